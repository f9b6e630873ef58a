"""``sglang-recv demo``: a real SGLang server gets new weights from this process, through file descriptors.

The model is tiny and random, so that it runs anywhere: on the GPU when torch finds one, else on the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sglang_recv.cli import models
from sglang_recv.client.client import WeightClient
from sglang_recv.errors import EngineLostError

READY_SECONDS = 300.0
STOP_SECONDS = 20.0

# Head sizes that GPU attention kernels take; the CPU takes any.
_SHAPE = replace(models.KINDS["qwen3"], hidden=256, intermediate=512, layers=4, heads=4, kv_heads=2, head=64)
_ON_DEVICE = {
    "cpu": ("--device", "cpu", "--max-total-tokens", "4096"),
    "cuda": ("--mem-fraction-static", "0.3", "--disable-cuda-graph", "--attention-backend", "triton"),
}


def run(server_args: Sequence[str]) -> int:
    """Start a server, update it, show what happened. 0 when the engine holds and says what the new weights say."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix="sr-demo-") as root:
        old, new = (models.checkpoint("demo", seed, Path(root), shape=_SHAPE) for seed in (0, 1))
        _say(f"two random models of {sum(t.nbytes for t in models.tensors(new).values()) / 1e6:.1f} MB, seeds 0 and 1")
        _say(f"starting an SGLang server on the {device.upper()} with --weight-receiver vmm and seed 0's weights ...")
        with (
            _server(old, Path(root), [*_ON_DEVICE[device], *server_args]) as url,
            WeightClient(url, slot_bytes=1 << 20) as client,
        ):
            before = _generate(url)
            version = _get(url, "/model_info")["weight_version"]
            _say("sending the weights of seed 1 from this process ...")
            tensors = {name: tensor.to(device) for name, tensor in models.tensors(new).items()}
            report = client.update(tensors, "seed-1", pause="abort")
            after = _generate(url)
            served = _get(url, "/model_info")["weight_version"]
            ours = client.checksum()[url]
            kind = client.status()[url][0].memory_kind
            _say("letting the server read the same weights from disk, to compare ...")
            _post(url, "/update_weights_from_disk", {"model_path": str(new)})
            match = all(a.tensors == b.tensors for a, b in zip(ours, client.checksum()[url], strict=True))
            match = match and _generate(url) == after != before
    phases = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in report.phases.items())
    print()
    print(f"sent            {report.tensors} tensors, {report.nbytes} bytes, in {report.rounds} rounds")
    print(f"mode            {report.mode} ({kind}), {report.staging_bytes} bytes of staging, all given back")
    print(f"time            {report.seconds * 1e3:.1f} ms (ms by phase: {phases})")
    print(f"weight version  {version} -> {served}")
    print(f"tokens before   {before}")
    print(f"tokens after    {after}")
    print(f"bytes match     {'yes' if match else 'NO'}, compared with the same weights read from disk")
    return 0 if match and served == "seed-1" else 1


def _say(text: str) -> None:
    print(f"demo: {text}", flush=True)


@contextmanager
def _server(model: Path, root: Path, args: Sequence[str]) -> Iterator[str]:
    """A server that ends with the block; its log is shown when it fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--skip-server-warmup", "--weight-receiver", "vmm", *args]
    log = root / "server.log"
    environment = os.environ | {"SGLANG_RECV_DIR": str(root / "s")}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        _wait_ready(process, url, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + READY_SECONDS
    while True:
        try:
            _get(url, "/model_info")
            return
        except (OSError, ValueError):
            pass  # not there yet
        try:
            code: int | None = process.wait(0.2)
        except subprocess.TimeoutExpired:
            code = None
        if code is not None or time.monotonic() > end:
            why = f"exited with {code}" if code is not None else f"was not ready within {READY_SECONDS:.0f} s"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise EngineLostError(f"the server {why}; the end of its log:\n{tail}", fix="see the log")


def _generate(url: str) -> list[int]:
    greedy = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    request = {"input_ids": [256, *b"The weights of this model are"], "sampling_params": greedy}
    tokens: list[int] = _post(url, "/generate", request)["output_ids"]
    return tokens


def _get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=30) as response:
        return json.load(response)


def _post(url: str, path: str, body: dict[str, Any]) -> Any:
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + path, data=data, headers=kind), timeout=300) as response:
        return json.load(response)
