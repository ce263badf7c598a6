"""An optimizer step over local parts: torch's optimizers without a dispatch per operator.

    from hwfsdp.optim import AdamW

The parameters of a sharded model are DTensors. Every operator on a DTensor goes through a dispatch, which finds out where the
result lies before anything is computed. AdamW runs a dozen operators per parameter, and the answer is always the same: where the
parameter lies. If an update treats every element by itself, a rank can update its rows without the other ranks. So the classes
here do one thing differently: during a step, the parameter groups and the state hold the local parts of the DTensors.

Everything else is torch's own. The classes derive from torch.optim's, take the same arguments, and compute the same bits. Between
steps, `param_groups` has the DTensors, and `state` has DTensors laid out like their parameter. Each can load the other's
checkpoints. `local` makes such a class of any other optimizer.

Note [What a step borrows]
    A step reads and writes `group["params"]`, `p.grad` and `self.state[p]`. It gets stand-ins for the parameters: a leaf over the
    memory of each local part, as it is at that moment (a model may replace it at any time), with the local part of the gradient.
    And it gets a copy of the state in which local parts take the place of DTensors. Writes in place reach the real memory. When
    the step has ended, even by an exception, new values in the state are taken over: a tensor shaped like the local part becomes
    a DTensor; any other value, such as the number of steps, stays as it is. Hooks run before and after all this, and a closure
    runs before it.

Note [What lies elsewhere]
    A gradient or a state tensor may have other placements than its parameter, such as a sum that tensor parallelism has not made
    yet. Then it is redistributed first, by a collective that torch would run at an operator. In two cases, a step uses the
    DTensors themselves, as slowly as torch does. First, if it is differentiable or being compiled. Second, if the local part of a
    parameter says too little: the parameter is a partial sum, or has no dimensions (then its state looks like a count of steps),
    or its gradient is not a DTensor on the parameter's mesh.

Note [Which implementation]
    `foreach=None` means the same as for plain tensors: one kernel for many parameters on an accelerator, a loop on the CPU. Over
    DTensors, torch always uses the loop. On the CPU both give the same bits. On an accelerator, compare runs with the same flag.
    Some flags work only here: over DTensors, torch 2.13 has no fused SGD and Adagrad, and no Rprop.

Left out: optimizers that are not element-wise. For torch's own optimizers, this module knows which ones these are. For others,
the caller of `local` must know.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, optim
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hwfsdp.compat import dtensor, local_of, wrap_like
from hwfsdp.errors import UsageError

__all__ = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "LocalStep"]
__all__ += ["NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "local"]

_WHY_NOT: dict[type[Optimizer], str] = {
    optim.Adafactor: "which takes means over whole rows and columns",
    optim.LBFGS: "which takes inner products over all parameters",
    optim.Muon: "which orthogonalizes whole matrices",
    optim.SparseAdam: "which takes sparse gradients",
}

Class = TypeVar("Class", bound=type[Optimizer])


class LocalStep(Optimizer):
    """An optimizer made by `local`: its `step` runs over local parts.

    Raises (when a class derives from it):
        UsageError: the class also derives from an optimizer of torch that is not element-wise.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for base in cls.__mro__:
            if base in _WHY_NOT:
                raise UsageError(
                    f"optimizer {cls.__name__}",
                    expected="an update that treats every element of a parameter by itself",
                    got=f"torch.optim.{base.__name__}, {_WHY_NOT[base]}",
                    remedy=f"Use torch.optim.{base.__name__} itself, without hwfsdp.optim.",
                )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step, with the same result as torch's step over the same DTensors.

        Args:
            closure: computes the loss and the gradients; called once, with gradients enabled, before the step.

        Returns:
            The result of the optimizer's own step: the loss if there is a closure.

        Raises:
            UsageError: the optimizer's own step calls the closure more than once.
        """
        arguments: tuple[Any, ...] = ()
        if closure is not None:
            with torch.enable_grad():
                arguments = (_answer(type(self).__name__, closure()),)
        own_step = _without_hooks(cast(Any, super().step).__func__)
        stand_ins = _stand_ins(self)
        if stand_ins is None:
            return own_step(self, *arguments)
        with _local_parts(self, stand_ins):
            return own_step(self, *arguments)


def local(optimizer: Class) -> Class:
    """Return the optimizer class with its step over local parts; for optimizers whose update is element-wise.

        FastLion = local(Lion)

    Args:
        optimizer: a subclass of `torch.optim.Optimizer`. The update of an element may depend on this element of parameter,
            gradient and state, and on numbers. It must not depend on other elements, as norms, means and products of matrices do
            (LAMB, LARS, Shampoo, SOAP): over local parts these would be different on every rank, without an error. The optimizer
            keeps its values for a parameter directly in `state[p]`, in the parameter's shape or as scalars.

    Returns:
        A subclass with the same name, arguments and documentation. A class that already has such a step is returned as it is.

    Raises:
        UsageError: an optimizer of torch that is known not to be element-wise, or a class derived from one.
    """
    if issubclass(optimizer, LocalStep):
        return optimizer
    names = {name: getattr(optimizer, name) for name in ("__module__", "__qualname__", "__doc__")}
    made = types.new_class(
        optimizer.__name__, (LocalStep, optimizer), exec_body=lambda body: body.update(names)
    )
    return cast(Class, made)


# --- one step ---


def _answer(name: str, loss: Any) -> Callable[[], Any]:
    """A closure that has been called: gives its loss, once."""
    answers = iter((loss,))

    def closure() -> Any:
        for answer in answers:
            return answer
        raise UsageError(
            f"{name}.step(closure)",
            expected="an optimizer that calls its closure once a step",
            got="a second call",
            remedy="Use the optimizer itself, without hwfsdp.optim.",
        )

    return closure


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step without torch's wrapper for hooks: hooks are only for the outermost step."""
    while getattr(step, "hooked", False):
        step = cast(Any, step).__wrapped__
    return step


StandIns = dict[DTensor, Tensor]  # parameter → a leaf over the memory of its local part


def _stand_ins(optimizer: Optimizer) -> StandIns | None:
    """Make a stand-in for every DTensor of the optimizer, frozen ones too.

    Returns:
        None if local parts do not contain everything that this step needs (Note [What lies elsewhere]). This depends only on
        layouts, so every rank gets the same answer.
    """
    if optimizer.defaults.get("differentiable") or torch.compiler.is_compiling():
        return None
    found: StandIns = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, DTensor):
                stand_in = _stand_in(param)
                if stand_in is None:
                    return None
                found[param] = stand_in
    return found


def _stand_in(param: DTensor) -> Tensor | None:
    """Make a leaf over the memory of the local part, with the gradient's local part; None if these do not say enough."""
    local, grad = local_of(param), param.grad
    if not local.dim():
        return None
    for placement in param.placements:
        if placement.is_partial():
            return None
    stand_in = local.detach().requires_grad_(param.requires_grad)
    if grad is not None:
        if not isinstance(grad, DTensor) or grad.device_mesh != param.device_mesh:
            return None
        local_grad = _lend(grad, param)
        if local_grad.dtype != local.dtype:
            stand_in.grad_dtype = None  # any
        stand_in.grad = local_grad
    return stand_in


def _lend(value: DTensor, param: DTensor) -> Tensor:
    """Return the local part of a gradient or of a state tensor, cut as the parameter is."""
    if value.placements != param.placements and value.shape == param.shape:
        value = cast(DTensor, value.detach()).redistribute(placements=param.placements)
    return local_of(value)


@contextmanager
def _local_parts(optimizer: Optimizer, stand_ins: StandIns) -> Iterator[None]:
    """Put stand-ins into the optimizer, and take over what the block changed in them (Note [What a step borrows])."""
    groups, state = list(optimizer.param_groups), optimizer.state
    lists = [group["params"] for group in groups]
    lent: defaultdict[Any, Any] = defaultdict(dict)
    for key, values in state.items():
        stand_in = stand_ins.get(cast(DTensor, key))
        if stand_in is None:
            lent[key] = values
        else:
            lent[stand_in] = {
                name: _lend(value, cast(DTensor, key)) if isinstance(value, DTensor) else value
                for name, value in values.items()
            }
    try:
        optimizer.state = lent
        for group, params in zip(groups, lists, strict=True):
            group["params"] = [stand_ins.get(param, param) for param in params]
        yield
    finally:
        for group, params in zip(groups, lists, strict=True):
            group["params"] = params
        left, optimizer.state = optimizer.state, state
        _take_over(left, state, stand_ins)
        # for autograd, as if the step had written to the DTensors
        increment_version([param for param, stand_in in stand_ins.items() if stand_in.grad is not None])


def _take_over(left: dict[Any, Any], state: dict[Any, Any], stand_ins: StandIns) -> None:
    """Make `state` the state after a step, in the same order; the dicts of parameters stay the same objects."""
    params = {stand_in: param for param, stand_in in stand_ins.items()}
    whole: dict[Any, Any] = {}
    for key, values in left.items():
        param = params.get(key)
        if param is None:
            whole[key] = values
            continue
        whole[param] = kept = state.get(param, {})
        now = {}
        for name, value in values.items():
            before = kept.get(name)
            if isinstance(before, DTensor) and local_of(before) is value:
                now[name] = before
            else:
                now[name] = _as_dtensor(value, param)
        kept.clear()
        kept.update(now)
    state.clear()
    state.update(whole)


def _as_dtensor(value: Any, like: DTensor) -> Any:
    """Return a value for the state: a tensor shaped like the local part of `like` becomes a DTensor, other values stay."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.shape != local_of(like).shape:
        return value
    if value.dtype == like.dtype:
        return wrap_like(value, like)
    return dtensor(value, like.device_mesh, like.placements, like.shape, like.stride())


# --- torch's own that are element-wise ---


class ASGD(LocalStep, optim.ASGD):
    """`torch.optim.ASGD` over local parts."""


class Adadelta(LocalStep, optim.Adadelta):
    """`torch.optim.Adadelta` over local parts."""


class Adagrad(LocalStep, optim.Adagrad):
    """`torch.optim.Adagrad` over local parts."""


class Adam(LocalStep, optim.Adam):
    """`torch.optim.Adam` over local parts."""


class AdamW(LocalStep, optim.AdamW):
    """`torch.optim.AdamW` over local parts."""


class Adamax(LocalStep, optim.Adamax):
    """`torch.optim.Adamax` over local parts."""


class NAdam(LocalStep, optim.NAdam):
    """`torch.optim.NAdam` over local parts."""


class RAdam(LocalStep, optim.RAdam):
    """`torch.optim.RAdam` over local parts."""


class RMSprop(LocalStep, optim.RMSprop):
    """`torch.optim.RMSprop` over local parts."""


class Rprop(LocalStep, optim.Rprop):
    """`torch.optim.Rprop` over local parts."""


class SGD(LocalStep, optim.SGD):
    """`torch.optim.SGD` over local parts."""
