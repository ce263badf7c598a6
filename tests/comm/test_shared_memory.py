"""Collectives in shared memory give gloo's results in every bit, and name the rank that is gone, late or elsewhere.

Most checks have their own process group and memory. Checks with the same number of ranks share a launch.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import tempfile
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from hwfsdp import fully_shard, launch
from hwfsdp.collectives import DefaultAllGather
from hwfsdp.comm import shared_memory, transport
from hwfsdp.comm.shared_memory import SharedMemoryGroup, SharedRows
from hwfsdp.compat import all_gather_single, reduce_scatter_single
from hwfsdp.errors import UnsupportedError
from together import Together, run_all

Group = dist.ProcessGroup
CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (*range(0, 12), 64, 1001, 70_000)
FP32 = "torch.float32"
SUM, MEAN = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def random(length: int, dtype: torch.dtype) -> Tensor:
    """Return numbers that differ on every rank and at every call, the same in every run."""
    return torch.randn(length, dtype=torch.float64).to(dtype)


def gather(output: Tensor, input: Tensor, group: Group) -> dist.Work:
    """Issue an all-gather in shared memory."""
    return issued(all_gather_single(output, input, shared(group), True))


def reduce(output: Tensor, input: Tensor, op: Any, group: Group) -> dist.Work:
    """Issue a reduce-scatter in shared memory."""
    return issued(reduce_scatter_single(output, input, op, shared(group), True))


def shared(group: Group) -> SharedMemoryGroup:
    found = shared_memory.over(group, CPU)
    assert isinstance(found, SharedMemoryGroup)
    return found


def issued(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def fresh_group() -> Group:
    """Make a group of all ranks that has no memory yet."""
    torch.manual_seed(dist.get_rank())
    shared_memory._pool = shared_memory.Pool()
    return dist.new_group()


def all_gather_name() -> str:
    return "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def blocks() -> int:
    return len(shared_memory._pool.blocks)


# --- Results -----------------------------------------------------------------------------------------------


def unequal_reductions() -> list[str]:
    """Return the cases in which this rank's part of a sum differs from gloo's."""
    group = fresh_group()
    world_size, wrong = dist.get_world_size(), []
    for dtype, length, op in itertools.product(DTYPES, LENGTHS, (SUM, MEAN)):
        whole = random(world_size * length, dtype)
        got, expected = torch.empty(length, dtype=dtype), torch.empty(length, dtype=dtype)
        if length:
            reduce_scatter_single(expected, whole.clone(), op, None, False)
        reduce(got, whole, op, group).wait()
        if not torch.equal(got, expected):
            wrong.append(f"{length} of {dtype} by {op}")
    return wrong


def unequal_gathers() -> list[str]:
    """Return the cases in which a gather differs from gloo's, in place and elsewhere."""
    group = fresh_group()
    world_size, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    for dtype, length in itertools.product((*DTYPES, torch.uint8, torch.int64), LENGTHS):
        part = random(length, torch.float64).mul(100).to(dtype)
        expected = torch.empty(world_size * length, dtype=dtype)
        if length:
            all_gather_single(expected, part.clone(), None, False)
        in_place = shared_memory.allocate((world_size * length,), dtype).fill_(1)
        own = in_place.narrow(0, rank * length, length)
        own.copy_(part)
        elsewhere = torch.ones(world_size * length, dtype=dtype)
        gather(in_place, own, group).wait()
        gather(elsewhere, part, group).wait()
        if not (torch.equal(in_place, expected) and torch.equal(elsewhere, expected)):
            wrong.append(f"{length} of {dtype}")
    return wrong


def blocks_written_before_all_have_read_them() -> list[str]:
    """Issue everything and release the buffers before the first wait. Return wrong results."""
    group = fresh_group()
    world_size, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    in_flight = []
    for step in range(12):
        flat = shared_memory.allocate((world_size, 100), torch.float32)
        flat[rank] = 100 * step + rank
        gathered, summed = torch.empty(world_size, 100), torch.empty(100)
        whole = shared_memory.allocate((world_size, 100), torch.float32).fill_(step + rank)
        works = gather(gathered.view(-1), flat[rank], group), reduce(summed, whole.view(-1), SUM, group)
        in_flight.append((works, gathered, summed))
        del flat, whole
    for step, (works, gathered, summed) in enumerate(in_flight):
        for work in works:
            work.wait()
        if gathered[:, 0].tolist() != [100 * step + r for r in range(world_size)]:
            wrong.append(f"gather {step}: {gathered[:, 0].tolist()}")
        if summed[0] != sum(step + r for r in range(world_size)):
            wrong.append(f"reduction {step}: {summed[0]}")
    return wrong


def parts_written_while_others_read_them_in_place() -> list[str]:
    """Read rows when later gathers are over whose parts are allocated anew. Return wrong rows, and the blocks if they are not used again."""
    group = fresh_group()
    world_size, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    held: list[tuple[int, dist.Work]] = []
    for step in range(36):
        part = shared_memory.allocate((100,), torch.float32).fill_(100 * step + rank)
        held.append((step, gather(part[:1].expand(100 * world_size), part, group)))
        del part
        held[-1][1].wait()
        if len(held) > 5:
            before, work = held.pop(0)
            assert isinstance(work, SharedRows)
            found = [row.tolist() for row in work.rows]
            if found != [[[100.0 * before + r] * 100] for r in range(world_size)]:
                wrong.append(f"gather {before}: {found}")
            del work
    return wrong + ([f"{blocks()} blocks"] if blocks() > 12 else [])


def groups_that_mix() -> list[str]:
    """Use the group of the first and the last rank and the group of all ranks, in turn."""
    group = fresh_group()
    rank, found = dist.get_rank(), []
    ends = [0, dist.get_world_size() - 1]
    pair, everyone = dist.new_group(ends), [*range(dist.get_world_size())]
    for members, among in ((ends, pair), (everyone, group), (ends, pair)):
        if rank in members:
            output = torch.zeros(len(members))
            gather(output, torch.full((1,), float(rank)), among).wait()
            found += [] if output.tolist() == members else [f"{output.tolist()} instead of {members}"]
    return found


AS_GLOO = (
    unequal_reductions,
    unequal_gathers,
    blocks_written_before_all_have_read_them,
    parts_written_while_others_read_them_in_place,
    groups_that_mix,
)


@pytest.mark.parametrize("world_size", [2, 4])  # the order of a sum matters from 4 on
def test_results_equal_gloos_bit_for_bit(world_size: int) -> None:
    for found in launch(run_all, world_size, {check.__name__: check for check in AS_GLOO}, timeout=100):
        assert found == {check.__name__: [] for check in AS_GLOO}


# --- On two ranks ------------------------------------------------------------------------------------------

two = Together(2)


class Copies(nn.Module):
    """A module that returns copies of its parameters."""

    def __init__(self, values: list[Tensor]) -> None:
        super().__init__()
        # all that are trained have one dtype
        self.held = nn.ParameterList([nn.Parameter(v, v.dtype != torch.bfloat16) for v in values])

    def forward(self) -> list[Tensor]:
        return [param + 0 for param in self.held]


PARAMS: dict[str, Callable[[], list[Tensor]]] = {
    "complex numbers": lambda: [torch.arange(15.0).view(5, 3) * 1j],
    "two dtypes": lambda: [torch.arange(15.0).view(5, 3), torch.arange(4.0).bfloat16()],
    "one row": lambda: [torch.arange(3.0).view(1, 3)],
    "no element": lambda: [torch.empty(0, 3)],
}


def found_nowhere(nbytes: int) -> int:
    return os.open("/nowhere/to/be/found", os.O_RDWR)


OBSTACLES: dict[str, Callable[..., Any]] = {
    "this_machine": lambda: "another machine with the same directory",
    "anonymous_file": found_nowhere,
    "_connect": lambda *args: None,
}


@two.finds([(False, [1.0, 2.0])] * len(OBSTACLES))
def ranks_that_cannot_share_memory_use_the_backend_although_they_see_the_same_directory() -> Any:
    found = []
    for function, obstacle in OBSTACLES.items():
        group, output = fresh_group(), torch.zeros(2)
        changed = {"_PATIENCE": 1.0} | ({function: obstacle} if dist.get_rank() == 1 else {})
        with mock.patch.multiple(shared_memory, **changed):
            DefaultAllGather(group)(output, torch.full((1,), dist.get_rank() + 1.0), group)
        found.append((isinstance(shared_memory.over(group, CPU), SharedMemoryGroup), output.tolist()))
    return found


@two.finds(([], False))
def nothing_is_left_in_the_file_system_and_sockets_are_closed_with_the_group() -> Any:
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(tempfile, "tempdir", directory):
        group, output = dist.new_group(), torch.zeros(2)
        gather(output, output[:1].clone(), group).wait()
        neighbors = weakref.ref(shared(group).neighbors)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        dist.barrier()  # the other rank has left, too
        shared_memory.allocate((1,), torch.uint8)  # looks for free blocks
        return os.listdir(directory), neighbors() is not None


# --- Failures ----------------------------------------------------------------------------------------------


def error_of(action: Callable[[], Any]) -> str:
    """Return the message of the error that an action raises."""
    try:
        action()
    except RuntimeError as error:
        return str(error).removeprefix("ranks call different collectives: number 1 of their group is ")
    return "no error"


CALLED = [  # the calls of rank 0 and of rank 1; both ranks hear of both
    (f"all_gather of 32 bytes of {FP32}", f"reduce_scatter by sum of 32 bytes of {FP32}"),
    ("all_gather of 16 bytes of torch.float16", "all_gather of 16 bytes of torch.bfloat16"),
    (f"all_gather of 32 bytes of {FP32}", f"all_gather of 40 bytes of {FP32}"),
]


@two.finds(*([f"{pair[r]} on rank {r}, {pair[1 - r]} on rank {1 - r}" for pair in CALLED] for r in (0, 1)))
def ranks_that_call_different_collectives_get_both_named() -> list[str]:
    """Another collective, another dtype, another size."""
    rank, said = dist.get_rank(), []
    for length, dtypes in (
        (4, (torch.float32,) * 2),
        (4, (torch.float16, torch.bfloat16)),
        (4 + rank, (torch.float32,) * 2),
    ):
        group, part = fresh_group(), torch.zeros(length, dtype=dtypes[rank])
        whole = torch.zeros(2 * length, dtype=part.dtype)
        transfer = gather(whole, part, group) if said or not rank else reduce(part, whole, SUM, group)
        said.append(error_of(transfer.wait))
    return said


@two.finds((True, [8.0 * step for step in range(9)], True))
def after_an_error_and_a_collective_nobody_waits_for_blocks_are_used_again() -> Any:
    group = fresh_group()
    small, large = torch.zeros(4), torch.zeros(8)
    failing = reduce(small, large, SUM, group) if dist.get_rank() else gather(large, small, group)
    first, second = (error_of(failing.wait) for _ in range(2))
    gather(large, small, group)
    read_in_place = weakref.ref(gather(small[:1].expand(8), small, group))
    sums = []
    for step in range(9):
        flat = shared_memory.allocate((8,), torch.float32).fill_(step)
        gather(flat, flat[4 * dist.get_rank() :][:4], group).wait()
        sums.append(float(flat.sum()))
        del flat
    return first == second != "no error", sums, blocks() <= 4 and read_in_place() is None


@two.finds(3000)
def any_number_of_collectives_may_be_issued_before_the_first_wait() -> int:
    """Both ranks send more records than sockets hold, before either one reads."""
    group = fresh_group()
    output, own = torch.zeros(2), shared_memory.allocate((1,), torch.float32).fill_(dist.get_rank() + 1)
    in_flight = [gather(output.clone(), own, group) for _ in range(3000)]
    return sum(work.wait() for work in in_flight)


@two.finds([2] * 5)
def a_group_that_is_not_used_any_more_keeps_no_block() -> list[int]:
    """Count the blocks after a gather and a reduction in one group after the other. Rows are dropped while the reduction travels."""
    fresh_group()
    counts = []
    for _ in range(5):
        group, whole = dist.new_group(), shared_memory.allocate((2000,), torch.float32)
        part = shared_memory.allocate((1000,), torch.float32)
        rows = gather(part[:1].expand(2000), part, group)
        rows.wait()
        reducing = reduce(torch.empty(1000), whole, SUM, group)
        del rows
        reducing.wait()
        del whole, part
        dist.barrier()
        counts.append(blocks())
    return counts


@two.finds("Timed out after 2 s waiting for rank 1 of the group", "nothing")
def a_rank_that_is_too_late_is_named() -> str:
    """After the first collective, rank 1 takes part in nothing until rank 0 has given up."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    output, own, said = torch.zeros(2), torch.zeros(1), "nothing"
    gather(output, own, group).wait()
    if dist.get_rank() == 0:
        said = error_of(gather(output, own, group).wait)
    dist.barrier()
    return said


@two.finds((["_allgather_base_", "_reduce_scatter_base_"], ["all"] * 4 + ["reduce"] * 2, [0, 1]))
def dispatch_modes_and_wrappers_of_torchs_functions_see_the_collectives() -> Any:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    for module in (*model, model):
        fully_shard(module)
    calls, ranks = [], []
    names = [name for name in dir(dist) if name in ("all_gather_single", "reduce_scatter_single")]
    names = names or ["all_gather_into_tensor", "reduce_scatter_tensor"]

    def watched(original: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(name.split("_")[0])
        ranks.extend(dist.get_process_group_ranks(kwargs["group"]))
        return original(*args, **kwargs)

    watching = {name: functools.partial(watched, getattr(dist, name), name) for name in names}
    with mock.patch.multiple(dist, **watching), CommDebugMode() as counted:
        model(torch.ones(2, 3)).sum().backward()
    # Others compare the ranks' models. With torch 2.15 and TORCH_DISTRIBUTED_DEBUG=DETAIL, some of these gather as well.
    seen = {str(op).split(".")[-1] for op in counted.get_comm_counts()}
    return sorted(op for op in seen if op.endswith("_base_")), sorted(calls), sorted(set(ranks))


@two.finds([True] * len(PARAMS))
def parameters_of_every_kind_are_whole_after_a_gather_that_may_read_parts_in_place() -> list[bool]:
    found = []
    for kind in PARAMS.values():
        model = Copies(kind())
        expected = model()
        with mock.patch.object(transport, "LEAST_READ_IN_PLACE", 1):
            got = fully_shard(model)()
        found.append(all(map(torch.equal, got, expected)))
    return found


@two
def a_replaced_all_gather_that_returns_no_work_is_refused_where_parts_are_read_in_place() -> None:
    model, name = fully_shard(nn.Linear(3, 4)), all_gather_name()
    with mock.patch.object(transport, "LEAST_READ_IN_PLACE", 1), mock.patch.object(dist, name):
        with pytest.raises(UnsupportedError, match="HWFSDP_SHARED_MEMORY=0"):
            model(torch.ones(2, 3))


@two.finds("Connection closed by peer: rank 1 of the group is gone", "gone")
def a_rank_that_is_gone_is_named() -> str:
    """This check is the last one, because memory that rank 1 may still read cannot be reclaimed."""
    group = fresh_group()
    output, own = torch.zeros(2), torch.zeros(1)
    gather(output, own, group).wait()
    if dist.get_rank() == 1:
        for connection in shared(group).neighbors._sockets.values():
            connection.close()
        return "gone"
    return error_of(lambda: gather(output, own, group).wait())


test_on_two_ranks = two.test()
