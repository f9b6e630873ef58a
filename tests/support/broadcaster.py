"""SGLang's own update by broadcast, from the trainer's side, on a CPU: rank 0 of a gloo group with one engine rank.

Rank 0 is a process of its own: a group lives as long as the process that made it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.server import EngineServer

GROUP = "test_broadcast"
WITHIN = timedelta(seconds=60)


class Broadcaster:
    """``with Broadcaster(server, checkpoint) as sender: sender.send(names)``. The server has one rank.

    Versions of SGLang that want it get an update session around all of them: their weights are usable after it.
    """

    def __init__(self, server: EngineServer, checkpoint: Path) -> None:
        self._server = server
        self._checkpoint = checkpoint
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Broadcaster:
        from support.server import interpreter

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._process = subprocess.Popen(
            [interpreter(self._server.version), __file__, str(port), str(self._checkpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            address = {"master_address": "127.0.0.1", "master_port": port}
            body = {**address, "rank_offset": 1, "world_size": 2, "group_name": GROUP, "backend": "gloo"}
            self._server.post("/init_weights_update_group", body)
            self._specs = json.loads(self._said())
            self._session = "/begin_weight_update" in self._server.get("/openapi.json")["paths"]
            if self._session:
                self._server.post("/begin_weight_update", {})
        except BaseException:
            self._end()
            raise
        return self

    def send(self, names: Sequence[str]) -> None:
        """One update: the engine is told what comes, and gets it."""
        dtypes, shapes = zip(*(self._specs[name] for name in names), strict=True)
        body = {"names": list(names), "dtypes": list(dtypes), "shapes": list(shapes), "group_name": GROUP}
        answer = self._pool.submit(self._server.post, "/update_weights_from_distributed", body)
        assert self._process.stdin is not None
        print(json.dumps(names), file=self._process.stdin, flush=True)
        answer.result()
        assert self._said() == "sent\n"

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._session:
                self._server.post("/end_weight_update", {})
            self._server.post("/destroy_weights_update_group", {"group_name": GROUP})
        finally:
            self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._pool.shutdown()


def main(port: str, checkpoint: str) -> None:
    """Rank 0: says what the checkpoint has, then broadcasts the tensors of each line."""
    from safetensors.torch import load_file
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    tensors = {
        name: t for file in sorted(Path(checkpoint).glob("*.safetensors")) for name, t in load_file(file).items()
    }
    # As SGLang's init_custom_process_group makes it: this process has no default group to ask.
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=WITHIN))
    group, _ = c10d._new_process_group_helper(
        2, 0, [], c10d.Backend("gloo"), c10d.PrefixStore(GROUP, store), c10d.GroupName(GROUP), timeout=WITHIN
    )
    specs = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}
    print(json.dumps(specs), flush=True)
    options = c10d.BroadcastOptions()
    options.rootRank = 0
    for line in sys.stdin:
        for name in json.loads(line):
            group.broadcast([tensors[name]], options).wait()
        print("sent", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
