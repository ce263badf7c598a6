"""Which DTensor a parameter becomes when it is sharded.

A plain parameter becomes a DTensor on the data-parallel mesh: `Shard(0)`, or `(Replicate(), Shard(0))` under hybrid
sharding. A parameter may also be a DTensor before, because tensor parallelism (TP) has cut it over other ranks.
Then FSDP cuts the part that this rank holds once more, over the ranks that hold the same part:

    rows 0…7 of a weight                 tp 0          tp 1
    TP cuts rows over 2 ranks            0 1 2 3       4 5 6 7
    FSDP cuts each part over 2   dp 0    0 1           4 5
                                 dp 1    2 3           6 7

The sharded DTensor lies on the mesh of both, `(dp, tp)`. Read from left to right, `(Shard(0), Shard(0))` would say
that dp cut first, and give rows 2 and 3 to the wrong rank. Since TP cut first, dp's placement is the strided
`_StridedShard(0, split_factor=2)`: a cut after two parts had been made. See `layout` for the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hwfsdp import compat
from hwfsdp.errors import UsageError
from hwfsdp.mesh import ShardMesh, flat_axis


@dataclass(frozen=True)
class Grid:
    """A mesh, and what each of its axes does to a tensor."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class Spread:
    """How a parameter lies over the ranks.

    Attributes:
        dim: the dimension that FSDP cuts.
        shape, stride: of the whole parameter, over all ranks.
        sharded: of the sharded parameter.
        unsharded: of the unsharded one; None if that is a plain tensor.
    """

    dim: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    sharded: Grid
    unsharded: Grid | None = None


def spread(param: Tensor, dim: int, mesh: ShardMesh, fqn: str) -> Spread:
    """How `param` will lie over the ranks when FSDP cuts dimension `dim`, 0 <= dim < param.ndim.

    Raises:
        UsageError: `param` is a DTensor whose mesh does not fit `mesh`.
    """
    shape, stride = tuple(param.shape), tuple(param.stride())
    if not isinstance(param, DTensor):
        if mesh.dims:
            raise UsageError(
                f"fully_shard(dp_mesh_dims=…): parameter {fqn!r}",
                expected="a DTensor on the whole mesh",
                got="a plain tensor",
                remedy="Distribute it first: distribute_module, or distribute_tensor with Replicate().",
            )
        return Spread(dim, shape, stride, Grid(mesh.mesh, mesh.placements(dim)))
    before = Grid(param.device_mesh, tuple(param.placements))
    over = _over_all_axes if mesh.dims else _over_other_axes
    return Spread(dim, shape, stride, over(before, dim, mesh, fqn), before)


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
    parts = prod(size for p, size in placements if compat.is_shard(p) and getattr(p, "dim", None) == dim)
    return compat.strided_shard(dim, parts) if parts > 1 else Shard(dim)


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
    cut = cut_after(zip(before, sizes, strict=True), dim)
    return (*(cut if compat.is_shard(p) else p for p in own), *before)


def _over_other_axes(before: Grid, dim: int, mesh: ShardMesh, fqn: str) -> Grid:
    """The DTensor lies on axes that are not data-parallel: those are appended to the data-parallel ones."""
    try:
        joined = compat.join_meshes([mesh.mesh, before.mesh])
    except (RuntimeError, TypeError, AssertionError) as error:
        raise UsageError(
            f"fully_shard: parameter {fqn!r}",
            expected="a DTensor on another axis of the mesh that the data-parallel mesh was taken from",
            got=f"one on {before.mesh}, which cannot be joined with {mesh.mesh} ({error})",
            remedy="Make one named mesh, init_device_mesh(…, mesh_dim_names=('dp', 'tp')), and slice both from it.",
        ) from error
    sizes = [before.mesh.size(i) for i in range(before.mesh.ndim)]
    return Grid(joined, joined_placements(mesh.placements(dim), before.placements, sizes, dim))


def _over_all_axes(before: Grid, dim: int, mesh: ShardMesh, fqn: str) -> Grid:
    """The DTensor lies on the whole mesh and replicates over the data-parallel axes: FSDP cuts those."""
    assert mesh.dims is not None and mesh.around is not None
    names = before.mesh.mesh_dim_names or ()
    dims = (*mesh.dims.shard_names, *mesh.dims.replicate_names)
    placed = dict(zip(names, before.placements, strict=True)) if names else {}
    if before.mesh != mesh.around or any(not isinstance(placed[name], Replicate) for name in dims):
        raise UsageError(
            f"fully_shard(dp_mesh_dims=…): parameter {fqn!r}",
            expected=f"a DTensor on the mesh given, Replicate() over {', '.join(dims)}",
            got=f"one on {before.mesh} with placements {before.placements}",
            remedy="Distribute it over the same mesh, and leave the data-parallel axes to fully_shard.",
        )
    if not mesh.dims.shard_names:
        return before
    first = names.index(mesh.dims.shard_names[0])
    right = [(before.placements[i], before.mesh.size(i)) for i in range(first + 1, len(names))]
    placed[mesh.dims.shard_names[0]] = cut_after(right, dim)
    if len(mesh.dims.shard_names) == 1:
        return Grid(before.mesh, tuple(placed.values()))
    return _with_flat_axis(before.mesh, placed, mesh.dims.shard_names, mesh.dims.replicate_names)


def _with_flat_axis(
    mesh: DeviceMesh, placed: dict[str, Placement], shard: tuple[str, ...], replicate: tuple[str, ...]
) -> Grid:
    """Several axes to shard over are one axis of the sharded DTensor, at the place of the first."""
    meshes, placements = [], []
    for name, placement in placed.items():
        if name == shard[0]:
            meshes += [flat_axis(mesh, part) for part in (replicate, shard) if part]
            placements += [*([Replicate()] if replicate else []), placement]
        elif name not in (*shard, *replicate):
            meshes.append(mesh[name])
            placements.append(placement)
    return Grid(compat.join_meshes(meshes), tuple(placements))
