"""The scheduler threads of an engine: N ranks with real votes and models, against the tables of docs/protocol.md."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_recv import wire
from sglang_recv.errors import LeaseLostError
from sglang_recv.receiver import checksum
from sglang_recv.receiver.apply import ModelApplier, Observations
from sglang_recv.receiver.mailbox import ChecksumDone, Event, Mailbox, OpenVoted, RoundDone, SessionEnded
from sglang_recv.receiver.replicated import Replicated
from sglang_recv.wire import (
    AbortCarrier,
    Aborted,
    Carrier,
    ChecksumCarrier,
    CommitCarrier,
    Error,
    LoadCarrier,
    MemorySaver,
    OpenCarrier,
)
from support.staged import staged

A, B = "a" * 32, "b" * 32
LOST = AbortCarrier(A, Error.of(LeaseLostError("sender t is gone", fix="look at its log")))
PATIENCE = 20.0  # seconds that a vote waits for ranks that never come


class Votes:
    """MIN over all ranks: what SGLang's TP CPU group does in a real engine. A rank that stays away breaks it."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._ballots = [True] * ranks
        self.count = 0

    def cast(self, rank: int, ok: bool) -> bool:
        self._ballots[rank] = ok
        if self._barrier.wait(PATIENCE) == 0:
            self.count += 1
        result = all(self._ballots)
        self._barrier.wait(PATIENCE)  # nobody votes again before all have counted
        return result


class Model(torch.nn.Module):
    """Two parameters, loaded by name; some names fail."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(3, 2), requires_grad=False)
        self.b = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "boom":
                raise ValueError("no room for boom")
            self.get_parameter(name).data.copy_(tensor)


class Fence:
    """Says in the host's log when somebody waits for the device."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def synchronize(self) -> None:
        self._log.append("synchronize")


class FakeHost:
    """One rank of an engine without SGLang."""

    device = torch.device("cpu")
    sglang_version = model_path = dtype = "test"
    tied_embeddings = False
    num_layers: int | None = None
    groups: tuple[tuple[str, ...], ...] = ()

    def __init__(self, rank: int, ranks: int, votes: Votes) -> None:
        self.rank, self.ranks = rank, ranks
        self._votes = votes
        self._model = Model()
        self.log: list[str] = []
        self.version = "v0"
        self.reasons: tuple[str, ...] = ()
        self.is_quiet = self.may_flush = True
        self.released = False
        self.begin_fails: Exception | None = None
        self.refused: list[str] = []

    def model(self) -> torch.nn.Module:
        return self._model

    def unsupported(self) -> tuple[str, ...]:
        return self.reasons

    def vote(self, ok: bool) -> bool:
        return self._votes.cast(self.rank, ok)

    def quiet(self) -> bool:
        return self.is_quiet

    def weights_released(self) -> bool:
        return self.released

    def memory_saver(self) -> MemorySaver:
        return MemorySaver(False, (), False)

    def weight_version(self) -> str:
        return self.version

    def begin_load(self) -> None:
        if self.begin_fails is not None:
            raise self.begin_fails
        self.log.append("begin_load")

    def filled(self) -> tuple[torch.nn.Parameter, ...]:
        return ()

    def fill(self) -> None:
        self.log.append("fill")

    def finish_load(self) -> None:
        self.log.append("finish_load")

    def flush_cache(self) -> bool:
        self.log.append("flush")
        return self.may_flush

    def record_version(self, version: str) -> None:
        self.log.append("record_version")
        self.version = version

    def refuse_queued(self, reason: str) -> None:
        self.refused.append(reason)

    def inject(self, carrier: Carrier) -> None:
        raise AssertionError("nothing here injects")

    def after_writes(self) -> Fence:
        return Fence(self.log)


def _answer(answer: tuple[bool, str] | None) -> tuple[bool, str]:
    assert answer is not None
    return answer


class Engine:
    """N ranks that run each carrier at the same step."""

    def __init__(self, ranks: int, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.votes = Votes(ranks)
        self.hosts = [FakeHost(rank, ranks, self.votes) for rank in range(ranks)]
        self.boxes = [Mailbox() for _ in range(ranks)]
        self.sides = [self._side(host, box) for host, box in zip(self.hosts, self.boxes, strict=True)]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        for box in self.boxes:
            box.wakeup.close()

    @staticmethod
    def _side(host: FakeHost, box: Mailbox) -> Replicated:
        observations = Observations(host.model())
        return Replicated(host, box, lambda kind: ModelApplier(host.model(), observations))

    def run(self, carrier: Carrier) -> list[tuple[bool, str] | None]:
        """What each rank answers."""
        calls = [self._pool.submit(side.run, carrier) for side in self.sides]
        return [call.result(2 * PATIENCE) for call in calls]

    def events(self) -> list[list[Event]]:
        return [box.events() for box in self.boxes]

    def one(self, kind: type[Any]) -> list[Any]:
        """The only event of each rank, all of one kind."""
        found = self.events()
        assert all(len(events) == 1 and isinstance(events[0], kind) for events in found), found
        return [events[0] for events in found]

    def codes(self, kind: type[Any]) -> list[str | None]:
        return [event.error and event.error.code for event in self.one(kind)]

    def put(self, session: str, number: int, *ranks: int, value: float = 1.0, names: Sequence[str] = "ab") -> None:
        """The given ranks (all by default) hold a round of one bucket per name."""
        for rank in ranks or range(len(self.hosts)):
            shapes = {"a": (3, 2), "b": (4,)}
            buckets = [staged([(name, torch.full(shapes.get(name, (1,)), value + rank))]) for name in names]
            self.boxes[rank].put_round(session, number, buckets)

    def opened(self, kind: str = "full") -> None:
        assert self.run(OpenCarrier(A, kind)) == [None] * len(self.hosts)
        assert set(self.codes(OpenVoted)) == {None}

    def loaded(self, number: int = 0, **kwargs: Any) -> None:
        self.put(A, number, **kwargs)
        assert self.run(LoadCarrier(A, number)) == [None] * len(self.hosts)
        assert set(self.codes(RoundDone)) == {None}

    def prepared(self) -> None:
        self.boxes[0].set_prepared(A)

    def committed(self, version: str = "v1", flush: bool = True) -> None:
        self.prepared()
        answers = self.run(CommitCarrier(A, version, flush))
        assert answers == [(True, f"weight version {version} committed")] * len(self.hosts)
        assert set(self.codes(SessionEnded)) == {None}

    def weights(self) -> list[dict[str, torch.Tensor]]:
        return [{n: p.clone() for n, p in host.model().named_parameters()} for host in self.hosts]

    def check(self, state: str, gate_closed: bool, session: str) -> None:
        """What hooks and senders see is the same on every rank."""
        for side, box in zip(self.sides, self.boxes, strict=True):
            assert (box.status.state, box.status.session) == (state, session)
            assert side.gate_closed is gate_closed
            assert (side.refusal() is None) == (state == "ready")
            assert (side.blocks_stock_update() is None) == (session == "")
            assert box.status.full_required == (state != "ready")


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture(params=[1, 2, 3], ids="{} ranks".format)
def engine(request: pytest.FixtureRequest, pool: ThreadPoolExecutor) -> Iterator[Engine]:
    with Engine(request.param, pool) as made:
        yield made


@pytest.fixture
def two(pool: ThreadPoolExecutor) -> Iterator[Engine]:
    with Engine(2, pool) as made:
        yield made


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(a[n], b[n]) for a, b in zip(one, other, strict=True) for n in a)


# --- the way it should go -------------------------------------------------------------------------------------------


def test_a_full_update(engine: Engine) -> None:
    engine.check("ready", False, "")
    engine.opened()
    engine.check("ready", False, A)
    engine.loaded(0, names="a", value=1.0)
    engine.check("ready", True, A)
    engine.loaded(1, names="b", value=7.0)
    assert {box.status.activity for box in engine.boxes} == {"session aaaaaaaa, 2 rounds loaded"}
    assert [host.version for host in engine.hosts] == ["v0"] * len(engine.hosts)
    engine.committed("v1")
    engine.check("ready", False, "")
    assert {box.status.activity for box in engine.boxes} == {"idle"}
    for host, weights in zip(engine.hosts, engine.weights(), strict=True):
        assert torch.equal(weights["a"], torch.full((3, 2), 1.0 + host.rank))
        assert torch.equal(weights["b"], torch.full((4,), 7.0 + host.rank))
        assert host.log == ["begin_load", "finish_load", "synchronize", "flush", "record_version"]
        assert host.version == "v1"
        assert host.refused == []
    assert engine.votes.count == 3, "votes at open, first write and commit, and no others"


def test_events_carry_what_the_service_thread_needs(two: Engine) -> None:
    two.run(OpenCarrier(A, "full"))
    appliers = [event.applier for event in two.one(OpenVoted)]
    two.put(A, 0, names="a")
    two.run(LoadCarrier(A, 0))
    for event in two.one(RoundDone):
        assert (event.session, event.round, event.error) == (A, 0, None)
        assert event.seconds >= 0
    assert [applier.missing() for applier in appliers] == [("b: 16 of 16 bytes were not written",)] * 2
    two.prepared()
    two.run(CommitCarrier(A, "v7"))
    for event in two.one(SessionEnded):
        assert (event.session, event.version, event.error, event.wrote) == (A, "v7", None, True)
        assert min(event.finalize, event.flush) > 0


def test_ranks_without_a_bucket_take_part(two: Engine) -> None:
    two.opened()
    two.put(A, 0, 1)
    two.run(LoadCarrier(A, 0))
    assert two.codes(RoundDone) == [None, None]
    two.check("ready", True, A)
    two.put(A, 1, 0, value=5.0)
    two.run(LoadCarrier(A, 1))
    assert two.codes(RoundDone) == [None, None]
    two.committed()
    assert torch.equal(two.weights()[0]["b"], torch.full((4,), 5.0))
    assert torch.equal(two.weights()[1]["b"], torch.full((4,), 2.0))


def test_a_commit_may_leave_the_cache(two: Engine) -> None:
    two.opened("partial")
    two.loaded(names="a")
    two.prepared()
    two.run(CommitCarrier(A, "v1", flush_cache=False))
    assert all("flush" not in host.log for host in two.hosts)
    assert [event.flush for event in two.one(SessionEnded)] == [0.0, 0.0]


def test_a_commit_without_rounds_touches_nothing(two: Engine) -> None:
    before = two.weights()
    two.opened("partial")
    two.committed("v1")
    two.check("ready", False, "")
    assert same(before, two.weights())
    assert [host.log for host in two.hosts] == [["record_version"]] * 2


def test_sessions_follow_each_other(two: Engine) -> None:
    for value in (1.0, 2.0, 3.0):
        two.opened()
        two.loaded(value=value)
        two.committed(f"v{value}")
        two.check("ready", False, "")
        assert torch.equal(two.weights()[0]["a"], torch.full((3, 2), value))
        assert two.hosts[1].version == f"v{value}"


# --- open -----------------------------------------------------------------------------------------------------------


def refuse_unsupported(host: FakeHost) -> None:
    host.reasons = ("quantization 'x': packed",)


def refuse_released(host: FakeHost) -> None:
    host.released = True


@pytest.mark.parametrize(
    ("refuse", "code"), [(refuse_unsupported, "UNSUPPORTED"), (refuse_released, "WEIGHTS_RELEASED")]
)
@pytest.mark.parametrize("which", [0, 1])
def test_one_rank_that_may_not_open_refuses_for_all(
    two: Engine, refuse: Callable[[FakeHost], None], code: str, which: int
) -> None:
    refuse(two.hosts[which])
    assert two.run(OpenCarrier(A, "full")) == [None, None]
    expected: list[str | None] = ["ABORTED", "ABORTED"]
    expected[which] = code
    assert two.codes(OpenVoted) == expected
    two.check("ready", False, "")
    two.hosts[which].reasons, two.hosts[which].released = (), False
    two.opened()


def test_reasons_are_the_details(two: Engine) -> None:
    refuse_unsupported(two.hosts[0])
    two.run(OpenCarrier(A, "full"))
    error = two.one(OpenVoted)[0].error
    assert error.details == ("quantization 'x': packed",)
    assert "docs/limits.md" in error.fix


def test_a_second_open_is_refused_and_the_first_lives(two: Engine) -> None:
    two.opened()
    two.run(OpenCarrier(B, "full"))
    for event in two.one(OpenVoted):
        assert (event.session, event.error.code, event.applier) == (B, "SESSION_STATE", None)
    two.check("ready", False, A)
    two.loaded()
    two.committed()


# --- the states of the weights --------------------------------------------------------------------------------------


def test_an_abort_before_the_first_write_leaves_the_engine_as_it_was(engine: Engine) -> None:
    before = engine.weights()
    engine.opened()
    engine.put(A, 0)
    assert engine.run(LOST) == [None] * len(engine.hosts)
    for event in engine.one(SessionEnded):
        assert (event.session, event.version, event.error.code, event.wrote) == (A, "", "LEASE_LOST", False)
    engine.check("ready", False, "")
    assert same(before, engine.weights())
    assert [host.log for host in engine.hosts] == [[]] * len(engine.hosts)
    assert [host.refused for host in engine.hosts] == [[]] * len(engine.hosts)
    engine.opened()


def test_an_abort_after_the_first_write_poisons(engine: Engine) -> None:
    engine.opened()
    engine.loaded(names="a")
    engine.run(LOST)
    for event in engine.one(SessionEnded):
        assert (event.error.code, event.wrote) == ("LEASE_LOST", True)
    engine.check("poisoned", True, "")
    for host, side, box in zip(engine.hosts, engine.sides, engine.boxes, strict=True):
        assert box.status.reason == "session aaaaaaaa ended half-way: sender t is gone"
        assert host.refused == [side.refusal()]
        assert host.log == ["begin_load", "finish_load"]
        assert host.version == "v0"


def poisoned(engine: Engine) -> None:
    engine.opened()
    engine.loaded(names="a")
    engine.run(LOST)
    engine.events()
    engine.check("poisoned", True, "")


def needing(engine: Engine) -> None:
    for side in engine.sides:
        side.resumed_without_backup()
    engine.check("needs_weights", True, "")


SPOILT = pytest.mark.parametrize(("spoil", "state"), [(poisoned, "poisoned"), (needing, "needs_weights")])


def test_what_the_engine_fills_is_filled_when_the_memory_is_back(two: Engine) -> None:
    """A stock reload may be what makes the rest whole, and it fills nothing."""
    needing(two)
    assert [host.log for host in two.hosts] == [["fill"], ["fill"]]


@SPOILT
def test_what_is_not_whole_takes_full_updates_alone(two: Engine, spoil: Callable[[Engine], None], state: str) -> None:
    spoil(two)
    two.run(OpenCarrier(A, "partial"))
    assert two.codes(OpenVoted) == ["FULL_REQUIRED", "FULL_REQUIRED"]
    two.check(state, True, "")
    two.opened("full")
    two.check(state, True, A)
    two.loaded()
    two.check(state, True, A)
    two.committed()
    two.check("ready", False, "")
    assert {(box.status.reason, box.status.state) for box in two.boxes} == {("", "ready")}


@SPOILT
def test_a_full_update_that_ends_before_its_first_write_changes_no_state(
    two: Engine, spoil: Callable[[Engine], None], state: str
) -> None:
    spoil(two)
    reasons = [box.status.reason for box in two.boxes]
    two.opened("full")
    two.run(LOST)
    two.check(state, True, "")
    assert [box.status.reason for box in two.boxes] == reasons


@SPOILT
def test_a_stock_reload_from_disk_clears(two: Engine, spoil: Callable[[Engine], None], state: str) -> None:
    spoil(two)
    for side in two.sides:
        assert state in (side.refusal() or "")
        assert "/update_weights_from_disk" in (side.refusal() or "")
        assert side.blocks_stock_update() is None
        side.reloaded()
    two.check("ready", False, "")
    two.opened("partial")


def test_stock_updates_are_blocked_in_a_session(two: Engine) -> None:
    two.opened()
    for side in two.sides:
        assert "weight session aaaaaaaa is open" in (side.blocks_stock_update() or "")
    two.loaded()
    two.committed()
    assert [side.blocks_stock_update() for side in two.sides] == [None, None]


def test_weights_that_go_in_mid_session_end_it(two: Engine) -> None:
    two.opened()
    two.loaded(names="a")
    for host in two.hosts:
        host.released = True
    two.put(A, 1, names="b")
    two.run(LoadCarrier(A, 1))
    assert two.codes(SessionEnded) == ["WEIGHTS_RELEASED"] * 2
    two.check("poisoned", True, "")


@pytest.mark.parametrize("kind", ["full", "partial"])
def test_weights_lost_before_the_first_write_end_the_session(two: Engine, kind: str) -> None:
    two.opened(kind)
    for side in two.sides:
        side.resumed_without_backup()
    ended = two.one(SessionEnded)
    assert [(end.session, end.wrote, end.error.code) for end in ended] == [(A, False, "WEIGHTS_RELEASED")] * 2
    assert [host.log for host in two.hosts] == [["fill"], ["fill"]], "what was never begun is not finished"
    two.check("needs_weights", True, "")
    two.put(A, 0)
    assert two.run(LoadCarrier(A, 0)) == [None, None]
    two.prepared()
    assert [ok for ok, _ in map(_answer, two.run(CommitCarrier(A, "v1")))] == [False, False]
    assert two.events() == [[], []]
    two.check("needs_weights", True, "")


def test_a_full_commit_does_not_hide_that_weights_were_lost_in_mid_session(two: Engine) -> None:
    """Released and resumed without a backup between two rounds: what round 0 wrote is gone."""
    two.opened("full")
    two.loaded(0, names="a")
    for side in two.sides:
        side.resumed_without_backup()
    assert two.codes(SessionEnded) == ["WEIGHTS_RELEASED"] * 2
    two.put(A, 1, names="b")
    two.run(LoadCarrier(A, 1))
    two.prepared()
    two.run(CommitCarrier(A, "v1"))
    two.check("needs_weights", True, "")
    assert [host.version for host in two.hosts] == ["v0", "v0"]
    assert [len(host.refused) for host in two.hosts] == [1, 1], "what queued behind the gate is answered"


# --- the first write ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
def test_running_requests_on_one_rank_end_the_session_and_nothing_has_changed(two: Engine, which: int) -> None:
    before = two.weights()
    two.hosts[which].is_quiet = False
    two.opened()
    two.put(A, 0)
    two.run(LoadCarrier(A, 0))
    expected = ["ABORTED", "ABORTED"]
    expected[which] = "NOT_PAUSED"
    assert two.codes(SessionEnded) == expected
    two.check("ready", False, "")
    assert same(before, two.weights())
    other = two.hosts[1 - which]
    assert other.log == ["begin_load", "finish_load"], "the layout is put back where it was changed"
    assert two.hosts[which].log == []
    assert [host.refused for host in two.hosts] == [[], []]


def test_weights_released_since_open_end_the_session(two: Engine) -> None:
    two.opened()
    two.hosts[1].released = True
    two.put(A, 0)
    two.run(LoadCarrier(A, 0))
    assert two.codes(SessionEnded) == ["ABORTED", "WEIGHTS_RELEASED"]
    two.check("ready", False, "")


def test_a_model_that_cannot_be_prepared_ends_the_session(two: Engine, caplog: pytest.LogCaptureFixture) -> None:
    two.hosts[0].begin_fails = RuntimeError("no such layout")
    two.opened()
    two.put(A, 0)
    two.run(LoadCarrier(A, 0))
    first, second = (event.error for event in two.one(SessionEnded))
    assert (first.code, second.code) == ("INTERNAL", "ABORTED")
    assert "RuntimeError: no such layout" in first.message
    two.check("ready", False, "")
    assert any("failed" in record.message and record.exc_info for record in caplog.records)


def test_later_rounds_do_not_ask_again(two: Engine) -> None:
    two.opened()
    two.loaded(0, names="a")
    votes = two.votes.count
    two.hosts[0].is_quiet = False  # nothing can run behind the gate; what is_fully_idle says no longer matters
    two.loaded(1, names="b")
    assert two.votes.count == votes


# --- errors of one rank ---------------------------------------------------------------------------------------------


def test_an_error_of_one_ranks_loader_is_latched_and_refuses_the_commit_of_all(two: Engine) -> None:
    two.opened()
    two.put(A, 0, 0)
    two.put(A, 0, 1, names=["a", "boom", "b"])
    two.run(LoadCarrier(A, 0))
    assert two.codes(RoundDone) == [None, "APPLY"]
    two.put(A, 1, value=9.0)
    two.run(LoadCarrier(A, 1))
    assert two.codes(RoundDone) == [None, "APPLY"]
    assert torch.equal(two.weights()[0]["a"], torch.full((3, 2), 9.0))
    assert torch.equal(two.weights()[1]["a"], torch.full((3, 2), 2.0)), "nothing more is written after an error"
    two.prepared()
    answers = two.run(CommitCarrier(A, "v1"))
    assert [answer[0] for answer in answers if answer] == [False, False]
    assert "[ABORTED]" in str(answers[0])
    assert "no room for boom" in str(answers[1])
    assert two.codes(SessionEnded) == ["ABORTED", "APPLY"]
    two.check("poisoned", True, "")
    assert [host.version for host in two.hosts] == ["v0", "v0"]


def test_an_error_on_the_first_write_aborts_to_poisoned(two: Engine) -> None:
    two.opened()
    two.put(A, 0, 0)
    two.put(A, 0, 1, names=["boom"])
    two.run(LoadCarrier(A, 0))
    assert two.codes(RoundDone) == [None, "APPLY"]
    two.run(LOST)
    two.check("poisoned", True, "")


def test_rounds_out_of_order_end_the_session_everywhere(two: Engine) -> None:
    two.opened()
    two.put(A, 1)
    two.run(LoadCarrier(A, 1))
    for event in two.one(SessionEnded):
        assert (event.error.code, event.wrote) == ("SESSION_STATE", False)
        assert event.error.message == "round 1 came, round 0 was due"
    two.check("ready", False, "")


def test_carriers_of_other_sessions_change_nothing(two: Engine) -> None:
    for carrier in (LoadCarrier(B, 0), AbortCarrier(B, LOST.error)):
        assert two.run(carrier) == [None, None]
    assert two.events() == [[], []]
    two.opened()
    for carrier in (LoadCarrier(B, 0), AbortCarrier(B, LOST.error)):
        assert two.run(carrier) == [None, None]
    assert two.events() == [[], []]
    two.check("ready", False, A)


# --- commit ---------------------------------------------------------------------------------------------------------


def test_a_commit_without_a_session_is_refused(two: Engine) -> None:
    for answer in two.run(CommitCarrier(A, "v1")):
        assert answer is not None
        assert answer[0] is False
        assert "[SESSION_STATE] commit of session aaaaaaaa, but no session is open" in answer[1]
    two.opened()
    for answer in two.run(CommitCarrier(B, "v1")):
        assert answer is not None
        assert "commit of session bbbbbbbb, but session aaaaaaaa is open" in answer[1]
    assert two.events() == [[], []]
    two.check("ready", False, A)
    assert [host.log for host in two.hosts] == [[], []]


@pytest.mark.parametrize(("wrote", "state"), [(False, "ready"), (True, "poisoned")])
def test_a_commit_before_every_sender_finished_ends_the_session(two: Engine, wrote: bool, state: str) -> None:
    two.opened()
    if wrote:
        two.loaded()
    two.boxes[0].set_prepared(B)
    answers = two.run(CommitCarrier(A, "v1"))
    assert "[SESSION_STATE] commit of session aaaaaaaa before every sender finished" in str(answers[0])
    assert [answer and answer[0] for answer in answers] == [False, False]
    assert two.codes(SessionEnded) == ["SESSION_STATE", "ABORTED"]
    two.check(state, wrote, "")
    assert [host.version for host in two.hosts] == ["v0", "v0"]


@pytest.mark.parametrize("which", [0, 1])
def test_a_refused_flush_fails_the_commit_loudly(two: Engine, which: int) -> None:
    two.opened()
    two.loaded()
    two.hosts[which].may_flush = False
    two.prepared()
    answers = two.run(CommitCarrier(A, "v1"))
    assert [answer and answer[0] for answer in answers] == [False, False]
    assert "[COMMIT] weights are written, but the engine refused to flush" in str(answers[which])
    expected = ["ABORTED", "ABORTED"]
    expected[which] = "COMMIT"
    assert two.codes(SessionEnded) == expected
    two.check("poisoned", True, "")
    for host in two.hosts:
        assert host.log.count("finish_load") == 1
        assert "record_version" not in host.log
        assert len(host.refused) == 1


def test_a_commit_is_not_taken_twice(two: Engine) -> None:
    two.opened()
    two.loaded()
    two.committed()
    assert [answer and answer[0] for answer in two.run(CommitCarrier(A, "v2"))] == [False, False]
    assert [host.version for host in two.hosts] == ["v1", "v1"]
    two.check("ready", False, "")


# --- what a host may throw ------------------------------------------------------------------------------------------


def explode(*_: object) -> Any:
    raise RuntimeError("the host broke")


def test_the_end_is_reported_even_if_queued_requests_cannot_be_refused(
    two: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.opened()
    two.loaded()
    monkeypatch.setattr(two.hosts[1], "refuse_queued", explode)
    two.run(LOST)
    assert two.codes(SessionEnded) == ["LEASE_LOST"] * 2


def test_a_version_that_cannot_be_recorded_does_not_leave_run(two: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    two.opened()
    two.loaded()
    two.prepared()
    monkeypatch.setattr(two.hosts[1], "record_version", explode)
    two.run(CommitCarrier(A, "v1"))
    assert len(two.one(SessionEnded)) == 2


def test_a_rank_without_an_applier_refuses_in_the_vote(two: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two.sides[1], "_make_applier", explode)
    two.run(OpenCarrier(A, "full"))
    assert two.codes(OpenVoted) == ["ABORTED", "INTERNAL"]
    two.check("ready", False, "")


@pytest.mark.parametrize("text", ["x" * 70_000, "file \udcff"], ids=["long", "surrogate"])
def test_the_reason_of_a_state_can_be_sent(two: Engine, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Whatever a host's exception says: an engine whose Welcome cannot be sent or read cannot be repaired."""

    def fail() -> None:
        raise RuntimeError(text)

    two.opened()
    two.loaded()
    two.prepared()
    monkeypatch.setattr(two.hosts[0], "finish_load", fail)
    two.run(CommitCarrier(A, "v1"))
    for box in two.boxes:
        sent = wire.encode(Aborted(A, box.status.reason, box.status.state))
        assert wire.decode(sent, wire.RankMessage).weights_state == "poisoned"


# --- checksums ------------------------------------------------------------------------------------------------------


def test_a_checksum_is_taken_on_the_rank_that_was_asked(two: Engine) -> None:
    two.opened()
    two.loaded()
    assert two.run(ChecksumCarrier("t", 1)) == [None, None]
    first, second = two.events()
    assert first == []
    assert second == [ChecksumDone("t", checksum.digests(two.hosts[1].model()), None)]
    two.check("ready", True, A)


def test_a_checksum_of_released_weights_is_an_error(two: Engine) -> None:
    two.hosts[0].released = True
    two.run(ChecksumCarrier("t", 0))
    (done,) = two.boxes[0].events()
    assert isinstance(done, ChecksumDone)
    assert done.error is not None
    assert (done.token, done.tensors, done.error.code) == ("t", {}, "WEIGHTS_RELEASED")


def test_a_checksum_that_fails_is_an_error(two: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two.hosts[0], "model", explode)
    two.run(ChecksumCarrier("t", 0))
    (done,) = two.boxes[0].events()
    assert isinstance(done, ChecksumDone)
    assert done.error is not None
    assert (done.error.code, done.tensors) == ("INTERNAL", {})
    assert "the host broke" in done.error.message


# --- any sequence ---------------------------------------------------------------------------------------------------

STEPS = st.sampled_from(
    ["open full", "open partial", "load", "load", "load nothing", "load boom", "load twice", "abort", "prepare",
     "commit", "busy", "idle", "release", "resume", "reload", "flush refused", "flush works"]
)  # fmt: skip


class Expected:
    """The tables of docs/protocol.md in a few lines: what the engine must look like, without ranks and votes."""

    def __init__(self) -> None:
        self.state, self.session, self.kind = "ready", "", ""
        self.rounds = 0
        self.unfinished = 0  # sessions whose end found no weights to call finish_load on
        self.writing = self.failed = self.prepared = self.busy = self.released = False
        self.flushes = True

    def _end(self) -> None:
        if self.writing:
            self.state = "poisoned"
            self.unfinished += self.released
        self.session, self.writing, self.prepared, self.failed = "", False, False, False

    def step(self, step: str) -> None:
        verb, _, what = step.partition(" ")
        if verb == "open" and not self.session and not self.released and (what == "full" or self.state == "ready"):
            self.session, self.kind, self.rounds = A, what, 0
        elif verb == "load" and self.session:
            if (what == "twice" and self.rounds) or (not self.writing and self.busy) or self.released:
                self._end()
            else:
                self.writing, self.rounds = True, self.rounds + 1
                self.failed |= what == "boom"
        elif verb == "abort" and self.session:
            self._end()
        elif verb == "prepare":
            self.prepared = bool(self.session)
        elif verb == "commit" and self.session:
            if self.failed or not self.prepared or self.released or (self.writing and not self.flushes):
                self._end()
            else:
                self.state = "ready" if self.kind == "full" and self.writing else self.state
                self.session, self.writing, self.prepared = "", False, False
        elif verb == "reload" and not self.session:
            self.state = "ready"
        elif verb in ("busy", "idle"):
            self.busy = verb == "busy"
        elif verb in ("release", "resume"):
            self.released = verb == "release"
        elif verb == "flush":
            self.flushes = what == "works"


def perform(engine: Engine, step: str, expected: Expected, failing: int) -> None:
    verb, _, what = step.partition(" ")
    number = expected.rounds
    if verb == "open":
        engine.run(OpenCarrier(A, what))
    elif verb == "load":
        number -= what == "twice" and number > 0
        if expected.session and what != "nothing":
            engine.put(A, number)
        if expected.session and what == "boom":
            engine.put(A, number, failing, names=["boom"])
        engine.run(LoadCarrier(A, number))
        for box in engine.boxes:
            box.drop_rounds()
    elif verb == "abort":
        engine.run(LOST)
    elif verb == "prepare":
        engine.boxes[0].set_prepared(A if expected.session else "")
    elif verb == "commit":
        engine.run(CommitCarrier(A, "v"))
        engine.boxes[0].set_prepared("")
    elif verb == "reload":
        for side in engine.sides:
            if side.blocks_stock_update() is None:
                side.reloaded()
    elif verb in ("busy", "idle"):
        engine.hosts[failing].is_quiet = verb == "idle"
    elif verb in ("release", "resume"):
        for host in engine.hosts:
            host.released = verb == "release"
    elif verb == "flush":
        engine.hosts[failing].may_flush = what == "works"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, max_size=14), st.integers(0, 1), st.sampled_from([1, 2]))
def test_any_sequence_follows_the_tables(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture, steps: list[str], failing: int, ranks: int
) -> None:
    expected = Expected()
    with caplog.at_level(logging.CRITICAL, "sglang_recv"), Engine(ranks, pool) as engine:
        for step in steps:
            before, wrote = engine.weights(), expected.writing
            perform(engine, step, expected, failing % ranks)
            expected.step(step)
            engine.check(expected.state, expected.writing or expected.state != "ready", expected.session)
            if not wrote and not expected.writing:
                assert same(before, engine.weights()), f"{step} changed weights outside of a session's writes"
        for host in engine.hosts:
            assert host.log.count("begin_load") - host.log.count("finish_load") == (
                expected.unfinished + expected.writing
            )
