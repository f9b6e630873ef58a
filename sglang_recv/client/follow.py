"""Tensors that were sent before in the same order: no specs are made, checked or written out for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_recv import manifest
from sglang_recv.client.fill import Left, has_bytes
from sglang_recv.client.layout import PLAIN, Layout, SentRound
from sglang_recv.client.pack import Prepared
from sglang_recv.client.rounds import Rounds
from sglang_recv.client.staging import Buffer
from sglang_recv.wire import Repeat


class Follower:
    """Repeats the rounds of a remembered session for as long as what comes is what came then.

    Parameters
    ----------
    rounds
        Takes full buckets.
    session
        Id of this session.
    layout
        What was sent in the other one.
    """

    def __init__(self, rounds: Rounds, session: str, layout: Layout) -> None:
        self._rounds = rounds
        self._session = session
        self.layout = layout
        #: How many rounds were sent, and how many tensors of the next one are in ``_buffer``.
        self._number = 0
        self._filled = 0
        self._buffer: Buffer | None = None

    @property
    def complete(self) -> bool:
        """True when everything was sent as it was."""
        return self._number == len(self.layout.rounds)

    def take_all(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send everything. ``tensors`` fit the layout (:meth:`Layout.fits`).

        The device packs one round while this side prepares the next, and where there is a free slot also packs that one
        before the first is sent: it should never wait for this side.
        """
        behind: tuple[SentRound, Buffer] | None = None
        place = 0
        for sent in self.layout.rounds:
            numbers = self.layout.order[place : place + len(sent.specs)]
            place += len(numbers)
            part = [tensors[number] for number in numbers]
            prepared = self._rounds.prepare(sent.tables, 0, part)
            if behind is not None and (sent.large or not sent.specs or not self._rounds.slot_is_free(behind[1])):
                self._sent(*behind)
                behind = None
            if not sent.specs:
                self._sent(sent, None)
                continue
            buffer = self._rounds.large(sent.nbytes) if sent.large else self._rounds.next_slot()
            self._start(buffer, sent, 0, part, prepared)
            if behind is not None:
                self._sent(*behind)
            behind = sent, buffer
        if behind is not None:
            self._sent(*behind)

    def take(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> int:
        """Send tensors whose source keeps them until this returns. How many were taken: the next one is another."""
        if not self.layout.in_order:
            return 0
        taken = 0
        while taken < len(pairs):
            tensors = self._fitting(pairs[taken:])
            if not tensors:
                break
            self._pack(tensors)
            taken += len(tensors)
        return taken

    def pad(self) -> bool:
        """Send a round without tensors; False when none followed here."""
        if self._filled or self._wanted() or self.complete:
            return False
        self._sent(self.layout.rounds[self._number], None)
        return True

    @property
    def between_rounds(self) -> bool:
        """True when nothing waits in a bucket that is being filled."""
        return self._buffer is None

    def left(self) -> Left:
        """Where another must go on."""
        part = None
        if self._buffer is not None:
            sent = self.layout.rounds[self._number]
            part = SentRound(sent.specs[: self._filled], sent.offsets[: self._filled], sent.large)
        rounds = self.layout.rounds[: self._number]
        count = sum(len(sent.specs) for sent in rounds) + self._filled
        return Left(rounds, part, self._buffer, self.layout.order[:count])

    def _fitting(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Those of ``pairs``, from the first on, that are the next ones of the round.

        A group counts as a whole: once half of it is in the bucket, nobody could hold it back for the other half.
        """
        wanted, mates = self._wanted(), self.layout.mates
        found: list[torch.Tensor] = []
        while len(found) < min(len(wanted), len(pairs)):
            names = mates.get(wanted[len(found)][0], wanted[len(found)][:1])
            stop = len(found) + len(names)
            part, expected = pairs[len(found) : stop], wanted[len(found) : stop]
            complete = len(part) == len(expected) == len(names) and {name for name, *_ in expected} == set(names)
            if not complete or not all(_is(*pair, one) for pair, one in zip(part, expected, strict=True)):
                break
            found += [tensor for _, tensor in part]
        return found

    def _wanted(self) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
        """The rest of the round that is being filled."""
        return () if self.complete else self.layout.rounds[self._number].expected[self._filled :]

    def _pack(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put the next tensors into the bucket, and send it when that was all."""
        sent = self.layout.rounds[self._number]
        if self._buffer is None:
            self._buffer = self._rounds.large(sent.nbytes) if sent.large else self._rounds.next_slot()
        prepared = self._rounds.prepare(sent.tables, self._filled, tensors)
        self._start(self._buffer, sent, self._filled, tensors, prepared)
        self._filled += len(tensors)
        if self._filled == len(sent.specs):
            self._sent(sent, self._buffer)

    def _start(
        self,
        buffer: Buffer,
        sent: SentRound,
        first: int,
        tensors: Sequence[torch.Tensor],
        prepared: Sequence[Prepared] | None,
    ) -> None:
        """Start packing tensors ``first`` and following of a round."""
        if prepared is not None:
            self._rounds.pack_prepared(buffer, sent.tables, first, prepared)
        else:
            empty = [name for (name, *_), t in zip(sent.expected[first:], tensors, strict=False) if not has_bytes(t)]
            if empty:
                findings = [f"{name}: has no bytes to send" for name in empty]
                raise manifest.manifest_error(findings, "a tensor cannot be sent")
            offsets = sent.offsets[first : first + len(tensors)]
            self._rounds.pack(buffer, list(zip(offsets, tensors, strict=True)))

    def _sent(self, sent: SentRound, buffer: Buffer | None) -> None:
        """Send a round whose tensors are on their way into ``buffer``."""
        self._buffer, self._filled = None, 0
        self._number += 1
        numbers = (buffer.number,) if buffer is not None and sent.filled else ()
        message = Repeat(self._session, self._rounds.sent, numbers)
        self._rounds.send(message, buffer, len(sent.specs), sum(sent.sizes))


def _is(name: str, tensor: torch.Tensor, expected: tuple[str, torch.dtype, tuple[int, ...]]) -> bool:
    return (
        type(tensor) in PLAIN
        and name == expected[0]
        and tensor.dtype is expected[1]
        and tensor.shape == expected[2]
        and has_bytes(tensor)
    )
