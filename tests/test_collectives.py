"""Many tensors in one buffer: copies against plain loops, scaling against torch's FSDP2, the whole way on ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

from hwfsdp import UsageError, launch
from hwfsdp.collectives import (
    Channel,
    DefaultAllGather,
    DefaultReduceScatter,
    Gathered,
    RingAllGather,
    RingReduceScatter,
    all_gather,
    copy_in,
    copy_in_grads,
    copy_out,
    mean_scaling,
    reduce_scatter,
)
from hwfsdp.mesh import Axis
from hwfsdp.streams import streams_for

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CPU = torch.device("cpu")


def numbered(shape: Sequence[int], dtype: torch.dtype = torch.float32, first: int = 1) -> Tensor:
    """1, 2, 3 … in this shape; small enough to be exact in every dtype."""
    return (torch.arange(prod(shape)) + first).remainder(100).to(dtype).view(*shape)


def bytes_of(number: Tensor) -> list[int]:
    """Of a tensor without dimensions, as they lie in memory."""
    return number.reshape(1).view(torch.uint8).tolist()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


# --- Copy-in and copy-out of parameters --------------------------------------------------------------------

sizes_of_shards = st.lists(st.integers(0, 6), min_size=1, max_size=5)


@given(sizes_of_shards, st.sampled_from(FLOATING), st.data())
def test_shards_lie_end_to_end_each_cast_to_the_common_dtype(
    sizes: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    shards = [numbered([n], data.draw(st.sampled_from(FLOATING)), first=10 * i) for i, n in enumerate(sizes)]
    part = torch.full((sum(sizes),), -1, dtype=dtype)
    copy_in(shards, [dtype] * len(shards), part, sizes)
    expected = [float(x) for shard in shards for x in shard]
    assert part.tolist() == expected


@given(sizes_of_shards, st.data())
def test_shards_of_several_dtypes_lie_end_to_end_as_bytes(sizes: list[int], data: st.DataObject) -> None:
    dtypes = [data.draw(st.sampled_from((*FLOATING, torch.int64, torch.uint8, torch.bool))) for _ in sizes]
    originals = [data.draw(st.sampled_from(FLOATING)) if d.is_floating_point else d for d in dtypes]
    shards = [numbered([n], orig, first=i) for i, (n, orig) in enumerate(zip(sizes, originals, strict=True))]
    in_bytes = [n * d.itemsize for n, d in zip(sizes, dtypes, strict=True)]
    part = torch.full((sum(in_bytes),), 77, dtype=torch.uint8)
    copy_in(shards, dtypes, part, in_bytes)
    expected = [byte for s, d in zip(shards, dtypes, strict=True) for x in s for byte in bytes_of(x.to(d))]
    assert part.tolist() == expected


@given(sizes_of_shards, st.integers(1, 4), st.sampled_from(FLOATING))
def test_a_gather_is_spread_so_that_each_parameter_has_its_shards_in_rank_order(
    sizes: list[int], world_size: int, dtype: torch.dtype
) -> None:
    shards = [
        [numbered([n], dtype, first=10 * i + 3 * rank) for i, n in enumerate(sizes)]
        for rank in range(world_size)
    ]
    flat = torch.stack([torch.cat(of_rank) for of_rank in shards])
    wholes = [torch.full((world_size, n), -1, dtype=dtype) for n in sizes]
    copy_out(Gathered(flat, sizes, None), wholes, "group")
    for i, whole in enumerate(wholes):
        assert whole.tolist() == [of_rank[i].tolist() for of_rank in shards]


@given(sizes_of_shards, st.integers(1, 4), st.data())
def test_what_was_gathered_as_bytes_comes_out_in_the_dtypes_it_went_in(
    sizes: list[int], world_size: int, data: st.DataObject
) -> None:
    dtypes = [data.draw(st.sampled_from((*FLOATING, torch.int64, torch.uint8))) for _ in sizes]
    in_bytes = [n * d.itemsize for n, d in zip(sizes, dtypes, strict=True)]
    flat = torch.empty(world_size, sum(in_bytes), dtype=torch.uint8)
    shards = [
        [numbered([n], d, first=3 * rank + i) for i, (n, d) in enumerate(zip(sizes, dtypes, strict=True))]
        for rank in range(world_size)
    ]
    for part, of_rank in zip(flat, shards, strict=True):
        copy_in(of_rank, dtypes, part, in_bytes)
    wholes = [torch.zeros(world_size, n, dtype=d) for n, d in zip(sizes, dtypes, strict=True)]
    copy_out(Gathered(flat, in_bytes, None), wholes, "group")
    for i, whole in enumerate(wholes):
        assert same_bits(whole, torch.stack([of_rank[i] for of_rank in shards]))


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize(
    ("order", "expected", "got"), [((1, 0, 2), "in tensor 0", 6), ((0, 1), "3 tensors", 2)]
)
def test_memory_in_another_order_is_refused_and_left_as_it_was(
    order: Sequence[int], expected: str, got: int, as_bytes: bool
) -> None:
    """Torch would resize the tensors, not their memory, and the next gather would be written beyond it."""
    sizes = [n * (4 if as_bytes else 1) for n in (5, 3, 3)]
    flat = torch.zeros(2, sum(sizes), dtype=torch.uint8 if as_bytes else torch.float32)
    wholes = [torch.ones(2, n) for n in (5, 3, 3)]
    got *= 4 if as_bytes and "in" in expected else 1
    with pytest.raises(UsageError, match=f"group 'blocks.0'.*{expected}.*got {got}"):
        copy_out(Gathered(flat, sizes, None), [wholes[i] for i in order], "blocks.0")
    assert all(torch.equal(whole, torch.ones(2, n)) for whole, n in zip(wholes, (5, 3, 3), strict=True))


# --- Copy-in of gradients ----------------------------------------------------------------------------------


def chunks_row_by_row(grads: Sequence[Tensor], world_size: int) -> list[list[float]]:
    """What each rank shall get: of every gradient its rows, then zeros up to a full chunk. One row at a time."""
    parts: list[list[float]] = [[] for _ in range(world_size)]
    for grad in grads:
        rows, width = grad.shape[0], prod(grad.shape[1:])
        per_rank = (rows + world_size - 1) // world_size
        for rank in range(world_size):
            for row in range(rank * per_rank, (rank + 1) * per_rank):
                parts[rank] += grad[row].flatten().tolist() if row < rows else [0.0] * width
    return parts


def copied_in(grads: Sequence[Tensor], world_size: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    numel = len(chunks_row_by_row(grads, world_size)[0])
    flat = torch.full((world_size, numel), torch.nan, dtype=dtype)
    copy_in_grads(grads, flat)
    return flat.tolist()


SHAPES = {
    "even": [(4, 3), (8,)],
    "uneven": [(5, 2), (7,), (3, 2, 2)],
    "fewer rows than ranks": [(1, 4), (2,), (1,)],
    "no rows": [(0, 3), (0,)],
    "no columns": [(3, 0), (4, 0, 2)],
    "a bit of everything": [(0, 2), (9, 1), (1,), (4, 2), (5, 0), (6, 3)],
    "one element": [(1,)],
    "nothing": [],
}


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("name", SHAPES)
def test_row_r_of_the_buffer_is_what_rank_r_shall_get(name: str, world_size: int) -> None:
    grads = [numbered(shape, first=20 * i + 1) for i, shape in enumerate(SHAPES[name])]
    assert copied_in(grads, world_size) == chunks_row_by_row(grads, world_size)


@given(
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), max_size=4),
    st.integers(1, 9),
    st.sampled_from(FLOATING),
    st.sampled_from(FLOATING),
)
def test_gradients_of_any_shapes_are_cut_padded_and_cast(
    shapes: list[list[int]], world_size: int, grad_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> None:
    grads = [numbered(shape, grad_dtype, first=i) for i, shape in enumerate(shapes)]
    assert copied_in(grads, world_size, reduce_dtype) == chunks_row_by_row(grads, world_size)


STRIDED = {
    "transposed": lambda: numbered((3, 5)).t(),
    "permuted": lambda: numbered((2, 3, 5)).permute(2, 0, 1),
    "every other row": lambda: numbered((10, 3))[::2],
    "every other column": lambda: numbered((5, 6))[:, ::2],
    "expanded": lambda: numbered((1, 3)).expand(5, 3),
    "one number": lambda: torch.tensor(2.0).expand(7, 2),
    "channels last": lambda: numbered((5, 2, 2, 2)).to(memory_format=torch.channels_last),
    "in the middle of a storage": lambda: numbered((20,))[3:8],
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", STRIDED)
def test_gradients_may_lie_in_memory_as_autograd_left_them(name: str, world_size: int) -> None:
    grads = [STRIDED[name](), numbered((4, 2)), STRIDED[name]()]
    assert copied_in(grads, world_size) == chunks_row_by_row(grads, world_size)


def test_copying_in_leaves_the_gradients_as_they_were() -> None:
    grads = [numbered((5, 3)), numbered((3, 5)).t()]
    before = [grad.clone() for grad in grads]
    copied_in(grads, 4)
    assert all(map(same_bits, grads, before))


# --- Scaling -----------------------------------------------------------------------------------------------


FACTORS = (None, 1.0, 2.0, 3.0, 4.0, 7.5, 64.0)


def scaling_of_torch(shards: int, replicas: int, *options: Any) -> tuple[float, Any, Any, float]:
    shard, replicate = (
        SimpleNamespace(size=lambda n=n: n) if n > 1 else None for n in (shards, replicas)
    )  # type: Any, Any
    dtype, factor, force_sum = options
    before, after, *ops = _get_gradient_divide_factors(shard, replicate, dtype, "", factor, force_sum)
    return before or 1, *ops, after or 1


@pytest.mark.parametrize("force_sum", [False, True])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_means_are_taken_as_fsdp2_takes_them(dtype: torch.dtype, force_sum: bool) -> None:
    for shards, replicas in itertools.product((1, 2, 3, 4, 6, 8, 16, 64), (1, 2, 3, 4)):
        expected = scaling_of_torch(shards, replicas, dtype, None, force_sum)
        assert tuple(mean_scaling(shards, replicas, dtype, None, force_sum)) == expected, (shards, replicas)


@pytest.mark.parametrize("force_sum", [False, True])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("factor", FACTORS)
def test_whatever_the_backend_does_not_divide_by_is_divided_apart(
    factor: float | None, dtype: torch.dtype, force_sum: bool
) -> None:
    for shards, replicas in itertools.product((1, 2, 3, 4, 8), (1, 2, 3)):
        before, scatter, reduce, after = mean_scaling(shards, replicas, dtype, factor, force_sum)
        by_backend = shards if scatter == dist.ReduceOp.AVG else 1
        by_backend *= replicas if reduce == dist.ReduceOp.AVG else 1
        wanted = shards * replicas if factor is None else factor
        assert before * after * by_backend == wanted
        assert not force_sum or by_backend == 1


# --- All the way, on ranks ---------------------------------------------------------------------------------

TRANSPORTS = {
    "backend": (DefaultAllGather, DefaultReduceScatter),
    "ring": (RingAllGather, RingReduceScatter),
}
PARAM_SHAPES = [(5, 2), (3,), (8, 1), (1,)]


def channel_of(transport: str) -> Channel:
    make_gather, make_reduction = TRANSPORTS[transport]
    axis = Axis(dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    return Channel(axis, CPU, streams_for("cpu"), "test", make_gather(), make_reduction())


def padded_chunks(whole: Tensor, world_size: int) -> list[Tensor]:
    """Flat and of equal size."""
    rows = -(-whole.shape[0] // world_size)
    padded = torch.cat([whole, whole.new_zeros(rows * world_size - whole.shape[0], *whole.shape[1:])])
    return [chunk.flatten() for chunk in padded.split(rows)]


def gather_there_and_back(transport: str, dtypes: Sequence[torch.dtype]) -> bool:
    channel = channel_of(transport)
    world_size, rank = channel.shard.size, dist.get_rank()
    wholes = [numbered(shape, first=7 * i) for i, shape in enumerate(PARAM_SHAPES)]
    shards = [padded_chunks(whole, world_size)[rank] for whole in wholes]
    gathered = all_gather(shards, dtypes, channel.shard, channel)
    channel.streams.compute.wait(gathered.done)
    outs = [torch.empty(world_size, s.numel(), dtype=d) for s, d in zip(shards, dtypes, strict=True)]
    copy_out(gathered, outs, "test")
    return all(
        same_bits(out.view(-1)[: whole.numel()].view(whole.shape), whole.to(dtype))
        for out, whole, dtype in zip(outs, wholes, dtypes, strict=True)
    )


def reduce_all_the_way(transport: str, grad_dtype: torch.dtype, reduce_dtype: torch.dtype) -> dict[str, bool]:
    channel = channel_of(transport)
    world_size, rank = channel.shard.size, dist.get_rank()

    def grads_of(any_rank: int) -> list[Tensor]:
        return [
            numbered(s, grad_dtype, first=any_rank + 3 * i) * world_size for i, s in enumerate(PARAM_SHAPES)
        ]

    given, results = grads_of(rank), []
    reducing = reduce_scatter(given, reduce_dtype, channel)
    emptied = given == []
    reducing.then(lambda result: results.append(result / reducing.divide))
    channel.streams.compute.wait(reducing.stream.record())
    of_ranks = [grads_of(r) for r in range(world_size)]
    means = [torch.stack([g.double() for g in grads]).mean(0) for grads in zip(*of_ranks, strict=True)]
    expected = torch.cat([padded_chunks(mean, world_size)[rank] for mean in means])
    (result,) = results
    return {
        "mean": torch.equal(result.double(), expected),
        "dtype": result.dtype == reduce_dtype,
        "emptied": emptied,
    }


@functools.cache
def along_all_ways(world_size: int) -> list[dict[Any, Any]]:
    """Gathers in one dtype and in several; reductions between dtypes, the sums being exact in each."""
    several = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
    gathers = [[dtype] * 4 for dtype in FLOATING] + [several]
    casts = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float64)]
    casts += [(torch.float32, torch.float16)]

    def run() -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for transport in TRANSPORTS:
            found["gather", transport] = [gather_there_and_back(transport, dtypes) for dtypes in gathers]
            found["reduce", transport] = [reduce_all_the_way(transport, *cast) for cast in casts]
        return found

    return launch(run, world_size, timeout=60)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_gather_gives_every_rank_the_whole_parameters(transport: str, world_size: int) -> None:
    for found in along_all_ways(world_size):
        assert all(found["gather", transport])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_reduction_gives_each_rank_the_mean_of_its_rows_and_empties_the_list_of_gradients(
    transport: str, world_size: int
) -> None:
    for found in along_all_ways(world_size):
        assert all(all(result.values()) for result in found["reduce", transport])


@pytest.mark.parametrize("kind", [DefaultAllGather, DefaultReduceScatter, RingAllGather, RingReduceScatter])
def test_a_transport_allocates_what_it_is_asked_for(kind: Any) -> None:
    buffer = kind().allocate((6,), dtype=torch.bfloat16, device=torch.device("meta"))
    assert (tuple(buffer.shape), buffer.dtype, buffer.device.type) == ((6,), torch.bfloat16, "meta")
