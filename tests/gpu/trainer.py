"""A trainer process for the GPU tests: holds random weights and updates a live engine. Prints one JSON object, last.

Started under torch_memory_saver's preload it first shows that torch cannot share the very same tensors.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import torch

from sglang_recv import WeightClient
from sglang_recv.cli import shapes
from sglang_recv.cli.bench_others import stock_update
from sglang_recv.cli.bench_trainer import device_copy
from sglang_recv.cli.server import post


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


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--slot-mib", type=int, default=0, help="0: the client's own choice")
    parser.add_argument("--saver", action="store_true", help="this process runs under the memory saver's preload")
    parser.add_argument("--stock", type=int, default=0, help="how many stock updates to time first")
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
        report["device_copy_seconds"] = device_copy(report["bytes"], device)
    report["stock_seconds"] = [stock_update(options.url, tensors, f"stock{index}") for index in range(options.stock)]
    gc.collect()
    torch.cuda.ipc_collect()
    # A first flush makes SGLang's own allocator take a segment for good; it must not count as ours.
    post(f"{options.url}/flush_cache", {})
    baseline = free_bytes()
    runs = []
    slot_bytes = options.slot_mib << 20 if options.slot_mib else None
    with WeightClient(options.url, slot_bytes=slot_bytes, deadline=300) as client:
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
        report["digest"] = client.checksum()[options.url][0].digest
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
