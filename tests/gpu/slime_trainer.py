"""The trainer of the colocated loop: a process under torch_memory_saver's preload, in slime's order of calls.

slime's own train loop cannot be installed here; its steps are written out (slime/train.py, actor.py: sleep, wake_up,
update_weights), and the updater is ours over the stand-ins of tests/slime. Prints one JSON object, last.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "slime")]

import torch
import torch.distributed as dist
import train_rank  # makes slime importable
from ray.actor import ActorHandle
from slime.backends.megatron_utils.update_weight import update_weight_from_tensor as stock
from slime.utils import distributed_utils
from torch_memory_saver import torch_memory_saver

from sglang_recv import WeightClient
from sglang_recv.cli import shapes
from sglang_recv.integrations.slime.updater import UpdateWeightFromVmm
from sglang_recv.receiver.checksum import digest

BUCKET = 512 << 20  # bytes, slime's default of --update-weight-buffer-size
RATE = 0.05  # of a gradient that equals the weight: every step changes nearly all bytes

_memory: dict[str, int] = {}


def used(phase: str) -> None:
    """Note the device's memory in use, of all processes, in MiB."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    _memory[phase] = (total - free) >> 20


def on_thread(work: Callable[[], Any]) -> Any:
    """Run on a fresh thread: there disable() does not hold, and all memory is the saver's."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    thread.join()
    return result[0]


def clear() -> None:
    """slime's clear_memory."""
    gc.collect()
    torch.cuda.empty_cache()


class Chunks:
    """As slime's iterator: from the backup in host memory to the device, bucket by bucket.

    With ``threaded``, as a converter that works on a thread of its own: there disable() does not hold, so that torch's
    CUDA IPC refuses what it makes.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.threaded = False

    def get_hf_weight_chunks(
        self, megatron_local_weights: Mapping[str, torch.Tensor], param_info_buckets: object = None
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        chunk: dict[str, torch.Tensor] = {}
        for name, tensor in megatron_local_weights.items():
            if chunk and sum(t.nbytes for t in chunk.values()) + tensor.nbytes > BUCKET:
                yield self._on_device(chunk)
                chunk = {}
            chunk[name] = tensor
        yield self._on_device(chunk)

    def _on_device(self, chunk: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        def move() -> list[tuple[str, torch.Tensor]]:
            return [(name, tensor.cuda()) for name, tensor in chunk.items()]

        moved: list[tuple[str, torch.Tensor]] = on_thread(move) if self.threaded else move()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        self.peak = max(self.peak, (total - free) >> 20)
        return moved


def stock_failure(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """What SGLang's own way says to the very tensors: a flattened bucket, serialised with a CUDA IPC handle."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    def serialise(make: Callable[[], torch.Tensor]) -> str:
        try:
            MultiprocessingSerializer.serialize({"flattened_tensor": make()}, output_str=True)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return "ok"

    def flattened() -> torch.Tensor:
        return FlattenedTensorBucket(named_tensors=tensors).get_flattened_tensor()

    return {
        "a flattened bucket of a fresh thread, inside disable()": on_thread(lambda: serialise(flattened)),
        "8,192 bytes of uint8 of a fresh thread, inside disable()": on_thread(
            lambda: serialise(lambda: torch.zeros(8192, dtype=torch.uint8, device="cuda"))
        ),
        "a tensor of the bucket": serialise(lambda: tensors[0][1]),
    }


def expected(weights: Mapping[str, torch.Tensor], tied: bool) -> dict[str, str]:
    """Digests of what SGLang's dense Qwen3 must hold at TP 1, by its names."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in weights.items():
        for part, whole in {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
                            "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}.items():  # fmt: skip
            name = name.replace(f".{part}.", f".{whole}.")
        if not (tied and name == "lm_head.weight"):
            found.setdefault(name, []).append(tensor)
    return {name: digest(torch.cat([part.cuda() for part in parts])) for name, parts in found.items()}


def compared(url: str, wanted: Mapping[str, str]) -> dict[str, Any]:
    """What the engine holds, beside what it should."""
    with WeightClient(url) as client:
        held = client.checksum()[url][0].tensors
        version = client.status()[url][0].weight_version
    return {
        "version": version,
        "tensors equal": sum(held.get(name) == value for name, value in wanted.items()),
        "tensors expected": len(wanted),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29511", rank=0, world_size=1)
    distributed_utils.set_gloo_group(dist.new_group(backend="gloo"))
    engine = train_rank.EngineActor(options.url, [])
    chunks = Chunks()
    stock.HfWeightIteratorBase.create = staticmethod(lambda **kwargs: chunks)
    used("engine started")

    engine._post("release_memory_occupation", {})
    used("engine released")
    # TMS_INIT_ENABLE=1: all of the trainer's memory is the saver's.
    parameters = {
        name: torch.nn.Parameter(tensor)
        for name, tensor in shapes.weights(options.model, 1, torch.device("cuda", 0)).items()
    }
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE)
    backup = {name: torch.empty_like(p, device="cpu").pin_memory() for name, p in parameters.items()}
    updater = UpdateWeightFromVmm(
        Namespace(
            rollout_num_gpus_per_engine=1,
            actor_num_nodes=1,
            actor_num_gpus_per_node=1,
            update_weight_buffer_size=BUCKET,
            update_weight_transport="nccl",
        ),
        [],
        weights_getter=lambda: backup,
        model_name="qwen3",
        quantization_config=None,
    )
    updater.connect_rollout_engines([ActorHandle(engine)], None, [1], [0])
    report: dict[str, Any] = {"tensors": len(parameters), "bytes": sum(p.nbytes for p in parameters.values())}
    tied = shapes.SHAPES[options.model].tied

    # What was reported: the trainer is awake, and what it sends is memory of the saver.
    engine._post("resume_memory_occupation", {"tags": ["weights"]})
    for name, parameter in parameters.items():
        backup[name].copy_(parameter.detach())
    chunks.threaded = True
    with torch_memory_saver.disable():
        report["stock"] = stock_failure(next(chunks.get_hf_weight_chunks(backup)))
        updater.update_weights()
    chunks.threaded = False
    report["reported"] = compared(options.url, expected(backup, tied))
    engine._post("release_memory_occupation", {"tags": ["weights"]})
    clear()
    torch_memory_saver.pause()
    steps = []
    for number in range(1, options.steps + 1):
        _memory.clear()
        torch_memory_saver.resume()
        used("trainer resumed")
        loss = 0.0
        for parameter in parameters.values():
            part = (parameter.float() ** 2).sum() / 2
            part.backward()
            loss += float(part.detach())
        used("after backward")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for name, parameter in parameters.items():
            backup[name].copy_(parameter.detach())
        wanted = expected(backup, tied)
        clear()
        torch_memory_saver.pause()
        used("trainer paused")
        engine._post("resume_memory_occupation", {"tags": ["weights"]})
        used("engine weights resumed")
        chunks.peak = 0
        started = time.monotonic()
        with torch_memory_saver.disable():
            updater.update_weights()
        seconds = time.monotonic() - started
        _memory["update, peak"] = chunks.peak
        clear()
        used("updated")
        engine._post("resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
        used("engine KV resumed")
        shown = compared(options.url, wanted)
        answer = json.loads(engine._post("generate", {
            "input_ids": [1, 2, 3, 4], "sampling_params": {"max_new_tokens": 4, "temperature": 0},
        }))  # fmt: skip
        used("generated")
        steps.append(
            {
                "step": number,
                "loss": loss,
                "seconds": seconds,
                **shown,
                "tokens": answer["output_ids"],
                "memory_mib": dict(_memory),
            }
        )
        print(json.dumps(steps[-1]), flush=True)
        engine._post("flush_cache", {})
        engine._post("release_memory_occupation", {})
    report["steps"] = steps
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
