"""``sglang-recv bench``: SGLang's own ways to update weights and ours, on the same engine, one after the other.

For each model an engine of its own takes stock's first update. A second one takes ours (recorded, proven, replayed),
then stock and ours in turn, then what else there is; trainers are processes of their own (bench_trainer).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

import torch

from sglang_recv.cli import bench_report, shapes
from sglang_recv.cli.bench_others import no_checkpoint_engine
from sglang_recv.cli.bench_report import CHECKPOINT_ENGINE, Found
from sglang_recv.cli.bench_trainer import SAVER
from sglang_recv.cli.server import LOG_FIX, Server, post, serve, tail
from sglang_recv.errors import DeadlineError, EngineLostError, RecvError, UnsupportedError

#: What is timed when no model is named, by kind of device.
MODELS: Final = {"cpu": ("tiny",), "cuda": ("0.6b", "8b")}
REPORT: Final = "bench.json"
_READY_SECONDS: Final = 400.0  # of an engine with dummy weights of 61 GB
#: checkpoint-engine waits without a bound for an engine that has failed.
_OTHERS_SECONDS: Final = 300.0
_PACKAGES: Final = (
    *("sglang", "torch", "triton", "torch_memory_saver", "checkpoint-engine", "cuda-bindings", "pyzmq", "msgspec"),
)


@dataclass(frozen=True)
class Options:
    """What is timed, and how.

    Parameters
    ----------
    models
        Keys of :data:`sglang_recv.cli.shapes.SHAPES`; none for those of the device.
    laps
        Updates of each mode in turn with stock.
    slots, slot_mib
        As WeightClient's ``slots`` and ``slot_bytes``, in MiB; None for its own choice.
    saver
        False to leave out torch_memory_saver, on both sides.
    out
        Where the report and the picture go.
    seconds
        After which the bench ends with what it has; None for no limit.
    server_args
        More arguments for SGLang's server.
    """

    models: tuple[str, ...]
    laps: int
    slots: int | None
    slot_mib: int | None
    saver: bool
    out: Path
    seconds: float | None
    server_args: tuple[str, ...]


class Stopped(BaseException):
    """The bench must end now; not an Exception, so that nothing takes it for a failure of what it was doing."""


def run(options: Options) -> int:
    """Time every model; 0 when all were timed and the engines held the same bytes after every way."""
    unknown = [model for model in options.models if model not in shapes.SHAPES]
    if unknown or options.laps < 1:
        raise UnsupportedError(
            f"models {unknown}, {options.laps} laps",
            fix=f"use models out of {', '.join(shapes.SHAPES)}, and at least one lap",
        )
    if util.find_spec("sglang") is None:
        raise UnsupportedError("SGLang is not installed in this Python", fix="pip install 'sglang-recv[engine,cuda]'")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["sglang-recv", *sys.argv[1:]])
    facts = environment()
    end = None if options.seconds is None else time.monotonic() + options.seconds
    found: list[Found] = []
    report: dict[str, Any] = {}
    stopped = ""
    for model in options.models or MODELS[device]:
        print(f"bench: {model} on the {device.upper()}, {options.laps} laps ...", flush=True)
        found.append(Found(model))
        try:
            with _interruptible(None if end is None else max(end - time.monotonic(), 0.001)):
                _time(found[-1], device, options)
        except RecvError as error:
            found[-1].error = error.message
            print(error, file=sys.stderr)
        except (Stopped, KeyboardInterrupt) as error:
            stopped = found[-1].error = str(error) or "interrupted"
        report = bench_report.write(options.out / REPORT, command, facts, found)
        print(bench_report.table(report, model), flush=True)
        if stopped:
            break
    picture(report, options.out)
    for one in found:
        if one.wrong:
            print(f"bench: {one.model}: {one.wrong}", file=sys.stderr)
    return 1 if stopped or any(one.wrong for one in found) else 0


def redraw(path: Path) -> int:
    """Print the tables of a report again, and draw it beside it."""
    try:
        report = json.loads(path.read_text())
        tables = [bench_report.table(report, one["model"]) for one in report["models"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedError(
            f"{path} is not a report of this bench: {type(error).__name__}: {error}", fix=f"name a {REPORT}"
        ) from error
    print("\n".join(tables))
    return 0 if picture(report, path.parent, path.stem) else 1


def picture(report: Mapping[str, Any], folder: Path, stem: str = Path(REPORT).stem) -> bool:
    """Draw the report; without matplotlib say how to do that later. True when it was drawn."""
    target = folder / f"{stem}.png"
    try:
        bench_report.draw(report, target)
    except ImportError as error:
        print(
            f"bench: no picture, since matplotlib cannot be imported ({error}). Where it can: "
            f"pip install 'sglang-recv[bench]' && sglang-recv bench --draw {stem}.json"
        )
        return False
    print(f"bench: {target}")
    return True


def _time(found: Found, device: str, options: Options) -> None:
    """Both engines of one model."""
    saver = options.saver and device == "cuda" and util.find_spec("torch_memory_saver") is not None
    if not saver:
        where = "needs a GPU" if device == "cpu" else "--no-saver, or torch_memory_saver is not installed"
        found.left_out[SAVER.name] = where
    args = [*shapes.engine_args(found.model, device), *(("--enable-memory-saver",) if saver else ())]
    args += options.server_args
    with _engine(found.model, args) as server:
        _train(server, found, "stock", device, options)
    with _engine(found.model, args) as server:
        _train(server, found, "turns", device, options)
        _train(server, found, "pool", device, options)
        if device == "cuda":
            # SGLang's own test: what a snapshot had must be there again after everything was overwritten.
            _check(server, "snapshot")
            _check(server, "reset_tensors")
            _train(server, found, "saver" if saver else "once", device, options)
            found.compare = bool(_check(server, "compare").get("success"))
        reason = no_checkpoint_engine(device)
        if reason is not None:
            found.left_out[CHECKPOINT_ENGINE] = reason
            return
        # Last, since an engine in which it fails may be stuck.
        try:
            _train(server, found, CHECKPOINT_ENGINE, device, options, within=_OTHERS_SECONDS)
        except RecvError as error:
            found.failed.setdefault(CHECKPOINT_ENGINE, error.message)  # unless it has said why


@contextlib.contextmanager
def _engine(model: str, args: Sequence[str]) -> Iterator[Server]:
    """A fresh engine with dummy weights."""
    with tempfile.TemporaryDirectory(prefix="sr-bench-") as root:
        folder = shapes.folder(model, Path(root))
        with serve(folder, Path(root), args, ready_seconds=_READY_SECONDS) as server:
            yield server


def _check(server: Server, action: str) -> dict[str, Any]:
    """SGLang's /weights_checker."""
    answer = post(f"{server.url}/weights_checker", {"action": action}, timeout=400)
    return answer if isinstance(answer, dict) else {}


def _train(
    server: Server, found: Found, program: str, device: str, options: Options, *, within: float | None = None
) -> None:
    """Run one program of bench_trainer to its end, and keep what it tells.

    Raises
    ------
    EngineLostError
        When it or the server fails, with the end of its log.
    DeadlineError
        When it takes longer than ``within`` seconds.
    """
    command = [sys.executable, "-m", "sglang_recv.cli.bench_trainer", server.url, found.model, program]
    command += ["--device", device, "--laps", str(options.laps)]
    if options.slots is not None:
        command += ["--slots", str(options.slots)]
    if options.slot_mib is not None:
        command += ["--slot-mib", str(options.slot_mib)]
    added = saver_environment() if program == "saver" else {}
    log = server.log.with_name(f"trainer-{program}.log")
    with log.open("wb") as err:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=err, env=os.environ | added, text=True, start_new_session=True
        )
    with _killed_after(process, within) as late:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"event": '):
                found.take(json.loads(line))
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if late():
        raise DeadlineError(f"the trainer ({program}) was not done within {within:.0f} s", fix="see the engine's log")
    server.check_alive()
    if process.returncode:
        said = (*tail(log), "the end of the server's log:", *server.tail())
        raise EngineLostError(f"the trainer ({program}) exited with {process.returncode}", fix=LOG_FIX, details=said)


@contextlib.contextmanager
def _killed_after(process: subprocess.Popen[str], seconds: float | None) -> Iterator[Callable[[], bool]]:
    """End the process and its group with the block, after so many seconds, or when the process itself ends: what it
    leaves behind may hold its output open.

    It leads its group, and is not reaped inside: its id, which is its group's, could be another's then. What is yielded
    says whether its time was over.
    """
    fired = threading.Event()

    def end_with_it() -> None:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        os.killpg(process.pid, signal.SIGKILL)

    def kill() -> None:
        fired.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill) if seconds is not None else None
    if timer is not None:
        timer.start()
    watcher = threading.Thread(target=end_with_it, name="sglang-recv-bench")
    watcher.start()
    try:
        yield fired.is_set
    finally:
        if timer is not None:
            timer.cancel()
            timer.join()
        os.killpg(process.pid, signal.SIGKILL)
        watcher.join()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def _interruptible(seconds: float | None) -> Iterator[None]:
    """Raise :class:`Stopped` on SIGTERM, and after so many seconds, so that servers end and what is known is kept."""
    reasons = {
        signal.SIGTERM: "ended by SIGTERM",
        signal.SIGINT: "interrupted",
        signal.SIGHUP: "its terminal is gone",
        signal.SIGALRM: "out of time",
    }
    before = {}

    def stop(number: int, _frame: object) -> None:
        for known in reasons:
            signal.signal(known, signal.SIG_IGN)  # once: the end must not be interrupted
        raise Stopped(reasons[signal.Signals(number)])

    for number in reasons:
        before[number] = signal.signal(number, stop)
    if seconds is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def saver_environment() -> dict[str, str]:
    """What a trainer is started with under torch_memory_saver's preload, as slime does.

    Raises
    ------
    UnsupportedError
        When it has no library for this torch.
    """
    import torch_memory_saver

    site = Path(torch_memory_saver.__file__).parents[1]
    major = str(torch.version.cuda).split(".")[0]
    for name in (f"preload_cu{major}", "preload"):
        found = site / f"torch_memory_saver_hook_mode_{name}.abi3.so"
        if found.exists():
            return {"LD_PRELOAD": str(found), "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    raise UnsupportedError(
        f"no preload library of torch_memory_saver for CUDA {major} in {site}", fix="install torch_memory_saver for it"
    )


def environment() -> dict[str, str]:
    """What the figures are taken on. The host's name is nobody's business."""
    found = {"date": datetime.date.today().isoformat(), "python": platform.python_version()}
    if torch.cuda.is_available():
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError):
            out = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
            found["gpu"] = out.splitlines()[0] if out else torch.cuda.get_device_name()
    found["cpu"] = f"{_cpu()}, {os.cpu_count()} cores"
    found["sglang_recv"] = metadata.version("sglang-recv")
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
