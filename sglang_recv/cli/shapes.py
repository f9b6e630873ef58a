"""Shapes of real models, and a tiny one, with random weights: what a trainer holds, and what an engine starts from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from sglang_recv.cli.models import KINDS, Shape, config, names
from sglang_recv.client.pool import ExportablePool, exportable_pool

_DTYPE: Final = torch.bfloat16
#: torch allocates in multiples of so many bytes.
_UNIT: Final = 512

SHAPES: Final[dict[str, Shape]] = {
    # Head sizes that GPU attention kernels take; the CPU takes any.
    "tiny": replace(KINDS["qwen3"], hidden=256, intermediate=512, layers=4, heads=4, kv_heads=2, head=64),
    "0.6b": Shape(
        "Qwen3ForCausalLM",
        "qwen3",
        vocabulary=151936,
        hidden=1024,
        intermediate=3072,
        layers=28,
        heads=16,
        kv_heads=8,
        head=128,
        positions=40960,
        tied=True,
    ),
    "8b": Shape(
        "Qwen3ForCausalLM",
        "qwen3",
        vocabulary=151936,
        hidden=4096,
        intermediate=12288,
        layers=36,
        heads=32,
        kv_heads=8,
        head=128,
        positions=40960,
    ),
    "30b": Shape(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        vocabulary=151936,
        hidden=2048,
        intermediate=6144,
        layers=48,
        heads=32,
        kv_heads=4,
        head=128,
        positions=40960,
        experts=128,
        experts_per_token=8,
        expert_intermediate=768,
    ),
}

#: Fraction of a 141 GB GPU for the engine (weights and KV) beside a trainer that holds the weights once more.
_MEMORY_FRACTION: Final = {"tiny": "0.3", "0.6b": "0.3", "8b": "0.35", "30b": "0.46"}

ON_CPU: Final = ("--device", "cpu", "--max-total-tokens", "4096")
#: Nothing here asks for tokens, so nothing need be compiled for them.
ON_GPU: Final = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-cuda-graph", "--disable-piecewise-cuda-graph"),
)


def engine_args(model: str, device: str) -> tuple[str, ...]:
    """SGLang's arguments for an engine of ``model`` with dummy weights and no tokenizer, on ``cuda`` or ``cpu``."""
    dummy = ("--load-format", "dummy", "--skip-tokenizer-init")
    if device == "cpu":
        return (*dummy, *ON_CPU)
    return (*dummy, *ON_GPU, "--mem-fraction-static", _MEMORY_FRACTION[model])


def folder(model: str, root: Path) -> Path:
    """A folder with a config only; the engine makes its own dummy weights."""
    path = root / model
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config(SHAPES[model])))
    return path


def weights(model: str, seed: int, device: torch.device, pool: ExportablePool | None = None) -> dict[str, torch.Tensor]:
    """Random bfloat16 weights, in ``pool`` if there is one.

    The same seed gives the same bytes in every process with the same GPU and torch.
    """
    generator = torch.Generator(device).manual_seed(seed)
    found = {}
    for name, size in names(SHAPES[model]):
        empty = torch.empty(size, dtype=_DTYPE, device=device) if pool is None else pool.empty(size, _DTYPE)
        found[name] = empty.normal_(0, 0.02, generator=generator)
    return found


def pool(model: str, device: torch.device) -> ExportablePool:
    """Room for the weights of ``model``."""
    sizes = (torch.Size(size).numel() * _DTYPE.itemsize for _, size in names(SHAPES[model]))
    return exportable_pool(sum(-(-size // _UNIT) * _UNIT for size in sizes), device)
