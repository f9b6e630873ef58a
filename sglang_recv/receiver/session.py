"""One rank's session as its service thread sees it: the states of docs/protocol.md, without sockets."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from sglang_recv import manifest
from sglang_recv.errors import (
    BadBufferError,
    BadMessageError,
    BusyError,
    DeadlineError,
    LeaseLostError,
    LimitError,
    RecvError,
    SessionAbortedError,
    SessionStateError,
)
from sglang_recv.fdpass import OwnedFd
from sglang_recv.memory import MemoryKind, StagingBuffer, import_buffer
from sglang_recv.receiver.apply import Applier
from sglang_recv.receiver.catalog import Catalog
from sglang_recv.receiver.mailbox import Mailbox, OpenVoted, RoundDone, SessionEnded
from sglang_recv.receiver.remembered import Memory, Round, misplaced, round_of
from sglang_recv.wire import (
    MAX_BUCKETS_PER_ROUND,
    MAX_BUFFERS,
    Abort,
    Aborted,
    Ack,
    Announce,
    Bucket,
    Committed,
    Error,
    Finish,
    Load,
    OfferBuffer,
    Open,
    Opened,
    Prepared,
    RankFailed,
    RankFinished,
    RankMessage,
    RankOpened,
    RankRead,
    RankReady,
    RankReport,
    RankSeconds,
    ReleaseBuffer,
    Released,
    Repeat,
    TensorSpec,
)

logger = logging.getLogger(__name__)

_REMEMBERED: Final = 256


class Outbox(Protocol):
    """Where a rank's session sends its messages."""

    def to_sender(self, peer: bytes, message: RankMessage) -> None:
        """Answer a sender."""

    def to_leader(self, report: RankReport) -> None:
        """Report to the leader."""

    def over(self, session: str) -> None:
        """The session is over on this rank: drop its connections."""


@dataclass
class _Live:
    """The session that holds this rank."""

    id: str
    kind: str
    peer: bytes
    sender: str
    #: When anything came from the sender, and when it last went on with its work (monotonic seconds).
    heard: float
    progressed: float
    announced: dict[str, TensorSpec] | None
    staging_bytes: int
    state: str = "opening"
    applier: Applier | None = None
    #: What came so far, and how many rounds of it are in ``seen``.
    history: list[Round] = field(default_factory=list)
    merged: int = 0
    seen: dict[str, TensorSpec] = field(default_factory=dict)
    #: The session to repeat. None when it is not remembered, or this one was not a repetition of it in all rounds.
    recalled: tuple[Round, ...] | None = None
    remember: str = ""
    buffers: dict[int, StagingBuffer] = field(default_factory=dict)
    views: dict[int, manifest.Views] = field(default_factory=dict)
    in_flight: dict[int, set[int]] = field(default_factory=dict)
    rounds: int = 0
    done: int = 0
    finishing: bool = False
    aborted_by_sender: bool = False
    failed: bool = False
    #: Seconds spent mapping, applying, and checking that nothing is missing; see :class:`RankSeconds`.
    mapping: float = 0.0
    loading: float = 0.0
    checking: float = 0.0


class RankSession:
    """Checks what senders send, keeps the session's buffers, and reports to the leader.

    Parameters
    ----------
    rank
        Rank of this process in its engine.
    device
        Device whose memory this rank imports.
    memory_kind
        The kind of buffer that this rank accepts.
    mailbox
        Shared with the scheduler thread.
    catalog
        Makes the initial catalog; called when the first session opens, since it reads files.
    outbox
        Where messages go.
    groups
        Parts of names that must be in one bucket, see :data:`sglang_recv.receiver.catalog.LOADED_TOGETHER`.
    lease_seconds
        How long a sender may be silent.
    progress_seconds
        How long a sender that is alive may do nothing for its session.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        memory_kind: MemoryKind,
        mailbox: Mailbox,
        catalog: Callable[[], Catalog],
        outbox: Outbox,
        *,
        groups: Sequence[Sequence[str]],
        lease_seconds: float,
        progress_seconds: float,
    ) -> None:
        self._rank = rank
        self._device = device
        self._kind = memory_kind
        self._mailbox = mailbox
        self._make_catalog = catalog
        self._catalog: Catalog | None = None
        self._out = outbox
        self._groups = groups
        self._lease = lease_seconds
        self._progress = progress_seconds
        self._live: _Live | None = None
        self._waiting: tuple[bytes, Open] | None = None
        self._memory = Memory()
        #: The session that the catalog was learned from.
        self._learned: tuple[Round, ...] | None = None
        #: Ids of the last sessions, oldest first: what still flies around of one must not meet another of the same id.
        self._used: dict[str, None] = {}

    @property
    def catalog(self) -> Catalog:
        """What is known of the model's tensors."""
        if self._catalog is None:
            self._catalog = self._make_catalog()
        return self._catalog

    @property
    def live(self) -> str:
        """Id of the session that holds this rank, or an empty string."""
        return self._live.id if self._live else ""

    # --- from senders ------------------------------------------------------------------------------------------------

    def open(self, peer: bytes, message: Open) -> None:
        """Take an ``Open``.

        Raises
        ------
        RecvError
            When it is refused; nothing has changed then.
        """
        self._check_open(message)
        announced = self._announced(message.kind, message.manifest)
        if message.session in self._used:
            raise SessionStateError(
                f"session id {message.session[:8]} was used before", fix="make a new id for each session"
            )
        if self._live is not None:
            if not message.takeover:
                raise BusyError(
                    f"session {self._live.id[:8]} of sender {self._live.sender} holds this rank",
                    fix="wait until it ends, or open with takeover=True to end it",
                )
            if self._waiting is not None:
                first, given_up = self._waiting
                error = SessionAbortedError(f"sender {message.sender} takes over as well", fix="open a new session")
                self._out.to_sender(first, Error.of(error, given_up.session))
            self._waiting = (peer, message)
            self._fail(SessionAbortedError(f"taken over by sender {message.sender}", fix="open a new session"))
            return
        now = time.monotonic()
        self._live = _Live(
            message.session, message.kind, peer, message.sender, now, now, announced, message.staging_bytes
        )
        if announced is None:  # else every round is checked against the announcement, and a Repeat names no tensors
            self._live.recalled = self._memory.get(message.recall)
        logger.info("session %s of %s opens: %s", message.session[:8], message.sender, _described(message))
        self._out.to_leader(RankOpened(message.session, self._rank, message.kind, message.sender, message.takeover))

    def announce(self, peer: bytes, message: Announce) -> None:
        """Take a manifest that ``Open`` left out.

        Raises
        ------
        RecvError
            When it does not fit the model.
        """
        live = self._expect(message.session, peer, "open")
        if live.announced is not None:
            raise SessionStateError("a manifest was announced before", fix="announce it once")
        live.announced = self._announced(live.kind, message.manifest)
        live.staging_bytes = message.staging_bytes
        live.recalled = None
        self._out.to_sender(live.peer, Opened(live.id))

    def _check_open(self, message: Open) -> None:
        """Every check that needs no session."""
        if message.kind not in manifest.KINDS:
            raise BadMessageError(f"kind {message.kind[:80]!r} is not one of {manifest.KINDS}", fix="use one of these")
        if not 16 <= len(message.session) <= 64 or not 1 <= len(message.sender) <= 256:
            raise BadMessageError(
                f"a session id of {len(message.session)} and a sender's name of {len(message.sender)} characters",
                fix="use 32 hex digits (128 random bits) as id, and a name of 1 to 256 characters",
            )
        if len(message.recall) > 64:
            raise BadMessageError(
                f"a token of {len(message.recall)} characters to recall", fix="use 32 hex digits (128 random bits)"
            )

    def _announced(self, kind: str, specs: Sequence[TensorSpec] | None) -> dict[str, TensorSpec] | None:
        """What is announced, if it fits the model."""
        if specs is None:
            return None
        findings = manifest.check_specs(specs) or self.catalog.problems(specs)
        if kind == "full":
            findings += self.catalog.missing(spec.name for spec in specs)
        if findings:
            raise manifest.manifest_error(findings, "the announced tensors do not fit this engine's model")
        return {spec.name: spec for spec in specs}

    def heard(self, session: str, sender: str) -> None:
        """Renew the lease."""
        if self._live is not None and (self._live.id, self._live.sender) == (session, sender):
            self._live.heard = time.monotonic()

    def load(self, peer: bytes, message: Load) -> None:
        """Take the buckets of one round."""
        live = self._due(message.session, peer, message.round)
        if len(message.buckets) > MAX_BUCKETS_PER_ROUND:
            raise LimitError(
                f"{len(message.buckets)} buckets in one round, the limit is {MAX_BUCKETS_PER_ROUND}",
                fix="use larger buckets",
            )
        specs = [entry.spec for bucket in message.buckets for entry in bucket.entries]
        _merge(live)
        stream = live.announced is None
        findings = self._stream_problems(live, specs) if stream else self._announced_problems(live, specs)
        findings += _split_groups(message.buckets, self._groups)
        if findings:
            raise manifest.manifest_error(findings, f"round {message.round} does not fit this engine's model")
        self._take(live, *round_of(message.buckets, {number: v.nbytes for number, v in live.views.items()}))
        live.recalled = None

    def repeat(self, peer: bytes, message: Repeat) -> None:
        """Take a round that is as it was in the recalled session."""
        live = self._due(message.session, peer, message.round)
        if live.recalled is None or message.round >= len(live.recalled):
            known = "none" if live.recalled is None else len(live.recalled)
            raise SessionStateError(
                f"round {message.round} repeats a recalled session, of which rank {self._rank} has {known} rounds",
                fix="send the tensors by Load unless Opened says that the session was recalled",
            )
        again, buffers = live.recalled[message.round], message.buffers
        if message.places:
            again, buffers = again.moved(message.places)
        if len(buffers) != len(again.ends):
            raise BadBufferError(
                f"round {message.round} lies in {len(again.ends)} buffers, {len(buffers)} are named", fix="report this"
            )
        self._take(live, again, buffers)

    def _due(self, session: str, peer: bytes, number: int) -> _Live:
        live = self._expect(session, peer, "open", "receiving")
        if number != live.rounds:
            raise SessionStateError(
                f"round {number} came, round {live.rounds} was due", fix="send rounds in order, each once"
            )
        return live

    def _take(self, live: _Live, came: Round, buffers: Sequence[int]) -> None:
        """Hand a round to the scheduler thread."""
        for end, number in zip(came.ends, buffers, strict=True):
            mapped = live.views[number].nbytes if number in live.views else 0
            if end > mapped:
                raise _outside(came, buffers, {n: v.nbytes for n, v in live.views.items()})
        number = live.rounds
        live.history.append(came)
        live.in_flight[number] = set(buffers)
        live.rounds += 1
        live.state = "receiving"
        staged = came.staged(self._device, [live.views[buffer] for buffer in buffers])
        self._mailbox.put_round(live.id, number, staged)
        self._out.to_leader(RankReady(live.id, self._rank, number))

    def release(self, peer: bytes, message: ReleaseBuffer) -> None:
        """Unmap one buffer."""
        live = self._expect(message.session, peer, "open", "receiving", "finished")
        busy = [number for number, buffers in live.in_flight.items() if message.buffer in buffers]
        buffer = live.buffers.get(message.buffer)
        if buffer is None or busy:
            raise BadBufferError(
                f"buffer {message.buffer} is " + (f"used by rounds {busy}" if busy else "not mapped"),
                fix="release a buffer once, after the Ack of every round that uses it",
            )
        del live.buffers[message.buffer], live.views[message.buffer]
        buffer.close()
        self._out.to_sender(live.peer, Released(live.id, message.buffer))

    def finish(self, peer: bytes, message: Finish) -> None:
        """The sender has sent everything."""
        live = self._expect(message.session, peer, "open", "receiving")
        if message.rounds != live.rounds:
            raise SessionStateError(
                f"the sender finished {message.rounds} rounds, this rank got {live.rounds}", fix="report this"
            )
        if len(message.remember) > 64:
            raise BadMessageError(
                f"a token of {len(message.remember)} characters to remember", fix="use 32 hex digits (128 random bits)"
            )
        if live.announced is not None:
            _merge(live)
        unsent = sorted(set(live.announced or ()) - set(live.seen))
        if unsent:
            raise manifest.manifest_error(
                [f"{name}: announced, but not sent" for name in unsent], "the update is not what was announced"
            )
        live.state = "finished"
        live.remember = message.remember
        live.finishing = True
        self._report_finished(live)

    def abort(self, peer: bytes, message: Abort) -> None:
        """The sender gives up."""
        if self._give_up_waiting(message.session, peer):
            return
        live = self._expect(message.session, peer)
        live.aborted_by_sender = True
        self._fail(SessionAbortedError(f"aborted by its sender: {message.reason}", fix="open a new session"))

    def offer(self, sender: str, message: OfferBuffer, fd: OwnedFd) -> None:
        """Map a buffer. Takes the fd in any case."""
        with fd:
            live = self._live
            peer = live.peer if live is not None and live.sender == sender else b""
            live = self._expect(message.session, peer, "open", "receiving")
            if message.kind != self._kind.value:
                raise BadBufferError(
                    f"a buffer of kind {message.kind!r}, this rank takes {self._kind.value!r}",
                    fix="let WeightClient allocate staging, it asks the rank",
                )
            if message.buffer < 0:
                raise BadBufferError(f"buffer id {message.buffer}", fix="use ids from 0")
            if message.buffer in live.buffers:
                raise BadBufferError(f"buffer {message.buffer} is mapped already", fix="give every buffer a new id")
            if len(live.buffers) >= MAX_BUFFERS:
                raise BadBufferError(
                    f"{MAX_BUFFERS} buffers are mapped, which is the limit", fix="release those that are not needed"
                )
            total = message.nbytes + sum(buffer.nbytes for buffer in live.buffers.values())
            if live.announced is not None and total > live.staging_bytes:
                raise BadBufferError(
                    f"buffer {message.buffer} brings staging to {total} bytes, {live.staging_bytes} were announced",
                    fix="announce the peak in Open",
                )
            begun = time.monotonic()
            buffer = import_buffer(self._device, fd, message.nbytes)
            try:
                views = manifest.Views(buffer.tensor())
            except BaseException:
                buffer.close()
                raise
            live.buffers[message.buffer], live.views[message.buffer] = buffer, views
            live.mapping += time.monotonic() - begun

    def error(self, error: RecvError, session: str | None, peer: bytes | None = None) -> bool:
        """End ``session`` (None: whichever is live) with ``error``. False when ``peer`` is not its owner."""
        live = self._live
        if live is None or session not in (None, live.id) or peer not in (None, live.peer):
            return False
        self._fail(error)
        return True

    def lost(self, session: str, sender: str, how: str) -> None:
        """The connection of a sender is gone; it matters when that sender owns the session."""
        waiting = self._waiting
        if waiting is not None and waiting[1].sender == sender and self._give_up_waiting(session, waiting[0]):
            return
        live = self._live
        if live is not None and (live.id, live.sender) == (session, sender):
            self._fail(
                LeaseLostError(
                    f"sender {live.sender} of session {live.id[:8]} is gone: {how}",
                    fix="look at the log of the trainer; the next full update repairs the engine",
                )
            )

    def tick(self) -> None:
        """End the session when its lease ran out."""
        live = self._live
        if live is not None and not live.failed:
            now = time.monotonic()
            if now - live.heard > self._lease:
                silent = f"silent for {now - live.heard:.1f} s, the lease is {self._lease:.1f} s"
                self.lost(live.id, live.sender, silent)
            elif now - live.progressed > self._progress:
                self._fail(
                    DeadlineError(
                        f"sender {live.sender} of session {live.id[:8]} is alive, but has done nothing for "
                        f"{now - live.progressed:.0f} s (the limit is {self._progress:.0f} s); rank {self._rank} is "
                        f"{live.state} after {live.rounds} rounds",
                        fix="look at what the trainer waits for; raise SGLANG_RECV_PROGRESS_SECONDS for slow sources",
                    )
                )

    # --- from the scheduler thread -----------------------------------------------------------------------------------

    def open_voted(self, event: OpenVoted) -> None:
        """The open carrier ran."""
        live = self._live
        if live is None or live.id != event.session:
            return
        if event.error is not None:
            self._over(live, Error.of(event.error, live.id, self._mailbox.status.state))
            return
        live.applier = event.applier
        live.state = "open"
        self._out.to_sender(live.peer, Opened(live.id, live.recalled is not None))

    def round_done(self, event: RoundDone) -> None:
        """A load carrier ran."""
        live = self._live
        if live is None or live.id != event.session:
            return
        if event.error is not None:
            self._fail(event.error)
            return
        if event.round < live.rounds:
            live.done += 1
            live.loading += event.seconds
            live.in_flight.pop(event.round, None)
            self._out.to_sender(live.peer, Ack(live.id, event.round, event.seconds))
            self._report_finished(live)

    def ended(self, event: SessionEnded) -> None:
        """The session is over on the scheduler threads."""
        live = self._live
        if live is None or live.id != event.session:
            return
        state = self._mailbox.status.state
        if event.error is None:
            if live.state in ("finished", "prepared"):
                self._keep(live)
            plan = live.applier.report() if live.applier is not None else None
            self._over(live, Committed(live.id, event.version, plan, _spent(live, event)))
        elif live.aborted_by_sender and isinstance(event.error, SessionAbortedError):
            self._over(live, Aborted(live.id, event.error.message, state))
        else:
            self._over(live, Error.of(event.error, live.id, state))

    # --- from the leader ---------------------------------------------------------------------------------------------

    def prepared(self, session: str) -> None:
        """All ranks have finished and the update is complete."""
        live = self._live
        if live is not None and live.id == session:
            live.state = "prepared"
            self._out.to_sender(live.peer, Prepared(live.id))

    def ended_by_leader(self, session: str, error: Error) -> None:
        """The session ended before the scheduler threads knew of it."""
        live = self._live
        if live is None or live.id != session or live.state != "opening":
            # From `open` on this rank's scheduler thread knows the session and may be reading its buffers: only what
            # that thread reports (SessionEnded) ends it.
            return
        state = self._mailbox.status.state
        if live.aborted_by_sender:
            self._over(live, Aborted(live.id, error.message, state))
        else:
            self._over(live, Error.of(error.exception(), live.id, state))

    def asked(self, session: str, names: Sequence[str]) -> None:
        """The leader asks which of ``names`` this rank has read."""
        live = self._live
        if live is not None and live.id == session and live.applier is not None:
            _merge(live)
            unread = set(live.applier.unread())
            read = tuple(name for name in names if name in live.seen and name not in unread)
            self._out.to_leader(RankRead(live.id, self._rank, read))

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _expect(self, session: str, peer: bytes, *states: str) -> _Live:
        live = self._live
        if live is None or (live.id, live.peer) != (session, peer):
            raise SessionStateError(
                f"session {session[:8]} is not open on rank {self._rank}", fix="open a session; it may have ended"
            )
        if live.failed:
            raise SessionStateError(f"session {session[:8]} is ending", fix="wait for the answer")
        if states and live.state not in states:
            raise SessionStateError(
                f"session {session[:8]} is {live.state}, this message needs {' or '.join(states)}",
                fix="see docs/protocol.md",
            )
        live.heard = live.progressed = time.monotonic()
        return live

    def _stream_problems(self, live: _Live, specs: Sequence[TensorSpec]) -> list[str]:
        found = manifest.check_specs(specs)
        found += [f"{spec.name}: sent twice" for spec in specs if spec.name in live.seen]
        return found or self.catalog.problems(specs)

    def _announced_problems(self, live: _Live, specs: Sequence[TensorSpec]) -> list[str]:
        """As for a stream, but the specs were checked when they were announced."""
        assert live.announced is not None
        found, fresh = [], set()
        for spec in specs:
            if live.announced.get(spec.name) != spec:
                found.append(f"{spec.name}: {spec.dtype}{list(spec.shape)} is not what was announced")
            if spec.name in live.seen or spec.name in fresh:
                found.append(f"{spec.name}: sent twice")
            fresh.add(spec.name)
        return found

    def _keep(self, live: _Live) -> None:
        """Remember what was committed. A failure here must not hide the commit."""
        try:
            rounds = tuple(live.history)
            same = live.recalled if live.recalled is not None and len(rounds) == len(live.recalled) else rounds
            # Nothing is learned twice in a row, but there may be another between a session and the one that repeats it.
            if live.kind == "full" and same is not self._learned:
                _merge(live)
                if live.seen:
                    self._catalog = self.catalog.learn(live.seen.values())
                    self._learned = same
            if live.remember:
                self._memory.put(live.remember, rounds)
        except Exception:
            logger.exception("the committed manifest was not learned")

    def _report_finished(self, live: _Live) -> None:
        if not live.finishing or live.done < live.rounds:
            return
        assert live.applier is not None
        live.finishing = False
        begun = time.monotonic()
        unread = tuple(name for name in live.applier.unread() if not self.catalog.skipped(name))
        missing = live.applier.missing() if live.kind == "full" else ()
        live.checking += time.monotonic() - begun
        self._out.to_leader(RankFinished(live.id, self._rank, live.rounds, unread, missing))

    def _fail(self, error: RecvError) -> None:
        live = self._live
        if live is not None and not live.failed:
            live.failed = True
            self._out.to_leader(RankFailed(live.id, self._rank, Error.of(error)))

    def _give_up_waiting(self, session: str, peer: bytes) -> bool:
        """Forget a takeover whose sender gave up before the live session ended. True when there was one."""
        if self._waiting is None or (self._waiting[1].session, self._waiting[0]) != (session, peer):
            return False
        self._waiting = None
        self._out.to_sender(peer, Aborted(session, "given up before it opened", self._mailbox.status.state))
        return True

    def close(self) -> None:
        """Unmap what the live session has, when the thread ends, unless the scheduler thread may be reading it."""
        live = self._live
        if live is not None and not set(live.in_flight) - self._mailbox.untaken(live.id):
            self._unmap(live)

    def _unmap(self, live: _Live) -> None:
        self._mailbox.drop_rounds()
        live.views.clear()
        for number, buffer in live.buffers.items():
            try:
                buffer.close()
            except Exception:
                logger.exception("buffer %d of session %s could not be unmapped", number, live.id[:8])

    def _over(self, live: _Live, answer: RankMessage) -> None:
        """Unmap everything, tell the sender, be free."""
        self._unmap(live)
        self._live = None
        self._used[live.id] = None
        while len(self._used) > _REMEMBERED:
            self._used.pop(next(iter(self._used)))
        self._out.to_sender(live.peer, answer)
        self._out.over(live.id)
        if self._waiting is not None:
            (peer, message), self._waiting = self._waiting, None
            try:
                self.open(peer, message)
            except RecvError as error:
                self._out.to_sender(peer, Error.of(error, message.session))


def _described(message: Open) -> str:
    tensors = "streamed" if message.manifest is None else f"{len(message.manifest)} tensors announced"
    return f"{message.kind}, {tensors}, {message.staging_bytes >> 20} MiB of staging"


def _spent(live: _Live, event: SessionEnded) -> RankSeconds:
    seconds = (live.mapping, live.loading, live.checking + event.finalize, event.flush)
    return RankSeconds(*(round(value, 6) for value in seconds))


def _merge(live: _Live) -> None:
    """Bring ``seen`` up to what came. Rounds that repeat others need it only when something else follows."""
    for came in live.history[live.merged :]:
        live.seen |= {spec.name: spec for spec in came.specs}
    live.merged = len(live.history)


def _outside(came: Round, buffers: Sequence[int], mapped: dict[int, int]) -> BadBufferError:
    """Names the first tensor that does not lie in what is mapped."""
    for layout, which, offsets in zip(came.layouts, came.which, came.offsets, strict=True):
        places = zip(layout.names, layout.sizes.tolist(), which.tolist(), offsets.tolist(), strict=True)
        for name, size, number, offset in places:
            limit = mapped.get(buffers[number], 0) if size else 0
            if size and offset + size > limit:
                return misplaced(name, offset, size, buffers[number], limit)
    raise AssertionError("everything is mapped")


def _split_groups(buckets: Sequence[Bucket], groups: Sequence[Sequence[str]]) -> list[str]:
    """Tensors that only one call loads, without the ones that must be in that call, one line each."""
    found = []
    for bucket in buckets if groups else ():
        names = {entry.spec.name for entry in bucket.entries}
        for name in names:
            mates = manifest.group_of(name, groups) or ()
            found += [f"{name}: needs {mate} in the same bucket" for mate in mates if mate not in names]
    return found
