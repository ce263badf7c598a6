"""The door that users call: `fully_shard` with all its arguments.

It does the same as the heart's `fully_shard` (`core.wrap`), but with parts that features choose for these arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hwfsdp import features
from hwfsdp.core import precision
from hwfsdp.core.compat import local_of
from hwfsdp.core.context import FSDPCommContext
from hwfsdp.core.form import Layout
from hwfsdp.core.state import FSDPState, state_of
from hwfsdp.core.wrap import become_fsdp_module, follow_state_dicts, move_to, unclaimed_params
from hwfsdp.features.arguments import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from hwfsdp.features.call import Call, absent, ask, state_class
from hwfsdp.features.module import FSDPModule

M = TypeVar("M", bound=nn.Module)


# torch's declares these two, too
@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: precision.MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    module_fqn: str | None = ...,
    comm_ctx: FSDPCommContext | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[M],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: precision.MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    module_fqn: str | None = ...,
    comm_ctx: FSDPCommContext | None = ...,
) -> list[FSDPModule]: ...


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
            them. None: False for the root, True for all others. A number of ranks, which must divide the number of shards, keeps
            them sharded over this many ranks after forward.
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

        After any of these errors, the module is unchanged: all checks come first.

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
    several = isinstance(module, Iterable) and not isinstance(module, nn.Module | Tensor)
    modules: list[Any] = [*module] if several else [module]
    call = Call(
        modules,
        mesh,
        reshard_after_forward,
        shard_placement_fn,
        mp_policy,
        offload_policy,
        set(ignored_params or ()),
        dp_mesh_dims,
        comm_ctx,
        module_class=FSDPModule,
    )
    ask("check", call)
    call.ranks = call.resolve(mesh, dp_mesh_dims)
    call.found = unclaimed_params(call.modules, call.ignored_params)
    call.meshes = [call.ranks for _ in call.found]
    refuse_absent(call)
    ask("check_params", call)
    call.layouts = [Layout(found.param, mesh) for found, mesh in zip(call.found, call.meshes, strict=True)]
    call.policies = [mp_policy for _ in call.found]
    ask("choose", call)
    state = shard(call)
    state.fqn = module_fqn or ""
    ask("joined", call, state)
    return module


def shard(call: Call) -> FSDPState:
    """Shard the parameters of a call with the parts that were chosen; return the state of its modules."""
    move_to(call.ranks.device, call.modules, call.found)
    comm_ctx = call.comm_ctx or FSDPCommContext(call.ranks.device.type)
    params = [
        call.make_param(param, places, fqn, policy, layout, call.home, call.make_form)
        for (param, fqn, places), layout, policy in zip(call.found, call.layouts, call.policies, strict=True)
    ]
    group = call.make_group(params, call.ranks, comm_ctx) if params else None
    if group:
        is_cut = call.ranks.shard.group is not None
        group.reshard_after_forward = is_cut and call.reshard_after_forward is not False
        group.rename(", ".join(type(module).__name__ for module in call.modules), "")
        for param in params:
            follow_state_dicts(param, group)
    auto = call.reshard_after_forward is None
    kind = state_class(tuple(call.states))
    state = kind(call.modules, group, comm_ctx, call.mp_policy, call.ranks.device, auto)
    for module in call.modules:
        become_fsdp_module(module, call.module_class)
    return state


def refuse_absent(call: Call) -> None:
    """Raise UnsupportedError if the call needs a feature that was taken out."""
    params = [found.param for found in call.found]
    asked = (
        ("module_lists", "[a, b]", len(call.modules) > 1),
        ("smaller_mesh", "reshard_after_forward=<number of ranks>", type(call.reshard_after_forward) is int),
        ("offload", "offload_policy=CPUOffloadPolicy()", hasattr(call.offload_policy, "pin_memory")),
        ("param_dtypes", "mp_policy=…", getattr(call.mp_policy, "param_dtype_override_fn", None) is not None),
        ("layouts", "shard_placement_fn=…", call.shard_placement_fn is not None),
        ("layouts", "a module with DTensors", any(isinstance(param, DTensor) for param in params)),
        ("extensions", "a module with tensor extensions", any(map(is_extension, params))),
    )
    for feature, given, is_asked in asked:
        if is_asked and feature not in features.FEATURES:
            raise absent(given, feature)


def is_extension(param: nn.Parameter) -> bool:
    """True if a parameter defines how it is gathered."""
    return hasattr(local_of(param) if isinstance(param, DTensor) else param.data, "fsdp_pre_all_gather")


fully_shard.state = state_of  # type: ignore[attr-defined]  # torch's has it, too
