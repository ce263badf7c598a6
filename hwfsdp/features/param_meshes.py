"""Meshes per parameter: one call of `fully_shard`, several groups, such as dense parameters and experts.

`shard_placement_fn` may return a `ShardPlacementResult`, which names a mesh in addition to the dimension. Expert parallelism
needs this. A rank holds only some of the experts, so fewer ranks share an expert than share the dense parameters around it:

    dense parameters    sharded over ranks 0 1 2 3
    experts 0 and 1     sharded over ranks 0   2
    experts 2 and 3     sharded over ranks   1   3

The parameters of one mesh are a group. The order is the same as in FSDP2: gathers go from the first group to the last. Reductions,
and the gathers that a backward starts ahead, go from the last group to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from hwfsdp.core import group as core
from hwfsdp.core.api import Unclaimed
from hwfsdp.core.private_torch import address_of, local_of
from hwfsdp.core.observer import moment
from hwfsdp.errors import UsageError
from hwfsdp.features.hybrid_sharding import HybridMesh, hybrid_mesh

if TYPE_CHECKING:
    from hwfsdp.features.feature_param import FSDPParam
    from hwfsdp.features.schedule import FSDPState


@dataclass(frozen=True)
class ShardPlacementResult:
    """A result of `shard_placement_fn`: the dimension along which a parameter is cut, and the mesh over which it is cut.

    Attributes:
        placement: `Shard(dim)`; None: `Shard(0)`.
        mesh_info: the mesh, 1D or 2D with names, as in `fully_shard(mesh=…)`; torch's `FSDPMeshInfo` works, too. torch's own
            `ShardPlacementResult` works in place of this class.
    """

    placement: Shard | None
    mesh_info: Any


class Choice(NamedTuple):
    """Where one parameter is cut: what the user's function returned (None: `Shard(0)`), and over which mesh."""

    placement: Any
    mesh: HybridMesh


def choices_of(
    found: Sequence[Unclaimed], ask: Callable[[nn.Parameter], Any] | None, mesh: HybridMesh
) -> list[Choice]:
    """Ask the user's function once for each parameter. Without a function, or if it names no mesh: `mesh`, the mesh of the call.

    Raises:
        UsageError: a mesh does not fit, or parameters on two meshes share memory.
    """
    if ask is None:
        return [Choice(None, mesh) for _ in found]
    choices: list[Choice] = []
    # By id of a mesh's description. The description is kept beside the mesh, so that no other object gets its id.
    known: dict[int, tuple[Any, HybridMesh]] = {}
    for param, name, _ in found:
        result = ask(param)
        if not hasattr(result, "mesh_info"):
            choices.append(Choice(result, mesh))
            continue
        info = result.mesh_info
        if id(info) not in known:
            subject = f"fully_shard(shard_placement_fn=…): parameter {name!r}"
            known[id(info)] = info, resolve(info, mesh, subject)
        choices.append(Choice(result.placement, known[id(info)][1]))
    check_memory(found, choices)
    return choices


def by_mesh(params: Sequence[FSDPParam]) -> list[list[FSDPParam]]:
    """Return the parameters of each mesh, in the order of their first parameters."""
    found: dict[Any, list[FSDPParam]] = {}
    for param in params:
        found.setdefault(ranks_of(param.mesh), []).append(param)
    return list(found.values())


# --- The meshes ----------------------------------------------------------------------------------------------


def ranks_of(mesh: HybridMesh) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the groups of ranks over which this mesh shards and replicates. Parameters of one group have the same two."""
    return mesh.shard.group, mesh.replicate.group


def resolve(info: Any, around: HybridMesh, subject: str) -> HybridMesh:
    """Return the mesh that a result names, as this process sees it.

    Args:
        info: a DeviceMesh, or an object with the attributes of torch's `FSDPMeshInfo`: `mesh`, `shard_mesh_dim`,
            `replicate_mesh_dim`, and, if `mesh` was taken out of a mesh of all parallelisms, `spmd_mesh` and `dp_mesh_dims`.
        around: the mesh of the call.

    Raises:
        UsageError: this is not a mesh to shard over, or it does not fit the mesh of the call.
    """
    mesh = info if isinstance(info, DeviceMesh) else getattr(info, "mesh", None)
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
    return hybrid_mesh(mesh if dims is None else info.spmd_mesh, dims)


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


def check_memory(found: Sequence[Unclaimed], choices: Sequence[Choice]) -> None:
    """Raise UsageError if parameters on two meshes share memory: sharding would separate them."""
    seen: dict[Any, tuple[str, HybridMesh]] = {}
    for (param, name, _), (_, mesh) in zip(found, choices, strict=True):
        address = address_of(local_of(param))
        other, others_mesh = seen.setdefault(address, (name, mesh))
        if ranks_of(mesh) != ranks_of(others_mesh):
            raise UsageError(
                f"fully_shard(shard_placement_fn=…): parameter {name!r}",
                expected=f"the mesh of {other!r}, with which it shares its memory",
                got="another one",
                remedy="Tie them as one nn.Parameter, or give one of them its own memory.",
            )


# --- The groups ----------------------------------------------------------------------------------------------


def suffixes_of(meshes: Sequence[HybridMesh], mesh: HybridMesh) -> list[str]:
    """Return a suffix for the name of each group of one module, such as " [efsdp]". The group on `mesh`, or else the first one, has ""."""
    names = ["×".join(each.mesh.mesh_dim_names or ()) or f"{each.size} ranks" for each in meshes]
    names = [name if names.count(name) == 1 else f"{name}, {i}" for i, name in enumerate(names)]
    keys = [ranks_of(each) for each in meshes]
    plain = keys.index(ranks_of(mesh)) if ranks_of(mesh) in keys else 0
    return ["" if i == plain else f" [{name}]" for i, name in enumerate(names)]


def groups_before(state: FSDPState) -> list[core.ParamGroup]:
    """Return all groups of the module whose forward ended before this module's, the last group first. [] if there is none."""
    places = state.groups[0].post_forward_indices
    order: Any = state.comm_ctx.post_forward_order[: places[-1] if places else 0]
    other: Any = next((group.state for group in reversed(order) if group.state is not state), None)
    return other.groups[::-1] if other else []


@contextmanager
def reduced_together(state: FSDPState) -> Iterator[None]:
    """Let the reductions of a module's groups run together. They wait for reductions of other modules, but not for each other."""
    comm_ctx, most = state.comm_ctx, state.comm_ctx.max_reductions
    if any(group.has_late_gradients for group in state.groups):
        with moment("post_backward_rs_wait", state.groups[0]):
            comm_ctx.wait_for_reductions(leave=most - 1)
    comm_ctx.max_reductions = most - 1 + len(state.groups)
    try:
        yield
    finally:
        comm_ctx.max_reductions = most
