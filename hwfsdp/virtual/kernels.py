"""Operators that run differently on a device than on a CPU.

Virtual tensors are on the CPU for torch, so torch chooses its CPU kernels. For most operators, shapes and bytes are the same
as on a GPU. For the others, this module replaces the call by a GPU's kernel:

- attention with dropout is one fused kernel, too; a CPU would build the whole matrix of weights;
- dropout is one kernel that keeps a mask of bytes; a CPU draws, divides and multiplies in separate kernels;
- the backward of SiLU is one kernel; without a kernel for tensors without values, torch would multiply and add six times;
- recurrent layers are matrix products and cells, not one opaque operator of a CPU's library (`device_kernels`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

_DROPOUT = 4  # place of `dropout_p` in the arguments of attention
_attention, _dropout, _silu = F.scaled_dot_product_attention, F.dropout, F.silu


@functools.wraps(_attention)
def fused_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Run `F.scaled_dot_product_attention` as one fused kernel. Dropout inside the kernel does not change its shapes and bytes."""
    if len(args) > _DROPOUT:
        args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :])
    return _attention(*args, **{**kwargs, **({"dropout_p": 0.0} if "dropout_p" in kwargs else {})})


@functools.wraps(_dropout)
def fused_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run `F.dropout` as one kernel."""
    if inplace or not training or not 0.0 < p < 1.0:
        return _dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


class FusedSiLU(torch.autograd.Function):
    """SiLU whose backward reads the gradient and the input once, and writes once, as a device's kernel does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        output: Tensor = _silu(x)
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad.mul(x)  # the same shapes and bytes; there are no values


@functools.wraps(_silu)
def fused_silu(input: Tensor, inplace: bool = False) -> Tensor:
    """Run `F.silu` with one kernel in each direction."""
    output: Tensor = _silu(input, True) if inplace else FusedSiLU.apply(input)  # type: ignore[no-untyped-call]
    return output


@contextmanager
def device_kernels() -> Iterator[None]:
    """Make torch's functions inside the block call the kernels of a device."""
    with ExitStack() as stack:
        cpu_library = torch.backends.mkldnn
        stack.callback(cpu_library.set_flags, cpu_library.set_flags(False)[0])
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", fused_attention))
        stack.enter_context(mock.patch.object(F, "dropout", fused_dropout))
        stack.enter_context(mock.patch.object(F, "silu", fused_silu))
        yield
