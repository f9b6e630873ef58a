"""Load plans: for each way to load, five updates end in the same bytes as one fresh load, planned or not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from sglang_recv.receiver import checksum, plan
from sglang_recv.receiver.apply import ModelApplier, Observations
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
        self.calls = 0
        self.notes: dict[str, list[torch.Tensor]] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.calls += 1
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
    "hidden": None,
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


def test_what_the_model_holds_beside_its_parameters_is_given_back_after_a_proof() -> None:
    model = Model("buffer")
    seen = Observations(model)
    update(model, seen, weights(1)).missing()
    before = model.table.clone()
    plan.prove(chain_of(seen), model, model.load_weights)
    assert chain_of(seen).proven
    assert torch.equal(model.table, before)
    assert checksum.digests(model) != fresh("buffer", weights(1))  # the parameters hold random bytes


def test_a_tensor_that_the_loader_replaces_gets_its_bytes_back_too() -> None:
    model = Model("derived attribute")
    seen = Observations(model)
    update(model, seen, weights(1)).missing()
    assert model.derived is not None
    before, old = model.derived.clone(), model.derived
    plan.prove(chain_of(seen), model, model.load_weights)
    assert model.derived is not old
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
