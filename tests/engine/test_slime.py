"""slime's updater: several train ranks in a gloo group, two real engines of different TP, errors that all ranks share.

slime, Megatron and Ray are stand-ins unless ``SLIME_SRC`` names a slime checkout (tests/slime/README.md).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import models, weights
from support.oracle import assert_follows, greedy
from support.pool import EnginePool
from support.server import EngineServer
from support.trainers import Trainers

pytestmark = pytest.mark.timeout(400)

DEADLINE = 300.0  # of integrations.slime.updater, which imports slime
PLACES = {"0.5.23": (0, 1), "0.5.13": (1, 2)}  # offset and count of GPUs; train rank 3 has no engine


class Run:
    """Two engines and the paths of checkpoints."""

    def __init__(self, engines: EnginePool, checkpoints: Path) -> None:
        self._engines = engines
        self._checkpoints = checkpoints

    def seed(self, seed: int) -> Path:
        """The folder of a checkpoint."""
        return models.checkpoint("qwen3", seed, self._checkpoints)

    def engine(self, version: str) -> EngineServer:
        """The running engine of a version, with as many ranks as it has GPUs."""
        return self._engines(version, tp=PLACES[version][1], receiver="vmm")

    def discard(self, version: str) -> None:
        """End it: whoever asks next gets a fresh one."""
        self._engines.discard(self.engine(version))

    @property
    def layout(self) -> list[tuple[str, int, int]]:
        """URL, offset and count of each engine, as slime tells its updater."""
        return [(self.engine(version).url, *place) for version, place in PLACES.items()]

    def trainers(self, count: int = 4, **env: str) -> Trainers:
        """Train ranks of this run."""
        return Trainers(count, env)

    def versions(self) -> list[str]:
        """What both engines report."""
        return [weights.version(self.engine(version)) for version in PLACES]

    def states(self) -> list[set[str]]:
        """The states of each engine's weights, which its ranks agree on."""
        return [{rank.weights_state for rank in weights.states(self.engine(version))} for version in PLACES]

    def follow(self, seed: int, what: str) -> None:
        """Both engines say what a model with these weights says."""
        for version in PLACES:
            assert_follows(greedy(self.engine(version)), self.seed(seed), f"{what}, {version}")


@pytest.fixture(scope="module")
def run(engines: EnginePool, checkpoints: Path) -> Iterator[Run]:
    """The engines are spoilt for others: they hold whatever came last."""
    found = Run(engines, checkpoints)
    yield found
    for version in PLACES:
        found.discard(version)


def fine(answers: list[dict[str, Any]], version: int) -> None:
    """Every rank has sent this version."""
    assert [(a.get("code"), a.get("message"), a["version"]) for a in answers] == [(None, None, version)] * len(answers)


def error_of(answers: list[dict[str, Any]], version: int) -> dict[str, Any]:
    """The one error of all ranks, which still serve ``version``."""
    assert len({(a.get("code"), a.get("message"), a.get("fix"), tuple(a.get("details", ()))) for a in answers}) == 1
    assert [a["version"] for a in answers] == [version] * len(answers)
    return answers[0]


def test_steps_with_an_engine_that_is_restarted_between_them(run: Run) -> None:
    with run.trainers() as ranks:
        source = os.environ.get("SLIME_SRC")
        assert all(answer["slime"].startswith(source or str(Path(__file__).parents[1])) for answer in ranks.ready)
        fine(ranks.ask(connect=run.layout, update=str(run.seed(1))), 1)
        assert run.versions() == ["1", "1"]
        run.follow(1, "first step")
        answers = ranks.ask(update=str(run.seed(2)))
        fine(answers, 2)
        order = ("pause_generation", "flush_cache", "continue_generation")
        assert answers[0]["calls"] == [call for call in order for _ in PLACES]
        assert [answer["calls"] for answer in answers[1:]] == [[]] * 3
        run.follow(2, "second step")
        held = weights.digests(run.engine("0.5.23"))

        run.discard("0.5.13")
        run.engine("0.5.13")
        lost = error_of(ranks.ask(update=str(run.seed(3))), 2)
        assert lost["code"] == "ENGINE_LOST"
        assert weights.digests(run.engine("0.5.23")) == held, "the other engine was not touched"
        assert run.states() == [{"ready"}, {"ready"}]
        assert run.versions() == ["2", "default"]

        fine(ranks.ask(connect=run.layout, update=str(run.seed(3))), 3)
        assert run.versions() == ["3", "3"]
        run.follow(3, "third step")
    digests = {version: weights.digests(run.engine(version)) for version in PLACES}
    for version, (_, count) in PLACES.items():
        with EngineServer(version, run.seed(3), tp=count, receiver="vmm") as fresh:
            assert weights.digests(fresh) == digests[version], "as an engine that has read the same weights from disk"


@pytest.mark.parametrize(
    ("what", "chunk", "code", "said"),
    [
        ("shape", 1, "MANIFEST", "round"),
        ("unknown", 2, "MANIFEST", "does not fit"),
        ("leave out", 2, "MANIFEST", "not complete"),
    ],
)
def test_an_error_of_one_rank_is_the_error_of_all_and_the_next_update_repairs(
    run: Run, what: str, chunk: int, code: str, said: str
) -> None:
    with run.trainers() as ranks:
        fine(ranks.ask(connect=run.layout, update=str(run.seed(1))), 1)
        failed = error_of(ranks.ask(update=str(run.seed(2)), mischief={"2": {str(chunk): what}}), 1)
        assert failed["code"] == code, failed
        assert said in failed["message"]
        assert run.versions() == ["1", "1"], "of no engine"
        assert run.states()[1] == {"poisoned"}, "it may hold a mix: it refuses to generate"
        fine(ranks.ask(update=str(run.seed(2))), 2)
        assert run.versions() == ["2", "2"]
        assert run.states() == [{"ready"}, {"ready"}]
        run.follow(2, "repaired")


def test_a_rank_that_dies_leaves_nothing_half_new(run: Run) -> None:
    with run.trainers() as ranks:
        fine(ranks.ask(connect=run.layout, update=str(run.seed(1))), 1)
        answers = ranks.ask(update=str(run.seed(2)), mischief={"1": {"2": "die"}})
        assert answers[1] == {}, "it has ended"
        assert all(answer["code"] and answer["version"] == 1 for answer in answers if answer)
    assert run.versions() == ["1", "1"]
    assert run.states() == [{"poisoned"}, {"poisoned"}]
    with run.trainers() as ranks:
        fine(ranks.ask(connect=run.layout, update=str(run.seed(2))), 1)
        run.follow(2, "by the next trainer")


def test_a_mixed_run_switches_all_versions_at_the_end(run: Run) -> None:
    """The engine beyond the trainer's GPUs gets slime's own broadcast, and its version with the others."""
    colocated, remote = (run.engine(version) for version in PLACES)
    layout = [(colocated.url, 0, 1), (remote.url, 1, 2)]
    with run.trainers(1) as ranks:
        fine(ranks.ask(connect=layout, gpus=1, update=str(run.seed(1))), 1)
        (answer,) = ranks.ask(update=str(run.seed(2)))
        fine([answer], 2)
        told = [call for call in answer["calls"] if call.startswith("remote")]
        assert told
        assert all(call.endswith("version 1") for call in told), "until the colocated engine has committed"
        assert run.versions() == ["2", "2"]
        failed = error_of(ranks.ask(update=str(run.seed(3)), mischief={"0": {"1": "shape"}}), 2)
        assert failed["code"] == "MANIFEST"
        assert run.versions() == ["2", "2"]
        fine(ranks.ask(update=str(run.seed(3))), 3)
        assert run.versions() == ["3", "3"]


@pytest.mark.parametrize("slot_bytes", [4096, 65536])
def test_routed_experts_come_after_the_rest_and_differ_by_rank(run: Run, slot_bytes: int) -> None:
    """slime sends each rank the experts of its engine rank, in batches of its own, some of them empty.

    With small slots one rank has many rounds to send while another one has none: slime lets it wait after the batch.
    """
    names = sorted(name for name in models.tensors(run.seed(1)) if ".mlp." in name)
    with run.trainers(TEST_SLOT_BYTES=str(slot_bytes)) as ranks:
        if not ranks.ready[0]["experts"]:
            pytest.skip("the slime that SLIME_SRC names has no expert routing")
        batches = [names[:3], names[3:]]
        fine(ranks.ask(connect=run.layout, experts=batches, update=str(run.seed(2))), 1)
        assert run.versions() == ["1", "1"]
        run.follow(2, "with routed tensors")
        failed = error_of(ranks.ask(update=str(run.seed(1)), experts=[names[:3], names[2:]]), 1)  # one twice
        assert failed["code"] == "MANIFEST"
        fine(ranks.ask(update=str(run.seed(1)), experts=batches), 2)
        run.follow(1, "repaired")


def test_what_only_one_rank_cannot_do_is_said_by_all(run: Run) -> None:
    """Among them a rank without an engine, which has nothing to do that could fail."""
    with run.trainers(TEST_SLOT_BYTES="100") as ranks:
        failed = error_of(ranks.ask(connect=run.layout, update=str(run.seed(1))), 0)
        assert "100 bytes" in failed["message"]
    before = run.states()
    with run.trainers() as ranks:
        failed = error_of(ranks.ask(connect=run.layout, update=str(run.seed(1)), mischief={"1": {"-1": "lost"}}), 0)
        assert failed["code"] == "INTERNAL"
        assert failed["message"] == "train rank 1: KeyError: 'no weights'"
        assert run.states() == before, "nothing was written"
        fine(ranks.ask(update=str(run.seed(1))), 1)


def test_a_failed_broadcast_is_the_error_of_all_at_once(run: Run) -> None:
    """The rank that feeds the remote engine feeds a colocated one too, whose other rank waits for it."""
    remote, colocated = (run.engine(version) for version in PLACES)
    layout = [(colocated.url, 0, 2), (remote.url, 2, 1)]
    with run.trainers(2) as ranks:
        fine(ranks.ask(connect=layout, gpus=2, update=str(run.seed(1))), 1)
        started = time.monotonic()
        failed = error_of(ranks.ask(update=str(run.seed(2)), mischief={"0": {"1": "no broadcast"}}), 1)
        assert time.monotonic() - started < DEADLINE / 4, "nobody waited for a deadline"
        assert failed["code"] == "ENGINE_LOST"
        assert "no broadcast" in failed["message"]
        assert run.versions() == ["1", "1"]
        fine(ranks.ask(update=str(run.seed(2))), 2)
        assert run.versions() == ["2", "2"]


def test_nccl_is_refused_before_anything_is_sent(run: Run) -> None:
    before = [weights.digests(run.engine(version)) for version in PLACES]
    with run.trainers(SGLANG_RECV_WEIGHT_RECEIVER="nccl") as ranks:
        refused = error_of(ranks.ask(connect=run.layout, update=str(run.seed(1))), 0)
        assert refused["code"] == "UNSUPPORTED"
        assert "nccl" in refused["message"]
        assert "vmm" in refused["fix"]
    assert [weights.digests(run.engine(version)) for version in PLACES] == before


def test_engine_ranks_without_a_train_rank_are_named(run: Run) -> None:
    layout = [(url, offset, 1) for url, offset, _ in run.layout]  # as if the second engine had one GPU
    with run.trainers(2) as ranks:
        lost = error_of(ranks.ask(connect=layout, update=str(run.seed(1))), 0)
        assert lost["code"] == "DEVICE_MISMATCH"
        assert any("rank 1 is on cpu:" in line and "no train rank's device" in line for line in lost["details"])
