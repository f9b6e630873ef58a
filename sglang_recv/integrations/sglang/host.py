"""One SGLang scheduler as the receiver sees it. Capabilities are probed on the objects; versions are not compared."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers import mm_utils
from sglang.srt.managers.io_struct import AbortReq, UpdateWeightsFromIPCReqInput
from sglang.version import __version__ as sglang_version

from sglang_recv import wire
from sglang_recv.channel import Wakeup
from sglang_recv.collective import gather_bytes
from sglang_recv.integrations.sglang import quantized
from sglang_recv.receiver.catalog import LOADED_TOGETHER, read_headers
from sglang_recv.wire import Carrier, MemorySaver

logger = logging.getLogger(__name__)


class _NoFence:
    """On a CPU, what was queued is done."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _Fences:
    """Events on every stream that may carry writes."""

    def __init__(self, streams: list[torch.cuda.Stream]) -> None:
        self._events = [stream.record_event() for stream in streams]

    def synchronize(self) -> None:
        """Wait until the device has done what was queued before."""
        for event in self._events:
            event.synchronize()


class SGLangHost:
    """Implements :class:`sglang_recv.receiver.host.Host` on a ``Scheduler``.

    Parameters
    ----------
    scheduler
        SGLang's Scheduler, with its weight updater made.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._updater = scheduler.weight_updater
        self._args = scheduler.server_args
        self._group = self._updater.tp_cpu_group
        self._version = str(self._args.weight_version or "")
        self._injected: deque[UpdateWeightsFromIPCReqInput] = deque()
        self._woken = False
        self._wakeup = Wakeup()
        self._rest: zmq.Poller | None = None
        sockets = [getattr(scheduler.ipc_channels, name) for name in ("recv_from_tokenizer", "recv_from_rpc")]
        if all(isinstance(socket, zmq.Socket) for socket in sockets):  # rank 0 has them, and only the usual server
            self._rest = zmq.Poller()
            for source in (self._wakeup.fileno(), *sockets):
                self._rest.register(source, zmq.POLLIN)
        sleeper = getattr(scheduler, "idle_sleeper", None)
        if sleeper is not None:
            # --sleep-on-idle polls SGLang's own sockets for up to a second; this makes an injected carrier wake it.
            sleeper.poller.register(self._wakeup.fileno(), zmq.POLLIN)
        self.rank: int = dist.get_rank(self._group)
        self.ranks: int = dist.get_world_size(self._group)
        kind = str(self._args.device)
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self.sglang_version: str = sglang_version
        config = self._runner.model_config
        self.model_path: str = str(config.model_path)
        self.dtype: str = str(config.dtype).removeprefix("torch.")
        text = getattr(config, "hf_text_config", None) or config.hf_config
        self.tied_embeddings = bool(getattr(text, "tie_word_embeddings", False))
        self.num_layers: int | None = getattr(text, "num_hidden_layers", None)
        # SGLang's DeepSeek loaders fuse the two only in models that have a low-rank query.
        low_rank = getattr(text, "q_lora_rank", None) is not None
        self.groups: tuple[tuple[str, ...], ...] = LOADED_TOGETHER if low_rank else ()
        self._refusals = quantized.Refusals(self.model, lambda: read_headers(Path(self.model_path)))

    @property
    def _runner(self) -> Any:
        return self._scheduler.tp_worker.model_runner

    @cached_property  # decided when the model is loaded, and a walk over all modules takes a millisecond
    def _packed_for_amx(self) -> bool:
        return any(getattr(module, "use_intel_amx_backend", False) for module in self.model().modules())

    @cached_property
    def _replicated_q(self) -> bool:
        copies = ("q_b_proj_qrep", "q_b_proj_qrep_weight", "w_kc_qrep")
        return any(getattr(module, name, None) is not None for module in self.model().modules() for name in copies)

    @cached_property
    def _with_kv_scales(self) -> tuple[torch.nn.Module, ...]:
        return quantized.layers_with_kv_scales(self.model())

    @cached_property  # SGLang makes others of what was loaded there; these are from before the first session
    def _kv_scales(self) -> tuple[float, ...]:
        return tuple(value for _, value in quantized.kv_scales(self._with_kv_scales))

    # --- facts -------------------------------------------------------------------------------------------------------

    def model(self) -> torch.nn.Module:
        """See Host."""
        model: torch.nn.Module = self._runner.model
        return model

    def unsupported(self) -> tuple[str, ...]:
        """See Host."""
        found = []
        quantization = getattr(self._runner.model_config, "quantization", None)
        if quantization:
            found += [f"quantization {quantization!r}: {reason}" for reason in self._refusals.find()]
        if getattr(self._updater, "_session", None) is not None:
            found.append("a weight update session of SGLang's own is open: call /end_weight_update first")
        if self._packed_for_amx:
            found.append("weights packed for Intel AMX: loaders would write into the packed layout")
        if self._replicated_q:
            found.append("dcp_replicate_q_proj: the gathered copies of q_b_proj would keep the old weights")
        if os.environ.get("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "0").lower() in ("1", "true"):
            found.append("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED: it permutes expert weights again after each update")
        if not self._has_session and getattr(self._args, "moe_runner_backend", None) == "flashinfer_trtllm":
            found.append("--moe-runner-backend flashinfer_trtllm: this SGLang cannot restore its shuffled weights")
        try:
            from sglang.srt.model_executor.model_runner_components import weight_updater as component
        except ImportError:
            pass  # versions without it have no such caches
        else:
            reason = component._unsupported_derived_weight_cache_error(self.model())
            if reason:
                found.append(reason)
        return tuple(found)

    def memory_saver(self) -> MemorySaver:
        """See Host. SGLang adds tags even when the saver is off, and then they mean nothing."""
        enabled = bool(getattr(self._updater.memory_saver_adapter, "enabled", False))
        released = tuple(sorted(self._updater.offload_tags)) if enabled else ()
        return MemorySaver(enabled, released, bool(getattr(self._args, "enable_weights_cpu_backup", False)))

    def weights_released(self) -> bool:
        """See Host."""
        return GPU_MEMORY_TYPE_WEIGHTS in self.memory_saver().released

    def weight_version(self) -> str:
        """See Host."""
        return self._version

    # --- ranks -------------------------------------------------------------------------------------------------------

    def vote(self, ok: bool) -> bool:
        """See Host."""
        if self.ranks == 1:
            return ok
        ballot = torch.tensor([int(ok)], dtype=torch.int32)
        dist.all_reduce(ballot, op=dist.ReduceOp.MIN, group=self._group)
        return bool(ballot.item())

    def share(self, mine: bytes) -> list[bytes]:
        """Give every rank the bytes of all ranks, in order of rank. A collective."""
        return gather_bytes(mine, self._group)

    def inject(self, carrier: Carrier) -> None:
        """See Host. Any thread."""
        self._injected.append(UpdateWeightsFromIPCReqInput(zmq_handles=wire.encode_carrier(carrier)))
        # In this order: once pull_injected has seen _woken, no late byte is left that would end every sleep at once.
        self._wakeup.set()
        self._woken = True

    def rest(self) -> None:
        """Sleep until a carrier is injected or SGLang receives something; called where rank 0 pulls its requests.

        What ``--sleep-on-idle`` does, but for 50 ms at most. A scheduler that spins takes the interpreter lock from the
        service thread, whose work it waits for, after every short step.
        """
        if self._rest is not None and not self._woken:
            self._rest.poll(50)

    def pull_injected(self) -> list[Any]:
        """Carriers to broadcast now; called where rank 0 pulls its requests."""
        if not self._woken:
            return []
        self._woken = False
        self._wakeup.clear()
        found = []
        while self._injected:
            found.append(self._injected.popleft())
        return found

    # --- weights -----------------------------------------------------------------------------------------------------

    @property
    def _has_session(self) -> bool:
        return hasattr(getattr(self._runner, "weight_updater", None), "begin_weight_update")

    def _streams(self) -> list[torch.cuda.Stream]:
        """The streams that forwards and loaders use. Loaders with worker threads use those threads' default stream."""
        forward = getattr(self._scheduler, "forward_stream", None)
        streams = [torch.cuda.current_stream(), torch.cuda.default_stream()]
        return streams + ([forward] if forward is not None else [])

    def begin_load(self) -> None:
        """See Host."""
        if self.device.type == "cuda":
            current = torch.cuda.current_stream()
            for stream in self._streams():
                current.wait_stream(stream)
                stream.wait_stream(current)
        self.fill()  # before it: what SGLang does after loading reads these
        if self._has_session:
            self._runner.weight_updater.begin_weight_update()

    def finish_load(self) -> None:
        """See Host. ``load_weights`` has run, and with it what models derive after loading."""
        self.fill()  # what a session that failed may have loaded there must not become the engine's own value
        if self._has_session:
            self._runner.weight_updater.end_weight_update(run_post_load=False)

    def filled(self) -> tuple[torch.nn.Parameter, ...]:
        """See Host."""
        return tuple(parameter for parameter, _ in quantized.kv_scales(self._with_kv_scales))

    def fill(self) -> None:
        """See Host."""
        for (parameter, _), value in zip(quantized.kv_scales(self._with_kv_scales), self._kv_scales, strict=True):
            parameter.data.fill_(value)

    def after_writes(self) -> _NoFence | _Fences:
        """See Host."""
        return _Fences(self._streams()) if self.device.type == "cuda" else _NoFence()

    def record_version(self, version: str) -> None:
        """See Host."""
        self._version = version
        record = getattr(self._scheduler, "record_weight_version_change", None)
        if record is not None:
            record(new_version=version)

    # --- requests ----------------------------------------------------------------------------------------------------

    @contextmanager
    def queues_set_aside(self) -> Iterator[None]:
        """Let SGLang's own idle test and flush look past requests that only wait: they hold no KV.

        What disaggregated decoding queues does hold KV; it is refused at start.
        """
        scheduler = self._scheduler
        waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
        grammar = scheduler.grammar_manager
        compiling, grammar.grammar_queue = grammar.grammar_queue, []
        try:
            yield
        finally:
            scheduler.waiting_queue = waiting
            grammar.grammar_queue = compiling

    def idle(self) -> bool:
        """True when nothing runs and nothing waits."""
        return bool(self._scheduler.is_fully_idle())

    def quiet(self) -> bool:
        """See Host."""
        with self.queues_set_aside():
            return self.idle()

    def flush_cache(self) -> bool:
        """See Host."""
        for module in (mm_utils, sys.modules.get("sglang.srt.managers.mm_schedule")):
            # What the vision tower made of images; SGLang's flush leaves it, as its weights never change otherwise.
            embeddings = getattr(module, "embedding_cache", None)
            if embeddings is not None:
                embeddings.clear()
        with self.queues_set_aside():
            return bool(self._scheduler.flush_cache(empty_cache=False))

    def refuse(self, request: Any, reason: str) -> None:
        """Answer one request with 503, as SGLang does when its queue is full."""
        finished = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": reason}
        answer = AbortReq(finished_reason=finished, rid=request.rid)
        self._scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)

    def refuse_queued(self, reason: str) -> None:
        """See Host."""
        scheduler = self._scheduler
        grammar = scheduler.grammar_manager
        for request in [*scheduler.waiting_queue, *grammar.grammar_queue]:
            self.refuse(request, reason)
        scheduler.waiting_queue = []
        grammar.grammar_queue = []
