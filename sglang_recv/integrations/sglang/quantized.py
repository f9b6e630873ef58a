"""Quantized models: which of them may be updated in place, and which of their parameters the engine fills itself.

SGLang's loaders write what a checkpoint holds, and ``process_weights_after_loading`` makes of it what kernels want. An
update by ``load_weights`` alone is right where that second step changes nothing. This is so for fp8 with a scale for
each block of a checkpoint's weights, unless a kernel wants another layout (DeepGEMM's scales on Blackwell, Marlin's
weights, shuffled experts). Nothing tells from outside, so the step is tried on random bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Final

import torch
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)

from sglang_recv.errors import StagingMemoryError
from sglang_recv.receiver import probe

_PLAIN: Final = (UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod, UnquantizedLinearMethod)
#: Weights, each with its scale, by the exact type of a layer's method: a subclass may do anything.
_PAIRS: Final[dict[type, tuple[tuple[str, str], ...]]] = {
    Fp8LinearMethod: (("weight", "weight_scale_inv"),),
    Fp8MoEMethod: (("w13_weight", "w13_weight_scale_inv"), ("w2_weight", "w2_weight_scale_inv")),
}
#: What a method has set when it keeps other items than a checkpoint's, by what that means.
_OTHER_ITEMS: Final = {
    "use_mxfp8": "scales of the MX format",
    "use_marlin": "weights packed for Marlin",
    "is_fp4_expert": "experts of 4 bits",
    "convert_mxfp8_to_block": "weights converted from the MX format",
    "block_fp8_as_mxfp8": "weights converted to the MX format",
}
#: Layers whose loaders take a weight and its scale in one call only, and leave out the half that came alone
#: (deepseek_weight_loader.py fuses these).
_IN_ONE_CALL: Final = re.compile(r"(^|\.)indexer\.(wk|weights_proj|wk_weights_proj)$")
#: Modules of models whose loaders quantize weights again by the scale that is there then (``ckpt_tp``).
_AGAIN: Final = ("mimo_v2",)
_KV_SCALES: Final = ("k_scale", "v_scale")
_KV_SCALE_NAME: Final = re.compile(r"\.(k|v|kv)_scale$")


class Refusals:
    """Why a quantized model cannot be updated in place, if it cannot.

    Looking needs memory for one more layer of each form, on the device, for a moment. Weights are not read.

    Parameters
    ----------
    model
        Gives the model, as it serves.
    names
        Gives the tensors of its checkpoint, where these are known.
    """

    def __init__(self, model: Callable[[], torch.nn.Module], names: Callable[[], Iterable[str]]) -> None:
        self._model = model
        self._names = names
        #: What was found, by the form of a layer.
        self._tried: dict[Hashable, str | None] = {}
        self._found: tuple[str, ...] | None = None

    def find(self) -> tuple[str, ...]:
        """For each reason the first layer that has it.

        It is looked for once, but a step that raised is tried again by the next call: it may have been out of memory.

        Raises
        ------
        StagingMemoryError
            When the device has no such memory now.
        """
        if self._found is None:
            try:
                reasons, failed = self._look()
            finally:
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()  # the trainer's staging is to find it
            if failed:
                return reasons
            self._found = reasons
        return self._found

    def _look(self) -> tuple[tuple[str, ...], bool]:
        """The reasons, and whether a step failed."""
        found: dict[str, str] = {}
        # Of steps that raise, by form: tried again in the next session, but not for each layer.
        raised: dict[Hashable, str] = {}
        model = self._model()
        again = next((part for part in type(model).__module__.split(".") if part.startswith(_AGAIN)), None)
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            if method is None or isinstance(method, (*_PLAIN, BaseKVCacheMethod)):
                continue
            reason = _other_form(module, method)
            if reason is None and _IN_ONE_CALL.search(name):
                reason = f"{type(method).__name__}: its loader takes weight and scale in one call only"
            if reason is None and again is not None:
                reason = (
                    f"{type(method).__name__} of a {again} model: its loader quantizes weights again by other scales"
                )
            if reason is None:
                reason = self._changed_by_processing(module, method, raised)
            if reason is not None:
                found.setdefault(reason, name)
        scale = next((name for name in self._names() if _KV_SCALE_NAME.search(name)), None)
        if scale is not None:
            found.setdefault("a scale of the KV cache, of which loaders leave a copy behind", scale)
        return tuple(f"{name}: {reason}" for reason, name in found.items()), bool(raised)

    def _changed_by_processing(self, module: torch.nn.Module, method: Any, raised: dict[Hashable, str]) -> str | None:
        """What SGLang's step after loading changes in a layer like this one; None when it changes nothing. What it
        raises goes into ``raised``."""
        form = probe.form(method.process_weights_after_loading, module)
        if form in raised:
            return raised[form]
        if form not in self._tried:
            try:
                self._tried[form] = _try_processing(module, method)
            except _StepError as error:
                raised[form] = str(error)
                return raised[form]
        return self._tried[form]


class _StepError(Exception):
    """A step that was tried has raised."""


def layers_with_kv_scales(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Attention layers of an fp8 model that have scales of the KV cache for parameters."""
    return tuple(m for m in model.modules() if isinstance(getattr(m, "quant_method", None), BaseKVCacheMethod))


def kv_scales(layers: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Parameter, float]]:
    """Parameters that no checkpoint fills, and what belongs there: 1.0, unless somebody has set another scale."""
    for layer in layers:
        for name in _KV_SCALES:
            parameter, value = getattr(layer, name, None), getattr(layer, f"{name}_float", None)
            if isinstance(parameter, torch.nn.Parameter) and isinstance(value, float):
                yield parameter, value


def _other_form(module: torch.nn.Module, method: Any) -> str | None:
    """Why the parameters of a layer are not those that its loaders were made for; None when they are."""
    kind = type(method).__name__
    pairs = _PAIRS.get(type(method))
    if pairs is None:
        return f"{kind}: only fp8 with scales for blocks is known to keep its weights as loaders write them"
    block = getattr(method.quant_config, "weight_block_size", None)
    if not method.block_quant or block is None:
        return f"{kind} without scales for blocks: its weights are transposed or quantized again after loading"
    if not method.quant_config.is_checkpoint_fp8_serialized:
        return f"{kind} of a checkpoint that is not fp8: its weights are quantized after loading"
    for flag, meaning in _OTHER_ITEMS.items():
        if getattr(method, flag, False):
            return f"{kind} with {meaning}"
    if getattr(module, "_mega_moe_weights_built", False):
        return f"{kind} with its rows interleaved for MegaMoE"
    alias = _other_view(module)
    if alias is not None:
        return f"{kind}: {alias} holds its weights in a form of its own"
    for weight_name, scale_name in pairs:
        weight, scale = getattr(module, weight_name, None), getattr(module, scale_name, None)
        if not isinstance(weight, torch.nn.Parameter) or not isinstance(scale, torch.nn.Parameter):
            return f"{kind} has no parameters {weight_name} and {scale_name}"
        for name, parameter in ((weight_name, weight), (scale_name, scale)):
            if not callable(getattr(parameter, "weight_loader", None)):
                return f"{kind}: {name} was replaced by one without a loader"
            if not parameter.is_contiguous():
                return f"{kind}: {name} has the strides {parameter.stride()}"
        if weight.dtype != torch.float8_e4m3fn:
            return f"{kind}: {weight_name} is {weight.dtype}, loaders write torch.float8_e4m3fn"
        blocks = (*weight.shape[:-2], *(-(-n // b) for n, b in zip(weight.shape[-2:], block, strict=True)))
        if scale.dtype != torch.float32 or tuple(scale.shape) != blocks or getattr(scale, "format_ue8m0", False):
            return (
                f"{kind}: {scale_name} is {scale.dtype} of shape {list(scale.shape)}, loaders write torch.float32 of "
                f"shape {list(blocks)}"
            )
    return None


def _other_view(module: torch.nn.Module) -> str | None:
    """The name of an attribute that shares memory with a parameter of this layer, and is none of them."""
    own = {id(parameter) for parameter in module._parameters.values()}
    homes = {p.untyped_storage().data_ptr() for p in module._parameters.values() if p is not None and p.numel()}
    for name, value in vars(module).items():
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(part, torch.Tensor) or id(part) in own or part.layout is not torch.strided:
                continue
            if part.numel() and part.untyped_storage().data_ptr() in homes:
                return name
    return None


def _try_processing(module: torch.nn.Module, method: Any) -> str | None:
    """See Refusals._changed_by_processing."""
    kind = type(method).__name__
    try:
        changed = probe.changed_by(method.process_weights_after_loading, module)
    except torch.OutOfMemoryError as error:
        size = sum(p.nbytes for p in module.parameters())
        raise StagingMemoryError(
            f"what {kind} does after loading must be tried once, and the device has no {size} bytes for it: {error}",
            fix="release the engine's KV cache for the first update, or lower --mem-fraction-static",
        ) from None
    except Exception as error:  # whatever it is, what it would do to real weights is not known
        said = f"{kind}: its step after loading fails on random bytes: {type(error).__name__}: {error}"
        raise _StepError(said) from None
    return f"{kind}: after loading it changes {', '.join(changed)}" if changed else None
