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

# Names of the package that may help:
#
# hwfsdp.compat
#     function   strided_shard(dim: int, split_factor: int) -> Placement
#                  Make a `Shard(dim)` of a tensor that later axes of the mesh have already cut into
#                  `split_factor` parts along `dim`.
#     function   is_shard(placement: Placement) -> bool
#                  True if the placement cuts the tensor. `_StridedShard` does, although only some versions of
#                  torch make it a `Shard`.
# hwfsdp.core.sharding
#     class      Extent(start: int, length: int)
#                  A run of consecutive rows: `start`, `start + 1`, … , `start + length - 1`.
#     function   chunk_extent(n: int, world_size: int, rank: int) -> Extent
#                  Return the rows of `rank` if `n` rows are cut for `world_size` ranks as `torch.chunk` cuts
#                  them.
# hwfsdp.layout.extents
#     constant   SHARDS = (StridedShard, Shard)
#     class      LocalExtent(shape: tuple[int, ...], offset: tuple[int, ...])
#                  The box that a rank holds: its `shape`, and the `offset` of its first element in the whole
#                  tensor.
#     function   impossible_factor(mesh_shape: Sequence[int], mesh_dim: int, placement: Placement,
#                    pieces: Sequence[int]) -> UsageError
#                  Make the error for a placement on `mesh_dim`. `pieces`: the numbers of pieces that cuts on
#                  its right do make, including 1.
#     function   extents_of(global_shape: Sequence[int], mesh_shape: Sequence[int],
#                    placements: Sequence[Placement]) -> dict[tuple[int, ...], LocalExtent]
#                  Return the extent of every coordinate, in row-major order. Raises UnsupportedError for
#                  `Partial` placements.
#     function   largest_shape(extents: Mapping[tuple[int, ...], LocalExtent]) -> tuple[int, ...]
#                  Return the largest local shape. It is the first rank's shape, because no chunk of a cut is
#                  longer than the first chunk.
#     function   slices_of(extent: LocalExtent) -> tuple[slice, ...]
#                  Return the index of a box in the whole tensor: `whole[slices_of(extent)]` is a view of the
#                  box.
#     function   front_of(extent: LocalExtent) -> tuple[slice, ...]
#                  Return the index of a shard without its padding: `padded[front_of(extent)]` is a view of
#                  everything except padding.
#     function   check_shards(shards: Sequence[Tensor], mesh_shape: Sequence[int], extents: Mapping[tuple[int,
#                    ...], LocalExtent]) -> None
#                  Raise UsageError if the shards do not match the extents in number and shape. Of replicas,
#                  only the first one is checked.


def cut_after(placements: Iterable[tuple[Placement, int]], dim: int) -> Placement:
    """Return the placement of an axis that cuts `dim` after the axes on its right have cut it.

    `placements`: of the axes on the right, each with its number of ranks. The result says into how many parts these axes have cut
    `dim`. If `dim` is still in one piece, the result is a plain `Shard`.
    """
    parts = prod(size for p, size in placements if compat.is_shard(p) and getattr(p, "dim", None) == dim)
    return compat.strided_shard(dim, parts) if parts > 1 else Shard(dim)


def joined_placements(
    own: Sequence[Placement], before: Sequence[Placement], sizes: Sequence[int], dim: int
) -> tuple[Placement, ...]:
    """Return the placements of a sharded parameter that was a DTensor before: first FSDP's axes, then its own.

    `own`: what a plain parameter would get. `before`, `sizes`: placements and sizes of the DTensor's axes, which stay.
    """
    cut = cut_after(zip(before, sizes, strict=True), dim)
    return (*(cut if compat.is_shard(p) else p for p in own), *before)


def orders_of_cuts(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> Mapping[int, list[int]]:
    """Return, for each tensor dim that is cut, the mesh dims that cut it, in the order of their cuts. The lists are new.

        mesh (2, 2, 2), [Shard(0), StridedShard(0, split_factor=2), Shard(0)]         {0: [0, 2, 1]}
        mesh (2, 3, 2), [StridedShard(0, split_factor=2), Shard(1), Shard(0)]         {0: [2, 0], 1: [1]}

    A placement tells how many pieces the mesh dims on its right have made before it cuts; a plain `Shard` cuts before them.

    If mesh dims of one rank leave several orders, any of them is right.

    Raises:
        UsageError: no order of cuts makes that number of pieces.
    """
    orders: defaultdict[int, list[int]] = defaultdict(list)
    for mesh_dim, placement in reversed(list(enumerate(placements))):
        if not isinstance(placement, SHARDS):
            continue
        order = orders[placement.dim]
        factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
        pieces = list(accumulate((mesh_shape[i] for i in order), mul, initial=1))
        if factor not in pieces:
            raise impossible_factor(mesh_shape, mesh_dim, placement, pieces)
        order.insert(pieces.index(factor), mesh_dim)
    return orders


def nested_extent(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    orders: Mapping[int, Sequence[int]],
    coordinate: Sequence[int],
) -> LocalExtent:
    """Return the box that the rank at this coordinate keeps after all cuts. Integers only. `orders`: see `orders_of_cuts`.

    A cut leaves a rank one chunk of what it had. If nothing is left of a dim, the offset is the size of that dim in the whole.
    """
    shape, offset = list(global_shape), [0] * len(global_shape)
    for dim, order in orders.items():
        for mesh_dim in order:
            start, shape[dim] = chunk_extent(shape[dim], mesh_shape[mesh_dim], coordinate[mesh_dim])
            offset[dim] = offset[dim] + start if shape[dim] else global_shape[dim]
    return LocalExtent(tuple(shape), tuple(offset))


def shard_strided(
    tensor: Tensor, mesh_shape: Sequence[int], placements: Sequence[Placement], *, pad: bool = False
) -> list[Tensor]:
    """Cut a tensor into the local tensors of all coordinates, in row-major order of the mesh. Autograd knows where they come from.

    Args:
        pad: append zeros in each sharded dim, so that all have the largest local shape, as collectives need.

    Returns:
        Contiguous tensors, each in its own memory, no larger than necessary; empty or all zeros if a rank has nothing.

    Raises:
        UnsupportedError: a placement is Partial: a sum does not tell which rank had which part. Also the errors of `extents_of`.
    """
    extents = extents_of(tensor.shape, mesh_shape, placements)
    shards = []
    for extent in extents.values():
        shard = tensor.new_zeros(largest_shape(extents) if pad else extent.shape)
        shard[front_of(extent)] = tensor[slices_of(extent)]
        shards.append(shard)
    return shards


def unshard_strided(
    shards: Sequence[Tensor],
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
) -> Tensor:
    """Put the whole tensor together: the inverse of `shard_strided`. Autograd knows where it comes from.

    Args:
        shards: of all coordinates, in row-major order, with or without padding. Of replicas, the first one counts.

    Raises:
        UsageError: a shard has no possible shape for its place, or there is not one shard for each coordinate.
    """
    extents = extents_of(global_shape, mesh_shape, placements)
    check_shards(shards, mesh_shape, extents)
    firsts: dict[LocalExtent, Tensor] = {}
    for extent, shard in zip(extents.values(), shards):
        firsts.setdefault(extent, shard)
    whole = shards[0].new_empty(tuple(global_shape))
    for extent, shard in firsts.items():
        whole[slices_of(extent)] = shard[front_of(extent)]
    return whole
