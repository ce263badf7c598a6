"""One parameter, sharded and whole.

An `FSDPParam` stands for one parameter of the model, in two forms:

- `sharded_param`, an `nn.Parameter` that is a DTensor, placement `Shard(0)` unless the user chose another dimension. It
  holds this rank's rows in the original dtype. Optimizers and state dicts see only this one.
- `unsharded_param`, an `nn.Parameter` like the original one, in the param dtype. Modules compute with this one. Its
  memory comes and goes (see `storage`).

| state        | registered on the modules | memory besides the shard        | left by            | to           |
| ------------ | ------------------------- | ------------------------------- | ------------------ | ------------ |
| SHARDED      | `sharded_param`           | none                            | `to_unsharded`     | UNSHARDED    |
| UNSHARDED    | `unsharded_param`         | the whole parameter, gathered   | `to_sharded`       | SHARDED      |
|              |                           |                                 | `to_post_forward`  | POST_FORWARD |
| POST_FORWARD | a DTensor, to look at     | a larger shard, of fewer ranks  | `to_unsharded`     | UNSHARDED    |
|              |                           |                                 | `to_sharded`       | SHARDED      |

The first two objects live as long as the model. A transition registers the other one; it never makes a new one.

Note [Padding lives in the shard]
    Ranks contribute equally to a gather, so a shard with fewer rows than a full chunk is padded (see
    `sharding`). Padding before every gather would cost a copy every time. Instead the shard is allocated with
    its padding once, as `padded_shard`, and the DTensor's rows are a view of its front. An optimizer that
    updates the rows updates the gather's input.

Note [Rows]
    Everything here speaks of rows, that is, of slices along dim 0. A parameter that is cut along another dimension is
    seen with one row per rank (`rows_of`, `sharding.rows_shape`). That is a view of the whole parameter, so gathers
    write through it and gradients are read through it, and nothing else has to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from hwfsdp import compat, storage
from hwfsdp.compat import local_of, replace_local, storage_key
from hwfsdp.errors import UsageError
from hwfsdp.extensions import Extension
from hwfsdp.mesh import ShardMesh, in_host_memory, is_in_place
from hwfsdp.placement import Spread
from hwfsdp.precision import CPUOffloadPolicy, Dtypes, MixedPrecisionPolicy, OffloadPolicy, resolve_dtypes
from hwfsdp.sharding import (
    chunk_extent,
    contiguous_strides,
    local_shape,
    padded_local_numel,
    padded_local_shape,
    rows_shape,
)


class ShardedState(Enum):
    """Which form of a parameter the modules see; the table in this module's docstring."""

    SHARDED = auto()
    UNSHARDED = auto()
    POST_FORWARD = auto()


class Slot(NamedTuple):
    """A place where a parameter is registered; tied parameters have several."""

    module: nn.Module
    name: str

    def registered(self) -> nn.Parameter:
        """The parameter that is there now."""
        return self.module.get_parameter(self.name)


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

    sharded_param: nn.Parameter
    padded_shard: Tensor
    gathered: Tensor
    post_forward_shard: Tensor | None
    dtypes: Dtypes

    def __init__(
        self,
        param: nn.Parameter,
        slots: Sequence[Slot],
        fqn: str,
        mesh: ShardMesh,
        policy: MixedPrecisionPolicy,
        spread: Spread,
        offload: OffloadPolicy = OffloadPolicy(),
    ) -> None:
        self.fqn, self.slots, self.mesh, self.policy, self.offload = fqn, tuple(slots), mesh, policy, offload
        self.spread = spread
        self.state = ShardedState.SHARDED
        self.unsharded_param: nn.Parameter | None = None
        self.gather_mesh, self.post_forward_shard = mesh, None
        self.accumulated_grad: Tensor | None = None
        self.partial_grad: Tensor | None = None
        whole = local_of(param) if isinstance(param, DTensor) else param
        self.shape = whole.shape
        self.rows = rows_shape(self.shape, spread.dim, mesh.size)
        self.local_shape = local_shape(self.rows, mesh.size, mesh.rank) if spread.dim == 0 else self.rows[1:]
        self.padded_numel = padded_local_numel(self.rows, mesh.size)
        self.local_numel = prod(self.local_shape)
        self.shard(whole, param.requires_grad)
        self.dtypes = resolve_dtypes(param.dtype, policy)
        self.extension = Extension.of(self.local, fqn)
        self.register(self.sharded_param)

    @property
    def local(self) -> Tensor:
        """This rank's rows, `local_shape`: the local part of the sharded parameter."""
        assert isinstance(self.sharded_param, DTensor)
        return local_of(self.sharded_param)

    def rows_of(self, whole: Tensor) -> Tensor:
        """`whole` [`shape`] as a view of shape `rows` (Note [Rows])."""
        dim = self.spread.dim
        return whole if dim == 0 else whole.unflatten(dim, (self.mesh.size, -1)).movedim(dim, 0)

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

    def _on_shard_device(self, tensor: Tensor) -> Tensor:
        """`tensor`, or its copy in host memory if shards are offloaded."""
        if not isinstance(self.offload, CPUOffloadPolicy) or tensor.is_meta:
            return tensor
        return in_host_memory(tensor, self.mesh.device, self.offload.pin_memory)

    # --- gathering ---

    def gather_inputs(self) -> list[Tensor]:
        """What this rank contributes to a gather, each 1D: one tensor, unless an extension wants more."""
        if self.post_forward_shard is not None:
            return [self.post_forward_shard]
        if self.extension is None:
            return [self.padded_shard]
        local = self.local
        if not is_in_place(local, self.mesh.device):
            local = local.to(self.mesh.device, non_blocking=True)
        arguments = (
            self.mesh.shard_axis,
            self.shape,
            contiguous_strides(self.shape),
            self.slots[0].module,
            self.policy,
        )
        return self.extension.pack(local, padded_local_shape(self.rows, self.mesh.size), arguments)

    @property
    def gather_dtypes(self) -> list[torch.dtype]:
        """What each of `gather_inputs` is gathered in."""
        return self.extension.dtypes if self.extension else [self.dtypes.gathered]

    def allocate(self) -> list[Tensor]:
        """Memory for the whole parameter; what a gather writes to.

        Returns:
            Per gather input a view of dim 0 = ranks, contents undefined, into which each rank's contribution goes in
            order. The memory is the same each time, unless the param dtype changed.
        """
        if self.extension:
            outputs = self.extension.allocate(self.mesh.size, self.mesh.device)
            return [t.view(self.mesh.size, -1) for t in outputs]
        if self.unsharded_param is None or self.gathered.dtype != self.dtypes.gathered:
            self._create_unsharded()
        storage.allocate(self.gathered)
        if self.post_forward_shard is not None:
            ranks, numel = self.gather_mesh.size, self.post_forward_shard.numel()
            return [self.gathered[: ranks * numel].view(ranks, -1)]
        return [self._rows]

    def _create_unsharded(self) -> None:
        """`gathered` and `unsharded_param` on one storage (see `storage`, Note [Writing without being noticed])."""
        with torch.inference_mode(False), torch.no_grad():
            numel = self.mesh.size * self.padded_numel
            self.gathered = torch.empty(numel, dtype=self.dtypes.gathered, device=self.mesh.device)
            self._set_unsharded(self.gathered.data[: self.shape.numel()].view(self.shape))
            by_rank = self.spread.dim == 0
            self._rows = (
                self.gathered.view(self.mesh.size, -1)
                if by_rank
                else self.rows_of(self.gathered.view(self.shape))
            )
            storage.free(self.gathered)  # from here on every allocation is a resizing

    def _set_unsharded(self, whole: Tensor) -> None:
        if grid := self.spread.unsharded:
            whole = compat.dtensor(whole, grid.mesh, grid.placements, self.spread.shape, self.spread.stride)
        self.unsharded_param = nn.Parameter(whole, requires_grad=self.sharded_param.requires_grad)

    # --- transitions ---

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

    @torch.no_grad()
    def _unpack_extension(self) -> None:
        """Sets `unsharded_param` to what the extension makes of what it gathered."""
        assert self.extension is not None
        with torch.inference_mode(False):
            whole = self.extension.unpack(self.local, self.dtypes.gathered, self.unsharded_param)
            if whole is not None:  # the first time; without the padding rows
                strides = contiguous_strides(self.shape)
                self._set_unsharded(
                    whole if whole.shape == self.shape else whole.as_strided(self.shape, strides)
                )

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

    @torch.no_grad()
    def to_post_forward(self, mesh: ShardMesh) -> None:
        """UNSHARDED → POST_FORWARD: keeps the rows that this rank would hold if `mesh` were all there is.

        Args:
            mesh: of fewer shards, S; what is registered is a DTensor on it, in the param dtype.

        `post_forward_shard` are those rows, padded to `ceil(d0 / S)`, in memory of their own. As S divides the world
        size, S such chunks never exceed what was gathered.
        """
        n = padded_local_numel(self.shape, mesh.size)
        self.post_forward_shard = self.gathered[mesh.rank * n : (mesh.rank + 1) * n].clone()
        shape = local_shape(self.shape, mesh.size, mesh.rank)
        local = self.post_forward_shard[: prod(shape)].view(shape)
        placements = (Replicate(), Shard(0))
        dtensor = compat.dtensor(local, mesh.mesh, placements, self.spread.shape, self.spread.stride)
        self.register(nn.Parameter(dtensor, requires_grad=self.sharded_param.requires_grad))
        self._free()
        self.gather_mesh = mesh
        self.state = ShardedState.POST_FORWARD

    def _free(self) -> None:
        if self.extension:
            self.extension.free()
        elif self.unsharded_param is not None:
            storage.free(self.gathered)

    def register(self, param: nn.Parameter) -> None:
        """Makes `param` the modules' parameter, at all places (`slots`: a tied parameter has several).

        A module's forward finds it as its attribute of that name, `named_parameters` lists it. It is the very object, not
        a copy. `compat.register_parameter` does this for one module and name, faster than `setattr`.
        """
        for module, name in self.slots:
            compat.register_parameter(module, name, param)

    # --- gradients ---

    def take_grad(self) -> Tensor | None:
        """The gradient to reduce, handed over: nobody but the caller refers to it afterwards, so that it can be freed.

        There are two places for it. Autograd leaves the gradient of a backward in `unsharded_param.grad`
        (`unsharded_param` may be None, if it was never gathered); under tensor parallelism that is a DTensor, and
        `_own_part` makes a tensor of it. Earlier backwards that were not reduced may have left `accumulated_grad`. Both
        are None afterwards.

        Returns:
            `shape`: the sum, made in place of `accumulated_grad` and so in its dtype, the reduce dtype, if there are two;
            if there is one, that one as it is; None if the parameter got no gradient.
        """
        grad, accumulated = None, self.accumulated_grad
        self.accumulated_grad = None
        if self.unsharded_param is not None:
            grad, self.unsharded_param.grad = self.unsharded_param.grad, None
        if isinstance(grad, DTensor):
            grad = self._own_part(grad)
        if accumulated is None or grad is None:
            return grad if accumulated is None else accumulated
        return accumulated.add_(grad)

    def _own_part(self, grad: DTensor) -> Tensor:
        """The part of a tensor-parallel gradient that belongs to this rank's part of the parameter."""
        grid = self.spread.unsharded
        if grid is None:
            return grad
        names = (*self.mesh.dims.shard_names, *self.mesh.dims.replicate_names) if self.mesh.dims else ()
        axes = grid.mesh.mesh_dim_names or ("",) * grid.mesh.ndim
        # over the data-parallel axes it stays a sum to be made: that is what the reduction is for
        wanted = tuple(
            now if name in names else p
            for name, now, p in zip(axes, grad.placements, grid.placements, strict=True)
        )
        return (grad if wanted == grad.placements else grad.redistribute(placements=wanted)).to_local()

    def accumulate_grad(self) -> None:
        """After a backward that is not reduced: keeps the whole gradient, in the reduce dtype.

        Where no reduce dtype is set (`dtypes.reduce` is None) or the gradient has it already, it may stay where it is, in
        `unsharded_param.grad`, and autograd itself adds the next one to it. Otherwise sums of many micro-batches would
        suffer from the param dtype: then the gradient is taken (`take_grad`, which adds to what there is) and kept as
        `accumulated_grad` in the reduce dtype. Once there is an `accumulated_grad`, it takes in all further gradients.

        Does nothing if the backward left no gradient. Nothing is communicated.
        """
        grad = self.unsharded_param.grad if self.unsharded_param is not None else None
        if grad is None or (self.accumulated_grad is None and self.dtypes.reduce in (None, grad.dtype)):
            return
        taken = self.take_grad()
        assert taken is not None
        self.accumulated_grad = taken if self.dtypes.reduce is None else taken.to(self.dtypes.reduce)

    def drop_grads(self) -> None:
        """Forgets gradients that were not reduced, or not over the replicas; no communication."""
        self.accumulated_grad = self.partial_grad = None
        if self.unsharded_param is not None:
            self.unsharded_param.grad = None

    @property
    def has_unreduced_grad(self) -> bool:
        """Whether a backward left a gradient that was not reduced."""
        param = self.unsharded_param
        return self.accumulated_grad is not None or (param is not None and param.grad is not None)

    def add_sharded_grad(self, grad: Tensor) -> None:
        """Adds the reduced gradient of this rank's rows to `sharded_param.grad`.

        Args:
            grad: `local_shape`, original dtype: the mean over all ranks. It may become the gradient's memory.

        `sharded_param.grad` is a DTensor laid out as the parameter (`compat.wrap_like(grad, sharded_param)`). If there is
        none yet, that of `grad` is it, without a copy; if there is one, of an earlier reduction that the user has not
        cleared, `grad` is added to its local part (`local_of`) in place.

        Before that, `_to_memory_of_grads(grad, used_at_once)` gives what takes the place of `grad`: itself, or its copy where
        gradients live. `used_at_once` says whether its elements are read before this returns, that is, whether there is a
        gradient to add them to, or a hook. After all, the parameter's post-accumulate-grad hooks
        (`compat.post_accumulate_grad_hooks` lists them), which autograd does not call here, are called with the parameter.
        """
        dtensor = self.sharded_param
        assert isinstance(dtensor, DTensor)
        hooks = compat.post_accumulate_grad_hooks(dtensor)
        grad = self._to_memory_of_grads(grad, used_at_once=bool(hooks) or dtensor.grad is not None)
        if dtensor.grad is None:
            dtensor.grad = compat.wrap_like(grad, dtensor)
        else:
            assert isinstance(dtensor.grad, DTensor)
            local_of(dtensor.grad).add_(grad)
        for hook in hooks:
            hook(dtensor)

    def _to_memory_of_grads(self, grad: Tensor, used_at_once: bool) -> Tensor:
        """`grad`, or its copy in host memory if gradients are offloaded; the host waits for the copy if it is used at once."""
        if not isinstance(self.offload, CPUOffloadPolicy):
            return grad
        return grad.to("cpu", non_blocking=self.offload.pin_memory and not used_at_once)

    # --- parameters exchanged by the user ---

    @torch.no_grad()
    def adopt_registered(self) -> None:
        """Takes over what is registered now, after `to`, `to_empty` or `load_state_dict` exchanged it.

        The registered parameter becomes `sharded_param`. Its memory becomes `padded_shard`, unless it already is, or
        lacks the padding: then the rows move into a new one.

        Does nothing while another form than the sharded one is registered.

        Raises:
            UsageError: it is not a DTensor of the same global shape, cut in the same way.
        """
        if self.state is not ShardedState.SHARDED:
            return
        param, grid = self.slots[0].registered(), self.spread.sharded
        if (
            not isinstance(param, DTensor)
            or (tuple(param.shape), tuple(param.placements)) != (self.spread.shape, grid.placements)
            or tuple(local_of(param).shape) != tuple(self.local_shape)
        ):
            raise UsageError(
                f"parameter {self.fqn!r}",
                expected=f"a DTensor of shape {self.spread.shape}, placements {grid.placements}",
                got=f"{type(param).__name__} of shape {tuple(param.shape)}"
                + (f", placements {param.placements}" if isinstance(param, DTensor) else ""),
                remedy="Assign DTensors to a sharded model, such as those of its own state_dict.",
            )
        if param is not self.sharded_param:
            self.sharded_param = param
            self.register(param)
        self.dtypes = resolve_dtypes(param.dtype, self.policy)
        self.extension = self.extension or Extension.of(self.local, self.fqn)
        if self.extension is None:
            self.hold_rows(param)

    @torch.no_grad()
    def hold_rows(self, param: DTensor) -> None:
        """Makes the memory of `param`, the registered parameter, the one that gathers read: `padded_shard`.

        `adopt_registered` calls it, for a parameter with this rank's rows, `local_shape`, in its local part (`local_of`).
        That comes from the user, or from `to_empty`, and knows nothing of padding.

        Afterwards, the local part is the front of `self.padded_shard` (Note [Padding lives in the shard]): an optimizer that
        updates the one updates the other. `padded_shard` is flat, of `self.padded_numel` elements in the dtype of the rows,
        where `self._on_shard_device(tensor)` puts it: the rows, as they were, then zeros. There are three cases.

        - The local part begins where `padded_shard` does (`address_of(tensor)` says where): nothing has changed, nothing to do.
        - The rows need no padding, are contiguous, and `_on_shard_device` returns the very tensor that it is given: their
          own memory becomes `padded_shard`, without a copy.
        - Otherwise there is new memory of shape `padded_local_shape(self.rows, self.mesh.size)`: `self.rows` is the shape
          that ranks cut along dim 0, `self.mesh.size` the number of these ranks. The rows are copied to its front, as many
          elements as `self.local_shape` has, and that front, in this shape, becomes the local part of `param`
          (`compat.replace_local(param, front)`), which stays the object that it is. Nobody keeps the memory where the rows
          were before.
        """
        rows = local_of(param)
        if address_of(rows) == address_of(self.padded_shard):
            return
        if rows.numel() == self.padded_numel and rows.is_contiguous() and self._on_shard_device(rows) is rows:
            self.padded_shard = rows.view(-1)
            return
        padded_shape = padded_local_shape(self.rows, self.mesh.size)
        self.padded_shard = self._on_shard_device(rows.new_zeros(padded_shape)).view(-1)
        front = self.padded_shard[: self.local_numel].view(self.local_shape)
        front.copy_(rows)
        replace_local(param, front)

    def __repr__(self) -> str:
        return f"FSDPParam({self.fqn}, {tuple(self.shape)}, {self.state.name})"


def address_of(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    """Where in memory a tensor begins, and how it is read."""
    return storage_key(tensor), int(tensor.storage_offset()), tensor.dtype
