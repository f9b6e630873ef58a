"""An SGLang server with a weight receiver, for as long as a command needs it."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sglang_recv.errors import EngineLostError

#: Below the range that the kernel gives to outgoing connections: a port found free here is still free 10 s later, when
#: the server binds it, unless another server picked the same one. SGLang also needs the port 10,000 above it.
_PORTS: Final = range(20000, 32000)

READY_SECONDS: Final = 300.0
STOP_SECONDS: Final = 20.0
LOG_FIX: Final = "look at its log, whose end is above"

# Whatever proxy the environment names, it is not for the loopback.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str, *, timeout: float = 30.0) -> Any:
    """The JSON that a GET is answered with."""
    with _DIRECT.open(url, timeout=timeout) as response:
        return json.load(response)


def post(url: str, body: Mapping[str, Any], *, timeout: float = 300.0) -> Any:
    """The answer to a POST: parsed from JSON, or as text.

    Raises
    ------
    EngineLostError
        With what it says, when it is an error.
    """
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    try:
        with _DIRECT.open(urllib.request.Request(url, data=data, headers=kind), timeout=timeout) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        with error:
            said = error.read().decode(errors="replace")[:1000]
        raise EngineLostError(f"{url} answered {error.code}: {said}", fix="look at the engine's log") from None
    except OSError as error:  # urllib's own, too
        raise EngineLostError(f"{url} does not answer: {error}", fix="look at the engine's log") from None
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")


def has_ended(pid: int, within: float) -> bool:
    """Whether a child ends within some seconds. It stays a zombie, so that its id, and its group's, stays ours."""
    pidfd = os.pidfd_open(pid)
    try:
        return bool(select.select([pidfd], [], [], within)[0])
    finally:
        os.close(pidfd)


def tail(log: Path, lines: int = 30) -> tuple[str, ...]:
    """The last lines of a log."""
    return tuple(log.read_text(errors="replace").splitlines()[-lines:])


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> tuple[str, ...]:
        """The last lines of its log."""
        return tail(self.log)

    def check_alive(self) -> None:
        """Raise an EngineLostError with the end of the log when its process has ended."""
        if has_ended(self.process.pid, 0):
            # Not poll(): that would reap it, and its group could not be ended by its id any more.
            status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            assert status is not None
            code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
            raise EngineLostError(f"the server exited with {code}", fix=LOG_FIX, details=self.tail())


@contextmanager
def serve(model: Path, root: Path, args: Sequence[str], *, ready_seconds: float = READY_SECONDS) -> Iterator[Server]:
    """A server on the loopback that ends with the block.

    Parameters
    ----------
    model
        The folder that it starts from.
    root
        Where its log and its sockets are made; with a short path, since a Unix socket's may have 107 bytes.
    args
        More arguments for SGLang.

    Raises
    ------
    EngineLostError
        With the end of its log, when it ends or is not ready within ``ready_seconds``.
    """
    held, port = hold_port()
    held.close()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--skip-server-warmup", "--weight-receiver", "vmm", *args]
    environment = os.environ | {
        "SGLANG_RECV_DIR": str(root / "s"),
        # /health would run a forward, which compiles kernels for a minute on a GPU.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "PYTHONUNBUFFERED": "1",
    }
    log = root / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_ready(server, ready_seconds)
        yield server
    finally:
        try:
            if not has_ended(process.pid, 0):
                process.send_signal(signal.SIGTERM)
                has_ended(process.pid, STOP_SECONDS)
        finally:  # also when somebody is impatient
            # Whoever is left: the server, or schedulers that hang or lost their parent. It is reaped last, see
            # has_ended.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_ready(server: Server, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            get(f"{server.url}/model_info")
            return
        except (OSError, ValueError):
            pass  # not there yet
        has_ended(server.process.pid, 0.2)
        server.check_alive()
        if time.monotonic() > end:
            raise EngineLostError(
                f"the server was not ready within {seconds:.0f} s", fix=LOG_FIX, details=server.tail()
            )


def hold_port() -> tuple[socket.socket, int]:
    """A listening socket on a free loopback port; close it just before a server starts there.

    Raises
    ------
    OSError
        When 50 ports in a row are taken.
    """
    for port in random.SystemRandom().sample(_PORTS, 50):
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            held.bind(("127.0.0.1", port))
            held.listen(1)
        except OSError:
            held.close()
            continue
        return held, port
    raise OSError("50 loopback ports in a row are taken")
