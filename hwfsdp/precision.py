"""Which dtype for what: policies and casts.

Three dtypes meet in one parameter. The *original* dtype is that of the shard, which the optimizer updates. The
*param* dtype is what is gathered and computed with. The *reduce* dtype is what gradients are summed in. Gather
in bf16, reduce in fp32, step in fp32 is the usual choice: half the bytes where they are cheap to lose, full
precision where errors would add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hwfsdp.nested import map_tensors


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """dtypes of one module.

    Attributes:
        param_dtype: of the unsharded parameters, hence of gather and compute. None: the original dtype.
        reduce_dtype: of the gradient reduction. None: the dtype of the gradients, that is, the param dtype.
        output_dtype: floating-point outputs of forward are cast to it. None: left alone.
        cast_forward_inputs: whether floating-point inputs of forward are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: shards live on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, sharded gradients and optimizer state live in host memory.

    Attributes:
        pin_memory: page-lock them, so that copies to and from the device overlap with compute.
    """

    pin_memory: bool = True


class Dtypes(NamedTuple):
    """dtypes of one parameter; None means that no cast is needed there."""

    orig: torch.dtype
    param: torch.dtype | None
    reduce: torch.dtype | None

    @property
    def gathered(self) -> torch.dtype:
        """The dtype of the unsharded parameter."""
        return self.param or self.orig


def resolve_dtypes(orig: torch.dtype, policy: MixedPrecisionPolicy) -> Dtypes:
    """The dtypes of a parameter of dtype `orig` under `policy`, casts that change nothing left out.

    Returns:
        `orig` as given. `param`: the policy's; None if it equals `orig`, or if `orig` is not floating-point: an integer
        parameter is never cast. `reduce`: the policy's; None if it equals the policy's param dtype, since gradients come in
        that dtype already. A policy without any dtype gives (orig, None, None).
    """
    reduce = None if policy.reduce_dtype == policy.param_dtype else policy.reduce_dtype
    param = None if policy.param_dtype == orig or not orig.is_floating_point else policy.param_dtype
    return Dtypes(orig, param, reduce)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with every floating-point tensor in `dtype`.

    Args:
        tree: a tensor, or lists, tuples, dicts, dataclasses, … of them, as forwards take and return; `map_tensors` maps a
            function over the tensors in it.

    Integer, boolean and complex tensors, floating-point ones that have the dtype already, and whatever is no tensor come
    back as the same object. Autograd sees through the cast.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast, tree)
