"""A table of copies in one kernel launch per item size: pieces of a few bytes and of gigabytes cost what they copy.

Each program of the grid copies one tile: some kilobytes of one row of the table. The table stays on the device; a
launch needs the addresses of its sources, a few bytes each. Importable where triton is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

#: Items of one tile. With items of 8 bytes a tile is 32 KiB: enough to hide the look at the table.
TILE: Final = 4096
_ITEMS: Final = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
#: Columns of a row on the device: number of the source, offset in it, address of the target, items of a run and of the
#: whole, runs of the inner dimension, steps of both dimensions in both places.
_COLUMNS: Final = 10


@triton.jit  # type: ignore[untyped-decorator]
def _copy_tiles(  # type: ignore[no-untyped-def]  # its arguments are triton's
    sources,
    rows,
    tiles,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    ITEM: tl.constexpr,
    SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    NARROW: tl.constexpr,
):
    tile = tiles + 2 * tl.program_id(0).to(tl.int64)
    row = rows + tl.load(tile) * COLUMNS
    first = tl.load(tile + 1)
    source = tl.load(sources + tl.load(row)) + tl.load(row + 1)
    target = tl.load(row + 2)
    items = tl.load(row + 4)
    index = tl.arange(0, TILE)
    inside = first + index < items
    if WHOLE:
        # One run. Both ends are multiples of 16, so the compiler may move 16 bytes at a time.
        source = tl.multiple_of(source + first * SIZE, 16)
        target = tl.multiple_of(target + first * SIZE, 16)
        value = tl.load(source.to(tl.pointer_type(ITEM)) + index, mask=inside)
        tl.store(target.to(tl.pointer_type(ITEM)) + index, value, mask=inside)
    else:
        run = tl.load(row + 3)
        inner = tl.load(row + 5)
        place = first + index
        if NARROW:  # divisions of 64 bits take several times as long
            run = run.to(tl.int32)
            inner = inner.to(tl.int32)
            place = place.to(tl.int32)
        column = (place % run).to(tl.int64)
        line = place // run
        across = (line % inner).to(tl.int64)
        down = (line // inner).to(tl.int64)
        away = source + across * tl.load(row + 6) + down * tl.load(row + 7) + column * SIZE
        there = target + across * tl.load(row + 8) + down * tl.load(row + 9) + column * SIZE
        value = tl.load(away.to(tl.pointer_type(ITEM)), mask=inside)
        tl.store(there.to(tl.pointer_type(ITEM)), value, mask=inside)


class _Launch(NamedTuple):
    """One kernel: rows of one item size, all of a single run or none."""

    size: int
    whole: bool
    narrow: bool
    rows: torch.Tensor
    tiles: torch.Tensor


class TritonCopier:
    """Runs a table on a GPU, on the current stream.

    Parameters
    ----------
    rows
        The table, of :data:`sglang_recv.copies.ROW`.
    targets
        The tensors that the ``target`` column counts. They must not move while this is used.
    alignment
        What the addresses of all sources are multiples of, in bytes: 16, 8, 4, 2 or 1.
    """

    def __init__(self, rows: np.ndarray, targets: Sequence[torch.Tensor], *, alignment: int = 16) -> None:
        self._alignment = alignment
        self._device = targets[0].device if targets else torch.device("cuda")
        self._launches = _plan(rows, np.array([t.data_ptr() for t in targets], np.int64), alignment, self._device)

    def run(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy from ``sources``, which the ``source`` column counts.

        Raises
        ------
        ValueError
            When a source is not aligned as promised: a kernel would read other bytes.
        """
        addresses = np.array([source.data_ptr() for source in sources], np.int64)
        if (addresses % self._alignment).any():
            raise ValueError(f"a source is at an address that is no multiple of {self._alignment} bytes")
        on_device = _upload(addresses, self._device)
        for launch in self._launches:
            _copy_tiles[(len(launch.tiles),)](
                on_device,
                launch.rows,
                launch.tiles,
                COLUMNS=_COLUMNS,
                TILE=TILE,
                ITEM=_ITEMS[launch.size],
                SIZE=launch.size,
                WHOLE=launch.whole,
                NARROW=launch.narrow,
                num_warps=8,
            )


def _plan(rows: np.ndarray, addresses: np.ndarray, alignment: int, device: torch.device) -> list[_Launch]:
    rows = rows[(rows["run"] > 0) & (rows["inner"] > 0) & (rows["outer"] > 0)]
    target = addresses[rows["target"]] + rows["target_offset"] if len(rows) else np.empty(0, np.int64)
    whole = (rows["inner"] == 1) & (rows["outer"] == 1)
    # The largest item that everything about a row is a multiple of: bits that are set in any of them, and the lowest.
    bits = target | rows["source_offset"] | rows["run"] | alignment
    for name in ("source_inner", "target_inner", "source_outer", "target_outer"):
        bits = bits | np.where(whole, 0, rows[name])
    vector = whole & (bits & 15 == 0)
    size = np.minimum(bits & -bits, 8)
    found = []
    for is_whole in (True, False):
        for item in _ITEMS:
            chosen = np.nonzero((vector if is_whole else ~vector) & (size == item))[0]
            if len(chosen):
                found.append(_launch(rows[chosen], target[chosen], item, is_whole, device))
    return found


def _launch(rows: np.ndarray, target: np.ndarray, item: int, whole: bool, device: torch.device) -> _Launch:
    run = rows["run"] // item
    items = run * rows["inner"] * rows["outer"]
    steps = [rows[name] for name in ("source_inner", "source_outer", "target_inner", "target_outer")]
    columns = np.stack([rows["source"], rows["source_offset"], target, run, items, rows["inner"], *steps], axis=1)
    counts = -(-items // TILE)
    number = np.repeat(np.arange(len(rows)), counts)
    first = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * TILE
    narrow = int(items.max()) + TILE < 1 << 31
    return _Launch(item, whole, narrow, _upload(columns, device), _upload(np.stack([number, first], axis=1), device))


def _upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values, np.int64))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
