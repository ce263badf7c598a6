"""The same weights for any number of ranks.

A model that was made on the meta device has no weights. After `to_empty`, each rank has memory only for its rows. It must fill
its rows so that the whole model is the same at any world size. If each rank had one generator with the same seed, every rank
would draw the same numbers. One common sequence would depend on how much each rank draws. So here every row of every parameter
has its own generator. Its seed is made from the model's seed, the parameter's name, and the number of the row in the whole
parameter.

No rank ever has a whole parameter. In addition to the shards, a rank has one row at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.core.compat import local_of
from hwfsdp.core.state import state_of
from hwfsdp.errors import StateError
from hwfsdp.layout.extents import compute_local_shape_and_global_offset

Init = Callable[[str, Tensor, torch.Generator], object]


class Part(NamedTuple):
    """A rank's part of a parameter: the memory to fill, and the index of its first element in the whole parameter."""

    local: Tensor
    offset: tuple[int, ...]


@torch.no_grad()
def init_shards(model: nn.Module, init: Init, seed: int) -> None:
    """Initialize this rank's rows of every parameter, without communication.

    Args:
        model: sharded, after `to_empty`. Parameters that are not sharded are initialized, too; buffers are not.
        init: called with a parameter's fqn, one of its rows, which it fills in place, and a CPU generator. The row has the
            shape of the parameter without dimension 0, and its dtype; for a 1D parameter it is a scalar. If a parameter is
            cut along another dimension, the whole row is drawn, and this rank keeps its part of the row.
        seed: of the whole model.

    First call `reshard_all(model)`: a forward may have left whole parameters, and the shards must be filled. Then go through the
    parameters of the model, each once, by the name that `named_parameters` gives it: `require_memory(fqn, param)`,
    `part_of(param)`, `fill_part(fqn, part, shape of the whole, init, seed)`. Nothing else in the process changes, not even its
    random numbers.

    Raises:
        StateError: a parameter is still on the meta device (`require_memory` raises this).
    """
    reshard_all(model)
    for fqn, param in model.named_parameters():
        require_memory(fqn, param)
        fill_part(fqn, part_of(param), tuple(param.shape), init, seed)


def reshard_all(model: nn.Module) -> None:
    """Register the shards of all groups below `model`. Values in whole parameters would be lost at the next gather."""
    for module in model.modules():
        for group in state.groups if (state := state_of(module)) else ():
            group.reshard()


def require_memory(fqn: str, param: Tensor) -> None:
    """Raise StateError if the parameter is still on the meta device."""
    if param.is_meta:
        raise StateError(
            f"init_shards: parameter {fqn!r}",
            expected="memory to fill",
            got="the meta device",
            remedy="Call model.to_empty(device=…) first.",
        )


def part_of(param: Tensor) -> Part:
    """Return this rank's part of a parameter, sharded or not.

    Returns:
        `Part(local, offset)`: the memory to fill, and the index of its first element in the whole, one integer for each dim.
        For a DTensor, `local` is its local part itself (`local_of(param)`), and `offset` is the second of the two results of
        `compute_local_shape_and_global_offset(shape, mesh, placements)` for its `shape`, `device_mesh` and `placements`.
        A parameter that is not sharded is its own part, at offset 0 in every dim.
    """
    if not isinstance(param, DTensor):
        return Part(param, (0,) * param.ndim)
    _, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return Part(local_of(param), offset)


def fill_part(fqn: str, part: Part, shape: tuple[int, ...], init: Init, seed: int) -> None:
    """Fill a rank's part of a parameter, row by row. Called with autograd off.

    Args:
        fqn: the parameter's. part: the part of this rank, `part.local`, at `part.offset` in the whole (see `part_of`). Fill it
            in place. It may have no elements; then there is nothing to do.
        shape: of the whole parameter, with as many dims as the part. A parameter without dims is one row without dims.
        init: call it as `init(fqn, row, generator)` once for each row of which the part has elements, first row first.
        seed: of the whole model.

    A row is a slice of the *whole* parameter along dim 0. For `init`, it is a new tensor of shape `shape[1:]`, in the part's
    dtype, on the CPU, contents undefined. Its generator is `row_generator(seed, fqn, number)`, where `number` counts the rows of
    the whole parameter. Then copy the row into the part. If the part is cut along other dims as well, copy only the elements that
    belong to the part, as `part.offset` and the part's shape say.

    At any time, there is memory for the part and for at most one row.
    """
    local, offset = part
    if local.numel() == 0:
        return
    first = offset[0] if offset else 0
    kept = tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True))
    for number, target in enumerate(local if local.ndim else local.view(1), first):
        row = torch.empty(shape[1:], dtype=local.dtype)
        init(fqn, row, row_generator(seed, fqn, number))
        target.copy_(row[kept])


def row_generator(seed: int, fqn: str, number: int) -> torch.Generator:
    """Make a CPU generator for one row of one parameter.

    Args:
        seed: of the whole model, any integer. fqn: the parameter's name. number: the row's number in the whole parameter.

    Returns:
        A new generator that depends only on these three arguments. It gives the same numbers in every process on every machine,
        no matter what was drawn before. If one of the three is different, it gives different numbers. Its `manual_seed` takes
        integers of 64 bits. Python's `hash` of a text differs from one process to the next; a hash of `hashlib` does not.
    """
    digest = hashlib.blake2b(f"{seed}/{fqn}/{number}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
