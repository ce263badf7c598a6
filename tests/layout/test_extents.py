"""The part of a tensor that a rank holds. The oracle is nested chunking: `torch.chunk` cuts row numbers, and cuts the pieces again.

The oracle knows who cuts first. The tested code must read this from the placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations, product
from math import prod
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import _utils as torchs
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hwfsdp.errors import UnsupportedError, UsageError
from hwfsdp.layout import (
    compute_global_tensor_info,
    compute_local_shape_and_global_offset,
    compute_local_stride,
    explicit_order_placements,
    local_extent_of,
    normalize_to_torch_size,
    shard_of,
    shard_strided,
    try_find_mesh_from_args,
    unshard_strided,
)

Sizes = tuple[int, ...]
Rows = tuple[int, ...]

ROWS = range(30)  # more than the largest mesh has ranks, and fewer


def strided(dim: int, split_factor: int) -> Placement:
    return _StridedShard(dim, split_factor=split_factor)


@cache
def nested_chunks(rows: Rows, mesh: Sizes, cuts: tuple[int, ...]) -> dict[Sizes, Rows]:
    """Return coordinate → rows. The mesh dims in `cuts` cut one after the other, each the pieces of the one before."""
    pieces: dict[tuple[tuple[int, int], ...], Tensor] = {(): torch.tensor(rows, dtype=torch.int64)}
    for mesh_dim in cuts:
        finer = {}
        for where, piece in pieces.items():
            chunks = list(piece.chunk(mesh[mesh_dim]))
            chunks += [piece[:0]] * (mesh[mesh_dim] - len(chunks))
            finer |= {(*where, (mesh_dim, i)): chunk for i, chunk in enumerate(chunks)}
        pieces = finer
    rows_of = {where: tuple(piece.tolist()) for where, piece in pieces.items()}
    coordinates = product(*map(range, mesh))
    return {c: rows_of[tuple((i, c[i]) for i in cuts)] for c in coordinates}


def extent_of_rows(rows: Sequence[int], n: int) -> tuple[int, int]:
    """Return (length, offset) of a rank's rows in a dim of size n."""
    return (len(rows), rows[0]) if rows else (0, n)


def placements_for(mesh: Sizes, cuts: Sequence[int]) -> list[Placement]:
    """Return placements on dim 0 with which the mesh dims cut in this order. This is a closed form, without a search."""
    factors = [prod(mesh[j] for j in cuts[: cuts.index(i)] if j > i) for i in range(len(mesh))]
    earlier = [any(j > i for j in cuts[: cuts.index(i)]) for i in range(len(mesh))]
    return [strided(0, f) if is_strided else Shard(0) for f, is_strided in zip(factors, earlier)]


def test_extents_equal_nested_chunking_on_every_small_mesh() -> None:
    for cuts in [*permutations(range(2)), *permutations(range(3))]:
        for mesh in product((1, 2, 3), repeat=len(cuts)):
            placements = placements_for(mesh, cuts)
            for n in ROWS:
                for coordinate, rows in nested_chunks(tuple(range(n)), mesh, cuts).items():
                    length, offset = extent_of_rows(rows, n)
                    assert list(rows) == list(range(offset, offset + length))
                    assert local_extent_of((n,), mesh, placements, coordinate) == ((length,), (offset,))


def test_every_order_of_cuts_is_found_in_the_placements_that_say_it() -> None:
    for ndim in [1, 2, 3, 4]:
        for mesh in product((2, 3, 4), repeat=ndim):
            for cuts in permutations(range(ndim)):
                ordered = explicit_order_placements(mesh, placements_for(mesh, cuts))
                assert ordered == [(mesh_dim, Shard(0)) for mesh_dim in cuts]
                assert not any(isinstance(placement, _StridedShard) for _, placement in ordered)


def test_strided_shards_wait_for_the_cuts_before_theirs_and_other_placements_do_not() -> None:
    for mesh, placements, order in [
        ((3, 2, 2, 2), [strided(1, 2), strided(0, 2), Shard(1), Shard(0)], (2, 0, 3, 1)),
        (
            (2, 3, 2, 2, 2),
            [Replicate(), strided(0, 2), Partial("max"), Shard(0), Replicate()],
            (0, 2, 3, 1, 4),
        ),
    ]:
        plain = [Shard(p.dim) if isinstance(p, _StridedShard) else p for p in placements]
        expected = [(mesh_dim, plain[mesh_dim]) for mesh_dim in order]
        assert explicit_order_placements(mesh, placements) == expected


# --- several tensor dims -------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    shape: Sizes
    mesh: Sizes
    placements: list[Placement]
    cuts: list[list[int]]  # for each tensor dim the mesh dims that cut it, first one first


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw any order of cuts, and any assignment of mesh dims to tensor dims."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    owner = [draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh]  # None: replicated
    cuts = [draw(st.permutations([i for i, dim in enumerate(owner) if dim == d])) for d in range(len(shape))]
    placements: list[Placement] = []
    for i, dim in enumerate(owner):
        if dim is None:
            placements.append(Replicate())
            continue
        before = [j for j in cuts[dim][: cuts[dim].index(i)] if j > i]
        written = dim - len(shape) if draw(st.booleans()) else dim
        placements.append(strided(written, prod(mesh[j] for j in before)) if before else Shard(written))
    return Layout(shape, mesh, placements, cuts)


def whole_of(shape: Sizes) -> Tensor:
    """Return a tensor whose elements are all different and not zero."""
    return torch.arange(1, prod(shape) + 1).reshape(shape)


def nested_shards(layout: Layout) -> dict[Sizes, tuple[tuple[Sizes, Sizes], Tensor]]:
    """Return coordinate → (extent, local tensor). Cut one tensor dim after the other by the oracle's rows."""
    shape, mesh, _, cuts = layout
    rows_of = [nested_chunks(tuple(range(n)), mesh, tuple(order)) for n, order in zip(shape, cuts)]
    found = {}
    for c in product(*map(range, mesh)):
        shard = whole_of(shape)
        for dim, rows in enumerate(rows_of):
            shard = shard.index_select(dim, torch.tensor(rows[c], dtype=torch.int64))
        extents = [extent_of_rows(rows[c], n) for n, rows in zip(shape, rows_of)]
        found[c] = ((tuple(n for n, _ in extents), tuple(offset for _, offset in extents)), shard)
    return found


@pytest.mark.parametrize("pad", [False, True], ids=["as_they_are", "padded"])
@given(layout=layouts())
def test_shards_equal_nested_chunking_and_join_to_the_whole_again(layout: Layout, pad: bool) -> None:
    """Padding makes all shards as large as the largest. It is zero, at the end of dims that are cut."""
    shape, mesh, placements, _ = layout
    whole, truth = whole_of(shape), nested_shards(layout)
    largest = tuple(max(shard.size(dim) for _, shard in truth.values()) for dim in range(len(shape)))
    shards = shard_strided(whole, mesh, placements, pad=pad)
    for shard, (coordinate, (extent, real)) in zip(shards, truth.items(), strict=True):
        expected = torch.zeros(largest if pad else real.shape, dtype=real.dtype)
        expected[tuple(map(slice, real.shape))] = real
        assert local_extent_of(shape, mesh, placements, coordinate) == extent
        assert torch.equal(shard, expected) and shard.is_contiguous()
        assert shard.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr() or not shard.numel()
    assert torch.equal(unshard_strided(shards, shape, mesh, placements), whole)


def test_shards_pass_gradients_on() -> None:
    whole = torch.ones(5, requires_grad=True)
    shards = shard_strided(whole, (2,), [Shard(0)], pad=True)
    (2 * unshard_strided(shards, (5,), (2,), [Shard(0)])).sum().backward()
    assert whole.grad is not None and whole.grad.tolist() == [2.0] * 5


# --- Refusals ------------------------------------------------------------------------------------------------------


def test_placements_that_no_cuts_make_are_refused() -> None:
    for placements, message in [
        ([Shard(0)], r"one for each dim of the mesh \(3, 2\); got 1"),
        ([strided(0, 3), Shard(0)], r"on dim 0 of the mesh \(3, 2\): .* one of \[1, 2\]; got 3"),
    ]:
        with pytest.raises(UsageError, match=message) as info:
            explicit_order_placements((3, 2), placements)
        assert isinstance(info.value, RuntimeError)  # as torch's is
        with pytest.raises(UsageError, match=message):
            local_extent_of((4, 4), (3, 2), placements, (0, 0))


def test_negative_dims_are_refused_where_the_number_of_dims_is_unknown() -> None:
    with pytest.raises(UsageError, match="counted from the front; got -1"):
        explicit_order_placements((2,), [strided(-1, 1)])
    assert local_extent_of((4, 6), (2,), [strided(-1, 1)], (1,)) == ((4, 3), (0, 3))


class Diagonal(Placement):
    def __str__(self) -> str:
        return "Diagonal"


NOT_THERE, OUTSIDE = "a dim of a tensor that has 2; got", r"one inside the mesh \(3, 2\)"


def test_dims_placements_and_coordinates_that_do_not_exist_are_refused() -> None:
    for placement, coordinate, error, message in [
        (Shard(2), (0, 0), UsageError, f"{NOT_THERE} 2"),
        (strided(-3, 1), (0, 0), UsageError, f"{NOT_THERE} -3"),
        (Diagonal(), (0, 0), UnsupportedError, "got Diagonal"),
        (Shard(0), (0,), UsageError, OUTSIDE),
        (Shard(0), (3, 0), UsageError, OUTSIDE),
    ]:
        with pytest.raises(error, match=message):
            local_extent_of((4, 4), (3, 2), [placement, Replicate()], coordinate)


def test_partial_placements_have_extents_but_their_values_are_refused() -> None:
    assert local_extent_of((4,), (2,), [Partial()], (1,)) == ((4,), (0,))
    with pytest.raises(UnsupportedError, match="got Partial"):
        shard_strided(torch.ones(4), (2,), [Partial()])
    with pytest.raises(UnsupportedError, match="got Partial"):
        unshard_strided([torch.ones(4)] * 2, (4,), (2,), [Partial()])


def test_a_shard_that_does_not_fit_its_place_is_named() -> None:
    shards = shard_strided(torch.ones(7, 3), (2, 2), [strided(0, 2), Shard(0)])
    shards[1] = torch.ones(2, 4)
    with pytest.raises(UsageError, match=r"the shard at \(0, 1\): expected shape \(2, 3\)"):
        unshard_strided(shards, (7, 3), (2, 2), [strided(0, 2), Shard(0)])


# --- on a mesh -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Make a mesh (2, 4) as seen by rank 6 at (1, 2). Its process group has no other processes."""
    dist.init_process_group("fake", rank=6, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (2, 4))
    dist.destroy_process_group()


def test_a_rank_finds_its_own_extent_and_takes_it_as_a_view(mesh: DeviceMesh) -> None:
    whole, placements = torch.arange(30).view(15, 2), [strided(0, 4), Shard(0)]
    rows = nested_chunks(tuple(range(15)), (2, 4), (1, 0))[1, 2]
    assert compute_local_shape_and_global_offset((15, 2), mesh, placements) == ((len(rows), 2), (rows[0], 0))
    assert compute_local_shape_and_global_offset((15, 2), mesh, placements, True) == ((len(rows), 2), ())
    part = shard_of(whole, mesh, placements)
    assert torch.equal(part, whole[list(rows)])
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_a_rank_outside_the_mesh_has_nothing(mesh: DeviceMesh) -> None:
    elsewhere = DeviceMesh("cpu", [0, 1])
    theirs = torchs.compute_local_shape_and_global_offset((4, 4), elsewhere, [Shard(0)])
    assert compute_local_shape_and_global_offset((4, 4), elsewhere, [Shard(0)]) == theirs == ((0,), ())
    assert shard_of(torch.ones(4, 4), elsewhere, [Shard(0)]).shape == (0,)


MEMORY_ORDERS = list(permutations(range(3)))


def laid_out(shape: Sizes, order: Sequence[int]) -> Tensor:
    """Make a dense tensor of this shape. Its dims lie in memory in this order, outermost first."""
    return torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])


def test_the_whole_has_the_memory_order_of_its_parts(mesh: DeviceMesh) -> None:
    """A dim of size 1 may have any stride, and torch leaves holes for some. hwfsdp leaves none."""
    for order in MEMORY_ORDERS:
        for local_shape in product((1, 2, 3), repeat=3):
            local = laid_out(local_shape, order)
            for placements in product([Replicate(), Partial(), Shard(0), Shard(1), Shard(2)], repeat=2):
                shape, stride = compute_global_tensor_info(local, mesh, placements)
                torchs_shape, torchs_stride = torchs.compute_global_tensor_info(local, mesh, placements)
                assert shape == torchs_shape
                if 1 not in local_shape:
                    assert stride == torchs_stride
                elif order == (0, 1, 2):
                    assert tuple(stride) == torch.empty(shape).stride()


def test_strided_shards_count_for_the_whole_like_plain_ones(mesh: DeviceMesh) -> None:
    for placements in ([strided(0, 4), Shard(0)], [Shard(-2), Shard(0)]):
        assert compute_global_tensor_info(torch.empty(3, 5), mesh, placements) == ([24, 5], [5, 1])


@pytest.mark.parametrize("order", MEMORY_ORDERS, ids=str)
def test_the_stride_of_a_part_follows_from_the_mesh_as_well(mesh: DeviceMesh, order: Sizes) -> None:
    """The oracle is a copy of this rank's part. `compute_local_stride(stride, local_shape)` gives the same."""
    for shape in product((4, 15), (6, 7), (8, 9)):
        whole = laid_out(shape, order)
        for placements in product([Replicate(), Shard(0), Shard(-2), Shard(2)], repeat=2):
            part = shard_of(whole, mesh, placements)
            stride = compute_local_stride(whole.stride(), part.shape)
            if not {0, 1} & {*part.shape}:  # empty parts, and dims of size 1, may have any stride
                assert stride == part.clone().stride()
            assert compute_local_stride(whole.stride(), mesh, placements) == stride
            assert compute_local_stride(whole.stride(), local_shape=part.shape) == stride


def test_a_stride_takes_a_shape_or_a_mesh_with_placements(mesh: DeviceMesh) -> None:
    every = {"mesh": mesh, "placements": [Shard(0), Replicate()], "local_shape": (2,)}
    for arguments in ({}, {"mesh": mesh}, every):
        with pytest.raises(UsageError, match="compute_local_stride: expected the local shape, or a mesh and"):
            compute_local_stride((1,), **arguments)


def test_an_empty_part_has_the_stride_of_an_empty_tensor() -> None:
    for shape in [(0, 3), (3, 0), (2, 0, 3), (0, 0), ()]:
        whole = torch.empty([n + 2 for n in shape])
        assert compute_local_stride(whole.stride(), shape) == torch.empty(shape).stride()


def test_sizes_are_read_as_torch_reads_them() -> None:
    for size in [3, (), [3], (2, 3), ([2, 3],), [[]], (torch.Size([2]),)]:
        read = normalize_to_torch_size(size)
        assert isinstance(read, torch.Size)
        assert read == torchs.normalize_to_torch_size(size)


def test_an_operator_has_the_mesh_of_its_first_dtensor_at_any_depth(mesh: DeviceMesh) -> None:
    on_mesh = DTensor.from_local(torch.ones(2), mesh, [Shard(0), Replicate()], run_check=False)
    op, plain = torch.ops.aten.cat.default, torch.ones(2)
    for args in ([on_mesh], [plain, on_mesh], [[on_mesh, on_mesh], 0], [None, (on_mesh,)], [on_mesh._spec]):
        assert try_find_mesh_from_args(op, args) is mesh
        assert torchs.try_find_mesh_from_args(op, args) is mesh
    # torch looks at the first of a list only
    assert try_find_mesh_from_args(op, [plain, [None, on_mesh]]) is mesh
    with pytest.raises(UsageError, match="aten.cat.default: expected a DTensor"):
        try_find_mesh_from_args(op, [plain, [], None])
