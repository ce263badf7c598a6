"""The part of a parameter that each rank keeps, and memory that comes and goes.

A `Layout` says which part of a parameter this rank keeps, and how gathered data becomes the whole tensor. A feature that cuts
parameters in another way gives `FSDPParam` another layout.

Note [Free by resizing, not by replacing]
    Autograd saves tensors of the forward for the backward, such as the weight of a linear layer. If FSDP made a new tensor in
    each gather, autograd would hold the old tensors, and free nothing until the backward. So the parameter is one tensor object for
    the life of the model. FSDP allocates and frees only the storage under it, by resizing. The tensor that autograd saved is this
    object, so it has its memory again when the backward needs it.

Note [Writing without being noticed]
    Autograd also counts in-place writes, and refuses to use a saved tensor that was written to afterwards. Filling the storage
    again with the same values is such a write, too. `Tensor.data` is an alias of the same storage with its own count. So we
    gather into one tensor, and register a parameter made from the alias.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.core import private_torch
from hwfsdp.core.sharding import chunk_extent, local_shape, padded_local_shape

if TYPE_CHECKING:
    from hwfsdp.core.mesh import ShardMesh


class Layout:
    """The part of a parameter that this rank keeps, as a DTensor. Here it is the rank's chunk of rows, `Shard(0)`. Extension point.

    Here `rows_of`, `as_whole` and `whole_grad` return their argument. Layouts that cut in other ways override them.

    Attributes:
        shape: the shape of the whole parameter that gathers put together and modules compute with.
        rows: the shape whose dim 0 is divided among the ranks; here it is `shape`.
        global_shape: the shape over all ranks of all parallelisms. device_mesh, placements: mesh and placements of the DTensor.
        local_shape: the shape of this rank's part. padded_shape: the shape of a full chunk of rows. padded_numel: its number of
            elements.
    """

    def __init__(self, param: Tensor, mesh: ShardMesh) -> None:
        self.mesh = mesh
        self.shape = self.rows = self.global_shape = param.shape
        self.stride = param.stride()
        self.device_mesh, self.placements = mesh.mesh, mesh.placements(0)
        self.local_shape = local_shape(self.rows, mesh.size, mesh.rank)
        self.padded_shape = padded_local_shape(self.rows, mesh.size)
        self.padded_numel = prod(self.padded_shape)

    def rows_of(self, whole: Tensor) -> Tensor:
        """Return `whole` [`shape`] as a view of shape `rows`."""
        return whole

    def by_rank(self, gathered: Tensor) -> Tensor:
        """Return a view of `gathered` [W * padded_numel] whose dim 0 counts the ranks. The gathered part of rank r goes to row r."""
        return gathered.view(self.mesh.size, -1)

    def own_rows(self, whole: Tensor) -> Tensor:
        """Return this rank's rows, a view of `whole` [`shape`]."""
        rows = self.rows_of(whole)
        extent = chunk_extent(rows.shape[0], self.mesh.size, self.mesh.rank)
        return rows.narrow(0, extent.start, extent.length)

    def as_shard(self, local: Tensor) -> DTensor:
        """Return the DTensor of the sharded parameter. `local` [`local_shape`] is this rank's part of it."""
        return private_torch.dtensor(local, self.device_mesh, self.placements, self.global_shape, self.stride)

    def as_whole(self, whole: Tensor) -> Tensor:
        """Return the tensor that modules compute with, made from `whole` [`shape`]."""
        return whole

    def whole_grad(self, grad: Tensor) -> Tensor:
        """Return a gradient [`shape`], made from `grad`, which autograd computed for the result of `as_whole`."""
        return grad


# --- Storage -------------------------------------------------------------------------------------------------


def allocate(tensor: Tensor) -> None:
    """Give the tensor's storage its full size, contents undefined; do nothing if it has this size already.

    The tensor covers its whole storage. Every alias of it may be read again, too (Note [Free by resizing, not by replacing]).
    """
    storage, nbytes = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)


def free(tensor: Tensor) -> None:
    """Give back the storage's memory, by resizing the storage to 0 bytes. A second call does nothing.

    The tensor and every alias stay the objects that they are. Their elements must not be read until `allocate`.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() != 0:
        storage.resize_(0)
