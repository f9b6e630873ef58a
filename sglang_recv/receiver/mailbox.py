"""What the service thread and the scheduler thread of a rank hand to each other. Neither ever waits for the other."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from sglang_recv.channel import Wakeup
from sglang_recv.errors import InternalError, RecvError
from sglang_recv.receiver.apply import Applier
from sglang_recv.receiver.bucket import StagedBucket


@dataclass(frozen=True)
class OpenVoted:
    """The open carrier ran: ``error`` is None when every rank agreed. ``applier`` may be asked for unread tensors and
    missing parameters on the service thread once every round of the session is done, since nothing uses it then."""

    session: str
    error: RecvError | None
    applier: Applier | None = None


@dataclass(frozen=True)
class RoundDone:
    """A load carrier ran; the device has read the round once ``fence.synchronize()`` returns."""

    session: str
    round: int
    fence: Any
    seconds: float
    error: RecvError | None


@dataclass(frozen=True)
class SessionEnded:
    """The session is over on the scheduler threads; ``error`` is None when it was committed. ``finalize`` and ``flush``
    are seconds of the commit, the flush of the KV cache apart."""

    session: str
    version: str
    error: RecvError | None
    wrote: bool
    fence: Any
    finalize: float = 0.0
    flush: float = 0.0


@dataclass(frozen=True)
class ChecksumDone:
    """The digests that ``token`` asked for."""

    token: str
    tensors: dict[str, str]
    error: RecvError | None


Event = OpenVoted | RoundDone | SessionEnded | ChecksumDone


@dataclass(frozen=True)
class WeightsStatus:
    """The replicated state, as the scheduler thread last published it."""

    state: str = "ready"
    reason: str = ""
    session: str = ""
    activity: str = "idle"

    @property
    def full_required(self) -> bool:
        """True when only a full update may be opened."""
        return self.state != "ready"


class Mailbox:
    """Rounds one way, events the other way, and the published status."""

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        #: Replaced as a whole by the scheduler thread, so any thread reads a consistent one.
        self.status = WeightsStatus()
        self._lock = threading.Lock()
        self._rounds: dict[tuple[str, int], list[StagedBucket]] = {}
        self._put: tuple[str, int] = ("", 0)
        #: Set when the service thread has died: the scheduler must not go on as if somebody listened.
        self.broken = ""
        #: Service thread: a sender is connected, so that this process has more to do than to wait for requests.
        self.senders = False
        self._events: deque[Event] = deque()
        self._prepared = ""

    def put_round(self, session: str, number: int, buckets: list[StagedBucket]) -> None:
        """Service thread: this rank holds all buckets of the round."""
        with self._lock:
            self._rounds[session, number] = buckets
            self._put = (session, number + 1)

    def take_round(self, session: str, number: int) -> list[StagedBucket]:
        """Scheduler thread: the buckets of the round; none when this rank's sender has finished before it.

        Raises
        ------
        InternalError
            When the sender has sent the round, but it is not here any more.
        """
        with self._lock:
            found = self._rounds.pop((session, number), None)
            sent = self._put[1] if self._put[0] == session else 0
        if found is None and number < sent:
            raise InternalError(f"round {number} of session {session[:8]} was lost", fix="report this")
        return found or []

    def untaken(self, session: str) -> set[int]:
        """Service thread: the rounds that the scheduler thread has not taken."""
        with self._lock:
            return {number for owner, number in self._rounds if owner == session}

    def drop_rounds(self) -> None:
        """Service thread, after the session ended: forget rounds that were never taken."""
        with self._lock:
            self._rounds.clear()
            self._put = ("", 0)

    def set_prepared(self, session: str) -> None:
        """Leader: a commit of this session may succeed; of none, when the id is empty."""
        self._prepared = session

    def is_prepared(self, session: str) -> bool:
        """Leader's scheduler thread: see :meth:`set_prepared`."""
        return bool(session) and self._prepared == session

    def post(self, event: Event) -> None:
        """Scheduler thread: hand over an event and wake the service thread."""
        self._events.append(event)
        self.wakeup.set()

    def events(self) -> list[Event]:
        """Service thread: all events so far, oldest first."""
        self.wakeup.clear()
        found = []
        while self._events:
            found.append(self._events.popleft())
        return found
