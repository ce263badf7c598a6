"""Whether memory is still alive: storages watched by weak references, and their bytes once everyone should have let go.

Note [Threads let go late]
    A thread of gloo that has finished a collective tells so, and lets go of its tensors a moment later. So what is still
    alive is looked at again, for a while in all: what nobody refers to is gone by then, what is kept stays.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.compat import local_of

Watched = weakref.ref[torch.UntypedStorage]


def ready() -> None:
    """Called at the beginning of a probe: what is there now is never garbage, so that looking for some is fast."""
    gc.freeze()


def watch(tensor: Tensor) -> Watched:
    """Views keep a storage alive as its tensor does."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return weakref.ref(local.untyped_storage())


def bytes_alive(watched: Iterable[Watched]) -> int:
    """Bytes of those storages that someone still refers to; what only a cycle of references holds is not counted."""
    return sum(still_alive({"": [*watched]}).values())


def still_alive(watched: Mapping[str, Sequence[Watched]]) -> dict[str, int]:
    """Such bytes by name; names without any are left out."""
    if any(map(_sum, watched.values())):
        gc.collect()
        _wait_for_threads(watched)
    return {name: nbytes for name, refs in watched.items() if (nbytes := _sum(refs))}


_left = 0.5  # seconds to wait in this process, all in all


def _wait_for_threads(watched: Mapping[str, Sequence[Watched]]) -> None:
    """Note [Threads let go late]."""
    global _left
    while _left > 0 and any(map(_sum, watched.values())):
        time.sleep(0.002)
        _left -= 0.002


def _sum(refs: Iterable[Watched]) -> int:
    """Every storage once, however often it is watched."""
    return sum({id(storage): storage.nbytes() for ref in refs if (storage := ref()) is not None}.values())
