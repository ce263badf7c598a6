"""Parameters that travel in their own form. Seam: the form.

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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hwfsdp.core import form as storage
from hwfsdp.core.compat import local_of
from hwfsdp.core.form import Form
from hwfsdp.core.param import FSDPParam
from hwfsdp.errors import RefusedError
from hwfsdp.features.call import Call
from hwfsdp.features.lookup import shard_axis

METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def check_params(call: Call) -> None:
    """Refuse a tensor that has only one of the two methods."""
    for param, fqn, _ in call.found:
        has_methods(local_of(param), fqn)


def choose(call: Call) -> None:
    """Choose the form of a parameter by its local part, which may be replaced later."""
    otherwise = call.make_form
    call.make_form = lambda param: make_form(param, otherwise)


def make_form(param: FSDPParam, otherwise: Callable[[FSDPParam], Form]) -> Form:
    """Make the extension's form if the local part has the two methods, else the usual form."""
    return ExtensionForm(param) if has_methods(param.local, param.fqn) else otherwise(param)


def has_methods(local: Tensor, fqn: str) -> bool:
    """True if a local part defines how it is gathered.

    Raises:
        RefusedError: it has only one of the two methods.
    """
    missing = [name for name in METHODS if not hasattr(local, name)]
    if len(missing) == 1:
        raise RefusedError(
            f"parameter {fqn!r}",
            expected=f"both {' and '.join(METHODS)}, or neither",
            got=f"{type(local).__name__} without {missing[0]}",
            remedy="Define the missing method.",
        )
    return not missing


def strides_of(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    return torch.empty(shape, device="meta").stride()


class ExtensionForm(Form):
    """The form of a parameter whose local part has the two methods.

    Attributes:
        tensors: memory that the gathers write to, one flat tensor per input; it comes and goes.
        inner: other memory that the unsharded tensor holds.
    """

    reads_rows = False

    def __init__(self, param: FSDPParam) -> None:
        super().__init__(param)
        self.tensors: list[Tensor] = []
        self.inner: list[Tensor] = []
        self._inputs: list[tuple[torch.Size, torch.dtype]] = []  # of the last gather
        self._metadata: Any = None

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [dtype for _, dtype in self._inputs]

    def inputs(self) -> list[Tensor]:
        """Return the tensors that the local part wants to gather, each flat."""
        param, layout = self.param, self.param.layout
        local: Any = param.local
        if not local.is_meta and local.device != layout.mesh.device:
            local = local.to(layout.mesh.device, non_blocking=True)
        arguments = (
            shard_axis(layout.mesh),
            layout.shape,
            strides_of(layout.shape),
            param.places[0].module,
            param.policy,
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
        inputs, self._metadata = local.fsdp_pre_all_gather(*(arguments[:1] if only_mesh else arguments))
        padded = tuple(layout.padded_shape)
        uneven = tuple(local.shape) != padded
        if uneven and not only_mesh and any(tuple(t.shape) != padded for t in inputs):
            raise RefusedError(
                f"{type(local).__name__}.fsdp_pre_all_gather",
                expected=f"tensors of the padded shard's shape, {padded}, for an unevenly sharded parameter",
                got=str([tuple(t.shape) for t in inputs]),
                remedy="Pad dim 0 with zeros; rows beyond the parameter's end are dropped after the gather.",
            )
        self._inputs = [(t.shape, t.dtype) for t in inputs]
        return [t.reshape(-1) for t in inputs]

    def outputs(self) -> list[Tensor]:
        mesh = self.param.layout.mesh
        if not self.tensors:
            self.tensors = [
                torch.empty(mesh.size * s.numel(), dtype=d, device=mesh.device) for s, d in self._inputs
            ]
        for tensor in self.tensors:
            storage.allocate(tensor)
        return [tensor.view(mesh.size, -1) for tensor in self.tensors]

    def finish(self) -> None:
        """Let the local part make the unsharded tensor. The first time, cut off the padding rows."""
        param, shape = self.param, self.param.layout.shape
        local: Any = param.local
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches autograd on
            for tensor in self.inner:
                storage.allocate(tensor)
            aliases = [t.data for t in self.tensors]  # `form`, Note [Writing without being noticed]
            outputs = tuple(t.view(-1, *s[1:]) for t, (s, _) in zip(aliases, self._inputs, strict=True))
            metadata, self._metadata = self._metadata, None
            dtype, out = param.dtypes.compute, param.unsharded_param
            if out is not None:
                local.fsdp_post_all_gather(outputs, metadata, dtype, out=out)
                return
            whole, inner = local.fsdp_post_all_gather(outputs, metadata, dtype)
            self.inner = list(inner)
            strides = strides_of(shape)
            param.set_unsharded(whole if whole.shape == shape else whole.as_strided(shape, strides))

    def free(self) -> None:
        for tensor in (*self.tensors, *self.inner) if not self.param.keeps_memory else ():
            storage.free(tensor)
