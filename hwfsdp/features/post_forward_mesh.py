"""Parameters that stay sharded over fewer ranks between forward and backward: `reshard_after_forward=<number>`.

After forward, each rank keeps the rows that it would hold on a smaller mesh. So the backward
gathers from fewer ranks, such as the ranks of one host. This is between ZeRO-3 (all ranks) and ZeRO-2 (no ranks).

| state        | registered on the modules | memory besides the shard       | left by        | to        |
| ------------ | ------------------------- | ------------------------------ | -------------- | --------- |
| POST_FORWARD | a DTensor, to look at     | a larger shard, of fewer ranks | `to_unsharded` | UNSHARDED |
|              |                           |                                | `to_sharded`   | SHARDED   |
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from enum import Enum, auto
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hwfsdp.comm.transport import GroupTransport
from hwfsdp.core.private_torch import dtensor, no_autograd, register_parameter
from hwfsdp.core.layout import Layout
from hwfsdp.core.mesh import ShardMesh, axis_along
from hwfsdp.core.param import ShardedState
from hwfsdp.core.sharding import local_shape, padded_local_numel
from hwfsdp.errors import UnsupportedError, UsageError
from hwfsdp.features.hybrid_sharding import HybridMesh
from hwfsdp.features.lookup import warn
from hwfsdp.features.user_changes import keep_changes, stand_in

if TYPE_CHECKING:
    from hwfsdp.core.api import Unclaimed
    from hwfsdp.features.feature_group import ParamGroup
    from hwfsdp.features.feature_param import FSDPParam


class PostForward(Enum):
    """A third state of a parameter."""

    POST_FORWARD = auto()


POST_FORWARD = PostForward.POST_FORWARD


def checked_reshard(
    reshard: bool | int | None, mesh: ShardMesh, found: Sequence[Unclaimed], layouts: Sequence[Layout]
) -> bool | int | None:
    """Return `reshard_after_forward` in its simplest form: True in place of all ranks, False in place of one.

    Args:
        layouts: one for each parameter found.

    Raises:
        UsageError: the number does not divide the number of shards. UnsupportedError: a parameter cannot be resharded to it.
    """
    if reshard is None or isinstance(reshard, bool):
        return reshard
    if mesh.shard.group is None:
        return True
    if reshard == 1:
        warn(
            "reshard_after_forward=1 is a world size: parameters stay whole after forward. Pass True to reshard them."
        )
        return False
    meshes = (mesh, *(layout.mesh for layout in layouts))
    if all([post_forward_mesh(each, reshard) is each for each in meshes]):  # a list: each of them is checked
        return True
    refuse_special_params(found, layouts, reshard)
    return reshard


def refuse_special_params(found: Sequence[Unclaimed], layouts: Sequence[Layout], size: int) -> None:
    """Refuse parameters that cannot be resharded to `size` ranks."""
    cut = [(u, layout) for u, layout in zip(found, layouts, strict=True) if layout.mesh.size != size]
    special = [
        u.name for u, _ in cut if isinstance(u.param, DTensor) or hasattr(u.param.data, "fsdp_pre_all_gather")
    ]
    if special:
        raise UnsupportedError(
            "fully_shard(reshard_after_forward=<number of ranks>)",
            expected="plain parameters",
            got=f"DTensors, or tensors with fsdp_pre_all_gather: {', '.join(special)}",
            remedy="Pass True or False.",
        )
    uneven = [u.name for u, layout in cut if layout.rows != layout.shape and u.param.shape[0] % size]
    if uneven:
        raise UnsupportedError(
            "fully_shard(reshard_after_forward=<number of ranks>)",
            expected=f"a multiple of {size} rows in each parameter that is sharded along another dimension than 0",
            got=", ".join(uneven),
            remedy="Pass True or False, or shard dimension 0.",
        )


_smaller: WeakKeyDictionary[Any, dict[tuple[DeviceMesh, int], ShardMesh]] = WeakKeyDictionary()


def post_forward_mesh(mesh: ShardMesh, size: int) -> ShardMesh:
    """Return a mesh of the same ranks that shards over each `size` consecutive ones. It is made once for each mesh and size.

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
        grid = grid_of(mesh.mesh, size)
        made[key] = HybridMesh(grid, axis_along(grid, 1), mesh.device, axis_along(grid, 0))
    return made[key]


def grid_of(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """Arrange the ranks of `mesh` in rows of `size`. Only these ranks need to call this, so `mesh` may be a slice of a larger one."""
    ranks = mesh.mesh.view(-1, size)
    ((row, column),) = (ranks == dist.get_rank()).nonzero().tolist()
    lines = ranks[:, column].tolist(), ranks[row].tolist()
    groups = [dist.new_group(line, use_local_synchronization=True) for line in lines]
    return DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=("replicate", "shard"))


# --- Larger shards ---------------------------------------------------------------------------------------------


def keep_larger_shards(group: ParamGroup, mesh: ShardMesh) -> None:
    """After forward, free the whole parameters, except the rows that this rank of `mesh` keeps."""
    keep_changes(group)
    group.is_unsharded = False
    whole = [param for param in group.params if param.state is ShardedState.UNSHARDED]
    with no_autograd():
        for param in whole:
            keep_larger_shard(param, mesh)
    streams = group.comm_ctx.streams
    streams.copy.wait(streams.compute.record())  # the copy stream reads the larger shards


def keep_larger_shard(param: FSDPParam, mesh: ShardMesh) -> None:
    """UNSHARDED → POST_FORWARD: the rows of this rank of `mesh` get memory of their own, and the whole parameter is freed.

    A DTensor of these rows is registered, so that the user can look at it.
    """
    layout, gathered = param.layout, param.gathered
    assert gathered is not None
    n = padded_local_numel(layout.shape, mesh.size)
    larger = gathered[mesh.rank * n : (mesh.rank + 1) * n].clone()
    kept = local_shape(layout.shape, mesh.size, mesh.rank)
    shown = dtensor(
        larger[: prod(kept)].view(kept), mesh.mesh, mesh.placements(0), layout.shape, layout.stride
    )
    shown_param = nn.Parameter(shown, requires_grad=param.sharded_param.requires_grad)
    stand_in(param, shown_param)
    register_parameter(param.places, shown_param)
    param.free_whole()
    param.over, param.larger, param.state = mesh, larger, POST_FORWARD


def over_fewer(transport: GroupTransport, mesh: ShardMesh) -> GroupTransport:
    """Return the same transport between the ranks of `mesh`, which hold larger shards."""
    fewer = copy.copy(transport)
    fewer.ranks = mesh.shard
    return fewer
