"""What every kind of staging memory offers, and what the kinds have in common."""

from __future__ import annotations

import enum
import sys
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TypeVar

import torch

from sglang_recv.errors import StagingMemoryError
from sglang_recv.fds import OwnedFd

__all__ = ["BufferBase", "ExportableBuffer", "MemoryKind", "StagingBuffer", "round_up"]

_Self = TypeVar("_Self", bound="BufferBase")


class MemoryKind(str, enum.Enum):
    """How a buffer's memory is made."""

    MEMFD = "memfd"
    CUDA_VMM = "cuda_vmm"

    def __str__(self) -> str:
        return self.value


class StagingBuffer(Protocol):
    """Memory that two processes share; this side may read and write all of it."""

    @property
    def nbytes(self) -> int:
        """Usable size in bytes, a multiple of the device's granularity."""

    @property
    def kind(self) -> MemoryKind:
        """How the memory is made."""

    @property
    def device(self) -> torch.device:
        """Where :meth:`tensor` lives; a CUDA device always with its index."""

    def tensor(self) -> torch.Tensor:
        """A ``uint8`` view of shape ``[nbytes]``. It does not outlive :meth:`close`."""

    def close(self) -> None:
        """Unmap the memory and give up this side's share of it; idempotent, and safe to call from any thread.

        The caller has dropped its views, and the device has finished what it was told to do with them: nothing here
        waits for the device.
        """

    def __enter__(self) -> StagingBuffer: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ExportableBuffer(StagingBuffer, Protocol):
    """The side that allocated the memory, and can hand it to other processes."""

    def export_fd(self) -> OwnedFd:
        """A new fd for the memory; the caller owns it. While any such fd is open, the memory is not freed."""

    def __enter__(self) -> ExportableBuffer: ...


def round_up(nbytes: int, granularity: int) -> int:
    """The smallest multiple of `granularity` that is at least `nbytes`; both in bytes."""
    return -(-nbytes // granularity) * granularity


class BufferBase:
    """Closing, locking and leak warnings of a staging buffer; the kinds add how to view and how to free.

    Parameters
    ----------
    kind, device, nbytes
        See :class:`StagingBuffer`.
    """

    _closed = True  # until __init__ has run: a constructor that fails half way owns nothing

    def __init__(self, kind: MemoryKind, device: torch.device, nbytes: int) -> None:
        self._kind = kind
        self._device = device
        self._nbytes = nbytes
        # Held while memory is freed, so that no other thread can make a view or an fd of half freed memory.
        self._lock = threading.Lock()
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Usable size in bytes."""
        return self._nbytes

    @property
    def kind(self) -> MemoryKind:
        """How the memory is made."""
        return self._kind

    @property
    def device(self) -> torch.device:
        """Where :meth:`tensor` lives."""
        return self._device

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed

    def tensor(self) -> torch.Tensor:
        """A ``uint8`` view of shape ``[nbytes]``.

        Raises
        ------
        StagingMemoryError
            If the buffer is closed, or torch cannot view the memory in place.
        """
        with self._lock:
            self._check_open()
            return self._view()

    def close(self) -> None:
        """Unmap and give up the memory, see :meth:`StagingBuffer.close`.

        A view that is still alive points to nothing afterwards, and reading it ends the process. The memory is given up
        all the same, since a peak that was announced is a promise, but a ``ResourceWarning`` says so.

        Raises
        ------
        StagingMemoryError
            If the driver failed to free something. What could be freed is freed, and closing again does nothing.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            viewed = self._free()
        if viewed:
            warnings.warn(f"{self!r} was closed while a view of it is alive", ResourceWarning, stacklevel=2)

    def _check_open(self) -> None:
        if self._closed:
            raise StagingMemoryError(
                f"this staging buffer of {self._nbytes} bytes on {self._device} is closed",
                fix="take what you need from the buffer before close(), or allocate a new one",
            )

    def _view(self) -> torch.Tensor:
        raise NotImplementedError

    def _free(self) -> bool:
        """Give up everything, and say whether a view is still alive."""
        raise NotImplementedError

    def _collect(self) -> None:
        """Give up what an unclosed buffer owns. No view is alive here that the kind has not provided for."""
        self._free()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At interpreter exit the process's memory goes anyway, and the driver may be gone already; so may this module's
        # names, which is why the function is bound here.
        if self._closed or finalizing():
            return
        message = f"unclosed {self!r}"
        self._closed = True
        try:
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)
        finally:  # where warnings are errors, too
            self._collect()

    def __repr__(self) -> str:
        state = "closed " if self._closed else ""
        return f"<{state}{type(self).__name__} {self._nbytes} bytes on {self._device}>"
