"""Tensors that nothing is known of beforehand: checked one by one, put into buckets, and written out in each round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from sglang_recv import manifest
from sglang_recv.client.layout import SentRound
from sglang_recv.client.pool import Place
from sglang_recv.client.rounds import Rounds
from sglang_recv.client.staging import Buffer
from sglang_recv.wire import Bucket, Entry, Load, TensorSpec

#: Tensors of one round, of which some lie in pools: their places must fit into one message.
_MOST_LENT: Final = 1 << 17


class _Given(NamedTuple):
    """A tensor, its number among those that were given, and where ranks can read it, if they can."""

    spec: TensorSpec
    tensor: torch.Tensor
    number: int
    place: Place | None


@dataclass
class Fill:
    """The bucket that is being filled.

    Parameters
    ----------
    buffer
        Where tensors are packed, once there is one that must be.
    """

    buffer: Buffer | None = None
    entries: list[Entry] = field(default_factory=list)
    #: Bytes of the buffer that are taken.
    used: int = 0
    #: What lies in pools, its bytes, and for each entry the number of its pool, or 0.
    lent: list[torch.Tensor] = field(default_factory=list)
    lent_bytes: int = 0
    pools: list[int] = field(default_factory=list)
    #: What is placed but not copied yet; only from sources that keep all their tensors anyway.
    waiting: list[tuple[int, torch.Tensor]] = field(default_factory=list)


class Left(NamedTuple):
    """Where a filler goes on: rounds that were sent, tensors that are in ``buffer`` but were not sent, and the numbers
    of all of them among those that were given."""

    rounds: Sequence[SentRound]
    part: SentRound | None
    buffer: Buffer | None
    lent: Sequence[torch.Tensor]
    order: Sequence[int]


class Filler:
    """Fills slots.

    Parameters
    ----------
    rounds
        Takes full buckets.
    session
        Id of the session.
    groups
        Parts of names whose tensors must be in one bucket.
    """

    def __init__(
        self,
        rounds: Rounds,
        session: str,
        groups: Sequence[Sequence[str]],
    ) -> None:
        self._rounds = rounds
        self._session = session
        #: What may be sent, where that was said.
        self.announced: Mapping[str, TensorSpec] | None = None
        self._groups = groups
        self._fill: Fill | None = None
        self._held: dict[tuple[str, ...], dict[str, _Given]] = {}
        self._names: set[str] = set()
        #: What was sent, and the numbers of its tensors among those that were given.
        self.history: list[SentRound] = []
        self.order: list[int] = []

    def adopt(self, left: Left) -> None:
        """Go on where another has left off."""
        self.history = list(left.rounds)
        self.order = list(left.order)
        self._names = {spec.name for sent in left.rounds for spec in sent.specs}
        if left.part is not None:
            fill = Fill(left.buffer, used=left.part.nbytes, lent=list(left.lent), pools=left.part.homes.tolist())
            fill.lent_bytes = sum(tensor.nbytes for tensor in left.lent)
            for spec, offset, pool in zip(left.part.specs, left.part.offsets, fill.pools, strict=True):
                fill.entries.append(Entry(spec, self._number_of(left.buffer, pool), offset))
                self._names.add(spec.name)
            if left.part.large:
                self._send(fill, large=True)
            else:
                self._fill = fill

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor.

        Raises
        ------
        ManifestError
            When it cannot be sent.
        RecvError
            When a rank refuses or fails.
        """
        check_pair(name, tensor)
        spec = manifest.spec_of(name, tensor)
        findings = []
        if self.announced is None:
            findings += manifest.problems_of(spec)
        elif self.announced.get(name) != spec:
            findings.append(f"{name}: {spec.dtype}{list(spec.shape)} is not what was announced")
        if name in self._names:
            findings.append(f"{name}: sent twice")
        if hasattr(tensor, "full_tensor"):
            findings.append(f"{name}: a DTensor is one rank's shard; send tensor.full_tensor()")
        elif not has_bytes(tensor):
            findings.append(f"{name}: layout {tensor.layout} on {tensor.device} has no bytes to send")
        if findings:
            raise manifest.manifest_error(findings, "a tensor cannot be sent")
        given = _Given(spec, tensor, len(self._names), self._rounds.find(tensor))
        self._names.add(name)
        names = manifest.group_of(name, self._groups)
        if names is None:
            self._place([given])
            return
        group = self._held.setdefault(names, {})
        if not self._rounds.kept:
            given = given._replace(tensor=tensor.detach().clone(), place=None)
        group[name] = given
        if len(group) == len(names):
            self._place(list(self._held.pop(names).values()))

    def let_go(self) -> None:
        """Before a call returns, nothing of its tensors is needed any more."""
        for group in self._held.values():
            group.update(
                {
                    name: given._replace(tensor=given.tensor.detach().clone(), place=None)
                    for name, given in group.items()
                }
            )
        if self._fill is not None and self._fill.lent:
            self.flush()
        elif self._fill is not None:
            self._pack(self._fill)
        self._rounds.wait_read()

    def flush(self) -> None:
        """Send the bucket that is being filled as it is."""
        fill, self._fill = self._fill, None
        if fill is not None and fill.entries:
            self._send(fill, large=False)

    def finish(self) -> None:
        """Send everything that is left, groups that were never completed too."""
        for key in list(self._held):
            self._place(list(self._held.pop(key).values()))
        self.flush()

    def pad(self) -> None:
        """Send a round without tensors."""
        self._rounds.send(Load(self._session, self._rounds.sent, ()), None, 0, 0)
        self.history.append(SentRound((), (), large=False))

    def clear(self) -> None:
        """Let go of tensors that were never sent."""
        self._held.clear()
        self._fill = None

    def _place(self, tensors: Sequence[_Given]) -> None:
        """Put tensors that belong together into one bucket."""
        slot = self._rounds.staging.slot_bytes
        needed = sum(manifest.align(manifest.nbytes(given.spec)) for given in tensors if given.place is None)
        lent = sum(manifest.nbytes(given.spec) for given in tensors if given.place is not None)
        if needed > slot:
            # No slot can hold them: they travel in a buffer of their own.
            self.flush()
            large = Fill(self._rounds.large(needed))
            self._put(large, tensors)
            self._send(large, large=True)
            return
        fill, pools = self._fill, [given.place.pool for given in tensors if given.place is not None]
        if fill is not None and (
            fill.used + needed > slot
            or (pools and fill.lent_bytes + lent > min(map(self._rounds.lent_bound, pools)))
            or (len(fill.entries) + len(tensors) > _MOST_LENT and (fill.lent or pools))
        ):
            self.flush()
        if self._fill is None:
            self._fill = Fill()
        if self._fill.buffer is None and any(given.place is None for given in tensors):
            self._fill.buffer = self._rounds.next_slot()
        self._put(self._fill, tensors)

    def _put(self, fill: Fill, tensors: Sequence[_Given]) -> None:
        for spec, tensor, number, place in tensors:
            if place is None:
                fill.entries.append(Entry(spec, self._number_of(fill.buffer, 0), fill.used))
                fill.waiting.append((fill.used, tensor))
                fill.used += manifest.align(manifest.nbytes(spec))
                fill.pools.append(0)
            else:
                fill.entries.append(Entry(spec, self._number_of(None, place.pool), place.offset))
                self._rounds.note()
                fill.lent.append(tensor)
                fill.lent_bytes += manifest.nbytes(spec)
                fill.pools.append(place.pool)
            self.order.append(number)
        if not self._rounds.kept:
            self._pack(fill)

    def _number_of(self, buffer: Buffer | None, pool: int) -> int:
        """The number of the buffer, or of a pool."""
        if pool:
            return self._rounds.staging.lend(pool)
        assert buffer is not None
        return buffer.number

    def _pack(self, fill: Fill) -> None:
        if fill.waiting and fill.buffer is not None:
            self._rounds.pack(fill.buffer, fill.waiting)
            fill.waiting.clear()

    def _send(self, fill: Fill, *, large: bool) -> None:
        self._pack(fill)
        entries = tuple(fill.entries)
        nbytes = sum(manifest.nbytes(entry.spec) for entry in entries)
        message = Load(self._session, self._rounds.sent, (Bucket(entries),))
        self._rounds.send(message, fill.buffer, len(entries), nbytes, self._rounds.lend(fill.lent, fill.lent_bytes))
        specs, offsets = tuple(entry.spec for entry in entries), tuple(entry.offset for entry in entries)
        self.history.append(SentRound(specs, offsets, large, tuple(fill.pools) if fill.lent else ()))


def has_bytes(tensor: torch.Tensor) -> bool:
    """False for tensors that only describe others: sparse ones, and those on no device."""
    return tensor.layout is torch.strided and not tensor.is_meta


def check_pair(name: object, tensor: object) -> None:
    """Refuse what is not a name with a tensor.

    Raises
    ------
    ManifestError
        Naming both types.
    """
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise manifest.manifest_error(
            [f"{str(name)[:80]!r} ({type(name).__name__}) with a {type(tensor).__name__}"],
            "a source gives pairs of a name and a tensor",
        )
