"""State dicts gathered, offloaded, copied and compared.

`iterate_state_dict` applies one function to every tensor and keeps everything around it. The other functions call it with
particular functions. They have the arguments and results of torch's private helpers of the same names, with two exceptions:
container types are kept, and everything that cannot be done exactly is an error. The error has the path of keys, and is raised
before any tensor has moved.

    gather_state_dict             DTensors become whole tensors
    offload_state_dict_to_cpu     every tensor moves to the CPU
    create_cpu_state_dict         memory for a copy: the same shapes on the CPU, no values yet
    copy_state_dict               values into such memory
    check_state_dict_similarity   tells if the values would fit

If one object is at two places of a state dict, one object is at both places of the result.

Note [Gathering by extents]
    The ranks along one mesh dim send each other their data. Then the ranks along the next mesh dim send each other the data
    that they received, and so on. After all mesh dims that cut the tensor, from right to left, each rank holds all shards in
    row-major order. Collectives need equal sizes, so shards that are shorter than the first are padded before they are sent.
    `layout` computes the place of each shard in the whole tensor. It is right for uneven strided cuts, too, where torch's
    redistribution is wrong. We send bytes, not numbers, so every dtype can travel over every backend.

`ShardedTensor` is torch's class before DTensor. It records for each shard the box of the whole tensor and the rank that has it.
A rank may have several shards or none. So a gather needs no arithmetic: the ranks of its group send each other all their shards
at once, padded to equal lengths, and each rank puts every box in its place. Only torch makes ShardedTensors, and `distribute`
does not fill them.
"""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from hwfsdp.checkpoint.boxes import Box, bytes_of, check_data, check_writable, part_of, pieces_at
from hwfsdp.checkpoint.error_messages import KeyPath, refuse
from hwfsdp.checkpoint.traverse import ABSENT, CompanionMismatch, items_of, leaves_of, map_leaves
from hwfsdp.compat import all_gather_single, device_types, group_of_sharded_tensor, is_shard
from hwfsdp.compat import is_sharded_tensor, local_of, sharded_tensor_like, wrap_like
from hwfsdp.errors import StateError
from hwfsdp.layout.extents import held_extent

# (tensor, pg, device, companion or None) → the replacement of the tensor
TensorFunction = Callable[[Any, dist.ProcessGroup | None, torch.device | None, Any], Any]

SIMPLE = (int, float, str, bytes, io.BytesIO, torch.Size, type(None))  # leaves that any checkpoint can hold


@torch.no_grad()
def iterate_state_dict(
    iter_object: Any,
    sharded_tensor_func: TensorFunction,
    dtensor_func: TensorFunction,
    tensor_func: TensorFunction,
    *,
    pg: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    cpu_offload: bool = False,
    companion_obj: Any = None,
    ranks_only: Sequence[int] = (),
    type_check: bool = True,
    non_blocking: bool = True,
    allow_cast: bool = False,
) -> Any:
    """Return the state dict with each tensor replaced by the result of the function for its kind.

    The functions are called without gradients (`torch.no_grad`), so autograd does not record what they do.

    Args:
        pg, device: passed to the functions. `ranks_only` has ranks of `pg`.
        cpu_offload: move results to the CPU. It has no effect if there is a companion.
        companion_obj: a state dict of the same structure. Results are copied into its tensors, and the returned state dict has
            these tensors. The functions also get them as their last argument. None in it stands for no companion there.
        ranks_only: if not empty, the other ranks call the functions, too, but return {} (None if `iter_object` is not a dict).
        type_check: refuse leaves other than tensors, int, float, str, bytes, BytesIO, torch.Size and None. Without this check,
            such leaves are deep copies.
        non_blocking: for the copies into the companion. allow_cast: these copies may change the dtype.

    Raises:
        UsageError: the type check refuses a leaf, or a container contains itself. No function was called yet.
        CompanionMismatch: the companion has other keys, or a tensor that a result does not fit exactly.
    """
    _check_leaves(iter_object, type_check, needs_data=False)
    kept = _is_kept(ranks_only, pg)

    def visit(path: KeyPath, value: Any, companion: Any) -> Any:
        if not isinstance(value, Tensor):
            _check_pair(path, value, companion, allow_cast)
            return value if isinstance(value, SIMPLE) else copy.deepcopy(value)
        function = dtensor_func if isinstance(value, DTensor) else tensor_func
        function = sharded_tensor_func if is_sharded_tensor(value) else function
        result = function(value, pg, device, None if companion is ABSENT else companion)
        if not kept:
            return None
        if companion is not ABSENT and companion is not None:
            return _copy_into(path, result, companion, non_blocking, allow_cast)
        return to_cpu(result) if cpu_offload and isinstance(result, Tensor) else result

    result = map_leaves(visit, iter_object, ABSENT if companion_obj is None else companion_obj)
    if kept:
        return result
    return {} if isinstance(iter_object, dict) else None


def _is_kept(ranks_only: Sequence[int], pg: dist.ProcessGroup | None) -> bool:
    """True if this rank gets the result."""
    if not ranks_only:
        return True
    size = dist.get_world_size(pg)
    if not all(0 <= rank < size for rank in ranks_only):
        expected = f"ranks of the group, 0 to {size - 1}"
        refuse("ranks_only", expected, f"{tuple(ranks_only)}", "Leave it empty for all ranks.")
    return dist.get_rank(pg) in ranks_only


def _check_leaves(state_dict: Any, type_check: bool, needs_data: bool) -> None:
    for path, value in leaves_of(state_dict):
        if needs_data and isinstance(value, Tensor):
            for tensor in shards_in(value):
                check_data(path, tensor)
        elif type_check and items_of(value) is None and not isinstance(value, (Tensor, *SIMPLE)):
            expected = "a tensor, int, float, str, bytes, BytesIO, torch.Size or None"
            remedy = "Replace it by such values, or pass type_check=False for a deep copy."
            refuse(path, expected, type(value).__name__, remedy)


# --- Gather and offload ------------------------------------------------------------------------------------


@torch.no_grad()
def gather_state_dict(
    state_dict: dict[Any, Any],
    *,
    pg: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    cpu_offload: bool = False,
    ranks_only: Sequence[int] = (),
    type_check: bool = True,
) -> Any:
    """Return the state dict with whole tensors in place of DTensors and ShardedTensors. All other leaves are the same objects.

    A collective: every rank of a DTensor's mesh calls it, with the DTensors in the same order. DTensors are gathered one at a time
    over their own meshes, on the mesh's kind of device.

    Args:
        pg: the group whose ranks `ranks_only` lists, and over which ShardedTensors are gathered (None: each over its own group).
        device: where ShardedTensors are gathered. None: a device whose tensors the group can move. The result is on the device of
            this rank's shards.
        cpu_offload, ranks_only, type_check: see `iterate_state_dict`.

    Raises:
        UsageError: for the reasons of `iterate_state_dict`; for a tensor on the meta device, a DTensor whose local shape differs
            from the shape that its placements give, or a ShardedTensor on ranks outside the group. Then this rank has run no
            collective.
    """
    _check_leaves(state_dict, type_check, needs_data=True)
    for path, value in leaves_of(state_dict):
        if is_sharded_tensor(value):
            check_owners(path, value, pg)
    options: dict[str, Any] = {"pg": pg, "device": device, "ranks_only": ranks_only, "type_check": type_check}
    return iterate_state_dict(state_dict, join_shards, whole_of, _same, cpu_offload=cpu_offload, **options)


def _same(tensor: Tensor, *_: Any) -> Tensor:
    return tensor


def whole_of(tensor: DTensor, *_: Any) -> Tensor:
    """Gather a DTensor on every rank of its mesh (Note [Gathering by extents]). A rank outside the mesh returns its local part."""
    mesh = tensor.device_mesh
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        summed = [Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
        tensor = tensor.redistribute(placements=summed)
    local = tensor.to_local()
    if local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)
    cutting = [dim for dim, placement in enumerate(tensor.placements) if is_shard(placement)]
    if mesh.get_coordinate() is None or not cutting:
        return local
    # The first shard is the longest.
    first = held_extent(tensor.shape, mesh.shape, tensor.placements, [0] * mesh.ndim)
    padded = local.new_zeros(first.shape)
    padded[tuple(slice(n) for n in local.shape)] = local
    stacked = bytes_of(padded)
    for dim in reversed(cutting):
        stacked = _gather_along(mesh, dim, stacked)
    sizes, placements = [mesh.size(dim) for dim in cutting], [tensor.placements[dim] for dim in cutting]
    shards = stacked.view(local.dtype).view(prod(sizes), *first.shape)
    whole = shards.new_empty(tensor.shape)
    for shard, at in zip(shards, product(*map(range, sizes))):
        for box, own in pieces_at(tensor.shape, sizes, placements, at):
            whole[box.slices] = shard[own.slices]
    return whole


def _gather_along(mesh: DeviceMesh, dim: int, mine: Tensor) -> Tensor:
    """Gather the parts of the ranks along this mesh dim, [n] each, in the order of the mesh: [size of the mesh dim * n]."""
    group, coordinate = mesh.get_group(dim), list(mesh.get_coordinate() or ())
    received = mine.new_empty(mesh.size(dim) * mine.numel())
    if not received.numel():
        return received
    all_gather_single(received, mine, group, False)
    along = mesh.mesh[tuple(slice(None) if i == dim else c for i, c in enumerate(coordinate))].tolist()
    order = [dist.get_process_group_ranks(group).index(rank) for rank in along]
    if order == sorted(order):
        return received
    return received.view(len(order), -1)[order].flatten()


@torch.no_grad()
def offload_state_dict_to_cpu(
    state_dict: dict[Any, Any], *, ranks_only: Sequence[int] = (), type_check: bool = True
) -> Any:
    """Return the state dict with every tensor on the CPU. DTensors stay DTensors. A tensor that is on the CPU already is the same object.

    Args:
        ranks_only, type_check: see `iterate_state_dict`.

    Raises:
        UsageError: for the reasons of `iterate_state_dict`, or for a tensor on the meta device.
    """
    _check_leaves(state_dict, type_check, needs_data=True)
    options: dict[str, Any] = {"cpu_offload": True, "ranks_only": ranks_only, "type_check": type_check}
    return iterate_state_dict(state_dict, _same, _same, _same, **options)


def to_cpu(tensor: Tensor) -> Tensor:
    parts = [part_of(tensor)] if isinstance(tensor, DTensor) else shards_in(tensor)
    return tensor if all(part.is_cpu for part in parts) else _in_other_memory(tensor, Tensor.cpu)


def _in_other_memory(tensor: Any, move: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor of the same kind. `move` is called on each shard of a ShardedTensor, the local part of a DTensor, or the tensor."""
    if is_sharded_tensor(tensor):
        moved: Tensor = sharded_tensor_like([move(shard) for shard in shards_in(tensor)], tensor)
        return moved
    return wrap_like(move(tensor.to_local()), tensor) if isinstance(tensor, DTensor) else move(tensor)


# --- Copies ------------------------------------------------------------------------------------------------


@torch.no_grad()
def create_cpu_state_dict(
    state_dict: dict[Any, Any], pin_memory: bool = False, share_memory: bool = False
) -> Any:
    """Return the state dict with new tensors of the same shapes and dtypes on the CPU, which `copy_state_dict` can fill.

    The tensors are dense and have memory of their own; their values are undefined. DTensors get a new local part, and ShardedTensors
    get new shards. Other leaves are deep copies if they are not of the types that `iterate_state_dict` accepts.

    Args:
        pin_memory: use page-locked memory. Copies from it to an accelerator can be asynchronous.
        share_memory: use memory that child processes see.

    Raises:
        StateError: `pin_memory` is set, but there is no CUDA device.
    """
    if pin_memory and not torch.cuda.is_available():
        remedy = "Leave pin_memory out; nothing could copy faster."
        refuse("create_cpu_state_dict(pin_memory=True)", "a CUDA device", "none", remedy, StateError)

    def make(tensor: Tensor, *_: Any) -> Any:
        return _in_other_memory(tensor, lambda p: cpu_room(p.shape, p.dtype, pin_memory, share_memory))

    return iterate_state_dict(state_dict, make, make, make, type_check=False)


def cpu_room(shape: Sequence[int], dtype: torch.dtype, pin: bool, share: bool) -> Tensor:
    """Return a new tensor on the CPU, with undefined values. `pin`, `share`: as in `create_cpu_state_dict`."""
    pin = pin and prod(shape) > 0
    room = torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pin and not share)
    if share:
        room.share_memory_()
    if pin and share:
        # The pinning allocator does not own shared memory. So we register the memory for as long as it lives.
        runtime: Any = torch.cuda.cudart()
        storage = room.untyped_storage()
        torch.cuda.check_error(int(runtime.cudaHostRegister(room.data_ptr(), storage.nbytes(), 1)))
        weakref.finalize(storage, runtime.cudaHostUnregister, room.data_ptr())
    return room


@torch.no_grad()
def copy_state_dict(
    state_dict: dict[Any, Any],
    copy_state_dict: dict[Any, Any],
    non_blocking: bool = False,
    type_check: bool = True,
    *,
    allow_cast: bool = False,
) -> Any:
    """Copy the values of every tensor into the tensor at the same place in `copy_state_dict`.

    Args:
        allow_cast: the target may have another dtype; the values are converted to it.

    Returns:
        The containers and other leaves of `state_dict` with the tensors of `copy_state_dict`.

    Raises:
        CompanionMismatch: keys, a shape, a placement or (without `allow_cast`) a dtype differ. Nothing is broadcast or cut.
        UsageError: for the reasons of `iterate_state_dict`, or for a tensor on the meta device, or one that cannot be written to.
        In all cases, nothing was copied.
    """
    _check_leaves(state_dict, type_check, needs_data=True)
    _check_leaves(copy_state_dict, type_check=False, needs_data=True)
    map_leaves(partial(_check_pair, allow_cast=allow_cast), state_dict, copy_state_dict)
    for path, target in leaves_of(copy_state_dict):
        for shard in shards_in(target) if isinstance(target, Tensor) else ():
            check_writable(path, shard)
    options: dict[str, Any] = {"type_check": type_check, "non_blocking": non_blocking}
    options["allow_cast"] = allow_cast
    return iterate_state_dict(state_dict, _same, _same, _same, companion_obj=copy_state_dict, **options)


def _copy_into(path: KeyPath, value: Any, target: Any, non_blocking: bool, allow_cast: bool) -> Any:
    _check_pair(path, value, target, allow_cast)
    if isinstance(value, Tensor):
        for to, source in zip(shards_in(target), shards_in(value)):
            local_of(to).copy_(local_of(source), non_blocking=non_blocking)
        return target
    return value


def check_state_dict_similarity(state_dict: dict[Any, Any], compared_state_dict: dict[Any, Any]) -> bool:
    """Return True if `copy_state_dict` from one to the other would fit: the same keys, shapes, dtypes and placements.

    It does not compare values, and changes nothing.

    Raises:
        UsageError: a container contains itself.
    """
    try:
        map_leaves(_check_alike, state_dict, compared_state_dict)
    except CompanionMismatch:
        return False
    return True


def _check_pair(path: KeyPath, value: Any, other: Any, allow_cast: bool = False) -> None:
    """Raise an error if only one leaf is a tensor, or two tensors differ in more than their values. `allow_cast`: dtypes may differ."""
    nothing = other is ABSENT or other is None or value is None  # to copy, or no place for it
    if not nothing:
        _check_alike(path, value, other, allow_cast)


def _check_alike(path: KeyPath, value: Any, other: Any, allow_cast: bool = False) -> None:
    """Raise an error for the differences that `_check_pair` names. None is a leaf without a tensor, like any other."""
    mine, theirs = (layout_text(each, with_dtype=not allow_cast) for each in (value, other))
    other_mesh = isinstance(value, DTensor) and value.device_mesh != getattr(other, "device_mesh", None)
    if mine != theirs or other is ABSENT or other_mesh:
        got = theirs if mine != theirs else "one on another device mesh"
        remedy = "Make the second state dict from the first one, for example with create_cpu_state_dict"
        is_cast = layout_text(value, False) == layout_text(other, False)
        remedy += ", or pass allow_cast=True." if is_cast else "."
        refuse(path, mine, got, remedy, CompanionMismatch)


def layout_text(leaf: Any, with_dtype: bool = True) -> str:
    """Describe everything that must match before values are copied unchanged. Without the dtype: before values are cast."""
    if not isinstance(leaf, Tensor):
        return "no tensor" if items_of(leaf) is None else f"a {type(leaf).__name__}"
    if is_sharded_tensor(leaf):
        kind, size = leaf.dtype if with_dtype else "a tensor", list(leaf.size())
        return f"{kind} {size} as a ShardedTensor of {boxes_of(leaf)}"
    text = f"{leaf.dtype if with_dtype else 'a tensor'} {list(leaf.shape)}"
    if leaf.layout != torch.strided:
        text += f" ({leaf.layout})"
    if isinstance(leaf, DTensor):
        text += f" as {list(leaf.placements)}"
    return text


# --- ShardedTensor -----------------------------------------------------------------------------------------


def boxes_of(tensor: Any) -> list[tuple[Box, int]]:
    """Return the boxes of all shards on all ranks, sorted by offset, each with the global rank that has it; -1: the metadata names none."""
    places = [
        (Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes)), shard.placement)
        for shard in tensor.metadata().shards_metadata
    ]
    return sorted((box, -1 if placement is None else placement.rank()) for box, placement in places)


def shards_in(tensor: Any) -> list[Tensor]:
    """Return the local shards of a ShardedTensor, sorted by offset. For any other tensor, return the tensor in a list."""
    if not is_sharded_tensor(tensor):
        return [tensor]
    ordered = sorted(tensor.local_shards(), key=lambda shard: list(shard.metadata.shard_offsets))
    return [shard.tensor for shard in ordered]


def check_owners(path: KeyPath, tensor: Any, pg: dist.ProcessGroup | None) -> None:
    """Raise UsageError if a rank outside the group has a shard."""
    ranks = dist.get_process_group_ranks(pg or group_of_sharded_tensor(tensor))
    owners = sorted({rank for _, rank in boxes_of(tensor)})
    if not set(owners) <= set(ranks):
        expected, got = f"a ShardedTensor on ranks of the group, {ranks}", f"one on the ranks {owners}"
        refuse(path, expected, got, "Leave pg out: a ShardedTensor knows its group.")


def join_shards(tensor: Any, pg: dist.ProcessGroup | None, device: torch.device | None, *_: Any) -> Tensor:
    """Gather a ShardedTensor on every rank of the group. The result is on the device of this rank's shards, or on the CPU without shards.

    Args:
        pg: the group; None: the tensor's own group. device: where the shards are gathered; None: on a device whose tensors the
            group can move.
    """
    mine = [bytes_of(shard) for shard in shards_in(tensor)]
    group, boxes, metadata = pg or group_of_sharded_tensor(tensor), boxes_of(tensor), tensor.metadata()
    ranks, dtype = dist.get_process_group_ranks(group), metadata.tensor_properties.dtype
    home, kinds = mine[0].device if mine else torch.device("cpu"), device_types(group)
    way = device or (home if home.type in kinds else torch.device(kinds[0]))

    longest = max(sum(box.numel for box, owner in boxes if owner == rank) for rank in ranks) * dtype.itemsize
    padded = torch.zeros(longest, dtype=torch.uint8, device=way)
    if mine:
        packed = torch.cat(mine)
        padded[: packed.numel()] = packed
    received = padded.new_empty(len(ranks) * longest)
    if longest:
        all_gather_single(received, padded, group, False)

    whole = torch.empty(metadata.size, dtype=dtype, device=way)
    for rank, part in zip(ranks, received.view(len(ranks), longest)):
        start = 0
        for box in (box for box, owner in boxes if owner == rank):
            whole[box.slices] = part.view(dtype)[start : start + box.numel].view(box.shape)
            start += box.numel
    return whole.to(home)
