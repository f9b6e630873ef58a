"""torch's own allocator in memory of ours.

It asks for memory by a C function while it holds its lock, and a function written in Python also needs the
interpreter's lock: a thread that frees a tensor has these two the other way round. So a pool gives torch all its memory
when it is made, and torch divides it from then on; what is freed it uses again. It asks again only for what does not
fit.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch

from sglang_recv.errors import SessionStateError, UnsupportedError

#: torch takes tensors of up to 1 MiB out of segments of 2 MiB, and all others out of those of 20 MiB and more
#: (c10/cuda/CUDACachingAllocator.cpp: kSmallSize, kSmallBuffer, kLargeBuffer).
_SMALL: Final = 1 << 20
SMALL_SEGMENT: Final = 2 << 20
LARGE_SEGMENT: Final = 20 << 20


class TorchPool:
    """``torch.cuda.MemPool`` in given memory.

    Parameters
    ----------
    device
        A GPU.
    span
        All addresses of the memory.
    take
        Gives the address of so many bytes of it, or 0.
    large
        Bytes for tensors of more than 1 MiB, all in one segment.
    small
        Segments for others.

    Raises
    ------
    UnsupportedError
        When torch has no such pools, or does not divide this one.
    """

    def __init__(self, device: torch.device, span: range, take: Callable[[int], int], large: int, small: int) -> None:
        # First of all attributes, and so the first to go: torch may need the others for it.
        self._pool: Any = None
        self._device = device
        make = getattr(torch._C, "_cuda_customAllocator", None)
        by_thread = hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool")
        if make is None or not by_thread or not inspect.signature(torch.cuda.memory_snapshot).parameters:
            raise UnsupportedError(
                f"torch {torch.__version__} has no memory pools for single threads with an allocator of one's own",
                fix="use torch 2.8 or newer",
            )
        kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self._take: Any = kind(lambda size, _device, _stream: take(size))
        # Segments are given back when torch drops the pool, maybe on a thread without the interpreter's lock. There is
        # nothing to do then, which any C function without arguments does.
        nothing = ctypes.cast(ctypes.CDLL(None).getppid, ctypes.c_void_p).value
        self._allocator = make(ctypes.cast(self._take, ctypes.c_void_p).value, nothing)
        try:
            with torch.cuda.device(device):  # where torch registers it
                self._pool = torch.cuda.MemPool(self._allocator)
            sizes = [large] + [_SMALL] * (small * (SMALL_SEGMENT // _SMALL))
            with self.use():
                made = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
                del made
                probes = [torch.empty(size, dtype=torch.uint8, device=device) for size in (512, 2 * _SMALL)]
            why = "" if all(probe.data_ptr() in span for probe in probes) else "it allocates outside of the pool"
            del probes
        except RuntimeError as error:  # torch.OutOfMemoryError, too
            why = f"{type(error).__name__}: {error}"
        if why:
            raise UnsupportedError(
                f"torch does not divide a memory pool: {why}",
                fix="leave expandable_segments, max_split_size_mb and roundup_power2_divisions out of "
                "PYTORCH_CUDA_ALLOC_CONF, and set_per_process_memory_fraction room for the pool; make it outside of "
                "other pools' use()",
            )

    def use(self) -> contextlib.AbstractContextManager[None]:
        """What this thread allocates inside lies in the pool."""
        found: contextlib.AbstractContextManager[None] = torch.cuda.use_mem_pool(self._pool, self._device)
        return found

    def close(self) -> bool:
        """Take the memory from torch; False when torch keeps it.

        Raises
        ------
        SessionStateError
            When tensors are still in it, or a graph is captured.
        """
        if torch.cuda.is_current_stream_capturing():
            raise SessionStateError("a graph is captured on the current stream", fix="close pools before or after that")
        held = sum(segment["allocated_size"] for segment in _segments(self._pool.id))
        if held:
            raise SessionStateError(
                f"tensors of {held} bytes are still in this pool", fix="drop every tensor that was made in it first"
            )
        # Kernels may still use what was freed.
        torch.cuda.synchronize(self._device)
        number, self._pool = self._pool.id, None
        if _segments(number):
            torch.cuda.empty_cache()  # older versions of torch leave it to the next one that asks
        return not _segments(number)


def _segments(number: tuple[int, int]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = torch.cuda.memory_snapshot(number)  # type: ignore[no-untyped-call]
    return found
