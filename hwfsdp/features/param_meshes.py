"""Meshes per parameter: one call of `fully_shard`, several groups, such as dense parameters and experts. Seams: the group, the state.

`shard_placement_fn` may return a `ShardPlacementResult`, which names a mesh in addition to the dimension. Expert parallelism
needs this. A rank holds only some of the experts, so fewer ranks share an expert than share the dense parameters around it:

    dense parameters    sharded over ranks 0 1 2 3
    experts 0 and 1     sharded over ranks 0   2
    experts 2 and 3     sharded over ranks   1   3

The parameters of one mesh are a group. `MeshGroups` holds the groups of a call, and takes the place of the heart's one group. So
the heart's schedule stays the same. The order is the same as in FSDP2: gathers go from the first group to the last. Reductions,
and the gathers that a backward starts ahead, go from the last group to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hwfsdp.core.compat import address_of, local_of
from hwfsdp.core.context import FSDPCommContext
from hwfsdp.core.group import ParamGroup
from hwfsdp.core.observer import moment
from hwfsdp.core.param import FSDPParam
from hwfsdp.core.ranks import ShardMesh
from hwfsdp.core.state import FSDPState
from hwfsdp.errors import UsageError
from hwfsdp.features.call import Call
from hwfsdp.features.lookup import replicas_of


def check_params(call: Call) -> None:
    """Ask the user's function once for each parameter, and note the parameter's mesh and placement in the call.

    Raises:
        UsageError: a mesh does not fit, or parameters on two meshes share memory.
    """
    ask = call.shard_placement_fn
    if ask is None:
        return
    placements: dict[nn.Parameter, Any] = {}
    # By id of a mesh's description. The description is kept beside the mesh, so that no other object gets its id.
    known: dict[int, tuple[Any, ShardMesh]] = {}
    for index, (param, fqn, _) in enumerate(call.found):
        result = placements[param] = ask(param)
        if hasattr(result, "mesh_info"):
            info, placements[param] = result.mesh_info, result.placement
            if id(info) not in known:
                subject = f"fully_shard(shard_placement_fn=…): parameter {fqn!r}"
                known[id(info)] = info, resolve(info, call, subject)
            call.meshes[index] = known[id(info)][1]
    call.shard_placement_fn = placements.get
    check_memory(call)


def choose(call: Call) -> None:
    """Make a group for each mesh, if parameters have meshes other than the call's."""
    call.states.append(MeshesState)  # after `steering`, whose lists come first
    if all(mesh is call.ranks for mesh in call.meshes):
        return
    make_group = call.make_group

    def make_groups(params: list[FSDPParam], mesh: ShardMesh, comm_ctx: FSDPCommContext) -> ParamGroup:
        found: dict[Any, list[FSDPParam]] = {}
        for param in params:
            found.setdefault(ranks_of(param.mesh), []).append(param)
        groups = [make_group(members, members[0].mesh, comm_ctx) for members in found.values()]
        return groups[0] if len(groups) == 1 else MeshGroups(groups, mesh)

    call.make_group = make_groups


# --- The meshes ----------------------------------------------------------------------------------------------


def ranks_of(mesh: ShardMesh) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the groups of ranks over which this mesh shards and replicates. Parameters of one group have the same two."""
    return mesh.shard.group, replicas_of(mesh).group


def resolve(info: Any, call: Call, subject: str) -> ShardMesh:
    """Return the mesh that a result names, as this process sees it.

    Args:
        info: a DeviceMesh, or an object with the attributes of torch's `FSDPMeshInfo`: `mesh`, `shard_mesh_dim`,
            `replicate_mesh_dim`, and, if `mesh` was taken out of a mesh of all parallelisms, `spmd_mesh` and `dp_mesh_dims`.

    Raises:
        UsageError: this is not a mesh to shard over, or it does not fit the mesh of the call.
    """
    mesh, around = info if isinstance(info, DeviceMesh) else getattr(info, "mesh", None), call.ranks
    if not isinstance(mesh, DeviceMesh) or not has_axes(info, mesh):
        raise UsageError(
            subject,
            expected="a mesh_info of a 1D mesh to shard over, or of a named 2D mesh (first replicated, second sharded)",
            got=repr(info),
            remedy="Take the axes out of a larger mesh: mesh['efsdp'].",
        )
    if around.shard.group is None:
        raise UsageError(
            subject,
            expected="an axis to shard over in fully_shard(mesh=…), where parameters have meshes of their own",
            got=f"{around.mesh}, over which parameters are only replicated",
            remedy="Name an axis to shard over in dp_mesh_dims.",
        )
    check_ranks(mesh, around.mesh, subject)
    dims = getattr(info, "dp_mesh_dims", None)
    return call.resolve(mesh if dims is None else info.spmd_mesh, dims)


def has_axes(info: Any, mesh: DeviceMesh) -> bool:
    """True if parameters can be sharded over this mesh: it is (shard), or (replicate, shard) with names."""
    expected = {1: (None, 0), 2: (0, 1)}.get(mesh.ndim)
    axes = expected if info is mesh else (info.replicate_mesh_dim, info.shard_mesh_dim)
    return expected is not None and axes == expected and (mesh.ndim == 1 or mesh.mesh_dim_names is not None)


def check_ranks(mesh: DeviceMesh, around: DeviceMesh, subject: str) -> None:
    """Raise UsageError if `mesh` does not fit `around`, the mesh of the call, on this rank.

    If two meshes are cut from one grid of ranks, the number of ranks that they share divides the size of each mesh.
    """
    ranks, others = set(mesh.mesh.flatten().tolist()), set(around.mesh.flatten().tolist())
    shared = len(ranks & others)
    of_call = "the mesh of fully_shard(mesh=…)"
    if mesh.device_type != around.device_type:
        expected, got = f"the device type of {of_call}, {around.device_type!r}", repr(mesh.device_type)
    elif mesh.get_coordinate() is None:
        expected, got = f"a mesh with this rank, {dist.get_rank()}", f"one of ranks {sorted(ranks)}"
    elif len(ranks) % shared or len(others) % shared:
        expected = f"ranks that fit {of_call}, {sorted(others)}: all meshes cut from one grid"
        got = f"{sorted(ranks)}, which overlap"
    else:
        return
    remedy = "Take both meshes from init_device_mesh over all ranks, by the names of its axes."
    raise UsageError(subject, expected=expected, got=got, remedy=remedy)


def check_memory(call: Call) -> None:
    """Raise UsageError if parameters on two meshes share memory: sharding would separate them."""
    seen: dict[Any, tuple[str, ShardMesh]] = {}
    for (param, fqn, _), mesh in zip(call.found, call.meshes, strict=True):
        address = address_of(local_of(param))
        other, others_mesh = seen.setdefault(address, (fqn, mesh))
        if ranks_of(mesh) != ranks_of(others_mesh):
            raise UsageError(
                f"fully_shard(shard_placement_fn=…): parameter {fqn!r}",
                expected=f"the mesh of {other!r}, with which it shares its memory",
                got="another one",
                remedy="Tie them as one nn.Parameter, or give one of them its own memory.",
            )


# --- The groups ----------------------------------------------------------------------------------------------


class OfEach:
    """An attribute with the same value in all groups of a call: read from the first, written to each."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, groups: MeshGroups, owner: type) -> Any:
        return getattr(groups.parts[0], self.name)

    def __set__(self, groups: MeshGroups, value: Any) -> None:
        for part in groups.parts:
            setattr(part, self.name, value)


def _in_each(method: Callable[[ParamGroup], None]) -> Callable[[MeshGroups], None]:
    """Make a method that calls the method of the same name on each group."""

    name = method.__name__

    def call(groups: MeshGroups) -> None:
        for part in groups.each():
            getattr(part, name)()

    return call


class MeshGroups(ParamGroup):
    """The groups of one call, in place of one group. Each call of a method is passed on to all groups.

    Attributes:
        parts: the groups, in the order in which their first parameters were registered. Each has a `label`, which comes after the
            module's name in the group's name: "" on the mesh of the call, else the axes or the size of its mesh.
    """

    comm_ctx: Any = OfEach()
    reshard_after_forward: Any = OfEach()
    reshard_after_backward: Any = OfEach()
    reduce_grads: Any = OfEach()
    unshard_in_backward: Any = OfEach()

    def __init__(self, parts: Sequence[ParamGroup], mesh: ShardMesh) -> None:
        self.parts: list[Any] = list(parts)
        self.fqn = self.module_fqn = ""
        self.params = [param for part in parts for param in part.params]
        self.mesh = mesh
        self.post_forward_indices: list[int] = []
        for part, label in zip(self.parts, labels_of([part.mesh for part in parts], mesh), strict=True):
            part.label = label

    def rename(self, fqn: str, module_fqn: str) -> None:
        self.fqn, self.module_fqn = fqn, module_fqn
        for part in self.parts:
            part.rename(fqn + part.label, module_fqn)
            part.transport.shards = part.shards = part.mesh.size  # for torch's profiler

    def each(self) -> Iterator[ParamGroup]:
        """Yield the groups, first to last. For the observer, all work until the next group belongs to this group."""
        for part in self.parts:
            with moment("part", part):
                yield part

    unshard = _in_each(ParamGroup.unshard)
    wait_for_gather = _in_each(ParamGroup.wait_for_gather)
    copy_out = _in_each(ParamGroup.copy_out)
    reshard = _in_each(ParamGroup.reshard)
    drop_gather = _in_each(ParamGroup.drop_gather)
    post_forward = _in_each(ParamGroup.post_forward)
    adopt_registered = _in_each(ParamGroup.adopt_registered)
    expect_grads = _in_each(ParamGroup.expect_grads)

    # --- gradients ---

    @property
    def has_late_gradients(self) -> bool:
        return any(part.has_late_gradients for part in self.parts)

    def post_backward(self) -> None:
        """Run post-backward of each group, the last one first. The reductions wait for other modules' reductions, not for each other."""
        comm_ctx, most = self.comm_ctx, self.comm_ctx.max_reductions
        if self.has_late_gradients:
            with moment("post_backward_rs_wait", self):
                comm_ctx.wait_for_reductions(leave=most - 1)
        comm_ctx.max_reductions = most - 1 + len(self.parts)
        try:
            for part in reversed(self.parts):
                with moment("part", part):
                    part.post_backward()
        finally:
            comm_ctx.max_reductions = most


def labels_of(meshes: Sequence[ShardMesh], mesh: ShardMesh) -> list[str]:
    """Return a label for each group of one module, such as " [efsdp]". The group on `mesh`, or else the first one, has ""."""
    names = ["×".join(each.mesh.mesh_dim_names or ()) or f"{each.size} ranks" for each in meshes]
    names = [name if names.count(name) == 1 else f"{name}, {i}" for i, name in enumerate(names)]
    keys = [ranks_of(each) for each in meshes]
    plain = keys.index(ranks_of(mesh)) if ranks_of(mesh) in keys else 0
    return ["" if i == plain else f" [{name}]" for i, name in enumerate(names)]


def parts_of(group: ParamGroup) -> list[ParamGroup]:
    """Return the groups behind one group of the schedule; usually only the group itself."""
    return group.parts if isinstance(group, MeshGroups) else [group]


class MeshesState(FSDPState):
    """A state whose module, or the one before it, may have several groups."""

    @property
    def groups(self) -> list[ParamGroup]:
        return parts_of(self.group) if self.group else []

    def name_states(self) -> list[FSDPState]:
        states = super().name_states()
        for state in states:
            if isinstance(state.group, MeshGroups):
                state.group.rename(state.fqn, state.module_fqn)
        return states

    def enter_backward(self) -> list[ParamGroup]:
        """Return the groups of the module before, the last one first. If this module has one group, return only the last of them."""
        indices = list(self.group.post_forward_indices) if self.group else []
        found = super().enter_backward()
        if not isinstance(self.group, MeshGroups):
            return [parts_of(group)[-1] for group in found]
        before = reversed(self.comm_ctx.post_forward_order[: indices[-1] if indices else 0])
        other = next((group for group in before if group is not self.group), None)
        return [*reversed(parts_of(other))] if other else []
