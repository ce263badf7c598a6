"""Other ways to move bytes.

By default, ranks on the CPU of one machine read each other's memory. Every call is noted, so that an error can say where ranks
differ (`hwfsdp.collectives`). Users may set their own collectives, or take buffers from the process group's allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from hwfsdp.collectives import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    GroupAllocAllGather,
    GroupAllocReduceScatter,
    ReduceScatter,
)
from hwfsdp.errors import RefusedStateError, UnsupportedError
from hwfsdp.features.lookup import FeatureModule, FeatureState, the_only

if TYPE_CHECKING:
    from hwfsdp.core.group import ParamGroup

_DEFAULTS = (DefaultAllGather, GroupAllocAllGather, DefaultReduceScatter, GroupAllocReduceScatter)


class TransportState(FeatureState):
    """A state that names transports for the other ranks, and copies out before the next gather starts if both may get one buffer."""

    def name_for_other_ranks(self) -> None:
        """Name the groups for the other ranks, too (`comm.pairing`)."""
        transports = [group.transport for state in self.states for group in state.groups]
        first: dict[object, int] = {}  # by process group
        for transport in transports:
            ranks = transport.ranks.group
            first[ranks] = min(first.get(ranks, transport.member.place), transport.member.place)
        for transport in transports:
            transport.member.rename(transport.name, first[transport.ranks.group])

    def prefetch_forward(self, groups: Sequence[ParamGroup]) -> None:
        self.copy_out_first()
        super().prefetch_forward(groups)

    def prefetch_backward(self, groups: Sequence[ParamGroup]) -> None:
        self.copy_out_first()
        super().prefetch_backward(groups)

    def copy_out_first(self) -> None:
        for group in self.groups:
            if group.transport.reuses_buffers:
                group.copy_out()


class CustomCollectives(FeatureModule):
    """Methods of sharded modules."""

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Choose how this module's own group gathers; for example `collectives.RingAllGather()`."""
        for group in the_only(self._groups(recurse=False), "set_custom_all_gather"):
            group.transport.gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Choose how this module's own group reduces; for example `collectives.RingReduceScatter()`."""
        for group in the_only(self._groups(recurse=False), "set_custom_reduce_scatter"):
            group.transport.scatter = comm

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Choose whether gradients are reduced in a separate process group, beside the gathers of other groups.

        This is a collective: every rank of the mesh has to call it. Modules sharded over the same ranks share the group.
        """
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in self._groups(recurse):
            transport = group.transport
            if enable and transport.ranks.group is not None:
                ranks = tuple(dist.get_process_group_ranks(transport.ranks.group))
                if ranks not in made:
                    made[ranks] = transport.reduce_group or dist.new_group(
                        list(ranks), use_local_synchronization=True, group_desc="fsdp_reduce_scatter"
                    )
                transport.reduce_group = made[ranks]
            elif not enable:
                transport.reduce_group = None

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Choose whether buffers come from the process group's own allocator, if it has one.

        Raises:
            RefusedStateError: custom collectives are set, and these allocate their own buffers.
        """
        for group in self._groups(recurse=False):
            transport = group.transport
            custom = [c for c in (transport.gather, transport.scatter) if type(c) not in _DEFAULTS]
            if custom:
                raise RefusedStateError(
                    "set_allocate_memory_from_process_group_for_comm",
                    expected="the default collectives",
                    got=type(custom[0]).__name__,
                    remedy="Allocate in the custom collective's own `allocate`.",
                )
            shard = transport.ranks.group
            reduce = transport.reduce_group or shard
            transport.gather = GroupAllocAllGather(shard) if enable else DefaultAllGather(shard)
            transport.scatter = GroupAllocReduceScatter(reduce) if enable else DefaultReduceScatter(reduce)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Raise UnsupportedError, because this is not built. The error names alternatives."""
        raise UnsupportedError(
            f"set_symm_mem_for_comm({backend!r})",
            expected="a feature that hwfsdp has",
            got="buffers in symmetric memory, which it does not have",
            remedy="Use set_allocate_memory_from_process_group_for_comm(True), or an AllGather of your own whose "
            "`allocate` takes symmetric memory, with set_custom_all_gather.",
        )
