"""What does a step that an engine takes after loading change in a layer? It is tried on one that holds random bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_recv.receiver import checksum
from sglang_recv.receiver.recording import random_is_safe


def changed_by(step: Callable[[torch.nn.Module], object], layer: torch.nn.Module) -> tuple[str, ...]:
    """Names of the tensors that ``step`` changes, moves, replaces, adds or removes in a layer like this one.

    The layer itself is neither read nor changed: its memory may be gone. Memory for its tensors is needed once more, on
    their devices, until this returns. Items that may be indices are not random, and not copied.

    Raises
    ------
    Exception
        What ``step`` raises, or torch.OutOfMemoryError.
    """
    stand_in: torch.nn.Module = type(layer).__new__(type(layer))
    vars(stand_in).update({name: _noise(v) if isinstance(v, torch.Tensor) else v for name, v in vars(layer).items()})
    vars(stand_in).update(
        _parameters={name: p if p is None else _noise(p) for name, p in layer._parameters.items()},
        _buffers={name: b if b is None else _noise(b) for name, b in layer._buffers.items()},
        _modules=dict(layer._modules),
    )
    others = {id(tensor) for _, tensor in checksum.held_tensors(layer)}
    before, parameters = _held(stand_in, others), dict(stand_in._parameters)
    step(stand_in)
    after = _held(stand_in, others)
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    # A new object for the same memory lacks what loaders look for on the old one.
    names |= {name for name, parameter in parameters.items() if stand_in._parameters.get(name) is not parameter}
    return tuple(sorted(names))


def _noise(tensor: torch.Tensor) -> torch.Tensor:
    """Random bytes of the same form, class and attributes."""
    if tensor.layout is not torch.strided or not random_is_safe(tensor.dtype):
        return tensor
    data = torch.empty_like(tensor.detach())
    generator = torch.Generator(data.device)  # torch's own is what the engine samples with
    flat = data.as_strided((data.numel(),), (1,)).view(torch.uint8)
    flat.random_(0, 256, generator=generator.manual_seed(data.numel()))
    # Not by its class, whose constructor asks for what only a layer knows.
    fresh: torch.Tensor = torch.Tensor._make_subclass(type(tensor), data, False)
    vars(fresh).update(vars(tensor))
    return fresh


def _held(layer: torch.nn.Module, others: set[int]) -> dict[str, tuple[Any, ...]]:
    """Digest, address and strides of each tensor that a layer holds; the bytes of ``others`` are not read."""
    own = ((name, tensor) for name, tensor in checksum.held_tensors(layer) if tensor.layout is torch.strided)
    return {
        name: ("" if id(tensor) in others else checksum.digest(tensor), tensor.data_ptr(), tensor.stride())
        for name, tensor in own
    }
