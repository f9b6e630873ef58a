"""The receiver's mode: flag, keyword and environment variable, and the configurations that it refuses.

The environment variable is what every process of the engine reads: SGLang's ServerArgs drops fields that it does not
declare, and launchers such as slime build ServerArgs themselves. Flag and keyword set it for the children of this
process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from sglang_recv.errors import UnsupportedError

ENV: Final = "SGLANG_RECV_WEIGHT_RECEIVER"
#: The first is the default.
MODES: Final = ("off", "auto", "vmm", "nccl")
ENV_PLAN: Final = "SGLANG_RECV_WEIGHT_RECEIVER_PLAN"
#: The first is the default.
PLANS: Final = ("auto", "off")

#: What the user had set before any flag or keyword of this process.
_inherited: Final = {name: os.environ.get(name) for name in (ENV, ENV_PLAN)}


def configured() -> str:
    """The mode this process was started with.

    Raises
    ------
    UnsupportedError
        When the environment variable holds something else.
    """
    return _checked(os.environ.get(ENV) or MODES[0], MODES, ENV)


def configured_plan() -> str:
    """Whether load plans are used, as this process was started.

    Raises
    ------
    UnsupportedError
        When the environment variable holds something else.
    """
    return _checked(os.environ.get(ENV_PLAN) or PLANS[0], PLANS, ENV_PLAN)


def choose(explicit: str | None) -> str:
    """Set the mode for this process and its children.

    ``explicit`` (a flag or keyword) goes before what the user's environment says; without both it is ``off``.
    """
    return _choose(explicit, MODES, ENV, "--weight-receiver")


def choose_plan(explicit: str | None) -> str:
    """Set whether load plans are used, for this process and its children.

    ``explicit`` (a flag or keyword) goes before what the user's environment says; without both it is the default.
    """
    return _choose(explicit, PLANS, ENV_PLAN, "--weight-receiver-plan")


def _choose(explicit: str | None, words: Sequence[str], variable: str, flag: str) -> str:
    # Not from the variable itself: an earlier engine of this process may have set it.
    word = _checked(explicit or _inherited[variable] or words[0], words, flag if explicit else variable)
    os.environ[variable] = word
    return word


def resolve(mode: str) -> str:
    """The mode that runs: ``auto`` becomes ``vmm``, which any engine rank can offer.

    Raises
    ------
    UnsupportedError
        For ``nccl``.
    """
    if mode == "nccl":
        raise UnsupportedError(
            "--weight-receiver nccl: receiving by broadcast is not built yet",
            fix="use --weight-receiver vmm for engines that share a GPU with the trainer, and SGLang's own "
            "update_weights_from_distributed for others",
        )
    return "vmm" if mode == "auto" else mode


def _checked(word: str, words: Sequence[str], source: str) -> str:
    if word not in words:
        raise UnsupportedError(f"{source} is {word!r}", fix=f"use one of {', '.join(words)}")
    return word


def check(mode: str, args: Any) -> None:
    """Refuse configurations of SGLang in which weights cannot be received safely yet.

    ``args`` is a ServerArgs, before or after it is resolved: fields that a version does not have are not in use in
    it, and those that are None are decided later.

    Raises
    ------
    UnsupportedError
        With one line for each option.
    """
    resolve(mode)
    reasons = () if mode == "off" else _refusals(args)
    if reasons:
        raise UnsupportedError(
            f"--weight-receiver {mode} does not work with this configuration",
            fix="leave out the named options, or start with --weight-receiver off",
            details=reasons,
        )


def _refusals(args: Any) -> tuple[str, ...]:
    def get(name: str, default: Any = None) -> Any:
        value = getattr(args, name, default)
        return default if value is None else value

    found = []
    if get("enable_dp_attention"):
        found.append("--enable-dp-attention: control requests and votes do not cover its groups yet")
    elif get("dp_size", 1) > 1:
        found.append(f"--dp-size {args.dp_size}: plain replicas do not run carriers at the same step")
    if get("pp_size", 1) > 1:
        found.append(f"--pp-size {args.pp_size}: its event loop runs batches past the gate")
    if get("nnodes", 1) > 1:
        found.append(f"--nnodes {args.nnodes}: ranks of other nodes cannot reach the leader's sockets yet")
    if get("tokenizer_worker_num", 1) > 1:
        found.append(f"--tokenizer-worker-num {args.tokenizer_worker_num}: SGLang loads no plugins in these workers")
    if get("enable_http2"):
        found.append("--enable-http2: its server process loads no plugins")
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes"):
        found.append("SGLANG_RUST_SERVER: its ingress takes no injected requests yet")
    if get("disaggregation_mode", "null") != "null":
        found.append(f"--disaggregation-mode {args.disaggregation_mode}: its event loops run batches past the gate")
    if get("speculative_algorithm"):
        found.append(f"--speculative-algorithm {args.speculative_algorithm}: draft models are not updated yet")
    if get("enable_lora") or get("lora_paths"):
        found.append("--enable-lora: adapters wrap the parameters that a full update must reach")
    if get("enable_eplb") or get("ep_num_redundant_experts"):
        found.append("--enable-eplb: moved experts would be loaded at their first place")
    if get("weight_cache_mode", "off") != "off":
        found.append(f"--weight-cache-mode {args.weight_cache_mode}: the weights are shared with other engines")
    if get("hicache_storage_backend"):
        found.append(
            f"--hicache-storage-backend {args.hicache_storage_backend}: a flush leaves KV of old weights there"
        )
    if get("enable_lmcache"):
        found.append("--enable-lmcache: a flush leaves KV of old weights there")
    if get("enable_pdmux"):
        found.append("--enable-pdmux: its event loop runs batches past the gate")
    if get("device", "cuda") not in ("cuda", "cpu"):
        found.append(f"--device {args.device}: only cuda and cpu have exportable memory here")
    return tuple(found)
