"""slime's updater for colocated engines, with fds instead of CUDA IPC. Imports slime: only train ranks import this."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import ray
import torch
import torch.distributed as dist
from slime.backends.megatron_utils.update_weight import update_weight_from_tensor as stock
from slime.utils.distributed_utils import get_gloo_group

from sglang_recv import identity, wire
from sglang_recv.client.client import new_session_id
from sglang_recv.client.target import HttpTarget
from sglang_recv.collective import broadcast_bytes, gather_bytes
from sglang_recv.errors import (
    DeadlineError,
    EngineLostError,
    InternalError,
    LeaseLostError,
    RecvError,
    SessionAbortedError,
)
from sglang_recv.integrations.sglang.mode import ENV as ENV_MODE
from sglang_recv.integrations.slime.pairing import Engine, Engines, Lead, Start, Trainer, assign
from sglang_recv.integrations.slime.senders import Senders
from sglang_recv.wire import Error

logger = logging.getLogger(__name__)

#: Seconds that any single wait on an engine may take. Gathers and conversions between two sends do not count.
DEADLINE: Final = 300.0

NamedTensors = Sequence[tuple[str, torch.Tensor]]


class UpdateWeightFromVmm(stock.UpdateWeightFromTensor):  # type: ignore[misc]
    """Takes the place of slime's ``UpdateWeightFromTensor``, whose iterator, expert routing, and way to engines on
    other GPUs it keeps.

    An update is one session: nothing serves before all of it is there, and the version changes once. Errors are agreed
    on: whatever fails on one train rank, all ranks go on with slime's collective iteration without sending, and then
    all raise the same error. What can be refused is refused before the iteration. After an error the version is as it
    was, so the next call sends it again, and repairs the engines.
    """

    weight_version: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mode = "vmm" if getattr(self.args, "update_weight_transport", "") == "vmm" else _asked()
        self._layout: list[tuple[Any, int, int]] = []
        self._senders: Senders | None = None
        self._failure: RecvError | None = None
        #: True while slime sends each rank's own experts.
        self._routing = False

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """As slime's. Engines are asked for their ranks in the next update, where an error can be agreed on."""
        self._disconnect()
        super().connect_rollout_engines(
            rollout_engines, rollout_engine_lock, engine_gpu_counts, engine_gpu_offsets, **kwargs
        )
        counts = engine_gpu_counts or [self.args.rollout_num_gpus_per_engine] * len(rollout_engines)
        offsets = engine_gpu_offsets or [sum(counts[:index]) for index in range(len(counts))]
        # The superclass has left only the colocated ones here.
        self._layout = list(zip(self.rollout_engines, offsets, counts, strict=False))

    @torch.no_grad()
    def update_weights(self) -> None:
        """Send everything, and switch the version of all engines at the end.

        Raises
        ------
        RecvError
            The same on all train ranks, naming the rank that failed.
        """
        version = self.weight_version + 1
        self._failure = None
        try:
            self._update(version)
        except BaseException:
            self._disconnect()
            raise
        self._each_sender().end()
        self.weight_version = version
        if dist.get_rank() == 0:
            self._attempt(self._continue)
        self._agree()

    # --- steps -------------------------------------------------------------------------------------------------------

    def _update(self, version: int) -> None:
        session = self._connect()
        if dist.get_rank() == 0:
            self._attempt(self._pause)
        self._agree()
        self._attempt(lambda: self._each_sender().open(str(version), session))
        self._agree()
        weights: list[Any] = []
        self._attempt(lambda: weights.append(self.weights_getter()))
        self._agree()
        self._send_all(*weights)
        self._attempt(lambda: self._each_sender().finish())
        self._agree()
        self._attempt(lambda: self._each_sender().commit())
        self._agree()
        if self.use_distribute and self._is_distributed_src_rank:
            self._attempt(lambda: self._switch_remote(str(version)))
        self._agree()

    def _pause(self) -> None:
        _get("pausing", [engine.pause_generation.remote() for engine in self._all_engines])
        _get("flushing", [engine.flush_cache.remote() for engine in self._all_engines])

    def _continue(self) -> None:
        _get("continuing", [engine.continue_generation.remote() for engine in self._all_engines])

    @property
    def _all_engines(self) -> list[Any]:
        # The remote ones too, which slime leaves running here: they would serve a mix of old and new.
        return [*self.rollout_engines, *(self.distributed_rollout_engines if self.use_distribute else ())]

    def _connect(self) -> str:
        """Let every rank know its engines, and the id of this update's session. Collective."""
        group = get_gloo_group()
        mine: list[bytes] = []
        self._attempt(lambda: mine.append(wire.encode(self._start())))
        self._agree()
        starts = [wire.decode(raw, Start) for raw in gather_bytes(mine[0], group)]
        if not all(start.connected for start in starts):
            self._disconnect()
            table = [b""]
            if dist.get_rank() == 0:
                self._attempt(lambda: table.append(wire.encode(Engines(tuple(self._discover())))))
            self._agree()
            engines = wire.decode(broadcast_bytes(table[-1], group), Engines).engines
            self._attempt(lambda: self._make_senders([start.trainer for start in starts], engines))
            self._agree()
        first: Start = starts[0]
        return first.session

    def _start(self) -> Start:
        masks = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        me = Trainer(dist.get_rank(), identity.boot_id(), _device(), masks)
        return Start(new_session_id(), self._senders is not None, me)

    def _make_senders(self, trainers: Sequence[Trainer], engines: Sequence[Engine]) -> None:
        self._senders = Senders(
            assign(trainers, engines)[dist.get_rank()],
            engines,
            mode=self._mode,
            slot_bytes=getattr(self.args, "update_weight_buffer_size", None),
            api_key=_api_key(self.args),
            deadline=DEADLINE,
        )

    def _discover(self) -> list[Engine]:
        urls = _get("finding", [engine.get_url.remote() for engine, _, _ in self._layout])

        def ask(place: tuple[str, tuple[Any, int, int]]) -> Engine:
            url, (_, offset, count) = place
            return Engine(url, offset, count, HttpTarget(url, _api_key(self.args), DEADLINE).rank_table())

        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(ask, zip(urls, self._layout, strict=True)))

    def _send_all(self, weights: Any) -> None:
        plan = getattr(self, "_expert_transfer_plan", None)
        buckets = {}
        if hasattr(self, "_full_param_info_buckets"):  # a slime with expert routing
            which = self._non_expert_param_info_buckets if plan else self._full_param_info_buckets
            buckets["param_info_buckets"] = which
        for named_tensors in self._hf_weight_iterator.get_hf_weight_chunks(weights, **buckets):
            self._send_hf_params(named_tensors)
            del named_tensors
        if plan:
            self._routing = True
            try:
                self._update_expert_weights(weights)
            finally:
                self._routing = False
        if torch.cuda.is_available():
            # What was gathered and converted; the engine's KV cache is to come back.
            self._attempt(torch.cuda.empty_cache)

    def _send_hf_params(self, hf_named_tensors: NamedTensors) -> tuple[list[Any], None]:
        """Called by slime's own steps for each chunk. Never raises: slime's iteration is collective."""
        if self._routing:
            self._send_evenly(hf_named_tensors)
        else:
            self._attempt(lambda: self._send(hf_named_tensors))
        return [], None

    def _send_evenly(self, named_tensors: NamedTensors) -> None:
        """Send what only this rank has, one round after the other, together with all ranks. Collective.

        Ranks get different experts, and slime lets them wait for each other after each batch. The ranks of an engine
        load a round together, so one that is ahead would wait for an acknowledgement that needs a rank waiting for it.
        """
        parts: list[NamedTensors] = []
        self._attempt(lambda: parts.extend(self._each_sender().pieces(named_tensors)))
        while self._round_of_all(parts):
            pass

    def _round_of_all(self, parts: list[NamedTensors]) -> bool:
        """Send one of ``parts``, if there is any, or an empty round; True when a rank has more of them."""
        rounds: dict[int, int] = {}
        if parts:
            self._attempt(lambda: self._send(parts.pop(0)))
        self._attempt(lambda: rounds.update(self._each_sender().flush()))
        mine = Lead(tuple(rounds.items()), bool(parts) and self._failure is None)
        leads = [wire.decode(raw, Lead) for raw in gather_bytes(wire.encode(mine), get_gloo_group())]
        sent = [item for lead in leads for item in lead.rounds]
        most = {engine: max(count for other, count in sent if other == engine) for engine, _ in sent}
        self._attempt(lambda: self._each_sender().pad(most))
        return any(lead.more for lead in leads)

    def _send(self, named_tensors: NamedTensors) -> None:
        refs = []
        if self.use_distribute and self._is_distributed_src_rank:
            # With the version that they serve already: it changes when the colocated engines have theirs too.
            refs = stock.update_weights_from_distributed(
                self._group_name,
                self._model_update_groups,
                self.weight_version,
                self.distributed_rollout_engines,
                named_tensors,
            )
        try:
            self._each_sender().send(named_tensors)
        finally:
            _get("broadcasting to", refs)

    def _switch_remote(self, version: str) -> None:
        for url in _get("finding", [engine.get_url.remote() for engine in self.distributed_rollout_engines]):
            HttpTarget(url, _api_key(self.args), DEADLINE).set_version(version, DEADLINE)

    # --- agreeing ----------------------------------------------------------------------------------------------------

    def _attempt(self, step: Callable[[], object]) -> None:
        """Run a step of this rank, unless one has failed already; what it raises is agreed on later."""
        if self._failure is not None:
            return
        try:
            step()
        except Exception as error:
            logger.exception("sglang_recv: a step of the weight update failed")
            self._failure = (
                error
                if isinstance(error, RecvError)
                else InternalError(
                    f"{type(error).__name__}: {error}", fix="the log of this train rank has the traceback"
                )
            )
            if self._senders is not None:
                # Else the other ranks of these engines would wait for this one's rounds until their deadline.
                _try(self._senders.end)

    def _agree(self) -> None:
        """Raise on all ranks when a step failed on any. Collective."""
        mine = b"" if self._failure is None else wire.encode(Error.of(self._failure))
        said = gather_bytes(mine, get_gloo_group())
        failed = {rank: wire.decode(raw, Error).exception() for rank, raw in enumerate(said) if raw}
        if failed:
            raise together(failed) from self._failure

    def _each_sender(self) -> Senders:
        assert self._senders is not None
        return self._senders

    def _disconnect(self) -> None:
        senders, self._senders = self._senders, None
        if senders is not None:
            _try(senders.close)


def together(failed: dict[int, RecvError]) -> RecvError:
    """One error for all train ranks: the first that is no mere consequence of another, and what the others say."""

    def order(item: tuple[int, RecvError]) -> tuple[int, int]:
        rank, error = item
        if isinstance(error, SessionAbortedError):
            return 2, rank
        return int(isinstance(error, DeadlineError | LeaseLostError)), rank

    rank, first = min(failed.items(), key=order)
    others = [f"train rank {r}: [{e.code}] {e.message}" for r, e in failed.items() if r != rank]
    return type(first)(f"train rank {rank}: {first.message}", fix=first.fix, details=(*first.details, *others))


def _try(step: Callable[[], object]) -> None:
    """Run a step whose failure must not hide the one before it."""
    try:
        step()
    except Exception as error:
        logger.warning("sglang_recv: closing a session failed: %s", error)


def _get(what: str, refs: list[Any]) -> list[Any]:
    """Results of calls of engine actors, which may take :data:`DEADLINE`."""
    try:
        found: list[Any] = ray.get(refs, timeout=DEADLINE)
    except Exception as error:  # Ray's own errors, and what an actor raises
        raise EngineLostError(
            f"{what} the engines failed: {type(error).__name__}: {error}",
            fix="look at the log of the engine; once slime has restarted it, the next update brings it up to date",
        ) from error
    return found


def _asked() -> str:
    mode = os.environ.get(ENV_MODE, "")
    return "auto" if mode in ("", "off") else mode


def _api_key(args: Any) -> str | None:
    return getattr(args, "sglang_admin_api_key", None) or getattr(args, "sglang_api_key", None)


def _device() -> str:
    return identity.device_id(torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu"))
