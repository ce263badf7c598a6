"""A parameter group: parameters that are gathered, freed and reduced together.

One call of `fully_shard` makes one group of all parameters below its modules that no earlier call has claimed.
A group knows how to do four things, and nothing about when:

    unshard              start to gather the parameters                       (twice a step)
    wait_for_unshard     wait for the gather, put the whole parameters into the modules
    reshard              put the shards back, free the whole parameters       (twice a step)
    reduce               average the gradients into the shards' gradients     (once a step)

The *when* is in `hooks`. Groups of one model share an `FSDPCommContext`: the streams, what is in flight on them,
and the order in which forwards ended.

Note [Partial gradients]
    Under hybrid sharding, gradients may be accumulated after the reduce-scatter and before the all-reduce: a shard's
    size, not the whole parameter's. They are kept per parameter, because another micro-batch may reach other
    parameters. The reduction that ends with an all-reduce takes them in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from hwfsdp import advice
from hwfsdp.collectives import (
    Channel,
    DefaultAllGather,
    DefaultReduceScatter,
    Gathered,
    Reducing,
    all_gather,
    all_reduce,
    copy_out,
    reduce_scatter,
)
from hwfsdp.compat import outside_autograd, profiler_range
from hwfsdp.errors import StateError, UsageError
from hwfsdp.mesh import ShardMesh, is_in_place
from hwfsdp.param import FSDPParam, ShardedState
from hwfsdp.precision import CPUOffloadPolicy
from hwfsdp.streams import Stream, StreamEvent, streams_for


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

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.streams = streams_for(device_type)
        self.post_forward_order: list[ParamGroup] = []
        self.max_reductions = 1
        self.callbacks: dict[Any, ref[Callable[[], None]]] = {}
        self._reducing: deque[Reducing] = deque()
        self._reduced: list[Reducing] = []
        self._copied_out: tuple[Gathered, StreamEvent] | None = None

    @property
    def all_gather_stream(self) -> Stream:
        return self.streams.all_gather

    @property
    def reduce_scatter_stream(self) -> Stream:
        return self.streams.reduce_scatter

    @property
    def backward_broke(self) -> bool:
        """Whether a backward ended without calling what it was to call."""
        return any(callback() is None for callback in self.callbacks.values())

    @property
    def is_full(self) -> bool:
        """Whether another reduction has to wait for one in flight."""
        return len(self._reducing) >= self.max_reductions

    def note_forward(self, group: ParamGroup) -> None:
        """The forward of `group` has ended."""
        group.post_forward_indices.append(len(self.post_forward_order))
        self.post_forward_order.append(group)

    def forget_forwards(self, keep: int = 0) -> None:
        """Shortens the order of forwards to its first `keep` entries."""
        for group in self.post_forward_order[keep:]:
            group.post_forward_indices = [i for i in group.post_forward_indices if i < keep]
        del self.post_forward_order[keep:]

    def keep_until_copied_out(self, gathered: Gathered) -> None:
        """Keeps a gather's buffer for as long as the copy-out reads it, which was just issued on the compute stream.

        The buffer (`gathered.flat`) belongs to the copy stream. As soon as no tensor refers to it, that stream may pack the
        next gather into the same memory, however far compute has come (`collectives`, Note [Why flat buffers outlive…]). So
        a reference is kept, in `_copied_out`: `gathered`, and an event recorded on compute now. A buffer kept before is
        let go first (`release_gather_buffer`), as there is never more than one. And if the event is over already
        (`event.is_over`, a property: on a CPU, where the host has copied), this one is let go at once, too.
        """
        self.release_gather_buffer()
        self._copied_out = gathered, self.streams.compute.record()
        if self._copied_out[1].is_over:  # the host has copied
            self.release_gather_buffer()

    def release_gather_buffer(self) -> None:
        """Lets the copy stream have the memory of the buffer that `keep_until_copied_out` keeps; nothing if it keeps none.

        Before the reference is dropped (`_copied_out` is None again), the copy stream waits for the event kept with it: what
        it packs from then on comes after the copy-out. Called before every gather, and when a forward or backward is over.
        """
        if self._copied_out is not None:
            self.streams.copy.wait(self._copied_out[1])
            self._copied_out = None

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
        if reduced.stream is reducing.stream:  # what was to follow is part of it
            reducing = reducing._replace(done=reducing.stream.record())
        else:
            self._reduced.append(reduced)
        self._reducing.append(reducing)

    def wait_for_reductions(self, leave: int = 0) -> None:
        """Compute waits for the oldest reductions in flight until at most `leave` of them are left.

        One after the other is taken out of `_reducing`, which lets go of its input, and compute waits for it
        (`Reducing.awaited_by`). Those left are not waited for. `ParamGroup.reduce` calls this before it starts one more, with
        `leave` one below `max_reductions`: that bounds the buffers of gradients alive.
        """
        while len(self._reducing) > leave:
            self._reducing.popleft().awaited_by(self.streams.compute)

    def settle(self) -> None:
        """Gradients may be looked at afterwards, and added to."""
        self.streams.reduce_scatter.settle()
        self.streams.all_reduce.settle()

    def synchronize(self) -> None:
        """The host waits for all gradients; it is about to read offloaded ones."""
        self.finish_reductions()
        self.streams.compute.synchronize()

    def finish_reductions(self) -> None:
        """Compute waits for all reductions; no buffer of theirs is held afterwards.

        Called when the last backward of an iteration is over; the optimizer is next to read the gradients, on compute.
        - What is in flight is waited for (`wait_for_reductions`).
        - `self.settle()` does what was put off on these streams until somebody waits; a device puts nothing off.
        - Compute waits for every stream that reductions in `_reduced` are on: an event recorded there now is after all of
          them. Then these are forgotten.
        """
        self.wait_for_reductions()
        self.settle()
        for stream in dict.fromkeys(reducing.stream for reducing in self._reduced):
            self.streams.compute.wait(stream.record())
        self._reduced.clear()


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

    def __init__(
        self,
        params: Sequence[FSDPParam],
        mesh: ShardMesh,
        comm_ctx: FSDPCommContext,
        reshard_mesh: ShardMesh | None,
    ) -> None:
        self.fqn = ""
        self.params = list(params)
        self.mesh = mesh
        self.reshard_mesh = reshard_mesh
        self.reshard_after_backward = True
        self.reduce_grads = self.all_reduce_grads = True
        self.reduce_unused = self.accumulated = False
        self.max_reductions = 1
        self.unshard_in_backward = True
        self.post_forward_indices: list[int] = []
        self._gathered: Gathered | None = None
        self.comm_ctx = comm_ctx
        self.channel = Channel(
            mesh.shard,
            mesh.device,
            comm_ctx.streams,
            self.fqn,
            DefaultAllGather(mesh.shard.group),
            DefaultReduceScatter(mesh.shard.group),
            mesh.replicate,
        )

    def use(self, comm_ctx: FSDPCommContext) -> None:
        """Communicates through this context from now on."""
        self.comm_ctx, self.channel.streams = comm_ctx, comm_ctx.streams

    def rename(self, fqn: str, module_fqn: str = "") -> None:
        """Sets the group's name, once the root of the model is known, and the one for torch's profiler."""
        self.fqn = self.channel.owner = fqn
        self.channel.module_fqn = module_fqn

    def profiled(self, moment: str) -> AbstractContextManager[Any]:
        """A range of torch's profiler around a moment of this group; nothing when none runs."""
        return profiler_range(moment, self.channel.module_fqn)

    @property
    def is_unsharded(self) -> bool:
        return self.params[-1].state is ShardedState.UNSHARDED  # the last one to become so

    @property
    def is_sharded(self) -> bool:
        """Whether nothing but the shards is there, nor on its way."""
        return self._gathered is None and self.params[0].state is ShardedState.SHARDED

    @property
    def has_late_gradients(self) -> bool:
        """Whether there are gradients that a backward which reduces them has left behind."""
        return self.reduce_grads and any(p.has_unreduced_grad for p in self.params)

    @property
    def is_offloaded(self) -> bool:
        return any(isinstance(p.offload, CPUOffloadPolicy) for p in self.params)

    # --- parameters ---

    def unshard(self) -> None:
        """Starts to gather the parameters, and returns before they are there.

        Does nothing if they are whole (`is_unsharded`), or on their way: then `_gathered` holds the gather in flight, a
        `Gathered`, which `_gather` returns.
        """
        if self._gathered is None and not self.is_unsharded:
            self._gathered = self._gather()

    @outside_autograd
    def _gather(self) -> Gathered:
        """Starts to gather all parameters of the group, in one collective; returns the gather in flight.

        - First `comm_ctx.release_gather_buffer()` lets go of the buffer of the gather before.
        - What travels are the tensors that `FSDPParam.gather_inputs()` returns, of all parameters, in the order of `params`: a
          list of one tensor each, or of more where the parameter has an extension. Since an extension may compute them,
          they are asked for on the copy stream: `with comm_ctx.streams.copy.run():`.
        - Each in the dtype that `FSDPParam.gather_dtypes` (a property) says, a list as long.
        - `collectives.all_gather` takes both lists, the axis to gather over, and `channel`. That axis is `gather_mesh.shard` of
          the parameters, which all have the same `gather_mesh`: between forward and backward it may be smaller than `mesh`.
          Frozen parameters travel like others: forward needs them.
        """
        self.comm_ctx.release_gather_buffer()
        with self.comm_ctx.streams.copy.run():  # extensions compute what they gather
            shards = [shard for p in self.params for shard in p.gather_inputs()]
        dtypes = [dtype for p in self.params for dtype in p.gather_dtypes]
        return all_gather(shards, dtypes, self.params[0].gather_mesh.shard, self.channel)

    def wait_for_unshard(self) -> None:
        """The modules have the whole parameters afterwards, if `unshard` was called before."""
        self.wait_for_gather()
        self.finish_unshard()

    def wait_for_gather(self) -> None:
        """Compute waits for the gather that `unshard` started (`_gathered.done` is its event), if one is in flight.

        On a device the host goes on at once, and what it issues on compute from now on comes after the gather. On the CPU,
        where compute is the host, the host waits. No other stream does.
        """
        if self._gathered is not None:
            self.comm_ctx.streams.compute.wait(self._gathered.done)

    @outside_autograd
    def finish_unshard(self) -> None:
        """Puts what was gathered into the modules' parameters; compute has waited for the gather.

        Does nothing if no gather is in flight (`_gathered` is None). Otherwise, in this order:
        - The gather is this group's no more: `_gathered` is None, so that the next `unshard` may start another.
        - Every parameter, in order, allocates its memory (`FSDPParam.allocate` returns a list of tensors to write to), and
          `copy_out` spreads the flat buffer over all of them, in that order.
        - The flat buffer, which the copies still read, is kept until they are over (`comm_ctx.keep_until_copied_out`).
        - Every parameter registers its whole form (`FSDPParam.to_unsharded`).
        """
        if self._gathered is None:
            return
        gathered, self._gathered = self._gathered, None
        copy_out(gathered, [memory for p in self.params for memory in p.allocate()], self.fqn)
        self.comm_ctx.keep_until_copied_out(gathered)
        for param in self.params:
            param.to_unsharded()

    @outside_autograd
    def reshard(self) -> None:
        """The modules have the shards afterwards; the whole parameters' memory is free.

        Every parameter that is not in state SHARDED goes there (`FSDPParam.to_sharded`). One that is stays as it is, so
        that calling this twice does no harm.

        Before that, if the next gather is one of larger shards (`gather_mesh` of the parameters is not the group's
        `mesh`): those shards are about to go, and a gather in flight may still read them, so compute waits for it
        (`wait_for_gather`) and it is forgotten (`drop_gather`). A gather over `mesh` reads the shards that stay, and
        remains in flight.
        """
        if (
            self.params[0].gather_mesh is not self.mesh
        ):  # larger shards are about to go; a gather may be reading them
            self.wait_for_gather()
            self.drop_gather()
        for param in self.params:
            if param.state is not ShardedState.SHARDED:
                param.to_sharded()

    def reshard_after_forward(self) -> None:
        """Frees the parameters after forward, in part, or not at all: what `reshard_mesh` asks for.

        - It is the group's own `mesh`: they are sharded over all its ranks again (`reshard`), and backward gathers them a
          second time. This is ZeRO-3.
        - It is a smaller mesh: they are sharded over its ranks only (`_reshard_to`), so that backward gathers from fewer.
        - It is None: they stay whole until backward has used them. One gather less, all the memory. This is ZeRO-2.
        """
        if self.reshard_mesh is self.mesh:
            self.reshard()
        elif self.reshard_mesh is not None:
            self._reshard_to(self.reshard_mesh)

    @outside_autograd
    def _reshard_to(self, mesh: ShardMesh) -> None:
        for param in self.params:
            if param.state is ShardedState.UNSHARDED:
                param.to_post_forward(mesh)
        self.comm_ctx.streams.copy.wait(self.comm_ctx.streams.compute.record())  # it reads those shards

    def drop_gather(self) -> None:
        """Forgets a gather that nobody came for; its buffer is reused after it is done."""
        if self._gathered is not None:
            self.comm_ctx.streams.copy.wait(self._gathered.done)
            self._gathered = None

    def discard_iteration(self) -> None:
        """Forgets what a broken iteration left: a gather, whole parameters, gradients that were not reduced."""
        self.drop_gather()
        self.reshard()
        for param in self.params:
            param.drop_grads()

    # --- gradients ---

    def note_accumulated(self) -> None:
        """A backward has ended."""
        self.accumulated = not (self.reduce_grads and self.all_reduce_grads) and any(
            p.has_unreduced_grad or p.partial_grad is not None for p in self.params
        )

    @outside_autograd
    def finish_gradients(self) -> None:
        """After the group's backward: frees the whole parameters, and reduces the gradients or keeps them for later.

        In the backward of the last micro-batch (`reduce_grads` is on) the gradients are taken from the parameters
        (`take_grads` returns two lists: the parameters that have one, and their gradients), and reduced (`reduce`), if
        there are any: a group that was not used communicates nothing. In those before (`reduce_grads` is off) nothing is
        communicated; every parameter keeps its whole gradient (`FSDPParam.accumulate_grad`) for the last one.

        The parameters are freed (`reshard`) if `reshard_after_backward` is on, when the gradients were taken and before
        the reduction starts, which allocates as much as they have held; off, they stay whole for the next micro-batch.

        First of all, `advice.note_unsynchronized(self, flag)` is told whether gradients will be left unreduced, so that an
        optimizer step that comes too early warns.
        """
        advice.note_unsynchronized(self, not self.reduce_grads)
        with self.profiled("post_backward_reshard"):
            params, grads = self.take_grads() if self.reduce_grads else ([], [])
            if self.reshard_after_backward:
                self.reshard()
        if grads:
            self.reduce(params, grads)
        with self.profiled("post_backward_accumulate"):
            if not self.reduce_grads:
                for param in self.params:
                    param.accumulate_grad()

    def take_grads(self) -> tuple[list[FSDPParam], list[Tensor]]:
        """The parameters that have a gradient to reduce, and those gradients, no longer referred to from elsewhere.

        Every parameter is asked for its gradient (`FSDPParam.take_grad`, which hands it over, or returns None). One without
        is left out: autograd leaves none on a frozen parameter, and nobody is to move zeros for it. In two cases, though,
        others count on this rank, and zeros stand for the gradient:

        - `reduce_unused` is on, the parameter is trained (`sharded_param.requires_grad`), and it was gathered at least once
          (`unsharded_param` is not None). Other ranks may have a gradient of it.
        - There is a `partial_grad` from earlier micro-batches, and this backward reduces over the replicas too
          (`all_reduce_grads`): the partial gradient is still to go there.

        Zeros are new, of the parameter's `shape`, in the dtype `dtypes.gathered`, on the device of `mesh`.

        Returns:
            Two lists of the same length, in the order of `params`.
        """
        pairs: list[tuple[FSDPParam, Tensor]] = []
        for param in self.params:
            grad = param.take_grad()
            gathered = param.unsharded_param is not None  # once at least: nobody has run it otherwise
            unused = self.reduce_unused and gathered and param.sharded_param.requires_grad
            if grad is None and (unused or (param.partial_grad is not None and self.all_reduce_grads)):
                grad = torch.zeros(param.shape, dtype=param.dtypes.gathered, device=self.mesh.device)
            if grad is not None:
                pairs.append((param, grad))
        return [p for p, _ in pairs], [grad for _, grad in pairs]

    def reduce(self, params: Sequence[FSDPParam], grads: list[Tensor]) -> None:
        """Averages whole gradients over the ranks and adds this rank's rows to the shards' gradients.

        Starts the reduction and returns. Before that, compute waits until fewer than `max_reductions` of the
        context are in flight. `grads` is empty afterwards.
        """
        with self.profiled("post_backward_rs_wait") if self.comm_ctx.is_full else nullcontext():
            self.comm_ctx.wait_for_reductions(leave=self.comm_ctx.max_reductions - 1)
        with self.profiled("post_backward_reduce"):
            dtype = self.reduce_dtype(params, grads)
            grads[:] = [p.rows_of(grad) for p, grad in zip(params, grads, strict=True)]
            reducing = reduce_scatter(grads, dtype, self.channel)
            self.comm_ctx.add_reduction(reducing, self.finish_reduction(params, reducing))

    def finish_reduction(self, params: Sequence[FSDPParam], reducing: Reducing) -> Reducing:
        """Says what becomes of a reduction over the shard axis, which may still be under way, and returns at once.

        `reducing.then(function)` calls `function` with the result as soon as that is there, on the stream that made it, and
        in the order in which functions were given; see `collectives.Reducing`. The host does not look at the result here. Such
        a function may wait for long, and what it refers to stays in memory with it: the number `reducing.divide` may,
        `reducing` itself, with the flat buffer of all gradients, must not.

        - Under hybrid sharding (`mesh.replicate` has a group) and with `all_reduce_grads` off, the result is kept for later
          (`add_partial_grads`, of all `params`). That is all; nothing reaches the shards' gradients.
        - Otherwise, if some of `params` have a `partial_grad`, these are first added to the result (`take_partial_grads`).
          Then `all_reduce(reducing, self.channel)` goes on over the replicas, if there are any, and returns the reduction
          after that. Its result, divided by `reducing.divide` (`divided(result, by)`), is added to the shards' gradients
          (`add_sharded_grads`).

        Returns:
            The reduction after all that happens to it: `reducing`, or what `all_reduce` returned.
        """
        if self.mesh.replicate.group and not self.all_reduce_grads:
            reducing.then(lambda result: self.add_partial_grads(params, result))
            return reducing
        if any(p.partial_grad is not None for p in params):
            reducing.then(lambda result: self.take_partial_grads(params, result))
        reduced, divide = all_reduce(reducing, self.channel), reducing.divide
        reduced.then(lambda result: self.add_sharded_grads(params, divided(result, divide)))
        return reduced

    def reduce_dtype(self, params: Sequence[FSDPParam], grads: Sequence[Tensor]) -> torch.dtype:
        """What to reduce these gradients in.

        Each parameter's reduce dtype (`dtypes.reduce`), or, where that is None, the dtype in which autograd left its
        gradient. A group is reduced in one buffer, so there has to be one answer for all.

        Args:
            params, grads: of the same length, not empty: parameters and their whole gradients.

        Raises:
            UsageError: there are several answers, because no reduce dtype was set and gradients differ. It is made of texts:
                `UsageError(what it is about, expected=…, got=…, remedy=…)`.
        """
        dtypes = {p.dtypes.reduce or grad.dtype for p, grad in zip(params, grads, strict=True)}
        if len(dtypes) > 1:
            raise UsageError(
                f"parameter group {self.fqn!r}",
                expected="gradients of one dtype, or a reduce_dtype",
                got=" and ".join(sorted(map(str, dtypes))),
                remedy="Wrap the modules with the other dtype in a fully_shard of their own.",
            )
        return dtypes.pop()

    def pieces(self, params: Sequence[FSDPParam], result: Tensor) -> list[tuple[FSDPParam, Tensor]]:
        """Views of a reduction's result: each parameter's rows of this rank.

        Args:
            result: [n]: this rank's padded chunk of every parameter of `params`, end to end, each `padded_numel` elements
                long. The rows of this rank are at the front of a chunk; the rest of it is padding.

        Returns:
            Each parameter with its rows, `local_shape`, in the order of `params`; no copies.
        """
        chunks = result.split_with_sizes([p.padded_numel for p in params])
        return [
            (p, (chunk if p.local_numel == p.padded_numel else chunk[: p.local_numel]).view(p.local_shape))
            for p, chunk in zip(params, chunks, strict=True)
        ]

    @outside_autograd
    def add_sharded_grads(self, params: Sequence[FSDPParam], result: Tensor) -> None:
        """Adds the result of a reduction to the sharded parameters' gradients, in the dtype of the shards.

        Args:
            params: those that were reduced. result: [n], reduce dtype; see `pieces`, which cuts it.

        Each piece is cast to its parameter's original dtype (`dtypes.orig`), in which the optimizer computes, and handed
        to `FSDPParam.add_sharded_grad`. Where all parameters have one original dtype, a single cast of `result` does.
        """
        dtypes = {p.dtypes.orig for p in params}
        if len(dtypes) == 1:  # one cast for all
            result = result.to(params[0].dtypes.orig)
        for param, grad in self.pieces(params, result):
            param.add_sharded_grad(grad if grad.dtype == param.dtypes.orig else grad.to(param.dtypes.orig))

    @outside_autograd
    def add_partial_grads(self, params: Sequence[FSDPParam], result: Tensor) -> None:
        """Keeps the result of a reduction over the shard axis only, as partial gradients of the parameters.

        The replicas have not heard of it yet. What is kept is as large as a shard, and kept per parameter, since another
        micro-batch may reach others. A later backward that reduces over the replicas takes it in.

        Args:
            params: those that were reduced. result: [n], reduce dtype; `pieces` cuts it. It is the caller's gift: nobody
                else uses it afterwards, so views of it may be kept. Except if the mesh has one shard only: then nothing
                was reduce-scattered, `result` is the flat buffer of the gradients, whose memory belongs to the compute
                stream, and what is kept has to be a copy.

        Afterwards the `partial_grad` of each of `params` has its piece added, in place, or is the piece, if there was none.
        Those of other parameters stay.
        """
        if self.mesh.size == 1:  # the result is the input, which belongs to the compute stream
            result = result.clone()
        for param, grad in self.pieces(params, result):
            param.partial_grad = grad if param.partial_grad is None else param.partial_grad.add_(grad)

    @outside_autograd
    def take_partial_grads(self, params: Sequence[FSDPParam], result: Tensor) -> None:
        """Adds partial gradients to the result of a reduction that goes on over the replicas.

        Args:
            params: those that are being reduced. result: [n], reduce dtype; `pieces` cuts it. Changed in place.

        Afterwards each piece has the `partial_grad` of its parameter in it, if there was one, and that is None: it counts
        once.
        """
        for param, grad in self.pieces(params, result):
            if param.partial_grad is not None:
                grad.add_(param.partial_grad)
                param.partial_grad = None

    # --- checks ---

    def adopt_registered(self) -> None:
        """Takes over parameters that were exchanged on the modules; see `FSDPParam.adopt_registered`."""
        for param in self.params:
            param.adopt_registered()

    def check_ready(self) -> None:
        """Raises if the group cannot run.

        Raises:
            StateError: a parameter is still on the meta device.
            UsageError: trainable parameters of several original dtypes.
        """
        on_meta = [p.fqn for p in self.params if p.sharded_param.is_meta]
        if on_meta:
            raise StateError(
                f"parameter group {self.fqn!r}",
                expected="materialized parameters at the first forward",
                got=f"{', '.join(on_meta)} on the meta device",
                remedy="Call model.to_empty(device=…) and initialize the shards, or load a checkpoint.",
            )
        dtypes = {p.dtypes.orig for p in self.params if p.sharded_param.requires_grad}
        if len(dtypes) > 1:
            raise UsageError(
                f"parameter group {self.fqn!r}",
                expected="trainable parameters of one dtype",
                got=" and ".join(sorted(map(str, dtypes))),
                remedy="Cast them, or wrap the modules with the other dtype in a fully_shard of their own.",
            )
        on_device = [p.fqn for p in self.params if not is_in_place(p.padded_shard, torch.device("cpu"))]
        if self.is_offloaded and on_device:
            raise StateError(
                f"parameter group {self.fqn!r}",
                expected="offloaded parameters in host memory",
                got=f"{', '.join(on_device)} on {self.mesh.device}",
                remedy='Call model.to_empty(device="cpu"), or load a state dict that is on the CPU.',
            )

    def __repr__(self) -> str:
        return f"ParamGroup({self.fqn}, {len(self.params)} parameters)"


def divided(tensor: Tensor, by: float) -> Tensor:
    """`tensor`, divided in place."""
    return tensor if by == 1 else tensor.div_(by)


@outside_autograd
def finish_broken_backward(groups: Sequence[ParamGroup], comm_ctx: FSDPCommContext) -> None:
    """Ends the reductions that a broken backward started, and drops its gradients that are not on the shards yet.

    The user may have cleared or used the shards' gradients since, so that nothing may be added to them now. But where
    earlier backwards left gradients without reducing them (`accumulated`), what is there holds these, too, and is kept.
    """
    dropped = [(p, p.sharded_param) for group in groups if not group.accumulated for p in group.params]
    for param, shard in dropped:  # a stand-in without hooks, whose gradient nobody reads
        param.sharded_param = nn.Parameter(shard.detach(), requires_grad=shard.requires_grad)
    try:
        comm_ctx.finish_reductions()
    finally:
        for param, shard in dropped:
            param.sharded_param = shard
            param.drop_grads()
