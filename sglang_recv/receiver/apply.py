"""The apply step: tensors of one bucket, in staging, into the model."""

from __future__ import annotations

import functools
import hashlib
import logging
import operator
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from sglang_recv.copies import Places
from sglang_recv.errors import ApplyError, RecvError
from sglang_recv.receiver.bucket import Layout, StagedBucket
from sglang_recv.receiver.coverage import CopyMode, CoverageMode, Ranges, Staged, watching
from sglang_recv.receiver.host import Load, Tensors
from sglang_recv.receiver.plan import BucketPlan, Chain, kept, prove
from sglang_recv.receiver.recording import Recorder, conclude
from sglang_recv.wire import Kept, PlanReport, printable

logger = logging.getLogger(__name__)


#: How many buckets are remembered before all are forgotten: senders whose layout differs each time must not pile up.
_MAX_OBSERVED: Final = 4096
_MAX_TENSORS: Final = 500_000
#: A proof loads the model once more. A sender whose sessions only begin alike would cause one each time.
_MAX_PROOFS: Final = 16
_PARTIAL: Final = "not a complete update"


class Applier(Protocol):
    """Loads buckets of one session into the model of one rank. Used on the scheduler thread only."""

    def apply(self, bucket: StagedBucket) -> None:
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

    def report(self) -> PlanReport:
        """How the buckets were loaded."""


@dataclass(frozen=True)
class _Seen:
    """What one observed load of a bucket wrote and left unread, and what of it can be repeated."""

    written: Ranges
    unread: tuple[str, ...]
    plan: BucketPlan | None


class _Walk:
    """The parameters of a model, found again without a walk through its modules while these are the same: thousands of
    modules take milliseconds.

    Parameters
    ----------
    model
        The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        #: All modules in order, and the children that each had.
        self._modules: list[tuple[torch.nn.Module, list[torch.nn.Module | None]]] = []

    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """As ``model.parameters()``."""
        kind = type(self._model)
        if (kind.parameters, kind.named_parameters) != (torch.nn.Module.parameters, torch.nn.Module.named_parameters):
            return tuple(self._model.parameters())
        if not self._modules or any(not _same(m._modules, children) for m, children in self._modules):
            self._modules = [(module, list(module._modules.values())) for module in self._model.modules()]
        parts = (p for module, _ in self._modules for p in module._parameters.values())
        return tuple({id(p): p for p in parts if p is not None}.values())


def _same(modules: Mapping[str, torch.nn.Module | None], known: Sequence[torch.nn.Module | None]) -> bool:
    """The very same objects: a module may say that it equals another."""
    return len(modules) == len(known) and all(map(operator.is_, modules.values(), known))


def _refuse_casts(recorder: Recorder) -> None:
    """A weight in fp8 goes with a scale, and a cast takes no notice of it. An engine that knows its checkpoint has
    refused other dtypes already."""
    for name, reason in recorder.reasons.items():
        if reason.startswith("converted from") and " to float8" in reason and "from float8" not in reason:
            raise ApplyError(
                f"{name} was {reason} without its scale", fix="send what the engine's own checkpoint would hold"
            )


class Observations:
    """What was seen of earlier loads on this rank, by everything that a loader's behaviour depends on.

    A loader's copies follow from names, dtypes and shapes, of this bucket and, where a loader keeps something between
    calls, of the ones before it in the session. The key of a bucket is therefore a chained digest over all buckets so
    far: a session that repeats an earlier one is not watched again, one that deviates is watched from there on. Load
    plans have the same keys.

    Parameters
    ----------
    model
        The model of this rank. Nothing is kept across a change of its parameters' addresses; a memory saver keeps them.
    plans
        False for a receiver that always calls the loader.
    filled
        Finds the parameters that the engine fills by itself.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        plans: bool = True,
        filled: Callable[[], Sequence[torch.nn.Parameter]] = tuple,
    ) -> None:
        self._model = model
        self._plans = plans
        self._walk = _Walk(model)
        self._find_filled = filled
        #: Addresses of parameters that no tensor may be loaded into.
        self.filled: frozenset[int] = frozenset()
        self._parameters: tuple[torch.nn.Parameter, ...] = ()
        #: Where parameters are and what form they have; a plan dies with it.
        self._forms: tuple[tuple[Any, ...], ...] = ()
        self._places = Places.of(())
        self._seen: dict[bytes, _Seen] = {}
        #: Complete sessions, by the key of their last bucket.
        self._complete: dict[bytes, Chain] = {}
        self._proven: set[bytes] = set()
        self._tensors = self._proofs = 0
        #: False once this model's loaders did something to tensors that is not a copy.
        self.only_copies = True

    def begin(self) -> bytes:
        """The key that a session starts from. Called when the parameters are where loaders write them."""
        parameters = self._walk.parameters()
        forms = tuple((p.data_ptr(), p.dtype, tuple(p.shape), p.stride()) for p in parameters)
        if forms != self._forms or len(self._seen) > _MAX_OBSERVED or self._tensors > _MAX_TENSORS:
            self._parameters, self._forms = parameters, forms
            self._tensors = self._proofs = 0
            self._places = Places.of(parameters)
            self._seen.clear()
            self._complete.clear()
            self._proven.clear()
            self.filled = frozenset(parameter.data_ptr() for parameter in self._find_filled())
        return b""

    @staticmethod
    def advance(key: bytes, layout: Layout) -> bytes:
        """The key after one more bucket."""
        return hashlib.blake2b(key + layout.digest, digest_size=16).digest()

    def get(self, key: bytes) -> _Seen | None:
        """What was seen under ``key``."""
        return self._seen.get(key)

    def put(self, key: bytes, layout: Layout, watched: _Watched) -> _Seen:
        """Keep what was seen of the load of a bucket."""
        plan = None
        if self._plans:
            seen_by = functools.partial(conclude, watched.recorder, layout.names, watched.read, self._parameters)
            plan = BucketPlan(layout, seen_by, self._places, self._parameters[0].device)
        self._tensors += len(layout)
        filled = zip(layout.names, layout.sizes.tolist(), strict=True)
        unread = tuple(name for name, size in filled if size and name not in watched.read)
        seen = self._seen[key] = _Seen(watched.written, unread, plan)
        return seen

    def complete(self, key: bytes) -> bool:
        """True when the buckets up to ``key`` were found to reach every byte of every parameter."""
        return key in self._complete

    def mark_complete(self, keys: Sequence[bytes]) -> None:
        """Keep that finding, for the session whose buckets these are."""
        plans = [self._seen[key].plan for key in keys]
        buckets = tuple(plan for plan in plans if plan is not None)
        self._complete[keys[-1]] = Chain(tuple(keys), buckets)

    def plan(self, key: bytes) -> BucketPlan | None:
        """The plan for a bucket, if it is proven."""
        return self._seen[key].plan if key in self._proven else None

    def prove(self, key: bytes, load: Load) -> None:
        """Before a full update whose first bucket this is: prove the newest recording that begins so.

        That the update may turn out otherwise does no harm: it reaches every parameter, or is never committed.
        """
        if not self._plans or self._proofs >= _MAX_PROOFS:
            return
        chain = next((chain for chain in reversed(self._complete.values()) if chain.keys[0] == key), None)
        if chain is not None and chain.verdict is None:
            self._proofs += 1
            prove(chain, self._model, load, self.filled)
            if chain.proven:
                self._proven.update(chain.keys)

    def report(self, keys: Sequence[bytes]) -> tuple[str, float, tuple[Kept, ...]]:
        """State, seconds of the proof, and what stays with the loader, for a session with these buckets."""
        chain = self._complete.get(keys[-1]) if keys else None
        if not self._plans or chain is None:
            return "off" if not self._plans else _PARTIAL, 0.0, ()
        state = "proven" if chain.proven else printable(chain.verdict or "recorded")
        return state, round(chain.seconds, 6), () if chain.verdict is None else kept(chain.buckets)


@dataclass(frozen=True)
class _Watched:
    """What a watched load did."""

    written: Ranges
    read: set[str]
    recorder: Recorder


class ModelApplier:
    """Loads by proven plans, else by the model's own ``load_weights``, and knows what was read and what was reached.

    Parameters
    ----------
    model
        The model of this rank.
    observations
        What earlier sessions saw; this one adds to it.
    full
        True for an update that reaches every parameter or is not committed.
    """

    def __init__(self, model: torch.nn.Module, observations: Observations, *, full: bool = True) -> None:
        self._model: Any = model
        self._observations = observations
        self._full = full
        self._keys: list[bytes] = []
        self._written: list[Ranges] = []
        self._staged = Ranges()
        self._unread: list[str] = []
        self._replayed = self._loaded = 0

    def apply(self, bucket: StagedBucket) -> None:
        """See :meth:`Applier.apply`."""
        key = self._observations.advance(self._keys[-1] if self._keys else self._observations.begin(), bucket.layout)
        if not self._keys and self._full:
            self._observations.prove(key, self._load)
        seen = self._observations.get(key)
        if seen is None:
            watched = self._watch(bucket.tensors())
            self._refuse_filled(watched.written)
            _refuse_casts(watched.recorder)
            seen = self._observations.put(key, bucket.layout, watched)
            self._loaded += len(bucket.layout)
        else:
            plan = self._observations.plan(key)
            if plan is None:
                self._load(bucket.tensors())
                self._loaded += len(bucket.layout)
            else:
                plan.replay(bucket, self._load)
                self._replayed += plan.planned
                self._loaded += len(plan.recorded.stock)
        self._staged.add_spans(*bucket.spans())
        self._keys.append(key)
        self._written.append(seen.written)
        self._unread += seen.unread

    def report(self) -> PlanReport:
        """See :meth:`Applier.report`."""
        state, seconds, kept = self._observations.report(self._keys)
        if self._replayed and state == _PARTIAL:
            state = "proven"  # its buckets are among those of a full update
        return PlanReport(state, self._replayed, self._loaded, seconds, kept)

    def _watch(self, tensors: Tensors) -> _Watched:
        """Load a bucket, and see what that does."""
        staged = Staged((name, tensor) for name, tensor in tensors if tensor.numel())
        if self._observations.only_copies:
            written, recorder = Ranges(), Recorder()
            copies = CopyMode(written, staged, recorder)
            with watching(copies):
                self._load(tensors)
            if not copies.others and len(copies.read) == len(staged):
                return _Watched(written, copies.read, recorder)
            # Once more, and this time every operation: a load of the same bytes changes nothing. A tensor that nothing
            # copied may be one that the model has no use for, but a loader that computes does so in other buckets too.
            logger.debug("watched in full: %s, %d of %d tensors copied", copies.others, len(copies.read), len(staged))
            self._observations.only_copies = not copies.others and 2 * len(copies.read) > len(staged)
        written, recorder = Ranges(), Recorder()
        mode = CoverageMode(written, staged, recorder)
        with watching(mode, mode.values()):
            self._load(tensors)
        return _Watched(written, mode.read, recorder)

    def _refuse_filled(self, written: Ranges) -> None:
        if not self._observations.filled:
            return
        for name, parameter in self._model.named_parameters():
            if parameter.data_ptr() in self._observations.filled and parameter.data_ptr() in written:
                raise ApplyError(
                    f"a tensor was loaded into {name!r}, which the engine fills by itself",
                    fix="leave it out (a scale of the KV cache): the engine would go on with a copy of the old one",
                )

    def _load(self, tensors: Tensors) -> None:
        try:
            self._model.load_weights(tensors)
        except RecvError:
            raise
        except Exception as error:
            # As text: a record of the exception would hold views of staging memory, which will be unmapped.
            logger.error("load_weights failed\n%s", traceback.format_exc())
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
        if self._keys and self._observations.complete(self._keys[-1]):
            return ()
        found = []
        written = Ranges()
        for part in self._written:
            written.update(part)
        for name, parameter in self._model.named_parameters():
            if parameter.data_ptr() in self._observations.filled:
                continue
            if parameter.data_ptr() in self._staged:
                found.append(f"{name}: the loader keeps the staging memory itself instead of a copy")
            lacking = written.missing_bytes(parameter.data)
            if lacking:
                total = parameter.numel() * parameter.element_size()
                found.append(f"{name}: {lacking} of {total} bytes were not written")
        if not found and self._keys:
            self._observations.mark_complete(self._keys)
        return tuple(found)
