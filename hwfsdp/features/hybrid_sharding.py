"""Hybrid sharding: shards that are replicated.

Parameters are sharded over one axis of the mesh, and the shards are replicated over another. Gathers stay within a node, and only
shards of gradients cross nodes: the result of the reduce-scatter is all-reduced over the replicas.

    copy-in, reduce-scatter as in the core                     (reduce-scatter stream)
    all-reduce of its result over the replicas                 (all-reduce stream)
    divide, add to the shards' gradients                       (all-reduce stream)

Note [Partial gradients]
    Gradients may add up between the reduce-scatter and the all-reduce. Then they have the size of a shard, not of the whole
    parameter. They are kept for each parameter, because another micro-batch may reach other parameters. The next reduction that
    ends with an all-reduce adds them to its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from hwfsdp import compat
from hwfsdp.core.flat_collectives import Mean, Reducing, mean_over
from hwfsdp.core.private_torch import no_autograd
from hwfsdp.core.observer import moment
from hwfsdp.core.param import FSDPParam
from hwfsdp.core.mesh import Axis, ShardMesh, axis_along, default_mesh, device_of
from hwfsdp.core.device_streams import StreamEvent
from hwfsdp.errors import RefusedError, UsageError
from hwfsdp.features.reductions import SettableReducer

# --- The mesh ------------------------------------------------------------------------------------------------


@dataclass(unsafe_hash=True)  # torch's can be changed, too
class DataParallelMeshDims:
    """The data-parallel axes of a mesh that also has other axes; see `fully_shard(dp_mesh_dims=…)`.

    Attributes:
        shard: name of the axis to shard over; several names are taken as one axis. None: replicate only.
        replicate: name of the axis to replicate over, or several. None: shard only.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise UsageError(
                "DataParallelMeshDims",
                expected="names of axes in shard, in replicate, or in both",
                got="neither",
                remedy="Name the data-parallel axis: DataParallelMeshDims(shard='dp').",
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


@dataclass(frozen=True)
class HybridMesh(ShardMesh):
    """The ranks over which parameters are sharded, and the ranks over which the shards are replicated.

    Attributes:
        mesh: the mesh of the data-parallel axes: (shard), (replicate, shard) or (replicate).
        shard: ranks that hold different rows. If there is no such axis, it has size 1 and no group.
        replicate: ranks that hold the same rows. If there is no such axis, it has size 1 and no group.
        dims: the names of these axes in `around`, the mesh of all axes, if the parameters are DTensors on `around`.
    """

    replicate: Axis = Axis()
    dims: DataParallelMeshDims | None = None
    around: DeviceMesh | None = None

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Return one placement for each axis of `mesh`, for a plain parameter that is cut along dimension `dim`.

        An axis exists if it has a group, even if the group has only one rank.
        """
        replicate = (Replicate(),) if self.replicate.group else ()
        return (*replicate, Shard(dim)) if self.shard.group else replicate


def hybrid_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> HybridMesh:
    """Check the mesh given to `fully_shard` (None: all ranks) and resolve it.

    Raises:
        UsageError: the mesh has three or more axes, or two without names, and `dims` does not say which to take; or `dims`
            names axes that the mesh does not have.
        StateError: no mesh is given and no process group is initialized.
    """
    mesh = default_mesh() if mesh is None else mesh
    if dims is not None:
        return _named_axes(mesh, DataParallelMeshDims(dims.shard, dims.replicate))  # may be torch's
    if mesh.ndim > 2:
        raise UsageError(
            "fully_shard(mesh=…)",
            expected="a 1D mesh, or a named 2D mesh",
            got=f"a {mesh.ndim}D mesh of shape {tuple(mesh.shape)}",
            remedy="Take the data-parallel axis out of it: mesh['dp'], or name it in dp_mesh_dims.",
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise RefusedError(
            "fully_shard(mesh=…)",
            expected="names for the axes of a 2D mesh (first replicated, second sharded)",
            got=f"an unnamed mesh of shape {tuple(mesh.shape)}",
            remedy="Pass mesh_dim_names=('replicate', 'shard') to init_device_mesh.",
        )
    shard, replicate = data_parallel_axes(mesh)
    return HybridMesh(mesh, shard, device_of(mesh.device_type), replicate)


def data_parallel_axes(mesh: DeviceMesh) -> tuple[Axis, Axis]:
    """Return (shard, replicate), the axes of a mesh (shard) or (replicate, shard). A missing axis is `Axis()`: one rank, no group."""
    replicate = axis_along(mesh, 0) if mesh.ndim == 2 else Axis()
    return axis_along(mesh, mesh.ndim - 1), replicate


def _named_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> HybridMesh:
    names = (*dims.replicate_names, *dims.shard_names)
    if unknown := [name for name in names if name not in (mesh.mesh_dim_names or ())]:
        raise UsageError(
            "fully_shard(dp_mesh_dims=…)",
            expected=f"names of axes of the mesh, {mesh.mesh_dim_names}",
            got=", ".join(map(repr, unknown)),
            remedy="Name the axes in init_device_mesh(mesh_dim_names=…) and use those names.",
        )
    parts = [flat_axis(mesh, part) for part in (dims.replicate_names, dims.shard_names) if part]
    shard = axis_along(parts[-1], 0) if dims.shard_names else Axis()
    replicate = axis_along(parts[0], 0) if dims.replicate_names else Axis()
    joined = parts[0] if len(parts) == 1 else compat.join_meshes(parts)
    return HybridMesh(joined, shard, device_of(mesh.device_type), replicate, dims, mesh)


def flat_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the 1D mesh of these axes of `mesh`; several axes become one."""
    return mesh[names[0]] if len(names) == 1 else compat.flatten_mesh(mesh[names])


# --- Gradients -----------------------------------------------------------------------------------------------


class HybridReducer(SettableReducer):
    """Scatter, all-reduce over the replicas, divide, add.

    Attributes:
        replicas: the ranks of the all-reduce. all_reduce_grads: if False, partial gradients add up (Note [Partial gradients]).
        partial_grads: by parameter, the gradient of this rank's rows, reduced over the shard axis only: `local_shape`, reduce
            dtype.
    """

    def __init__(self, replicas: Axis) -> None:
        super().__init__()
        self.replicas = replicas

    def mean(self, dtype: torch.dtype) -> Mean:
        """Return the reduce-scatter's part of the mean over all ranks; `replica_operation` returns the all-reduce's part."""
        if self._backend_divides(dtype):
            return Mean(1, dist.ReduceOp.AVG, 1)
        return mean_over(self.group.mesh.size * self.replicas.size, dtype, self.divide_factor, only_sum=True)

    def replica_operation(self, dtype: torch.dtype) -> dist.ReduceOp.RedOpType:
        """Return the operation of the all-reduce: AVG if the backend divides and no other divisor is set, else SUM."""
        both = self._backend_divides(dtype) and self.divide_factor is None
        return dist.ReduceOp.AVG if both else dist.ReduceOp.SUM

    def _backend_divides(self, dtype: torch.dtype) -> bool:
        """True if the backend divides: the dtype has enough range, and the divisor is a number of ranks."""
        shards = self.group.mesh.size
        usual = self.divide_factor is None or self.divide_factor == shards > 1
        several = shards * self.replicas.size > 1
        return dtype in (torch.float32, torch.bfloat16) and several and usual and not self.force_sum

    def zeros_for(self, param: FSDPParam) -> Tensor | None:
        """Return zeros if a partial gradient waits. The reduction of these zeros takes the partial gradient to the replicas."""
        waiting = param in self.partial_grads and self.all_reduce_grads
        return self.zeros(param) if waiting else super().zeros_for(param)

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
            return super().finish(params, reducing)
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
        stream, transport = self.group.comm_ctx.streams.all_reduce, self.group.transport
        stream.wait(reduced)
        with stream.run():
            with moment("all_reduce", transport):
                operation = self.replica_operation(result.dtype)
                stream.add(transport.all_reduce(result, operation, self.replicas, stream.is_host))
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
