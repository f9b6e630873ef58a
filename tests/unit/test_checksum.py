"""Digests: equal bytes give equal digests, any other bit gives another, by the formula in docs/wire.md."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_recv.receiver import checksum
from sglang_recv.receiver.checksum import digest, digests, held_tensors, overall

DTYPES = [
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float32,
    torch.float64,
    torch.int64,
]
MODULUS = 1 << 64


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
    return x ^ (x >> 31)


def reference(dtype: torch.dtype, shape: Sequence[int], raw: bytes) -> str:
    """The formula in docs/wire.md, one word at a time in Python's integers."""
    raw += bytes(-len(raw) % 8)
    a = b = 0
    for i, (word,) in enumerate(struct.iter_unpack("<Q", raw)):
        k = (i + 1) * 0x9E3779B97F4A7C15 % MODULUS
        m = mix(word ^ k)
        a = (a + m) % MODULUS
        b = (b + mix((m + k) % MODULUS)) % MODULUS
    text = f"{dtype}{list(shape)}{len(raw)}{a:016x}{b:016x}"
    return hashlib.blake2b(text.encode("ascii"), digest_size=16).hexdigest()


def tensor_of(raw: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    storage = torch.tensor(list(raw), dtype=torch.uint8)
    return storage.view(dtype).view(tuple(shape)) if raw else torch.zeros(tuple(shape), dtype=dtype)


@st.composite
def contents(draw: st.DrawFn) -> tuple[bytes, torch.dtype, list[int]]:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    return bytes(byte & 1 for byte in raw) if dtype is torch.bool else raw, dtype, shape


@settings(max_examples=200, deadline=None)
@given(contents())
def test_digest_is_the_documented_formula(content: tuple[bytes, torch.dtype, list[int]]) -> None:
    raw, dtype, shape = content
    assert digest(tensor_of(raw, dtype, shape)) == reference(dtype, shape, raw)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = bytes(range(256)) * 3 + b"odd"
    expected = reference(torch.uint8, [771], raw)
    for words in (1, 2, 7, 96, 97, 98, 1000):
        monkeypatch.setattr(checksum, "_CHUNK_WORDS", words)
        assert digest(tensor_of(raw, torch.uint8, [771])) == expected, words


@settings(max_examples=100, deadline=None)
@given(contents(), st.integers(1, 9))
def test_layout_and_place_in_memory_do_not_matter(content: tuple[bytes, torch.dtype, list[int]], shift: int) -> None:
    raw, dtype, shape = content
    tensor = tensor_of(raw, dtype, shape)
    expected = digest(tensor)
    assert digest(tensor.clone()) == expected
    assert digest(torch.nn.Parameter(tensor, requires_grad=False)) == expected
    if tensor.dim() > 1:
        transposed = tensor.transpose(0, -1).contiguous().transpose(0, -1)
        assert digest(transposed) == expected
    if tensor.numel() > 1:
        wide = torch.zeros(*shape, 2, dtype=dtype)
        wide[..., 1] = tensor
        assert digest(wide[..., 1]) == expected
    if raw:
        storage = torch.zeros(len(raw) + shift * dtype.itemsize, dtype=torch.uint8)
        storage[shift * dtype.itemsize :] = torch.tensor(list(raw), dtype=torch.uint8)
        misplaced = storage.view(torch.uint8)[shift * dtype.itemsize :].view(dtype).view(tuple(shape))
        assert digest(misplaced) == expected


def test_one_element_of_any_stride_has_a_digest() -> None:
    element = torch.arange(6.0)[1::3][:1]
    assert element.stride() == (3,)
    assert digest(element) == digest(torch.tensor([1.0]))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 24, 31])
def test_each_flipped_bit_changes_the_digest(size: int) -> None:
    raw = bytes((37 * i + 11) % 256 for i in range(size))
    seen = {digest(tensor_of(raw, torch.uint8, [size]))}
    for bit in range(8 * size):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(digest(tensor_of(bytes(changed), torch.uint8, [size])))
    assert len(seen) == 8 * size + 1


def test_order_shape_dtype_and_padding_matter() -> None:
    raw = bytes(range(1, 49))
    swapped = raw[8:16] + raw[:8] + raw[16:]
    seen = [
        digest(tensor_of(raw, torch.uint8, [48])),
        digest(tensor_of(swapped, torch.uint8, [48])),
        digest(tensor_of(raw, torch.uint8, [6, 8])),
        digest(tensor_of(raw, torch.uint8, [8, 6])),
        digest(tensor_of(raw, torch.int8, [48])),
        digest(tensor_of(raw, torch.bfloat16, [24])),
        digest(tensor_of(raw, torch.float16, [24])),
        digest(tensor_of(raw + b"\0", torch.uint8, [49])),
        digest(tensor_of(raw[:-1], torch.uint8, [47])),
        digest(torch.zeros(0, dtype=torch.uint8)),
        digest(torch.zeros(0, 3, dtype=torch.uint8)),
        digest(torch.zeros((), dtype=torch.uint8)),
    ]
    assert len(set(seen)) == len(seen)


def test_bits_count_not_values() -> None:
    zeros = torch.zeros(4)
    assert digest(zeros) != digest(-zeros)
    nan = torch.tensor([float("nan")])
    assert digest(nan) == digest(nan.clone())


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("cache", torch.full((2,), 2.0), persistent=False)
        self.scale = torch.tensor(3.0)
        self.parts = [torch.tensor(4.0), "text", torch.tensor(5.0)]
        self.pair = (torch.tensor(6.0), None)
        self.table: dict[Any, Any] = {"w": torch.tensor(7.0), 8: torch.tensor(8.0), "n": 1}
        self.number = 9


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))
        self.layers = torch.nn.ModuleList([Inner(), Inner()])
        self.tied = self.layers[0].weight
        self.absent = None
        self.register_buffer("none", None)


def test_parameters_buffers_and_attributes_are_found() -> None:
    inner = {"weight", "cache", "scale", "parts.0", "parts.2", "pair.0", "table.w", "table.8"}
    expected = {"bias", "tied", *(f"layers.{i}.{name}" for i in (0, 1) for name in inner)}
    found = [name for name, _ in held_tensors(Outer())]
    assert len(found) == len(set(found))
    assert set(found) == expected
    values = dict(held_tensors(Inner()))
    assert [
        float(values[n].max())
        for n in ("weight", "cache", "scale", "parts.0", "parts.2", "pair.0", "table.w", "table.8")
    ] == [float(n) for n in range(1, 9)]


def test_each_held_tensor_shows_in_its_digest_alone() -> None:
    model = Outer()
    before = digests(model)
    assert before == digests(Outer())
    assert all(len(value) == 32 for value in before.values())
    for name in before:
        changed = Outer()
        with torch.no_grad():
            dict(held_tensors(changed))[name].view(-1)[0] = 0.5
        after = digests(changed)
        shared = {"tied", "layers.0.weight"} if name in ("tied", "layers.0.weight") else {name}
        assert {n for n in before if before[n] != after[n]} == shared
        assert overall(after) != overall(before)


def test_overall_is_the_documented_formula() -> None:
    tensors = {"b": "1" * 32, "a": "0" * 32}
    expected = hashlib.blake2b(f"a {'0' * 32}\nb {'1' * 32}".encode(), digest_size=16).hexdigest()
    assert overall(tensors) == expected
    assert overall(dict(reversed(tensors.items()))) == expected
    assert overall({"a": "1" * 32, "b": "0" * 32}) != expected
