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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hwfsdp.core.layout import allocate, free
from hwfsdp.errors import RefusedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hwfsdp.core.mesh import ShardMesh
    from hwfsdp.features.feature_param import FSDPParam

METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def gather_class(local: Tensor, name: str) -> type | None:
    """Return the class of a local part that defines how it is gathered; None for any other.

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
    return None if missing else type(local)


def strides_of(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    return torch.empty(shape, device="meta").stride()


class Extension:
    """What a parameter that travels in its own form keeps from one of the two methods to the other, and between gathers.

    Attributes:
        kind: the class of the local part. The user may replace the local part; one of another class needs a new `Extension`.
        tensors: memory that the gathers write to, one flat tensor per input; it comes and goes.
        inner: other memory that the unsharded tensor holds.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.tensors: list[Tensor] = []
        self.inner: list[Tensor] = []
        self._metadata: Any = None
        self._inputs: list[tuple[torch.Size, torch.dtype]] = []  # of the last gather

    def gather_inputs(self, param: FSDPParam) -> list[tuple[Tensor, torch.dtype]]:
        """Return the tensors that the local part wants to gather, each flat."""
        device, local = param.layout.mesh.device, param.local
        if not local.is_meta and local.device != device:
            local = local.to(device, non_blocking=True)
        inputs, self._metadata = call_pre_all_gather(param, local)
        self._inputs = [(t.shape, t.dtype) for t in inputs]
        return [(t.reshape(-1), t.dtype) for t in inputs]

    def allocate(self, mesh: ShardMesh) -> list[Tensor]:
        """Allocate memory for the gathered data; see `core.param.FSDPParam.allocate_whole`."""
        if not self.tensors:
            self.tensors = [
                torch.empty(mesh.size * s.numel(), dtype=d, device=mesh.device) for s, d in self._inputs
            ]
        for tensor in self.tensors:
            allocate(tensor)
        return [tensor.view(mesh.size, -1) for tensor in self.tensors]

    def make_whole(self, param: FSDPParam) -> None:
        """Let the local part make the unsharded tensor. The first time, cut off the padding rows."""
        shape = param.layout.shape
        local: Any = param.local
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches autograd on
            for tensor in self.inner:
                allocate(tensor)
            aliases = [t.data for t in self.tensors]  # `core.layout`, Note [Writing without being noticed]
            outputs = tuple(t.view(-1, *s[1:]) for t, (s, _) in zip(aliases, self._inputs, strict=True))
            metadata, self._metadata = self._metadata, None
            dtype, out = param.dtypes.compute, param.unsharded_param
            if out is not None:
                local.fsdp_post_all_gather(outputs, metadata, dtype, out=out)
                return
            whole, inner = local.fsdp_post_all_gather(outputs, metadata, dtype)
            self.inner = list(inner)
            param.set_unsharded(whole if whole.shape == shape else whole.as_strided(shape, strides_of(shape)))

    def free(self) -> None:
        for tensor in (*self.tensors, *self.inner):
            free(tensor)


def call_pre_all_gather(param: FSDPParam, local: Any) -> tuple[Sequence[Tensor], Any]:
    """Call the first of the two methods. `local`: the local part, on the mesh's device.

    Raises:
        RefusedError: it has other parameters, or returns tensors of another shape than the padded shard's.
    """
    layout = param.layout
    shape, module = layout.shape, param.places[0].module
    arguments = shard_axis(layout.mesh), shape, strides_of(shape), module, param.policy
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


def shard_axis(mesh: ShardMesh) -> DeviceMesh:
    """Return the 1D mesh of the ranks that hold different rows."""
    names = mesh.mesh.mesh_dim_names
    return mesh.mesh[names[-1]] if mesh.mesh.ndim == 2 and names else mesh.mesh
