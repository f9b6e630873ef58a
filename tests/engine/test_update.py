"""The main job: after an update an engine is bit-equal to one that has read the same weights from disk.

Two fresh servers that differ in their weights are each other's oracle: what one held at its start is what the other
must hold after the update, by digest and by what it says.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_recv import Progress
from support import models, weights
from support.oracle import assert_differ, assert_same, greedy
from support.pool import EnginePool
from support.server import EngineServer

# Every pair of (version, kind, TP) occurs; `make test-full` runs the rest.
SUBSET = {
    ("0.5.23", "qwen3", 1),
    ("0.5.23", "moe", 2),
    ("0.5.23", "tied", 2),
    ("0.5.13", "qwen3", 2),
    ("0.5.13", "moe", 1),
    ("0.5.13", "tied", 1),
}
CASES = [
    pytest.param(version, kind, tp, marks=() if (version, kind, tp) in SUBSET else pytest.mark.full)
    for version in ("0.5.23", "0.5.13")
    for kind in ("qwen3", "moe", "tied")
    for tp in (1, 2)
]


@pytest.mark.parametrize(("version", "kind", "tp"), CASES)
def test_three_updates_are_bit_equal_to_a_fresh_load(
    engines: EnginePool, checkpoints: Path, version: str, kind: str, tp: int
) -> None:
    # By the loader alone; tests/engine/test_plan.py does the same with plans.
    server = engines(version, kind, tp=tp, seed=0, receiver="vmm", args=("--weight-receiver-plan", "off"))
    fresh = engines(version, kind, tp=tp, seed=1, receiver="vmm")
    sent = {seed: models.tensors(models.checkpoint(kind, seed, checkpoints)) for seed in (0, 1)}
    held = {0: weights.digests(server), 1: weights.digests(fresh)}
    said = {0: greedy(server), 1: greedy(fresh)}
    assert held[0].keys() == set(range(tp))
    assert held[0] != held[1]
    assert_differ(said[0], said[1], "two seeds")

    # The second and the third update matter as much as the first, and so do slots that hold everything, a few tensors,
    # or less than most single tensors.
    for seed, slot_bytes in ((1, 64 << 20), (0, 100_000), (1, 4096)):
        name = f"{version}-{kind}-{tp}-{slot_bytes}"
        with weights.client(server, slot_bytes=slot_bytes) as client:
            report = client.update(sent[seed], name)

        assert weights.digests(server) == held[seed]
        assert_same(greedy(server), said[seed], f"slots of {slot_bytes} bytes")
        assert weights.version(server) == name
        assert report.nbytes == sum(tensor.nbytes for tensor in sent[seed].values())
        assert report.tensors == len(sent[seed])
        assert [(plan.state, plan.loaded) for plan in report.plans.values()] == [("off", len(sent[seed]))] * tp
    engines.discard(server)  # it no longer holds what its seed says
    engines.discard(fresh)


@pytest.mark.parametrize("version", ["0.5.23", "0.5.13"])
def test_the_version_changes_once_at_commit(engines: EnginePool, checkpoints: Path, version: str) -> None:
    server = engines(version, receiver="vmm")
    tensors = models.tensors(models.checkpoint("qwen3", 0, checkpoints))
    before = weights.version(server)

    with weights.client(server, slot_bytes=8192) as client, client.open("new") as session:
        for name, tensor in tensors.items():
            session.send([(name, tensor)])
            assert weights.version(server) == before
        session.commit()
        assert weights.version(server) == "new"

    assert weights.version(server) == "new"
    assert server.generate("x", 1)["meta_info"]["weight_version"] == "new"


def test_a_lazy_source_is_asked_for_one_tensor_at_a_time(engines: EnginePool, checkpoints: Path) -> None:
    server = engines("0.5.23", receiver="vmm")
    tensors = models.tensors(models.checkpoint("qwen3", 0, checkpoints))
    held = weights.digests(server)
    scratch = torch.empty(max(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)

    def produce() -> object:
        # One buffer for all: a sender that kept a tensor for later would send the bytes of the next one.
        for name, tensor in tensors.items():
            view = scratch[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor)
            yield name, view
            scratch.fill_(0xFF)

    with weights.client(server, slot_bytes=50_000) as client:
        client.update(produce(), "lazy")  # type: ignore[arg-type]

    assert weights.digests(server) == held


def test_a_checkpoint_of_several_dtypes(engines: EnginePool, checkpoints: Path) -> None:
    """The norms are float32 in the checkpoint, bfloat16 in the engine; the sender may have them as either."""
    tensors = {
        name: tensor.float() if name.endswith("norm.weight") else tensor
        for name, tensor in models.tensors(models.checkpoint("qwen3", 5, checkpoints)).items()
    }
    folder = checkpoints / "mixed-0"
    shutil.copytree(models.checkpoint("qwen3", 5, checkpoints), folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    server = engines("0.5.23", "mixed", receiver="vmm")
    held = weights.digests(server)
    sent = {name: tensor.bfloat16() if "layers.0." in name else tensor for name, tensor in tensors.items()}
    assert {tensor.dtype for tensor in sent.values()} == {torch.float32, torch.bfloat16}

    with weights.client(server, slot_bytes=10_000) as client:
        client.update({name: tensor + 1 for name, tensor in sent.items()}, "away")
        assert weights.digests(server) != held
        client.update(sent, "back")

    assert weights.digests(server) == held
    engines.discard(server)


def test_odd_tensors_just_work(engines: EnginePool, checkpoints: Path) -> None:
    """Sources that are not contiguous, and tensors above a slot."""
    server = engines("0.5.23", receiver="vmm")
    held = weights.digests(server)
    tensors = dict(models.tensors(models.checkpoint("qwen3", 0, checkpoints)))
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            tensors[name] = tensor.t().contiguous().t()
            assert not tensors[name].is_contiguous()

    with weights.client(server, slot_bytes=4096) as client:
        report = client.update(tensors, "strided")

    assert weights.digests(server) == held
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert report.staging_bytes >= largest > 4096


def test_an_empty_partial_update_switches_the_version_alone(engines: EnginePool) -> None:
    server = engines("0.5.23", receiver="vmm")
    held = weights.digests(server)

    with weights.client(server) as client:
        report = client.update({}, "empty", kind="partial")

    assert report.rounds == 0
    assert weights.version(server) == "empty"
    assert weights.digests(server) == held


def test_a_partial_update_changes_what_it_names(engines: EnginePool, checkpoints: Path) -> None:
    server = engines("0.5.23", receiver="vmm")
    tensors = models.tensors(models.checkpoint("qwen3", 0, checkpoints))
    held = weights.digests(server)
    name = "model.layers.1.mlp.down_proj.weight"

    with weights.client(server) as client:
        client.update({name: tensors[name] + 1}, "part", kind="partial")
        changed = weights.digests(server)
        client.update({name: tensors[name]}, "back", kind="partial")

    assert {n for n, digest in changed[0].items() if digest != held[0][n]} == {name}
    assert weights.digests(server) == held


def test_progress_is_reported_after_each_round(engines: EnginePool, checkpoints: Path) -> None:
    server = engines("0.5.23", receiver="vmm")
    tensors = models.tensors(models.checkpoint("qwen3", 0, checkpoints))
    seen: list[Progress] = []

    with weights.client(server, slot_bytes=50_000) as client:
        report = client.update(tensors, "watched", on_progress=seen.append)

    assert len(seen) == report.rounds > 3
    assert [step.nbytes for step in seen] == sorted({step.nbytes for step in seen})
    assert (seen[-1].tensors, seen[-1].nbytes) == (report.tensors, report.nbytes)


def test_one_call_updates_two_engines(engines: EnginePool, checkpoints: Path) -> None:
    servers = [engines("0.5.23", receiver="vmm"), engines("0.5.13", receiver="vmm")]
    held = [weights.digests(server) for server in servers]
    other = models.tensors(models.checkpoint("qwen3", 7, checkpoints))
    own = models.tensors(models.checkpoint("qwen3", 0, checkpoints))

    with weights.client(*servers) as client:
        client.update(other, "both")
        assert [weights.version(server) for server in servers] == ["both", "both"]
        assert all(weights.digests(server) != digest for server, digest in zip(servers, held, strict=True))
        client.update(own, "again")

    assert [weights.digests(server) for server in servers] == held


@pytest.mark.parametrize("version", ["0.5.23", pytest.param("0.5.13", marks=pytest.mark.full)])
def test_an_engine_that_spins_rests_while_an_update_has_it(version: str, checkpoints: Path) -> None:
    own, other = (models.checkpoint("qwen3", seed, checkpoints) for seed in (0, 3))
    tensors = models.tensors(other)
    with (
        EngineServer(version, own, receiver="vmm", spins=True) as server,
        weights.client(server, slot_bytes=16_384) as client,
    ):
        (scheduler,) = server.pids()
        before = greedy(server)
        with client.open("rested") as session:
            session.send(list(tensors.items())[:-1])
            busy = _cpu_seconds(scheduler)
            with ThreadPoolExecutor(1) as pool:
                # The gate is closed: this request waits, and the engine must take it in and answer it all the same.
                waiting = pool.submit(greedy, server)
                with pytest.raises(TimeoutError):
                    waiting.result(timeout=2.0)
                busy = _cpu_seconds(scheduler) - busy
                session.send(list(tensors.items())[-1:])
                session.commit()
                after = waiting.result(timeout=60)
        assert_differ(after, before, "the waiting request got the new weights")
        assert_same(greedy(server), after, "and so does the next one")
        assert busy < 1.0, f"{busy:.2f} of 2 seconds of a processor, while nothing could run"


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process so far: fields 14 and 15 of proc(5)'s stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_engine_that_sleeps_wakes_at_once(engines: EnginePool) -> None:
    """--sleep-on-idle polls SGLang's own sockets for a second; ours must end that sleep."""
    import time

    server = engines("0.5.23", receiver="vmm")
    with weights.client(server) as client:
        client.checksum()
        started = time.monotonic()
        for _ in range(6):
            client.checksum()
        # Without the wake-up each of the six would wait for the rest of a second.
        assert time.monotonic() - started < 3.0
