"""A bucket in staging: what is in it, and where. Tensors are made of it only for those who need them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from sglang_recv import manifest
from sglang_recv.copies import Places
from sglang_recv.receiver.host import Tensors
from sglang_recv.wire import TensorSpec


class Layout:
    """Names, dtypes and shapes of a bucket, in order: what a loader's behaviour depends on.

    Parameters
    ----------
    specs
        One per tensor.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = tuple(specs)

    def __len__(self) -> int:
        return len(self.specs)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the tensors, in order."""
        return tuple(spec.name for spec in self.specs)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of each tensor, int64."""
        return np.array([manifest.nbytes(spec) for spec in self.specs], np.int64)

    @cached_property
    def packed(self) -> np.ndarray:
        """Where each tensor begins when they lie one after the other, and where the last one ends, int64."""
        unit = manifest.ALIGNMENT
        return np.concatenate([[0], np.cumsum(-(-self.sizes // unit) * unit)])

    @cached_property
    def digest(self) -> bytes:
        """A name for this layout."""
        lines = (f"{spec.name} {spec.dtype} {spec.shape}" for spec in self.specs)
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()


class StagedBucket:
    """The tensors of one bucket, in mapped memory.

    Parameters
    ----------
    layout
        What they are.
    device
        Of the memories, and of tensors without bytes.
    memories
        The mapped buffers.
    which
        For each tensor the number of its memory, int64.
    offsets
        For each tensor where it begins in that memory, in bytes; a multiple of its item's size. int64.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        memories: Sequence[manifest.Views],
        which: np.ndarray,
        offsets: np.ndarray,
    ) -> None:
        self.layout = layout
        self._device = device
        self._memories = memories
        self._which = which
        self._offsets = offsets

    @cached_property
    def places(self) -> Places:
        """The same for copies of bytes."""
        return Places([views.buffer for views in self._memories], self._which, self._offsets)

    def spans(self) -> tuple[np.ndarray, np.ndarray]:
        """Addresses where tensors start and stop, those without bytes left out."""
        some = self.layout.sizes > 0
        starts = self.places.addresses[some]
        return starts, starts + self.layout.sizes[some]

    def tensors(self) -> Tensors:
        """What a loader gets: a new view for each tensor."""
        found = []
        for spec, which, offset in zip(self.layout.specs, self._which.tolist(), self._offsets.tolist(), strict=True):
            dtype = manifest.dtype_of(spec.dtype)
            if 0 in spec.shape:
                found.append((spec.name, torch.empty(spec.shape, dtype=dtype, device=self._device)))
            else:
                found.append((spec.name, self._memories[which].at(offset, dtype, spec.shape)))
        return found
