"""Coverage: writes and reads of real torch operations, compared with a slow mask of booleans."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from sglang_recv.errors import ApplyError
from sglang_recv.manifest import Views
from sglang_recv.receiver import apply as apply_module
from sglang_recv.receiver.apply import ModelApplier, Observations
from sglang_recv.receiver.bucket import StagedBucket
from sglang_recv.receiver.coverage import CopyMode, CoverageMode, Mode, Ranges, Staged, runs, watching
from sglang_recv.receiver.recording import Recorder
from support.staged import staged

WORDS = 96  # elements of the storage that random views lie in


@st.composite
def views(draw: st.DrawFn, numel: int = WORDS) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Size, strides and offset of a view that stays inside ``numel`` elements; it may overlap itself."""
    size = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    strides: list[int] = []
    left = numel - 1
    for count in size:
        most = left // (count - 1) if count > 1 else 20
        stride = draw(st.integers(0, min(most, 20)))
        strides.append(stride)
        left -= stride * max(count - 1, 0)
    return size, tuple(strides), draw(st.integers(0, left))


def mask_of(storage: torch.Tensor, view: torch.Tensor) -> np.ndarray:
    """One boolean for each byte of ``storage``: does ``view`` contain it? By walking over every element."""
    mask = np.zeros(storage.numel() * storage.element_size(), bool)
    first = view.data_ptr() - storage.data_ptr() if view.numel() else 0
    for index in itertools.product(*(range(n) for n in view.shape)):
        start = first + sum(i * s for i, s in zip(index, view.stride(), strict=True)) * view.element_size()
        mask[start : start + view.element_size()] = True
    return mask


@settings(max_examples=300, deadline=None)
@given(views(), st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]))
def test_runs_are_the_bytes_of_the_view(
    shape: tuple[tuple[int, ...], tuple[int, ...], int], dtype: torch.dtype
) -> None:
    storage = torch.zeros(WORDS, dtype=dtype)
    view = storage.as_strided(*shape)
    starts, length = runs(view)
    found = np.zeros(WORDS * dtype.itemsize, bool)
    for start in starts - storage.data_ptr():
        found[start : start + length] = True
    assert np.array_equal(found, mask_of(storage, view))


@settings(max_examples=300, deadline=None)
@given(st.lists(views(), max_size=6), views(), st.lists(st.booleans(), min_size=6, max_size=6))
def test_ranges_agree_with_a_mask(
    written: Sequence[tuple[tuple[int, ...], tuple[int, ...], int]],
    wanted: tuple[tuple[int, ...], tuple[int, ...], int],
    ask: Sequence[bool],
) -> None:
    storage = torch.zeros(WORDS, dtype=torch.int16)
    target = storage.as_strided(*wanted)
    ranges, mask = Ranges(), np.zeros(2 * WORDS, bool)
    starts, length = runs(target)
    addresses = [start - storage.data_ptr() + i for start in starts for i in range(length)]
    for shape, early in zip(written, ask, strict=False):
        view = storage.as_strided(*shape)
        ranges.add(view)
        mask |= mask_of(storage, view)
        if early:  # merging half-way changes nothing
            assert ranges.missing_bytes(target) == sum(not mask[a] for a in addresses)
    assert ranges.missing_bytes(target) == sum(not mask[a] for a in addresses)
    assert (ranges.missing_bytes(target) == 0) == bool(mask[mask_of(storage, target)].all())
    merged_starts, merged_stops = ranges.merged()
    assert (merged_starts[1:] > merged_stops[:-1]).all(), "neighbouring ranges are not merged"
    assert int((merged_stops - merged_starts).sum()) == int(mask.sum())


def cover(
    step: Callable[[torch.Tensor, torch.Tensor], object], parameter: torch.Tensor, source: torch.Tensor
) -> Ranges:
    """What ``step(parameter, source)`` writes, where ``source`` lies in staging."""
    ranges = Ranges()
    staged = Staged([("w", torch.empty(0, dtype=torch.uint8).set_(source.untyped_storage()))])
    with CoverageMode(ranges, staged, Recorder()):
        step(parameter, source)
    return ranges


def reads(step: Callable[[torch.Tensor], object], source: torch.Tensor) -> set[str]:
    mode = CoverageMode(Ranges(), Staged([("w", source)]), Recorder())
    with mode:
        step(source)
    return mode.read


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 8), st.integers(0, 5), st.integers(0, 6)), max_size=5))
def test_copies_into_slices_are_counted_exactly(boxes: Sequence[tuple[int, int, int, int]]) -> None:
    """Shards of a fused parameter, as loaders write them."""
    parameter = torch.nn.Parameter(torch.zeros(8, 6), requires_grad=False)
    source = torch.ones(8, 6)
    mask = torch.zeros(8, 6, dtype=torch.bool)

    def load(param: torch.Tensor, loaded: torch.Tensor) -> None:
        for top, bottom, left, right in boxes:
            param.data[top:bottom].narrow(1, left, max(right - left, 0)).copy_(
                loaded[top:bottom].narrow(1, left, max(right - left, 0))
            )

    ranges = cover(load, parameter, source)
    for top, bottom, left, right in boxes:
        mask[top:bottom, left : max(right, left)] = True
    assert torch.equal(parameter.data, mask.to(torch.float32)), "the reference itself"
    assert ranges.missing_bytes(parameter.data) == 4 * int((~mask).sum())


def _out(parameter: torch.Tensor, source: torch.Tensor) -> None:
    torch.add(source, 1, out=parameter)


def _foreach(parameter: torch.Tensor, source: torch.Tensor) -> None:
    torch._foreach_copy_([parameter[:1], parameter[1:]], [source[:1], source[1:]])


def _each(parameter: torch.Tensor, source: torch.Tensor) -> None:
    for row in range(len(parameter)):
        parameter[row] = source[row]


WHOLE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "copy_": lambda p, s: p.copy_(s),
    "copy_ of a view": lambda p, s: p.copy_(s.t().t()),
    "copy_ into a transpose": lambda p, s: p.t().copy_(s.t()),
    "copy_ with a cast": lambda p, s: p.copy_(s.to(torch.float64)),
    "slice assignment": lambda p, s: p.__setitem__(slice(None), s),
    "row assignment": _each,
    "fill_": lambda p, s: p.fill_(float(s[0, 0])),
    "zero_": lambda p, s: p.zero_(),
    "out=": _out,
    "_foreach_copy_": _foreach,
    "in chunks": lambda p, s: [a.copy_(b) for a, b in zip(p.chunk(2), s.chunk(2), strict=True)],
    "unbound": lambda p, s: [a.copy_(b) for a, b in zip(p.unbind(0), s.unbind(0), strict=True)],
    "as bytes": lambda p, s: p.view(torch.uint8).copy_(s.view(torch.uint8)),
    "index of a tensor": lambda p, s: p.__setitem__(torch.arange(4), s),
    "index_copy_": lambda p, s: p.index_copy_(0, torch.arange(4), s),
}


@pytest.mark.parametrize("how", sorted(WHOLE))
def test_each_way_to_write_everything_is_seen(how: str) -> None:
    parameter = torch.nn.Parameter(torch.full((4, 6), -1.0), requires_grad=False)
    ranges = cover(WHOLE[how], parameter.data, torch.arange(24.0).view(4, 6))
    assert not (parameter.data == -1).any(), "the operation itself"
    assert ranges.missing_bytes(parameter.data) == 0


PART: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "nothing": lambda p, s: s.sum(),
    "a row": lambda p, s: p[1].copy_(s[1]),
    "a row by a tensor of one number": lambda p, s: p.__setitem__(torch.tensor(1), s[1]),
    "a column": lambda p, s: p[:, 2].copy_(s[:, 2]),
    "every other row": lambda p, s: p[::2].copy_(s[::2]),
    "reading the parameter": lambda p, s: p.add(s),
}


@pytest.mark.parametrize("how", sorted(PART))
def test_a_part_is_not_the_whole(how: str) -> None:
    parameter = torch.full((4, 6), -1.0)
    ranges = cover(PART[how], parameter, torch.arange(24.0).view(4, 6))
    assert ranges.missing_bytes(parameter) == 4 * int((parameter == -1).sum())


INDEXED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "index_put_": lambda p, s: p.__setitem__(torch.tensor([1, 3]), s[:2]),
    "mask": lambda p, s: p.__setitem__(torch.tensor([True, False, False, False]), s[:1]),
    "index_copy_": lambda p, s: p.index_copy_(0, torch.tensor([2]), s[:1]),
    "index_fill_": lambda p, s: p.index_fill_(0, torch.tensor([2]), 5.0),
    "masked_fill_": lambda p, s: p.masked_fill_(torch.eye(4, 6) > 0, 5.0),
    "scatter_": lambda p, s: p.scatter_(0, torch.zeros(1, 6, dtype=torch.int64), s[:1]),
}


@pytest.mark.parametrize("how", sorted(INDEXED))
def test_indexed_writes_cover_no_more_than_they_wrote(how: str) -> None:
    parameter = torch.full((4, 6), -1.0)
    ranges = cover(INDEXED[how], parameter, torch.arange(24.0).view(4, 6))
    assert (parameter == -1).any(), "the operation itself"
    assert ranges.missing_bytes(parameter) == 4 * int((parameter == -1).sum())


def test_an_indexed_write_that_cannot_be_told_covers_nothing() -> None:
    parameter = torch.full((4, 6), -1.0)
    ranges = cover(lambda p, s: p.masked_scatter_(torch.eye(4, 6) > 0, s), parameter, torch.arange(24.0).view(4, 6))
    assert ranges.missing_bytes(parameter) == 96


READING: dict[str, Callable[[torch.Tensor], object]] = {
    "copy_ from it": lambda s: torch.empty(4, 6).copy_(s),
    "copy_ from a view": lambda s: torch.empty(2, 3).copy_(s[::2, 1:4]),
    "copy_ from its bytes": lambda s: torch.empty(4, 24, dtype=torch.uint8).copy_(s.view(torch.uint8)),
    "clone": lambda s: s.clone(),
    "cast": lambda s: s.to(torch.bfloat16),
    "contiguous of a transpose": lambda s: s.t().contiguous(),
    "cat": lambda s: torch.cat([torch.zeros(1, 6), s]),
    "stack of views": lambda s: torch.stack([s[0], s[1]]),
    "item": lambda s: s[0, 0].item(),
    "multiplication": lambda s: 2 * s,
    "keyword": lambda s: torch.add(torch.zeros(4, 6), other=s),
    "_foreach": lambda s: torch._foreach_copy_([torch.empty(4, 6)], [s]),
    "reshape that copies": lambda s: s.t().reshape(-1),
    "deepcopy": copy.deepcopy,
    "index of a list": lambda s: s[[0, 2]],
    "index of a mask": lambda s: s[torch.tensor([True, False, False, True])],
}
VIEWING: dict[str, Callable[[torch.Tensor], object]] = {
    "slice": lambda s: s[1:3],
    "select": lambda s: s[0],
    "narrow": lambda s: s.narrow(0, 1, 2),
    "chunk": lambda s: s.chunk(2, dim=-1),
    "split": lambda s: torch.split(s, [1, 3]),
    "unbind": lambda s: s.unbind(0),
    "transpose": lambda s: s.t(),
    "permute": lambda s: s.permute(1, 0),
    "view": lambda s: s.view(-1).view(2, 12),
    "reshape": lambda s: s.reshape(2, 12),
    "bytes": lambda s: s.view(torch.uint8),
    "detach": lambda s: s.detach(),
    "expand": lambda s: s.unsqueeze(0).expand(3, 4, 6),
    "as_strided": lambda s: s.as_strided((2,), (3,)),
    "flatten": lambda s: s.flatten().view(4, 6),
    "same dtype": lambda s: s.to(torch.float32),
    "contiguous already": lambda s: s.contiguous(),
    "shape": lambda s: (s.shape, s.numel(), s.dim(), s.size(0)),
}


@pytest.mark.parametrize("how", sorted(READING))
def test_reading_counts(how: str) -> None:
    assert reads(READING[how], torch.arange(24.0).view(4, 6)) == {"w"}


@pytest.mark.parametrize("how", sorted(VIEWING))
def test_views_alone_are_not_reads(how: str) -> None:
    assert reads(VIEWING[how], torch.arange(24.0).view(4, 6)) == set()


def test_reads_are_told_apart_by_address() -> None:
    staging = torch.zeros(100)
    staged = Staged((f"t{start}", staging[start:stop]) for start, stop in ((64, 70), (10, 20), (20, 30)))
    mode = CoverageMode(Ranges(), staged, Recorder())
    with mode:
        for first, last in ((0, 10), (30, 64), (70, 100)):
            staging[first:last].clone()  # gaps
        assert mode.read == set()
        staging[19:20].clone()
        assert mode.read == {"t10"}
        staging[69:70].clone()
        assert mode.read == {"t10", "t64"}
        staging[20:30].clone()
    assert mode.read == {"t10", "t20", "t64"}


CHANGING: dict[str, Callable[[torch.Tensor], object]] = {
    "mul_": lambda s: s.mul_(2),
    "zero_ of a view": lambda s: s[1].zero_(),
    "copy_ into it": lambda s: s.copy_(torch.ones(4, 6)),
    "index": lambda s: s.__setitem__(torch.tensor([0]), 1.0),
    "out=": lambda s: torch.add(torch.ones(4, 6), 1, out=s),
    "_foreach": lambda s: torch._foreach_mul_([s], 2.0),
}


@pytest.mark.parametrize("how", sorted(CHANGING))
def test_changing_the_input_in_place_is_refused_before_it_happens(how: str) -> None:
    source = torch.arange(24.0).view(4, 6)
    before = source.clone()
    with pytest.raises(ApplyError, match=r"changes its input 'w' in place") as caught:
        reads(CHANGING[how], source)
    assert caught.value.fix
    assert torch.equal(source, before)


# --- the applier around it ------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """Two names for one storage, a fused parameter, one that loaders skip, and one of no bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.head = torch.nn.Parameter(self.embed.data, requires_grad=False)
        self.qkv = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.zeros(0, 4), requires_grad=False)
        self.extra = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)

    def load_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        places = {"embed": self.embed, "q": self.qkv.data[:2], "k": self.qkv.data[2:4], "v": self.qkv.data[4:]}
        for name, tensor in weights:
            if name in places:
                places[name].data.copy_(tensor)
            elif name == "boom":
                raise ValueError("no such weight")
            elif name == "eager":
                tensor.mul_(2)


def applier_of(model: torch.nn.Module) -> ModelApplier:
    """Of the first session of its engine."""
    return ModelApplier(model, Observations(model))


def bucket(**tensors: torch.Tensor) -> StagedBucket:
    """The tensors in one staging buffer, where a rank has them."""
    views = Views(torch.zeros(256 * len(tensors), dtype=torch.uint8))
    placed = [(name, views.at(256 * i, t.dtype, tuple(t.shape))) for i, (name, t) in enumerate(tensors.items())]
    for (_, place), tensor in zip(placed, tensors.values(), strict=True):
        place.copy_(tensor)
    return staged(placed)


def test_shared_storage_counts_once_and_shards_add_up() -> None:
    model = Tied()
    applier = applier_of(model)
    assert applier.missing() == (
        "embed: 96 of 96 bytes were not written",
        "head: 96 of 96 bytes were not written",
        "qkv: 96 of 96 bytes were not written",
        "extra: 24 of 24 bytes were not written",
    )
    applier.apply(bucket(embed=torch.ones(6, 4), q=torch.ones(2, 4)))
    applier.apply(bucket(v=torch.ones(2, 4), unknown=torch.ones(3), nothing=torch.ones(0)))
    assert applier.missing() == ("qkv: 32 of 96 bytes were not written", "extra: 24 of 24 bytes were not written")
    assert applier.unread() == ("unknown",)
    applier.apply(bucket(k=torch.ones(2, 4)))
    assert applier.missing() == ("extra: 24 of 24 bytes were not written",)
    assert torch.equal(model.qkv.data, torch.ones(6, 4))
    assert torch.equal(model.head.data, torch.ones(6, 4))


def test_a_loader_that_fails_is_an_apply_error_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ApplyError, match=r"bucket of 2 tensors \(q, boom, ...\): ValueError: no such weight") as caught:
        applier_of(Tied()).apply(bucket(q=torch.ones(2, 4), boom=torch.ones(1)))
    # Not as its cause: a traceback holds views of staging. The engine's log has it.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    (record,) = [record for record in caplog.records if record.name == "sglang_recv.receiver.apply"]
    assert record.exc_info is None
    assert record.getMessage().rstrip().endswith("ValueError: no such weight")


class Keeping(torch.nn.Module):
    """A loader that assigns what it gets, as some do for small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.w.data = tensor


def test_a_loader_that_keeps_staging_memory_is_found() -> None:
    model = Keeping()
    applier = applier_of(model)
    applier.apply(bucket(w=torch.ones(4)))
    assert applier.missing()[0] == "w: the loader keeps the staging memory itself instead of a copy"


def test_a_parameter_between_two_staging_buffers_is_not_staging() -> None:
    memory = torch.zeros(12)
    model = Tied()
    for name in ("embed", "head", "qkv"):
        setattr(model, name, torch.nn.Parameter(torch.zeros(0), requires_grad=False))
    model.extra.data = memory[4:10].view(2, 3)
    applier = applier_of(model)
    applier.apply(staged([("first", memory[:2]), ("second", memory[10:])]))
    assert applier.missing() == ("extra: 24 of 24 bytes were not written",)


def test_a_loader_that_changes_its_input_is_an_apply_error() -> None:
    tensor = torch.ones(3)
    with pytest.raises(ApplyError, match="'eager' in place"):
        applier_of(Tied()).apply(staged([("eager", tensor)]))
    assert torch.equal(tensor, torch.ones(3))


def test_the_mode_ends_with_the_bucket() -> None:
    model = Tied()
    applier = applier_of(model)
    applier.apply(bucket(q=torch.ones(2, 4)))
    model.extra.data.fill_(1)
    assert "extra: 24 of 24 bytes were not written" in applier.missing()


# --- the cheap way to watch -----------------------------------------------------------------------------------------


class Doing(torch.nn.Module):
    """Loads one parameter in a way of the test's choice, and another one in the usual way."""

    def __init__(self, step: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.step = step
        self.loads = 0
        self.p = torch.nn.Parameter(torch.full((4, 6), -1.0), requires_grad=False)
        self.other = torch.nn.Parameter(torch.zeros(3), requires_grad=False)

    def load_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        for name, tensor in weights:
            if name == "p":
                self.step(self.p.data, tensor)
            else:
                self.other.data.copy_(tensor)


STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    **WHOLE,
    **{f"part: {how}": step for how, step in PART.items()},
    **{f"index: {how}": step for how, step in INDEXED.items()},
    **{f"reading: {how}": lambda p, s, step=step: step(s) for how, step in (READING | VIEWING).items()},
    **{f"changing: {how}": lambda p, s, step=step: step(s) for how, step in CHANGING.items()},
    "a transpose that is copied": lambda p, s: p.copy_(s.view(6, 4).t().contiguous()),
}


@pytest.mark.parametrize("how", sorted(STEPS))
def test_both_ways_to_watch_say_the_same(how: str) -> None:
    said: list[object] = []
    for only_copies in (True, False):
        model = Doing(STEPS[how])
        seen = Observations(model)
        seen.only_copies = only_copies
        applier = ModelApplier(model, seen)
        error = ""
        try:
            applier.apply(bucket(other=torch.ones(3), p=torch.arange(24.0).view(4, 6)))
        except ApplyError as caught:
            error = caught.message.partition(" (")[0]
        said.append((error, applier.missing(), applier.unread(), model.p.data.tolist(), model.other.data.tolist()))
    assert said[0] == said[1]


def test_a_loader_that_only_copies_is_run_once_and_watched_cheaply() -> None:
    model = Watched()
    applier = applier_of(model)
    applier.apply(bucket(embed=torch.ones(6, 4), q=Q, nothing=torch.ones(0)))
    applier.apply(bucket(k=Q, v=Q))
    assert model.watched == ["copies", "copies"]
    assert applier.missing() == ("extra: 24 of 24 bytes were not written",)


def test_a_tensor_that_nothing_copies_is_looked_at_in_the_other_way_and_only_its_bucket() -> None:
    model = Watched()
    applier = applier_of(model)
    applier.apply(bucket(embed=torch.ones(6, 4), q=Q, unknown=Q))
    applier.apply(bucket(k=Q))
    assert model.watched == ["copies", "all", "copies"]
    assert applier.unread() == ("unknown",)


def test_a_loader_that_computes_is_run_twice_once() -> None:
    model = Doing(lambda p, s: p.zero_().add_(s))
    applier = applier_of(model)
    for loads in (2, 3, 4):
        applier.apply(bucket(p=torch.full((4, 6), float(loads))))
        assert model.loads == loads
    assert torch.equal(model.p.data, torch.full((4, 6), 4.0))
    assert applier.missing() == ("other: 12 of 12 bytes were not written",)


# --- what a plan could not repeat -----------------------------------------------------------------------------------


def recorded(
    how: str, step: Callable[[torch.Tensor, torch.Tensor], object], parameter: torch.Tensor, source: torch.Tensor
) -> tuple[Recorder, set[str]]:
    """What one way to watch notes of ``step``, and which tensors it saw read. ``source`` lies in staging."""
    staged, recorder = Staged([("w", source)]), Recorder()
    modes: list[Mode] = [CopyMode(Ranges(), staged, recorder)]
    if how == "all":
        everything = CoverageMode(Ranges(), staged, recorder)
        modes = [everything, everything.values()]
    with watching(*modes):
        step(parameter, source)
    return recorder, modes[0].read


def touches(recorder: Recorder, tensor: torch.Tensor) -> set[str]:
    """What else happened to the bytes of ``tensor``."""
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return {why for low, high, why in recorder.touched if low < stop and start < high}


SLICES: dict[str, Callable[[torch.Tensor], object]] = {
    "a number": lambda s: s[1],
    "a slice": lambda s: s[1:3],
    "a column": lambda s: s[..., 2],
    "a new dimension": lambda s: s[None, ::2],
}
ADVANCED: dict[str, Callable[[torch.Tensor], object]] = {
    "a list": lambda s: s[[0, 1, 2]],
    "a mask": lambda s: s[torch.tensor([True, False, True, True])],
    "a tensor": lambda s: s[:, torch.tensor([1, 2])],
}


@pytest.mark.parametrize("how", sorted(SLICES))
def test_a_slice_keeps_the_plan(how: str) -> None:
    recorder, _ = recorded("copies", lambda p, s: (p.copy_(s), SLICES[how](s), SLICES[how](p)), *pair())
    assert recorder.reasons == {}
    assert recorder.touched == []


@pytest.mark.parametrize("how", sorted(ADVANCED))
def test_an_index_that_makes_a_copy_ends_the_plan_of_its_tensor(how: str) -> None:
    recorder, _ = recorded("copies", lambda p, s: (p.copy_(s), ADVANCED[how](s)), *pair())
    assert recorder.reasons == {"w": "copied by __getitem__()"}


@pytest.mark.parametrize("how", sorted(ADVANCED))
def test_an_index_that_copies_out_of_a_parameter_is_noted(how: str) -> None:
    parameter, source = pair()
    recorder, _ = recorded("copies", lambda p, s: (p.copy_(s), ADVANCED[how](p)), parameter, source)
    assert touches(recorder, parameter) == {"copied by __getitem__()"}


def test_a_tensor_of_the_bucket_that_is_an_index_ends_its_plan() -> None:
    keep = torch.tensor([True, False, True, False])
    recorder, _ = recorded("copies", lambda p, s: p[s], torch.zeros(4, 6), keep)
    assert recorder.reasons == {"w": "copied by __getitem__()"}


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter and a tensor for it."""
    return torch.zeros(4, 6), torch.arange(24.0).view(4, 6)


LEAVING: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "numpy": (lambda t: t.numpy(), "read by numpy()"),
    "numpy of a view": (lambda t: t[1:].numpy(), "read by numpy()"),
    "numpy by force": (lambda t: t.numpy(force=True), "read by numpy()"),
    "asarray": (np.asarray, "read by __array__()"),
    "tolist": (lambda t: t.tolist(), "read as a number"),
    "dlpack": (lambda t: np.from_dlpack(t), "read by __dlpack__()"),
    "storage": (lambda t: bytes(t.untyped_storage()), "read by untyped_storage()"),
    "text": (repr, "read by __repr__()"),
}


@pytest.mark.parametrize("way", ["copies", "all"])
@pytest.mark.parametrize("how", sorted(LEAVING))
def test_values_that_leave_torch_end_the_plan_of_their_tensor(how: str, way: str) -> None:
    take, reason = LEAVING[how]
    recorder, read = recorded(way, lambda p, s: take(s), *pair())
    assert recorder.reasons == {"w": reason}
    assert read == {"w"}


@pytest.mark.parametrize("way", ["copies", "all"])
@pytest.mark.parametrize("how", sorted(LEAVING))
def test_values_of_a_parameter_that_leave_torch_are_noted(how: str, way: str) -> None:
    parameter, source = pair()
    take, reason = LEAVING[how]
    recorder, _ = recorded(way, lambda p, s: (p.copy_(s), take(p)), parameter, source)
    assert reason in touches(recorder, parameter)
    assert recorder.reasons == {}


def test_an_argument_that_gets_the_result_is_no_source_of_it() -> None:
    parameter, source = pair()
    recorder, _ = recorded("copies", lambda p, s: (copy.deepcopy(p), copy.deepcopy(s)), parameter, source)
    assert recorder.reasons == {"w": "read by __deepcopy__()"}
    assert touches(recorder, parameter) == {"read by __deepcopy__()"}


STAYING: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "slice assignment": lambda p, s: p.__setitem__(slice(None), s),
    "views by functions": lambda p, s: [a.copy_(b) for a, b in zip(torch.split(p, 2), torch.split(s, 2), strict=True)],
    "facts": lambda p, s: (p.copy_(s), torch.is_floating_point(s), s.is_sparse, torch.numel(s), s.dim_order()),
}


@pytest.mark.parametrize("way", ["copies", "all"])
@pytest.mark.parametrize("how", sorted(STAYING))
def test_calls_that_only_hand_on_views_and_facts_keep_the_plan(how: str, way: str) -> None:
    recorder, _ = recorded(way, STAYING[how], *pair())
    assert recorder.reasons == {}
    assert recorder.touched == []


def test_facts_are_not_reads() -> None:
    _, read = recorded("all", lambda p, s: (torch.is_floating_point(s), s.is_sparse, s.dim_order()), *pair())
    assert read == set()


def test_both_modes_together_note_each_copy_once() -> None:
    recorder, read = recorded("all", lambda p, s: p.copy_(s), *pair())
    assert [(copied.name, copied.shape) for copied in recorder.copies] == [("w", (4, 6))]
    assert read == {"w"}


def test_the_reason_of_an_operation_goes_before_that_of_the_call() -> None:
    recorder, _ = recorded("all", lambda p, s: torch.cat([s, s]), *pair())
    assert recorder.reasons == {"w": "read by aten.cat.default"}


@pytest.mark.parametrize("way", ["copies", "all"])
def test_a_write_by_python_is_noted(way: str) -> None:
    parameter, source = pair()
    recorder, _ = recorded(way, lambda p, s: p.copy_(s).map_(s, lambda a, b: a + b), parameter, source)
    assert touches(recorder, parameter) == {"read by map_()"}
    assert recorder.reasons == {"w": "read by map_()"}


@pytest.mark.parametrize("way", ["copies", "all"])
def test_a_write_by_python_to_the_input_is_refused(way: str) -> None:
    parameter, source = pair()
    with pytest.raises(ApplyError, match=r"changes its input 'w' in place"):
        recorded(way, lambda p, s: s.apply_(lambda item: item + 1), parameter, source)
    assert torch.equal(source, torch.arange(24.0).view(4, 6))


# --- thread pools ---------------------------------------------------------------------------------------------------


def halves(parameter: torch.Tensor, source: torch.Tensor) -> None:
    """Copies by two tasks."""
    with ThreadPoolExecutor(2) as pool:
        for task in [pool.submit(parameter[i : i + 2].copy_, source[i : i + 2]) for i in (0, 2)]:
            task.result()


def nested(parameter: torch.Tensor, source: torch.Tensor) -> None:
    """A task that gives its work to another pool, and then does some itself."""

    def outer() -> None:
        halves(parameter[:, :3], source[:, :3])
        parameter[:, 3:].copy_(source[:, 3:])

    with ThreadPoolExecutor(1) as pool:
        pool.submit(outer).result()


@pytest.mark.parametrize("way", ["copies", "all"])
@pytest.mark.parametrize("step", [halves, nested])
def test_tasks_of_pools_are_watched_and_of_pools_in_pools(
    step: Callable[[torch.Tensor, torch.Tensor], None], way: str
) -> None:
    parameter, source = pair()
    recorder, read = recorded(way, step, parameter, source)
    written = np.zeros((4, 6), bool)
    for copied in recorder.copies:
        row, column = divmod((copied.target - parameter.data_ptr()) // 4, 6)
        place = written[row : row + copied.shape[0], column : column + copied.shape[1]]
        assert not place.any(), "noted twice"
        place[...] = True
    assert written.all()
    assert read == {"w"}
    assert torch.equal(parameter, source)


def test_a_pools_thread_is_left_alone_after_its_task() -> None:
    parameter, source = pair()
    with ThreadPoolExecutor(1) as pool:
        recorder, _ = recorded("copies", lambda p, s: pool.submit(p[:2].copy_, s[:2]).result(), parameter, source)
        pool.submit(halves, parameter, source).result()
    assert [copied.shape for copied in recorder.copies] == [(2, 6)]


def wrapped(submit: Callable[..., Any], seen: list[str]) -> Callable[..., Any]:
    """``submit`` as a library that traces tasks patches it."""

    def traced(pool: ThreadPoolExecutor, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        seen.append("task")
        return submit(pool, task, *args, **kwargs)

    return traced


def test_a_patch_of_another_library_is_used_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    theirs = wrapped(ThreadPoolExecutor.submit, seen)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", theirs)
    recorder, _ = recorded("copies", halves, *pair())
    assert len(recorder.copies) == 2
    assert seen == ["task", "task"]
    assert ThreadPoolExecutor.submit is theirs


def test_a_patch_that_comes_while_somebody_watches_stays_and_tasks_are_watched_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(ThreadPoolExecutor, "submit", ThreadPoolExecutor.submit)  # given back after the test

    def patching(parameter: torch.Tensor, source: torch.Tensor) -> None:
        ThreadPoolExecutor.submit = wrapped(ThreadPoolExecutor.submit, seen)  # type: ignore[method-assign]
        halves(parameter, source)

    recorder, _ = recorded("copies", patching, *pair())
    theirs = ThreadPoolExecutor.submit
    assert len(recorder.copies) == 2
    assert seen == ["task"] * 2
    recorder, _ = recorded("copies", halves, *pair())
    assert len(recorder.copies) == 2
    assert seen == ["task"] * 4
    assert ThreadPoolExecutor.submit is theirs
    halves(*pair())
    assert len(recorder.copies) == 2


def test_watching_within_watching_gives_back_the_outer_one() -> None:
    stock = ThreadPoolExecutor.submit
    inner: list[Recorder] = []

    def step(parameter: torch.Tensor, source: torch.Tensor) -> None:
        inner.append(recorded("copies", halves, *pair())[0])
        halves(parameter, source)

    recorder, _ = recorded("copies", step, *pair())
    assert [copied.name for copied in recorder.copies] == ["w", "w"]
    assert len(inner[0].copies) == 2
    assert ThreadPoolExecutor.submit is stock


# --- what earlier sessions saw --------------------------------------------------------------------------------------


class Watched(Tied):
    """Knows how its loads are watched: for copies, for every operation, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: list[str] = []

    def load_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        copies = any(isinstance(mode, CopyMode) for mode in _get_current_function_mode_stack())
        self.watched.append("copies" if copies else "all" if _len_torch_dispatch_stack() else "")
        super().load_weights(weights)


Q = torch.ones(2, 4)


def session(model: Watched, seen: Observations, *buckets: dict[str, torch.Tensor]) -> tuple[str, tuple[bool, ...]]:
    """What a session reports, and which of its buckets were watched."""
    applier = ModelApplier(model, seen)
    watched = []
    for tensors in buckets:
        model.watched.clear()
        applier.apply(bucket(**tensors))
        watched.append(any(model.watched))
    return "; ".join((*applier.missing(), *applier.unread())), tuple(watched)


def test_a_session_that_repeats_another_is_not_watched_and_says_the_same() -> None:
    model = Watched()
    seen = Observations(model)
    rounds = [{"embed": torch.ones(6, 4)}, {"q": Q, "unknown": Q}, {"v": Q, "k": Q}]
    first, watched = session(model, seen, *rounds)
    assert first == "extra: 24 of 24 bytes were not written; unknown"
    assert watched == (True,) * 3
    model.qkv.data.zero_()
    assert session(model, seen, *rounds) == (first, (False,) * 3)
    assert torch.equal(model.qkv.data, torch.ones(6, 4)), "loaded all the same"


@pytest.mark.parametrize("change", ["order", "name", "shape", "dtype", "split"])
def test_a_session_is_watched_from_where_it_deviates(change: str) -> None:
    model = Watched()
    seen = Observations(model)
    session(model, seen, {"embed": torch.ones(6, 4)}, {"q": Q, "k": Q}, {"v": Q})
    second: list[dict[str, torch.Tensor]] = {
        "order": [{"k": Q, "q": Q}],
        "name": [{"q": Q, "unknown": Q}],
        "shape": [{"q": Q, "k": torch.ones(1, 4)}],
        "dtype": [{"q": Q, "k": Q.double()}],
        "split": [{"q": Q}, {"k": Q}],
    }[change]
    findings, watched = session(model, seen, {"embed": torch.ones(6, 4)}, *second, {"v": Q})
    assert watched == (False, *([True] * (len(second) + 1)))
    assert ("qkv: 32 of 96 bytes" in findings) == (change == "name")


def test_a_shorter_session_does_not_inherit_what_it_did_not_send() -> None:
    model = Watched()
    seen = Observations(model)
    session(model, seen, {"q": Q}, {"k": Q}, {"v": Q})
    assert session(model, seen, {"q": Q}, {"k": Q})[0].startswith("embed: 96 of 96 bytes were not written; head")
    assert "qkv: 32 of 96 bytes" in session(model, seen, {"q": Q}, {"k": Q})[0]


def test_a_load_that_failed_is_watched_again() -> None:
    model = Watched()
    seen = Observations(model)
    for _ in range(2):
        with pytest.raises(ApplyError):
            session(model, seen, {"q": Q, "boom": Q})
        assert model.watched == ["copies"]


def test_parameters_at_other_addresses_are_watched_again() -> None:
    model = Watched()
    seen = Observations(model)
    session(model, seen, {"q": Q})
    assert session(model, seen, {"q": Q})[1] == (False,)
    keep = model.qkv.data
    model.qkv.data = keep.clone()
    findings, watched = session(model, seen, {"q": Q})
    assert watched == (True,)
    assert "qkv: 64 of 96 bytes were not written" in findings
    assert not any(parameter.data_ptr() == keep.data_ptr() for parameter in model.parameters())


def test_layouts_that_never_repeat_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply_module, "_MAX_OBSERVED", 5)
    model = Watched()
    seen = Observations(model)
    for number in range(20):
        session(model, seen, {f"unknown{number}": Q}, {"q": Q})
    assert len(seen._seen) <= 7
