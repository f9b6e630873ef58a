"""The trainer of ``sglang-recv bench``: a process of its own that holds random weights and updates a live engine.

Writes one JSON object a line to its standard output as soon as it knows something, so that a run which is cut off has
told what it had: ``facts``, ``lap`` (of a mode), ``failed`` and ``digest``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch

from sglang_recv.cli import bench_others as others
from sglang_recv.cli import bench_report, shapes
from sglang_recv.cli.bench_report import CHECKPOINT_ENGINE
from sglang_recv.cli.server import post
from sglang_recv.client.client import WeightClient

_COPY_BYTES: Final = 2 << 30
_DEADLINE: Final = 300.0

Lap = dict[str, Any]


def emit(event: str, **fields: Any) -> None:
    """Tell the bench."""
    print(json.dumps({"event": event, **fields}), flush=True)


@dataclass
class Held:
    """What this process updates with."""

    url: str
    tensors: dict[str, torch.Tensor]
    device: torch.device
    client: WeightClient
    laps: int
    versions: int = 0

    def version(self) -> str:
        """A weight version that was not used yet."""
        self.versions += 1
        return f"bench-{self.versions}"

    def digest(self) -> str:
        """Of all that the engine holds."""
        return self.client.checksum()[self.url][0].digest


@dataclass(frozen=True)
class Mode:
    """One way to update, and how often to time it.

    Parameters
    ----------
    name
        Its row in the table.
    update
        Does one update, and says at least its ``seconds``.
    copies
        How often it copies every byte on the device, which is its limit; 0 when that is not what limits it.
    laps
        None for as many as were asked for.
    warm_up
        Laps before them that do not count.
    """

    name: str
    update: Callable[[Held], Lap]
    copies: int = 2
    laps: int | None = None
    warm_up: int = 0

    def run(self, held: Held) -> None:
        """All laps."""
        for _ in range(self.warm_up):
            self.update(held)
        for _ in range(held.laps if self.laps is None else self.laps):
            self.lap(held)

    def lap(self, held: Held) -> None:
        """One lap, told at once."""
        emit("lap", mode=self.name, copies=self.copies, **self.update(held))


def ours(held: Held) -> Lap:
    """From the call to the new version visible, with tensors at hand."""
    return _timed(held, held.tensors)


def lazily(held: Held) -> Lap:
    """As :func:`ours`, from an iterator: each tensor is copied before the next one is asked for."""
    return _timed(held, iter(held.tensors.items()))


def _timed(held: Held, tensors: Any) -> Lap:
    others.synchronize(held.device)
    started = time.monotonic()
    done = held.client.update(tensors, held.version())
    seconds = time.monotonic() - started
    return {
        "seconds": seconds,
        "phases": done.phases,
        "rank_phases": max(done.rank_phases.values(), key=lambda spent: sum(spent.values()), default={}),
        "plan": msgspec.to_builtins(next(iter(done.plans.values()), None)),
        "rounds": done.rounds,
        "staging_bytes": done.staging_bytes,
    }


def stock(held: Held) -> Lap:
    """SGLang's flattened bucket."""
    return {"seconds": others.stock_update(held.url, held.tensors, held.version())}


STOCK_FRESH: Final = Mode(bench_report.STOCK_FRESH, stock, laps=1)
STOCK: Final = Mode(bench_report.STOCK, stock)
#: On a fresh engine, in this order.
AT_FIRST: Final = (
    Mode(f"{bench_report.FRESH}: recording", ours, laps=1),
    Mode("second update: proving", ours, laps=1),
)
#: Turn by turn with stock, as machines are noisy.
STEADY: Final = Mode("steady", ours)
#: Each by itself.
AFTER: Final = (Mode("steady, a lazy source", lazily, laps=2, warm_up=1),)
#: In a process of its own, since its tensors lie elsewhere; its rounds are others, so it is recorded and proven first.
IN_PLACE: Final = Mode("steady, tensors in an exportable pool", ours, copies=1, warm_up=3)
SAVER: Final = Mode("steady, trainer under the memory saver", ours, warm_up=3)


def on_fresh_stock(held: Held) -> None:
    """Stock's first update."""
    _measure_limit(held)
    _settle(held)
    STOCK_FRESH.run(held)
    _digest(held, "stock", STOCK_FRESH)


def in_turn(held: Held) -> None:
    """All that one engine can be timed with by one trainer; at last, that ours writes what stock writes."""
    _measure_limit(held)
    _settle(held)
    for mode in AT_FIRST:
        mode.run(held)
    ours(held)  # the first replay
    stock(held)  # on this engine
    for _ in range(held.laps):
        STOCK.lap(held)
        STEADY.lap(held)
    for mode in AFTER:
        mode.run(held)
    emit("facts", round_trip_seconds=round_trip(held.client))
    ours(held)  # that session was not committed
    # The weights were the same in every lap so far: a way that wrote nothing would pass. So others, and back.
    _negate(held)
    stock(held)
    _digest(held, bench_report.OTHER, STOCK)
    _negate(held)
    ours(held)
    _digest(held, "ours", *AT_FIRST, STEADY, *AFTER)


def in_place(held: Held) -> None:
    """A process whose tensors ranks read where they are."""
    _settle(held)
    _negate(held)
    stock(held)  # others, so that what ours writes is seen
    _negate(held)
    IN_PLACE.run(held)
    _digest(held, "ours, in place", IN_PLACE)


def under_saver(held: Held) -> None:
    """A process whose memory is all the memory saver's."""
    _settle(held)
    SAVER.run(held)
    _digest(held, "ours, under the memory saver", SAVER)


def once(held: Held) -> None:
    """One update."""
    ours(held)
    _digest(held, "ours, once more")


def by_checkpoint_engine(held: Held) -> None:
    """checkpoint-engine, which the bench has found installed."""

    def failed(error: Exception) -> None:
        emit("failed", mode=CHECKPOINT_ENGINE, reason=f"{type(error).__name__}: {error}")

    def refused(error: Exception) -> None:
        failed(error)
        os._exit(1)  # the thread that waits cannot be ended

    try:
        server = others.CheckpointEngine(held.url, refused)

        def update(held: Held) -> Lap:
            phases = server.update(held.tensors, held.version())
            return {"seconds": sum(phases.values()), "phases": phases}

        mode = Mode(CHECKPOINT_ENGINE, update, copies=0, laps=min(held.laps, 3), warm_up=1)
        mode.run(held)
        _negate(held)  # what stock sent for others
        update(held)
        _digest(held, CHECKPOINT_ENGINE, mode)
    except Exception as error:  # it is another project's code, and must not end the bench
        failed(error)


PROGRAMS: Final[dict[str, Callable[[Held], None]]] = {
    "stock": on_fresh_stock,
    "turns": in_turn,
    "pool": in_place,
    "saver": under_saver,
    "once": once,
    CHECKPOINT_ENGINE: by_checkpoint_engine,
}


def _digest(held: Held, of: str, *modes: Mode) -> None:
    """Tell what the engine holds now, and which rows stand or fall with it."""
    emit("digest", of=of, digest=held.digest(), modes=[mode.name for mode in modes])


def _measure_limit(held: Held) -> None:
    emit("facts", limit_seconds=device_copy(sum(t.nbytes for t in held.tensors.values()), held.device))


def _settle(held: Held) -> None:
    gc.collect()
    others.release(held.device)
    # A first flush makes SGLang's own allocator take a segment for good; it must not count as ours.
    post(f"{held.url}/flush_cache", {})


def _negate(held: Held) -> None:
    for tensor in held.tensors.values():
        tensor.neg_()


def device_copy(nbytes: int, device: torch.device) -> float:
    """Seconds to copy as many bytes once on the device, 2 GiB at a time: the limit of any way that copies."""
    part = min(_COPY_BYTES, nbytes)
    source, target = (torch.zeros(part, dtype=torch.uint8, device=device) for _ in range(2))
    laps = []
    for _ in range(5):
        others.synchronize(device)
        started = time.monotonic()
        for start in range(0, nbytes, part):
            size = min(part, nbytes - start)
            target[:size].copy_(source[:size])
        others.synchronize(device)
        laps.append(time.monotonic() - started)
    return statistics.median(laps)


def round_trip(client: WeightClient, laps: int = 200) -> float:
    """Median seconds of a round without tensors, from its message to its acknowledgement: the cost of control."""
    found = []
    with client.open("empty", kind="partial") as session:
        for number in range(1, laps + 1):
            started = time.monotonic()
            session.pad(number)
            session._rounds._wait_acked(number)  # nobody else waits for a single round
            found.append(time.monotonic() - started)
    return statistics.median(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model", choices=shapes.SHAPES)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--laps", type=int, default=7)
    parser.add_argument("--slots", type=int, help="as WeightClient's; by default its own choice")
    parser.add_argument("--slot-mib", type=int, help="as WeightClient's slot_bytes, in MiB; by default its own choice")
    options = parser.parse_args(arguments)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with contextlib.ExitStack() as undo:
        pool = undo.enter_context(shapes.pool(options.model, device)) if options.program == "pool" else None
        _run(options, shapes.weights(options.model, 1, device, pool), device)


def _run(options: argparse.Namespace, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    emit("facts", tensors=len(tensors), bytes=sum(t.nbytes for t in tensors.values()))
    slot_bytes = options.slot_mib << 20 if options.slot_mib else None
    with WeightClient(options.url, slots=options.slots, slot_bytes=slot_bytes, deadline=_DEADLINE) as client:
        PROGRAMS[options.program](Held(options.url, tensors, device, client, options.laps))
    tensors.clear()  # a pool cannot be closed while they are in it


if __name__ == "__main__":
    main()
