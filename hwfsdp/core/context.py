"""Shared by groups: streams, buffers in flight on them, and the order in which groups are gathered ahead.

Note [What to gather next]
    Forward. Groups run in the order in which they ran last time, unless the model takes another path. So each forward notes the
    order in which it enters groups. The next forward follows this order and gathers one group ahead. The first forward knows no
    order, and gathers each group when it needs it.

    Backward. Groups run in the reverse of the order in which their forwards ended. The forward has just noted this order. So
    while a group runs its backward, we gather the group that comes before it in this order.

    One group ahead is enough to hide a gather behind a computation. So while a module computes, at most two groups are in memory:
    its own group, whole, and the buffer of the next gather. The groups of the modules around it, such as the root's, come on top.
    A wrong guess costs a gather, but never changes a result: a module whose group is not whole gathers it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from hwfsdp.core.observer import moment
from hwfsdp.core.ranks import Transport
from hwfsdp.core.streams import Stream, StreamEvent, streams_for

if TYPE_CHECKING:
    from hwfsdp.core.group import ParamGroup


class InFlight(NamedTuple):
    """A buffer that a stream still uses, until the event `done`; `transport` moves its bytes."""

    buffer: Tensor
    done: StreamEvent
    transport: Transport


class FSDPCommContext:
    """The streams and buffers that the groups of a model share. Their gathers run one after the other, and so do their reductions.

    Several models may share one context.

    Args:
        device_type: the device type of the mesh, for example "cuda".

    Attributes:
        streams: see `streams.StreamSet`. all_gather_stream, reduce_scatter_stream: two of them, under torch's names.
        post_forward_order: groups in the order in which their forwards ended, once per forward.
        max_reductions: the largest number of reductions in flight. Each holds a buffer of one group's gradients.
        reducing: the reductions in flight, the oldest first.
    """

    def __init__(self, device_type: str) -> None:
        self.streams = streams = streams_for(device_type)
        self.all_gather_stream, self.reduce_scatter_stream = streams.all_gather, streams.reduce_scatter
        self.post_forward_order: list[ParamGroup] = []
        self.max_reductions = 1
        self.reducing: deque[InFlight] = deque()
        self._held: dict[Stream, list[Tensor]] = {}

    # --- the order of forwards ---

    def note_forward(self, group: ParamGroup) -> None:
        """Record that the forward of `group` has ended."""
        group.post_forward_indices.append(len(self.post_forward_order))
        self.post_forward_order.append(group)

    def take_previous(self, group: ParamGroup) -> list[ParamGroup]:
        """Return the group whose backward should come next: its forward ended just before the forward of `group`. [] if there is none.

        Called when the backward of `group` begins. A group has one place in the order for each of its forwards. Its backwards
        come in reverse, so each of them takes away the last place.
        """
        index = group.post_forward_indices.pop() if group.post_forward_indices else 0
        return self.post_forward_order[index - 1 : index] if 0 < index < len(self.post_forward_order) else []

    def forget_forwards(self, keep: int = 0) -> None:
        """Shorten the order of forwards to its first `keep` entries."""
        for group in self.post_forward_order[keep:]:
            group.post_forward_indices = [i for i in group.post_forward_indices if i < keep]
        del self.post_forward_order[keep:]

    # --- what is in flight (`collectives`, Note [Why flat buffers outlive their use]) ---

    def keep_until_reduced(self, reduction: InFlight) -> None:
        """Keep the input of a reduction that was just started, until compute has waited for it."""
        self.reducing.append(reduction)

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        """Keep a tensor until the iteration is over. Its end waits for the work on this stream. For features: the heart holds nothing."""
        self._held.setdefault(stream, []).append(tensor)

    def wait_for_reductions(self, leave: int = 0) -> None:
        """Make compute wait for the oldest reductions in flight, until at most `leave` of them are left."""
        while len(self.reducing) > leave:
            reduction = self.reducing.popleft()  # which keeps the buffer until compute has waited
            with moment("wait_for_reduction", reduction.transport):
                self.streams.compute.wait(reduction.done)

    def settle(self) -> None:
        """Run the deferred work of both reduction streams. Afterwards, on the CPU, other code may read gradients and add to them."""
        self.streams.reduce_scatter.settle()
        self.streams.all_reduce.settle()

    def finish_reductions(self) -> None:
        """Make compute wait for all reductions, and drop their buffers. The optimizer comes next."""
        self.wait_for_reductions()
        self.settle()
        for stream in self._held:
            self.streams.compute.wait(stream.record())
        self._held.clear()


class ForwardOrder:
    """The order in which forwards enter groups, learned from one forward for the next."""

    def __init__(self) -> None:
        self._last: list[ParamGroup] = []
        self._current: list[ParamGroup] = []

    def enter(self, group: ParamGroup) -> list[ParamGroup]:
        """Record that this forward enters `group`. Return the group to gather meanwhile, in a list, or an empty list.

        If the last forward had `group` at this position, return the group that came after it. If not, this forward takes another
        path; guess nothing until the paths agree again.
        """
        place = len(self._current)
        self._current.append(group)
        expected = self._last[place : place + 2]
        return expected[1:] if expected and expected[0] is group else []

    def finish(self) -> None:
        """End this forward. The next forward is expected to take the same path."""
        self._last, self._current = self._current, []

    def forget(self) -> None:
        """Drop this forward. The next forward is expected to take the path of the last complete one."""
        self._current = []
