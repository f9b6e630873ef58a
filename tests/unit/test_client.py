"""The trainer's side, from the client to the model: real services, sockets and shared memory, without SGLang."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch

from sglang_recv import WeightClient, manifest, wire
from sglang_recv.client import link as link_module
from sglang_recv.client import rounds
from sglang_recv.client import staging as staging_module
from sglang_recv.client.client import new_session_id
from sglang_recv.client.link import RankLink, combined, wait
from sglang_recv.client.rounds import Clock as RoundsClock
from sglang_recv.client.rounds import Rounds
from sglang_recv.client.select import Pair
from sglang_recv.client.session import Progress, Session
from sglang_recv.errors import (
    ApplyError,
    BadBufferError,
    BusyError,
    CommitError,
    DeadlineError,
    DeviceMismatchError,
    EngineLostError,
    FullUpdateRequiredError,
    LeaseLostError,
    ManifestError,
    NotPausedError,
    RecvError,
    SessionAbortedError,
    SessionStateError,
    StagingMemoryError,
    UnsupportedError,
    WeightsReleasedError,
)
from sglang_recv.memory import ExportableBuffer
from sglang_recv.receiver import service as service_module
from sglang_recv.wire import AbortCarrier, Aborted, Ack, Committed, Error, Load, LoadCarrier, OpenCarrier, RankInfo
from support.rank import PATIENCE, Engine, weights
from support.waiting import wait_until

Q_A, KV_A = "attn.q_a_proj.weight", "attn.kv_a_proj_with_mqa.weight"
SLOT = 4096


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    """A service takes the interval at its making for the usual one; here, another engine may have lowered it."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def one() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture
def two() -> Iterator[Engine]:
    with Engine(2) as engine:
        yield engine


@contextlib.contextmanager
def client(*engines: Engine, **kwargs: Any) -> Iterator[WeightClient]:
    with WeightClient(list(engines), **{"slots": 2, "slot_bytes": SLOT, "deadline": PATIENCE, **kwargs}) as made:
        yield made


def expected(value: float, rank: int = 0, ranks: int = 1) -> dict[str, torch.Tensor]:
    """What a rank holds after ``weights(value)``."""
    sent = weights(value)
    rows = 8 // ranks
    return {
        "embed": sent["embed"][rows * rank : rows * (rank + 1)],
        "norm": sent["norm"],
        "fused": torch.cat([sent[Q_A], sent[KV_A]]),
    }


def check(engine: Engine, value: float, version: str) -> None:
    """Every rank holds ``weights(value)`` and says so."""
    assert engine.states() == {("ready", version)}
    for rank, held in enumerate(engine.parameters()):
        wanted = expected(value, rank, engine.ranks)
        assert held.keys() == wanted.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in wanted.items()), held


def mapped() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:sglang_recv")


def calls(engine: Engine) -> list[list[str]]:
    """Names of each bucket, in order."""
    return engine.rank[0].host.model().calls


# --- whole updates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("source", ["mapping", "list", "generator"])
def test_an_update_arrives_on_every_rank(source: str, ranks: int) -> None:
    before, threads = mapped(), set(threading.enumerate())
    with Engine(ranks) as engine, client(engine) as sender:
        for value, version in ((1.0, "v1"), (2.0, "v2"), (3.0, "v3")):
            tensors = weights(value)
            sources: dict[str, Any] = {
                "mapping": tensors, "list": list(tensors.items()), "generator": iter(tensors.items())
            }  # fmt: skip
            report = sender.update(sources[source], version)
            check(engine, value, version)
            assert (report.version, report.mode, report.engines) == (version, "vmm", (engine.name,))
            assert (report.tensors, report.nbytes, report.rounds) == (4, 128 + 10 + 32 + 64, 1)
            assert report.staging_bytes == 2 * SLOT
            assert mapped() == before, "nothing is kept between updates"
        assert [state.session for state in sender.status()[engine.name]] == [""] * ranks
        digests = sender.checksum()[engine.name]
        assert [digest.rank for digest in digests] == list(range(ranks))
        assert all(digest.weight_version == "v3" for digest in digests)
        assert len({digest.tensors["norm"] for digest in digests}) == 1
        assert len({digest.tensors["embed"] for digest in digests}) == ranks
    assert set(threading.enumerate()) == threads


def test_two_engines_get_the_same_update(one: Engine, two: Engine) -> None:
    with client(one, two) as sender:
        report = sender.update(weights(5.0), "v1")
    check(one, 5.0, "v1")
    check(two, 5.0, "v1")
    assert report.engines == (one.name, two.name)


def test_a_partial_update_leaves_the_rest(one: Engine) -> None:
    with client(one) as sender:
        sender.update(weights(1.0), "v1")
        sender.update({"norm": weights(9.0)["norm"]}, "v2", kind="partial")
    held = one.parameters()[0]
    assert torch.equal(held["norm"], weights(9.0)["norm"])
    assert torch.equal(held["embed"], weights(1.0)["embed"])
    assert one.states() == {("ready", "v2")}


def test_strided_and_expanded_sources_arrive(one: Engine) -> None:
    tensors = weights(2.0)
    tensors["embed"] = tensors["embed"].t().contiguous().t()
    tensors["norm"] = torch.tensor([2.0], dtype=torch.bfloat16).expand(5)
    tensors[Q_A] = torch.full((2, 8), 2.0)[:, ::2]
    assert not any(tensors[name].is_contiguous() for name in ("embed", "norm", Q_A))
    with client(one) as sender:
        sender.update(tensors, "v1")
    check(one, 2.0, "v1")


def test_many_rounds_through_few_slots(one: Engine) -> None:
    """Slots are used again only after the rank has read them: otherwise later bytes would be loaded twice."""
    seen: list[float] = []
    model = one.rank[0].host.model()
    progress: list[Progress] = []
    parts = 40

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(parts):
            yield f"extra.{number}", torch.full((SLOT // 4,), float(number))

    def load(pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in pairs:
            (value,) = set(tensor.tolist())
            seen.append(value)

    model.load_weights = load  # type: ignore[method-assign]
    with client(one, slots=2) as sender:
        report = sender.update(source(), "v1", kind="partial", on_progress=progress.append)
    assert seen == [float(number) for number in range(parts)]
    assert (report.rounds, report.staging_bytes) == (parts, 2 * SLOT)
    assert [step.tensors for step in progress] == list(range(1, parts + 1))
    assert progress[-1].nbytes == parts * SLOT


def test_a_session_in_steps_fills_buckets_across_calls(one: Engine) -> None:
    with client(one) as sender, sender.open("v1") as session:
        for name, tensor in weights(4.0).items():
            session.send([(name, tensor)])
            tensor.fill_(-1)  # a source may be overwritten once send() has returned
        report = session.commit()
        assert session.report is report
        with pytest.raises(SessionStateError, match="is over"):
            session.send([])
        with pytest.raises(SessionStateError, match="is over"):
            session.commit()
        session.abort()
    check(one, 4.0, "v1")
    assert report.rounds == 1
    assert [name for name in calls(one)[0] if "proj" not in name] == ["embed", "norm"]


def test_phases_inside_others_count_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: now))
    clock = rounds.Clock()
    work(0.5)

    def fail() -> NoReturn:
        work(2.0)
        with clock.phase("wait"):
            work(4.0)
        raise KeyError("ends the phase all the same")

    with clock.phase("fill"):
        work(1.0)
        with pytest.raises(KeyError), clock.phase("pack"):
            fail()
        work(8.0)

    def source() -> Iterator[int]:
        work(16.0)
        yield 1
        work(32.0)
        yield 2
        work(64.0)

    drawn = []
    with clock.phase("finish"):
        for number in clock.drawn(source()):
            work(128.0)
            drawn.append(number)
    found = {name: seconds for name, seconds in clock.phases.items() if seconds}
    assert drawn == [1, 2]
    assert found == {"fill": 9.0, "pack": 2.0, "wait": 4.0, "source": 112.0, "finish": 256.0}


def test_a_report_says_where_the_time_went_on_both_sides(one: Engine) -> None:
    slow = threading.Event()

    def lazy() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in weights(3.0).items():
            slow.wait(0.02)
            yield pair

    with client(one) as sender:
        at_hand = sender.update(weights(1.0), "v1")
        drawn = sender.update(lazy(), "v2")
        with sender.open("v3") as session:
            slow.wait(0.02)
            session.send(weights(2.0))
            steps = session.commit()
    assert at_hand.phases["source"] == 0.0
    assert drawn.phases["source"] >= 0.02 * len(weights(3.0))
    assert steps.phases["source"] >= 0.02, "the caller's time between its calls"
    for report in (at_hand, drawn, steps):
        assert set(report.phases) == {*rounds.PHASES, "load"}
        assert sum(report.phases[name] for name in rounds.PHASES) <= report.seconds + 1e-5, "of rounding"
        ((name, spent),) = report.rank_phases.items()
        assert name == f"engine {one.name} rank 0"
        assert set(spent) == {"map", "load", "finalize", "flush"}
        assert min(spent["map"], spent["load"], spent["finalize"]) > 0, spent
        assert spent["load"] == report.phases["load"]


def test_pause_is_undone_after_the_session_whatever_happens(one: Engine) -> None:
    with client(one) as sender:
        sender.update(weights(1.0), "v1", pause="retract")
        with pytest.raises(ManifestError):
            sender.update({"norm": weights(1.0)["norm"]}, "v2", pause="abort")
        with pytest.raises(SessionStateError, match="pause 'stop'"):
            sender.update(weights(1.0), "v3", pause="stop")
        assert one.calls == ["pause retract", "resume"], "what is refused pauses nothing"
        with pytest.raises(ManifestError):
            sender.update(iter({"norm": weights(1.0)["norm"]}.items()), "v4", pause="abort")
        assert one.calls[2:] == ["pause abort", "resume"]
    assert one.states() == {("poisoned", "v1")}


def test_generation_is_paused_while_the_session_is_open(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str, tuple[str, str]]] = []

    def note(what: str) -> None:
        told.append((what, one.rank[0].service._session.live, next(iter(one.states()))))

    monkeypatch.setattr(one, "pause", lambda how, timeout: note(how))
    monkeypatch.setattr(one, "resume", lambda timeout: note("resume"))
    with client(one) as sender:
        with sender.open("v1", pause="in_place") as session:
            assert told == [("in_place", session.id, ("ready", "v0"))]
            session.send(weights(1.0))
            session.commit()
        assert told[1:] == [("resume", "", ("ready", "v1"))]
        with pytest.raises(KeyError), sender.open("v2", pause="in_place"):
            raise KeyError("of the caller")
        assert [what for what, _, _ in told[2:]] == ["in_place", "resume"]
        assert told[3][1] == "", "the session has ended before"


def test_a_busy_engine_is_not_paused(one: Engine) -> None:
    with client(one) as first, client(one) as second, first.open("v1"):
        with pytest.raises(BusyError):
            second.update(weights(2.0), "v2", pause="abort")
    assert one.calls == []


def test_only_the_coordinator_pauses(one: Engine) -> None:
    with client(one) as sender, sender.open("v1", coordinator=False, pause="abort"):
        pass
    assert one.calls == []


def test_what_was_not_paused_is_not_resumed(one: Engine, two: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(how: str, timeout: float) -> None:
        raise EngineLostError("no answer to pause", fix="look")

    monkeypatch.setattr(two, "pause", fail)
    with client(one, two) as sender:
        with pytest.raises(EngineLostError, match="no answer to pause"):
            sender.update(weights(1.0), "v1", pause="abort")
        assert (one.calls, two.calls) == (["pause abort", "resume"], [])
        assert one.states() == two.states() == {("ready", "v0")}
        sender.update(weights(2.0), "v2")


def test_an_error_of_resume_is_told_and_hides_no_other(
    one: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(timeout: float) -> None:
        raise EngineLostError("no answer to resume", fix="look")

    monkeypatch.setattr(one, "resume", fail)
    with client(one) as sender:
        with pytest.raises(KeyError, match="of the caller"), sender.open("v1", pause="abort"):
            raise KeyError("of the caller")
        assert "no answer to resume" in caplog.text
        with pytest.raises(EngineLostError, match="no answer to resume"):
            sender.update(weights(1.0), "v1", pause="abort")
    check(one, 1.0, "v1")


# --- what is refused before anything moves --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "engines"),
    [({"slots": 0}, 1), ({"slots": -1}, 1), ({"slot_bytes": 255}, 1), ({"slot_bytes": 0}, 1), ({"deadline": 0.0}, 1),
     ({"deadline": -1.0}, 1), ({}, 0)],
)  # fmt: skip
def test_bad_arguments_are_refused(kwargs: dict[str, Any], engines: int) -> None:
    with pytest.raises(SessionStateError) as caught:
        WeightClient(["http://127.0.0.1:1"] * engines, **kwargs)
    assert f"{engines} engines" in caught.value.message
    assert "256 bytes" in caught.value.fix


def test_one_engine_needs_no_list(one: Engine) -> None:
    with WeightClient(one, slot_bytes=256) as sender:
        assert list(sender.status()) == [one.name]


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [({"mode": "tcp"}, UnsupportedError), ({"mode": "nccl"}, UnsupportedError), ({"ranks": "own"}, DeviceMismatchError),
     ({"ranks": [7]}, DeviceMismatchError), ({"ranks": []}, DeviceMismatchError)],
)  # fmt: skip
def test_what_cannot_be_paired_is_refused(one: Engine, kwargs: dict[str, Any], error: type[RecvError]) -> None:
    with client(one, **kwargs) as sender, pytest.raises(error):
        sender.update(weights(1.0), "v1")
    assert one.carriers == []


def test_released_weights_are_resumed_first_when_the_caller_says_so(two: Engine) -> None:
    with client(two) as sender:
        for rank in two.rank:
            rank.host.released = ("kv_cache", "weights")
        with pytest.raises(FullUpdateRequiredError, match="no CPU backup"):
            sender.update({"norm": weights(1.0)["norm"]}, "v1", kind="partial", resume_weights=True)
        with pytest.raises(WeightsReleasedError, match="resume_weights=True"):
            sender.update(weights(1.0), "v1")
        with pytest.raises(WeightsReleasedError), sender.open("v1", coordinator=False, resume_weights=True):
            pass
        assert two.calls == [], "what is refused has resumed nothing"
        sender.update(weights(1.0), "v1", resume_weights=True)
    assert two.calls == ["resume weights"]
    assert [rank.host.released for rank in two.rank] == [("kv_cache",)] * 2
    check(two, 1.0, "v1")


def test_finish_says_that_everything_is_there_before_anyone_commits(two: Engine) -> None:
    with client(two, ranks=[0]) as first, client(two, ranks=[1]) as second, ThreadPoolExecutor(2) as pool:
        meeting = new_session_id()

        def send(sender: WeightClient, coordinator: bool, value: float) -> contextlib.ExitStack:
            stack = contextlib.ExitStack()
            session = stack.enter_context(sender.open("v1", session_id=meeting, coordinator=coordinator))
            session.send(weights(value))
            session.finish()
            session.finish()
            with pytest.raises(SessionStateError, match="is finished"):
                session.send({"norm": weights(value)["norm"]})
            kept.append(session)
            return stack

        kept: list[Session] = []
        stacks = [pool.submit(send, first, True, 1.0), pool.submit(send, second, False, 1.0)]
        with contextlib.ExitStack() as opened:
            for stack in stacks:
                opened.enter_context(stack.result(30))
            assert two.states() == {("ready", "v0")}, "nothing was committed"
            reports = [pool.submit(session.commit) for session in kept]
            assert {report.result(30).version for report in reports} == {"v1"}
    check(two, 1.0, "v1")


def test_leaving_after_finish_aborts(one: Engine) -> None:
    with client(one) as sender:
        with sender.open("v1") as session:
            session.send(weights(1.0))
            session.finish()
        assert {state for state, _ in one.states()} == {"poisoned"}
        sender.update(weights(2.0), "v2")
    check(one, 2.0, "v2")


def test_what_a_welcome_says_against_an_update_is_raised(two: Engine) -> None:
    with client(two) as sender:
        with pytest.raises(ManifestError, match="2 problems, the first: .* rank 0: kind 'delta'") as caught:
            sender.update(weights(1.0), "v1", kind="delta")
        assert "full, partial" in caught.value.fix
        two.rank[1].host.released = ("kv_cache", "weights")
        with pytest.raises(WeightsReleasedError, match="rank 1: the memory saver has released"):
            sender.update(weights(1.0), "v1")
        two.rank[1].host.released = ("kv_cache",)
        sender.update(weights(1.0), "v1")
        for rank in two.rank:
            rank.side.resumed_without_backup()
        with pytest.raises(FullUpdateRequiredError, match="needs_weights") as missing:
            sender.update({"norm": weights(1.0)["norm"]}, "v2", kind="partial")
        assert len(missing.value.details) == 2
        sender.update(weights(2.0), "v2")
    check(two, 2.0, "v2")


def test_a_known_model_checks_an_announced_manifest_as_a_whole() -> None:
    specs = [manifest.spec_of(name, tensor) for name, tensor in weights(0.0).items()]
    wrong = {"embed": torch.zeros(4, 4), "norm": torch.zeros(5, dtype=torch.int8), "x": torch.zeros(1)}
    with Engine(specs=specs) as engine, client(engine) as sender:
        with pytest.raises(ManifestError) as caught:
            sender.update(wrong, "v1")
        assert caught.value.details == (
            "embed: shape [4, 4], the engine expects [8, 4]",
            "norm: dtype int8, the engine expects bfloat16 or float32",
            "x: the engine's model has no tensor of this name",
            f"{Q_A}: missing",
            f"{KV_A}: missing",
        )
        assert engine.carriers == []
        sender.update(weights(1.0), "v1")
        check(engine, 1.0, "v1")


@pytest.mark.parametrize("lazy", [True, False])
def test_duplicate_names_are_refused(one: Engine, lazy: bool) -> None:
    tensors = [*weights(1.0).items(), ("norm", weights(1.0)["norm"])]
    with client(one) as sender:
        with pytest.raises(ManifestError, match="1 problem") as caught:
            sender.update(iter(tensors) if lazy else tensors, "v1")
        assert caught.value.details == ("norm: sent twice",)
        assert one.states() == {("ready", "v0")}
        sender.update(weights(2.0), "v2")
    check(one, 2.0, "v2")


def test_tensors_without_bytes_to_send_are_refused(one: Engine) -> None:
    with client(one) as sender:
        for tensor in (torch.empty(5, device="meta"), torch.eye(3).to_sparse()):
            with pytest.raises(ManifestError) as caught:
                sender.update(iter([("norm", tensor)]), "v1", kind="partial")
            assert "has no bytes to send" in caught.value.details[0]
    assert one.states() == {("ready", "v0")}


def test_what_was_announced_is_what_may_be_sent(one: Engine) -> None:
    specs = [manifest.spec_of(name, tensor) for name, tensor in weights(0.0).items()]
    with client(one) as sender:
        with sender.open("v1", specs=specs) as session, pytest.raises(ManifestError) as caught:
            session.send([("norm", torch.zeros(6, dtype=torch.bfloat16))])
        assert caught.value.details == ("norm: bfloat16[6] is not what was announced",)
        with sender.open("v1", specs=specs) as session:
            session.send([("norm", weights(0.0)["norm"])])
            with pytest.raises(ManifestError) as caught:
                session.commit()
        assert f"{Q_A}: announced, but not sent" in caught.value.details


# --- groups ---------------------------------------------------------------------------------------------------------


def tower(layers: int) -> dict[str, torch.Tensor]:
    """Tensors of which most fill a slot by half: whatever is not held together is split."""
    found = {}
    for layer in range(layers):
        found[f"{layer}.norm"] = torch.zeros(SLOT // 8)
        found[f"{layer}.{Q_A}"] = torch.full((SLOT // 12,), float(layer))
        found[f"{layer}.mlp"] = torch.zeros(SLOT // 8)
        found[f"{layer}.{KV_A}"] = torch.full((SLOT // 12,), -float(layer))
    return found


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("order", ["as stored", "reversed", "all first halves first"])
def test_what_is_loaded_together_travels_together(one: Engine, order: str, lazy: bool) -> None:
    tensors = list(tower(3).items())
    if order == "reversed":
        tensors.reverse()
    elif order == "all first halves first":
        tensors.sort(key=lambda pair: KV_A in pair[0])
    seen: dict[str, torch.Tensor] = {}

    def load(pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        names = {name for name, _ in pairs}
        assert all(name.replace("q_a_proj", "kv_a_proj_with_mqa") in names for name in names if "q_a_proj" in name)
        assert all(name.replace("kv_a_proj_with_mqa", "q_a_proj") in names for name in names if "kv_a_proj" in name)
        seen.update({name: tensor.clone() for name, tensor in pairs})

    one.rank[0].host.model().load_weights = load  # type: ignore[method-assign]
    with client(one) as sender:
        report = sender.update(iter(tensors) if lazy else tensors, "v1", kind="partial")
    assert report.rounds > 3, "they did not all fit into one bucket"
    assert seen.keys() == tower(3).keys()
    assert all(torch.equal(seen[name], tensor) for name, tensor in tower(3).items())


def test_a_half_that_stays_alone_is_named(one: Engine) -> None:
    tensors = weights(1.0)
    del tensors[KV_A]
    with client(one) as sender, pytest.raises(ManifestError) as caught:
        sender.update(iter(tensors.items()), "v1")
    assert caught.value.details == (f"{Q_A}: needs {KV_A} in the same bucket",)


# --- oversize and lazy sources --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [True, False])
def test_tensors_above_a_slot_travel_in_a_buffer_of_their_own(one: Engine, lazy: bool) -> None:
    sizes = [100, 5000, 20_000, 9000, 60_000, 30, 60_001]
    tensors = {f"t{i}": torch.arange(size, dtype=torch.int32) + i for i, size in enumerate(sizes)}
    seen: dict[str, torch.Tensor] = {}
    peak: list[int] = []
    idle = mapped()

    def load(pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        seen.update({name: tensor.clone() for name, tensor in pairs})
        peak.append(mapped() - idle)

    one.rank[0].host.model().load_weights = load  # type: ignore[method-assign]
    with client(one) as sender:
        report = sender.update(iter(tensors.items()) if lazy else tensors, "v1", kind="partial")
    assert seen.keys() == tensors.keys()
    assert all(torch.equal(seen[name], tensor) for name, tensor in tensors.items())
    assert report.rounds == 7
    assert max(peak) <= 2 * 3, "two slots and one large buffer, each mapped by both sides"
    assert report.staging_bytes == 2 * SLOT + -(-4 * 60_001 // 4096) * 4096, "no more than one large buffer at a time"


def test_a_group_above_a_slot_travels_together(one: Engine) -> None:
    tensors = {Q_A: torch.ones(3 * SLOT // 4), KV_A: torch.ones(3 * SLOT // 4), "norm": weights(1.0)["norm"]}
    seen: list[list[str]] = []
    one.rank[0].host.model().load_weights = lambda pairs: seen.append(  # type: ignore[method-assign,assignment]
        [name for name, tensor in pairs if any(tensor.tolist())]
    )
    with client(one) as sender:
        sender.update(iter(tensors.items()), "v1", kind="partial")
    assert sorted(map(sorted, seen)) == sorted([sorted([Q_A, KV_A]), ["norm"]])


def test_nothing_is_held_from_a_lazy_source(one: Engine) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, _ in weights(1.0).items():
            gc.collect()
            most = max(most, sum(reference() is not None for reference in alive))
            tensor = weights(1.0)[name]
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    with client(one) as sender, sender.open("v1") as session:
        session.send(source())
        gc.collect()
        assert [reference() for reference in alive] == [None] * 4
        session.commit()
    # The loop variable of send() holds the last one while the next is made.
    assert most <= 1
    check(one, 1.0, "v1")


def test_a_source_that_fails_aborts(one: Engine) -> None:
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield "extra", torch.zeros(SLOT // 4)
        yield "norm", weights(1.0)["norm"]
        raise ZeroDivisionError("a conversion failed")

    before = mapped()
    with client(one) as sender:
        with pytest.raises(ZeroDivisionError, match="a conversion failed"):
            sender.update(source(), "v1")
        assert mapped() == before
        assert isinstance(one.carriers[-1], AbortCarrier)
        assert one.carriers[-1].error.message == "aborted by its sender: ZeroDivisionError while sending"
        sender.update(weights(3.0), "v2")
    check(one, 3.0, "v2")


# --- incomplete and failing updates ---------------------------------------------------------------------------------


def test_missing_and_unknown_tensors_are_named_and_the_engine_waits_for_a_repair(two: Engine) -> None:
    tensors = weights(1.0)
    del tensors["norm"]
    tensors["nonsense"] = torch.zeros(3)
    with client(two) as sender:
        with pytest.raises(ManifestError) as caught:
            sender.update(tensors, "v1")
        assert caught.value.details == (
            "nonsense: no rank of the engine read it (unknown name)",
            "rank 0: norm: 10 of 10 bytes were not written",
            "rank 1: norm: 10 of 10 bytes were not written",
        )
        assert two.states() == {("poisoned", "v0")}
        with pytest.raises(FullUpdateRequiredError):
            sender.update({"norm": weights(1.0)["norm"]}, "v1", kind="partial")
        sender.update(weights(2.0), "v2")
    check(two, 2.0, "v2")


@pytest.mark.parametrize("place", ["first round", "later round"])
def test_an_error_of_the_loader_is_the_error_of_the_update(two: Engine, place: str) -> None:
    tensors = {**weights(1.0), "boom": torch.zeros(SLOT // 4)}
    if place == "first round":
        tensors = dict(reversed(tensors.items()))
    before = mapped()
    with client(two) as sender:
        with pytest.raises(ApplyError, match="ValueError: no room for boom"):
            sender.update(tensors, "v1")
        assert mapped() == before
        assert two.states() == {("poisoned", "v0")}
        sender.update(weights(2.0), "v2")
    check(two, 2.0, "v2")


def test_one_rank_of_two_that_fails_is_the_cause(two: Engine) -> None:
    def fail() -> None:
        raise OSError("only here")

    two.rank[1].host.model().on_load = fail
    with client(two) as sender:
        with pytest.raises(ApplyError, match="OSError: only here"):
            sender.update(weights(1.0), "v1")
        two.rank[1].host.model().on_load = lambda: None
        sender.update(weights(2.0), "v2")
    check(two, 2.0, "v2")


def test_a_busy_engine_refuses_and_is_as_before(two: Engine) -> None:
    with client(two) as sender:
        sender.update(weights(1.0), "v1")
        two.rank[1].host.is_quiet = False
        with pytest.raises(NotPausedError, match="running requests") as caught:
            sender.update(weights(2.0), "v2")
        assert "/pause_generation" in caught.value.fix
        check(two, 1.0, "v1")
        two.rank[1].host.is_quiet = True
        sender.update(weights(2.0), "v2")
    check(two, 2.0, "v2")


def test_a_commit_that_fails_poisons_and_says_why(two: Engine) -> None:
    two.rank[0].host.may_flush = False
    with client(two) as sender:
        with pytest.raises(CommitError, match="refused to flush"):
            sender.update(weights(1.0), "v1")
        assert two.states() == {("poisoned", "v0")}
        two.rank[0].host.may_flush = True
        sender.update(weights(2.0), "v2")
    check(two, 2.0, "v2")


def test_of_two_engines_the_one_that_failed_is_named(one: Engine, two: Engine) -> None:
    two.rank[0].host.may_flush = False
    with client(one, two) as sender:
        with pytest.raises(CommitError, match="1 of 2 engines did not commit version 'v1'") as caught:
            sender.update(weights(1.0), "v1")
        assert caught.value.details[0].startswith(f"{two.name}: [COMMIT]")
        assert caught.value.details[1] == f"{one.name}: serves version 'v1'"
        check(one, 1.0, "v1")
        two.rank[0].host.may_flush = True
        sender.update(weights(2.0), "v2")
    check(one, 2.0, "v2")
    check(two, 2.0, "v2")


def test_leaving_without_a_commit_aborts(one: Engine) -> None:
    with client(one) as sender:
        with sender.open("v1") as session:
            session.send([("norm", weights(1.0)["norm"])])
        assert one.states() == {("ready", "v0")}, "no round was sent"
        with pytest.raises(KeyError), sender.open("v1"):
            raise KeyError("of the caller")
        assert [c.error.message for c in one.carriers if isinstance(c, AbortCarrier)] == [
            "aborted by its sender: left without a commit",
            "aborted by its sender: KeyError in the caller",
        ]


# --- several sessions and senders -----------------------------------------------------------------------------------


def test_a_second_session_is_refused_until_it_takes_over(one: Engine) -> None:
    with client(one) as first, client(one) as second, contextlib.ExitStack() as stack:
        session = stack.enter_context(first.open("v1"))
        session.send([("norm", weights(1.0)["norm"])])
        with pytest.raises(BusyError, match=session.id[:8]):
            second.update(weights(2.0), "v2")
        second.update(weights(2.0), "v2", takeover=True)
        check(one, 2.0, "v2")
        with pytest.raises(SessionAbortedError, match="taken over by sender"):
            session.commit()
    check(one, 2.0, "v2")


def test_a_refused_buffer_does_not_hide_why_the_session_ended(one: Engine) -> None:
    """The rank's socket for buffers only knows that the session is gone."""
    with client(one) as first, client(one) as second, contextlib.ExitStack() as stack:
        session = stack.enter_context(first.open("v1"))
        second.update(weights(2.0), "v2", takeover=True)
        with pytest.raises(SessionAbortedError, match="taken over by sender"):
            session.send([("embed", torch.zeros(SLOT))])  # larger than a slot
    check(one, 2.0, "v2")


def _no_memory(device: torch.device, nbytes: int) -> NoReturn:
    raise StagingMemoryError(f"no {nbytes} bytes on {device}", fix="free some")


def test_staging_that_cannot_be_had_ends_the_session(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with client(one) as sender:
        with monkeypatch.context() as patch:
            patch.setattr(staging_module, "allocate", _no_memory)
            with pytest.raises(StagingMemoryError, match=f"no {SLOT} bytes on cpu"):
                sender.update(weights(1.0), "v1")
        sender.update(weights(2.0), "v2")
    check(one, 2.0, "v2")


def test_a_refusal_says_more_than_a_lack_of_memory(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging is allocated while the ranks decide."""
    with client(one) as first, client(one) as second, first.open("v1") as session:
        with monkeypatch.context() as patch:
            patch.setattr(staging_module, "allocate", _no_memory)
            with pytest.raises(BusyError, match=session.id[:8]):
                second.update(weights(2.0), "v2")
        session.send(weights(1.0))
        session.commit()
    check(one, 1.0, "v1")


def test_whoever_takes_over_allocates_when_the_other_has_given_up(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with client(one) as first, client(one) as second, contextlib.ExitStack() as stack:
        session = stack.enter_context(first.open("v1"))
        held: list[str] = []
        allocate = staging_module.allocate

        def note(device: torch.device, nbytes: int) -> ExportableBuffer:
            held.append(second.status()[one.name][0].session)
            return allocate(device, nbytes)

        monkeypatch.setattr(staging_module, "allocate", note)
        second.update(weights(2.0), "v2", takeover=True)
        assert len(held) == 2
        assert session.id not in held
        with pytest.raises(SessionAbortedError, match="taken over by sender"):
            session.commit()
    check(one, 2.0, "v2")


def test_two_senders_feed_one_rank_each(two: Engine) -> None:
    """The second sender has fewer rounds: a rank that has finished counts as ready."""
    with client(two, ranks=[0]) as first, client(two, ranks=[1]) as second, ThreadPoolExecutor(2) as pool:
        for value, version in ((1.0, "v1"), (2.0, "v2")):
            meeting = new_session_id()

            def feed(sender: WeightClient, coordinator: bool, value: float = value, version: str = version) -> int:
                tensors = list(weights(value).items())
                with sender.open(version, session_id=meeting, coordinator=coordinator) as session:  # noqa: B023
                    for start in range(0, 4, 2 if coordinator else 4):
                        session.send(tensors[start : start + (2 if coordinator else 4)])
                        if coordinator:
                            session.flush()
                    return session.commit().rounds

            rounds = [pool.submit(feed, sender, sender is first) for sender in (first, second)]
            assert [call.result(PATIENCE) for call in rounds] == [2, 1]
            check(two, value, version)
    loads = [carrier for carrier in two.carriers if isinstance(carrier, LoadCarrier)]
    assert [carrier.round for carrier in loads] == [0, 1, 0, 1]
    assert sum(isinstance(carrier, OpenCarrier) for carrier in two.carriers) == 2


def test_senders_that_disagree_on_the_kind_are_both_told(two: Engine) -> None:
    meeting = new_session_id()

    def feed(sender: WeightClient, kind: str) -> RecvError:
        with pytest.raises(SessionStateError) as caught, sender.open("v", session_id=meeting, kind=kind):
            pass
        return caught.value

    with client(two, ranks=[0]) as first, client(two, ranks=[1]) as second, ThreadPoolExecutor(2) as pool:
        told = [pool.submit(feed, first, "full"), pool.submit(feed, second, "partial")]
        assert len({str(call.result(PATIENCE)) for call in told}) == 1


def test_when_one_of_two_senders_fails_the_other_is_told(two: Engine) -> None:
    meeting = new_session_id()
    opened = threading.Barrier(2)

    def fail(sender: WeightClient) -> None:
        with sender.open("v", session_id=meeting) as session:
            opened.wait(PATIENCE)
            session.abort("gave up")

    def feed(sender: WeightClient) -> str:
        with sender.open("v", session_id=meeting, coordinator=False) as session:
            opened.wait(PATIENCE)
            session.send([("norm", weights(1.0)["norm"])])  # no round yet, so nothing is noticed
            with pytest.raises(SessionAbortedError) as caught:
                session.commit()
        return caught.value.message

    with client(two, ranks=[0]) as first, client(two, ranks=[1]) as second, ThreadPoolExecutor(2) as pool:
        gone, told = pool.submit(fail, first), pool.submit(feed, second)
        gone.result(PATIENCE)
        assert told.result(PATIENCE) == "aborted by its sender: gave up"
        assert two.states() == {("ready", "v0")}


# --- lost engines ---------------------------------------------------------------------------------------------------


def test_an_engine_that_ends_in_mid_session_is_lost() -> None:
    before = mapped()
    with Engine() as engine, client(engine) as sender, contextlib.ExitStack() as stack:
        session = stack.enter_context(sender.open("v1"))
        session.send([("norm", weights(1.0)["norm"])])
        engine.rank[0].service.close()
        # Which of the two depends on whether it had mapped the slots by then.
        with pytest.raises(
            EngineLostError, match=r"closed its connection while|closed its socket .* during OfferBuffer"
        ):
            session.commit()
        assert mapped() == before


def test_a_deadline_names_rank_phase_and_activity(one: Engine) -> None:
    with one.stalled(), client(one, deadline=0.3) as sender:
        with pytest.raises(DeadlineError, match=r"open: not done within 0.3 s by engine \w+ rank 0"):
            sender.update(weights(1.0), "v1")
    with client(one) as sender:
        wait_until(lambda: sender.status()[one.name][0].session == "", PATIENCE, "the late abort is done")
        sender.update(weights(2.0), "v2")
    check(one, 2.0, "v2")


def test_a_sender_without_a_pulse_loses_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "LEASE_SECONDS", 0.2)
    monkeypatch.setattr(link_module.Heart, "_run", lambda self: None)
    with Engine() as engine, client(engine) as sender, contextlib.ExitStack() as stack:
        session = stack.enter_context(sender.open("v1"))
        wait_until(lambda: any(isinstance(c, AbortCarrier) for c in engine.carriers), PATIENCE, "the lease ended")
        link = session._links[0]
        wait([link], lambda link: link.error is not None, "the end", PATIENCE)
        assert isinstance(link.error, LeaseLostError)


def test_an_engine_that_was_restarted_is_discovered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine() as old, client(old) as sender:
        sender.update(weights(1.0), "v1")
        with Engine() as new:
            old.rank[0].service.close()
            monkeypatch.setattr(old, "rank_table", new.rank_table)
            monkeypatch.setattr(old, "commit", new.commit)
            sender.update(weights(2.0), "v2")
            check(new, 2.0, "v2")


# --- which error is raised ------------------------------------------------------------------------------------------


class FakeLink(RankLink):
    """A rank that says what it is told to say, without sockets; the clock and the poll are the caller's."""

    def __init__(self, name: str, error: RecvError | None = None) -> None:
        info = RankInfo(0, "cpu", "boot", "ipc:///nowhere", "/nowhere", "")
        with mock.patch.object(link_module, "Dealer", return_value=SimpleNamespace(socket=None)):
            super().__init__(None, "engine", Pair(info, "cpu"))  # type: ignore[arg-type]
        self.name = name
        self.error = error
        self.activity = "loading round 3"
        self.alive_at = 0.0
        self.done = False
        self.closed = False
        self.later: list[Callable[[FakeLink], None]] = []

    def pump(self) -> None:
        if self.later:
            self.later.pop(0)(self)

    def hung_up(self) -> bool:
        return self.closed


class Clock:
    """Time passes when something is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(link_module, "zmq", SimpleNamespace(Poller=lambda: self, POLLIN=1))

    def register(self, socket: object, events: int) -> None:
        pass

    def poll(self, milliseconds: int) -> None:
        self.now += milliseconds / 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def waited(*links: Any, lease: float | None = None, deadline: float = 10.0) -> RecvError | None:
    try:
        wait(links, lambda link: link.done, "the phase", deadline, lease)  # type: ignore[attr-defined]
    except RecvError as error:
        return error
    return None


def say(error: RecvError | None) -> Callable[[FakeLink], None]:
    def act(link: FakeLink) -> None:
        if error is None:
            link.done = True
        else:
            link._take(Error.of(error))

    return act


def same(error: RecvError | None, other: RecvError) -> bool:
    """One went over the wire."""
    return type(error) is type(other) and str(error) == str(other)


def nothing(link: FakeLink) -> None:
    pass


def acknowledge(link: FakeLink) -> None:
    link._take(Ack("s", 0, 0.1))


ABORTED = SessionAbortedError("another rank refused", fix="see that rank")
CAUSE = ApplyError("boom", fix="report it", details=("line",))


def test_a_cause_that_comes_later_is_preferred(clock: Clock) -> None:
    first, second = FakeLink("rank 0", ABORTED), FakeLink("rank 1")
    second.later = [nothing, nothing, say(CAUSE)]
    assert same(waited(first, second), CAUSE)


def test_a_consequence_alone_is_raised_after_a_grace(clock: Clock) -> None:
    assert waited(FakeLink("rank 0", ABORTED), FakeLink("rank 1")) is ABORTED
    assert 2.0 <= clock.now < 2.5


def test_when_all_have_failed_nobody_waits(clock: Clock) -> None:
    assert waited(FakeLink("rank 0", ABORTED), FakeLink("rank 1", ABORTED)) is ABORTED
    assert clock.now == 0.0


def test_who_is_done_has_not_failed(clock: Clock) -> None:
    done, late = FakeLink("rank 0", ABORTED), FakeLink("rank 1")
    done.done = True
    late.later = [nothing, say(None)]
    assert waited(done, late) is None


def test_the_deadline_names_who_is_late_and_what_it_did(clock: Clock) -> None:
    done = FakeLink("rank 0")
    done.done = True
    error = waited(done, FakeLink("rank 1"), deadline=3.0)
    assert isinstance(error, DeadlineError)
    assert error.message == "the phase: not done within 3.0 s by rank 1 (last: loading round 3)"
    assert 3.0 <= clock.now < 3.5


def test_silence_above_the_lease_is_a_lost_engine(clock: Clock) -> None:
    error = waited(FakeLink("rank 0"), lease=5.0)
    assert isinstance(error, EngineLostError)
    assert "rank 0 has not answered for 5." in error.message
    assert "it was last: loading round 3" in error.message
    assert 5.0 <= clock.now < 6.0


@pytest.mark.parametrize("polls", range(49, 54))
def test_an_answer_that_comes_just_after_the_lease_leaves_no_error(clock: Clock, polls: int) -> None:
    """Else the next step would find one on a rank that has answered."""
    link = FakeLink("rank 0")
    link.later = [nothing] * polls + [say(None)]
    error = waited(link, lease=5.0)
    assert (error is None) == link.done
    assert (link.error, link.assumed) == (error, error is not None)


def test_any_word_of_a_rank_is_a_sign_of_life(clock: Clock) -> None:
    link = FakeLink("rank 0")
    link.later = [nothing] * 40 + [acknowledge] + [nothing] * 40 + [say(None)]
    assert waited(link, lease=5.0) is None
    assert clock.now > 8.0


def test_a_closed_connection_is_a_lost_engine_after_its_last_words(clock: Clock) -> None:
    link = FakeLink("rank 0")
    link.closed = True
    error = waited(link, lease=60.0)
    assert isinstance(error, EngineLostError)
    assert "closed its connection while this side waited for: the phase" in error.message
    assert link.assumed
    assert 2.0 <= clock.now < 2.5


@pytest.mark.parametrize("news", [None, CAUSE, ABORTED], ids=["done", "failed", "followed"])
@pytest.mark.parametrize("delay", [1, 2, 19])
def test_what_a_rank_said_before_it_closed_is_heard(clock: Clock, news: RecvError | None, delay: int) -> None:
    """A rank answers over ZMQ, whose threads carry the message, and then closes the Unix socket, which is at once."""
    link = FakeLink("rank 0")
    link.closed = True
    link.later = [nothing] * delay + [say(news)]
    error = waited(link)
    assert error is None if news is None else same(error, news), error
    assert clock.now == pytest.approx(delay / 10), "nobody waits longer than for the word"


class Refusing:
    """The other end of a link's Unix connection, which does not map what it is offered."""

    def __init__(self, how: BaseException) -> None:
        self._how = how

    def recv(self, timeout: float) -> tuple[bytes, None]:
        if isinstance(self._how, RecvError):
            return wire.encode(Error.of(self._how)), None
        raise self._how


GONE = SessionStateError("session 01234567 is not open on rank 0", fix="open a session; it may have ended")
REFUSED = BadBufferError("no memfd", fix="offer one")


@pytest.mark.parametrize(
    ("how", "delay", "raised"),
    [
        (GONE, 0, CAUSE),
        (GONE, 5, CAUSE),
        (GONE, 30, GONE),
        (EOFError(), 5, CAUSE),
        (EOFError(), 30, EngineLostError),
        (TimeoutError(), 0, CAUSE),
        (TimeoutError(), 1, DeadlineError),
        (REFUSED, 1, REFUSED),
    ],
    ids=["known", "later", "too late", "closed", "closed for good", "silent", "silent for good", "its own cause"],
)
def test_what_a_rank_says_goes_before_what_its_socket_for_buffers_says(
    clock: Clock, how: BaseException, delay: int, raised: Any
) -> None:
    link = FakeLink("rank 0")
    link.fds = Refusing(how)  # type: ignore[assignment]
    link.dealer.socket = SimpleNamespace(poll=lambda _: clock.poll(100))  # type: ignore[assignment]
    link.later = [*[acknowledge] * delay, say(CAUSE)]  # of which an Ack does not end the wait
    with pytest.raises(RecvError) as caught:
        link.mapped(1.0)
    if isinstance(raised, RecvError):
        assert same(caught.value, raised)
    else:
        assert isinstance(caught.value, raised)
    assert clock.now < 2.5


def test_a_rank_that_says_nothing_more_is_not_waited_for(clock: Clock) -> None:
    link = FakeLink("rank 0")
    link.closed = True
    link.later = [nothing] * 30 + [say(None)]
    assert isinstance(waited(link), EngineLostError)


def test_the_word_of_a_rank_goes_before_what_was_assumed(clock: Clock) -> None:
    link = FakeLink("rank 0")
    link.closed = True
    assert isinstance(waited(link), EngineLostError)
    link.later = [say(CAUSE)]
    assert same(waited(link), CAUSE)
    link.later = [say(ABORTED)]
    assert same(waited(link), CAUSE), "the first word counts"
    assert link.over


@pytest.mark.parametrize(
    ("message", "reason"),
    [(Aborted("s", "enough", "ready"), ": enough"), (Committed("s", "v1"), "")],
    ids=["aborted", "committed"],
)
def test_a_session_that_ended_otherwise_is_not_waited_for(clock: Clock, message: Any, reason: str) -> None:
    link = FakeLink("rank 0")
    link.later = [nothing, lambda link: link._take(message)]
    error = waited(link)
    assert isinstance(error, SessionAbortedError)
    assert error.message == f"rank 0 ended the session while this side waited for: the phase{reason}"
    assert clock.now == pytest.approx(0.1)


def test_errors_that_are_the_same_are_one() -> None:
    links: list[Any] = [FakeLink(f"rank {i}", ApplyError("boom", fix="f", details=("line",))) for i in range(3)]
    assert combined(links) is links[0].error


def test_errors_that_differ_are_all_told() -> None:
    links: list[Any] = [
        FakeLink("rank 0", ABORTED),
        FakeLink("rank 1", CAUSE),
        FakeLink("rank 2", ApplyError("bang", fix="f", details=("line",))),
    ]
    error = combined(links)
    assert type(error) is ApplyError
    assert (error.message, error.fix) == ("boom", "report it")
    assert error.details == ("rank 1: boom", "rank 2: bang", "rank 1: line", "rank 2: line")


def test_without_a_cause_consequences_are_told() -> None:
    links: list[Any] = [FakeLink("rank 0", ABORTED), FakeLink("rank 1", SessionAbortedError("other", fix="f"))]
    assert combined(links).details == ("rank 0: another rank refused", "rank 1: other")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_cause_is_found_whatever_the_order(clock: Clock, order: Sequence[int]) -> None:
    errors = [ABORTED, CAUSE, ABORTED]
    links = [FakeLink(f"rank {i}") for i in range(3)]
    for turn, index in enumerate(order):
        links[index].later = [nothing] * turn + [say(errors[index])]
    assert same(waited(*links), CAUSE)


@pytest.mark.parametrize("delay", [0, 1, 5])
def test_the_cause_of_a_failed_round_is_waited_for(clock: Clock, delay: int) -> None:
    follows, fails = FakeLink("rank 0"), FakeLink("rank 1")
    follows.later, fails.later = [say(ABORTED)], [nothing] * delay + [say(CAUSE)]
    for link in (follows, fails):
        link.dealer.send = mock.Mock()  # type: ignore[method-assign]
    staging: Any = mock.Mock()
    rounds = Rounds([follows, fails], staging, "s" * 32, 10.0, 60.0, RoundsClock(), None)
    with pytest.raises(ApplyError) as caught:
        rounds.send(Load("s" * 32, 0, ()), None, 0, 0)
    assert same(caught.value, CAUSE)


def test_a_link_takes_errors_as_the_rank_raised_them() -> None:
    link = FakeLink("rank 0")
    link._take(Error.of(CAUSE, "s", "poisoned"))
    assert type(link.error) is ApplyError
    assert (link.error.message, link.error.details, link.weights_state) == ("boom", ("line",), "poisoned")
    link._take(Error.of(ABORTED, "s", "poisoned"))
    assert type(link.error) is ApplyError, "the first one counts"
    assert not link.assumed


def test_a_consequence_does_not_hide_the_answer_to_a_commit() -> None:
    """The Abort that follows a failed commit may reach the rank that failed before its scheduler's word does."""
    session = Session.__new__(Session)
    session._targets = [SimpleNamespace(name="engine")]  # type: ignore[list-item]
    session._links = [FakeLink("rank 0"), FakeLink("rank 1", ABORTED)]
    session._links[0].aborted = Aborted("s", "the engine refused to flush", "poisoned")
    answer = CommitError("the engine refused to flush", fix="pause it")
    assert session._commit_error({"engine": answer}, []) is answer
    session._links[0].error = CAUSE
    assert session._commit_error({"engine": answer}, []) is CAUSE
