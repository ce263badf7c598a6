"""A parameter group: parameters that are gathered, freed and reduced together.

One call of `fully_shard` makes one group of all parameters below its module that no earlier call has claimed.
A group knows how to do four things, and nothing about when:

    unshard              start to gather the parameters                       (twice a step)
    wait_for_unshard     wait for the gather, put the whole parameters into the modules
    reshard              put the shards back, free the whole parameters       (twice a step)
    reduce               average the gradients into the shards' gradients     (once a step)

The *when* is in `hooks`. Groups of one model share an `FSDPCommContext`: the streams, what is in flight on them,
and the order in which forwards ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from hwfsdp import events
from hwfsdp.collectives import Channel, Gathered, Reducing, all_gather, copy_out, reduce_scatter
from hwfsdp.errors import StateError, UsageError
from hwfsdp.mesh import ShardMesh
from hwfsdp.param import FSDPParam, ShardedState
from hwfsdp.sharding import local_shape, offsets, padded_local_numel
from hwfsdp.streams import Stream, StreamEvent, streams_for


class FSDPCommContext:
    """What the groups of one model, or of several, share in order to take turns on the wire.

    Args:
        device_type: of the mesh, for example "cuda".

    Attributes:
        streams: see `streams.StreamSet`.
        post_forward_order: groups in the order in which their forwards ended, once per forward.
        max_reductions: reductions in flight; each holds a buffer of one group's gradients.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.streams = streams_for(device_type)
        self.post_forward_order: list[ParamGroup] = []
        self.max_reductions = 1
        self._reducing: deque[Reducing] = deque()
        self._copied_out: tuple[Gathered, StreamEvent] | None = None

    @property
    def all_gather_stream(self) -> Stream:
        return self.streams.all_gather

    @property
    def reduce_scatter_stream(self) -> Stream:
        return self.streams.reduce_scatter

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
        """Keeps a gather's buffer, which the copy-out just issued still reads."""
        self.release_gather_buffer()
        self._copied_out = gathered, self.streams.compute.record()

    def release_gather_buffer(self) -> None:
        """Lets the copy stream reuse the buffer kept (see `collectives`, Note [Why flat buffers outlive…])."""
        if self._copied_out is not None:
            self.streams.copy.wait(self._copied_out[1])
            self._copied_out = None

    def add_reduction(self, reducing: Reducing) -> None:
        """Keeps a reduction's input until `wait_for_reductions` saw it through."""
        self._reducing.append(reducing)

    def wait_for_reductions(self, leave: int = 0) -> None:
        """Compute waits for the oldest reductions in flight until at most `leave` of them are left."""
        while len(self._reducing) > leave:
            reducing = self._reducing.popleft()
            with events.owned_by(reducing.owner):
                self.streams.compute.wait(reducing.done)


class ParamGroup:
    """Parameters that travel together.

    Attributes:
        fqn: of the module that the group was made for; names it in errors, traces and pictures.
        params: in the order in which they lie in the flat buffers.
        reshard_after_forward: free the whole parameters after forward, and gather them again for backward.
        reshard_after_backward: free them after backward; off, they stay for the next micro-batch.
        reduce_grads: reduce in backward; off, gradients add up in the whole parameters' gradients.
        unshard_in_backward: off for a group whose backward needs no parameters, such as an embedding.
        post_forward_indices: this group's places in `FSDPCommContext.post_forward_order`.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        mesh: ShardMesh,
        comm_ctx: FSDPCommContext,
        reshard_after_forward: bool,
    ) -> None:
        self.fqn = ""
        self.params = list(params)
        self.mesh = mesh
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.reduce_grads = True
        self.unshard_in_backward = True
        self.post_forward_indices: list[int] = []
        self._gathered: Gathered | None = None
        self.comm_ctx = comm_ctx
        self.channel = Channel(mesh.group, mesh.device, comm_ctx.streams, self.fqn)

    def use(self, comm_ctx: FSDPCommContext) -> None:
        """Communicates through this context from now on."""
        self.comm_ctx, self.channel.streams = comm_ctx, comm_ctx.streams

    def rename(self, fqn: str) -> None:
        """Sets the group's name, once the root of the model is known."""
        self.fqn = self.channel.owner = fqn

    @property
    def is_unsharded(self) -> bool:
        return all(p.state is ShardedState.UNSHARDED for p in self.params)

    # --- parameters ---

    def unshard(self) -> None:
        """Starts to gather the parameters; nothing if they are whole already, or on their way."""
        if self.is_unsharded or self._gathered is not None:
            return
        self.comm_ctx.release_gather_buffer()
        shards = [p.padded_shard for p in self.params]
        self._gathered = all_gather(shards, [p.dtypes.gathered for p in self.params], self.channel)

    def wait_for_unshard(self) -> None:
        """The modules have the whole parameters afterwards, if `unshard` was called before."""
        self.wait_for_gather()
        self.finish_unshard()

    def wait_for_gather(self) -> None:
        """Compute waits for the gather that `unshard` started, if any."""
        if self._gathered is not None:
            self.comm_ctx.streams.compute.wait(self._gathered.done)

    def finish_unshard(self) -> None:
        """Allocates the whole parameters, copies the finished gather out and registers them on the modules."""
        if self._gathered is None:
            return
        gathered, self._gathered = self._gathered, None
        copy_out(gathered, [p.allocate() for p in self.params], self.channel)
        self.comm_ctx.keep_until_copied_out(gathered)
        for param in self.params:
            param.to_unsharded()

    def reshard(self) -> None:
        """The modules have the shards afterwards; the whole parameters' memory is free."""
        for param in self.params:
            if param.state is ShardedState.UNSHARDED:
                param.to_sharded()

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
            param.take_grad()

    # --- gradients ---

    def finish_gradients(self) -> None:
        """After the group's backward: frees the whole parameters and reduces, or accumulates, the gradients.

        Does nothing harmful for a group that was not used: without gradients nothing is reduced.
        """
        if not self.reduce_grads:
            if self.reshard_after_backward:
                self.reshard()
            for param in self.params:
                param.accumulate_grad()
            return
        params, grads = self.take_grads()
        if self.reshard_after_backward:
            self.reshard()
        if grads:
            self.reduce(params, grads)

    def take_grads(self) -> tuple[list[FSDPParam], list[Tensor]]:
        """The parameters that got a gradient, and those gradients, no longer referred to from anywhere else."""
        pairs = [(p, grad) for p in self.params if (grad := p.take_grad()) is not None]
        return [p for p, _ in pairs], [grad for _, grad in pairs]

    def reduce(self, params: Sequence[FSDPParam], grads: list[Tensor]) -> None:
        """Averages whole gradients over the ranks and adds this rank's rows to the shards' gradients.

        Starts the reduction and returns. Before that, compute waits until fewer than `max_reductions` of the
        context are in flight. `grads` is empty afterwards.
        """
        dtypes = {grad.dtype for grad in grads}
        if len(dtypes) > 1:
            raise UsageError(
                f"parameter group {self.fqn!r}",
                expected="gradients of one dtype",
                got=" and ".join(sorted(map(str, dtypes))),
                remedy="Wrap the modules with the other dtype in a fully_shard of their own.",
            )
        self.comm_ctx.wait_for_reductions(leave=self.comm_ctx.max_reductions - 1)
        reduce_dtype = params[0].dtypes.reduce or dtypes.pop()

        def add_to_shards(reduced: Tensor) -> None:
            with torch.no_grad():
                self.add_sharded_grads(params, reduced)

        self.comm_ctx.add_reduction(reduce_scatter(grads, reduce_dtype, add_to_shards, self.channel))

    def add_sharded_grads(self, params: Sequence[FSDPParam], reduced: Tensor) -> None:
        """Cuts the result of a reduction into the parameters' rows, as views, and adds them to the gradients.

        Args:
            reduced: [n], reduce dtype: this rank's padded chunk of every parameter of `params`, end to end.
        """
        reduced = reduced.to(params[0].dtypes.orig)
        sizes = [padded_local_numel(p.shape, self.mesh.size) for p in params]
        for param, start in zip(params, offsets(sizes), strict=True):
            rows = local_shape(param.shape, self.mesh.size, self.mesh.rank)
            numel = torch.Size(rows).numel()
            param.add_sharded_grad(reduced[start : start + numel].view(rows))

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

    def __repr__(self) -> str:
        return f"ParamGroup({self.fqn}, {len(self.params)} parameters)"
