"""Exercise 11: Hybrid sharding"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from hwfsdp.collectives import Channel, Reducing, all_reduce, scaling_of, start_all_reduce
from hwfsdp.compat import outside_autograd
from hwfsdp.group import divided
from hwfsdp.mesh import Axis, axis_along
from hwfsdp.param import FSDPParam

# The package's own, that the docstrings name:
#
# hwfsdp.mesh
#     class      Axis(group: dist.ProcessGroup | None = None, size: int = 1, rank: int = 0)
#     attribute  ShardMesh.mesh: DeviceMesh
#     attribute  ShardMesh.shard: Axis
#     attribute  ShardMesh.replicate: Axis
# hwfsdp.collectives
#     attribute  Channel.streams: StreamSet
#     attribute  Channel.replicate: Axis
#     class      Reducing(owner: str, flat: Tensor, result: Tensor, divide: float, stream: Stream,
#                    done: StreamEvent)
#     method     Reducing.then(function: Callable[[Tensor], None]) -> None
#     function   start_all_reduce(tensor: Tensor, operation: Any, axis: Axis, stream: Stream,
#                    channel: Channel) -> None
#     function   scaling_of(channel: Channel, dtype: torch.dtype) -> Scaling
#     class      Scaling(before: float, scatter: Any, all_reduce: Any, after: float)
#     function   all_reduce(reducing: Reducing, channel: Channel) -> Reducing
# hwfsdp.streams
#     attribute  StreamSet.all_reduce: Stream
#     method     Stream.run() -> AbstractContextManager[Any]
#     method     Stream.record() -> StreamEvent
#     method     Stream.wait(event: StreamEvent | None) -> None
# hwfsdp.group
#     attribute  ParamGroup.mesh: ShardMesh
#     attribute  ParamGroup.channel: Channel
#     attribute  ParamGroup.all_reduce_grads: bool
#     method     ParamGroup.pieces(params: Sequence[FSDPParam], result: Tensor) -> list[tuple[FSDPParam,
#                    Tensor]]
#     method     ParamGroup.add_sharded_grads(params: Sequence[FSDPParam], result: Tensor) -> None
#     function   divided(tensor: Tensor, by: float) -> Tensor
# hwfsdp.param
#     attribute  FSDPParam.partial_grad: Tensor | None


def data_parallel_axes(mesh: DeviceMesh) -> tuple[Axis, Axis]:
    """The axis to shard over and the one to replicate over, as this process sees them.

    Args:
        mesh: 1D: (shard); or 2D: (replicate, shard). An axis may have one rank only.

    An `Axis` is made of the process group along one dimension of the mesh, `mesh.get_group(dim)`: those ranks that differ
    from this one in that coordinate only. Its `size()` says how many they are, its `rank()` which of them this process
    is; that is not its rank among all. An axis that the mesh does not have is `Axis()`: no group, one rank.

    Returns:
        (shard, replicate), in this order.
    """
    # TODO(11)
    raise NotImplementedError


class ShardMesh:
    """The ranks over which parameters are sharded, and those over which the shards are replicated.

    Attributes:
        mesh: its data-parallel axes: (shard), (replicate, shard) or (replicate).
        shard: ranks that hold different rows. Of size 1, without a group, if there is no such axis.
        replicate: ranks that hold the same rows. Of size 1, without a group, if there is no such axis.
        device: where unsharded parameters live.
        dims: the names of these axes in `around`, the mesh of all axes, if the parameters are DTensors on that.
    """

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Of a plain parameter that is sharded along its dimension `dim`: one placement for each axis of `mesh`.

        `Replicate()` over the axis of replicas, if there is one (`replicate` has a group), then `Shard(dim)` over the axis of
        shards, if there is one. An axis may be there and have one rank only.
        """
        # TODO(11)
        raise NotImplementedError


def reduce_over_replicas(reducing: Reducing, channel: Channel) -> Reducing:
    """Goes on with a reduction across the replicas: an all-reduce of what the reduce-scatter leaves on this rank.

    Ranks that replicate hold the same rows, and the reduce-scatter has left each with the same rows of gradients, reduced
    over its own shard axis only. So only these rows still have to cross, 1/S of what the reduce-scatter worked on.

    Does nothing if there is one replica (`channel.replicate.size`): `reducing` is returned as it is. Otherwise:
    - The all-reduce stream (`channel.streams.all_reduce`) waits (`stream.wait(event)`) for all that was issued so far on the
      stream where the result is made (`reducing.stream.record()`): the reduce-scatter, and what was added to its result.
    - On the all-reduce stream (`with stream.run():`), `start_all_reduce` is called once: for `reducing.result`, in place,
      over `channel.replicate`, with the operation for replicas of `scaling_of(channel, dtype of the result)`. Whether that
      sums or averages is decided there, for both collectives together; nothing is divided here.
    Nobody else waits: not compute, not the host, and not the reduce-scatter stream, which has the next group to reduce.

    Returns:
        The same reduction, with that stream as its `stream`, and its result as `flat`: this is the input of the all-reduce.
        The larger one of the reduce-scatter must not be kept alive by it.
    """
    # TODO(11)
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
        # TODO(11)
        raise NotImplementedError

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
        # TODO(11)
        raise NotImplementedError

    @outside_autograd
    def take_partial_grads(self, params: Sequence[FSDPParam], result: Tensor) -> None:
        """Adds partial gradients to the result of a reduction that goes on over the replicas.

        Args:
            params: those that are being reduced. result: [n], reduce dtype; `pieces` cuts it. Changed in place.

        Afterwards each piece has the `partial_grad` of its parameter in it, if there was one, and that is None: it counts
        once.
        """
        # TODO(11)
        raise NotImplementedError
