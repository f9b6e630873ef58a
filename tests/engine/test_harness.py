"""The harness itself: both versions start, answer, agree with transformers, and end."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models import checkpoint
from support.oracle import assert_differ, assert_follows, assert_same, greedy, reference
from support.pool import EnginePool
from support.server import VERSIONS, EngineServer, RequestError, ServerStartError


@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_answers_as_transformers_does(engines: EnginePool, checkpoints: Path, version: str) -> None:
    server = engines(version)

    first = greedy(server)

    assert_same(greedy(server), first, "the same request again")
    assert_follows(first, checkpoint("qwen3", 0, checkpoints), f"SGLang {version}")
    assert len(server.pids()) == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_a_text_is_one_token_for_each_byte(engines: EnginePool, version: str) -> None:
    text = "Grüße \n"

    answer = engines(version).generate(text, 1)

    assert answer["meta_info"]["prompt_tokens"] == len(text.encode())


def test_an_error_status_is_raised_with_its_body(engines: EnginePool) -> None:
    with pytest.raises(RequestError, match="404") as caught:
        engines(VERSIONS[0]).get("/no-such-route")

    assert caught.value.status == 404


def test_seeds_say_different_things(checkpoints: Path) -> None:
    answers = [reference(checkpoint("qwen3", seed, checkpoints)) for seed in (0, 1)]

    assert_differ(*answers, "two seeds")


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(ServerStartError, match="the end of the log") as caught:
        EngineServer(VERSIONS[0], tmp_path / "empty", ready_within=60).start()

    assert "config" in str(caught.value)


def test_a_server_leaves_no_process_and_no_folder(engines: EnginePool) -> None:
    server = engines(VERSIONS[0])
    folder = server.socket_dir.parent
    processes = server.processes()
    assert len(processes) >= 3, f"HTTP server, scheduler and detokenizer: {processes}"

    engines.discard(server)

    assert not server.alive()
    assert not folder.exists()
    assert not [pid for pid in processes if _is_running(pid, processes[pid])]


@pytest.mark.full
@pytest.mark.parametrize(
    ("version", "kind"), [("0.5.23", "moe"), ("0.5.13", "tied"), ("0.5.23", "llama"), ("0.5.13", "moe")]
)
def test_two_ranks_by_the_other_entry_point(engines: EnginePool, checkpoints: Path, version: str, kind: str) -> None:
    server = engines(version, kind, tp=2, entry="serve")

    assert_follows(greedy(server), checkpoint(kind, 0, checkpoints), f"SGLang {version}, {kind}")
    assert len(server.pids()) == 2


def _is_running(pid: int, title: str) -> bool:
    try:
        return title in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return False
