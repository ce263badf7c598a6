"""Values that each rank has for itself: the state of a random number generator, a position in its own data.

A checkpoint holds one state dict, which is the same on all ranks. `PerRank` is the exception:

    state = {"model": model.state_dict(), "rng": PerRank(torch.get_rng_state())}
    save(state, path)
    load(state, path)                           # as many ranks as saved
    torch.set_rng_state(state["rng"].value)

In the checkpoint it is a dict with one entry for each rank: state["rng"][0], state["rng"][1], and so on. A load by another number of
ranks has no right value for every rank, so it refuses a `PerRank`. With strict=False it leaves the value out, with a warning. Such a
load can also take a plain dict {rank: value} as target, and then decide for itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch.distributed as dist

from hwfsdp.checkpoint.messages import KeyPath, refuse
from hwfsdp.checkpoint.traverse import containers_in


class PerRank(dict[int, Any]):
    """A value in a state dict that belongs to this rank alone. It is a dict with one entry: {rank: value}.

    Args:
        value: anything that a checkpoint can hold, except DTensors. Each rank may have another type or shape.
        group: the process group that saves or loads; None: all ranks. Make a PerRank after `init_process_group`.
    """

    def __init__(self, value: Any, group: dist.ProcessGroup | None = None) -> None:
        super().__init__({dist.get_rank(group) if dist.is_initialized() else 0: value})

    @property
    def value(self) -> Any:
        """This rank's value. A load replaces it, or fills it if it is a tensor."""
        return next(iter(self.values()))


def find_per_rank(state_dict: Any, rank: int) -> list[KeyPath]:
    """Return the paths of every `PerRank`. Raise UsageError if one is not this rank's."""
    found = [(path, tree) for path, tree in containers_in(state_dict).items() if isinstance(tree, PerRank)]
    for path, tree in found:
        if set(tree) != {rank}:
            expected, got = f"the value of rank {rank}, which this process is in the group", f"{list(tree)}"
            remedy = "Make it after init_process_group, as PerRank(value, group)."
            refuse(path, expected, f"the value of rank {got}", remedy)
    return [path for path, _ in found]


def is_within(path: KeyPath, outer: Collection[KeyPath]) -> bool:
    """True if the path leads into one of the containers at the paths `outer`."""
    return any(len(path) > len(at) and path[: len(at)] == at for at in outer)
