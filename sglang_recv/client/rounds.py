"""Rounds of one session on their way: slots in turn, buffers for what no slot holds, and what came of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from sglang_recv.client.link import RankLink, wait
from sglang_recv.client.pack import Prepared, Tables
from sglang_recv.client.staging import Buffer, Staging
from sglang_recv.wire import Load, ReleaseBuffer, Repeat


@dataclass(frozen=True)
class Progress:
    """What ``on_progress`` gets after each round: tensors and bytes so far, and seconds since the session opened."""

    tensors: int
    nbytes: int
    seconds: float


#: Of one update, on this side, in the order in which they begin.
PHASES: Final = ("connect", "compare", "open", "allocate", "map", "pack", "wait", "finish", "commit", "close")


@dataclass
class Clock:
    """Seconds by phase, and since the start."""

    started: float = field(default_factory=time.monotonic)
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as ``name``."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] += time.monotonic() - started


class Rounds:
    """Packs and sends rounds.

    Parameters
    ----------
    links
        The ranks that get them.
    staging
        The slots, once they are allocated.
    session
        Id of the session.
    deadline, lease
        Seconds for a single wait, and of silence after which a rank counts as lost.
    clock
        Counts the phases ``pack`` and ``wait``.
    on_progress
        Called after each round.
    """

    def __init__(
        self,
        links: Sequence[RankLink],
        staging: Staging,
        session: str,
        deadline: float,
        lease: float,
        clock: Clock,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.staging = staging
        self._links = links
        self._session = session
        self._deadline = deadline
        self._lease = lease
        self._clock = clock
        self._on_progress = on_progress
        self._slot = 0
        self._large: Buffer | None = None
        self.sent = 0
        self.tensors = 0
        self.nbytes = 0

    def next_slot(self) -> Buffer:
        """The slot whose turn it is, once nobody reads it any more."""
        buffer = self.staging.slots[self._slot]
        self._slot = (self._slot + 1) % len(self.staging.slots)
        self._wait_acked(buffer.free_at)
        return buffer

    def slot_is_free(self, unsent: Buffer) -> bool:
        """True when :meth:`next_slot` need not wait, and is not ``unsent``: there may be a single slot."""
        for link in self._links:
            link.pump()
        slot = self.staging.slots[self._slot]
        return slot is not unsent and all(link.acked >= slot.free_at for link in self._links)

    def large(self, needed: int) -> Buffer:
        """A buffer of ``needed`` bytes or more beside the slots, which is kept for the next one."""
        buffer = self._large
        if buffer is not None:
            self._wait_acked(buffer.free_at)
            if buffer.nbytes >= needed:
                return buffer
            for link in self._links:
                link.send(ReleaseBuffer(self._session, buffer.number))
            number = buffer.number
            self.wait(lambda link: number in link.released, f"release of buffer {number}")
            self.staging.drop(buffer)
        self._large = self.staging.add(needed)
        return self._large

    def pack(self, buffer: Buffer, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Start copying tensors to their offsets."""
        with self._clock.phase("pack"):
            self.staging.pack(buffer, tensors)

    def prepare(self, tables: Tables, first: int, tensors: Sequence[torch.Tensor]) -> list[Prepared] | None:
        """What :meth:`pack_prepared` needs, for tensors of a known round; None when they need :meth:`pack`."""
        with self._clock.phase("pack"):
            return self.staging.prepare(tables, first, tensors)

    def pack_prepared(self, buffer: Buffer, tables: Tables, first: int, prepared: Sequence[Prepared]) -> None:
        """Start copying tensors of a known round by kernels."""
        with self._clock.phase("pack"):
            self.staging.pack_prepared(buffer, tables, first, prepared)

    def send(self, message: Load | Repeat, buffer: Buffer | None, tensors: int, nbytes: int) -> None:
        """Send the next round, whose tensors are on their way into ``buffer``."""
        with self._clock.phase("map"):
            self.staging.wait_mapped()
        if buffer is not None:
            with self._clock.phase("pack"):
                buffer.wait_packed()
            buffer.free_at = self.sent + 1
        for link in self._links:
            link.send(message)
        self.sent += 1
        self.tensors += tensors
        self.nbytes += nbytes
        for link in self._links:
            link.pump()
        if any(link.error is not None for link in self._links):
            # Raises: the cause, though the ranks that only follow the one that failed may say so before it does.
            self.wait(lambda link: False, f"round {self.sent - 1}")
        if self._on_progress is not None and buffer is not None:
            self._on_progress(Progress(self.tensors, self.nbytes, time.monotonic() - self._clock.started))

    def wait(self, done: Callable[[RankLink], bool], phase: str) -> None:
        """Wait until ``done`` holds for every rank; see :func:`sglang_recv.client.link.wait`."""
        wait(self._links, done, f"session {self._session[:8]}, {phase}", self._deadline, self._lease)

    def _wait_acked(self, rounds: int) -> None:
        with self._clock.phase("wait"):
            self.wait(lambda link: link.acked >= rounds, f"acknowledgement of round {rounds - 1}")
