"""Parameters that stay sharded over fewer ranks between forward and backward: `reshard_after_forward=<number>`.

Seams: the form, and the group. After forward, each rank keeps the rows that it would hold on a smaller mesh. So the backward
gathers from fewer ranks, such as the ranks of one host. This is between ZeRO-3 (all ranks) and ZeRO-2 (no ranks).

| state        | registered on the modules | memory besides the shard       | left by        | to        |
| ------------ | ------------------------- | ------------------------------ | -------------- | --------- |
| POST_FORWARD | a DTensor, to look at     | a larger shard, of fewer ranks | `to_unsharded` | UNSHARDED |
|              |                           |                                | `to_sharded`   | SHARDED   |
"""

from __future__ import annotations

import copy
import warnings
from enum import Enum, auto
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hwfsdp.core.compat import dtensor, no_autograd
from hwfsdp.core.context import FSDPCommContext
from hwfsdp.core.form import Form
from hwfsdp.core.group import ParamGroup
from hwfsdp.core.param import FSDPParam, ShardedState
from hwfsdp.core.ranks import ShardMesh, Transport, axis_along
from hwfsdp.core.sharding import local_shape, padded_local_numel
from hwfsdp.errors import UnsupportedError, UsageError
from hwfsdp.features.call import Call
from hwfsdp.features.hybrid_sharding import HybridMesh


class PostForward(Enum):
    """A third state of a parameter."""

    POST_FORWARD = auto()


POST_FORWARD = PostForward.POST_FORWARD


def choose(call: Call) -> None:
    """Accept a number of ranks in place of True or False."""
    reshard, mesh = call.reshard_after_forward, call.ranks
    if reshard is None or isinstance(reshard, bool) or mesh.shard.group is None:
        return
    if reshard == 1:
        warnings.warn(
            "reshard_after_forward=1 is a world size: parameters stay whole after forward. Pass True to reshard them.",
            UserWarning,
            stacklevel=4,
        )
        call.reshard_after_forward = False
        return
    meshes = (mesh, *call.meshes)
    if all([smaller_mesh(each, reshard) is each for each in meshes]):  # a list: each of them is checked
        return
    refuse_special_params(call, reshard)
    call.make_form = LargerShard
    call.make_group = lambda params, ranks, comm_ctx: make_group(params, ranks, comm_ctx, reshard)


def make_group(params: list[FSDPParam], mesh: ShardMesh, comm_ctx: FSDPCommContext, size: int) -> ParamGroup:
    """Make a group that reshards to `size` ranks; if the mesh has no more ranks than this, the heart's own group."""
    smaller = smaller_mesh(mesh, size)
    if smaller is mesh:
        return ParamGroup(params, mesh, comm_ctx)
    return SmallerMeshGroup(params, mesh, comm_ctx, smaller)


def refuse_special_params(call: Call, size: int) -> None:
    """Refuse parameters that cannot be resharded to `size` ranks."""
    every = zip(call.found, call.layouts, strict=True)
    found = [(u, layout) for u, layout in every if layout.mesh.size != size]
    special = [
        u.fqn
        for u, _ in found
        if isinstance(u.param, DTensor) or hasattr(u.param.data, "fsdp_pre_all_gather")
    ]
    if special:
        raise UnsupportedError(
            "fully_shard(reshard_after_forward=<number of ranks>)",
            expected="plain parameters",
            got=f"DTensors, or tensors with fsdp_pre_all_gather: {', '.join(special)}",
            remedy="Pass True or False.",
        )
    uneven = [u.fqn for u, layout in found if layout.rows != layout.shape and u.param.shape[0] % size]
    if uneven:
        raise UnsupportedError(
            "fully_shard(reshard_after_forward=<number of ranks>)",
            expected=f"a multiple of {size} rows in each parameter that is sharded along another dimension than 0",
            got=", ".join(uneven),
            remedy="Pass True or False, or shard dimension 0.",
        )


_smaller: WeakKeyDictionary[Any, dict[tuple[DeviceMesh, int], ShardMesh]] = WeakKeyDictionary()


def smaller_mesh(mesh: ShardMesh, size: int) -> ShardMesh:
    """Return a mesh of the same ranks that shards over each `size` consecutive ones; it is made once per process group.

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
        made[key] = HybridMesh(grid, axis_along(grid, 1), mesh.device, axis_along(grid, 0))
    return made[key]


class LargerShard(Form):
    """The form of a parameter that may be gathered from the larger shards of fewer ranks.

    Attributes:
        mesh: these ranks. larger: [ceil(d0 / S) * rest], compute dtype: the rows that this rank of S keeps after forward; None at
            other times.
    """

    def __init__(self, param: FSDPParam) -> None:
        super().__init__(param)
        self.mesh: ShardMesh | None = None
        self.larger: Tensor | None = None

    def inputs(self) -> list[Tensor]:
        return super().inputs() if self.larger is None else [self.larger]

    def outputs(self) -> list[Tensor]:
        usual = super().outputs()
        if self.larger is None or self.mesh is None or self.gathered is None:
            return usual
        return [self.gathered[: self.mesh.size * self.larger.numel()].view(self.mesh.size, -1)]

    def finish(self) -> None:
        self.larger = None

    def keep(self, mesh: ShardMesh) -> None:
        """Free the whole parameter, except the rows that this rank of `mesh` keeps, which get their own memory.

        S, the number of ranks of `mesh`, divides the world size, so S such chunks are never larger than the gathered memory. A
        DTensor of these rows is registered, so that the user can look at it.
        """
        param, shape = self.param, self.param.layout.shape
        assert self.gathered is not None
        n = padded_local_numel(shape, mesh.size)
        self.mesh, self.larger = mesh, self.gathered[mesh.rank * n : (mesh.rank + 1) * n].clone()
        kept = local_shape(shape, mesh.size, mesh.rank)
        local = self.larger[: prod(kept)].view(kept)
        shown = dtensor(local, mesh.mesh, mesh.placements(0), shape, param.layout.stride)
        param.register(nn.Parameter(shown, requires_grad=param.sharded_param.requires_grad))
        super().free()
        param.state = POST_FORWARD

    def free(self) -> None:
        self.larger = None
        super().free()


class SmallerMeshGroup(ParamGroup):
    """A group whose parameters stay sharded over fewer ranks after forward.

    Attributes:
        smaller: the mesh of these ranks; None if the user has changed the setting since then.
    """

    def __init__(
        self, params: list[FSDPParam], mesh: ShardMesh, comm_ctx: FSDPCommContext, smaller: ShardMesh
    ) -> None:
        super().__init__(params, mesh, comm_ctx)
        self.smaller: ShardMesh | None = smaller

    @property
    def gather_transport(self) -> Transport:
        """The transport from the ranks that hold larger shards, if there are such shards."""
        if self.smaller is None or self.params[0].state is not POST_FORWARD:
            return self.transport
        over_fewer = copy.copy(self.transport)
        over_fewer.ranks = self.smaller.shard
        return over_fewer

    @torch.no_grad()
    def post_forward(self) -> None:
        if self.smaller is None or not self.reshard_after_forward:
            super().post_forward()
            return
        for param in self.params:
            if param.state is ShardedState.UNSHARDED and isinstance(param.form, LargerShard):
                param.form.keep(self.smaller)
        streams = self.comm_ctx.streams
        streams.copy.wait(streams.compute.record())  # the copy stream reads the larger shards

    def reshard(self) -> None:
        """Wait for a gather that may be reading the larger shards, before they are freed."""
        if self.params[0].state is POST_FORWARD:
            with no_autograd():
                self.wait_for_gather()
                self.drop_gather()
        super().reshard()
