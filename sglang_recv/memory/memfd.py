"""Staging memory on the CPU: a sealed memfd, mapped shared by both sides.

A file that shrinks under a mapping kills whoever touches the lost pages with SIGBUS. So the exporter seals its memfd
against shrinking before anybody sees it, and the importer maps nothing that is not sealed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import weakref
from pathlib import Path

import torch

from sglang_recv.errors import BadBufferError, StagingMemoryError
from sglang_recv.fds import OwnedFd, describe_fd
from sglang_recv.memory.base import BufferBase, MemoryKind, round_up

__all__ = ["ExportableMemfdBuffer", "MemfdBuffer", "allocate", "granularity", "import_buffer"]

# Growing is harmless to us; it is sealed so that the size stays what was announced. F_SEAL_SEAL: no seal can be added
# later, F_SEAL_WRITE for one.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LESS = "lower slot_bytes or slots, or free memory on this host"


class MemfdBuffer(BufferBase):
    """A mapped memfd. Use :func:`import_buffer`."""

    def __init__(self, mapping: mmap.mmap, nbytes: int) -> None:
        super().__init__(MemoryKind.MEMFD, torch.device("cpu"), nbytes)
        self._mapping: mmap.mmap | None = mapping

    def _view(self) -> torch.Tensor:
        assert self._mapping is not None
        # The tensor holds a reference to the mmap object, but no buffer export of it, so close() can unmap at any time.
        return torch.frombuffer(self._mapping, dtype=torch.uint8)

    def _free(self) -> bool:
        mapping, self._mapping = self._mapping, None
        assert mapping is not None
        mapping.close()
        alive = weakref.ref(mapping)
        del mapping
        return alive() is not None

    def _collect(self) -> None:
        # Not unmapped here: the mmap object does that when the last view goes.
        self._mapping = None


class ExportableMemfdBuffer(MemfdBuffer):
    """A memfd of our own. Use :func:`allocate`."""

    def __init__(self, mapping: mmap.mmap, nbytes: int, fd: OwnedFd) -> None:
        super().__init__(mapping, nbytes)
        self._fd = fd

    def export_fd(self) -> OwnedFd:
        """A new fd for the memory; the caller owns it.

        Raises
        ------
        StagingMemoryError
            If the buffer is closed, or the process is out of fds.
        """
        with self._lock:
            self._check_open()
            try:
                return OwnedFd(fcntl.fcntl(self._fd.fileno(), fcntl.F_DUPFD_CLOEXEC, 0))
            except OSError as error:
                raise StagingMemoryError(
                    f"the fd of a staging buffer of {self._nbytes} bytes could not be duplicated: {error}",
                    fix="raise the limit on open files (ulimit -n)",
                ) from error

    def _free(self) -> bool:
        self._fd.close()
        return super()._free()

    def _collect(self) -> None:
        self._fd.close()
        super()._collect()


def granularity() -> int:
    """The page size in bytes."""
    return mmap.PAGESIZE


def allocate(nbytes: int) -> ExportableMemfdBuffer:
    """Allocate at least `nbytes` bytes, with the pages reserved.

    Raises
    ------
    StagingMemoryError
        If the host has not enough memory, or refuses the memfd.
    """
    size = round_up(nbytes, granularity())
    # Asking the kernel for far more than there is does not fail: it wakes the OOM killer. So look first.
    available = _available_bytes()
    if available is not None and size > available:
        raise StagingMemoryError(
            f"{size} bytes of shared memory were asked for, but this host has {available} bytes available", fix=_LESS
        )
    call = "memfd_create"
    try:
        fd = OwnedFd(os.memfd_create("sglang_recv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        try:
            call = "ftruncate"
            os.ftruncate(fd.fileno(), size)
            # Without this a full host would show as SIGBUS in the middle of a copy.
            call = "posix_fallocate"
            os.posix_fallocate(fd.fileno(), 0, size)
            call = "fcntl(F_ADD_SEALS)"
            fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, _SEALS)
            call = "mmap"
            return ExportableMemfdBuffer(mmap.mmap(fd.fileno(), size, mmap.MAP_SHARED), size, fd)
        except BaseException:
            fd.close()
            raise
    except OSError as error:
        raise StagingMemoryError(f"{call} failed for {size} bytes of shared memory: {error}", fix=_LESS) from error


def import_buffer(fd: int, nbytes: int) -> MemfdBuffer:
    """Map `nbytes` bytes of a memfd that another process made; the caller keeps the fd.

    Raises
    ------
    BadBufferError
        If `fd` is no memfd, is too small, could shrink, or is not writable.
    StagingMemoryError
        If the memory cannot be mapped.
    """
    status = os.fstat(fd)
    ours = "send the fd that export_fd() of an allocated staging buffer returned"
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = None  # EINVAL: not on a file system that knows seals, so no memfd
    if seals is None or not stat.S_ISREG(status.st_mode):
        raise BadBufferError(f"the fd received for a staging buffer is {describe_fd(fd)}, not a memfd", fix=ours)
    if not seals & fcntl.F_SEAL_SHRINK:
        raise BadBufferError(
            f"the memfd received for a staging buffer has seals {seals:#x}, without F_SEAL_SHRINK "
            f"({fcntl.F_SEAL_SHRINK:#x}), so its owner could truncate it and kill this process",
            fix=ours,
        )
    if status.st_size < nbytes:
        raise BadBufferError(
            f"a staging buffer of {nbytes} bytes was announced, but its memfd has {status.st_size} bytes",
            fix="announce the buffer's nbytes as allocate() returned it",
        )
    try:
        return MemfdBuffer(mmap.mmap(fd, nbytes, mmap.MAP_SHARED), nbytes)
    except PermissionError as error:
        raise BadBufferError(
            f"the memfd received for a staging buffer of {nbytes} bytes cannot be mapped for writing: {error}", fix=ours
        ) from error
    except OSError as error:
        raise StagingMemoryError(
            f"mmap failed for a staging buffer of {nbytes} bytes: {error}",
            fix="free memory on this host, or raise the process's limits (ulimit -v, vm.max_map_count)",
        ) from error


def _available_bytes() -> int | None:
    """What the kernel thinks can be allocated without swapping; None if it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None
