"""A trainer process for the GPU tests: holds random weights and updates a live engine. Prints one JSON object, last.

Started under torch_memory_saver's preload it first shows that torch cannot share the very same tensors.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import torch

from gpu import shapes
from sglang_recv import WeightClient

STOCK_BUCKET = 512 << 20  # bytes, what slime uses by default


def free_bytes() -> int:
    """Free memory of the device, as the driver counts it for all processes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def on_thread(work: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run ``work`` on a thread of its own."""
    result: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    thread.join()
    return result[0]


def stock_share(tensor: torch.Tensor) -> str:
    """What torch's CUDA IPC says to this tensor."""
    try:
        tensor.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "ok"


def buckets(tensors: dict[str, torch.Tensor]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors in lists of at most STOCK_BUCKET bytes."""
    bucket: list[tuple[str, torch.Tensor]] = []
    used = 0
    for name, tensor in tensors.items():
        if bucket and used + tensor.nbytes > STOCK_BUCKET:
            yield bucket
            bucket, used = [], 0
        bucket.append((name, tensor))
        used += tensor.nbytes
    yield bucket


def stock_update(url: str, tensors: dict[str, torch.Tensor], version: str) -> float:
    """SGLang's own way for a colocated trainer: a flattened bucket by torch CUDA IPC over HTTP. Returns seconds."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    started = time.monotonic()
    parts = list(buckets(tensors))
    for index, part in enumerate(parts):
        flat = FlattenedTensorBucket(named_tensors=part)
        data = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        last = index == len(parts) - 1
        body: dict[str, Any] = {
            "serialized_named_tensors": [MultiprocessingSerializer.serialize(data, output_str=True)],
            "load_format": "flattened_bucket",
            "flush_cache": last,
        }
        if last:
            body["weight_version"] = version
        request = urllib.request.Request(
            f"{url}/update_weights_from_tensor",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            assert json.load(response)["success"]
        del flat, data
        torch.cuda.ipc_collect()
    torch.cuda.synchronize()
    return time.monotonic() - started


def flush(url: str) -> None:
    """SGLang's /flush_cache."""
    with urllib.request.urlopen(urllib.request.Request(f"{url}/flush_cache", data=b""), timeout=60):
        pass


def device_copy(nbytes: int) -> float:
    """Seconds to copy as many bytes once on the device, 2 GiB at a time: the limit of any way that copies."""
    part = 2 << 30
    source, target = (torch.empty(part, dtype=torch.uint8, device="cuda") for _ in range(2))
    laps = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.monotonic()
        for start in range(0, nbytes, part):
            size = min(part, nbytes - start)
            target[:size].copy_(source[:size])
        torch.cuda.synchronize()
        laps.append(time.monotonic() - started)
    return statistics.median(laps)


def timed(client: WeightClient, tensors: dict[str, torch.Tensor], version: str) -> dict[str, Any]:
    """One update of ours, from the call to the new version visible."""
    torch.cuda.synchronize()
    started = time.monotonic()
    done = client.update(tensors, version)
    seconds = time.monotonic() - started
    plans = {name: msgspec.to_builtins(plan) for name, plan in done.plans.items()}
    return {"seconds": seconds, "phases": done.phases, "rounds": done.rounds, "plans": plans} | {
        "staging_bytes": done.staging_bytes
    }


def race(
    url: str, tensors: dict[str, torch.Tensor], slots: int | None, slot_bytes: int | None, laps: int, *, stock: bool
) -> dict[str, Any]:
    """Updates until a plan replays, and then stock and ours turn by turn, as the machine is noisy."""
    report: dict[str, Any] = {"first": [], "ours": [], "stock": []}
    with WeightClient(url, slots=slots, slot_bytes=slot_bytes, deadline=300) as client:
        for number in range(3):
            report["first"].append(timed(client, tensors, f"first-{number}"))
        for lap in range(laps):
            if stock:
                report["stock"].append(stock_update(url, tensors, f"race-stock{lap}"))
            report["ours"].append(timed(client, tensors, f"race-{lap}"))
        report["lazy"] = []
        for lap in range(3):
            started = time.monotonic()
            client.update(iter(tensors.items()), f"lazy-{lap}")
            report["lazy"].append(time.monotonic() - started)
        report["round_trip_seconds"] = round_trip(client)
        client.update(tensors, "whole-again")
    return report


def round_trip(client: WeightClient, laps: int = 200) -> float:
    """Median seconds of a round without tensors, from its message to its acknowledgement: the cost of control."""
    found = []
    with client.open("empty", kind="partial") as session:
        for number in range(1, laps + 1):
            started = time.monotonic()
            session.pad(number)
            session._rounds._wait_acked(number)
            found.append(time.monotonic() - started)
    return statistics.median(found)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--slot-mib", type=int, default=0, help="0: the client's own choice")
    parser.add_argument("--slots", type=int, default=None)
    parser.add_argument("--saver", action="store_true", help="this process runs under the memory saver's preload")
    parser.add_argument("--stock", type=int, default=0, help="how many stock updates to time first")
    parser.add_argument("--race", type=int, default=0, help="how often to time stock and ours in turn, at the end")
    parser.add_argument("--version", default="v")
    parser.add_argument("--kind", default="full")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    report: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if options.saver:
        from torch_memory_saver import torch_memory_saver

        # TMS_INIT_ENABLE=1: this thread is inside a region from the start, and so is every other thread.
        tensors = shapes.weights(options.model, options.seed, device)
        last = next(reversed(tensors))
        moved = on_thread(lambda: tensors[last].clone())
        tensors[last] = moved
        small = torch.zeros(8192, dtype=torch.uint8, device=device)
        report["stock_share"] = {
            "8,192 bytes in a region": stock_share(small),
            "a weight in a region": stock_share(next(iter(tensors.values()))),
            "a clone from another thread": stock_share(moved),
        }
        with torch_memory_saver.disable():
            report["stock_share"]["another thread inside disable()"] = stock_share(on_thread(lambda: small.clone()))
    else:
        tensors = shapes.weights(options.model, options.seed, device)
    report["tensors"] = len(tensors)
    report["bytes"] = sum(t.nbytes for t in tensors.values())
    if not options.saver:
        report["device_copy_seconds"] = device_copy(report["bytes"])
    report["stock_seconds"] = [stock_update(options.url, tensors, f"stock{index}") for index in range(options.stock)]
    gc.collect()
    torch.cuda.ipc_collect()
    # A first flush makes SGLang's own allocator take a segment for good; it must not count as ours.
    flush(options.url)
    baseline = free_bytes()
    runs = []
    slot_bytes = options.slot_mib << 20 if options.slot_mib else None
    with WeightClient(options.url, slots=options.slots, slot_bytes=slot_bytes, deadline=300) as client:
        if options.stock:
            report["stock_digest"] = client.checksum()[options.url][0].digest
        for index in range(options.updates):
            lowest = [baseline]

            def note(_progress: object, lowest: list[int] = lowest) -> None:
                lowest[0] = min(lowest[0], torch.cuda.mem_get_info()[0])

            started = time.monotonic()
            done = client.update(tensors, f"{options.version}{index}", kind=options.kind, on_progress=note)
            runs.append(
                {
                    "seconds": time.monotonic() - started,
                    "phases": done.phases,
                    "plans": {name: msgspec.to_builtins(plan) for name, plan in done.plans.items()},
                    "rounds": done.rounds,
                    "staging_bytes": done.staging_bytes,
                    "device_bytes_in_use_at_peak": baseline - lowest[0],
                    "device_bytes_after": baseline - free_bytes(),
                }
            )
        if options.updates:
            started = time.monotonic()
            client.update(iter(tensors.items()), f"{options.version}-streamed")
            report["streamed_seconds"] = time.monotonic() - started
        report["updates"] = runs
        if options.race:
            stock = not options.saver
            report["race"] = race(options.url, tensors, options.slots, slot_bytes, options.race, stock=stock)
        report["digest"] = client.checksum()[options.url][0].digest
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
