"""The leader's book: which ranks have opened, hold a round, have finished; and which carrier follows from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sglang_recv import manifest
from sglang_recv.errors import BusyError, DeadlineError, RecvError, SessionAbortedError, SessionStateError
from sglang_recv.wire import (
    AbortCarrier,
    Carrier,
    ChecksumCarrier,
    Error,
    LeaderAsk,
    LeaderEnd,
    LeaderMessage,
    LeaderPrepared,
    LoadCarrier,
    OpenCarrier,
    RankChecksum,
    RankFailed,
    RankFinished,
    RankOpened,
    RankRead,
    RankReady,
    RankReport,
)

logger = logging.getLogger(__name__)

#: How long the senders of one session may take to open all ranks, in seconds.
OPEN_SECONDS: Final = 60.0
_REMEMBERED: Final = 64


@dataclass
class _Book:
    """One session over all ranks."""

    id: str
    kind: str
    deadline: float
    opened: dict[int, str] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    finished: dict[int, RankFinished] = field(default_factory=dict)
    read: dict[int, set[str]] = field(default_factory=dict)
    injected_open: bool = False
    injected_rounds: int = 0
    aborting: bool = False
    prepared: bool = False


class Leader:
    """Decides for all ranks; runs on the leader's service thread.

    Parameters
    ----------
    ranks
        How many ranks the engine has.
    inject
        Hands a carrier to all scheduler threads.
    tell
        Sends a message to the service thread of one rank.
    prepared
        Called when a commit may succeed.
    clock
        Monotonic seconds.
    """

    def __init__(
        self,
        ranks: int,
        *,
        inject: Callable[[Carrier], None],
        tell: Callable[[int, LeaderMessage], None],
        prepared: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._ranks = ranks
        self._inject = inject
        self._tell = tell
        self._prepared = prepared
        self._clock = clock
        self._book: _Book | None = None
        self._next: list[RankOpened] = []
        #: Why the last sessions failed, for ranks that open them later.
        self._failed: dict[str, Error] = {}

    def handle(self, report: RankReport) -> None:
        """Take a report of any rank (the leader's own rank included)."""
        if isinstance(report, RankChecksum):
            self._inject(ChecksumCarrier(report.token, report.rank))
            return
        if isinstance(report, RankOpened):
            self._opened(report)
            return
        book = self._book
        if book is None or book.id != report.session:
            if isinstance(report, RankFailed):
                self._next = [r for r in self._next if (r.session, r.rank) != (report.session, report.rank)]
                # The session is unknown here, so no scheduler thread knows it either: its rank may forget it.
                self._tell(report.rank, LeaderEnd(report.session, report.error))
            return
        if isinstance(report, RankFailed):
            self._fail(book, report.error)
        elif isinstance(report, RankReady):
            book.ready[report.rank] = report.round + 1
            self._pump(book)
        elif isinstance(report, RankFinished):
            book.finished[report.rank] = report
            self._pump(book)
            self._settle(book)
        elif isinstance(report, RankRead):
            book.read[report.rank] = set(report.names)
            self._settle(book)

    def over(self, session: str) -> None:
        """The session ended on the scheduler threads."""
        if self._book is not None and self._book.id == session:
            self._book = None
            early, self._next = self._next, []
            for report in early:
                self._opened(report)

    def tick(self) -> None:
        """End a session that some rank never opened."""
        book = self._book
        if book is not None and not book.injected_open and not book.aborting and self._clock() > book.deadline:
            absent = sorted(set(range(self._ranks)) - set(book.opened))
            self._fail(
                book,
                Error.of(
                    DeadlineError(
                        f"no sender opened ranks {absent} of session {book.id[:8]} within {OPEN_SECONDS:.0f} s",
                        fix="let one sender per rank open with the same session id, or one sender open all ranks",
                    )
                ),
            )

    def _opened(self, report: RankOpened) -> None:
        ended = self._failed.get(report.session)
        if ended is not None:
            self._tell(report.rank, LeaderEnd(report.session, ended))
            return
        book = self._book
        if book is None:
            book = self._book = _Book(report.session, report.kind, self._clock() + OPEN_SECONDS)
        refusal: RecvError | None = None
        if book.id != report.session and report.takeover and not book.prepared:
            # The other ranks' reports of the same takeover may come later than this one.
            taken = SessionAbortedError(f"taken over by sender {report.sender}", fix="open a new session")
            self._next.append(report)
            self._fail(book, Error.of(taken))
            return
        if book.id != report.session and (book.prepared or book.aborting or report.rank in book.opened):
            # Ranks learn of the end of a session one after the other: this one is a step ahead of the leader.
            self._next.append(report)
            return
        if book.id != report.session:
            refusal = BusyError(
                f"session {book.id[:8]} of sender {next(iter(book.opened.values()), '?')} holds this engine",
                fix="wait until it ends, or open with takeover",
            )
        elif book.aborting:
            refusal = SessionStateError(f"session {book.id[:8]} is being aborted", fix="open a new session")
        elif book.kind != report.kind:
            book.opened[report.rank] = report.sender
            mixed = SessionStateError(
                f"rank {report.rank} opened a {report.kind!r} update, the other ranks a {book.kind!r} one",
                fix="pass the same kind in every sender",
            )
            self._fail(book, Error.of(mixed))
            return
        if refusal is not None:
            self._tell(report.rank, LeaderEnd(report.session, Error.of(refusal)))
            return
        book.opened[report.rank] = report.sender
        if len(book.opened) == self._ranks:
            book.injected_open = True
            self._inject(OpenCarrier(book.id, book.kind))

    def _pump(self, book: _Book) -> None:
        """Inject every round that all ranks hold or, having finished, need not hold."""
        while not book.aborting:
            number = book.injected_rounds
            holders = [rank for rank in range(self._ranks) if book.ready.get(rank, 0) > number]
            waiting = [rank for rank in range(self._ranks) if rank not in holders and rank not in book.finished]
            if not holders or waiting:
                return
            book.injected_rounds += 1
            self._inject(LoadCarrier(book.id, number))

    def _settle(self, book: _Book) -> None:
        """When all ranks have finished: is the update complete?"""
        if len(book.finished) < self._ranks or book.aborting:
            return
        suspects = {name for report in book.finished.values() for name in report.unread}
        if suspects and len(book.read) < self._ranks:
            if not book.read:
                for rank in range(self._ranks):
                    self._tell(rank, LeaderAsk(book.id, tuple(sorted(suspects))))
            return
        unknown = suspects.difference(*book.read.values())
        findings = [f"{name}: no rank of the engine read it (unknown name)" for name in sorted(unknown)]
        findings += [
            f"rank {rank}: {line}" for rank, report in sorted(book.finished.items()) for line in report.missing
        ]
        if findings:
            self._fail(book, Error.of(manifest.manifest_error(findings, "the update is not complete")))
            return
        book.prepared = True
        self._prepared(book.id)
        for rank in range(self._ranks):
            self._tell(rank, LeaderPrepared(book.id))

    def _fail(self, book: _Book, error: Error) -> None:
        if book.aborting:
            return
        book.aborting = True
        self._failed[book.id] = error
        while len(self._failed) > _REMEMBERED:
            self._failed.pop(next(iter(self._failed)))
        if book.injected_open:
            self._inject(AbortCarrier(book.id, error))
            return  # the book is closed when the carrier has run, see over()
        for rank in book.opened:
            self._tell(rank, LeaderEnd(book.id, error))
        self.over(book.id)
