"""Memory that one process allocates and another maps, passed between them as a file descriptor.

On CUDA it comes from the driver's virtual memory calls (``cuda_vmm``), on the CPU from a sealed memfd (``memfd``).
Neither goes through torch's allocator, so neither is subject to what torch_memory_saver does to that.
"""

from __future__ import annotations

import errno
import os
from typing import cast

import torch

from sglang_recv.errors import BadBufferError, RecvError, StagingMemoryError, UnsupportedError
from sglang_recv.fds import OwnedFd
from sglang_recv.memory import cuda_vmm, memfd
from sglang_recv.memory.base import ExportableBuffer, MemoryKind, StagingBuffer

__all__ = ["ExportableBuffer", "MemoryKind", "StagingBuffer", "allocate", "granularity", "import_buffer", "probe"]

_TOO_LARGE = 1 << 63
"""Sizes from here on do not fit the system's and the driver's calls, which would raise errors of their own."""


def granularity(device: torch.device) -> int:
    """The unit of allocation on `device`, in bytes: buffer sizes are multiples of it.

    Raises
    ------
    UnsupportedError
        If the device is neither CUDA nor the CPU, or has no memory that can be exported.
    """
    device = _resolve(device)
    return memfd.granularity() if device.type == "cpu" else cuda_vmm.granularity(device)


def allocate(device: torch.device, nbytes: int) -> ExportableBuffer:
    """Allocate a buffer of at least `nbytes` bytes that other processes can map.

    Parameters
    ----------
    device
        Where the memory lives. A CUDA device without an index means the calling thread's current one.
    nbytes
        Wanted size in bytes, rounded up to :func:`granularity`; the result's ``nbytes`` is what to announce.

    Raises
    ------
    StagingMemoryError
        If `nbytes` is below 1, or there is not that much memory.
    UnsupportedError
        If the device has no memory that can be exported.
    """
    device = _resolve(device)
    if not 1 <= nbytes < _TOO_LARGE:
        raise StagingMemoryError(
            f"a staging buffer of {nbytes} bytes was asked for; the least is 1, and the most what {device} has",
            fix="raise slot_bytes to at least 1" if nbytes < 1 else "lower slot_bytes or slots",
        )
    return memfd.allocate(nbytes) if device.type == "cpu" else cuda_vmm.allocate(device, nbytes)


def import_buffer(device: torch.device, fd: OwnedFd, nbytes: int) -> StagingBuffer:
    """Map a buffer that another process exported.

    Parameters
    ----------
    device
        Where the memory must live, in this process's terms.
    fd
        What ``export_fd()`` returned over there. It is closed here, on success and on failure.
    nbytes
        The exporter's ``nbytes``, in bytes.

    Raises
    ------
    BadBufferError
        If the fd is not such memory, lives on another device, or is smaller than announced.
    StagingMemoryError
        If the memory cannot be mapped.
    UnsupportedError
        If the device has no memory that can be exported.
    """
    with fd:
        device = _resolve(device)
        try:
            os.fstat(fd.fileno())
        except OSError as error:
            if error.errno == errno.EBADF:
                fd.detach()  # nothing to close, and closing would only hide the error below
            raise BadBufferError(
                f"the fd received for a staging buffer of {nbytes} bytes cannot be used: {error}",
                fix="keep the received fd open until the buffer is imported",
            ) from error
        unit = granularity(device)
        if not 1 <= nbytes < _TOO_LARGE or nbytes % unit:
            raise BadBufferError(
                f"a staging buffer of {nbytes} bytes was announced, but {device} has units of {unit} bytes",
                fix="announce the buffer's nbytes as allocate() returned it",
            )
        if device.type == "cpu":
            return memfd.import_buffer(fd.fileno(), nbytes)
        return cuda_vmm.import_buffer(device, fd.fileno(), nbytes)


def probe(device: torch.device) -> str | None:
    """Allocate and export the smallest buffer on `device`: None when that works, else the reason as a sentence."""
    try:
        with allocate(device, 1) as buffer, buffer.export_fd():
            return None
    except RecvError as error:
        return error.message


def _resolve(device: torch.device) -> torch.device:
    """Check the device's type, and give a CUDA device its index."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise UnsupportedError(
            f"device {device} is of type {device.type!r}, which has no exportable memory here",
            fix="use a CUDA device or the CPU",
        )
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"device {device} was asked for, but torch {torch.__version__} finds no CUDA device",
            fix="install a CUDA build of torch, and check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    # torch's annotations say int, but the index of torch.device("cuda") is None.
    index = cast("int | None", device.index)
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)
