"""A caching allocator's layout of storages: a device needs more memory than is alive.

PyTorch's allocator takes memory from the device in segments, keeps it, and cuts blocks from it. Only the stream that made a
block can reuse it, and a hole serves only storages that fit into it. So the reserved memory is at least the sum of the
streams' peaks, which may come at different times, plus the holes. This module follows the documented rules of torch's CUDA
allocator (docs.pytorch.org, CUDA semantics, "Memory management", and its published source's constants):

- sizes are rounded up to 512 bytes; up to 1 MiB they come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB,
  larger ones get a segment of their own size, rounded up to 2 MiB;
- the smallest hole that fits is taken; what is left of it stays a hole if it is 512 bytes or more (of small blocks), or
  more than 1 MiB (of others);
- neighboring holes of one segment become one.

Left out: expandable segments, giving memory back when the device runs out, garbage collection of cached segments.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

ROUND = 512  # bytes
_SMALL, _MEDIUM = 1 << 20, 10 << 20  # the largest block of a small segment, of a medium one
_SMALL_SEGMENT, _MEDIUM_SEGMENT, _LARGE_ROUND = 2 << 20, 20 << 20, 2 << 20


def rounded(nbytes: int) -> int:
    """Bytes of the block for a storage."""
    return max(ROUND, -(-nbytes // ROUND) * ROUND)


@dataclass(eq=False)
class Block:
    """A part of a segment: taken, or a hole.

    Attributes:
        at: bytes from an origin that all segments share. before, after: its neighbors in the segment.
    """

    at: int
    nbytes: int
    pool: Pool
    is_hole: bool = True
    before: Block | None = None
    after: Block | None = None


@dataclass(eq=False)
class Pool:
    """The holes of one stream's segments of one kind, by size and then by address."""

    is_small: bool
    holes: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)  # holes by address

    def take(self, nbytes: int) -> Block | None:
        """The smallest hole of at least so many bytes."""
        place = bisect_left(self.holes, (nbytes, 0))
        if place == len(self.holes):
            return None
        return self.blocks.pop(self.holes.pop(place)[1])

    def put(self, hole: Block) -> None:
        insort(self.holes, (hole.nbytes, hole.at))
        self.blocks[hole.at] = hole

    def remove(self, hole: Block) -> None:
        self.holes.pop(bisect_left(self.holes, (hole.nbytes, hole.at)))
        del self.blocks[hole.at]


class Pools:
    """The pools of all streams.

    Attributes:
        reserved: bytes of all segments; they are never given back.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._pools: dict[tuple[str, bool], Pool] = {}

    def allocate(self, nbytes: int, stream: str) -> Block:
        """A block for a storage of so many bytes."""
        size = rounded(nbytes)
        is_small = size <= _SMALL
        pool = self._pools.setdefault((stream, is_small), Pool(is_small))
        block = pool.take(size) or self._segment(size, pool)
        block.is_hole = False
        rest = block.nbytes - size
        if rest >= ROUND if is_small else rest > _SMALL:
            hole = Block(block.at + size, rest, pool, before=block, after=block.after)
            if block.after:
                block.after.before = hole
            block.nbytes, block.after = size, hole
            pool.put(hole)
        return block

    def free(self, block: Block) -> None:
        """Make a hole of the block, and one hole of it and the holes beside it."""
        block.is_hole = True
        for neighbor in (block.before, block.after):
            if neighbor is not None and neighbor.is_hole:
                block.pool.remove(neighbor)
                block.at, block.nbytes = min(block.at, neighbor.at), block.nbytes + neighbor.nbytes
                if neighbor is block.before:
                    block.before = neighbor.before
                    if block.before:
                        block.before.after = block
                else:
                    block.after = neighbor.after
                    if block.after:
                        block.after.before = block
        block.pool.put(block)

    def _segment(self, size: int, pool: Pool) -> Block:
        nbytes = _SMALL_SEGMENT if pool.is_small else _MEDIUM_SEGMENT
        if size >= _MEDIUM:
            nbytes = -(-size // _LARGE_ROUND) * _LARGE_ROUND
        self.reserved += nbytes
        return Block(self.reserved - nbytes, nbytes, pool)
