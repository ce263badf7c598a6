"""All-gather and reduce-scatter from send and receive.

The ranks form a ring. In each of `W - 1` steps, every rank sends one block to its right neighbor, and receives one from its left
neighbor. For any number of ranks, each rank sends only `(W - 1) / W` of the tensor. Less is not possible, so libraries use this
algorithm for large tensors.

    all-gather, W = 3 (each rank starts with its own block)
              rank 0      rank 1      rank 2
    start     a . .       . b .       . . c
    step 1    a . c       a b .       . b c
    step 2    a b c       a b c       a b c

A reduce-scatter goes around in the same way, with an addition at every stop: the block for rank r starts at rank r + 1, and
collects every other rank's share on its way.

These functions are for reading and for teaching. `collectives.RingAllGather` and `RingReduceScatter` use them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(send: Tensor, receive: Tensor, group: dist.ProcessGroup | None) -> None:
    """Send one block to the next rank of the ring, and receive one of the same size from the previous rank."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, send, group=group, group_peer=(rank + 1) % world_size),
            dist.P2POp(dist.irecv, receive, group=group, group_peer=(rank - 1) % world_size),
        ]
    )
    for work in works:
        work.wait()


def ring_all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `output` with every rank's `input`, in rank order: block r is the input of rank r of the group.

    Args:
        output: [W * n], contiguous, n >= 1; written. input: [n], same dtype, only read; may be this rank's block of
            `output`, the same memory.
        group: its W ranks call this together. Ranks are counted within the group; None means all ranks.

    In each of W - 1 steps, every rank sends one block of n elements to the next rank of the ring, and receives one from the
    previous rank (`exchange` does both). In the first step it sends its own block; in step s it passes on the block that it
    received in step s - 1. One rank alone sends nothing. Returns when `output` is complete on this rank.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    blocks = output.view(world_size, -1)
    if blocks[rank].data_ptr() != input.data_ptr():
        blocks[rank].copy_(input)
    for step in range(world_size - 1):
        exchange(blocks[(rank - step) % world_size], blocks[(rank - step - 1) % world_size], group)


def ring_reduce_scatter(output: Tensor, input: Tensor, group: dist.ProcessGroup | None, mean: bool) -> None:
    """Set `output` to this rank's block of the sum, or mean, of all ranks' `input`.

    Args:
        output: [n], n >= 1; written, and not part of `input`. input: [W * n], contiguous, same dtype, only read; block r is
            this rank's share of the result of rank r of the group.
        group: its W ranks call this together. Ranks are counted within the group; None means all ranks.
        mean: divide the sum by W once it is complete; only for floating-point tensors.

    In each of W - 1 steps, every rank sends one block of n elements to the next rank of the ring, and receives one from the
    previous rank (`exchange` does both). First it sends its share of the left neighbor's block. In every later step it sends
    the block that it has just received, plus its own share of this block. The last block that arrives is its own. One rank
    alone sends nothing. Returns when `output` is complete on this rank.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    blocks = input.view(world_size, -1)
    partial = blocks[(rank - 1) % world_size]
    for step in range(1, world_size):
        received = torch.empty_like(partial)
        exchange(partial, received, group)
        partial = received.add_(blocks[(rank - step - 1) % world_size])
    output.copy_(partial)
    if mean:
        output.div_(world_size)
