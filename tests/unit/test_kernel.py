"""The kernel against torch's copies: every item size, rows with and without steps, one tile and many.

Without a GPU, where triton is installed: ``TRITON_INTERPRET=1 pytest tests/unit/test_kernel.py``.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from sglang_recv import copies

pytest.importorskip("triton", reason="needs triton, which comes with torch for CUDA")
from sglang_recv.copies import Places
from sglang_recv.copies_triton import STEPS, TILE, WHOLE, TritonCopier

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs an NVIDIA GPU (torch.cuda.is_available() is false), or TRITON_INTERPRET=1",
)


def case(seed: int) -> tuple[list[tuple[int, ...]], list[torch.Tensor], int]:
    """Rows between random boxes, their sources, and how many bytes each target needs."""
    draw = random.Random(seed)
    rows: list[tuple[int, ...]] = []
    sources, most = [], 0
    for number in range(draw.randint(1, 5)):
        shape = [draw.randint(1, 6) for _ in range(draw.randint(0, 4))]
        if shape and draw.random() < 0.5:
            shape[-1] = draw.choice([64, 1000, 2 * TILE + 8])
        item = draw.choice([1, 2, 4, 8])

        def strides() -> tuple[list[int], int]:
            order = list(reversed(range(len(shape))))  # noqa: B023 - called in this turn
            if draw.random() < 0.5:
                draw.shuffle(order)
            found, step = [0] * len(shape), 1  # noqa: B023
            for dim in order:
                found[dim] = step
                step *= shape[dim] + (draw.random() < 0.3)  # noqa: B023
            return found, step

        (source, source_items), (target, target_items) = strides(), strides()
        start, end = (draw.randint(0, 3) * draw.choice([1, 16]) * item for _ in range(2))
        rows += copies.rows_of((number, start, source), (number, end, target), shape, item)
        sources.append(torch.randint(0, 256, (start + source_items * item + 64,), dtype=torch.uint8, device=DEVICE))
        most = max(most, end + target_items * item + 64)
    return rows, sources, most


@pytest.mark.parametrize("seed", range(60))
def test_the_kernel_copies_what_torch_copies(seed: int) -> None:
    rows, sources, size = case(seed)
    targets = [[torch.zeros(size, dtype=torch.uint8, device=DEVICE) for _ in sources] for _ in range(2)]
    table = copies.table(rows)
    copies.TorchCopier(table).run(Places.of(sources), Places.of(targets[0]))
    TritonCopier(table, DEVICE).run(Places.of(sources), Places.of(targets[1]))
    for expected, found in zip(*targets, strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8, 16])
def test_a_table_follows_its_addresses(shift: int) -> None:
    """The same table runs between other places, whose alignment allows larger or smaller items."""
    size = 2 * max(WHOLE, TILE * STEPS) * 8 + 24  # more than two chunks
    table = copies.table([(0, 0, 0, 0, size, 1, 0, 0, 1, 0, 0), (0, 5, 1, 3, 12, 1, 0, 0, 1, 0, 0)])
    kernel = TritonCopier(table, DEVICE)
    memory = torch.randint(0, 256, (size + 64,), dtype=torch.uint8, device=DEVICE)
    for start in (0, shift, 0, 16 + shift):
        source = memory[start:]
        targets = [
            torch.zeros(size + 32, dtype=torch.uint8, device=DEVICE),
            torch.zeros(64, dtype=torch.uint8, device=DEVICE),
        ]
        kernel.run(Places.of([source]), Places.of([targets[0][shift:], targets[1]]))
        assert torch.equal(targets[0][shift : shift + size], source[:size])
        assert not targets[0][:shift].any()
        assert not targets[0][shift + size :].any(), "nothing beyond the piece"
        assert torch.equal(targets[1][3:15], source[5:17])


@pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU: elsewhere torch copies")
def test_a_gpu_gets_the_kernel() -> None:
    memory = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    assert isinstance(copies.copier(copies.table([]), memory.device), TritonCopier)
    copies.warm_up(DEVICE)
