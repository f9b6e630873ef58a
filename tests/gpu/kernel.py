"""How fast the copy kernel is by itself, beside torch's copies and one plain copy of the same bytes.

``python tests/gpu/kernel.py [--out DIR]`` prints bytes per second for packing, for replaying (contiguous pieces, and
the rows of a row-parallel shard), and for many small pieces, with tiles and warps of several sizes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from sglang_recv import copies, copies_triton

DEVICE = torch.device("cuda")
Case = tuple[list[torch.Tensor], list[torch.Tensor], list[tuple[int, ...]]]


def seconds(work: Callable[[], object], laps: int = 7) -> float:
    """Median time of ``work`` on the device."""
    found = []
    work()
    for _ in range(laps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return sorted(found)[laps // 2]


def pieces(size: int, total: int) -> Case:
    """``total`` bytes from tensors of ``size`` bytes each, which lie apart, into one buffer."""
    count = total // size
    sources = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(count)]
    slot = torch.empty(total, dtype=torch.uint8, device=DEVICE)
    return sources, [slot], [(i, 0, 0, i * size, size, 1, 0, 0, 1, 0, 0) for i in range(count)]


def shard(rows: int, row: int, total: int) -> Case:
    """The left half of each row of ``row`` bytes, out of a slot into tensors of ``rows`` rows."""
    count = total // (rows * row)
    slot = torch.empty(total, dtype=torch.uint8, device=DEVICE)
    targets = [torch.empty(rows * row // 2, dtype=torch.uint8, device=DEVICE) for _ in range(count)]
    return [slot], targets, [(0, i * rows * row, i, 0, row // 2, rows, row, row // 2, 1, 0, 0) for i in range(count)]


def mirrored(case: Case) -> Case:
    """The same pieces out of the buffer."""
    sources, targets, rows = case
    return targets, sources, [(b, b_at, a, a_at, *rest) for a, a_at, b, b_at, *rest in rows]


CASES: dict[str, Callable[[], Case]] = {
    "pack, experts of 3 MiB": lambda: pieces(3 << 20, 3 << 30),
    "replay, experts of 3 MiB": lambda: mirrored(pieces(3 << 20, 3 << 30)),
    "one piece of 2 GiB": lambda: pieces(2 << 30, 2 << 30),
    "pack, pieces of 4 KiB": lambda: pieces(4 << 10, 256 << 20),
    "pack, pieces of 256 bytes": lambda: pieces(256, 8 << 20),
    "replay, half rows of 1536 bytes": lambda: shard(2048, 1536, 3 << 30),
}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, float]] = {}
    source, target = (torch.empty(4 << 30, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    found["one copy of 4 GiB"] = {"torch": source.nbytes / seconds(functools.partial(target.copy_, source)) / 1e9}
    del source, target
    for name, make in CASES.items():
        sources, targets, rows = make()
        table = copies.table(rows)
        total = copies.nbytes(table)
        places = copies.Places.of(sources), copies.Places.of(targets)
        plain = copies.TorchCopier(table)
        found[name] = {"torch": total / seconds(functools.partial(plain.run, *places)) / 1e9}
        for whole, steps, warps in itertools.product((4096, 8192, 16384), (8,), (4, 8, 16)):
            copies_triton.WHOLE, copies_triton.STEPS, copies_triton.WARPS = whole, steps, warps  # type: ignore[misc]
            kernel = copies_triton.TritonCopier(table, DEVICE)
            speed = total / seconds(functools.partial(kernel.run, *places)) / 1e9
            found[name][f"{whole} items, {steps} steps, {warps} warps"] = speed
        print(name, " ".join(f"[{way}] {speed:.0f}" for way, speed in found[name].items()), flush=True)
        del sources, targets, places, plain, kernel
        torch.cuda.empty_cache()
    print(found["one copy of 4 GiB"])
    (options.out / "kernel.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
