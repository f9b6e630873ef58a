"""Rounds of one session on their way: slots in turn, buffers for what no slot holds, and what came of it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
import torch

from sglang_recv.client.link import RankLink, wait
from sglang_recv.client.pack import Pending, Prepared, Tables
from sglang_recv.client.pool import Place
from sglang_recv.client.staging import Buffer, Staging
from sglang_recv.wire import Load, ReleaseBuffer, Repeat

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """What ``on_progress`` gets after each round: tensors and bytes so far, and seconds since the session opened."""

    tensors: int
    nbytes: int
    seconds: float


#: Bytes of one round that lie in pools, where all tensors are there anyway: a round costs half a millisecond.
LENT_ROUND: Final = 4 << 30

#: Of one update, on this side, in the order in which they begin.
PHASES: Final = (
    *("connect", "compare", "open", "allocate", "map", "source", "fill", "pack", "wait", "finish", "commit", "close"),
)


@dataclass
class Clock:
    """Seconds by phase, and since the start. A phase inside another counts by itself: no time counts twice."""

    started: float = field(default_factory=time.monotonic)
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _inside: list[str] = field(default_factory=list)
    #: When the innermost phase began, or went on after one inside it.
    _since: float = 0.0

    def enter(self, name: str) -> None:
        """Count the time from now on as ``name``, until :meth:`leave`."""
        now = time.monotonic()
        if self._inside:
            self.phases[self._inside[-1]] += now - self._since
        self._inside.append(name)
        self._since = now

    def leave(self) -> None:
        """Go back to the phase that the last one lies in."""
        now = time.monotonic()
        self.phases[self._inside.pop()] += now - self._since
        self._since = now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as ``name``."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def drawn(self, pairs: Iterable[T]) -> Iterator[T]:
        """``pairs``, with the time that each takes to come counted as ``source``."""
        waiting = iter(pairs)
        while True:
            self.enter("source")
            try:
                pair = next(waiting)
            except StopIteration:
                return
            finally:
                self.leave()
            yield pair


@dataclass(frozen=True)
class Lent:
    """Tensors of one round that ranks read where they are.

    Parameters
    ----------
    tensors
        Held until every rank has read them.
    nbytes
        Of all of them.
    ready
        Reached once the device has written them.
    """

    tensors: Sequence[torch.Tensor]
    nbytes: int
    ready: Sequence[Pending]


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
        #: What was lent, with the number of its round; oldest first.
        self._lent: deque[tuple[int, Lent]] = deque()
        #: Streams that may still write what the next round lends.
        self._writing: dict[torch.cuda.Stream, None] = {}
        #: True while the source keeps all its tensors until it has been sent.
        self.kept = False
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

    def pack_one(self, buffer: Buffer, offset: int, tensor: torch.Tensor) -> None:
        """Start copying one tensor, whose memory its source may reuse behind that."""
        self._clock.enter("pack")
        try:
            self.staging.pack_one(buffer, offset, tensor)
        finally:
            self._clock.leave()

    def prepare(
        self, tables: Tables, first: int, tensors: Sequence[torch.Tensor], addresses: np.ndarray | None = None
    ) -> list[Prepared] | None:
        """What :meth:`pack_prepared` needs, for tensors of a known round; None when they need :meth:`pack`."""
        with self._clock.phase("pack"):
            return self.staging.prepare(tables, first, tensors, addresses)

    def pack_prepared(self, buffer: Buffer, tables: Tables, first: int, prepared: Sequence[Prepared]) -> None:
        """Start copying tensors of a known round by kernels."""
        with self._clock.phase("pack"):
            self.staging.pack_prepared(buffer, tables, first, prepared)

    def find(self, tensor: torch.Tensor) -> Place | None:
        """Where ranks can read a tensor without a copy."""
        return self.staging.pools.find(tensor)

    def note(self) -> None:
        """A tensor in a pool was given for the next round; what the current streams hold may still write it."""
        for stream in self.staging.streams():
            self._writing[stream] = None

    def lend(self, tensors: Sequence[torch.Tensor], nbytes: int) -> Lent | None:
        """Tensors in pools that were noted, of ``nbytes`` bytes together, to be sent in the next round."""
        if not tensors:
            return None
        lent = Lent(tensors, nbytes, [stream.record_event() for stream in self._writing])
        self._writing.clear()
        return lent

    def lent_bound(self, pool: int = 0) -> int:
        """How many bytes of pools, ``pool`` among them, a round may have, and may wait to be read beside it."""
        return LENT_ROUND if self.kept else min(self.staging.slot_bytes, self.staging.smallest_lent(pool) // 4)

    def send(
        self, message: Load | Repeat, buffer: Buffer | None, tensors: int, nbytes: int, lent: Lent | None = None
    ) -> None:
        """Send the next round, whose tensors are on their way into ``buffer``, or lie in pools."""
        with self._clock.phase("map"):
            # All before the first write: a rank that cannot map one of them keeps its weights.
            self.staging.wait_mapped()
        if buffer is not None:
            with self._clock.phase("pack"):
                buffer.wait_packed()
            buffer.free_at = self.sent + 1
        if lent is not None:
            with self._clock.phase("pack"):
                for event in lent.ready:
                    if event is not None:
                        event.synchronize()
            self._lent.append((self.sent, lent))
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
        self._let_go()
        if lent is not None and not self.kept:
            self.wait_read(self.lent_bound())  # the source needs its pool back while it goes on
        if self._on_progress is not None and tensors:
            self._on_progress(Progress(self.tensors, self.nbytes, time.monotonic() - self._clock.started))

    def wait_read(self, left: int = 0) -> None:
        """Return once at most ``left`` bytes of what was lent are still to be read."""
        while sum(lent.nbytes for _, lent in self._lent) > left:
            self._wait_acked(self._lent[0][0] + 1)
            self._let_go()

    def _let_go(self) -> None:
        while self._lent and all(link.acked > self._lent[0][0] for link in self._links):
            self._lent.popleft()

    def clear(self) -> None:
        """Let go of what was lent: the session is over."""
        self._lent.clear()
        self._writing.clear()

    def wait(self, done: Callable[[RankLink], bool], phase: str) -> None:
        """Wait until ``done`` holds for every rank; see :func:`sglang_recv.client.link.wait`."""
        wait(self._links, done, f"session {self._session[:8]}, {phase}", self._deadline, self._lease)

    def _wait_acked(self, rounds: int) -> None:
        with self._clock.phase("wait"):
            self.wait(lambda link: link.acked >= rounds, f"acknowledgement of round {rounds - 1}")
