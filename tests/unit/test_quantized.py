"""Which quantized layers are tried, and what is kept of it. SGLang is not imported: its classes are stood in for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_recv.errors import StagingMemoryError

_MODULE = "sglang_recv.integrations.sglang.quantized"
_LAYERS = "sglang.srt.layers.quantization"
_CLASSES = {
    f"{_LAYERS}.fp8": ("Fp8LinearMethod", "Fp8MoEMethod"),
    f"{_LAYERS}.kv_cache": ("BaseKVCacheMethod",),
    f"{_LAYERS}.unquant": ("UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod", "UnquantizedLinearMethod"),
}


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with SGLang's classes as far as it knows them."""
    for name, classes in _CLASSES.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        made: Any = ModuleType(name)
        for each in classes:
            setattr(made, each, type(each, (), {}))
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.delitem(sys.modules, _MODULE, raising=False)
    yield importlib.import_module(_MODULE)
    sys.modules.pop(_MODULE, None)


class Step:
    """What is done after loading, and how often it was tried."""

    def __init__(self) -> None:
        self.tried = 0
        self.act: Callable[[Any], None] = lambda layer: None

    def __call__(self, layer: Any) -> None:
        self.tried += 1
        self.act(layer)


def linear(quantized: Any, step: Step) -> Any:
    """A layer of 256 by 128 in fp8, with a scale for each block of 128 by 128."""
    kind = quantized.Fp8LinearMethod
    kind.process_weights_after_loading = lambda self, layer: step(layer)
    method = kind()
    method.block_quant = True
    method.quant_config = SimpleNamespace(weight_block_size=[128, 128], is_checkpoint_fp8_serialized=True)
    made: Any = torch.nn.Module()
    made.weight = torch.nn.Parameter(torch.zeros(256, 128).to(torch.float8_e4m3fn), requires_grad=False)
    made.weight_scale_inv = torch.nn.Parameter(torch.zeros(2, 1), requires_grad=False)
    for parameter in made.parameters():
        parameter.weight_loader = torch.Tensor.copy_
    made.quant_method = method
    return made


def refusals(quantized: Any, *layers: Any) -> Any:
    return quantized.Refusals(lambda: torch.nn.ModuleList(layers), lambda: ())


def test_each_form_is_tried_once_and_what_was_found_is_kept(quantized: Any) -> None:
    step = Step()
    layers = [linear(quantized, step) for _ in range(4)]
    layers[2].register_buffer("workspace", torch.zeros(2))
    layers[3].quant_method.cutlass_fp8_supported = True
    look = refusals(quantized, *layers)
    assert (look.find(), step.tried) == ((), 3)
    assert (look.find(), step.tried) == ((), 3)


def test_a_change_is_a_reason_that_is_kept(quantized: Any) -> None:
    step = Step()
    step.act = lambda layer: layer.weight_scale_inv.data.zero_()
    look = refusals(quantized, linear(quantized, step))
    assert look.find() == ("0: Fp8LinearMethod: after loading it changes weight_scale_inv",)
    step.act = lambda layer: None
    assert look.find() == ("0: Fp8LinearMethod: after loading it changes weight_scale_inv",)


def test_a_step_that_raises_is_tried_once_for_all_layers_of_a_form(quantized: Any) -> None:
    step, tried = Step(), list[int]()

    def fail(layer: Any) -> None:
        tried.append(1)
        raise RuntimeError("CUDA error: out of memory")

    step.act = fail
    look = refusals(quantized, *(linear(quantized, step) for _ in range(5)))
    for sessions in (1, 2):
        assert len(look.find()) == 1
        assert len(tried) == sessions


def test_a_step_that_raised_is_tried_again(quantized: Any) -> None:
    step = Step()

    def fail(layer: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    step.act = fail
    other = linear(quantized, Step())
    other.register_buffer("workspace", torch.zeros(2))
    look = refusals(quantized, linear(quantized, step), other)
    (reason,) = look.find()
    assert reason.startswith("0: Fp8LinearMethod: its step after loading fails on random bytes: RuntimeError: CUDA")
    step.act = lambda layer: None
    assert look.find() == ()
    step.act = fail
    assert look.find() == (), "kept, once nothing raised"


def test_without_memory_there_is_no_answer(quantized: Any) -> None:
    step = Step()

    def full(layer: Any) -> None:
        raise torch.OutOfMemoryError("1 GiB")

    step.act = full
    look = refusals(quantized, linear(quantized, step))
    with pytest.raises(StagingMemoryError, match="no 32776 bytes for it: 1 GiB"):
        look.find()
    step.act = lambda layer: None
    assert look.find() == ()
