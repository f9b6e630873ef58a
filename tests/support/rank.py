"""An engine without SGLang, in this process: real services, sockets, buffers and carriers around tiny torch models.

Each rank has the real service thread and a scheduler thread of its own, which runs what is injected with the real
:class:`~sglang_recv.receiver.replicated.Replicated`; votes are a barrier over the ranks. The engine is a
:class:`~sglang_recv.client.target.Target`, so a :class:`~sglang_recv.WeightClient` updates it as it would a server.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

from sglang_recv import identity, wire
from sglang_recv.errors import CommitError
from sglang_recv.fdpass import make_private_dir
from sglang_recv.memory import MemoryKind
from sglang_recv.receiver.apply import ModelApplier, Observations
from sglang_recv.receiver.catalog import LOADED_TOGETHER, Catalog
from sglang_recv.receiver.mailbox import Mailbox
from sglang_recv.receiver.replicated import Replicated
from sglang_recv.receiver.service import Facts, Service, Sources
from sglang_recv.wire import Carrier, CommitCarrier, MemorySaver, RankInfo, RankTable, TensorSpec

PATIENCE: Final = 30.0  # seconds after which a test gives up on a thread or a vote
CPU: Final = torch.device("cpu")


class Model(torch.nn.Module):
    """One rank's part: rows of ``embed`` and a ``norm`` of which each rank has all, loaded as SGLang's loaders do.

    ``kv_a_proj_with_mqa`` and ``q_a_proj`` are fused when both come in one call and dropped otherwise; names that the
    model does not have are skipped in silence; ``boom`` fails.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self._rows = slice(8 // ranks * rank, 8 // ranks * (rank + 1))
        self.embed = torch.nn.Parameter(torch.zeros(8 // ranks, 4), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16), requires_grad=False)
        self.fused = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        #: Names of each call, in order.
        self.calls: list[list[str]] = []
        #: Called in each load, before anything is written.
        self.on_load: Callable[[], None] = lambda: None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy what this rank holds of each tensor."""
        self.calls.append([])
        self.on_load()
        halves: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            self.calls[-1].append(name)
            if name == "boom":
                raise ValueError("no room for boom")
            if name == "embed":
                self.embed.data.copy_(tensor[self._rows])
            elif name == "norm":
                self.norm.data.copy_(tensor)
            elif name.endswith(("_proj.weight", "_with_mqa.weight")):
                halves[name.split(".")[-2]] = tensor
        if len(halves) == 2:
            self.fused.data.copy_(torch.cat([halves["q_a_proj"], halves["kv_a_proj_with_mqa"]]))


def weights(value: float) -> dict[str, torch.Tensor]:
    """A full update of :class:`Model`, different for each value."""
    return {
        "embed": torch.arange(32.0).view(8, 4) + value,
        "norm": torch.full((5,), value, dtype=torch.bfloat16),
        "attn.q_a_proj.weight": torch.full((2, 4), value),
        "attn.kv_a_proj_with_mqa.weight": torch.full((4, 4), -value),
    }


class NoFence:
    """On a CPU, what was queued is done."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Votes:
    """MIN over all ranks. A rank that stays away breaks it."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._ballots = [True] * ranks

    def cast(self, rank: int, ok: bool) -> bool:
        """This rank's vote; the result once every rank has voted."""
        self._ballots[rank] = ok
        self._barrier.wait(PATIENCE)
        result = all(self._ballots)
        self._barrier.wait(PATIENCE)  # nobody votes again before all have counted
        return result


class Host:
    """One rank of the engine, as :class:`sglang_recv.receiver.host.Host`."""

    device = CPU
    sglang_version = model_path = "test"
    dtype = "float32"
    tied_embeddings = False
    num_layers: int | None = None
    groups = LOADED_TOGETHER

    def __init__(self, engine: Engine, rank: int) -> None:
        self.rank, self.ranks = rank, engine.ranks
        self._engine = engine
        self._model = Model(rank, engine.ranks)
        self.version = "v0"
        self.is_quiet = self.may_flush = True
        self.released: tuple[str, ...] = ()

    def model(self) -> Model:
        """See Host."""
        return self._model

    def unsupported(self) -> tuple[str, ...]:
        """See Host."""
        return ()

    def vote(self, ok: bool) -> bool:
        """See Host."""
        return self._engine.votes.cast(self.rank, ok)

    def quiet(self) -> bool:
        """See Host."""
        return self.is_quiet

    def weights_released(self) -> bool:
        """See Host."""
        return "weights" in self.released

    def memory_saver(self) -> MemorySaver:
        """See Host."""
        return MemorySaver(bool(self.released), self.released, False)

    def weight_version(self) -> str:
        """See Host."""
        return self.version

    def begin_load(self) -> None:
        """See Host."""

    def filled(self) -> tuple[torch.nn.Parameter, ...]:
        """See Host."""
        return ()

    def fill(self) -> None:
        """See Host."""

    def finish_load(self) -> None:
        """See Host."""

    def flush_cache(self) -> bool:
        """See Host."""
        return self.may_flush

    def record_version(self, version: str) -> None:
        """See Host."""
        self.version = version

    def refuse_queued(self, reason: str) -> None:
        """See Host."""

    def inject(self, carrier: Carrier) -> None:
        """See Host."""
        self._engine.inject(carrier)

    def after_writes(self) -> NoFence:
        """See Host."""
        return NoFence()


class Rank:
    """The two threads of one rank."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.host = Host(engine, number)
        self.mailbox = Mailbox()
        observations = Observations(self.host.model())
        self.side = Replicated(self.host, self.mailbox, lambda kind: ModelApplier(self.host.model(), observations))
        self.work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        facts = facts_of(engine.name, number, engine.ranks)
        sources = Sources(self.host.memory_saver, self.host.weight_version, engine.catalog, self.host.inject)
        self.service = Service(facts, sources, self.mailbox, engine.folder)
        self._scheduler = threading.Thread(target=self._run, name=f"scheduler-{number}", daemon=True)

    def start(self) -> None:
        """Start both threads."""
        self.service.start()
        self._scheduler.start()

    def _run(self) -> None:
        while (step := self.work.get()) is not None:
            step()

    def info(self) -> RankInfo:
        """What the engine publishes of this rank."""
        device = identity.device_id(CPU, self.host.rank)
        return RankInfo(
            self.host.rank, device, identity.boot_id(), self.service.control_url, str(self.service.fds_path), ""
        )

    def close(self) -> None:
        """End both threads."""
        self.work.put(None)
        if self._scheduler.ident is not None:
            self._scheduler.join(PATIENCE)
            assert not self._scheduler.is_alive(), "the scheduler thread hangs"
        self.service.close()


class Engine:
    """N ranks that run each carrier in the same order.

    Parameters
    ----------
    ranks
        How many.
    specs
        What the engine knows of its model's tensors before an update; nothing by default.
    """

    def __init__(self, ranks: int = 1, specs: Iterable[TensorSpec] = ()) -> None:
        self.ranks = ranks
        self.votes = Votes(ranks)
        self._specs = {spec.name: spec for spec in specs}
        # Not tmp_path: the path of a Unix socket has 107 bytes at most.
        self._root = Path(tempfile.mkdtemp(prefix="recv"))
        self.name = self._root.name
        self.folder = self._root / "e"
        make_private_dir(self.folder)
        self._order = threading.Lock()
        #: Every carrier that was run, in order.
        self.carriers: list[Carrier] = []
        #: Calls of pause and resume.
        self.calls: list[str] = []
        self.rank = [Rank(self, number) for number in range(ranks)]
        for rank in self.rank:
            rank.start()

    def catalog(self) -> Catalog:
        """What a rank knows at first."""
        return Catalog(self._specs, model_dtype="float32", tied_embeddings=False, num_layers=None)

    def inject(self, carrier: Carrier) -> list[Future[tuple[bool, str] | None]]:
        """Let every scheduler thread run ``carrier``."""
        with self._order:
            self.carriers.append(carrier)
            futures: list[Future[tuple[bool, str] | None]] = []
            for rank in self.rank:
                future: Future[tuple[bool, str] | None] = Future()
                rank.work.put(_step(rank, carrier, future))
                futures.append(future)
            return futures

    @contextmanager
    def stalled(self, *ranks: int) -> Iterator[None]:
        """While inside, the scheduler threads (of some ranks) run nothing."""
        go = threading.Event()
        for number in ranks or range(self.ranks):
            self.rank[number].work.put(lambda: _assert(go.wait(PATIENCE)))
        try:
            yield
        finally:
            go.set()

    def parameters(self) -> list[dict[str, torch.Tensor]]:
        """What each rank's model holds."""
        return [{n: p.detach().clone() for n, p in rank.host.model().named_parameters()} for rank in self.rank]

    def states(self) -> set[tuple[str, str]]:
        """Weights state and version of all ranks."""
        return {(rank.mailbox.status.state, rank.host.version) for rank in self.rank}

    # --- Target ------------------------------------------------------------------------------------------------------

    def rank_table(self) -> RankTable:
        """See Target."""
        ranks = tuple(rank.info() for rank in self.rank)
        return RankTable(wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, self.name, "vmm", ranks)

    def commit(self, carrier: CommitCarrier, timeout: float) -> None:
        """See Target."""
        answers = [future.result(timeout) for future in self.inject(carrier)]
        failed = [answer[1] for answer in answers if answer is not None and not answer[0]]
        if failed:
            raise CommitError(f"engine {self.name} refused the commit: {failed[0]}", fix="see the error inside")

    def pause(self, how: str, timeout: float) -> None:
        """See Target."""
        self.calls.append(f"pause {how}")

    def resume(self, timeout: float) -> None:
        """See Target."""
        self.calls.append("resume")

    def resume_memory(self, tags: Sequence[str], timeout: float) -> None:
        """See Target: of an engine that keeps no CPU backup of its weights."""
        self.calls.append(f"resume {', '.join(tags)}")
        for rank in self.rank:
            rank.host.released = tuple(tag for tag in rank.host.released if tag not in tags)
            rank.side.resumed_without_backup()

    # --- end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all threads and remove all files."""
        for rank in self.rank:
            rank.close()
        shutil.rmtree(self._root)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def facts_of(engine: str, rank: int = 0, ranks: int = 1) -> Facts:
    """Facts of a rank on this CPU."""
    return Facts(
        engine=engine,
        rank=rank,
        ranks=ranks,
        device=CPU,
        device_id=identity.device_id(CPU, rank),
        boot_id=identity.boot_id(),
        mode="vmm",
        memory_kind=MemoryKind.MEMFD,
        sglang_version="test",
        model="test",
        dtype="float32",
        groups=LOADED_TOGETHER,
    )


def _assert(happened: bool) -> None:
    assert happened


def _step(rank: Rank, carrier: Carrier, future: Future[tuple[bool, str] | None]) -> Callable[[], Any]:
    def step() -> None:
        try:
            future.set_result(rank.side.run(carrier))
        except BaseException as error:
            future.set_exception(error)

    return step
