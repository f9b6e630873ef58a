"""The apply step: tensors of one bucket, in staging, into the model. Load plans will replace the call."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from sglang_recv.errors import ApplyError, RecvError
from sglang_recv.receiver.coverage import CopyMode, CoverageMode, Ranges, Staged

logger = logging.getLogger(__name__)

#: A bucket as the model gets it: names and tensors that lie in staging.
Tensors = Sequence[tuple[str, torch.Tensor]]


#: How many buckets are remembered before all are forgotten: senders whose layout differs each time must not pile up.
_MAX_OBSERVED: Final = 4096


class Applier(Protocol):
    """Loads buckets of one session into the model of one rank. Used on the scheduler thread only."""

    def apply(self, tensors: Tensors) -> None:
        """Load one bucket.

        Raises
        ------
        ApplyError
            When the loader fails; what it had written stays written.
        """

    def unread(self) -> tuple[str, ...]:
        """Names of tensors that nothing read."""

    def missing(self) -> tuple[str, ...]:
        """Parameters that were not reached completely, one line each."""


@dataclass(frozen=True)
class _Seen:
    """What one observed load of a bucket wrote and left unread."""

    written: Ranges
    unread: tuple[str, ...]


class Observations:
    """What was seen of earlier loads on this rank, by everything that a loader's behaviour depends on.

    A loader's copies follow from names, dtypes and shapes, of this bucket and, where a loader keeps something between
    calls, of the ones before it in the session. The key of a bucket is therefore a chained digest over all buckets so
    far: a session that repeats an earlier one is not watched again, one that deviates is watched from there on.

    Parameters
    ----------
    model
        The model of this rank. Nothing is kept across a change of its parameters' addresses.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._addresses: tuple[int, ...] = ()
        self._seen: dict[bytes, _Seen] = {}
        self._complete: set[bytes] = set()
        #: False once this model's loaders did something to tensors that is not a copy.
        self.only_copies = True

    def begin(self) -> bytes:
        """The key that a session starts from."""
        addresses = tuple(parameter.data_ptr() for parameter in self._model.parameters())
        if addresses != self._addresses or len(self._seen) > _MAX_OBSERVED:
            self._addresses = addresses
            self._seen.clear()
            self._complete.clear()
        return b""

    @staticmethod
    def advance(key: bytes, tensors: Tensors) -> bytes:
        """The key after one more bucket."""
        text = "\n".join(f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors)
        return hashlib.blake2b(key + text.encode(), digest_size=16).digest()

    def get(self, key: bytes) -> _Seen | None:
        """What was seen under ``key``."""
        return self._seen.get(key)

    def put(self, key: bytes, written: Ranges, unread: tuple[str, ...]) -> _Seen:
        """Keep what was seen."""
        seen = self._seen[key] = _Seen(written, unread)
        return seen

    def complete(self, key: bytes) -> bool:
        """True when the buckets up to ``key`` were found to reach every byte of every parameter."""
        return key in self._complete

    def mark_complete(self, key: bytes) -> None:
        """Keep that finding."""
        self._complete.add(key)


class StockApplier:
    """Calls the model's own ``load_weights``, and knows what it read and what it reached.

    Parameters
    ----------
    model
        The model of this rank.
    observations
        What earlier sessions saw; this one adds to it.
    """

    def __init__(self, model: torch.nn.Module, observations: Observations) -> None:
        self._model: Any = model
        self._observations = observations
        self._key = observations.begin()
        self._written: list[Ranges] = []
        self._staged = Ranges()
        self._unread: list[str] = []

    def apply(self, tensors: Tensors) -> None:
        """See :meth:`Applier.apply`."""
        sized = [(name, tensor) for name, tensor in tensors if tensor.numel()]
        for _, tensor in sized:
            self._staged.add(tensor)
        self._key = self._observations.advance(self._key, tensors)
        seen = self._observations.get(self._key)
        if seen is None:
            written, read = self._watch(tensors, Staged(sized))
            unread = tuple(name for name, _ in sized if name not in read)
            seen = self._observations.put(self._key, written, unread)
        else:
            self._load(tensors)
        self._written.append(seen.written)
        self._unread += seen.unread

    def _watch(self, tensors: Tensors, staged: Staged) -> tuple[Ranges, set[str]]:
        """Load the bucket; what was written, and which tensors were read."""
        if self._observations.only_copies:
            written = Ranges()
            copies = CopyMode(written, staged)
            with copies:
                self._load(tensors)
            if not copies.other and len(copies.read) == len(staged):
                return written, copies.read
            # Once more, and this time every operation: a load of the same bytes changes nothing. A tensor that nothing
            # copied may be one that the model has no use for, but a loader that computes does so in other buckets too.
            logger.debug("watched in full: %s, %d of %d tensors copied", copies.other, len(copies.read), len(staged))
            self._observations.only_copies = not copies.other and 2 * len(copies.read) > len(staged)
        written = Ranges()
        mode = CoverageMode(written, staged)
        with mode:
            self._load(tensors)
        return written, mode.read

    def _load(self, tensors: Tensors) -> None:
        try:
            self._model.load_weights(tensors)
        except RecvError:
            raise
        except Exception as error:
            logger.exception("load_weights failed")
            names = ", ".join(name for name, _ in tensors[:3])
            raise ApplyError(
                f"load_weights failed on a bucket of {len(tensors)} tensors ({names}, ...): "
                f"{type(error).__name__}: {error}",
                fix="compare names, shapes and dtypes with the engine's checkpoint; the engine's log has the traceback",
            ) from None

    def unread(self) -> tuple[str, ...]:
        """See :meth:`Applier.unread`."""
        return tuple(self._unread)

    def missing(self) -> tuple[str, ...]:
        """See :meth:`Applier.missing`."""
        if self._observations.complete(self._key):
            return ()
        found = []
        written = Ranges()
        for part in self._written:
            written.update(part)
        for name, parameter in self._model.named_parameters():
            if parameter.data_ptr() in self._staged:
                found.append(f"{name}: the loader keeps the staging memory itself instead of a copy")
            lacking = written.missing_bytes(parameter.data)
            if lacking:
                total = parameter.numel() * parameter.element_size()
                found.append(f"{name}: {lacking} of {total} bytes were not written")
        if not found:
            self._observations.mark_complete(self._key)
        return tuple(found)
