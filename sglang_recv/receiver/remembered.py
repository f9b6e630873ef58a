"""Committed sessions that a rank remembers, so that the next one like it needs to name nothing.

Trainers send the same tensors in the same buckets after every step. A sender gives a session a token, and once it is
committed the rank keeps what came in it: names, dtypes, shapes and places. A later session that recalls the token sends
the number of a round instead of its tensors, and the rank checks and hashes nothing again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import torch

from sglang_recv import manifest
from sglang_recv.errors import BadBufferError
from sglang_recv.receiver.bucket import Layout, StagedBucket
from sglang_recv.wire import MAX_TENSORS, Bucket, TensorSpec

#: Sessions that a rank remembers; the one that was used least recently is forgotten first.
MAX_REMEMBERED: Final = 8


@dataclass(frozen=True)
class Round:
    """What came in one round.

    Parameters
    ----------
    layouts
        Its buckets.
    which, offsets
        For each bucket and tensor: the number of its buffer among those of the round, and where it begins in it, in
        bytes. int64.
    """

    layouts: tuple[Layout, ...]
    which: tuple[np.ndarray, ...]
    offsets: tuple[np.ndarray, ...]

    @cached_property
    def _flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Buffer, start and size of every tensor."""
        empty = [np.empty(0, np.int64)]
        sizes = [layout.sizes for layout in self.layouts]
        return tuple(np.concatenate([*parts, *empty]) for parts in (self.which, self.offsets, sizes))  # type: ignore[return-value]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """How many bytes of each buffer the round needs."""
        which, offsets, sizes = self._flat
        count = int(which[sizes > 0].max(initial=-1)) + 1
        return tuple(int((offsets + sizes)[(which == buffer) & (sizes > 0)].max()) for buffer in range(count))

    @property
    def specs(self) -> list[TensorSpec]:
        """Of all tensors."""
        return [spec for layout in self.layouts for spec in layout.specs]

    def moved(self, places: Sequence[int]) -> tuple[Round, tuple[int, ...]]:
        """The same tensors elsewhere: buffer and offset of each, in turn. Also returns the buffers that it counts.

        Raises
        ------
        BadBufferError
            When ``places`` cannot be places of these tensors.
        """
        count = sum(len(layout) for layout in self.layouts)
        try:
            found = np.array(places, np.int64).reshape(-1, 2)
        except (OverflowError, ValueError) as error:
            raise BadBufferError(f"{len(places)} numbers are no places: {error}", fix="report this") from error
        sizes = self._flat[2]
        # The upper bound is far beyond any memory, and keeps sums within 64 bits.
        bad = ((found < 0) | (found > manifest.MAX_SIZE << 10)).any(axis=1) | (found[:, 1] % manifest.ALIGNMENT != 0)
        if len(found) != count or bad.any():
            wrong = found[bad][:1].tolist() or len(found)
            raise BadBufferError(
                f"places of {count} tensors are needed, got {len(found)}; the first that cannot be: {wrong}",
                fix=f"send a buffer and an offset for each tensor; offsets are multiples of {manifest.ALIGNMENT}",
            )
        buffers, which = np.unique(found[:, 0], return_inverse=True)
        used = np.unique(which[sizes > 0])  # tensors without bytes need no buffer
        which = np.searchsorted(used, np.where(sizes > 0, which, used[0] if len(used) else 0))
        cuts = np.cumsum([len(layout) for layout in self.layouts])[:-1]
        round_ = Round(self.layouts, tuple(np.split(which, cuts)), tuple(np.split(found[:, 1], cuts)))
        return round_, tuple(int(buffers[number]) for number in used)

    def staged(self, device: torch.device, memories: Sequence[manifest.Views]) -> list[StagedBucket]:
        """Its buckets in these buffers, which are large enough."""
        return [
            StagedBucket(layout, device, memories, which, offsets)
            for layout, which, offsets in zip(self.layouts, self.which, self.offsets, strict=True)
        ]


def round_of(buckets: Sequence[Bucket], mapped: Mapping[int, int]) -> tuple[Round, tuple[int, ...]]:
    """What a sender wrote out, and the buffers that it counts.

    Parameters
    ----------
    buckets
        Specs and places.
    mapped
        Bytes of the buffers that there are.

    Raises
    ------
    BadBufferError
        When a tensor lies outside of them, or not where tensors may begin.
    """
    numbers: dict[int, int] = {}
    layouts, whiches, all_offsets = [], [], []
    for bucket in buckets:
        layout = Layout([entry.spec for entry in bucket.entries])
        which, offsets = np.zeros(len(layout), np.int64), np.zeros(len(layout), np.int64)
        for place, entry in enumerate(bucket.entries):
            size = manifest.nbytes(entry.spec)
            if not size:
                continue
            limit = mapped.get(entry.buffer, 0)
            if entry.offset < 0 or entry.offset + size > limit or entry.offset % manifest.ALIGNMENT:
                raise misplaced(entry.spec.name, entry.offset, size, entry.buffer, limit)
            which[place] = numbers.setdefault(entry.buffer, len(numbers))
            offsets[place] = entry.offset
        layouts.append(layout)
        whiches.append(which)
        all_offsets.append(offsets)
    return Round(tuple(layouts), tuple(whiches), tuple(all_offsets)), tuple(numbers)


def misplaced(name: str, offset: int, size: int, buffer: int, mapped: int) -> BadBufferError:
    """For a tensor that lies outside of what is mapped, or not where tensors may begin."""
    return BadBufferError(
        f"{name}: bytes {offset} to {offset + size} of buffer {buffer}, which has {mapped} mapped bytes; offsets are "
        f"multiples of {manifest.ALIGNMENT}",
        fix="offer the buffer before the Load that uses it, and keep entries inside it",
    )


@dataclass
class Memory:
    """What this rank remembers, by token."""

    _sessions: dict[str, tuple[Round, ...]] = field(default_factory=dict)

    def put(self, token: str, rounds: Sequence[Round]) -> None:
        """Keep a committed session."""
        self._sessions.pop(token, None)
        self._sessions[token] = tuple(rounds)
        while len(self._sessions) > MAX_REMEMBERED or self._entries() > MAX_TENSORS:
            self._sessions.pop(next(iter(self._sessions)))

    def get(self, token: str) -> tuple[Round, ...] | None:
        """The rounds of the session with this token; None when it is not remembered."""
        found = self._sessions.pop(token, None)
        if found is not None:
            self._sessions[token] = found
        return found

    def _entries(self) -> int:
        """Tensors, buckets and rounds together: empty ones take memory too."""
        rounds = [part for session in self._sessions.values() for part in session]
        return len(rounds) + sum(1 + len(layout) for part in rounds for layout in part.layouts)
