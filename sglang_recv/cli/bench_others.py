"""The other ways to update an engine, for ``sglang-recv bench`` to compare with: SGLang's own, by their own functions.

The only module of the package that pickles (SGLang's flattened bucket is a pickle) and, beside the integration, the
only one that imports SGLang. Nothing but the bench imports it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from sglang_recv.cli.server import get, post
from sglang_recv.errors import CommitError

STOCK_BUCKET: Final = 512 << 20  # bytes, what slime uses by default


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what was queued; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what other processes have let go of, and what the allocator keeps."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def buckets(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors in lists of at most ``STOCK_BUCKET`` bytes."""
    bucket: list[tuple[str, torch.Tensor]] = []
    used = 0
    for name, tensor in tensors.items():
        if bucket and used + tensor.nbytes > STOCK_BUCKET:
            yield bucket
            bucket, used = [], 0
        bucket.append((name, tensor))
        used += tensor.nbytes
    yield bucket


def stock_update(url: str, tensors: Mapping[str, torch.Tensor], version: str) -> float:
    """SGLang's own way for a colocated trainer: flattened buckets, by torch's IPC over HTTP. Returns seconds.

    Raises
    ------
    CommitError
        When the engine refuses.
    """
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    device = next(iter(tensors.values())).device
    if device.type == "cpu":
        # Shared by name. By descriptor, torch's own way, only relatives of this process could get at it.
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    _has_sessions(url)  # asked before the clock runs
    synchronize(device)
    started = time.monotonic()
    with _session(url):
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
            _call(url, "update_weights_from_tensor", body)
            del flat, data
            if device.type == "cuda":
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    synchronize(device)
    return time.monotonic() - started


def no_checkpoint_engine(device: str) -> str | None:
    """Why checkpoint-engine cannot be timed on ``cpu`` or ``cuda`` here, or None."""
    if device != "cuda":
        return "checkpoint-engine needs a GPU"
    if importlib.util.find_spec("checkpoint_engine") is None:
        return "checkpoint-engine is not installed: pip install 'sglang[checkpoint-engine]'"
    return None


class CheckpointEngine:
    """checkpoint-engine's parameter server of one rank, through SGLang's ``/update_weights_from_ipc``.

    It sends from pinned host memory, so an update begins with a copy of the weights to there.

    Parameters
    ----------
    url
        The engine.
    refused
        Called on another thread when the engine refuses: checkpoint-engine goes on to wait for it without a bound.
    """

    def __init__(self, url: str, refused: Callable[[Exception], None]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # It reads its place from the environment, and listens on the port above MASTER_PORT.
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1)}
        from checkpoint_engine.ps import ParameterServer

        self._url = url
        self._refused = refused
        self._server: Any = ParameterServer(auto_pg=False)
        # Once: by itself it would make a process group for each update.
        self._server.init_process_group()
        #: Newer versions keep the pinned memory for the next update.
        pool = "use_shared_memory_pool" in inspect.signature(self._server.register_checkpoint).parameters
        self._options = {"use_shared_memory_pool": True} if pool else {}

    def update(self, tensors: Mapping[str, torch.Tensor], version: str) -> dict[str, float]:
        """One update; seconds of its phases: ``register`` (to pinned host memory), ``gather``, ``update``.

        Raises
        ------
        Exception
            Whatever checkpoint-engine raises.
        """
        _has_sessions(self._url)
        torch.cuda.synchronize()
        marks = [time.monotonic()]
        self._server.register_checkpoint(version, named_tensors=dict(tensors), **self._options)
        marks.append(time.monotonic())
        self._server.gather_metas(version)
        marks.append(time.monotonic())

        def request(sockets: list[tuple[str, str]]) -> None:
            body = {"zmq_handles": dict(sockets), "flush_cache": True, "weight_version": version}
            try:
                _call(self._url, "update_weights_from_ipc", body)
            except Exception as error:
                self._refused(error)
                raise

        with _session(self._url):
            self._server.update(version, request)
        torch.cuda.synchronize()
        marks.append(time.monotonic())
        self._server.unregister_checkpoint(version)
        spent = (later - earlier for earlier, later in itertools.pairwise(marks))
        return dict(zip(("register", "gather", "update"), spent, strict=True))


@contextlib.contextmanager
def _session(url: str) -> Iterator[None]:
    """SGLang's own session around weight updates, where this SGLang has such."""
    if _has_sessions(url):
        _call(url, "begin_weight_update", {})
    yield
    if _has_sessions(url):
        _call(url, "end_weight_update", {})


@functools.cache
def _has_sessions(url: str) -> bool:
    return "/begin_weight_update" in get(f"{url}/openapi.json")["paths"]


def _call(url: str, name: str, body: Mapping[str, Any]) -> None:
    answer = post(f"{url}/{name}", body)
    if not (isinstance(answer, dict) and answer.get("success")):
        raise CommitError(f"/{name} answered {str(answer)[:300]}", fix="look at the engine's log")
