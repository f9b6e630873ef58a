"""``sglang-recv demo``: a real SGLang server gets new weights from this process, through file descriptors.

The model is tiny and random, so that it runs anywhere: on the GPU when torch finds one, else on the CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_recv.cli import models, shapes
from sglang_recv.cli.server import get, post, serve
from sglang_recv.client.client import WeightClient

_ON_DEVICE = {
    "cpu": shapes.ON_CPU,
    "cuda": ("--mem-fraction-static", "0.3", "--disable-cuda-graph", "--attention-backend", "triton"),
}


def run(server_args: Sequence[str]) -> int:
    """Start a server, update it, show what happened. 0 when the engine holds and says what the new weights say."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix="sr-demo-") as root:
        old, new = (models.checkpoint("demo", seed, Path(root), shape=shapes.SHAPES["tiny"]) for seed in (0, 1))
        _say(f"two random models of {sum(t.nbytes for t in models.tensors(new).values()) / 1e6:.1f} MB, seeds 0 and 1")
        _say(f"starting an SGLang server on the {device.upper()} with --weight-receiver vmm and seed 0's weights ...")
        with (
            serve(old, Path(root), [*_ON_DEVICE[device], *server_args]) as server,
            WeightClient(server.url, slot_bytes=1 << 20) as client,
        ):
            url = server.url
            before = _generate(url)
            version = get(f"{url}/model_info")["weight_version"]
            _say("sending the weights of seed 1 from this process ...")
            tensors = {name: tensor.to(device) for name, tensor in models.tensors(new).items()}
            report = client.update(tensors, "seed-1", pause="abort")
            after = _generate(url)
            served = get(f"{url}/model_info")["weight_version"]
            ours = client.checksum()[url]
            kind = client.status()[url][0].memory_kind
            _say("letting the server read the same weights from disk, to compare ...")
            post(f"{url}/update_weights_from_disk", {"model_path": str(new)})
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


def _generate(url: str) -> list[int]:
    greedy = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    request = {"input_ids": [256, *b"The weights of this model are"], "sampling_params": greedy}
    tokens: list[int] = post(f"{url}/generate", request)["output_ids"]
    return tokens
