"""MLA and block fp8 on one GPU: after every update the engine holds what a fresh load of the same weights holds.

``python tests/gpu/forms.py [--out DIR] [FORM ...]`` starts three engines for each form: two load a checkpoint, and what
they hold is the truth; one begins with dummy weights and gets those checkpoints in turn from a trainer process, in
small slots. ``--device cpu --version 0.5.13`` does the same where there is no GPU, with fp8 weights kept as on one.
Exits 1 when a form is not equal; prints a table last, and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import torch

from gpu.engine import GpuServer
from gpu.main_job import run_trainer
from sglang_recv import WeightClient
from sglang_recv.cli import shapes
from sglang_recv.cli.bench import environment
from support import forms
from support.server import EngineServer, ServerStartError, server_path

UPDATES: Final = 5
SLOT_BYTES: Final = 100_000
START_SECONDS: Final = 150.0
EXTERNAL: Final = Path(__file__).resolve().parents[1] / "support" / "external"

Digests = dict[str, str]


class FormServer(GpuServer):
    """On the GPU. The engines of a form start at the same time, so each takes little of its memory."""

    def __init__(self, folder: Path, load_format: str) -> None:
        args = ("--load-format", load_format, "--skip-tokenizer-init", *shapes.ON_GPU)
        args += ("--mem-fraction-static", "0.3", "--max-total-tokens", "4096")
        EngineServer.__init__(self, "installed", folder, args=args, receiver="vmm", ready_within=START_SECONDS)


def cpu_server(version: str, folder: Path, load_format: str) -> EngineServer:
    """On the CPU, with SGLang of one of the test environments."""
    return EngineServer(
        version,
        folder,
        receiver="vmm",
        args=("--skip-tokenizer-init", "--load-format", load_format),
        env={
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "gpu_like",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            "PYTHONPATH": server_path(EXTERNAL),
        },
        ready_within=START_SECONDS,
    )


def digests(url: str) -> Digests:
    """Of every tensor that the engine holds."""
    with WeightClient(url, deadline=60) as client:
        (rank,) = client.checksum()[url]
        return rank.tensors


def run(kind: str, device: str, version: str, root: Path) -> dict[str, Any]:
    """One form; ``error`` says why there is nothing else in the report."""

    def server(seed: int | None) -> EngineServer:
        folder = forms.folder(kind, root, seed)
        load_format = "dummy" if seed is None else "safetensors"
        return FormServer(folder, load_format) if device == "cuda" else cpu_server(version, folder, load_format)

    def truth(seed: int) -> Digests:
        with server(seed) as fresh:
            return digests(fresh.url)

    def trained() -> dict[str, Any]:
        with server(None) as engine:
            try:
                return run_trainer(Path(__file__), ["--trainer", engine.url, "--device", device, kind], saver=False)
            except RuntimeError as error:
                raise RuntimeError(f"{error}\n{engine.tail()}") from error

    begun = time.monotonic()
    try:
        with ThreadPoolExecutor(3 if device == "cuda" else 1) as pool:
            zero, one, report = pool.submit(truth, 0), pool.submit(truth, 1), pool.submit(trained)
            fresh, found = {0: zero.result(), 1: one.result()}, report.result()
    except (ServerStartError, RuntimeError) as error:
        return {"form": kind, "error": str(error), "seconds": time.monotonic() - begun}
    for step in found["steps"]:
        held, expected = step.pop("digests"), fresh[step["seed"]]
        step["different"] = sorted(n for n in held.keys() | expected.keys() if held.get(n) != expected.get(n))
    derived = [n for n in fresh[0] if n.rsplit(".", 1)[1] in ("w_kc", "w_vc", "w_scale", "w_scale_k", "w_scale_v")]
    return {
        "form": kind,
        "held": len(fresh[0]),
        "derived": derived,
        # What does not depend on the weights cannot show that they are the right ones.
        "same_for_both": sorted(name for name in fresh[0] if fresh[0][name] == fresh[1].get(name)),
        "steps": found["steps"],
        "seconds": time.monotonic() - begun,
    }


def train(url: str, kind: str, device: str) -> dict[str, Any]:
    """The trainer process: updates with two sets of weights in turn, and what the engine holds after each."""
    form = forms.FORMS[kind]
    sent = {seed: {n: t.to(device) for n, t in forms.tensors(form, seed).items()} for seed in (0, 1)}
    steps = []
    with WeightClient(url, slot_bytes=SLOT_BYTES, deadline=120) as client:
        for number in range(UPDATES):
            seed = (number + 1) % 2
            if device == "cuda":
                torch.cuda.synchronize()
            started = time.monotonic()
            report = client.update(sent[seed], f"{kind} {number}")
            seconds = time.monotonic() - started
            (plan,) = report.plans.values()
            (rank,) = client.checksum()[url]
            step = {"seed": seed, "seconds": seconds, "rounds": report.rounds, "plan": msgspec.to_builtins(plan)}
            steps.append({**step, "digests": rank.tensors})
    return {"steps": steps}


def equal(report: dict[str, Any]) -> bool:
    """True when every update left what a fresh load leaves, and something in it was replayed by a proven plan."""
    steps = report.get("steps", ())
    return (
        len(steps) == UPDATES
        and not any(step["different"] for step in steps)
        and all(step["plan"]["state"] == "proven" and step["plan"]["replayed"] for step in steps[1:])
    )


def table(reports: list[dict[str, Any]]) -> str:
    """One line for each form, and the tensors that stay with the loader."""
    lines = [
        f"{'form':10} {'equal':>5} {'held':>5} {'derived':>7} {'replayed':>8} {'loaded':>6}  state, proof, updates"
    ]
    for report in reports:
        if "error" in report:
            lines.append(f"{report['form']:10} {'no':>5} {report['error'].strip().splitlines()[-1][:200]}")
            continue
        plan = report["steps"][-1]["plan"]
        lines.append(
            f"{report['form']:10} {'yes' if equal(report) else 'NO':>5} {report['held']:5} {len(report['derived']):7} "
            f"{plan['replayed']:8} {plan['loaded']:6}  {plan['state']}, {plan['proof_seconds']:.3f} s, "
            + " ".join(f"{step['seconds']:.3f}" for step in report["steps"])
            + f" s, {report['steps'][-1]['rounds']} rounds"
        )
        lines += [f"{'':10} {kept['count']} {kept['reason']}: {', '.join(kept['names'][:2])}" for kept in plan["kept"]]
        different = {name for step in report["steps"] for name in step["different"]}
        if different:
            lines.append(f"{'':10} different: {', '.join(sorted(different)[:8])}")
        same = sorted({name.rsplit(".", 1)[1] for name in report["same_for_both"]})
        lines.append(f"{'':10} the same for both sets of weights: {', '.join(same) or 'nothing'}")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("forms", nargs="*", help=f"of {', '.join(forms.FORMS)}; by default all of them")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--version", default="0.5.13", help="of SGLang, on the CPU")
    parser.add_argument("--at-once", type=int, help="how many forms; by default 2 on a GPU and 1 on a CPU")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds after which no other form is begun")
    parser.add_argument("--trainer", metavar="URL", help="be the trainer of this engine")
    options = parser.parse_args()
    if options.trainer:
        print(json.dumps(train(options.trainer, options.forms[0], options.device)), flush=True)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    where = environment() if options.device == "cuda" else {"sglang": options.version, "device": "cpu"}
    kinds = options.forms or list(forms.FORMS)
    ends = time.monotonic() + options.budget
    reports: list[dict[str, Any]] = []

    with tempfile.TemporaryDirectory() as root:

        def within_budget(kind: str) -> dict[str, Any]:
            if time.monotonic() > ends:
                return {"form": kind, "seconds": 0.0, "error": f"not begun: {options.budget:.0f} s were over"}
            return run(kind, options.device, options.version, Path(root))

        with ThreadPoolExecutor(options.at_once or (2 if options.device == "cuda" else 1)) as pool:
            for report in pool.map(within_budget, kinds):
                reports.append(report)
                print(f"{report['form']}: {report['seconds']:.0f} s", report.get("error", "")[-4000:], flush=True)
                text = json.dumps({"environment": where, "reports": reports}, indent=1)
                (options.out / "forms.json").write_text(text)
    print(table(reports), flush=True)
    sys.exit(0 if all(map(equal, reports)) else 1)


if __name__ == "__main__":
    main()
