"""Exercise 01: Shard math"""

from __future__ import annotations

from collections.abc import Sequence

from hwfsdp.sharding import Extent


def chunk_length(n: int, world_size: int) -> int:
    """Rows of a full chunk when `n` rows are cut for `world_size` ranks: `ceil(n / world_size)`."""
    # TODO(01)
    raise NotImplementedError


def padded_length(n: int, world_size: int) -> int:
    """Rows on the wire: the smallest multiple of `world_size` that is not below `n`."""
    # TODO(01)
    raise NotImplementedError


def chunk_extent(n: int, world_size: int, rank: int) -> Extent:
    """The rows of `rank` when `n` rows are cut for `world_size` ranks.

    Args:
        n: rows in all, >= 0.
        world_size: ranks, >= 1.
        rank: 0 <= rank < world_size.

    Returns:
        The extent that `torch.chunk` gives the rank. Ranks for which no row is left get an empty extent that
        starts at `n`, so that no empty extent ever shares its start with a real one.
    """
    # TODO(01)
    raise NotImplementedError


def local_shape(shape: Sequence[int], world_size: int, rank: int) -> tuple[int, ...]:
    """Shape of the rank's shard of a tensor of this shape, without padding; dim 0 may be 0."""
    # TODO(01)
    raise NotImplementedError
