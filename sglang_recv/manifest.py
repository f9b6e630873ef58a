"""Tensor specs: sizes, digests, alignment and the checks that need no model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Final

import torch

from sglang_recv.errors import LimitError, ManifestError
from sglang_recv.wire import MAX_DIMS, MAX_NAME_CHARS, MAX_TENSORS, TensorSpec

#: Every tensor in a buffer starts at a multiple of this many bytes, so that vector loads and views of any dtype work.
ALIGNMENT: Final = 256

#: Largest size of one dimension, so that the product of all of them is checked before torch sees it.
MAX_SIZE: Final = 1 << 40

KINDS: Final = ("full", "partial")


@lru_cache(256)
def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called ``name`` (``bfloat16``, ``float8_e4m3fn``, ...).

    Raises
    ------
    ManifestError
        When torch has no such dtype.
    """
    found = getattr(torch, name, None) if name.isidentifier() else None
    # quint8, bits8 and their like have no arithmetic of their own, and no checkpoint holds them.
    if not isinstance(found, torch.dtype) or name.startswith(("q", "bits")):
        raise ManifestError(
            f"{name[:80]!r} is not a torch dtype", fix="use torch's own name without 'torch.', e.g. 'bfloat16'"
        )
    return found


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of ``dtype`` without the prefix."""
    return str(dtype).removeprefix("torch.")


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The spec of ``tensor`` under ``name``."""
    return TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))


def nbytes(spec: TensorSpec) -> int:
    """Bytes of the tensor when contiguous."""
    return math.prod(spec.shape) * dtype_of(spec.dtype).itemsize


def align(offset: int) -> int:
    """``offset`` rounded up to :data:`ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@lru_cache(1 << 16)  # bounded: shapes come from the wire
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class Views:
    """Tensors inside a buffer: one torch call each, since an update has tens of thousands of them.

    Parameters
    ----------
    buffer
        uint8, shape [bytes], starting at the beginning of its storage.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self.nbytes = buffer.numel()

    def at(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The contiguous tensor at ``offset`` bytes, which is a multiple of the item's size and inside the buffer."""
        typed = self._typed.get(dtype)
        if typed is None:
            whole = self.nbytes - self.nbytes % dtype.itemsize
            typed = self._typed[dtype] = self.buffer[:whole].view(dtype)
        return typed.as_strided(shape, _contiguous_strides(shape), offset // dtype.itemsize)


def group_of(name: str, groups: Sequence[Sequence[str]]) -> tuple[str, ...] | None:
    """Names of all tensors that must be in one bucket with ``name``, itself included; None when there are none.

    ``groups`` holds alternatives for one part of a name: ``("q_a_proj", "kv_a_proj_with_mqa")``.
    """
    parts = name.split(".")
    for group in groups:
        for place, part in enumerate(parts):
            if part in group:
                return tuple(".".join([*parts[:place], mate, *parts[place + 1 :]]) for mate in group)
    return None


def digest(specs: Iterable[TensorSpec]) -> str:
    """A name for a set of specs, whatever their order: SHA-256 in hex."""
    lines = sorted(f"{s.name}\0{s.dtype}\0{','.join(map(str, s.shape))}" for s in specs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def problems_of(spec: TensorSpec) -> list[str]:
    """What is wrong with ``spec`` by itself, one line each."""
    found = []
    if not spec.name or len(spec.name) > MAX_NAME_CHARS:
        found.append(f"a name of {len(spec.name)} characters; 1 to {MAX_NAME_CHARS} are allowed: {spec.name[:60]!r}")
    if len(spec.shape) > MAX_DIMS or any(not 0 <= n <= MAX_SIZE for n in spec.shape):
        found.append(
            f"{spec.name}: shape {list(spec.shape)} has over {MAX_DIMS} dimensions or a size outside 0 to {MAX_SIZE}"
        )
    try:
        dtype_of(spec.dtype)
    except ManifestError as error:
        found.append(f"{spec.name}: {error.message}")
    return found


def check_specs(specs: Iterable[TensorSpec]) -> list[str]:
    """What is wrong with a manifest by itself: bad specs, duplicate names. One line per finding.

    Raises
    ------
    LimitError
        When there are more tensors than a session may name.
    """
    found: list[str] = []
    seen: set[str] = set()
    for count, spec in enumerate(specs, 1):
        if count > MAX_TENSORS:
            raise LimitError(f"more than {MAX_TENSORS} tensors in one manifest", fix="split the update")
        found += problems_of(spec)
        if spec.name in seen:
            found.append(f"{spec.name}: sent twice")
        seen.add(spec.name)
    return found


def manifest_error(findings: list[str], what: str) -> ManifestError:
    """One error that lists all ``findings`` (the first hundred by name, the rest by number)."""
    shown = findings[:100]
    if len(findings) > len(shown):
        shown.append(f"... and {len(findings) - len(shown)} more")
    return ManifestError(
        f"{what}: {len(findings)} problem(s)",
        fix="send Hugging Face names and full (not sharded) shapes in the dtypes of the engine's checkpoint; "
        "kind='partial' updates only some parameters; an iterator is checked by what the loaders really reach",
        details=tuple(shown),
    )
