"""One train rank of the slime tests: a real gloo process that runs our updater. Commands come as JSON lines on stdin.

slime, Megatron and Ray are the stand-ins beside this file; with ``SLIME_SRC`` the updater's superclass and its
distributed path are those of that checkout, and only what they import of Megatron and SGLang is stood in for.
"""

from __future__ import annotations

import json
import os
import sys
import types
import urllib.request
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STAND_IN = HERE / "stand_in"
#: Modules of slime that import Megatron or SGLang and that nothing here calls.
HOLLOW = (
    "megatron",
    "megatron.core",
    "slime.backends.megatron_utils.sglang",
    "slime.backends.megatron_utils.megatron_to_hf",
    "slime.backends.megatron_utils.update_weight.common",
    "slime.utils.http_utils",
    "slime.utils.misc",
)


class _Hollow(types.ModuleType):
    """Has every name; calling one fails the test."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def called(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"{self.__name__}.{name} was called")

        return called


def find_slime(source: str | None) -> None:
    """Make ``slime``, ``ray`` and what slime imports of Megatron importable."""
    sys.path.insert(0, str(STAND_IN))
    if not source:
        return
    sys.path.insert(0, source)
    for name in HOLLOW:
        sys.modules[name] = _Hollow(name)
    mpu = sys.modules["megatron.core"].mpu = types.ModuleType("megatron.core.mpu")  # type: ignore[attr-defined]
    mpu.get_data_parallel_rank = lambda with_context_parallel: dist.get_rank()  # type: ignore[attr-defined]
    mpu.get_tensor_model_parallel_rank = lambda: 0  # type: ignore[attr-defined]
    mpu.get_pipeline_model_parallel_rank = lambda: 0  # type: ignore[attr-defined]
    accelerator = sys.modules["slime.utils.accelerator"] = types.ModuleType("slime.utils.accelerator")
    for name in ("synchronize", "ipc_collect", "empty_cache"):
        setattr(accelerator, name, lambda: None)
    # Packages without their __init__, which would import Megatron and SGLang.
    for name in ("slime.backends", "slime.backends.megatron_utils"):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(Path(source, *name.split(".")))]


find_slime(os.environ.get("SLIME_SRC"))

import torch
import torch.distributed as dist
from ray.actor import ActorHandle
from slime.backends.megatron_utils.update_weight import update_weight_from_tensor as stock
from slime.utils import distributed_utils

from sglang_recv.errors import RecvError
from sglang_recv.integrations.slime.updater import UpdateWeightFromVmm


class EngineActor:
    """slime's SGLangEngine, as far as an updater calls it: HTTP to a server. Notes its calls."""

    def __init__(self, url: str, calls: list[str]) -> None:
        self.url = url
        self._calls = calls

    def _post(self, path: str, body: Mapping[str, Any]) -> str:
        self._calls.append(path)
        request = urllib.request.Request(
            f"{self.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300) as response:
            return response.read().decode()

    def get_url(self) -> str:
        return self.url

    def pause_generation(self) -> str:
        return self._post("pause_generation", {})

    def continue_generation(self) -> str:
        return self._post("continue_generation", {})

    def flush_cache(self) -> str:
        return self._post("flush_cache", {})

    def update_weights_from_distributed(self, names: Any, weight_version: str, **kwargs: Any) -> None:
        if iterator.mischief.get(iterator.number) == "no broadcast":
            raise RuntimeError("no broadcast")
        self._calls.append(f"remote {len(names)} tensors, version {weight_version}")


class Iterator_:
    """slime's bucket iterator: every step is a collective of all train ranks, so one that stops hangs the others."""

    def __init__(self) -> None:
        self.chunk = 5
        #: (chunk, what): what this rank does wrong, and when.
        self.mischief: dict[int, str] = {}
        self.number = 0

    def weights(self) -> Mapping[str, torch.Tensor]:
        """What slime's weights_getter gives; chunk -1 is before the first."""
        if self.mischief.get(-1):
            raise KeyError("no weights")
        return weights

    def get_hf_weight_chunks(
        self, megatron_local_weights: Mapping[str, torch.Tensor], param_info_buckets: object = None
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        names = list(megatron_local_weights)
        if isinstance(param_info_buckets, _Rest):
            names = param_info_buckets.of(megatron_local_weights)
        for number, start in enumerate(range(0, len(names), self.chunk)):
            dist.all_reduce(torch.zeros(1), group=distributed_utils.get_gloo_group())
            self.number = number
            tensors = [(name, megatron_local_weights[name].clone()) for name in names[start : start + self.chunk]]
            match self.mischief.get(number):
                case "shape":
                    tensors[0] = (tensors[0][0], tensors[0][1][:-1])
                case "unknown":
                    tensors.append(("model.nonsense.weight", torch.ones(3)))
                case "leave out":
                    tensors.pop()
                case "die":
                    os._exit(9)
            yield tensors


def route(updater: Any, batches: list[list[str]], rank: int) -> None:
    """Let these names travel as slime's routed experts: after the others, and on each rank in batches of its own."""
    routed = {name for batch in batches for name in batch}
    mine = list(reversed(batches)) if rank % 2 else [*batches[:1], [], *batches[1:]]
    longest = len(batches) + 1
    mine += [[]] * (longest - len(mine))  # every rank reaches the barrier after each batch
    updater._expert_transfer_plan = [mine[:1], mine[1:]]
    updater._non_expert_param_info_buckets = _Rest(routed)
    updater._prepare_expert_weight_batch = lambda batch, weights, buffers: [(n, weights[n].clone()) for n in batch]


class _Rest:
    """The names that are not routed, once the weights are known."""

    def __init__(self, routed: set[str]) -> None:
        self._routed = routed

    def of(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """In the weights' own order."""
        return [name for name in weights if name not in self._routed]


iterator = Iterator_()
weights: dict[str, torch.Tensor] = {}


def load(path: str) -> dict[str, torch.Tensor]:
    """A checkpoint."""
    from safetensors.torch import load_file

    return {name: t for file in sorted(Path(path).glob("*.safetensors")) for name, t in load_file(file).items()}


def main() -> None:
    """Serve commands until stdin ends."""
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    distributed_utils.GLOO_GROUP = group
    if hasattr(distributed_utils, "set_gloo_group"):
        distributed_utils.set_gloo_group(group)
    rank = dist.get_rank()
    stock.HfWeightIteratorBase.create = staticmethod(lambda **kwargs: iterator)
    args = Namespace(
        rollout_num_gpus_per_engine=1,
        actor_num_nodes=1,
        actor_num_gpus_per_node=dist.get_world_size(),
        update_weight_buffer_size=int(os.environ.get("TEST_SLOT_BYTES", 65536)),
        colocate=True,
        expert_model_parallel_size=1,
        update_weight_transport=os.environ.get("TEST_TRANSPORT", "nccl"),
    )
    updater = UpdateWeightFromVmm(
        args, [], weights_getter=iterator.weights, model_name="test", quantization_config=None
    )
    stock.configure_expert_routing = lambda **kwargs: (None, [])
    stock.connect_rollout_engines_from_distributed = lambda *args, **kwargs: None
    stock.disconnect_rollout_engines_from_distributed = lambda *args, **kwargs: None
    if "SLIME_SRC" in os.environ:
        stock.update_weights_from_distributed = lambda name, group, version, engines, tensors: [
            engine.update_weights_from_distributed.remote([n for n, _ in tensors], str(version)) for engine in engines
        ]
    calls: list[str] = []
    ready = {"ready": rank, "slime": stock.__file__, "experts": hasattr(updater, "_full_param_info_buckets")}
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if "connect" in command:
                engines = [ActorHandle(EngineActor(url, calls)) for url, _, _ in command["connect"]]
                args.actor_num_gpus_per_node = command.get("gpus", dist.get_world_size())
                updater.connect_rollout_engines(
                    engines,
                    None,
                    engine_gpu_counts=[count for _, _, count in command["connect"]],
                    engine_gpu_offsets=[offset for _, offset, _ in command["connect"]],
                )
            if "experts" in command:
                route(updater, command["experts"], rank)
            if "update" in command:
                weights.clear()
                weights.update(load(command["update"]))
                mischief = command.get("mischief", {}).get(str(rank), {})
                iterator.mischief = {int(chunk): what for chunk, what in mischief.items()}
                updater.update_weights()
        except RecvError as error:
            answer = {"code": error.code, "message": error.message, "fix": error.fix, "details": list(error.details)}
        except Exception as error:  # a trainer dies of it, and so do the ranks that wait for it
            print(
                json.dumps({"code": type(error).__name__, "rank": rank, "version": updater.weight_version}), flush=True
            )
            raise
        answer |= {"rank": rank, "version": updater.weight_version, "calls": list(calls)}
        calls.clear()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
