"""Exercise 12: Strided shards"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import mul

from torch import Tensor
from torch.distributed.tensor import Placement, Shard

from hwfsdp import compat
from hwfsdp.compat import StridedShard
from hwfsdp.core.sharding import chunk_extent
from hwfsdp.layout.extents import (
    LocalExtent,
    SHARDS,
    check_shards,
    extents_of,
    front_of,
    impossible_factor,
    largest_shape,
    slices_of,
)

# The package's own, that the docstrings name:
#
# hwfsdp.compat
#     function   strided_shard(dim: int, split_factor: int) -> Placement
#     function   is_shard(placement: Placement) -> bool
# hwfsdp.core.sharding
#     function   chunk_extent(n: int, world_size: int, rank: int) -> Extent
# hwfsdp.layout.extents
#     constant   SHARDS = (StridedShard, Shard)
#     class      LocalExtent(shape: tuple[int, ...], offset: tuple[int, ...])
#     function   impossible_factor(mesh_shape: Sequence[int], mesh_dim: int, placement: Placement,
#                    pieces: Sequence[int]) -> UsageError
#     function   extents_of(global_shape: Sequence[int], mesh_shape: Sequence[int],
#                    placements: Sequence[Placement]) -> dict[tuple[int, ...], LocalExtent]
#     function   largest_shape(extents: Mapping[tuple[int, ...], LocalExtent]) -> tuple[int, ...]
#     function   slices_of(extent: LocalExtent) -> tuple[slice, ...]
#     function   front_of(extent: LocalExtent) -> tuple[slice, ...]
#     function   check_shards(shards: Sequence[Tensor], mesh_shape: Sequence[int], extents: Mapping[tuple[int,
#                    ...], LocalExtent]) -> None


def cut_after(placements: Iterable[tuple[Placement, int]], dim: int) -> Placement:
    """FSDP's placement when it cuts tensor dim `dim` after others did: how one axis of the mesh says what came before it.

    Args:
        placements: of the axes on the right of FSDP's, which have made their cuts already, each with the number of
            ranks along its axis.

    Returns:
        `compat.strided_shard(dim, parts)`, where `parts` is the number of parts that these cuts have made of `dim`. A plain
        `Shard(dim)` if it is 1, and the tensor dim is still in one piece. `compat.is_shard` tells which placements cut, and
        these have a `dim`, which may be another one.
    """
    # TODO(12)
    raise NotImplementedError


def joined_placements(
    own: Sequence[Placement], before: Sequence[Placement], sizes: Sequence[int], dim: int
) -> tuple[Placement, ...]:
    """Placements of a sharded parameter that was a DTensor before, on the mesh of both: data-parallel axes come first.

    Args:
        own: what FSDP would say of a plain parameter: `(Shard(dim),)`, or `(Replicate(), Shard(dim))` under hybrid sharding.
        before: the parameter's placements before FSDP, one for each of its axes. They stay as they are.
        sizes: the number of ranks along each of these axes.
        dim: the tensor dim that FSDP cuts.

    Returns:
        One placement for each axis of the joined mesh. Where `own` cuts, it has to say that `before` has cut already
        (`cut_after`); where it replicates, it still does.
    """
    # TODO(12)
    raise NotImplementedError


def orders_of_cuts(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> Mapping[int, list[int]]:
    """The mesh dims that cut each tensor dim, the first to cut first (Note [Right to left]).

    Args:
        mesh_shape: the number of ranks along each mesh dim.
        placements: one for each mesh dim. Those that are `isinstance(placement, SHARDS)` cut tensor dim `placement.dim`,
            counted from the front; all others cut nothing.

    Returns:
        By tensor dim, for each that is cut, all mesh dims that cut it: lists of its own, which the caller may change.

    A `StridedShard` asks for `placement.split_factor` pieces, a plain `Shard` for 1: so many pieces of the tensor dim
    are there when its mesh dim cuts, counting only cuts by mesh dims on its right. As those are on its right, one goes
    from the last mesh dim to the first, and puts each into the order of its tensor dim after as many of the cuts that are
    there already as it takes for their mesh sizes to multiply to what it asks for (none, for 1). If mesh dims of size 1 leave
    several such places, any will do.

        mesh (2, 2, 2), [Shard(0), StridedShard(0, split_factor=2), Shard(0)]         {0: [0, 2, 1]}
        mesh (2, 3, 2), [StridedShard(0, split_factor=2), Shard(1), Shard(0)]         {0: [2, 0], 1: [1]}

    Raises:
        UsageError: there is no such place, because the cuts so far never make so many pieces. `impossible_factor(mesh_shape,
            mesh_dim, placement, pieces)` returns the error to raise; `pieces` are all numbers of pieces that there are
            places for, 1 among them.
    """
    # TODO(12)
    raise NotImplementedError


def nested_extent(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    orders: Mapping[int, Sequence[int]],
    coordinate: Sequence[int],
) -> LocalExtent:
    """The box that is left for the rank at this coordinate when every cut was made: integers only.

    Args:
        global_shape: of the whole tensor; sizes may be 0.
        mesh_shape: the number of ranks along each mesh dim.
        orders: what `orders_of_cuts` returns. Tensor dims that are not in it are not cut.
        coordinate: the rank's index along each mesh dim.

    Each cut takes what the cuts before it left of the tensor dim to this rank, deals it out to the ranks along its mesh dim
    as `sharding.chunk_extent` does, and keeps the chunk of this rank's index along that mesh dim. Nothing has to divide.

    Returns:
        Shape, and offset in the whole tensor, as tuples of integers. Where nothing is left of a tensor dim, the offset in it
        is the size of that dim in `global_shape`, so that no empty part ever shares its offset with a real one.
    """
    # TODO(12)
    raise NotImplementedError


def shard_strided(
    tensor: Tensor, mesh_shape: Sequence[int], placements: Sequence[Placement], *, pad: bool = False
) -> list[Tensor]:
    """The local tensor of every coordinate, in row-major order of the mesh.

    Args:
        tensor: the whole, of any shape; it stays as it is.
        pad: zeros are appended in each sharded dim, so that all have the largest local shape, as collectives want.

    Returns:
        As many as the mesh has ranks, contiguous, of the dtype of `tensor`, each in memory of its own and no larger than it
        has to be. A rank for which nothing is left has an empty tensor, or one of zeros if `pad`. Autograd knows where they
        come from.

    `extents_of(shape, mesh_shape, placements)` says which box of the tensor each coordinate has: a dict from coordinate to
    `LocalExtent`, in row-major order. `largest_shape(extents)`, of that dict, is as large as the largest of them in each dim.
    `slices_of(extent)` is the index of the box in the whole, `front_of(extent)` the index of as many elements at the front of a
    shard.

    Raises:
        What `local_extent_of` does, and UnsupportedError for Partial: which addend is whose, the sum does not tell.
    """
    # TODO(12)
    raise NotImplementedError


def unshard_strided(
    shards: Sequence[Tensor],
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
) -> Tensor:
    """The whole tensor, from the local tensors of all coordinates; the inverse of `shard_strided`.

    Args:
        shards: one for each coordinate of the mesh, in row-major order, with or without padding. They stay as they are.

    Returns:
        A tensor of `global_shape`, in memory of its own, of the shards' dtype and device. Autograd knows where it comes from.

    `extents_of(global_shape, mesh_shape, placements)` says where in the whole each shard belongs: a dict from coordinate to
    `LocalExtent`, in row-major order. The elements of a shard are the front of it, of the shape that its extent has
    (`front_of(extent)`, and `slices_of(extent)` in the whole); what is behind them is padding, and stays out, since in the
    whole it would be in the middle. Several coordinates may have the same extent: of replicas the first one counts, and the
    others are not looked at.

    Raises:
        UsageError: a shard that is smaller than its extent, or larger than padding makes it, or not one for each
            coordinate (`check_shards(shards, mesh_shape, extents)` sees to all that, given the dict); and what
            `shard_strided` raises.
    """
    # TODO(12)
    raise NotImplementedError
