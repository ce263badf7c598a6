"""Exercise 11: Hybrid sharding"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from hwfsdp.core.collectives import Reducing
from hwfsdp.core.compat import no_autograd
from hwfsdp.core.param import FSDPParam
from hwfsdp.core.ranks import Axis, axis_along
from hwfsdp.core.streams import StreamEvent

# Names of the package that the docstrings mention:
#
# hwfsdp.core.ranks
#     class      Axis(group: dist.ProcessGroup | None = None, size: int = 1, rank: int = 0)
#     function   axis_along(mesh: DeviceMesh, dim: int) -> Axis
#     attribute  ShardMesh.mesh: DeviceMesh
#     attribute  ShardMesh.shard: Axis
#     property   ShardMesh.size -> int
# hwfsdp.features.hybrid_sharding
#     attribute  HybridMesh.replicate: Axis
# hwfsdp.core.collectives
#     class      Reducing(flat: Tensor, result: Tensor, mean: Mean, stream: Stream)
#     class      Mean(before: float, operation: Any, after: float)
# hwfsdp.core.streams
#     method     Stream.run() -> AbstractContextManager[Any]
#     method     Stream.record() -> StreamEvent
#     method     Stream.wait(event: StreamEvent) -> None
#     method     Stream.then(function: Callable[[], None]) -> None
# hwfsdp.core.context
#     attribute  FSDPCommContext.streams
#     method     FSDPCommContext.hold(tensor: Tensor, stream: Stream) -> None
# hwfsdp.core.group
#     attribute  ParamGroup.mesh: ShardMesh
#     attribute  ParamGroup.comm_ctx: FSDPCommContext
#     method     ParamGroup.pieces(params: Sequence[FSDPParam], result: Tensor) -> list[tuple[FSDPParam,
#                    Tensor]]
#     method     ParamGroup.add_sharded_grads(params: Sequence[FSDPParam], result: Tensor) -> None
#     function   divided(tensor: Tensor, by: float) -> Tensor
#     attribute  Reducer.group: ParamGroup
# hwfsdp.features.hybrid_sharding
#     attribute  HybridReducer.replicas
#     attribute  HybridReducer.all_reduce_grads: bool
#     attribute  HybridReducer.partial_grads: dict[FSDPParam, Tensor]
#     method     HybridReducer.start_all_reduce(tensor: Tensor, stream: Stream) -> None
#     method     HybridReducer.finish_shards(params: Sequence[FSDPParam], reducing: Reducing) -> StreamEvent
# hwfsdp.features.reductions
#     method     SteeredReducer.add_divided(stream: Stream, params: Sequence[FSDPParam], result: Tensor,
#                    divisor: float) -> None


def data_parallel_axes(mesh: DeviceMesh) -> tuple[Axis, Axis]:
    """Return the axis to shard over and the axis to replicate over, as this process sees them.

    Args:
        mesh: 1D: (shard); or 2D: (replicate, shard). An axis may have only one rank. `axis_along(mesh, dim)` makes the `Axis`
            of one dimension. An axis that the mesh does not have is `Axis()`: no group, one rank.

    Returns:
        (shard, replicate), in this order.
    """
    # TODO(11)
    raise NotImplementedError


class HybridMesh:
    """The ranks over which parameters are sharded, and the ranks over which the shards are replicated.

    Attributes:
        mesh: the mesh of the data-parallel axes: (shard), (replicate, shard) or (replicate).
        shard: ranks that hold different rows. If there is no such axis, it has size 1 and no group.
        replicate: ranks that hold the same rows. If there is no such axis, it has size 1 and no group.
        dims: the names of these axes in `around`, the mesh of all axes, if the parameters are DTensors on `around`.
    """

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Return the placements of a plain parameter that is sharded along dimension `dim`: one for each axis of `mesh`.

        First `Replicate()` for the axis of replicas, if there is one (if `replicate` has a group). Then `Shard(dim)` for the axis
        of shards, if there is one. An axis that exists may have only one rank.
        """
        # TODO(11)
        raise NotImplementedError


class HybridReducer:
    """Scatter, all-reduce over the replicas, divide, add.

    Attributes:
        replicas: the ranks of the all-reduce. all_reduce_grads: if False, partial gradients add up (Note [Partial gradients]).
        partial_grads: by parameter, the gradient of this rank's rows, reduced over the shard axis only: `local_shape`, reduce
            dtype.
    """

    def finish(self, params: Sequence[FSDPParam], reducing: Reducing) -> StreamEvent:
        """Queue the work that follows a reduction over the shard axis; return at once. The reduction may still be in flight.

        If `all_reduce_grads` is False, the result is kept for later (`add_partial_grads`), and nothing reaches the shards'
        gradients. Otherwise, kept partial gradients are added to the result (`take_partial_grads`). Then the result is reduced
        over the replicas (`reduce_over_replicas`). With one replica, it goes directly to the shards' gradients (`finish_shards`).
        `comm_ctx.hold` keeps the memory of the all-reduce until the backward is over.

        `finish_shards` is called directly. The calls of the other three functions are handed to `reducing.stream.then` inside
        `reducing.stream.run()`, and must not refer to `reducing.flat`.

        Returns:
            An event after which `reducing.flat` may be reused.
        """
        # TODO(11)
        raise NotImplementedError

    def reduce_over_replicas(
        self, params: Sequence[FSDPParam], result: Tensor, divisor: float, reduced: StreamEvent
    ) -> None:
        """All-reduce the result of the reduce-scatter over the replicas, in place. Then add it to the shards' gradients.

        Replicas hold the same rows, so only these rows cross: 1/S of the elements that the reduce-scatter read, for S shards.
        Called once, when the reduce-scatter is over or, on a device, as soon as it is issued. `reduced` is the event after the
        reduce-scatter and after `take_partial_grads`.

        The all-reduce stream (`self.group.comm_ctx.streams.all_reduce`) waits for this event. On this stream, the collective
        starts (`start_all_reduce`). Then, on the same stream, the result is divided and added to the shards' gradients
        (`add_divided`). Nothing else waits: neither compute, nor the host, nor the reduce-scatter stream, which has the next
        group to reduce.
        """
        # TODO(11)
        raise NotImplementedError

    def add_partial_grads(self, params: Sequence[FSDPParam], result: Tensor) -> None:
        """Keep the result of a reduction over the shard axis only, which has not reached the replicas yet.

        Args:
            params: the parameters that were reduced. result: [n], reduce dtype; `self.group.pieces(params, result)` cuts it. You
                may keep views of it, except if the mesh has only one shard. Then `result` is the flat buffer of the gradients,
                whose memory belongs to the compute stream, so you must keep a copy.

        Afterwards `partial_grads` has an entry for each of `params`: the old entry, to which the piece was added in place; or,
        without an old entry, the piece.
        """
        # TODO(11)
        raise NotImplementedError

    def take_partial_grads(self, params: Sequence[FSDPParam], result: Tensor) -> None:
        """Add partial gradients to the result of a reduction that goes on over the replicas. Each is added once.

        Args:
            params: the parameters that are being reduced. result: [n], reduce dtype; `self.group.pieces` cuts it. Changed in
                place.
        """
        # TODO(11)
        raise NotImplementedError
