"""Who takes part: the data-parallel mesh.

A `DeviceMesh` arranges ranks in a grid with named axes. FSDP shards parameters over one axis, and may replicate the
shards over another: hybrid sharding (HSDP), where gathers stay within a host and only shards of gradients cross
hosts. Other axes, such as that of tensor parallelism, are none of its business. This module checks a mesh, makes the
default one, and keeps what the rest needs to know of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from hwfsdp import compat
from hwfsdp.errors import StateError, UsageError


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a mesh are data-parallel, when it has others too; see `fully_shard(dp_mesh_dims=…)`.

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


class Axis(NamedTuple):
    """One axis of a mesh, as this process sees it: `size` ranks, of which it is number `rank`."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class ShardMesh:
    """The ranks over which parameters are sharded, and those over which the shards are replicated.

    Attributes:
        mesh: its data-parallel axes: (shard), (replicate, shard) or (replicate).
        shard: ranks that hold different rows. Of size 1, without a group, if there is no such axis.
        replicate: ranks that hold the same rows. Of size 1, without a group, if there is no such axis.
        device: where unsharded parameters live.
        dims: the names of these axes in `around`, the mesh of all axes, if the parameters are DTensors on that.
    """

    mesh: DeviceMesh
    shard: Axis
    replicate: Axis
    device: torch.device
    dims: DataParallelMeshDims | None = None
    around: DeviceMesh | None = None

    @property
    def size(self) -> int:
        return self.shard.size

    @property
    def rank(self) -> int:
        return self.shard.rank

    @property
    def shard_axis(self) -> DeviceMesh:
        """The 1D mesh of the ranks that hold different rows."""
        names = self.mesh.mesh_dim_names
        return self.mesh[names[-1]] if self.mesh.ndim == 2 and names else self.mesh

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Of a plain parameter that is sharded along its dimension `dim`: one placement for each axis of `mesh`.

        `Replicate()` over the axis of replicas, if there is one (`replicate` has a group), then `Shard(dim)` over the axis of
        shards, if there is one. An axis may be there and have one rank only.
        """
        replicate = (Replicate(),) if self.replicate.group else ()
        return (*replicate, Shard(dim)) if self.shard.group else replicate


def is_in_place(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor is on this device already, or has no memory yet."""
    return tensor.is_meta or tensor.device == device


def in_host_memory(tensor: Tensor, device: torch.device, pin: bool) -> Tensor:
    """`tensor`, or its copy in host memory; if `pin`, page-locked where `device` is an accelerator."""
    tensor = tensor.cpu()
    return tensor.pin_memory() if pin and device.type != "cpu" and not tensor.is_pinned() else tensor


def shard_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> ShardMesh:
    """Checks the mesh given to `fully_shard` (None: all ranks) and resolves it.

    Raises:
        UsageError: the mesh has three or more axes, or two without names, and `dims` does not say which to take; or
            `dims` names axes that the mesh does not have.
        StateError: no mesh is given and no process group is initialized.
    """
    mesh = default_mesh() if mesh is None else mesh
    if dims is not None:
        return _named_axes(mesh, dims)
    if mesh.ndim > 2:
        raise UsageError(
            "fully_shard(mesh=…)",
            expected="a 1D mesh, or a named 2D mesh",
            got=f"a {mesh.ndim}D mesh of shape {tuple(mesh.shape)}",
            remedy="Take the data-parallel axis out of it: mesh['dp'], or name it in dp_mesh_dims.",
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise UsageError(
            "fully_shard(mesh=…)",
            expected="names for the axes of a 2D mesh (first replicated, second sharded)",
            got=f"an unnamed mesh of shape {tuple(mesh.shape)}",
            remedy="Pass mesh_dim_names=('replicate', 'shard') to init_device_mesh.",
        )
    shard, replicate = data_parallel_axes(mesh)
    return ShardMesh(mesh, shard, replicate, device_of(mesh.device_type))


def data_parallel_axes(mesh: DeviceMesh) -> tuple[Axis, Axis]:
    """The axis to shard over and the one to replicate over, as this process sees them.

    Args:
        mesh: 1D: (shard); or 2D: (replicate, shard). An axis may have one rank only.

    An `Axis` is made of the process group along one dimension of the mesh, `mesh.get_group(dim)`: those ranks that differ
    from this one in that coordinate only. Its `size()` says how many they are, its `rank()` which of them this process
    is; that is not its rank among all. An axis that the mesh does not have is `Axis()`: no group, one rank.

    Returns:
        (shard, replicate), in this order.
    """
    replicate = axis_along(mesh, 0) if mesh.ndim == 2 else Axis()
    return axis_along(mesh, mesh.ndim - 1), replicate


def axis_along(mesh: DeviceMesh, dim: int) -> Axis:
    """This process's axis along one dimension of a mesh."""
    group = mesh.get_group(dim)
    return Axis(group, group.size(), group.rank())


def _named_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> ShardMesh:
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
    return ShardMesh(joined, shard, replicate, device_of(mesh.device_type), dims, mesh)


def flat_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The 1D mesh of these axes of `mesh`, several taken as one."""
    return mesh[names[0]] if len(names) == 1 else compat.flatten_mesh(mesh[names])


_smaller: WeakKeyDictionary[Any, dict[tuple[DeviceMesh, int], ShardMesh]] = WeakKeyDictionary()


def smaller_mesh(mesh: ShardMesh, size: int) -> ShardMesh:
    """The same ranks, sharded over runs of `size` of them and replicated across; made once per process group.

    Raises:
        UsageError: `size` does not divide the number of shards.
    """
    if not 1 <= size <= mesh.size or mesh.size % size:
        raise UsageError(
            "fully_shard(reshard_after_forward=…)",
            expected=f"a factor of the {mesh.size} ranks that parameters are sharded over",
            got=str(size),
            remedy="Pass the number of ranks of one host, True, or False.",
        )
    if size == mesh.size:
        return mesh
    made = _smaller.setdefault(dist.group.WORLD, {})
    key = (mesh.mesh, size)
    if key not in made:
        grid = DeviceMesh(mesh.mesh.device_type, mesh.mesh.mesh.view(-1, size))
        made[key] = ShardMesh(grid, axis_along(grid, 1), axis_along(grid, 0), mesh.device)
    return made[key]


def default_mesh() -> DeviceMesh:
    """A 1D mesh of all ranks: on the accelerator if there is one and the process group serves it, else on the CPU.

    A process group of gloo alone cannot gather on an accelerator.
    """
    if not dist.is_initialized() and "RANK" in os.environ:  # started by torchrun
        dist.init_process_group()
    if not dist.is_initialized():
        raise StateError(
            "fully_shard",
            expected="an initialized process group, or mesh=…",
            got="neither",
            remedy="Run the function through hwfsdp.launch or torchrun, or call init_process_group first.",
        )
    accelerator = torch.accelerator.current_accelerator()
    device_type = "cpu" if accelerator is None or dist.get_backend() == "gloo" else accelerator.type
    return init_device_mesh(device_type, (dist.get_world_size(),))


def device_of(device_type: str) -> torch.device:
    """The device of this type that the process uses now."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
