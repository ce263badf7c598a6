"""Refuse modules that cannot be sharded or cannot run, before anything is changed. Seams: the door, and the state at the root."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hwfsdp.core.compat import in_transforms, local_of
from hwfsdp.core.context import FSDPCommContext
from hwfsdp.core.group import ParamGroup
from hwfsdp.core.param import ShardedState
from hwfsdp.core.state import Args, FSDPState, Kwargs, state_of
from hwfsdp.errors import (
    RefusedError,
    RuntimeRefusedError,
    StateError,
    UnsupportedError,
    UsageError,
    WrongTypeError,
)
from hwfsdp.features.call import Call, ask
from hwfsdp.features.lookup import CLAIMED


def check(call: Call) -> None:
    """Check the modules and the arguments."""
    for module in call.modules:
        check_module(module)
    check_arguments(call)


def check_params(call: Call) -> None:
    """Check the parameters that were found."""
    for param, fqn, _ in call.found:
        check_param(fqn, param)


def choose(call: Call) -> None:
    """Let a root check that its model can run."""
    call.states.append(CheckedState)


def joined(call: Call, state: FSDPState) -> None:
    """Mark these parameters: sharded parameters have taken their place."""
    for param, fqn, _ in call.found:
        setattr(param, CLAIMED, fqn)


def check_module(module: Any) -> None:
    """Raise UsageError if this is not a module, has no forward, or was sharded before."""
    if not isinstance(module, nn.Module):
        raise WrongTypeError(
            "fully_shard",
            expected="an nn.Module, or a list of them",
            got=type(module).__name__,
            remedy="Pass the module whose parameters are to be sharded.",
        )
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise UsageError(
            "fully_shard",
            expected="a module with a forward",
            got=f"nn.{type(module).__name__}, which has none",
            remedy="Shard its children one by one.",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise RuntimeRefusedError(
            "fully_shard",
            expected="a module of Python",
            got="a torch.jit.ScriptModule, which takes no hooks",
            remedy="Shard the module before torch.jit.script, or use torch.compile.",
        )
    if state_of(module) is not None:
        raise RefusedError(
            "fully_shard",
            expected="a module that was not sharded yet",
            got=f"{type(module).__name__}, which was",
            remedy="Call it once per module, children before their parents.",
        )


def check_arguments(call: Call) -> None:
    """Raise UsageError if an argument is of a type that cannot be used."""
    reshard, offload, dims = call.reshard_after_forward, call.offload_policy, call.dp_mesh_dims
    names = ("param_dtype", "reduce_dtype", "output_dtype")
    has_dtypes = all(isinstance(getattr(call.mp_policy, name, ""), torch.dtype | None) for name in names)
    is_policy = offload is None or type(offload).__name__.endswith("OffloadPolicy")
    usable = {
        "mesh to be a DeviceMesh": isinstance(call.mesh, DeviceMesh | None),
        "reshard_after_forward to be True, False, None or a number of ranks": isinstance(reshard, int | None),
        "mp_policy to be a MixedPrecisionPolicy of torch.dtypes": has_dtypes,
        "offload_policy to be an OffloadPolicy": is_policy,
        "dp_mesh_dims to be a DataParallelMeshDims": dims is None or hasattr(dims, "shard_names"),
        "comm_ctx to be an FSDPCommContext": isinstance(call.comm_ctx, FSDPCommContext | None),
    }
    for expected, fits in usable.items():
        if not fits:
            given = getattr(call, expected.partition(" ")[0])
            raise UsageError(
                "fully_shard", expected=expected, got=repr(given), remedy="Pass one, or leave it out."
            )


def check_param(name: str, param: nn.Parameter) -> None:
    """Raise an error if a parameter cannot be cut into rows, or if another group has cut it already."""
    subject = f"fully_shard: parameter {name!r}"
    if hasattr(param, CLAIMED):
        raise UsageError(
            subject,
            expected="a parameter of one group only",
            got="one that is tied to a parameter of another group",
            remedy="Shard the modules that share it in one call: fully_shard([a, b]), or fully_shard of a module above both.",
        )
    if param.ndim == 0:
        raise UsageError(
            subject,
            expected="at least one dimension to shard",
            got="a scalar",
            remedy="Make it 1D with one element: nn.Parameter(torch.tensor([value])).",
        )
    local = local_of(param)
    if not local.is_contiguous():
        raise UnsupportedError(
            subject,
            expected="contiguous memory",
            got=f"shape {tuple(param.shape)} with strides {param.stride()}",
            remedy="Assign a contiguous copy first: nn.Parameter(p.detach().contiguous()).",
        )


class CheckedState(FSDPState):
    """A state that checks its model before it runs."""

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if in_transforms() and self.is_outermost():
            for child in module.modules():
                for group in state.groups if (state := state_of(child)) else ():
                    check_not_replaced(group)
        return super().pre_forward(module, args, kwargs)

    def before_unshard(self) -> None:
        """Check the groups if the user gathers by hand before the first forward. This forward would have checked them."""
        super().before_unshard()  # type: ignore[misc]
        for group in () if self.root.states else self.groups:
            group.adopt_registered()
            ask("ready", group)

    def become_root(self) -> None:
        """Check that the root is one module, that it is the first to run a forward, and that every group below it can run.

        Raises:
            StateError: a module below it ran a forward before, or has parameters on the meta device.
            UsageError: a group cannot be reduced as one, or is asked to be the root with several modules.
        """
        if len(self.modules) > 1:
            raise RuntimeRefusedError(
                "fully_shard: the module whose forward comes first",
                expected="a single module, the root",
                got=f"one of the {len(self.modules)} modules of a group",
                remedy="Call fully_shard on the whole model as well, and run the model's forward.",
            )
        for fqn, module in self.modules[0].named_modules():
            state = state_of(module)
            if state is not None and state.root.states:
                raise StateError(
                    f"fully_shard: module {fqn!r}",
                    expected="the root to run the first forward",
                    got="a forward of this module before the root's forward",
                    remedy="Run the whole model once before calling a part of it by itself.",
                )
        super().become_root()
        try:
            for group in self.root.groups:
                ask("ready", group)
        except (StateError, UsageError):
            self.root.states = []  # the model has not begun: the user may correct it and try again
            raise


def check_not_replaced(group: ParamGroup) -> None:
    """Raise UsageError if other tensors are in the place of a group's parameters: the gather would ignore these tensors."""
    for param in group.params:
        ours = param.sharded_param if param.state is ShardedState.SHARDED else param.unsharded_param
        module, name = param.places[0]
        if getattr(module, name) is not ours:
            raise UsageError(
                f"torch.func: parameter {param.fqn!r}",
                expected="the parameter that fully_shard registered: transforms are for inputs of a sharded model",
                got="another tensor, such as functional_call puts in its place",
                remedy="For gradients of parameters, call backward() on a loss that was computed outside of torch.func.grad.",
            )


def ready(group: ParamGroup) -> None:
    """Raise an error if the group cannot run.

    Raises:
        StateError: a parameter is still on the meta device.
        UsageError: trainable parameters have several original dtypes.
    """
    on_meta = [p.fqn for p in group.params if p.sharded_param.is_meta]
    if on_meta:
        raise StateError(
            f"parameter group {group.fqn!r}",
            expected="materialized parameters at the first forward",
            got=f"{', '.join(on_meta)} on the meta device",
            remedy="Call model.to_empty(device=…) and initialize the shards, or load a checkpoint.",
        )
    dtypes = {p.dtypes.orig for p in group.params if p.sharded_param.requires_grad}
    if len(dtypes) > 1:
        raise RefusedError(
            f"parameter group {group.fqn!r}",
            expected="trainable parameters of one dtype",
            got=" and ".join(sorted(map(str, dtypes))),
            remedy="Cast them, or wrap the modules with the other dtype in a fully_shard of their own.",
        )
