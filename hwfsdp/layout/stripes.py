"""Stripes: several boxes of a tensor that one rank holds. Integers only.

Note [Stripes]
    `_StridedShard(d, split_factor=f)` says that dim d is in f pieces when its mesh dim cuts. Mostly, other mesh dims have made the
    pieces, and a rank holds one box (see `extents`). But no mesh dim has made them if the tensor was flattened. Flatten a tensor of
    shape (2, 8) whose columns four ranks share: each rank has two of 16 elements from the first row, and two from the second row. The
    placement is _StridedShard(0, split_factor=2), without a cut on its right. `stripes_of` lists the boxes of such a rank.
    Functions that need one box refuse such placements (`explicit_order_placements`, `local_extent_of`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul
from typing import NamedTuple

from torch.distributed.tensor import Placement, Shard

from hwfsdp.compat import StridedShard
from hwfsdp.core.sharding import chunk_extent

Runs = list[list[tuple[int, int]]]  # of each dim: start and length in the whole, in the order of the part


class Stripe(NamedTuple):
    """A box that a rank holds: its shape, its offset in the whole tensor, and its offset `at` in the rank's part."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    at: tuple[int, ...]


def are_striped(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> bool:
    """True if a rank may hold several boxes of a tensor: no cuts make the pieces of a strided shard (Note [Stripes])."""
    if not any(isinstance(placement, StridedShard) for placement in placements):
        return False
    orders = _orders_with_pieces(mesh_shape, placements, 0) or {}
    return any(mesh_dim is None for order in orders.values() for mesh_dim, _ in order)


def stripes_of(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> list[Stripe]:
    """Return the boxes that the rank at this mesh coordinate holds, in the order of its part. The placements are striped."""
    runs = _runs_of(global_shape, mesh_shape, placements, coordinate)
    placed = [list(zip(dim_runs, accumulate((n for _, n in dim_runs), initial=0))) for dim_runs in runs]
    stripes = []
    for box in product(*placed):
        shape, offset = tuple(length for (_, length), _ in box), tuple(start for (start, _), _ in box)
        stripes.append(Stripe(shape, offset, tuple(at for _, at in box)))
    return stripes


def joined_extent(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of all stripes of a rank together, and the offset of the first one. The placements are striped."""
    runs = _runs_of(global_shape, mesh_shape, placements, coordinate)
    offset = tuple(of_dim[0][0] if of_dim else size for of_dim, size in zip(runs, global_shape))
    return tuple(sum(length for _, length in of_dim) for of_dim in runs), offset


def _runs_of(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> Runs:
    orders = _orders_with_pieces(mesh_shape, placements, len(global_shape))
    assert orders is not None
    runs = [[(0, size)] for size in global_shape]
    for dim, order in orders.items():
        for mesh_dim, parts in order:
            indices = range(parts) if mesh_dim is None else [coordinate[mesh_dim]]
            chunks = [(start, chunk_extent(size, parts, i)) for start, size in runs[dim] for i in indices]
            runs[dim] = [(start + begin, length) for start, (begin, length) in chunks if length]
    return runs


def _orders_with_pieces(
    mesh_shape: Sequence[int], placements: Sequence[Placement], ndim: int
) -> dict[int, list[tuple[int | None, int]]] | None:
    """Return the cuts of each tensor dim in their order, as `orders_of_cuts` does: mesh dims and their sizes; None if there is no order.

    The mesh dim is None for pieces that no mesh dim makes, as many as a strided shard still needs when all on its right have cut.
    Dims may be counted from the end of `ndim` dims.
    """
    orders: defaultdict[int, list[tuple[int | None, int]]] = defaultdict(list)
    for mesh_dim, placement in reversed(list(enumerate(placements))):
        if not isinstance(placement, StridedShard | Shard):
            continue
        order = orders[placement.dim + ndim if placement.dim < 0 else placement.dim]
        factor = int(getattr(placement, "split_factor", 1))
        pieces = list(accumulate((parts for _, parts in order), mul, initial=1))
        if factor not in pieces and factor % pieces[-1] == 0:
            order.append((None, factor // pieces[-1]))
            pieces.append(factor)
        if factor not in pieces or mesh_dim >= len(mesh_shape):
            return None
        order.insert(pieces.index(factor), (mesh_dim, mesh_shape[mesh_dim]))
    return orders
