"""A real SGLang engine on this machine's GPU, with dummy weights of a real shape and no tokenizer."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_recv.cli import shapes
from support.server import EngineServer


class GpuServer(EngineServer):
    """As :class:`EngineServer`, but on the GPU, in the Python that runs this."""

    def __init__(self, model: str, root: Path, *, args: Sequence[str] = (), receiver: str | None = "vmm") -> None:
        super().__init__(
            "installed",
            shapes.folder(model, root),
            args=(*shapes.engine_args(model, "cuda"), *args),
            receiver=receiver,
            ready_within=400,
        )

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model)]
        command += ["--skip-server-warmup", "--host", "127.0.0.1", "--port", str(self._port)]
        if self.receiver is not None:
            command += ["--weight-receiver", self.receiver]
        return [*command, *self.args]

    def _environment(self) -> dict[str, str]:
        # /health would run a forward, which compiles kernels for a minute; nothing here asks for one.
        return os.environ | {
            "SGLANG_RECV_DIR": str(self.socket_dir),
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            "PYTHONUNBUFFERED": "1",
            **self.env,
        }
