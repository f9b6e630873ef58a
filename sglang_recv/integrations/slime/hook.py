"""The way into slime that changes no source of it: its own hook for custom initialisation."""

from __future__ import annotations

import importlib
import logging
import os
from argparse import Namespace
from typing import Any, Final

from sglang_recv.errors import UnsupportedError

logger = logging.getLogger(__name__)

#: Environment: the user's own init function, ``package.module.function``, since slime's flag takes only one.
ENV_CHAIN: Final = "SGLANG_RECV_CHAIN_INIT"
_STOCK: Final = "UpdateWeightFromTensor"


def install(args: Namespace) -> None:
    """Put our updater in the place of slime's for colocated engines; for ``--custom-megatron-init-path``.

    slime calls it in every train rank before it chooses its updater (slime/backends/megatron_utils/initialize.py). A
    function named in ``SGLANG_RECV_CHAIN_INIT`` is called first, with the same argument.

    Raises
    ------
    UnsupportedError
        When another transport was configured that this would replace, or when slime has no such updater.
    """
    chained = os.environ.get(ENV_CHAIN, "")
    if chained:
        _function(chained)(args)
    transport = getattr(args, "update_weight_transport", "nccl")
    if not args.colocate:
        logger.warning(
            "sglang_recv: the run is not colocated, so slime's own transport (%s) is used: fds reach only engines on "
            "the trainer's own GPUs",
            transport,
        )
        return
    if transport == "disk":
        raise UnsupportedError(
            "--update-weight-transport disk, and sglang_recv as --custom-megatron-init-path",
            fix="leave out one of them: the hook replaces the way to colocated engines",
        )
    if transport == "nccl":
        logger.warning(
            "sglang_recv: --update-weight-transport nccl speaks of engines on other GPUs; NCCL refuses two ranks on "
            "one device, so colocated engines get their weights as fds"
        )
    actor: Any = importlib.import_module("slime.backends.megatron_utils.actor")
    if not hasattr(actor, _STOCK):
        raise UnsupportedError(
            f"this slime's {actor.__name__} has no {_STOCK} to replace",
            fix="use a slime that patches/README.md lists, or apply the patch that `sglang-recv patch --check` names",
        )
    from sglang_recv.integrations.slime.updater import UpdateWeightFromVmm

    setattr(actor, _STOCK, UpdateWeightFromVmm)


def _function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnsupportedError(
            f"{ENV_CHAIN} is {path!r}: {error}",
            fix="name a function as package.module.function that train ranks can import",
        ) from error
