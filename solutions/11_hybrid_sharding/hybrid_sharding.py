"""Exercise 11: Hybrid sharding"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from hwfsdp.core.collectives import Reducing
from hwfsdp.core.compat import no_autograd
from hwfsdp.core.mesh import Axis, axis_along
from hwfsdp.core.param import FSDPParam
from hwfsdp.core.streams import StreamEvent

# Names of the package that may help:
#
# hwfsdp.core.mesh
#     class      Axis(group: dist.ProcessGroup | None = None, size: int = 1, rank: int = 0)
#                  One axis of a mesh, as this process sees it: `size` ranks. This process has number `rank`.
#     function   axis_along(mesh: DeviceMesh, dim: int) -> Axis
#                  Return this process's axis along one dimension of a mesh.
#     attribute  ShardMesh.mesh: DeviceMesh
#                  the user's mesh.
#     attribute  ShardMesh.shard: Axis
#                  its axis of ranks that hold different rows.
#     property   ShardMesh.size -> int
# hwfsdp.features.hybrid_sharding
#     attribute  HybridMesh.replicate: Axis
#                  ranks that hold the same rows.
# hwfsdp.core.collectives
#     class      Reducing(flat: Tensor, result: Tensor, mean: Mean, stream: Stream)
#                  A reduction in flight on `stream`.
#     class      Mean(before: float, operation: Any, after: float)
#                  The steps of a mean: divide by `before`, reduce with `operation`, divide by `after`.
#                  Division by 1 is left out.
# hwfsdp.core.compat
#     function   no_autograd() -> AbstractContextManager[Any]
#                  Keep the operations of the block out of autograd, and out of any `torch.func` transform.
# hwfsdp.core.streams
#     method     Stream.run() -> AbstractContextManager[Any]
#                  Issue the work of the block on this stream.
#     method     Stream.record() -> StreamEvent
#                  Return an event after all work that was issued here so far.
#     method     Stream.wait(event: StreamEvent) -> None
#                  Let all work that is issued here from now on run after `event`.
#     method     Stream.then(function: Callable[[], None]) -> None
#                  Run `function` here, in order. Called inside `run`.
#     attribute  StreamSet.all_reduce
# hwfsdp.core.context
#     property   FSDPCommContext.streams -> StreamSet
# hwfsdp.features.group
#     method     FSDPCommContext.hold(tensor: Tensor, stream: Stream) -> None
#                  Keep a tensor that the reduce-scatter stream made, until the work on `stream` has used it.
# hwfsdp.core.group
#     attribute  ParamGroup.mesh: ShardMesh
#                  the ranks over which they are sharded.
#     attribute  ParamGroup.comm_ctx: FSDPCommContext
#                  shared by the model's groups; it has the streams, for example.
#     method     ParamGroup.pieces(params: Sequence[FSDPParam], result: Tensor) -> list[tuple[FSDPParam,
#                    Tensor]]
#                  Return each of `params` with its rows, a view of a reduction's `result` [n]. `result` has
#                  the padded chunks end to end.
#     method     ParamGroup.add_sharded_grads(params: Sequence[FSDPParam], result: Tensor) -> None
#                  Add `result` [n], the mean of the gradients, to the shards' gradients, in the dtype that
#                  the optimizer gets.
#     function   divided(tensor: Tensor, by: float) -> Tensor
#                  Divide `tensor` in place; return it.
#     attribute  Reducer.group: ParamGroup
#                  the group of these gradients, which sets it.
# hwfsdp.features.hybrid_sharding
#     attribute  HybridReducer.replicas: Axis
#                  the ranks of the all-reduce.
# hwfsdp.features.reductions
#     attribute  SettableReducer.all_reduce_grads: bool
#     attribute  SettableReducer.partial_grads: dict[FSDPParam, Tensor]
# hwfsdp.features.hybrid_sharding
#     method     HybridReducer.start_all_reduce(tensor: Tensor, stream: Stream) -> None
#                  Issue an all-reduce of `tensor` over the replicas, in place, on `stream`, which is current;
#                  return at once.
#     method     HybridReducer.finish_shards(params: Sequence[FSDPParam], reducing: Reducing) -> StreamEvent
#                  Queue the usual work: divide, add to the shards' gradients. If there is a hook, it runs
#                  before the division.
# hwfsdp.features.reductions
#     method     SettableReducer.add_divided(stream: Stream, params: Sequence[FSDPParam], result: Tensor,
#                    divisor: float) -> None
#                  Queue on `stream`, which is current: call the hook, divide `result`, add it to the shards'
#                  gradients.


def data_parallel_axes(mesh: DeviceMesh) -> tuple[Axis, Axis]:
    """Return (shard, replicate), the axes of a mesh (shard) or (replicate, shard). A missing axis is `Axis()`: one rank, no group."""
    replicate = axis_along(mesh, 0) if mesh.ndim == 2 else Axis()
    return axis_along(mesh, mesh.ndim - 1), replicate


class HybridMesh:
    """The ranks over which parameters are sharded, and the ranks over which the shards are replicated.

    Attributes:
        mesh: the mesh of the data-parallel axes: (shard), (replicate, shard) or (replicate).
        shard: ranks that hold different rows. If there is no such axis, it has size 1 and no group.
        replicate: ranks that hold the same rows. If there is no such axis, it has size 1 and no group.
        dims: the names of these axes in `around`, the mesh of all axes, if the parameters are DTensors on `around`.
    """

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Return one placement for each axis of `mesh`, for a plain parameter that is cut along dimension `dim`.

        An axis exists if it has a group, even if the group has only one rank.
        """
        replicate = (Replicate(),) if self.replicate.group else ()
        return (*replicate, Shard(dim)) if self.shard.group else replicate


class HybridReducer:
    """Scatter, all-reduce over the replicas, divide, add.

    Attributes:
        replicas: the ranks of the all-reduce. all_reduce_grads: if False, partial gradients add up (Note [Partial gradients]).
        partial_grads: by parameter, the gradient of this rank's rows, reduced over the shard axis only: `local_shape`, reduce
            dtype.
    """

    def finish(self, params: Sequence[FSDPParam], reducing: Reducing) -> StreamEvent:
        """Queue everything that follows a reduction over the shard axis. The reduction may still be in flight; do not wait for it.

        Its result reaches the shards' gradients, or `partial_grads` if `all_reduce_grads` is off. Nothing that is queued may keep
        `reducing.flat` alive. On return, the memory of an all-reduce is already kept until the backward is over.

        Returns:
            An event after which `reducing.flat` may be reused.
        """
        result, divisor = reducing.result, reducing.mean.after
        with reducing.stream.run():
            if not self.all_reduce_grads:
                reducing.stream.then(lambda: self.add_partial_grads(params, result))
                return reducing.stream.record()
            if any(param in self.partial_grads for param in params):
                reducing.stream.then(lambda: self.take_partial_grads(params, result))
        if self.replicas.size == 1:
            return self.finish_shards(params, reducing)
        reduced = reducing.stream.record()
        with reducing.stream.run():
            reducing.stream.then(lambda: self.reduce_over_replicas(params, result, divisor, reduced))
        self.group.comm_ctx.hold(result, self.group.comm_ctx.streams.all_reduce)
        return reducing.stream.record()

    def reduce_over_replicas(
        self, params: Sequence[FSDPParam], result: Tensor, divisor: float, reduced: StreamEvent
    ) -> None:
        """Reduce `result` over the replicas, in place, on the all-reduce stream; then add it to the shards' gradients there.

        Called when the reduce-scatter is over or, on a device, as soon as it is issued. `reduced` is the event after it. Only the
        all-reduce stream waits: not compute, not the host, not the next group's reduce-scatter. `divisor`: divide by it in the end.
        """
        stream = self.group.comm_ctx.streams.all_reduce
        stream.wait(reduced)
        with stream.run():
            self.start_all_reduce(result, stream)
            self.add_divided(stream, params, result, divisor)

    def add_partial_grads(self, params: Sequence[FSDPParam], result: Tensor) -> None:
        """Add a result [n] of a reduction over the shard axis only to the partial gradients of `params`.

        With one shard, `result` is memory that the compute stream will use again.
        """
        with no_autograd():
            if self.group.mesh.size == 1:  # the result is the input, which belongs to the compute stream
                result = result.clone()
            for param, grad in self.group.pieces(params, result):
                kept = self.partial_grads.get(param)
                self.partial_grads[param] = grad if kept is None else kept.add_(grad)

    def take_partial_grads(self, params: Sequence[FSDPParam], result: Tensor) -> None:
        """Add the partial gradients of `params` to `result` [n], in place. Each counts once."""
        with no_autograd():
            for param, grad in self.group.pieces(params, result):
                if param in self.partial_grads:
                    grad.add_(self.partial_grads.pop(param))
