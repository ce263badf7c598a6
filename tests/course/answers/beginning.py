"""Functions that all files in `right/` share: stations 01 and 02, `replicate` of 03, `traffic` of 05, and the functions that are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Shape = Sequence[int]


# --- 01 Rows -----------------------------------------------------------------------------------------------


def padded_rows(n: int, world_size: int) -> int:
    """Count the rows that each of `world_size` ranks sends for a parameter of `n` rows, padding included."""
    return -(-n // world_size)


def rows_of(n: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the first row that `rank` keeps, and the row after its last one. A rank without rows keeps `(n, n)`."""
    chunk = padded_rows(n, world_size)
    return min(rank * chunk, n), min((rank + 1) * chunk, n)


# --- 02 Rings ----------------------------------------------------------------------------------------------


def ring_all_gather(whole: Tensor, part: Tensor) -> None:
    """Fill `whole`, [W * n], with the `part`, [n], of every rank, in the order of ranks.

    A rank sends to the next rank and receives from the previous one, nothing else, and no more than it must.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = whole.chunk(world_size) if whole.numel() else [whole] * world_size
    parts[rank].copy_(part)
    for step in range(world_size - 1):
        pass_on(parts[(rank - step) % world_size], parts[(rank - step - 1) % world_size])


def ring_reduce_scatter(part: Tensor, whole: Tensor) -> None:
    """Fill `part`, [n], with the sum of all ranks' pieces for this rank; `whole`, [W * n], has a piece for each and stays.

    A rank sends to the next rank and receives from the previous one, nothing else, and no more than it must.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = whole.view(world_size, -1) if whole.numel() else whole.new_empty(world_size, 0)
    # A sum starts at the rank after the one it is for, and arrives there after a whole round.
    part.copy_(pieces[(rank - 1) % world_size])
    arrived = torch.empty_like(part)
    for step in range(1, world_size):
        pass_on(part, arrived)
        torch.add(arrived, pieces[(rank - step - 1) % world_size], out=part)


def pass_on(sent: Tensor, received: Tensor) -> None:
    """Send a tensor to the next rank of the ring, and receive one from the previous rank, at the same time."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    to_next = dist.P2POp(dist.isend, sent, (rank + 1) % world_size)
    from_previous = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
    for work in dist.batch_isend_irecv([to_next, from_previous]):
        work.wait()


# --- 03 Replicas -------------------------------------------------------------------------------------------


def replicate(model: nn.Module) -> nn.Module:
    """Make each backward average the gradients of `model` over the ranks, which all keep the whole model; return it."""

    def average(parameter: Tensor) -> None:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)
    return model


# --- 05 Closed forms -----------------------------------------------------------------------------------------


def traffic(shapes: Sequence[Shape], strategy: str, world_size: int, shards: int = 1) -> dict[str, int]:
    """Count the bytes that one training step in float32 moves, by collective, each time the whole tensor that it works on.

    Args:
        shapes: of all parameters. strategy: "ddp", "zero1", "zero2", "zero3" (which is FSDP), or "hybrid".
        shards: for "hybrid", how many ranks share one copy of the parameters.
    """
    cut = {"ddp": 1, "zero1": world_size, "zero2": world_size, "zero3": world_size, "hybrid": shards}[
        strategy
    ]
    copies = world_size // cut  # groups of ranks that keep the same rows

    def rows(shape: Shape) -> int:
        return padded_rows(shape[0] if shape else 1, cut)

    part = 4 * sum(rows(shape) * math.prod(shape[1:]) for shape in shapes)  # what one rank keeps
    whole = cut * part
    gathers = 1 if strategy in ("zero1", "zero2") else 2
    return {
        "all_gather": gathers * whole if cut > 1 else 0,
        "reduce_scatter": whole if cut > 1 else 0,
        "all_reduce": part if copies > 1 else 0,
    }


# --- Given --------------------------------------------------------------------------------------------------


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return nested lists, tuples and dicts with what `function` makes of everything in them."""
    if isinstance(tree, dict):
        return {key: tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        made = [tree_map(function, value) for value in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    return function(tree)


def tree_leaves(tree: Any) -> list[Any]:
    """Return everything in nested lists, tuples and dicts, from left to right."""
    leaves: list[Any] = []
    tree_map(leaves.append, tree)
    return leaves
