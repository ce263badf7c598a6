"""Which memory is allocated, and whether it is still alive: storages watched by weak references.

Note [Threads let go late]
    A gloo thread reports that a collective is done, and drops its tensors a moment later. So a check looks again for a while:
    by then, tensors that only the thread held are gone.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hwfsdp.compat import DispatchMode, local_of, storage_key

Watched = weakref.ref[torch.UntypedStorage]


def ready() -> None:
    """Begin a probe. Exclude the objects that exist now from garbage collection, so that collections are fast."""
    gc.freeze()


def copied(tensor: Tensor | None) -> Tensor | None:
    """Copy this rank's part of a tensor into new memory; None if there is no tensor, or it has no memory."""
    part = None if tensor is None else local_of(tensor)
    return None if part is None or part.is_meta else part.detach().clone()


def watch(tensor: Tensor) -> Watched:
    """Watch the storage of this rank's part. A view keeps a storage alive just as its tensor does."""
    return weakref.ref(local_of(tensor).untyped_storage())


def bytes_alive(watched: Iterable[Watched]) -> int:
    """Count the bytes of watched storages that are still referenced. Storages that only a reference cycle holds do not count."""
    global _left
    refs = list(watched)
    if _sum(refs):
        gc.collect()
    while _left > 0 and _sum(refs):
        time.sleep(0.002)
        _left -= 0.002
    return _sum(refs)


_left = 0.5  # seconds left to wait in this process, in total (Note [Threads let go late])


def _sum(refs: Iterable[Watched]) -> int:
    """Add up the bytes; count every storage once, even if it is watched several times."""
    return sum({id(storage): storage.nbytes() for ref in refs if (storage := ref()) is not None}.values())


class Allocations(DispatchMode):
    """Watch the memory that operators allocate in the block.

    Args:
        ignored: tensors of this dtype are not counted.

    Attributes:
        made: the storages seen. nbytes: of all, since `restart`; largest: of the largest one; peak: most bytes alive at once.
    """

    def __init__(self, ignored: torch.dtype | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ignored = ignored
        self.made: list[Watched] = []
        self.restart()

    def restart(self) -> None:
        self.nbytes, self.largest, self.peak = 0, 0, _sum(self.made)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {storage_key(local_of(a)) for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor)}
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.dtype != self.ignored:
                self._see(local_of(tensor), given)
        return found

    def _see(self, tensor: Tensor, given: set[int]) -> None:
        if storage_key(tensor) in given:
            return
        nbytes = tensor.untyped_storage().nbytes()
        self.made = [*(ref for ref in self.made if ref() is not None), watch(tensor)]
        self.nbytes += nbytes
        self.largest, self.peak = max(self.largest, nbytes), max(self.peak, _sum(self.made))
