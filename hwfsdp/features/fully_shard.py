"""`fully_shard` with all its arguments.

It has the same steps as the core's `fully_shard` (`core.api`). Between them it calls the features that have a part in building. The
schedule, the group and the parameter call the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hwfsdp import compat
from hwfsdp.comm.transport import GroupTransport
from hwfsdp.core import precision
from hwfsdp.core.api import become_fsdp_module, follow_state_dicts, move_to, unclaimed_params
from hwfsdp.core.state import state_of
from hwfsdp.features import advice, entries, recovery, whole
from hwfsdp.features import private_autograd
from hwfsdp.features.checks import (
    check_arguments,
    check_params,
    checked_modules,
    mark_claimed,
    replicated_params,
)
from hwfsdp.features.feature_group import FSDPCommContext, ParamGroup
from hwfsdp.features.feature_param import FSDPParam
from hwfsdp.features.hybrid_sharding import DataParallelMeshDims, HybridMesh, hybrid_mesh
from hwfsdp.features.lookup import all_groups, owners_of
from hwfsdp.features.layouts import layout_of
from hwfsdp.features.module import FSDPModule
from hwfsdp.features.policies import MixedPrecisionPolicy, OffloadPolicy, memory_of, policy_of
from hwfsdp.features.param_meshes import by_mesh, choices_of, suffixes_of
from hwfsdp.features.post_forward_mesh import checked_reshard, post_forward_mesh
from hwfsdp.features.reductions import SettableReducer
from hwfsdp.features.schedule import FSDPState
from hwfsdp.features.user_changes import keep_writes_before_step

M = TypeVar("M", bound=nn.Module)


class Options(TypedDict, total=False):
    """The keywords of `fully_shard`, for type checkers."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: precision.MixedPrecisionPolicy
    offload_policy: OffloadPolicy | None
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None
    module_fqn: str | None
    comm_ctx: FSDPCommContext | None


@overload  # torch's declares these two, too
def fully_shard(module: nn.Module, **options: Unpack[Options]) -> FSDPModule: ...


@overload
def fully_shard(module: list[M], **options: Unpack[Options]) -> list[FSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: precision.MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | None = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    module_fqn: str | None = None,
    comm_ctx: FSDPCommContext | None = None,
) -> Any:
    """Shard the parameters of `module` over the ranks of `mesh`, in place.

    The last two arguments are ours. All other arguments, their defaults and their effects are the same as in
    `torch.distributed.fsdp.fully_shard` of the installed torch (2.11 to 2.15).

    Args:
        module: implements `forward`. Its parameters that no call has claimed yet become one group: gathered in one collective,
            reduced in one. They become DTensors, `Shard(0)`, original dtype. A list of modules makes one group of all of them.
        mesh: 1D, or 2D with names: replicated over the first axis, sharded over the second. By default all ranks, on the
            accelerator if there is one. Parameters may be DTensors on other axes of the same mesh.
        reshard_after_forward: True frees the whole parameters after forward and gathers them again in backward; False keeps
            them. None: the root keeps them if a backward can follow; all others free them. A number of ranks, which must divide the
            number of shards, keeps them sharded over this many ranks after forward.
        shard_placement_fn: returns the `Shard` of a parameter, or None for `Shard(0)`. The size of a dimension other than 0 must
            be a multiple of the number of shards. Or it returns a `ShardPlacementResult`, which also names a mesh for the
            parameter. Then the parameters of each mesh become a group: they are gathered and averaged over this mesh.
        mp_policy: dtypes; see `MixedPrecisionPolicy`.
        offload_policy: `CPUOffloadPolicy()` keeps shards and their gradients, and so optimizer states, in host memory. None: no
            offloading.
        ignored_params: stay as they are: neither sharded nor reduced.
        dp_mesh_dims: the data-parallel axes of `mesh`, if `mesh` has the axes of all parallelisms. Then all parameters are
            DTensors on `mesh`, replicated over the data-parallel axes.
        module_fqn: the module's name in errors and traces; by default its name from the root.
        comm_ctx: streams to share with other roots; by default new ones.

    Returns:
        `module`, which now is an `FSDPModule` too.

    Raises:
        UsageError: the module, a parameter or the mesh cannot be sharded.
        UnsupportedError: an argument asks for something that is not built.
        StateError: there is no process group.

        After any of these errors, the module is unchanged: all checks come first. Process groups that were made for a mesh stay.

    For example:

        import torch
        from torch import nn
        from hwfsdp import fully_shard, launch

        def train():
            model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
            for layer in model:
                fully_shard(layer)              # blocks first: one group each
            fully_shard(model)                  # then the root
            optimizer = torch.optim.AdamW(model.parameters())  # after sharding
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            return tuple(model[0].weight.shape), tuple(model[0].weight.to_local().shape)

        if __name__ == "__main__":
            assert launch(train, 2) == [((8, 8), (4, 8))] * 2
    """
    # check: until `build`, no module is changed
    modules = checked_modules(module)
    ignored = {*(ignored_params or ())}
    check_arguments(mesh, reshard_after_forward, mp_policy, offload_policy, ignored, dp_mesh_dims, comm_ctx)
    ignored |= replicated_params(modules)
    over = hybrid_mesh(mesh, dp_mesh_dims)

    # find the parameters, and choose how to cut each of them
    found = unclaimed_params(modules, ignored)
    check_params(found)
    choices = choices_of(found, shard_placement_fn, over)
    layouts = [layout_of(u.param, u.name, *choice) for u, choice in zip(found, choices, strict=True)]
    after_forward = checked_reshard(reshard_after_forward, over, found, layouts)
    policies = [policy_of(param, name, mp_policy) for param, name, _ in found]

    # build
    register_process_hooks()
    move_to(over.device, modules, found)
    comm_ctx = comm_ctx or FSDPCommContext(over.device.type)
    memory = memory_of(offload_policy, over.device)
    params = [
        FSDPParam(param, places, name, policy, layout, memory)
        for (param, name, places), policy, layout in zip(found, policies, layouts, strict=True)
    ]
    groups = groups_of(
        ", ".join(type(each).__name__ for each in modules), params, over, comm_ctx, after_forward
    )
    FSDPState(modules, groups, comm_ctx, mp_policy, over.device, after_forward is None, module_fqn or "")

    # join
    for group in groups:
        follow_state_dicts(group)
    for each in modules:
        become_fsdp_module(each, FSDPModule)
        compat.note_applied(each, "fully_shard")
    mark_claimed(found)
    advice.note_new_model(ignored)
    advice.warn_of_sharding(found, params)
    return module


def groups_of(
    name: str,
    params: Sequence[FSDPParam],
    over: HybridMesh,
    comm_ctx: FSDPCommContext,
    after_forward: bool | int | None,
) -> list[ParamGroup]:
    """Make the groups of a call, one for each mesh.

    Args:
        over: the mesh of the call. after_forward: what `checked_reshard` returned.
    """
    groups = []
    for members in by_mesh(params):
        mesh = members[0].mesh
        transport = GroupTransport(
            mesh.shard, mesh.device, name, [(p.name, tuple(p.layout.shape)) for p in members]
        )
        smaller = mesh if isinstance(after_forward, bool | None) else post_forward_mesh(mesh, after_forward)
        group = ParamGroup(name, members, mesh, comm_ctx, transport, SettableReducer())
        group.smaller = None if smaller is mesh else smaller
        group.reshard_after_forward = over.shard.group is not None and after_forward is not False
        groups.append(group)
    if len(groups) > 1:
        for group, suffix in zip(groups, suffixes_of([group.mesh for group in groups], over), strict=True):
            group.suffix, group.transport.shards = suffix, group.mesh.size
            group.rename(name)
    return groups


# --- What torch calls in the whole process: around each backward, and around each step of an optimizer --------


@functools.cache
def register_process_hooks() -> None:
    """Register the hooks, once. Two of them change something that a compiler cannot see, so the compiler must not trace them."""
    private_autograd.watch_backwards(entries.watch_entries, whole.explained_in_backward, whole.with_wholes)
    disable: Any = torch.compiler.disable
    register_optimizer_step_pre_hook(disable(before_step, reason="FSDP hooks"))
    register_optimizer_step_pre_hook(advice.look_at_optimizer)
    register_optimizer_step_post_hook(disable(after_step, reason="FSDP hooks"))


def before_step(optimizer: Optimizer, *_: Any) -> None:
    groups = changed_by(optimizer)
    keep_writes_before_step(groups)
    recovery.mark_step(groups)


def after_step(optimizer: Optimizer, *_: Any) -> None:
    recovery.mark_step(changed_by(optimizer))


def changed_by(optimizer: Optimizer) -> list[ParamGroup]:
    """Return the groups whose shards a step of this optimizer may change. These are the groups whose parameters it holds.

    If it also holds other DTensors, return all groups, because these DTensors may share memory with shards. For an optimizer without
    DTensors, return none. Such an optimizer may exist on one rank only, and then only this rank would gather again.
    """
    held = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
    owners = owners_of(held)
    return all_groups() if len(owners) < len(held) else [*dict.fromkeys(param.group for param in owners)]


fully_shard.state = state_of  # type: ignore[attr-defined]  # torch's has it, too
