"""Parameters that the engine fills by itself, and attributes that a loader derives from several tensors (MLA, fp8)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from sglang_recv.errors import ApplyError
from sglang_recv.receiver import checksum, plan
from sglang_recv.receiver.apply import ModelApplier, Observations
from sglang_recv.receiver.stock import StockUpdates
from support.staged import staged

Weights = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn


class Latent(torch.nn.Module):
    """As SGLang's DeepSeek in fp8: each load ends in an attribute made of what it wrote, and of what it did not.

    ``k_scale`` is no tensor of the checkpoint. With ``every`` the attribute is made by every load, as in some models.
    """

    def __init__(self, *, every: bool = False) -> None:
        super().__init__()
        self.every = every
        for name, size, dtype in (("kv_b", (4, 6), FP8), ("scale", (4, 1), torch.float32), ("o", (8,), FP8)):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(size).to(dtype), requires_grad=False))
        self.k_scale = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
        self.w_kc: torch.Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As SGLang's."""
        names = []
        for name, tensor in weights:
            names.append(name)
            getattr(self, name).data.copy_(tensor)
        if self.every or {"kv_b", "scale"} & set(names):
            made = (self.get_parameter("kv_b").float() * self.get_parameter("scale")).to(torch.bfloat16).t()
            if self.w_kc is None:
                self.w_kc = made
            else:
                self.w_kc.copy_(made)


def weights(seed: int) -> Weights:
    """Random tensors of a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"kv_b": ((4, 6), FP8), "o": ((8,), FP8), "scale": ((4, 1), torch.float32)}
    return {name: torch.randn(size, generator=generator).to(dtype) for name, (size, dtype) in sizes.items()}


def observed(model: Latent) -> Observations:
    """As a receiver makes it."""
    return Observations(model, filled=lambda: [model.k_scale])


def update(model: Latent, seen: Observations, sent: Weights, *, together: bool = False) -> ModelApplier:
    """One session with a bucket for each tensor, or one for all."""
    applier = ModelApplier(model, seen)
    for bucket in [list(sent.items())] if together else [[item] for item in sent.items()]:
        applier.apply(staged([(name, tensor.clone()) for name, tensor in bucket]))
    return applier


def fresh(sent: Weights) -> dict[str, str]:
    """Digests after one load of everything."""
    model = Latent()
    model.load_weights(list(sent.items()))
    return checksum.digests(model)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("every", [True, False])
def test_five_updates_derive_what_a_fresh_load_derives(every: bool, together: bool) -> None:
    model = Latent(every=every)
    model.load_weights(list(weights(0).items()))
    seen = observed(model)
    for step in range(1, 6):
        applier = update(model, seen, weights(step), together=together)
        assert applier.missing() == ()
        assert checksum.digests(model) == fresh(weights(step)), step
        assert "w_kc" in checksum.digests(model)
    report = applier.report()
    assert (report.state, report.replayed, report.loaded) == ("proven", 1, 2)
    assert {name for kept in report.kept for name in kept.names} == {"kv_b", "scale"}


def test_an_attribute_that_a_plan_leaves_behind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a kernel that torch does not know reads the weight: its copy looks like all there is."""
    monkeypatch.setattr("sglang_recv.receiver.recording._mark_touched", lambda *args: None)
    model = Latent()
    model.load_weights(list(weights(0).items()))
    seen = observed(model)
    for step in range(1, 4):
        applier = update(model, seen, weights(step))
        assert applier.missing() == ()
        assert checksum.digests(model) == fresh(weights(step)), step
    assert applier.report().state == "the loader does more than the recorded copies: w_kc differ"
    assert applier.report().replayed == 0


def test_a_proof_leaves_what_the_engine_fills() -> None:
    model = Latent()
    seen = observed(model)
    update(model, seen, weights(1)).missing()
    (chain,) = seen._complete.values()
    plan.prove(chain, model, model.load_weights, seen.filled)
    assert chain.proven
    assert model.k_scale.item() == 1.0
    assert checksum.digest(model.get_parameter("o")) != fresh(weights(1))["o"], "all else is random now"


def test_only_what_the_engine_fills_may_be_left_out() -> None:
    model = Latent()
    assert update(model, observed(model), weights(1)).missing() == ()
    assert update(model, Observations(model), weights(1)).missing() == ("k_scale: 4 of 4 bytes were not written",)
    fewer = {name: tensor for name, tensor in weights(1).items() if name != "o"}
    assert update(model, observed(model), fewer).missing() == ("o: 8 of 8 bytes were not written",)


@pytest.mark.parametrize("plans", [True, False])
def test_a_tensor_for_what_the_engine_fills_is_refused_every_time(plans: bool) -> None:
    model = Latent()
    seen = Observations(model, plans=plans, filled=lambda: [model.k_scale])
    for step in range(1, 4):
        with pytest.raises(ApplyError, match="'k_scale', which the engine fills by itself"):
            update(model, seen, {**weights(step), "k_scale": torch.tensor(2.0)})


def test_stock_updates_make_weights_whole_without_what_the_engine_fills() -> None:
    model = Latent()
    for filled, whole in (((model.k_scale,), True), ((), False)):
        stock = StockUpdates(model, lambda filled=filled: filled)
        stock.watch(lambda: model.load_weights(list(weights(1).items())[:2]))
        assert not stock.whole()
        stock.watch(lambda: model.load_weights(list(weights(1).items())[2:]))
        assert stock.whole() == whole


@pytest.mark.parametrize("plans", [True, False])
def test_a_weight_in_fp8_is_not_cast(plans: bool) -> None:
    """Its scale would be of other items."""
    model = Latent()
    seen = Observations(model, plans=plans, filled=lambda: [model.k_scale])
    for _ in range(2):
        with pytest.raises(ApplyError, match="o was converted from bfloat16 to float8_e4m3fn without its scale"):
            update(model, seen, weights(1) | {"o": torch.zeros(8, dtype=torch.bfloat16)})
    update(model, seen, weights(1))
