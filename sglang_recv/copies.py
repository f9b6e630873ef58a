"""Copies of bytes between tensors as rows of a table: many strided pieces, in one step.

A *piece* is a strided box of bytes that exists at two places. Rows are numbers, so a table can be kept for as long as
the layout it describes, while the memory under it is mapped somewhere else in every session: each row addresses its
source and its target by the number of a tensor and an offset into it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
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


class Copier(Protocol):
    """Runs one table, any number of times."""

    def run(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy from ``sources``, which the ``source`` column counts, on the current stream. They are of one device, and
        begin at multiples of 16 bytes."""


def copier(rows: np.ndarray, targets: Sequence[torch.Tensor]) -> Copier:
    """The fastest way to run a table on the targets' device: one kernel on a GPU with triton, else torch's copies.

    Parameters
    ----------
    rows
        The table.
    targets
        The tensors that the ``target`` column counts. They must not move while this is used.
    """
    if targets and targets[0].is_cuda:
        try:
            from sglang_recv.copies_triton import TritonCopier
        except ImportError:
            logger.warning("triton cannot be imported: tables are run by torch's copies, one after the other")
        else:
            return TritonCopier(rows, targets)
    return TorchCopier(rows, targets)


def warm_up(device: torch.device) -> None:
    """Pay for what the first table on ``device`` costs in this process: triton compiles for about a second."""
    memory = torch.zeros(256, dtype=torch.uint8, device=device)
    whole, strided = (0, 0, 0, 64, 64, 1, 0, 0, 1, 0, 0), (0, 0, 0, 128, 8, 4, 16, 16, 1, 0, 0)
    copier(table([whole, strided]), [memory]).run([memory])


class TorchCopier:
    """Runs a table by torch's own copies. Takes what :func:`copier` takes."""

    def __init__(self, rows: np.ndarray, targets: Sequence[torch.Tensor]) -> None:
        self._rows: list[tuple[int, ...]] = rows.tolist()
        places = {row[2]: storage_bytes(targets[row[2]]) for row in self._rows}
        self._targets = [_Box(row[4], row[5], row[7], row[8], row[10], row[3]).of(places[row[2]]) for row in self._rows]
        self._sources = [_Box(row[4], row[5], row[6], row[8], row[9], row[1]) for row in self._rows]

    def run(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy from ``sources``, which the ``source`` column counts."""
        places = [storage_bytes(source) for source in sources]
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for row, target, box in zip(self._rows, self._targets, self._sources, strict=True):
            pairs.append(_widest(target, box.of(places[row[0]])))
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
