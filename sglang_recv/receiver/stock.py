"""What the engine's own weight updates have reached since its weights stopped being whole.

SGLang's updates by tensor or broadcast come in pieces, and none of them says that it is the last. So they are watched:
once they have written every byte of every parameter, nothing is left of what made the weights unusable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from sglang_recv.receiver.coverage import CoverageMode, Ranges, Staged
from sglang_recv.receiver.recording import Recorder

Result = TypeVar("Result")


class StockUpdates:
    """Coverage over several updates.

    Parameters
    ----------
    model
        The model of this rank.
    filled
        Finds the parameters that the engine fills by itself.
    """

    def __init__(self, model: torch.nn.Module, filled: Callable[[], Sequence[torch.nn.Parameter]] = tuple) -> None:
        self._model: Any = model
        self._filled = filled
        self._written = Ranges()

    def forget(self) -> None:
        """Begin anew: what was written so far is undefined now."""
        self._written = Ranges()

    def watch(self, update: Callable[[], Result]) -> Result:
        """Run an update, and note what the model's loader writes in it. A write by other means does not count."""
        stock, written = self._model.load_weights, self._written

        def watched(*args: Any, **kwargs: Any) -> Any:
            with CoverageMode(written, Staged(()), Recorder()):
                return stock(*args, **kwargs)

        self._model.load_weights = watched
        try:
            return update()
        finally:
            del self._model.load_weights  # what hid the method of the class

    def whole(self) -> bool:
        """True when every byte of every parameter was written, but for those that the engine fills by itself."""
        filled = {parameter.data_ptr() for parameter in self._filled()}
        return not any(
            self._written.missing_bytes(parameter.data)
            for parameter in self._model.parameters()
            if parameter.data_ptr() not in filled
        )
