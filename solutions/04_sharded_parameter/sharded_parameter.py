"""Exercise 04: A sharded parameter"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hwfsdp import compat
from hwfsdp.param import ShardedState
from hwfsdp.sharding import chunk_extent, padded_local_shape

# The package's own, that the docstrings name:
#
# hwfsdp.param
#     method     FSDPParam.rows_of(whole: Tensor) -> Tensor
#     method     FSDPParam._on_shard_device(tensor: Tensor) -> Tensor
#     method     FSDPParam._free() -> None
#     method     FSDPParam._unpack_extension() -> None
#     attribute  FSDPParam.mesh: ShardMesh
#     attribute  FSDPParam.slots
#     attribute  FSDPParam.spread: Spread
#     class      Slot(module: nn.Module, name: str)
#     enum       ShardedState: SHARDED, UNSHARDED, POST_FORWARD
# hwfsdp.placement
#     class      Spread(dim: int, shape: tuple[int, ...], stride: tuple[int, ...], sharded: Grid,
#                    unsharded: Grid | None = None)
#     class      Grid(mesh: DeviceMesh, placements: tuple[Placement, ...])
# hwfsdp.mesh
#     property   ShardMesh.rank -> int
#     property   ShardMesh.size -> int
# hwfsdp.sharding
#     function   chunk_extent(n: int, world_size: int, rank: int) -> Extent
#     function   padded_local_shape(shape: Sequence[int], world_size: int) -> tuple[int, ...]
# hwfsdp.compat
#     function   dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement],
#                    shape: Sequence[int], stride: Sequence[int]) -> DTensor
#     function   register_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None


def allocate(tensor: Tensor) -> None:
    """Gives the tensor's storage its full size, contents undefined; nothing happens if it has it.

    Args:
        tensor: all of its storage: contiguous, beginning at its first element. It is changed in place: afterwards it, and
            every alias of it, may be written and read again. The storage has the bytes of the tensor's elements.

    The storage is resized, not exchanged (Note [Free by resizing, not by replacing]).
    """
    storage, nbytes = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)


def free(tensor: Tensor) -> None:
    """Gives the storage's memory back, by resizing it; nothing happens if that was done.

    The storage has 0 bytes afterwards. The tensor and every alias of it, such as one that autograd saved for backward, are
    the objects that they were, with their shapes; their elements must not be read until `allocate` and whoever fills
    the memory again.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() != 0:
        storage.resize_(0)


class FSDPParam:
    """A parameter of the model, with its shard and its memory when whole.

    Attributes:
        fqn: fully qualified name from the root module.
        spread: how the parameter lies over the ranks, before and after sharding.
        mesh: the `ShardMesh` whose ranks cut it: `mesh.size` of them, this one is `mesh.rank`.
        shape: of what FSDP gathers: the whole parameter, or the part of it that tensor parallelism left to this rank.
        rows: `shape` with the ranks' rows in dim 0 (Note [Rows]).
        local_shape, local_numel: of this rank's rows; padded_numel: elements that it contributes to a gather.
        dtypes: original, param and reduce dtype.
        state: which form is registered.
        padded_shard: [ceil(d0 / W) * rest], original dtype: this rank's rows, then zeros. In host memory if offloaded.
        sharded_param: DTensor; its local part is a view of the front of `padded_shard`.
        gathered: [W * ceil(d0 / W) * rest], param dtype: memory of the whole parameter, its padding at the end.
        unsharded_param: `shape`, param dtype: an alias of the front of `gathered`; None before the first gather.
        gather_mesh: whose shards the next gather puts together: `mesh`, or the smaller one that forward resharded to.
        post_forward_shard: [ceil(d0 / S) * rest], param dtype: rows kept after forward by this rank of a smaller world
            of S ranks; None in other states.
        accumulated_grad: `shape`, reduce dtype: gradients of backwards that were not reduced; else None.
        partial_grad: this rank's rows, flat, reduce dtype: gradients that were reduced within the shard axis only.
        extension: the local part's own way to be gathered, if it has one.
    """

    @torch.no_grad()
    def shard(self, whole: Tensor, requires_grad: bool) -> None:
        """Takes this rank's rows out of the whole parameter: sets `padded_shard` and `sharded_param`.

        Args:
            whole: `shape`, contiguous, on the mesh's device or on meta, the same values on every rank of the mesh. It
                is only read, so that other references to it stay valid, and freed by others: nothing here may keep it.
            requires_grad: of the parameter that is made.

        `rows_of(whole)` is a view of it in which dim 0 is dealt out to the ranks (Note [Rows]): this one is `mesh.rank` of
        `mesh.size`, and its rows are those of `sharding.chunk_extent`.

        `padded_shard` is flat and new, of `padded_numel` elements (as many as `sharding.padded_local_shape(self.rows, …)`
        has), in the dtype of `whole`, where `_on_shard_device` puts it. This rank's rows come first; all elements after
        them are zero.

        `sharded_param` is an `nn.Parameter` of a DTensor whose local part is the front of `padded_shard`, a view and no
        copy, in `local_shape`, possibly without elements. `compat.dtensor` makes the DTensor: mesh and placements are those
        of `spread.sharded`, shape and stride those of the whole parameter, `spread.shape` and `spread.stride`.
        """
        rows = self.rows_of(whole)
        extent = chunk_extent(rows.shape[0], self.mesh.size, self.mesh.rank)
        padded = self._on_shard_device(whole.new_zeros(padded_local_shape(self.rows, self.mesh.size)))
        front = padded.narrow(0, 0, extent.length)
        front.copy_(rows.narrow(0, extent.start, extent.length))
        self.padded_shard = padded.view(-1)
        grid = self.spread.sharded
        local = front if self.spread.dim == 0 else front.view(self.local_shape)
        dtensor = compat.dtensor(local, grid.mesh, grid.placements, self.spread.shape, self.spread.stride)
        self.sharded_param = nn.Parameter(dtensor, requires_grad=requires_grad)

    def register(self, param: nn.Parameter) -> None:
        """Makes `param` the modules' parameter, at all places (`slots`: a tied parameter has several).

        A module's forward finds it as its attribute of that name, `named_parameters` lists it. It is the very object, not
        a copy. `compat.register_parameter` does this for one module and name, faster than `setattr`.
        """
        for module, name in self.slots:
            compat.register_parameter(module, name, param)

    def to_unsharded(self) -> None:
        """From SHARDED or POST_FORWARD to UNSHARDED: the modules compute with the whole parameter from now on.

        Called when `allocate` has given `gathered` its memory and a gather has filled it, so that `unsharded_param` is
        there; where an extension gathers in a form of its own (`extension` is not None), `_unpack_extension` makes it, and
        has to be called first.

        Afterwards `unsharded_param` is registered at all places, it needs a gradient if and only if `sharded_param` does
        (the user may have changed that since the last time), the state is UNSHARDED, and nothing is left of
        POST_FORWARD: `gather_mesh` is `mesh` again, `post_forward_shard` None. Both parameters are the objects that they
        were: the optimizer holds one of them, what autograd has saved the other.
        """
        if self.extension:
            self._unpack_extension()
        assert self.unsharded_param is not None, f"{self.fqn}: to_unsharded before allocate"
        if self.unsharded_param.requires_grad != self.sharded_param.requires_grad:
            self.unsharded_param.requires_grad_(self.sharded_param.requires_grad)
        self.register(self.unsharded_param)
        self.gather_mesh, self.post_forward_shard = self.mesh, None
        self.state = ShardedState.UNSHARDED

    def to_sharded(self) -> None:
        """From UNSHARDED or POST_FORWARD to SHARDED: the modules have the shard again, and the rest is given back.

        Afterwards `sharded_param` is registered at all places, the memory of the whole parameter is free (`_free`;
        `unsharded_param` stays the object that it is, without memory), the state is SHARDED, and nothing is left of
        POST_FORWARD: `gather_mesh` is `mesh` again, `post_forward_shard` None.
        """
        self.register(self.sharded_param)
        self._free()
        self.gather_mesh, self.post_forward_shard = self.mesh, None
        self.state = ShardedState.SHARDED
