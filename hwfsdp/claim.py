"""What a call of `fully_shard` claims: which parameters, in which places, cut how; and whether it may.

A call claims the parameters below its modules that no earlier call has claimed. Everything that can be wrong is found
here, before anything is changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hwfsdp import advice, compat
from hwfsdp.errors import UnsupportedError, UsageError
from hwfsdp.extensions import METHODS, Extension
from hwfsdp.hooks import state_of
from hwfsdp.mesh import ShardMesh, is_in_place, smaller_mesh
from hwfsdp.param import Slot
from hwfsdp.placement import Spread, spread

PlacementFn = Callable[[nn.Parameter], Any]


class Claim(NamedTuple):
    """A parameter to shard.

    Attributes:
        slots: all places where it is registered; fqn: the name of the first, from the module given.
        spread: how it is to lie over the ranks.
    """

    param: nn.Parameter
    slots: list[Slot]
    fqn: str
    spread: Spread


def claim(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter], choose: PlacementFn | None, mesh: ShardMesh
) -> list[Claim]:
    """The parameters below `modules` to claim, each with all its places, in order of registration.

    Args:
        choose: gives the `Shard` of a parameter, None for `Shard(0)`.

    Raises:
        UsageError, UnsupportedError: a parameter cannot be sharded, or not in this way.
    """
    claims = []
    for param, fqn, slots in parameters_to_claim(modules, ignored):
        _check_param(fqn, param)
        dim = _chosen_dim(fqn, param, choose, mesh)
        claims.append(Claim(param, slots, fqn, spread(param, dim, mesh, fqn)))
    return claims


class Unclaimed(NamedTuple):
    """A parameter that no group has: its first name, and all places where it is registered, the first one first."""

    param: nn.Parameter
    fqn: str
    slots: list[Slot]


def parameters_to_claim(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[Unclaimed]:
    """The parameters that a call of `fully_shard` makes one group of, frozen ones included.

    They are those of `managed_modules`, without those in `ignored`, in the order in which modules and their parameters were
    registered. Every rank makes this list for itself, and the flat buffers of all ranks have to fit together, so the
    order must follow from the model alone.

    A parameter may be registered at several places, in two modules or twice in one: a *tied* parameter, one object with
    several names. It is listed once, where it comes first, with all its places: whoever exchanges it later has to
    exchange it at every one of them. `module.named_parameters(recurse=False, remove_duplicate=False)` lists a
    module's own parameters with all their names.

    Returns:
        For each an `Unclaimed(param, fqn, slots)`: the fqn is the prefix that `managed_modules` gives and the name in that
        module, of its first place; slots are its places (`Slot(module, name)`), each once, in order.
    """
    found: dict[nn.Parameter, Unclaimed] = {}
    for prefix, module in managed_modules(modules):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param not in ignored:
                unclaimed = found.setdefault(param, Unclaimed(param, prefix + name, []))
                unclaimed.slots.append(Slot(module, name))
    return list(found.values())


def managed_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose parameters a call of `fully_shard` is about, with their prefixes.

    These are `modules` themselves, and all modules below them, down to those that have a state already (`state_of(module)`
    is not None): an earlier call has sharded these, and they and everything below them are left to it.

    In the order of `nn.Module.named_modules`: a module comes before what is below it, children in the order of
    registration (`named_children`), everything below one child before the next one. A module that is reached twice, since it
    is registered at two places, comes once, where it is reached first.

    Args:
        modules: not sharded yet; none of them is below another.

    Yields:
        (prefix, module). A prefix is what to put before the name of a module's parameter: "" for `modules` themselves, and
        "blocks.0.mlp." for what is called `blocks.0.mlp` in the one of `modules` that it is in.
    """
    seen = set[nn.Module]()
    stack = [("", module) for module in reversed(modules)]
    while stack:
        prefix, current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        yield prefix, current
        children = [(f"{prefix}{name}.", c) for name, c in current.named_children() if state_of(c) is None]
        stack.extend(reversed(children))


def outermost(modules: Sequence[Any]) -> list[nn.Module]:
    """The modules given to `fully_shard`, each once, without those that are below others of them.

    Raises:
        UsageError: there is none, or one that cannot be sharded.
    """
    if not modules:
        raise UsageError(
            "fully_shard", expected="at least one module", got="an empty list", remedy="Leave the call out."
        )
    for module in modules:
        _check_module(module)
    below = {child for module in modules for child in module.modules() if child is not module}
    return [module for module in dict.fromkeys(modules) if module not in below]


def reshard_target(reshard: bool | int | None, mesh: ShardMesh, claims: Sequence[Claim]) -> ShardMesh | None:
    """Over which ranks parameters are sharded after forward; None: they stay whole.

    Raises:
        UsageError: a number that does not divide that of the shards.
        UnsupportedError: a number, and parameters that cannot be resharded to it.
    """
    if reshard is False or mesh.shard.group is None:
        return None
    if reshard is None or reshard is True:
        return mesh
    if reshard == 1:
        warnings.warn(
            "reshard_after_forward=1 is a world size: parameters stay whole after forward. Pass True to reshard them.",
            UserWarning,
            stacklevel=3,
        )
        return None
    smaller = smaller_mesh(mesh, reshard)
    special = [c.fqn for c in claims if isinstance(c.param, DTensor) or hasattr(c.param.data, METHODS[0])]
    if special and smaller is not mesh:
        raise UnsupportedError(
            "fully_shard(reshard_after_forward=<number of ranks>)",
            expected="plain parameters",
            got=f"DTensors, or tensors with {METHODS[0]}: {', '.join(special)}",
            remedy="Pass True or False.",
        )
    uneven = [c.fqn for c in claims if c.spread.dim and c.param.shape[0] % smaller.size]
    if uneven and smaller is not mesh:
        raise UnsupportedError(
            "fully_shard(reshard_after_forward=<number of ranks>)",
            expected=f"a multiple of {smaller.size} rows where another dimension than 0 is sharded",
            got=", ".join(uneven),
            remedy="Pass True or False, or shard dimension 0.",
        )
    return smaller


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(
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
    if state_of(module) is not None:
        raise UsageError(
            "fully_shard",
            expected="a module that was not sharded yet",
            got=f"{type(module).__name__}, which was",
            remedy="Call it once per module, children before their parents.",
        )


def _check_param(name: str, param: nn.Parameter) -> None:
    subject = f"fully_shard: parameter {name!r}"
    if advice.is_claimed(param):
        raise UsageError(
            subject,
            expected="a parameter of one group only",
            got="one that is tied to a parameter of another group",
            remedy="Shard the modules that share it in one call: fully_shard([a, b]), or that of a module above both.",
        )
    if param.ndim == 0:
        raise UsageError(
            subject,
            expected="at least one dimension to shard",
            got="a scalar",
            remedy="Make it 1D with one element: nn.Parameter(torch.tensor([value])).",
        )
    local = compat.local_of(param) if isinstance(param, DTensor) else param
    Extension.of(local, name)  # raises if it is half of one
    if not local.is_contiguous():
        raise UnsupportedError(
            subject,
            expected="contiguous memory",
            got=f"shape {tuple(param.shape)} with strides {param.stride()}",
            remedy="Assign a contiguous copy first: nn.Parameter(p.detach().contiguous()).",
        )


def _chosen_dim(name: str, param: nn.Parameter, choose: PlacementFn | None, mesh: ShardMesh) -> int:
    placement = choose(param) if choose else None
    subject = f"fully_shard(shard_placement_fn=…): parameter {name!r}"
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        error = UnsupportedError if hasattr(placement, "mesh_info") else UsageError
        raise error(
            subject,
            expected="a Shard, or None for Shard(0)",
            got=repr(placement),
            remedy="Parameters on meshes of their own need a fully_shard call of their own.",
        )
    local = compat.local_of(param) if isinstance(param, DTensor) else param
    dim = placement.dim + local.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < local.ndim:
        raise UsageError(
            subject,
            expected=f"a dimension of shape {tuple(local.shape)}",
            got=repr(placement),
            remedy="Return Shard(dim) with -ndim <= dim < ndim.",
        )
    if dim and local.shape[dim] % mesh.size:
        raise UnsupportedError(
            subject,
            expected=f"a multiple of {mesh.size} ranks in dimension {dim}",
            got=f"shape {tuple(local.shape)}",
            remedy="Only dimension 0 is padded: return Shard(0) for it, or another dimension.",
        )
    return dim


def move_to(device: torch.device, claims: Sequence[Claim], modules: Sequence[nn.Module]) -> None:
    """Parameters and buffers to the mesh's device; those on meta stay there until `to_empty`."""
    buffers = [b for _, owner in managed_modules(modules) for b in owner.buffers(recurse=False)]
    tensors: list[Tensor] = [*(c.param for c in claims), *buffers]
    for tensor in tensors:
        if not is_in_place(tensor, device):
            compat.move_in_place(tensor, device)
