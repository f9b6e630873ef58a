"""The apply step: tensors of one bucket, in staging, into the model. Load plans will replace what is inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sglang_recv.errors import ApplyError, RecvError
from sglang_recv.receiver.coverage import CoverageMode, Ranges

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
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model: Any = model
        self._written = Ranges()
        self._unread: list[str] = []

    def apply(self, tensors: Tensors) -> None:
        """See :meth:`Applier.apply`."""
        sized = [(name, tensor) for name, tensor in tensors if tensor.numel()]
        staged = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name) for name, t in sized)
        mode = CoverageMode(self._written, staged)
        try:
            with mode:
                self._model.load_weights(tensors)
        except RecvError:
            raise
        except Exception as error:
            names = ", ".join(name for name, _ in tensors[:3])
            raise ApplyError(
                f"load_weights failed on a bucket of {len(tensors)} tensors ({names}, ...): "
                f"{type(error).__name__}: {error}",
                fix="compare names, shapes and dtypes with the engine's checkpoint; the engine's log has the traceback",
            ) from error
        self._unread += [name for name, _ in sized if name not in mode.read]

    def unread(self) -> tuple[str, ...]:
        """See :meth:`Applier.unread`."""
        return tuple(self._unread)

    def missing(self) -> tuple[str, ...]:
        """See :meth:`Applier.missing`."""
        found = []
        for name, parameter in self._model.named_parameters():
            lacking = self._written.missing_bytes(parameter.data)
            if lacking:
                total = parameter.numel() * parameter.element_size()
                found.append(f"{name}: {lacking} of {total} bytes were not written")
        return tuple(found)
