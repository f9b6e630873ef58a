"""The pack step: tensors of a bucket, wherever they are, into a staging buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Packer(Protocol):
    """Copies tensors into one buffer. One packer per staging buffer's device."""

    def pack(self, buffer: torch.Tensor, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Start copying.

        Parameters
        ----------
        buffer
            uint8, shape [bytes].
        tensors
            Offsets in bytes into ``buffer``, and what goes there; the copies have been queued behind the current
            stream's work when this returns, so a source may be reused by later work on that stream.
        """

    def wait(self) -> None:
        """Return once the device has done every copy that was started."""


class TorchPacker:
    """Copies by torch, on the current stream.

    Parameters
    ----------
    device
        The buffer's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @torch.no_grad()
    def pack(self, buffer: torch.Tensor, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See :meth:`Packer.pack`."""
        for offset, tensor in tensors:
            if tensor.numel():
                size = tensor.numel() * tensor.element_size()
                target = buffer[offset : offset + size].view(tensor.dtype).view(tensor.shape)
                # Only between device memories is a copy ordered behind later reuse of the source; from or to the host a
                # non-blocking copy may still run when the caller overwrites it.
                target.copy_(tensor.detach(), non_blocking=tensor.is_cuda and target.is_cuda)

    def wait(self) -> None:
        """See :meth:`Packer.wait`."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
