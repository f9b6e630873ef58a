"""Tensors as a receiver finds them in staging, for tests without a session."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from sglang_recv import manifest
from sglang_recv.copies import storage_bytes
from sglang_recv.receiver.bucket import Layout, StagedBucket


def staged(tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedBucket:
    """A bucket of contiguous tensors where they are, each in its own storage."""
    pairs = list(tensors)
    found = [storage_bytes(tensor) for _, tensor in pairs]
    return StagedBucket(
        Layout([manifest.spec_of(name, tensor) for name, tensor in pairs]),
        torch.device("cpu"),
        [manifest.Views(memory) for memory, _ in found],
        np.arange(len(found)),
        np.array([offset for _, offset in found], np.int64),
    )
