"""ZMQ endpoints: creation, limits, framing and deadlines. Who says what is in docs/protocol.md.

Sockets are never shared between threads. Every socket has no linger (a dead peer must not hold an exiting process) and
refuses messages above the protocol's limit before they are buffered.
"""

from __future__ import annotations

import socket as pysocket
from pathlib import Path
from types import TracebackType
from typing import Final

import zmq

from sglang_recv.errors import EngineLostError
from sglang_recv.fdpass import check_path
from sglang_recv.wire import MAX_MESSAGE_BYTES

_QUEUE: Final = 4096


def ipc_url(path: Path) -> str:
    """The ZMQ address of a Unix socket at ``path``."""
    return f"ipc://{path}"


def _configure(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, _QUEUE)
    socket.setsockopt(zmq.RCVHWM, _QUEUE)


class Router:
    """A bound endpoint that many peers talk to; each peer has an identity.

    Parameters
    ----------
    context
        The ZMQ context.
    path
        Where to bind; the directory must be private (see :func:`sglang_recv.fdpass.make_private_dir`).
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        check_path(path)
        self.path = path
        self.url = ipc_url(path)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        _configure(self.socket)
        # Without it a message to a peer that went away vanishes silently; with it send() tells us.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(self.url)

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next (identity, payload), or None when nothing waits. Other framings are dropped."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) == 2:
                return frames[0], frames[1]

    def send(self, identity: bytes, payload: bytes) -> bool:
        """Send to one peer; False when that peer is gone or its queue is full."""
        try:
            self.socket.send_multipart([identity, payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """Close the socket and remove its file."""
        self.socket.close()
        self.path.unlink(missing_ok=True)


class Dealer:
    """A connection to a :class:`Router`, used by one thread at a time.

    Parameters
    ----------
    context
        The ZMQ context.
    url
        The address that the peer published.
    identity
        How the router knows this peer; chosen by ZMQ when None.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], url: str, identity: bytes | None = None) -> None:
        self.url = url
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        _configure(self.socket)
        if identity is not None:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(url)

    def send(self, payload: bytes) -> None:
        """Queue one message.

        Raises
        ------
        EngineLostError
            When the queue is full: the peer has not read for thousands of messages.
        """
        try:
            self.socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            raise EngineLostError(
                f"{self.url} has read none of the last {_QUEUE} messages",
                fix="look at the log of the engine; restart it if it hangs",
            ) from None

    def receive(self) -> bytes | None:
        """The next payload, or None when nothing waits."""
        try:
            return self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        """Close the connection; queued messages are dropped."""
        self.socket.close()

    def __enter__(self) -> Dealer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Wakeup:
    """Wakes a poller from another thread: a pair of sockets, because an fd is what every poller takes."""

    def __init__(self) -> None:
        self._reader, self._writer = pysocket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The fd to poll for reading."""
        return self._reader.fileno()

    def set(self) -> None:
        """Make the fd readable. Safe from any thread."""
        try:
            self._writer.send(b"\0")
        except BlockingIOError:
            pass  # full means that a wake-up is already pending
        except OSError:
            pass  # closed while another thread was finishing its work: nobody is left to wake

    def clear(self) -> None:
        """Make the fd unreadable again; call before looking at what was queued."""
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()
