"""The memory of a virtual device: every storage, from the operator that makes it to its last reference.

Fake tensors have storages with sizes and lifetimes, but no memory. The allocator counts a storage when it first sees it, when
the host resizes it, and when its last reference is gone. A real device's allocator takes memory back at the same moments. The
bytes alive are one number; the bytes that must be reserved for them are another (`pools`).

Left out: the workspaces of libraries, and the memory that a driver needs for itself.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import NamedTuple

import torch

from hwfsdp.compat import storage_key
from hwfsdp.virtual.pools import Block, Pools

# The kind of all storages that nobody names: activations, their gradients, temporary results.
ACTIVATION = "activation"


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
