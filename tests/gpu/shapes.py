"""Real shapes with random weights: what a trainer holds, and a folder that an engine starts from with dummy weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from support.models import Shape, config, names

SHAPES: dict[str, Shape] = {
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
MEMORY_FRACTION = {"0.6b": "0.3", "8b": "0.35", "30b": "0.46"}


def folder(model: str, root: Path) -> Path:
    """A folder with a config only; the engine makes its own dummy weights."""
    path = root / model
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config(SHAPES[model])))
    return path


def weights(model: str, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random bfloat16 weights; the same seed gives the same bytes in every process with the same GPU and torch."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
        for name, size in names(SHAPES[model])
    }
