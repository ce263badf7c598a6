"""The public door: `fully_shard`.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())  # after, so that it sees the shards

Bottom up, because a call claims the parameters below its module that no call has claimed before. The module stays
the object it was; only its class becomes a subclass that also derives from `FSDPModule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hwfsdp import advice
from hwfsdp.claim import PlacementFn, claim, move_to, outermost, reshard_target
from hwfsdp.errors import UsageError
from hwfsdp.group import FSDPCommContext, ParamGroup
from hwfsdp.hooks import FSDPState, attach_state
from hwfsdp.mesh import DataParallelMeshDims, shard_mesh
from hwfsdp.module import become_fsdp_module
from hwfsdp.param import FSDPParam
from hwfsdp.precision import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    module_fqn: str | None = None,
    comm_ctx: FSDPCommContext | None = None,
) -> M:
    """Shards the parameters of `module` over the ranks of `mesh`, in place.

    Arguments, defaults and effect are those of `torch.distributed.fsdp.fully_shard` (torch 2.13), but for the
    last two.

    Args:
        module: implements `forward`. Its parameters that no call has claimed yet become one group: gathered in
            one collective, reduced in one. They become DTensors, `Shard(0)`, original dtype. A list of modules makes
            one group of all of them.
        mesh: 1D, or 2D with names: replicated over the first axis, sharded over the second. By default all ranks, on
            the accelerator if there is one. Parameters may be DTensors on other axes of the same mesh.
        reshard_after_forward: True frees the whole parameters after forward and gathers them again in backward;
            False keeps them. None: False for the root, True for all others. A number, a factor of the number of
            shards: keeps them sharded over so many ranks.
        shard_placement_fn: returns the `Shard` of a parameter, None for `Shard(0)`. Dimensions other than 0 have to
            be multiples of the number of shards.
        mp_policy: dtypes; see `MixedPrecisionPolicy`.
        offload_policy: `CPUOffloadPolicy()` keeps shards, their gradients and so optimizer states in host memory.
        ignored_params: stay as they are: neither sharded nor reduced.
        dp_mesh_dims: `mesh` is that of all parallelisms, these are its data-parallel axes, and all parameters are
            DTensors on it, replicated over those.
        module_fqn: the module's name in errors and traces; by default its name from the root.
        comm_ctx: streams to share with other roots; by default new ones.

    Returns:
        `module`, which now is an `FSDPModule` too.

    Raises:
        UsageError: the module, a parameter or the mesh cannot be sharded.
        UnsupportedError: an argument asks for what is not built.
        StateError: no process group. The module is unchanged after an error.
    """
    modules = outermost(module if isinstance(module, list | tuple) else [module])
    _check_arguments(mesh, reshard_after_forward, mp_policy, offload_policy, dp_mesh_dims, comm_ctx)
    dims = dp_mesh_dims and DataParallelMeshDims(dp_mesh_dims.shard, dp_mesh_dims.replicate)
    resolved = shard_mesh(mesh, dims)
    claims = claim(modules, set(ignored_params or ()), shard_placement_fn, resolved)
    reshard_mesh = reshard_target(reshard_after_forward, resolved, claims)
    move_to(resolved.device, claims, modules)

    comm_ctx = comm_ctx or FSDPCommContext(resolved.device.type)
    offload = _own_offload_policy(offload_policy)
    params = [FSDPParam(c.param, c.slots, c.fqn, resolved, mp_policy, c.spread, offload) for c in claims]
    for c in claims:
        advice.mark_claimed(c.param, c.fqn)
    group = ParamGroup(params, resolved, comm_ctx, reshard_mesh) if params else None
    auto = reshard_after_forward is None
    state = FSDPState(modules, group, comm_ctx, mp_policy, resolved.device, auto)
    state.fqn = module_fqn or ""
    if group:
        _follow_state_dicts(group)
    for each in modules:
        attach_state(each, state)
        become_fsdp_module(each)
    return module


def _check_arguments(
    mesh: object, reshard: object, policy: object, offload: object, dims: object, comm_ctx: object
) -> None:
    dtypes = [getattr(policy, name, "") for name in ("param_dtype", "reduce_dtype", "output_dtype")]
    wrong = {
        "mesh, a DeviceMesh": (mesh, mesh is None or isinstance(mesh, DeviceMesh)),
        "reshard_after_forward, True, False, None or a number of ranks": (
            reshard,
            reshard is None or isinstance(reshard, int),
        ),
        "mp_policy, a MixedPrecisionPolicy of torch.dtypes": (
            policy,
            all(dtype is None or isinstance(dtype, torch.dtype) for dtype in dtypes),
        ),
        "offload_policy, an OffloadPolicy": (offload, type(offload).__name__.endswith("OffloadPolicy")),
        "dp_mesh_dims, a DataParallelMeshDims": (dims, dims is None or hasattr(dims, "shard_names")),
        "comm_ctx, an FSDPCommContext": (comm_ctx, comm_ctx is None or isinstance(comm_ctx, FSDPCommContext)),
    }
    for argument, (given, usable) in wrong.items():
        if not usable:
            raise UsageError(
                "fully_shard", expected=argument, got=repr(given), remedy="Pass one, or leave it out."
            )


def _own_offload_policy(policy: Any) -> OffloadPolicy:
    """torch's policy as ours; both say the same."""
    return CPUOffloadPolicy(policy.pin_memory) if hasattr(policy, "pin_memory") else OffloadPolicy()


def _follow_state_dicts(group: ParamGroup) -> None:
    """State dicts hold the shards: they are registered before one is taken or loaded, and adopted after."""

    def reshard(*_: Any) -> None:
        group.drop_gather()  # of values that may be about to change
        group.reshard()

    def adopt(*_: Any) -> None:
        group.adopt_registered()

    for module in dict.fromkeys(slot.module for p in group.params for slot in p.slots):
        module.register_state_dict_pre_hook(reshard)
        module.register_load_state_dict_pre_hook(reshard)
        module.register_load_state_dict_post_hook(adopt)
