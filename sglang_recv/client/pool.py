"""Memory in which a trainer allocates tensors that ranks read where they are: sent without a pack.

On a GPU torch's own allocator works in it (``torch.cuda.MemPool``). It asks for memory by a C function while it holds
its lock, and a function written in Python also needs the interpreter's lock: a thread that frees a tensor has these two
the other way round. So a pool takes all its memory when it is made, in the one call that torch cannot avoid, and torch
divides it from then on; what is freed it uses again.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from sglang_recv import memory
from sglang_recv.errors import SessionStateError, StagingMemoryError, UnsupportedError
from sglang_recv.manifest import ALIGNMENT
from sglang_recv.memory import ExportableBuffer

#: torch takes tensors of up to 1 MiB out of segments of 2 MiB, and all others out of those of 20 MiB and more
#: (c10/cuda/CUDACachingAllocator.cpp: kSmallSize, kSmallBuffer, kLargeBuffer).
_SMALL: Final = 1 << 20
_SMALL_SEGMENT: Final = 2 << 20
_LARGE_SEGMENT: Final = 20 << 20
#: Of a pool's bytes, so many are for small tensors: a 64th, within bounds.
_SMALL_SHARE: Final = 64
_SMALL_BOUNDS: Final = (8 << 20, 64 << 20)

#: Types whose tensors are what they seem. Subclasses may stand for other bytes.
PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter))

_numbers = itertools.count(1)
_pools: dict[int, ExportablePool] = {}
_pools_lock = threading.Lock()


class ExportablePool:
    """Made by :func:`exportable_pool`; a context manager that closes itself.

    Parameters
    ----------
    device
        Where its memory is.
    nbytes
        Bytes for tensors.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        #: Which pool of this process it is; counted from 1.
        self.number = next(_numbers)
        self._taken = 0
        small = 0
        if device.type == "cuda":
            small = _round_up(min(max(nbytes // _SMALL_SHARE, _SMALL_BOUNDS[0]), _SMALL_BOUNDS[1]), _SMALL_SEGMENT)
            nbytes = _round_up(max(nbytes, _LARGE_SEGMENT), _SMALL_SEGMENT)
        self.buffer: ExportableBuffer = memory.allocate(device, nbytes + small)
        self._whole = self.buffer.tensor()
        self.device = self.buffer.device
        self.start = self._whole.data_ptr()
        self._torch: _TorchPool | None = None
        if device.type == "cuda":
            try:
                self._torch = _TorchPool(self, nbytes, small // _SMALL_SEGMENT)
            except BaseException:
                del self._whole
                self.buffer.close()
                raise
        with _pools_lock:
            _pools[self.number] = self

    @property
    def nbytes(self) -> int:
        """Bytes that ranks map."""
        return self.buffer.nbytes

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """What the calling thread allocates inside by torch, on the pool's device, lies in the pool.

        On the stream that was current when the pool was made: torch keeps memory apart by stream.

        Raises
        ------
        torch.OutOfMemoryError
            From inside, when the pool is full; the message counts the GPU's free memory, which the pool does not take.
        UnsupportedError
            On a CPU, where torch has no such pools.
        """
        if self._torch is None:
            raise UnsupportedError(
                f"torch has no memory pools on device {self.device}", fix="make each tensor by pool.empty()"
            )
        with self._torch.use():
            yield

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the pool, as ``torch.empty``. On a CPU its memory is used again only once the pool is closed.

        Raises
        ------
        torch.OutOfMemoryError, StagingMemoryError
            When the pool is full, on a GPU and on a CPU.
        """
        if self._torch is not None:
            with self._torch.use():
                return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        needed = torch.Size(shape).numel() * dtype.itemsize
        if self._taken + needed > self.nbytes:
            raise StagingMemoryError(
                f"{needed} bytes do not fit: {self._taken} of this pool's {self.nbytes} bytes are taken",
                fix="make the pool larger",
            )
        start = self._taken
        self._taken = start + _round_up(needed, ALIGNMENT)
        return self._whole[start : start + needed].view(dtype).view(tuple(shape))

    def take(self, size: int) -> int:
        """The address of ``size`` bytes that were not taken before; 0 when there are no more."""
        if self._taken + size > self.nbytes:
            return 0
        address = self.start + self._taken
        self._taken += size
        return address

    def close(self) -> None:
        """Free the memory; idempotent.

        Raises
        ------
        SessionStateError
            When tensors are still in it, on a GPU; the pool stays usable.
        """
        with _pools_lock:
            if self.number not in _pools:
                return
            if self._torch is not None:
                self._torch.close()
            del _pools[self.number]
        del self._whole
        self.buffer.close()

    def __enter__(self) -> ExportablePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _TorchPool:
    """torch's allocator in the memory of a pool.

    Parameters
    ----------
    pool
        Gives the memory.
    large
        Bytes for tensors of more than 1 MiB, all in one segment.
    small
        Segments for others.
    """

    def __init__(self, pool: ExportablePool, large: int, small: int) -> None:
        make = getattr(torch._C, "_cuda_customAllocator", None)
        if make is None or not hasattr(torch.cuda, "use_mem_pool"):
            raise UnsupportedError(
                f"torch {torch.__version__} has no memory pools with an allocator of one's own", fix="use torch 2.6"
            )
        self._device = pool.device
        kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

        def take(size: int, _device: int, _stream: int | None) -> int:
            return pool.take(size)

        self._take: Any = kind(take)
        # Segments are given back when torch drops the pool, maybe on a thread without the interpreter's lock. There is
        # nothing to do then, which any C function without arguments does.
        nothing = ctypes.cast(ctypes.CDLL(None).getppid, ctypes.c_void_p).value
        allocator = make(ctypes.cast(self._take, ctypes.c_void_p).value, nothing)
        self._allocator = allocator
        self._pool: Any = torch.cuda.MemPool(allocator)
        sizes = [large] + [_SMALL] * (small * (_SMALL_SEGMENT // _SMALL))
        with self.use():
            made = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
            del made
            probes = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in (512, 2 * _SMALL)]
        inside = all(pool.start <= probe.data_ptr() < pool.start + pool.nbytes for probe in probes)
        del probes
        if not inside:
            raise UnsupportedError(
                "torch allocates outside of its memory pool",
                fix="leave expandable_segments and max_split_size_mb out of PYTORCH_CUDA_ALLOC_CONF",
            )

    def use(self) -> contextlib.AbstractContextManager[None]:
        """See :meth:`ExportablePool.use`."""
        found: contextlib.AbstractContextManager[None] = torch.cuda.use_mem_pool(self._pool, self._device)
        return found

    def close(self) -> None:
        """Take the memory from torch."""
        held = sum(segment["allocated_size"] for segment in _segments(self._pool.id))
        if held:
            raise SessionStateError(
                f"tensors of {held} bytes are still in this pool", fix="drop every tensor that was made in it first"
            )
        number = self._pool.id
        del self._pool
        if _segments(number):
            torch.cuda.empty_cache()  # older versions of torch leave it to the next one that asks


def _segments(number: tuple[int, int]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = torch.cuda.memory_snapshot(number)  # type: ignore[no-untyped-call]
    return found


def exportable_pool(nbytes: int, device: torch.device | str | None = None) -> ExportablePool:
    """Memory for tensors that ranks on the same device read where they are.

    Tensors in it may be sent together with any others. They are read until the call that sends them returns: unlike
    others, they must not change before that. A lazy source may allocate as it goes; of what it has given, at most half
    of the pool waits to be read.

    Parameters
    ----------
    nbytes
        For tensors, in bytes. The memory is allocated now and freed by :meth:`ExportablePool.close`; no memory saver
        pauses it.
    device
        By default the current GPU, or the CPU where there is none.

    Raises
    ------
    StagingMemoryError
        When the device has not that much memory.
    UnsupportedError
        When torch cannot allocate in it.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return ExportablePool(torch.device(device), nbytes)


def pools_on(device: torch.device) -> list[ExportablePool]:
    """The pools of this process on a device, oldest first."""
    with _pools_lock:
        return [pool for pool in _pools.values() if pool.device == device]


class Place(NamedTuple):
    """Where a tensor lies: in which pool, by its number, and the offset in it, in bytes."""

    pool: int
    offset: int


class Look(NamedTuple):
    """What one look at each of many tensors tells.

    Parameters
    ----------
    addresses
        Where each begins, if that is known and all are contiguous with no operation pending on their bytes; else None.
        int64.
    pools, offsets
        For each the number of its pool and its offset there, in bytes; both 0 for those that lie elsewhere. int64.
    """

    addresses: np.ndarray | None
    pools: np.ndarray
    offsets: np.ndarray


class Pools:
    """The pools that ranks can map in one session.

    Parameters
    ----------
    pools
        All on the one device of these ranks.
    """

    def __init__(self, pools: Sequence[ExportablePool]) -> None:
        self.by_number = {pool.number: pool for pool in pools}

    def __bool__(self) -> bool:
        return bool(self.by_number)

    @property
    def nbytes(self) -> int:
        """Of all."""
        return sum(pool.nbytes for pool in self.by_number.values())

    @property
    def smallest(self) -> int:
        """Bytes of the smallest; 0 when there is none."""
        return min((pool.nbytes for pool in self.by_number.values()), default=0)

    def find(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies, if ranks can read it there: in one piece, and where tensors may begin."""
        if not self.by_number or type(tensor) not in PLAIN or not tensor.numel():
            return None
        address = tensor.data_ptr()
        for pool in self.by_number.values():
            offset = address - pool.start
            if offset >= 0 and offset + tensor.nbytes <= pool.nbytes:
                readable = offset % ALIGNMENT == 0 and tensor.is_contiguous() and tensor.device == pool.device
                return Place(pool.number, offset) if readable and not tensor.is_neg() and not tensor.is_conj() else None
        return None

    def look(self, tensors: Sequence[torch.Tensor]) -> Look:
        """At all tensors. Without a pool that is nothing."""
        homes, offsets = (np.zeros(len(tensors), np.int64) for _ in range(2))
        seen = look(tensors) if self.by_number else None
        if seen is None:
            return Look(None, homes, offsets)
        addresses, simple = seen
        for pool in self.by_number.values():
            # One that begins inside also ends there, in one piece. Empty ones have no address.
            away = addresses - pool.start
            inside = simple & (away >= 0) & (away < pool.nbytes) & (away % ALIGNMENT == 0)
            homes[inside], offsets[inside] = pool.number, away[inside]
        return Look(addresses if simple.all() else None, homes, offsets)


def look(tensors: Sequence[torch.Tensor]) -> tuple[np.ndarray, np.ndarray] | None:
    """Where each begins, int64, and whether it is contiguous with no operation pending on its bytes, bool.

    None when one of them has no bytes, or may stand for others.
    """
    if not PLAIN.issuperset(map(type, tensors)):
        return None
    try:
        addresses = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors))
        simple = np.fromiter(map(torch.Tensor.is_contiguous, tensors), bool, len(tensors))
    except RuntimeError:
        return None
    for pending in (torch.Tensor.is_neg, torch.Tensor.is_conj):
        if any(map(pending, tensors)):
            simple &= ~np.fromiter(map(pending, tensors), bool, len(tensors))
    return addresses, simple


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
