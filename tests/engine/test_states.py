"""States, gate and votes on real servers: nothing half-new ever serves, and the next full update repairs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_recv.errors import (
    BusyError,
    FullUpdateRequiredError,
    ManifestError,
    NotPausedError,
    SessionStateError,
)
from support import models, weights
from support.broadcaster import Broadcaster
from support.oracle import assert_same, greedy
from support.pool import EnginePool
from support.server import EngineServer, RequestError
from support.waiting import wait_until

VERSIONS = ("0.5.23", "0.5.13")
_RECEIVED = "Receive: obj="
SLOT = 16_384  # bytes: some twenty rounds per update

Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=VERSIONS)
def server(request: pytest.FixtureRequest, engines: EnginePool, checkpoints: Path) -> Iterator[EngineServer]:
    """A server with seed 0's weights, before and after the test."""
    found = engines(request.param, receiver="vmm", args=("--log-requests", "--log-requests-level", "0"))
    yield found
    if found.alive():
        with weights.client(found) as client:
            client.update(_seed(checkpoints, 0), "restored")
        found.post("/continue_generation")


@pytest.fixture
def own(checkpoints: Path) -> Tensors:
    """What the server holds."""
    return _seed(checkpoints, 0)


@pytest.fixture
def other(checkpoints: Path) -> Tensors:
    """Other weights of the same model."""
    return _seed(checkpoints, 3)


def _seed(checkpoints: Path, seed: int) -> Tensors:
    return models.tensors(models.checkpoint("qwen3", seed, checkpoints))


@contextmanager
def background(call: Any, *args: Any, **kwargs: Any) -> Iterator[Future[Any]]:
    """Run a call on a thread; the thread has ended when this does."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call, *args, **kwargs)


def write_some(server: EngineServer, tensors: Tensors, session: Any) -> None:
    """Send until the engine has written something."""
    session.send(list(tensors.items())[:8])
    wait_until(lambda: "rounds loaded" in _activity(server) and "0 rounds" not in _activity(server), 10, "first write")


def _activity(server: EngineServer) -> str:
    """What rank 0 says that it is doing, by a heartbeat of no session."""
    import zmq

    from sglang_recv import wire
    from sglang_recv.channel import Dealer

    info = server.get("/server_info")["sglang_recv"]["ranks"][0]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Dealer(context, info["control"]) as dealer:
        dealer.send(wire.encode(wire.Heartbeat("", "test")))
        raw = wait_until(dealer.receive, 5, "an answer to a heartbeat", interval=0.005)
    context.term()
    answer = wire.decode(raw, wire.RankMessage)
    assert isinstance(answer, wire.Alive)
    return answer.activity


def assert_poisoned(server: EngineServer) -> None:
    """No request is served, and everybody says why."""
    with pytest.raises(RequestError) as refused:
        server.generate("x", 1)
    assert refused.value.status == 503
    assert "poisoned" in str(refused.value.body)
    assert "full update" in str(refused.value.body)
    for state in weights.states(server):
        assert state.weights_state == "poisoned"
        assert state.full_required
        assert state.weights_reason


def assert_untouched(server: EngineServer, held: object, said: Any) -> None:
    """The engine serves what it served."""
    assert weights.digests(server) == held
    assert [state.weights_state for state in weights.states(server)] == ["ready"]
    assert_same(greedy(server), said, "after a session that wrote nothing")


def test_leaving_before_the_first_write_changes_nothing(server: EngineServer, other: Tensors) -> None:
    held, said, version = weights.digests(server), greedy(server), weights.version(server)

    with weights.client(server, slot_bytes=1 << 20) as client, client.open("never") as session:
        session.send(list(other.items())[:3])  # they fit the slot, so no round is sent

    assert_untouched(server, held, said)
    assert weights.version(server) == version


def test_leaving_after_the_first_write_poisons_until_a_full_update(server: EngineServer, other: Tensors) -> None:
    version = weights.version(server)
    with weights.client(server, slot_bytes=SLOT) as client:
        with client.open("never") as session:
            write_some(server, other, session)
        assert_poisoned(server)
        assert weights.version(server) == version

        with pytest.raises(FullUpdateRequiredError, match="poisoned"):
            client.update(dict(list(other.items())[:1]), "part", kind="partial")

        client.update(other, "whole")
    assert [state.weights_state for state in weights.states(server)] == ["ready"]
    assert len(server.generate("x", 2)["output_ids"]) == 2
    assert weights.version(server) == "whole"


def test_a_reload_from_disk_clears_poison(server: EngineServer, own: Tensors, other: Tensors) -> None:
    held = weights.digests(server)
    with weights.client(server, slot_bytes=SLOT) as client, client.open("never") as session:
        write_some(server, other, session)
    assert_poisoned(server)

    server.post("/update_weights_from_disk", {"model_path": str(server.model)})

    assert weights.digests(server) == held
    assert [state.weights_state for state in weights.states(server)] == ["ready"]
    assert len(server.generate("x", 2)["output_ids"]) == 2


def test_broadcasts_that_reach_everything_clear_poison(
    server: EngineServer, checkpoints: Path, own: Tensors, other: Tensors
) -> None:
    """slime's remote engines: SGLang's own updates say nothing about what is still to come."""
    with weights.client(server) as client:
        client.update(other, "whole")
        held = weights.digests(server)
        client.update(own, "back")
    with weights.client(server, slot_bytes=SLOT) as client, client.open("never") as session:
        write_some(server, own, session)
    assert_poisoned(server)
    names = list(other)
    with Broadcaster(server, models.checkpoint("qwen3", 3, checkpoints)) as sender:
        for part in (names[:7], names[7:-1]):
            sender.send(part)
            assert_poisoned(server)
        sender.send(names[-1:])
    assert [state.weights_state for state in weights.states(server)] == ["ready"]
    assert weights.digests(server) == held
    assert len(server.generate("x", 2)["output_ids"]) == 2


TRAINER = """
import sys
from pathlib import Path
from sglang_recv import WeightClient
from support import models
client = WeightClient(sys.argv[1], slot_bytes=16384)
tensors = models.tensors(Path(sys.argv[2]))
with client.open("never") as session:
    session.send(list(tensors.items())[:int(sys.argv[3])])
    print("sent", flush=True)
    sys.stdin.read()
"""


@contextmanager
def trainer(server: EngineServer, folder: Path, count: int) -> Iterator[subprocess.Popen[str]]:
    """A trainer process that has sent some tensors and now gathers for ever."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, server.url, str(folder), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "PATH": "/usr/bin:/bin"},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_killed_trainer_ends_its_session(server: EngineServer, checkpoints: Path, other: Tensors) -> None:
    held, said = weights.digests(server), greedy(server)
    folder = models.checkpoint("qwen3", 3, checkpoints)

    with trainer(server, folder, 0) as process:
        assert weights.states(server)[0].session
        process.kill()
        wait_until(lambda: not weights.states(server)[0].session, 10, "the session of a killed trainer ends")
    assert_untouched(server, held, said)

    with trainer(server, folder, 8) as process:
        process.kill()
        wait_until(lambda: not weights.states(server)[0].session, 10, "the session of a killed trainer ends")
    assert_poisoned(server)
    assert "gone" in weights.states(server)[0].weights_reason
    with weights.client(server) as client:
        client.update(other, "repaired")
    assert len(server.generate("x", 2)["output_ids"]) == 2


def test_a_second_trainer_is_told_busy_and_may_take_over(server: EngineServer, checkpoints: Path, own: Tensors) -> None:
    held = weights.digests(server)
    with trainer(server, models.checkpoint("qwen3", 3, checkpoints), 0), weights.client(server) as client:
        with pytest.raises(BusyError, match="holds"):
            client.update(own, "second")

        client.update(own, "second", takeover=True)

    assert weights.version(server) == "second"
    assert weights.digests(server) == held


def test_nothing_generates_between_two_rounds(server: EngineServer, other: Tensors) -> None:
    with weights.client(server, slot_bytes=SLOT) as client:
        client.update(other, "what it shall say")
        expected = greedy(server)
        client.update({name: tensor + 1 for name, tensor in other.items()}, "away again")

        items = list(other.items())
        with client.open("new") as session:
            write_some(server, dict(items), session)
            received = server.log_text().count(_RECEIVED)
            with background(greedy, server) as request:
                wait_until(lambda: server.log_text().count(_RECEIVED) > received, 20, "the server has the request")
                # It waits for the commit, also when somebody continues generation.
                server.post("/continue_generation")
                for item in items[8:]:
                    session.send([item])
                    assert not request.done()
                session.commit()
                answer = request.result(30)

    assert_same(answer, expected, "a request that waited for the commit")


def test_a_health_probe_is_answered_while_the_gate_is_closed(server: EngineServer, other: Tensors) -> None:
    with weights.client(server, slot_bytes=SLOT) as client, client.open("new") as session:
        write_some(server, other, session)
        server.get("/health", timeout=10)  # raises on any status but 200
        received = server.log_text().count(_RECEIVED)
        with background(server.generate, "x", 2) as request:
            wait_until(lambda: server.log_text().count(_RECEIVED) > received, 20, "the server has the request")
            server.get("/health", timeout=10)  # a queued request must not make the engine look dead
            assert not request.done()
            session.send(list(other.items())[8:])
            session.commit()
            assert len(request.result(30)["output_ids"]) == 2


def test_memory_may_be_released_while_a_request_waits_at_the_gate(server: EngineServer, other: Tensors) -> None:
    """SGLang ends an engine that is asked to release memory while it is not idle; waiting at the gate is idle."""
    with weights.client(server, slot_bytes=SLOT) as client, client.open("new") as session:
        write_some(server, other, session)
        received = server.log_text().count(_RECEIVED)
        with background(server.generate, "x", 2) as request:
            wait_until(lambda: server.log_text().count(_RECEIVED) > received, 20, "the server has the request")
            server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
            server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
            session.send(list(other.items())[8:])
            session.commit()
            assert len(request.result(30)["output_ids"]) == 2
    assert weights.version(server) == "new"


def test_a_refused_sender_cannot_harm_the_session_whose_id_it_has(server: EngineServer, other: Tensors) -> None:
    with weights.client(server, slot_bytes=SLOT) as owner, owner.open("owner") as session:
        write_some(server, other, session)
        with weights.client(server) as intruder:
            with pytest.raises(BusyError), intruder.open("intruder", session_id=session.id):
                pass
            assert weights.states(server)[0].session == session.id
        session.send(list(other.items())[8:])
        session.commit()
    assert weights.version(server) == "owner"
    assert [state.weights_state for state in weights.states(server)] == ["ready"]


def test_running_requests_refuse_the_first_write(server: EngineServer, other: Tensors) -> None:
    held = weights.digests(server)
    with background(server.generate, "long", 400) as request:
        wait_until(lambda: _load(server, "num_running_reqs"), 20, "the request runs")
        with weights.client(server) as client, pytest.raises(NotPausedError, match="running requests"):
            client.update(other, "never")
        assert len(request.result(60)["output_ids"]) == 400
    assert weights.digests(server) == held
    assert [state.weights_state for state in weights.states(server)] == ["ready"]


def _load(server: EngineServer, what: str) -> int:
    return sum(load.get(what, 0) for load in server.get("/v1/loads")["loads"])


def test_a_retracted_request_goes_on_with_the_new_weights(server: EngineServer, other: Tensors) -> None:
    with background(server.generate, "long", 400) as request:
        wait_until(lambda: _load(server, "num_running_reqs"), 20, "the request runs")
        with weights.client(server) as client:
            client.update(other, "retracted", pause="retract")
        assert len(request.result(60)["output_ids"]) == 400
    assert weights.version(server) == "retracted"
    with weights.client(server) as client:
        expected = weights.digests(server)
        client.update(other, "same")
    assert weights.digests(server) == expected


def test_stock_updates_are_refused_during_a_session(server: EngineServer, own: Tensors) -> None:
    with weights.client(server) as client, client.open("v") as session:
        with pytest.raises(RequestError) as refused:
            server.post("/update_weights_from_disk", {"model_path": str(server.model)})
        assert "sglang_recv" in str(refused.value.body)
        session.send(own)
        session.commit()
    assert weights.version(server) == "v"


def test_everything_wrong_is_said_at_once_and_nothing_is_written(server: EngineServer, own: Tensors) -> None:
    held, said = weights.digests(server), greedy(server)
    wrong = dict(own)
    del wrong["model.norm.weight"]
    wrong["model.layers.0.mlp.down_proj.weight"] = torch.zeros(3, 5, dtype=torch.bfloat16)
    wrong["model.layers.0.mlp.up_proj.weight"] = own["model.layers.0.mlp.up_proj.weight"].to(torch.float32)
    wrong["model.layers.9.nonsense.weight"] = torch.zeros(1, dtype=torch.bfloat16)
    wrong["another.weight"] = torch.zeros(1, dtype=torch.bfloat16)

    with weights.client(server) as client, pytest.raises(ManifestError) as refused:
        client.update(wrong, "never")

    text = "\n".join(refused.value.details)
    for part in (
        "model.norm.weight: missing",
        "model.layers.0.mlp.down_proj.weight: shape [3, 5], the engine expects [64, 128]",
        "model.layers.0.mlp.up_proj.weight: dtype float32, the engine expects bfloat16",
        "another.weight: the engine's model has no tensor of this name",
    ):
        assert part in text
    assert_untouched(server, held, said)


def test_duplicates_are_refused(server: EngineServer, own: Tensors) -> None:
    held, said = weights.digests(server), greedy(server)
    items = list(own.items())

    with weights.client(server) as client:
        with pytest.raises(ManifestError, match="not a manifest") as refused:
            client.update([*items, items[0]], "never")
        assert refused.value.details == (f"{items[0][0]}: sent twice",)
        assert_untouched(server, held, said)

        with pytest.raises(ManifestError) as streamed:
            client.update(iter([items[0], items[0]]), "never")
        assert streamed.value.details == (f"{items[0][0]}: sent twice",)
    assert_untouched(server, held, said)


def test_a_lazy_update_that_lacks_a_tensor_poisons_at_finish(server: EngineServer, own: Tensors) -> None:
    lacking = [(name, tensor) for name, tensor in own.items() if name != "model.norm.weight"]

    with weights.client(server) as client, pytest.raises(ManifestError) as refused:
        client.update(iter(lacking), "never")

    assert any("model.norm.weight" in line and "not written" in line for line in refused.value.details)
    assert_poisoned(server)


def test_a_commit_nobody_prepared_is_refused(server: EngineServer, own: Tensors) -> None:
    from sglang_recv import HttpTarget, wire

    held, said = weights.digests(server), greedy(server)
    with pytest.raises(Exception, match="no session is open"):
        HttpTarget(server.url).commit(wire.CommitCarrier("0" * 32, "forged"), 30)
    assert_untouched(server, held, said)

    with weights.client(server) as client, client.open("never") as session:
        with pytest.raises(Exception, match="before every sender finished"):
            HttpTarget(server.url).commit(wire.CommitCarrier(session.id, "forged"), 30)
        session.send(own)
        with pytest.raises(SessionStateError):
            session.commit()
    assert weights.version(server) != "forged"
    assert_untouched(server, held, said)
