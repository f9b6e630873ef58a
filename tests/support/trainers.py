"""The train ranks of a slime run: real processes in one gloo group, told what to do line by line."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

RANK = Path(__file__).parents[1] / "slime" / "train_rank.py"
REPLY_WITHIN = 120.0


class Trainers:
    """``with Trainers(4) as ranks`` starts them; :meth:`ask` sends one command to all and returns their answers."""

    def __init__(self, count: int, env: Mapping[str, str] | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {
            name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "TMS_", "LD_PRELOAD"))
        }
        common |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(count),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **({"SLIME_SRC": os.environ["SLIME_SRC"]} if "SLIME_SRC" in os.environ else {}),
            **(env or {}),
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(RANK)],
                env=common | {"RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        self._lines: list[queue.Queue[str]] = [queue.Queue() for _ in self.processes]
        self._readers = [
            threading.Thread(target=self._read, args=(rank,), daemon=True) for rank in range(len(self.processes))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, rank: int) -> None:
        out = self.processes[rank].stdout
        assert out is not None
        for line in out:
            if line.startswith("{"):
                self._lines[rank].put(line)
        self._lines[rank].put("")

    def __enter__(self) -> Trainers:
        self.ready = self.answers()
        return self

    def answers(self) -> list[dict[str, Any]]:
        """One answer of each rank; an empty one of a rank that has ended."""
        lines = [self._lines[rank].get(timeout=REPLY_WITHIN) for rank in range(len(self.processes))]
        return [json.loads(line) if line else {} for line in lines]

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Send a command to all ranks."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        return self.answers()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.close()  # the end of their commands
            except BrokenPipeError:
                pass  # it has ended already
        for process in self.processes:
            try:
                process.wait(timeout=0 if kind else 20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reader in self._readers:
            reader.join()
        for process in self.processes:
            if process.stdout is not None:
                process.stdout.close()
