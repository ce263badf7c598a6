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

WORLD_SIZES = (1, 2, 3, 4)
BLOCKS = (1, 5, 64)  # elements
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
    return {
        "right": all(torch.equal(result, expected) for result in (beside, in_place, selected)),
        "input untouched": torch.equal(given, block),
        "blocks the host": work is None,
        **volumes(log),
    }


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
    return {
        "right": right,
        "input untouched": torch.equal(given, whole),
        "blocks the host": work is None,
        **volumes(log),
    }


def volumes(log: Any) -> dict[str, Any]:
    """Bytes of each send and receive, and what else was called."""
    return {
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


each_case = [
    pytest.mark.parametrize("world_size", WORLD_SIZES),
    pytest.mark.parametrize("collective", [gather_both_ways, reduce_both_ways], ids=["gather", "reduce"]),
    pytest.mark.parametrize("n", BLOCKS),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
]


def for_each_case(test: Any) -> Any:
    for mark in each_case:
        test = mark(test)
    return test


@for_each_case
def test_the_ring_gives_what_the_backend_gives_and_only_reads_its_input(
    world_size: int, collective: Any, n: int, dtype: torch.dtype
) -> None:
    for result in results(world_size):
        found = result[collective.__name__, n, dtype]
        assert found["right"]
        assert found["input untouched"]
        assert found["blocks the host"]


@for_each_case
def test_every_rank_sends_one_block_per_step_and_so_the_least_that_is_possible(
    world_size: int, collective: Any, n: int, dtype: torch.dtype
) -> None:
    block = n * dtype.itemsize
    for result in results(world_size):
        found = result[collective.__name__, n, dtype]
        assert found["sent"] == found["received"] == [block] * (world_size - 1)
        assert found["other collectives"] == []
        assert sum(found["sent"]) == on_the_wire("all_gather", world_size * block, world_size)
        assert sum(found["sent"]) * world_size == (world_size - 1) * world_size * block


def test_an_exchange_passes_each_block_to_the_next_rank_of_the_ring() -> None:
    def pass_on() -> float:
        mine, received = torch.tensor([float(dist.get_rank())]), torch.tensor([-1.0])
        exchange(mine, received, dist.group.WORLD)
        return received.item()

    assert launch(pass_on, 3, timeout=60) == [2.0, 0.0, 1.0]


def test_a_ring_over_some_of_the_ranks_leaves_the_others_out() -> None:
    """Given ranks 1 and 3 of four, in that order, as a group of their own."""

    def gather_and_reduce() -> tuple[list[float], list[float]]:
        group, rank = dist.new_group([1, 3]), dist.get_rank()
        gathered, reduced = torch.zeros(2), torch.zeros(1)
        if rank in (1, 3):
            ring_all_gather(gathered, torch.tensor([float(rank)]), group)
            ring_reduce_scatter(reduced, torch.tensor([rank + 10.0, rank + 20.0]), group, mean=False)
        return gathered.tolist(), reduced.tolist()

    outside = ([0.0, 0.0], [0.0])
    assert launch(gather_and_reduce, 4, timeout=60) == [
        outside,
        ([1.0, 3.0], [24.0]),
        outside,
        ([1.0, 3.0], [44.0]),
    ]
