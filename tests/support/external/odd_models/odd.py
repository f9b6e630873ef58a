"""Qwen3 with a loader that does what loaders of other models do. Imported by SGLang, in servers only."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from sglang.srt.models.qwen3 import Qwen3ForCausalLM


class OddForCausalLM(Qwen3ForCausalLM):  # type: ignore[misc]
    """The norms' loaders cast, scale and overlap, one is derived from; all else is copied on other threads."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See SGLang."""
        layers = self.model.layers
        with ThreadPoolExecutor(2) as pool:
            tasks = []
            for name, tensor in weights:
                if name == "model.layers.0.input_layernorm.weight":
                    layers[0].input_layernorm.weight.data.copy_(tensor.double().to(tensor.dtype))
                elif name == "model.layers.0.post_attention_layernorm.weight":
                    layers[0].post_attention_layernorm.weight.data.copy_(tensor).mul_(0.5)
                elif name == "model.layers.1.input_layernorm.weight":
                    layers[1].input_layernorm.weight.data.copy_(tensor)
                    layers[1].input_layernorm.weight.data[:8].copy_(tensor[8:16])
                elif name == "model.norm.weight":
                    self.model.norm.weight.data.copy_(tensor)
                    # An attribute, as MLA's w_kc and w_vc.
                    self.derived = self.model.norm.weight.data.float() + 1
                else:
                    tasks.append(pool.submit(super().load_weights, [(name, tensor)]))
            for task in tasks:
                task.result()


EntryClass = OddForCausalLM
