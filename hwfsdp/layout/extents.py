"""Placements: the part of a tensor that a rank holds.

A DTensor lives on a mesh of ranks, with one placement per mesh dim: `Shard(d)` cuts tensor dim `d` among the ranks
along that mesh dim; `Replicate()` and `Partial()` leave it whole. Several mesh dims may cut the same tensor dim. Then
the pieces are cut again, each as `torch.chunk` does it (see `sharding`), and it matters which mesh dim cuts first.
FSDP comes after tensor parallelism: tp has cut the model already, and FSDP cuts the parts that it finds. But FSDP's mesh
dim is the outer one, and placements are read from left to right. So FSDP's placement is a `_StridedShard`, which says that
it cut last:

    8 rows, mesh (fsdp 2, tp 2)                ranks (0, 0)   (0, 1)   (1, 0)   (1, 1)
    [Shard(0), Shard(0)]                             0 1      2 3      4 5      6 7       fsdp cuts first
    [_StridedShard(0, split_factor=2), Shard(0)]     0 1      4 5      2 3      6 7       tp cuts first

The name comes from the ranks with the same fsdp index: together they hold stripes of the tensor, here 0 1 and 4 5. A single rank
never holds stripes. It holds one box of the tensor, a shape at an offset. This module computes the box, even if nothing
divides evenly: it finds the order of the cuts, and makes them.

    7 rows, mesh (fsdp 3, tp 2), tp first      ranks (0, 0)   (0, 1)   (1, 0)   (1, 1)   (2, 0)   (2, 1)
    after tp                                         0-3      4-6      0-3      4-6      0-3      4-6
    after fsdp                                       0 1      4        2 3      5        -        6

Left out: moving data between ranks. Functions that need values refuse tensors that are not summed yet (`Partial`).

Note [Right to left]
    `_StridedShard(d, split_factor=f)` says that dim d is in f pieces when its mesh dim cuts. It counts only the cuts of mesh
    dims on its right; mesh dims on its left have placements that say the same about themselves. So we go through the mesh
    dims from right to left, and keep for each tensor dim the order of the cuts so far. Each mesh dim is inserted where there
    are as many pieces as it asks for: after the cuts whose mesh sizes multiply to f. A plain `Shard` is the case f = 1: it
    cuts before everything on its right. A cut that is inserted later comes from a mesh dim further left. It moves the cuts
    behind it back and does not change their order, so nothing has to be revised.

    Take [Shard(0), _StridedShard(0, split_factor=2), Shard(0)] on the mesh (2, 2, 2). Mesh dim 2: order 2. Mesh dim 1
    asks for two pieces, and mesh dim 2 makes two: order 2, 1. Mesh dim 0 comes first: order 0, 2, 1.

    Another way seems possible: step through the tensor from left to right, and give a strided rank one stripe of each of the f
    pieces. This is right only if all pieces are equally long. In the 7 rows above, the stripes of rank 0 along fsdp would be 0 1
    and 4, and rank 2 would have only the stripe 6. Then tp would cut this stripe, and give row 6 to its rank 0.

Note [Stripes]
    `_StridedShard(d, split_factor=f)` says that dim d is in f pieces when its mesh dim cuts. Mostly, other mesh dims have made the
    pieces, and a rank holds one box. But no mesh dim has made them if the tensor was flattened. Flatten a tensor of
    shape (2, 8) whose columns four ranks share: each rank has two of 16 elements from the first row, and two from the second row. The
    placement is _StridedShard(0, split_factor=2), without a cut on its right. `stripes_of` lists the boxes of such a rank.
    Functions that need one box refuse such placements (`explicit_order_placements`, `local_extent_of`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, product
from operator import mul
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from hwfsdp.compat import StridedShard
from hwfsdp.errors import RuntimeRefusedError, UnsupportedError, UsageError
from hwfsdp.core.sharding import chunk_extent

SHARDS = (StridedShard, Shard)  # these cut; in some versions of torch, a strided shard is a `Shard`
_PLACEMENTS = (*SHARDS, Replicate, Partial)


class LocalExtent(NamedTuple):
    """The box that a rank holds: its `shape`, and the `offset` of its first element in the whole tensor."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def explicit_order_placements(
    mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> list[tuple[int, Placement]]:
    """Return the pairs (mesh dim, placement) in the order of the cuts. Every shard in the result is a plain `Shard`.

    This is the order of mesh dims, except that a strided shard comes after the cuts that must come before its own.

    Raises:
        UsageError: there is not one placement per mesh dim, a shard dim is negative, or no cuts make the split factor.
    """
    _check_placements(mesh_shape, placements)
    waiting = {dim: list(order) for dim, order in orders_of_cuts(mesh_shape, placements).items()}
    ordered: list[tuple[int, Placement]] = []
    for mesh_dim, placement in enumerate(placements):
        if not isinstance(placement, SHARDS):
            ordered.append((mesh_dim, placement))
            continue
        order = waiting[placement.dim]
        while order and order[0] <= mesh_dim:
            ordered.append((order.pop(0), Shard(placement.dim)))
    return ordered


def _check_placements(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> None:
    if len(placements) != len(mesh_shape):
        raise RuntimeRefusedError(
            "placements",
            expected=f"one for each dim of the mesh {tuple(mesh_shape)}",
            got=f"{len(placements)}: {list(placements)}",
            remedy="Write Replicate() for mesh dims that cut nothing.",
        )
    for placement in placements:
        if isinstance(placement, SHARDS) and placement.dim < 0:
            raise UsageError(
                f"the placement {placement}",
                expected="a tensor dim counted from the front",
                got=f"{placement.dim}",
                remedy=f"Add the tensor's number of dims to {placement.dim}.",
            )


def orders_of_cuts(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> Mapping[int, list[int]]:
    """Return, for each tensor dim that is cut, the mesh dims that cut it, in the order of their cuts. The lists are new.

        mesh (2, 2, 2), [Shard(0), StridedShard(0, split_factor=2), Shard(0)]         {0: [0, 2, 1]}
        mesh (2, 3, 2), [StridedShard(0, split_factor=2), Shard(1), Shard(0)]         {0: [2, 0], 1: [1]}

    A placement tells how many pieces the mesh dims on its right have made before it cuts; a plain `Shard` cuts before them.

    If mesh dims of one rank leave several orders, any of them is right.

    Raises:
        UsageError: no order of cuts makes that number of pieces.
    """
    cuts = _cuts_of(mesh_shape, placements)
    return {dim: [mesh_dim for mesh_dim, _ in order if mesh_dim is not None] for dim, order in cuts.items()}


def _cuts_of(
    mesh_shape: Sequence[int], placements: Sequence[Placement], striped: bool = False
) -> dict[int, list[tuple[int | None, int]]]:
    """Return the cuts of each tensor dim in their order: mesh dims and their sizes.

    With `striped`, the mesh dim is None for pieces that no mesh dim makes, as many as a strided shard still needs when all mesh dims
    on its right have cut (Note [Stripes]).
    """
    orders: defaultdict[int, list[tuple[int | None, int]]] = defaultdict(list)
    for mesh_dim, placement in reversed(list(enumerate(placements))):
        if not isinstance(placement, SHARDS):
            continue
        order = orders[placement.dim]
        factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
        pieces = list(accumulate((parts for _, parts in order), mul, initial=1))
        if striped and factor not in pieces and factor % pieces[-1] == 0:
            order.append((None, factor // pieces[-1]))
            pieces.append(factor)
        if factor not in pieces:
            raise RuntimeRefusedError(
                f"{placement} on dim {mesh_dim} of the mesh {tuple(mesh_shape)}",
                expected=f"a number of pieces that the cuts on its right make: one of {sorted(set(pieces))}",
                got=str(factor),
                remedy="Multiply the sizes of those mesh dims on its right that cut this tensor dim before it.",
            )
        order.insert(pieces.index(factor), (mesh_dim, mesh_shape[mesh_dim]))
    return orders


def local_extent_of(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> LocalExtent:
    """Return the extent that the rank at this mesh coordinate holds of a tensor of this shape. Integers only.

    Returns:
        Shape and offset. If the rank gets nothing of a tensor dim, the offset in this dim is the size of the dim, so that an empty
        part never has the offset of a real part.

    Raises:
        UsageError: the coordinate is outside the mesh, or the tensor does not have a shard dim. Also the errors of
            `explicit_order_placements`.
        UnsupportedError: a placement is not `Shard`, `StridedShard`, `Replicate` or `Partial`.
    """
    if len(coordinate) != len(mesh_shape) or not all(0 <= c < n for c, n in zip(coordinate, mesh_shape)):
        raise UsageError(
            "coordinate",
            expected=f"one inside the mesh {tuple(mesh_shape)}",
            got=f"{tuple(coordinate)}",
            remedy="Give each mesh dim an index from 0 to its size - 1.",
        )
    placements = _normalized(placements, len(global_shape))
    _check_placements(mesh_shape, placements)
    return nested_extent(global_shape, mesh_shape, orders_of_cuts(mesh_shape, placements), coordinate)


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


def _normalized(
    placements: Sequence[Placement], ndim: int, known: tuple[type[Placement], ...] = _PLACEMENTS
) -> list[Placement]:
    """Return the same placements for a tensor of `ndim` dims, with shard dims counted from the front."""
    normalized: list[Placement] = []
    for placement in placements:
        if not isinstance(placement, known):
            raise UnsupportedError(
                f"the placement {placement}",
                expected=f"one of {[kind.__name__ for kind in known]}",
                got=type(placement).__name__,
                remedy="Redistribute the tensor to those first.",
            )
        if isinstance(placement, SHARDS) and not -ndim <= placement.dim < ndim:
            raise UsageError(
                f"the placement {placement}",
                expected=f"a dim of a tensor that has {ndim}",
                got=f"{placement.dim}",
                remedy="Shard a dim that exists, or replicate.",
            )
        if isinstance(placement, StridedShard):
            placement = StridedShard(placement.dim % ndim, split_factor=placement.split_factor)
        elif isinstance(placement, Shard):
            placement = Shard(placement.dim % ndim)
        normalized.append(placement)
    return normalized


def held_extent(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> LocalExtent:
    """Return what `local_extent_of` returns. If the rank holds stripes, return their joined shape, and the offset of the first one."""
    if not are_striped(mesh_shape, placements):
        return local_extent_of(global_shape, mesh_shape, placements, coordinate)
    runs = _runs_of(global_shape, mesh_shape, placements, coordinate)
    offset = tuple(of_dim[0][0] if of_dim else size for of_dim, size in zip(runs, global_shape))
    return LocalExtent(tuple(sum(length for _, length in of_dim) for of_dim in runs), offset)


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], skip_offset: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, offset) of this rank's part (`local_extent_of`), or ((0,), ()) if this rank is not in the mesh.

    If the rank holds stripes, it is their joined shape, and the offset of the first one (Note [Stripes]). With
    `skip_offset`, the offset is () as well.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return LocalExtent((0,), ())
    extent = held_extent(global_shape, mesh.shape, placements, coordinate)
    return extent._replace(offset=()) if skip_offset else extent


def compute_global_tensor_info(
    tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """Return shape and stride of the whole tensor if every rank holds a local tensor with this shape and stride.

    The whole has the same memory order as the part. Undoing a cut multiplies the size of its dim, and the strides of all dims
    outside this dim. If a dim of size 1 shares a stride with another dim, it counts as inside the other dim.
    """
    placements = _normalized(placements, tensor.ndim)
    shape, stride = list(tensor.shape), list(tensor.stride())
    outwards = sorted(range(tensor.ndim), key=lambda d: (tensor.stride(d), tensor.shape[d] > 1, -d))
    for mesh_dim, placement in explicit_order_placements(mesh.shape, placements):
        if isinstance(placement, Shard):
            shape[placement.dim] *= mesh.size(mesh_dim)
            for outer in outwards[outwards.index(placement.dim) + 1 :]:
                stride[outer] *= mesh.size(mesh_dim)
    return shape, stride


def compute_local_stride(
    global_stride: Sequence[int],
    mesh: DeviceMesh | Sequence[int] | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    local_shape: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return the stride of this rank's part. The part is a dense tensor whose dims have the memory order of the whole.

        compute_local_stride(global_stride, local_shape)
        compute_local_stride(global_stride, mesh, placements)       # the arguments of torch before 2.13

    A size of 0 counts as 1, as in the stride that torch gives an empty tensor. With a mesh, the result is right for uneven parts,
    too: a stride is a product of sizes, so the strides of the whole contain all necessary sizes. Outside the mesh, a rank gets the
    stride of the mesh's first rank.

    Raises:
        UsageError: neither a local shape nor a mesh with placements is given, or both are given. Also the errors of
            `local_extent_of`.
    """
    if isinstance(mesh, DeviceMesh) and placements is not None and local_shape is None:
        local_shape = _local_shape_by_stride(global_stride, mesh, placements)
    elif local_shape is None and mesh is not None and not isinstance(mesh, DeviceMesh) and placements is None:
        local_shape = mesh
    elif local_shape is None or mesh is not None or placements is not None:
        raise UsageError(
            "compute_local_stride",
            expected="the local shape, or a mesh and placements",
            got="neither of the two, or both",
            remedy="Call it as (global_stride, local_shape) or (global_stride, mesh, placements).",
        )
    stride, step = [0] * len(local_shape), 1
    for dim in sorted(range(len(local_shape)), key=lambda d: (global_stride[d], -d)):
        stride[dim] = step
        step *= max(local_shape[dim], 1)
    return tuple(stride)


def _local_shape_by_stride(
    global_stride: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Return this rank's shape. Strides do not contain the size of the outermost dim, so it counts as 1.

    If several dims have the same stride, only one of them is longer than 1. This function assumes that it is a dim that is cut.
    """
    ndim = len(global_stride)
    placements = _normalized(placements, ndim)
    cut = {placement.dim for placement in placements if isinstance(placement, SHARDS)}
    inwards = sorted(range(ndim), key=lambda d: (-global_stride[d], d not in cut, d))
    shape = [1] * ndim
    for outer, dim in zip(inwards, inwards[1:]):
        shape[dim] = global_stride[outer] // max(global_stride[dim], 1)
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    return local_extent_of(shape, mesh.shape, placements, coordinate).shape


def shard_of(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Return this rank's part of a whole tensor, as a view; stripes are copied. Outside the mesh, return an empty tensor [0]."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return tensor.new_empty(0)
    if are_striped(mesh.shape, placements):
        part = tensor.new_empty(held_extent(tensor.shape, mesh.shape, placements, coordinate).shape)
        for shape, offset, at in stripes_of(tensor.shape, mesh.shape, placements, coordinate):
            part[slices_of(LocalExtent(shape, at))] = tensor[slices_of(LocalExtent(shape, offset))]
        return part
    return tensor[slices_of(local_extent_of(tensor.shape, mesh.shape, placements, coordinate))]


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
    _check_shards(shards, mesh_shape, extents)
    firsts: dict[LocalExtent, Tensor] = {}
    for extent, shard in zip(extents.values(), shards):
        firsts.setdefault(extent, shard)
    whole = shards[0].new_empty(tuple(global_shape))
    for extent, shard in firsts.items():
        whole[slices_of(extent)] = shard[front_of(extent)]
    return whole


def _check_shards(
    shards: Sequence[Tensor], mesh_shape: Sequence[int], extents: Mapping[tuple[int, ...], LocalExtent]
) -> None:
    """Raise UsageError if the shards do not match the extents in number and shape. Of replicas, only the first one is checked."""
    if len(shards) != len(extents):
        raise UsageError(
            "shards",
            expected=f"{len(extents)}, one for each coordinate of the mesh {tuple(mesh_shape)}",
            got=f"{len(shards)}",
            remedy="Give the shards of all ranks in row-major order, empty ones and replicas included.",
        )
    largest, seen = largest_shape(extents), set()
    for (coordinate, extent), shard in zip(extents.items(), shards):
        if extent in seen:
            continue
        seen.add(extent)
        bounds = zip(extent.shape, largest)
        if shard.ndim != len(extent.shape) or not all(a <= n <= b for n, (a, b) in zip(shard.shape, bounds)):
            raise UsageError(
                f"the shard at {coordinate}",
                expected=f"shape {extent.shape}, padded to {largest} at most",
                got=f"shape {tuple(shard.shape)}",
                remedy="Pass the global shape, mesh and placements with which the tensor was cut.",
            )


def extents_of(
    global_shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> dict[tuple[int, ...], LocalExtent]:
    """Return the extent of every coordinate, in row-major order. Raises UnsupportedError for `Partial` placements."""
    placements = _normalized(placements, len(global_shape), known=(*SHARDS, Replicate))
    coordinates = product(*map(range, mesh_shape))
    return {c: local_extent_of(global_shape, mesh_shape, placements, c) for c in coordinates}


def largest_shape(extents: Mapping[tuple[int, ...], LocalExtent]) -> tuple[int, ...]:
    """Return the largest local shape. It is the first rank's shape, because no chunk of a cut is longer than the first chunk."""
    return next(iter(extents.values())).shape


def slices_of(extent: LocalExtent) -> tuple[slice, ...]:
    """Return the index of a box in the whole tensor: `whole[slices_of(extent)]` is a view of the box."""
    return tuple(slice(start, start + n) for start, n in zip(extent.offset, extent.shape))


def front_of(extent: LocalExtent) -> tuple[slice, ...]:
    """Return the index of a shard without its padding: `padded[front_of(extent)]` is a view of everything except padding."""
    return tuple(slice(n) for n in extent.shape)


# --- Stripes -----------------------------------------------------------------------------------------------

Runs = list[list[tuple[int, int]]]  # of each dim: start and length in the whole, in the order of the part


class Stripe(NamedTuple):
    """A box that a rank holds: its shape, its offset in the whole tensor, and its offset `at` in the rank's part."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    at: tuple[int, ...]


def are_striped(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> bool:
    """True if a rank may hold several boxes of a tensor: no cuts make the pieces of a strided shard (Note [Stripes])."""
    if len(placements) != len(mesh_shape) or not any(isinstance(each, StridedShard) for each in placements):
        return False
    cuts = _cuts_of(mesh_shape, placements, striped=True)
    return any(mesh_dim is None for order in cuts.values() for mesh_dim, _ in order)


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


def _runs_of(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> Runs:
    runs = [[(0, size)] for size in global_shape]
    cuts = _cuts_of(mesh_shape, _normalized(placements, len(global_shape)), striped=True)
    for dim, order in cuts.items():
        for mesh_dim, parts in order:
            indices = range(parts) if mesh_dim is None else [coordinate[mesh_dim]]
            chunks = [(start, chunk_extent(size, parts, i)) for start, size in runs[dim] for i in indices]
            runs[dim] = [(start + begin, length) for start, (begin, length) in chunks if length]
    return runs
