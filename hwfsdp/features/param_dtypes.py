"""Parameters that compute in their own dtype, such as norms that stay in fp32 among layers in bf16. No seam.

A group can gather several dtypes in one collective (`core.collectives`). So this feature only chooses a policy for each parameter
(`Call.policies`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from hwfsdp.errors import UsageError
from hwfsdp.features.call import Call


def choose(call: Call) -> None:
    """Make a policy for each parameter, from the user's function.

    Raises:
        UsageError: the function returned a dtype that is neither the parameter's nor `param_dtype`.
    """
    override = getattr(call.mp_policy, "param_dtype_override_fn", None)
    if override is not None:
        call.policies = [policy_of(param, fqn, call.mp_policy, override) for param, fqn, _ in call.found]


def policy_of(param: nn.Parameter, fqn: str, policy: Any, override: Callable[[nn.Parameter], Any]) -> Any:
    """Return the policy of one parameter."""
    dtype = override(param)
    if dtype not in (None, policy.param_dtype, param.dtype):
        raise UsageError(
            f"param_dtype_override_fn: parameter {fqn!r}",
            expected=f"None, or a dtype: {policy.param_dtype} or {param.dtype}",
            got=repr(dtype),
            remedy="Return the parameter's own dtype to keep it, None for the policy's.",
        )
    return dataclasses.replace(policy, param_dtype=dtype or policy.param_dtype, param_dtype_override_fn=None)
