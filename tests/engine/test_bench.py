"""``sglang-recv bench`` on a CPU: the whole of it, with a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from support.server import interpreter, server_path


@pytest.mark.parametrize("version", ["0.5.23", pytest.param("0.5.13", marks=pytest.mark.full)])
def test_every_way_is_timed_and_leaves_the_same_bytes(version: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")} | {
        "PYTHONPATH": server_path(),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(interpreter(version)), "-m", "sglang_recv.cli", "bench", "--model", "tiny", "--laps", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--slot-mib", "4", "--", "--sleep-on-idle"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "bench.json").read_text())

    rows = {row["mode"]: row for row in report["rows"]}
    assert {mode: len(row["laps"]) for mode, row in rows.items()} == {
        "stock, first update of a fresh engine": 1,
        "first update of a fresh engine: recording": 1,
        "second update: proving": 1,
        "stock": 2,
        "steady": 2,
        "steady, a lazy source": 2,
        "steady, tensors in an exportable pool": 2,
    }
    assert all(row["seconds"] > row["limit_seconds"] > 0 for row in rows.values())
    (model,) = report["models"]
    assert (model["error"], model["digests_equal"]) == ("", True)
    assert (
        model["digests"]["stock"]
        == model["digests"]["ours"]
        == model["digests"]["ours, in place"]
        != model["digests"]["other weights"]
    )
    assert set(model["left_out"]) == {"steady, trainer under the memory saver", "checkpoint-engine"}
    plans = {mode: (plan["state"], plan["replayed"], plan["loaded"]) for mode, plan in model["plans"].items()}
    assert plans == {
        "first update of a fresh engine: recording": ("recorded", 0, model["tensors"]),
        "second update: proving": ("proven", model["tensors"], 0),
        "steady": ("proven", model["tensors"], 0),
        "steady, a lazy source": ("proven", model["tensors"], 0),
        "steady, tensors in an exportable pool": ("proven", model["tensors"], 0),
    }
    assert model["rounds"]["steady"] > 1
    assert model["phases"]["steady, tensors in an exportable pool"]["pack"] < model["phases"]["steady"]["pack"]
    for mode, rank in model["rank_phases"].items():
        assert min(rank["map"], rank["load"], rank["finalize"], rank["flush"]) > 0, mode
        assert rank["load"] == model["phases"][mode]["load"]
    assert "steady: ms on this side" in done.stdout
    assert str(Path.home()) not in json.dumps(report)
