"""What a watched load did with each tensor of its bucket: a pure copy that can be repeated without the loader, or not.

The recorder believes what it is told (:mod:`sglang_recv.receiver.coverage` watches). It is careful: a tensor is planned
only if all that happened to it were copies of the same dtype into parameters, and nothing else happened to the bytes
that it reached. All else stays with the loader, with a reason. Whether the result is right is proven elsewhere
(:mod:`sglang_recv.receiver.plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from sglang_recv import copies

#: Items of these dtypes may be used as indices, and a proof loads what is no index.
_MAY_INDEX: Final = frozenset((torch.bool, torch.int8, torch.int16, torch.int32, torch.int64))


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
    if source.dtype in _MAY_INDEX:
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
    # Runs of bytes as columns: who writes them, from where to where. Every copy counts, planned or not.
    rows = [
        list(
            copies.rows_of(
                (0, 0, copy.source_strides), (0, copy.target, copy.target_strides), copy.shape, copy.itemsize
            )
        )
        for copy in recorder.copies
    ]
    _mark_conflicts(recorder, rows, reasons)
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


def _mark_conflicts(recorder: Recorder, rows: Sequence[list[tuple[int, ...]]], reasons: dict[str, str]) -> None:
    """Give a reason to every tensor whose bytes something else reached too."""
    starts, stops, owners = [], [], []
    for number, of_copy in enumerate(rows):
        for row in of_copy:
            _, _, _, target, run, inner, _, inner_step, outer, _, outer_step = row
            first = (target + np.arange(outer)[:, None] * outer_step + np.arange(inner) * inner_step).ravel()
            starts.append(first)
            stops.append(first + run)
            owners.append(np.full(len(first), number, np.int64))
    if not starts:
        return
    start, stop, owner = np.concatenate(starts), np.concatenate(stops), np.concatenate(owners)
    order = np.argsort(start, kind="stable")
    start, stop, owner = start[order], stop[order], owner[order]
    # A run overlaps an earlier one when it begins before the furthest stop so far; whose that was is in ``reach_of``.
    reach = np.maximum.accumulate(stop)
    last = np.maximum.accumulate(np.where(stop == reach, np.arange(len(stop)), 0))
    for place in np.nonzero(start[1:] < reach[:-1])[0]:
        for number in (owner[place + 1], owner[last[place]]):
            reasons.setdefault(recorder.copies[number].name, "overlapping destinations")
    for low, high, why in recorder.touched:
        # Sorted by start, but stops need not be in order where runs overlap; those are marked already.
        begin = int(np.searchsorted(reach, low, side="right"))
        end = int(np.searchsorted(start, high, side="left"))
        for number in set(owner[begin:end].tolist()):
            reasons.setdefault(recorder.copies[number].name, why)
