"""What the receiver needs of the engine it lives in. It knows "a model with load_weights", not SGLang."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from sglang_recv.wire import Carrier, MemorySaver

#: A bucket as the model gets it: names and tensors that lie in staging.
Tensors = Sequence[tuple[str, torch.Tensor]]

#: The model's own loader.
Load = Callable[[Tensors], None]


class Model(Protocol):
    """A model that loads tensors by their Hugging Face names."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Copy the tensors into the parameters of this rank."""

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """As in :class:`torch.nn.Module`."""


class Host(Protocol):
    """One engine rank. Methods are called on its scheduler thread only, unless they say otherwise."""

    rank: int
    ranks: int
    device: torch.device
    sglang_version: str
    model_path: str
    dtype: str
    tied_embeddings: bool
    num_layers: int | None
    #: Parts of names whose tensors one call must load, see :data:`sglang_recv.receiver.catalog.LOADED_TOGETHER`.
    groups: tuple[tuple[str, ...], ...]

    def model(self) -> torch.nn.Module:
        """The model whose weights are updated; it satisfies :class:`Model`."""

    def unsupported(self) -> tuple[str, ...]:
        """Why this engine's weights cannot be updated online; empty when they can."""

    def vote(self, ok: bool) -> bool:
        """True when every rank says True. A collective: all ranks must reach it."""

    def quiet(self) -> bool:
        """True when no forward runs or is resumable without scheduling; requests may wait in queues."""

    def weights_released(self) -> bool:
        """True while the memory saver holds the weights' memory. The same on all ranks."""

    def memory_saver(self) -> MemorySaver:
        """The memory saver's state. Callable from any thread: it reads, and a stale answer is checked again later."""

    def weight_version(self) -> str:
        """The version that the engine reports. Callable from any thread."""

    def begin_load(self) -> None:
        """Bring the weights into the layout that loaders write (where the engine has such a step), :meth:`fill`, and
        order this thread's stream behind every stream that reads weights."""

    def filled(self) -> tuple[torch.nn.Parameter, ...]:
        """Parameters that the engine fills by itself: no tensor of an update belongs there."""

    def fill(self) -> None:
        """Fill them."""

    def finish_load(self) -> None:
        """Undo :meth:`begin_load`, after the last load."""

    def flush_cache(self) -> bool:
        """Drop KV that the old weights computed; False when the engine refuses."""

    def record_version(self, version: str) -> None:
        """Tell the scheduler, where it keeps the version."""

    def refuse_queued(self, reason: str) -> None:
        """Answer every queued request with 503 and ``reason``."""

    def inject(self, carrier: Carrier) -> None:
        """Hand a carrier to all ranks' scheduler threads. On the leader, from its service thread."""

    def after_writes(self) -> Any:
        """Something with ``synchronize()`` that waits until the device has done all that was queued so far."""
