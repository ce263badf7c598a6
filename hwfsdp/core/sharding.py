"""The rows that belong to each rank: integers only.

FSDP cuts each parameter along dim 0 into one chunk per rank, as `torch.chunk` does. Every chunk has
`ceil(n / world_size)` rows, but the last chunks may be shorter, or empty. Collectives need equal sizes, so on the wire
each chunk is padded to the full chunk length. All padding comes at the end of the gathered tensor, so its first `n` rows
are the parameter.

    n = 5, world_size = 4            rank 0   rank 1   rank 2   rank 3
    rows                             0 1      2 3      4        -
    on the wire (padding: .)         0 1      2 3      4 .      . .

Nothing here touches a tensor, so tests can check all of it by enumeration.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Extent(NamedTuple):
    """A run of consecutive rows: `start`, `start + 1`, … , `start + length - 1`."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


def chunk_length(n: int, world_size: int) -> int:
    """Return the number of rows in a full chunk if `n` rows are cut for `world_size` ranks: `ceil(n / world_size)`."""
    return -(-n // world_size)


def chunk_extent(n: int, world_size: int, rank: int) -> Extent:
    """Return the rows of `rank` if `n` rows are cut for `world_size` ranks as `torch.chunk` cuts them.

    A rank without rows gets an empty extent that starts at `n`. Every other extent starts before `n`.
    """
    length = chunk_length(n, world_size)
    start = min(rank * length, n)
    return Extent(start, min(length, n - start))


def local_shape(shape: Sequence[int], world_size: int, rank: int) -> tuple[int, ...]:
    """Return the shape of the rank's shard of a tensor of this shape, without padding. Dim 0 may be 0."""
    return (chunk_extent(shape[0], world_size, rank).length, *shape[1:])


def padded_local_shape(shape: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return the shape of every rank's shard on the wire: a full chunk of rows, padding included."""
    return (chunk_length(shape[0], world_size), *shape[1:])


def padded_local_numel(shape: Sequence[int], world_size: int) -> int:
    """Return the number of elements that one rank contributes to a gather, or gets from a reduction (`padded_local_shape`)."""
    return prod(padded_local_shape(shape, world_size))
