"""Copies of bytes between tensors as rows of a table: many strided pieces, in one step.

A *piece* is a strided box of bytes that exists at two places. Rows are numbers, so a table can be kept for as long as
the layout it describes, while the memory under it is mapped somewhere else in every session: each row addresses its
source and its target by the number of a tensor and an offset into it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

logger = logging.getLogger(__name__)

#: Columns of a row. A row is ``outer * inner`` runs of ``run`` bytes; steps are bytes from one run to the next.
ROW: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("source", "source_offset", "target", "target_offset", "run"),
            *("inner", "source_inner", "target_inner"),
            *("outer", "source_outer", "target_outer"),
        )
    ]
)


def rows_of(
    source: tuple[int, int, Sequence[int]],
    target: tuple[int, int, Sequence[int]],
    shape: Sequence[int],
    itemsize: int,
) -> Iterator[tuple[int, ...]]:
    """Rows for one copy between equal shapes.

    Parameters
    ----------
    source, target
        Number of the tensor, offset into it in bytes, and strides in items of ``itemsize`` bytes.
    shape
        Of both.
    itemsize
        Bytes of one item.

    Yields
    ------
    tuple[int, ...]
        Rows of :data:`ROW`: one, where at most two dimensions are left once neighbours have been merged.
    """
    (source_index, source_offset, source_strides), (target_index, target_offset, target_strides) = source, target
    # From the fastest dimension of the target to its slowest: that is how its runs become contiguous.
    dims = sorted(
        (t * itemsize, s * itemsize, n) for n, s, t in zip(shape, source_strides, target_strides, strict=True) if n != 1
    )
    if any(n == 0 for _, _, n in dims):
        return
    run, merged = itemsize, list[tuple[int, int, int]]()
    for t, s, n in dims:
        if not merged and t == s == run:
            run *= n
        elif merged and t == merged[-1][0] * merged[-1][2] and s == merged[-1][1] * merged[-1][2]:
            merged[-1] = (*merged[-1][:2], merged[-1][2] * n)
        else:
            merged.append((t, s, n))
    # The two longest dimensions stay in the row, whose steps go from the faster to the slower one of the target.
    long = sorted(sorted(merged, key=lambda dim: dim[2])[-2:])
    rest = [dim for dim in merged if dim not in long]
    (t_inner, s_inner, inner), (t_outer, s_outer, outer) = [*long, (0, 0, 1), (0, 0, 1)][:2]
    for index in np.ndindex(*(n for _, _, n in rest)):
        source_step = sum(i * s for i, (_, s, _) in zip(index, rest, strict=True))
        target_step = sum(i * t for i, (t, _, _) in zip(index, rest, strict=True))
        yield (
            *(source_index, source_offset + source_step, target_index, target_offset + target_step, run),
            *(inner, s_inner, t_inner, outer, s_outer, t_outer),
        )


def table(rows: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Rows as an array of :data:`ROW`."""
    return np.array(list(rows), ROW)


def nbytes(rows: np.ndarray) -> int:
    """Bytes that a table copies."""
    return int((rows["run"] * rows["inner"] * rows["outer"]).sum())


def storage_bytes(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The whole storage of ``tensor`` as bytes, and the offset of ``tensor`` in it."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return whole, tensor.data_ptr() - storage.data_ptr()


class Places:
    """What a column of a table counts: byte ranges that begin at offsets into a few memories.

    Parameters
    ----------
    memories
        uint8, each contiguous and of one dimension.
    which
        For each place the number of its memory, int64.
    offsets
        For each place where it begins in that memory, in bytes, int64.
    """

    def __init__(self, memories: Sequence[torch.Tensor], which: np.ndarray, offsets: np.ndarray) -> None:
        self._memories = memories
        self._which = which
        self._offsets = offsets

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Places:
        """Tensors, each in its own storage."""
        found = [storage_bytes(tensor) for tensor in tensors]
        offsets = np.array([offset for _, offset in found], np.int64)
        return cls([memory for memory, _ in found], np.arange(len(found)), offsets)

    @cached_property
    def addresses(self) -> np.ndarray:
        """Where each begins, int64."""
        starts = np.array([memory.data_ptr() for memory in self._memories], np.int64)
        return starts[self._which] + self._offsets if len(starts) else np.zeros(len(self._which), np.int64)

    def bytes_of(self, number: int) -> tuple[torch.Tensor, int]:
        """The memory of one, and where it begins in it."""
        return self._memories[self._which[number]], int(self._offsets[number])


class Addresses(Places):
    """Places of which nothing but the addresses is known: enough for a kernel.

    Parameters
    ----------
    addresses
        Where each begins, int64.
    """

    def __init__(self, addresses: np.ndarray) -> None:
        super().__init__((), np.empty(0, np.int64), addresses)
        self.addresses = addresses


#: Gives the device memory that holds what is in a pinned int64 tensor.
Upload = Callable[[torch.Tensor], torch.Tensor]


class Copier(Protocol):
    """Runs one table, any number of times."""

    def run(self, sources: Places, targets: Places, upload: Upload | None = None) -> None:
        """Copy from ``sources`` to ``targets``, which the columns of these names count, on the current stream. All are
        of one device. ``upload`` says where a kernel's table goes; by default into memory of torch's allocator."""


def copier(rows: np.ndarray, device: torch.device) -> Copier:
    """The fastest way to run a table on ``device``: one kernel on a GPU with triton, else torch's copies."""
    if device.type == "cuda":
        try:
            from sglang_recv.copies_triton import TritonCopier
        except ImportError:
            logger.warning("triton cannot be imported: tables are run by torch's copies, one after the other")
        else:
            return TritonCopier(rows, device)
    return TorchCopier(rows)


def warm_up(device: torch.device) -> None:
    """Pay for what the first tables on ``device`` cost in this process: triton compiles each kind for about a
    second."""
    memory = Places.of([torch.zeros(512, dtype=torch.uint8, device=device)])
    strided = [(0, 0, 0, 256, run, 3, 16, 16, 1, 0, 0) for run in (8, 4, 2)]
    copier(table([(0, 0, 0, 256, 64, 1, 0, 0, 1, 0, 0), *strided]), device).run(memory, memory)


class TorchCopier:
    """Runs a table by torch's own copies. Takes what :func:`copier` takes."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows: list[tuple[int, ...]] = rows.tolist()
        self._sources = [_Box(row[4], row[5], row[6], row[8], row[9], row[1]) for row in self._rows]
        self._targets = [_Box(row[4], row[5], row[7], row[8], row[10], row[3]) for row in self._rows]

    def run(self, sources: Places, targets: Places, upload: Upload | None = None) -> None:
        """See :meth:`Copier.run`."""
        pairs = [
            _widest(box.of(targets.bytes_of(row[2])), other.of(sources.bytes_of(row[0])))
            for row, box, other in zip(self._rows, self._targets, self._sources, strict=True)
        ]
        if pairs:
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


class _Box(NamedTuple):
    """One side of a row."""

    run: int
    inner: int
    inner_step: int
    outer: int
    outer_step: int
    offset: int

    def of(self, place: tuple[torch.Tensor, int]) -> torch.Tensor:
        """As bytes, [outer, inner, run], or [bytes] of a single run."""
        whole, start = place
        start += self.offset
        if self.outer == self.inner == 1:
            return whole[start : start + self.run]
        return whole.as_strided((self.outer, self.inner, self.run), (self.outer_step, self.inner_step, 1), start)


def _widest(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in items of 8 bytes where everything is a multiple of that: strided copies go item by item."""
    for part in (target, source):
        if any(step % 8 for step in part.stride()[:-1]) or part.shape[-1] % 8 or part.storage_offset() % 8:
            return target, source
    return target.view(torch.int64), source.view(torch.int64)
