"""A parameter group: parameters that are gathered, freed and reduced together.

One call of `fully_shard` makes one group of all parameters below its module that no earlier call has claimed. A group knows
how to do these things, and nothing about when:

    unshard          start to gather the parameters                                      (twice a step)
    wait_for_gather  let compute wait for it
    copy_out         put what was gathered into the modules' parameters
    reshard          put the shards back, free the whole parameters                      (twice a step)
    reduce           average the gradients into the shards' gradients                    (once a step)

The *when* is in `state`. Groups of one model share an `FSDPCommContext`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from hwfsdp.core import collectives
from hwfsdp.core.collectives import Gathered, Mean, Reducing
from hwfsdp.core.compat import accept_grads, no_autograd
from hwfsdp.core.context import FSDPCommContext, InFlight
from hwfsdp.core.observer import moment
from hwfsdp.core.param import FSDPParam, ShardedState
from hwfsdp.core.ranks import ShardMesh, Transport
from hwfsdp.core.streams import StreamEvent


class Reducer:
    """What happens to a group's gradients: scatter, divide, add. Seam.

    Attributes:
        group: whose gradients they are.
    """

    def __init__(self, group: ParamGroup) -> None:
        self.group = group

    def mean(self, dtype: torch.dtype) -> Mean:
        """Say how to average in this dtype; see `collectives.mean_over`."""
        return collectives.mean_over(self.group.mesh.size, dtype)

    def stand_in(self, param: FSDPParam) -> Tensor | None:
        """Return the gradient to reduce for a parameter that got none. None: reduce nothing for it.

        Return None only if the parameter has no gradient on any rank. Otherwise the ranks wait for each other for ever. Seam.
        """
        return None

    def finish(self, params: Sequence[FSDPParam], reducing: Reducing) -> StreamEvent:
        """Queue the work on a reduction's result, on the reduction's stream; return at once.

        The queued function must not refer to `reducing.flat`. A reference would keep the buffer of all gradients alive.

        Returns:
            An event after which that buffer may be reused.
        """
        result, divisor, group = reducing.result, reducing.mean.after, self.group
        with reducing.stream.run():
            reducing.stream.then(lambda: group.add_sharded_grads(params, divided(result, divisor)))
        return reducing.stream.record()


class ParamGroup:
    """Parameters that travel together.

    Attributes:
        fqn: of the module that the group was made for; names it in errors, traces and pictures. module_fqn: "" at the root.
        params: in the order in which they lie in the flat buffers.
        mesh: over whose ranks they are sharded. comm_ctx: what the model's groups share, such as streams.
        transport: moves its bytes. reducer: handles its gradients.
        reshard_after_forward: free them after forward; off, they stay for the backward.
        reshard_after_backward: free them after backward; off, they stay for the next micro-batch.
        reduce_grads: reduce in backward; off, gradients add up in the whole parameters' gradients.
        unshard_in_backward: off for a group whose backward needs no parameters, such as an embedding.
        post_forward_indices: this group's places in `FSDPCommContext.post_forward_order`.
    """

    def __init__(self, params: Sequence[FSDPParam], mesh: ShardMesh, comm_ctx: FSDPCommContext) -> None:
        self.fqn = self.module_fqn = ""
        self.params = list(params)
        self.mesh, self.comm_ctx = mesh, comm_ctx
        self.transport = Transport(mesh.shard, mesh.device)
        self.reducer = Reducer(self)
        self.reshard_after_forward = self.reshard_after_backward = True
        self.reduce_grads = self.unshard_in_backward = True
        self.post_forward_indices: list[int] = []
        self._gathered: Gathered | None = None

    def rename(self, fqn: str, module_fqn: str) -> None:
        """Set the group's names, once the root of the model is known."""
        self.fqn = self.transport.fqn = fqn
        self.module_fqn = self.transport.module_fqn = module_fqn

    @property
    def is_unsharded(self) -> bool:
        """Whether the modules have the whole parameters."""
        return self.params[-1].state is ShardedState.UNSHARDED  # the last one to become so

    # --- parameters ---

    @property
    def gather_transport(self) -> Transport:
        """The transport of the next gather. Seam: in a backward it may reach other ranks than in a forward."""
        return self.transport

    def unshard(self) -> None:
        """Start to gather the parameters, unless they are whole or on their way; return before they are there."""
        if self._gathered is not None or self.is_unsharded:
            return
        with no_autograd():
            self.comm_ctx.release_gather_buffer()
            streams = self.comm_ctx.streams
            with streams.copy.run():
                shards = [shard for param in self.params for shard in param.form.inputs()]
            dtypes = [dtype for param in self.params for dtype in param.form.dtypes]
            self._gathered = collectives.all_gather(shards, dtypes, self.gather_transport, streams)

    def wait_for_gather(self) -> None:
        """Let compute wait for the gather in flight, if there is one (`streams`, Note [What a wait costs])."""
        if self._gathered is not None:
            self.comm_ctx.streams.compute.wait(self._gathered.done)

    def copy_out(self) -> None:
        """Put what was gathered into the modules' parameters. Compute has waited for the gather, if there is one."""
        if self._gathered is None:
            return
        with no_autograd():
            gathered, self._gathered = self._gathered, None
            wholes = [memory for param in self.params for memory in param.form.outputs()]
            with moment("copy_out", self.transport, "compute", (gathered.flat,), wholes):
                collectives.copy_out(gathered.flat, gathered.sizes, wholes)
            for param in self.params:
                param.to_unsharded()
            self.comm_ctx.keep_until_copied_out(
                gathered
            )  # last: a form may have read more, made on the copy stream

    def reshard(self) -> None:
        """Put the shards back on the modules, and free the whole parameters' memory. A gather stays in flight."""
        with no_autograd():
            for param in self.params:
                if param.state is not ShardedState.SHARDED:
                    param.to_sharded()

    def drop_gather(self) -> None:
        """Forget an unused gather. Its buffer is reused only after the gather is done."""
        if self._gathered is not None:
            self.comm_ctx.streams.copy.wait(self._gathered.done)
            self._gathered = None

    def post_forward(self) -> None:
        """After the group's forward: free the parameters, or keep them for the backward."""
        if self.reshard_after_forward:
            self.reshard()

    # --- gradients ---

    def expect_grads(self) -> None:
        """At the start of a backward, say in which dtype it leaves gradients."""
        for param in self.params:
            cast_later = self.reduce_grads or param.has_unreduced_grad
            accept_grads(param.unsharded_param, param.dtypes.reduce, cast_later)

    @property
    def has_late_gradients(self) -> bool:
        """Whether a backward should have reduced gradients that are still here."""
        return self.reduce_grads and any(param.has_unreduced_grad for param in self.params)

    def post_backward(self) -> None:
        """After the group's backward: free the whole parameters, and reduce the gradients or keep them for later.

        First take the gradients, then free the parameters, then start the reduction: its buffer is as large as the parameters
        were. A group without gradients communicates nothing, so it must have none on the other ranks either.
        """
        with no_autograd():
            with moment("post_backward_reshard", self):
                params, grads = self.take_grads() if self.reduce_grads else ([], [])
                if self.reshard_after_backward:
                    self.reshard()
            if grads:
                self.reduce(params, grads)
            with moment("post_backward_accumulate", self):
                if not self.reduce_grads:
                    for param in self.params:
                        param.accumulate_grad()

    def take_grads(self) -> tuple[list[FSDPParam], list[Tensor]]:
        """Return the parameters that have a gradient to reduce, and these gradients. Nothing else refers to them afterwards."""
        params, grads = [], []
        for param in self.params:
            grad = param.take_grad()
            if grad is None:
                grad = self.reducer.stand_in(param)
            if grad is not None:
                params.append(param)
                grads.append(grad)
        return params, grads

    def reduce(self, params: Sequence[FSDPParam], grads: list[Tensor]) -> None:
        """Start to average whole gradients over the ranks, into the shards' gradients; return before that is done.

        First, compute waits until fewer than `max_reductions` of the context are in flight. This limits how many buffers of
        gradients are alive. `grads` is empty afterwards.
        """
        comm_ctx = self.comm_ctx
        with moment("post_backward_rs_wait", self):
            comm_ctx.wait_for_reductions(leave=comm_ctx.max_reductions - 1)
        with moment("post_backward_reduce", self):
            dtype = self.reduce_dtype(params, grads)
            grads[:] = [param.layout.rows_of(grad) for param, grad in zip(params, grads, strict=True)]
            reducing = collectives.reduce_scatter(
                grads, dtype, self.reducer.mean(dtype), self.transport, comm_ctx.streams
            )
            done = self.reducer.finish(params, reducing)
            comm_ctx.keep_until_reduced(InFlight(reducing.flat, done, self.transport))

    def reduce_dtype(self, params: Sequence[FSDPParam], grads: Sequence[Tensor]) -> torch.dtype:
        """Return the dtype in which to reduce these gradients: one for all, because they lie in one buffer.

        It is the parameters' reduce dtype. Where that is None, it is the dtype in which autograd left the gradient. If these
        differ between parameters, it is the dtype to which torch promotes them, which can hold all of their values.
        """
        dtypes = [p.dtypes.reduce or grad.dtype for p, grad in zip(params, grads, strict=True)]
        return functools.reduce(torch.promote_types, dtypes)

    def pieces(self, params: Sequence[FSDPParam], result: Tensor) -> list[tuple[FSDPParam, Tensor]]:
        """Return each of `params` with its rows, a view of a reduction's `result` [n], which has the padded chunks end to end."""
        chunks = result.split_with_sizes([p.padded_numel for p in params])
        return [
            (p, chunk[: p.local_numel].view(p.layout.local_shape))
            for p, chunk in zip(params, chunks, strict=True)
        ]

    def add_sharded_grads(self, params: Sequence[FSDPParam], result: Tensor) -> None:
        """Add the mean of gradients to the shards' gradients, in the dtype in which the optimizer gets them."""
        with no_autograd():
            dtypes = [p.dtypes.grad or result.dtype for p in params]
            if len(set(dtypes)) == 1:  # one cast for all
                result = result.to(dtypes[0])
            for (param, grad), dtype in zip(self.pieces(params, result), dtypes, strict=True):
                param.add_sharded_grad(grad if grad.dtype == dtype else grad.to(dtype))

    def adopt_registered(self) -> None:
        """Take over parameters that were replaced on the modules; see `FSDPParam.adopt_registered`."""
        for param in self.params:
            param.adopt_registered()


def divided(tensor: Tensor, by: float) -> Tensor:
    """Divide `tensor` in place; return it."""
    return tensor if by == 1 else tensor.div_(by)
