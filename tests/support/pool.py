"""Servers that test modules share: a start costs 10 to 17 seconds, and two cores carry two servers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.models import checkpoint
from support.server import EngineServer, Entry

LIVE_SERVERS = 2
"""How many are kept alive at once."""

_Key = tuple[object, ...]


class EnginePool:
    """Hands out running servers by what they are; starting one too many stops the one unused for longest.

    A shared server is as the test before left it: undo what you change, or :meth:`discard` it. One that has died is
    started again.
    """

    def __init__(self, checkpoints: Path, logs: Path) -> None:
        self.checkpoints = checkpoints
        self.logs = logs
        self._live: OrderedDict[_Key, EngineServer] = OrderedDict()

    def __call__(
        self,
        version: str,
        kind: str = "qwen3",
        *,
        tp: int = 1,
        seed: int = 0,
        receiver: str | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        entry: Entry = "launch_server",
    ) -> EngineServer:
        """The running server that matches exactly, started if there is none."""
        key = (version, kind, tp, seed, receiver, tuple(args), tuple(sorted((env or {}).items())), entry)
        server = self._live.pop(key, None)
        if server is not None and not server.alive():
            server.stop()
            server = None
        if server is None:
            while len(self._live) >= LIVE_SERVERS:
                self._live.popitem(last=False)[1].stop()
            server = EngineServer(
                version,
                checkpoint(kind, seed, self.checkpoints),
                tp=tp,
                args=args,
                env=env,
                receiver=receiver,
                entry=entry,
                log_dir=self.logs,
            )
            server.start()
        self._live[key] = server
        return server

    @property
    def live(self) -> tuple[EngineServer, ...]:
        """The servers that run now, the one used last at the end."""
        return tuple(self._live.values())

    def discard(self, server: EngineServer) -> None:
        """Stop a server that a test has spoilt; whoever asks next gets a fresh one."""
        for key, known in list(self._live.items()):
            if known is server:
                del self._live[key]
        server.stop()

    def close(self) -> None:
        """Stop all of them."""
        while self._live:
            self._live.popitem()[1].stop()
