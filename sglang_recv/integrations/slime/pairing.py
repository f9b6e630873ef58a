"""Which train rank feeds which engine ranks: a pure function of what all of them report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from sglang_recv.errors import DeviceMismatchError
from sglang_recv.wire import RankInfo, RankTable


class Trainer(msgspec.Struct, tag=True, frozen=True):
    """One train rank: its rank, host, and device (``gpu:<uuid>``, or anything on a CPU)."""

    rank: int
    boot_id: str
    device: str
    visible_devices: str


class Start(msgspec.Struct, tag=True, frozen=True):
    """What a train rank brings to an update: an id for the session, and whether it has its senders still."""

    session: str
    connected: bool
    trainer: Trainer


class Lead(msgspec.Struct, tag=True, frozen=True):
    """How many rounds a train rank has sent to each of its engines, and whether it has more tensors to send."""

    rounds: tuple[tuple[int, int], ...]
    more: bool


class Engine(msgspec.Struct, frozen=True):
    """One colocated engine: base URL, the train rank of its first GPU, how many GPUs slime gave it, and its ranks."""

    url: str
    offset: int
    count: int
    table: RankTable


class Engines(msgspec.Struct, tag=True, frozen=True):
    """What one train rank found out, for all of them."""

    engines: tuple[Engine, ...]


@dataclass(frozen=True)
class Share:
    """What one train rank feeds of one engine. The lowest train rank of an engine coordinates it."""

    engine: int
    ranks: tuple[int, ...]
    coordinator: bool


def assign(trainers: Sequence[Trainer], engines: Sequence[Engine]) -> dict[int, tuple[Share, ...]]:
    """For each train rank, its shares, in order of engines.

    GPUs are paired by UUID and host. A CPU has none, so there slime's own layout pairs: rank ``j`` of an engine belongs
    to train rank ``offset + j``.

    Raises
    ------
    DeviceMismatchError
        When an engine rank is on no train rank's device, or on the device of several, with both sides' devices.
    """
    fed: dict[tuple[int, int], list[int]] = {}
    lost = []
    for index, engine in enumerate(engines):
        for rank in engine.table.ranks:
            found = [trainer.rank for trainer in trainers if _same(trainer, engine, rank)]
            if len(found) == 1:
                fed.setdefault((found[0], index), []).append(rank.rank)
            else:
                whose = f"that of train ranks {found}" if found else "no train rank's"
                lost.append(
                    f"engine {engine.url} rank {rank.rank} is on {rank.device} (host {rank.boot_id[:8]}, "
                    f"CUDA_VISIBLE_DEVICES={rank.visible_devices!r}), which is {whose} device"
                )
    if lost:
        lost += [
            f"train rank {t.rank} is on {t.device} (host {t.boot_id[:8]}, CUDA_VISIBLE_DEVICES={t.visible_devices!r})"
            for t in trainers
        ]
        raise DeviceMismatchError(
            "colocated engines and train ranks do not share their GPUs one by one",
            fix="place each engine on GPUs of the trainer (--colocate, one train rank per GPU), in containers that "
            "share the host's kernel",
            details=tuple(lost),
        )
    coordinators = {index: min(trainer for trainer, i in fed if i == index) for _, index in fed}
    return {
        trainer.rank: tuple(
            Share(index, tuple(ranks), coordinators[index] == trainer.rank)
            for (owner, index), ranks in sorted(fed.items())
            if owner == trainer.rank
        )
        for trainer in trainers
    }


def _same(trainer: Trainer, engine: Engine, rank: RankInfo) -> bool:
    if trainer.boot_id != rank.boot_id:
        return False
    if rank.device.startswith("cpu:"):
        return trainer.rank == engine.offset + rank.rank
    return trainer.device == rank.device
