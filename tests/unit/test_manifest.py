"""Specs: sizes, digests, alignment, and what is wrong with a manifest by itself."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_recv import manifest
from sglang_recv.errors import LimitError, ManifestError
from sglang_recv.wire import MAX_DIMS, MAX_NAME_CHARS, TensorSpec

DTYPES = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int64", "bool"]
OUT_OF_RANGE = f"has over 16 dimensions or a size outside 0 to {1 << 40}"
SPECS = st.builds(
    TensorSpec,
    st.text(st.characters(codec="utf-8", exclude_characters="\0\n"), min_size=1, max_size=12),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 2048), max_size=4).map(tuple),
)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 5, 7)])
def test_spec_describes_the_tensor(name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=getattr(torch, name))
    spec = manifest.spec_of("w", tensor)
    assert spec == TensorSpec("w", name, shape)
    assert manifest.dtype_of(name) is tensor.dtype
    assert manifest.dtype_name(tensor.dtype) == name
    assert manifest.nbytes(spec) == tensor.untyped_storage().nbytes()


def test_spec_of_a_view_has_the_bytes_of_the_contiguous_tensor() -> None:
    view = torch.zeros(8, 6, dtype=torch.bfloat16)[::2, 1:4].t()
    spec = manifest.spec_of("w", view)
    assert spec.shape == (3, 4)
    assert manifest.nbytes(spec) == 24


@pytest.mark.parametrize("name", ["bf16", "torch.bfloat16", "", "Tensor", "nn", "float32 ", "__name__", "float" * 100])
def test_names_that_are_no_dtypes_are_refused(name: str) -> None:
    with pytest.raises(ManifestError, match="is not a torch dtype") as caught:
        manifest.dtype_of(name)
    assert repr(name[:80]) in caught.value.message
    assert "bfloat16" in caught.value.fix


@given(st.integers(0, 1 << 62))
def test_align_is_the_next_multiple(offset: int) -> None:
    aligned = manifest.align(offset)
    assert aligned % 256 == 0
    assert offset <= aligned < offset + 256


@given(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4).map(tuple), st.integers(0, 3), st.integers(0, 7)
)
def test_views_are_the_bytes_at_the_offset(name: str, shape: tuple[int, ...], slot: int, spare: int) -> None:
    """Compared with plain slicing; the buffer's size need not be a multiple of the item's."""
    dtype = manifest.dtype_of(name)
    size = manifest.nbytes(TensorSpec("w", name, shape))
    buffer = torch.arange(256 * slot + size + spare).remainder(2).to(torch.uint8)
    views = manifest.Views(buffer)
    assert views.nbytes == len(buffer)
    found = views.at(256 * slot, dtype, shape)
    assert (found.dtype, tuple(found.shape)) == (dtype, shape)
    assert found.is_contiguous()
    assert found.contiguous().reshape(-1).view(torch.uint8).tolist() == buffer[256 * slot : 256 * slot + size].tolist()
    if size:
        assert found.data_ptr() == buffer.data_ptr() + 256 * slot
        buffer[256 * slot] ^= 1
        assert found.view(-1).view(torch.uint8)[0] == buffer[256 * slot], "a view, not a copy"


def test_digest_is_the_documented_formula() -> None:
    specs = [TensorSpec("b", "float32", (2, 3)), TensorSpec("a", "bfloat16", ())]
    assert manifest.digest(specs) == hashlib.sha256(b"a\0bfloat16\0\nb\0float32\x002,3").hexdigest()
    assert manifest.digest([]) == hashlib.sha256(b"").hexdigest()


@given(st.lists(SPECS, max_size=5), st.randoms())
def test_digest_ignores_order_and_nothing_else(specs: list[TensorSpec], random: object) -> None:
    shuffled = list(specs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert manifest.digest(shuffled) == manifest.digest(specs)
    other = TensorSpec("new", "int8", (1,))
    assert manifest.digest([*specs, other]) != manifest.digest(specs)
    for index, spec in enumerate(specs):
        for changed in (
            TensorSpec(spec.name + "x", spec.dtype, spec.shape),
            TensorSpec(spec.name, "int16", spec.shape),
            TensorSpec(spec.name, spec.dtype, (*spec.shape, 1)),
        ):
            assert manifest.digest([*specs[:index], changed, *specs[index + 1 :]]) != manifest.digest(specs)


@given(SPECS)
def test_good_specs_have_no_problems(spec: TensorSpec) -> None:
    assert manifest.problems_of(spec) == []
    assert manifest.check_specs([spec]) == []


@pytest.mark.parametrize(
    ("spec", "finding"),
    [
        (TensorSpec("", "float32", (1,)), "a name of 0 characters; 1 to 1024 are allowed: ''"),
        (TensorSpec("n" * 1025, "float32", (1,)), f"a name of 1025 characters; 1 to 1024 are allowed: {'n' * 60!r}"),
        (TensorSpec("w", "float32", (1, -1)), f"w: shape [1, -1] {OUT_OF_RANGE}"),
        (TensorSpec("w", "float32", (1,) * 17), f"w: shape {[1] * 17} {OUT_OF_RANGE}"),
        (TensorSpec("w", "float32", (2, 1 << 41)), f"w: shape [2, {1 << 41}] {OUT_OF_RANGE}"),
        (TensorSpec("w", "quint8", (1,)), "w: 'quint8' is not a torch dtype"),
        (TensorSpec("w", "bits8", (1,)), "w: 'bits8' is not a torch dtype"),
        (TensorSpec("w", "bf16", (1,)), "w: 'bf16' is not a torch dtype"),
    ],
)
def test_each_problem_is_named(spec: TensorSpec, finding: str) -> None:
    assert manifest.problems_of(spec) == [finding]


def test_values_at_the_limits_are_good() -> None:
    assert manifest.problems_of(TensorSpec("n" * MAX_NAME_CHARS, "float32", (1,) * MAX_DIMS)) == []
    assert manifest.problems_of(TensorSpec("w", "float32", (0, manifest.MAX_SIZE))) == []


def test_everything_that_is_wrong_is_found() -> None:
    good, bad = TensorSpec("w", "float32", (1,)), TensorSpec("v", "bf16", (-1,))
    assert manifest.check_specs([good, bad, good, bad, good]) == [
        f"v: shape [-1] {OUT_OF_RANGE}",
        "v: 'bf16' is not a torch dtype",
        "w: sent twice",
        f"v: shape [-1] {OUT_OF_RANGE}",
        "v: 'bf16' is not a torch dtype",
        "v: sent twice",
        "w: sent twice",
    ]


def test_too_many_tensors_are_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MAX_TENSORS", 3)
    specs = [TensorSpec(str(i), "float32", ()) for i in range(4)]
    assert manifest.check_specs(specs[:3]) == []
    with pytest.raises(LimitError, match="more than 3 tensors"):
        manifest.check_specs(specs)


@pytest.mark.parametrize("count", [1, 99, 100, 101, 5000])
def test_error_shows_a_hundred_findings_and_counts_the_rest(count: int) -> None:
    error = manifest.manifest_error([f"line {i}" for i in range(count)], "it does not fit")
    assert error.message == f"it does not fit: {count} problem(s)"
    expected = [f"line {i}" for i in range(min(count, 100))]
    assert list(error.details) == expected + ([f"... and {count - 100} more"] if count > 100 else [])
    assert "partial" in error.fix
