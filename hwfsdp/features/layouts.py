"""Other layouts: parameters that tensor parallelism has cut before, and other dimensions than 0.

A plain parameter becomes a DTensor on the data-parallel mesh. A parameter may also be a DTensor already, because tensor
parallelism (TP) has cut it over other ranks. Then FSDP cuts the part of this rank again, over the ranks that hold the same part:

    rows 0…7 of a weight                 tp 0          tp 1
    TP cuts rows over 2 ranks            0 1 2 3       4 5 6 7
    FSDP cuts each part over 2   dp 0    0 1           4 5
                                 dp 1    2 3           6 7

The sharded DTensor lies on the mesh of both, `(dp, tp)`. Placements are read from left to right. So `(Shard(0), Shard(0))` would
say that dp cut first, and would give rows 2 and 3 to the wrong rank. But TP cut first. So dp's placement is
`_StridedShard(0, split_factor=2)`: a cut of a dimension that was already in two parts. See `hwfsdp.layout` for the arithmetic.

Note [Rows]
    In the core, rows are slices along dim 0. A parameter that is cut along another dimension is viewed with one row per rank.
    This is a view of the whole parameter, so gathers write through it, and gradients are read through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hwfsdp import compat
from hwfsdp.core.private_torch import dtensor, local_of
from hwfsdp.core.layout import Layout
from hwfsdp.core.mesh import ShardMesh
from hwfsdp.core.sharding import padded_local_shape
from hwfsdp.errors import RefusedError, RuntimeRefusedError, UnsupportedError, UsageError
from hwfsdp.features.hybrid_sharding import DataParallelMeshDims, HybridMesh, flat_axis


def layout_of(param: nn.Parameter, name: str, placement: Any, mesh: HybridMesh) -> Layout:
    """Return how to cut a parameter: along dim 0, or otherwise if it is a DTensor or `placement` says so.

    Args:
        placement: what the user's function returned; None: `Shard(0)`.
    """
    dim = chosen_dim(name, param, placement, mesh)
    if dim or isinstance(param, DTensor) or mesh.dims is not None:
        return CutLayout(param, dim, mesh, name)
    return Layout(param, mesh)


def chosen_dim(name: str, param: nn.Parameter, placement: Any, mesh: ShardMesh) -> int:
    """Return the dimension along which `placement` cuts this parameter; None is `Shard(0)`."""
    subject = f"fully_shard(shard_placement_fn=…): parameter {name!r}"
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise UsageError(
            subject,
            expected="a Shard, or None for Shard(0)",
            got=repr(placement),
            remedy="Return one of these, or a ShardPlacementResult, which also names a mesh.",
        )
    local = local_of(param)
    dim = placement.dim + local.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < local.ndim:
        raise RefusedError(
            subject,
            expected=f"a dimension of shape {tuple(local.shape)}",
            got=repr(placement),
            remedy="Return Shard(dim) with -ndim <= dim < ndim.",
        )
    if dim and local.shape[dim] % mesh.size:
        raise UnsupportedError(
            subject,
            expected=f"a size in dimension {dim} that {mesh.size} ranks divide evenly",
            got=f"shape {tuple(local.shape)}",
            remedy="Only dimension 0 is padded: return Shard(0), or a dimension that divides evenly.",
        )
    return dim


class MeshPlacements(NamedTuple):
    """A mesh, and a tensor's placement on each of its axes."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]


class CutLayout(Layout):
    """The layout of a parameter that is cut along `dim`, and that other axes may have cut before.

    Attributes:
        unsharded: mesh and placements of the unsharded parameter; None if it is a plain tensor.
    """

    def __init__(self, param: Tensor, dim: int, mesh: HybridMesh, name: str) -> None:
        super().__init__(local_of(param), mesh)
        self.dim, self.dims = dim, mesh.dims
        self.global_shape, self.stride = param.shape, param.stride()
        sharded, self.unsharded = placements_of(param, dim, mesh, name)
        self.device_mesh, self.placements = sharded.mesh, sharded.placements
        if dim:
            # (4, 6) cut along dim 1 for 3 ranks: (3, 4, 2)
            before, length, after = self.shape[:dim], self.shape[dim], self.shape[dim + 1 :]
            self.rows = torch.Size((mesh.size, *before, length // mesh.size, *after))
            self.local_shape = self.rows[1:]
            self.padded_shape = padded_local_shape(self.rows, mesh.size)
            self.padded_numel = prod(self.padded_shape)

    def rows_of(self, whole: Tensor) -> Tensor:
        if self.dim == 0:
            return whole
        rows: Tensor = whole.unflatten(self.dim, (self.mesh.size, -1)).movedim(self.dim, 0)
        return rows

    def by_rank(self, gathered: Tensor) -> Tensor:
        return super().by_rank(gathered) if self.dim == 0 else self.rows_of(gathered.view(self.shape))

    def as_whole(self, whole: Tensor) -> Tensor:
        if self.unsharded is None:
            return whole
        grid = self.unsharded
        return dtensor(whole, grid.mesh, grid.placements, self.global_shape, self.stride)

    def whole_grad(self, grad: Tensor) -> Tensor:
        """Return the part of a tensor-parallel gradient that belongs to this rank's part of the parameter."""
        if not isinstance(grad, DTensor) or self.unsharded is None:
            return grad
        own, dims = self.unsharded, self.dims
        names = (*dims.shard_names, *dims.replicate_names) if dims else ()
        axes = own.mesh.mesh_dim_names or ("",) * own.mesh.ndim
        # over the data-parallel axes, the gradient stays as it is: the group's reduction sums it
        wanted = tuple(
            now if name in names else placement
            for name, now, placement in zip(axes, grad.placements, own.placements, strict=True)
        )
        part = grad if wanted == grad.placements else grad.redistribute(placements=wanted)
        local: Tensor = part.to_local()
        return local


def placements_of(
    param: Tensor, dim: int, mesh: HybridMesh, name: str
) -> tuple[MeshPlacements, MeshPlacements | None]:
    """Return mesh and placements of `param`, sharded and unsharded, if FSDP cuts dimension `dim`, 0 <= dim < param.ndim.

    Raises:
        UsageError: `param` is a DTensor whose mesh does not fit `mesh`.
    """
    dims = mesh.dims
    if not isinstance(param, DTensor):
        if dims:
            raise UsageError(
                f"fully_shard(dp_mesh_dims=…): parameter {name!r}",
                expected="a DTensor on the whole mesh",
                got="a plain tensor",
                remedy="Distribute it first: distribute_module, or distribute_tensor with Replicate().",
            )
        return MeshPlacements(mesh.mesh, mesh.placements(dim)), None
    before = MeshPlacements(param.device_mesh, tuple(param.placements))
    if dims:
        return _over_all_axes(before, dim, mesh, dims, name), before
    return _over_other_axes(before, dim, mesh, name), before


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


def _over_other_axes(before: MeshPlacements, dim: int, mesh: HybridMesh, name: str) -> MeshPlacements:
    """Place a DTensor on axes that are not data-parallel: append these axes to the data-parallel ones."""
    if before.mesh.device_type != mesh.mesh.device_type:
        raise UsageError(
            f"fully_shard: parameter {name!r}",
            expected=f"a DTensor on a mesh of the data-parallel mesh's device type, {mesh.mesh.device_type!r}",
            got=f"one on a mesh of {before.mesh.device_type!r}",
            remedy="Slice both meshes from one: init_device_mesh(…, mesh_dim_names=('dp', 'tp')).",
        )
    try:
        joined = compat.join_meshes([mesh.mesh, before.mesh])
    except (RuntimeError, TypeError, AssertionError) as error:
        raise RuntimeRefusedError(
            f"fully_shard: parameter {name!r}",
            expected="a DTensor on another axis of the mesh that the data-parallel mesh was taken from",
            got=f"one on {before.mesh}, which cannot be joined with {mesh.mesh} ({error})",
            remedy="Make one named mesh, init_device_mesh(…, mesh_dim_names=('dp', 'tp')), and slice both from it.",
        ) from error
    sizes = [before.mesh.size(i) for i in range(before.mesh.ndim)]
    return MeshPlacements(joined, joined_placements(mesh.placements(dim), before.placements, sizes, dim))


def _over_all_axes(
    before: MeshPlacements, dim: int, mesh: HybridMesh, axes: DataParallelMeshDims, name: str
) -> MeshPlacements:
    """Place a DTensor that lies on the whole mesh and replicates over the data-parallel axes. FSDP cuts over these axes."""
    names = before.mesh.mesh_dim_names or ()
    dims = (*axes.shard_names, *axes.replicate_names)
    placed = dict(zip(names, before.placements, strict=True)) if names else {}
    if before.mesh != mesh.around or any(not isinstance(placed[name], Replicate) for name in dims):
        raise UsageError(
            f"fully_shard(dp_mesh_dims=…): parameter {name!r}",
            expected=f"a DTensor on the mesh given, Replicate() over {', '.join(dims)}",
            got=f"one on {before.mesh} with placements {before.placements}",
            remedy="Distribute it over the same mesh, and leave the data-parallel axes to fully_shard.",
        )
    if not axes.shard_names:
        return before
    first = names.index(axes.shard_names[0])
    right = [(before.placements[i], before.mesh.size(i)) for i in range(first + 1, len(names))]
    placed[axes.shard_names[0]] = cut_after(right, dim)
    if len(axes.shard_names) == 1:
        return MeshPlacements(before.mesh, tuple(placed.values()))
    return _with_flat_axis(before.mesh, placed, axes.shard_names, axes.replicate_names)


def _with_flat_axis(
    mesh: DeviceMesh, placed: dict[str, Placement], shard: tuple[str, ...], replicate: tuple[str, ...]
) -> MeshPlacements:
    """Join several axes to shard over into one axis of the sharded DTensor, at the place of the first."""
    meshes, placements = [], []
    for name, placement in placed.items():
        if name == shard[0]:
            meshes += [flat_axis(mesh, part) for part in (replicate, shard) if part]
            placements += [*([Replicate()] if replicate else []), placement]
        elif name not in (*shard, *replicate):
            meshes.append(mesh[name])
            placements.append(placement)
    return MeshPlacements(compat.join_meshes(meshes), tuple(placements))
