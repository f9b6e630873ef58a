"""What a step after loading changes is seen on a stand-in, and the layer stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_recv.receiver.probe import changed_by


class Weight(torch.nn.Parameter):
    """As SGLang's: built with more than its data, and with a loader that its object knows."""

    def __new__(cls, *, data: torch.Tensor, loader: str) -> Weight:
        return super().__new__(cls, data, False)

    def __init__(self, *, data: torch.Tensor, loader: str) -> None:
        self.loader = loader


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


CASES = {
    nothing: (),
    shuffle: ("weight",),
    replace: ("weight",),
    transpose: ("weight",),
    cache: ("cache",),
    derive: ("derived",),
    add: ("packed",),
    remove: ("scale",),
}


@pytest.mark.parametrize(("step", "changed"), CASES.items(), ids=[step.__name__ for step in CASES])
def test_a_change_is_named_and_happens_elsewhere(step: Callable[[Any], None], changed: tuple[str, ...]) -> None:
    held = layer()
    before = {**held.state_dict(), "derived": held.derived, "table": held.table}
    copies = {name: (tensor, tensor.clone()) for name, tensor in before.items()}
    assert changed_by(step, held) == changed
    after = {**held.state_dict(), "derived": held.derived, "table": held.table}
    assert after.keys() == before.keys()
    for name, (tensor, copy) in copies.items():
        assert after[name].data_ptr() == tensor.data_ptr(), name
        assert torch.equal(after[name].to(torch.float32), copy.to(torch.float32)), name
    assert isinstance(held.weight, Weight)


def test_what_the_step_raises_is_raised() -> None:
    def fail(stand_in: Any) -> None:
        raise NotImplementedError("no such kernel")

    with pytest.raises(NotImplementedError, match="no such kernel"):
        changed_by(fail, layer())
