"""Questions about a tensor in a state dict: does it have data, which memory and which bytes are this rank's?

A `ShardedTensor`, which torch had before DTensor, says itself which box of the whole each shard is, and which rank has it;
ranks may have several shards or none. So a gather needs no arithmetic: the ranks of its group send each other all they have
at once, padded to equal lengths, and each puts every box in its place. What makes one, torch does; `distribute` fills none.
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
from hwfsdp.compat import (
    device_types,
    group_of_sharded_tensor,
    is_sharded_tensor,
    is_traceable_wrapper_subclass,
    local_of,
)
from hwfsdp.errors import UnsupportedError
from hwfsdp.layout.extents import compute_local_shape_and_global_offset


def memory_of(tensor: Tensor) -> Tensor:
    """The tensor with this rank's values: the local part of a DTensor, any other tensor itself."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor) -> Tensor:
    """The same, without its gradient's history."""
    return memory_of(tensor).detach()


def bytes_of(tensor: Tensor) -> Tensor:
    """The values as bytes, in row-major order; a view if they lie like that already."""
    dense: Tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.view(-1).view(torch.uint8)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements are one place in memory, which cannot be written to."""
    return any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride()))


def check_data(path: KeyPath, tensor: Tensor) -> None:
    """Raise if the values of the tensor cannot be had, or it is a ShardedTensor."""
    if is_sharded_tensor(tensor):
        refuse_sharded_tensor(path)
    if is_lazy(tensor):
        _refuse_without_memory(path, "a parameter that is not initialized yet")
    if tensor.is_meta:
        got = f"one on the meta device, of shape {tuple(tensor.shape)}"
        refuse(path, "a tensor with data", got, "Materialize it first: to_empty, then initialize or load.")
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is not None:
        shape = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[0]
        if tuple(tensor.to_local().shape) != shape:
            expected = f"the local shape {shape} that {list(tensor.placements)} give this rank"
            remedy = "Cut it with hwfsdp.layout.shard_of, or give from_local the global shape."
            refuse(path, expected, f"{tuple(tensor.to_local().shape)}", remedy)

    local = memory_of(tensor)
    wraps: bool = is_traceable_wrapper_subclass(local)  # a wrapper has no memory of its own
    if local.layout == torch.strided and not (wraps or local.is_nested) and local.numel():
        last = local.storage_offset() + sum((n - 1) * step for n, step in zip(local.shape, local.stride()))
        if local.untyped_storage().nbytes() < (last + 1) * local.element_size():
            _refuse_without_memory(path, "one whose memory was freed")


def _refuse_without_memory(path: KeyPath, got: str) -> NoReturn:
    remedy = "Take the state dict of the sharded model, or initialize it first."
    refuse(path, "a tensor with memory", got, remedy)


def refuse_sharded_tensor(path: KeyPath) -> NoReturn:
    remedy = "Make it a DTensor, or call gather_state_dict for the whole."
    refuse(path, "a Tensor or DTensor", "a ShardedTensor", remedy, UnsupportedError)


def check_no_sum(path: KeyPath, tensor: Tensor) -> None:
    """Raise if it is a DTensor whose parts are still to be summed."""
    if isinstance(tensor, DTensor) and any(isinstance(p, Partial) for p in tensor.placements):
        remedy, got = "Redistribute Partial to Replicate first.", f"{list(tensor.placements)}"
        refuse(path, "placements that say which values a rank has", got, remedy, UnsupportedError)


def check_kind(path: KeyPath, tensor: Tensor) -> None:
    """Raise `UnsupportedError` if a tensor's values are not plain numbers in memory, or still to be summed."""
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
    """Raise if values cannot be written into this rank's part of the tensor."""
    local = part_of(tensor)
    if is_expanded(local):
        refuse(path, "memory for every element", "an expanded tensor", "Pass a clone of it.")
    if local.is_inference() and not torch.is_inference_mode_enabled():
        remedy = "Load in inference mode, too, or make it outside."
        refuse(path, "a tensor that can be changed", "one that was made in inference mode", remedy)


@functools.cache
def _can_be_copied(dtype: torch.dtype) -> bool:
    """Whether torch has kernels for a dtype; some have a name only."""
    one = torch.empty(1, dtype=dtype)
    try:
        torch.empty(1, dtype=dtype).copy_(one)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def identity_of(tensor: Tensor) -> tuple[Any, ...]:
    """The same for two tensors that must have the same values, at the same place in the whole."""
    part = part_of(tensor)
    place = part.data_ptr(), part.device, tuple(part.shape), part.stride()
    placed: tuple[Any, ...] = ()
    if isinstance(tensor, DTensor):
        placed = tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape)
    return *place, part.dtype, part.is_conj(), part.is_neg(), *placed


# --- ShardedTensor -----------------------------------------------------------------------------------------


class OwnedBox(NamedTuple):
    """A shard's place in the whole, and the rank that has it, as the world counts; -1 if nothing says so."""

    box: Box
    rank: int


def boxes_of(tensor: Any) -> list[OwnedBox]:
    """The shards of all ranks, by their offsets."""
    boxes = []
    for shard in tensor.metadata().shards_metadata:
        rank = -1 if shard.placement is None else shard.placement.rank()
        boxes.append(OwnedBox(Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes)), rank))
    return sorted(boxes)


def shards_in(tensor: Any) -> list[Tensor]:
    """The local shards of a ShardedTensor, by their offsets; of any other tensor, the tensor."""
    if not is_sharded_tensor(tensor):
        return [tensor]
    ordered = sorted(tensor.local_shards(), key=lambda shard: list(shard.metadata.shard_offsets))
    return [shard.tensor for shard in ordered]


def describe_shards(tensor: Any, with_dtype: bool) -> str:
    """A description that must match before shards are copied unchanged; without the dtype, before they are copied at all."""
    metadata = tensor.metadata()
    kind = metadata.tensor_properties.dtype if with_dtype else "a tensor"
    boxes = [(*box, rank) for box, rank in boxes_of(tensor)]
    return f"{kind} {list(metadata.size)} as a ShardedTensor of {boxes}"


def check_owners(path: KeyPath, tensor: Any, pg: dist.ProcessGroup | None) -> None:
    """Raise UsageError if a rank that the group does not have has a shard."""
    ranks = dist.get_process_group_ranks(pg or group_of_sharded_tensor(tensor))
    owners = sorted({rank for _, rank in boxes_of(tensor)})
    if not set(owners) <= set(ranks):
        expected, got = f"a ShardedTensor on ranks of the group, {ranks}", f"one on the ranks {owners}"
        refuse(path, expected, got, "Leave pg out: a ShardedTensor knows its group.")


def join_shards(tensor: Any, pg: dist.ProcessGroup | None, device: torch.device | None, *_: Any) -> Tensor:
    """All of a ShardedTensor, on every rank of the group, on the device of this rank's shards, or the CPU if it has none.

    Args:
        pg: None: the tensor's own. device: where it is gathered; None: on a device whose tensors the group moves.
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
        dist.all_gather_single(received, padded, group)

    whole = torch.empty(metadata.size, dtype=dtype, device=way)
    for rank, part in zip(ranks, received.view(len(ranks), longest)):
        start = 0
        for box in (box for box, owner in boxes if owner == rank):
            whole[box.slices] = part.view(dtype)[start : start + box.numel].view(box.shape)
            start += box.numel
    return whole.to(home)
