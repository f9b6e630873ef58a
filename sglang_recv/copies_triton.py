"""A table of copies in a kernel launch or two: pieces of a few bytes and of gigabytes cost what they copy.

Each program of the grid copies one chunk: some kilobytes of one row of the table. What of a table does not depend on
addresses is made once; for a run the addresses are put in, and the table travels to the device with the launch (some
60 KiB for a gigabyte in pieces of 3 MiB), so nothing on the device outlives a run. Importable where triton is.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from sglang_recv.copies import Places, Upload

#: Items of 8 bytes that a program copies of a row of one run: 64 KiB, sixteen 16-byte loads of each thread before its
#: first store.
WHOLE: Final = 8192
#: Of rows of another form: items of one step, and steps, which share what was read of the row.
TILE: Final = 2048
STEPS: Final = 8
WARPS: Final = 8
_ITEMS: Final = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
#: What kernels get begins at multiples of this: triton compiles other addresses apart, as it would other counts.
_ALIGNED: Final = 16


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _copy_whole(rows, chunks, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of one run whose ends are multiples of 16: source, target, items of 8 bytes; ``count`` of each."""
    chunk = chunks + 2 * tl.program_id(0)
    row = rows + tl.load(chunk)
    first = tl.load(chunk + 1).to(tl.int64) * TILE
    # The compiler may move 16 bytes at a time.
    source = tl.multiple_of(tl.load(row) + first * 8, 16).to(tl.pointer_type(tl.int64))
    target = tl.multiple_of(tl.load(row + count) + first * 8, 16).to(tl.pointer_type(tl.int64))
    index = tl.arange(0, TILE)
    inside = index < tl.load(row + 2 * count) - first
    tl.store(target + index, tl.load(source + index, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _copy_boxes(  # type: ignore[no-untyped-def]  # its arguments are triton's
    rows,
    chunks,
    count,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    ITEM: tl.constexpr,
    SIZE: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Rows of any form: source, target, items, items of a run, runs inside, and the four steps; ``count`` of each."""
    chunk = chunks + 2 * tl.program_id(0)
    row = rows + tl.load(chunk)
    first = tl.load(chunk + 1).to(tl.int64) * (TILE * STEPS)
    source = tl.load(row)
    target = tl.load(row + count)
    items = tl.load(row + 2 * count)
    run = tl.load(row + 3 * count)
    inner = tl.load(row + 4 * count)
    if NARROW:  # divisions of 64 bits take several times as long
        run = run.to(tl.int32)
        inner = inner.to(tl.int32)
    for start in range(0, tl.minimum(items - first, TILE * STEPS), TILE):
        place = first + start + tl.arange(0, TILE)
        inside = place < items
        if NARROW:
            place = place.to(tl.int32)
        column = (place % run).to(tl.int64)
        line = place // run
        across = (line % inner).to(tl.int64)
        down = (line // inner).to(tl.int64)
        away = source + across * tl.load(row + 5 * count) + down * tl.load(row + 6 * count) + column * SIZE
        there = target + across * tl.load(row + 7 * count) + down * tl.load(row + 8 * count) + column * SIZE
        value = tl.load(away.to(tl.pointer_type(ITEM)), mask=inside)
        tl.store(there.to(tl.pointer_type(ITEM)), value, mask=inside)


class _Launch(NamedTuple):
    """One kernel: rows of one kind, and where its parts are in the table that is uploaded, in items of 8 bytes."""

    size: int
    whole: bool
    narrow: bool
    chosen: np.ndarray
    rows: slice
    chunks: slice
    programs: int


class TritonCopier:
    """Runs a table on a GPU, on the current stream.

    Parameters
    ----------
    rows
        The table, of :data:`sglang_recv.copies.ROW`.
    device
        The GPU.
    """

    def __init__(self, rows: np.ndarray, device: torch.device) -> None:
        self._rows = rows[(rows["run"] > 0) & (rows["inner"] > 0) & (rows["outer"] > 0)]
        self._device = device
        #: What the addresses were when the launches were made, modulo 16: the items that a row moves depend on it.
        self._low: np.ndarray | None = None
        self._launches: list[_Launch] = []
        self._table = np.empty(0, np.int64)

    def run(self, sources: Places, targets: Places, upload: Upload | None = None) -> None:
        """See :meth:`sglang_recv.copies.Copier.run`."""
        if not len(self._rows):
            return
        source = sources.addresses[self._rows["source"]] + self._rows["source_offset"]
        target = targets.addresses[self._rows["target"]] + self._rows["target_offset"]
        low = (source | target) & 15
        if self._low is None or not np.array_equal(low, self._low):
            self._low = low
            self._launches, self._table = _prepare(self._rows, low)
        for launch in self._launches:
            count = len(launch.chosen)
            into = self._table[launch.rows]
            into[:count] = source[launch.chosen]
            into[count : 2 * count] = target[launch.chosen]
        table = torch.from_numpy(self._table)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                pinned = table.pin_memory()
                self._launch(pinned.to(self._device, non_blocking=True) if upload is None else upload(pinned))
        else:
            self._launch(table)

    def _launch(self, table: torch.Tensor) -> None:
        for launch in self._launches:
            rows, chunks = table[launch.rows], table[launch.chunks].view(torch.int32)
            grid, count = (launch.programs,), len(launch.chosen)
            if launch.whole:
                _copy_whole[grid](rows, chunks, count, TILE=WHOLE, num_warps=WARPS)
                continue
            _copy_boxes[grid](
                rows,
                chunks,
                count,
                TILE=TILE,
                STEPS=STEPS,
                ITEM=_ITEMS[launch.size],
                SIZE=launch.size,
                NARROW=launch.narrow,
                num_warps=WARPS,
            )


def _prepare(rows: np.ndarray, low: np.ndarray) -> tuple[list[_Launch], np.ndarray]:
    """The launches for rows whose addresses are ``low`` modulo 16, and a table of which only addresses are missing."""
    single = (rows["inner"] == 1) & (rows["outer"] == 1)
    # The largest item that everything about a row is a multiple of: bits that are set in any of them, and the lowest.
    bits = low | rows["run"] | 16
    for name in ("source_inner", "target_inner", "source_outer", "target_outer"):
        bits = bits | np.where(single, 0, rows[name])
    whole = single & (bits & 15 == 0)
    size = np.minimum(bits & -bits, 8)
    launches, parts, used = [], [], 0
    for is_whole in (True, False):
        for item in _ITEMS:
            chosen = np.nonzero((whole if is_whole else ~whole) & (size == item))[0]
            if not len(chosen):
                continue
            found = rows[chosen]
            run = found["run"] // item
            items = run * found["inner"] * found["outer"]
            empty = np.zeros(len(chosen), np.int64)  # of addresses
            columns = [empty, empty, items]
            if not is_whole:
                columns += [run, found["inner"]]
                columns += [found[name] for name in ("source_inner", "source_outer", "target_inner", "target_outer")]
            chunks = _chunks(items, WHOLE if is_whole else TILE * STEPS)
            begin, middle = used, used + _padded(len(columns) * len(chosen))
            used = middle + _padded(len(chunks))
            parts += [(begin, np.concatenate(columns)), (middle, chunks.view(np.int64).ravel())]
            narrow = int(items.max()) + TILE * STEPS < 1 << 31
            launches.append(
                _Launch(
                    *(item, is_whole, narrow, chosen),
                    *(slice(begin, middle), slice(middle, used), len(chunks)),
                )
            )
    table = np.zeros(used, np.int64)
    for begin, values in parts:
        table[begin : begin + len(values)] = values
    return launches, table


def _padded(items: int) -> int:
    unit = _ALIGNED // 8
    return -(-items // unit) * unit


def _chunks(items: np.ndarray, size: int) -> np.ndarray:
    """Row and number of each chunk of ``size`` items, int32 [chunks, 2]."""
    counts = -(-items // size)
    row = np.repeat(np.arange(len(items)), counts)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.ascontiguousarray(np.stack([row, number], axis=1), np.int32)
