"""Hybrid sharding: shards that are replicated.

Parameters are sharded over one axis of the mesh, and the shards are replicated over another. Gathers stay within a node, and only
shards of gradients cross nodes (`reductions`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from hwfsdp import compat
from hwfsdp.core.mesh import Axis, ShardMesh, axis_along, default_mesh, device_of
from hwfsdp.errors import RefusedError, UsageError


@dataclass(unsafe_hash=True)  # torch's can be changed, too
class DataParallelMeshDims:
    """The data-parallel axes of a mesh that also has other axes; see `fully_shard(dp_mesh_dims=…)`.

    Attributes:
        shard: name of the axis to shard over; several names are taken as one axis. None: replicate only.
        replicate: name of the axis to replicate over, or several. None: shard only.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise UsageError(
                "DataParallelMeshDims",
                expected="names of axes in shard, in replicate, or in both",
                got="neither",
                remedy="Name the data-parallel axis: DataParallelMeshDims(shard='dp').",
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


@dataclass(frozen=True)
class HybridMesh(ShardMesh):
    """The ranks over which parameters are sharded, and the ranks over which the shards are replicated.

    Attributes:
        mesh: the mesh of the data-parallel axes: (shard), (replicate, shard) or (replicate).
        shard: ranks that hold different rows. If there is no such axis, it has size 1 and no group.
        replicate: ranks that hold the same rows. If there is no such axis, it has size 1 and no group.
        dims: the names of these axes in `around`, the mesh of all axes, if the parameters are DTensors on `around`.
    """

    replicate: Axis = Axis()
    dims: DataParallelMeshDims | None = None
    around: DeviceMesh | None = None

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Return one placement for each axis of `mesh`, for a plain parameter that is cut along dimension `dim`.

        An axis exists if it has a group, even if the group has only one rank.
        """
        replicate = (Replicate(),) if self.replicate.group else ()
        return (*replicate, Shard(dim)) if self.shard.group else replicate


def hybrid_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> HybridMesh:
    """Check the mesh given to `fully_shard` (None: all ranks) and resolve it.

    Raises:
        UsageError: the mesh has three or more axes, or two without names, and `dims` does not say which to take; or `dims`
            names axes that the mesh does not have.
        StateError: no mesh is given and no process group is initialized.
    """
    mesh = default_mesh() if mesh is None else mesh
    if dims is not None:
        return _named_axes(mesh, DataParallelMeshDims(dims.shard, dims.replicate))  # may be torch's
    if mesh.ndim > 2:
        raise UsageError(
            "fully_shard(mesh=…)",
            expected="a 1D mesh, or a named 2D mesh",
            got=f"a {mesh.ndim}D mesh of shape {tuple(mesh.shape)}",
            remedy="Take the data-parallel axis out of it: mesh['dp'], or name it in dp_mesh_dims.",
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise RefusedError(
            "fully_shard(mesh=…)",
            expected="names for the axes of a 2D mesh (first replicated, second sharded)",
            got=f"an unnamed mesh of shape {tuple(mesh.shape)}",
            remedy="Pass mesh_dim_names=('replicate', 'shard') to init_device_mesh.",
        )
    shard, replicate = data_parallel_axes(mesh)
    return HybridMesh(mesh, shard, device_of(mesh.device_type), replicate)


def data_parallel_axes(mesh: DeviceMesh) -> tuple[Axis, Axis]:
    """Return (shard, replicate), the axes of a mesh (shard) or (replicate, shard). A missing axis is `Axis()`: one rank, no group."""
    replicate = axis_along(mesh, 0) if mesh.ndim == 2 else Axis()
    return axis_along(mesh, mesh.ndim - 1), replicate


def _named_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> HybridMesh:
    names = (*dims.replicate_names, *dims.shard_names)
    if unknown := [name for name in names if name not in (mesh.mesh_dim_names or ())]:
        raise UsageError(
            "fully_shard(dp_mesh_dims=…)",
            expected=f"names of axes of the mesh, {mesh.mesh_dim_names}",
            got=", ".join(map(repr, unknown)),
            remedy="Name the axes in init_device_mesh(mesh_dim_names=…) and use those names.",
        )
    parts = [flat_axis(mesh, part) for part in (dims.replicate_names, dims.shard_names) if part]
    shard = axis_along(parts[-1], 0) if dims.shard_names else Axis()
    replicate = axis_along(parts[0], 0) if dims.replicate_names else Axis()
    joined = parts[0] if len(parts) == 1 else compat.join_meshes(parts)
    return HybridMesh(joined, shard, device_of(mesh.device_type), replicate, dims, mesh)


def flat_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the 1D mesh of these axes of `mesh`; several axes become one."""
    return mesh[names[0]] if len(names) == 1 else compat.flatten_mesh(mesh[names])
