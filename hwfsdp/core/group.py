"""A parameter group: parameters that are gathered, freed and reduced together.

One call of `fully_shard` makes one group of all parameters below its module that no earlier call has claimed. A group knows how
to do these things, but not when to do them:

    unshard          start to gather the parameters                   (before forward and before backward)
    wait_for_gather  make compute wait for the gather
    copy_out         copy the gathered data into the modules' parameters
    reshard          put the shards back, free the whole parameters      (after forward and after backward)
    reduce           average the gradients into the shards' gradients                      (after backward)

`state` decides when, with the group's settings (`reshard_after_forward`, for example). Groups of one model share an `FSDPCommContext`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hwfsdp.core import flat_collectives, private_torch
from hwfsdp.core.observer import moment
from hwfsdp.core.param import FSDPParam, ShardedState

if TYPE_CHECKING:
    from hwfsdp.core.context import FSDPCommContext
    from hwfsdp.core.device_streams import StreamEvent
    from hwfsdp.core.mesh import ShardMesh, Transport


class Reducer:
    """What a reduction of a group's gradients computes: which mean, and what follows the reduce-scatter (divide, add). Extension point.

    Attributes:
        group: the group of these gradients, which sets it.
    """

    group: ParamGroup

    def mean(self, dtype: torch.dtype) -> flat_collectives.Mean:
        """Return the steps of a mean in this dtype; see `flat_collectives.mean_over`."""
        return flat_collectives.mean_over(self.group.mesh.size, dtype)

    def zeros_for(self, param: FSDPParam) -> Tensor | None:
        """Return the gradient to reduce for a parameter that got none. None: reduce nothing for it.

        Return None only if the parameter has no gradient on any rank. Otherwise the ranks wait for each other forever.
        """
        return None

    def finish(self, params: Sequence[FSDPParam], reducing: flat_collectives.Reducing) -> StreamEvent:
        """Queue the work that follows a reduction (divide, add) on the reduction's stream; return at once.

        The queued function must not refer to `reducing`, which would keep the buffer of all gradients alive.

        Returns:
            An event after which that buffer may be reused.
        """
        result, divisor, group = reducing.result, reducing.mean.after, self.group
        with reducing.stream.run():
            reducing.stream.then(lambda: group.add_sharded_grads(params, divided(result, divisor)))
        return reducing.stream.record()


class ParamGroup:
    """Parameters that travel together. Extension point.

    Attributes:
        name: the name of the group's module, for errors, traces and pictures; the root's is its class.
        params: the parameters, in their order in the flat buffers.
        mesh: the ranks over which they are sharded. comm_ctx: shared by the model's groups; it has the streams, for example.
        transport: moves the group's bytes. reducer: reduces its gradients.
        reshard_after_forward: if True, free the parameters after forward; if False, they stay whole for the backward. None: they
            stay, unless gradients are disabled and no backward can follow.
        reshard_after_backward: if True, free them after backward; if False, they stay whole for the next micro-batch.
        reduce_grads: if True, each backward reduces gradients; if False, they add up in the whole parameters' gradients.
        unshard_in_backward: False for a group whose backward needs no parameters, such as an embedding.
        is_unsharded: True if the modules have the whole parameters.
        shard_writes: for each parameter, the number of writes to its shard before the last gather started.
        post_forward_indices: this group's places in `FSDPCommContext.post_forward_order`.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[FSDPParam],
        mesh: ShardMesh,
        comm_ctx: FSDPCommContext,
        transport: Transport,
        reducer: Reducer,
    ) -> None:
        self.params = list(params)
        self.mesh, self.comm_ctx = mesh, comm_ctx
        self.transport, self.reducer = transport, reducer
        reducer.group = self
        self.rename(name)
        self.is_unsharded = False
        self.reshard_after_forward: bool | None = True
        self.reshard_after_backward = self.reduce_grads = self.unshard_in_backward = True
        self.post_forward_indices: list[int] = []
        self._gathering: flat_collectives.Gathering | None = None
        self.shard_writes: list[int] = []

    def rename(self, name: str) -> None:
        """Set the group's name, again once the root of the model is known."""
        self.name = self.transport.name = name

    # --- parameters ---

    @property
    def gather_transport(self) -> Transport:
        """The transport of the next gather. In a feature it depends on the state: a backward may gather from other ranks than a forward."""
        return self.transport

    def unshard(self) -> bool:
        """Start the gather of the parameters; return True before it is done. Return False if they are whole, or in flight already.

        A gather that was started ahead, before a write to a shard, brings old values. It is dropped, and another one is started.
        Backwards do not look for such writes: they need the values of the forward.
        """
        if self.is_unsharded or self._gathering is not None and not self.was_written():
            return False
        with private_torch.no_autograd():
            streams = self.comm_ctx.streams
            if self._gathering is not None:
                self.drop_gather()
                streams.copy.wait(streams.compute.record())
            self.shard_writes = private_torch.writes_to([param.sharded_param for param in self.params])
            with streams.copy.run():
                inputs = [each for param in self.params for each in param.gather_inputs()]
            shards, dtypes = zip(*inputs, strict=True)
            self._gathering = flat_collectives.all_gather(shards, dtypes, self.gather_transport, streams)
            return True

    def was_written(self) -> bool:
        """True if a shard was written since the last gather started. False in a backward."""
        if private_torch.in_backward():
            return False
        return private_torch.writes_to([param.sharded_param for param in self.params]) != self.shard_writes

    def wait_for_gather(self) -> None:
        """Make compute wait for the gather in flight, if there is one (`device_streams`, Note [What a wait costs])."""
        if self._gathering is not None:
            self.comm_ctx.streams.compute.wait(self._gathering.done)

    def copy_out(self) -> None:
        """Copy the gathered data into the modules' parameters, which are whole afterwards. Do nothing if no gather is in flight.

        Before this call, compute has waited for the gather.
        """
        if self._gathering is None:
            return
        with private_torch.no_autograd():
            gathering, self._gathering = self._gathering, None
            wholes = [memory for param in self.params for memory in param.allocate_whole()]
            with moment("copy_out", self.transport, "compute", (gathering.flat,), wholes):
                rows = gathering.transport.rows(gathering.flat, gathering.work)
                flat_collectives.copy_out(rows, gathering.sizes, wholes)
            for param in self.params:
                param.to_unsharded()
            self.is_unsharded = True
            # `to_unsharded` may have read other memory of the copy stream, too, such as an extension's metadata
            self.comm_ctx.streams.copy.wait(self.comm_ctx.streams.compute.record())

    def reshard(self) -> None:
        """Put the shards back on the modules, and free the whole parameters' memory. A gather stays in flight."""
        self.is_unsharded = False
        with private_torch.no_autograd():
            for param in self.params:
                if param.state is not ShardedState.SHARDED:
                    param.to_sharded()

    def drop_gather(self) -> None:
        """Forget an unused gather. Its buffer is reused only after the gather is done."""
        if self._gathering is not None:
            self.comm_ctx.streams.copy.wait(self._gathering.done)
            self._gathering = None

    def post_forward(self) -> None:
        """Free the parameters after the group's forward, or keep them for the backward."""
        if self.reshard_after_forward or self.reshard_after_forward is None and not torch.is_grad_enabled():
            self.reshard()

    # --- gradients ---

    def pre_backward(self) -> None:
        """Set the dtype of the gradients that the coming backward leaves."""
        for param in self.params if private_torch.REDUCES_IN_GRAD_DTYPE else ():
            cast_later = self.reduce_grads or param.has_unreduced_grad
            private_torch.accept_grads(param.unsharded_param, param.dtypes.reduce, cast_later)

    @property
    def has_late_gradients(self) -> bool:
        """True if the group still has gradients that a backward should have reduced."""
        return self.reduce_grads and any([param.has_unreduced_grad for param in self.params])

    def post_backward(self) -> None:
        """Free the whole parameters after the group's backward, and reduce the gradients or keep them for later.

        The parameters are freed before the reduction, because its buffer needs as many elements as they have. A group without
        gradients communicates nothing, so it must have no gradients on the other ranks, either.
        """
        with private_torch.no_autograd():
            with moment("take_and_free", self):
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
        """Return the parameters that have a gradient to reduce, and these gradients. Afterwards only the caller refers to them."""
        params, grads = [], []
        for param in self.params:
            grad = param.take_grad()
            if grad is None:
                grad = self.reducer.zeros_for(param)
            if grad is not None:
                params.append(param)
                grads.append(grad)
        return params, grads

    def reduce(self, params: Sequence[FSDPParam], grads: list[Tensor]) -> None:
        """Start the reduction of whole gradients; return before it is done. Their mean over the ranks is added to the shards' gradients.

        First, compute waits until fewer than `comm_ctx.max_reductions` reductions are in flight. This limits the number of
        buffers of gradients. Afterwards, `grads` is empty.
        """
        comm_ctx = self.comm_ctx
        with moment("post_backward_rs_wait", self):
            comm_ctx.wait_for_reductions(leave=comm_ctx.max_reductions - 1)
        with moment("post_backward_reduce", self):
            dtype = self.reduce_dtype(params, grads)
            grads[:] = [param.layout.rows_of(grad) for param, grad in zip(params, grads, strict=True)]
            reducing = flat_collectives.reduce_scatter(
                grads, dtype, self.reducer.mean(dtype), self.transport, comm_ctx.streams
            )
            done = self.reducer.finish(params, reducing)
            comm_ctx.keep_until_reduced(reducing.flat, done, self.transport)

    def reduce_dtype(self, params: Sequence[FSDPParam], grads: Sequence[Tensor]) -> torch.dtype:
        """Return the dtype in which to reduce these gradients. All have the same, because they lie in one buffer.

        If parameters ask for different dtypes, the result is the dtype to which torch promotes them. It can hold all values.
        """
        dtypes = {p.dtypes.reduce or grad.dtype for p, grad in zip(params, grads, strict=True)}
        return functools.reduce(torch.promote_types, dtypes)

    def pieces(self, params: Sequence[FSDPParam], result: Tensor) -> list[tuple[FSDPParam, Tensor]]:
        """Return each of `params` with its rows, a view of a reduction's `result` [n]. `result` has the padded chunks end to end."""
        chunks = result.split_with_sizes([p.padded_numel for p in params])
        return [
            (p, chunk[: p.local_numel].view(p.layout.local_shape))
            for p, chunk in zip(params, chunks, strict=True)
        ]

    def add_sharded_grads(self, params: Sequence[FSDPParam], result: Tensor) -> None:
        """Add `result` [n], the mean of the gradients, to the shards' gradients, in the dtype that the optimizer gets."""
        with private_torch.no_autograd():
            dtypes = [p.dtypes.grad or result.dtype for p in params]
            if len(set(dtypes)) == 1:  # one cast for all
                result = result.to(dtypes[0])
            for (param, grad), dtype in zip(self.pieces(params, result), dtypes, strict=True):
                param.add_sharded_grad(grad if grad.dtype == dtype else grad.to(dtype))

    def wait_until_readable(self) -> None:
        """Wait until other code may read the gradients."""
        self.params[0].memory.wait_until_readable(self.comm_ctx.streams)

    def adopt_registered(self) -> None:
        """Take over parameters that were replaced on the modules; see `FSDPParam.adopt_registered`."""
        for param in self.params:
            param.adopt_registered()


def divided(tensor: Tensor, by: float) -> Tensor:
    """Divide `tensor` in place; return it."""
    return tensor if by == 1 else tensor.div_(by)
