"""Hooks that autograd calls before and after the backward of a module.

Pre-backward is a hook on the tensors that the module returned, because the module's backward begins with their gradients.

Post-backward is a hook on the inputs of the module. If one input needs a gradient, the module gets a view of this input, and the
node of the view has the hook. If several inputs need one, they pass through one autograd function, so that autograd calls once
for all of them. In both cases, the node with the hook is older than the module's own nodes. Autograd runs a ready node that adds a
gradient to a parameter first, and younger nodes before older nodes. So usually the parameters have their gradients when the
hook runs. For late ones, see `state`, Note [Groups without an input gradient].

Note [Views as outputs]
    A module may return a view, `out = h.view(…)`, and its caller may change this view in place, `out += x`. Then `out` and its
    base, `h`, have a new history, without the hook. But the node that made `h` is still a part of it. So this node gets a hook,
    too. This hook does something only if no hook of an output has run before it.

Note [Inputs that come out again]
    A module may return its own input (`return x, f(x)`). Then the view of the input is an output as well, and one tensor has
    both kinds of hooks. Hooks on a tensor run before hooks on its node, so pre-backward comes first.

Note [Inputs changed in place]
    If a module first changes its only input in place, the view gets a new history, without the hook. The gradients are still
    right. But post-backward comes only when the backward ends, and the parameters stay whole until then. With several inputs,
    autograd refuses the operation, because an autograd function has returned them as views.

Note [Outputs that stay]
    A module may return a tensor that is older than this forward, such as its own parameter, or a tensor that it keeps. Then the
    next forward finds the hook of an earlier one, which does the same, and adds none. Otherwise each step would add a hook.

Note [Transforms]
    Inside a `torch.func` transform or forward-mode AD, a tensor consists of several: the transform wraps a value, which an ordinary
    backward may reach later, and the value may have a tangent with its own history. A hook on the tensor sees gradients of the
    innermost transform only. So all inputs and outputs pass through an autograd function, to which torch gives a node in
    each of these histories. The outputs are copied afterwards, because autograd forbids in-place operations on what the function returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hwfsdp.core import private_torch
from hwfsdp.core.precision import MapTree, map_tensors, replace_tensors_with_grad, tensors_with_grad


class CallInBackward(torch.autograd.Function):
    """The identity on tensors. Each backward that reaches a result calls the given function first.

    Under `torch.func` transforms, torch applies this function once per level, and gives each level its own node. It has a separate
    `setup_context`, because transforms need this.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.function = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.function()
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, function: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return call_in_backward(ctx.function, *tangents)


def call_in_backward(function: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return aliases of `tensors`. Each backward that reaches one of them calls `function` first."""
    results: tuple[Tensor, ...] = CallInBackward.apply(function, *tensors)  # type: ignore[no-untyped-call]
    return results


class WatchedOutputs:
    """The outputs of one forward of a module. Each time a backward reaches one of them, the callback is called."""

    def __init__(self, before_backward: Callable[[], None]) -> None:
        self._before_backward = before_backward
        self._seen_in = -1  # the backward in which an output's own hook ran last

    def watch(self, output: Any) -> Any:
        """Put hooks on the tensors in `output` that a backward may reach. Return `output`; in a transform, with other tensors."""
        tensors = tensors_with_grad(output) if torch.is_grad_enabled() else []
        if private_torch.in_transforms():  # Note [Transforms]
            watched = [call_in_backward(self._before_backward, tensor)[0].clone() for tensor in tensors]
            return replace_tensors_with_grad(output, watched) if tensors else output
        for tensor in tensors:
            if not any(map(self._is_ours, private_torch.hooks_of(tensor))):
                tensor.register_hook(self._on_grad)
            base = private_torch.base_of_view(tensor)
            node: Any = base.grad_fn if base is not None else None
            if node is not None and node.metadata.setdefault(self._before_backward, self) is self:
                node.register_prehook(self._on_base_grad)
        return output

    def _is_ours(self, hook: Any) -> bool:
        """True if the hook calls the same callback (Note [Outputs that stay])."""
        owner = getattr(hook, "__self__", None)
        return isinstance(owner, WatchedOutputs) and owner._before_backward == self._before_backward

    def _on_grad(self, *_: object) -> None:
        self._seen_in = private_torch.number_of_backward()
        self._before_backward()

    def _on_base_grad(self, *_: object) -> None:
        """Call the callback, unless an output's own hook has called it in this backward (Note [Views as outputs])."""
        if self._seen_in != private_torch.number_of_backward():
            self._on_grad()


def watch_inputs(inputs: Any, after_backward: Callable[[], None], map_tree: MapTree = map_tensors) -> Any:
    """Return `inputs` with an alias for each tensor that needs a gradient. A backward that reaches them calls `after_backward`.

    `map_tree` replaces tensors in `inputs`, as `map_tensors` does.
    """
    tensors = tensors_with_grad(inputs, map_tree) if torch.is_grad_enabled() else []
    if not tensors:
        return inputs
    if len(tensors) == 1 and not private_torch.in_transforms():
        alias = tensors[0].view_as(tensors[0])
        assert alias.grad_fn is not None, "a view of a tensor that needs a gradient has a history"
        alias.grad_fn.register_prehook(lambda grads: after_backward())
        return replace_tensors_with_grad(inputs, [alias], map_tree)
    return replace_tensors_with_grad(inputs, call_in_backward(after_backward, *tensors), map_tree)
