"""Kernels that pack known buckets: made once for each part, and not kept without end."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from sglang_recv.client import pack as pack_module
from sglang_recv.client.pack import Tables

TENSORS = 12
DEVICES = [torch.device("cuda", ordinal) for ordinal in range(8)]


@dataclass(eq=False)
class Kernel:
    """For so many tensors."""

    device: torch.device
    rows: int


class Kernels:
    """Notes which kernels are made, and which are still there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[torch.device, list[int]]] = []
        self.kept: weakref.WeakSet[Kernel] = weakref.WeakSet()
        monkeypatch.setattr(pack_module, "copier", self._make)

    def _make(self, rows: np.ndarray, device: torch.device) -> Kernel:
        self.made.append((device, rows["run"].tolist()))
        kernel = Kernel(device, len(rows))
        self.kept.add(kernel)
        return kernel

    def rows(self) -> int:
        """Of all kernels that are kept."""
        return sum(kernel.rows for kernel in self.kept)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


def tables() -> Tables:
    sizes = np.arange(1, TENSORS + 1)
    return Tables(sizes * 256, sizes)


@pytest.mark.parametrize("part", [1, 3, TENSORS])
def test_a_kernel_is_made_once_for_each_part_and_device(kernels: Kernels, part: int) -> None:
    made = tables()
    parts = [(device, first, first + part) for first in range(0, TENSORS, part) for device in DEVICES]
    first_time = [made.get(*one) for one in parts]
    assert [made.get(*one) for one in parts] == first_time
    assert kernels.made == [(device, list(range(first + 1, last + 1))) for device, first, last in parts]


def test_parts_that_vary_are_not_kept_without_end(kernels: Kernels) -> None:
    made = tables()
    for device in DEVICES[:2]:
        for first in range(TENSORS):
            for last in range(first + 1, TENSORS + 1):
                kernel: Any = made.get(device, first, last)
                assert (kernel.device, kernel.rows) == (device, last - first)
                del kernel
                assert kernels.rows() <= 2 * 4 * TENSORS
    assert {kernel.device for kernel in kernels.kept} == set(DEVICES[:2]), "one device's parts are not another's"
