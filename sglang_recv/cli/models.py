"""Tiny random checkpoints in Hugging Face's layout, written without transformers.

Written by hand because importing transformers costs seconds, and because the names below are then the ones that the
hub's checkpoints have (transformers 5 fuses a MoE layer's experts in memory). ``tests/engine/test_harness.py`` shows
that the engine and transformers read them alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# The tokenizer's: a token for each byte, then the two specials; the rest of the vocabulary is never produced by a text.
BOS = 256
EOS = 257


@dataclass(frozen=True)
class Shape:
    """What a checkpoint is made of. ``experts`` of 0 is a dense model."""

    architecture: str
    model_type: str
    vocabulary: int = 512
    hidden: int = 64
    intermediate: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head: int = 32
    positions: int = 512
    tied: bool = False
    qk_norm: bool = True
    experts: int = 0
    experts_per_token: int = 2
    expert_intermediate: int = 64


_QWEN3 = Shape("Qwen3ForCausalLM", "qwen3")

KINDS: dict[str, Shape] = {
    "qwen3": _QWEN3,
    "tied": replace(_QWEN3, tied=True),
    # /get_weights_by_name answers on the Llama class only.
    "llama": Shape("LlamaForCausalLM", "llama", head=16, qk_norm=False),
    "moe": Shape("Qwen3MoeForCausalLM", "qwen3_moe", experts=4),
}


def checkpoint(kind: str, seed: int, root: Path, *, shape: Shape | None = None) -> Path:
    """Write a checkpoint and its tokenizer, or find the one written before.

    Parameters
    ----------
    kind
        A key of :data:`KINDS`; with ``shape``, a name for that shape.
    seed
        Of the weights: the same seed gives the same bytes, and another seed gives other greedy tokens.
    root
        The folder that keeps them, usually a session's temporary one.
    shape
        For a size that ``KINDS`` has not.
    """
    folder = root / f"{kind}-{seed}"
    if folder.is_dir():
        return folder
    shape = KINDS[kind] if shape is None else shape
    root.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: a reader never meets half a checkpoint.
    part = Path(tempfile.mkdtemp(prefix=f".{kind}-{seed}-", dir=root))
    try:
        save_file(random_tensors(shape, seed), part / "model.safetensors", metadata={"format": "pt"})
        _write_json(part / "config.json", config(shape))
        _write_json(part / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS})
        _write_tokenizer(part, shape)
        part.chmod(0o755)
        os.rename(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name, on the CPU."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found.update(load_file(file))
    if not found:
        raise FileNotFoundError(f"no safetensors file in {path}")
    return found


def random_tensors(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """The weights of a seed, as the checkpoint has them."""
    made: dict[str, torch.Tensor] = {}
    for name, size in names(shape):
        # Each tensor has a generator of its own: one more tensor in a shape changes none of the others.
        salt = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(salt[:6], "little"))
        noise = torch.randn(size, generator=generator)
        # Norms near one; the rest wide enough for seeds to differ in their greedy tokens.
        made[name] = (1 + 0.1 * noise if name.endswith("norm.weight") else 0.2 * noise).to(torch.bfloat16)
    return made


def names(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and size, in the order of the layers."""
    s = shape
    yield "model.embed_tokens.weight", (s.vocabulary, s.hidden)
    for layer in range(s.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (s.hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (s.heads * s.head, s.hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (s.kv_heads * s.head, s.hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (s.kv_heads * s.head, s.hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (s.hidden, s.heads * s.head)
        if s.qk_norm:
            yield f"{prefix}.self_attn.q_norm.weight", (s.head,)
            yield f"{prefix}.self_attn.k_norm.weight", (s.head,)
        yield f"{prefix}.post_attention_layernorm.weight", (s.hidden,)
        if s.experts:
            yield f"{prefix}.mlp.gate.weight", (s.experts, s.hidden)
            for expert in range(s.experts):
                yield from _mlp(f"{prefix}.mlp.experts.{expert}", s.hidden, s.expert_intermediate)
        else:
            yield from _mlp(f"{prefix}.mlp", s.hidden, s.intermediate)
    yield "model.norm.weight", (s.hidden,)
    if not s.tied:
        yield "lm_head.weight", (s.vocabulary, s.hidden)


def _mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (intermediate, hidden)
    yield f"{prefix}.up_proj.weight", (intermediate, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, intermediate)


def config(shape: Shape) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "max_position_embeddings": shape.positions,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "torch_dtype": "bfloat16",
    }
    if shape.experts:
        config |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.expert_intermediate,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    return config


def _write_tokenizer(folder: Path, shape: Shape) -> None:
    """A byte-level tokenizer without merges: one token for each byte of a text."""
    vocabulary = {character: token for token, character in enumerate(_byte_characters())}
    specials = {"<bos>": BOS, "<eos>": EOS} | {f"<unused{i}>": i for i in range(EOS + 1, shape.vocabulary)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    added = [{"id": token, "content": text} | flags for text, token in (("<bos>", BOS), ("<eos>", EOS))]
    _write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary | specials, "merges": []},
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<eos>",
            "model_max_length": shape.positions,
            "clean_up_tokenization_spaces": False,
        },
    )


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, in the order of the bytes.

    Printable Latin-1 stands for itself; the 68 other bytes take the code points from 256 on, in turn.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(0x100)]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1))
