"""A caching allocator's layout of storages. It shows why a device reserves more bytes than are alive.

PyTorch's allocator takes memory from the device in segments, keeps it, and cuts blocks from it. Only the stream that made a
block can reuse it, and a hole can hold only storages that fit into it. So the reserved memory is at least the sum of the
streams' peaks, which may come at different times, plus the holes. This module follows the documented rules of torch's CUDA
allocator (docs.pytorch.org, CUDA semantics, "Memory management", and the constants in its published source):

- sizes are rounded up to multiples of 512 bytes. Blocks up to 1 MiB come from segments of 2 MiB, and blocks up to 10 MiB from
  segments of 20 MiB. A larger block gets a segment of its own size, rounded up to a multiple of 2 MiB;
- the smallest hole that fits is taken. The rest of it stays a hole if it has at least 512 bytes (small blocks), or more than
  1 MiB (all others);
- neighboring holes of one segment become one hole.

Left out: expandable segments, memory that is given back when the device runs out, garbage collection of cached segments.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

ROUND = 512  # bytes
_SMALL, _MEDIUM = 1 << 20, 10 << 20  # the largest block of a small segment, of a medium one
_SMALL_SEGMENT, _MEDIUM_SEGMENT, _LARGE_ROUND = 2 << 20, 20 << 20, 2 << 20


def rounded(nbytes: int) -> int:
    """Return the bytes of the block for a storage of `nbytes` bytes."""
    return max(ROUND, -(-nbytes // ROUND) * ROUND)


@dataclass(eq=False)
class Block:
    """A part of a segment, either taken or a hole.

    Attributes:
        at: its address, in bytes from an origin that all segments share. before, after: its neighbors in the segment.
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
        """Remove and return the smallest hole of at least `nbytes` bytes, or return None."""
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
        reserved: bytes of all segments. They are never given back.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._pools: dict[tuple[str, bool], Pool] = {}

    def allocate(self, nbytes: int, stream: str) -> Block:
        """Return a block for a storage of `nbytes` bytes on this stream."""
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
        """Turn the block into a hole, and join it with the neighboring holes."""
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
