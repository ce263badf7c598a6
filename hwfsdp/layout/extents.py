"""Placements: which part of a tensor a rank holds.

A DTensor lives on a mesh of ranks, with one placement per mesh dim: `Shard(d)` cuts tensor dim `d` among the ranks
along that mesh dim, `Replicate()` and `Partial()` leave it whole. Several mesh dims may cut the same tensor dim. Then
the pieces are cut again, each as `torch.chunk` does it (see `sharding`), and all that matters is who cuts first.
FSDP comes after tensor parallelism: the model was cut by tp already when FSDP cut what it found. Its mesh dim is the
outer one nevertheless, and `_StridedShard` is how placements, which are read from left to right, say so:

    8 rows, mesh (fsdp 2, tp 2)                ranks (0, 0)   (0, 1)   (1, 0)   (1, 1)
    [Shard(0), Shard(0)]                             0 1      2 3      4 5      6 7       fsdp cuts first
    [_StridedShard(0, split_factor=2), Shard(0)]     0 1      4 5      2 3      6 7       tp cuts first

Hence the name: the ranks of one fsdp index hold stripes of the tensor, here 0 1 and 4 5. A single rank never does.
It holds one box of the tensor, a shape at an offset, and that is what this module computes, also where nothing divides
evenly: it finds the order of the cuts, and makes them.

    7 rows, mesh (fsdp 3, tp 2), tp first      ranks (0, 0)   (0, 1)   (1, 0)   (1, 1)   (2, 0)   (2, 1)
    after tp                                         0-3      4-6      0-3      4-6      0-3      4-6
    after fsdp                                       0 1      4        2 3      5        -        6

Left out: moving data between ranks, and gradients still to be summed (`Partial`) where values are asked for.

Note [Right to left]
    `_StridedShard(d, split_factor=f)` says how many pieces of dim d there are when its mesh dim cuts: f. It counts
    only the cuts of mesh dims on its right, since those on its left speak for themselves. So mesh dims are looked at
    from right to left, keeping per tensor dim the order of the cuts so far, and each is inserted where as many pieces
    exist as it asks for: after the cuts whose mesh sizes multiply to f. A plain `Shard` is the case f = 1; it cuts
    before everything on its right. Cuts inserted later, further left, shift those behind them without changing
    their order, so nothing has to be revised.

    Take [Shard(0), _StridedShard(0, split_factor=2), Shard(0)] on the mesh (2, 2, 2). Mesh dim 2: order 2. Mesh dim 1
    wants two pieces, which is what mesh dim 2 makes: order 2, 1. Mesh dim 0 comes first: order 0, 2, 1.

    Stepping through a tensor from left to right, and giving a strided rank one stripe of each of the f pieces that are
    still to come, ends in the same place only if all of them are equally long. In the 7 rows above, the stripes of
    rank 0 along fsdp would be 0 1 and 4, rank 2's only 6, and tp would then cut 6 for its rank 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Sized
from itertools import accumulate, product
from operator import mul
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from hwfsdp.compat import StridedShard
from hwfsdp.errors import UnsupportedError, UsageError
from hwfsdp.core.sharding import chunk_extent

SHARDS = (StridedShard, Shard)  # what cuts; whether a strided shard is a `Shard` depends on torch's version
_PLACEMENTS = (*SHARDS, Replicate, Partial)


class LocalExtent(NamedTuple):
    """The box that a rank holds: `shape` of it, and `offset` of its first element in the whole tensor."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def explicit_order_placements(
    mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> list[tuple[int, Placement]]:
    """(mesh dim, placement) in the order in which the cuts have to be made; every shard in it is plain.

    Mesh dims stay in order except that a strided shard waits for the cuts that come before its own.

    Raises:
        UsageError: not one placement per mesh dim, a negative shard dim, or a split factor that no cuts make.
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
        raise UsageError(
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


def impossible_factor(
    mesh_shape: Sequence[int], mesh_dim: int, placement: Placement, pieces: Sequence[int]
) -> UsageError:
    """The error for a split factor that no cuts make.

    Args:
        mesh_dim: the placement's. pieces: the numbers of pieces that cuts on its right do make, 1 among them.
    """
    return UsageError(
        f"{placement} on dim {mesh_dim} of the mesh {tuple(mesh_shape)}",
        expected=f"a number of pieces that the cuts on its right make: one of {sorted(set(pieces))}",
        got=f"{getattr(placement, 'split_factor', 1)}",
        remedy="Multiply the sizes of those mesh dims on its right that cut this tensor dim before it.",
    )


def local_extent_of(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> LocalExtent:
    """The extent that the rank at this mesh coordinate holds of a tensor of this shape: integers only.

    Returns:
        Shape and offset. Where the rank gets nothing of a tensor dim, the offset in it is the dim's size, so that
        no empty part ever shares its offset with a real one.

    Raises:
        UsageError: a coordinate outside the mesh, a shard dim that the tensor does not have, or what
            `explicit_order_placements` raises.
        UnsupportedError: a placement that is no shard, replica or partial value.
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
    shape, offset = list(global_shape), [0] * len(global_shape)
    for dim, order in orders.items():
        for mesh_dim in order:
            start, shape[dim] = chunk_extent(shape[dim], mesh_shape[mesh_dim], coordinate[mesh_dim])
            offset[dim] = offset[dim] + start if shape[dim] else global_shape[dim]
    return LocalExtent(tuple(shape), tuple(offset))


def _normalized(
    placements: Sequence[Placement], ndim: int, known: tuple[type[Placement], ...] = _PLACEMENTS
) -> list[Placement]:
    """The same placements with shard dims counted from the front, for a tensor of `ndim` dims."""
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


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], skip_offset: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`local_extent_of` this rank: (shape, offset), or ((0,), ()) if the mesh does not have the rank.

    With `skip_offset` the offset is () as well.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return LocalExtent((0,), ())
    extent = local_extent_of(global_shape, mesh.shape, placements, coordinate)
    return extent._replace(offset=()) if skip_offset else extent


def compute_global_tensor_info(
    tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """Shape and stride of the whole, if every rank holds a local tensor like this one.

    The whole has the memory order of the part. Each cut that is undone makes its dim longer, and with it the steps of
    all dims outside that dim. A dim of size 1 is inside the dim it shares a stride with.
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
    """Stride of this rank's part, a dense tensor that has its dims in the memory order of the whole.

        compute_local_stride(global_stride, local_shape)
        compute_local_stride(global_stride, mesh, placements)       # as torch had it before 2.13

    A size of 0 counts as 1, as in the stride that torch gives an empty tensor. With a mesh, uneven parts are right, too: a
    stride is a product of sizes, so the whole's strides say all sizes that are needed. Outside the mesh, the stride is that
    of its first rank.

    Raises:
        UsageError: neither a local shape nor a mesh with placements, or what `local_extent_of` raises.
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
    """This rank's shape, as far as the stride depends on it: the outermost dim, of which strides say nothing, counts as 1.

    Of dims with the same stride only one is longer than 1. It is taken to be one that is cut.
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


def normalize_to_torch_size(
    size: SupportsIndex | Sequence[SupportsIndex] | Sequence[Sequence[SupportsIndex]],
) -> torch.Size:
    """A size in any of the ways in which one calls `torch.empty`: `3`, `(2, 3)`, `([2, 3],)`."""
    sizes: Any = size if isinstance(size, Sized) else (size,)
    if len(sizes) == 1 and isinstance(sizes[0], Sequence):
        (sizes,) = sizes
    return torch.Size(sizes)


def try_find_mesh_from_args(op_call: object, args: Sequence[object]) -> DeviceMesh:
    """The mesh of the first DTensor (or DTensor spec) among arguments of an operator, lists and tuples included.

    Raises:
        UsageError: there is none; `op_call` is named.
    """
    for arg in args:
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            mesh = getattr(item, "device_mesh", None)
            if isinstance(mesh, DeviceMesh):
                return mesh
    raise UsageError(
        f"{op_call}",
        expected="a DTensor among its arguments",
        got=f"{[type(arg).__name__ for arg in args]}",
        remedy="Distribute one of them over a mesh.",
    )


def shard_of(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of a tensor that it has in whole, as a view; an empty tensor [0] outside the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return tensor.new_empty(0)
    return tensor[slices_of(local_extent_of(tensor.shape, mesh.shape, placements, coordinate))]


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
    extents = extents_of(global_shape, mesh_shape, placements)
    check_shards(shards, mesh_shape, extents)
    firsts: dict[LocalExtent, Tensor] = {}
    for extent, shard in zip(extents.values(), shards):
        firsts.setdefault(extent, shard)
    whole = shards[0].new_empty(tuple(global_shape))
    for extent, shard in firsts.items():
        whole[slices_of(extent)] = shard[front_of(extent)]
    return whole


def check_shards(
    shards: Sequence[Tensor], mesh_shape: Sequence[int], extents: Mapping[tuple[int, ...], LocalExtent]
) -> None:
    """Raise UsageError if these cannot be the shards of these extents, by number and shape; replicas may be anything."""
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
    """The extent of every coordinate, in row-major order, for placements that say which values a rank has."""
    placements = _normalized(placements, len(global_shape), known=(*SHARDS, Replicate))
    coordinates = product(*map(range, mesh_shape))
    return {c: local_extent_of(global_shape, mesh_shape, placements, c) for c in coordinates}


def largest_shape(extents: Mapping[tuple[int, ...], LocalExtent]) -> tuple[int, ...]:
    """The first rank's shape: no chunk is longer than the first, and cutting a longer one gives longer chunks."""
    return next(iter(extents.values())).shape


def slices_of(extent: LocalExtent) -> tuple[slice, ...]:
    """An index: `whole[slices_of(extent)]` is the box, a view."""
    return tuple(slice(start, start + n) for start, n in zip(extent.offset, extent.shape))


def front_of(extent: LocalExtent) -> tuple[slice, ...]:
    """An index: `padded[front_of(extent)]` is what is no padding, a view."""
    return tuple(slice(n) for n in extent.shape)
