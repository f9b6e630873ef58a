"""Which ranks a sender feeds, from which device: by device and host, never by ordinal."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_recv.client.choice import Place, Situation, choose
from sglang_recv.errors import DeviceMismatchError
from sglang_recv.wire import RankInfo, RankTable

#: Which ranks this sender feeds: every rank, those on its current device, or a list.
Ranks = Literal["all", "local"] | Sequence[int]


@dataclass(frozen=True)
class Sender:
    """What the sender reports of itself."""

    boot_id: str
    #: Device ids that this process can use, with the torch device of each.
    devices: Mapping[str, str]
    #: Device id of the current device.
    current: str
    visible_devices: str


@dataclass(frozen=True)
class Pair:
    """One engine rank and the torch device on this side that shares memory with it."""

    rank: RankInfo
    device: str


def pair(mode: str, engine: str, table: RankTable, sender: Sender, ranks: Ranks) -> list[Pair]:
    """The ranks of ``engine`` that this sender feeds by fds.

    Raises
    ------
    ReceiverOffError, UnsupportedError
        For a mode that is not built or not offered by the engine.
    DeviceMismatchError
        When a rank that is to be fed is on no device of this process, with both sides' devices.
    """
    if isinstance(ranks, str) and ranks not in ("all", "local"):
        raise DeviceMismatchError(f"ranks={ranks!r}", fix="use 'all', 'local' or a list of ranks")
    wanted = [rank for rank in table.ranks if _wanted(rank, sender, ranks)]
    if not isinstance(ranks, str):
        unknown = sorted(set(ranks) - {rank.rank for rank in table.ranks})
        if unknown:
            raise DeviceMismatchError(
                f"engine {engine} has ranks 0 to {len(table.ranks) - 1}, not {unknown}", fix="correct ranks="
            )
    if not wanted:  # a mode that cannot be had anywhere is the better reason
        with contextlib.suppress(DeviceMismatchError):
            choose(situation(mode, table, table.ranks[0], sender), f"engine {engine}")
    pairs, lost = [], []
    for rank in wanted:
        try:
            choose(situation(mode, table, rank, sender), f"engine {engine} rank {rank.rank}")
        except DeviceMismatchError:
            lost.append(
                f"rank {rank.rank} is on {rank.device} (host {rank.boot_id[:8]}, CUDA_VISIBLE_DEVICES="
                f"{rank.visible_devices!r})"
            )
        else:
            pairs.append(Pair(rank, _device(rank, sender) or ""))
    if lost or not pairs:
        if not wanted:
            lost = [f"rank {r.rank} is on {r.device} (host {r.boot_id[:8]})" for r in table.ranks]
        mine = ", ".join(sender.devices) or "none"
        raise DeviceMismatchError(
            f"engine {engine} cannot be fed by fds from this process",
            fix="run the trainer on the engine's GPU and host with a CUDA_VISIBLE_DEVICES that includes it; for other "
            "placements use SGLang's own update_weights_from_distributed",
            details=(
                *lost,
                f"this process (host {sender.boot_id[:8]}, CUDA_VISIBLE_DEVICES={sender.visible_devices!r}) has "
                f"{mine}, the current one is {sender.current}",
            ),
        )
    return pairs


def _wanted(rank: RankInfo, sender: Sender, ranks: Ranks) -> bool:
    if ranks == "all":
        return True
    if ranks == "local":
        return rank.device == sender.current
    return rank.rank in ranks


def _device(rank: RankInfo, sender: Sender) -> str | None:
    if rank.boot_id != sender.boot_id:
        return None
    if rank.device.startswith("cpu:"):
        return "cpu"
    return sender.devices.get(rank.device)


def situation(mode: str, table: RankTable, rank: RankInfo, sender: Sender) -> Situation:
    """What is known of a rank before it is asked for its state."""
    place: Place = "same host" if rank.boot_id == sender.boot_id else "other host"
    if _device(rank, sender) is not None:
        place = "same device"
    return Situation(mode, table.mode, place, "cpu" if rank.device.startswith("cpu:") else "cuda")
