"""Exercise 02: Ring collectives"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp.ring import exchange

# The package's own, that the docstrings name:
#
# hwfsdp.ring
#     function   exchange(send: Tensor, receive: Tensor, group: dist.ProcessGroup | None) -> None


def ring_all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fills `output` with every rank's `input`, in rank order: block r is what rank r of the group gives.

    Args:
        output: [W * n], contiguous, n >= 1; written. input: [n], same dtype, only read; may be this rank's block of
            `output`, the same memory.
        group: its W ranks call this together; ranks are counted in it, and None means all of them.

    In each of W - 1 steps every rank sends one block of n elements to the next rank of the ring and receives one from the
    previous (`exchange` does both). In step s it passes on the block that it received in step s - 1, its own in the
    first step. With one rank nothing is sent. Returns when `output` is complete on this rank.
    """
    # TODO(02)
    raise NotImplementedError


def ring_reduce_scatter(output: Tensor, input: Tensor, group: dist.ProcessGroup | None, mean: bool) -> None:
    """Sets `output` to this rank's block of the sum, or mean, of all ranks' `input`.

    Args:
        output: [n], n >= 1; written, and not part of `input`. input: [W * n], contiguous, same dtype; block r is this
            rank's share of what rank r of the group gets; only read.
        group: its W ranks call this together; ranks are counted in it, and None means all of them.
        mean: divide the sum by W, once it is complete; only asked of floating-point tensors.

    In each of W - 1 steps every rank sends one block of n elements to the next rank of the ring and receives one from the
    previous (`exchange` does both). The first block it sends is its share of the left neighbor's; in every later step it
    passes on what it just received plus its own share of that block. What arrives last is its own block. With one rank
    nothing is sent. Returns when `output` is complete on this rank.
    """
    # TODO(02)
    raise NotImplementedError
