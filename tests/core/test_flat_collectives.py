"""Many tensors in one buffer: copies against plain loops, and scaling against torch's FSDP2."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

from hwfsdp.core.flat_collectives import copy_in, copy_in_grads, copy_out, mean_over
from hwfsdp.core.mesh import Axis
from hwfsdp.features.reductions import SettableReducer

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def numbered(shape: Sequence[int], dtype: torch.dtype = torch.float32, first: int = 1) -> Tensor:
    """Return 1, 2, 3 … in this shape, small enough to be exact in every dtype."""
    return (torch.arange(prod(shape)) + first).remainder(100).to(dtype).view(*shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


# --- Copy-in and copy-out of parameters --------------------------------------------------------------------

sizes_of_shards = st.lists(st.integers(0, 6), min_size=1, max_size=5)


@given(sizes_of_shards, st.integers(1, 4), st.booleans(), st.data())
def test_a_gather_is_cast_and_spread_so_that_each_parameter_has_its_shards_in_rank_order(
    sizes, world_size, mixed, data
):
    """Parameters travel in one dtype, or in several, as bytes. Shards lie end to end in the buffer."""
    each = st.sampled_from((*FLOATING, torch.int64, torch.uint8))
    dtypes = (
        [data.draw(each) for _ in sizes] if mixed else [data.draw(st.sampled_from(FLOATING))] * len(sizes)
    )
    originals = [data.draw(st.sampled_from(FLOATING)) if d.is_floating_point else d for d in dtypes]
    columns = [n * (d.itemsize if mixed else 1) for n, d in zip(sizes, dtypes, strict=True)]
    flat = torch.empty(world_size, sum(columns), dtype=torch.uint8 if mixed else dtypes[0])
    shards = [
        [numbered([n], d, first=3 * rank + 10 * i) for i, (n, d) in enumerate(zip(sizes, originals))]
        for rank in range(world_size)
    ]
    for part, of_rank in zip(flat, shards, strict=True):
        copy_in(of_rank, dtypes, part, columns)
    assert (
        flat[-1].split(columns)[-1].clone().view(dtypes[-1]).tolist()
        == shards[-1][-1].to(dtypes[-1]).tolist()
    )
    wholes = [torch.zeros(world_size, n, dtype=d) for n, d in zip(sizes, dtypes, strict=True)]
    copy_out([flat], columns, wholes)
    for i, whole in enumerate(wholes):
        assert same_bits(whole, torch.stack([of_rank[i] for of_rank in shards]).to(dtypes[i]))


# --- Copy-in of gradients ----------------------------------------------------------------------------------


def chunks_row_by_row(grads: Sequence[Tensor], world_size: int) -> list[list[float]]:
    """Return the part of each rank: its rows of every gradient, then zeros up to a full chunk. Copy one row at a time."""
    parts: list[list[float]] = [[] for _ in range(world_size)]
    for grad in grads:
        rows, width = grad.shape[0], prod(grad.shape[1:])
        per_rank = (rows + world_size - 1) // world_size
        for rank in range(world_size):
            for row in range(rank * per_rank, (rank + 1) * per_rank):
                parts[rank] += grad[row].flatten().tolist() if row < rows else [0.0] * width
    return parts


def copied_in(
    grads: Sequence[Tensor], world_size: int, dtype: torch.dtype = torch.float32, on_host: bool = True
) -> list[Any]:
    numel = len(chunks_row_by_row(grads, world_size)[0])
    flat = torch.full((world_size, numel), torch.nan, dtype=dtype)
    copy_in_grads(grads, flat, on_host)
    return flat.tolist()


@given(
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), max_size=4),
    st.integers(1, 9),
    st.lists(st.sampled_from(FLOATING), min_size=1, max_size=2),
    st.sampled_from(FLOATING),
    st.booleans(),
)
@example([[4, 3], [8]], 4, [torch.float32], torch.float32, True)  # no padding
@example([[1, 4], [2], [0, 3], [3, 0]], 4, [torch.float32], torch.float32, True)  # fewer rows than ranks
@example([[5, 3], [1]], 4, [torch.bfloat16], torch.float32, False)  # padding and casts, as a device does them
def test_gradients_of_any_shapes_are_cut_padded_and_cast(
    shapes, world_size, grad_dtypes, reduce_dtype, on_host
):
    dtypes = itertools.cycle(grad_dtypes)
    grads = [numbered(shape, next(dtypes), first=i) for i, shape in enumerate(shapes)]
    assert copied_in(grads, world_size, reduce_dtype, on_host) == chunks_row_by_row(grads, world_size)


STRIDED = {
    "transposed": lambda: numbered((3, 5)).t(),
    "permuted": lambda: numbered((2, 3, 5)).permute(2, 0, 1),
    "every other column": lambda: numbered((5, 6))[:, ::2],
    "expanded": lambda: numbered((1, 3)).expand(5, 3),
    "channels last": lambda: numbered((5, 2, 2, 2)).to(memory_format=torch.channels_last),
    "in the middle of a storage": lambda: numbered((20,))[3:8],
}


def test_gradients_may_lie_in_memory_as_autograd_left_them_and_stay_as_they_were():
    for world_size in [1, 2, 3]:
        for name in STRIDED:
            grads = [STRIDED[name](), numbered((4, 2)), STRIDED[name]()]
            before = [grad.clone() for grad in grads]
            assert copied_in(grads, world_size) == chunks_row_by_row(grads, world_size)
            assert all(map(same_bits, grads, before))


# --- Scaling -----------------------------------------------------------------------------------------------


FACTORS = (1.0, 2.0, 3.0, 7.5)


def scaling_of_torch(
    shards: int, replicas: int, dtype: Any, force_sum: bool
) -> tuple[float, Any, Any, float]:
    group: list[Any] = [SimpleNamespace(size=lambda n=n: n) if n > 1 else None for n in (shards, replicas)]
    before, after, *ops = _get_gradient_divide_factors(*group, dtype, "", None, force_sum)
    return before or 1, *ops, after or 1


def mean_scaling(
    shards: int, replicas: int, dtype: Any, factor: float | None, force_sum: bool
) -> tuple[float, Any, Any, float]:
    """Return the divisor before, both operations, and the divisor after. Without replicas, the core's mean must agree."""
    reducer, group = SettableReducer(), SimpleNamespace(
        mesh=SimpleNamespace(size=shards, replicate=Axis(None, replicas))
    )
    reducer.group = cast(Any, group)
    reducer.divide_factor, reducer.force_sum = factor, force_sum
    assert replicas > 1 or reducer.mean(dtype) == mean_over(shards, dtype, factor, force_sum)
    before, operation, after = reducer.mean(dtype)
    return before, operation, reducer.replica_operation(dtype), after


def test_means_are_taken_as_fsdp2_takes_them_and_factors_around_a_reduction_make_up_the_divisor() -> None:
    kinds = [*itertools.product((1, 2, 3, 4, 6, 8, 64), (1, 2, 3, 4), FLOATING, (False, True))]
    for shards, replicas, dtype, force_sum in kinds:
        found = mean_scaling(shards, replicas, dtype, None, force_sum)
        assert found == scaling_of_torch(shards, replicas, dtype, force_sum), (shards, replicas)
        for factor in FACTORS:
            before, scatter, reduce, after = mean_scaling(shards, replicas, dtype, factor, force_sum)
            by_backend = shards if scatter == dist.ReduceOp.AVG else 1
            by_backend *= replicas if reduce == dist.ReduceOp.AVG else 1
            assert before * after * by_backend == factor
            assert not force_sum or by_backend == 1
