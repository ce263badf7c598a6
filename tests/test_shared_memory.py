"""Collectives in shared memory give what gloo gives, in every bit, and say which rank is gone, late or elsewhere."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hwfsdp import RankError, compat, fully_shard, launch, record, shared_memory
from hwfsdp.collectives import BackendAllGather, BackendReduceScatter, DefaultAllGather, DefaultReduceScatter
from hwfsdp.shared_memory import SharedMemoryGroup

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (*range(0, 20), 64, 1001, 70_000)
FP32 = "torch.float32"
REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def random(length: int, dtype: torch.dtype) -> Tensor:
    """Different on every rank and at every call, the same in every run."""
    return torch.randn(length, dtype=torch.float64).to(dtype)


def seed() -> int:
    torch.manual_seed(dist.get_rank())
    return dist.get_world_size()


def gather(output: Tensor, input: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Issues an all-gather in shared memory."""
    return issued(compat.all_gather_single(output, input, shared(group), True))


def reduce(output: Tensor, input: Tensor, op: Any, group: dist.ProcessGroup | None) -> dist.Work:
    """Issues a reduce-scatter in shared memory."""
    return issued(compat.reduce_scatter_single(output, input, op, shared(group), True))


def shared(group: dist.ProcessGroup | None) -> SharedMemoryGroup:
    found = shared_memory.over(group, torch.device("cpu"))
    assert isinstance(found, SharedMemoryGroup)
    return found


def issued(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


# --- Results -----------------------------------------------------------------------------------------------


def unequal_reductions() -> list[str]:
    """Where this rank's part of a sum is not that of gloo."""
    world_size, wrong = seed(), []
    for dtype in DTYPES:
        for length in LENGTHS:
            for op in REDUCTIONS:
                whole = random(world_size * length, dtype)
                got, expected = torch.empty(length, dtype=dtype), torch.empty(length, dtype=dtype)
                if length:
                    compat.reduce_scatter_single(expected, whole.clone(), op, None, False)
                reduce(got, whole, op, None).wait()
                if not torch.equal(got, expected):
                    wrong.append(f"{length} of {dtype} by {op}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_reductions_are_those_of_gloo_in_every_bit(world_size):
    assert launch(unequal_reductions, world_size, timeout=60) == [[]] * world_size


def unequal_gathers() -> list[str]:
    """Where a gather is not that of gloo, wherever its tensors lie."""
    world_size, wrong = seed(), []
    rank = dist.get_rank()
    for dtype in (*DTYPES, torch.uint8, torch.int64):
        for length in LENGTHS:
            part = random(length, torch.float64).mul(100).to(dtype)
            expected = torch.empty(world_size * length, dtype=dtype)
            if length:
                compat.all_gather_single(expected, part.clone(), None, False)
            in_place = shared_memory.allocate((world_size * length,), dtype).fill_(1)
            own = in_place.narrow(0, rank * length, length)
            own.copy_(part)
            elsewhere = torch.ones(world_size * length, dtype=dtype)
            gather(in_place, own, None).wait()
            gather(elsewhere, part, None).wait()
            for place, got in (("in place", in_place), ("elsewhere", elsewhere)):
                if not torch.equal(got, expected):
                    wrong.append(f"{length} of {dtype}, {place}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_gathers_are_those_of_gloo(world_size):
    assert launch(unequal_gathers, world_size, timeout=60) == [[]] * world_size


def late_readers(steps: int) -> list[str]:
    """Everything is issued, and the buffers given up, before anything is waited for."""
    world_size, rank, wrong = seed(), dist.get_rank(), []
    in_flight = []
    for step in range(steps):
        flat = shared_memory.allocate((world_size, 100), torch.float32)
        flat[rank] = 100 * step + rank
        gathered = torch.empty(world_size * 100)
        summed = torch.empty(100)
        whole = shared_memory.allocate((world_size, 100), torch.float32).fill_(step + rank)
        in_flight.append(
            (
                gather(gathered, flat[rank], None),
                reduce(summed, whole.view(-1), dist.ReduceOp.SUM, None),
                gathered.view(world_size, 100),
                summed,
            )
        )
        del flat, whole
    for step, (gathering, reduction, gathered, summed) in enumerate(in_flight):
        gathering.wait()
        reduction.wait()
        if gathered[:, 0].tolist() != [100 * step + r for r in range(world_size)]:
            wrong.append(f"gather {step}: {gathered[:, 0].tolist()}")
        if summed[0] != sum(step + r for r in range(world_size)):
            wrong.append(f"reduction {step}: {summed[0]}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_block_is_not_written_again_before_all_have_read_it(world_size):
    assert launch(late_readers, world_size, 12, timeout=60) == [[]] * world_size


def blocks_after(lengths: list[int]) -> list[list[int]]:
    """Sizes of this rank's blocks after collectives of these lengths, one after the other."""
    sizes = []
    for length in lengths:
        output = torch.empty(length)
        whole = shared_memory.allocate((dist.get_world_size() * length,), torch.float32)
        reduce(output, whole, dist.ReduceOp.SUM, None).wait()
        del whole
        sizes.append(sorted(block.capacity for block in shared_memory._pool.blocks))
    return sizes


def test_blocks_are_used_again_and_small_ones_make_room_for_large_ones():
    """Two blocks are enough: what was told with the second collective is that the first was read."""
    lengths = [1024] * 10 + [2048] * 10 + [1024, 2048] * 5
    for sizes in launch(blocks_after, 2, lengths, timeout=60):
        assert max(map(len, sizes)) <= 2
        assert set(sizes[9]) == {8192} and max(sizes[-1]) == 16384


def between_modes() -> list[float]:
    """Issued without inference mode and waited for with it, and the other way round."""
    rank, found = dist.get_rank(), []
    for at_first in (True, False):
        with torch.inference_mode(at_first):
            output, own = torch.zeros(2), torch.full((1,), rank + 1.0)
            transfer = gather(output, own, None)
        with torch.inference_mode(not at_first):
            transfer.wait()
            found.append(float(output.sum()))
    return found


def test_a_transfer_may_be_waited_for_in_another_mode_than_it_was_issued_in():
    assert launch(between_modes, 2, timeout=60) == [[3.0, 3.0]] * 2


# --- In a training -----------------------------------------------------------------------------------------


def trained(through_backend: bool, policy: dict[str, torch.dtype]) -> tuple[list[Tensor], dict[str, Any]]:
    """Local shards after three steps; and what was counted of the last."""
    from torch.distributed.tensor import DTensor

    from hwfsdp import MixedPrecisionPolicy

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(13, 29), nn.ReLU(), nn.Linear(29, 13)) for _ in range(3)])
    for module in (*model, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(**policy))
        if through_backend and module is not model:
            module.set_custom_all_gather(BackendAllGather())
            module.set_custom_reduce_scatter(BackendReduceScatter())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    summary: dict[str, Any] = {}
    for step in range(3):
        with record() as log:
            model(torch.randn(5, 13)).square().mean().backward()
        summary = log.summary()
        optimizer.step()
        optimizer.zero_grad()
    shards = [p.to_local().clone() for p in model.parameters() if isinstance(p, DTensor)]
    return shards, {key: summary[key] for key in ("bytes_by_op", "count_by_op")}


def differing(policy: dict[str, torch.dtype]) -> list[str]:
    """What a training through shared memory has otherwise than one through gloo."""
    (shared, counted), (through_gloo, expected) = (trained(through, policy) for through in (False, True))
    wrong = [f"shard {i}" for i, pair in enumerate(zip(shared, through_gloo)) if not torch.equal(*pair)]
    return wrong if counted == expected else [*wrong, f"{counted} instead of {expected}"]


POLICIES = {"fp32": {}, "bf16": {"param_dtype": torch.bfloat16}, "fp16": {"reduce_dtype": torch.float16}}


@functools.cache
def differences(world_size: int) -> list[dict[str, list[str]]]:
    def on_a_rank() -> dict[str, list[str]]:
        return {name: differing(policy) for name, policy in POLICIES.items()}

    return launch(on_a_rank, world_size, timeout=90)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_training_is_the_same_and_logged_the_same_as_through_gloo(world_size, policy):
    assert [found[policy] for found in differences(world_size)] == [[]] * world_size


# --- Finding each other ------------------------------------------------------------------------------------


def reached_when_one_declines() -> tuple[bool, float]:
    """Rank 1 wants no shared memory; collectives go on through gloo."""
    os.environ["HWFSDP_SHARED_MEMORY"] = "0" if dist.get_rank() == 1 else "1"
    group, output = dist.group.WORLD, torch.zeros(2)
    own = DefaultAllGather(group).allocate((1,), dtype=torch.float32, device=torch.device("cpu")).fill_(2.0)
    DefaultAllGather(group)(output, own, group)
    DefaultReduceScatter(group)(own, output, group, dist.ReduceOp.SUM)
    return isinstance(shared_memory.over(group, own.device), SharedMemoryGroup), float(own)


def test_if_one_rank_cannot_or_does_not_want_to_all_use_the_backend():
    assert launch(reached_when_one_declines, 2, timeout=60) == [(False, 4.0)] * 2


def left_behind(directory: str) -> tuple[list[str], bool]:
    """Names in the directory for temporary files; and whether the sockets are open, when a group is gone."""
    tempfile.tempdir = directory
    group, output = dist.new_group(), torch.zeros(2)
    gather(output, output[:1].clone(), group).wait()
    neighbors = weakref.ref(shared(group).neighbors)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    dist.barrier()  # the other rank has left, too
    shared_memory.allocate((1,), torch.uint8)  # looks which blocks are free
    return os.listdir(directory), neighbors() is not None


def test_nothing_is_left_in_the_file_system_and_sockets_are_closed_with_the_group(tmp_path):
    assert launch(left_behind, 2, str(tmp_path), timeout=60) == [([], False)] * 2


def subgroups() -> list[float]:
    """Two groups of two, and one of all four, in turn."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    found = []
    for group in (pairs[rank % 2], dist.group.WORLD, pairs[rank % 2]):
        output = torch.zeros(dist.get_world_size(group))
        gather(output, torch.full((1,), float(rank)), group).wait()
        found.append(float(output.sum()))
    return found


def test_groups_do_not_mix():
    assert launch(subgroups, 4, timeout=60) == [[2.0, 6.0, 2.0], [4.0, 6.0, 4.0]] * 2


def met_when_machines_differ(how: str) -> tuple[bool, list[float]]:
    """Rank 1 is on another machine with the same directory, may not have memory to share, or cannot be connected to."""
    if dist.get_rank() == 1:
        if how == "another machine":
            shared_memory._machine = lambda: "another"
        elif how == "no memory":
            shared_memory._anonymous_file = lambda nbytes: os.open("/nowhere/to/be/found", os.O_RDWR)
        else:
            shared_memory._connect = lambda *args: None
    shared_memory._PATIENCE = 1.0
    group, output = dist.group.WORLD, torch.zeros(2)
    DefaultAllGather(group)(output, torch.full((1,), dist.get_rank() + 1.0), group)
    return isinstance(shared_memory.over(group, output.device), SharedMemoryGroup), output.tolist()


@pytest.mark.parametrize("how", ["another machine", "no memory", "no connection"])
def test_ranks_that_cannot_share_memory_use_the_backend_although_they_see_the_same_directory(how):
    assert launch(met_when_machines_differ, 2, how, timeout=60) == [(False, [1.0, 2.0])] * 2


# --- What can go wrong -------------------------------------------------------------------------------------


def error_of(action: Callable[[], Any]) -> str:
    """What it raises."""
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return "no error"


def different_collectives() -> str:
    """Rank 0 gathers, rank 1 reduces."""
    small, large = torch.zeros(4), torch.zeros(8)
    if dist.get_rank() == 0:
        return error_of(gather(large, small, None).wait)
    return error_of(reduce(small, large, dist.ReduceOp.SUM, None).wait)


def test_ranks_that_call_different_collectives_are_told_which():
    said = launch(different_collectives, 2, timeout=60)
    assert (
        f"all_gather of 32 bytes of {FP32} on rank 0, reduce_scatter by sum of 32 bytes of {FP32} on rank 1"
        in said[0]
    )
    assert (
        f"reduce_scatter by sum of 32 bytes of {FP32} on rank 1, all_gather of 32 bytes of {FP32} on rank 0"
        in said[1]
    )


def waits_after_an_error() -> tuple[list[str], list[float], list[int]]:
    """A collective that failed, waited for twice; one that nobody waits for; then others."""
    small, large = torch.zeros(4), torch.zeros(8)
    if dist.get_rank() == 0:
        failing = gather(large, small, None)
    else:
        failing = reduce(small, large, dist.ReduceOp.SUM, None)
    errors = [error_of(failing.wait)[:15] for _ in range(2)]
    gather(large, small, None)
    sums, blocks = [], []
    for step in range(9):
        flat = shared_memory.allocate((8,), torch.float32).fill_(step)
        gather(flat, flat[4 * dist.get_rank() :][:4], None).wait()
        sums.append(float(flat.sum()))
        del flat
        blocks.append(len(shared_memory._pool.blocks))
    return errors, sums, blocks


def test_after_an_error_and_a_collective_nobody_waits_for_blocks_are_used_again():
    for errors, sums, blocks in launch(waits_after_an_error, 2, timeout=60):
        assert errors == ["ranks call diffe"[:15]] * 2
        assert sums == [8.0 * step for step in range(9)]
        assert blocks[-1] <= 3, blocks


def much_before_the_first_wait(number: int) -> int:
    """More records than sockets hold, from both ranks, before either listens."""
    output, own = torch.zeros(2), shared_memory.allocate((1,), torch.float32).fill_(dist.get_rank() + 1)
    in_flight = [gather(output.clone(), own, None) for _ in range(number)]
    return sum(work.wait() for work in in_flight)


def test_any_number_of_collectives_may_be_issued_before_the_first_wait():
    assert launch(much_before_the_first_wait, 2, 3000, timeout=60) == [3000, 3000]


def idle_blocks_after_a_backward(groups: int) -> list[int]:
    """How many blocks there are after reductions in one group after the other, each used once."""
    counts = []
    for _ in range(groups):
        group, output = dist.new_group(), torch.empty(1000)
        whole = shared_memory.allocate((2000,), torch.float32)
        reduce(output, whole, dist.ReduceOp.SUM, group).wait()
        del whole
        dist.barrier()
        counts.append(len(shared_memory._pool.blocks))
    return counts


def test_a_group_that_is_not_used_any_more_keeps_no_block():
    assert launch(idle_blocks_after_a_backward, 2, 5, timeout=60) == [[1] * 5] * 2


def different_dtypes() -> str:
    part = torch.zeros(4, dtype=torch.bfloat16 if dist.get_rank() else torch.float16)
    return error_of(gather(torch.zeros(8, dtype=part.dtype), part, None).wait)


def test_ranks_that_gather_different_dtypes_are_told_which():
    assert (
        "torch.float16 on rank 0, all_gather of 16 bytes of torch.bfloat16 on rank 1"
        in launch(different_dtypes, 2, timeout=60)[0]
    )


def different_sizes() -> str:
    part = torch.zeros(4 + dist.get_rank())
    return error_of(gather(torch.zeros(2 * part.numel()), part, None).wait)


def test_ranks_that_gather_different_sizes_are_told_which():
    said = launch(different_sizes, 2, timeout=60)[0]
    assert f"32 bytes of {FP32} on rank 0, all_gather of 40 bytes of {FP32} on rank 1" in said


def a_rank_that_stays_away() -> str:
    """Rank 1 takes part in nothing after the first collective, until rank 0 has given up."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    output, own = torch.zeros(2), torch.zeros(1)
    gather(output, own, group).wait()
    said = "nothing"
    if dist.get_rank() == 0:
        said = error_of(gather(output, own, group).wait)
    dist.barrier()
    return said


def test_a_rank_that_is_too_late_is_named():
    assert launch(a_rank_that_stays_away, 2, timeout=60) == [
        "Timed out after 2 s waiting for rank 1 of the group",
        "nothing",
    ]


def a_rank_that_dies() -> None:
    """In the middle of a training."""
    model = fully_shard(nn.Linear(4, 4))
    for step in range(3):
        if step == 1 and dist.get_rank() == 1:
            os._exit(7)
        model(torch.ones(1, 4)).sum().backward()


def test_a_rank_that_dies_is_reported_at_once_and_not_the_one_that_waited_for_it():
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1.*exit(ed)?.* 7"):
        launch(a_rank_that_dies, 2, timeout=60)
    assert time.monotonic() - begin < 30, "it waited for the timeout"


def a_rank_that_waits_for_a_dead_one() -> str:
    output, own = torch.zeros(2), torch.zeros(1)
    gather(output, own, None).wait()
    if dist.get_rank() == 1:
        for connection in shared(None).neighbors._sockets.values():
            connection.close()
        return "gone"
    return error_of(lambda: gather(output, own, None).wait())


def test_a_rank_that_is_gone_is_named():
    said = launch(a_rank_that_waits_for_a_dead_one, 2, timeout=60)
    assert said == ["Connection closed by peer: rank 1 of the group is gone", "gone"]


# --- Who watches -------------------------------------------------------------------------------------------


def seen_by_others() -> tuple[dict[str, int], list[str], list[int]]:
    """Collectives of a step as a dispatch mode counts them, and as a wrapper around torch's functions sees them."""
    from torch.distributed.tensor.debug import CommDebugMode

    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    for module in (*model, model):
        fully_shard(module)
    calls, ranks = [], []
    names = [name for name in dir(dist) if name in ("all_gather_single", "reduce_scatter_single")]
    names = names or ["all_gather_into_tensor", "reduce_scatter_tensor"]
    originals = {name: getattr(dist, name) for name in names}

    def watch(name: str) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.append(name.split("_")[0])
            ranks.extend(dist.get_process_group_ranks(kwargs["group"]))
            return originals[name](*args, **kwargs)

        return watched

    for name in names:
        setattr(dist, name, watch(name))
    with CommDebugMode() as counted:
        model(torch.ones(2, 3)).sum().backward()
    by_op = {str(op).split(".")[-1]: number for op, number in counted.get_comm_counts().items()}
    by_op = {
        op: number for op, number in by_op.items() if op.endswith("_base_")
    }  # others compare the ranks' models
    return by_op, sorted(calls), sorted(set(ranks))


def test_dispatch_modes_and_wrappers_of_torchs_functions_see_the_collectives():
    for by_op, calls, ranks in launch(seen_by_others, 2, timeout=60):
        assert by_op == {"_allgather_base_": 4, "_reduce_scatter_base_": 2}
        assert calls == ["all"] * 4 + ["reduce"] * 2
        assert ranks == [0, 1]
