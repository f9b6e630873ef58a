"""Names of hosts and devices that mean the same in every process.

Ordinals and PIDs do not: each process has its own ``CUDA_VISIBLE_DEVICES`` and perhaps its own PID namespace.
"""

from __future__ import annotations

import functools
import uuid
from pathlib import Path
from typing import cast

import torch

from sglang_recv.errors import UnsupportedError

__all__ = ["boot_id", "device_id"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def boot_id() -> str:
    """The running kernel's boot id: the same in all containers of a host, and different on every other host.

    Raises
    ------
    UnsupportedError
        If the kernel does not tell it.
    """
    try:
        return str(uuid.UUID(_BOOT_ID.read_text(encoding="ascii").strip()))
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"the host's boot id could not be read from {_BOOT_ID}: {error}",
            fix="run on Linux, with /proc mounted and readable by this process",
        ) from error


def device_id(device: torch.device, rank: int = 0) -> str:
    """The name of a device on the wire.

    Parameters
    ----------
    device
        A CUDA device, or the CPU. A CUDA device without an index means torch's current one.
    rank
        Tells apart several engine ranks on one CPU; a CUDA device ignores it.

    Returns
    -------
    str
        ``gpu:<uuid>``, or ``cpu:<boot id>:<rank>``.

    Raises
    ------
    UnsupportedError
        If the device is of another type, absent, or torch does not tell its uuid.
    """
    if device.type == "cpu":
        return f"cpu:{boot_id()}:{rank}"
    if device.type != "cuda":
        raise UnsupportedError(f"device {device} is of type {device.type!r}", fix="use a CUDA device or the CPU")
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"device {device} was asked for, but torch {torch.__version__} finds no CUDA device",
            fix="install a CUDA build of torch, and check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    # torch's annotations say int, but the index of torch.device("cuda") is None.
    index = cast("int | None", device.index)
    ordinal = torch.cuda.current_device() if index is None else index
    count = torch.cuda.device_count()
    if ordinal >= count:
        raise UnsupportedError(
            f"device {device} was asked for, but this process sees {count} CUDA devices",
            fix="check CUDA_VISIBLE_DEVICES of this process",
        )
    found = getattr(torch.cuda.get_device_properties(ordinal), "uuid", None)
    if found is None:
        raise UnsupportedError(f"torch {torch.__version__} does not tell GPU uuids", fix="use torch 2.5 or newer")
    return f"gpu:{str(found).lower()}"
