"""Refuse modules that cannot be sharded, before a call changes anything, and models that cannot run, before the first forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hwfsdp import compat
from hwfsdp.core.api import Unclaimed
from hwfsdp.core.private_torch import local_of
from hwfsdp.core.state import FSDPState, state_of
from hwfsdp.errors import (
    RefusedError,
    RuntimeRefusedError,
    StateError,
    UnsupportedError,
    UsageError,
    WrongTypeError,
)
from hwfsdp.features.feature_group import FSDPCommContext, ParamGroup
from hwfsdp.features.private_autograd import is_traced
from hwfsdp.features.extensions import gather_class
from hwfsdp.features.lookup import CLAIMED
from hwfsdp.features.policies import check_in_host_memory

# --- Before a call -------------------------------------------------------------------------------------------


def checked_modules(given: Any) -> list[nn.Module]:
    """Return the modules of a call, one or several. A module that is inside another module of the list is left out.

    Raises:
        UsageError: the list is empty, or one of them is not a module, has no forward, or was sharded before.
    """
    several = isinstance(given, Iterable) and not isinstance(given, nn.Module | Tensor)
    modules = list(given) if several else [given]
    if not modules:
        raise UsageError(
            "fully_shard", expected="at least one module", got="an empty list", remedy="Leave the call out."
        )
    for module in modules:
        if not isinstance(module, nn.Module):
            raise WrongTypeError(
                "fully_shard",
                expected="an nn.Module, or a list of them",
                got=type(module).__name__,
                remedy="Pass the module whose parameters are to be sharded.",
            )
    below = {child for module in modules for child in module.modules() if child is not module}
    modules = [module for module in dict.fromkeys(modules) if module not in below]
    for module in modules:
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
    return modules


def replicated_params(modules: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters that `replicate()` averages: these stay as they are.

    On every module, torch keeps a list of the functions that were applied to it. `replicate()` reads this list: it refuses a sharded
    module, and leaves sharded modules below alone. So `fully_shard` puts itself into the list (`compat.note_applied`), and reads it.

    Raises:
        RefusedError: torch's own fully_shard has sharded a module, or a given module is replicated.
    """
    found: set[nn.Parameter] = set()
    for name, module in (named for given in modules for named in given.named_modules()):
        applied = compat.applied_to(module)
        if "fully_shard" in applied and state_of(module) is None:
            raise RefusedError(
                "fully_shard",
                expected="a model that one library shards",
                got=f"module {name!r}, which torch's own fully_shard has sharded",
                remedy="Use one library for both. hwfsdp.install(), called first, replaces torch's in the whole program.",
            )
        if "replicate" in applied and module in modules:
            raise RefusedError(
                "fully_shard",
                expected="a module that is not replicated",
                got=f"{type(module).__name__}, to which replicate() was applied",
                remedy="Choose one. To replicate shards, pass a mesh with two axes.",
            )
        if "replicate" in applied:
            found.update(module.parameters())
    return found


def check_arguments(
    mesh: Any,
    reshard_after_forward: Any,
    mp_policy: Any,
    offload_policy: Any,
    ignored_params: set[Any],
    dp_mesh_dims: Any,
    comm_ctx: Any,
) -> None:
    """Raise UsageError if an argument is of a type that cannot be used."""
    names = ("param_dtype", "reduce_dtype", "output_dtype")
    has_dtypes = all(isinstance(getattr(mp_policy, name, ""), torch.dtype | None) for name in names)
    is_policy = offload_policy is None or type(offload_policy).__name__.endswith("OffloadPolicy")
    is_reshard = isinstance(reshard_after_forward, int | None)
    strangers = [param for param in ignored_params if not isinstance(param, Tensor)]
    usable = (
        ("mesh to be a DeviceMesh", mesh, isinstance(mesh, DeviceMesh | None)),
        (
            "reshard_after_forward to be True, False, None or a number of ranks",
            reshard_after_forward,
            is_reshard,
        ),
        ("mp_policy to be a MixedPrecisionPolicy of torch.dtypes", mp_policy, has_dtypes),
        ("offload_policy to be an OffloadPolicy", offload_policy, is_policy),
        ("ignored_params to be a set of parameters", strangers, not strangers),
        (
            "dp_mesh_dims to be a DataParallelMeshDims",
            dp_mesh_dims,
            dp_mesh_dims is None or hasattr(dp_mesh_dims, "shard_names"),
        ),
        ("comm_ctx to be a hwfsdp.FSDPCommContext", comm_ctx, isinstance(comm_ctx, FSDPCommContext | None)),
    )
    for expected, given, fits in usable:
        if not fits:
            raise UsageError(
                "fully_shard", expected=expected, got=repr(given), remedy="Pass one, or leave it out."
            )


def check_params(found: Sequence[Unclaimed]) -> None:
    """Raise an error if a parameter cannot be cut into rows, or if another group has cut it already."""
    for param, name, _ in found:
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
        gather_class(local, name)


def mark_claimed(found: Sequence[Unclaimed]) -> None:
    """Mark these parameters: sharded parameters have taken their place."""
    for param, name, _ in found:
        setattr(param, CLAIMED, name)


# --- Before a forward ----------------------------------------------------------------------------------------


def refuse_tracing(root: FSDPState) -> None:
    """Raise RuntimeRefusedError if the forward that begins is traced or exported."""
    if is_traced():
        raise not_compiled(f"trace or export of {root.name or 'the root module'}")


def check_root(root: FSDPState) -> None:
    """Check that the root is one module, and that it is the first to run a forward.

    Raises:
        StateError: a module below it ran a forward before, or `core.fully_shard` has sharded it.
        RuntimeRefusedError: it has several modules.
    """
    if len(root.modules) > 1:
        raise RuntimeRefusedError(
            "fully_shard: the module whose forward comes first",
            expected="a single module, the root",
            got=f"one of the {len(root.modules)} modules of a group",
            remedy="Call fully_shard on the whole model as well, and run the model's forward.",
        )
    for name, module in root.modules[0].named_modules():
        state = state_of(module)
        if state is not None and not isinstance(state, type(root)):
            raise StateError(
                f"fully_shard: module {name!r}",
                expected="one fully_shard for the whole model",
                got="hwfsdp.core's for this module, hwfsdp's for the root",
                remedy="Shard this module with hwfsdp.fully_shard, too.",
            )
        if state is not None and state.root.states:
            raise StateError(
                f"fully_shard: module {name!r}",
                expected="the root to run the first forward",
                got="a forward of this module before the root's forward",
                remedy="Run the whole model once before calling a part of it by itself.",
            )


def not_compiled(subject: str) -> RuntimeRefusedError:
    """Make the error of a compiler that does not run the hooks of `fully_shard`."""
    return RuntimeRefusedError(
        subject,
        expected="a module that is not sharded",
        got="one whose hooks gather and free parameters",
        remedy="Load its state into a model that is not sharded, and compile or export this one. For training, use torch.compile.",
    )


def check_ready(group: ParamGroup) -> None:
    """Raise an error if the group cannot run.

    Raises:
        StateError: a parameter is still on the meta device.
        UsageError: trainable parameters have several original dtypes.
    """
    on_meta = [p.name for p in group.params if p.sharded_param.is_meta]
    if on_meta:
        raise StateError(
            f"parameter group {group.name!r}",
            expected="materialized parameters at the first forward",
            got=f"{', '.join(on_meta)} on the meta device",
            remedy="Call model.to_empty(device=…) and initialize the shards, or load a checkpoint.",
        )
    dtypes = {p.dtypes.orig for p in group.params if p.sharded_param.requires_grad}
    if len(dtypes) > 1:
        raise RefusedError(
            f"parameter group {group.name!r}",
            expected="trainable parameters of one dtype",
            got=" and ".join(sorted(map(str, dtypes))),
            remedy="Cast them, or wrap the modules with the other dtype in a fully_shard of their own.",
        )
    check_in_host_memory(group)
