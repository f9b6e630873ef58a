"""What a committed session looked like: the next one that sends the same tensors repeats it round by round."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import torch

from sglang_recv import manifest
from sglang_recv.client.pack import Tables
from sglang_recv.client.pool import PLAIN
from sglang_recv.wire import TensorSpec

#: Layouts that a client remembers: the ones used last.
MAX_LAYOUTS: Final = 8


class Sizes(NamedTuple):
    """Staging on one device: slots, bytes of each, and the most bytes that are known beforehand."""

    slots: int
    slot_bytes: int
    peak: int


#: So many slots keep a GPU busy: one is packed and one is loaded, while the message of the third is on its way.
_SLOTS: Final = 3
#: Slots are not made smaller than this for the sake of their number: a round costs half a millisecond.
_SMALL: Final = 64 << 20


def choose_sizes(
    slots: int | None, slot_bytes: int | None, bound: int, total: int | None, largest: int, unit: int
) -> Sizes:
    """Slots, and bytes of each.

    Parameters
    ----------
    slots, slot_bytes
        What the caller wants, if anything.
    bound
        Bytes that slots may have together where the caller does not say otherwise.
    total, largest
        Bytes of the update, or None, and of what must be in one buffer, as far as they are known.
    unit
        Of allocation, in bytes.
    """
    count = slots or _SLOTS
    size = slot_bytes
    if size is None:
        size = max(bound // count, unit)
        if slots is None and size < largest <= bound // 2:
            # What fits no slot gets a buffer of its own, which is allocated and mapped in the middle of the session.
            size, count = largest, max(bound // largest, 2)
        if total is not None:
            size = min(size, max(total // count, largest if largest <= size else 0, _SMALL))
    if total is not None:
        size = min(size, max(total, manifest.ALIGNMENT))
    size = -(-size // unit) * unit
    oversize = -(-largest // unit) * unit if largest > size else 0
    return Sizes(count, size, count * size + oversize)


_DTYPE: Final = operator.attrgetter("dtype")


def new_token() -> str:
    """128 random bits in hex: what a rank remembers a session under."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class SentRound:
    """One round as it was sent.

    Parameters
    ----------
    specs
        Its tensors, in order; none in a round that only kept step with other senders.
    offsets
        Where each began in its buffer, in bytes.
    large
        True for a buffer of its own, beside the slots.
    pools
        The number of the pool in which each lay, 0 for those that were packed; empty when all were.
    """

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    large: bool
    pools: tuple[int, ...] = ()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        return tuple(manifest.nbytes(spec) for spec in self.specs)

    @cached_property
    def homes(self) -> np.ndarray:
        """``pools`` with a number for every tensor, int64."""
        return np.array(self.pools, np.int64) if self.pools else np.zeros(len(self.specs), np.int64)

    @cached_property
    def packed(self) -> np.ndarray:
        """Which tensors are packed, int64."""
        return np.nonzero(self.homes == 0)[0]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the buffer that what is packed needs."""
        ends = (self.offsets[number] + self.sizes[number] for number in self.packed)
        return manifest.align(max(ends, default=0))

    @cached_property
    def lent_bytes(self) -> int:
        """Bytes of what lies in pools."""
        return int(np.array(self.sizes, np.int64)[self.homes > 0].sum())

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Pools, and 0 for the buffer, in the order in which its tensors name them; those without bytes name none."""
        return tuple(dict.fromkeys(self.homes[np.array(self.sizes, np.int64) > 0].tolist()))

    @cached_property
    def tables(self) -> Tables:
        """Kernels that pack what is packed."""
        offsets, sizes = (np.array(values, np.int64)[self.packed] for values in (self.offsets, self.sizes))
        return Tables(offsets, sizes)

    @cached_property
    def expected(self) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
        """Name, dtype and shape of each tensor."""
        return tuple((spec.name, manifest.dtype_of(spec.dtype), spec.shape) for spec in self.specs)

    def moved(self, offsets: Sequence[int]) -> SentRound:
        """The same round with its pools' tensors elsewhere in them."""
        found = replace(self, offsets=tuple(offsets))
        for name in ("sizes", "homes", "packed", "nbytes", "lent_bytes", "order", "tables", "expected"):
            found.__dict__[name] = getattr(self, name)  # what does not depend on it, and takes a while
        return found


@dataclass(frozen=True)
class Layout:
    """A committed session.

    Parameters
    ----------
    token
        What the ranks remember it under.
    kind
        ``full`` or ``partial``.
    sizes
        Its staging.
    rounds
        In order.
    order
        For each sent tensor its number among those that were given.
    groups
        Parts of names whose tensors had to be in one bucket.
    """

    token: str
    kind: str
    sizes: Sizes
    rounds: tuple[SentRound, ...]
    order: tuple[int, ...]
    groups: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def mates(self) -> dict[str, tuple[str, ...]]:
        """Names of tensors that need others in their bucket, with all of them."""
        found = {}
        for name in self.given[0] if self.groups else ():
            names = manifest.group_of(name, self.groups)
            if names is not None:
                found[name] = names
        return found

    @cached_property
    def in_order(self) -> bool:
        """True when tensors were sent in the order in which they were given."""
        return self.order == tuple(range(len(self.order)))

    @cached_property
    def given(self) -> tuple[list[str], list[torch.dtype], list[tuple[int, ...]]]:
        """Names, dtypes and shapes in the order in which they were given."""
        sent = [spec for part in self.rounds for spec in part.specs]
        specs = [spec for _, spec in sorted(zip(self.order, sent, strict=True), key=lambda pair: pair[0])]
        dtypes = [manifest.dtype_of(spec.dtype) for spec in specs]
        return [spec.name for spec in specs], dtypes, [spec.shape for spec in specs]

    @cached_property
    def pools(self) -> np.ndarray:
        """The number of each tensor's pool, in the order in which they were given, 0 for those that were packed."""
        found = np.zeros(len(self.order), np.int64)
        found[np.array(self.order, np.int64)] = np.concatenate([np.empty(0, np.int64), *(r.homes for r in self.rounds)])
        return found

    @property
    def lends(self) -> list[int]:
        """The numbers of all pools that its tensors lay in."""
        return [pool for pool in np.unique(self.pools).tolist() if pool]

    def fits(self, names: Sequence[str], tensors: Sequence[torch.Tensor], pools: np.ndarray) -> bool:
        """True when these are the tensors that were given, and in the same pools, but for whether they have bytes at
        all.

        There may be tens of thousands of them, and a microsecond for each is what a fast update cannot spare: hence
        comparisons by ``map``, which also keep nothing that would bring on the garbage collector.
        """
        known_names, dtypes, shapes = self.given
        return (
            names == known_names
            and np.array_equal(pools, self.pools)
            and PLAIN.issuperset(map(type, tensors))
            and all(map(operator.is_, map(_DTYPE, tensors), dtypes))
            and all(map(operator.eq, map(torch.Tensor.size, tensors), shapes))
        )


@dataclass
class Layouts:
    """What a client remembers, the last used last."""

    _known: list[Layout] = field(default_factory=list)

    def guess(self, kind: str, names: Sequence[str] | None) -> Layout | None:
        """The last session of this kind, and of tensors of these names unless that is None."""
        fitting = (known for known in reversed(self._known) if known.kind == kind)
        return next((known for known in fitting if names is None or known.given[0] == names), None)

    def keep(self, layout: Layout) -> None:
        """Remember a session that was committed."""
        self._known = [known for known in self._known if known.token != layout.token][1 - MAX_LAYOUTS :]
        self._known.append(layout)
