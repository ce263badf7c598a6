"""Exercise 09: Streams and forward prefetch"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hwfsdp import compat
from hwfsdp.collectives import Gathered
from hwfsdp.prefetch import T
from hwfsdp.streams import StreamEvent, StreamSet

# The package's own, that the docstrings name:
#
# hwfsdp.streams
#     attribute  StreamSet.compute: Stream
#     attribute  StreamSet.copy: Stream
#     attribute  StreamSet.all_gather: Stream
#     method     Stream.run() -> AbstractContextManager[Any]
#     method     Stream.record() -> StreamEvent
#     method     Stream.wait(event: StreamEvent | None) -> None
#     property   StreamEvent.is_over -> bool
# hwfsdp.collectives
#     class      Gathered(flat: Tensor, sizes: list[int], done: StreamEvent, module_fqn: str = '')
# hwfsdp.group
#     method     ParamGroup.unshard() -> None
#     attribute  ParamGroup._gathered: Gathered | None
#     attribute  ParamGroup.comm_ctx: FSDPCommContext
#     attribute  FSDPCommContext._copied_out: tuple[Gathered, StreamEvent] | None
# hwfsdp.prefetch
#     attribute  ForwardOrder._last: list[T]
#     attribute  ForwardOrder._current: list[T]
# hwfsdp.hooks
#     attribute  FSDPState.group: ParamGroup | None
#     attribute  FSDPState.root: RootContext
#     attribute  FSDPState.forward_prefetch: list[FSDPState]
#     attribute  FSDPState.forward_order: ForwardOrder[ParamGroup]
#     attribute  RootContext.forward_root: FSDPState | None
#     attribute  RootContext.guessed: list[ParamGroup]
# hwfsdp.compat
#     function   in_backward() -> bool


def pack_then_gather(streams: StreamSet, pack: Callable[[], None], gather: Callable[[], None]) -> StreamEvent:
    """Issues the two halves of a gather on their streams, and returns while they may still be under way.

    `all_gather` calls it once per gather. Both functions only issue work, on the stream that is current: one whose block
    `with stream.run():` they are called in. Each is called once, `pack` first.

    - `pack` belongs on `streams.copy`, beside what `streams.compute` has to do.
    - `gather` belongs on `streams.all_gather`, and sends what `pack` writes. Streams know nothing of each other, so before it
      is issued, that stream has to wait (`stream.wait(event)`) for an event that was recorded (`stream.record()`) on the
      copy stream after `pack`. Nobody else waits for anything: not compute, which has no use for these bytes yet, and
      not the host.

    Returns:
        An event on the all-gather stream. After it, what was gathered is complete.
    """
    # TODO(09)
    raise NotImplementedError


class ParamGroup:
    """Parameters that travel together.

    Attributes:
        fqn: of the modules that the group was made for; names it in errors, traces and pictures.
        params: in the order in which they lie in the flat buffers.
        mesh: over whose ranks they are sharded. comm_ctx: what the model's groups share, streams among it.
        channel: how collectives of this group are run (`collectives.Channel`).
        reshard_mesh: over whose ranks parameters are sharded after forward, to be gathered again for backward: `mesh`,
            or a smaller one. None: they stay whole.
        reshard_after_backward: free them after backward; off, they stay for the next micro-batch.
        reduce_grads: reduce in backward; off, gradients add up in the whole parameters' gradients.
        all_reduce_grads: reduce over replicas, too; off, partial gradients add up (Note [Partial gradients]).
        reduce_unused: parameters without a gradient are reduced as zeros, since other ranks may have one.
        unshard_in_backward: off for a group whose backward needs no parameters, such as an embedding.
        accumulated: whether the last backward that ended left gradients that are not reduced over all ranks.
        max_reductions: see `FSDPCommContext`, which takes the largest of its groups.
        post_forward_indices: this group's places in `FSDPCommContext.post_forward_order`.
    """

    def wait_for_gather(self) -> None:
        """Compute waits for the gather that `unshard` started (`_gathered.done` is its event), if one is in flight.

        On a device the host goes on at once, and what it issues on compute from now on comes after the gather. On the CPU,
        where compute is the host, the host waits. No other stream does.
        """
        # TODO(09)
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

    def keep_until_copied_out(self, gathered: Gathered) -> None:
        """Keeps a gather's buffer for as long as the copy-out reads it, which was just issued on the compute stream.

        The buffer (`gathered.flat`) belongs to the copy stream. As soon as no tensor refers to it, that stream may pack the
        next gather into the same memory, however far compute has come (`collectives`, Note [Why flat buffers outlive…]). So
        a reference is kept, in `_copied_out`: `gathered`, and an event recorded on compute now. A buffer kept before is
        let go first (`release_gather_buffer`), as there is never more than one. And if the event is over already
        (`event.is_over`, a property: on a CPU, where the host has copied), this one is let go at once, too.
        """
        # TODO(09)
        raise NotImplementedError

    def release_gather_buffer(self) -> None:
        """Lets the copy stream have the memory of the buffer that `keep_until_copied_out` keeps; nothing if it keeps none.

        Before the reference is dropped (`_copied_out` is None again), the copy stream waits for the event kept with it: what
        it packs from then on comes after the copy-out. Called before every gather, and when a forward or backward is over.
        """
        # TODO(09)
        raise NotImplementedError


def next_in_forward(order: Sequence[T], position: int, current: T) -> T | None:
    """The group to gather while `current` computes in a forward.

    Args:
        order: the groups that the last forward entered, in that order; a group that ran twice is there twice. Empty
            before the first.
        position: how many groups this forward has entered before `current`, 0 or more; possibly more than `order` has.
        current: the group that this forward enters now.

    Returns:
        The one that came after `current` last time, if the last forward had `current` at the same position: the same
        object, as groups are told apart by `is`. None if it had another one there, or none, or `current` was its last: a
        forward that takes another path is not guessed at until the paths agree again.
    """
    # TODO(09)
    raise NotImplementedError


class ForwardOrder:
    """The order in which forwards enter groups, learned from one forward for the next.

    Attributes:
        _last: the groups that the last forward entered, in that order. _current: those of the forward in progress so far.
    """

    def enter(self, group: T) -> T | None:
        """Notes in `_current` that this forward enters `group`; returns the group to gather meanwhile, if known.

        What to gather, `next_in_forward` says, from the order of the last forward and the place of `group` in this one.
        """
        # TODO(09)
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

    def prefetch_forward(self) -> None:
        """Starts the gathers to hide behind this forward: those the user listed, else the one learned.

        Called once per forward of this state, when compute has waited for its own gather and before it computes. Starting a
        gather is `ParamGroup.unshard`, which does nothing for a group that is whole or on its way.

        - The outermost forward in progress (`root.forward_root`, a state, or None) has a `forward_order`. It is told of
          every group that this iteration enters (`enter`), whether or not a list decides, and says which one is expected
          next. It is not told, and nothing is learned, if this state has no group, if there is no outermost forward, or in a
          recomputation (`compat.in_backward()`), whose order is another.
        - If the user listed states (`forward_prefetch`, not empty), the groups of all of these are gathered, in that
          order, in place of the one expected. A listed state may have no group.
        - Every group gathered here is a guess, and is noted in `root.guessed`: when the forward is over, those that nobody
          came for are dropped, because the optimizer is about to change what they hold.
        """
        # TODO(09)
        raise NotImplementedError
