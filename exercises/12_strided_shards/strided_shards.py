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

# Names of the package that the docstrings mention:
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
    """Return the placement of FSDP's axis, which cuts tensor dim `dim` after other axes. It says how they have cut this dim.

    Args:
        placements: the placements of the axes on the right of FSDP's axis, which have made their cuts already, each with the
            number of ranks along its axis.

    Returns:
        `compat.strided_shard(dim, parts)`, where `parts` is the number of parts into which these cuts have divided `dim`. If
        `parts` is 1, `dim` is still in one piece; then a plain `Shard(dim)`. `compat.is_shard` is True for placements that cut.
        The `dim` of such a placement may be another tensor dim.
    """
    # TODO(12)
    raise NotImplementedError


def joined_placements(
    own: Sequence[Placement], before: Sequence[Placement], sizes: Sequence[int], dim: int
) -> tuple[Placement, ...]:
    """Return the placements on the joined mesh of a sharded parameter that was a DTensor before. Data-parallel axes come first.

    Args:
        own: the placements that a plain parameter would get: `(Shard(dim),)`, or `(Replicate(), Shard(dim))` under hybrid
            sharding.
        before: the parameter's placements before FSDP, one for each of its axes. They stay as they are.
        sizes: the number of ranks along each of these axes.
        dim: the tensor dim that FSDP cuts.

    Returns:
        One placement for each axis of the joined mesh. Where `own` cuts, the placement has to say what `before` has cut
            already (`cut_after`). Where `own` replicates, the placement replicates, too.
    """
    # TODO(12)
    raise NotImplementedError


def orders_of_cuts(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> Mapping[int, list[int]]:
    """Return, for each tensor dim, the mesh dims that cut it, in the order of their cuts (Note [Right to left]).

    Args:
        mesh_shape: the number of ranks along each mesh dim.
        placements: one for each mesh dim. If `isinstance(placement, SHARDS)`, this mesh dim cuts tensor dim `placement.dim`,
            counted from the front. All other placements cut nothing.

    Returns:
        A dict from each tensor dim that is cut to a new list of all mesh dims that cut it. The caller may change the lists.

    A `StridedShard` asks for `placement.split_factor` pieces, and a plain `Shard` asks for 1. The tensor dim is in this number of
    pieces when the mesh dim cuts it, if we count only cuts by mesh dims on its right. So go from the last mesh dim to the first.
    Insert each into the order of its tensor dim: at the place where the product of the mesh sizes of the cuts before it is the
    number that it asks for (for 1: at the front). If there are several such places, because some mesh dims have size 1, take any.

        mesh (2, 2, 2), [Shard(0), StridedShard(0, split_factor=2), Shard(0)]         {0: [0, 2, 1]}
        mesh (2, 3, 2), [StridedShard(0, split_factor=2), Shard(1), Shard(0)]         {0: [2, 0], 1: [1]}

    Raises:
        UsageError: there is no such place, because the cuts so far never make this number of pieces.
            `impossible_factor(mesh_shape, mesh_dim, placement, pieces)` returns the error to raise. `pieces` are the numbers of
            pieces at all places, including 1.
    """
    # TODO(12)
    raise NotImplementedError


def nested_extent(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    orders: Mapping[int, Sequence[int]],
    coordinate: Sequence[int],
) -> LocalExtent:
    """Return the box that the rank at this coordinate keeps after all cuts. Integers only.

    Args:
        global_shape: of the whole tensor; sizes may be 0.
        mesh_shape: the number of ranks along each mesh dim.
        orders: the result of `orders_of_cuts`. Tensor dims that are not in it are not cut.
        coordinate: the rank's index along each mesh dim.

    Each cut divides the part of the tensor dim that earlier cuts have left to this rank. It divides this part among the ranks
    along its mesh dim, as `sharding.chunk_extent` does, and keeps the chunk for this rank's index along that mesh dim. The sizes
    need not divide evenly.

    Returns:
        Shape, and offset in the whole tensor, as tuples of integers. If nothing is left of a tensor dim, the offset in it is
        the size of this dim in `global_shape`, so that an empty part never has the offset of a real part.
    """
    # TODO(12)
    raise NotImplementedError


def shard_strided(
    tensor: Tensor, mesh_shape: Sequence[int], placements: Sequence[Placement], *, pad: bool = False
) -> list[Tensor]:
    """Cut a tensor into the local tensors of all coordinates, in row-major order of the mesh.

    Args:
        tensor: the whole, of any shape; it does not change.
        pad: append zeros in each sharded dim, so that all local tensors have the largest local shape, as collectives need.

    Returns:
        One tensor for each rank of the mesh: contiguous, in the dtype of `tensor`, in its own memory, which is no larger than
        necessary. If nothing is left for a rank, its tensor is empty; with `pad`, it is full of zeros. Autograd knows that they
        come from `tensor`.

    `extents_of(shape, mesh_shape, placements)` gives the box of each coordinate: a dict from coordinate to `LocalExtent`, in
    row-major order. `largest_shape(extents)` of this dict has, in each dim, the largest size of all boxes. `slices_of(extent)` is
    the index of the box in the whole tensor. `front_of(extent)` is the index of the same number of elements at the front of a
    shard.

    Raises:
        The errors of `local_extent_of`, and UnsupportedError for Partial, because a sum does not tell which rank had which part.
    """
    # TODO(12)
    raise NotImplementedError


def unshard_strided(
    shards: Sequence[Tensor],
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
) -> Tensor:
    """Put the whole tensor together from the local tensors of all coordinates; the inverse of `shard_strided`.

    Args:
        shards: one for each coordinate of the mesh, in row-major order, with or without padding. They do not change.

    Returns:
        A tensor of `global_shape`, in its own memory, with the shards' dtype and device. Autograd knows that it comes from the
        shards.

    `extents_of(global_shape, mesh_shape, placements)` gives the place of each shard in the whole: a dict from coordinate to
    `LocalExtent`, in row-major order. The elements of a shard are at its front: `front_of(extent)` is their index in the shard,
    `slices_of(extent)` in the whole. The rest of a shard is padding. Leave it out. Several coordinates may have the same extent
    (replicas). Take the shard of the first one, and ignore the others.

    Raises:
        UsageError: a shard is smaller than its extent, or larger than padding makes it, or there is not one shard for each
            coordinate. `check_shards(shards, mesh_shape, extents)` checks all of this. Also the errors of `shard_strided`.
    """
    # TODO(12)
    raise NotImplementedError
