"""How staging is divided into slots."""

from __future__ import annotations

import pytest

from sglang_recv.client.layout import Sizes, choose_sizes

MIB, GIB = 1 << 20, 1 << 30
PAGE = 2 * MIB


@pytest.mark.parametrize(
    ("wanted", "total", "largest", "expected"),
    [
        ((None, None), None, 0, Sizes(3, GIB, 3 * GIB)),  # a lazy source
        ((None, None), 61 * GIB, 600 * MIB, Sizes(3, GIB, 3 * GIB)),
        # A slot for the largest tensor, since a buffer of its own costs time in the middle of a session ...
        ((None, None), 16 * GIB, 1190 * MIB, Sizes(2, 1190 * MIB, 2380 * MIB)),
        # ... unless that leaves no two of them.
        ((None, None), 61 * GIB, 2 * GIB, Sizes(3, GIB, 5 * GIB)),
        ((None, None), 1200 * MIB, 300 * MIB, Sizes(3, 400 * MIB, 1200 * MIB)),
        ((None, None), 1200 * MIB, 512 * MIB, Sizes(3, 512 * MIB, 1536 * MIB)),
        ((None, None), 100 * MIB, MIB, Sizes(3, 64 * MIB, 192 * MIB)),
        ((None, None), 1000, 500, Sizes(3, PAGE, 3 * PAGE)),
        ((None, None), 0, 0, Sizes(3, PAGE, 3 * PAGE)),
        ((2, None), 61 * GIB, 600 * MIB, Sizes(2, 1536 * MIB, 3 * GIB)),
        ((None, 512 * MIB), 61 * GIB, 600 * MIB, Sizes(3, 512 * MIB, 2136 * MIB)),
        ((2, 512 * MIB), None, 0, Sizes(2, 512 * MIB, GIB)),
        ((2, 512 * MIB), 10 * MIB, MIB, Sizes(2, 10 * MIB, 20 * MIB)),
        ((1, 3 * MIB), 61 * GIB, 0, Sizes(1, 4 * MIB, 4 * MIB)),
    ],
)
def test_slots(wanted: tuple[int | None, int | None], total: int | None, largest: int, expected: Sizes) -> None:
    assert choose_sizes(*wanted, 3 * GIB, total, largest, PAGE) == expected


def test_little_memory_makes_small_slots_and_never_less_than_a_page() -> None:
    assert choose_sizes(None, None, 60 * MIB, 61 * GIB, 0, PAGE) == Sizes(3, 20 * MIB, 60 * MIB)
    assert choose_sizes(None, None, 0, 61 * GIB, 0, PAGE) == Sizes(3, PAGE, 3 * PAGE)
