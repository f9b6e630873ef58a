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
    padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    return [bytes(part[: int(size)].tolist()) for part, size in zip(parts, sizes, strict=True)]
