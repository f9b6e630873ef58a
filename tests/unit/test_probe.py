"""What a step after loading changes is seen on a stand-in, and the layer stays as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_recv.receiver import checksum
from sglang_recv.receiver.probe import changed_by, form


class Weight(torch.nn.Parameter):
    """As SGLang's: built with more than its data, and with a loader that its object knows."""

    def __new__(cls, *, data: torch.Tensor, loader: str) -> Weight:
        return super().__new__(cls, data, False)

    def __init__(self, *, data: torch.Tensor, loader: str) -> None:
        self.loader = loader


@dataclasses.dataclass
class Facts:
    """As SGLang's configurations of a layer, some of which know it."""

    limits: torch.Tensor
    of: torch.nn.Module


class Method:
    """As SGLang's, of whose methods the step is one."""

    def __init__(self) -> None:
        self.done = 0
        self.blocks = [128, 128]
        self.table = torch.ones(2)

    def process(self, stand_in: Any) -> None:
        assert stand_in.method is self, "the layer's own"
        assert self.blocks == [128, 128]
        self.done += 1
        self.blocks.append(1)
        self.table.zero_()


def layer() -> Any:
    """A block-quantised layer, with a buffer, an attribute and a table of indices."""
    made: Any = torch.nn.Module()
    made.weight = Weight(data=torch.ones(256, 128).to(torch.float8_e4m3fn), loader="rows")
    made.scale = torch.nn.Parameter(torch.ones(2, 1), requires_grad=False)
    made.register_parameter("bias", None)
    made.register_buffer("cache", torch.ones(4))
    made.table = torch.arange(3)
    made.derived = torch.ones(3)
    made.child = torch.nn.Linear(2, 2)
    made.parts = (torch.ones(2), [torch.ones(3)])
    made.by_name = {"a": torch.ones(2)}
    made.weight.packed = torch.ones(5)
    made.weight.load = made.child.forward
    made.facts = Facts(torch.ones(2), made)
    made.method = Method()
    return made


def nothing(stand_in: Any) -> None:
    assert stand_in.weight.loader == "rows"
    assert stand_in.table.tolist() == [0, 1, 2]
    stand_in.weight.data = stand_in.weight.data  # what SGLang's does on most GPUs
    stand_in.scale.format = False


def shuffle(stand_in: Any) -> None:
    """In place, and twice is as it was."""
    stand_in.weight.copy_(torch.cat(stand_in.weight.chunk(2)[::-1]))


def replace(stand_in: Any) -> None:
    stand_in.weight = torch.nn.Parameter(stand_in.weight.data, requires_grad=False)


def transpose(stand_in: Any) -> None:
    stand_in.weight.data = stand_in.weight.data.t()


def cache(stand_in: Any) -> None:
    stand_in.cache.copy_(stand_in.scale.data[0].expand(4))


def derive(stand_in: Any) -> None:
    stand_in.derived = stand_in.scale.data.clone()


def add(stand_in: Any) -> None:
    stand_in.register_buffer("packed", stand_in.weight.data.clone())


def remove(stand_in: Any) -> None:
    del stand_in.scale


def child(stand_in: Any) -> None:
    stand_in.child.weight.data.zero_()


def child_replaced(stand_in: Any) -> None:
    stand_in.child.bias = torch.nn.Parameter(stand_in.child.bias.data)


def entries(stand_in: Any) -> None:
    stand_in.parts[0].zero_()
    stand_in.parts[1][0].zero_()
    stand_in.parts[1].append(0)
    stand_in.by_name["a"].zero_()
    stand_in.by_name["b"] = torch.zeros(1)


def attribute(stand_in: Any) -> None:
    stand_in.weight.packed.zero_()


def bound(stand_in: Any) -> None:
    """By a method that a parameter knows."""
    stand_in.weight.load.__self__.weight.data.zero_()


def table(stand_in: Any) -> None:
    stand_in.table.add_(1)


def data(stand_in: Any) -> None:
    assert stand_in.facts.of is stand_in
    stand_in.facts.limits.zero_()


CASES = {
    nothing: (),
    shuffle: ("weight",),
    replace: ("weight", "weight.packed"),
    transpose: ("weight",),
    cache: ("cache",),
    derive: ("derived",),
    add: ("packed",),
    remove: ("scale",),
    child: ("child.weight",),
    child_replaced: ("child.bias",),
    entries: ("by_name.a", "by_name.b", "parts.0"),
    attribute: ("weight.packed",),
    bound: ("child.weight",),
    table: ("table",),
    data: (),
}


def everything(held: Any) -> dict[str, Any]:
    """All that a layer holds, by name."""
    deep = {"parts.1.0": held.parts[1][0], "packed": held.weight.packed, "limits": held.facts.limits}
    rest = {"length": len(held.parts[1]), "done": held.method.done, "blocks": list(held.method.blocks)}
    return {**dict(checksum.held_tensors(held)), **deep, "method": held.method.table, **rest}


@pytest.mark.parametrize(("step", "changed"), CASES.items(), ids=[step.__name__ for step in CASES])
def test_a_change_is_named_and_happens_elsewhere(step: Callable[[Any], None], changed: tuple[str, ...]) -> None:
    held = layer()
    before = everything(held)
    copies = copied(before)
    assert changed_by(step, held) == changed
    same(held, before, copies)


def copied(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.data.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def same(held: Any, before: dict[str, Any], copies: dict[str, Any]) -> None:
    """The same objects, addresses and bytes."""
    after = everything(held)
    assert after.keys() == before.keys()
    for name, was in copies.items():
        if isinstance(was, torch.Tensor):
            assert after[name] is before[name], name
            assert torch.equal(after[name].to(torch.float32), was.to(torch.float32)), name
        else:
            assert after[name] == was, name


def test_the_object_whose_method_it_is_stays_as_it_is_too() -> None:
    held = layer()
    before = everything(held)
    copies = copied(before)
    assert changed_by(held.method.process, held) == ()
    same(held, before, copies)


def test_what_is_the_engines_is_not_copied() -> None:
    held = layer()
    held.group, held.parent = object(), [torch.nn.Linear(2, 2)]

    def step(stand_in: Any) -> None:
        assert stand_in.group is held.group
        assert stand_in.parent[0] is held.parent[0]
        assert stand_in.parent is not held.parent

    assert changed_by(step, held) == ()


def buffer(held: Any) -> None:
    held.cache = torch.ones(5)


def flag(held: Any) -> None:
    held.interleaved = True


def method_flag(held: Any) -> None:
    held.method.done = 1


def method_list(held: Any) -> None:
    held.method.blocks = [1, 32]


def parameter_flag(held: Any) -> None:
    held.scale.format = True


def dtype(held: Any) -> None:
    held.derived = held.derived.half()


def of_child(held: Any) -> None:
    held.child = torch.nn.Linear(2, 3)


def fact(held: Any) -> None:
    held.facts.limits = torch.ones(3)


@pytest.mark.parametrize(
    "differ", [buffer, flag, method_flag, method_list, parameter_flag, dtype, of_child, fact, remove, replace]
)
def test_layers_that_differ_in_what_decides_have_other_forms(differ: Callable[[Any], None]) -> None:
    one, other = layer(), layer()
    other.layer_id, one.layer_id, other.prefix = 1, 0, "layers.1"
    other.weight.data.zero_()
    other.register_forward_hook(lambda *_: None)
    assert form(one.method.process, one) == form(other.method.process, other), "their place and their bytes alone"
    differ(other)
    assert form(one.method.process, one) != form(other.method.process, other)


def test_what_the_step_raises_is_raised() -> None:
    def fail(stand_in: Any) -> None:
        raise NotImplementedError("no such kernel")

    with pytest.raises(NotImplementedError, match="no such kernel"):
        changed_by(fail, layer())
