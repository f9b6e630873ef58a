"""The leader's book: every order of reports leads to the same carriers, and every failure to one end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_recv.errors import ApplyError, LeaseLostError
from sglang_recv.receiver.leader import OPEN_SECONDS, Leader
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
)

A, B, C = "a" * 32, "b" * 32, "c" * 32
LOST = Error.of(LeaseLostError("sender t1 is gone", fix="look at its log"))


class Engine:
    """A leader, and everything that it says."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.now = 1000.0
        self.carriers: list[Carrier] = []
        self.told: list[tuple[int, LeaderMessage]] = []
        self.prepared: list[str] = []
        self.leader = Leader(
            ranks,
            inject=self.carriers.append,
            tell=lambda rank, message: self.told.append((rank, message)),
            prepared=self.prepared.append,
            clock=lambda: self.now,
        )

    def open(self, session: str, *ranks: int, kind: str = "full") -> None:
        for rank in ranks or range(self.ranks):
            self.leader.handle(RankOpened(session, rank, kind, f"t{rank}"))

    def ready(self, session: str, number: int, *ranks: int) -> None:
        for rank in ranks or range(self.ranks):
            self.leader.handle(RankReady(session, rank, number))

    def finish(self, session: str, rounds: int, *ranks: int) -> None:
        for rank in ranks or range(self.ranks):
            self.leader.handle(RankFinished(session, rank, rounds, (), ()))

    def fail(self, session: str, rank: int, error: Error = LOST) -> None:
        self.leader.handle(RankFailed(session, rank, error))

    def tell_of(self, kind: type[Any]) -> list[tuple[int, Any]]:
        return [(rank, message) for rank, message in self.told if isinstance(message, kind)]


def everyone(engine: Engine, message: LeaderMessage) -> list[tuple[int, LeaderMessage]]:
    return [(rank, message) for rank in range(engine.ranks)]


class Rank:
    """What one rank reports, and when it can: a round ahead of the scheduler at most where its slots allow it."""

    def __init__(self, engine: Engine, number: int, rounds: int, ahead: int) -> None:
        self.engine, self.number, self.rounds, self.ahead = engine, number, rounds, ahead
        self.opened = self.finished = False
        self.sent = 0

    @property
    def loaded(self) -> int:
        return sum(isinstance(carrier, LoadCarrier) for carrier in self.engine.carriers)

    def next(self) -> Callable[[], None] | None:
        """The report that this rank can make now, if any."""
        if not self.opened:
            return self._open
        if OpenCarrier(A, "full") not in self.engine.carriers:
            return None
        if self.sent < self.rounds:
            return self._ready if self.sent < self.loaded + self.ahead else None
        return self._finish if not self.finished and self.loaded >= self.rounds else None

    def _open(self) -> None:
        self.opened = True
        self.engine.open(A, self.number)

    def _ready(self) -> None:
        self.sent += 1
        self.engine.ready(A, self.sent - 1, self.number)

    def _finish(self) -> None:
        self.finished = True
        self.engine.finish(A, self.rounds, self.number)


def holds(rank: Rank, number: int) -> bool:
    return rank.sent > number or rank.finished


@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_every_order_of_reports_gives_the_same_carriers(data: st.DataObject, rounds: list[int], ahead: int) -> None:
    engine = Engine(len(rounds))
    ranks = [Rank(engine, number, count, ahead) for number, count in enumerate(rounds)]
    while moves := [move for rank in ranks if (move := rank.next()) is not None]:
        moves[data.draw(st.integers(0, len(moves) - 1))]()
        # A round goes when all ranks hold it or have finished, no earlier and no later.
        assert bool(engine.carriers) == all(rank.opened for rank in ranks)
        due = ranks[0].loaded
        for number in range(due):
            assert all(holds(rank, number) for rank in ranks)
        assert not all(holds(rank, due) for rank in ranks) or not any(rank.sent > due for rank in ranks)
        assert bool(engine.prepared) == all(rank.finished for rank in ranks)
    assert all(rank.finished for rank in ranks), "the ranks wait for each other for ever"
    assert engine.carriers == [OpenCarrier(A, "full"), *(LoadCarrier(A, n) for n in range(max(rounds)))]
    assert engine.prepared == [A]
    assert engine.told == everyone(engine, LeaderPrepared(A))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 25))
def test_a_failure_at_any_time_ends_the_session_once(data: st.DataObject, rounds: list[int], after: int) -> None:
    engine = Engine(len(rounds))
    ranks = [Rank(engine, number, count, 2) for number, count in enumerate(rounds)]
    failing = data.draw(st.integers(0, len(rounds) - 1))
    for _ in range(after):
        moves = [move for rank in ranks if (move := rank.next()) is not None]
        if not moves:
            break
        moves[data.draw(st.integers(0, len(moves) - 1))]()
    opened = [rank.number for rank in ranks if rank.opened]
    injected = bool(engine.carriers)
    engine.carriers.clear()
    engine.told.clear()
    engine.fail(A, failing)
    if injected:
        assert engine.carriers == [AbortCarrier(A, LOST)]
        assert engine.told == []
    else:
        assert engine.carriers == []
        # Whoever opened hears of it; a rank that failed in a session that nobody opened hears of it, too.
        assert sorted(rank for rank, _ in engine.told) == (opened or [failing])
        assert all(message == LeaderEnd(A, LOST) for _, message in engine.told)
    # Late reports of the others, and more failures, change nothing.
    engine.told.clear()
    engine.carriers.clear()
    for rank in ranks:
        if rank.opened and injected:
            engine.ready(A, rank.sent, rank.number)
            engine.finish(A, rank.sent, rank.number)
            engine.fail(A, rank.number)
            engine.leader.handle(RankRead(A, rank.number, ()))
    assert (engine.carriers, engine.told) == ([], [])
    # The next session is as good as the first one.
    engine.leader.over(A)
    engine.open(B)
    engine.ready(B, 0)
    assert engine.carriers == [OpenCarrier(B, "full"), LoadCarrier(B, 0)]


def test_reports_of_unknown_sessions_change_nothing() -> None:
    engine = Engine(2)
    engine.ready(A, 0)
    engine.finish(A, 0)
    engine.leader.handle(RankRead(A, 0, ()))
    engine.leader.over(A)
    assert (engine.carriers, engine.told, engine.prepared) == ([], [], [])
    engine.open(A)
    engine.ready(B, 0)
    engine.finish(B, 0)
    engine.fail(B, 1)
    assert engine.carriers == [OpenCarrier(A, "full")]
    assert engine.told == [(1, LeaderEnd(B, LOST))], "its rank may forget it"
    engine.leader.over(B)
    engine.ready(A, 0)
    assert engine.carriers[1:] == [LoadCarrier(A, 0)]


def test_checksums_go_to_their_rank_at_any_time() -> None:
    engine = Engine(2)
    engine.leader.handle(RankChecksum(1, "t1"))
    engine.open(A)
    engine.leader.handle(RankChecksum(0, "t2"))
    assert engine.carriers == [ChecksumCarrier("t1", 1), OpenCarrier(A, "full"), ChecksumCarrier("t2", 0)]


# --- who may open ---------------------------------------------------------------------------------------------------


def test_a_second_session_gets_busy_with_the_holder() -> None:
    engine = Engine(2)
    engine.open(A, 1)
    engine.open(B, 0)
    ((rank, message),) = engine.told
    assert rank == 0
    assert isinstance(message, LeaderEnd)
    assert (message.session, message.error.error_code) == (B, "BUSY")
    assert message.error.message == "session aaaaaaaa of sender t1 holds this engine"
    assert "takeover" in message.error.fix
    engine.open(A, 0)
    assert [(r, m.error.error_code) for r, m in engine.tell_of(LeaderEnd)] == [(0, "BUSY")]
    assert engine.carriers == [OpenCarrier(A, "full")]


def test_ranks_must_agree_on_the_kind() -> None:
    engine = Engine(2)
    engine.open(A, 0, kind="full")
    engine.open(A, 1, kind="partial")
    ends = dict(engine.tell_of(LeaderEnd))
    assert ends[1].error.error_code == "SESSION_STATE"
    assert ends[1].error.message == "rank 1 opened a 'partial' update, the other ranks a 'full' one"
    assert engine.carriers == []


def test_ranks_that_disagree_on_the_kind_end_the_session_everywhere() -> None:
    engine = Engine(2)
    engine.open(A, 0, kind="full")
    engine.open(A, 1, kind="partial")
    assert sorted(rank for rank, _ in engine.tell_of(LeaderEnd)) == [0, 1]


@pytest.mark.parametrize("end", ["prepared", "aborting"])
def test_a_session_opened_while_the_last_one_ends_waits_for_that(end: str) -> None:
    """Ranks learn of the end one after the other, so rank 1's sender may be a session ahead."""
    engine = Engine(2)
    engine.open(A)
    if end == "prepared":
        engine.finish(A, 0)
    else:
        engine.fail(A, 0)
    engine.told.clear()
    engine.carriers.clear()
    engine.open(B, 1)
    assert (engine.carriers, engine.told) == ([], [])
    engine.leader.over(A)
    assert engine.carriers == []
    engine.open(B, 0)
    assert engine.carriers == [OpenCarrier(B, "full")]


def test_a_rank_that_saw_the_end_first_is_not_told_that_the_engine_is_busy() -> None:
    """NOT_PAUSED in the vote of the first round: rank 1's own sender is told, and opens again, before the leader's
    service thread has taken its own SessionEnded."""
    engine = Engine(2)
    engine.open(A)
    engine.told.clear()
    engine.open(B, 1)
    assert engine.told == [], "rank 1 holds one session at a time, so A is over there"
    engine.leader.over(A)
    engine.open(B, 0)
    assert engine.carriers[-1] == OpenCarrier(B, "full")


def test_of_two_early_sessions_the_first_gets_the_engine() -> None:
    engine = Engine(2)
    engine.open(A)
    engine.fail(A, 0)
    engine.open(B, 1)
    engine.open(C, 0)
    engine.carriers.clear()
    engine.leader.over(A)
    assert [(r, m.session, m.error.error_code) for r, m in engine.tell_of(LeaderEnd)] == [(0, C, "BUSY")]
    engine.open(B, 0)
    assert engine.carriers == [OpenCarrier(B, "full")]


def test_an_early_session_that_failed_is_not_opened() -> None:
    engine = Engine(2)
    engine.open(A)
    engine.finish(A, 0)
    engine.open(B)
    engine.fail(B, 0)
    engine.fail(B, 1)
    assert sorted(rank for rank, message in engine.tell_of(LeaderEnd) if message.session == B) == [0, 1]
    engine.carriers.clear()
    engine.leader.over(A)
    assert engine.carriers == []
    engine.open(C)
    assert engine.carriers == [OpenCarrier(C, "full")]


def test_a_rank_that_opens_a_failed_session_is_told_at_once() -> None:
    engine = Engine(2)
    engine.open(A, 0)
    engine.fail(A, 0)
    engine.told.clear()
    engine.open(A, 1)
    ((rank, message),) = engine.told
    assert (rank, message.session) == (1, A)
    engine.open(B)
    assert engine.carriers == [OpenCarrier(B, "full")]


def test_a_session_that_is_being_aborted_takes_no_more_ranks() -> None:
    engine = Engine(2)
    engine.open(A)
    engine.fail(A, 0)
    engine.open(A, 1)
    assert [(r, m.session, m.error.error_code) for r, m in engine.tell_of(LeaderEnd)] == [(1, A, "LEASE_LOST")]
    assert engine.carriers == [OpenCarrier(A, "full"), AbortCarrier(A, LOST)]
    engine.leader.over(A)
    engine.told.clear()
    engine.open(A, 1)
    assert engine.told == [(1, LeaderEnd(A, LOST))], "after its end, too"
    engine.open(B)
    assert engine.carriers[-1] == OpenCarrier(B, "full")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_takeover_ends_the_live_session_once_and_waits_for_its_end(order: tuple[int, int]) -> None:
    """The reports of one takeover, by two senders, come before and after each other's."""
    engine = Engine(2)
    engine.open(A)
    for rank in order:
        engine.leader.handle(RankOpened(B, rank, "full", f"t{rank}", True))
        engine.fail(A, rank)
    assert [type(carrier) for carrier in engine.carriers] == [OpenCarrier, AbortCarrier]
    assert engine.carriers[1].error.message == f"taken over by sender t{order[0]}"  # type: ignore[union-attr]
    assert engine.told == []
    engine.leader.over(A)
    assert engine.carriers[2:] == [OpenCarrier(B, "full")]


def test_a_takeover_does_not_end_a_prepared_session() -> None:
    engine = Engine(2)
    engine.open(A)
    engine.finish(A, 0)
    for rank in range(2):
        engine.leader.handle(RankOpened(B, rank, "full", f"t{rank}", True))
    assert engine.carriers == [OpenCarrier(A, "full")]
    engine.leader.over(A)
    assert engine.carriers == [OpenCarrier(A, "full"), OpenCarrier(B, "full")]


# --- the deadline of opening ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("present", [[0], [2], [0, 2], [1]])
def test_ranks_that_nobody_opened_are_named_at_the_deadline(present: list[int]) -> None:
    engine = Engine(3)
    engine.open(A, *present)
    engine.now += OPEN_SECONDS
    engine.leader.tick()
    assert engine.told == []
    engine.now += 0.001
    engine.leader.tick()
    absent = sorted({0, 1, 2} - set(present))
    assert sorted(rank for rank, _ in engine.told) == present
    for _, message in engine.tell_of(LeaderEnd):
        assert message.error.error_code == "DEADLINE"
        assert message.error.message == f"no sender opened ranks {absent} of session aaaaaaaa within 60 s"
    engine.told.clear()
    engine.leader.tick()
    assert (engine.told, engine.carriers) == ([], [])
    engine.open(B)
    assert engine.carriers == [OpenCarrier(B, "full")]


def test_an_open_session_has_no_deadline_here() -> None:
    engine = Engine(2)
    engine.open(A)
    engine.now += 100 * OPEN_SECONDS
    engine.leader.tick()
    engine.leader.tick()
    assert (engine.carriers, engine.told) == ([OpenCarrier(A, "full")], [])


def test_the_deadline_of_an_early_session_starts_with_its_turn() -> None:
    engine = Engine(2)
    engine.open(A)
    engine.fail(A, 0)
    engine.open(B, 1)
    engine.now += 2 * OPEN_SECONDS
    engine.leader.over(A)
    engine.leader.tick()
    assert engine.told == []


# --- completeness ---------------------------------------------------------------------------------------------------

NAMES = [f"w{i}" for i in range(6)]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from(NAMES), st.booleans()), min_size=1, max_size=4),
    st.randoms(),
    st.lists(
        st.lists(st.sampled_from(["p: 4 of 8 bytes were not written", "q: 8 of 8 bytes were not written"]), max_size=2),
        min_size=4,
        max_size=4,
    ),
)
def test_a_tensor_is_unknown_when_no_rank_read_it(
    sent: Sequence[dict[str, bool]], random: Any, missing: list[list[str]]
) -> None:
    """``sent[rank]`` says of each tensor that the rank got whether it read it."""
    engine = Engine(len(sent))
    engine.open(A)
    engine.carriers.clear()
    unread = [tuple(name for name in tensors if not tensors[name]) for tensors in sent]
    order = list(range(len(sent)))
    random.shuffle(order)
    for rank in order:
        assert engine.told == []
        engine.leader.handle(RankFinished(A, rank, 1, unread[rank], tuple(missing[rank])))
    suspects = sorted({name for names in unread for name in names})
    if suspects:
        assert engine.told == everyone(engine, LeaderAsk(A, tuple(suspects)))
        random.shuffle(order)
        for rank in order:
            assert (engine.prepared, engine.carriers) == ([], []), "decided before every rank answered"
            engine.leader.handle(RankRead(A, rank, tuple(n for n in suspects if sent[rank].get(n))))
    # The slow way to say it: look at every tensor and every rank.
    unknown = [n for n in suspects if not any(tensors.get(n) for tensors in sent)]
    findings = [f"{name}: no rank of the engine read it (unknown name)" for name in unknown]
    findings += [f"rank {rank}: {line}" for rank in range(len(sent)) for line in missing[rank]]
    if findings:
        (carrier,) = engine.carriers
        assert isinstance(carrier, AbortCarrier)
        assert (carrier.session, carrier.error.error_code) == (A, "MANIFEST")
        assert carrier.error.message == f"the update is not complete: {len(findings)} problem(s)"
        assert list(carrier.error.details) == findings
        assert engine.prepared == []
        assert engine.tell_of(LeaderPrepared) == []
    else:
        assert engine.carriers == []
        assert engine.prepared == [A]
        assert engine.tell_of(LeaderPrepared) == everyone(engine, LeaderPrepared(A))


def test_a_failure_while_ranks_are_asked_wins() -> None:
    engine = Engine(2)
    engine.open(A)
    engine.leader.handle(RankFinished(A, 0, 0, ("w",), ()))
    engine.finish(A, 0, 1)
    engine.leader.handle(RankRead(A, 0, ()))
    error = Error.of(ApplyError("boom", fix="report it"))
    engine.fail(A, 1, error)
    engine.leader.handle(RankRead(A, 1, ("w",)))
    assert engine.carriers == [OpenCarrier(A, "full"), AbortCarrier(A, error)]
    assert engine.prepared == []


def test_a_failure_after_prepared_still_aborts() -> None:
    engine = Engine(2)
    engine.open(A)
    engine.finish(A, 0)
    engine.fail(A, 1)
    engine.fail(A, 0)
    assert engine.carriers == [OpenCarrier(A, "full"), AbortCarrier(A, LOST)]
