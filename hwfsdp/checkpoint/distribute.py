"""Whole tensors into shards.

`broadcast_state_dict` starts from one rank that has a full state dict, `distribute_state_dict` from ranks that all
have it. Both fill a state dict whose tensors are sharded, or not, in whatever way: each rank cuts its part out of
the whole, at the extent that `layout` gives it. Entries are matched by their paths, so nested state dicts, those of
optimizers for example, need not be flattened.

Note [Agreeing before moving]
    If a rank found out halfway that a shape does not fit, it would leave the other ranks in a collective, and all ranks
    with a mixture of two models. So `broadcast_state_dict` has three phases. *Plan*: the source announces paths, shapes and
    dtypes, and sends all values that are not tensors. *Agree*: each rank compares the plan with its own state dict, and tells
    all others which entries do not fit. If any rank, the source included, has such an entry, every rank raises the same
    error, and nothing has changed. *Move*: tensors travel one at a time, through a buffer as large as the largest tensor.
    A rank needs no other memory besides its own state dict.

Left out: tensors that no rank has asked for travel, too. Gradients that are still to be summed (`Partial`) cannot be filled.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, MutableMapping
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.messages import KeyPath, refuse
from hwfsdp.checkpoint.state_dict import to_cpu
from hwfsdp.checkpoint.tensors import (
    bytes_of,
    check_data,
    check_no_sum,
    is_expanded,
    part_of,
    refuse_sharded_tensor,
)
from hwfsdp.checkpoint.traverse import items_of, leaves_of, map_leaves
from hwfsdp.compat import device_types, dtensor, is_sharded_tensor
from hwfsdp.errors import StateError
from hwfsdp.layout.extents import shard_of

Plan = dict[KeyPath, Any]  # what will come there: a TensorInfo, an EmptyContainer, or the value itself


class TensorInfo(NamedTuple):
    """A tensor that is going to be sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class EmptyContainer(NamedTuple):
    """A container without entries, of this type."""

    type_name: str


@torch.no_grad()
def broadcast_state_dict(
    full_state_dict: dict[Any, Any],
    local_state_dict: dict[Any, Any],
    device: torch.device,
    pg: dist.ProcessGroup | None = None,
    strict: bool = False,
    cpu_offload: bool = False,
    *,
    cast: bool = False,
) -> None:
    """Fill every rank's `local_state_dict` from the `full_state_dict` of rank 0 of the group, in place.

    A collective over `pg`. Tensors with memory of their own are written where they are. Those on the meta device are
    replaced, as are plain ones that are on another kind of device than `device`; plain 0-d ones then go to the CPU,
    where optimizers count their steps. Entries that are not tensors take rank 0's value. What one side alone has is
    left as it is. The outermost dict stays the same object, containers inside are replaced by new ones.

    Args:
        full_state_dict: whole tensors; of other ranks than 0 it is not looked at.
        strict: keys of dicts that rank 0 does not have are removed from `local_state_dict`.
        cpu_offload: tensors of `local_state_dict` that were filled move to the CPU.
        cast: tensors keep their dtype where rank 0 has another one; the values become what it can hold.

    Raises:
        UsageError: on all ranks, if on any of them a shape or, unless `cast`, a dtype differs, a tensor faces what is none, a DTensor
            is not cut as its placements say, or rank 0 has a DTensor, a meta tensor or what cannot be pickled.
        UnsupportedError: likewise, for a `Partial` placement or a ShardedTensor.
        StateError: there is no process group.
    """
    if not dist.is_initialized():
        remedy = "Call init_process_group first, or distribute_state_dict in a single process."
        refuse("broadcast_state_dict", "a process group", "none", remedy, StateError)
    agreement = Agreement(pg, "broadcast_state_dict")
    is_source = agreement.rank == 0
    plan = _send_plan(agreement, full_state_dict if is_source else None, pg)
    agreement.step("comparing", lambda: check_plan(plan, local_state_dict, cast))
    source = dict(leaves_of(full_state_dict)) if is_source else {}
    device = torch.device(device)
    buffer = _buffer_for(plan, source, _way(pg, device))

    def receive(path: KeyPath) -> Tensor:
        return _broadcast(source.get(path), plan[path], buffer, pg)

    _fill(plan, local_state_dict, receive, device, cpu_offload)
    if strict:
        _prune(local_state_dict, plan)


@torch.no_grad()
def distribute_state_dict(
    full_state_dict: dict[Any, Any],
    local_state_dict: dict[Any, Any],
    device: torch.device,
    pg: dist.ProcessGroup | None = None,
    *,
    cast: bool = False,
) -> None:
    """Fill `local_state_dict` from the `full_state_dict` that this rank has, in place, as `broadcast_state_dict` does.

    No communication, and no tensor shares memory with the full one. What dicts and lists of the full one alone have is
    added where no tensor in it could be cut: values that are no tensors, and 0-d tensors, on the CPU.

    Args:
        pg: without effect, as in torch. cast: as in `broadcast_state_dict`.

    Raises:
        UsageError, UnsupportedError: as `broadcast_state_dict`, but on this rank only; nothing was touched.
    """
    plan = _plan_of(full_state_dict)
    check_plan(plan, local_state_dict, cast)
    source = dict(leaves_of(full_state_dict))
    _fill(plan, local_state_dict, lambda path: source[path].detach(), torch.device(device), cpu_offload=False)
    _add_missing(full_state_dict, local_state_dict)


# --- Plan --------------------------------------------------------------------------------------------------


def _plan_of(full_state_dict: dict[Any, Any]) -> Plan:
    plan: Plan = {}
    for path, value in leaves_of(full_state_dict):
        if not isinstance(value, Tensor):
            plan[path] = value if items_of(value) is None else EmptyContainer(type(value).__name__)
            continue
        check_data(path, value)
        if isinstance(value, DTensor) or value.layout != torch.strided:
            got = type(value).__name__ if isinstance(value, DTensor) else str(value.layout)
            remedy = "Call gather_state_dict for DTensors, and to_dense for sparse tensors."
            refuse(path, "a whole, dense tensor in the full state dict", got, remedy)
        plan[path] = TensorInfo(tuple(value.shape), value.dtype)
    return plan


def _send_plan(
    agreement: Agreement, full_state_dict: dict[Any, Any] | None, pg: dist.ProcessGroup | None
) -> Plan:
    """The plan of the rank that has the full state dict, on every rank; its error, on every rank, if it has none."""
    plan: list[Any] = [None]

    def prepare() -> None:
        if full_state_dict is not None:
            plan[0] = _plan_of(full_state_dict)
            _check_pickles(plan[0])

    agreement.step("planning", prepare)
    dist.broadcast_object_list(plan, group=pg, group_src=0)
    sent: Plan = plan[0]
    return sent


def _check_pickles(plan: Plan) -> None:
    for path, value in plan.items():
        try:
            pickle.dumps((path, value))
        except Exception as error:
            got = f"{type(value).__name__} ({' '.join(str(error).split())})"
            expected = "what can be sent to other ranks: a tensor, or something that can be pickled"
            refuse(path, expected, got, "Take it out of the full state dict.")


# --- Agree -------------------------------------------------------------------------------------------------


def check_plan(plan: Plan, local_state_dict: dict[Any, Any], cast: bool | None = None) -> None:
    """Raise unless everything in the plan that this rank has a place for fits there.

    Args:
        cast: whether in any dtype. None: it must fit, and the caller has no such option to recommend.
    """
    places = dict(leaves_of(local_state_dict))
    inner = {path[:n] for path in places for n in range(len(path))}
    planned = {path[:n] for path in plan for n in range(len(path))}
    for path, place in places.items():
        if path in plan:
            _check_entry(path, plan[path], place, cast)
        elif path in planned and items_of(place) is None:
            refuse(path, "what can hold the entries of a container", type(place).__name__)
    for path, coming in plan.items():
        if path in inner and not isinstance(coming, EmptyContainer):
            refuse(path, "a container, as this rank has", "a leaf")


def _check_entry(path: KeyPath, coming: Any, place: Any, cast: bool | None) -> None:
    if isinstance(coming, EmptyContainer):
        if items_of(place) is None:
            refuse(path, f"{type(place).__name__}, as this rank has", f"an empty {coming.type_name}")
        return
    if not isinstance(coming, TensorInfo):
        if isinstance(place, Tensor):
            refuse(path, f"a tensor of shape {tuple(place.shape)}", type(coming).__name__)
        return
    if is_sharded_tensor(place):
        refuse_sharded_tensor(path)
    if not isinstance(place, Tensor):
        refuse(path, f"{type(place).__name__}, as this rank has", f"a tensor of shape {coming.shape}")
    _check_kind(path, coming, place, cast)
    check_no_sum(path, place)
    if not place.is_meta:
        check_data(path, place)


def _check_kind(path: KeyPath, coming: TensorInfo, place: Tensor, cast: bool | None) -> None:
    expected, got = (f"shape {tuple(t.shape)} and {t.dtype}" for t in (place, coming))
    if tuple(place.shape) != coming.shape or (place.dtype != coming.dtype and cast is None):
        refuse(path, expected, got)
    if place.dtype != coming.dtype and not cast:
        remedy = "Pass cast=True if the values may become what that dtype can hold."
        refuse(path, expected, got, remedy)


# --- Move --------------------------------------------------------------------------------------------------


def _way(pg: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """The device of tensors while they travel: `device`, if the group can move tensors there."""
    group = pg if pg is not None else dist.group.WORLD
    kinds = device_types(group) if group is not None else []
    return device if device.type in kinds or not kinds else torch.device(kinds[0])


def _buffer_for(plan: Plan, source: dict[KeyPath, Any], way: torch.device) -> Tensor:
    """Memory, as bytes, for the largest tensor of the plan; on the source, for the largest that cannot be sent in place."""
    infos = {path: info for path, info in plan.items() if isinstance(info, TensorInfo)}
    sizes = [
        info.nbytes
        for path, info in infos.items()
        if path not in source or not _lies_ready(source[path], way)
    ]
    return torch.empty(max(sizes, default=0), dtype=torch.uint8, device=way)


def _lies_ready(tensor: Tensor, way: torch.device) -> bool:
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == way.type and tensor.is_contiguous() and not is_lazy


def _broadcast(
    tensor: Tensor | None, info: TensorInfo, buffer: Tensor, pg: dist.ProcessGroup | None
) -> Tensor:
    """The tensor of rank 0, there, or in the buffer, which the next one overwrites; as bytes, whatever the dtype."""
    flat = buffer[: info.nbytes]
    if tensor is not None and _lies_ready(tensor, buffer.device):
        flat = bytes_of(tensor)
    elif tensor is not None:
        flat.view(info.dtype).view(info.shape).copy_(tensor)
    if flat.numel():
        dist.broadcast(flat, group=pg, group_src=0)
    return flat.view(info.dtype).view(info.shape)


def _fill(
    plan: Plan,
    local_state_dict: dict[Any, Any],
    receive: Callable[[KeyPath], Tensor],
    device: torch.device,
    cpu_offload: bool,
) -> None:
    """Receive every tensor of the plan in its order, and put what this rank has a place for there."""
    places = dict(leaves_of(local_state_dict))
    written: dict[int, Tensor] = {}  # by the id of its place: tied tensors stay tied
    filled: dict[KeyPath, Any] = {}
    for path, coming in plan.items():
        if isinstance(coming, TensorInfo):
            whole = receive(path)
            if path in places:
                place = places[path]
                written[id(place)] = _write(whole, written.get(id(place), place), device)
                filled[path] = to_cpu(written[id(place)]) if cpu_offload else written[id(place)]
        elif not isinstance(coming, EmptyContainer):
            filled[path] = coming

    def fill_in(path: KeyPath, leaf: Any, _: Any) -> Any:
        # an empty container gets a copy, to which entries may be added
        empty = isinstance(leaf, MutableMapping | list)
        return filled[path] if path in filled else copy.copy(leaf) if empty else leaf

    new = map_leaves(fill_in, dict(local_state_dict), by_path=True)
    for key, value in new.items():
        local_state_dict[key] = value


def _write(whole: Tensor, place: Tensor, device: torch.device) -> Tensor:
    """Write this rank's values into `place`, and return it; or return another tensor with these values."""
    part = whole
    if isinstance(place, DTensor):
        if place.device_mesh.get_coordinate() is None:
            return place
        part = shard_of(whole, place.device_mesh, place.placements)
    memory = part_of(place)
    elsewhere = not isinstance(place, DTensor) and place.ndim > 0 and place.device.type != device.type
    if not (memory.is_meta or elsewhere or is_expanded(memory)):
        memory.copy_(part)
        return place
    if not isinstance(place, DTensor):
        return _copy_to(part, device if place.ndim else torch.device("cpu"), place.dtype)
    local = _copy_to(part, torch.device(device), place.dtype)
    return dtensor(local, place.device_mesh, place.placements, place.shape, place.stride())


def _copy_to(part: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A contiguous copy, never a view: a part of a tensor would keep the whole alive."""
    return torch.empty(part.shape, dtype=dtype, device=device).copy_(part)


def _add_missing(full: Any, local: Any) -> None:
    """Add to dicts and list what only the full ones have, unless a tensor in it would have to be cut."""
    theirs, mine = items_of(full) or {}, items_of(local)
    if mine is None:
        return
    for key, child in theirs.items():
        if key in mine:
            _add_missing(child, mine[key])
        elif all(not isinstance(value, Tensor) or value.ndim == 0 for _, value in leaves_of({key: child})):
            new = map_leaves(_alone, child)
            if isinstance(local, MutableMapping):
                local[key] = new
            elif isinstance(local, list) and key == len(local):
                local.append(new)


def _alone(_: KeyPath, leaf: Any, __: Any) -> Any:
    return _copy_to(leaf.detach(), torch.device("cpu"), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _prune(tree: Any, plan: Plan, at: KeyPath = ()) -> None:
    """Remove the keys of dicts under which the plan has nothing."""
    known = {path[: len(at) + 1] for path in plan if path[: len(at)] == at}
    items = items_of(tree) or {}
    for key, child in items.items():
        if (*at, key) in known:
            _prune(child, plan, (*at, key))
        elif isinstance(tree, dict):
            del tree[key]
