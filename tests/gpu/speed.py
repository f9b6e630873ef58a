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
from gpu.main_job import check, environment, trainer

SAVER = ("--enable-memory-saver",)


def run(model: str, slots: tuple[str, ...], laps: int) -> dict[str, Any]:
    """One model: stock on an engine of its own; ours on another, both in turn there, and a trainer under the saver
    whose update must bring back what the engine has forgotten."""
    with tempfile.TemporaryDirectory() as root:
        with GpuServer(model, Path(root), args=SAVER) as server:
            stock = trainer(server.url, model, *slots, "--stock", "1", "--updates", "0", saver=False)
        with GpuServer(model, Path(root), args=SAVER) as server:
            ours = trainer(server.url, model, *slots, "--updates", "0", "--race", str(laps), saver=False)
            check(server, "snapshot")
            check(server, "reset_tensors")
            saver = trainer(server.url, model, *slots, "--updates", "0", "--race", str(laps), saver=True)
            compared = check(server, "compare")
    return {
        "model": model,
        "bytes": ours["bytes"],
        "tensors": ours["tensors"],
        "limit": ours["device_copy_seconds"],
        "fresh_stock": stock["stock_seconds"][0],
        "race": ours["race"],
        "saver": saver["race"],
        "compare": compared.get("success"),
        "digests": {"stock": stock["digest"], "ours": ours["digest"], "saver": saver["digest"]},
    }


def rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each way to update."""
    race = report["race"]
    stock = statistics.median(race["stock"])
    found = [
        ("first update of a fresh engine: recording", [race["first"][0]["seconds"]], report["fresh_stock"]),
        ("second update: proving", [race["first"][1]["seconds"]], stock),
        ("steady", [lap["seconds"] for lap in race["ours"]], stock),
        ("steady, a lazy source", race["lazy"][1:], stock),
        ("steady, trainer under the memory saver", [lap["seconds"] for lap in report["saver"]["ours"]], stock),
    ]
    return [
        {
            "model": report["model"],
            "mode": mode,
            "seconds": statistics.median(laps),
            "laps": laps,
            "stock_seconds": beside,
            "limit_seconds": report["limit"],
        }
        for mode, laps, beside in found
    ]


def table(report: dict[str, Any]) -> str:
    """Seconds, and ratios to stock and to the limit of two copies."""
    race = report["race"]
    equal = len(set(report["digests"].values())) == 1
    lines = [
        f"{report['model']}: {report['bytes']} bytes, {report['tensors']} tensors; one copy on the device "
        f"{report['limit']:.4f} s; compare {report['compare']}, digests equal {equal}",
        f"  {'':44} {'seconds':>8} {'stock':>8} {'x':>6} {'/ 2 copies':>10}",
    ]
    for row in rows(report):
        two = row["seconds"] / (2 * row["limit_seconds"])
        lines.append(
            f"  {row['mode']:44} {row['seconds']:8.4f} {row['stock_seconds']:8.3f} "
            f"{row['stock_seconds'] / row['seconds']:6.1f} {two:10.2f}  "
            + " ".join(f"{lap:.4f}" for lap in row["laps"])
        )
    lines.append(f"  a round without tensors, there and back: {race['round_trip_seconds'] * 1e3:.3f} ms")
    for name, lap in {"recording": race["first"][0], "proving": race["first"][1], "steady": race["ours"][-1]}.items():
        phases = " ".join(f"{phase} {seconds * 1e3:.1f}" for phase, seconds in lap["phases"].items())
        plan = next(iter(lap["plans"].values()))
        lines.append(
            f"  {name}: {phases} ms; {lap['rounds']} rounds, staging {lap['staging_bytes'] >> 20} MiB, "
            f"{plan['state']}: {plan['replayed']} replayed, {plan['loaded']} loaded, proof "
            f"{plan['proof_seconds']:.2f} s"
        )
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["0.6b", "8b", "30b"])
    parser.add_argument("--slots", type=int, help="as WeightClient's; by default its own choice")
    parser.add_argument("--slot-mib", type=int, help="as WeightClient's slot_bytes; by default its own choice")
    parser.add_argument("--laps", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    slots: tuple[str, ...] = ()
    if options.slots:
        slots += ("--slots", str(options.slots))
    if options.slot_mib:
        slots += ("--slot-mib", str(options.slot_mib))
    reports = []
    for model in options.models:
        reports.append(run(model, slots, options.laps))
        text = json.dumps(
            {"environment": environment(), "rows": [row for r in reports for row in rows(r)], "reports": reports}
        )
        (options.out / "speed.json").write_text(text)
        print(table(reports[-1]), flush=True)


if __name__ == "__main__":
    main()
