"""The scheduler thread's half of a rank: runs carriers, owns the replicated state, writes weights.

Everything here runs on the scheduler thread, on every rank, in the same order, because SGLang broadcasts the carriers.
The rule that keeps the ranks together (docs/protocol.md): branches depend on replicated state only; whatever is local
to a rank is reduced to an error or None first and then put to a vote, which every rank reaches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sglang_recv.errors import (
    REPAIR,
    BadMessageError,
    CommitError,
    FullUpdateRequiredError,
    InternalError,
    NotPausedError,
    RecvError,
    SessionAbortedError,
    SessionStateError,
    UnsupportedError,
    WeightsReleasedError,
)
from sglang_recv.receiver import checksum
from sglang_recv.receiver.apply import Applier
from sglang_recv.receiver.host import Host
from sglang_recv.receiver.mailbox import ChecksumDone, Mailbox, OpenVoted, RoundDone, SessionEnded, WeightsStatus
from sglang_recv.receiver.stock import Result, StockUpdates
from sglang_recv.wire import (
    MAX_VERSION_CHARS,
    AbortCarrier,
    Carrier,
    ChecksumCarrier,
    CommitCarrier,
    LoadCarrier,
    OpenCarrier,
    printable,
)

logger = logging.getLogger(__name__)

READY: Final = "ready"
NEEDS_WEIGHTS: Final = "needs_weights"
POISONED: Final = "poisoned"


@dataclass
class _Session:
    """The live session. All but ``error`` is the same on every rank; that one is voted on at commit."""

    id: str
    kind: str
    applier: Applier
    next_round: int = 0
    writing: bool = False
    loading: bool = False
    error: RecvError | None = None
    started: float = field(default_factory=time.monotonic)
    flush_seconds: float = 0.0


class Replicated:
    """Runs carriers against a host.

    Parameters
    ----------
    host
        The engine rank.
    mailbox
        Where the service thread finds what happened.
    make_applier
        A fresh apply step for each session, by the kind of its update.
    """

    def __init__(self, host: Host, mailbox: Mailbox, make_applier: Callable[[str], Applier]) -> None:
        self._host = host
        self._mailbox = mailbox
        self._make_applier = make_applier
        self._session: _Session | None = None
        self._stock = StockUpdates(host.model(), host.filled)
        self._state = READY
        self._reason = ""

    # --- what the hooks ask ------------------------------------------------------------------------------------------

    @property
    def gate_closed(self) -> bool:
        """True while no batch may be scheduled."""
        return self._state != READY or self.writing

    @property
    def writing(self) -> bool:
        """True from the first write of a session to its end: no batch runs, and none may be scheduled."""
        return self._session is not None and self._session.writing

    def refusal(self) -> str | None:
        """Why requests are answered with 503, or None when they are served or queued."""
        return None if self._state == READY else f"weights are {self._state}: {self._reason}; {REPAIR}"

    def blocks_stock_update(self) -> str | None:
        """Why SGLang's own weight updates are refused now, or None."""
        if self._session is None:
            return None
        return f"weight session {self._session.id[:8]} is open in sglang_recv; commit or abort it first"

    def stock_update(self, update: Callable[[], Result], succeeded: Callable[[Result], bool]) -> Result:
        """Run an update of SGLang's own, by tensor or broadcast. Weights that were not whole are so again when such
        updates have reached all of them."""
        if self._state == READY:
            return update()
        result = self._stock.watch(update)
        if self._host.vote(succeeded(result) and self._stock.whole()):
            self._set_state(READY, "")
        return result

    def reloaded(self) -> None:
        """A stock reload from disk succeeded: the weights are whole again."""
        self._set_state(READY, "")

    def half_reloaded(self) -> None:
        """A stock reload from disk succeeded on some ranks only."""
        self._set_state(POISONED, "a reload from disk succeeded on some ranks only")

    def resumed_without_backup(self) -> None:
        """The memory saver resumed weights that it had not backed up: their content is undefined."""
        if self._session is not None:
            self._end(
                WeightsReleasedError(
                    "the weights were released and resumed without a backup in the middle of the session",
                    fix="release memory only outside of a session",
                )
            )
        self._host.fill()  # whatever makes the weights whole again, nothing else fills these
        self._set_state(NEEDS_WEIGHTS, "the memory saver resumed them without a CPU backup")

    # --- carriers ----------------------------------------------------------------------------------------------------

    def run(self, carrier: Carrier) -> tuple[bool, str] | None:
        """Run one carrier; a commit answers (success, message), everything else None."""
        if isinstance(carrier, CommitCarrier):
            return self._commit(carrier)
        if isinstance(carrier, OpenCarrier):
            self._open(carrier)
        elif isinstance(carrier, LoadCarrier):
            self._load(carrier)
        elif isinstance(carrier, AbortCarrier):
            self._abort(carrier)
        elif isinstance(carrier, ChecksumCarrier):
            self._checksum(carrier)
        return None

    def _open(self, carrier: OpenCarrier) -> None:
        applier: Applier | None = None
        if self._session is not None:
            error: RecvError | None = SessionStateError(
                f"session {self._session.id[:8]} is still open on the scheduler", fix="abort it first"
            )
        else:
            made: list[Applier] = []
            error = self._vote(lambda: made.append(self._may_open(carrier)))
            if error is None:
                applier = made[0]
                self._session = _Session(carrier.session, carrier.kind, applier)
        self._publish()
        self._mailbox.post(OpenVoted(carrier.session, error, applier))

    def _may_open(self, carrier: OpenCarrier) -> Applier:
        self._check_mapped()  # first, since what follows reads tables of quantized layers
        reasons = self._host.unsupported()
        if reasons:
            raise UnsupportedError(
                "this engine's weights cannot be updated online", fix="see docs/limits.md", details=reasons
            )
        if carrier.kind != "full" and self._state != READY:
            raise FullUpdateRequiredError(f"weights are {self._state}: {self._reason}", fix=REPAIR)
        return self._make_applier(carrier.kind)

    def _check_mapped(self) -> None:
        if self._host.weights_released():
            raise WeightsReleasedError(
                "the memory saver has released this engine's weights",
                fix="resume them first: POST /resume_memory_occupation with tags ['weights']",
            )

    def _load(self, carrier: LoadCarrier) -> None:
        session = self._session
        if session is None or session.id != carrier.session:
            return  # it ended by an earlier carrier, which every rank has run too
        if carrier.round != session.next_round:
            self._end(
                SessionStateError(f"round {carrier.round} came, round {session.next_round} was due", fix="report this")
            )
            return
        if not session.writing:
            error = self._vote(lambda: self._may_write(session, carrier.round))
            if error is not None:
                self._end(error)
                return
            session.writing = True
        elif self._host.weights_released():
            self._end(
                WeightsReleasedError(
                    f"the weights were released in the middle of the session, before round {carrier.round}",
                    fix="release memory only outside of a session",
                )
            )
            return
        session.next_round += 1
        started = time.monotonic()
        self._catch(session, lambda: self._apply(session, carrier.round))
        fence = self._host.after_writes()
        self._publish()
        self._mailbox.post(RoundDone(session.id, carrier.round, fence, time.monotonic() - started, session.error))

    def _may_write(self, session: _Session, number: int) -> None:
        self._check_mapped()
        if not self._host.quiet():
            raise NotPausedError(
                "the engine is running requests",
                fix="pause it first: POST /pause_generation with mode 'abort' or 'retract', or pass pause= to "
                "update(); a pause 'in_place' keeps requests running",
            )
        # Last, since it changes the layout of packed weights where the engine has such: a vote that fails after it
        # calls finish_load on this rank (see _end).
        session.loading = True
        self._host.begin_load()

    def _apply(self, session: _Session, number: int) -> None:
        buckets = self._mailbox.take_round(session.id, number)
        if session.error is None:
            for place, bucket in enumerate(buckets):
                names = bucket.layout.names
                last = names[-1] if names else "nothing"
                self._publish(f"loading round {number}, bucket {place} ({len(names)} tensors, the last is {last})")
                session.applier.apply(bucket)

    def _commit(self, carrier: CommitCarrier) -> tuple[bool, str]:
        session = self._session
        if not 1 <= len(carrier.version) <= MAX_VERSION_CHARS:
            return False, str(version_error(carrier.version))
        if session is None or session.id != carrier.session:
            known = f"session {session.id[:8]} is" if session else "no session is"
            error: RecvError = SessionStateError(
                f"commit of session {carrier.session[:8]}, but {known} open", fix="open a new session"
            )
            return False, str(error)
        self._publish("committing")
        begun = time.monotonic()
        local = self._vote(lambda: self._finalise(session, carrier))
        if local is not None:
            self._end(local)
            return False, str(local)
        # After the vote nothing may fail: the other ranks have committed.
        _try("recording the version", lambda: self._host.record_version(carrier.version))
        if session.kind == "full" and session.writing:
            self._set_state(READY, "")
        self._session = None
        self._mailbox.set_prepared("")
        self._publish()
        fence, now, flush = self._host.after_writes(), time.monotonic(), session.flush_seconds
        ended = SessionEnded(
            session.id, carrier.version, None, session.writing, fence, finalize=now - begun - flush, flush=flush
        )
        self._mailbox.post(ended)
        seconds = now - session.started
        logger.info("weight version %s committed: %d rounds in %.3f s", carrier.version, session.next_round, seconds)
        return True, f"weight version {carrier.version} committed"

    def _finalise(self, session: _Session, carrier: CommitCarrier) -> None:
        if session.error is not None:
            raise session.error
        if self._host.rank == 0 and not self._mailbox.is_prepared(session.id):
            raise SessionStateError(
                f"commit of session {session.id[:8]} before every sender finished",
                fix="commit after Prepared; WeightClient does",
            )
        self._check_mapped()
        self._finish_load(session)
        if session.writing:
            self._host.after_writes().synchronize()
            if carrier.flush_cache:
                self._flush(session)

    def _flush(self, session: _Session) -> None:
        begun = time.monotonic()
        flushed = self._host.flush_cache()
        session.flush_seconds = time.monotonic() - begun
        if not flushed:
            raise CommitError(
                "weights are written, but the engine refused to flush its KV cache",
                fix="pause the engine, let running requests finish, and send a full update",
            )

    def _abort(self, carrier: AbortCarrier) -> None:
        if self._session is not None and self._session.id == carrier.session:
            self._end(carrier.error.exception())

    def _checksum(self, carrier: ChecksumCarrier) -> None:
        if carrier.rank != self._host.rank:
            return
        tensors: dict[str, str] = {}
        error: RecvError | None = None
        try:
            self._check_mapped()
            tensors = checksum.digests(self._host.model())
        except RecvError as refused:
            error = refused
        except Exception as failed:
            error = _internal("checksum", failed)
        self._mailbox.post(ChecksumDone(carrier.token, tensors, error))

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _vote(self, local: Callable[[], None]) -> RecvError | None:
        """Run ``local``, then agree: None when no rank raised."""
        error: RecvError | None = None
        try:
            local()
        except RecvError as refused:
            error = _detached(refused)
        except Exception as failed:
            error = _internal("vote", failed)
        if self._host.vote(error is None):
            return None
        return error or SessionAbortedError("another rank of this engine refused", fix="see the error of that rank")

    def _catch(self, session: _Session, step: Callable[[], None]) -> None:
        try:
            step()
        except RecvError as error:
            session.error = session.error or _detached(error)
        except Exception as failed:
            session.error = session.error or _internal("load", failed)

    def _finish_load(self, session: _Session) -> None:
        if session.loading:
            session.loading = False
            if not self._host.weights_released():  # there is nothing to finish on, and touching it would be fatal
                self._host.finish_load()

    def _end(self, error: RecvError) -> None:
        """End the live session without a commit, on every rank."""
        session = self._session
        assert session is not None
        self._catch(session, lambda: self._finish_load(session))
        self._session = None
        self._mailbox.set_prepared("")
        if session.writing:
            self._set_state(POISONED, f"session {session.id[:8]} ended half-way: {error.message}")
            _try("refusing queued requests", lambda: self._host.refuse_queued(self.refusal() or ""))
        self._publish()
        logger.warning("weight session %s ended without a commit: %s", session.id[:8], error)
        self._mailbox.post(SessionEnded(session.id, "", error, session.writing, self._host.after_writes()))

    def _set_state(self, state: str, reason: str) -> None:
        reason = printable(reason)
        if state != READY:
            self._stock.forget()
        if (state, reason) != (self._state, self._reason):
            logger.log(logging.INFO if state == READY else logging.ERROR, "weights are %s %s", state, reason)
        self._state, self._reason = state, reason
        self._publish()

    def _publish(self, activity: str = "") -> None:
        session = self._session
        if not activity:
            activity = f"session {session.id[:8]}, {session.next_round} rounds loaded" if session else "idle"
        status = WeightsStatus(self._state, self._reason, session.id if session else "", activity)
        self._mailbox.status = status


def version_error(version: str) -> BadMessageError:
    """For a weight version that is empty or too long."""
    return BadMessageError(
        f"a weight version of {len(version)} characters", fix=f"use 1 to {MAX_VERSION_CHARS} characters"
    )


def _detached(error: RecvError) -> RecvError:
    """``error`` without the frames that raised it: they hold views of staging memory, which will be unmapped."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _try(what: str, step: Callable[[], None]) -> None:
    """Run a step that must not stop what follows it; its failure is in the log."""
    try:
        step()
    except Exception:
        logger.exception("%s failed", what)


def _internal(phase: str, error: Exception) -> InternalError:
    logger.exception("%s failed", phase)
    return InternalError(
        f"{phase} failed: {type(error).__name__}: {error}", fix="the engine's log has the traceback; report it"
    )
