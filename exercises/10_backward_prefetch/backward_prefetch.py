"""Exercise 10: Backward prefetch and reduce overlap"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from hwfsdp.collectives import Reducing
from hwfsdp.prefetch import T
from hwfsdp.streams import StreamEvent, StreamSet

# The package's own, that the docstrings name:
#
# hwfsdp.hooks
#     attribute  FSDPState.group: ParamGroup | None
#     attribute  FSDPState.comm_ctx: FSDPCommContext
#     attribute  FSDPState.backward_prefetch: list[FSDPState]
# hwfsdp.group
#     method     ParamGroup.unshard() -> None
#     attribute  ParamGroup.unshard_in_backward: bool
#     attribute  ParamGroup.post_forward_indices: list[int]
#     attribute  FSDPCommContext.post_forward_order: list[ParamGroup]
#     attribute  FSDPCommContext._reducing: deque[Reducing]
#     attribute  FSDPCommContext._reduced: list[Reducing]
#     method     FSDPCommContext.settle() -> None
# hwfsdp.streams
#     attribute  StreamSet.compute: Stream
#     attribute  StreamSet.reduce_scatter: Stream
#     method     Stream.run() -> AbstractContextManager[Any]
#     method     Stream.record() -> StreamEvent
#     method     Stream.wait(event: StreamEvent | None) -> None
# hwfsdp.collectives
#     class      Reducing(owner: str, flat: Tensor, result: Tensor, divide: float, stream: Stream,
#                    done: StreamEvent)
#     method     Reducing.awaited_by(stream: Stream) -> None


def next_in_backward(order: Sequence[T], index: int) -> T | None:
    """The group to gather while the group at `order[index]` runs its backward.

    Backward takes the reverse of the order in which forwards ended, and so does this.

    Args:
        order: groups in the order in which their forwards ended; a group that ran twice is there twice.
        index: of the group whose backward comes now. It may lie outside the order, if that has been forgotten: then there
            is no answer.

    Returns:
        The one before it; None for the first, and for an index below 0, or of no group.
    """
    # TODO(10)
    raise NotImplementedError


class FSDPState:
    """The schedule of the modules of one `fully_shard` call.

    Attributes:
        modules: those given to `fully_shard`; fqn: their names from the root, the root's is its class.
        parent: the state of the closest sharded module above; None at the root.
        root: what all states below one root share, the same object (`RootContext`). comm_ctx: what their groups share.
        group: its parameters; None if every parameter below it was claimed by others.
        auto_reshard: `reshard_after_forward` was None: true below the root, false at the root.
        to_run: modules whose forward the one in progress waits for (Note [Several modules, one group]).
        forward_prefetch, backward_prefetch: states whose groups to gather next, if the user said so; else empty.
        forward_order: the order in which groups ran when this state's forward was the outermost one.
    """

    def prefetch_backward(self) -> None:
        """Starts the gathers to hide behind this backward: those the user listed, else the one before in order.

        Called once per backward of this state, when compute has waited for its own gather and before it computes. Starting a
        gather is `ParamGroup.unshard`, which does nothing for a group that is whole or on its way. One that needs no
        parameters in backward (`unshard_in_backward` is off) is left out.

        - If the user listed states (`backward_prefetch`, not empty), the groups of all of these are gathered, in that
          order. A listed state may have no group.
        - Else it is the one before this group in `comm_ctx.post_forward_order`, if there is one (`next_in_backward`). The places
          of a group there are in `group.post_forward_indices`, one per forward, in order; its backwards come in reverse, and
          each takes one away, from the end, whether or not a list decides. A state without a group, or a group without a
          place, expects nothing.
        """
        # TODO(10)
        raise NotImplementedError


def reduce_after_packing(streams: StreamSet, reduce: Callable[[], Tensor]) -> tuple[Tensor, StreamEvent]:
    """Issues a reduction on its stream, and returns while it may still be under way.

    `reduce_scatter` calls it once per reduction, when the copies that fill the flat buffer have just been issued on
    `streams.compute`. `reduce` only issues work, on the stream that is current: one whose block `with stream.run():` it is
    called in. It is called once, on `streams.reduce_scatter`, and what it issues reads the flat buffer. So that
    stream has to wait first (`stream.wait(event)`) for an event recorded on compute now (`stream.record()`). Compute
    itself waits for nothing here: the next group's backward is to run beside the reduction.

    Returns:
        What `reduce` returned, and an event on the reduce-scatter stream. After it, the reduction is over.
    """
    # TODO(10)
    raise NotImplementedError


class FSDPCommContext:
    """What the groups of one model, or of several, share in order to take turns on the wire.

    Args:
        device_type: of the mesh, for example "cuda".

    Attributes:
        streams: see `streams.StreamSet`.
        post_forward_order: groups in the order in which their forwards ended, once per forward.
        max_reductions: reductions in flight; each holds a buffer of one group's gradients.
        callbacks: what the backward in progress will call at its end, for each root or part of a model that it came to.
        _copied_out: a gather whose flat buffer is kept for the copy-out that reads it, and an event on the compute stream
            after that; None if none is kept. At most one is.
        _reducing: reductions in flight, the oldest first; a reduction's input is kept as long as it is here.
        _reduced: reductions that went on on another stream; that keeps their results until backward ends.
    """

    def add_reduction(self, reducing: Reducing, reduced: Reducing) -> None:
        """Keeps a reduction that was just started, and with it its buffers, until compute has waited for it.

        Args:
            reducing: on the reduce-scatter stream; `reducing.done` is the event after the collective, `reducing.flat` its
                input.
            reduced: the same reduction after all that is to happen to it. Either that was issued on the same stream
                (`reduced.stream is reducing.stream`): then more came after the collective, such as casting the result, and what
                is kept in `_reducing` has to have a `done` recorded there now (`_replace`). Or it went on on another stream, as an
                all-reduce: then `reducing` is kept as it is, since its input is free when the reduce-scatter is over, and
                `reduced`, whose result that stream still works on, is kept in `_reduced`.
        """
        # TODO(10)
        raise NotImplementedError

    def wait_for_reductions(self, leave: int = 0) -> None:
        """Compute waits for the oldest reductions in flight until at most `leave` of them are left.

        One after the other is taken out of `_reducing`, which lets go of its input, and compute waits for it
        (`Reducing.awaited_by`). Those left are not waited for. `ParamGroup.reduce` calls this before it starts one more, with
        `leave` one below `max_reductions`: that bounds the buffers of gradients alive.
        """
        # TODO(10)
        raise NotImplementedError

    def finish_reductions(self) -> None:
        """Compute waits for all reductions; no buffer of theirs is held afterwards.

        Called when the last backward of an iteration is over; the optimizer is next to read the gradients, on compute.
        - What is in flight is waited for (`wait_for_reductions`).
        - `self.settle()` does what was put off on these streams until somebody waits; a device puts nothing off.
        - Compute waits for every stream that reductions in `_reduced` are on: an event recorded there now is after all of
          them. Then these are forgotten.
        """
        # TODO(10)
        raise NotImplementedError
