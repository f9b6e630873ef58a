"""Tensors that nothing is known of beforehand: checked one by one, put into buckets, and written out in each round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sglang_recv import manifest
from sglang_recv.client.layout import SentRound
from sglang_recv.client.rounds import Rounds
from sglang_recv.client.staging import Buffer
from sglang_recv.wire import Bucket, Entry, Load, TensorSpec


class _Given(NamedTuple):
    """A tensor, and its number among those that were given."""

    spec: TensorSpec
    tensor: torch.Tensor
    number: int


@dataclass
class Fill:
    """The bucket that is being filled."""

    buffer: Buffer
    entries: list[Entry] = field(default_factory=list)
    used: int = 0
    #: What is placed but not copied yet; only from sources that keep all their tensors anyway.
    waiting: list[tuple[int, torch.Tensor]] = field(default_factory=list)


class Left(NamedTuple):
    """Where a filler goes on: rounds that were sent, tensors that are in ``buffer`` but were not sent, and the numbers
    of all of them among those that were given."""

    rounds: Sequence[SentRound]
    part: SentRound | None
    buffer: Buffer | None
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
        #: True while the source keeps all its tensors until it has been sent.
        self.kept = False
        #: What was sent, and the numbers of its tensors among those that were given.
        self.history: list[SentRound] = []
        self.order: list[int] = []

    def adopt(self, left: Left) -> None:
        """Go on where another has left off."""
        self.history = list(left.rounds)
        self.order = list(left.order)
        self._names = {spec.name for sent in left.rounds for spec in sent.specs}
        if left.part is not None and left.buffer is not None:
            fill = Fill(left.buffer)
            for spec, offset in zip(left.part.specs, left.part.offsets, strict=True):
                fill.entries.append(Entry(spec, left.buffer.number, offset))
                self._names.add(spec.name)
            fill.used = left.part.nbytes
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
        given = _Given(spec, tensor, len(self._names))
        self._names.add(name)
        names = manifest.group_of(name, self._groups)
        if names is None:
            self._place([given])
            return
        group = self._held.setdefault(names, {})
        group[name] = given._replace(tensor=tensor.detach().clone())
        if len(group) == len(names):
            self._place(list(self._held.pop(names).values()))

    def pack_waiting(self) -> None:
        """Before a call returns, nothing of its tensors is needed any more."""
        if self._fill is not None:
            self._pack(self._fill)

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
        needed = sum(manifest.align(manifest.nbytes(given.spec)) for given in tensors)
        if needed > slot:
            # No slot can hold them: they travel in a buffer of their own.
            self.flush()
            fill = Fill(self._rounds.large(needed))
            self._put(fill, tensors)
            self._send(fill, large=True)
            return
        if self._fill is not None and self._fill.used + needed > slot:
            self.flush()
        if self._fill is None:
            self._fill = Fill(self._rounds.next_slot())
        self._put(self._fill, tensors)

    def _put(self, fill: Fill, tensors: Sequence[_Given]) -> None:
        for spec, tensor, number in tensors:
            fill.entries.append(Entry(spec, fill.buffer.number, fill.used))
            fill.waiting.append((fill.used, tensor))
            fill.used += manifest.align(manifest.nbytes(spec))
            self.order.append(number)
        if not self.kept:
            self._pack(fill)

    def _pack(self, fill: Fill) -> None:
        self._rounds.pack(fill.buffer, fill.waiting)
        fill.waiting.clear()

    def _send(self, fill: Fill, *, large: bool) -> None:
        self._pack(fill)
        entries = tuple(fill.entries)
        nbytes = sum(manifest.nbytes(entry.spec) for entry in entries)
        message = Load(self._session, self._rounds.sent, (Bucket(entries),))
        self._rounds.send(message, fill.buffer, len(entries), nbytes)
        self.history.append(SentRound(tuple(e.spec for e in entries), tuple(e.offset for e in entries), large))


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
