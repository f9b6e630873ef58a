"""What does a step that an engine takes after loading change in a layer? It is tried on one that holds random bytes."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Hashable
from typing import Any, Final

import torch

from sglang_recv.receiver import checksum
from sglang_recv.receiver.recording import random_is_safe

#: Attributes that say where a layer is, and not what it is.
_PLACES: Final = frozenset(("layer_id", "layer_idx", "layer_index", "layer_name", "prefix"))
#: torch's own, hooks among them, which are numbered through the process.
_TORCHS: Final = frozenset(vars(torch.nn.Module())) - {"training", "_parameters", "_buffers"}
_PLAIN: Final = (bool, int, float, str, bytes, type, torch.dtype, torch.device, enum.Enum, type(None))


def changed_by(step: Callable[[torch.nn.Module], object], layer: torch.nn.Module) -> tuple[str, ...]:
    """Names of the tensors that ``step`` changes, moves, replaces, adds or removes in a layer like this one.

    The layer stays as it is, and so does the object that ``step`` is a method of: both are stood in for, with all that
    they hold as attributes, in containers, in dataclasses, in child modules and as attributes of tensors. Other objects
    (a group of ranks, a dispatcher) are the engine's, and the stand-in has the very same.

    Bytes of the layer are not read, but for items that may be indices: these are copied, and not random. Memory for its
    tensors is needed once more, on their devices, until this returns.

    Raises
    ------
    Exception
        What ``step`` raises, or torch.OutOfMemoryError.
    """
    stand_ins = _StandIns(layer, step)
    stand_in = stand_ins.of(layer)
    before = _held(stand_in)
    parameters = dict(stand_in.named_parameters(remove_duplicate=False))
    stand_ins.of(step)(stand_in)
    after = _held(stand_in)
    now = dict(stand_in.named_parameters(remove_duplicate=False))
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    # A new object for the same memory lacks what loaders look for on the old one.
    names |= {name for name, parameter in parameters.items() if now.get(name) is not parameter}
    return tuple(sorted(names))


def form(step: Callable[[torch.nn.Module], object], layer: torch.nn.Module) -> Hashable:
    """What :func:`changed_by` may depend on: equal for layers that differ in their bytes and their place alone.

    That is types, plain values, and the forms of all tensors, of the layer and of the object that ``step`` is a method
    of. Of objects that are no containers only the plain values count.
    """
    owner = getattr(step, "__self__", None)
    return _module(layer, frozenset()), type(owner), _facts(getattr(owner, "__dict__", {}), frozenset({id(layer)}))


class _StandIns:
    """Copies of what a layer holds, each made once, so that what was one object is one again.

    Parameters
    ----------
    layer
        Its child modules are copied too; a module that it merely refers to, its parent say, is not.
    step
        The object that it is a method of is copied.
    """

    def __init__(self, layer: torch.nn.Module, step: Callable[..., object]) -> None:
        self._own = {id(module) for module in layer.modules()} | {id(getattr(step, "__self__", None))}
        self._made: dict[int, Any] = {}
        self._seen: list[Any] = []  # or another object would get the id of one that is gone

    def of(self, value: Any) -> Any:
        """The copy of a value; the value itself when it is not the layer's."""
        if id(value) not in self._made:
            self._seen.append(value)
            self._made[id(value)] = value  # for one that holds itself
            self._made[id(value)] = self._copy(value)
        return self._made[id(value)]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            made: Any = _noise(value)
        elif isinstance(value, torch.nn.Module):
            if id(value) not in self._own:
                return value
            made = type(value).__new__(type(value))
        elif isinstance(value, tuple):
            items = [self.of(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        elif isinstance(value, (list, dict, set)):
            return self._container(value)
        elif isinstance(value, functools.partial):
            return functools.partial(self.of(value.func), *map(self.of, value.args), **self.of(value.keywords))
        elif isinstance(value, types.MethodType):
            # Not of an object that is not copied, which would become a new method of the same.
            owner = self.of(value.__self__) if id(value.__self__) in self._own else value.__self__
            return types.MethodType(value.__func__, owner)
        elif hasattr(value, "__dict__") and (id(value) in self._own or _is_data(value)):
            made = copy.copy(value)
        else:
            return value
        self._made[id(value)] = made
        for name, item in vars(value).items():
            vars(made)[name] = self.of(item)
        return made

    def _container(self, value: Any) -> Any:
        made = copy.copy(value)  # with its class
        self._made[id(value)] = made
        if isinstance(value, list):
            made[:] = map(self.of, value)
        elif isinstance(value, dict):
            made.update((key, self.of(item)) for key, item in value.items())
        else:
            made.clear()
            made.update(map(self.of, value))
        return made


def _is_data(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _noise(tensor: torch.Tensor) -> torch.Tensor:
    """Random bytes of the same form and class."""
    if tensor.layout is not torch.strided or not random_is_safe(tensor.dtype):
        data = tensor.detach().clone()
    else:
        data = torch.empty_like(tensor.detach())
        if not data.is_meta:
            generator = torch.Generator(data.device)  # torch's own is what the engine samples with
            flat = data.as_strided((data.numel(),), (1,)).view(torch.uint8)
            flat.random_(0, 256, generator=generator.manual_seed(data.numel()))
    # Not by its class, whose constructor asks for what only a layer knows.
    fresh: torch.Tensor = torch.Tensor._make_subclass(type(tensor), data, False)
    return fresh


def _held(layer: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    """Digest, address and strides of each tensor that a layer holds, or that such a tensor has as an attribute."""
    found = dict(checksum.held_tensors(layer))
    for name, tensor in tuple(found.items()):
        found |= {f"{name}.{key}": value for key, value in vars(tensor).items() if isinstance(value, torch.Tensor)}
    return {
        name: ("" if tensor.is_meta else checksum.digest(tensor), tensor.data_ptr(), tensor.stride())
        for name, tensor in found.items()
        if tensor.layout is torch.strided
    }


def _module(module: torch.nn.Module, above: frozenset[int]) -> Hashable:
    """What of a layer and its children counts in :func:`form`."""
    inside = above | {id(module)}
    own = {name: value for name, value in vars(module).items() if name not in _TORCHS}
    children = tuple((name, child and _module(child, inside)) for name, child in module._modules.items())
    return type(module), _facts(own, inside), children


def _facts(value: Any, above: frozenset[int]) -> Hashable:
    """What of a value counts in :func:`form`; ``above`` are the objects that it lies in."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if id(value) in above or isinstance(value, torch.nn.Module):
        return type(value).__module__, type(value).__qualname__
    inside = above | {id(value)}
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else None
        return type(value), value.dtype, tuple(value.shape), strides, value.device, _facts(vars(value), inside)
    if isinstance(value, dict):
        return type(value), tuple((key, _facts(item, inside)) for key, item in value.items() if key not in _PLACES)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_facts(item, inside) for item in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(_facts(item, inside) for item in value)
    if isinstance(value, functools.partial):
        return tuple(_facts(part, inside) for part in (value.func, value.args, value.keywords))
    if isinstance(value, (types.MethodType, types.FunctionType)):
        return value.__module__, value.__qualname__  # closures differ from layer to layer
    attributes = dict(getattr(value, "__dict__", {}))
    if not _is_data(value):
        attributes = {name: item for name, item in attributes.items() if isinstance(item, _PLAIN)}
    return type(value), _facts(attributes, inside)
