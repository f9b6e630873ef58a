"""A Unix socket that carries small messages, each with at most one fd: the only place an fd crosses a process.

The sockets are of type SEQPACKET, so a message is one packet: it arrives whole, in order, with its fd, or not at all.
Both sides ask the kernel who the other is, and talk only to their own user (or root). Nothing here waits unless it is
given a timeout, and nothing trusts what it receives: an fd that does not belong is closed before anybody sees it.
"""

from __future__ import annotations

import array
import errno
import math
import os
import select
import socket
import stat
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from sglang_recv.errors import (
    BadMessageError,
    BusyError,
    EngineLostError,
    LimitError,
    PeerDeniedError,
    UnsupportedError,
)
from sglang_recv.fds import OwnedFd

__all__ = [
    "MAX_MESSAGE",
    "MAX_PATH",
    "FdConnection",
    "FdListener",
    "OwnedFd",
    "PeerCredentials",
    "check_path",
    "make_private_dir",
]

MAX_MESSAGE = 65536
"""Largest message in bytes."""

MAX_PATH = 107
"""Longest path of a Unix socket in bytes: ``sun_path`` has 108, the last of which is the terminator."""

_BACKLOG = 64
_UCRED = struct.Struct("iII")
_TIMEVAL = struct.Struct("ll")


class PeerCredentials(NamedTuple):
    """Who is on the other end, as the kernel says.

    The pid is for logs only: it is a number in our own PID namespace (0 if the peer has none there), and it can be
    reused.
    """

    pid: int
    uid: int
    gid: int


def make_private_dir(path: Path) -> None:
    """Create a directory that only this user can enter, or check that an existing one is such.

    Raises
    ------
    PeerDeniedError
        If another user owns the directory, or may enter it.
    UnsupportedError
        If the path is a symbolic link or no directory, or cannot be created.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=False)
    except FileExistsError:
        pass  # checked below, as is one that we made ourselves
    except OSError as error:
        raise UnsupportedError(
            f"the socket directory {path} cannot be created: {error}",
            fix="set SGLANG_RECV_DIR to a directory you can create",
        ) from error
    # lstat, because a link's target could be exchanged after this check.
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a directory"
        raise UnsupportedError(f"the socket directory {path} is {what}", fix="set SGLANG_RECV_DIR to a real directory")
    if status.st_uid != os.geteuid():
        raise PeerDeniedError(
            f"the socket directory {path} belongs to uid {status.st_uid}, but this process runs as uid {os.geteuid()}",
            fix="set SGLANG_RECV_DIR to a directory of your own",
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise PeerDeniedError(
            f"the socket directory {path} has mode {mode:#o}, which lets others in; it must be 0o700",
            fix=f"chmod 700 {path}, or set SGLANG_RECV_DIR to another directory",
        )


class FdListener:
    """Accepts connections on a path, from this user alone.

    Parameters
    ----------
    path
        Where to listen, in a directory from :func:`make_private_dir`. A socket file that a dead process left there is
        replaced.

    Raises
    ------
    LimitError
        If the path is longer than :data:`MAX_PATH` bytes.
    BusyError
        If another process listens there.
    UnsupportedError
        If the path cannot be bound.
    """

    def __init__(self, path: Path) -> None:
        self._closed = True
        check_path(path)
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setblocking(False)
            try:
                self._socket.bind(os.fspath(path))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                _remove_stale(path)
                self._socket.bind(os.fspath(path))
            self._socket.listen(_BACKLOG)
            self._inode = _inode(path)
        except OSError as error:
            self._socket.close()
            raise UnsupportedError(
                f"the socket {path} cannot be made: {error}", fix="set SGLANG_RECV_DIR to a directory on a local disk"
            ) from error
        except BaseException:
            self._socket.close()
            raise
        self._closed = False

    def fileno(self) -> int:
        """For ``poll``: readable when :meth:`accept` has something to do. -1 when closed."""
        return self._socket.fileno()

    def accept(self) -> FdConnection:
        """Take one waiting connection; does not wait for one.

        Raises
        ------
        BlockingIOError
            If nobody is waiting.
        PeerDeniedError
            If the peer is another user. It has been disconnected, and the listener goes on.
        """
        peer, _ = self._socket.accept()
        return FdConnection(peer)

    def close(self) -> None:
        """Stop listening and remove the socket file; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._socket.close()
        # Only our own: another process may have found our file stale after a crash of ours, or moved a new one over it.
        try:
            if _inode(self.path) == self._inode:
                self.path.unlink()
        except FileNotFoundError:
            pass

    def __enter__(self) -> FdListener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FdConnection:
    """One end of a connection. Use :meth:`connect` or :meth:`FdListener.accept`.

    One thread may send while another receives. An end that is garbage collected unclosed emits a ``ResourceWarning``.

    Parameters
    ----------
    sock
        A connected SEQPACKET socket; owned from here on, and closed if the peer is refused.

    Raises
    ------
    PeerDeniedError
        If the peer is another user.
    """

    peer: PeerCredentials
    """Who is on the other end."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        try:
            # Always non-blocking, and waits are polls: a timeout set on the socket would be shared by both directions.
            sock.setblocking(False)
            self.peer = _credentials(sock)
            _check_peer(self.peer)
        except BaseException:
            sock.close()
            raise

    @classmethod
    def connect(cls, path: Path, timeout: float) -> FdConnection:
        """Connect to a listener.

        Parameters
        ----------
        path
            The listener's path.
        timeout
            How long to wait while the listener's queue is full, in seconds.

        Raises
        ------
        EngineLostError
            If nobody listens there.
        LimitError
            If the path is longer than :data:`MAX_PATH` bytes.
        PeerDeniedError
            If the listener is another user, or its directory is closed to us.
        TimeoutError
            If the listener's queue stayed full.
        """
        check_path(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(None)  # whatever socket.setdefaulttimeout says
            # A non-blocking connect to a full queue fails at once, with nothing to poll for; a blocking one waits for
            # as long as the send timeout says. There 0 would mean for ever.
            micros = max(1, math.ceil(timeout * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*divmod(micros, 1_000_000)))
            sock.connect(os.fspath(path))
        except BlockingIOError as error:
            sock.close()
            raise TimeoutError(f"the listener at {path} took no connection within {timeout} s") from error
        except PermissionError as error:
            sock.close()
            raise PeerDeniedError(
                f"uid {os.geteuid()} may not connect to {path}: {error}", fix="run both processes as the same user"
            ) from error
        except OSError as error:
            sock.close()
            raise EngineLostError(
                f"nobody listens at {path}: {error}",
                fix="check that the engine runs, and that both sides see the same SGLANG_RECV_DIR",
            ) from error
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    def fileno(self) -> int:
        """For ``poll``: readable when :meth:`recv` has something to do. -1 when closed."""
        return self._socket.fileno()

    def send(self, payload: bytes, fd: int | None = None, timeout: float | None = None) -> None:
        """Send one message.

        Parameters
        ----------
        payload
            1 to :data:`MAX_MESSAGE` bytes.
        fd
            A file descriptor to go with it. The peer gets a duplicate; the caller keeps this one.
        timeout
            How long to wait for a peer that does not read, in seconds; None for as long as it takes.

        Raises
        ------
        LimitError
            If the payload is empty or too long.
        BlockingIOError
            If `timeout` is 0 and the peer's queue is full.
        TimeoutError
            If the peer's queue stayed full.
        EOFError
            If the peer has closed.
        """
        # An empty packet cannot be told from the end of the connection.
        if not 1 <= len(payload) <= MAX_MESSAGE:
            raise LimitError(
                f"a message of {len(payload)} bytes cannot be sent with an fd; 1 to {MAX_MESSAGE} bytes can",
                fix="send large data over the control channel",
            )
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        deadline = _Deadline(timeout)
        while True:
            try:
                self._socket.sendmsg([payload], rights, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                if timeout == 0:
                    raise
                deadline.wait(self._socket, select.POLLOUT, "the peer did not read")
            except (BrokenPipeError, ConnectionResetError) as error:
                raise EOFError("the peer has closed the connection") from error

    def recv(self, timeout: float | None) -> tuple[bytes, OwnedFd | None]:
        """Receive one message.

        Parameters
        ----------
        timeout
            How long to wait, in seconds; None for as long as it takes, 0 not at all.

        Returns
        -------
        tuple
            The payload, and the fd that came with it or None. The caller owns the fd, which is close-on-exec.

        Raises
        ------
        BadMessageError
            If the message is too long, or came with more than one fd. Its fds have been closed.
        BlockingIOError
            If `timeout` is 0 and there is no message.
        TimeoutError
            If no message came in time.
        EOFError
            If the peer has closed.
        """
        deadline = _Deadline(timeout)
        while True:
            try:
                return self._receive()
            except BlockingIOError:
                if timeout == 0:
                    raise
                deadline.wait(self._socket, select.POLLIN, "no message came")
            except ConnectionResetError as error:
                raise EOFError("the peer has closed the connection without reading what was sent to it") from error

    def _receive(self) -> tuple[bytes, OwnedFd | None]:
        # Room for one fd. By its alignment the kernel fits a second one in; it drops what is beyond and sets
        # MSG_CTRUNC. So a peer that sends hundreds cannot fill our fd table.
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        payload, ancillary, flags, _ = self._socket.recvmsg(MAX_MESSAGE, room, socket.MSG_CMSG_CLOEXEC)
        received = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
        fds = [OwnedFd(fd) for fd in received]
        problem = None
        if flags & socket.MSG_CTRUNC:
            problem = "a message came with more than one fd, or with one that this process has no room for"
        elif flags & socket.MSG_TRUNC:
            problem = f"a message is longer than {MAX_MESSAGE} bytes"
        elif len(fds) > 1:
            problem = f"a message came with {len(fds)} fds, and 1 is allowed"
        elif fds and not payload:
            problem = "a message has an fd and no payload"
        if problem is not None:
            for fd in fds:
                fd.close()
            raise BadMessageError(
                problem,
                fix="use the same version of sglang_recv on both sides, and check the limit on open files (ulimit -n)",
            )
        if not payload:
            raise EOFError("the peer has closed the connection")
        return payload, fds[0] if fds else None

    def close(self) -> None:
        """Close this end; the peer gets EOF at once. Idempotent."""
        if self._socket.fileno() < 0:
            return
        # A child process that was forked off may hold a copy of the socket; the peer must see the end all the same.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # ENOTCONN: the peer was faster
        self._socket.close()

    def __enter__(self) -> FdConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Deadline:
    """The end of a wait that may take several polls."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    def wait(self, sock: socket.socket, event: int, what: str) -> None:
        """Wait for `event`, or raise TimeoutError."""
        poll = select.poll()
        poll.register(sock, event)
        if self._end is None:
            poll.poll()
            return
        left = self._end - time.monotonic()
        # Rounded up: poll counts whole milliseconds, and 0 of them would make this a busy loop.
        if left <= 0 or not poll.poll(math.ceil(left * 1000)):
            raise TimeoutError(f"{what} within {self._timeout} s")


def check_path(path: Path) -> None:
    """Refuse a path that no Unix socket can be bound to.

    Raises
    ------
    LimitError
        If it is longer than :data:`MAX_PATH` bytes.
    """
    length = len(os.fsencode(path))
    if length > MAX_PATH:
        raise LimitError(
            f"the socket path {path} has {length} bytes, and Unix sockets allow {MAX_PATH}",
            fix="set SGLANG_RECV_DIR to a shorter path",
        )


def _credentials(sock: socket.socket) -> PeerCredentials:
    return PeerCredentials(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def _check_peer(peer: PeerCredentials) -> None:
    # Root is let through because it could read our memory anyway.
    if peer.uid not in (os.geteuid(), 0):
        raise PeerDeniedError(
            f"the process on the other end runs as uid {peer.uid}, but this process runs as uid {os.geteuid()}",
            fix="run the trainer and the engine as the same user",
        )


def _inode(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _remove_stale(path: Path) -> None:
    """Remove a socket file that nobody listens on."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise UnsupportedError(
            f"{path} exists and is no socket", fix="remove it, or set SGLANG_RECV_DIR to another directory"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:
            pass  # a full queue or another type of socket: somebody is there
    raise BusyError(f"another process listens at {path}", fix="stop it, or set SGLANG_RECV_DIR to another directory")
