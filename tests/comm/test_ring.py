"""All-gather and reduce-scatter from send and receive. The oracle is the backend's own collectives.

The numbers are small integers, so that floating-point sums are exact in any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp import launch, record
from hwfsdp.collectives import RingAllGather, RingReduceScatter
from hwfsdp.comm.ring import exchange, ring_all_gather, ring_reduce_scatter
from hwfsdp.compat import all_gather_single, reduce_scatter_single

SUM, MEAN = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def integers(n: int, dtype: torch.dtype) -> Tensor:
    """Return integers that differ on every rank."""
    generator = torch.Generator().manual_seed(1000 * n + dist.get_rank())
    return torch.randint(-50, 50, (n,), generator=generator).to(dtype)


def sent_in_blocks(call: Callable[[], Any], block: Tensor) -> bool:
    """Return True if the call sends and receives one block per step, which is the minimum, and calls no other collective."""
    with record() as log:
        call()
    steps = dist.get_world_size() - 1
    found = Counter((e.op, e.bytes) for e in log.collectives())
    return found == Counter({(op, block.nbytes): steps for op in ("send", "recv")})


def gather_and_reduce(n: int, dtype: torch.dtype) -> None:
    group, world_size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    block, whole = integers(n, dtype), integers(world_size * n, dtype)
    expected, beside, in_place = (torch.full((world_size * n,), -99, dtype=dtype) for _ in range(3))
    total, summed = (torch.full((n,), -99, dtype=dtype) for _ in range(2))
    all_gather_single(expected, block, group, False)
    reduce_scatter_single(total, whole.clone(), SUM, group, False)
    given, given_whole = block.clone(), whole.clone()
    assert sent_in_blocks(lambda: ring_all_gather(beside, given, group), block)
    assert sent_in_blocks(lambda: ring_reduce_scatter(summed, given_whole, group, mean=False), block)
    own = in_place[rank * n : (rank + 1) * n]
    own.copy_(block)
    assert RingAllGather()(in_place, own, group, async_op=True) is None, "it blocks the host"
    assert torch.equal(beside, expected) and torch.equal(in_place, expected) and torch.equal(summed, total)
    if dtype.is_floating_point:
        assert RingReduceScatter()(summed, given_whole, group, MEAN, async_op=True) is None
        assert torch.equal(summed, total / world_size)
    assert torch.equal(given, block) and torch.equal(given_whole, whole), "the inputs are only read"


def gather_and_reduce_among_some() -> tuple[float, list[float], list[float]]:
    """Ranks 0 and 2 of three are a group. Then all ranks exchange in their ring."""
    group, rank = dist.new_group([0, 2]), dist.get_rank()
    received, gathered, reduced = torch.full((1,), -1.0), torch.zeros(2), torch.zeros(1)
    exchange(torch.tensor([float(rank)]), received, dist.group.WORLD)
    if rank in (0, 2):
        ring_all_gather(gathered, torch.tensor([rank + 5.0]), group)
        ring_reduce_scatter(reduced, torch.tensor([rank + 10.0, rank + 20.0]), group, mean=False)
    return received.item(), gathered.tolist(), reduced.tolist()


def test_the_ring_equals_the_backend_keeps_its_input_sends_the_fewest_bytes_and_leaves_other_ranks_out() -> (
    None
):
    def on_a_rank() -> tuple[float, list[float], list[float]]:
        for n, dtype in product((1, 5), (torch.float32, torch.float64, torch.int64)):
            gather_and_reduce(n, dtype)
        return gather_and_reduce_among_some()

    assert launch(on_a_rank, 3, timeout=60) == [
        (2.0, [5.0, 7.0], [22.0]),
        (0.0, [0.0, 0.0], [0.0]),
        (1.0, [5.0, 7.0], [42.0]),
    ]
