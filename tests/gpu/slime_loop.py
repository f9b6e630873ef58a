"""slime's colocated loop on one GPU: a real engine with the memory saver, a trainer under its preload.

``python tests/gpu/slime_loop.py [--out DIR] [MODEL ...]`` prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.engine import GpuServer
from gpu.main_job import run_trainer
from sglang_recv.cli.bench import environment

TRAINER = Path(__file__).with_name("slime_trainer.py")
#: With a CPU backup the engine's weights come back as they were, without one they are undefined until an update.
BACKUP = {"0.6b": ("--enable-weights-cpu-backup",), "8b": ()}


def run(model: str, steps: int) -> dict[str, Any]:
    """All steps of one model."""
    args = ("--enable-memory-saver", *BACKUP[model])
    with tempfile.TemporaryDirectory() as root, GpuServer(model, Path(root), args=args) as server:
        report = run_trainer(TRAINER, [server.url, model, "--steps", str(steps)], saver=True)
        report |= {"model": model, "engine_args": args, "log": server.tail(20)}
    return report


def table(report: dict[str, Any]) -> str:
    """Memory of each phase and what each step showed."""
    steps = report["steps"]
    lines = [f"{report['model']} {' '.join(report['engine_args'])}: {report['bytes']} bytes"]
    for phase in steps[0]["memory_mib"]:
        lines.append(f"  {phase:24} " + " ".join(f"{step['memory_mib'][phase]:8d}" for step in steps) + "  MiB")
    lines.append(f"  {'update':24} " + " ".join(f"{step['seconds']:8.3f}" for step in steps) + "  s")
    for step in steps:
        lines.append(
            f"  step {step['step']}: version {step['version']}, {step['tensors equal']} of {step['tensors expected']} "
            f"tensors as the trainer expects, loss {step['loss']:.4g}, tokens {step['tokens']}"
        )
    lines.append(f"  as reported, stock: {json.dumps(report['stock'])}")
    lines.append(f"  as reported, ours: {json.dumps(report['reported'])}")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["0.6b", "8b"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    reports = []
    for model in options.models:
        reports.append(run(model, options.steps))
        text = json.dumps({"environment": environment(), "reports": reports}, indent=1)
        (options.out / "slime_loop.json").write_text(text)
        print(table(reports[-1]), flush=True)


if __name__ == "__main__":
    main()
