"""What ranks say to each other in a process group on the CPU, without pickling."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_bytes(mine: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Give every rank the bytes of all ranks, in order of rank. A collective: all ranks of the group must reach it.

    torch's own ``all_gather_object`` pickles, and whoever can write to the group could then run code in all of it.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return [mine]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(mine)], dtype=torch.int64), group=group)
    longest = max(1, int(torch.cat(sizes).max()))
    # bytearrays that tensors look into, and not the other way round: torch makes bytes one item at a time.
    parts = [bytearray(longest) for _ in range(ranks)]
    dist.all_gather([_tensor(part) for part in parts], _tensor(bytearray(mine.ljust(longest, b"\0"))), group=group)
    return [bytes(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def broadcast_bytes(mine: bytes, group: dist.ProcessGroup) -> bytes:
    """Give every rank the bytes of the group's first rank. A collective, as :func:`gather_bytes`."""
    if dist.get_world_size(group) == 1:
        return mine
    source = dist.get_global_rank(group, 0)
    size = torch.tensor([len(mine)], dtype=torch.int64)
    dist.broadcast(size, source, group=group)
    data = bytearray(mine if dist.get_rank(group) == 0 else bytes(int(size)))
    if data:
        dist.broadcast(_tensor(data), source, group=group)
    return bytes(data)


def _tensor(data: bytearray) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
