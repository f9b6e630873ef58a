"""Staging memory: what one process writes another reads, nothing hostile is mapped, and everything comes back.

The CUDA halves need a GPU. Without one, a stand-in for the driver checks that every failing call undoes the ones
before it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import itertools
import json
import mmap
import os
import re
import resource
import select
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_recv.errors import BadBufferError, RecvError, StagingMemoryError, UnsupportedError
from sglang_recv.fdpass import FdConnection, FdListener
from sglang_recv.fds import OwnedFd
from sglang_recv.memory import MemoryKind, allocate, cuda_vmm, granularity, import_buffer, memfd, probe

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0  # seconds: a child imports torch, and may make a CUDA context
MIB = 1 << 20
SIZE = 64 * MIB
CPU = torch.device("cpu")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

IMPORTER = """
import hashlib, json, sys
from pathlib import Path
import torch
from sglang_recv.errors import RecvError
from sglang_recv.fdpass import FdConnection
from sglang_recv.memory import import_buffer

with FdConnection.connect(Path(sys.argv[1]), 60) as connection:
    while True:
        try:
            payload, fd = connection.recv(60)
        except EOFError:
            break
        spec = json.loads(payload)
        try:
            with import_buffer(torch.device(spec["device"]), fd, spec["nbytes"]) as buffer:
                view = buffer.tensor()
                seen = view.cpu().clone()
                view.copy_(255 - seen)
                if view.is_cuda:
                    torch.cuda.synchronize()
                del view
            reply = {"sha256": hashlib.sha256(seen.numpy().tobytes()).hexdigest()}
        except RecvError as error:
            reply = {"error": str(error)}
        connection.send(json.dumps({**reply, "fd_closed": fd.closed}).encode())
"""

EXPORTER = """
import sys
from pathlib import Path
import torch
from sglang_recv.fdpass import FdConnection
from sglang_recv.memory import allocate

with FdConnection.connect(Path(sys.argv[1]), 60) as connection:
    with allocate(torch.device(sys.argv[2]), int(sys.argv[3])) as buffer:
        view = buffer.tensor()
        view.fill_(7)
        view[-1] = 9
        if view.is_cuda:
            torch.cuda.synchronize()
        del view
        with buffer.export_fd() as fd:
            connection.send(str(buffer.nbytes).encode(), fd.fileno())
"""


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each kind of device, warmed up: a first use opens fds and takes memory that stay with the process."""
    device = torch.device(request.param)
    with allocate(device, 1) as buffer:
        buffer.tensor().fill_(1)
        import_buffer(device, buffer.export_fd(), buffer.nbytes).close()
    synchronize(device)
    return device


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def digest(data: torch.Tensor) -> str:
    return hashlib.sha256(data.cpu().numpy().tobytes()).hexdigest()


def open_fds() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        # The one that listed the folder is gone.
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{name}: {os.readlink(f'/proc/self/fd/{name}')}")
    return found


def mapped_bytes() -> int:
    """How much of our memfds this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:sglang_recv" in line:
            start, end = line.split()[0].split("-")
            total += int(end, 16) - int(start, 16)
    return total


def free_bytes(device: torch.device) -> int:
    """The memory that an allocation here must give back; on the CPU, minus what is mapped."""
    return -mapped_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def assert_given_back(device: torch.device, free: int) -> None:
    """Check that `free` bytes are free again. The tests that ask allocate 64 MiB at least.

    A CUDA driver keeps a little for itself, page tables for one.
    """
    assert free - free_bytes(device) <= (0 if device.type == "cpu" else 16 * MIB)


@contextlib.contextmanager
def peer(path: Path, script: str, *args: object) -> Iterator[FdConnection]:
    """A connection to a script that runs in a process of its own, and is expected to end well."""
    with FdListener(path) as listener:
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(path), *map(str, args)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            # Its stderr becomes readable when it dies without having connected.
            ready = select.select([listener.fileno(), process.stderr.fileno()], [], [], PATIENCE)[0]
            assert listener.fileno() in ready, process.communicate(timeout=PATIENCE)[1]
            with listener.accept() as connection:
                yield connection
            errors = process.communicate(timeout=PATIENCE)[1]
            assert process.returncode == 0, errors
            assert "ResourceWarning" not in errors
        finally:
            process.kill()
            process.communicate()


# Buffers within one process


def test_size_is_rounded_up_to_the_granularity(device: torch.device) -> None:
    unit = granularity(device)
    assert unit > 1
    for asked, got in ((1, unit), (unit, unit), (unit + 1, 2 * unit)):
        with allocate(device, asked) as buffer:
            assert buffer.nbytes == got
            assert buffer.device == device
            view = buffer.tensor()
            assert (view.dtype, view.shape, view.device) == (torch.uint8, (got,), device)
            del view


def test_kind_names_the_memory() -> None:
    assert (str(MemoryKind.MEMFD), f"{MemoryKind.CUDA_VMM}") == ("memfd", "cuda_vmm")
    assert MemoryKind("memfd") is MemoryKind.MEMFD
    with allocate(CPU, 1) as buffer:
        assert buffer.kind == "memfd"


@pytest.mark.gpu
def test_kind_on_a_gpu() -> None:
    with allocate(torch.device("cuda:0"), 1) as buffer:
        assert buffer.kind is MemoryKind.CUDA_VMM


def test_views_share_the_memory(device: torch.device) -> None:
    with allocate(device, MIB) as buffer:
        data = pattern(buffer.nbytes, seed=1).to(device)
        buffer.tensor().copy_(data)
        assert torch.equal(buffer.tensor(), data)
        first, second = buffer.tensor(), buffer.tensor()
        assert first.data_ptr() == second.data_ptr()
        first[12345] = 77
        assert int(second[12345]) == 77
        synchronize(device)
        del first, second


def test_import_sees_the_exporters_bytes(device: torch.device) -> None:
    with allocate(device, MIB) as mine, import_buffer(device, mine.export_fd(), mine.nbytes) as theirs:
        data = pattern(mine.nbytes, seed=2).to(device)
        mine.tensor().copy_(data)
        assert torch.equal(theirs.tensor(), data)
        assert theirs.tensor().data_ptr() != mine.tensor().data_ptr()
        theirs.tensor().fill_(5)
        assert bool((mine.tensor() == 5).all())
        assert not hasattr(theirs, "export_fd")
        synchronize(device)


def test_everything_comes_back(device: torch.device) -> None:
    fds, free = open_fds(), free_bytes(device)
    for _ in range(4):  # a little that is lost each time would show
        mine = allocate(device, SIZE)
        theirs = import_buffer(device, mine.export_fd(), mine.nbytes)
        theirs.tensor().fill_(1)
        synchronize(device)
        # Both share the physical memory of a GPU; on the CPU what is counted is the two mappings.
        if device.type == "cpu":
            assert free - free_bytes(device) == 2 * SIZE
        else:
            assert SIZE <= free - free_bytes(device) < 2 * SIZE
        mine.close()
        theirs.close()
    assert_given_back(device, free)
    assert open_fds() == fds


def test_memory_lives_as_long_as_one_side_has_it(device: torch.device) -> None:
    mine = allocate(device, MIB)
    mine.tensor().fill_(42)
    synchronize(device)
    with mine.export_fd() as kept:
        mine.close()
        # The fd alone keeps it.
        with import_buffer(device, OwnedFd(os.dup(kept.fileno())), mine.nbytes) as theirs:
            assert bool((theirs.tensor() == 42).all())


def test_each_export_is_a_new_fd_that_no_child_inherits(device: torch.device) -> None:
    fds = open_fds()
    with allocate(device, 1) as buffer, buffer.export_fd() as first, buffer.export_fd() as second:
        assert first.fileno() != second.fileno()
        assert not os.get_inheritable(first.fileno())
    assert open_fds() == fds


def test_closed_buffer_cannot_be_used(device: torch.device) -> None:
    buffer = allocate(device, 1)
    buffer.close()
    buffer.close()
    with pytest.raises(StagingMemoryError, match=f"{buffer.nbytes} bytes on {device} is closed"):
        buffer.tensor()
    with pytest.raises(StagingMemoryError, match="is closed"):
        buffer.export_fd()


def test_buffers_may_be_made_and_closed_on_any_thread(device: torch.device) -> None:
    fds, free = open_fds(), free_bytes(device)
    made: list[Any] = []

    def make() -> None:
        mine = allocate(device, SIZE)
        made.extend([mine, import_buffer(device, mine.export_fd(), mine.nbytes)])

    def close() -> None:
        for buffer in made:
            buffer.close()

    for steps in ([make], [close, close, close]):  # three at once: closing is idempotent
        threads = [threading.Thread(target=step) for step in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert len(made) == 2
    assert all(buffer.closed for buffer in made)
    assert open_fds() == fds
    assert_given_back(device, free)


def test_forgotten_buffer_warns_and_is_freed(device: torch.device) -> None:
    fds, free = open_fds(), free_bytes(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        allocate(device, SIZE)
        gc.collect()
    assert [w.category for w in caught] == [ResourceWarning]
    assert re.search(rf"unclosed <\w+ \d+ bytes on {device}>", str(caught[0].message))
    assert open_fds() == fds
    assert_given_back(device, free)


def test_view_keeps_a_forgotten_buffer_mapped(device: torch.device) -> None:
    free = free_bytes(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        view = allocate(device, SIZE).tensor()
        gc.collect()
        view.fill_(3)
        assert bool((view.cpu() == 3).all())  # compared off the GPU, where torch would keep what it allocates
        del view
        gc.collect()
    assert_given_back(device, free)


def test_closing_under_a_view_frees_and_warns(device: torch.device) -> None:
    free = free_bytes(device)
    buffer = allocate(device, SIZE)
    view = buffer.tensor()  # never touched again: it points to nothing
    with pytest.warns(ResourceWarning, match="closed while a view of it is alive"):
        buffer.close()
    assert_given_back(device, free)
    del view


@pytest.mark.parametrize("nbytes", [0, -1])
def test_empty_buffer_is_refused(nbytes: int, device: torch.device) -> None:
    with pytest.raises(StagingMemoryError, match=f"{nbytes} bytes was asked for"):
        allocate(device, nbytes)


def test_more_than_there_is_is_refused(device: torch.device) -> None:
    fds, free = open_fds(), free_bytes(device)
    for nbytes in (1 << 50, 1 << 70):
        with pytest.raises(StagingMemoryError, match=f"{nbytes} bytes") as caught:
            allocate(device, nbytes)
        assert "lower slot_bytes or slots" in caught.value.fix
    assert open_fds() == fds
    assert_given_back(device, free)


def test_probe_finds_nothing_wrong(device: torch.device) -> None:
    fds = open_fds()
    assert probe(device) is None
    assert open_fds() == fds


def test_probe_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "'meta'" in str(probe(torch.device("meta")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no CUDA device" in str(probe(torch.device("cuda")))


def test_other_devices_are_refused_and_the_fd_is_closed() -> None:
    fds = open_fds()
    for call in (granularity, lambda device: allocate(device, 1)):
        with pytest.raises(UnsupportedError, match="'meta'"):
            call(torch.device("meta"))
    with pytest.raises(UnsupportedError, match="'meta'"):
        import_buffer(torch.device("meta"), OwnedFd(os.memfd_create("test")), 4096)
    assert open_fds() == fds


# Two processes


def test_bytes_cross_processes_and_back(device: torch.device, tmp_path: Path) -> None:
    fds, free = open_fds(), free_bytes(device)
    with peer(tmp_path / "s", IMPORTER) as connection, allocate(device, SIZE) as buffer:
        spec = json.dumps({"device": str(device), "nbytes": buffer.nbytes}).encode()
        for seed in (1, 2):  # the second time over a new fd of the same memory
            data = pattern(buffer.nbytes, seed)
            buffer.tensor().copy_(data)
            synchronize(device)
            with buffer.export_fd() as fd:
                connection.send(spec, fd.fileno())
            reply = json.loads(connection.recv(PATIENCE)[0])
            assert reply == {"sha256": digest(data), "fd_closed": True}
            assert torch.equal(buffer.tensor().cpu(), 255 - data)
    assert open_fds() == fds
    assert_given_back(device, free)


def test_memory_outlives_its_exporter(device: torch.device, tmp_path: Path) -> None:
    fds, free = open_fds(), free_bytes(device)
    with peer(tmp_path / "s", EXPORTER, device, SIZE) as connection:
        payload, fd = connection.recv(PATIENCE)
        with pytest.raises(EOFError):
            connection.recv(PATIENCE)
    assert fd is not None  # and its process is gone
    with import_buffer(device, fd, int(payload)) as buffer:
        view = buffer.tensor().cpu().clone()
        assert bool((view[:-1] == 7).all())
        assert int(view[-1]) == 9
        assert buffer.nbytes == int(payload)
    assert fd.closed
    assert open_fds() == fds
    assert_given_back(device, free)


def test_importer_survives_a_hostile_fd(device: torch.device, tmp_path: Path) -> None:
    with peer(tmp_path / "s", IMPORTER) as connection, (tmp_path / "file").open("w+b") as file:
        file.truncate(8 * MIB)
        connection.send(json.dumps({"device": str(device), "nbytes": 8 * MIB}).encode(), file.fileno())
        reply = json.loads(connection.recv(PATIENCE)[0])
        assert reply["error"].startswith("[BUFFER]")
        assert reply["fd_closed"]


# Hostile fds


def a_file(path: Path) -> int:
    fd = os.open(path / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    os.truncate(fd, 8 * MIB)
    return fd


def a_pipe(_: Path) -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def a_directory(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def a_device(_: Path) -> int:
    return os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC)


def an_event(_: Path) -> int:
    return os.eventfd(0)


def a_memfd(size: int = 8 * MIB, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize("make", [a_file, a_pipe, a_directory, a_device, an_event])
def test_fd_that_is_no_memory_is_refused(make: Any, device: torch.device, tmp_path: Path) -> None:
    fds = open_fds()
    with pytest.raises(BadBufferError, match="received for a staging buffer"):
        import_buffer(device, OwnedFd(make(tmp_path)), 8 * MIB)
    assert open_fds() == fds


@pytest.mark.gpu
def test_memfd_is_refused_as_gpu_memory() -> None:
    device = torch.device("cuda:0")
    fds = open_fds()
    with pytest.raises(BadBufferError, match="not GPU memory"):
        import_buffer(device, OwnedFd(a_memfd()), 8 * MIB)
    assert open_fds() == fds


def test_closed_fd_is_refused(device: torch.device) -> None:
    number = a_memfd()
    os.close(number)
    fd = OwnedFd(number)
    with pytest.raises(BadBufferError, match="Bad file descriptor"):
        import_buffer(device, fd, 8 * MIB)
    assert fd.closed


@pytest.mark.parametrize("nbytes", [0, -4096, 1, 4097, 1 << 70])
def test_size_that_allocate_never_gives_is_refused(nbytes: int, device: torch.device) -> None:
    fds = open_fds()
    with allocate(device, 1) as buffer:
        with pytest.raises(
            BadBufferError, match=rf"{nbytes} bytes was announced.*units of {granularity(device)} bytes"
        ):
            import_buffer(device, buffer.export_fd(), nbytes)
    assert open_fds() == fds


def test_buffer_smaller_than_announced_is_refused(device: torch.device) -> None:
    fds, free = open_fds(), free_bytes(device)
    with allocate(device, 1) as buffer:
        larger = buffer.nbytes + granularity(device)
        with pytest.raises(BadBufferError, match=f"{larger} bytes was announced"):
            import_buffer(device, buffer.export_fd(), larger)
    assert open_fds() == fds
    assert_given_back(device, free)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL])
def test_memfd_that_can_shrink_is_refused(seals: int) -> None:
    fds = open_fds()
    with pytest.raises(BadBufferError, match=f"has seals {seals:#x}, without F_SEAL_SHRINK"):
        import_buffer(CPU, OwnedFd(a_memfd(seals=seals)), 8 * MIB)
    assert open_fds() == fds


def test_memfd_that_knows_no_seals_is_refused() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, 4096)
    with pytest.raises(BadBufferError, match="without F_SEAL_SHRINK"):
        import_buffer(CPU, OwnedFd(fd), 4096)


def test_memfd_that_is_too_small_is_named_with_both_sizes() -> None:
    with pytest.raises(BadBufferError, match="8192 bytes was announced, but its memfd has 4096 bytes"):
        import_buffer(CPU, OwnedFd(a_memfd(4096)), 8192)


def test_memfd_that_cannot_be_written_is_refused() -> None:
    fds = open_fds()
    with pytest.raises(BadBufferError, match="cannot be mapped for writing"):
        import_buffer(CPU, OwnedFd(a_memfd(4096, SEALS | fcntl.F_SEAL_WRITE)), 4096)
    assert open_fds() == fds


# A memfd of our own


def test_exported_memfd_keeps_its_size() -> None:
    with allocate(CPU, MIB) as buffer, buffer.export_fd() as fd:
        for size in (0, 2 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(fd.fileno(), size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_pages_are_reserved_at_once() -> None:
    with allocate(CPU, 16 * MIB) as buffer, buffer.export_fd() as fd:
        assert os.fstat(fd.fileno()).st_blocks * 512 == 16 * MIB


def test_failing_system_calls_are_named_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fds, mapped = open_fds(), mapped_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for module, name, call in (
        (os, "memfd_create", "memfd_create"),
        (os, "ftruncate", "ftruncate"),
        (os, "posix_fallocate", "posix_fallocate"),
        (fcntl, "fcntl", r"fcntl\(F_ADD_SEALS\)"),
        (mmap, "mmap", "mmap"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(StagingMemoryError, match=rf"{call} failed for {MIB} bytes.*No space left") as caught:
                allocate(CPU, MIB)
            assert "lower slot_bytes" in caught.value.fix
        assert open_fds() == fds
        assert mapped_bytes() == mapped


def test_limit_of_the_process_is_an_error_and_no_signal() -> None:
    script = f"""
import resource, torch
from sglang_recv.errors import StagingMemoryError
from sglang_recv.memory import allocate
resource.setrlimit(resource.RLIMIT_FSIZE, ({MIB}, {MIB}))
allocate(torch.device("cpu"), {MIB}).close()
try:
    allocate(torch.device("cpu"), {2 * MIB})
except StagingMemoryError as error:
    print(error.message)
"""
    seen = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert re.match(rf"\w+ failed for {2 * MIB} bytes of shared memory: .*File too large", seen.stdout)


def test_export_without_a_free_fd_is_an_error() -> None:
    with allocate(CPU, 1) as buffer:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with buffer.export_fd() as lowest:
            number = lowest.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
        try:
            with pytest.raises(StagingMemoryError, match="could not be duplicated"):
                buffer.export_fd()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_host_that_does_not_tell_its_memory_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "_available_bytes", lambda: None)
    allocate(CPU, 1).close()


# The CUDA driver, stood in for


class Status:
    def __init__(self, name: str) -> None:
        self.name = name


class Names:
    """Enums: every name is its own value."""

    def __getattr__(self, name: str) -> str:
        return name


class StandInDriver:
    """As much of cuda.bindings.driver as we call. It keeps books, and fails where it is told to."""

    UNIT = 2 * MIB
    CUmemAllocationType = CUmemLocationType = CUmemAllocationHandleType = Names()
    CUmemAllocationGranularity_flags = CUmemAccess_flags = CUdevice_attribute = Names()

    def __init__(self) -> None:
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=Status("CUDA_SUCCESS"))
        self.fail: dict[str, str] = {}
        self.calls: list[str] = []
        self.owned: set[tuple[str, object]] = set()
        self.retained = 0
        self.current: object = "another context"
        self.imported = SimpleNamespace(location=SimpleNamespace(type="CU_MEM_LOCATION_TYPE_DEVICE", id=0))
        self.imported_size = 4 * MIB
        self._numbers = itertools.count(0x7000)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name in self.fail:
                return Status(self.fail[name]), None
            result = getattr(self, f"do_{name}")(*args)
            if isinstance(result, Status):
                return result, None
            return (self.CUresult.CUDA_SUCCESS, *result) if result is not None else (self.CUresult.CUDA_SUCCESS,)

        return call

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def _own(self, kind: str) -> tuple[int]:
        number = next(self._numbers)
        self.owned.add((kind, number))
        return (number,)

    def do_cuInit(self, flags: int) -> None: ...

    def do_cuDeviceGet(self, ordinal: int) -> tuple[int]:
        return (ordinal,)

    def do_cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[int]:
        return (int(attribute not in self.fail),)

    def do_cuDevicePrimaryCtxRetain(self, device: int) -> tuple[str]:
        self.retained += 1
        return ("primary",)

    def do_cuDevicePrimaryCtxRelease(self, device: int) -> None:
        self.retained -= 1

    def do_cuCtxGetCurrent(self) -> tuple[object]:
        return (self.current,)

    def do_cuCtxSetCurrent(self, context: object) -> None:
        self.current = context

    def do_cuMemGetInfo(self) -> tuple[int, int]:
        assert self.current == "primary"
        return 11, 22

    def do_cuMemGetAllocationGranularity(self, properties: Any, option: str) -> tuple[int]:
        return (self.UNIT,)

    def do_cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple[int]:
        assert nbytes % self.UNIT == 0
        assert self.current == "primary"
        assert properties.type == "CU_MEM_ALLOCATION_TYPE_PINNED"
        assert properties.requestedHandleTypes == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
        return self._own("memory")

    def do_cuMemImportFromShareableHandle(self, fd: int, kind: str) -> tuple[int]:
        os.fstat(fd)
        return self._own("memory")

    def do_cuMemExportToShareableHandle(self, handle: int, kind: str, flags: int) -> tuple[int]:
        assert ("memory", handle) in self.owned
        return (os.memfd_create("test", 0),)

    def do_cuMemGetAllocationPropertiesFromHandle(self, handle: int) -> tuple[Any]:
        return (self.imported,)

    def do_cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> tuple[int]:
        return self._own("address")

    def do_cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> Status | None:
        assert {("address", address), ("memory", handle)} <= self.owned
        if nbytes > self.imported_size:
            return Status("CUDA_ERROR_INVALID_VALUE")
        self.owned.add(("mapping", address))
        return None

    def do_cuMemSetAccess(self, address: int, nbytes: int, access: list[Any], count: int) -> None:
        assert ("mapping", address) in self.owned
        assert [a.location.id for a in access] == [0]

    def do_cuMemUnmap(self, address: int, nbytes: int) -> None:
        assert self.current == "primary"
        self.owned.remove(("mapping", address))

    def do_cuMemAddressFree(self, address: int, nbytes: int) -> None:
        assert ("mapping", address) not in self.owned
        self.owned.remove(("address", address))

    def do_cuMemRelease(self, handle: int) -> None:
        self.owned.remove(("memory", handle))

    def assert_nothing_left(self) -> None:
        assert self.owned == set()
        assert self.retained == 0
        assert self.current == "another context"


GPU = torch.device("cuda", 0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInDriver]:
    stand_in = StandInDriver()
    monkeypatch.setattr(cuda_vmm, "_load_driver", lambda: stand_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cuda_vmm._granularity.cache_clear()
    yield stand_in
    cuda_vmm._granularity.cache_clear()


def test_vmm_buffer_returns_everything(driver: StandInDriver) -> None:
    fds = open_fds()
    with allocate(GPU, 3 * MIB) as mine:
        assert (mine.nbytes, mine.kind, mine.device) == (4 * MIB, MemoryKind.CUDA_VMM, GPU)
        fd = mine.export_fd()
        assert not os.get_inheritable(fd.fileno())
        with import_buffer(GPU, fd, mine.nbytes):
            assert fd.closed
            assert driver.current == "another context"
            assert driver.retained == 2
            assert len(driver.owned) == 6
    driver.assert_nothing_left()
    assert open_fds() == fds
    mine.close()
    driver.assert_nothing_left()


def test_vmm_close_works_on_another_thread(driver: StandInDriver) -> None:
    buffer = allocate(GPU, 1)
    thread = threading.Thread(target=buffer.close)
    thread.start()
    thread.join(PATIENCE)
    driver.assert_nothing_left()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_failed_vmm_allocation_is_undone(call: str, driver: StandInDriver) -> None:
    driver.fail[call] = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(StagingMemoryError) as caught:
        allocate(GPU, 3 * MIB)
    assert f"{call} returned CUDA_ERROR_OUT_OF_MEMORY" in caught.value.message
    assert f"{4 * MIB} bytes on cuda:0, where 11 of 22 bytes are free" in caught.value.message
    assert "KV cache" in caught.value.fix
    driver.assert_nothing_left()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("cuMemImportFromShareableHandle", BadBufferError),
        ("cuMemGetAllocationPropertiesFromHandle", StagingMemoryError),
        ("cuMemAddressReserve", StagingMemoryError),
        ("cuMemMap", BadBufferError),
        ("cuMemSetAccess", StagingMemoryError),
    ],
)
def test_failed_vmm_import_is_undone(call: str, error: type[RecvError], driver: StandInDriver) -> None:
    fds = open_fds()
    driver.fail[call] = "CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(error, match=f"{call} returned CUDA_ERROR_INVALID_VALUE.* {4 * MIB} bytes"):
        import_buffer(GPU, OwnedFd(a_memfd()), 4 * MIB)
    driver.assert_nothing_left()
    assert open_fds() == fds


def test_vmm_import_of_more_than_there_is_is_refused(driver: StandInDriver) -> None:
    with pytest.raises(BadBufferError, match=f"{6 * MIB} bytes was announced"):
        import_buffer(GPU, OwnedFd(a_memfd()), 6 * MIB)
    driver.assert_nothing_left()


@pytest.mark.parametrize(
    ("kind", "ordinal", "where"),
    [("CU_MEM_LOCATION_TYPE_DEVICE", 1, "cuda:1"), ("CU_MEM_LOCATION_TYPE_HOST_NUMA", 0, "no GPU")],
)
def test_vmm_memory_elsewhere_is_refused(kind: str, ordinal: int, where: str, driver: StandInDriver) -> None:
    driver.imported.location.type, driver.imported.location.id = kind, ordinal
    with pytest.raises(BadBufferError, match=f"received for cuda:0 lives on {where}"):
        import_buffer(GPU, OwnedFd(a_memfd()), 4 * MIB)
    driver.assert_nothing_left()


def test_failed_vmm_export_is_named(driver: StandInDriver) -> None:
    with allocate(GPU, 1) as buffer:
        driver.fail["cuMemExportToShareableHandle"] = "CUDA_ERROR_NOT_SUPPORTED"
        with pytest.raises(StagingMemoryError, match="cuMemExportToShareableHandle returned CUDA_ERROR_NOT_SUPPORTED"):
            buffer.export_fd()
        assert "NOT_SUPPORTED" in str(probe(GPU))
    driver.assert_nothing_left()


def test_failed_vmm_close_frees_the_rest(driver: StandInDriver) -> None:
    buffer = allocate(GPU, 1)
    driver.fail["cuMemRelease"] = "CUDA_ERROR_ILLEGAL_ADDRESS"
    with pytest.raises(StagingMemoryError, match="freeing .* cuMemRelease returned CUDA_ERROR_ILLEGAL_ADDRESS"):
        buffer.close()
    assert {kind for kind, _ in driver.owned} == {"memory"}
    assert driver.retained == 0
    assert driver.current == "another context"
    buffer.close()


def test_vmm_buffer_is_left_alone_by_a_forked_child(driver: StandInDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = allocate(GPU, 1)
    calls = len(driver.calls)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        buffer.close()
    assert len(driver.calls) == calls


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_unusable_driver_is_unsupported(call: str, driver: StandInDriver) -> None:
    driver.fail[call] = "CUDA_ERROR_NO_DEVICE"
    with pytest.raises(UnsupportedError, match=f"{call} returned CUDA_ERROR_NO_DEVICE"):
        allocate(GPU, 1)
    driver.assert_nothing_left()


def test_full_gpu_is_no_unsupported_gpu(driver: StandInDriver) -> None:
    driver.fail["cuDevicePrimaryCtxRetain"] = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(StagingMemoryError, match="cuDevicePrimaryCtxRetain returned CUDA_ERROR_OUT_OF_MEMORY"):
        allocate(GPU, 1)
    driver.assert_nothing_left()


def test_gpu_that_cannot_export_is_unsupported(driver: StandInDriver) -> None:
    driver.fail["CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"] = ""
    assert "does not support memory export as a file descriptor" in str(probe(GPU))
    driver.assert_nothing_left()


def test_missing_cuda_bindings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    cuda_vmm._granularity.cache_clear()
    cuda_vmm._load_driver.cache_clear()
    fds = open_fds()
    try:
        with pytest.raises(UnsupportedError, match="cuda-bindings") as caught:
            import_buffer(GPU, OwnedFd(a_memfd()), 8 * MIB)
    finally:
        cuda_vmm._load_driver.cache_clear()
    assert caught.value.fix == "pip install sglang-recv[cuda]"
    assert open_fds() == fds
