"""13 Meta-device start: weights for a sharded model that was never whole on any rank, the same at any world size.

A model begins on the meta device, where tensors have shapes and no memory. There are two ways to its shards, and then one to weights:

    fully_shard(model); model.to_empty(device="cpu")     hwfsdp's and torch's fully_shard take models on the meta device
    hollow(model, "cpu"); fully_shard(model)             for any other file that copies the rows it keeps, such as yours of 03
    init_shards(model, shapes, init, seed)               fill the shards
"""

from __future__ import annotations

# @13
import hashlib

# @end
from collections.abc import Callable, Mapping, Sequence

import torch

# @13
import torch.distributed as dist

# @end
from torch import Tensor, nn

# @13
from torch.distributed.tensor import DTensor

from hwfsdp.layout import compute_local_shape_and_global_offset

# @end

Init = Callable[[str, Tensor, torch.Generator], object]  # (name, row, generator): fills one row in place


def row_generator(seed: int, name: str, number: int) -> torch.Generator:
    """Make a CPU generator for row `number` of the whole parameter `name`, in a model whose seed is any integer.

    Its numbers depend on these three alone: they are the same in every process on every machine.
    """
    # @13
    digest = hashlib.blake2b(f"{seed}/{name}/{number}".encode(), digest_size=8).digest()
    return generator_of(int.from_bytes(digest, "little"))
    # @00
    # |     raise NotImplementedError("TODO(13): row_generator")
    # @end


def generator_of(seed: int) -> torch.Generator:
    """Make a CPU generator from 64 bits. torch's `manual_seed` keeps only 32 of them, and a model has millions of rows."""
    made = torch.Generator()
    # A state takes 30 bits, and a number of its own. These generators are linear: the exclusive or of three states is a state.
    first, *others = (
        made.manual_seed(i << 30 | seed >> 30 * i & (1 << 30) - 1).get_state() for i in range(3)
    )
    made.set_state(first ^ others[0] ^ others[1])
    return made


def hollow(model: nn.Module, device: str) -> nn.Module:
    """Move a model from the meta device to `device`, in place, with almost no memory; return it.

    Each parameter gets a new one in its place, with the same shape, dtype and requires_grad; a tied one stays tied. It can be read,
    and has at most 64 bytes of memory, whatever its shape. Buffers get memory of their size.
    """
    # @13
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if param not in made:
                one = torch.zeros((), dtype=param.dtype, device=device)
                made[param] = nn.Parameter(one.expand(param.shape), param.requires_grad)
            module.register_parameter(name, made[param])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device=device))
    return model
    # @00
    # |     raise NotImplementedError("TODO(13): hollow")
    # @end


# @13
def part_of(param: Tensor, shape: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a parameter: its memory, not a copy, and the index of its first element in the whole.

    The index of a parameter without dims is (0,), as if it had one row.
    """
    if isinstance(param, DTensor):
        _, offset = compute_local_shape_and_global_offset(tuple(shape), param.device_mesh, param.placements)
        return param.to_local(), tuple(offset)
    first = 0
    if tuple(param.shape) != tuple(shape):  # rows, as in exercise 01
        first = -(-shape[0] // dist.get_world_size()) * dist.get_rank()
    return param, (first, *(0 for _ in shape[1:]))


def fill_part(
    name: str, part: Tensor, offset: Sequence[int], shape: Sequence[int], init: Init, seed: int
) -> None:
    """Fill a part in place: draw each whole row that has elements here, and keep these elements."""
    if part.numel() == 0:
        return
    kept = tuple(slice(start, start + n) for start, n in zip(offset[1:], part.shape[1:], strict=False))
    for number, target in enumerate(part if part.ndim else part.view(1), offset[0]):
        row = torch.empty(tuple(shape[1:]), dtype=part.dtype)
        init(name, row, row_generator(seed, name, number))
        target.copy_(row[kept])


# @end


@torch.no_grad()
def init_shards(model: nn.Module, shapes: Mapping[str, Sequence[int]], init: Init, seed: int) -> None:
    """Fill this rank's part of every parameter of a sharded model, without communication: the same model at any world size.

    `init(name, row, generator)` is called once for each row that has elements on this rank, the first row first. A row is a new CPU
    tensor: the whole parameter without dim 0, in its dtype, even if the rank has only some columns of it. The generator is the
    `row_generator` of the row's number in the whole. A parameter without dims is one row. A tied parameter is filled once, under its
    first name. Besides the shards, at most one row is in memory.

    A parameter is a DTensor; or a plain tensor, which holds all, or this rank's rows, cut along dim 0 as in exercise 01. A forward may
    have left a module whole; if the module has a method `reshard`, this gives it its shards back. Buffers, the objects that modules
    hold, and the other random numbers of the process stay as they are.

    shapes: of the whole parameters, by name; the model had them before it was sharded.

    Raises:
        RuntimeError: a parameter is still on the meta device.
    """
    # @13
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    for name, param in model.named_parameters():
        if param.is_meta:
            raise RuntimeError(f"init_shards: parameter {name!r} has no memory yet")
        fill_part(name, *part_of(param, shapes[name]), shapes[name], init, seed)
    # @00
    # |     raise NotImplementedError("TODO(13): init_shards")
    # @end
