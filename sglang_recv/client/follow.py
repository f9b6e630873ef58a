"""Tensors that were sent before in the same order: no specs are made, checked or written out for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from sglang_recv import manifest
from sglang_recv.client.fill import Left, has_bytes
from sglang_recv.client.layout import Layout, SentRound, new_token
from sglang_recv.client.pack import Prepared
from sglang_recv.client.pool import PLAIN, Look, Place
from sglang_recv.client.rounds import Lent, Rounds
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
        self._layout = layout
        #: How many rounds were sent, and how many tensors of the next one are in its bucket: packed, or in a pool.
        self._number = 0
        self._filled = 0
        self._buffer: Buffer | None = None
        self._lent: list[torch.Tensor] = []
        #: Where they lie in their buffers. Pools' tensors may have moved inside of their pools.
        self._offsets: list[int] = []
        #: Copies of tensors of a group that is not complete, of a lazy source.
        self.held: list[tuple[str, torch.Tensor]] = []
        self._moved: dict[int, SentRound] = {}

    @property
    def layout(self) -> Layout:
        """What was sent: what is repeated, or, where something has moved, another with a token of its own."""
        if not self._moved:
            return self._layout
        return replace(self._layout, token=new_token(), rounds=tuple(map(self._round, range(len(self._layout.rounds)))))

    @property
    def moved(self) -> bool:
        """True when something has moved."""
        return bool(self._moved)

    @property
    def complete(self) -> bool:
        """True when everything was sent as it was."""
        return self._number == len(self._layout.rounds)

    def take_all(self, tensors: Sequence[torch.Tensor], look: Look) -> None:
        """Send everything.

        The device packs one round while this side prepares the next, and where there is a free slot also packs that one
        before the first is sent: it should never wait for this side.

        Parameters
        ----------
        tensors
            They fit the layout (:meth:`Layout.fits`).
        look
            At them.
        """
        behind: tuple[SentRound, Buffer | None, Lent | None] | None = None
        place = 0
        order = np.array(self._layout.order, np.int64)
        for number, sent in enumerate(self._layout.rounds):
            numbers = order[place : place + len(sent.specs)]
            place += len(numbers)
            if sent.pools:
                sent = self._found_at(number, np.where(sent.homes > 0, look.offsets[numbers], sent.offsets))
            chosen = numbers[sent.packed]
            packed = [tensors[index] for index in chosen.tolist()]
            self._rounds.note()
            lent = self._rounds.lend([tensors[i] for i in numbers[sent.homes > 0].tolist()], sent.lent_bytes)
            known = look.addresses[chosen] if look.addresses is not None else None
            prepared = self._rounds.prepare(sent.tables, 0, packed, known)
            if behind is not None and (sent.large or not packed or not self._may_wait(behind[1])):
                self._sent(*behind)
                behind = None
            buffer: Buffer | None = None
            if packed:
                buffer = self._rounds.large(sent.nbytes) if sent.large else self._rounds.next_slot()
                self._start(buffer, sent, 0, packed, prepared)
            if behind is not None:
                self._sent(*behind)
            behind = sent, buffer, lent
        if behind is not None:
            self._sent(*behind)

    def _may_wait(self, buffer: Buffer | None) -> bool:
        """True when a round that is being packed is sent no later for packing the next one first."""
        return buffer is not None and not buffer.packed and self._rounds.slot_is_free(buffer)

    def take(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> int:
        """Send tensors whose source keeps them until this returns. How many were taken: the next one is another."""
        if not self._layout.in_order:
            return 0
        taken = 0
        while taken < len(pairs):
            tensors, places = self._fitting(pairs[taken:])
            if not tensors:
                break
            self._pack(tensors, places)
            taken += len(tensors)
        return taken

    def take_lazily(self, name: str, tensor: torch.Tensor) -> bool:
        """Send one tensor whose memory its source may use for the next one. False when another was due: then what is
        in :attr:`held` must go another way too, before it."""
        if not self._layout.in_order or self.complete:
            return False
        sent, number = self._layout.rounds[self._number], self._filled + len(self.held)
        if number >= len(sent.specs) or not _is(name, tensor, sent.expected[number]):
            return False
        if self.held or name in self._layout.mates:
            return self._take_held(name, tensor)
        if sent.pools or self._rounds.find(tensor) is not None:
            return self.take(((name, tensor),)) == 1
        if self._buffer is None:
            self._buffer = self._rounds.large(sent.nbytes) if sent.large else self._rounds.next_slot()
        self._rounds.pack_one(self._buffer, sent.offsets[number], tensor)
        self._offsets.append(sent.offsets[number])
        self._filled += 1
        self._send_full(sent)
        return True

    def _take_held(self, name: str, tensor: torch.Tensor) -> bool:
        """Of a group that only one bucket may hold, nothing is packed before all of it is there."""
        names = self._layout.mates.get(self.held[0][0] if self.held else name, ())
        if name not in names:
            return False
        self.held.append((name, tensor.detach().clone()))
        if len(self.held) < len(names):
            return True
        held, self.held = self.held, []
        if self.take(held):
            return True
        self.held = held[:-1]
        return False

    def pad(self) -> bool:
        """Send a round without tensors; False when none followed here."""
        if self._filled or self.complete or self._layout.rounds[self._number].specs:
            return False
        self._sent(self._round(self._number), None, None)
        return True

    @property
    def between_rounds(self) -> bool:
        """True when nothing waits in a bucket that is being filled."""
        return self._filled == 0 and not self.held

    @property
    def lends(self) -> bool:
        """True when tensors of a bucket that is being filled are read where they are."""
        return bool(self._lent)

    def let_go(self) -> None:
        """Before a call returns: its caller may use the streams for what must not be waited for here."""
        if self._buffer is not None:
            self._buffer.mark()

    def left(self) -> Left:
        """Where another must go on; :attr:`held` comes next."""
        self.let_go()
        part = None
        if self._filled:
            sent = self._round(self._number)
            pools = sent.pools[: self._filled]
            part = SentRound(sent.specs[: self._filled], tuple(self._offsets), sent.large, pools)
        rounds = [self._round(number) for number in range(self._number)]
        count = sum(len(sent.specs) for sent in rounds) + self._filled
        return Left(rounds, part, self._buffer, self._lent, self._layout.order[:count])

    def _round(self, number: int) -> SentRound:
        return self._moved.get(number, self._layout.rounds[number])

    def _found_at(self, number: int, offsets: Sequence[int] | np.ndarray) -> SentRound:
        """A round whose tensors lie at ``offsets``."""
        sent = self._layout.rounds[number]
        if not np.array_equal(offsets, sent.offsets):
            self._moved[number] = sent.moved([int(offset) for offset in offsets])
        return self._round(number)

    def _fitting(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> tuple[list[torch.Tensor], list[Place | None]]:
        """Those of ``pairs``, from the first on, that are the next ones of the round, and where ranks can read them.

        A group counts as a whole: once half of it is in the bucket, nobody could hold it back for the other half.
        """
        found: list[torch.Tensor] = []
        places: list[Place | None] = []
        if self.complete:
            return found, places
        sent, mates = self._layout.rounds[self._number], self._layout.mates
        if not self._rounds.kept and sent.lent_bytes > min(
            (self._rounds.lent_bound(pool) for pool in sent.order if pool), default=0
        ):
            return found, places  # of a source that kept all its tensors: a lazy one may need them back before
        first = self._filled
        while len(found) < len(pairs) and first < len(sent.specs):
            wanted = sent.expected[first]
            names = mates.get(wanted[0], wanted[:1])
            stop = len(found) + len(names)
            part, expected = pairs[len(found) : stop], sent.expected[first : first + len(names)]
            complete = len(part) == len(expected) == len(names) and {name for name, *_ in expected} == set(names)
            if not complete or not all(_is(*pair, one) for pair, one in zip(part, expected, strict=True)):
                break
            # Of a lazy source, tensors of a group are held back as copies until all of them are there.
            copied = len(names) > 1 and not self._rounds.kept
            lie = [None if copied else self._rounds.find(tensor) for _, tensor in part]
            homes = sent.pools[first : first + len(names)] or (0,) * len(names)
            if tuple(place.pool if place is not None else 0 for place in lie) != homes:
                break
            found += [tensor for _, tensor in part]
            places += lie
            first += len(names)
        return found, places

    def _pack(self, tensors: Sequence[torch.Tensor], places: Sequence[Place | None]) -> None:
        """Put the next tensors into the bucket, and send it when that was all."""
        sent = self._layout.rounds[self._number]
        packed = [tensor for tensor, place in zip(tensors, places, strict=True) if place is None]
        if packed:
            if self._buffer is None:
                self._buffer = self._rounds.large(sent.nbytes) if sent.large else self._rounds.next_slot()
            first = self._filled - len(self._lent)
            prepared = self._rounds.prepare(sent.tables, first, packed)
            self._start(self._buffer, sent, first, packed, prepared)
        if len(packed) < len(tensors):
            self._rounds.note()
            self._lent += [tensor for tensor, place in zip(tensors, places, strict=True) if place is not None]
        for number, place in enumerate(places, self._filled):
            self._offsets.append(sent.offsets[number] if place is None else place.offset)
        self._filled += len(tensors)
        self._send_full(sent)

    def _send_full(self, sent: SentRound) -> None:
        """Send the bucket when all of its tensors are in it."""
        if self._filled == len(sent.specs):
            sent = self._found_at(self._number, self._offsets)
            self._sent(sent, self._buffer, self._rounds.lend(self._lent, sent.lent_bytes))

    def _start(
        self,
        buffer: Buffer,
        sent: SentRound,
        first: int,
        tensors: Sequence[torch.Tensor],
        prepared: Sequence[Prepared] | None,
    ) -> None:
        """Start packing tensors ``first`` and following of those of a round that are packed."""
        if prepared is not None:
            self._rounds.pack_prepared(buffer, sent.tables, first, prepared)
            return
        numbers = sent.packed[first : first + len(tensors)].tolist()
        empty = [sent.specs[number].name for number, t in zip(numbers, tensors, strict=True) if not has_bytes(t)]
        if empty:
            findings = [f"{name}: has no bytes to send" for name in empty]
            raise manifest.manifest_error(findings, "a tensor cannot be sent")
        offsets = [sent.offsets[number] for number in numbers]
        self._rounds.pack(buffer, list(zip(offsets, tensors, strict=True)))

    def _sent(self, sent: SentRound, buffer: Buffer | None, lent: Lent | None) -> None:
        """Send a round whose tensors are on their way into ``buffer``, or lie in pools."""
        numbers = {pool: self._rounds.staging.lend(pool) for pool in sent.order if pool}
        if buffer is not None:
            numbers[0] = buffer.number
        places: list[int] = []
        if self._number in self._moved:
            for pool, offset in zip(sent.homes.tolist(), sent.offsets, strict=True):
                places += (numbers.get(pool, 0), offset)
        message = Repeat(self._session, self._rounds.sent, tuple(numbers[pool] for pool in sent.order), tuple(places))
        self._buffer, self._filled, self._lent, self._offsets = None, 0, [], []
        self._number += 1
        self._rounds.send(message, buffer, len(sent.specs), sum(sent.sizes), lent)


def _is(name: str, tensor: torch.Tensor, expected: tuple[str, torch.dtype, tuple[int, ...]]) -> bool:
    return (
        type(tensor) in PLAIN
        and name == expected[0]
        and tensor.dtype is expected[1]
        and tensor.shape == expected[2]
        and has_bytes(tensor)
    )
