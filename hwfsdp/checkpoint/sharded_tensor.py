"""`ShardedTensor`, which torch had before DTensor, in state dicts of old programs: gathered, and made again on the CPU.

It says itself which box of the whole each shard is, and which rank has it; ranks may have several shards or none. So a
gather needs no arithmetic: the ranks of its group send each other all they have at once, padded to equal lengths, and each
puts every box in its place.

Left out: what makes one (torch does), and filling one from a whole tensor; `distribute` refuses it.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp.checkpoint.traverse import Path, show
from hwfsdp.compat import all_gather_single, device_types, group_of_sharded_tensor, is_sharded_tensor
from hwfsdp.errors import UsageError
from hwfsdp.layout.extents import LocalExtent, slices_of


class Box(NamedTuple):
    """A shard's place in the whole, and the rank that has it, as the world counts; -1 if nothing says so."""

    extent: LocalExtent
    rank: int

    @property
    def numel(self) -> int:
        return prod(self.extent.shape)


def boxes_of(tensor: Any) -> list[Box]:
    """The shards of all ranks, by their offsets."""
    boxes = []
    for shard in tensor.metadata().shards_metadata:
        rank = -1 if shard.placement is None else shard.placement.rank()
        boxes.append(Box(LocalExtent(tuple(shard.shard_sizes), tuple(shard.shard_offsets)), rank))
    return sorted(boxes, key=lambda box: box.extent.offset)


def shards_in(tensor: Any) -> list[Tensor]:
    """The local shards of a ShardedTensor, by their offsets; of any other tensor, the tensor."""
    if not is_sharded_tensor(tensor):
        return [tensor]
    ordered = sorted(tensor.local_shards(), key=lambda shard: list(shard.metadata.shard_offsets))
    return [shard.tensor for shard in ordered]


def describe_shards(tensor: Any, with_dtype: bool) -> str:
    """What has to be the same for shards to be copied as they are, or, without the dtype, to be copied at all."""
    metadata = tensor.metadata()
    kind = metadata.tensor_properties.dtype if with_dtype else "a tensor"
    boxes = [(*box.extent, box.rank) for box in boxes_of(tensor)]
    return f"{kind} {list(metadata.size)} as a ShardedTensor of {boxes}"


def check_owners(path: Path, tensor: Any, pg: dist.ProcessGroup | None) -> None:
    """Raises UsageError if a rank that the group does not have has a shard."""
    ranks = dist.get_process_group_ranks(pg or group_of_sharded_tensor(tensor))
    owners = sorted({box.rank for box in boxes_of(tensor)})
    if not set(owners) <= set(ranks):
        raise UsageError(
            show(path),
            expected=f"a ShardedTensor on ranks of the group, {ranks}",
            got=f"one on the ranks {owners}",
            remedy="Leave pg out: a ShardedTensor knows its group.",
        )


def join_shards(
    tensor: Any, mine: list[Tensor], pg: dist.ProcessGroup | None, device: torch.device | None
) -> Tensor:
    """All of a ShardedTensor, on every rank of the group, on the device of this rank's shards, or the CPU if it has none.

    Args:
        mine: the values of `shards_in(tensor)` as bytes, [k] each.
        pg: None: the tensor's own. device: where it is gathered; None: on a device whose tensors the group moves.
    """
    group, boxes, metadata = pg or group_of_sharded_tensor(tensor), boxes_of(tensor), tensor.metadata()
    ranks, dtype = dist.get_process_group_ranks(group), metadata.tensor_properties.dtype
    home, kinds = mine[0].device if mine else torch.device("cpu"), device_types(group)
    way = device or (home if home.type in kinds else torch.device(kinds[0]))

    longest = max(sum(box.numel for box in boxes if box.rank == rank) for rank in ranks) * dtype.itemsize
    padded = torch.zeros(longest, dtype=torch.uint8, device=way)
    if mine:
        packed = torch.cat(mine)
        padded[: packed.numel()] = packed
    received = padded.new_empty(len(ranks) * longest)
    if longest:
        all_gather_single(received, padded, group, async_op=False)

    whole = torch.empty(metadata.size, dtype=dtype, device=way)
    for rank, part in zip(ranks, received.view(len(ranks), longest)):
        start = 0
        for box in (box for box in boxes if box.rank == rank):
            piece = part.view(dtype)[start : start + box.numel]
            whole[slices_of(box.extent)] = piece.view(box.extent.shape)
            start += box.numel
    return whole.to(home)
