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
from sglang_recv.copies_triton import TILE, TritonCopier

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
    copies.TorchCopier(table, targets[0]).run(sources)
    TritonCopier(table, targets[1]).run(sources)
    for expected, found in zip(*targets, strict=True):
        assert torch.equal(expected, found)


def test_a_source_that_is_not_aligned_is_refused() -> None:
    memory = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    kernel = TritonCopier(copies.table([(0, 0, 0, 0, 16, 1, 0, 0, 1, 0, 0)]), [memory])
    with pytest.raises(ValueError, match="no multiple of 16"):
        kernel.run([memory[1:]])
    TritonCopier(copies.table([(0, 0, 0, 32, 16, 1, 0, 0, 1, 0, 0)]), [memory], alignment=1).run([memory[1:]])


@pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU: elsewhere torch copies")
def test_a_gpu_gets_the_kernel() -> None:
    memory = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    assert isinstance(copies.copier(copies.table([]), [memory]), TritonCopier)
    copies.warm_up(DEVICE)
