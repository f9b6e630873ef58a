"""Tables of copies, compared with a copy of one element after the other."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_recv import copies

WORDS = 1 << 15  # more than the largest box reaches


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]:
    """A shape, strides of a source and of a target without overlap, and their offsets, in items."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))

    def strides() -> tuple[int, ...]:
        order = draw(st.permutations(range(len(shape))))
        step, found = draw(st.integers(1, 2)), [0] * len(shape)
        for dim in order:
            found[dim] = step
            step *= max(shape[dim], 1) if draw(st.booleans()) else max(shape[dim], 1) + 1
        return tuple(found)

    def reach(of: tuple[int, ...]) -> int:
        return sum(max(n - 1, 0) * s for n, s in zip(shape, of, strict=True)) + 1

    source, target = strides(), strides()
    if draw(st.booleans()) and shape:  # a broadcast dimension
        dim = draw(st.integers(0, len(shape) - 1))
        source = (*source[:dim], 0, *source[dim + 1 :])
    return (
        *(shape, source, target),
        draw(st.integers(0, max(WORDS - reach(source), 0))),
        draw(st.integers(0, max(WORDS - reach(target), 0))),
    )


def address(start: int, strides: tuple[int, ...], index: tuple[int, ...]) -> int:
    """Of one item."""
    return start + sum(i * s for i, s in zip(index, strides, strict=True))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(boxes(), min_size=1, max_size=3),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex128]),
)
def test_a_table_copies_what_a_loop_over_items_copies(
    drawn: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]], dtype: torch.dtype
) -> None:
    size = dtype.itemsize
    generator = torch.Generator().manual_seed(1)
    sources = [torch.randint(0, 256, (WORDS * size + 3,), dtype=torch.uint8, generator=generator)[3:] for _ in drawn]
    targets = [torch.zeros(WORDS * size, dtype=torch.uint8) for _ in drawn]
    expected = [target.numpy().copy() for target in targets]
    rows: list[tuple[int, ...]] = []
    for number, (shape, source_strides, target_strides, source_start, target_start) in enumerate(drawn):
        other = len(drawn) - 1 - number  # sources and targets are counted apart
        rows += copies.rows_of(
            (number, source_start * size, source_strides), (other, target_start * size, target_strides), shape, size
        )
        for index in itertools.product(*(range(n) for n in shape)):
            a, b = address(source_start, source_strides, index), address(target_start, target_strides, index)
            expected[other][b * size : (b + 1) * size] = sources[number][a * size : (a + 1) * size].numpy()
    table = copies.table(rows)
    copies.TorchCopier(table).run(copies.Places.of(sources), copies.Places.of(targets))
    for target, wanted in zip(targets, expected, strict=True):
        assert np.array_equal(target.numpy(), wanted)
    assert copies.nbytes(table) == sum(int(np.prod(shape)) * size for shape, *_ in drawn)


def test_neighbours_are_merged() -> None:
    whole = list(copies.rows_of((0, 0, (12, 4, 1)), (1, 8, (12, 4, 1)), (2, 3, 4), 2))
    assert whole == [(0, 0, 1, 8, 48, 1, 0, 0, 1, 0, 0)]
    shard = list(copies.rows_of((0, 8, (16, 1)), (0, 0, (4, 1)), (6, 4), 2))  # columns 4 to 7 of 16
    assert shard == [(0, 8, 0, 0, 8, 6, 32, 8, 1, 0, 0)]
    assert len(list(copies.rows_of((0, 0, (64, 16, 4, 1)), (0, 0, (100, 30, 7, 2)), (3, 2, 9, 2), 1))) == 4


def test_a_model_of_large_shards_needs_few_rows() -> None:
    rows = list(copies.rows_of((0, 4096, (8192, 1)), (0, 0, (4096, 1)), (8192, 4096), 2))
    assert rows == [(0, 4096, 0, 0, 8192, 8192, 16384, 8192, 1, 0, 0)]
