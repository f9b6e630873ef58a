"""A real SGLang server on a CPU, as a context manager.

Every server is a session (process group) of its own with a log file, and its end is certain: SIGTERM, and SIGKILL for
the group after a bound. Of sglang_recv this knows only the flag and the variable that turn it on.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from sglang_recv.cli.server import has_ended, hold_port
from support.waiting import wait_until

VERSIONS = ("0.5.23", "0.5.13")
"""The SGLang releases that the tests run on, the newest first."""

REPOSITORY = Path(__file__).resolve().parents[2]
CPU_SHIM = Path(__file__).resolve().parent / "cpu_shim"

Entry = Literal["launch_server", "serve"]

# A start takes 10-17 s on two cores; the rest is for a machine that is busy with other things.
READY_WITHIN = 120.0
# SGLang waits 5 s for its requests to drain.
TERM_WITHIN = 20.0
KILL_WITHIN = 10.0

_CLASH = re.compile(r"address already in use", re.IGNORECASE)
_START_TRIES = 3


class ServerStartError(RuntimeError):
    """The server died or wasn't ready in time. The message ends with its log."""


class RequestError(RuntimeError):
    """The server answered with an error status."""

    def __init__(self, method: str, url: str, status: int, body: Any) -> None:
        super().__init__(f"{method} {url}: {status}: {body}")
        self.status = status
        self.body = body


def server_path(*more: Path) -> str:
    """What servers import from: this checkout, also where the environments hold another one, and ``more``."""
    return os.pathsep.join(map(str, (CPU_SHIM, REPOSITORY, *more)))


def interpreter(version: str) -> Path:
    """The Python of a version's environment (``SGLANG_RECV_VENVS``, or ``.venv`` of the repository)."""
    home = Path(os.environ.get("SGLANG_RECV_VENVS") or REPOSITORY / ".venv")
    python = home / f"sglang-{version}" / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"no {python}: run scripts/environments.py, or set SGLANG_RECV_VENVS")
    return python


class EngineServer:
    """One server process tree; ``with EngineServer(...) as server`` starts it and waits until it answers.

    Parameters
    ----------
    version
        One of :data:`VERSIONS`.
    model
        A checkpoint folder, see :func:`support.models.checkpoint`.
    tp
        Tensor parallel ranks, one scheduler process each, each bound to a core of its own.
    args
        More command line arguments, after the usual ones, so that they win.
    env
        More environment variables; ``SGLANG_*`` variables of the caller's own environment are not handed down.
    receiver
        The value of ``--weight-receiver``; None leaves the flag out.
    entry
        ``launch_server`` runs the module, ``serve`` the ``sglang`` command: they load plugins in different places.
    log_dir
        Where the log goes; by default the server's own temporary folder, which ends with it.
    ready_within
        Seconds until ``/model_info`` must answer.
    spins
        Leave ``--sleep-on-idle`` out: an idle scheduler then keeps a core busy, as SGLang does unless told otherwise.
    """

    def __init__(
        self,
        version: str,
        model: Path,
        *,
        tp: int = 1,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        receiver: str | None = None,
        entry: Entry = "launch_server",
        log_dir: Path | None = None,
        ready_within: float = READY_WITHIN,
        spins: bool = False,
    ) -> None:
        self.version = version
        self.model = model
        self.tp = tp
        self.args = tuple(args)
        self.env = dict(env or {})
        self.receiver = receiver
        self.entry = entry
        self.ready_within = ready_within
        self.spins = spins
        self._log_dir = log_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._log: Path | None = None
        self._port = 0

    # -- life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> EngineServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it answers; on failure nothing is left running.

        Raises
        ------
        ServerStartError
            With the end of the log.
        """
        if self._process is not None:
            raise RuntimeError(f"{self} is running already")
        for attempt in range(1, _START_TRIES + 1):
            try:
                self._start_once()
                return
            except BaseException as error:
                report = f"{self} did not start: {error}\n{self.tail()}"
                clash = _CLASH.search(self.log_text()) is not None
                self.stop()
                if not isinstance(error, (TimeoutError, ServerStartError)):
                    raise
                if not clash or attempt == _START_TRIES:
                    raise ServerStartError(report) from None

    def _start_once(self) -> None:
        # Short on purpose: a Unix socket's path may have 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="sr-"))
        (self._folder / "recv").mkdir(mode=0o700)
        held, self._port = hold_port()
        log_dir = self._log_dir or self._folder
        log_dir.mkdir(parents=True, exist_ok=True)
        self._log = log_dir / f"server-{self.version}-tp{self.tp}-{self._port}.log"
        with held, self._log.open("wb") as log:
            # From here until the server binds it, the port is held only by the range it was taken from.
            held.close()
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                cwd=self._folder,
                start_new_session=True,
            )
        wait_until(self._is_ready, self.ready_within, f"{self.url}/model_info answers", interval=0.1)

    def _command(self) -> list[str]:
        python = interpreter(self.version)
        start = {
            "launch_server": [str(python), "-m", "sglang.launch_server"],
            "serve": [str(python.parent / "sglang"), "serve"],
        }[self.entry]
        command = [*start, "--model-path", str(self.model), "--device", "cpu", "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--max-total-tokens", "4096", "--skip-server-warmup"]
        if not self.spins:
            command.append("--sleep-on-idle")
        if self.tp > 1:
            command += ["--tp", str(self.tp)]
        if self.receiver is not None:
            command += ["--weight-receiver", self.receiver]
        return [*command, *self.args]

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
        environment |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_RECV_DIR": str(self.socket_dir),
            # A compiled helper would trip over the stand-in for triton.
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": server_path(),
            "PYTHONUNBUFFERED": "1",
        }
        if self.tp > 1:
            # SGLang asserts without a core for each rank.
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(self.tp))
        return environment | self.env

    def _is_ready(self) -> bool:
        if not self.alive():
            raise ServerStartError(f"its process ended while it started ({' '.join(self._command())})")
        try:
            self.get("/model_info", timeout=5)
        except (OSError, RequestError, http.client.HTTPException):
            return False
        return True

    def alive(self) -> bool:
        """Whether the main process still runs."""
        return self._process is not None and not has_ended(self._process.pid, 0)

    def stop(self, *, within: float = TERM_WITHIN) -> None:
        """End the whole process tree: SIGTERM, then SIGKILL after ``within`` seconds. May be called again."""
        process, self._process = self._process, None
        try:
            if process is not None:
                _end_session(process, within)
        finally:
            folder, self._folder = self._folder, None
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    # -- what it is ---------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        parts = [f"SGLang {self.version}", f"TP {self.tp}", self.model.name, *self.args]
        if self.receiver is not None:
            parts.append(f"receiver {self.receiver}")
        return f"<{', '.join(parts)}, port {self._port}>"

    @property
    def url(self) -> str:
        """Its address, without a slash at the end."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def socket_dir(self) -> Path:
        """The ``SGLANG_RECV_DIR`` of this server, its own."""
        if self._folder is None:
            raise RuntimeError(f"{self} is not running")
        return Path(self.env.get("SGLANG_RECV_DIR", self._folder / "recv"))

    @property
    def pid(self) -> int:
        """The main process: HTTP server and tokenizer."""
        if self._process is None:
            raise RuntimeError(f"{self} is not running")
        return self._process.pid

    def pids(self) -> list[int]:
        """The scheduler processes, in the order of their TP ranks."""
        ranked = []
        for pid, title in self.processes().items():
            if title.startswith("sglang::scheduler"):
                rank = re.search(r"_TP(\d+)", title)
                ranked.append((int(rank[1]) if rank else 0, pid))
        return [pid for _, pid in sorted(ranked)]

    def processes(self) -> dict[int, str]:
        """Every live process of the server's session, with its title."""
        return _session(self.pid)

    def log_text(self) -> str:
        """Everything that the server has said so far."""
        return self._log.read_text(errors="replace") if self._log is not None and self._log.exists() else ""

    def tail(self, lines: int = 60) -> str:
        """The end of the log, with a heading."""
        return "\n".join([f"--- the end of the log of {self} ---", *self.log_text().splitlines()[-lines:]])

    # -- talking to it ------------------------------------------------------------------------------------------------

    def get(self, path: str, *, timeout: float = 30) -> Any:
        """GET; the answer parsed from JSON, or as text. Raises :class:`RequestError` on an error status."""
        return self._request("GET", path, None, timeout)

    def post(self, path: str, json: Any = None, *, timeout: float = 60) -> Any:
        """POST a JSON body; answers as :meth:`get` does."""
        return self._request("POST", path, {} if json is None else json, timeout)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 12,
        *,
        return_logprob: bool = False,
        timeout: float = 60,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Greedy tokens for a text or for token ids: SGLang's own answer, with ``output_ids`` and ``meta_info``.

        An end token doesn't end it, so that the number of tokens is known. ``sampling`` overrides its parameters.
        """
        parameters = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True} | sampling
        body = {"sampling_params": parameters, "return_logprob": return_logprob}
        body |= {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        answer = self.post("/generate", body, timeout=timeout)
        assert isinstance(answer, dict)
        return answer

    def _request(self, method: str, path: str, body: Any, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with _DIRECT.open(request, timeout=timeout) as answer:
                return _parse(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                raise RequestError(method, self.url + path, error.code, _parse(error.read())) from None


# Whatever proxy the environment names, it is not for the loopback.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def _end_session(process: subprocess.Popen[bytes], within: float) -> None:
    """End a process and its session.

    The leader is reaped last: as long as it is a zombie its id can't be given to anybody else's process group.
    """
    try:
        if not has_ended(process.pid, 0):
            process.send_signal(signal.SIGTERM)
            has_ended(process.pid, within)
        # Whoever is left: schedulers that froze or lost their parent.
        os.killpg(process.pid, signal.SIGKILL)
        wait_until(lambda: not _session(process.pid), KILL_WITHIN, f"the session of {process.pid} has ended")
    finally:
        process.wait(KILL_WITHIN)


def _session(leader: int) -> dict[int, str]:
    """The live processes of a session, by id, with their command lines."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # After the name in brackets, which may contain anything: state, parent, group, session.
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            # It ended while we looked.
            continue
        if int(session) == leader and state not in "ZX":
            found[int(entry.name)] = title
    return found
