"""12 Strided shards: which part of a tensor a rank holds after several axes of a mesh have cut it.

Shapes, meshes and boxes are integers. Helpers of your own are welcome, and so is your arithmetic of exercise 01. A placement says
how one axis of the mesh cuts the tensor. `is_shard(placement)` is true for the first two; `strided_shard(dim, f)` makes the second:

    Shard(dim)                                  it cuts `dim` before the axes on its right do
    StridedShard(dim, split_factor=f)           it cuts `dim` when the axes on its right have made `f` pieces of it
    Replicate(), Partial()                      it does not cut
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# @12
from itertools import product
from math import prod

# @end
from typing import NamedTuple

from torch import Tensor

# @12
from torch.distributed.tensor import Placement, Shard

# @00
# | from torch.distributed.tensor import Placement
# @end

from hwfsdp.compat import StridedShard, is_shard, strided_shard


class Box(NamedTuple):
    """The part of a tensor that a rank holds: its `shape`, and the index of its first element in the whole, `offset`."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def cut_after(axes: Sequence[tuple[Placement, int]], dim: int) -> Placement:
    """Return the placement of an axis that cuts `dim` after the axes on its right have made their cuts.

    axes: the placement and the size of each axis on the right. If `dim` is still in one piece, the result is a plain `Shard`.
    """
    # @12
    pieces = prod(size for placement, size in axes if is_shard(placement) and placement.dim == dim)
    return strided_shard(dim, pieces) if pieces > 1 else Shard(dim)
    # @00
    # |     raise NotImplementedError("TODO(12): cut_after")
    # @end


def joined_placements(
    own: Sequence[Placement], before: Sequence[Placement], sizes: Sequence[int], dim: int
) -> tuple[Placement, ...]:
    """Return the placements of a DTensor that FSDP has cut once more, along `dim`: one for each axis of the joined mesh.

    own: what FSDP gives a plain parameter on its own axes: `Shard(dim)`, or `Replicate(), Shard(dim)` for hybrid sharding.
    before, sizes: placements and sizes of the axes that the DTensor had already. FSDP's axes are the outer ones.
    """
    # @12
    cut = cut_after(list(zip(before, sizes, strict=True)), dim)
    return (*(cut if is_shard(placement) else placement for placement in own), *before)
    # @00
    # |     raise NotImplementedError("TODO(12): joined_placements")
    # @end


def orders_of_cuts(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> dict[int, list[int]]:
    """Return, for each tensor dim that is cut, the axes that cut it, by their position in the mesh, first cut first.

        mesh (2, 2, 2), [Shard(0), StridedShard(0, split_factor=2), Shard(0)]         {0: [0, 2, 1]}
        mesh (2, 3, 2), [StridedShard(0, split_factor=2), Shard(1), Shard(0)]         {0: [2, 0], 1: [1]}

    An axis of one rank may stand anywhere in its list.

    Raises:
        ValueError: no order of cuts gives a strided shard the number of pieces that it names.
    """
    # @12
    orders: dict[int, list[int]] = {}
    for axis, placement in reversed(list(enumerate(placements))):
        if not is_shard(placement):
            continue
        order = orders.setdefault(placement.dim, [])
        wanted = placement.split_factor if isinstance(placement, StridedShard) else 1
        pieces = [prod(mesh_shape[earlier] for earlier in order[:place]) for place in range(len(order) + 1)]
        if wanted not in pieces:
            raise ValueError(f"axis {axis}: {placement}, but its dim can be in {sorted(set(pieces))} pieces")
        order.insert(pieces.index(wanted), axis)
    return orders
    # @00
    # |     raise NotImplementedError("TODO(12): orders_of_cuts")
    # @end


def box_of(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    orders: Mapping[int, Sequence[int]],
    coordinate: Sequence[int],
) -> Box:
    """Return the box of the rank at this coordinate of the mesh. orders: what `orders_of_cuts` returns.

    Each cut leaves the rank one chunk of what it had, as `torch.chunk` cuts. If nothing is left of a dim, the offset is the
    size of this dim in the whole tensor.
    """
    # @12
    lengths, offset = list(shape), [0] * len(shape)
    for dim, order in orders.items():
        for axis in order:
            chunk = -(-lengths[dim] // mesh_shape[axis])
            start = min(coordinate[axis] * chunk, lengths[dim])
            lengths[dim] = min(chunk, lengths[dim] - start)
            offset[dim] = offset[dim] + start if lengths[dim] else shape[dim]
    return Box(tuple(lengths), tuple(offset))
    # @00
    # |     raise NotImplementedError("TODO(12): box_of")
    # @end


def shard_strided(
    tensor: Tensor, mesh_shape: Sequence[int], placements: Sequence[Placement], *, pad: bool = False
) -> list[Tensor]:
    """Cut a tensor. Return the shard of each rank, in the order of coordinates: the last axis changes fastest.

    A shard is contiguous and has memory of its own, for its own elements and no more. Gradients flow back to `tensor`.

    pad: append zeros in each dim, so that all shards have the shape of the largest one, as collectives need.
    """
    # @12
    boxes, shards = boxes_of(tensor.shape, mesh_shape, placements), []
    for box in boxes:
        shard = tensor.new_zeros(boxes[0].shape if pad else box.shape)  # no chunk is longer than the first
        shard[inside(box.shape)] = tensor[inside(box.shape, box.offset)]
        shards.append(shard)
    return shards
    # @00
    # |     raise NotImplementedError("TODO(12): shard_strided")
    # @end


def unshard_strided(
    shards: Sequence[Tensor], shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> Tensor:
    """Put the whole tensor of this shape together: the inverse of `shard_strided`. Gradients flow back to the shards.

    shards: of all ranks, in the order of coordinates, with or without padding. If several ranks hold the same box, the first counts.

    Raises:
        ValueError: there is not one shard for each rank, or a shard has neither the shape of its box nor the padded shape.
    """
    # @12
    boxes = boxes_of(shape, mesh_shape, placements)
    if len(shards) != len(boxes):
        raise ValueError(f"{len(shards)} shards for {len(boxes)} ranks")
    whole, done = shards[0].new_empty(tuple(shape)), set()
    for rank, (box, shard) in enumerate(zip(boxes, shards, strict=True)):
        if tuple(shard.shape) not in (box.shape, boxes[0].shape):
            raise ValueError(f"the shard of rank {rank} has shape {tuple(shard.shape)}, its box {box.shape}")
        if box not in done:
            done.add(box)
            whole[inside(box.shape, box.offset)] = shard[inside(box.shape)]
    return whole
    # @00
    # |     raise NotImplementedError("TODO(12): unshard_strided")
    # @end


# @12
def boxes_of(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[Box]:
    """Return the boxes of all ranks, in the order of coordinates."""
    orders = orders_of_cuts(mesh_shape, placements)
    return [box_of(shape, mesh_shape, orders, coordinate) for coordinate in product(*map(range, mesh_shape))]


def inside(shape: Sequence[int], offset: Sequence[int] = ()) -> tuple[slice, ...]:
    """Return the index of a box. Without an offset, the box is at the front."""
    return tuple(slice(start, start + n) for n, start in zip(shape, offset or [0] * len(shape), strict=True))


# @end
