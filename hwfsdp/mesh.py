"""Who takes part: the data-parallel mesh.

A `DeviceMesh` arranges ranks in a grid with named axes. FSDP shards over one axis. This module checks a mesh,
makes the default one, and keeps what the rest needs to know of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hwfsdp.errors import StateError, UnsupportedError, UsageError


@dataclass(frozen=True)
class ShardMesh:
    """The ranks over which parameters are sharded.

    Attributes:
        mesh: the 1D mesh that sharded DTensors carry.
        group: the process group of its only axis.
        size: ranks in it; rank: this process's place, 0 <= rank < size.
        device: where unsharded parameters live.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup
    size: int
    rank: int
    device: torch.device


def shard_mesh(mesh: DeviceMesh | None) -> ShardMesh:
    """Checks the mesh given to `fully_shard` (None: all ranks) and resolves it.

    Raises:
        UsageError: the mesh has three or more axes, or two without names.
        UnsupportedError: a named 2D mesh.
        StateError: no mesh is given and no process group is initialized.
    """
    mesh = default_mesh() if mesh is None else mesh
    if mesh.ndim > 2:
        raise UsageError(
            "fully_shard(mesh=…)",
            expected="a 1D mesh, or a named 2D mesh",
            got=f"a {mesh.ndim}D mesh of shape {tuple(mesh.shape)}",
            remedy="Take the data-parallel axis out of it: mesh['dp'].",
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise UsageError(
            "fully_shard(mesh=…)",
            expected="names for the axes of a 2D mesh (first replicated, second sharded)",
            got=f"an unnamed mesh of shape {tuple(mesh.shape)}",
            remedy="Pass mesh_dim_names=('replicate', 'shard') to init_device_mesh.",
        )
    if mesh.ndim == 2:
        raise UnsupportedError(
            "fully_shard(mesh=…)",
            expected="a 1D mesh",
            got=f"the 2D mesh {mesh.mesh_dim_names}",
            remedy="Hybrid sharding is not built yet; shard over one axis: mesh['shard'].",
        )
    group = mesh.get_group(0)
    return ShardMesh(mesh, group, group.size(), group.rank(), device_of(mesh.device_type))


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
