"""Which bytes of the parameters did a load reach, and which tensors did it read?

Success of ``load_weights`` says little: SGLang's loaders skip names that they do not know, and nothing tells whether
every parameter got its bytes. So loads run under a dispatch mode that sees each operation. A parameter is covered
when writes reached all of its bytes; a tensor was read when an operation other than a view took it (or a view of it).
Work that a loader does on other threads is invisible to a dispatch mode (torch keeps modes per thread).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_recv.errors import ApplyError


def runs(tensor: torch.Tensor) -> tuple[np.ndarray, int]:
    """Addresses of the contiguous runs of ``tensor`` and the bytes of each run."""
    item = tensor.element_size()
    if tensor.numel() == 0:
        return np.empty(0, np.int64), 0
    start = tensor.data_ptr()
    dims = sorted(((s * item, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1), reverse=True)
    length = item
    while dims and dims[-1][0] == length:
        length *= dims.pop()[1]
    starts = np.array([start], np.int64)
    for stride, count in dims:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return starts, length


class Ranges:
    """A set of address ranges, merged when asked for."""

    def __init__(self) -> None:
        self._starts: list[np.ndarray] = []
        self._stops: list[np.ndarray] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Add every byte of ``tensor``."""
        starts, length = runs(tensor)
        if length:
            self._starts.append(starts)
            self._stops.append(starts + length)

    def merged(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts and stops of the disjoint union, in order."""
        if not self._starts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        starts, stops = np.concatenate(self._starts), np.concatenate(self._stops)
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(stops[order])
        first = np.concatenate([[True], starts[1:] > reach[:-1]])
        last = np.concatenate([first[1:], [True]])
        merged = starts[first], reach[last]
        self._starts, self._stops = [merged[0]], [merged[1]]
        return merged

    def missing_bytes(self, tensor: torch.Tensor) -> int:
        """How many bytes of ``tensor`` lie outside this set."""
        starts, stops = self.merged()
        wanted, length = runs(tensor)
        if not length:
            return 0
        if not len(starts):
            return len(wanted) * length
        # Bytes of the set below an address, by which the covered bytes of any run are a difference.
        below = np.concatenate([[0], np.cumsum(stops - starts)])

        def covered_below(address: np.ndarray) -> np.ndarray:
            index = np.searchsorted(starts, address, side="right")
            inside = np.where(index > 0, np.minimum(address, stops[index - 1]) - starts[index - 1], 0)
            return np.where(index > 0, below[index - 1] + np.maximum(inside, 0), 0)

        covered = covered_below(wanted + length) - covered_below(wanted)
        return int(len(wanted) * length - covered.sum())


@cache
def _roles(func: Any) -> tuple[frozenset[int | str], bool]:
    """Positions and names of the arguments that ``func`` writes, and whether it is a view (reads no bytes)."""
    schema = func._schema
    written: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {position, argument.name}
    view = not written and any(r.alias_info is not None for r in schema.returns)
    return frozenset(written), view


class CoverageMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records writes and reads while active.

    Parameters
    ----------
    written
        Gets the bytes that operations wrote.
    staged
        (first address, last address + 1, name) of each tensor of the bucket in staging, in order of addresses.
    """

    def __init__(self, written: Ranges, staged: Sequence[tuple[int, int, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written = written
        self._staged = staged
        self._starts = [start for start, _, _ in staged]
        self.read: set[str] = set()

    def _name_at(self, tensor: torch.Tensor) -> str | None:
        address = tensor.data_ptr()
        index = bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._staged[index][1]:
            return self._staged[index][2]
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written, view = _roles(func)
        if not view:
            for place, value in (*enumerate(args), *kwargs.items()):
                for tensor in _tensors(value):
                    name = self._name_at(tensor)
                    if place not in written:
                        if name is not None:
                            self.read.add(name)
                    elif name is None:
                        self._written.add(tensor)
                    else:
                        raise ApplyError(
                            f"the loader changes its input {name!r} in place ({func}), which other ranks also read",
                            fix="report the model; until then update it with SGLang's own endpoints",
                        )
        return func(*args, **kwargs)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, (list, tuple)):
        return tuple(v for v in value if isinstance(v, torch.Tensor))
    return ()
