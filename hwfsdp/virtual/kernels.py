"""Operators that run differently on a device than on a CPU.

Virtual tensors say that they are on the CPU, so torch chooses the kernels that it has for a CPU. For most operators that
makes no difference to shapes and bytes. Where it does, the call is changed here to what a GPU would run:

- attention with dropout is one fused kernel, too; a CPU would build the whole matrix of weights;
- dropout is one kernel, which keeps a mask of bytes; a CPU draws, divides and multiplies;
- recurrent layers are products and cells, not one opaque operator of a CPU's library (`device_kernels`).
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
_attention, _dropout = F.scaled_dot_product_attention, F.dropout


@functools.wraps(_attention)
def fused_attention(*args: Any, **kwargs: Any) -> Tensor:
    """`F.scaled_dot_product_attention` by a kernel that drops weights as it goes: shapes and bytes as without."""
    if len(args) > _DROPOUT:
        args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :])
    return _attention(*args, **{**kwargs, **({"dropout_p": 0.0} if "dropout_p" in kwargs else {})})


@functools.wraps(_dropout)
def fused_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout` by one kernel."""
    if inplace or not training or not 0.0 < p < 1.0:
        return _dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


@contextmanager
def device_kernels() -> Iterator[None]:
    """In the block, torch's functions call what a device would run."""
    with ExitStack() as stack:
        cpu_library = torch.backends.mkldnn
        stack.callback(cpu_library.set_flags, cpu_library.set_flags(False)[0])
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", fused_attention))
        stack.enter_context(mock.patch.object(F, "dropout", fused_dropout))
        yield
