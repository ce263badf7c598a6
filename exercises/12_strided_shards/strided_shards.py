"""12 Strided shards: which part of a tensor a rank holds after several axes of a mesh have cut it.

Shapes, meshes and boxes are integers. Helpers of your own are welcome, and so is your arithmetic of exercise 01. A placement says
how one axis of the mesh cuts the tensor. `is_shard(placement)` is true for the first two; `strided_shard(dim, f)` makes the second:

    Shard(dim)                                  it cuts `dim` before the axes on its right do
    StridedShard(dim, split_factor=f)           it cuts `dim` when the axes on its right have made `f` pieces of it
    Replicate(), Partial()                      it does not cut
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing import NamedTuple

from torch import Tensor

from torch.distributed.tensor import Placement

from hwfsdp.compat import StridedShard, is_shard, strided_shard


class Box(NamedTuple):
    """The part of a tensor that a rank holds: its `shape`, and the index of its first element in the whole, `offset`."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def cut_after(axes: Sequence[tuple[Placement, int]], dim: int) -> Placement:
    """Return the placement of an axis that cuts `dim` after the axes on its right have made their cuts.

    axes: the placement and the size of each axis on the right. If `dim` is still in one piece, the result is a plain `Shard`.
    """
    raise NotImplementedError("TODO(12): cut_after")


def joined_placements(
    own: Sequence[Placement], before: Sequence[Placement], sizes: Sequence[int], dim: int
) -> tuple[Placement, ...]:
    """Return the placements of a DTensor that FSDP has cut once more, along `dim`: one for each axis of the joined mesh.

    own: what FSDP gives a plain parameter on its own axes: `Shard(dim)`, or `Replicate(), Shard(dim)` for hybrid sharding.
    before, sizes: placements and sizes of the axes that the DTensor had already. FSDP's axes are the outer ones.
    """
    raise NotImplementedError("TODO(12): joined_placements")


def orders_of_cuts(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> dict[int, list[int]]:
    """Return, for each tensor dim that is cut, the axes that cut it, by their position in the mesh, first cut first.

        mesh (2, 2, 2), [Shard(0), StridedShard(0, split_factor=2), Shard(0)]         {0: [0, 2, 1]}
        mesh (2, 3, 2), [StridedShard(0, split_factor=2), Shard(1), Shard(0)]         {0: [2, 0], 1: [1]}

    An axis of one rank may stand anywhere in its list.

    Raises:
        ValueError: no order of cuts gives a strided shard the number of pieces that it names.
    """
    raise NotImplementedError("TODO(12): orders_of_cuts")


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
    raise NotImplementedError("TODO(12): box_of")


def shard_strided(
    tensor: Tensor, mesh_shape: Sequence[int], placements: Sequence[Placement], *, pad: bool = False
) -> list[Tensor]:
    """Cut a tensor. Return the shard of each rank, in the order of coordinates: the last axis changes fastest.

    A shard is contiguous and has memory of its own, for its own elements and no more. Gradients flow back to `tensor`.

    pad: append zeros in each dim, so that all shards have the shape of the largest one, as collectives need.
    """
    raise NotImplementedError("TODO(12): shard_strided")


def unshard_strided(
    shards: Sequence[Tensor], shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> Tensor:
    """Put the whole tensor of this shape together: the inverse of `shard_strided`. Gradients flow back to the shards.

    shards: of all ranks, in the order of coordinates, with or without padding. If several ranks hold the same box, the first counts.

    Raises:
        ValueError: there is not one shard for each rank, or a shard has neither the shape of its box nor the padded shape.
    """
    raise NotImplementedError("TODO(12): unshard_strided")
