"""Whether memory is still alive: storages watched by weak references, and their bytes once everyone should have let go."""

from __future__ import annotations

import gc
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
    return {name: nbytes for name, refs in watched.items() if (nbytes := _sum(refs))}


def _sum(refs: Iterable[Watched]) -> int:
    """Every storage once, however often it is watched."""
    return sum({id(storage): storage.nbytes() for ref in refs if (storage := ref()) is not None}.values())
