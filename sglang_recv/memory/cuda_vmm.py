"""Staging memory on a GPU, from the CUDA driver's virtual memory calls.

One ``cuMemCreate`` allocation per buffer, exported as a POSIX fd. Legacy CUDA IPC is no use here: it cannot share
memory that torch_memory_saver made. Nothing here goes through torch's allocator, and nothing waits for the device.

The driver's errors stay inside this file: every one leaves as one of ours, naming the driver call and the sizes.
"""

from __future__ import annotations

import functools
import importlib
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sglang_recv.errors import BadBufferError, StagingMemoryError, UnsupportedError
from sglang_recv.fds import OwnedFd, describe_fd
from sglang_recv.memory.base import BufferBase, MemoryKind, round_up

__all__ = ["ExportableVmmBuffer", "VmmBuffer", "allocate", "granularity", "import_buffer"]

_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_DOCTOR = "check nvidia-smi, the driver's log and the container's device access on this machine"
_FREE = "lower slot_bytes or slots, or free GPU memory first, the engine's KV cache for one"
_RESTART = "restart this process: its GPU memory can no longer be relied on"


class _DriverError(Exception):
    """A driver call that returned an error."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call} returned {name}")
        self.call = call
        self.name = name


@functools.cache
def _load_driver() -> Any:
    """The driver API; imported late, so that a host without CUDA needs no CUDA package."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UnsupportedError(
            f"GPU staging memory needs the package cuda-bindings, which cannot be imported: {error}",
            fix="pip install sglang-recv[cuda]",
        ) from error


class _Driver:
    """Calls into one device's driver, with errors raised and its primary context kept alive.

    The primary context is what torch uses. It is retained for as long as a buffer exists, because in a process where
    torch has not touched the GPU yet we would otherwise create and destroy it around every call.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.api = _load_driver()
        try:
            self.call("cuInit", 0)
            # The same number as torch's is right: both count what this process's CUDA_VISIBLE_DEVICES left visible. It
            # must never be sent to another process, which may count differently.
            self.ordinal = int(self.call("cuDeviceGet", device.index))
            self._require("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "virtual memory management")
            self._require("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "memory export as a file descriptor")
            self._context = self.call("cuDevicePrimaryCtxRetain", self.ordinal)
        except _DriverError as error:
            message = f"the CUDA driver does not give access to {device}: {error}"
            if error.name == _OUT_OF_MEMORY:  # a context takes some hundred MB
                raise StagingMemoryError(message, fix=_FREE) from error
            raise UnsupportedError(
                message,
                fix="check nvidia-smi and CUDA_VISIBLE_DEVICES, and do not fork a process that has used CUDA",
            ) from error
        except RuntimeError as error:
            # cuda-bindings raises it when it finds no libcuda, or one without such a function.
            raise UnsupportedError(
                f"the CUDA driver library cannot be used: {error}",
                fix="install an NVIDIA driver that supports CUDA 12 or newer",
            ) from error

    def call(self, name: str, *args: Any) -> Any:
        """Make one driver call, and return its result: None, one value, or a list of several."""
        status, *values = getattr(self.api, name)(*args)
        if status != self.api.CUresult.CUDA_SUCCESS:
            raise _DriverError(name, status.name)
        return values if len(values) > 1 else values[0] if values else None

    def _require(self, attribute: str, what: str) -> None:
        key = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        if not self.call("cuDeviceGetAttribute", key, self.ordinal):
            raise UnsupportedError(
                f"{self.device} does not support {what}", fix="use a GPU and a driver that do, or the nccl mode"
            )

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the primary context current on this thread, which may be a service thread that has none."""
        previous = self.call("cuCtxGetCurrent")
        self.call("cuCtxSetCurrent", self._context)
        try:
            yield
        finally:
            self.call("cuCtxSetCurrent", previous)

    def release(self) -> None:
        """Give the primary context back; no other call may follow."""
        try:
            self.call("cuDevicePrimaryCtxRelease", self.ordinal)
        except _DriverError as error:
            raise StagingMemoryError(f"{error} for {self.device}", fix=_RESTART) from error

    def properties(self) -> Any:
        """What we ask ``cuMemCreate`` for."""
        properties = self.api.CUmemAllocationProp()
        properties.type = self.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.ordinal
        properties.requestedHandleTypes = self._fd_type()
        return properties

    def granularity(self) -> int:
        """The unit of allocation in bytes. The minimum is 2 MiB on the GPUs we know, as is the recommended one."""
        option = self.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call("cuMemGetAllocationGranularity", self.properties(), option))

    def create(self, nbytes: int, undo: ExitStack) -> Any:
        handle = self.call("cuMemCreate", nbytes, self.properties(), 0)
        undo.callback(self.call, "cuMemRelease", handle)
        return handle

    def export(self, handle: Any) -> OwnedFd:
        fd = OwnedFd(int(self.call("cuMemExportToShareableHandle", handle, self._fd_type(), 0)))
        os.set_inheritable(fd.fileno(), False)
        return fd

    def import_handle(self, fd: int, undo: ExitStack) -> Any:
        handle = self.call("cuMemImportFromShareableHandle", fd, self._fd_type())
        undo.callback(self.call, "cuMemRelease", handle)
        return handle

    def location(self, handle: Any) -> tuple[bool, int]:
        """Whether the memory is device memory, and of which ordinal."""
        found = self.call("cuMemGetAllocationPropertiesFromHandle", handle).location
        return found.type == self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, int(found.id)

    def map(self, handle: Any, nbytes: int, undo: ExitStack) -> int:
        """Map the memory for this device alone, and return its address."""
        address = self.call("cuMemAddressReserve", nbytes, 0, 0, 0)
        undo.callback(self.call, "cuMemAddressFree", address, nbytes)
        self.call("cuMemMap", address, nbytes, 0, handle, 0)
        undo.callback(self.call, "cuMemUnmap", address, nbytes)
        access = self.api.CUmemAccessDesc()
        access.location.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        access.flags = self.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.call("cuMemSetAccess", address, nbytes, [access], 1)
        return int(address)

    def free_memory(self) -> str:
        """How much memory the device has left, for a message about another failure: so it does not fail itself."""
        try:
            with self.current():
                free, total = self.call("cuMemGetInfo")
        except _DriverError as error:
            return f"the free memory is not known ({error})"
        return f"{free} of {total} bytes are free"

    def _fd_type(self) -> Any:
        return self.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class _ArrayInterface:
    """What torch makes a tensor of. The tensor keeps this object alive, and this object the buffer."""

    def __init__(self, buffer: VmmBuffer, address: int) -> None:
        self._buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class VmmBuffer(BufferBase):
    """A mapped allocation of GPU memory. Use :func:`import_buffer`."""

    def __init__(self, driver: _Driver, handle: Any, address: int, nbytes: int, undo: ExitStack) -> None:
        super().__init__(MemoryKind.CUDA_VMM, driver.device, nbytes)
        self._driver = driver
        self._handle = handle
        self._address = address
        self._undo = undo
        self._pid = os.getpid()
        self._interface: weakref.ref[_ArrayInterface] | None = None

    def _view(self) -> torch.Tensor:
        interface = None if self._interface is None else self._interface()
        if interface is None:
            interface = _ArrayInterface(self, self._address)
            self._interface = weakref.ref(interface)
        # The public protocol, and not torch._C._construct_storage_from_data_pointer, whose storage keeps nothing alive.
        # Its sizes are 64 bits wide.
        try:
            view = torch.as_tensor(interface, device=self._device)
        except RuntimeError as error:
            raise StagingMemoryError(
                f"torch cannot view a staging buffer of {self._nbytes} bytes on {self._device}: {error}",
                fix="install numpy, which torch needs for __cuda_array_interface__, and check the device's state",
            ) from error
        # as_tensor copies where it thinks that it must. A silent copy would make every later transfer meaningless.
        if view.data_ptr() != self._address:
            raise StagingMemoryError(
                f"torch copied a staging buffer of {self._nbytes} bytes on {self._device} and did not view it",
                fix="report this, with the version of torch",
            )
        return view

    def _free(self) -> bool:
        # In a child that was forked off, neither the mapping nor the driver exists.
        if os.getpid() != self._pid:
            self._undo.pop_all()
            return False
        try:
            with ExitStack() as last:
                last.callback(self._driver.release)
                with self._driver.current():
                    self._undo.close()
        except _DriverError as error:
            raise StagingMemoryError(
                f"freeing a staging buffer of {self._nbytes} bytes on {self._device} failed: {error}",
                fix=_RESTART,
            ) from error
        return self._interface is not None and self._interface() is not None


class ExportableVmmBuffer(VmmBuffer):
    """An allocation of our own. Use :func:`allocate`."""

    def export_fd(self) -> OwnedFd:
        """A new fd for the memory; the caller owns it.

        Raises
        ------
        StagingMemoryError
            If the buffer is closed, or the driver makes no fd.
        """
        with self._lock:
            self._check_open()
            try:
                with self._driver.current():
                    return self._driver.export(self._handle)
            except _DriverError as error:
                raise StagingMemoryError(
                    f"a staging buffer of {self._nbytes} bytes on {self._device} could not be exported: {error}",
                    fix=f"raise the limit on open files (ulimit -n), or {_DOCTOR}",
                ) from error


def granularity(device: torch.device) -> int:
    """The unit of allocation on `device` in bytes.

    Raises
    ------
    UnsupportedError
        If the device or the driver cannot export memory, or cuda-bindings is not installed.
    """
    assert device.index is not None
    return _granularity(device.index)


@functools.cache
def _granularity(ordinal: int) -> int:
    # Asked for at every import, and a property of the hardware.
    driver = _Driver(torch.device("cuda", ordinal))
    with ExitStack() as last:
        last.callback(driver.release)
        try:
            return driver.granularity()
        except _DriverError as error:
            raise UnsupportedError(
                f"the CUDA driver names no allocation granularity for {driver.device}: {error}", fix=_DOCTOR
            ) from error


def allocate(device: torch.device, nbytes: int) -> ExportableVmmBuffer:
    """Allocate at least `nbytes` bytes of physical memory on `device`, and map them for it.

    Raises
    ------
    StagingMemoryError
        If the device has not enough memory, or the driver refuses.
    UnsupportedError
        If the device or the driver cannot export memory, or cuda-bindings is not installed.
    """
    size = round_up(nbytes, granularity(device))
    driver = _Driver(device)
    with ExitStack() as last:
        last.callback(driver.release)
        try:
            with driver.current(), ExitStack() as undo:
                handle = driver.create(size, undo)
                address = driver.map(handle, size, undo)
                buffer = ExportableVmmBuffer(driver, handle, address, size, undo.pop_all())
        except _DriverError as error:
            raise StagingMemoryError(
                f"{error} for a staging buffer of {size} bytes on {device}, where {driver.free_memory()}",
                fix=_FREE if error.name == _OUT_OF_MEMORY else _DOCTOR,
            ) from error
        last.pop_all()  # the buffer releases the context now
    return buffer


def import_buffer(device: torch.device, fd: int, nbytes: int) -> VmmBuffer:
    """Map `nbytes` bytes of GPU memory that another process exported; the caller keeps the fd.

    Raises
    ------
    BadBufferError
        If `fd` is no GPU memory, is another GPU's, or is smaller than announced.
    StagingMemoryError
        If the memory cannot be mapped.
    UnsupportedError
        If the device or the driver cannot import memory, or cuda-bindings is not installed.
    """
    driver = _Driver(device)
    with ExitStack() as last:
        last.callback(driver.release)
        try:
            with driver.current(), ExitStack() as undo:
                handle = driver.import_handle(fd, undo)
                on_device, ordinal = driver.location(handle)
                if not on_device or ordinal != driver.ordinal:
                    where = f"cuda:{ordinal}" if on_device else "no GPU"
                    raise BadBufferError(
                        f"the staging buffer of {nbytes} bytes received for {device} lives on {where}",
                        fix="pair each sender with the engine rank on its own GPU",
                    )
                address = driver.map(handle, nbytes, undo)
                buffer = VmmBuffer(driver, handle, address, nbytes, undo.pop_all())
        except _DriverError as error:
            raise _import_error(error, device, fd, nbytes, driver.free_memory()) from error
        last.pop_all()  # the buffer releases the context now
    return buffer


def _import_error(
    error: _DriverError, device: torch.device, fd: int, nbytes: int, free: str
) -> BadBufferError | StagingMemoryError:
    """Tell a bad fd from a device in trouble."""
    if error.call == "cuMemImportFromShareableHandle" and error.name != _OUT_OF_MEMORY:
        return BadBufferError(
            f"{error}: the fd received for a staging buffer of {nbytes} bytes on {device} is {describe_fd(fd)}, "
            "and not GPU memory that this device can map",
            fix="send the fd that export_fd() of an allocated staging buffer on the same GPU returned",
        )
    # An allocation does not tell its size, so this is where an announcement that is too large comes out. NOT_SUPPORTED
    # is what driver 580 says of an imported allocation, INVALID_VALUE of one of our own.
    if error.call == "cuMemMap" and error.name in ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE"):
        return BadBufferError(
            f"{error}: a staging buffer of {nbytes} bytes was announced on {device}, and the fd has less",
            fix="announce the buffer's nbytes as allocate() returned it",
        )
    return StagingMemoryError(
        f"{error} for an imported staging buffer of {nbytes} bytes on {device}, where {free}", fix=_DOCTOR
    )
