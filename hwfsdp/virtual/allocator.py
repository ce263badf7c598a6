"""The memory of a virtual device: every storage, from the operator that makes it to its last reference, and the segments for it.

Fake tensors have storages with sizes and lifetimes, but no memory. The `Allocator` counts a storage when it first sees it, when the
host resizes it, and when its last reference is gone. A real device's allocator takes memory back at the same moments. The bytes alive
are one number; the bytes that must be reserved for them are another.

Note [Segments]
    PyTorch's allocator takes memory from the device in segments, keeps it, and cuts blocks from it. Only the stream that made a
    block can reuse it, and a hole can hold only storages that fit into it. So the reserved memory is at least the sum of the
    streams' peaks, which may come at different times, plus the holes. `Pools` follows the documented rules of torch's CUDA
    allocator (docs.pytorch.org, CUDA semantics, "Memory management", and the constants in its published source):

    - sizes are rounded up to multiples of 512 bytes. Blocks up to 1 MiB come from segments of 2 MiB, and blocks below 10 MiB from
      segments of 20 MiB. A larger block gets a segment of its own size, rounded up to a multiple of 2 MiB;
    - the smallest hole that fits is taken. The rest of it stays a hole if it has at least 512 bytes (small blocks), or more than
      1 MiB (all others);
    - neighboring holes of one segment become one hole.

Left out: expandable segments, memory that is given back when the device runs out, garbage collection of cached segments, the workspaces
of libraries, and the memory that a driver needs for itself.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hwfsdp.compat import storage_key

# The kind of all storages that nobody names: activations, their gradients, temporary results.
ACTIVATION = "activation"
ROUND = 512  # bytes
_SMALL, _MEDIUM = 1 << 20, 10 << 20  # the largest block of a small segment; larger than any of a medium one
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


class Step(NamedTuple):
    """A change of the bytes alive: the number of the storage, and the change in bytes."""

    number: int
    delta: int


class Allocator:
    """Counts the bytes of storages.

    Attributes:
        allocated, peak: bytes alive now, and the most bytes alive at once since `reset_peak`.
    """

    def __init__(self) -> None:
        self.allocated = self.peak = 0
        self._numbers: dict[int, int] = {}  # storage_key → number of the storage
        self._bytes: dict[int, int] = {}  # number → bytes
        self._kinds: dict[int, str] = {}  # number → kind
        self._steps: list[Step] = []
        self._peak_at = 0  # number of steps up to the peak
        self._made = 0
        self._pools = Pools()
        self._blocks: dict[int, Block] = {}  # number → its block

    @property
    def reserved(self) -> int:
        """Return the bytes of all segments that were reserved since `pack`."""
        return self._pools.reserved

    def see(self, storage: torch.UntypedStorage, stream: str = "compute") -> None:
        """Count a storage from now on, or its new size if it was seen before. `stream` made or resized it."""
        key, nbytes = storage_key(storage), storage.nbytes()
        number = self._numbers.get(key)
        if number is None:
            number = self._made = self._made + 1
            self._numbers[key], self._bytes[number] = number, 0
            weakref.finalize(storage, self._lose, key, number).atexit = False
        if nbytes != self._bytes[number]:
            self._change(number, nbytes - self._bytes[number], stream)

    def name(self, storage: torch.UntypedStorage, kind: str) -> None:
        """Count the storage under `kind`, from its beginning."""
        self.see(storage)
        self._kinds[self._numbers[storage_key(storage)]] = kind

    def reset_peak(self) -> None:
        """Forget the peak, and measure a new peak from now on."""
        self.peak, self._peak_at = self.allocated, len(self._steps)

    def pack(self) -> None:
        """Lay out all living storages again, as blocks of the compute stream, and forget the old segments."""
        self._pools = Pools()
        self._blocks = {
            number: self._pools.allocate(nbytes, "compute")
            for number, nbytes in self._bytes.items()
            if nbytes
        }

    def peak_by_kind(self) -> dict[str, int]:
        """Return the bytes alive at the (first) peak, by kind."""
        totals: Counter[str] = Counter()
        for number, delta in self._steps[: self._peak_at]:
            totals[self._kinds.get(number, ACTIVATION)] += delta
        return {kind: nbytes for kind, nbytes in totals.items() if nbytes}

    def _lose(self, key: int, number: int) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
        if self._bytes[number]:
            self._change(number, -self._bytes[number], "")

    def _change(self, number: int, delta: int, stream: str) -> None:
        if block := self._blocks.pop(number, None):
            self._pools.free(block)
        self._bytes[number] += delta
        if self._bytes[number]:
            self._blocks[number] = self._pools.allocate(self._bytes[number], stream)
        self._steps.append(Step(number, delta))
        self.allocated += delta
        if self.allocated > self.peak:
            self.peak, self._peak_at = self.allocated, len(self._steps)
