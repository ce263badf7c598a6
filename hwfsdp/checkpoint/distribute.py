"""Whole tensors into shards.

`broadcast_state_dict` starts from one rank that has a full state dict. `distribute_state_dict` starts from ranks that all have
it. Both fill a state dict whose tensors may be sharded in any way, or not at all. Each rank cuts its part out of the whole
tensor; `layout` gives the extent of the part. Entries are matched by their paths. So nested state dicts, such as an optimizer's,
need not be flattened.

Note [Agreeing before moving]
    If a rank found out halfway that a shape does not fit, it would leave the other ranks in a collective, and all ranks
    with a mixture of two models. So `broadcast_state_dict` has three phases. *Plan*: the source announces paths, shapes and
    dtypes, and sends all values that are not tensors. *Agree*: each rank compares the plan with its own state dict, and tells
    all others which entries do not fit. If any rank, including the source, has such an entry, every rank raises the same
    error, and nothing has changed. *Move*: tensors travel one at a time, through a buffer as large as the largest tensor.
    A rank needs no other memory besides its own state dict.

Left out: a selection. Rank 0 sends all of its tensors, even those for which no rank has a place. DTensors with a `Partial`
placement, whose values are not summed yet, cannot be filled.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection, Iterable, MutableMapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.boxes import bytes_of, check_data, check_no_sum, identity_of, is_expanded, part_of
from hwfsdp.checkpoint.boxes import refuse_sharded_tensor
from hwfsdp.checkpoint.error_messages import KeyPath, refuse, show, told
from hwfsdp.checkpoint.manifest import TensorEntry
from hwfsdp.checkpoint.state_dict import to_cpu
from hwfsdp.checkpoint.traverse import items_of, leaves_of, map_leaves
from hwfsdp.compat import device_types, dtensor, is_sharded_tensor
from hwfsdp.errors import StateError
from hwfsdp.layout.extents import shard_of

Plan = dict[KeyPath, Any]  # by path: a TensorEntry, the value itself, or {} for any empty container


@torch.no_grad()
def broadcast_state_dict(
    full_state_dict: dict[Any, Any],
    local_state_dict: dict[Any, Any],
    device: torch.device,
    pg: dist.ProcessGroup | None = None,
    strict: bool = False,
    cpu_offload: bool = False,
    *,
    allow_cast: bool = False,
) -> None:
    """Fill every rank's `local_state_dict` from the `full_state_dict` of rank 0 of the group, in place.

    A collective over `pg`. Tensors with memory of their own are filled in place. Tensors on the meta device are replaced. So are
    plain tensors on another kind of device than `device`. Plain 0-d tensors that are replaced go to the CPU, because optimizers
    count their steps there. Entries that are not tensors get the value of rank 0. Entries on only one side stay as they are. So does
    None in the place of a tensor, unless the tensor has 0 dims; it goes to the CPU. A None of rank 0 replaces what is there. The
    outermost dict stays the same object; the containers inside are replaced by new ones.

    Args:
        full_state_dict: whole tensors. Only rank 0 reads this argument.
        strict: remove from `local_state_dict` the keys of dicts that rank 0 does not have.
        cpu_offload: move the filled tensors of `local_state_dict` to the CPU.
        allow_cast: allow another dtype on rank 0. Each tensor keeps its dtype, and values are converted to it.

    Raises:
        UsageError: on all ranks, if on any of them a shape differs, a dtype differs (without `allow_cast`), a tensor meets another
            value, a DTensor is not cut as its placements say, one tensor would get two different values, or rank 0 has a DTensor, a
            meta tensor or a value that cannot be pickled.
        UnsupportedError: on all ranks, if any of them has a `Partial` placement or a ShardedTensor.
        StateError: there is no process group.
    """
    if not dist.is_initialized():
        remedy = "Call init_process_group first, or distribute_state_dict in a single process."
        refuse("broadcast_state_dict", "a process group", "none", remedy, StateError)
    agreement = Agreement(pg, "broadcast_state_dict")
    is_source = agreement.rank == 0
    plan = _send_plan(agreement, full_state_dict if is_source else None, pg)
    source = dict(leaves_of(full_state_dict)) if is_source else {}

    agreement.step(
        "comparing",
        lambda: check_plan(plan, local_state_dict, allow_cast),
        lambda ties: check_ties(plan, source, chain(*ties)),
    )
    device = torch.device(device)
    # The source sends its tensors from where they are, or from a copy of one at a time.
    sizes = [0 if is_source else info.nbytes for info in plan.values() if isinstance(info, TensorEntry)]
    buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=_way(pg, device))

    def receive(path: KeyPath) -> Tensor:
        return _broadcast(source.get(path), plan[path], buffer, pg)

    _fill(plan, local_state_dict, receive, device, cpu_offload)
    if strict:
        _prune(local_state_dict, {path[:n] for path in plan for n in range(len(path) + 1)})


@torch.no_grad()
def distribute_state_dict(
    full_state_dict: dict[Any, Any],
    local_state_dict: dict[Any, Any],
    device: torch.device,
    pg: dist.ProcessGroup | None = None,
    *,
    allow_cast: bool = False,
) -> None:
    """Fill `local_state_dict` from this rank's `full_state_dict`, in place, by the rules of `broadcast_state_dict`.

    There is no communication. No tensor shares memory with the full state dict. The function also adds entries that only the dicts
    and lists of the full state dict have, if no tensor in them could be sharded: values that are not tensors, and 0-d tensors, which
    go to the CPU.

    Args:
        pg: has no effect, as in torch. allow_cast: as in `broadcast_state_dict`.

    Raises:
        UsageError, UnsupportedError: as `broadcast_state_dict`, but only on this rank. Nothing was changed.
    """
    plan = _plan_of(full_state_dict)
    source = dict(leaves_of(full_state_dict))
    check_ties(plan, source, check_plan(plan, local_state_dict, allow_cast))
    _fill(plan, local_state_dict, lambda path: source[path].detach(), torch.device(device), cpu_offload=False)
    _add_missing(full_state_dict, local_state_dict)


# --- Plan --------------------------------------------------------------------------------------------------


def _plan_of(full_state_dict: dict[Any, Any]) -> Plan:
    plan: Plan = {}
    for path, value in leaves_of(full_state_dict):
        if not isinstance(value, Tensor):
            plan[path] = value if items_of(value) is None else {}
            continue
        check_data(path, value)
        if isinstance(value, DTensor) or value.layout != torch.strided:
            got = type(value).__name__ if isinstance(value, DTensor) else str(value.layout)
            remedy = "Call gather_state_dict for DTensors, and to_dense for sparse tensors."
            refuse(path, "a whole, dense tensor in the full state dict", got, remedy)
        plan[path] = TensorEntry(path, value.dtype, tuple(value.shape))
    return plan


def _send_plan(
    agreement: Agreement, full_state_dict: dict[Any, Any] | None, pg: dist.ProcessGroup | None
) -> Plan:
    """Return the plan of rank 0, which has the full state dict, on every rank. If rank 0 fails, raise its error on every rank."""
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
            expected = "what can be sent to other ranks: a tensor, or something that can be pickled"
            refuse(path, expected, told(error), "Take it out of the full state dict.")


# --- Agree -------------------------------------------------------------------------------------------------


def check_plan(plan: Plan, local_state_dict: dict[Any, Any], allow_cast: bool) -> list[list[int]]:
    """Raise an error unless each entry of the plan fits this rank's entry at the same path, if there is one.

    `allow_cast`: any dtype fits.

    Returns:
        The pairs of tensors, by their numbers in the plan, for which this rank has one tensor at two places.
    """
    places = dict(leaves_of(local_state_dict))
    inner = {path[:n] for path in places for n in range(len(path))}
    planned = {path[:n] for path in plan for n in range(len(path))}
    for path, place in places.items():
        if path in plan:
            check_entry(path, plan[path], place, allow_cast)
        elif path in planned and items_of(place) is None:
            refuse(path, "what can hold the entries of a container", type(place).__name__)
    first: dict[Any, int] = {}
    ties = []
    for number, (path, coming) in enumerate(plan.items()):
        if path in inner and not isinstance(coming, dict):
            refuse(path, "a container, as this rank has", "a leaf")
        if isinstance(coming, TensorEntry) and isinstance(place := places.get(path), Tensor):
            has_memory = not place.is_meta and part_of(place).numel()
            other = first.setdefault(identity_of(place) if has_memory else id(place), number)
            ties += [[other, number]] if other != number else []
    return ties


def check_entry(path: KeyPath, coming: Any, place: Any, allow_cast: bool) -> None:
    """Raise an error unless what is coming, an entry of a `Plan`, fits the place; see `check_plan`."""
    if isinstance(coming, dict):
        if items_of(place) is None:
            refuse(path, f"{type(place).__name__}, as this rank has", "an empty container")
        return
    if not isinstance(coming, TensorEntry):
        if isinstance(place, Tensor) and coming is not None:
            refuse(path, f"a tensor of shape {tuple(place.shape)}", type(coming).__name__)
        return
    if is_sharded_tensor(place):
        refuse_sharded_tensor(path)
    if place is None:
        return
    if not isinstance(place, Tensor):
        refuse(path, f"{type(place).__name__}, as this rank has", f"a tensor of shape {coming.shape}")
    expected, got = (f"shape {tuple(t.shape)} and {t.dtype}" for t in (place, coming))
    if tuple(place.shape) != coming.shape:
        refuse(path, expected, got)
    if place.dtype != coming.dtype and not allow_cast:
        remedy = "Pass allow_cast=True if the values may become what that dtype can hold."
        refuse(path, expected, got, remedy)
    check_no_sum(path, place)
    if not place.is_meta:
        check_data(path, place)


def check_ties(plan: Plan, source: dict[KeyPath, Any], ties: Iterable[list[int]]) -> None:
    """Raise an error if two tensors that a rank has at one place differ in the source."""
    paths = [*plan]
    for path, other in ((paths[number], paths[first]) for first, number in ties):
        one, two = source[path], source[other]
        if one.dtype != two.dtype or not torch.equal(bytes_of(one.cpu()), bytes_of(two.cpu())):
            expected = f"the same values as for {show(other)}, as both are one tensor in a rank's state dict"
            refuse(path, expected, "others in the full state dict", "Untie them before.")


# --- Move --------------------------------------------------------------------------------------------------


def _way(pg: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Return the device on which tensors travel: `device` if the group can move tensors there, else a device of the group's backend."""
    group = pg if pg is not None else dist.group.WORLD
    kinds = device_types(group) if group is not None else []
    return device if device.type in kinds or not kinds else torch.device(kinds[0])


def _broadcast(
    tensor: Tensor | None, info: TensorEntry, buffer: Tensor, pg: dist.ProcessGroup | None
) -> Tensor:
    """Return the tensor of rank 0, on every rank. Other ranks get it in the buffer, which the next call overwrites.

    The tensor is sent as bytes, so its dtype does not matter.
    """
    flat = buffer[: info.nbytes] if tensor is None else bytes_of(tensor.to(buffer.device))
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
    """Receive every tensor of the plan, in the plan's order. Store the entries for which this rank has a place."""
    places = dict(leaves_of(local_state_dict))
    written: dict[int, Tensor] = {}  # by the id of the old tensor, so that tied tensors stay tied
    filled: dict[KeyPath, Any] = {}
    for path, coming in plan.items():
        if isinstance(coming, TensorEntry):
            whole = receive(path)
            if path in places and (place := places[path]) is None:
                if not coming.shape:
                    filled[path] = _copy_to(whole, torch.device("cpu"), coming.dtype)
            elif path in places:
                written[id(place)] = write(whole, written.get(id(place), place), device)
                filled[path] = to_cpu(written[id(place)]) if cpu_offload else written[id(place)]
        elif not isinstance(coming, dict):
            filled[path] = coming

    def fill_in(path: KeyPath, leaf: Any, _: Any) -> Any:
        # An empty container is copied, because entries may be added to it.
        empty = isinstance(leaf, MutableMapping | list)
        return filled[path] if path in filled else copy.copy(leaf) if empty else leaf

    new = map_leaves(fill_in, dict(local_state_dict), by_path=True)
    for key, value in new.items():
        local_state_dict[key] = value


def write(whole: Tensor, place: Tensor, device: torch.device) -> Tensor:
    """Write this rank's values into `place` and return it. If that is not possible, return a new tensor with these values."""
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
    """Return a contiguous copy, never a view: a view of a part would keep the whole tensor alive."""
    return torch.empty(part.shape, dtype=dtype, device=device).copy_(part.detach())


def _add_missing(full: Any, local: Any) -> None:
    """Add to dicts and lists the entries that only the full ones have, unless an entry contains a tensor that could be sharded."""
    theirs, mine = items_of(full) or {}, items_of(local)
    if mine is None:
        return
    for key, child in theirs.items():
        if key in mine:
            _add_missing(child, mine[key])
        elif all(not isinstance(value, Tensor) or value.ndim == 0 for _, value in leaves_of({key: child})):
            new = map_leaves(_apart, child)
            if isinstance(local, MutableMapping):
                local[key] = new
            elif isinstance(local, list) and key == len(local):
                local.append(new)


def _apart(_: KeyPath, leaf: Any, __: Any) -> Any:
    return _copy_to(leaf, torch.device("cpu"), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _prune(tree: Any, known: Collection[KeyPath], at: KeyPath = ()) -> None:
    """Remove the keys of dicts whose paths do not lead to an entry of the plan. `known`: these paths, and all above them."""
    for key, child in (items_of(tree) or {}).items():
        if (*at, key) in known:
            _prune(child, known, (*at, key))
        elif isinstance(tree, dict):
            del tree[key]
