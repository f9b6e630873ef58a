"""Connections of one sender to the ranks that it feeds, and the waits on them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import zmq

from sglang_recv import wire
from sglang_recv.channel import Dealer, Wakeup
from sglang_recv.client.select import Pair
from sglang_recv.errors import (
    BadMessageError,
    DeadlineError,
    EngineLostError,
    RecvError,
    SessionAbortedError,
    SessionStateError,
)
from sglang_recv.fdpass import FdConnection
from sglang_recv.wire import (
    Aborted,
    Ack,
    Alive,
    Attach,
    Attached,
    BufferMapped,
    Checksum,
    Committed,
    Error,
    Heartbeat,
    Hello,
    OfferBuffer,
    Opened,
    PlanReport,
    Prepared,
    RankMessage,
    RankSeconds,
    Released,
    SenderMessage,
    Welcome,
)

logger = logging.getLogger(__name__)

#: How long to wait for better news after a rank reported that another one failed, in seconds.
_GRACE: Final = 2.0
#: How long a rank that closed its connection may take to say why, in seconds.
_LAST_WORDS: Final = 2.0
_POLL_MS: Final = 100


class RankLink:
    """One rank of one engine, and what it has said so far."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], engine: str, pair: Pair) -> None:
        self.engine = engine
        self.info = pair.rank
        self.device = pair.device
        self.name = f"engine {engine} rank {pair.rank.rank}"
        self.dealer = Dealer(context, pair.rank.control)
        self.fds: FdConnection | None = None
        #: Answers on it that came before anyone waited for them.
        self._early: deque[bytes] = deque()
        self.welcome: Welcome | None = None
        self.opened = False
        self.recalled = False
        self.prepared = False
        self.committed = False
        self.plan: PlanReport | None = None
        self.spent: RankSeconds | None = None
        self.aborted: Aborted | None = None
        self.error: RecvError | None = None
        #: True when ``error`` is not the rank's word, but made of its closed connection or its silence.
        self.assumed = False
        self.closed_at: float | None = None
        self.weights_state = ""
        self.acked = 0
        self.load_seconds = 0.0
        self.released: set[int] = set()
        self.checksum: Checksum | None = None
        self.alive_at = time.monotonic()
        self.activity = ""

    @property
    def over(self) -> bool:
        """True when the rank has ended the session, in whatever way."""
        return self.committed or self.aborted is not None or self.error is not None

    def send(self, message: SenderMessage) -> None:
        """Queue a message."""
        self.dealer.send(wire.encode(message))

    def pump(self) -> None:
        """Take in everything that the rank has sent."""
        while (raw := self.dealer.receive()) is not None:
            self._take(wire.decode(raw, wire.RankMessage))

    def _take(self, message: RankMessage) -> None:
        self.alive_at = time.monotonic()
        if isinstance(message, Ack):
            self.acked = message.round + 1
            self.load_seconds += message.seconds
        elif isinstance(message, Welcome):
            self.welcome = message
        elif isinstance(message, Opened):
            self.opened, self.recalled = True, message.recalled
        elif isinstance(message, Released):
            self.released.add(message.buffer)
        elif isinstance(message, Prepared):
            self.prepared = True
        elif isinstance(message, Committed):
            self.committed, self.plan, self.spent = True, message.plan, message.spent
        elif isinstance(message, Aborted):
            self.aborted = message
            self.weights_state = message.weights_state
        elif isinstance(message, Checksum):
            self.checksum = message
        elif isinstance(message, Error):
            # What the rank itself says goes before what this side assumed of its silence.
            if self.error is None or self.assumed:
                self.error, self.assumed = message.exception(), False
            self.weights_state = message.weights_state

    def connect(self, timeout: float) -> None:
        """Open the Unix connection; unlike ZMQ's it says at once when nobody is there.

        Raises
        ------
        EngineLostError
            When the rank's socket is gone.
        PeerDeniedError
            When it belongs to another user.
        """
        try:
            self.fds = FdConnection.connect(Path(self.info.fds), timeout)
        except OSError as error:
            raise EngineLostError(
                f"{self.name}: nobody answers at {self.info.fds}: {error}",
                fix="check that the engine runs and that both sides see the same SGLANG_RECV_DIR",
            ) from error

    def attach(self, session: str, sender: str, timeout: float) -> None:
        """Bind the Unix connection to the lease of a session."""
        with self._fd_exchange("Attach", timeout) as fds:
            fds.send(wire.encode(Attach(session, sender)), None, timeout)
            self._take_fd_reply(fds, Attached, timeout)

    def offer(self, message: OfferBuffer, fd: int, timeout: float) -> None:
        """Hand over a buffer. The rank's answer is taken by :meth:`mapped`, once for each buffer."""
        with self._fd_exchange("OfferBuffer", timeout) as fds:
            fds.send(wire.encode(message), fd, timeout)

    def mapped(self, timeout: float) -> None:
        """Wait until the rank has mapped the next buffer that it was offered."""
        with self._fd_exchange("OfferBuffer", timeout) as fds:
            self._take_fd_reply(fds, BufferMapped, timeout)

    @contextlib.contextmanager
    def _fd_exchange(self, what: str, timeout: float) -> Iterator[FdConnection]:
        assert self.fds is not None
        try:
            yield self.fds
        except TimeoutError as error:
            self.pump()
            raise self.error or DeadlineError(
                f"{self.name}: no answer to {what} within {timeout:.1f} s; it was last: {self.activity or 'no report'}",
                fix="raise deadline=, or look at the engine's log",
            ) from error
        except (OSError, EOFError) as error:
            # Why it hung up is on its way on the other socket.
            raise self._last_words() or EngineLostError(
                f"{self.name} closed its socket {self.info.fds} during {what}: {error!r}",
                fix="look at the engine's log",
            ) from error

    def _take_fd_reply(self, fds: FdConnection, expected: type[Attached | BufferMapped], timeout: float) -> None:
        raw = self._early.popleft() if self._early else _packet(fds, timeout)
        answer = wire.decode(raw, wire.FdReply)
        if isinstance(answer, Error):
            refused = answer.exception()
            # "Not open" is what is left of a session whose end is told, with its cause, on the other socket.
            raise (self._last_words() if isinstance(refused, SessionStateError) else None) or refused
        if not isinstance(answer, expected):
            raise BadMessageError(
                f"{self.name} answered {type(answer).__name__}",
                fix="install the same version of sglang-recv on both sides",
            )

    def _last_words(self) -> RecvError | None:
        """The error of the rank itself, which may still be on its way; None when it says nothing in time."""
        until = time.monotonic() + _LAST_WORDS
        while True:
            self.pump()
            left = until - time.monotonic()
            if self.over or left <= 0:
                return self.error
            self.dealer.socket.poll(max(1, int(left * 1000)))

    def hung_up(self) -> bool:
        """True when the rank's end of the Unix connection is closed."""
        if self.fds is None:
            return False
        try:
            while True:  # what comes before the end is somebody's answer
                self._early.append(_packet(self.fds, 0))
        except BlockingIOError:
            return False
        except (EOFError, OSError):
            return True

    def close(self) -> None:
        """Drop both connections."""
        self.dealer.close()
        if self.fds is not None:
            self.fds.close()


def _packet(fds: FdConnection, timeout: float) -> bytes:
    raw, stray = fds.recv(timeout)
    if stray is not None:
        stray.close()
    return raw


def wait(
    links: Sequence[RankLink], done: Callable[[RankLink], bool], phase: str, deadline: float, lease: float | None = None
) -> None:
    """Wait until ``done`` holds for every link.

    Parameters
    ----------
    phase
        What is waited for, for the error.
    deadline
        Seconds.
    lease
        Seconds of silence (no answer to heartbeats) after which a rank counts as lost; None when no heartbeats are
        sent.

    Raises
    ------
    DeadlineError
        Naming the ranks that are not done and what they last reported.
    EngineLostError
        When a rank hangs up or stays silent.
    RecvError
        What a rank reported; when several did, the one that is not merely a consequence.
    """
    until = time.monotonic() + deadline
    grace: float | None = None
    while True:
        poller = zmq.Poller()
        for link in links:
            link.pump()
        for link in links:
            if link.over and link.error is None and not done(link):
                link.error = SessionAbortedError(
                    f"{link.name} ended the session while this side waited for: {phase}"
                    + (f": {link.aborted.reason}" if link.aborted else ""),
                    fix="open a new session",
                )
        failed = [link for link in links if link.error is not None and not done(link)]
        pending = [link for link in links if not done(link)]
        if not pending:
            for link in links:
                if link.assumed:  # it did answer, just before this side gave it up
                    link.error, link.assumed = None, False
            return
        now = time.monotonic()
        if failed:
            # The rank that failed and the ranks that follow it answer in any order: wait a little for the cause.
            if grace is None:
                grace = now + _GRACE
            if len(failed) == len(pending) or now > grace or any(_is_cause(link) for link in failed):
                raise combined(failed)
        for link in pending:
            if link.error is not None:
                continue
            if link.closed_at is None and link.hung_up():
                link.closed_at = now
            if link.closed_at is not None and now - link.closed_at > _LAST_WORDS:
                link.assumed = True
                link.error = EngineLostError(
                    f"{link.name} closed its connection while this side waited for: {phase}",
                    fix="look at the engine's log; restart it and send a full update",
                )
            elif lease is not None and now - link.alive_at > lease:
                link.assumed = True
                link.error = EngineLostError(
                    f"{link.name} has not answered for {now - link.alive_at:.1f} s while this side waited for: "
                    f"{phase}; it was last: {link.activity or 'unknown'}",
                    fix="look at the engine's log; it may hang or be stopped",
                )
        if now > until:
            stuck = "; ".join(f"{link.name} (last: {link.activity or 'no report'})" for link in pending)
            raise DeadlineError(
                f"{phase}: not done within {deadline:.1f} s by {stuck}",
                fix="raise deadline=, or look at the engine's log",
            )
        for link in pending:
            poller.register(link.dealer.socket, zmq.POLLIN)
        poller.poll(min(_POLL_MS, max(1, int((until - now) * 1000))))


def _is_cause(link: RankLink) -> bool:
    return not isinstance(link.error, SessionAbortedError)


def combined(links: Sequence[RankLink]) -> RecvError:
    """One error for what ``links`` report: the cause, with what each rank said when they differ."""
    causes = [link for link in links if _is_cause(link)] or list(links)
    first = causes[0].error
    assert first is not None
    texts = {(link.error.code, link.error.message, link.error.details) for link in causes if link.error}
    if len(texts) == 1:
        return first
    details = [f"{link.name}: {link.error.message}" for link in causes if link.error]
    details += [f"{link.name}: {line}" for link in causes if link.error for line in link.error.details]
    return type(first)(first.message, fix=first.fix, details=tuple(dict.fromkeys(details)))


class Heart:
    """The lease thread: one heartbeat per rank and interval, on connections of its own, and what comes back.

    It runs as long as the process is alive, whatever the caller's thread does: a trainer that gathers for minutes keeps
    its session, one that is stopped or killed loses it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        links: Sequence[RankLink],
        session: str,
        sender: str,
        interval: float,
    ) -> None:
        self._context = context
        self._links = links
        self._beat = wire.encode(Heartbeat(session, sender))
        self._interval = interval
        self._stop = Wakeup()
        for link in links:
            link.alive_at = time.monotonic()  # silence counts from the first heartbeat
        self._thread = threading.Thread(target=self._run, name="sglang-recv-lease", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        dealers = [(Dealer(self._context, link.info.control), link) for link in self._links]
        try:
            poller = zmq.Poller()
            poller.register(self._stop.fileno(), zmq.POLLIN)
            for dealer, _ in dealers:
                poller.register(dealer.socket, zmq.POLLIN)
            due = 0.0
            while True:
                now = time.monotonic()
                if now >= due:
                    due = now + self._interval
                    for dealer, _ in dealers:
                        dealer.send(self._beat)
                if any(key == self._stop.fileno() for key, _ in poller.poll(max(0, int((due - now) * 1000)))):
                    return
                for dealer, link in dealers:
                    while (raw := dealer.receive()) is not None:
                        answer = wire.decode(raw, wire.RankMessage)
                        if isinstance(answer, Alive):
                            link.alive_at = time.monotonic()
                            link.activity = answer.activity
        except RecvError as error:
            # The caller's wait sees the silence of the rank and says so with a name.
            logger.warning("heartbeats ended: %s", error)
        finally:
            for dealer, _ in dealers:
                dealer.close()

    def stop(self) -> None:
        """End the thread and wait for it; it never waits longer than for one poll."""
        self._stop.set()
        self._thread.join()
        self._stop.close()


def greet(links: Sequence[RankLink], engine: str, sender: str, deadline: float) -> None:
    """Exchange Hello and Welcome with every rank of the engine that published the id ``engine``.

    Raises
    ------
    ProtocolVersionError
        When a rank speaks another major version.
    DeadlineError, EngineLostError
        When one does not answer.
    """
    hello = Hello(wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, sender)
    for link in links:
        link.send(hello)
    wait(links, lambda link: link.welcome is not None, "handshake", deadline)
    for link in links:
        welcome = link.welcome
        assert welcome is not None
        wire.check_major(welcome.protocol_major, welcome.protocol_minor, link.name)
        if (welcome.engine, welcome.device) != (engine, link.info.device):
            raise EngineLostError(
                f"{link.name}: engine {welcome.engine} on {welcome.device} answers where {engine} on "
                f"{link.info.device} was expected",
                fix="the engine was restarted: discover it again",
            )
