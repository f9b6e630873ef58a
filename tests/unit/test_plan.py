"""Load plans: for each way to load, five updates end in the same bytes as one fresh load, planned or not."""

from __future__ import annotations

import collections
import ctypes
import itertools
import queue
import threading
import tracemalloc
import types
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_recv import copies
from sglang_recv.errors import StagingMemoryError
from sglang_recv.receiver import apply as apply_module
from sglang_recv.receiver import checksum, plan, recording
from sglang_recv.receiver.apply import ModelApplier, Observations, _Walk
from sglang_recv.receiver.recording import Copy, Recorder
from sglang_recv.wire import Kept
from support.staged import staged

Weights = dict[str, torch.Tensor]
SHAPES = {
    **{f"layers.{n}.{p}.weight": (8, 16) for n in range(2) for p in ("q", "k", "v", "o")},
    **{f"layers.0.experts.{e}.{p}.weight": (6, 4) for e in range(3) for p in ("up", "down")},
    "embed.weight": (10, 16),
    "norm.weight": (16,),
    "scale": (),
}


class Model(torch.nn.Module):
    """Rank 1 of 2: stacked and sliced projections, experts, a shard of the embedding, a tensor that goes to two places.

    ``how`` names what the loader of ``norm.weight`` does in addition.
    """

    def __init__(self, how: str = "copy") -> None:
        super().__init__()
        self.how = how
        for number in range(2):
            layer = torch.nn.Module()
            layer.qkv = torch.nn.Parameter(torch.zeros(12, 16), requires_grad=False)
            layer.o = torch.nn.Parameter(torch.zeros(8, 8), requires_grad=False)
            self.add_module(f"layer{number}", layer)
        self.w13 = torch.nn.Parameter(torch.zeros(3, 3, 4), requires_grad=False)
        self.w2 = torch.nn.Parameter(torch.zeros(3, 4, 6).transpose(1, 2), requires_grad=False)
        self.embed = torch.nn.Parameter(torch.zeros(5, 16), requires_grad=False)
        self.head = torch.nn.Parameter(torch.zeros(5, 16), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(16), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("table", torch.arange(6.0))
        self.derived: torch.Tensor | None = torch.zeros(16) if how == "derived attribute" else None
        self._count = types.SimpleNamespace(calls=0)  # a plain number would be given back after a proof
        self.notes: dict[str, list[torch.Tensor]] = {}

    @property
    def calls(self) -> int:
        """How often the loader was called."""
        return int(self._count.calls)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._count.calls += 1
        for name, tensor in weights:
            parts = name.split(".")
            if parts[0] == "embed":
                self.embed.data.copy_(tensor[5:])
                self.head.data.copy_(tensor.narrow(0, 5, 5))
            elif parts[0] == "norm":
                LOADERS[self.how](self, tensor)
            elif parts[0] == "scale":
                self.scale.data.copy_(tensor)
            elif parts[2] == "experts":
                expert = int(parts[3])
                if parts[4] == "up":
                    self.w13.data[expert].copy_(tensor[3:])
                else:
                    self.w2.data[expert].copy_(tensor)
            elif parts[2] == "o":
                getattr(self, f"layer{parts[1]}").o.data.copy_(tensor[:, 8:])
            else:
                start = 4 * "qkv".index(parts[2])
                getattr(self, f"layer{parts[1]}").qkv.data[start : start + 4].copy_(tensor[4:])


def _cast(model: Model, tensor: torch.Tensor) -> None:
    model.norm.data.copy_(tensor.to(torch.float64).to(torch.float32))


def _scale(model: Model, tensor: torch.Tensor) -> None:
    model.norm.data.copy_(tensor)
    model.norm.data.mul_(2)


def _overlap(model: Model, tensor: torch.Tensor) -> None:
    model.norm.data.copy_(tensor)
    model.norm.data[:4].copy_(tensor[12:])


def _attribute(model: Model, tensor: torch.Tensor) -> None:
    model.norm.data.copy_(tensor)
    model.derived = model.norm.data.float().contiguous().clone() + 1


def _kept_copy(model: Model, tensor: torch.Tensor) -> None:
    model.norm.data.copy_(tensor)
    if model.derived is None:
        model.derived = torch.zeros(16)
    model.derived.copy_(model.norm.data)


def _elsewhere(model: Model, tensor: torch.Tensor) -> None:
    # Where neither a digest nor a proof looks.
    model.norm.data.copy_(tensor)
    model.notes["norm"] = [tensor.to(torch.float64)]


def _hidden(model: Model, tensor: torch.Tensor) -> None:
    model.norm.data.copy_(tensor)
    model.table.copy_(torch.from_numpy(model.norm.numpy()[:6].copy()))  # type: ignore[operator]
    np.add(model.table.numpy(), 1, out=model.table.numpy())  # type: ignore[operator]


def _out_of_sight(model: Model, tensor: torch.Tensor) -> None:
    model.norm.data.copy_(tensor)
    ctypes.memmove(model.table.data_ptr(), model.norm.data_ptr(), 24)  # type: ignore[operator, arg-type]


def _number(model: Model, tensor: torch.Tensor) -> None:
    model.norm.data.fill_(tensor[3].item())


def _indexed(model: Model, tensor: torch.Tensor) -> None:
    model.norm.data[torch.arange(16)] = tensor


def _assigned(model: Model, tensor: torch.Tensor) -> None:
    model.norm.data[:] = tensor


def _buffer(model: Model, tensor: torch.Tensor) -> None:
    model.norm.data.copy_(tensor)
    model.table.copy_(tensor[:6])  # type: ignore[operator]


def _pool(model: Model, tensor: torch.Tensor) -> None:
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(model.norm.data[i : i + 8].copy_, tensor[i : i + 8]) for i in (0, 8)]
        for task in tasks:
            task.result()


LOADERS: dict[str, Callable[[Model, torch.Tensor], object]] = {
    "copy": lambda model, tensor: model.norm.data.copy_(tensor),
    "cast": _cast,
    "scale": _scale,
    "overlap": _overlap,
    "derived attribute": _attribute,
    "kept copy": _kept_copy,
    "elsewhere": _elsewhere,
    "hidden": _hidden,
    "out of sight": _out_of_sight,
    "number": _number,
    "indexed": _indexed,
    "assigned": _assigned,
    "buffer": _buffer,
    "thread pool": _pool,
}
#: What is left to the loader, and why; None where the proof must find it.
EXPECTED: dict[str, str | None] = {
    "copy": "",
    "cast": "read by aten._to_copy.default",
    "scale": "written by aten.mul_.Tensor",
    "overlap": "overlapping destinations",
    "derived attribute": "read by aten.clone.default",
    "kept copy": "read by a copy",
    "elsewhere": "copied by to()",
    "hidden": "read by numpy()",
    "out of sight": None,
    "number": "read as a number",
    "indexed": "read by aten.index_put_.default",
    "assigned": "",
    "buffer": "copied to memory that is no parameter",
    "thread pool": "",
}


def weights(seed: int) -> Weights:
    """Random tensors of all shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}


def update(model: Model, seen: Observations, sent: Weights, *, buckets: int = 3, full: bool = True) -> ModelApplier:
    """One session in which the loader's staging is not there any more afterwards."""
    applier = ModelApplier(model, seen, full=full)
    items = list(sent.items())
    for number in range(buckets):
        memory = [(name, tensor.clone()) for name, tensor in items[number::buckets]]
        applier.apply(staged(memory))
        for _, tensor in memory:
            tensor.fill_(-1)
    return applier


def fresh(how: str, sent: Weights) -> dict[str, str]:
    """Digests of a model that was loaded once."""
    model = Model(how)
    model.load_weights(list(sent.items()))
    return checksum.digests(model)


def chain_of(seen: Observations) -> plan.Chain:
    """The only recording."""
    (found,) = seen._complete.values()
    return found


@pytest.mark.parametrize("how", LOADERS)
def test_five_updates_hold_what_a_fresh_load_holds(how: str) -> None:
    model = Model(how)
    seen = Observations(model)
    for step in range(1, 6):
        applier = update(model, seen, weights(step))
        assert applier.missing() == ()
        assert applier.unread() == ()
        assert checksum.digests(model) == fresh(how, weights(step)), step
    chain = chain_of(seen)
    expected = EXPECTED[how]
    if expected is None:
        assert not chain.proven
        assert chain.verdict is not None
        assert "table" in chain.verdict
    else:
        assert chain.proven, chain.verdict
        kept = {(entry.reason, entry.count, entry.names) for entry in plan.kept(chain.buckets)}
        assert kept == ({(expected, 1, ("norm.weight",))} if expected else set())
        report = applier.report()
        assert (report.state, report.loaded, report.replayed) == ("proven", len(kept), len(SHAPES) - len(kept))


@pytest.mark.parametrize("buckets", [1, 3, len(SHAPES)])
def test_a_proven_plan_does_not_call_the_loader(buckets: int) -> None:
    model = Model()
    seen = Observations(model)
    for step in (1, 2):
        update(model, seen, weights(step), buckets=buckets).missing()
    before = model.calls
    update(model, seen, weights(3), buckets=buckets)
    assert model.calls == before
    assert checksum.digests(model) == fresh("copy", weights(3))


def test_what_stays_with_the_loader_is_all_it_gets() -> None:
    model = Model("scale")
    seen = Observations(model)
    for step in (1, 2):
        update(model, seen, weights(step)).missing()
    got: list[str] = []
    stock = model.load_weights
    model.load_weights = lambda pairs: (got.extend(name for name, _ in pairs), stock(pairs))  # type: ignore[method-assign, assignment]
    update(model, seen, weights(3))
    assert got == ["norm.weight"]
    assert checksum.digests(model) == fresh("scale", weights(3))


def corrupt(rows: np.ndarray, how: str) -> np.ndarray:
    """A table with one thing wrong."""
    rows = rows.copy()
    if how == "a row less":
        return rows[1:]
    if how == "nothing":
        return rows[:0]
    if how == "another source":
        rows["source_offset"][0] += 4
    elif how == "another target":
        rows["target_offset"][0] += 4 if rows["target_offset"][0] == 0 else -4
    elif how == "a shorter run":
        rows["run"][0] -= 4
    elif how == "swapped":
        rows["source"][[0, 1]] = rows["source"][[1, 0]]
    return rows


@pytest.mark.parametrize("bucket", [0, 1, 2])
@pytest.mark.parametrize(
    "how", ["a row less", "nothing", "another source", "another target", "a shorter run", "swapped"]
)
def test_a_plan_that_is_wrong_is_found_and_never_used(how: str, bucket: int) -> None:
    model = Model()
    seen = Observations(model)
    assert update(model, seen, weights(1)).missing() == ()
    chain = chain_of(seen)
    recorded = chain.buckets[bucket].recorded
    if how in ("another source", "another target", "a shorter run"):
        # In a row that has room for it on both sides.
        roomy = int(np.argmax((recorded.rows["run"] > 4) & (recorded.rows["inner"] > 1)))
        recorded.rows[[0, roomy]] = recorded.rows[[roomy, 0]]
    chain.buckets[bucket].recorded = recorded._replace(rows=corrupt(recorded.rows, how))
    for step in (2, 3):
        assert update(model, seen, weights(step)).missing() == ()
        assert checksum.digests(model) == fresh("copy", weights(step))
    assert chain_of(seen) is chain
    assert chain.verdict is not None
    assert "the loader does more than the recorded copies" in chain.verdict or "out of bounds" in chain.verdict


def test_the_proof_happens_once_and_before_a_full_update_only() -> None:
    model = Model()
    seen = Observations(model)
    update(model, seen, weights(1)).missing()
    calls = model.calls
    update(model, seen, weights(2), full=False)
    assert model.calls == calls + 3  # three buckets, and no proof: a partial update may leave random bytes
    assert chain_of(seen).verdict is None
    update(model, seen, weights(3))
    assert model.calls == calls + 6
    update(model, seen, weights(4))
    assert model.calls == calls + 6
    assert chain_of(seen).seconds > 0


def test_plans_that_are_off_are_not_used() -> None:
    model = Model()
    seen = Observations(model, plans=False)
    for step in range(1, 4):
        update(model, seen, weights(step)).missing()
        assert checksum.digests(model) == fresh("copy", weights(step))
    assert chain_of(seen).verdict is None
    assert model.calls == 9


@pytest.mark.parametrize("change", ["fewer tensors", "another order", "other buckets", "another dtype"])
def test_an_update_that_deviates_goes_to_the_loader(change: str) -> None:
    model = Model()
    seen = Observations(model)
    for step in (1, 2):
        update(model, seen, weights(step)).missing()
    calls, sent, buckets = model.calls, weights(3), 3
    if change == "fewer tensors":
        del sent["layers.0.q.weight"]
    elif change == "another order":
        sent = dict(reversed(sent.items()))
    elif change == "other buckets":
        buckets = 2
    else:
        sent = {name: tensor.double() for name, tensor in sent.items()}
    applier = update(model, seen, sent, buckets=buckets)
    assert model.calls >= calls + buckets
    assert bool(applier.missing()) == (change == "fewer tensors")
    if change != "fewer tensors":
        assert checksum.digests(model) == fresh("copy", weights(3))


def test_parameters_that_moved_end_a_plan() -> None:
    model = Model()
    seen = Observations(model)
    for step in (1, 2):
        update(model, seen, weights(step)).missing()
    calls = model.calls
    model.norm.data = torch.zeros(16)
    assert update(model, seen, weights(3)).missing() == ()
    assert model.calls > calls
    assert chain_of(seen).verdict is None
    assert checksum.digests(model) == fresh("copy", weights(3))
    chain_of(seen).verdict = "not now"  # as if it failed: what was proven for the other memory must not count
    calls = model.calls
    assert update(model, seen, weights(4)).missing() == ()
    assert model.calls == calls + 3
    assert checksum.digests(model) == fresh("copy", weights(4))


def test_a_parameter_of_another_form_at_the_same_address_ends_a_plan() -> None:
    model = Model()
    seen = Observations(model)
    for step in (1, 2):
        update(model, seen, weights(step)).missing()
    address = model.w2.data_ptr()
    model.w2.data = torch.as_strided(model.w2.data, (3, 6, 4), (24, 4, 1))
    assert model.w2.data_ptr() == address
    for step in (3, 4, 5):
        assert update(model, seen, weights(step)).missing() == ()
        wanted = torch.stack([weights(step)[f"layers.0.experts.{n}.down.weight"] for n in range(3)])
        assert torch.equal(model.w2.data, wanted)


def test_what_the_model_holds_beside_its_parameters_is_given_back_after_a_proof() -> None:
    model = Model("buffer")
    seen = Observations(model)
    update(model, seen, weights(1)).missing()
    before = model.table.clone()
    plan.prove(chain_of(seen), model, model.load_weights)
    assert chain_of(seen).proven
    assert torch.equal(model.table, before)
    assert checksum.digests(model) != fresh("buffer", weights(1))  # the parameters hold random bytes


def test_a_tensor_that_the_loader_replaces_is_given_back() -> None:
    model = Model("derived attribute")
    seen = Observations(model)
    update(model, seen, weights(1)).missing()
    assert model.derived is not None
    before, old = model.derived.clone(), model.derived
    plan.prove(chain_of(seen), model, model.load_weights)
    assert model.derived is old
    assert torch.equal(model.derived, before)


def test_an_update_keeps_what_is_kept_out_of_sight() -> None:
    model = Model("elsewhere")
    seen = Observations(model)
    for step in range(1, 4):
        update(model, seen, weights(step)).missing()
        assert torch.equal(model.notes["norm"][0], weights(step)["norm.weight"].double())


def test_a_loader_that_refuses_random_bytes_keeps_the_work(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    seen = Observations(model)
    update(model, seen, weights(1)).missing()
    stock = model.load_weights

    def picky(pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            if not bool(((tensor >= 0) & (tensor <= 1)).all()):
                raise ValueError(f"{name} is out of range")
        stock(pairs)

    model.load_weights = picky  # type: ignore[method-assign, assignment]
    assert update(model, seen, weights(2)).missing() == ()
    assert checksum.digests(model) == fresh("copy", weights(2))
    assert "out of range" in str(chain_of(seen).verdict)
    assert "the proof of a load plan failed" in caplog.text


def test_the_proof_leaves_torchs_own_random_numbers_alone() -> None:
    model = Model()
    seen = Observations(model)
    update(model, seen, weights(1)).missing()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    update(model, seen, weights(2))
    assert chain_of(seen).proven
    assert torch.equal(torch.rand(3), expected)


def test_pools_of_other_threads_are_not_watched() -> None:
    model = Model("thread pool")
    other = torch.zeros(4)
    done = threading.Event()

    def elsewhere() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other.add_, 1).result()
        done.set()

    class Meddling(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            super().load_weights(weights)

    model = Meddling("thread pool")
    seen = Observations(model)
    assert update(model, seen, weights(1)).missing() == ()
    assert done.is_set()
    assert seen.only_copies  # the addition of the other thread would have ended that
    assert ThreadPoolExecutor.submit.__name__ == "submit"


class Padded(torch.nn.Module):
    """An embedding whose last rows the loader fills, as SGLang's VocabParallelEmbedding does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.full((8, 4), 7.0), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.calls: queue.SimpleQueue[str] = queue.SimpleQueue()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy, and fill what no tensor reaches."""
        for name, tensor in weights:
            self.calls.put(name)
            if name == "embed":
                self.embed.data[: len(tensor)].copy_(tensor)
                self.embed.data[len(tensor) :].fill_(0)
            else:
                self.norm.data.copy_(tensor)


def session(model: torch.nn.Module, seen: Observations, sent: Weights) -> ModelApplier:
    """A full update in one bucket."""
    applier = ModelApplier(model, seen)
    applier.apply(staged([(name, tensor.clone()) for name, tensor in sent.items()]))
    assert applier.missing() == ()
    return applier


def test_what_a_loader_fills_beside_its_copies_is_filled_again() -> None:
    """The memory saver may bring parameters back with any content at the addresses of before."""
    model = Padded()
    seen = Observations(model)
    for step in range(1, 5):
        sent = {"embed": torch.full((5, 4), float(step)), "norm": torch.full((4,), float(step))}
        report = session(model, seen, sent).report()
        assert torch.equal(model.embed.data, torch.cat([sent["embed"], torch.zeros(3, 4)]))
        assert torch.equal(model.norm.data, sent["norm"])
        model.embed.data.fill_(float("nan"))
        model.norm.data.fill_(float("nan"))
    assert (report.state, report.replayed, report.loaded) == ("proven", 1, 1)
    assert report.kept == (Kept("filled", 1, ("embed",)),)


def test_a_recording_without_what_no_tensor_reaches_is_not_proven() -> None:
    model = Padded()
    seen = Observations(model)
    sent = {"embed": torch.ones(5, 4), "norm": torch.ones(4)}
    session(model, seen, sent)
    chain = chain_of(seen)
    recorded = chain.buckets[0].recorded
    rows = copies.table([*recorded.rows.tolist(), (0, 0, 0, 0, 80, 1, 0, 0, 1, 0, 0)])
    chain.buckets[0].recorded = recorded._replace(rows=rows, stock=frozenset())
    session(model, seen, sent)
    assert chain.verdict == "the loader does more than the recorded copies: embed differ"


class Attributes(torch.nn.Module):
    """A loader that also sets what is no tensor, and a sparse tensor that no proof can put aside."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.table = torch.eye(3).to_sparse()
        self.limit: float | None = None
        self.seen: dict[str, Any] = {"first": 1}
        self.names = ["a"]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy ``w``, and remember things."""
        for name, tensor in weights:
            if name == "w":
                self.w.data.copy_(tensor)
            self.limit = float(tensor[0])
            self.seen[name] = self.limit
            self.names.append(name)
            self.extra = self.limit


def test_a_proof_gives_back_what_is_no_tensor() -> None:
    model = Attributes()
    seen = Observations(model)
    session(model, seen, {"w": torch.ones(4)})
    before = (model.limit, dict(model.seen), list(model.names), model.extra)
    plan.prove(chain_of(seen), model, model.load_weights)
    assert (model.limit, model.seen, model.names, model.extra) == before
    assert model.table.is_sparse


def test_a_proof_that_cannot_begin_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    seen = Observations(model)
    update(model, seen, weights(1)).missing()

    def full(model: torch.nn.Module) -> None:
        raise MemoryError("no room for \ud800")

    monkeypatch.setattr(plan, "_SetAside", full)
    for step in (2, 3):
        applier = update(model, seen, weights(step))
        assert applier.missing() == ()
        assert checksum.digests(model) == fresh("copy", weights(step))
    assert applier.report().state == "the proof failed: MemoryError: no room for ?"


def test_a_proof_without_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    seen = Observations(model)
    update(model, seen, weights(1)).missing()

    def full(device: torch.device, nbytes: int) -> None:
        raise StagingMemoryError("full", fix="free some")

    with monkeypatch.context() as patch:
        patch.setattr(plan, "allocate", full)
        assert update(model, seen, weights(2)).report().state == "recorded"
    assert update(model, seen, weights(3)).report().state == "proven"


def test_senders_that_only_begin_alike_do_not_cause_proofs_for_ever() -> None:
    model = Model()
    seen = Observations(model)
    sent = weights(1)
    first = {name: sent.pop(name) for name in list(sent)[:1]}
    proofs = []
    for step in range(apply_module._MAX_PROOFS + 4):
        applier = ModelApplier(model, seen)
        order = list(sent)
        order = order[step % len(order) :] + order[: step % len(order)]
        calls = model.calls
        for part in (first, {name: sent[name] for name in order[: 2 + step // len(order)]},
                     {name: sent[name] for name in order[2 + step // len(order) :]}):  # fmt: skip
            applier.apply(staged([(name, tensor.clone()) for name, tensor in part.items()]))
        assert applier.missing() == ()
        proofs.append(model.calls - calls > 3)
    assert any(proofs)
    assert not any(proofs[-3:])


@pytest.mark.parametrize(
    ("dtype", "planned"),
    [(dtype, True) for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.float8_e4m3fn)]
    + [(dtype, False) for dtype in (torch.int64, torch.int8, torch.bool, torch.uint16, torch.uint32)],
)  # fmt: skip
def test_what_may_be_an_index_is_not_planned(dtype: torch.dtype, planned: bool) -> None:
    target, source = torch.zeros(4, dtype=dtype), torch.zeros(4, dtype=dtype)
    recorder = Recorder()
    recorder.copied(target, source, ("w", source.data_ptr()))
    assert bool(recorder.copies) == planned
    assert recorder.reasons == ({} if planned else {"w": f"{dtype} may be an index".replace("torch.", "")})


REASONS = {
    "converted from float32 to bfloat16": (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4)),
    "overlapping destinations": (torch.zeros(1).expand(4), torch.zeros(4)),
    "a lazily negated view": (torch.zeros(4), torch.zeros(4, dtype=torch.complex64).conj().imag),
    "copied from cpu to meta": (torch.zeros(4, device="meta"), torch.zeros(4)),
}


@pytest.mark.parametrize("why", REASONS)
def test_copies_that_are_no_plain_ones(why: str) -> None:
    recorder = Recorder()
    recorder.copied(*REASONS[why], ("w", 0))
    assert recorder.copies == []
    assert recorder.reasons == {"w": why}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
        min_size=1, max_size=6,
    )
)  # fmt: skip
def test_every_two_copies_that_meet_are_found(boxes: list[tuple[int, int, int, int, int]]) -> None:
    found, owners = [], collections.defaultdict(set)
    twice = set()
    for number, (start, rows, columns, down, across) in enumerate(boxes):
        shape, strides = (rows, columns), (down * 2, across * 2)
        found.append(Copy(str(number), 0, (columns, 1), 2 * start, strides, shape, 2))
        for row, column in itertools.product(range(rows), range(columns)):
            first = 2 * start + 2 * (row * strides[0] + column * strides[1])
            for place in (first, first + 1):
                if number in owners[place]:
                    twice.add(number)
                owners[place].add(number)
    reasons: dict[str, str] = {}
    recording._mark_conflicts(found, reasons)
    wanted = {str(n) for who in owners.values() if len(who) > 1 for n in who} | {str(n) for n in twice}
    assert set(reasons) >= wanted
    # More may be named only where three meet and the one in between reaches further.
    if len(boxes) == 2:
        assert set(reasons) == wanted


def test_a_transposed_copy_needs_no_memory_for_each_item() -> None:
    parameter = torch.zeros(1024, 1024)
    source = torch.zeros(1024, 1024)
    recorder = Recorder()
    recorder.copied(parameter, source.t(), ("w", source.data_ptr()))
    tracemalloc.start()
    try:
        recorded = recording.conclude(recorder, ["w"], {"w"}, [parameter])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20, "a megabyte for a million items"
    finally:
        tracemalloc.stop()
    assert len(recorded.rows) == 1


def test_without_plans_nothing_is_concluded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply_module, "conclude", None)
    model = Model()
    seen = Observations(model, plans=False)
    for step in (1, 2):
        assert update(model, seen, weights(step)).missing() == ()
        assert checksum.digests(model) == fresh("copy", weights(step))


def test_parameters_are_found_again_after_any_change_of_modules() -> None:
    def part() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Embedding(4, 2), torch.nn.ReLU())

    model = torch.nn.ModuleDict({"a": part(), "b": part(), "none": None})  # type: ignore[dict-item]
    walk = _Walk(model)

    def check() -> None:
        for _ in range(2):
            assert [id(p) for p in walk.parameters()] == [id(p) for p in model.parameters()]

    check()
    model["a"][0].weight = torch.nn.Parameter(torch.zeros(3, 2))
    check()
    model["b"][1] = torch.nn.Embedding(5, 2)
    check()
    model["b"][1].weight = model["a"][1].weight  # tied
    check()
    model["c"] = part()
    check()
    model["a"][0].register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    model["a"][0].register_parameter("nothing", None)
    check()
    del model["b"]
    check()
