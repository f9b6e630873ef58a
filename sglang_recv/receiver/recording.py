"""What a watched load did with each tensor of its bucket: a pure copy that can be repeated without the loader, or not.

The recorder believes what it is told (:mod:`sglang_recv.receiver.coverage` watches). It is careful: a tensor is planned
only if all that happened to it were copies of the same dtype into parameters, and nothing else happened to the bytes
that it reached. All else stays with the loader, with a reason. Whether the result is right is proven elsewhere
(:mod:`sglang_recv.receiver.plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_recv import copies


def random_is_safe(dtype: torch.dtype) -> bool:
    """True when a proof may load random bytes as items of ``dtype``; other items may be used as indices."""
    return dtype.is_floating_point or dtype.is_complex or dtype == torch.uint8


class Copy(NamedTuple):
    """One copy out of a bucket. Strides in items."""

    name: str
    #: Bytes from the start of the tensor.
    offset: int
    source_strides: tuple[int, ...]
    #: Address of the first item.
    target: int
    target_strides: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int


class Recorder:
    """Collects while a bucket is loaded."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        #: Why a tensor is not planned, by name.
        self.reasons: dict[str, str] = {}
        #: Start, stop and what happened there other than a copy out of the bucket.
        self.touched: list[tuple[int, int, str]] = []

    def copied(self, target: torch.Tensor, source: torch.Tensor, place: tuple[str, int] | None) -> None:
        """``target.copy_(source)``; ``place`` is the tensor of the bucket that ``source`` lies in, and its address."""
        if place is None:
            self.touch(target, "copied from memory outside of the bucket")
            self.touch(source, "read by a copy")
            return
        name, start = place
        why = _no_plan(target, source)
        if why:
            self.unplanned(name, why)
            self.touch(target, why)
            return
        if source.shape != target.shape:
            source = source.expand_as(target)
        self.copies.append(
            Copy(
                name,
                source.data_ptr() - start,
                source.stride(),
                target.data_ptr(),
                target.stride(),
                tuple(target.shape),
                target.element_size(),
            )
        )

    def unplanned(self, name: str, reason: str) -> None:
        """The first reason counts."""
        self.reasons.setdefault(name, reason)

    def touch(self, tensor: torch.Tensor, reason: str) -> None:
        """An operation that is no copy out of the bucket took ``tensor``: its bytes may be a parameter's."""
        if tensor.numel() and tensor.layout is torch.strided:
            span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            self.touched.append((tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size(), reason))


def _no_plan(target: torch.Tensor, source: torch.Tensor) -> str:
    if source.dtype != target.dtype:
        return f"converted from {source.dtype} to {target.dtype}".replace("torch.", "")
    if not random_is_safe(source.dtype):
        return f"{source.dtype} may be an index".replace("torch.", "")
    if source.device != target.device:
        return f"copied from {source.device.type} to {target.device.type}"
    if source.is_conj() or source.is_neg():
        return "a lazily negated view"
    if any(s == 0 and n > 1 for n, s in zip(target.shape, target.stride(), strict=True)):
        return "overlapping destinations"
    return ""


class Recorded(NamedTuple):
    """What can be repeated of one bucket.

    ``rows`` has sources counted in ``names`` and targets counted in the parameters of the model; ``stock`` are the
    names that the loader must get again, and ``reasons`` says why.
    """

    names: tuple[str, ...]
    rows: np.ndarray
    stock: frozenset[str]
    reasons: dict[str, str]


def conclude(
    recorder: Recorder, names: Sequence[str], read: Iterable[str], parameters: Sequence[torch.Tensor]
) -> Recorded:
    """Sort the tensors of a bucket into those that are copied and those that the loader must get.

    Parameters
    ----------
    recorder
        What happened.
    names
        Tensors of the bucket, in order.
    read
        Those that the loader used at all; the others are left out of both.
    parameters
        All parameters of the model, in the order that rows count them.
    """
    reasons = dict(recorder.reasons)
    home = _Homes(parameters)
    places = [home.of(copy) for copy in recorder.copies]
    for copy, place in zip(recorder.copies, places, strict=True):
        if place is None:
            reasons.setdefault(copy.name, "copied to memory that is no parameter")
    _mark_conflicts(recorder.copies, reasons)
    _mark_touched(recorder, home, places, reasons)
    used = set(read) | {copy.name for copy in recorder.copies}
    numbers = {name: number for number, name in enumerate(names)}
    planned = [
        row
        for copy, place in zip(recorder.copies, places, strict=True)
        if place is not None and copy.name not in reasons
        for row in copies.rows_of(
            (numbers[copy.name], copy.offset, copy.source_strides),
            (*place, copy.target_strides),
            copy.shape,
            copy.itemsize,
        )
    ]
    done = {copy.name for copy in recorder.copies if copy.name not in reasons}
    stock = frozenset(name for name in used if name not in done)
    for name in stock:
        reasons.setdefault(name, "used by something that is no copy")
    return Recorded(tuple(names), copies.table(planned), stock, {n: r for n, r in reasons.items() if n in stock})


class _Homes:
    """Which parameter an address lies in."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        spans = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in parameters]
        self._order = np.array(sorted(range(len(spans)), key=lambda number: spans[number]), np.int64)
        self._starts = np.array([spans[number][0] for number in self._order], np.int64)
        self._stops = np.array([spans[number][1] for number in self._order], np.int64)

    def of(self, copy: Copy) -> tuple[int, int] | None:
        """Number of the parameter that holds all of the copy's target, and the offset in it; None without one."""
        span = sum((n - 1) * s for n, s in zip(copy.shape, copy.target_strides, strict=True)) + 1
        if 0 in copy.shape or not len(self._starts):
            return None
        place = int(np.searchsorted(self._starts, copy.target, side="right")) - 1
        if place < 0 or copy.target + span * copy.itemsize > self._stops[place]:
            return None
        return int(self._order[place]), int(copy.target - self._starts[place])

    def between(self, low: int, high: int) -> list[int]:
        """Numbers of the parameters that have bytes from ``low`` to below ``high``."""
        # Sorted by start; stops are in order too unless parameters share memory, and then a few more are named.
        first = int(np.searchsorted(np.maximum.accumulate(self._stops), low, side="right"))
        last = int(np.searchsorted(self._starts, high, side="left"))
        return [int(self._order[place]) for place in range(first, last)]


def _mark_conflicts(found: Sequence[Copy], reasons: dict[str, str]) -> None:
    """Give a reason to every tensor of which another copy reached the same bytes."""
    starts, stops, owners = [], [], []
    for number, copy in enumerate(found):
        # Only where it goes matters, so runs are as long as the target has them, whatever the source's order is.
        target = (0, copy.target, copy.target_strides)
        for row in copies.rows_of((0, 0, copy.target_strides), target, copy.shape, copy.itemsize):
            _, _, _, place, run, inner, _, inner_step, outer, _, outer_step = row
            first = (place + np.arange(outer)[:, None] * outer_step + np.arange(inner) * inner_step).ravel()
            starts.append(first)
            stops.append(first + run)
            owners.append(np.full(len(first), number, np.int64))
    if not starts:
        return
    start, stop, owner = np.concatenate(starts), np.concatenate(stops), np.concatenate(owners)
    order = np.argsort(start, kind="stable")
    start, stop, owner = start[order], stop[order], owner[order]
    # A run overlaps an earlier one when it begins before the furthest stop so far; whose that was is in ``last``.
    reach = np.maximum.accumulate(stop)
    last = np.maximum.accumulate(np.where(stop == reach, np.arange(len(stop)), 0))
    later = np.nonzero(start[1:] < reach[:-1])[0]
    for number in np.unique(np.concatenate([owner[later + 1], owner[last[later]]])).tolist():
        reasons.setdefault(found[number].name, "overlapping destinations")


def _mark_touched(
    recorder: Recorder, home: _Homes, places: Sequence[tuple[int, int] | None], reasons: dict[str, str]
) -> None:
    """Give a reason to every tensor that was copied into a parameter to which something else happened too.

    To any of its bytes: a loader that fills the padding of a shard, which no tensor reaches, must do so again.
    """
    copied: dict[int, set[str]] = {}
    for copy, place in zip(recorder.copies, places, strict=True):
        if place is not None:
            copied.setdefault(place[0], set()).add(copy.name)
    for low, high, why in recorder.touched:
        for parameter in home.between(low, high):
            for name in copied.get(parameter, ()):
                reasons.setdefault(name, why)
