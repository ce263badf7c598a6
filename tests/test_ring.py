"""All-gather and reduce-scatter from send and receive: the backend's own are the oracle.

The numbers are small integers, so that floating-point sums are exact in any order.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp import compat, launch, record
from hwfsdp.accounting import on_the_wire
from hwfsdp.collectives import RingAllGather, RingReduceScatter
from hwfsdp.ring import exchange, ring_all_gather, ring_reduce_scatter

WORLD_SIZES = (1, 2, 3)
BLOCKS = (1, 5)  # elements
DTYPES = (torch.float32, torch.float64, torch.int64)


def integers(n: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Different on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randint(-50, 50, (n,), generator=generator).to(dtype)


def gather_both_ways(n: int, dtype: torch.dtype) -> dict[str, Any]:
    group, world_size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    block = integers(n, n, dtype)
    expected = torch.empty(world_size * n, dtype=dtype)
    compat.all_gather_single(expected, block, group, async_op=False)

    beside = torch.full((world_size * n,), -99, dtype=dtype)
    given = block.clone()
    with record() as log:
        ring_all_gather(beside, given, group)
    in_place = torch.full((world_size * n,), -99, dtype=dtype)
    own = in_place[rank * n : (rank + 1) * n]
    own.copy_(block)
    ring_all_gather(in_place, own, group)
    selected = torch.full((world_size * n,), -99, dtype=dtype)
    work = RingAllGather()(selected, block, group, async_op=True)
    right = all(torch.equal(result, expected) for result in (beside, in_place, selected))
    return found(log, right=right, untouched=torch.equal(given, block), work=work)


def reduce_both_ways(n: int, dtype: torch.dtype) -> dict[str, Any]:
    group, world_size = dist.group.WORLD, dist.get_world_size()
    whole = integers(world_size * n, n, dtype)
    total, mean = torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype)
    compat.reduce_scatter_single(total, whole, dist.ReduceOp.SUM, group, async_op=False)

    given, summed, averaged = whole.clone(), torch.full_like(total, -99), torch.full_like(total, -99)
    with record() as log:
        ring_reduce_scatter(summed, given, group, mean=False)
    right = torch.equal(summed, total)
    selected = torch.full_like(total, -99)
    work = RingReduceScatter()(selected, whole, group, dist.ReduceOp.SUM, async_op=True)
    right &= torch.equal(selected, total)
    if dtype.is_floating_point:
        compat.reduce_scatter_single(mean, whole, dist.ReduceOp.AVG, group, async_op=False)
        ring_reduce_scatter(averaged, given, group, mean=True)
        RingReduceScatter()(selected, whole, group, dist.ReduceOp.AVG)
        right &= torch.allclose(averaged, mean, rtol=1e-6) and torch.equal(averaged, total / world_size)
        right &= torch.equal(selected, averaged)
    return found(log, right=right, untouched=torch.equal(given, whole), work=work)


def found(log: Any, *, right: bool, untouched: bool, work: object) -> dict[str, Any]:
    """With the bytes of each send and receive, and what else was called."""
    return {
        "right": right,
        "input untouched": untouched,
        "blocks the host": work is None,
        "sent": [e.bytes for e in log.select("send")],
        "received": [e.bytes for e in log.select("recv")],
        "other collectives": [e.op for e in log.collectives() if e.op not in ("send", "recv")],
    }


def all_cases() -> dict[Any, dict[str, Any]]:
    return {
        (collective.__name__, n, dtype): collective(n, dtype)
        for collective in (gather_both_ways, reduce_both_ways)
        for n in BLOCKS
        for dtype in DTYPES
    }


@functools.cache
def results(world_size: int) -> list[dict[Any, dict[str, Any]]]:
    return launch(all_cases, world_size, timeout=60)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_ring_gives_what_the_backend_gives_and_only_reads_its_input(world_size: int) -> None:
    for result in results(world_size):
        for case, got in result.items():
            assert got["right"] and got["input untouched"] and got["blocks the host"], case


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_rank_sends_one_block_per_step_and_so_the_least_that_is_possible(world_size: int) -> None:
    for result in results(world_size):
        for (_, n, dtype), got in result.items():
            block = n * dtype.itemsize
            assert got["sent"] == got["received"] == [block] * (world_size - 1)
            assert got["other collectives"] == []
            assert sum(got["sent"]) == on_the_wire("all_gather", world_size * block, world_size)


def test_a_ring_over_some_of_the_ranks_leaves_the_others_out() -> None:
    """Given ranks 0 and 2 of three, as a group of their own; and an exchange in the ring of all."""

    def gather_and_reduce() -> tuple[float, list[float], list[float]]:
        group, rank = dist.new_group([0, 2]), dist.get_rank()
        received, gathered, reduced = torch.full((1,), -1.0), torch.zeros(2), torch.zeros(1)
        exchange(torch.tensor([float(rank)]), received, dist.group.WORLD)
        if rank in (0, 2):
            ring_all_gather(gathered, torch.tensor([rank + 5.0]), group)
            ring_reduce_scatter(reduced, torch.tensor([rank + 10.0, rank + 20.0]), group, mean=False)
        return received.item(), gathered.tolist(), reduced.tolist()

    assert launch(gather_and_reduce, 3, timeout=60) == [
        (2.0, [5.0, 7.0], [22.0]),
        (0.0, [0.0, 0.0], [0.0]),
        (1.0, [5.0, 7.0], [42.0]),
    ]
