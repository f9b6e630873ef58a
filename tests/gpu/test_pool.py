"""torch's own allocator in exportable memory."""

from __future__ import annotations

import gc

import pytest
import torch

from sglang_recv import exportable_pool
from sglang_recv.client.pool import Pools
from sglang_recv.errors import SessionStateError

SIZE = 256 << 20


def free() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def test_torch_allocates_in_the_pool_and_gives_it_back() -> None:
    torch.zeros(1, device="cuda")
    before = free()
    pool = exportable_pool(SIZE)
    assert before - free() == pool.nbytes
    pools = Pools([pool])
    with pool.use():
        large = torch.full((100 << 18,), 7, dtype=torch.int32, device="cuda")
        small = [torch.full((100,), float(number), device="cuda") for number in range(64)]
        joined = torch.cat([large[:1000], large[:1000]])
    elsewhere = torch.empty(100, device="cuda")
    tensors = [large, *small, joined, elsewhere, large[1:], large[64:]]
    addresses, homes, offsets = pools.look(tensors)
    assert addresses is not None
    assert addresses.tolist() == [tensor.data_ptr() for tensor in tensors]
    assert homes.tolist() == [pool.number] * 66 + [0, 0, pool.number]
    assert len(set(offsets[:66].tolist())) == 66
    assert pool.buffer.tensor()[offsets[0] : offsets[0] + 8].view(torch.int32).tolist() == [7, 7]
    with pytest.raises(SessionStateError, match="still in this pool"):
        pool.close()
    address = large.data_ptr()
    del large, tensors[0], tensors[-2:]
    again = pool.empty((100 << 18,), torch.int32)
    assert again.data_ptr() == address, "what was freed is used again"
    with pytest.raises(torch.OutOfMemoryError):
        pool.empty((SIZE,), torch.uint8)
    assert torch.equal(torch.stack(small)[:, 0].cpu(), torch.arange(64.0))
    del again, small, joined, tensors
    whole = pool.empty((SIZE,), torch.uint8)
    assert pools.find(whole) is not None
    del whole
    pool.close()
    del pools, pool, elsewhere
    assert free() == before


def test_a_pool_on_another_stream_is_refused_by_torch_and_stays_whole() -> None:
    with exportable_pool(SIZE) as pool:
        with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(torch.OutOfMemoryError):
            pool.empty((2 << 20,), torch.uint8)
        tensor = pool.empty((2 << 20,), torch.uint8)
        assert Pools([pool]).find(tensor) is not None
        del tensor
