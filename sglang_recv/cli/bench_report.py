"""What ``sglang-recv bench`` found: kept as JSON, shown as a table and as a picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

#: Modes whose laps others are compared with: later updates with the one, those of a fresh engine with the other.
STOCK: Final = "stock"
STOCK_FRESH: Final = "stock, first update of a fresh engine"
#: Modes that are compared with stock's first update.
FRESH: Final = "first update of a fresh engine"
CHECKPOINT_ENGINE: Final = "checkpoint-engine"

#: Digests that must be one, and the one that must be another.
_OURS_AND_STOCK: Final = ("stock", "ours")
OTHER: Final = "other weights"


@dataclass
class Found:
    """One model's results, as its trainers tell them."""

    model: str
    facts: dict[str, Any] = field(default_factory=dict)
    laps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    #: The modes whose updates left what was digested, by the name of the digest.
    left_by: dict[str, list[str]] = field(default_factory=dict)
    #: What SGLang's /weights_checker says after its snapshot, a reset and an update; None where it was not asked.
    compare: bool | None = None
    #: Why it was cut off, or empty.
    error: str = ""

    def take(self, event: Mapping[str, Any]) -> None:
        """Keep what a trainer process said."""
        told = dict(event)
        kind = told.pop("event")
        if kind == "facts":
            self.facts |= told
        elif kind == "lap":
            self.laps.setdefault(told.pop("mode"), []).append(told)
        elif kind == "failed":
            self.failed[told["mode"]] = told["reason"]
        elif kind == "digest":
            self.digests[told["of"]] = told["digest"]
            self.left_by[told["of"]] = told.get("modes", [])

    @property
    def digests_equal(self) -> bool | None:
        """True when stock and all of ours left the same bytes, and other weights others; None before both are known."""
        if any(name not in self.digests for name in (*_OURS_AND_STOCK, OTHER)):
            return None
        ours = {digest for name, digest in self.digests.items() if name == "stock" or name.startswith("ours")}
        return len(ours) == 1 and self.digests[OTHER] not in ours

    @property
    def without_a_time(self) -> dict[str, str]:
        """Modes that are not timed, with the reason: they failed, or left other bytes than they should."""
        found = dict(self.failed)
        stock, other = self.digests.get("stock"), self.digests.get(OTHER)
        for name, modes in self.left_by.items():
            held = self.digests[name]
            if name == OTHER:
                reason = "" if held != stock else f"other weights left the same bytes, checksum {held}"
            else:
                due = other if name == CHECKPOINT_ENGINE else stock
                reason = (
                    "" if held == due else f"the engine holds other bytes than stock left: checksum {held}, not {due}"
                )
            if reason:
                found |= {mode: reason for mode in modes if mode not in found}
        return found

    @property
    def wrong(self) -> str:
        """What a bench must not end well with: bytes that differ, or a model that was not finished."""
        if self.error:
            return self.error
        if self.digests_equal is not True:
            return f"checksums are not as they must be: {self.digests}"
        return "" if self.compare in (None, True) else "SGLang's /weights_checker found a difference"

    def rows(self) -> list[dict[str, Any]]:
        """One for each mode, with the median of its laps beside stock's and the limit."""
        untimed = self.without_a_time
        timed = {mode: laps for mode, laps in self.laps.items() if mode not in untimed}
        medians = {mode: statistics.median(lap["seconds"] for lap in laps) for mode, laps in timed.items()}
        found = []
        for mode, laps in timed.items():
            fresh = mode == STOCK_FRESH or mode.startswith(FRESH)
            found.append(
                {
                    "model": self.model,
                    "mode": mode,
                    "seconds": _short(medians[mode]),
                    "laps": [_short(lap["seconds"]) for lap in laps],
                    "stock_seconds": _short(medians.get(STOCK_FRESH if fresh else STOCK)),
                    "limit_seconds": _short(self.facts.get("limit_seconds")),
                    "copies": laps[0]["copies"],
                }
            )
        for mode, reason in untimed.items():
            found.append({"model": self.model, "mode": mode, "seconds": None, "failed": reason})
        return found

    def summary(self) -> dict[str, Any]:
        """Everything else: of each mode the lap in the middle."""
        untimed = self.without_a_time
        timed = {mode: laps for mode, laps in self.laps.items() if mode not in untimed}
        middle = {mode: sorted(laps, key=_seconds)[len(laps) // 2] for mode, laps in timed.items()}
        kept = ("phases", "rank_phases", "plan", "rounds", "staging_bytes")
        parts = {name: {mode: lap[name] for mode, lap in middle.items() if lap.get(name) is not None} for name in kept}
        return {
            "model": self.model,
            **{name: _short(value) if isinstance(value, float) else value for name, value in self.facts.items()},
            "compare": self.compare,
            "digests_equal": self.digests_equal,
            "digests": self.digests,
            "left_out": self.left_out,
            "error": self.error,
            "plans": parts.pop("plan"),
            **parts,
        }


def _seconds(lap: Mapping[str, Any]) -> float:
    seconds: float = lap["seconds"]
    return seconds


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def write(path: Path, command: str, environment: Mapping[str, str], found: Iterable[Found]) -> dict[str, Any]:
    """Write the report of all models so far; an interrupted write leaves the one before. Returns it."""
    models = list(found)
    report = {
        "command": command,
        "environment": dict(environment),
        "rows": [row for model in models for row in model.rows()],
        "models": [model.summary() for model in models],
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)
    return report


def table(report: Mapping[str, Any], model: str) -> str:
    """One model: seconds, how many times as fast as stock, how many times the limit; and the phases of both sides."""
    summary = next(one for one in report["models"] if one["model"] == model)
    rows = [row for row in report["rows"] if row["model"] == model]
    lines = [_heading(summary, rows)]
    width = max((len(row["mode"]) for row in rows), default=0)
    lines.append(f"  {'':{width}} {'seconds':>9} {'stock':>9} {'as fast':>8} {'limit':>9} {'above it':>9}")
    for row in rows:
        if row.get("failed"):
            lines.append(f"  {row['mode']:{width}} failed: {row['failed']}")
            continue
        limit, times = limit_of(row), as_fast(row)
        lines.append(
            f"  {row['mode']:{width}} {row['seconds']:9.4f} {_cell(row['stock_seconds'], '9.4f')} "
            f"{_times(times):>8} {_cell(limit, '9.4f')} {_times(limit and row['seconds'] / limit):>9}"
        )
    lines += [f"  {mode:{width}} left out: {reason}" for mode, reason in summary.get("left_out", {}).items()]
    round_trip = summary.get("round_trip_seconds")
    if round_trip is not None:
        lines.append(f"  a round without tensors, there and back: {round_trip * 1e3:.2f} ms")
    lines += _phases(summary)
    if summary.get("error"):
        lines.append(f"  cut off: {summary['error'].splitlines()[0]}")
    return "\n".join(lines)


def _heading(summary: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> str:
    parts = []
    if "bytes" in summary:
        parts.append(f"{summary['bytes'] / 1e9:.2f} GB in {summary['tensors']} tensors")
    limit = next((row["limit_seconds"] for row in rows if row.get("limit_seconds")), None)
    if limit is not None:
        parts.append(f"one copy on the device {limit:.4f} s")
    equal = {True: "equal", False: "DIFFERENT", None: "not compared"}
    parts.append(f"checksums of stock and ours: {equal[summary['digests_equal']]}")
    if summary.get("compare") is not None:
        parts.append(f"/weights_checker: {equal[summary['compare']]}")
    return f"{summary['model']}: {'; '.join(parts)}"


def _phases(summary: Mapping[str, Any]) -> list[str]:
    """For each mode that has phases, both sides and what its plan did."""
    lines = []
    for mode, phases in summary.get("phases", {}).items():
        # Not among those that add up: ranks load meanwhile.
        mine = {name: seconds for name, seconds in phases.items() if name != "load"}
        beside = f"; meanwhile the ranks load for {phases['load'] * 1e3:.1f}" if "load" in phases else ""
        lines.append(f"  {mode}: ms on this side: {_milliseconds(mine)}{beside}")
        rank = summary.get("rank_phases", {}).get(mode)
        plan = summary.get("plans", {}).get(mode)
        if rank:
            lines.append(f"    on the rank: {_milliseconds(rank)}")
        if plan:
            proof = f", proof {plan['proof_seconds']:.2f} s" if plan["proof_seconds"] else ""
            lines.append(f"    plan {plan['state']}: {plan['replayed']} replayed, {plan['loaded']} loaded{proof}")
    return lines


def _milliseconds(phases: Mapping[str, float]) -> str:
    return " ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in phases.items())


def _cell(value: float | None, form: str) -> str:
    return f"{'-':>{form.split('.')[0]}}" if value is None else f"{value:{form}}"


def _times(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2f}x"


def limit_of(row: Mapping[str, Any]) -> float | None:
    """Seconds that the copies of this mode take at the least, or None when they are not what limits it."""
    limit, copies = row.get("limit_seconds"), row.get("copies", 2)
    return limit * copies if limit and copies else None


def as_fast(row: Mapping[str, Any]) -> float | None:
    """How many times as fast as stock; None for stock itself, and where stock was not timed."""
    stock = row.get("stock_seconds")
    return None if stock is None or row["mode"] in (STOCK, STOCK_FRESH) else stock / row["seconds"]


def draw(report: Mapping[str, Any], path: Path) -> None:
    """The comparison as a picture: for each model a bar for each mode, and the limit as a line.

    Raises
    ------
    ImportError
        Where matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [row for row in report["rows"] if row.get("seconds")]
    models = list(dict.fromkeys(row["model"] for row in timed))
    count = max(len(timed), 1)
    figure = Figure(figsize=(11, 1.2 + 0.42 * count + 0.7 * len(models)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    heights = [sum(row["model"] == model for row in timed) for model in models] or [1]
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for model, axis in zip(models, axes, strict=False):
        _draw_model(axis, model, [row for row in timed if row["model"] == model])
    environment = report["environment"]
    on = environment.get("gpu") or environment.get("cpu", "")
    figure.suptitle(f"One weight update: sglang-recv beside stock. {on}, {environment.get('date', '')}", fontsize=10)
    canvas.print_png(str(path))


def _draw_model(axis: Any, model: str, rows: list[Mapping[str, Any]]) -> None:
    places = range(len(rows))
    others = [row["mode"] in (STOCK, STOCK_FRESH, CHECKPOINT_ENGINE) for row in rows]
    axis.barh(places, [row["seconds"] for row in rows], color=["#9aa0a6" if grey else "#2a7de1" for grey in others])
    for place, row in zip(places, rows, strict=True):
        times = as_fast(row)
        label = f" {row['seconds']:.4f} s" + (f", {_times(times)} as fast as stock" if times is not None else "")
        axis.text(row["seconds"], place, label, va="center", fontsize=8)
    for copies in sorted({row.get("copies", 2) for row in rows} - {0}):
        limits = [limit for row in rows if row.get("copies", 2) == copies and (limit := limit_of(row)) is not None]
        if limits:
            word = "one copy" if copies == 1 else f"{copies} copies"
            style = ":" if copies == 1 else "--"
            axis.axvline(limits[0], color="#d93025", linestyle=style, linewidth=1, label=f"limit: {word}")
    axis.set_xscale("log")
    axis.set_yticks(places, [row["mode"] for row in rows], fontsize=8)
    axis.invert_yaxis()
    lowest, highest = axis.get_xlim()
    axis.set_xlim(lowest, highest * 6)  # room for the labels
    axis.set_xlabel("seconds (log scale)", fontsize=8)
    axis.set_title(f"Qwen3 {model}" if model != "tiny" else model, fontsize=9, loc="left")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, loc="lower right")
