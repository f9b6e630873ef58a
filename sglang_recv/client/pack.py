"""The pack step: tensors of a bucket, wherever they are, into a staging buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from sglang_recv.client.pool import look
from sglang_recv.copies import Addresses, Copier, Places, TorchCopier, copier, table
from sglang_recv.manifest import Views
from sglang_recv.memory import ExportableBuffer, allocate

#: Bytes on a GPU that tables travel through. Memory of our own, since a trainer under the memory saver may have paused
#: all that its allocator holds.
TABLE_BYTES: Final = 2 << 20


#: Kernels are kept for so many times the tensors of their bucket, on each device: whoever sends them in the same parts
#: every time needs each once.
_KEPT: Final = 4

#: Up to so many tensors torch's copies cost no more than a kernel with its table.
_FEW: Final = 4

#: Reached when the device has done a copy; None when that is so already.
Pending = torch.cuda.Event | None


class Prepared(NamedTuple):
    """What a kernel needs to pack tensors, and where they are."""

    kernel: Copier
    addresses: np.ndarray


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
            parts = [part for part in self._made if part[0] == device]
            if sum(end - start for _, start, end in parts) + last - first > _KEPT * len(self._sizes):
                for part in parts:  # the parts vary: those that come again are made again
                    del self._made[part]
            rows = [(i, 0, i, 0, size, 1, 0, 0, 1, 0, 0) for i, size in enumerate(self._sizes[first:last].tolist())]
            made = copier(table(rows), device)
            self._made[key] = None if isinstance(made, TorchCopier) else made
        return self._made[key]


class Packer:
    """Copies tensors into buffers on one device, on the current stream.

    What is started is ordered behind the stream's work so far, and later work of the stream behind it: a source on the
    same device may be changed by it at once.

    Parameters
    ----------
    device
        The buffers' device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scratch: ExportableBuffer | None = None
        #: Where the next table goes in the scratch; start, end and readers of those before it, oldest first.
        self._next = 0
        self._tables: list[tuple[int, int, Pending]] = []
        self._newest = (0, 0)

    @property
    def scratch_bytes(self) -> int:
        """Memory of its own on the device."""
        return self._scratch.nbytes if self._scratch is not None else 0

    @torch.no_grad()
    def pack(self, buffer: Views, tensors: Sequence[tuple[int, torch.Tensor]]) -> Pending:
        """Start copying tensors to their offsets, in bytes, in ``buffer``."""
        # Views of staging are kept between calls, so none may be made in the caller's inference mode.
        with torch.inference_mode(False):
            targets, sources, on_device = [], [], self._device.type == "cuda"
            for offset, tensor in tensors:
                if tensor.numel():
                    targets.append(buffer.at(offset, tensor.dtype, tuple(tensor.shape)))
                    sources.append(tensor.detach())
                    on_device = on_device and tensor.is_cuda
            if not targets:
                return None
            # Only between device memories is a copy ordered behind later reuse of the source; from or to the host a
            # non-blocking copy may still run when the caller overwrites it.
            torch._foreach_copy_(targets, sources, non_blocking=on_device)
            return self.event()

    def pack_one(self, buffer: Views, offset: int, tensor: torch.Tensor) -> torch.cuda.Stream | None:
        """Start copying one tensor. The stream that does it, which :meth:`pack` would have recorded an event on: where
        there are thousands, one for all of them does. None when it is done."""
        if not tensor.numel():
            return None
        on_device = self._device.type == "cuda"
        with torch.inference_mode(False):
            target = buffer.at(offset, tensor.dtype, tuple(tensor.shape))
            target.copy_(tensor.detach(), non_blocking=on_device and tensor.is_cuda)
        return torch.cuda.current_stream(self._device) if on_device else None

    def prepare(
        self, tables: Tables, first: int, tensors: Sequence[torch.Tensor], addresses: np.ndarray | None = None
    ) -> Prepared | None:
        """Tensors ``first`` and following of a known bucket for :meth:`pack_prepared`; None when a kernel cannot pack
        them, or need not.

        A kernel takes what is on this device, contiguous, and has no operation pending on its bytes. Where all but the
        first is known already, ``addresses`` says where they are, int64.
        """
        if self._device.type != "cuda" or len(tensors) < _FEW:
            return None
        kernel = tables.get(self._device, first, first + len(tensors))
        if kernel is None or set(map(torch.Tensor.get_device, tensors)) != {self._device.index}:
            return None
        if addresses is None:
            seen = look(tensors)
            if seen is None or not seen[1].all():
                return None
            addresses = seen[0]
        return Prepared(kernel, addresses)

    def pack_prepared(self, buffer: Views, tables: Tables, first: int, prepared: Prepared) -> Pending:
        """Start copying by one kernel."""
        with torch.inference_mode(False):
            targets = tables.targets(buffer, first, first + len(prepared.addresses))
            self._newest = (0, 0)
            prepared.kernel.run(Addresses(prepared.addresses), targets, self._upload)
            event = self.event()
            if self._newest[1]:
                self._tables.append((*self._newest, event))
            return event

    def event(self) -> Pending:
        """Reached once the device has done what the current stream holds."""
        if self._device.type != "cuda":
            return None
        # Of the stream that was current here: the caller may wait under another one.
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def _upload(self, pinned: torch.Tensor) -> torch.Tensor:
        if pinned.nbytes > TABLE_BYTES:  # a slot full of tensors of a few bytes
            return pinned.to(self._device, non_blocking=True)
        if self._scratch is None:
            self._scratch = allocate(self._device, TABLE_BYTES)
        if self._next + pinned.nbytes > self._scratch.nbytes:
            self._next = 0
        start, end = self._next, self._next + pinned.nbytes
        clashes = [number for number, (first, last, _) in enumerate(self._tables) if first < end and start < last]
        for _, _, reader in self._tables[: max(clashes, default=-1) + 1]:
            if reader is not None:
                reader.synchronize()
        del self._tables[: max(clashes, default=-1) + 1]
        self._newest = start, end
        self._next = -(-end // 256) * 256
        return self._scratch.tensor()[start:end].view(torch.int64).copy_(pinned, non_blocking=True)

    def close(self) -> None:
        """Free what it has on the device."""
        if self._scratch is not None:
            for _, _, reader in self._tables:
                if reader is not None:
                    reader.synchronize()
            self._tables.clear()
            self._scratch.close()
            self._scratch = None
