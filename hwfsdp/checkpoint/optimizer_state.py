"""The state that a fresh optimizer will have, so that a checkpoint can be loaded into it.

Note [One parameter at a time]
    Only the step of an optimizer knows which state the optimizer keeps. So we make a step with gradients that are zero. We make
    it for each parameter alone. So we need a copy of only one parameter to restore its bits afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hwfsdp.checkpoint.messages import refusal, told
from hwfsdp.checkpoint.tensors import part_of
from hwfsdp.compat import wrap_like
from hwfsdp.errors import FSDPError, UnsupportedError


@torch.no_grad()
def init_optimizer_state(optimizer: Optimizer) -> None:
    """Give a fresh optimizer the state that it will have, so that a checkpoint can be loaded into it.

    Every parameter that requires grad and has no state yet gets state (Note [One parameter at a time]): moments are zero, and counts
    of steps are zero. Parameters keep every bit, gradients and groups stay the same, and hooks are not called. There is no
    communication, unless the optimizer's step communicates. The state of parameters on the meta device is on the meta device, too.

    Args:
        optimizer: of `torch.optim`, of `hwfsdp.optim`, or any other optimizer whose step skips parameters without gradients.

    Raises:
        UnsupportedError: the step needs a closure (as LBFGS does), or refuses dense gradients of zeros.
            Then the optimizer stays as it was.
    """
    step = _plain_step(optimizer)
    done: list[Tensor] = []
    try:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad and not optimizer.state.get(param):
                    done.append(param)
                    _step_alone(optimizer, step, group, param)
    except Exception as error:
        for param in done:
            optimizer.state.pop(param, None)
        if isinstance(error, FSDPError):
            raise
        raise _refusal(optimizer, "a step over gradients that are dense and zero", told(error)) from error


def _refusal(optimizer: Optimizer, expected: str, got: str) -> FSDPError:
    what, remedy = type(optimizer).__name__, "Take one training step, and load the checkpoint afterwards."
    return refusal(f"init_optimizer_state({what})", expected, got, remedy, UnsupportedError)


def _plain_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the step of the optimizer's class, without torch's wrapper that calls hooks."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        expected = "an optimizer whose step can be made without a closure"
        raise _refusal(optimizer, expected, "one that evaluates the model itself")
    return step  # type: ignore[no-any-return]


def _step_alone(optimizer: Optimizer, step: Callable[..., Any], group: dict[str, Any], param: Tensor) -> None:
    """Make a step of this parameter alone, with a gradient of zeros and without weight decay. Keep its bits; count no step."""
    groups, params, grad = optimizer.param_groups, group["params"], param.grad
    memory, decay = part_of(param), group.get("weight_decay")
    bits, zeros = memory.detach().clone(), torch.zeros_like(memory)
    try:
        optimizer.param_groups = [group]
        group["params"] = [param]
        if decay is not None:
            group["weight_decay"] = 0
        param.grad = wrap_like(zeros, param) if isinstance(param, DTensor) else zeros
        step(optimizer)
    finally:
        param.grad = grad
        group["params"], optimizer.param_groups = params, groups
        if decay is not None:
            group["weight_decay"] = decay
        memory.copy_(bits)
    state = optimizer.state.get(param, {})
    if isinstance(count := state.get("step"), Tensor):
        count.zero_()
    elif count is not None:
        state["step"] = 0
