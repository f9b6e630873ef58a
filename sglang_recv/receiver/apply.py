"""The apply step: tensors of one bucket, in staging, into the model. Load plans will replace what is inside."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sglang_recv.errors import ApplyError, RecvError
from sglang_recv.receiver.coverage import CoverageMode, Ranges

logger = logging.getLogger(__name__)

#: A bucket as the model gets it: names and tensors that lie in staging.
Tensors = Sequence[tuple[str, torch.Tensor]]


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


class StockApplier:
    """Calls the model's own ``load_weights``, and records what it read and what it reached.

    Parameters
    ----------
    model
        The model of this rank.
    observe
        False when the very same manifest was already seen to reach every parameter of this model: what a loader does
        depends on names, dtypes and shapes, so watching each operation again would tell nothing new.
    """

    def __init__(self, model: torch.nn.Module, *, observe: bool = True) -> None:
        self._model: Any = model
        self._observe = observe
        self._written = Ranges()
        self._staged: list[tuple[int, int]] = []
        self._unread: list[str] = []

    def apply(self, tensors: Tensors) -> None:
        """See :meth:`Applier.apply`."""
        sized = [(name, tensor) for name, tensor in tensors if tensor.numel()]
        if sized:
            first, last = min(t.data_ptr() for _, t in sized), max(t.data_ptr() + t.nbytes for _, t in sized)
            self._staged.append((first, last))
        if not self._observe:
            self._load(tensors)
            return
        staged = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name) for name, t in sized)
        mode = CoverageMode(self._written, staged)
        with mode:
            self._load(tensors)
        self._unread += [name for name, _ in sized if name not in mode.read]

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
        found = []
        for name, parameter in self._model.named_parameters():
            address = parameter.data_ptr()
            if any(first <= address < last for first, last in self._staged):
                found.append(f"{name}: the loader keeps the staging memory itself instead of a copy")
            if not self._observe:
                continue
            lacking = self._written.missing_bytes(parameter.data)
            if lacking:
                total = parameter.numel() * parameter.element_size()
                found.append(f"{name}: {lacking} of {total} bytes were not written")
        return tuple(found)
