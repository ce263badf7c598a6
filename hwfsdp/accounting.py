"""What a step costs, before it is run: bytes in closed form.

The oracle for the ledger and the event log: everything here follows from shapes, dtypes and the world size.
Bytes of a collective are those of the whole tensor it works on (the output of an all-gather, the input of a
reduce-scatter, padding included); `on_the_wire` turns them into what one rank sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hwfsdp.sharding import padded_local_numel


@dataclass(frozen=True)
class GroupSizes:
    """One parameter group as integers.

    Attributes:
        shapes: of its parameters, unsharded.
        gather_itemsize: bytes per element of the parameters as gathered (their param dtype).
        reduce_itemsize: bytes per element of the gradients as reduced (their reduce dtype).
        resharded_after_forward: whether the backward has to gather them again.
    """

    shapes: Sequence[Sequence[int]]
    gather_itemsize: int = 4
    reduce_itemsize: int = 4
    resharded_after_forward: bool = True

    def padded_numel(self, world_size: int) -> int:
        """Elements of the whole group on the wire: every parameter padded to a multiple of `world_size` rows."""
        return world_size * sum(padded_local_numel(shape, world_size) for shape in self.shapes)


def unsharded_bytes(group: GroupSizes, world_size: int) -> int:
    """Bytes that the group's unsharded parameters hold while they are allocated."""
    return group.padded_numel(world_size) * group.gather_itemsize


def gathers_per_step(group: GroupSizes) -> int:
    """All-gathers of one forward and backward: two, or one for a group that stays unsharded in between."""
    return 2 if group.resharded_after_forward else 1


def step_traffic(groups: Sequence[GroupSizes], world_size: int) -> dict[str, int]:
    """Bytes by collective of one training step (forward and backward, gradients reduced).

    Returns:
        `{"all_gather": …, "reduce_scatter": …}`; zeros at world size 1, where nothing travels.
    """
    if world_size == 1:
        return {"all_gather": 0, "reduce_scatter": 0}
    return {
        "all_gather": sum(gathers_per_step(g) * unsharded_bytes(g, world_size) for g in groups),
        "reduce_scatter": sum(g.padded_numel(world_size) * g.reduce_itemsize for g in groups),
    }


def on_the_wire(collective: str, nbytes: int, world_size: int) -> int:
    """Bytes that one rank sends, by the ring algorithm, for a collective over `nbytes`.

    An all-gather or a reduce-scatter sends `(W - 1) / W` of the tensor, an all-reduce is one of each.
    (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.)
    """
    rounds = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}[collective]
    return rounds * nbytes * (world_size - 1) // world_size


def peak_unsharded_bytes(kept: Sequence[GroupSizes], passing: Sequence[GroupSizes], world_size: int) -> int:
    """The most bytes of unsharded parameters alive at once.

    Args:
        kept: groups that are whole while others are: those that stay from forward to backward, and those of modules
            around others. The root is both, by default.
        passing: groups that are freed after use; the schedule holds one of them at a time.
    """
    sizes = [unsharded_bytes(g, world_size) for g in passing]
    return sum(unsharded_bytes(g, world_size) for g in kept) + max(sizes, default=0)
