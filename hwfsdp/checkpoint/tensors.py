"""Questions about a tensor in a state dict: does it have data, and which memory and which bytes belong to this rank?

`ShardedTensor` is torch's class before DTensor. It records for each shard the box of the whole tensor and the rank that has it.
A rank may have several shards or none. So a gather needs no arithmetic: the ranks of its group send each other all their shards
at once, padded to equal lengths, and each rank puts every box in its place. Only torch makes ShardedTensors, and `distribute`
does not fill them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parameter import is_lazy

from hwfsdp.checkpoint.boxes import Box
from hwfsdp.checkpoint.messages import KeyPath, refuse
from hwfsdp.checkpoint.views import end_of
from hwfsdp.compat import (
    all_gather_single,
    device_types,
    group_of_sharded_tensor,
    is_sharded_tensor,
    is_traceable_wrapper_subclass,
    local_of,
)
from hwfsdp.errors import UnsupportedError
from hwfsdp.layout.extents import compute_local_shape_and_global_offset


def part_of(tensor: Tensor) -> Tensor:
    """Return the tensor with this rank's values, detached from autograd."""
    return local_of(tensor).detach()


def local_shape_of(tensor: DTensor) -> tuple[int, ...]:
    """Return the shape that this rank's part has by the placements. Outside the mesh, it is the shape that the part has."""
    if tensor.device_mesh.get_coordinate() is None:
        return tuple(local_of(tensor).shape)
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[0]


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the values as bytes, in row-major order. If the memory has this order already, the result is a view."""
    dense: Tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.view(-1).view(torch.uint8)


def is_expanded(tensor: Tensor) -> bool:
    """True if several elements share one place in memory. Such a tensor cannot be written to."""
    return any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride()))


def check_data(path: KeyPath, tensor: Tensor) -> None:
    """Raise an error if the values of the tensor are not available, or if it is a ShardedTensor."""
    if is_sharded_tensor(tensor):
        refuse_sharded_tensor(path)
    if is_lazy(tensor):
        _refuse_without_memory(path, "a parameter that is not initialized yet")
    if tensor.is_meta:
        got = f"one on the meta device, of shape {tuple(tensor.shape)}"
        refuse(path, "a tensor with data", got, "Materialize it first: to_empty, then initialize or load.")
    local = local_of(tensor)
    if isinstance(tensor, DTensor) and tuple(local.shape) != local_shape_of(tensor):
        expected = f"the local shape {local_shape_of(tensor)} that {list(tensor.placements)} give this rank"
        remedy = "Cut it with hwfsdp.layout.shard_of, or give from_local the global shape."
        refuse(path, expected, f"{tuple(local.shape)}", remedy)
    wraps: bool = is_traceable_wrapper_subclass(local)  # then the tensor has no memory of its own
    if local.layout == torch.strided and not (wraps or local.is_nested) and local.numel():
        if local.untyped_storage().nbytes() < end_of(local):
            _refuse_without_memory(path, "one whose memory was freed")


def _refuse_without_memory(path: KeyPath, got: str) -> NoReturn:
    remedy = "Take the state dict of the sharded model, or initialize it first."
    refuse(path, "a tensor with memory", got, remedy)


def refuse_sharded_tensor(path: KeyPath) -> NoReturn:
    remedy = "Make it a DTensor, or call gather_state_dict for the whole."
    refuse(path, "a Tensor or DTensor", "a ShardedTensor", remedy, UnsupportedError)


def check_no_sum(path: KeyPath, tensor: Tensor) -> None:
    """Raise an error if the tensor is a DTensor with a `Partial` placement, whose parts are not summed yet."""
    if isinstance(tensor, DTensor) and any(isinstance(p, Partial) for p in tensor.placements):
        remedy, got = "Redistribute Partial to Replicate first.", f"{list(tensor.placements)}"
        refuse(path, "placements that say which values a rank has", got, remedy, UnsupportedError)


def check_kind(path: KeyPath, tensor: Tensor) -> None:
    """Raise `UnsupportedError` if a tensor's values are not plain numbers in memory, or are not summed yet."""
    inner = part_of(tensor)
    wrapper: bool = is_traceable_wrapper_subclass(inner)
    kind = "a quantized tensor" if inner.is_quantized else "a nested tensor" if inner.is_nested else ""
    if inner.layout != torch.strided:
        kind = f"a sparse tensor ({inner.layout})"
    elif wrapper or type(inner).__name__ == "FakeTensor":
        kind = f"a {type(inner).__name__}"
    elif not _can_be_copied(inner.dtype):
        kind = f"one of {inner.dtype}, which torch cannot copy"
    if kind:
        remedy = "Save its parts, or what to_dense() or dequantize() returns."
        refuse(path, "a dense tensor", kind, remedy, UnsupportedError)
    check_no_sum(path, tensor)


def check_writable(path: KeyPath, tensor: Tensor) -> None:
    """Raise an error if values cannot be written into this rank's part of the tensor."""
    local = part_of(tensor)
    if is_expanded(local):
        refuse(path, "memory for every element", "an expanded tensor", "Pass a clone of it.")
    if local.is_inference() and not torch.is_inference_mode_enabled():
        remedy = "Load in inference mode, too, or make it outside."
        refuse(path, "a tensor that can be changed", "one that was made in inference mode", remedy)


@functools.cache
def _can_be_copied(dtype: torch.dtype) -> bool:
    """True if torch can copy this dtype. Some dtypes have a name but no kernels."""
    one = torch.empty(1, dtype=dtype)
    try:
        torch.empty(1, dtype=dtype).copy_(one)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def identity_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key. Two tensors with equal keys have the same values in the same memory, at the same place of the whole."""
    part = part_of(tensor)
    place = part.data_ptr(), part.device, tuple(part.shape), part.stride()
    placed: tuple[Any, ...] = ()
    if isinstance(tensor, DTensor):
        placed = tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape)
    return *place, part.dtype, part.is_conj(), part.is_neg(), *placed


# --- ShardedTensor -----------------------------------------------------------------------------------------


class OwnedBox(NamedTuple):
    """A shard's place in the whole, and the global rank that has it; -1 if the metadata names no rank."""

    box: Box
    rank: int


def boxes_of(tensor: Any) -> list[OwnedBox]:
    """Return the boxes of all shards on all ranks, sorted by offset."""
    boxes = []
    for shard in tensor.metadata().shards_metadata:
        rank = -1 if shard.placement is None else shard.placement.rank()
        boxes.append(OwnedBox(Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes)), rank))
    return sorted(boxes)


def shards_in(tensor: Any) -> list[Tensor]:
    """Return the local shards of a ShardedTensor, sorted by offset. For any other tensor, return the tensor in a list."""
    if not is_sharded_tensor(tensor):
        return [tensor]
    ordered = sorted(tensor.local_shards(), key=lambda shard: list(shard.metadata.shard_offsets))
    return [shard.tensor for shard in ordered]


def describe_shards(tensor: Any, with_dtype: bool) -> str:
    """Describe everything that must match before shards are copied unchanged. Without the dtype: before values are cast."""
    metadata = tensor.metadata()
    kind = metadata.tensor_properties.dtype if with_dtype else "a tensor"
    boxes = [(*box, rank) for box, rank in boxes_of(tensor)]
    return f"{kind} {list(metadata.size)} as a ShardedTensor of {boxes}"


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
