"""Load plans: what a loader was seen to copy, repeated without the loader, once it is proven that nothing is missing.

``load_weights`` is Python that ends in copies. They depend on names, dtypes and shapes, so they are recorded while a
session is watched, and the next one repeats them (docs/performance.md has what that saves). Between the two stands a
proof, since a recording may lack what no one saw: work on other threads, tensors that a model derives from its weights.

The proof loads random bytes, first by the plan, then by the model's own ``load_weights``. If the second changes nothing
in what the model holds, parameters, buffers and tensors kept as attributes, then the plan had done all that the loader
does. Trained weights prove little here: from one step to the next most of their bytes stay the same.
"""

from __future__ import annotations

import copy
import logging
import secrets
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch

from sglang_recv import manifest
from sglang_recv.copies import Copier, Places, copier, storage_bytes
from sglang_recv.errors import RecvError
from sglang_recv.memory import StagingBuffer, allocate
from sglang_recv.receiver import checksum
from sglang_recv.receiver.bucket import Layout, StagedBucket
from sglang_recv.receiver.host import Load
from sglang_recv.receiver.recording import Recorded, random_is_safe
from sglang_recv.wire import Kept, printable

logger = logging.getLogger(__name__)

_NAMED: Final = 5


@dataclass
class BucketPlan:
    """How one bucket is loaded.

    Parameters
    ----------
    layout
        The bucket.
    conclude
        Makes ``recorded`` of what was seen. It takes half as long as to watch, and the update that was watched is slow
        enough: nobody needs it before the proof.
    parameters
        What the targets of rows count.
    device
        Of the parameters.
    """

    layout: Layout
    conclude: Callable[[], Recorded] | None
    parameters: Places
    device: torch.device

    @cached_property
    def recorded(self) -> Recorded:
        """What can be repeated."""
        assert self.conclude is not None
        found, self.conclude = self.conclude(), None  # which holds on to what was seen
        return found

    @cached_property
    def planned(self) -> int:
        """How many tensors need no loader."""
        return len(np.unique(self.recorded.rows["source"]))

    @cached_property
    def _copier(self) -> Copier:
        return copier(self.recorded.rows, self.device)

    def replay(self, bucket: StagedBucket, load: Load) -> None:
        """Copy what is planned, and give the rest to the loader."""
        with torch.no_grad():
            self._copier.run(bucket.places, self.parameters)
        if self.recorded.stock:
            load([(name, tensor) for name, tensor in bucket.tensors() if name in self.recorded.stock])


@dataclass
class Chain:
    """The plans of a complete session, in order."""

    keys: tuple[bytes, ...]
    buckets: tuple[BucketPlan, ...]
    #: Why they are not used; empty when they are proven, None before anyone has tried.
    verdict: str | None = None
    #: Seconds that the proof took.
    seconds: float = field(default=0.0)

    @property
    def proven(self) -> bool:
        """True when the plans may be used."""
        return self.verdict == ""


def prove(chain: Chain, model: torch.nn.Module, load: Load, filled: Collection[int] = ()) -> None:
    """Decide whether the plans do all that the loader does, and set the verdict.

    Afterwards the parameters hold random bytes: the caller is about to write all of them. All else that the model holds
    is as it was.

    Parameters
    ----------
    chain
        What was recorded, for parameters that have not moved since.
    model
        The model. A buffer for random bytes is made on its device, of the size of the largest bucket, and freed again.
    load
        The model's own loader.
    filled
        Addresses of parameters that the engine fills by itself: they stay as they are.
    """
    started = time.monotonic()
    chain.verdict = _attempt(lambda: _verdict(chain, model, load, filled))
    chain.seconds = time.monotonic() - started
    logger.info(
        "load plan of %d buckets: %s, %.3f s; left to the loader: %s",
        len(chain.buckets),
        "not proven" if chain.verdict is None else chain.verdict or "proven",
        chain.seconds,
        kept(chain.buckets) or "nothing",
    )


def _attempt(step: Callable[[], str | None]) -> str | None:
    """The verdict of ``step``. Whatever a loader makes of random bytes, the update goes on without a plan."""
    try:
        return step()
    except Exception as error:
        # As text: a record of the exception would hold views of the buffer.
        logger.warning("the proof of a load plan failed\n%s", traceback.format_exc())
        return f"the proof failed: {type(error).__name__}: {error}"


def _verdict(chain: Chain, model: torch.nn.Module, load: Load, filled: Collection[int]) -> str | None:
    if not any(len(bucket.recorded.rows) for bucket in chain.buckets):
        return "nothing is a plain copy"
    device = next(model.parameters()).device
    try:
        buffer = allocate(device, max(int(bucket.layout.packed[-1]) for bucket in chain.buckets))
    except RecvError as error:
        logger.warning("a load plan cannot be proven now: %s", error)
        return None  # there may be memory next time
    try:
        aside = _SetAside(model)
        try:
            return _attempt(lambda: _compare(chain, model, load, buffer, filled))
        finally:
            aside.restore()
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        buffer.close()


def _compare(chain: Chain, model: torch.nn.Module, load: Load, buffer: StagingBuffer, filled: Collection[int]) -> str:
    noise = _Noise(buffer, secrets.randbits(62))
    # What a recording leaves out must not be there already, from the load that was recorded.
    noise.scramble(model, filled)
    for number, bucket in enumerate(chain.buckets):
        bucket.replay(noise.fill(number, bucket.layout), load)
    replayed = checksum.digests(model)
    for number, bucket in enumerate(chain.buckets):
        load(noise.fill(number, bucket.layout).tensors())
    loaded = checksum.digests(model)
    different = sorted(name for name in replayed.keys() | loaded.keys() if replayed.get(name) != loaded.get(name))
    if not different:
        return ""
    more = f" and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
    return f"the loader does more than the recorded copies: {', '.join(different[:_NAMED])}{more} differ"


class _Noise:
    """Random bytes, the same again for the same seed and number of a bucket."""

    def __init__(self, buffer: StagingBuffer, seed: int) -> None:
        self._bytes = buffer.tensor()
        self._views = manifest.Views(self._bytes)
        self._generator = torch.Generator(self._bytes.device)  # torch's own is what the engine samples with
        self._seed = seed

    def fill(self, number: int, layout: Layout) -> StagedBucket:
        """A bucket of this layout; integers, which may be indices, are 0."""
        self._generator.manual_seed(self._seed + number)
        whole = self._bytes.numel() // 8 * 8
        self._bytes[:whole].view(torch.int64).random_(-(1 << 63), None, generator=self._generator)
        which = np.zeros(len(layout), np.int64)
        bucket = StagedBucket(layout, self._bytes.device, [self._views], which, layout.packed[:-1])
        for _, tensor in bucket.tensors():
            if not random_is_safe(tensor.dtype):
                tensor.zero_()
        return bucket

    @torch.no_grad()
    def scramble(self, model: torch.nn.Module, filled: Collection[int]) -> None:
        """Random bytes in place of every parameter, but for items that may be indices and for what is ``filled``."""
        for number, parameter in enumerate(model.parameters()):
            if parameter.data_ptr() in filled or not random_is_safe(parameter.dtype) or not parameter.numel():
                continue
            # Another parameter's bytes may be between its own.
            whole = parameter if parameter.is_contiguous() else torch.empty_like(parameter).contiguous()
            flat = whole.detach().as_strided((whole.numel(),), (1,)).view(torch.uint8)
            self._generator.manual_seed(self._seed - 1 - number)
            flat.random_(0, 256, generator=self._generator)
            if whole is not parameter:
                parameter.copy_(whole)


class _SetAside:
    """What the modules of a model hold beside their parameters, kept while a proof changes it.

    Attributes as they are, entries of lists and dictionaries among them, and the bytes of all tensors found so, in host
    memory. What lies deeper, or in objects that are no modules, is not kept.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        homes = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._entries: list[tuple[Any, Any]] = []
        #: Storages and their bytes: layers often share a table.
        self._bytes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for module in model.modules():
            held = {name: value for name, value in vars(module).items() if name not in ("_parameters", "_modules")}
            self._attributes.append((vars(module), held))
            self._entries += [(value, copy.copy(value)) for value in held.values() if type(value) in (list, dict)]
        for _, tensor in checksum.held_tensors(model):
            if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
                continue
            home = tensor.untyped_storage().data_ptr()
            if home not in homes and home not in self._bytes:
                whole = storage_bytes(tensor)[0]
                self._bytes[home] = whole, whole.to("cpu", copy=True)

    def restore(self) -> None:
        """Give everything back."""
        for attributes, held in self._attributes:
            for name in attributes.keys() - held.keys() - {"_parameters", "_modules"}:
                del attributes[name]
            attributes.update(held)
        for container, entries in self._entries:
            container.clear()
            if isinstance(container, list):
                container.extend(entries)
            else:
                container.update(entries)
        with torch.no_grad():
            for whole, held_bytes in self._bytes.values():
                whole.copy_(held_bytes)


def kept(buckets: Iterable[BucketPlan]) -> tuple[Kept, ...]:
    """Tensors that stay with the loader, by reason."""
    by_reason: dict[str, list[str]] = {}
    for bucket in buckets:
        for name, reason in bucket.recorded.reasons.items():
            by_reason.setdefault(reason, []).append(name)
    return tuple(Kept(printable(why), len(names), tuple(names[:_NAMED])) for why, names in by_reason.items())
