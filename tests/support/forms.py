"""Small models whose loaders do more than the demo's: MLA, which derives attributes from a weight, and block fp8, where
each weight comes with a scale for every block of 128 times 128 items.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

BLOCK: Final = 128
VOCABULARY: Final = 512
HIDDEN: Final = 256
HEADS: Final = 4

FP8: Final = torch.float8_e4m3fn
Spec = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Form:
    """A model. ``mla`` is DeepSeek's attention with experts, else it is Qwen3's, dense or with ``experts``."""

    mla: bool
    fp8: bool
    experts: int = 0


FORMS: Final[dict[str, Form]] = {
    "mla": Form(mla=True, fp8=False, experts=4),
    "mla-fp8": Form(mla=True, fp8=True, experts=4),
    "dense-fp8": Form(mla=False, fp8=True),
    "moe-fp8": Form(mla=False, fp8=True, experts=4),
}

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "bfloat16",
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
# DeepSeek-V3's own sizes of a head: kernels for MLA know no others.
_LATENT, _ROPE, _NOPE, _VALUE, _LOW_RANK = 512, 64, 128, 128, 256


def config(form: Form) -> dict[str, Any]:
    """What config.json holds."""
    found = dict(_COMMON)
    if form.mla:
        found |= {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_hidden_layers": 3,
            "num_key_value_heads": HEADS,
            "q_lora_rank": _LOW_RANK,
            "kv_lora_rank": _LATENT,
            "qk_rope_head_dim": _ROPE,
            "qk_nope_head_dim": _NOPE,
            "v_head_dim": _VALUE,
            "n_routed_experts": form.experts,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
            # SGLang's rotary embedding for a CPU insists on one.
            "rope_scaling": {
                "type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        }
    else:
        found |= {
            "architectures": ["Qwen3MoeForCausalLM" if form.experts else "Qwen3ForCausalLM"],
            "model_type": "qwen3_moe" if form.experts else "qwen3",
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "num_experts": form.experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if form.fp8:
        found["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    return found


def specs(form: Form) -> dict[str, Spec]:
    """Dtype and shape of every tensor of a checkpoint, in the order of the layers."""
    return dict(_specs(form))


def _specs(form: Form) -> Iterator[tuple[str, Spec]]:
    yield "model.embed_tokens.weight", (torch.bfloat16, (VOCABULARY, HIDDEN))
    for layer in range(3 if form.mla else 2):
        prefix = f"model.layers.{layer}"
        yield from _norm(f"{prefix}.input_layernorm", HIDDEN)
        yield from _mla(f"{prefix}.self_attn", form) if form.mla else _attention(f"{prefix}.self_attn", form)
        yield from _norm(f"{prefix}.post_attention_layernorm", HIDDEN)
        if (form.mla and layer == 0) or not form.experts:
            yield from _mlp(f"{prefix}.mlp", 256, form)
            continue
        yield f"{prefix}.mlp.gate.weight", (torch.bfloat16, (form.experts, HIDDEN))
        if form.mla:
            yield f"{prefix}.mlp.gate.e_score_correction_bias", (torch.float32, (form.experts,))
            yield from _mlp(f"{prefix}.mlp.shared_experts", 256, form)
        for expert in range(form.experts):
            yield from _mlp(f"{prefix}.mlp.experts.{expert}", 256, form)
    yield from _norm("model.norm", HIDDEN)
    yield "lm_head.weight", (torch.bfloat16, (VOCABULARY, HIDDEN))


def _norm(name: str, size: int) -> Iterator[tuple[str, Spec]]:
    yield f"{name}.weight", (torch.bfloat16, (size,))


def _linear(name: str, rows: int, columns: int, form: Form) -> Iterator[tuple[str, Spec]]:
    yield f"{name}.weight", (FP8 if form.fp8 else torch.bfloat16, (rows, columns))
    if form.fp8:
        yield f"{name}.weight_scale_inv", (torch.float32, (-(-rows // BLOCK), -(-columns // BLOCK)))


def _mlp(prefix: str, intermediate: int, form: Form) -> Iterator[tuple[str, Spec]]:
    yield from _linear(f"{prefix}.gate_proj", intermediate, HIDDEN, form)
    yield from _linear(f"{prefix}.up_proj", intermediate, HIDDEN, form)
    yield from _linear(f"{prefix}.down_proj", HIDDEN, intermediate, form)


def _attention(prefix: str, form: Form) -> Iterator[tuple[str, Spec]]:
    yield from _linear(f"{prefix}.q_proj", HEADS * 128, HIDDEN, form)
    yield from _linear(f"{prefix}.k_proj", 2 * 128, HIDDEN, form)
    yield from _linear(f"{prefix}.v_proj", 2 * 128, HIDDEN, form)
    yield from _linear(f"{prefix}.o_proj", HIDDEN, HEADS * 128, form)
    yield from _norm(f"{prefix}.q_norm", 128)
    yield from _norm(f"{prefix}.k_norm", 128)


def _mla(prefix: str, form: Form) -> Iterator[tuple[str, Spec]]:
    yield from _linear(f"{prefix}.q_a_proj", _LOW_RANK, HIDDEN, form)
    yield from _norm(f"{prefix}.q_a_layernorm", _LOW_RANK)
    yield from _linear(f"{prefix}.q_b_proj", HEADS * (_NOPE + _ROPE), _LOW_RANK, form)
    yield from _linear(f"{prefix}.kv_a_proj_with_mqa", _LATENT + _ROPE, HIDDEN, form)
    yield from _norm(f"{prefix}.kv_a_layernorm", _LATENT)
    yield from _linear(f"{prefix}.kv_b_proj", HEADS * (_NOPE + _VALUE), _LATENT, form)
    yield from _linear(f"{prefix}.o_proj", HIDDEN, HEADS * _VALUE, form)


def tensors(form: Form, seed: int) -> dict[str, torch.Tensor]:
    """Random weights on the CPU; each tensor has a generator of its own, and another seed changes every one."""
    made = {}
    for name, (dtype, shape) in specs(form).items():
        salt = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(salt[:6], "little"))
        noise = torch.randn(shape, generator=generator)
        if dtype == FP8:
            noise *= 64
        elif name.endswith("weight_scale_inv"):
            noise = noise.abs() * 1e-3 + 1e-4
        elif name.endswith("norm.weight"):
            noise = 1 + 0.1 * noise
        else:
            noise *= 0.05
        made[name] = noise.to(dtype)
    return made


def folder(kind: str, root: Path, seed: int | None = None) -> Path:
    """A folder with a config, and with a seed also a checkpoint; made once."""
    path = root / (kind if seed is None else f"{kind}-{seed}")
    if path.is_dir():
        return path
    root.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=root))
    try:
        if seed is not None:
            save_file(tensors(FORMS[kind], seed), part / "model.safetensors", metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(config(FORMS[kind]), indent=1))
        os.rename(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return path
