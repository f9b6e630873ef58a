"""Which way a slime run sends its weights: ``--update-weight-transport``, made definite.

slime ignores ``nccl`` where trainer and engine share a GPU. Here a choice that cannot work is refused at start, before
a model is loaded.
"""

from __future__ import annotations

import argparse
from typing import Final

from sglang_recv.errors import UnsupportedError

__all__ = ["TRANSPORTS", "resolve_transport"]

#: What ``--update-weight-transport`` takes; the first is the default.
TRANSPORTS: Final = ("auto", "nccl", "vmm", "ipc", "disk")


def resolve_transport(args: argparse.Namespace) -> str:
    """Return the transport that this run uses, or refuse one that cannot reach its engines.

    Parameters
    ----------
    args
        slime's arguments. Read are ``update_weight_transport``, ``update_weight_mode`` and ``colocate``, which slime
        itself changes while it validates: call this afterwards.

    Returns
    -------
    str
        ``"vmm"``, ``"nccl"``, ``"ipc"`` or ``"disk"``. Resolving the result again gives the result.

    Raises
    ------
    UnsupportedError
        The value is unknown, or does not go with ``--colocate`` or with the mode.
    """
    transport: str = args.update_weight_transport
    if transport not in TRANSPORTS:
        raise UnsupportedError(
            f"--update-weight-transport is {transport!r}, which is none of {', '.join(TRANSPORTS)}",
            fix="use one of these; auto chooses by --colocate",
        )
    if transport == "disk":
        return "disk"
    if args.update_weight_mode == "delta":
        if transport in ("vmm", "ipc"):
            raise UnsupportedError(
                f"--update-weight-transport {transport} sends every parameter, and --update-weight-mode is delta",
                fix="use --update-weight-mode full, or the transport that slime's delta mode asks for",
            )
        # Whether delta goes over NCCL, and beside --colocate, differs between versions of slime: it says so itself.
        return "nccl"
    if args.colocate:
        if transport == "nccl":
            raise UnsupportedError(
                "--update-weight-transport nccl cannot reach an engine on the trainer's own GPU (--colocate): NCCL "
                'refuses two ranks on one device ("Duplicate GPU detected")',
                fix="use vmm or auto, or slime's own way, ipc: they keep its NCCL broadcast for the remote engines of "
                "the run; or disk",
            )
        return "vmm" if transport == "auto" else transport
    if transport in ("vmm", "ipc"):
        what = "file descriptors" if transport == "vmm" else "CUDA IPC handles"
        raise UnsupportedError(
            f"--update-weight-transport {transport} passes {what}, which reach only engines on the trainer's own GPU, "
            "and --colocate is off",
            fix="use nccl, auto or disk",
        )
    return "nccl"
