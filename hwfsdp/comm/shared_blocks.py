"""Blocks of memory that one rank writes and the other ranks of its machine read.

Note [When a block is free]
    A rank may write a block again when the block's tensor is gone and all other ranks have read it. No rank waits for this: each
    record also says up to which collective its sender has read. After the last reduction of a backward, ranks send this at once. If
    no block is known to be free, the rank makes another block. A training run needs four or five blocks: two or three as large as
    the largest group's gradients, and others for a rank's parts of gathers. Blocks are kept, because the first use of new memory
    takes longer than a copy. Only the owner of a block decides about it, so ranks do not have to agree.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor


class Reader(Protocol):
    """A group of ranks that reads blocks (`shared_memory.Neighbors`)."""

    @property
    def read_by_all(self) -> int:
        """The number of the collective up to which all other ranks have read."""

    def catch_up(self) -> None:
        """Receive the messages that say so."""


class Block:
    """Memory that one rank writes and the other ranks read.

    Attributes:
        capacity: its size in bytes. address: its first address in this process.
        tensor: returns the buffer of the tensor that uses the block, or None if there is no such tensor any more.
        readers: the groups that read it, each with the number of the last collective in which they read it.
    """

    def __init__(self, file: int, capacity: int) -> None:
        self.file, self.capacity, self.memory = file, capacity, mmap.mmap(file, capacity)
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.tensor: Callable[[], memoryview | None] = lambda: None
        self.readers: dict[Reader, int] = {}

    @property
    def is_free(self) -> bool:
        """True if the block may be written again (Note [When a block is free])."""
        if self.tensor() is not None:
            return False
        for neighbors, number in list(self.readers.items()):
            if number > neighbors.read_by_all:
                neighbors.catch_up()
                if number > neighbors.read_by_all:
                    return False
            del self.readers[neighbors]
        return True

    def __del__(self) -> None:
        os.close(self.file)


class Pool:
    """The blocks that this process writes."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._index_at: dict[int, int] = {}  # by address
        self._lock = threading.Lock()  # `shared_memory`, Note [Threads]

    def allocate(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        nbytes = prod(size) * dtype.itemsize
        with self._lock:
            block = self.blocks[self._free(nbytes)]
            buffer = memoryview(block.memory)[: max(nbytes, dtype.itemsize)]
            block.tensor = weakref.ref(buffer)
        return torch.frombuffer(buffer, dtype=dtype)[: prod(size)].view(*size)

    def _free(self, nbytes: int) -> int:
        """Return the index of the smallest free block that is large enough. If there is none, make one."""
        unused = sorted((b.capacity, at) for at, b in enumerate(self.blocks) if b.tensor() is None)
        for capacity, at in unused:
            if capacity >= nbytes and self.blocks[at].is_free:
                return at
        too_small = [at for capacity, at in unused if capacity < nbytes and self.blocks[at].is_free]
        # a new block replaces the largest free one that is too small
        index = too_small[-1] if too_small else len(self.blocks)
        block = Block(anonymous_file(capacity := max(nbytes, mmap.PAGESIZE)), capacity)
        self.blocks[index : index + 1] = [block]
        self._index_at = {block.address: index for index, block in enumerate(self.blocks)}
        return index

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the place of a tensor: index of its block, and offset in bytes. Return None if it is in no block."""
        index = self._index_at.get(tensor.untyped_storage().data_ptr())
        return None if index is None else (index, int(tensor.storage_offset()) * tensor.element_size())


def anonymous_file(nbytes: int) -> int:
    """Return a file without a name, in memory if possible. The system removes it when its last user is gone."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("hwfsdp")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, nbytes)
    return file
