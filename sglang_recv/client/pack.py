"""The pack step: tensors of a bucket, wherever they are, into a staging buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from sglang_recv.copies import Addresses, Copier, Places, TorchCopier, copier, table
from sglang_recv.manifest import Views
from sglang_recv.memory import ExportableBuffer, allocate

#: Bytes on a GPU that tables travel through. Memory of our own, since a trainer under the memory saver may have paused
#: all that its allocator holds.
TABLE_BYTES: Final = 2 << 20


class Tables:
    """Kernels for parts of one bucket, made when they are first needed. Kept between sessions, in host memory.

    Parameters
    ----------
    offsets, sizes
        Where each tensor goes in the buffer, and its bytes. int64.
    """

    def __init__(self, offsets: np.ndarray, sizes: np.ndarray) -> None:
        self._offsets = offsets
        self._sizes = sizes
        self._made: dict[tuple[torch.device, int, int], Copier | None] = {}

    def targets(self, buffer: Views, first: int, last: int) -> Places:
        """Where tensors ``first`` to ``last`` - 1 go."""
        return Places([buffer.buffer], np.zeros(last - first, np.int64), self._offsets[first:last])

    def get(self, device: torch.device, first: int, last: int) -> Copier | None:
        """A kernel that packs tensors ``first`` to ``last`` - 1, which are contiguous; None without triton."""
        key = device, first, last
        if key not in self._made:
            rows = [(i, 0, i, 0, size, 1, 0, 0, 1, 0, 0) for i, size in enumerate(self._sizes[first:last].tolist())]
            made = copier(table(rows), device)
            self._made[key] = None if isinstance(made, TorchCopier) else made
        return self._made[key]


class Packer:
    """Copies tensors into buffers on one device, on the current stream.

    Parameters
    ----------
    device
        The buffers' device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started: list[torch.cuda.Event] = []
        self._scratch: ExportableBuffer | None = None
        self._used = 0

    @property
    def scratch_bytes(self) -> int:
        """Memory of its own on the device."""
        return self._scratch.nbytes if self._scratch is not None else 0

    @torch.no_grad()
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
        # Views of staging are kept between calls, so none may be made in the caller's inference mode.
        with torch.inference_mode(False):
            self._copy(buffer, tensors)

    def pack_again(self, buffer: Views, tables: Tables, first: int, tensors: Sequence[torch.Tensor]) -> bool:
        """As :meth:`pack`, for tensors ``first`` and following of a known bucket, by one kernel. False when they are
        not as a kernel needs them: on this device, contiguous, and with no operation pending on their bytes."""
        if self._device.type != "cuda":
            return False
        addresses = []
        for tensor in tensors:
            if tensor.get_device() != self._device.index or not tensor.is_contiguous():
                return False
            if tensor.is_neg() or tensor.is_conj():
                return False
            addresses.append(tensor.data_ptr())
        last = first + len(addresses)
        kernel = tables.get(self._device, first, last)
        if kernel is None:
            return False
        with torch.inference_mode(False):
            kernel.run(Addresses(np.array(addresses, np.int64)), tables.targets(buffer, first, last), self._upload)
            self._record()
        return True

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
            self._record()

    def _record(self) -> None:
        if self._device.type == "cuda":
            # Of the stream that was current here: the caller may wait under another one.
            self._started.append(torch.cuda.current_stream(self._device).record_event())

    def _upload(self, pinned: torch.Tensor) -> torch.Tensor:
        if pinned.nbytes > TABLE_BYTES:  # a slot full of tensors of a few bytes
            return pinned.to(self._device, non_blocking=True)
        if self._scratch is None:
            self._scratch = allocate(self._device, TABLE_BYTES)
        if self._used + pinned.nbytes > self._scratch.nbytes:
            self.wait()  # until no kernel needs what is there
        place = self._scratch.tensor()[self._used : self._used + pinned.nbytes].view(torch.int64)
        self._used += -(-pinned.nbytes // 256) * 256
        return place.copy_(pinned, non_blocking=True)

    def wait(self) -> None:
        """Return once the device has done every copy that was started."""
        for event in self._started:
            event.synchronize()
        self._started.clear()
        self._used = 0

    def close(self) -> None:
        """Free what it has on the device."""
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
