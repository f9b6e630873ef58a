"""MLA and block fp8 on real engines: updates leave what a fresh load leaves, derived attributes among it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_recv.errors import RecvError
from support import forms, models, weights
from support.server import EngineServer, server_path

EXTERNAL = Path(__file__).parents[1] / "support" / "external"
NO_FORWARD = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
#: What stays with the loader, by form: it concatenates two projections, and derives w_kc and w_vc from a third one.
WITH_LOADER = {
    "mla": {"q_a_proj.weight", "kv_a_proj_with_mqa.weight", "kv_b_proj.weight"},
    "mla-fp8": {
        f"{name}.{part}"
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj")
        for part in ("weight", "weight_scale_inv")
    },
    "dense-fp8": set(),
    "moe-fp8": set(),
}
# Every version, form and TP occurs; `make test-full` runs the rest.
SUBSET = {("0.5.13", "mla-fp8", 1), ("0.5.23", "moe-fp8", 2)}
CASES = [
    pytest.param(version, form, tp, marks=() if (version, form, tp) in SUBSET else pytest.mark.full)
    for version in ("0.5.23", "0.5.13")
    for form in forms.FORMS
    for tp in (1, 2)
]


def server_of(version: str, folder: Path, *args: str, tp: int = 1, package: str = "gpu_like") -> EngineServer:
    """An engine that loads fp8 weights as an H200 does. It runs no forward."""
    env = {"SGLANG_EXTERNAL_MODEL_PACKAGE": package, "PYTHONPATH": server_path(EXTERNAL), **NO_FORWARD}
    return EngineServer(version, folder, tp=tp, receiver="vmm", env=env, args=("--skip-tokenizer-init", *args))


@pytest.mark.parametrize(("version", "kind", "tp"), CASES)
def test_five_updates_are_bit_equal_to_a_fresh_load(checkpoints: Path, version: str, kind: str, tp: int) -> None:
    form = forms.FORMS[kind]
    folders = [forms.folder(kind, checkpoints / "forms", seed) for seed in (0, 1)]
    with server_of(version, folders[1], tp=tp) as server:
        held = {1: weights.digests(server)}
    with server_of(version, folders[0], tp=tp) as server:
        held[0] = weights.digests(server)
        assert {name.rsplit(".", 1)[1] for name in held[0][0]} >= ({"w_kc", "w_vc"} if form.mla else set())
        # A slot holds the largest tensor and no more. In fp8 that is kv_b_proj's weight, so its scale comes in a later
        # bucket: the loader derives from the old scale first.
        with weights.client(server, slot_bytes=100_000) as client:
            for step in range(5):
                seed = (step + 1) % 2
                report = client.update(forms.tensors(form, seed), f"step {step}")
                assert weights.digests(server) == held[seed], step
                for plan in report.plans.values():
                    assert plan.state == ("proven" if step else "recorded")
                    kept = {".".join(name.rsplit(".", 2)[1:]) for entry in plan.kept for name in entry.names}
                    assert kept <= WITH_LOADER[kind]
                    assert sum(entry.count for entry in plan.kept) == (3 * len(WITH_LOADER[kind]) if step else 0)
                    assert plan.replayed + plan.loaded == len(forms.specs(form))
                    assert not step or plan.loaded == 3 * len(WITH_LOADER[kind])


@pytest.mark.full
@pytest.mark.parametrize("version", ["0.5.13", "0.5.23"])
def test_dummy_weights_become_what_a_fresh_load_is(checkpoints: Path, version: str) -> None:
    """SGLang fills scales of the KV cache with random numbers then, and no tensor of an update belongs there."""
    folder = forms.folder("mla-fp8", checkpoints / "forms", 0)
    with server_of(version, folder) as server:
        held = weights.digests(server)
    sent = forms.tensors(forms.FORMS["mla-fp8"], 0)
    scales = {
        f"model.layers.{layer}.self_attn.{x}_proj.{x}_scale": torch.tensor(2.0) for layer in range(3) for x in "kv"
    }
    nothing = forms.folder("mla-fp8", checkpoints / "forms", None)
    with server_of(version, nothing, "--load-format", "dummy") as server:
        with weights.client(server) as client:
            # Without a checkpoint nobody knows that they are none of its tensors; nor must one that failed stay.
            with pytest.raises(RecvError, match="which the engine fills by itself"):
                client.update({**sent, **scales}, "refused")
            client.update(sent, "full")
        assert weights.digests(server) == held


@pytest.mark.full
def test_scales_of_the_kv_cache_in_a_checkpoint_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(forms.folder("mla-fp8", checkpoints / "forms", 0), tmp_path / "scaled")
    names = [f"model.layers.{layer}.self_attn.{x}_proj.{x}_scale" for layer in range(3) for x in "kv"]
    scales = {name: torch.tensor(0.5) for name in names}
    save_file(scales, folder / "scales.safetensors")
    with server_of("0.5.23", folder) as server, weights.client(server) as client:
        with pytest.raises(RecvError, match=r"layers\.0\.self_attn\.k_proj\.k_scale: a scale of the KV cache"):
            client.update({**forms.tensors(forms.FORMS["mla-fp8"], 1), **scales}, "never")


@pytest.mark.parametrize("version", ["0.5.23", pytest.param("0.5.13", marks=pytest.mark.full)])
def test_experts_that_are_swapped_after_loading_are_refused(checkpoints: Path, version: str) -> None:
    """In place, which leaves no trace in any form."""
    folder = forms.folder("moe-fp8", checkpoints / "forms", 0)
    with server_of(version, folder, package="gpu_like_swapped") as server:
        held = weights.digests(server)
        with weights.client(server) as client, pytest.raises(RecvError) as refused:
            client.update(forms.tensors(forms.FORMS["moe-fp8"], 1), "never")
        reason = "quantization 'fp8': model.layers.0.mlp.experts: Fp8MoEMethod: after loading it changes w13_weight"
        assert reason in str(refused.value)
        assert weights.digests(server) == held


@pytest.mark.full
@pytest.mark.parametrize("version", ["0.5.23", "0.5.13"])
def test_weights_that_are_quantized_after_loading_are_refused(checkpoints: Path, version: str) -> None:
    folder = models.checkpoint("qwen3", 0, checkpoints)
    with server_of(version, folder, "--quantization", "fp8") as server:
        held = weights.digests(server)
        with weights.client(server) as client, pytest.raises(RecvError) as refused:
            client.update(models.tensors(folder), "never")
        reason = "model.layers.0.self_attn.qkv_proj: Fp8LinearMethod without scales for blocks"
        assert reason in str(refused.value)
        assert weights.digests(server) == held
