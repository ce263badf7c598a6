"""Which memory is made, and whether it is still alive: storages watched by weak references.

Note [Threads let go late]
    A thread of gloo says that a collective is done, and drops its tensors a moment later. So a check looks again for a while:
    tensors that only the thread held are gone by then.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.compat import DispatchMode, local_of, storage_key

Watched = weakref.ref[torch.UntypedStorage]


def ready() -> None:
    """Begin a probe. Objects that exist now are left out of garbage collections, so that these are fast."""
    gc.freeze()


def local_part(tensor: Tensor) -> Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def copied(tensor: Tensor | None) -> Tensor | None:
    """This rank's part of a tensor, in memory of its own; None if there is none, or it has no memory."""
    part = None if tensor is None else local_part(tensor)
    return None if part is None or part.is_meta else part.detach().clone()


def watch(tensor: Tensor) -> Watched:
    """Views keep a storage alive as its tensor does."""
    return weakref.ref(local_part(tensor).untyped_storage())


def bytes_alive(watched: Iterable[Watched]) -> int:
    """Bytes of those storages that someone still refers to; what only a cycle of references holds is not counted."""
    global _left
    refs = list(watched)
    if _sum(refs):
        gc.collect()
    while _left > 0 and _sum(refs):
        time.sleep(0.002)
        _left -= 0.002
    return _sum(refs)


_left = 0.5  # seconds to wait in this process, all in all (Note [Threads let go late])


def _sum(refs: Iterable[Watched]) -> int:
    """Every storage once, however often it is watched."""
    return sum({id(storage): storage.nbytes() for ref in refs if (storage := ref()) is not None}.values())


class Allocations(DispatchMode):
    """The memory that operators make in its block.

    Args:
        ignored: tensors of this dtype are not counted.

    Attributes:
        made: what was seen. nbytes: of all, since `restart`; largest: of one; peak: alive at once.
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
        given = {
            storage_key(local_part(a)) for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor)
        }
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.dtype != self.ignored:
                self._see(local_part(tensor), given)
        return found

    def _see(self, tensor: Tensor, given: set[int]) -> None:
        if storage_key(tensor) in given:
            return
        nbytes = tensor.untyped_storage().nbytes()
        self.made = [*(ref for ref in self.made if ref() is not None), watch(tensor)]
        self.nbytes += nbytes
        self.largest, self.peak = max(self.largest, nbytes), max(self.peak, _sum(self.made))
