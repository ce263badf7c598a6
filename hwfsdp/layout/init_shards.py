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

from hwfsdp.core.private_torch import local_of
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
    """Initialize this rank's rows of every parameter, without communication, with equal weights at any number of ranks.

    Args:
        model: sharded, after `to_empty`; a forward may have left parameters whole. Parameters that are not sharded are
            initialized, too; buffers are not.
        init: `init(fqn, row, generator)` fills one row of a parameter in place, with a CPU generator. The row has the parameter's
            shape without dimension 0, and its dtype; for a 1D parameter it is a scalar.
        seed: of the whole model. No other random numbers of the process change.

    Raises:
        StateError: a parameter is still on the meta device.
    """
    for module in model.modules():
        for group in state.groups if (state := state_of(module)) else ():
            group.reshard()  # values in whole parameters would be lost at the next gather
    for fqn, param in model.named_parameters():
        if param.is_meta:
            raise StateError(
                f"init_shards: parameter {fqn!r}",
                expected="memory to fill",
                got="the meta device",
                remedy="Call model.to_empty(device=…) first.",
            )
        fill_part(fqn, part_of(param), tuple(param.shape), init, seed)


def part_of(param: Tensor) -> Part:
    """Return this rank's part of a parameter, sharded or not: the memory itself, not a copy, and where in the whole it begins."""
    if not isinstance(param, DTensor):
        return Part(param, (0,) * param.ndim)
    _, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return Part(local_of(param), offset)


def fill_part(fqn: str, part: Part, shape: tuple[int, ...], init: Init, seed: int) -> None:
    """Fill a part in place: call `init(fqn, row, generator)` once for each row that has elements here, first row first.

    A row is a new CPU tensor of the part's dtype: a whole parameter of this `shape` without dim 0, even if the part has only some
    columns. Its generator is the one of its number in the whole. A parameter without dims is one row. Besides the part, at most one
    row has memory. Autograd is off.
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
    """Make a CPU generator for one row: row `number` of the whole parameter `fqn`, in a model with any integer as `seed`.

    Its numbers depend on these three alone: they are the same in every process on every machine.
    """
    digest = hashlib.blake2b(f"{seed}/{fqn}/{number}".encode(), digest_size=8).digest()
    return generator_of(int.from_bytes(digest, "little"))


def generator_of(seed: int) -> torch.Generator:
    """Make a CPU generator from all 64 bits of a seed. torch's `manual_seed` keeps only 32, and a model has millions of rows."""
    made = torch.Generator()
    # Each state gets 30 bits and its own number. Generators are linear: the exclusive or of three states is a state, too.
    first, *others = (
        made.manual_seed(i << 30 | seed >> 30 * i & (1 << 30) - 1).get_state() for i in range(3)
    )
    state = first ^ others[0] ^ others[1]
    made.set_state(state)
    return made
