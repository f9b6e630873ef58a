"""What two processes get that copy on one GPU at the same time, as a trainer that packs and an engine that replays do.

``python tests/gpu/turns.py [--out DIR]`` prints bytes per second of each, alone and together: by the kernel in one
launch or several for each submission, and by the driver's own copies, which a copy engine makes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from cuda.bindings import driver

from sglang_recv import copies, copies_triton

DEVICE: Final = torch.device("cuda")
SECONDS: Final = 0.3
TOTAL: Final = 4 << 30
#: Submissions that may wait on the device beside the one that runs.
WAITING: Final = 2


class Case(NamedTuple):
    """Bytes of a piece and of a submission, launches of each submission, and how both sides copy; "" for not at all."""

    piece: int
    submission: int
    launches: int
    pack: str
    replay: str


CASES: Final = (
    *(Case(3 << 20, 1 << 30, 1, pack, replay) for pack, replay in (("kernel", ""), ("", "kernel"))),
    *(Case(3 << 20, size << 20, 1, "kernel", "kernel") for size in (128, 256, 512, 1024, 2048, 4096)),
    *(Case(3 << 20, 1 << 30, launches, "kernel", "kernel") for launches in (2, 4, 8, 16)),
    *(Case(64 << 20, 1 << 30, 1, pack, "") for pack in ("kernel", "driver")),
    *(Case(64 << 20, 1 << 30, 1, *ways) for ways in (("kernel", "kernel"), ("driver", "kernel"), ("driver", "driver"))),
)


def submissions(case: Case, way: str, *, replays: bool) -> list[list[Callable[[], object]]]:
    """Launches of each submission; together they copy :data:`TOTAL` bytes between pieces that lie apart and slots."""
    size, count = case.piece, case.submission // case.piece
    part = -(-count // case.launches)
    found = []
    for _ in range(max(TOTAL // case.submission, 1)):
        slot = torch.empty(count * size, dtype=torch.uint8, device=DEVICE)
        pieces = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(count)]
        launches = []
        for first in range(0, count, part):
            chosen = range(first, min(first + part, count))
            launches.append(_launch(slot, pieces, chosen, size, way, replays=replays))
        found.append(launches)
    return found


def _launch(
    slot: torch.Tensor, pieces: list[torch.Tensor], chosen: range, size: int, way: str, *, replays: bool
) -> Callable[[], object]:
    if way == "driver":
        pairs = [(slot.data_ptr() + i * size, pieces[i].data_ptr()) for i in chosen]
        ends = [(b, a) for a, b in pairs] if replays else pairs

        def copy() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for target, source in ends:
                (status,) = driver.cuMemcpyDtoDAsync(target, source, size, stream)
                assert status == driver.CUresult.CUDA_SUCCESS, status

        return copy
    if replays:
        table = copies.table([(0, i * size, i, 0, size, 1, 0, 0, 1, 0, 0) for i in chosen])
        sources, targets = [slot], pieces
    else:
        table = copies.table([(i, 0, 0, i * size, size, 1, 0, 0, 1, 0, 0) for i in chosen])
        sources, targets = pieces, [slot]
    kernel, places = copies_triton.TritonCopier(table, DEVICE), (copies.Places.of(sources), copies.Places.of(targets))
    return lambda: kernel.run(*places)


def side(replays: bool, barrier: Any, queue: Any) -> None:
    """One of the processes: bytes per second in each case."""
    stream, found = torch.cuda.Stream(), []
    torch.cuda.set_stream(stream)
    for case in CASES:
        way = case.replay if replays else case.pack
        work = submissions(case, way or "kernel", replays=replays)
        for launches in work:
            for launch in launches:
                launch()
        stream.synchronize()
        barrier.wait(60)
        done, waiting, begun = 0, [], time.monotonic()
        while way and time.monotonic() - begun < SECONDS:
            for launch in work[done % len(work)]:
                launch()
            done += 1
            waiting.append(stream.record_event())
            if len(waiting) > WAITING:
                waiting.pop(0).synchronize()
        stream.synchronize()
        copied = done * (case.submission // case.piece) * case.piece
        found.append(copied / (time.monotonic() - begun))
        barrier.wait(60)
        del work
        torch.cuda.empty_cache()
    queue.put((replays, found))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    processes = [context.Process(target=side, args=(replays, barrier, queue)) for replays in (False, True)]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=150) for _ in processes)
    for process in processes:
        process.join()
    rows = []
    for case, pack, replay in zip(CASES, found[False], found[True], strict=True):
        rows.append({**case._asdict(), "pack_gbps": pack / 1e9, "replay_gbps": replay / 1e9})
        print(
            f"pieces of {case.piece >> 20} MiB, {case.submission >> 20} MiB in {case.launches} launches: "
            f"pack by {case.pack or '-'} {pack / 1e9:.0f}, replay by {case.replay or '-'} {replay / 1e9:.0f}, "
            f"together {(pack + replay) / 1e9:.0f} GB/s"
        )
    (options.out / "turns.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
