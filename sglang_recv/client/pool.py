"""Memory in which a trainer allocates tensors that ranks read where they are: sent without a pack."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from sglang_recv import memory
from sglang_recv.client.torch_pool import LARGE_SEGMENT, SMALL_SEGMENT, TorchPool
from sglang_recv.errors import SessionStateError, StagingMemoryError, UnsupportedError
from sglang_recv.manifest import ALIGNMENT
from sglang_recv.memory import ExportableBuffer

logger = logging.getLogger(__name__)

#: Of a pool's bytes, so many are for small tensors: a 64th, within bounds.
_SMALL_SHARE: Final = 64
_SMALL_BOUNDS: Final = (8 << 20, 64 << 20)

#: Types whose tensors are what they seem. Subclasses may stand for other bytes.
PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter))

_numbers = itertools.count(1)
#: Not weak references: torch alone knows which tensors are left on a GPU, and a collector must not wait for its lock.
_pools: dict[int, ExportablePool] = {}
#: Of what is above, and of all pools' counts.
_lock = threading.RLock()

#: Pools that one session can lend, oldest first: ranks map 1,024 buffers at most.
_MOST: Final = 256


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
        #: Sessions whose ranks have it mapped.
        self._lent = 0
        #: The thread that allocates in it, and how often that has entered.
        self._user = 0
        self._depth = 0
        small = 0
        if device.type == "cuda":
            small = _round_up(min(max(nbytes // _SMALL_SHARE, _SMALL_BOUNDS[0]), _SMALL_BOUNDS[1]), SMALL_SEGMENT)
            nbytes = _round_up(max(nbytes, LARGE_SEGMENT), SMALL_SEGMENT)
        self.buffer: ExportableBuffer = memory.allocate(device, nbytes + small)
        whole = self.buffer.tensor()
        self._whole: torch.Tensor | None = whole
        self.device = self.buffer.device
        self.start = whole.data_ptr()
        self._torch: TorchPool | None = None
        if device.type == "cuda":
            try:
                span = range(self.start, self.start + self.nbytes)
                self._torch = TorchPool(self.device, span, self._take, nbytes, small // SMALL_SEGMENT)
            except BaseException:
                del whole
                self._whole = None
                self.buffer.close()
                raise
        with _lock:
            _pools[self.number] = self

    @property
    def nbytes(self) -> int:
        """Bytes that ranks map."""
        return self.buffer.nbytes

    @property
    def closed(self) -> bool:
        """True once its memory is gone."""
        return self.number not in _pools

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """What the calling thread allocates inside by torch, on the pool's device, lies in the pool.

        On the stream that was current when the pool was made: torch keeps memory apart by stream. Keep it short: torch
        treats the device as if a graph were captured meanwhile, so what other streams free comes back only after it.

        Raises
        ------
        torch.OutOfMemoryError
            From inside, when the pool is full; the message counts the GPU's free memory, which the pool does not take.
        SessionStateError
            When another thread is inside, or the pool is closed.
        UnsupportedError
            On a CPU, where torch has no such pools.
        """
        me = threading.get_ident()
        with _lock:
            self._check_open()
            if self._torch is None:
                raise UnsupportedError(
                    f"torch has no memory pools on device {self.device}", fix="make each tensor by pool.empty()"
                )
            if self._depth and self._user != me:
                raise SessionStateError("another thread allocates in this pool", fix="give each thread its own pool")
            self._user = me
            self._depth += 1
        try:
            # Not twice: torch counts the second one before it refuses it.
            with self._torch.use() if self._depth == 1 else contextlib.nullcontext():
                yield
        finally:
            with _lock:
                self._depth -= 1

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the pool, as ``torch.empty``. On a CPU its memory is used again only once the pool is closed.

        Raises
        ------
        torch.OutOfMemoryError, StagingMemoryError
            When the pool is full, on a GPU and on a CPU.
        SessionStateError
            When the pool is closed, or another thread allocates in it.
        """
        if self._torch is not None:
            with self.use():
                return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        size = torch.empty(tuple(shape), dtype=dtype, device="meta").nbytes  # refuses shapes that are none
        with _lock:
            self._check_open()
            assert self._whole is not None
            if self._taken + size > self.nbytes:
                raise StagingMemoryError(
                    f"{size} bytes do not fit: {self._taken} of this pool's {self.nbytes} bytes are taken",
                    fix="make the pool larger",
                )
            start = self._taken
            self._taken = start + _round_up(size, ALIGNMENT)
            return self._whole[start : start + size].view(dtype).view(tuple(shape))

    def lend(self) -> None:
        """A session's ranks map it: it is not closed until :meth:`give_back`.

        Raises
        ------
        SessionStateError
            When it is closed.
        """
        with _lock:
            self._check_open()
            self._lent += 1

    def give_back(self) -> None:
        """A session that it was lent to is over."""
        with _lock:
            self._lent -= 1

    def close(self) -> None:
        """Free the memory, once the device has done what it was told; idempotent.

        Raises
        ------
        SessionStateError
            While a session or a thread uses it, another pool is in use on its device, or a graph is captured; on a GPU
            also when tensors are still in it. The pool stays usable.
        """
        with _lock:
            if self.closed:
                return
            if self._lent:
                raise SessionStateError(
                    "a session has sent tensors of this pool, and its ranks have it mapped",
                    fix="commit or abort the session first",
                )
            if any(pool._depth for pool in _pools.values() if pool.device == self.device):
                # torch frees nothing then, and ends the process when it must.
                raise SessionStateError("a pool of this device is in use", fix="close pools outside of use()")
            released = self._torch is None or self._torch.close()
            del _pools[self.number]
            self._whole = self._torch = None
        if released:
            self.buffer.close()
        else:
            logger.error("torch does not let go of a pool of %d bytes: they stay allocated", self.nbytes)

    def __enter__(self) -> ExportablePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except SessionStateError as error:
            if kind is None:
                raise
            logger.warning("a pool stays open, since an error came first: %s", error)

    def _take(self, size: int) -> int:
        """The address of ``size`` bytes that were not taken before; 0 when there are no more."""
        if self._taken + size > self.nbytes:
            return 0
        address = self.start + self._taken
        self._taken += size
        return address

    def _check_open(self) -> None:
        if self._whole is None:
            raise SessionStateError("this pool is closed", fix="make a new one")


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
    """The pools of this process on a device, oldest first, as many as one session can lend."""
    with _lock:
        return [pool for pool in _pools.values() if pool.device == device][:_MOST]


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

    def find(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies, if ranks can read it there: in one piece, and where tensors may begin."""
        if not self.by_number or type(tensor) not in PLAIN or not tensor.numel():
            return None
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # without memory, which is refused elsewhere
            return None
        for pool in self.by_number.values():
            offset = address - pool.start
            # What was a pool's when it was closed may be anybody's now.
            if offset >= 0 and offset + tensor.nbytes <= pool.nbytes and not pool.closed:
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
            if pool.closed:
                continue
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
