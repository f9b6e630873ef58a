"""Load plans on real engines: what a plan leaves in the model is what a fresh load leaves, update after update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_recv import UpdateReport
from support import models, weights
from support.oracle import assert_same, greedy
from support.pool import EnginePool
from support.server import EngineServer, server_path

# Every version, kind and TP occurs; `make test-full` runs the rest.
SUBSET = {("0.5.23", "moe", 1), ("0.5.23", "tied", 2), ("0.5.13", "qwen3", 2)}
CASES = [
    pytest.param(version, kind, tp, marks=() if (version, kind, tp) in SUBSET else pytest.mark.full)
    for version in ("0.5.23", "0.5.13")
    for kind in ("qwen3", "moe", "tied")
    for tp in (1, 2)
]


def states(report: UpdateReport) -> set[str]:
    """What the ranks say of their plans."""
    return {plan.state for plan in report.plans.values()}


def five_updates(
    server: EngineServer,
    sent: Mapping[int, Mapping[str, torch.Tensor]],
    held: Mapping[int, object],
    said: Mapping[int, Any] | None = None,
) -> list[UpdateReport]:
    """Two sets of weights in turn; after each update the server holds, and says, what belongs to them."""
    reports = []
    with weights.client(server, slot_bytes=100_000) as client:
        for step in range(5):
            seed = (step + 1) % 2
            reports.append(client.update(sent[seed], f"step {step}"))
            assert weights.digests(server) == held[seed], step
            if said is not None:
                assert_same(greedy(server), said[seed], f"step {step}")
    return reports


@pytest.mark.parametrize(("version", "kind", "tp"), CASES)
def test_five_updates_are_bit_equal_to_a_fresh_load(
    engines: EnginePool, checkpoints: Path, version: str, kind: str, tp: int
) -> None:
    server = engines(version, kind, tp=tp, receiver="vmm")
    folders = [models.checkpoint(kind, seed, checkpoints) for seed in (0, 1)]
    sent, held, said = {}, {}, {}
    for seed in (1, 0):  # SGLang's own reload is the oracle
        server.post("/update_weights_from_disk", {"model_path": str(folders[seed])})
        sent[seed], held[seed], said[seed] = models.tensors(folders[seed]), weights.digests(server), greedy(server)
    reports = five_updates(server, sent, held, said)
    assert [states(report) for report in reports] == [{"recorded"}, *[{"proven"}] * 4]
    for number, report in enumerate(reports):
        assert len(report.plans) == tp
        for plan in report.plans.values():
            assert plan.kept == (), "everything in these models is a plain copy"
            assert plan.replayed + plan.loaded == len(sent[0])
            assert (plan.replayed > 0.9 * len(sent[0])) == (number > 0)
            assert (plan.proof_seconds > 0) == (number > 0)
    engines.discard(server)  # it no longer holds what its seed says


def test_an_abandoned_proof_poisons_and_the_next_update_repairs(engines: EnginePool, checkpoints: Path) -> None:
    """The proof leaves random bytes: until all of the real ones are there nothing may serve."""
    server = engines("0.5.23", receiver="vmm")
    own = models.tensors(models.checkpoint("qwen3", 0, checkpoints))
    held = weights.digests(server)
    with weights.client(server, slot_bytes=50_000) as client:
        assert states(client.update(own, "first")) == {"recorded"}
        with client.open("never") as session:
            session.send(list(own.items())[:8])
            session.flush()
        assert [state.weights_state for state in weights.states(server)] == ["poisoned"]
        report = client.update(own, "second")
        assert weights.digests(server) == held
        (plan,) = report.plans.values()
        assert plan.state in ("recorded", "proven")
        assert states(client.update(own, "third")) == {"proven"}
        assert weights.digests(server) == held
    engines.discard(server)


EXTERNAL = Path(__file__).parents[1] / "support" / "external"
#: What stays with the loader of tests/support/external/odd_models/odd.py.
ODD = {
    "model.layers.0.input_layernorm.weight": "read by aten._to_copy.default",
    "model.layers.0.post_attention_layernorm.weight": "written by aten.mul_.Tensor",
    "model.layers.1.input_layernorm.weight": "overlapping destinations",
    "model.norm.weight": "read by aten._to_copy.default",
}


@pytest.mark.parametrize("version", ["0.5.13", pytest.param("0.5.23", marks=pytest.mark.full)])
def test_a_loader_that_does_more_than_copy_keeps_what_it_must(
    engines: EnginePool, checkpoints: Path, version: str
) -> None:
    """It casts, scales, overlaps, derives an attribute, and works on other threads."""
    shape = replace(models.KINDS["qwen3"], architecture="OddForCausalLM")
    folders = [models.checkpoint("odd", seed, checkpoints, shape=shape) for seed in (0, 1)]
    env = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "odd_models", "PYTHONPATH": server_path(EXTERNAL)}
    with EngineServer(version, folders[1], receiver="vmm", env=env) as fresh:
        held = {1: weights.digests(fresh)}
    assert "derived" in held[1][0]
    with EngineServer(version, folders[0], receiver="vmm", env=env) as server:
        held[0] = weights.digests(server)
        sent = {seed: models.tensors(folder) for seed, folder in enumerate(folders)}
        reports = five_updates(server, sent, held)
        assert [states(report) for report in reports] == [{"recorded"}, *[{"proven"}] * 4]
        (plan,) = reports[-1].plans.values()
        assert {name: kept.reason for kept in plan.kept for name in kept.names} == ODD
        assert (plan.loaded, plan.replayed) == (len(ODD), len(sent[0]) - len(ODD))
