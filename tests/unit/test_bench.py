"""What the bench makes of its laps: rows, table and picture, from reports that are given."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image

from sglang_recv import cli
from sglang_recv.cli import bench, bench_others, bench_report
from sglang_recv.cli.bench_report import Found
from sglang_recv.cli.server import Server, has_ended
from sglang_recv.errors import CommitError, DeadlineError, EngineLostError, RecvError, UnsupportedError

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


def digest(of: str, value: str, *modes: str) -> dict[str, Any]:
    return {"event": "digest", "of": of, "digest": value, "modes": list(modes)}


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
    lap(
        "steady",
        0.04,
        phases={"pack": 0.007, "load": 0.0065, "wait": 0.002},
        rank_phases={"load": 0.006, "flush": 0.001},
    ),
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
        "steady: ms on this side: pack 7.0 wait 2.0; meanwhile the ranks load for 6.5",
        "first update of a fresh engine: recording: ms on this side: pack 12.5; meanwhile the ranks load for 250.0",
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


@pytest.mark.parametrize(
    ("of", "value", "modes", "reason"),
    [
        ("checkpoint-engine", "a1", ("checkpoint-engine",), "other bytes than stock left: checksum a1, not b2"),
        ("ours, in place", "c3", ("in place",), "other bytes than stock left: checksum c3, not a1"),
        ("ours", "c3", ("steady", "second update: proving"), "other bytes than stock left: checksum c3, not a1"),
        ("other weights", "a1", ("stock",), "other weights left the same bytes, checksum a1"),
    ],
    ids=["checkpoint-engine", "in place", "ours", "stock"],
)
def test_a_row_without_the_bytes_that_it_should_leave_has_no_time(
    of: str, value: str, modes: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    found = told(*EVENTS, digest(of, value, *modes))
    assert (found.wrong == "") is (of == "checkpoint-engine")
    report = bench_report.write(tmp_path / "bench.json", "sglang-recv bench", ON, [found])
    rows = {row["mode"]: row for row in report["rows"]}
    assert len(rows) == len(report["rows"]), "each once"
    assert {mode for mode, row in rows.items() if row["seconds"] is None} == {*modes, "another"}
    assert (rows["in place"].get("stock_seconds") is None) is bool({"stock", "in place"} & set(modes))
    lines = [" ".join(line.split()) for line in bench_report.table(report, "8b").splitlines()]
    for mode in modes:
        assert any(line.startswith(f"{mode} failed: ") and line.endswith(reason) for line in lines)
        assert not any(line.startswith(f"{mode}: ms on this side") for line in lines)
    bench_report.draw(report, tmp_path / "bench.png")


def test_a_way_that_failed_after_some_laps_has_no_time() -> None:
    found = told(*EVENTS, {"event": "failed", "mode": "checkpoint-engine", "reason": "it hangs"})
    rows = [row for row in found.rows() if row["mode"] == "checkpoint-engine"]
    assert rows == [{"model": "8b", "mode": "checkpoint-engine", "seconds": None, "failed": "it hangs"}]


def test_a_failed_comparison_and_a_cut_off_run_are_wrong_too() -> None:
    found = told(*EVENTS)
    assert found.wrong == ""
    found.compare = False
    assert "/weights_checker" in found.wrong
    found.error = "the server exited with -9"
    assert found.wrong == found.error


def test_a_run_that_was_cut_off_shows_what_it_had(tmp_path: Path) -> None:
    found = told(lap("stock, first update of a fresh engine", 0.5))
    found.error = "out of time"
    report = bench_report.write(tmp_path / "bench.json", "sglang-recv bench", ON, [found])
    text = bench_report.table(report, "8b")
    assert "checksums of stock and ours: not compared" in text
    assert "0.5000" in text
    assert "cut off: out of time" in text


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
        wanted = dataclasses.replace(options(tmp_path), **arguments)
        with pytest.raises(UnsupportedError, match="tiny, 0.6b, 8b, 30b"):
            bench.run(wanted)
    assert list(tmp_path.iterdir()) == []


def test_the_environment_names_no_host() -> None:
    found = bench.environment()
    assert {"date", "python", "cpu", "torch", "sglang", "sglang_recv"} <= set(found)
    assert platform.node() not in " ".join(found.values())


@pytest.mark.parametrize(("seconds", "reason"), [(None, "ended by SIGTERM"), (0.01, "out of time")])
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
    process = subprocess.Popen(hangs, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with bench._killed_after(process, 0.05) as late:
        assert process.stdout is not None
        assert process.stdout.read() == ""
    assert process.returncode == -signal.SIGKILL
    assert late()


@pytest.mark.parametrize("hangs", [True, False], ids=["out of time", "in time"])
def test_what_a_trainer_started_ends_with_it(hangs: bool, tmp_path: Path) -> None:
    # Whoever holds the pipe's write end still runs: nobody does, once it reads as ended.
    held, end = os.pipe()
    child = "subprocess.Popen(['sleep', '600'], pass_fds=[int(sys.argv[1])]); print('started', flush=True)"
    code = "import subprocess, sys, time; " + child + ("; time.sleep(600)" if hangs else "")
    program = [sys.executable, "-c", code, str(end)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, start_new_session=True, pass_fds=[end])
    os.close(end)
    with bench._killed_after(process, 5.0 if hangs else None) as late:
        assert process.stdout is not None
        assert process.stdout.read() == "started\n", "nothing keeps its output open"
        assert has_ended(process.pid, PATIENCE)
    assert late() is hangs
    assert process.returncode == (-signal.SIGKILL if hangs else 0)
    with open(held, "rb") as pipe:
        assert select.select([pipe], [], [], PATIENCE)[0], "its child is still there"
        assert pipe.read() == b""


def options(tmp_path: Path, *, saver: bool = True) -> bench.Options:
    return bench.Options(("tiny",), 1, slots=2, slot_mib=1, saver=saver, out=tmp_path, seconds=None, server_args=())


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Server]:
    """A server that answers nothing, with a log."""
    log = tmp_path / "server.log"
    log.write_text("one\ntwo\n")
    process = subprocess.Popen(["sleep", "600"])
    yield Server("http://127.0.0.1:9", process, log)
    process.kill()
    process.wait()


def test_what_a_trainer_told_before_it_failed_is_kept(sleeper: Server, tmp_path: Path) -> None:
    found = Found("tiny")
    with pytest.raises(EngineLostError, match=r"the trainer \(once\) exited with 1") as failed:
        bench._train(sleeper, found, "once", "cpu", options(tmp_path))
    assert found.facts == {"tensors": 47, "bytes": 5_248_512}
    assert failed.value.details[-3:] == ("the end of the server's log:", "one", "two")
    assert any("127.0.0.1:9" in line for line in failed.value.details)


def test_a_server_that_has_ended_is_told_with_its_log(sleeper: Server) -> None:
    sleeper.check_alive()
    sleeper.process.send_signal(signal.SIGTERM)
    assert has_ended(sleeper.process.pid, PATIENCE)
    with pytest.raises(EngineLostError, match="the server exited with -15") as lost:
        sleeper.check_alive()
    assert lost.value.details == ("one", "two")


class Machine:
    """A machine with a GPU, as far as the order of what the bench does there: engines, trainers, checks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.fails: dict[str, RecvError] = {}
        self.tells: dict[str, tuple[dict[str, Any], ...]] = {}
        self.installed = {"torch_memory_saver", "checkpoint_engine"}
        monkeypatch.setattr(bench, "_engine", self.engine)
        monkeypatch.setattr(bench, "_train", self.train)
        monkeypatch.setattr(bench, "_check", self.check)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in self.installed else None)

    @contextlib.contextmanager
    def engine(self, model: str, args: Sequence[str]) -> Iterator[None]:
        self.done.append("engine with the saver" if "--enable-memory-saver" in args else "engine")
        yield

    def train(self, _server: None, found: Found, program: str, *_: object, within: float | None = None) -> None:
        self.done.append(program)
        for event in self.tells.get(program, ()):
            found.take(event)
        if program in self.fails:
            raise self.fails[program]

    def check(self, _server: None, action: str) -> dict[str, Any]:
        self.done.append(action)
        return {"success": True}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


WITH_SAVER = [
    "engine with the saver",
    "stock",
    "engine with the saver",
    "turns",
    "pool",
    "snapshot",
    "reset_tensors",
    "saver",
]


def test_on_a_gpu_all_is_timed_and_compared(machine: Machine, tmp_path: Path) -> None:
    found = Found("8b")
    bench._time(found, "cuda", options(tmp_path))
    assert machine.done == [*WITH_SAVER, "compare", "checkpoint-engine"]
    assert (found.compare, found.left_out, found.failed) == (True, {}, {})


def test_what_is_not_there_is_left_out_with_a_reason(machine: Machine, tmp_path: Path) -> None:
    machine.installed.clear()
    found = Found("8b")
    bench._time(found, "cuda", options(tmp_path))
    assert machine.done == [
        "engine",
        "stock",
        "engine",
        "turns",
        "pool",
        "snapshot",
        "reset_tensors",
        "once",
        "compare",
    ]
    assert "torch_memory_saver is not installed" in found.left_out["steady, trainer under the memory saver"]
    assert "pip install 'sglang[checkpoint-engine]'" in found.left_out["checkpoint-engine"]
    machine.installed.add("torch_memory_saver")
    bench._time(found, "cuda", options(tmp_path, saver=False))
    assert "engine with the saver" not in machine.done


@pytest.mark.parametrize(
    ("failure", "digests", "reason"),
    [
        (DeadlineError("it hangs", fix=""), (), "it hangs"),
        (None, (digest("checkpoint-engine", "c3", "checkpoint-engine"),), "other bytes than stock left"),
        (None, (digest("checkpoint-engine", "b2", "checkpoint-engine"),), None),
    ],
    ids=["hangs", "writes something else", "is right"],
)
def test_checkpoint_engine_cannot_end_the_bench(
    machine: Machine,
    tmp_path: Path,
    failure: RecvError | None,
    digests: tuple[dict[str, Any], ...],
    reason: str | None,
) -> None:
    if failure is not None:
        machine.fails["checkpoint-engine"] = failure
    machine.tells = {"turns": EVENTS, "checkpoint-engine": digests}
    found = Found("8b")
    bench._time(found, "cuda", options(tmp_path))
    if reason is None:
        assert "checkpoint-engine" not in found.without_a_time
    else:
        assert reason in found.without_a_time["checkpoint-engine"]
    assert found.wrong == ""


class ParameterServer:
    """As checkpoint-engine 0.1.2's, which SGLang asks for."""

    made: ClassVar[list[ParameterServer]] = []

    def __init__(self, *, rank: int | None = None, world_size: int | None = None, auto_pg: bool = False) -> None:
        self.done: list[Any] = [(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"], auto_pg)]
        assert 0 < int(os.environ["MASTER_PORT"]) + 1 < 65536
        self.made.append(self)

    def init_process_group(self) -> None:
        self.done.append("group")

    def register_checkpoint(
        self,
        checkpoint_name: str,
        *,
        files: list[str] | None = None,
        named_tensors: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.done.append(("register", checkpoint_name, list(named_tensors or ())))

    def gather_metas(self, checkpoint_name: str) -> None:
        self.done.append(("gather", checkpoint_name))

    def update(self, checkpoint_name: str, req_func: Callable[[list[tuple[str, str]]], None]) -> None:
        self.done.append(("update", checkpoint_name))
        req_func([("GPU-0", "ipc://@socket")])

    def unregister_checkpoint(self, checkpoint_name: str) -> None:
        self.done.append(("unregister", checkpoint_name))


@pytest.mark.parametrize("accepted", [True, False])
def test_checkpoint_engine_is_driven_by_its_public_methods(accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setitem(sys.modules, "checkpoint_engine", ModuleType("checkpoint_engine"))
    monkeypatch.setitem(sys.modules, "checkpoint_engine.ps", SimpleNamespace(ParameterServer=ParameterServer))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench_others, "get", lambda url: {"paths": ["/begin_weight_update"]})
    posted: list[tuple[str, Any]] = []

    def post(url: str, body: Any) -> dict[str, Any]:
        posted.append((url, body))
        return {"success": accepted or not url.endswith("_ipc"), "message": "as told"}

    monkeypatch.setattr(bench_others, "post", post)
    refused: list[Exception] = []
    driver = bench_others.CheckpointEngine("http://engine", refused.append)
    server = ParameterServer.made.pop()
    assert server.done == [("0", "1", "127.0.0.1", False), "group"]
    tensors = {"a": torch.zeros(1), "b": torch.zeros(2)}
    if not accepted:
        with pytest.raises(CommitError, match="as told"):
            driver.update(tensors, "v1")
        assert len(refused) == 1, "told once, and at once"
        return
    assert set(driver.update(tensors, "v1")) == {"register", "gather", "update"}
    steps = [("register", "v1", ["a", "b"]), ("gather", "v1"), ("update", "v1"), ("unregister", "v1")]
    assert server.done[2:] == steps
    body = {"zmq_handles": {"GPU-0": "ipc://@socket"}, "flush_cache": True, "weight_version": "v1"}
    assert posted == [
        ("http://engine/begin_weight_update", {}),
        ("http://engine/update_weights_from_ipc", body),
        ("http://engine/end_weight_update", {}),
    ]
    assert refused == []
