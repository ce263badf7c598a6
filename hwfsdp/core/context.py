"""Shared by groups: streams, buffers in flight on them, and the order in which groups are gathered ahead. Shared by the states below
one root: their place in an iteration.

Note [What to gather next]
    Forward. Groups run in the order in which they ran last time, unless the model takes another path. So each forward notes the
    order in which it enters groups. The next forward follows this order and gathers one group ahead. The first forward knows no
    order, and gathers each group when it needs it.

    Backward. Groups run in the reverse of the order in which their forwards ended. The forward has just noted this order. So
    while a group runs its backward, we gather the group that comes before it in this order.

    One group ahead is enough to hide a gather behind a computation. So while a module computes, at most two groups are in memory:
    its own group, whole, and the buffer of the next gather. The groups of the modules around it, such as the root's, come on top,
    and so do groups that stay whole for their backward. A wrong guess costs a gather, but never changes a result: a module whose group
    is not whole gathers it. If the model writes to the shards of a group that was gathered ahead, the group is gathered again.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from hwfsdp.core.observer import moment
from hwfsdp.core.mesh import Transport
from hwfsdp.core.device_streams import StreamEvent, StreamSet, stream_maker

if TYPE_CHECKING:
    from hwfsdp.core.group import ParamGroup
    from hwfsdp.core.state import FSDPState


class InFlight(NamedTuple):
    """A buffer that a stream still uses, until the event `done`; `transport` moves its bytes."""

    buffer: Tensor
    done: StreamEvent
    transport: Transport


class FSDPCommContext:
    """The streams and buffers that the groups of a model share. Their gathers run one after the other, and so do their reductions.

    Each call of `fully_shard` makes a context. The root's takes the place of all others, so usually only the root's makes streams.
    Several models may share one context.

    Args:
        device_type: the device type of the mesh, for example "cuda".

    Attributes:
        streams: see `device_streams.StreamSet`.
        post_forward_order: groups in the order in which their forwards ended, once per forward.
        max_reductions: the largest number of reductions in flight. Each holds a buffer of one group's gradients. A module with several
            groups may have one more for each further group.
        reducing: the reductions in flight, the oldest first.
    """

    def __init__(self, device_type: str) -> None:
        self._make_streams = stream_maker(device_type)
        self.post_forward_order: list[ParamGroup] = []
        self.max_reductions = 1
        self.reducing: deque[InFlight] = deque()

    @functools.cached_property
    def streams(self) -> StreamSet:
        return self._make_streams()

    # --- the order of forwards ---

    def note_end_of_forward(self, group: ParamGroup) -> None:
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

    # --- what is in flight (`flat_collectives`, Note [Why flat buffers outlive their use]) ---

    def keep_until_reduced(self, flat: Tensor, done: StreamEvent, transport: Transport) -> None:
        """Keep the input of a reduction that was just started, until compute has waited for `done`."""
        self.reducing.append(InFlight(flat, done, transport))

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


class ForwardOrder:
    """The order in which forwards enter modules with groups, learned from one forward for the next."""

    def __init__(self) -> None:
        self._last: list[FSDPState] = []
        self._current: list[FSDPState] = []

    def begin(self) -> None:
        """Begin a forward. If the last one did not finish, its order is forgotten."""
        self._current = []

    def note_and_predict(self, state: FSDPState) -> FSDPState | None:
        """Record that this forward enters the module of `state`. Return the state to gather meanwhile; None: there is none.

        If the last forward had `state` at this position, return the state that came after it. If not, this forward takes another
        path; predict nothing until the paths agree again.
        """
        place = len(self._current)
        self._current.append(state)
        expected = self._last[place : place + 2]
        return expected[1] if len(expected) == 2 and expected[0] is state else None

    def finish(self) -> None:
        """End this forward. The next forward is expected to take the same path."""
        self._last = self._current


class RootContext:
    """The data that the states below one root share.

    Attributes:
        states: the states of all modules below the root, in `named_modules` order; empty until a root is found.
        forward_root: the state of the outermost running forward; None between forwards. Not always the root: a part
            of the model may be called by itself.
        forwards_before: the length of `post_forward_order` when this iteration began. It is above 0 if an earlier forward still
            waits for its backward, or one of another model that shares the context.
        guessed: groups that were gathered ahead in this forward. If unused, they are stale after the next optimizer step.
        is_last_backward: if True, the end of the next backward waits for all reductions and forgets the order.
        finish_queued: if True, autograd will call `finish_backward` at the end of the running backward.
        backwards: the number of backwards that have ended.
    """

    def __init__(self) -> None:
        self.states: list[FSDPState] = []
        self.forward_root: FSDPState | None = None
        self.forwards_before = 0
        self.guessed: list[ParamGroup] = []
        self.is_last_backward = True
        self.finish_queued = False
        self.backwards = 0

    @property
    def groups(self) -> list[ParamGroup]:
        return [group for state in self.states for group in state.groups]
