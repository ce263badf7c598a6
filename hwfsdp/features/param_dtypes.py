"""Parameters that compute in their own dtype, such as norms that stay in fp32 among layers in bf16.

A group can gather several dtypes in one collective (`core.collectives`). So this feature only chooses a policy for each parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hwfsdp.core.api import Unclaimed
from hwfsdp.errors import UsageError


def policies_of(found: Sequence[Unclaimed], policy: Any) -> list[Any]:
    """Return the policy of each parameter: `policy`, or what its function says.

    Raises:
        UsageError: the function returned a dtype that is neither the parameter's nor `param_dtype`.
    """
    override = getattr(policy, "param_dtype_override_fn", None)
    if override is None:
        return [policy for _ in found]
    return [policy_of(param, name, policy, override) for param, name, _ in found]


def policy_of(param: nn.Parameter, name: str, policy: Any, override: Callable[[nn.Parameter], Any]) -> Any:
    """Return the policy of one parameter."""
    dtype = override(param)
    if dtype not in (None, policy.param_dtype, param.dtype):
        raise UsageError(
            f"param_dtype_override_fn: parameter {name!r}",
            expected=f"None, or a dtype: {policy.param_dtype} or {param.dtype}",
            got=repr(dtype),
            remedy="Return the parameter's own dtype to keep it, None for the policy's.",
        )
    return dataclasses.replace(policy, param_dtype=dtype or policy.param_dtype, param_dtype_override_fn=None)
