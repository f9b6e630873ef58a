"""Messages and fds between processes: data, ownership of every fd, and who may connect."""

from __future__ import annotations

import array
import contextlib
import gc
import os
import re
import resource
import select
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_recv import fdpass
from sglang_recv.errors import (
    BadMessageError,
    BusyError,
    EngineLostError,
    LimitError,
    PeerDeniedError,
    UnsupportedError,
)
from sglang_recv.fdpass import MAX_MESSAGE, MAX_PATH, FdConnection, FdListener, PeerCredentials, make_private_dir
from sglang_recv.fds import OwnedFd, describe_fd

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds: a child on a busy machine needs a few to start
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def open_fds() -> set[str]:
    """The fds of this process, each with what it is."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        # The one that listed the folder is gone.
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{name}: {os.readlink(f'/proc/self/fd/{name}')}")
    return found


def temporary_file(content: bytes = b"") -> OwnedFd:
    fd = OwnedFd(os.memfd_create("test", os.MFD_CLOEXEC))
    os.pwrite(fd.fileno(), content, 0)
    return fd


def accept(listener: FdListener) -> FdConnection:
    assert select.select([listener], [], [], PATIENCE)[0], "nobody connected"
    return listener.accept()


@contextlib.contextmanager
def child(script: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """Run a script in a process of its own, and expect it to end well."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors + output
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[FdConnection, FdConnection]]:
    """The two ends of a connection, and afterwards a check that all fds are back."""
    before = open_fds()
    with FdListener(tmp_path / "s") as listener, FdConnection.connect(tmp_path / "s", 1) as client:
        with accept(listener) as server:
            yield client, server
    assert open_fds() == before


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[tuple[socket.socket, FdConnection]]:
    """A peer that breaks the rules, and our end."""
    before = open_fds()
    with FdListener(tmp_path / "s") as listener, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(tmp_path / "s"))
        with accept(listener) as server:
            yield peer, server
    assert open_fds() == before


def rights(*fds: int) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]


# OwnedFd


def test_owned_fd_closes_once() -> None:
    before = open_fds()
    with temporary_file() as fd:
        number = fd.fileno()
        assert repr(fd) == f"<OwnedFd {number}>"
    assert fd.closed
    assert open_fds() == before
    # Another file may get the number now, and must survive a second close.
    other = os.memfd_create("other")
    try:
        fd.close()
        os.fstat(other)
    finally:
        os.close(other)


def test_closed_fd_cannot_be_used() -> None:
    fd = temporary_file()
    fd.close()
    with pytest.raises(ValueError, match="closed or detached"):
        fd.fileno()
    with pytest.raises(ValueError, match="closed or detached"):
        fd.detach()


def test_detached_fd_belongs_to_the_caller() -> None:
    fd = temporary_file(b"kept")
    number = fd.detach()
    fd.close()
    try:
        assert os.pread(number, 4, 0) == b"kept"
    finally:
        os.close(number)
    with pytest.raises(ValueError, match="closed or detached"):
        fd.fileno()


def test_negative_fd_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        OwnedFd(-1)


def test_forgotten_fd_warns_and_is_closed() -> None:
    before = open_fds()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        temporary_file()
        gc.collect()
    assert [w.category for w in caught] == [ResourceWarning]
    assert "unclosed <OwnedFd" in str(caught[0].message)
    assert open_fds() == before


def test_description_names_what_an_fd_is() -> None:
    ends = os.pipe()
    try:
        assert describe_fd(ends[0]) == "a pipe"
    finally:
        for end in ends:
            os.close(end)
    with temporary_file(b"123") as fd:
        assert describe_fd(fd.fileno()) == "a regular file of 3 bytes"
        number = fd.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        describe_fd(number)


# The directory


def test_private_dir_is_made_with_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    make_private_dir(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    make_private_dir(path)  # an existing one is fine


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o777, 0o750])
def test_open_dir_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(PeerDeniedError, match=f"mode {mode:#o}") as caught:
        make_private_dir(path)
    assert f"chmod 700 {path}" in caught.value.fix


def test_link_to_a_private_dir_is_refused(tmp_path: Path) -> None:
    make_private_dir(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(UnsupportedError, match="symbolic link"):
        make_private_dir(tmp_path / "link")


def test_file_instead_of_a_dir_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnsupportedError, match="not a directory"):
        make_private_dir(tmp_path / "file")
    with pytest.raises(UnsupportedError, match="cannot be created"):
        make_private_dir(tmp_path / "file" / "below")


@needs_root
def test_foreign_dir_is_refused(tmp_path: Path) -> None:
    make_private_dir(tmp_path / "foreign")
    os.chown(tmp_path / "foreign", NOBODY, NOBODY)
    with pytest.raises(PeerDeniedError, match=f"belongs to uid {NOBODY}.*runs as uid 0"):
        make_private_dir(tmp_path / "foreign")


# The path


def test_path_at_the_limit_works_and_beyond_it_is_refused(tmp_path: Path) -> None:
    longest = tmp_path / ("x" * (MAX_PATH - len(str(tmp_path)) - 1))
    with FdListener(longest) as listener, FdConnection.connect(longest, 1) as client, accept(listener) as server:
        client.send(b"far")
        assert server.recv(1) == (b"far", None)
    for too_long in (Path(f"{longest}y"), Path(str(longest)[:-1] + "ä")):
        with pytest.raises(LimitError, match=f"has 108 bytes, and Unix sockets allow {MAX_PATH}") as caught:
            FdListener(too_long)
        assert caught.value.fix == "set SGLANG_RECV_DIR to a shorter path"
        with pytest.raises(LimitError):
            FdConnection.connect(too_long, 1)


def test_closing_a_listener_removes_its_file_once(tmp_path: Path) -> None:
    path = tmp_path / "s"
    before = open_fds()
    listener = FdListener(path)
    assert stat.S_ISSOCK(path.stat().st_mode)
    listener.close()
    assert not path.exists()
    path.touch()  # not ours
    listener.close()
    assert path.exists()
    assert listener.fileno() == -1
    assert open_fds() == before


def test_closing_a_listener_leaves_its_successors_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    old = FdListener(path)
    path.rename(tmp_path / "moved")
    with FdListener(path):
        old.close()
        assert path.exists()


def test_file_of_a_dead_listener_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    with FdListener(path) as listener, FdConnection.connect(path, 1), accept(listener):
        pass


def test_live_listener_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with FdListener(path) as listener:
        with pytest.raises(BusyError, match="another process listens"):
            FdListener(path)
        with accept(listener), pytest.raises(BlockingIOError):  # what the second one knocked with
            listener.accept()


def test_other_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(UnsupportedError, match="no socket"):
        FdListener(tmp_path / "s")
    assert (tmp_path / "s").read_text() == "precious"
    with pytest.raises(UnsupportedError, match="cannot be made"):
        FdListener(tmp_path / "absent" / "s")


# Connecting


def test_accept_does_not_wait(tmp_path: Path) -> None:
    with FdListener(tmp_path / "s") as listener, pytest.raises(BlockingIOError):
        listener.accept()


def test_connecting_to_nobody_says_where(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with pytest.raises(EngineLostError, match=str(path)):
        FdConnection.connect(path, 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    with pytest.raises(EngineLostError, match="nobody listens"):
        FdConnection.connect(path, 1)


def test_full_queue_times_out(tmp_path: Path) -> None:
    before = open_fds()
    with FdListener(tmp_path / "s") as listener, contextlib.ExitStack() as queue:

        def fill() -> None:
            for _ in range(1000):
                queue.enter_context(FdConnection.connect(tmp_path / "s", 0.05))

        with pytest.raises(TimeoutError, match="took no connection"):
            fill()
        # A place in the queue is enough to go on.
        with accept(listener):
            queue.enter_context(FdConnection.connect(tmp_path / "s", PATIENCE))
    assert open_fds() == before


def test_both_ends_know_each_other(pair: tuple[FdConnection, FdConnection]) -> None:
    for end in pair:
        assert end.peer == (os.getpid(), os.geteuid(), os.getegid())
        assert not os.get_inheritable(end.fileno())


def test_foreign_peer_is_refused_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the kernel says is stood in for, so that this runs as any user. The next test has real users.
    before = open_fds()
    denied = f"runs as uid 777, .*runs as uid {os.geteuid()}$"
    with FdListener(tmp_path / "s") as listener:
        with monkeypatch.context() as patch:
            patch.setattr(fdpass, "_credentials", lambda _: PeerCredentials(1, 777, 0))
            with pytest.raises(PeerDeniedError) as caught:
                FdConnection.connect(tmp_path / "s", 1)
            assert re.search(denied, caught.value.message)
            with pytest.raises(PeerDeniedError) as caught:
                accept(listener)
            assert re.search(denied, caught.value.message)
        with FdConnection.connect(tmp_path / "s", 1) as client, accept(listener) as server:
            client.send(b"the listener goes on")
            assert server.recv(1) == (b"the listener goes on", None)
    assert open_fds() == before


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """A directory that another user can reach, which pytest's are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@needs_root
def test_another_user_cannot_connect(public_dir: Path) -> None:
    script = f"""
import os, sys
from pathlib import Path
from sglang_recv.fdpass import FdConnection
os.setgid({NOBODY}); os.setuid({NOBODY})
with FdConnection.connect(Path(sys.argv[1]), {PATIENCE}) as connection:  # to root, which is let through
    assert connection.peer.uid == 0
    try:
        connection.recv({PATIENCE})
    except EOFError:
        print("refused")
"""
    with FdListener(public_dir / "s") as listener:
        (public_dir / "s").chmod(0o666)
        with child(script, public_dir / "s") as process:
            with pytest.raises(PeerDeniedError, match=f"runs as uid {NOBODY}, .*runs as uid 0"):
                accept(listener)
            assert process.stdout is not None
            assert process.stdout.readline() == "refused\n"


@needs_root
def test_another_users_listener_is_refused(public_dir: Path) -> None:
    script = f"""
import os, sys
from pathlib import Path
from sglang_recv.fdpass import FdListener
os.setgid({NOBODY}); os.setuid({NOBODY})
with FdListener(Path(sys.argv[1])):
    print("listening", flush=True)
    sys.stdin.read()
"""
    before = open_fds()
    with child(script, public_dir / "s") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        with pytest.raises(PeerDeniedError, match=f"runs as uid {NOBODY}, .*runs as uid 0"):
            FdConnection.connect(public_dir / "s", PATIENCE)
    assert open_fds() == before


@needs_root
def test_closed_directory_is_named(tmp_path: Path) -> None:
    script = f"""
import os, sys
from pathlib import Path
from sglang_recv.errors import PeerDeniedError
from sglang_recv.fdpass import FdConnection
os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    FdConnection.connect(Path(sys.argv[1]), {PATIENCE})
except PeerDeniedError as error:
    print(error.message)
"""
    make_private_dir(tmp_path / "closed")
    with FdListener(tmp_path / "closed" / "s"), child(script, tmp_path / "closed" / "s") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"uid {NOBODY} may not connect to {tmp_path}")


# Messages


def test_messages_arrive_whole_in_order_and_both_ways(pair: tuple[FdConnection, FdConnection]) -> None:
    client, server = pair
    largest = os.urandom(MAX_MESSAGE)
    client.send(b"first")
    client.send(largest)
    server.send(b"\x00")
    assert server.recv(1) == (b"first", None)
    assert server.recv(None) == (largest, None)
    assert client.recv(1) == (b"\x00", None)


def test_fd_arrives_with_its_message(pair: tuple[FdConnection, FdConnection]) -> None:
    client, server = pair
    with temporary_file(b"sent") as sent:
        client.send(b"without")
        client.send(b"with", sent.fileno())
        client.send(b"without again")
        assert server.recv(1) == (b"without", None)
        payload, received = server.recv(1)
        assert payload == b"with"
        assert received is not None
        with received:
            assert received.fileno() != sent.fileno()
            assert not os.get_inheritable(received.fileno())
            assert os.pread(received.fileno(), 4, 0) == b"sent"
            os.pwrite(received.fileno(), b"back", 0)
            assert os.pread(sent.fileno(), 4, 0) == b"back"
        assert server.recv(1) == (b"without again", None)


def test_fd_crosses_processes(tmp_path: Path) -> None:
    script = f"""
import os, sys
from pathlib import Path
from sglang_recv.fdpass import FdConnection
with FdConnection.connect(Path(sys.argv[1]), {PATIENCE}) as connection:
    payload, fd = connection.recv({PATIENCE})
    with fd:
        seen = os.pread(fd.fileno(), 100, 0)
        os.pwrite(fd.fileno(), seen[::-1], 0)
    fd = os.memfd_create("theirs")
    os.pwrite(fd, b"from the child", 0)
    connection.send(payload + b" " + seen + b" %d" % os.getpid(), fd)
"""
    before = open_fds()
    with FdListener(tmp_path / "s") as listener, child(script, tmp_path / "s") as process, accept(listener) as server:
        with temporary_file(b"abc") as sent:
            server.send(b"seen:", sent.fileno())
            payload, theirs = server.recv(PATIENCE)
            assert payload == b"seen: abc %d" % process.pid
            assert server.peer.pid == process.pid
            assert os.pread(sent.fileno(), 100, 0) == b"cba"
        assert theirs is not None
        with theirs:
            assert os.pread(theirs.fileno(), 100, 0) == b"from the child"
        with pytest.raises(EOFError):
            server.recv(PATIENCE)
    assert open_fds() == before


@pytest.mark.parametrize("size", [0, MAX_MESSAGE + 1])
def test_message_of_a_wrong_size_is_not_sent(size: int, pair: tuple[FdConnection, FdConnection]) -> None:
    client, server = pair
    with pytest.raises(LimitError, match=f"{size} bytes"):
        client.send(b"x" * size)
    with pytest.raises(BlockingIOError):
        server.recv(0)


def test_waiting_ends_in_time(pair: tuple[FdConnection, FdConnection]) -> None:
    client, server = pair
    with pytest.raises(BlockingIOError):
        server.recv(0)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        server.recv(0.05)
    assert time.monotonic() - start >= 0.05

    def fill() -> None:
        for _ in range(1000):
            client.send(b"x" * MAX_MESSAGE, timeout=0)

    with pytest.raises(BlockingIOError):
        fill()
    with pytest.raises(TimeoutError, match=r"did not read within 0\.05 s"):
        client.send(b"x" * MAX_MESSAGE, timeout=0.05)
    server.recv(0)
    client.send(b"there is room again", timeout=1)


def test_receiver_wakes_when_a_message_comes(pair: tuple[FdConnection, FdConnection]) -> None:
    client, server = pair
    got: list[tuple[bytes, OwnedFd | None]] = []
    waiting = threading.Thread(target=lambda: got.append(server.recv(PATIENCE)))
    waiting.start()
    client.send(b"wake up")
    waiting.join(PATIENCE)
    assert got == [(b"wake up", None)]


def test_closed_peer_is_the_end(pair: tuple[FdConnection, FdConnection]) -> None:
    client, server = pair
    client.send(b"last words")
    client.close()
    client.close()
    assert client.fileno() == -1
    assert server.recv(1) == (b"last words", None)
    with pytest.raises(EOFError):
        server.recv(0)
    with pytest.raises(EOFError):
        server.send(b"anybody?")


def test_peer_that_closes_with_unread_messages_is_the_end(pair: tuple[FdConnection, FdConnection]) -> None:
    client, server = pair
    server.send(b"never read")
    client.close()
    for _ in range(2):
        with pytest.raises(EOFError):
            server.recv(1)


def test_closing_reaches_the_peer_although_a_copy_is_open(pair: tuple[FdConnection, FdConnection]) -> None:
    client, server = pair
    copy = os.dup(client.fileno())  # as a forked child has
    try:
        client.close()
        with pytest.raises(EOFError):
            server.recv(1)
    finally:
        os.close(copy)


def test_unread_fd_is_closed_with_the_connection(pair: tuple[FdConnection, FdConnection]) -> None:
    # The pair's fixture counts fds; here the file itself must be gone.
    client, server = pair
    read, write = os.pipe()
    client.send(b"never read", write)
    os.close(write)
    server.close()
    try:
        assert os.read(read, 1) == b""  # EOF: nobody holds the other end any more
    finally:
        os.close(read)


# Peers that break the rules


@pytest.mark.parametrize("count", [2, 3, 100])
def test_message_with_more_than_one_fd_is_refused(count: int, raw: tuple[socket.socket, FdConnection]) -> None:
    peer, server = raw
    before = open_fds()
    with temporary_file() as fd:
        peer.sendmsg([b"many"], rights(*[fd.fileno()] * count))
    with pytest.raises(BadMessageError, match=r"came with (2 fds|more than one fd)"):
        server.recv(1)
    assert open_fds() == before
    peer.send(b"the connection goes on")
    assert server.recv(1) == (b"the connection goes on", None)


@pytest.mark.parametrize("with_fd", [False, True])
def test_message_that_is_too_long_is_refused(with_fd: bool, raw: tuple[socket.socket, FdConnection]) -> None:
    peer, server = raw
    before = open_fds()
    with temporary_file() as fd:
        peer.sendmsg([b"x" * (MAX_MESSAGE + 1)], rights(fd.fileno()) if with_fd else [])
    with pytest.raises(BadMessageError, match=f"longer than {MAX_MESSAGE} bytes"):
        server.recv(1)
    assert open_fds() == before


def test_fd_without_a_payload_is_refused(raw: tuple[socket.socket, FdConnection]) -> None:
    peer, server = raw
    before = open_fds()
    with temporary_file() as fd:
        peer.sendmsg([b""], rights(fd.fileno()))
    with pytest.raises(BadMessageError, match="no payload"):
        server.recv(1)
    assert open_fds() == before


def test_empty_message_is_the_end(raw: tuple[socket.socket, FdConnection]) -> None:
    peer, server = raw
    peer.send(b"")
    with pytest.raises(EOFError):
        server.recv(1)


def test_fd_that_finds_no_room_is_refused(raw: tuple[socket.socket, FdConnection]) -> None:
    peer, server = raw
    with temporary_file() as fd:
        peer.sendmsg([b"one"], rights(fd.fileno()))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Not even the next free number may be used.
        lowest = os.dup(fd.fileno())
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            with pytest.raises(BadMessageError, match="no room"):
                server.recv(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_unclosed_connection_warns(tmp_path: Path) -> None:
    before = open_fds()
    with FdListener(tmp_path / "s") as listener:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            FdConnection.connect(tmp_path / "s", 1)
            gc.collect()
        assert [w.category for w in caught] == [ResourceWarning]
        accept(listener).close()
    assert open_fds() == before
