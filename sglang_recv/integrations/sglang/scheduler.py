"""Hooks in a scheduler process. Each wraps one function of SGLang and says why it is that one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers import io_struct, schedule_batch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.managers.utils import is_health_check_generate_req
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils import freeze_gc

from sglang_recv import wire
from sglang_recv.errors import ReceiverOffError, RecvError
from sglang_recv.integrations.sglang import mode
from sglang_recv.integrations.sglang.host import SGLangHost
from sglang_recv.receiver.receiver import Receiver
from sglang_recv.wire import RankTable

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

# One scheduler per process; SGLang's own objects have slots, so the receiver cannot hang on one of them.
_host: SGLangHost | None = None
_receiver: Receiver | None = None


def register() -> None:
    """Register all hooks of this module."""
    # The last step of construction that sees a ready model and comes before anything that can fail for other reasons;
    # an exception here ends the scheduler, and with it the engine, with our reason in the log.
    HookRegistry.register(f"{_SCHEDULER}.init_request_dispatcher", _attach, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.get_init_info", _publish, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.get_next_batch_to_run", _gate, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.handle_generate_request", _request, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.handle_embedding_request", _request, HookType.AROUND)
    HookRegistry.register(f"{_RECEIVER}._pull_raw_reqs", _pull, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.update_weights_from_ipc", _carrier, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.update_weights_from_disk", _disk, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.release_memory_occupation", _release, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.resume_memory_occupation", _resume, HookType.AFTER)
    for name in ("update_weights_from_tensor", "update_weights_from_distributed"):
        HookRegistry.register(f"{_UPDATER}.{name}", _stock(_output_class(name)), HookType.AROUND)
    for name in ("begin_weight_update", "end_weight_update"):
        if hasattr(SchedulerWeightUpdaterManager, name):
            HookRegistry.register(f"{_UPDATER}.{name}", _stock(_output_class(name)), HookType.AROUND)


def _output_class(method: str) -> Callable[..., Any]:
    camel = "".join(part.capitalize() for part in method.split("_"))
    found: Callable[..., Any] = getattr(io_struct, f"{camel}ReqOutput")
    return found


def _attach(_result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    global _host, _receiver
    asked = mode.configured()
    if asked == "off":
        return
    mode.check(asked, scheduler.server_args)
    host = SGLangHost(scheduler)
    plans = mode.configured_plan() != "off"
    _receiver = Receiver(host, mode.resolve(asked), host.share, plans=plans)
    _host = host


def _publish(result: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    off = RankTable(wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, "", "off", ())
    result[wire.INFO_KEY] = msgspec.to_builtins(off if _receiver is None else _receiver.table)
    if _receiver is not None:
        # Everything is built now. What updates allocate would make the collector scan all of it, for 0.3 s each time.
        freeze_gc("Scheduler")
    return result


def _gate(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    if _receiver is None or not _receiver.replicated.gate_closed:
        return original(scheduler, *args, **kwargs)
    if _receiver.replicated.refusal() is None:
        # SGLang sets probes aside while requests wait, and answers them with the next batch's results.
        scheduler.maybe_send_health_check_signal()
    plan = getattr(schedule_batch, "NextBatchPlan", None)
    if plan is None:
        return None
    running = kwargs["running_batch"] if "running_batch" in kwargs else args[0]
    return plan(batch_to_run=None, running_batch=running)


def _request(original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    if _receiver is None or _host is None:
        return original(scheduler, request, *args, **kwargs)
    refusal = _receiver.replicated.refusal()
    probe = is_health_check_generate_req(request)
    if refusal is not None:
        if not probe:  # an unanswered probe makes /health say 503; SGLang offers no quicker no
            _host.refuse(request, refusal)
        return None
    if probe and _receiver.replicated.gate_closed:
        scheduler.return_health_check_ipcs.append(getattr(request, "http_worker_ipc", None))
        scheduler.maybe_send_health_check_signal()
        return None
    return original(scheduler, request, *args, **kwargs)


def _pull(requests: list[Any] | None, *args: Any, **kwargs: Any) -> list[Any] | None:
    if _receiver is not None and _receiver.mailbox.broken:
        # Better no engine than one whose gate nobody can open: SGLang ends it with this reason in the log.
        raise RuntimeError(f"sglang_recv: the service thread died: {_receiver.mailbox.broken}")
    if _host is not None and requests is not None:
        if not requests and _receiver is not None and _may_rest(_receiver, _host):
            _host.rest()
        requests.extend(_host.pull_injected())
    return requests


def _may_rest(receiver: Receiver, host: SGLangHost) -> bool:
    """True when this loop has nothing to do, and the service thread has."""
    return receiver.replicated.writing or (receiver.mailbox.senders and host.idle())


def _carrier(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    output = io_struct.UpdateWeightsFromIPCReqOutput
    try:
        carrier = wire.decode_carrier(request.zmq_handles)
    except RecvError as error:
        return output(success=False, message=str(error))
    if carrier is None:
        return _stock(output)(original, updater, request)
    if _receiver is None:
        off = ReceiverOffError("a carrier came, but the receiver is off", fix="start with --weight-receiver vmm")
        return output(success=False, message=str(off))
    answer = _receiver.replicated.run(carrier)
    if answer is None:
        return None  # injected: an answer that nobody waits for kills SGLang 0.5.13
    return output(success=answer[0], message=answer[1])


def _stock(output: Callable[..., Any]) -> Callable[..., Any]:
    def hook(original: Callable[..., Any], updater: Any, request: Any) -> Any:
        if _receiver is None:
            return original(updater, request)
        blocked = _receiver.replicated.blocks_stock_update()
        if blocked:
            return output(success=False, message=blocked)
        return _watched(original, updater, request)

    return hook


def _watched(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    assert _receiver is not None

    def done(answer: Any) -> bool:
        # Inside a session of SGLang's own weights may be in a layout that only its end makes usable.
        return bool(answer.success) and getattr(updater, "_session", None) is None

    return _receiver.replicated.stock_update(lambda: original(updater, request), done)


def _disk(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    blocked = _receiver.replicated.blocks_stock_update() if _receiver is not None else None
    if blocked:
        return io_struct.UpdateWeightFromDiskReqOutput(success=False, message=blocked, num_paused_requests=0)
    result = original(updater, request)
    if _receiver is not None and _host is not None:
        # Each rank has a result of its own; what follows must be the same on all of them.
        if _host.vote(result.success):
            _receiver.replicated.reloaded()
        elif not _host.vote(not result.success):
            _receiver.replicated.half_reloaded()
    return result


def _release(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    if _receiver is None or _host is None or not _receiver.replicated.gate_closed:
        return original(updater, request)
    with _host.queues_set_aside():  # SGLang ends the engine when it is not idle, and behind the gate requests wait
        return original(updater, request)


def _resume(_result: Any, updater: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    if _receiver is None or _host is None:
        return
    saver = _host.memory_saver()
    resumed = not request.tags or GPU_MEMORY_TYPE_WEIGHTS in request.tags
    if resumed and saver.enabled and not saver.weights_cpu_backup:
        _receiver.replicated.resumed_without_backup()
