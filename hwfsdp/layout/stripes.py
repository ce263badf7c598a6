"""Stripes: several boxes of a tensor that one rank holds.

Note [Stripes]
    A rank does hold stripes if no mesh dims make the pieces. Flatten a tensor of shape (2, 8) whose columns four ranks share: each
    rank has two of 16 elements from the first row, and two from the second row. The placement is _StridedShard(0, split_factor=2),
    without a cut on its right. `stripes_of` lists the boxes of such a rank, and `shard_of` joins them. Functions that need one box
    refuse such placements (`explicit_order_placements`, `local_extent_of`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul
from typing import NamedTuple

from torch.distributed.tensor import Placement

from hwfsdp.compat import StridedShard
from hwfsdp.core.sharding import chunk_extent
from hwfsdp.layout.extents import SHARDS, LocalExtent, _normalized, impossible_factor, local_extent_of


class Stripe(NamedTuple):
    """A box of the whole tensor that a rank holds, and the offset of the box in the rank's part."""

    whole: LocalExtent
    offset: tuple[int, ...]


def are_striped(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> bool:
    """True if a rank may hold several boxes of a tensor: no cuts make the pieces of a strided shard (Note [Stripes])."""
    if not any(isinstance(placement, StridedShard) for placement in placements):
        return False
    orders = _orders_with_pieces(mesh_shape, placements)
    return any(mesh_dim is None for order in orders.values() for mesh_dim, _ in order)


def stripes_of(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> list[Stripe]:
    """Return the boxes that the rank at this mesh coordinate holds, in the order of its part. Integers only.

    Raises:
        UsageError: neither cuts nor stripes make the split factor.
    """
    runs = _runs_of(global_shape, mesh_shape, placements, coordinate)
    stripes = []
    placed = [list(zip(dim_runs, accumulate((n for _, n in dim_runs), initial=0))) for dim_runs in runs]
    for box in product(*placed):
        shape, offset = tuple(length for (_, length), _ in box), tuple(start for (start, _), _ in box)
        stripes.append(Stripe(LocalExtent(shape, offset), tuple(at for _, at in box)))
    return stripes


def held_extent(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> LocalExtent:
    """Return what `local_extent_of` returns; for a rank that holds stripes, the shape of its part, and the offset of the first one."""
    if not are_striped(mesh_shape, placements):
        return local_extent_of(global_shape, mesh_shape, placements, coordinate)
    runs = _runs_of(global_shape, mesh_shape, placements, coordinate)
    offset = tuple(of_dim[0][0] if of_dim else size for of_dim, size in zip(runs, global_shape))
    return LocalExtent(tuple(sum(length for _, length in of_dim) for of_dim in runs), offset)


def _runs_of(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> list[list[tuple[int, int]]]:
    """Return the runs of indices that the rank holds of each dim: start and length in the whole, in the order of its part."""
    runs = [[(0, size)] for size in global_shape]
    for dim, order in _orders_with_pieces(mesh_shape, _normalized(placements, len(global_shape))).items():
        for mesh_dim, parts in order:
            indices = range(parts) if mesh_dim is None else [coordinate[mesh_dim]]
            chunks = [(start, chunk_extent(size, parts, i)) for start, size in runs[dim] for i in indices]
            runs[dim] = [(start + begin, length) for start, (begin, length) in chunks if length]
    return runs


def _orders_with_pieces(
    mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> dict[int, list[tuple[int | None, int]]]:
    """Return the cuts of each tensor dim in their order, as `orders_of_cuts` does: mesh dims and their sizes.

    The mesh dim is None for pieces that no mesh dim makes, as many as a strided shard still needs when all on its right have cut.
    """
    orders: defaultdict[int, list[tuple[int | None, int]]] = defaultdict(list)
    for mesh_dim, placement in reversed(list(enumerate(placements))):
        if not isinstance(placement, SHARDS):
            continue
        order, factor = orders[placement.dim], int(getattr(placement, "split_factor", 1))
        pieces = list(accumulate((parts for _, parts in order), mul, initial=1))
        if factor not in pieces and factor % pieces[-1] == 0:
            order.append((None, factor // pieces[-1]))
            pieces.append(factor)
        if factor not in pieces:
            raise impossible_factor(mesh_shape, mesh_dim, placement, pieces)
        order.insert(pieces.index(factor), (mesh_dim, mesh_shape[mesh_dim]))
    return orders
