"""Which ranks a sender feeds: by device and host, never by ordinal, and with a reason when it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_recv.client.choice import MODES
from sglang_recv.client.select import Pair, Sender, pair
from sglang_recv.errors import DeviceMismatchError, UnsupportedError
from sglang_recv.wire import RankInfo, RankTable

HOST, OTHER = "aaaaaaaa-0000", "bbbbbbbb-0000"


def gpu(rank: int, device: str, boot: str = HOST, mask: str = "3,1") -> RankInfo:
    return RankInfo(rank, device, boot, f"ipc:///r/{rank}", f"/r/{rank}", mask)


def table(*ranks: RankInfo, mode: str = "vmm") -> RankTable:
    return RankTable(1, 0, "e", mode, ranks)


CPU = table(*(gpu(rank, f"cpu:{HOST}:{rank}", mask="") for rank in range(2)))
TWO = table(gpu(0, "gpu:x"), gpu(1, "gpu:y"))
#: The same GPUs under other ordinals than in the engine.
SENDER = Sender(HOST, {"gpu:z": "cuda:0", "gpu:y": "cuda:1", "gpu:x": "cuda:2"}, "gpu:y", "7,1,3")


@pytest.mark.parametrize("mode", ["vmm", "auto"])
def test_ranks_are_paired_by_device_id(mode: str) -> None:
    assert pair(mode, "e", TWO, SENDER, "all") == [Pair(TWO.ranks[0], "cuda:2"), Pair(TWO.ranks[1], "cuda:1")]


def test_local_is_the_rank_on_the_current_device() -> None:
    assert pair("auto", "e", TWO, SENDER, "local") == [Pair(TWO.ranks[1], "cuda:1")]


def test_several_ranks_may_share_the_current_device() -> None:
    shared = table(gpu(0, "gpu:y"), gpu(1, "gpu:x"), gpu(2, "gpu:y"))
    assert [p.rank.rank for p in pair("auto", "e", shared, SENDER, "local")] == [0, 2]


@pytest.mark.parametrize(("ranks", "expected"), [([0], [0]), ((1,), [1]), ([1, 0], [0, 1]), (range(2), [0, 1])])
def test_listed_ranks(ranks: Any, expected: list[int]) -> None:
    assert [p.rank.rank for p in pair("auto", "e", TWO, SENDER, ranks)] == expected


def test_a_cpu_engine_of_this_host_is_fed_from_the_cpu() -> None:
    sender = Sender(HOST, {}, "cpu", "")
    assert pair("vmm", "e", CPU, sender, "all") == [Pair(rank, "cpu") for rank in CPU.ranks]
    assert pair("vmm", "e", CPU, SENDER, [1]) == [Pair(CPU.ranks[1], "cpu")]


@pytest.mark.parametrize("mode", ["", "VMM", "ipc"])
def test_unknown_modes_are_refused(mode: str) -> None:
    with pytest.raises(UnsupportedError, match=repr(mode)) as caught:
        pair(mode, "e", TWO, SENDER, "all")
    assert all(known in caught.value.fix for known in MODES)


def test_broadcast_is_refused_on_either_side() -> None:
    with pytest.raises(UnsupportedError, match="refuses two ranks on one device.*engine e rank 0 is on") as caught:
        pair("nccl", "e", TWO, SENDER, "all")
    assert "'vmm' or 'auto'" in caught.value.fix
    with pytest.raises(UnsupportedError, match="not built yet"):
        pair("nccl", "e", TWO, Sender(HOST, {}, "cpu", ""), "local")
    with pytest.raises(UnsupportedError, match="engine e rank 0 offers 'nccl', not 'vmm'"):
        pair("auto", "e", table(*TWO.ranks, mode="nccl"), SENDER, "all")


def lines(table_: RankTable, sender: Sender, ranks: Any) -> tuple[str, ...]:
    with pytest.raises(DeviceMismatchError, match="engine e cannot be fed by fds from this process") as caught:
        pair("auto", "e", table_, sender, ranks)
    assert "CUDA_VISIBLE_DEVICES" in caught.value.fix
    return caught.value.details


def test_a_mismatch_shows_both_sides() -> None:
    masked = Sender(HOST, {"gpu:y": "cuda:0"}, "gpu:y", "1")
    assert lines(TWO, masked, "all") == (
        "rank 0 is on gpu:x (host aaaaaaaa, CUDA_VISIBLE_DEVICES='3,1')",
        "this process (host aaaaaaaa, CUDA_VISIBLE_DEVICES='1') has gpu:y, the current one is gpu:y",
    )


def test_the_same_device_id_on_another_host_does_not_match() -> None:
    away = Sender(OTHER, SENDER.devices, "gpu:x", "7,1,3")
    assert lines(TWO, away, "all") == (
        "rank 0 is on gpu:x (host aaaaaaaa, CUDA_VISIBLE_DEVICES='3,1')",
        "rank 1 is on gpu:y (host aaaaaaaa, CUDA_VISIBLE_DEVICES='3,1')",
        "this process (host bbbbbbbb, CUDA_VISIBLE_DEVICES='7,1,3') has gpu:z, gpu:y, gpu:x, the current one is gpu:x",
    )
    assert len(lines(CPU, Sender(OTHER, {}, "cpu", ""), "all")) == 3


def test_a_sender_on_a_device_of_no_rank_sees_all_ranks() -> None:
    elsewhere = Sender(HOST, {"gpu:z": "cuda:0"}, "gpu:z", "7")
    assert lines(TWO, elsewhere, "local") == (
        "rank 0 is on gpu:x (host aaaaaaaa)",
        "rank 1 is on gpu:y (host aaaaaaaa)",
        "this process (host aaaaaaaa, CUDA_VISIBLE_DEVICES='7') has gpu:z, the current one is gpu:z",
    )


def test_a_sender_without_gpus_says_none() -> None:
    assert lines(TWO, Sender(HOST, {}, "cpu", ""), "all")[-1] == (
        "this process (host aaaaaaaa, CUDA_VISIBLE_DEVICES='') has none, the current one is cpu"
    )


def test_one_lost_rank_loses_all() -> None:
    assert len(lines(table(gpu(0, "gpu:x"), gpu(1, "gpu:w")), SENDER, "all")) == 2


def test_ranks_that_do_not_exist_are_named() -> None:
    with pytest.raises(DeviceMismatchError, match=r"engine e has ranks 0 to 1, not \[-1, 2\]"):
        pair("auto", "e", TWO, SENDER, [0, 2, -1])


def test_no_ranks_are_a_mismatch() -> None:
    assert len(lines(TWO, SENDER, [])) == 3


def test_unknown_words_for_ranks_are_refused() -> None:
    with pytest.raises(DeviceMismatchError, match="ranks='own'") as caught:
        pair("auto", "e", TWO, SENDER, "own")  # type: ignore[arg-type]
    assert "'local'" in caught.value.fix
