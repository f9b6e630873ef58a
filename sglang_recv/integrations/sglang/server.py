"""Hooks in the engine's main process: flag, keyword, commit, and the check that every rank has a receiver."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_recv import wire
from sglang_recv.errors import PluginMissingError, RecvError
from sglang_recv.integrations.sglang import mode

logger = logging.getLogger(__name__)

_ARGS = "sglang.srt.server_args.ServerArgs"

_registered = False


def register_flag() -> None:
    """Register the hooks that make ``--weight-receiver`` a flag of SGLang's command line."""
    HookRegistry.register(f"{_ARGS}.add_cli_args", _add_flag, HookType.AROUND)
    HookRegistry.register(f"{_ARGS}.from_cli_args", _from_cli, HookType.AROUND)


def register() -> None:
    """Register the hooks on what the main process runs; imports SGLang's engine."""
    global _registered
    if _registered:
        return
    _registered = True
    from sglang.srt.entrypoints.engine import Engine

    Engine.server_args_class = staticmethod(_with_keyword(Engine.server_args_class))
    HookRegistry.register("sglang.srt.entrypoints.engine._wait_for_scheduler_ready", _check_ranks, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.update_weights_from_ipc",
        _commit,
        HookType.AROUND,
    )


def _add_flag(original: Callable[..., Any], parser: Any) -> Any:
    result = original(parser)
    # On the parser and not in a group of its own: slime wraps parser.add_argument to prefix flags.
    parser.add_argument(
        "--weight-receiver",
        choices=mode.MODES,
        default=None,
        dest="weight_receiver",
        help="Accept weight updates by sglang_recv: as CUDA VMM fd handles from a trainer on the same GPU (vmm), by "
        f"broadcast (nccl), whatever fits (auto), or not at all (off, the default). Environment: {mode.ENV}.",
    )
    parser.add_argument(
        "--weight-receiver-plan",
        choices=mode.PLANS,
        default=None,
        dest="weight_receiver_plan",
        help="Repeat the copies that the model's loader was seen to make, once a proof on random bytes has shown that "
        "they are all it does (auto, the default), or call the loader in every update (off). "
        f"Environment: {mode.ENV_PLAN}.",
    )
    return result


def _from_cli(original: Callable[..., Any], cls: Any, args: Any) -> Any:
    chosen = mode.choose(getattr(args, "weight_receiver", None))
    mode.choose_plan(getattr(args, "weight_receiver_plan", None))
    server_args = original(cls, args)
    mode.check(chosen, server_args)  # here already, since the schedulers would say it after a minute of loading
    if chosen != "off":
        # At this point this is the process that will run the server, so its modules may be imported.
        register()
        HookRegistry.apply_hooks()
    return server_args


def _with_keyword(server_args_class: Any) -> Callable[..., Any]:
    """``sglang.Engine(weight_receiver=...)``: Engine makes its ServerArgs from the keywords by this class attribute."""

    def make(
        *args: Any, weight_receiver: str | None = None, weight_receiver_plan: str | None = None, **kwargs: Any
    ) -> Any:
        chosen = mode.choose(weight_receiver)
        mode.choose_plan(weight_receiver_plan)
        made = server_args_class(*args, **kwargs)
        mode.check(chosen, made)
        return made

    return make


def _check_ranks(infos: list[dict[str, Any]], readers: Any, processes: list[Any]) -> None:
    """SGLang logs and ignores a plugin that fails, so the parent checks that its children really have a receiver."""
    if mode.configured() == "off" or all(info.get(wire.INFO_KEY, {}).get("ranks") for info in infos):
        return
    for process in processes:
        process.kill()
    raise PluginMissingError(
        f"the engine was started with a weight receiver ({mode.configured()}), but a scheduler process has none",
        fix="look for 'sglang_recv' in the log above: SGLANG_PLUGINS may leave it out, or a hook failed to apply",
    )


async def _commit(original: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> tuple[bool, str]:
    """Send a commit carrier without SGLang's model_update_lock: the lock waits for running requests, and requests that
    came after the first write wait for the commit. The gate already guarantees that nothing runs."""
    if wire.CARRIER_KEY not in obj.zmq_handles:
        answer: tuple[bool, str] = await original(manager, obj, request)
        return answer
    from sglang.srt.managers.communicator import FanOutCommunicator

    try:
        carrier = wire.decode_carrier(obj.zmq_handles)
    except RecvError as error:
        return False, str(error)
    if not isinstance(carrier, wire.CommitCarrier):
        # The other carriers have no answer, so whoever waited for one would block every later commit.
        return False, f"{type(carrier).__name__} is not for this route; only a commit is"
    manager.auto_create_handle_loop()
    success, message = FanOutCommunicator.merge_results(await manager.update_weights_from_ipc_communicator(obj))
    if success:
        manager._update_weight_version_if_provided(carrier.version)
        processor = getattr(manager, "mm_processor", None)
        if processor is not None and hasattr(processor, "clear_preprocess_cache"):
            processor.clear_preprocess_cache()
    return success, message
