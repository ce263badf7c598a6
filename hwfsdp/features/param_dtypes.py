"""Parameters that compute in a dtype of their own, such as norms that stay in fp32 among layers in bf16. Seam: the form.

A group gathers several dtypes in one collective (`core.collectives`), so a policy for each parameter is all it takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hwfsdp.core import precision
from hwfsdp.errors import UsageError
from hwfsdp.features.call import Call


@dataclass(frozen=True)
class MixedPrecisionPolicy(precision.MixedPrecisionPolicy):
    """dtypes of one module.

    Attributes:
        param_dtype: of the unsharded parameters, hence of gather and compute. None: the original dtype.
        reduce_dtype: of the gradient reduction. None: with torch 2.15, the `grad_dtype` of each parameter as set before the first
            forward, which is its original dtype unless set; before, the dtype of the gradients, that is, the param dtype.
        output_dtype: floating-point outputs of forward are cast to it. None: left alone.
        cast_forward_inputs: whether floating-point inputs of forward are cast to `param_dtype`.
        param_dtype_override_fn: called once for each parameter. It returns the parameter's own dtype, in which the parameter is
            to stay, or None (or `param_dtype`) for `param_dtype`; the same on every rank. With every torch, as of 2.15.
    """

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )


def choose(call: Call) -> None:
    """A policy for each parameter, in which nothing is left to ask for.

    Raises:
        UsageError: the function returned a dtype that is neither the parameter's nor `param_dtype`.
    """
    override = getattr(call.mp_policy, "param_dtype_override_fn", None)
    if override is not None:
        call.policies = [policy_of(param, fqn, call.mp_policy, override) for param, fqn, _ in call.found]


def policy_of(param: nn.Parameter, fqn: str, policy: Any, override: Callable[[nn.Parameter], Any]) -> Any:
    """The policy of one parameter."""
    dtype = override(param)
    if dtype not in (None, policy.param_dtype, param.dtype):
        raise UsageError(
            f"param_dtype_override_fn: parameter {fqn!r}",
            expected=f"None, or a dtype: {policy.param_dtype} or {param.dtype}",
            got=repr(dtype),
            remedy="Return the parameter's own dtype to keep it, None for the policy's.",
        )
    return dataclasses.replace(policy, param_dtype=dtype or policy.param_dtype, param_dtype_override_fn=None)
