"""Load plans: what a loader was seen to copy, repeated without the loader, once it is proven that nothing is missing.

``load_weights`` is Python that ends in copies. They depend on names, dtypes and shapes, so they are recorded while a
session is watched, and the next one repeats them (docs/performance.md has what that saves). Between the two stands a
proof, since a recording may lack what no one saw: work on other threads, tensors that a model derives from its weights.

The proof loads random bytes, first by the plan, then by the model's own ``load_weights``. If the second changes nothing
in what the model holds, parameters, buffers and tensors kept as attributes, then the plan had done all that the loader
does. Trained weights prove little here: from one step to the next most of their bytes stay the same.
"""

from __future__ import annotations

import logging
import secrets
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import torch

from sglang_recv import manifest
from sglang_recv.copies import Copier, Places, copier, storage_bytes
from sglang_recv.errors import RecvError
from sglang_recv.memory import StagingBuffer, allocate
from sglang_recv.receiver import checksum
from sglang_recv.receiver.bucket import Layout, StagedBucket
from sglang_recv.receiver.host import Load
from sglang_recv.receiver.recording import Recorded
from sglang_recv.wire import Kept

logger = logging.getLogger(__name__)

_NAMED: Final = 5


@dataclass
class BucketPlan:
    """How one bucket is loaded. ``parameters`` are what the rows' targets count."""

    layout: Layout
    recorded: Recorded
    parameters: Places
    device: torch.device

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


def prove(chain: Chain, model: torch.nn.Module, load: Load) -> None:
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
    """
    started = time.monotonic()
    chain.verdict = _verdict(chain, model, load)
    chain.seconds = time.monotonic() - started
    logger.info(
        "load plan of %d buckets: %s, %.3f s; left to the loader: %s",
        len(chain.buckets),
        chain.verdict or "proven",
        chain.seconds,
        kept(chain.buckets) or "nothing",
    )


def _verdict(chain: Chain, model: torch.nn.Module, load: Load) -> str:
    if not any(len(bucket.recorded.rows) for bucket in chain.buckets):
        return "nothing is a plain copy"
    device = next(model.parameters()).device
    try:
        buffer = allocate(device, max(int(bucket.layout.packed[-1]) for bucket in chain.buckets))
    except RecvError as error:
        return f"no memory for a proof: {error.message}"
    aside = _SetAside(model)
    try:
        return _compare(chain, model, load, buffer)
    finally:
        aside.restore(model)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        buffer.close()


def _compare(chain: Chain, model: torch.nn.Module, load: Load, buffer: StagingBuffer) -> str:
    noise = _Noise(buffer, secrets.randbits(62))
    try:
        for number, bucket in enumerate(chain.buckets):
            bucket.replay(noise.fill(number, bucket.layout), load)
        replayed = checksum.digests(model)
        for number, bucket in enumerate(chain.buckets):
            load(noise.fill(number, bucket.layout).tensors())
        loaded = checksum.digests(model)
    except Exception as error:  # whatever a loader makes of random bytes, the update goes on without a plan
        # As text: a record of the exception would hold views of the buffer.
        logger.warning("the proof of a load plan failed\n%s", traceback.format_exc())
        return f"the proof failed: {type(error).__name__}: {error}"
    different = sorted(name for name in replayed.keys() | loaded.keys() if replayed.get(name) != loaded.get(name))
    if not different:
        return ""
    more = f" and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
    return f"the loader does more than the recorded copies: {', '.join(different[:_NAMED])}{more} differ"


class _Noise:
    """Buckets of random bytes, the same again for the same seed and number."""

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
            if not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.uint8:
                tensor.zero_()
        return bucket


class _SetAside:
    """What a model holds beside its parameters, kept in host memory while a proof changes it."""

    def __init__(self, model: torch.nn.Module) -> None:
        homes = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        #: Bytes of storages, by address: layers often share a table.
        self._bytes: dict[int, torch.Tensor] = {}
        #: For each tensor its storage, and the bytes of the tensor itself in ``_bytes``.
        self._held: dict[str, tuple[int, torch.Tensor]] = {}
        for name, tensor in checksum.held_tensors(model):
            home = tensor.untyped_storage().data_ptr()
            if tensor.numel() and not tensor.is_meta and home not in homes:
                if home not in self._bytes:
                    self._bytes[home] = storage_bytes(tensor)[0].to("cpu", copy=True)
                whole = torch.empty(0, dtype=tensor.dtype).set_(self._bytes[home].untyped_storage())
                self._held[name] = home, whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def restore(self, model: torch.nn.Module) -> None:
        """Give every tensor its bytes back, also where the loader has put another tensor in its place."""
        done = set()
        with torch.no_grad():
            for name, tensor in checksum.held_tensors(model):
                home, held = self._held.get(name, (0, tensor))
                if not home or (tensor.shape, tensor.dtype) != (held.shape, held.dtype):
                    continue
                if tensor.untyped_storage().data_ptr() != home:
                    tensor.copy_(held)
                elif home not in done:
                    storage_bytes(tensor)[0].copy_(self._bytes[home])
                    done.add(home)


def kept(buckets: Iterable[BucketPlan]) -> tuple[Kept, ...]:
    """Tensors that stay with the loader, by reason."""
    by_reason: dict[str, list[str]] = {}
    for bucket in buckets:
        for name, reason in bucket.recorded.reasons.items():
            by_reason.setdefault(reason, []).append(name)
    return tuple(Kept(reason, len(names), tuple(names[:_NAMED])) for reason, names in by_reason.items())
