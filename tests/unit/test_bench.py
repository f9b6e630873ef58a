"""What the bench makes of its laps: rows, table and picture, from reports that are given."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sglang_recv import cli
from sglang_recv.cli import bench, bench_report
from sglang_recv.cli.bench_report import Found
from sglang_recv.errors import UnsupportedError

PATIENCE = 30.0  # seconds
MEASURED = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "h200-2026-12-03.json"
ON = {"date": "2026-12-03", "gpu": "a GPU, 1.2", "cpu": "a CPU, 2 cores"}


def lap(mode: str, seconds: float, copies: int = 2, **more: Any) -> dict[str, Any]:
    return {"event": "lap", "mode": mode, "copies": copies, "seconds": seconds, **more}


def told(*events: dict[str, Any], model: str = "8b") -> Found:
    found = Found(model)
    for event in events:
        found.take(event)
    return found


def digest(of: str, value: str) -> dict[str, Any]:
    return {"event": "digest", "of": of, "digest": value}


EQUAL = (digest("stock", "a1"), digest("other weights", "b2"), digest("ours", "a1"))
EVENTS = (
    {"event": "facts", "tensors": 399, "bytes": 16_000_000_000},
    {"event": "facts", "limit_seconds": 0.01},
    lap("stock, first update of a fresh engine", 0.5),
    lap("first update of a fresh engine: recording", 0.4, phases={"pack": 0.0125, "load": 0.25}),
    lap("second update: proving", 2.0),
    lap("stock", 0.2),
    lap("steady", 0.05, phases={"pack": 1.0}, rank_phases={"load": 1.0}),
    lap("stock", 0.32),
    lap("steady", 0.04, phases={"pack": 0.007, "wait": 0.002}, rank_phases={"load": 0.006, "flush": 0.001}),
    lap("stock", 0.24),
    lap("steady", 0.03, phases={"pack": 2.0}, rank_phases={"load": 2.0}),
    lap("in place", 0.012, copies=1),
    lap("checkpoint-engine", 0.96, copies=0),
    {"event": "failed", "mode": "another", "reason": "RuntimeError: it cannot"},
    *EQUAL,
)


def test_rows_are_medians_beside_stock_and_limit() -> None:
    rows = {row.pop("mode"): row for row in told(*EVENTS).rows()}
    assert rows["steady"] == {
        "model": "8b",
        "seconds": 0.04,
        "laps": [0.05, 0.04, 0.03],
        "stock_seconds": 0.24,
        "limit_seconds": 0.01,
        "copies": 2,
    }
    assert rows["first update of a fresh engine: recording"]["stock_seconds"] == 0.5, "fresh beside fresh"
    assert rows["second update: proving"]["stock_seconds"] == 0.24
    assert rows["in place"]["copies"] == 1
    assert rows["another"] == {"model": "8b", "seconds": None, "failed": "RuntimeError: it cannot"}


def test_the_table_has_the_ratios_and_both_sides_of_the_lap_in_the_middle(tmp_path: Path) -> None:
    found = told(*EVENTS)
    found.left_out["steady, trainer under the memory saver"] = "needs a GPU"
    found.compare = True
    report = bench_report.write(tmp_path / "bench.json", "sglang-recv bench", ON, [found])
    assert json.loads((tmp_path / "bench.json").read_text()) == report
    assert list(tmp_path.iterdir()) == [tmp_path / "bench.json"]
    lines = [" ".join(line.split()) for line in bench_report.table(report, "8b").splitlines()]
    assert lines[0] == (
        "8b: 16.00 GB in 399 tensors; one copy on the device 0.0100 s; checksums of stock and ours: equal; "
        "/weights_checker: equal"
    )
    assert lines[1] == "seconds stock as fast limit above it"
    for line in (
        "first update of a fresh engine: recording 0.4000 0.5000 1.2x 0.0200 20.0x",
        "second update: proving 2.0000 0.2400 0.12x 0.0200 100.0x",
        "stock 0.2400 0.2400 - 0.0200 12.0x",
        "steady 0.0400 0.2400 6.0x 0.0200 2.0x",
        "in place 0.0120 0.2400 20.0x 0.0100 1.2x",
        "checkpoint-engine 0.9600 0.2400 0.25x - -",
        "another failed: RuntimeError: it cannot",
        "steady, trainer under the memory saver left out: needs a GPU",
        "steady: ms on this side: pack 7.0 wait 2.0",
        "on the rank: load 6.0 flush 1.0",
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("digests", "equal"),
    [
        (EQUAL, True),
        (EQUAL[:2], None),
        ((*EQUAL, digest("ours, under the memory saver", "c3")), False),
        ((*EQUAL, digest("checkpoint-engine", "c3")), True),
        ((EQUAL[0], EQUAL[1], digest("ours", "c3")), False),
        ((EQUAL[0], digest("other weights", "a1"), EQUAL[2]), False),
    ],
    ids=["equal", "unknown", "saver differs", "not ours", "ours differs", "other weights did not arrive"],
)
def test_a_bench_ends_well_only_with_equal_bytes(digests: tuple[dict[str, Any], ...], equal: bool | None) -> None:
    found = told(*EVENTS[:-3], *digests)
    assert found.digests_equal is equal
    assert ("checksums are not as they must be" in found.wrong) is (equal is not True)


def test_a_failed_comparison_and_a_cut_off_run_are_wrong_too() -> None:
    found = told(*EVENTS)
    assert found.wrong == ""
    found.compare = False
    assert "/weights_checker" in found.wrong
    found.error = "the server exited with -9"
    assert found.wrong == found.error


def test_a_run_that_was_cut_off_shows_what_it_had(tmp_path: Path) -> None:
    found = told(lap("stock, first update of a fresh engine", 0.5))
    found.error = "out of time: 3.0 s"
    report = bench_report.write(tmp_path / "bench.json", "sglang-recv bench", ON, [found])
    text = bench_report.table(report, "8b")
    assert "checksums of stock and ours: not compared" in text
    assert "0.5000" in text
    assert "cut off: out of time: 3.0 s" in text


def test_the_measured_report_is_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / MEASURED.name
    copy.write_text(MEASURED.read_text())
    assert cli.main(["bench", "--draw", str(copy)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "steady 0.0366 0.1350 3.7x 0.0154 2.4x" in lines, "the README's row of 8B"
    with Image.open(copy.with_suffix(".png")) as picture:
        picture.load()
        width, height = picture.size
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20) or ()}
    assert min(width, height) > 300
    assert {(0x2A, 0x7D, 0xE1), (0xD9, 0x30, 0x25)} <= colours, "bars, and the line of the limit"


def test_without_matplotlib_there_is_a_word_instead_of_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    copy = tmp_path / "r.json"
    copy.write_text(MEASURED.read_text())
    assert cli.main(["bench", "--draw", str(copy)]) == 1
    said = capsys.readouterr().out
    assert "0.0366" in said
    assert "sglang-recv bench --draw r.json" in said
    assert list(tmp_path.iterdir()) == [copy]


@pytest.mark.parametrize("text", ["", "[]", '{"models": [{}]}'])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(text)
    assert cli.main(["bench", "--draw", str(tmp_path / "x.json")]) == 1
    assert "x.json is not a report of this bench" in capsys.readouterr().err


def test_unknown_models_and_no_laps_are_refused(tmp_path: Path) -> None:
    for arguments in ({"models": ("70b",)}, {"laps": 0}):
        options = {"models": ("tiny",), "laps": 1} | arguments
        with pytest.raises(UnsupportedError, match="tiny, 0.6b, 8b, 30b"):
            bench.run(
                bench.Options(
                    slots=None, slot_mib=None, saver=True, out=tmp_path, seconds=None, server_args=(), **options
                )
            )
    assert list(tmp_path.iterdir()) == []


def test_the_environment_names_no_host() -> None:
    found = bench.environment()
    assert {"date", "python", "cpu", "torch", "sglang", "sglang_recv"} <= set(found)
    assert platform.node() not in " ".join(found.values())


@pytest.mark.parametrize(("seconds", "reason"), [(None, "ended by SIGTERM"), (0.01, "out of time: 0.01 s")])
def test_the_end_of_its_time_and_sigterm_stop_it_once(seconds: float | None, reason: str) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def work() -> None:
        if seconds is None:
            signal.raise_signal(signal.SIGTERM)
        threading.Event().wait(PATIENCE)

    with pytest.raises(bench.Stopped, match=reason), bench._interruptible(seconds):
        work()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_trainer_that_hangs_is_ended() -> None:
    hangs = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = subprocess.Popen(hangs, stdout=subprocess.PIPE, text=True)
    with bench._killed_after(process, 0.05) as late:
        assert process.stdout is not None
        assert process.stdout.read() == ""
        assert process.wait() == -signal.SIGKILL
    assert late()
