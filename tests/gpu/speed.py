"""How fast, beside SGLang's own way: first updates of fresh engines, and later ones in turn on one engine.

``python tests/gpu/speed.py [--out DIR] [MODEL ...]`` prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.engine import GpuServer
from gpu.main_job import environment, trainer

SAVER = ("--enable-memory-saver",)


def run(model: str, slot_mib: int, laps: int) -> dict[str, Any]:
    """Seconds of one model: of stock and ours on an engine of its own, then of both in turn on the second engine."""
    slots = ("--slot-mib", str(slot_mib))
    with tempfile.TemporaryDirectory() as root:
        with GpuServer(model, Path(root), args=SAVER) as server:
            stock = trainer(server.url, model, *slots, "--stock", "1", "--updates", "0", saver=False)
        with GpuServer(model, Path(root), args=SAVER) as server:
            ours = trainer(server.url, model, *slots, "--updates", "1", "--race", str(laps), saver=False)
    return {
        "model": model,
        "bytes": ours["bytes"],
        "tensors": ours["tensors"],
        "device_copy": ours["device_copy_seconds"],
        "fresh": {"stock": stock["stock_seconds"][0], "ours, watched": ours["updates"][0]["seconds"]},
        "phases": ours["updates"][0]["phases"],
        "in_turn": ours["race"],
    }


def table(reports: list[dict[str, Any]]) -> str:
    """One line per model and way: seconds, and the ratio to stock."""
    lines = []
    for report in reports:
        lines.append(
            f"{report['model']}: {report['bytes']} bytes, {report['tensors']} tensors, one copy on the device "
            f"{report['device_copy']:.4f} s"
        )
        fresh, turns = report["fresh"], report["in_turn"]
        for way, seconds in fresh.items():
            lines.append(f"  fresh engine   {way:14} {seconds:8.3f}  x{seconds / fresh['stock']:.2f}")
        stock = statistics.median(turns["stock"])
        for way, laps in turns.items():
            median = statistics.median(laps)
            lines.append(
                f"  in turn        {way:14} {median:8.3f}  x{median / stock:.2f}  "
                + " ".join(f"{lap:.3f}" for lap in laps)
            )
        lines.append(f"  phases of the first: {json.dumps(report['phases'])}")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["0.6b", "30b"])
    parser.add_argument("--slot-mib", type=int, default=512)
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    reports = []
    for model in options.models:
        reports.append(run(model, options.slot_mib, options.laps))
        text = json.dumps({"environment": environment(), "reports": reports}, indent=1)
        (options.out / "speed.json").write_text(text)
        print(table(reports[-1:]), flush=True)


if __name__ == "__main__":
    main()
