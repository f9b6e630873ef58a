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
from sglang_recv.collective import gather_bytes
from sglang_recv.errors import EngineLostError, InternalError, RecvError, SessionAbortedError
from sglang_recv.integrations.sglang.mode import ENV as ENV_MODE
from sglang_recv.integrations.slime.pairing import Engine, Engines, Trainer, assign
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

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """As slime's. Engines are asked for their ranks in the next update, where an error can be agreed on."""
        super().connect_rollout_engines(
            rollout_engines, rollout_engine_lock, engine_gpu_counts, engine_gpu_offsets, **kwargs
        )
        counts = engine_gpu_counts or [self.args.rollout_num_gpus_per_engine] * len(rollout_engines)
        offsets = engine_gpu_offsets or [sum(counts[:index]) for index in range(len(counts))]
        # The superclass has left only the colocated ones here.
        self._layout = list(zip(self.rollout_engines, offsets, counts, strict=False))
        self._disconnect()

    @torch.no_grad()
    def update_weights(self) -> None:
        """Send everything, and switch the version of all engines at the end.

        Raises
        ------
        RecvError
            The same on all train ranks, naming the rank that failed.
        """
        version = self.weight_version + 1
        rank = dist.get_rank()
        self._failure = None
        try:
            session_id = self._connect()
            if rank == 0:
                self._attempt(self._pause)
            self._agree()
            self._attempt(lambda: self._open(str(version), session_id))
            self._agree()
            self._send_all()
            self._attempt(lambda: self._each_sender().finish())
            self._agree()
            self._attempt(lambda: self._each_sender().commit())
            self._agree()
            if self.use_distribute and self._is_distributed_src_rank:
                self._attempt(lambda: self._switch_remote(str(version)))
            self._agree()
        except BaseException:
            self._disconnect()
            raise
        self._each_sender().end()
        self.weight_version = version
        if rank == 0:
            self._attempt(self._continue)
        self._agree()

    # --- steps -------------------------------------------------------------------------------------------------------

    def _pause(self) -> None:
        _get("pausing", [engine.pause_generation.remote() for engine in self.rollout_engines])
        _get("flushing", [engine.flush_cache.remote() for engine in self.rollout_engines])

    def _continue(self) -> None:
        _get("continuing", [engine.continue_generation.remote() for engine in self.rollout_engines])

    def _connect(self) -> str:
        """Let every rank know its engines, and the id of this update's session. Collective."""
        group = get_gloo_group()
        session_id = gather_bytes(new_session_id().encode(), group)[0].decode()
        # Only this process knows whether its senders are gone, but all lose them together (_disconnect).
        if self._senders is None:
            found: list[Engine] = []
            if dist.get_rank() == 0:
                self._attempt(lambda: found.extend(self._discover()))
            self._agree()
            engines = wire.decode(gather_bytes(wire.encode(Engines(tuple(found))), group)[0], Engines).engines
            me = Trainer(dist.get_rank(), identity.boot_id(), _device(), os.environ.get("CUDA_VISIBLE_DEVICES", ""))
            trainers = [wire.decode(raw, Trainer) for raw in gather_bytes(wire.encode(me), group)]
            self._senders = Senders(
                assign(trainers, engines)[me.rank],
                engines,
                mode=self._mode,
                slot_bytes=getattr(self.args, "update_weight_buffer_size", None),
                api_key=_api_key(self.args),
                deadline=DEADLINE,
            )
        return session_id

    def _discover(self) -> list[Engine]:
        urls = _get("finding", [engine.get_url.remote() for engine, _, _ in self._layout])

        def ask(place: tuple[str, tuple[Any, int, int]]) -> Engine:
            url, (_, offset, count) = place
            return Engine(url, offset, count, HttpTarget(url, _api_key(self.args), DEADLINE).rank_table())

        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(ask, zip(urls, self._layout, strict=True)))

    def _open(self, version: str, session_id: str) -> None:
        self._each_sender().open(version, session_id)

    def _send_all(self) -> None:
        weights = self.weights_getter()
        plan = getattr(self, "_expert_transfer_plan", None)
        buckets = {}
        if hasattr(self, "_full_param_info_buckets"):  # a slime with expert routing
            which = self._non_expert_param_info_buckets if plan else self._full_param_info_buckets
            buckets["param_info_buckets"] = which
        for named_tensors in self._hf_weight_iterator.get_hf_weight_chunks(weights, **buckets):
            self._send_hf_params(named_tensors)
            del named_tensors
        if plan:
            self._update_expert_weights(weights)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what was gathered and converted; the engine's KV cache is to come back

    def _send_hf_params(self, hf_named_tensors: NamedTensors) -> tuple[list[Any], None]:
        """Called by slime's own steps for each chunk. Never raises: slime's iteration is collective."""
        if self._failure is None:
            self._attempt(lambda: self._send(hf_named_tensors))
        return [], None

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
        self._each_sender().send(named_tensors)
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
        except RecvError as error:
            self._failure = error
        except Exception as error:
            logger.exception("sglang_recv: a step of the weight update failed")
            self._failure = InternalError(
                f"{type(error).__name__}: {error}", fix="the log of this train rank has the traceback"
            )

    def _agree(self) -> None:
        """Raise on all ranks when a step failed on any. Collective."""
        mine = b"" if self._failure is None else wire.encode(Error.of(self._failure))
        said = gather_bytes(mine, get_gloo_group())
        failed = {rank: wire.decode(raw, Error).exception() for rank, raw in enumerate(said) if raw}
        if failed:
            raise together(failed)

    def _each_sender(self) -> Senders:
        assert self._senders is not None
        return self._senders

    def _disconnect(self) -> None:
        senders, self._senders = self._senders, None
        if senders is not None:
            try:
                senders.close()
            except RecvError as error:
                logger.warning("sglang_recv: closing a session failed: %s", error)


def together(failed: dict[int, RecvError]) -> RecvError:
    """One error for all train ranks: the first that is no mere consequence of another, and what the others say."""
    causes = {rank: error for rank, error in failed.items() if not isinstance(error, SessionAbortedError)} or failed
    rank, first = min(causes.items())
    others = [f"train rank {r}: [{e.code}] {e.message}" for r, e in failed.items() if r != rank]
    return type(first)(f"train rank {rank}: {first.message}", fix=first.fix, details=(*first.details, *others))


def _get(what: str, refs: list[Any]) -> list[Any]:
    """Results of calls of engine actors."""
    try:
        found: list[Any] = ray.get(refs)
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
