"""13 Meta-device start: weights for a sharded model that was never whole on any rank, the same at any world size.

A model begins on the meta device, where tensors have shapes and no memory. There are two ways to its shards, and then one to weights:

    fully_shard(model); model.to_empty(device="cpu")     hwfsdp's and torch's fully_shard take models on the meta device
    hollow(model, "cpu"); fully_shard(model)             for any other file that copies the rows it keeps, such as yours of 03
    init_shards(model, shapes, init, seed)               fill the shards
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from torch import Tensor, nn


Init = Callable[[str, Tensor, torch.Generator], object]  # (name, row, generator): fills one row in place


def row_generator(seed: int, name: str, number: int) -> torch.Generator:
    """Make a CPU generator for row `number` of the whole parameter `name`, in a model whose seed is any integer.

    Its numbers depend on these three alone: they are the same in every process on every machine.
    """
    raise NotImplementedError("TODO(13): row_generator")


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
    raise NotImplementedError("TODO(13): hollow")


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
    raise NotImplementedError("TODO(13): init_shards")
