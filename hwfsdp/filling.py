"""The same weights whatever the number of ranks.

A model that was made on the meta device has no weights. After `to_empty` each rank has memory for its rows only, and
must fill them so that the whole model is the same at any world size: not from one generator per rank, which gives
every rank the same numbers, nor from one sequence, which depends on who draws how much. Here every row of every
parameter has a generator of its own, seeded by the seed, the parameter's name and the row's number in the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.compat import local_of
from hwfsdp.errors import StateError
from hwfsdp.hooks import state_of
from hwfsdp.layout import compute_local_shape_and_global_offset

Init = Callable[[str, Tensor, torch.Generator], object]


@torch.no_grad()
def init_shards(model: nn.Module, init: Init, seed: int) -> None:
    """Initializes this rank's rows of every parameter; no communication.

    Args:
        model: sharded, after `to_empty`. Parameters that are not sharded are initialized too, buffers are not.
        init: called with a parameter's fqn, one of its rows, to be filled in place, and a CPU generator. The row has
            the parameter's shape without dimension 0, in its dtype; of a 1D parameter it is a scalar. Where a
            parameter is cut along another dimension, the whole row is drawn, and this rank's part of it kept.
        seed: of the whole model.

    Raises:
        StateError: a parameter is still on the meta device.
    """
    for module in model.modules():
        for group in state.groups if (state := state_of(module)) else ():
            group.reshard()  # whole parameters would be forgotten
    for fqn, param in model.named_parameters():
        if param.is_meta:
            raise StateError(
                f"init_shards: parameter {fqn!r}",
                expected="memory to fill",
                got="the meta device",
                remedy="Call model.to_empty(device=…) first.",
            )
        shape = tuple(param.shape)
        local, offset = (
            (local_of(param), _offset(param)) if isinstance(param, DTensor) else (param, (0,) * param.ndim)
        )
        if local.numel() == 0:
            continue
        inner = tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True))
        for number, row in enumerate(local if local.ndim else local.view(1)):
            whole = torch.empty(shape[1:], dtype=param.dtype)
            init(fqn, whole, _generator(seed, fqn, offset[0] + number if offset else 0))
            row.copy_(whole[inner])


def _offset(param: DTensor) -> tuple[int, ...]:
    return compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)[1]


def _generator(seed: int, fqn: str, row: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{fqn}/{row}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
