"""As gpu_like, with experts whose halves are swapped in place after loading, as some kernels want them."""

import importlib
from typing import Any

import torch
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod

importlib.import_module("gpu_like")
_original = Fp8MoEMethod.process_weights_after_loading


def _swapped(self: Any, layer: Any) -> None:
    _original(self, layer)
    layer.w13_weight.copy_(torch.cat(layer.w13_weight.chunk(2, 1)[::-1], 1))


Fp8MoEMethod.process_weights_after_loading = _swapped
