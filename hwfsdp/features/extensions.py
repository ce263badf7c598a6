"""Parameters that travel in their own form.

A sharded parameter's local part may be a tensor subclass that defines how it is gathered. For example, it may be quantized:
instead of one fp32 tensor, it gathers one tensor of int8 values and one of scales. It has two methods, which torch's FSDP2
defined:

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (inputs, metadata)
        Returns the tensors to gather. For an unevenly sharded parameter they have the shape of the padded shard. A method
        that takes only `mesh` is called with only that.
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> (unsharded, inner) or None
        Makes the unsharded tensor from the gathered outputs. Each output has world size times as many rows as its input.
        `inner` are tensors with their own memory, which is freed together with the unsharded tensor. Later calls get
        `out`, the tensor that the first call made, to fill it again.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.core.layout import allocate, free
from hwfsdp.core.param import FSDPParam
from hwfsdp.core.private_torch import local_of
from hwfsdp.errors import RefusedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hwfsdp.core.mesh import ShardMesh
    from hwfsdp.features.hybrid_sharding import HybridMesh

METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def has_gather_methods(local: Tensor, name: str) -> bool:
    """True if a local part defines how it is gathered.

    Raises:
        RefusedError: it has only one of the two methods.
    """
    missing = [method for method in METHODS if not hasattr(local, method)]
    if len(missing) == 1:
        raise RefusedError(
            f"parameter {name!r}",
            expected=f"both {' and '.join(METHODS)}, or neither",
            got=f"{type(local).__name__} without {missing[0]}",
            remedy="Define the missing method.",
        )
    return not missing


def strides_of(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    return torch.empty(shape, device="meta").stride()


class ExtensionParam(FSDPParam):
    """A parameter whose local part may have the two methods. The user may replace the local part later.

    Attributes:
        is_extension: True if the local part has the two methods.
        tensors: memory that the gathers write to, one flat tensor per input; it comes and goes.
        inner: other memory that the unsharded tensor holds.
    """

    is_extension = False

    @property
    def mesh(self) -> HybridMesh:
        """The ranks over which it is sharded."""
        return cast("HybridMesh", self.layout.mesh)

    @property
    def local(self) -> Tensor:
        """This rank's rows: the local part of the sharded parameter."""
        return local_of(self.sharded_param)

    def shard(self, whole: Tensor, requires_grad: bool) -> None:
        super().shard(whole, requires_grad)
        self.look_at_local()

    def look_at_local(self) -> None:
        """Find out what travels. If the local part is of another type now, the next gather makes a new whole parameter."""
        self.accumulated_grad, self.unsharded_param = self.take_grad(), None
        self.is_extension, self._kind = has_gather_methods(self.local, self.name), type(self.local)
        self.gathered, self._metadata = None, None
        self.tensors: list[Tensor] = []
        self.inner: list[Tensor] = []
        self._inputs: list[tuple[torch.Size, torch.dtype]] = []  # of the last gather

    def hold_rows(self, param: DTensor) -> None:
        """Hold the rows of `param`. An extension's gathers read them where they are."""
        if (
            type(self.local) is not self._kind
            or has_gather_methods(self.local, self.name) != self.is_extension
        ):
            self.look_at_local()
        if not self.is_extension:
            super().hold_rows(param)

    def gather_inputs(self) -> list[tuple[Tensor, torch.dtype]]:
        """Return the tensors that the local part wants to gather, each flat."""
        if not self.is_extension:
            return super().gather_inputs()
        layout, local = self.layout, self.local
        if not local.is_meta and local.device != layout.mesh.device:
            local = local.to(layout.mesh.device, non_blocking=True)
        inputs, self._metadata = self.call_pre_all_gather(local)
        self._inputs = [(t.shape, t.dtype) for t in inputs]
        return [(t.reshape(-1), t.dtype) for t in inputs]

    def call_pre_all_gather(self, local: Any) -> tuple[Sequence[Tensor], Any]:
        """Call the first of the two methods.

        Raises:
            RefusedError: it has other parameters, or returns tensors of another shape than the padded shard's.
        """
        layout = self.layout
        arguments = (
            shard_axis(layout.mesh),
            layout.shape,
            strides_of(layout.shape),
            self.places[0].module,
            self.policy,
        )
        signature = inspect.signature(local.fsdp_pre_all_gather)
        if len(signature.parameters) not in (1, len(arguments)):
            raise RefusedError(
                f"{type(local).__name__}.fsdp_pre_all_gather",
                expected="the parameters (self, mesh, outer_size, outer_stride, module, mp_policy), or (self, mesh)",
                got=str(signature),
                remedy="Add the missing parameters, also if the method does not use them.",
            )
        only_mesh = len(signature.parameters) == 1
        inputs, metadata = local.fsdp_pre_all_gather(*(arguments[:1] if only_mesh else arguments))
        padded = tuple(layout.padded_shape)
        uneven = tuple(local.shape) != padded
        if uneven and not only_mesh and any(tuple(t.shape) != padded for t in inputs):
            raise RefusedError(
                f"{type(local).__name__}.fsdp_pre_all_gather",
                expected=f"tensors of the padded shard's shape, {padded}, for an unevenly sharded parameter",
                got=str([tuple(t.shape) for t in inputs]),
                remedy="Pad dim 0 with zeros; rows beyond the parameter's end are dropped after the gather.",
            )
        return inputs, metadata

    def allocate_whole(self) -> list[Tensor]:
        if not self.is_extension:
            return super().allocate_whole()
        mesh = self.layout.mesh
        if not self.tensors:
            self.tensors = [
                torch.empty(mesh.size * s.numel(), dtype=d, device=mesh.device) for s, d in self._inputs
            ]
        for tensor in self.tensors:
            allocate(tensor)
        return [tensor.view(mesh.size, -1) for tensor in self.tensors]

    def to_unsharded(self) -> None:
        if self.is_extension:
            self.make_whole()
        super().to_unsharded()

    def make_whole(self) -> None:
        """Let the local part make the unsharded tensor. The first time, cut off the padding rows."""
        shape = self.layout.shape
        local: Any = self.local
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches autograd on
            for tensor in self.inner:
                allocate(tensor)
            aliases = [t.data for t in self.tensors]  # `core.layout`, Note [Writing without being noticed]
            outputs = tuple(t.view(-1, *s[1:]) for t, (s, _) in zip(aliases, self._inputs, strict=True))
            metadata, self._metadata = self._metadata, None
            dtype, out = self.dtypes.compute, self.unsharded_param
            if out is not None:
                local.fsdp_post_all_gather(outputs, metadata, dtype, out=out)
                return
            whole, inner = local.fsdp_post_all_gather(outputs, metadata, dtype)
            self.inner = list(inner)
            strides = strides_of(shape)
            self.set_unsharded(whole if whole.shape == shape else whole.as_strided(shape, strides))

    def free_whole(self) -> None:
        super().free_whole()
        for tensor in (*self.tensors, *self.inner):
            free(tensor)


def shard_axis(mesh: ShardMesh) -> DeviceMesh:
    """Return the 1D mesh of the ranks that hold different rows."""
    names = mesh.mesh.mesh_dim_names
    return mesh.mesh[names[-1]] if mesh.mesh.ndim == 2 and names else mesh.mesh
