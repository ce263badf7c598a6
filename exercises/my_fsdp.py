"""Fully sharded data parallel training (FSDP), in one file.

Every rank keeps a chunk of rows of every parameter. Before a module computes, the ranks gather its parameters; afterwards they
free them. The backward does the same, and averages the gradients: each rank gets the rows that it keeps.

    padded_rows, rows_of      station 01: which rows a rank keeps
    ring_all_gather, ring_reduce_scatter      02: what collectives are made of
    replicate                 03: data parallel training without sharding
    fully_shard               03: shards the parameters of a module
    traffic                   05: the bytes that a training step moves, in closed form


Collectives and streams come from `hwfsdp`. Everything else is here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hwfsdp.collectives import all_gather_flat, reduce_scatter_flat
from hwfsdp.streams import StreamEvent, after_backward, streams_for

Shape = Sequence[int]
Places = list[tuple[nn.Module, str]]  # modules, and names in them


# --- 01 Rows -----------------------------------------------------------------------------------------------


def padded_rows(n: int, world_size: int) -> int:
    """Count the rows that each of `world_size` ranks sends for a parameter of `n` rows, padding included."""
    raise NotImplementedError("TODO(01): padded_rows")


def rows_of(n: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the first row that `rank` keeps, and the row after its last one. A rank without rows keeps `(n, n)`."""
    raise NotImplementedError("TODO(01): rows_of")


# --- 02 Rings ----------------------------------------------------------------------------------------------


def ring_all_gather(whole: Tensor, part: Tensor) -> None:
    """Fill `whole`, [W * n], with the `part`, [n], of every rank, in the order of ranks.

    A rank sends only to the next rank, receives only from the previous one, and sends no more bytes than it must.
    """
    raise NotImplementedError("TODO(02): ring_all_gather")


def ring_reduce_scatter(part: Tensor, whole: Tensor) -> None:
    """Fill `part`, [n], with the sum of all ranks' pieces for this rank; `whole`, [W * n], has a piece for each rank.

    A rank sends only to the next rank, receives only from the previous one, and sends no more bytes than it must.
    """
    raise NotImplementedError("TODO(02): ring_reduce_scatter")


def pass_on(sent: Tensor, received: Tensor) -> None:
    """Send a tensor to the next rank of the ring, and receive one from the previous rank, at the same time."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    to_next = dist.P2POp(dist.isend, sent, (rank + 1) % world_size)
    from_previous = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
    for work in dist.batch_isend_irecv([to_next, from_previous]):
        work.wait()


# --- 03 Replicas -------------------------------------------------------------------------------------------


def replicate(model: nn.Module) -> nn.Module:
    """Make each backward average the gradients of `model` over the ranks. Every rank keeps all of `model`. Return it."""

    raise NotImplementedError("TODO(03): replicate")


# --- 05 Closed forms -----------------------------------------------------------------------------------------


def traffic(shapes: Sequence[Shape], strategy: str, world_size: int, shards: int = 1) -> dict[str, int]:
    """Count the bytes that one training step in float32 moves, by collective. A call counts the whole tensor that it works on.

    Args:
        shapes: of all parameters. strategy: "ddp", "zero1", "zero2", "zero3" (which is FSDP), or "hybrid".
        shards: for "hybrid", how many ranks share one copy of the parameters.
    """
    raise NotImplementedError("TODO(05): traffic")


# --- 03 Collectives --------------------------------------------------------------------------------------


def all_gather(whole: Tensor, part: Tensor, name: str) -> None:
    """Fill `whole`, [W * n], with the `part`, [n], of every rank; return when it is there. Traces show `name`."""
    streams = streams_for(whole.device.type)
    streams.all_gather.wait(streams.compute.record())
    streams.compute.wait(all_gather_flat(whole, part, None, streams.all_gather, name))


def reduce_scatter(part: Tensor, whole: Tensor, name: str) -> None:
    """Fill `part`, [n], with this rank's piece of the mean of all ranks' `whole`, [W * n]; return when it is there."""
    streams = streams_for(whole.device.type)
    streams.reduce_scatter.wait(streams.compute.record())
    streams.compute.wait(reduce_scatter_flat(part, whole, None, streams.reduce_scatter, name))


# --- 03 Fully sharded ----------------------------------------------------------------------------------------


# TODO(03): a class for one parameter, and one for the parameters of a module with the hooks that move them.


def fully_shard(
    module: nn.Module,
) -> nn.Module:
    """Shard the parameters of `module`, in place, over all ranks; return it.

    Parameters that an earlier call has sharded are left alone, so call it for inner modules first. From then on
    `module.parameters()` are this rank's rows, forwards and backwards compute with whole parameters, and the rows' `grad` is their
    part of the mean gradient.
    """
    raise NotImplementedError("TODO(03): fully_shard")


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
