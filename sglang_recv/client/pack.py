"""The pack step: tensors of a bucket, wherever they are, into a staging buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang_recv.manifest import Views


class Packer(Protocol):
    """Copies tensors into one buffer. One packer per staging buffer's device."""

    def pack(self, buffer: Views, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Start copying.

        Parameters
        ----------
        buffer
            The staging buffer.
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
        self._started: list[torch.cuda.Event] = []

    @torch.no_grad()
    def pack(self, buffer: Views, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See :meth:`Packer.pack`."""
        # Views of staging are kept between calls, so none may be made in the caller's inference mode.
        with torch.inference_mode(False):
            self._copy(buffer, tensors)

    def _copy(self, buffer: Views, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        targets, sources, on_device = [], [], self._device.type == "cuda"
        for offset, tensor in tensors:
            if tensor.numel():
                targets.append(buffer.at(offset, tensor.dtype, tuple(tensor.shape)))
                sources.append(tensor.detach())
                on_device = on_device and tensor.is_cuda
        if targets:
            # Only between device memories is a copy ordered behind later reuse of the source; from or to the host a
            # non-blocking copy may still run when the caller overwrites it.
            torch._foreach_copy_(targets, sources, non_blocking=on_device)
            if self._device.type == "cuda":
                # Of the stream that was current here: the caller may wait under another one.
                self._started.append(torch.cuda.current_stream(self._device).record_event())

    def wait(self) -> None:
        """See :meth:`Packer.wait`."""
        for event in self._started:
            event.synchronize()
        self._started.clear()
