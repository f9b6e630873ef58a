"""The main job on one GPU: an engine with the memory saver, a trainer under its preload, stock and ours together.

Run as a script it prints a table and writes JSON: ``python tests/gpu/main_job.py [--out DIR] [MODEL ...]``. Its
functions are what tests/gpu/test_main_job.py asserts on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.engine import GpuServer
from sglang_recv.cli.bench import environment, saver_environment
from support.server import RequestError

TRAINER = Path(__file__).with_name("trainer.py")


def trainer(url: str, model: str, *args: str, saver: bool) -> dict[str, Any]:
    """Run a trainer process to its end and return its report."""
    return run_trainer(TRAINER, [url, model, *args, *(("--saver",) if saver else ())], saver=saver)


def run_trainer(script: Path, args: Sequence[str], *, saver: bool) -> dict[str, Any]:
    """Run a trainer script to its end, with ``saver`` under the memory saver's preload as slime does, and return the
    JSON object of its last line."""
    command = [sys.executable, str(script), *args]
    variables = os.environ | (saver_environment() if saver else {})
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500, check=False)
    if done.returncode:
        raise RuntimeError(f"the trainer exited {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return report


def used_bytes() -> int:
    """Device memory in use by all processes, by the driver's own tool."""
    out = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(out.stdout.split()[0]) << 20


def check(server: GpuServer, action: str) -> dict[str, Any]:
    """SGLang's own /weights_checker."""
    answer = server.post("/weights_checker", {"action": action}, timeout=400)
    assert isinstance(answer, dict)
    return answer


def run(model: str, slot_mib: int, *, saver_states: bool) -> dict[str, Any]:
    """Everything for one model; with ``saver_states`` also what happens to updates of released weights."""
    report: dict[str, Any] = {"model": model, "slot_mib": slot_mib}
    with tempfile.TemporaryDirectory() as root:
        begun = time.monotonic()
        with GpuServer(model, Path(root), args=("--enable-memory-saver",)) as server:
            report["engine_start_seconds"] = time.monotonic() - begun
            report["engine_used_before"] = used_bytes()
            slots = ("--slot-mib", str(slot_mib))
            report["saver"] = trainer(server.url, model, *slots, "--version", "tms", saver=True)
            report["engine_used_after"] = used_bytes()
            report["weight_version"] = server.get("/model_info")["weight_version"]
            check(server, "snapshot")
            check(server, "reset_tensors")
            again = trainer(server.url, model, *slots, "--version", "again", "--updates", "1", saver=True)
            report["compare"] = check(server, "compare")
            report["digests_equal_after_reset"] = again["digest"] == report["saver"]["digest"]
            report["plain"] = trainer(server.url, model, *slots, "--stock", "3", saver=False)
            report["digests_equal_to_stock"] = report["plain"]["stock_digest"] == report["saver"]["digest"]
            if saver_states:
                report["released"] = released(server, model, slots)
            report["log"] = server.tail(30)
    return report


def released(server: GpuServer, model: str, slots: tuple[str, ...]) -> dict[str, Any]:
    """Weights released and resumed without a backup: what is refused when, and that a full update makes them whole."""
    digest = trainer(server.url, model, *slots, "--updates", "1", saver=False)["digest"]
    tags = {"tags": ["weights"]}
    server.post("/release_memory_occupation", tags)
    report: dict[str, Any] = {"update while released": _error(server, model)}
    server.post("/resume_memory_occupation", tags)
    try:
        server.generate([1, 2, 3], 1)
        report["generate after resume"] = "served"
    except RequestError as error:
        report["generate after resume"] = f"{error.status} {str(error.body)[:300]}"
    report["partial update after resume"] = _error(server, model, "--kind", "partial")
    again = trainer(server.url, model, *slots, "--updates", "1", saver=False)
    report["full update makes them whole"] = again["digest"] == digest
    return report


def _error(server: GpuServer, model: str, *args: str) -> str:
    """The first line of what a trainer process is told."""
    try:
        trainer(server.url, model, *args, saver=False)
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.startswith("sglang_recv.errors.")]
        return lines[-1] if lines else str(error)[-500:]
    return "no error"


def table(reports: list[dict[str, Any]]) -> str:
    """The figures that matter, one line per model and way."""
    lines = [f"{'model':6} {'way':34} {'first':>8} {'second':>8} {'third':>8}  (seconds)"]
    for report in reports:
        plain, saver = report["plain"], report["saver"]
        rows = {
            "stock flattened bucket, no saver": plain["stock_seconds"],
            "ours, no saver": [run["seconds"] for run in plain["updates"]],
            "ours, trainer under the saver": [run["seconds"] for run in saver["updates"]],
            "ours, no saver, a lazy source": [plain["streamed_seconds"]],
            "one copy on the device": [plain["device_copy_seconds"]],
        }
        for way, seconds in rows.items():
            lines.append(f"{report['model']:6} {way:34} " + " ".join(f"{s:8.3f}" for s in seconds))
        last = saver["updates"][-1]
        mib = {key: value >> 20 for key, value in last.items() if isinstance(value, int)}
        lines += [
            f"       stock share under the saver: {json.dumps(saver['stock_share'])}",
            f"       compare after reset: {report['compare'].get('success')}, equal to stock: "
            f"{report['digests_equal_to_stock']}, version {report['weight_version']}",
            f"       MiB: staging {mib['staging_bytes']}, device at peak +{mib['device_bytes_in_use_at_peak']}, after "
            f"+{mib['device_bytes_after']}; without a trainer before {report['engine_used_before'] >> 20}, after "
            f"{report['engine_used_after'] >> 20}",
            f"       memory saver: {json.dumps(report.get('released'))}",
            *(f"       phases of update {i}: {json.dumps(run['phases'])}" for i, run in enumerate(plain["updates"])),
        ]
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["0.6b", "30b"])
    parser.add_argument("--slot-mib", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    reports = []
    for model in options.models:
        print(f"{model}: starting", flush=True)
        reports.append(run(model, options.slot_mib, saver_states=model == "0.6b"))
        result = {"environment": environment(), "reports": reports}
        (options.out / "main_job.json").write_text(json.dumps(result, indent=1))
        print(table(reports), flush=True)


if __name__ == "__main__":
    main()
