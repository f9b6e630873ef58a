"""Ways in, refusals at start, several senders, and what a client hears from an engine without us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from sglang_recv import WeightClient, wire
from sglang_recv.channel import Dealer
from sglang_recv.errors import PluginMissingError, ReceiverOffError, UnsupportedError
from support import models, weights
from support.oracle import greedy
from support.pool import EnginePool
from support.server import CPU_SHIM, VERSIONS, EngineServer, ServerStartError, interpreter
from support.waiting import wait_until

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_environment_variable_alone_is_enough(engines: EnginePool, checkpoints: Path, version: str) -> None:
    """For launchers that build ServerArgs themselves; and the second command line of SGLang."""
    server = engines(version, "llama", env={"SGLANG_RECV_WEIGHT_RECEIVER": "auto"}, entry="serve")
    tensors = models.tensors(models.checkpoint("llama", 1, checkpoints))
    before = weights.digests(server)

    with weights.client(server) as client:
        assert client.status()[server.url][0].mode == "vmm"
        client.update(tensors, "by variable")

    assert weights.version(server) == "by variable"
    assert weights.digests(server) != before
    answer = server.post("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 64})
    assert answer == [float(value) for value in tensors["model.norm.weight"][:64]]
    engines.discard(server)


ENGINE = """
import json, sys
from pathlib import Path

def main():
    import sglang
    from sglang_recv import EngineTarget, WeightClient
    from support import models
    engine = sglang.Engine(model_path=sys.argv[1], device="cpu", max_total_tokens=4096, weight_receiver="vmm")
    greedy = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
    target = EngineTarget(engine)
    with WeightClient(target) as client:
        said = [engine.generate("abc", greedy)["output_ids"]]
        report = client.update(models.tensors(Path(sys.argv[2])), "by engine")
        said.append(engine.generate("abc", greedy)["output_ids"])
        last = engine.generate("abc", greedy)["meta_info"]["weight_version"]
        digest = client.checksum()[target.name][0].tensors
    engine.shutdown()
    print(json.dumps({"said": said, "version": last, "rounds": report.rounds, "digest": digest}))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_sglang_engine_takes_a_keyword(engines: EnginePool, checkpoints: Path, tmp_path: Path, version: str) -> None:
    folders = [models.checkpoint("qwen3", seed, checkpoints) for seed in (0, 1)]
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(CPU_SHIM), str(TESTS)]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_RECV_DIR": str(tmp_path / "s"),
    }
    done = subprocess.run(
        [str(interpreter(version)), str(script), *map(str, folders)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])

    fresh = engines(version, seed=1, receiver="vmm")
    assert report["version"] == "by engine"
    assert report["said"][0] != report["said"][1]
    assert report["digest"] == weights.digests(fresh)[0]
    assert fresh.generate("abc", 8)["output_ids"] == report["said"][1]


def test_an_engine_whose_receiver_is_off_says_what_to_do(engines: EnginePool, checkpoints: Path) -> None:
    server = engines("0.5.23")

    with weights.client(server) as client, pytest.raises(ReceiverOffError) as refused:
        client.update(models.tensors(models.checkpoint("qwen3", 0, checkpoints)), "never")

    assert server.url in refused.value.message
    assert "--weight-receiver vmm" in refused.value.fix


def test_an_engine_that_could_not_load_us_says_what_to_do(engines: EnginePool, checkpoints: Path) -> None:
    env = {"SGLANG_PLUGINS": "somebody_else", "SGLANG_RECV_WEIGHT_RECEIVER": "vmm"}
    server = engines("0.5.23", env=env)

    with weights.client(server) as client, pytest.raises(PluginMissingError) as refused:
        client.update(models.tensors(models.checkpoint("qwen3", 0, checkpoints)), "never")

    assert server.url in refused.value.message
    assert "SGLANG_PLUGINS" in refused.value.fix
    engines.discard(server)


def test_another_major_version_is_refused_with_both_versions(engines: EnginePool) -> None:
    server = engines("0.5.13", tp=2, seed=1, receiver="vmm")
    rank = server.get("/server_info")["sglang_recv"]["ranks"][1]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Dealer(context, rank["control"]) as dealer:
        dealer.send(wire.encode(wire.Hello(wire.PROTOCOL_MAJOR + 1, 0, "from the future")))
        raw = wait_until(dealer.receive, 5, "an answer", interval=0.01)
    context.term()

    answer = wire.decode(raw, wire.RankMessage)

    assert isinstance(answer, wire.Error)
    assert answer.error_code == "PROTOCOL_VERSION"
    ours = f"{wire.PROTOCOL_MAJOR}.{wire.PROTOCOL_MINOR}"
    assert f"speaks protocol {wire.PROTOCOL_MAJOR + 1}.0, this side speaks {ours}" in answer.message


def _start_fails(server: EngineServer) -> str:
    with pytest.raises(ServerStartError):
        server.start()
    text = server.log_text()
    assert not server.alive()
    return text


@pytest.mark.parametrize("version", VERSIONS)
def test_a_receiver_that_cannot_start_ends_the_engine_with_the_reason(
    checkpoints: Path, tmp_path: Path, version: str
) -> None:
    open_dir = tmp_path / "open"
    open_dir.mkdir()
    open_dir.chmod(0o755)
    server = EngineServer(
        version,
        models.checkpoint("qwen3", 0, checkpoints),
        receiver="vmm",
        env={"SGLANG_RECV_DIR": str(open_dir)},
        log_dir=tmp_path,
    )

    text = _start_fails(server)

    assert "has mode 0o755, which lets others in" in text
    assert "chmod 700" in text


@pytest.mark.parametrize("version", VERSIONS)
def test_a_plugin_that_is_kept_out_ends_the_engine(checkpoints: Path, tmp_path: Path, version: str) -> None:
    """SGLANG_PLUGINS leaves us out of the children, but the parent still checks that each has a receiver."""
    starter = tmp_path / "starter.py"
    starter.write_text(
        "import os, runpy, sys\n"
        "if __name__ == '__main__':\n"
        "    from sglang.srt.plugins import load_plugins\n"
        "    load_plugins()\n"
        "    os.environ['SGLANG_PLUGINS'] = 'somebody_else'\n"
        "    sys.argv = ['launch_server', *sys.argv[1:]]\n"
        "    runpy.run_module('sglang.launch_server', run_name='__main__')\n"
    )

    class Starter(EngineServer):
        def _command(self) -> list[str]:
            usual = super()._command()
            return [usual[0], str(starter), *usual[3:]]

    text = _start_fails(Starter(version, models.checkpoint("qwen3", 0, checkpoints), receiver="vmm", log_dir=tmp_path))

    assert "PLUGIN_MISSING" in text
    assert "SGLANG_PLUGINS" in text


@pytest.mark.parametrize(
    ("version", "args", "named"),
    [
        ("0.5.23", ("--weight-receiver", "nccl"), "receiving by broadcast is not built yet"),
        ("0.5.13", ("--weight-receiver", "vmm", "--tokenizer-worker-num", "2"), "--tokenizer-worker-num 2"),
        pytest.param(
            "0.5.23",
            ("--weight-receiver", "vmm", "--dp-size", "2"),
            "--dp-size 2: plain replicas",
            marks=pytest.mark.full,
        ),
        pytest.param("0.5.13", ("--weight-receiver", "vmm", "--enable-lora"), "--enable-lora", marks=pytest.mark.full),
    ],
)
def test_what_is_not_supported_is_refused_at_start(
    checkpoints: Path, tmp_path: Path, version: str, args: tuple[str, ...], named: str
) -> None:
    model = models.checkpoint("qwen3", 0, checkpoints)

    text = _start_fails(EngineServer(version, model, args=args, log_dir=tmp_path))

    assert "UNSUPPORTED" in text
    assert named in text


SENDER = """
import json, sys
from pathlib import Path
from sglang_recv import WeightClient
from support import models
url, folder, rank, session = sys.argv[1:]
with WeightClient(url, ranks=[int(rank)], slot_bytes=int(20_000 * (1 + int(rank)))) as client:
    with client.open("by two", session_id=session, coordinator=rank == "0") as open_session:
        open_session.send(iter(models.tensors(Path(folder)).items()))
        report = open_session.commit()
print(json.dumps({"rounds": report.rounds}))
"""


def test_two_sender_processes_feed_one_rank_each(engines: EnginePool, checkpoints: Path) -> None:
    """Each with buckets of its own: the ranks have different numbers of rounds."""
    from sglang_recv import new_session_id

    server = engines("0.5.13", tp=2, receiver="vmm")
    fresh = engines("0.5.13", tp=2, seed=1, receiver="vmm")
    folder = models.checkpoint("qwen3", 1, checkpoints)
    session = new_session_id()
    senders = [
        subprocess.Popen(
            [sys.executable, "-c", SENDER, server.url, str(folder), str(rank), session],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(TESTS), "PATH": os.environ["PATH"]},
        )
        for rank in (0, 1)
    ]
    outcomes = [sender.communicate(timeout=60) for sender in senders]

    assert [sender.returncode for sender in senders] == [0, 0], outcomes
    rounds = [json.loads(out)["rounds"] for out, _ in outcomes]
    assert rounds[0] > rounds[1] > 0
    assert weights.version(server) == "by two"
    assert weights.digests(server) == weights.digests(fresh)
    assert greedy(server) == greedy(fresh)
    engines.discard(server)


def test_a_rank_without_a_sender_keeps_nobody_waiting(engines: EnginePool, checkpoints: Path) -> None:
    server = engines("0.5.13", tp=2, seed=1, receiver="vmm")
    tensors = models.tensors(models.checkpoint("qwen3", 1, checkpoints))
    held = weights.digests(server)

    # Rank 1 has no sender: nothing is written, and the message says which rank is missing. The deadline of the client
    # comes first here, and the engine is free again at once.
    lone = WeightClient(server.url, ranks=[0], deadline=2)
    with lone, pytest.raises(Exception, match="open: not done within 2.0 s"), lone.open("never"):
        pass
    assert weights.digests(server) == held

    with weights.client(server) as client:
        client.update(tensors, "after")
    assert weights.digests(server) == held
    assert weights.version(server) == "after"


def test_a_mode_that_is_not_built_is_refused(engines: EnginePool, checkpoints: Path) -> None:
    server = engines("0.5.13", tp=2, seed=1, receiver="vmm")
    client = WeightClient(server.url, mode="nccl")

    with client, pytest.raises(UnsupportedError, match="broadcast is not built yet"):
        client.update(models.tensors(models.checkpoint("qwen3", 1, checkpoints)), "never")
