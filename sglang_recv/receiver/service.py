"""The service thread of a rank: control endpoint, fd socket, link to the leader. It waits only in its poll."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import zmq

from sglang_recv import manifest, wire
from sglang_recv.channel import Dealer, Router, Wakeup
from sglang_recv.errors import BadMessageError, InternalError, RecvError, SessionStateError, UnsupportedError
from sglang_recv.fdpass import FdConnection, FdListener
from sglang_recv.memory import MemoryKind
from sglang_recv.receiver import checksum
from sglang_recv.receiver.catalog import Catalog
from sglang_recv.receiver.fences import Fences, Reached
from sglang_recv.receiver.leader import Leader
from sglang_recv.receiver.mailbox import ChecksumDone, Event, Mailbox, OpenVoted, RoundDone
from sglang_recv.receiver.session import RankSession
from sglang_recv.wire import (
    Abort,
    Alive,
    Announce,
    Attach,
    Attached,
    BufferMapped,
    Carrier,
    Checksum,
    ChecksumRequest,
    Error,
    Finish,
    Heartbeat,
    Hello,
    LeaderAsk,
    LeaderEnd,
    LeaderMessage,
    LeaderPrepared,
    Load,
    MemorySaver,
    OfferBuffer,
    Open,
    RankChecksum,
    RankMessage,
    RankReport,
    ReleaseBuffer,
    Repeat,
    Welcome,
)

logger = logging.getLogger(__name__)

#: Seconds without a word from a sender after which its session ends.
LEASE_SECONDS: Final = 15.0
_TICK_MS: Final = 250
#: Environment: seconds that a live sender may do nothing for its session. A gather of a large model takes minutes.
ENV_PROGRESS: Final = "SGLANG_RECV_PROGRESS_SECONDS"
_PROGRESS_SECONDS: Final = 1800.0
#: Seconds after which Python takes the interpreter lock from a thread that does not give it up (the default is 0.005).
#: While the scheduler spins or loaders run Python code, each of the service thread's short steps waits that long,
#: several times per round; so it is lower while a sender is connected.
_SWITCH_SECONDS: Final = 0.0002
_USUAL_SWITCH_SECONDS: Final = sys.getswitchinterval()
_MAX_PEERS: Final = 256


def progress_seconds() -> float:
    """The limit on a sender's idleness in a session, in seconds.

    Raises
    ------
    UnsupportedError
        When the environment holds no positive number.
    """
    text = os.environ.get(ENV_PROGRESS, "")
    try:
        seconds = float(text) if text else _PROGRESS_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UnsupportedError(f"{ENV_PROGRESS} is {text!r}", fix="use a number of seconds above 0, or leave it out")
    return seconds


@dataclass(frozen=True)
class Facts:
    """What does not change while the engine lives."""

    engine: str
    rank: int
    ranks: int
    device: torch.device
    device_id: str
    boot_id: str
    mode: str
    memory_kind: MemoryKind
    sglang_version: str
    model: str
    dtype: str
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Sources:
    """What the service thread may ask the engine for at any time, without waiting."""

    memory_saver: Callable[[], MemorySaver]
    weight_version: Callable[[], str]
    catalog: Callable[[], Catalog]
    inject: Callable[[Carrier], None]


class Service:
    """Sockets and thread of one rank.

    Parameters
    ----------
    facts, sources
        What the rank is, and what may be asked of it.
    mailbox
        Shared with the scheduler thread.
    folder
        The engine's private socket directory; the sockets of this rank are made in it at once, so that what the engine
        publishes is bound.
    """

    def __init__(self, facts: Facts, sources: Sources, mailbox: Mailbox, folder: Path) -> None:
        self._facts = facts
        self._ask = sources
        self._mailbox = mailbox
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = Router(self._context, folder / f"rank{facts.rank}.control")
        self._fds = FdListener(folder / f"rank{facts.rank}.fds")
        self._link_path = folder / "leader.link"
        self._link_in = Router(self._context, self._link_path) if facts.rank == 0 else None
        self._link_out: Dealer | None = None
        self._leader: Leader | None = None
        self._local: deque[LeaderMessage] = deque()
        #: By fd: the connection, and the session and the sender that it attached to.
        self._connections: dict[int, tuple[FdConnection, str, str]] = {}
        self._accept_again = 0.0
        self._checksums: dict[str, bytes] = {}
        self._fences = Fences(facts.device)
        self._stop = Wakeup()
        self._stopping = False
        self._session = RankSession(
            facts.rank,
            facts.device,
            facts.memory_kind,
            mailbox,
            sources.catalog,
            self,
            groups=facts.groups,
            lease_seconds=LEASE_SECONDS,
            progress_seconds=progress_seconds(),
        )
        self._thread = threading.Thread(target=self._run, name="sglang-recv", daemon=True)

    @property
    def control_url(self) -> str:
        """Address of the control endpoint."""
        return self._control.url

    @property
    def fds_path(self) -> Path:
        """Path of the fd socket."""
        return self._fds.path

    def start(self) -> None:
        """Start the thread; call once every rank of the engine has bound its sockets."""
        if self._facts.rank == 0:
            self._leader = Leader(
                self._facts.ranks,
                inject=self._ask.inject,
                tell=self._tell,
                prepared=self._mailbox.set_prepared,
                clock=time.monotonic,
            )
        else:
            self._link_out = Dealer(self._context, f"ipc://{self._link_path}", identity=str(self._facts.rank).encode())
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Stop the thread, close and remove the sockets. Waits up to ``timeout`` seconds."""
        if self._thread.ident is None:  # it was never started
            if not self._stopping:
                self._release()
            self._stopping = True
            return
        self._stopping = True
        self._stop.set()
        self._thread.join(timeout)

    # --- Outbox of the session ---------------------------------------------------------------------------------------

    def to_sender(self, peer: bytes, message: RankMessage) -> None:
        """Answer a sender; one that is gone loses its session by its lease."""
        if not self._control.send(peer, wire.encode(message)):
            logger.warning("a sender is gone, %s was not delivered", type(message).__name__)

    def to_leader(self, report: RankReport) -> None:
        """Report to the leader."""
        if self._leader is not None:
            self._leader.handle(report)
        elif self._link_out is not None:
            self._link_out.send(wire.encode(report))

    def over(self, session: str) -> None:
        """Let the connections of a session go, and close the leader's book.

        They stay open until the sender closes them: an end of file could overtake the last answer on the other socket.
        """
        for fd, (connection, owner, _) in list(self._connections.items()):
            if owner == session:
                self._connections[fd] = (connection, "", "")
        if self._leader is not None:
            self._leader.over(session)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._facts.device.type == "cuda":
                torch.cuda.set_device(self._facts.device)
            # Reads the headers of the checkpoint: now, and not while a sender waits for its Welcome.
            self._guard(lambda: self._session.catalog, "reading the checkpoint")
            while not self._stopping:
                self._step()
        except BaseException as error:
            logger.exception("the service thread of rank %d died", self._facts.rank)
            self._mailbox.broken = f"{type(error).__name__}: {error}"
        finally:
            self._release()

    def _release(self) -> None:
        sys.setswitchinterval(_USUAL_SWITCH_SECONDS)
        self._session.close()
        self._fences.close()
        for fd, (connection, _, _) in list(self._connections.items()):
            self._drop(fd, connection)
        self._fds.close()
        self._control.close()
        for link in (self._link_in, self._link_out):
            if link is not None:
                link.close()
        self._context.term()
        self._stop.close()
        self._mailbox.wakeup.close()

    def _guard(self, work: Callable[[], object], what: str) -> None:
        """Do ``work``. What it did not foresee ends the live session, not the thread."""
        try:
            work()
        except Exception as failed:
            logger.exception("%s failed", what)
            reason = f"{what} failed on rank {self._facts.rank}: {type(failed).__name__}: {failed}"
            self._session.error(InternalError(reason, fix="the engine's log has the traceback; report it"), None)

    def _step(self) -> None:
        poller = zmq.Poller()
        sources: list[Any] = [
            self._stop,
            self._mailbox.wakeup,
            self._fences.wakeup,
            *(c for c, _, _ in self._connections.values()),
        ]
        if time.monotonic() >= self._accept_again:
            sources.append(self._fds)
        for source in sources:
            poller.register(source.fileno(), zmq.POLLIN)
        poller.register(self._control.socket, zmq.POLLIN)
        link = self._link_in or self._link_out
        if link is not None:
            poller.register(link.socket, zmq.POLLIN)
        ready = {key for key, _ in poller.poll(0 if self._local else _TICK_MS)}
        if self._fds.fileno() in ready:
            self._guard(self._accept, "accepting a connection")
        for fd, (connection, _, _) in list(self._connections.items()):
            if fd in ready:
                self._guard(functools.partial(self._from_fd, fd, connection), "reading a connection")
        self._guard(self._from_senders, "a message of a sender")
        self._from_link()
        for event in self._mailbox.events():
            self._guard(functools.partial(self._from_scheduler, event), "an event of the scheduler")
        for reached in self._fences.take():
            self._guard(functools.partial(self._from_device, reached), "work of the device")
        self._guard(self._session.tick, "the lease")
        if self._leader is not None:
            self._guard(self._leader.tick, "the leader's clock")
        self._mailbox.senders = bool(self._connections)
        wanted = _SWITCH_SECONDS if self._connections else _USUAL_SWITCH_SECONDS
        if sys.getswitchinterval() != wanted:
            sys.setswitchinterval(wanted)

    def _from_scheduler(self, event: Event) -> None:
        if isinstance(event, OpenVoted):
            self._session.open_voted(event)
            if event.error is not None and self._leader is not None:
                self._leader.over(event.session)
        elif isinstance(event, ChecksumDone):
            self._checksum_done(event)
        else:
            self._fences.put(event)

    def _from_device(self, reached: Reached) -> None:
        event = reached.event
        if isinstance(event, RoundDone):
            if reached.error is not None:
                raise reached.error
            self._session.round_done(event)
            return
        self._session.ended(event)
        if self._leader is not None:
            self._leader.over(event.session)
        if reached.error is not None:
            raise reached.error

    # --- senders -----------------------------------------------------------------------------------------------------

    def _from_senders(self) -> None:
        while (received := self._control.receive()) is not None:
            peer, raw = received
            session = ""
            try:
                message = wire.decode(raw, wire.SenderMessage)
                session = getattr(message, "session", "")
                self._from_sender(peer, message)
            except RecvError as error:
                self._refuse(peer, session, error)
            except Exception as failed:
                logger.exception("a message of a sender failed")
                what = f"{type(failed).__name__}: {failed}"
                self._refuse(peer, session, InternalError(what, fix="the engine's log has the traceback; report it"))

    def _refuse(self, peer: bytes, session: str, error: RecvError) -> None:
        """End the sender's session with the error when it is the live one; else only answer."""
        if not self._session.error(error, session, peer):
            self.to_sender(peer, Error.of(error, session, self._mailbox.status.state))

    def _from_sender(self, peer: bytes, message: wire.SenderMessage) -> None:
        if isinstance(message, Heartbeat):
            self._session.heard(message.session, message.sender)
            self.to_sender(peer, Alive(self._session.live, self._mailbox.status.activity))
        elif isinstance(message, Hello):
            wire.check_major(message.protocol_major, message.protocol_minor, f"sender {message.sender}")
            self.to_sender(peer, self._welcome())
        elif isinstance(message, Open):
            try:
                if (message.session, message.sender) not in {(s, who) for _, s, who in self._connections.values()}:
                    raise SessionStateError(
                        f"sender {message.sender[:80]} opens session {message.session[:8]} without a connection",
                        fix="send Attach on the Unix socket first: its end of file is what ends a lost session",
                    )
                self._session.open(peer, message)
            except RecvError as error:
                # A refused Open has no session to end: another sender's may be the live one, under the same id.
                self.to_sender(peer, Error.of(error, message.session, self._mailbox.status.state))
        elif isinstance(message, Announce):
            self._session.announce(peer, message)
        elif isinstance(message, Load):
            self._session.load(peer, message)
        elif isinstance(message, Repeat):
            self._session.repeat(peer, message)
        elif isinstance(message, ReleaseBuffer):
            self._session.release(peer, message)
        elif isinstance(message, Finish):
            self._session.finish(peer, message)
        elif isinstance(message, Abort):
            self._session.abort(peer, message)
        elif isinstance(message, ChecksumRequest):
            self._checksums[message.token] = peer
            self.to_leader(RankChecksum(self._facts.rank, message.token))

    def _welcome(self) -> Welcome:
        facts, status = self._facts, self._mailbox.status
        return Welcome(
            protocol_major=wire.PROTOCOL_MAJOR,
            protocol_minor=wire.PROTOCOL_MINOR,
            engine=facts.engine,
            rank=facts.rank,
            ranks=facts.ranks,
            device=facts.device_id,
            boot_id=facts.boot_id,
            mode=facts.mode,
            memory_kind=facts.memory_kind.value,
            alignment=manifest.ALIGNMENT,
            lease_seconds=LEASE_SECONDS,
            progress_seconds=progress_seconds(),
            sglang_version=facts.sglang_version,
            model=facts.model,
            dtype=facts.dtype,
            weights_state=status.state,
            weights_reason=status.reason,
            weight_version=self._ask.weight_version(),
            full_required=status.full_required,
            memory_saver=self._ask.memory_saver(),
            session=self._session.live,
            groups=self._facts.groups,
            catalog_digest=self._session.catalog.digest,
        )

    def _checksum_done(self, event: ChecksumDone) -> None:
        peer = self._checksums.pop(event.token, None)
        if peer is None:
            return
        if event.error is not None:
            self.to_sender(peer, Error.of(event.error))
            return
        self.to_sender(
            peer,
            Checksum(
                event.token,
                self._facts.rank,
                checksum.overall(event.tensors),
                event.tensors,
                self._ask.weight_version(),
            ),
        )

    # --- the fd socket -----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection = self._fds.accept()
        except BlockingIOError:
            return
        except RecvError as error:
            logger.warning("a connection was refused: %s", error)
            return
        except OSError as error:
            # Out of fds, say: the connection keeps waiting, and asking for it in every turn would help nobody.
            logger.warning("no connection can be accepted: %s", error)
            self._accept_again = time.monotonic() + _TICK_MS / 1000
            return
        if len(self._connections) >= _MAX_PEERS:
            idle = [(fd, c) for fd, (c, session, _) in self._connections.items() if not session]
            if not idle:
                logger.warning("more than %d connections, the newest was closed", _MAX_PEERS)
                connection.close()
                return
            self._drop(*idle[0])  # the oldest of those that never attached
        self._connections[connection.fileno()] = (connection, "", "")

    def _drop(self, fd: int, connection: FdConnection) -> None:
        del self._connections[fd]
        connection.close()

    def _hung_up(self, connection: FdConnection, how: str) -> None:
        fd = connection.fileno()
        _, session, sender = self._connections[fd]
        self._drop(fd, connection)
        if session:
            self._session.lost(session, sender, how)

    def _from_fd(self, fd: int, connection: FdConnection) -> None:
        _, owner, sender = self._connections[fd]
        try:
            raw, passed = connection.recv(timeout=0)
        except BlockingIOError:
            return
        except (EOFError, OSError) as error:
            self._hung_up(connection, f"its Unix socket closed ({type(error).__name__})")
            return
        except RecvError as error:
            self._answer(connection, Error.of(error))
            return
        try:
            message = wire.decode(raw, wire.FdRequest)
            if isinstance(message, Attach):
                if passed is not None:
                    raise BadMessageError("an fd came with Attach", fix="send fds with OfferBuffer only")
                self._connections[fd] = (connection, message.session, message.sender)
                answer: wire.FdReply = Attached(message.session)
            elif passed is None:
                raise BadMessageError("OfferBuffer came without an fd", fix="send the fd in the same packet")
            else:
                handed, passed = passed, None
                answer = self._map(owner, sender, message, handed)
        except RecvError as error:
            answer = Error.of(error, owner, self._mailbox.status.state)
        except Exception as failed:
            # Answered here: the sender listens to this socket alone until it has an answer.
            logger.exception("a message on the fd socket failed")
            reason = f"rank {self._facts.rank} cannot map a buffer: {type(failed).__name__}: {failed}"
            internal = InternalError(reason, fix="the engine's log has the traceback; report it")
            answer = Error.of(internal, owner, self._mailbox.status.state)
        finally:
            if passed is not None:
                passed.close()
        self._answer(connection, answer)

    def _map(self, owner: str, sender: str, message: OfferBuffer, fd: Any) -> BufferMapped:
        with fd:
            if message.session != owner:
                raise SessionStateError(
                    f"a buffer for session {message.session[:8]} on a connection of {owner[:8] or 'no session'}",
                    fix="send Attach first, with the same session",
                )
            self._session.offer(sender, message, fd)
        return BufferMapped(message.session, message.buffer)

    def _answer(self, connection: FdConnection, message: wire.FdReply) -> None:
        try:
            # Without waiting: a sender that does not read must not stop the others.
            connection.send(wire.encode(message), timeout=0)
        except (EOFError, OSError, RecvError) as error:
            self._hung_up(connection, f"{type(message).__name__} could not be delivered: {error!r}")

    # --- ranks and leader --------------------------------------------------------------------------------------------

    def _tell(self, rank: int, message: LeaderMessage) -> None:
        if rank == 0:
            self._local.append(message)
        elif self._link_in is not None and not self._link_in.send(str(rank).encode(), wire.encode(message)):
            logger.error("rank %d is not linked to the leader, %s was lost", rank, type(message).__name__)

    def _from_link(self) -> None:
        while self._local:
            message = self._local.popleft()
            self._guard(functools.partial(self._from_leader, message), "a message of the leader")
        if self._link_in is not None and self._leader is not None:
            while (received := self._link_in.receive()) is not None:
                self._guard(functools.partial(self._from_rank, self._leader, received[1]), "a report of a rank")
        if self._link_out is not None:
            while (raw := self._link_out.receive()) is not None:
                self._guard(functools.partial(self._from_leader_raw, raw), "a message of the leader")

    def _from_rank(self, leader: Leader, raw: bytes) -> None:
        leader.handle(wire.decode(raw, wire.RankReport))

    def _from_leader_raw(self, raw: bytes) -> None:
        self._from_leader(wire.decode(raw, wire.LeaderMessage))

    def _from_leader(self, message: LeaderMessage) -> None:
        if isinstance(message, LeaderPrepared):
            self._session.prepared(message.session)
        elif isinstance(message, LeaderEnd):
            self._session.ended_by_leader(message.session, message.error)
        elif isinstance(message, LeaderAsk):
            self._session.asked(message.session, message.names)
