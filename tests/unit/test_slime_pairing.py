"""Which train rank feeds which engine ranks."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_recv.errors import DeviceMismatchError
from sglang_recv.integrations.slime.pairing import Engine, Share, Trainer, assign
from sglang_recv.wire import RankInfo, RankTable

HOST, OTHER = "aaaaaaaa-0000", "bbbbbbbb-0000"


def trainers(*devices: str, boot: str = HOST) -> list[Trainer]:
    return [Trainer(rank, boot, device, f"{rank}") for rank, device in enumerate(devices)]


def engine(url: str, offset: int, *devices: str, boot: str = HOST) -> Engine:
    ranks = tuple(RankInfo(rank, device, boot, "ipc:///c", "/f", "all") for rank, device in enumerate(devices))
    return Engine(url, offset, len(devices), RankTable(1, 0, url, "vmm", ranks))


def cpus(count: int) -> tuple[str, ...]:
    return tuple(f"cpu:{HOST}:{rank}" for rank in range(count))


def test_the_reported_layout_eight_engines_of_one_gpu() -> None:
    gpus = [f"gpu:{letter}" for letter in "hgfedcba"]
    engines = [engine(f"e{i}", i, gpu) for i, gpu in enumerate(gpus)]
    assert assign(trainers(*gpus), engines) == {i: (Share(i, (0,), True),) for i in range(8)}


def test_the_uuid_decides_and_not_the_order() -> None:
    engines = [engine("two", 0, "gpu:c", "gpu:a"), engine("one", 2, "gpu:b")]
    assert assign(trainers("gpu:a", "gpu:b", "gpu:c", "gpu:d"), engines) == {
        0: (Share(0, (1,), True),),
        1: (Share(1, (0,), True),),
        2: (Share(0, (0,), False),),
        3: (),
    }


def test_several_engines_and_ranks_on_one_gpu_are_all_fed() -> None:
    engines = [engine("a", 0, "gpu:x"), engine("b", 0, "gpu:x", "gpu:x", "gpu:y")]
    assert assign(trainers("gpu:x", "gpu:y"), engines) == {
        0: (Share(0, (0,), True), Share(1, (0, 1), True)),
        1: (Share(1, (2,), False),),
    }


def test_on_a_cpu_slimes_own_layout_pairs() -> None:
    engines = [engine("a", 0, *cpus(1)), engine("b", 1, *cpus(2))]
    assert assign(trainers(*("cpu:any",) * 4), engines) == {
        0: (Share(0, (0,), True),),
        1: (Share(1, (0,), True),),
        2: (Share(1, (1,), False),),
        3: (),
    }


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
def test_every_rank_is_fed_by_exactly_one_and_every_engine_has_one_coordinator(count: int) -> None:
    gpus = [f"gpu:{number}" for number in range(count)]
    engines = [engine(f"e{at}", at, *gpus[at : at + size]) for at, size in _sizes(count)]
    shares = assign(trainers(*reversed(gpus)), engines)
    fed = [(share.engine, rank) for found in shares.values() for share in found for rank in share.ranks]
    assert sorted(fed) == [(i, rank.rank) for i, e in enumerate(engines) for rank in e.table.ranks]
    chosen = [share.engine for found in shares.values() for share in found if share.coordinator]
    assert sorted(chosen) == list(range(len(engines)))


def _sizes(count: int) -> list[tuple[int, int]]:
    found, at = [], 0
    for size in (1, 2, 4, 8, 16, 33):
        if at + size <= count:
            found.append((at, size))
            at += size
    return found


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ([engine("e", 0, "gpu:q")], "e rank 0 is on gpu:q (host aaaaaaaa, CUDA_VISIBLE_DEVICES='all'), which is no"),
        ([engine("e", 0, "gpu:x", boot=OTHER)], "rank 0 is on gpu:x (host bbbbbbbb"),
        ([engine("e", 1, *cpus(2))], "engine e rank 1 is on cpu:"),
    ],
)  # fmt: skip
def test_an_engine_rank_elsewhere_is_named_with_both_sides(engines: Any, said: str) -> None:
    with pytest.raises(DeviceMismatchError) as caught:
        assign(trainers("gpu:x", "gpu:y"), engines)
    assert any(said in line for line in caught.value.details), caught.value.details
    assert "train rank 1 is on gpu:y (host aaaaaaaa, CUDA_VISIBLE_DEVICES='1')" in caught.value.details


def test_two_train_ranks_on_one_gpu_are_named() -> None:
    with pytest.raises(DeviceMismatchError) as caught:
        assign(trainers("gpu:x", "gpu:x"), [engine("e", 0, "gpu:x")])
    assert "that of train ranks [0, 1] device" in caught.value.details[0]
