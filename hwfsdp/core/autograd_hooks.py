"""Hooks that autograd calls before and after the backward of a module.

Pre-backward is a hook on the tensors that the module returned, because the module's backward begins with their gradients.

Post-backward is a hook on the inputs of the module. If one input needs a gradient, the module gets a view of this input, and the
node of the view has the hook. If several inputs need one, they pass through one autograd function, so that autograd calls once
for all of them. In both cases, the node with the hook is older than the module's own nodes. Autograd runs a ready node that adds a
gradient to a parameter first, and younger nodes before older nodes. So the parameters have their gradients when the hook runs.

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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hwfsdp.core import compat
from hwfsdp.core.precision import replace_tensors_with_grad, tensors_with_grad


class WatchedOutputs:
    """The outputs of one forward of a module. Each time a backward reaches one of them, the callback is called.

    Args:
        before_backward: the callback.
        backwards: returns the number of backwards that have ended. It tells one backward from the next.
    """

    def __init__(self, before_backward: Callable[[], None], backwards: Callable[[], int]) -> None:
        self._before_backward, self._backwards = before_backward, backwards
        self._seen_in = -1  # the backward in which an output's own hook ran last

    def watch(self, output: Any) -> None:
        """Put hooks on the tensors in `output` that need a gradient."""
        for tensor in tensors_with_grad(output):
            tensor.register_hook(self._on_grad)
            base = compat.base_of_view(tensor)
            if base is not None and base.grad_fn is not None:
                base.grad_fn.register_prehook(self._on_base_grad)

    def _on_grad(self, *_: object) -> None:
        self._seen_in = self._backwards()
        self._before_backward()

    def _on_base_grad(self, *_: object) -> None:
        """Call the callback, unless an output's own hook has called it in this backward (Note [Views as outputs])."""
        if self._seen_in != self._backwards():
            self._on_grad()


class PostBackward(torch.autograd.Function):
    """The identity on the inputs of a module; its backward runs when the module's backward is done.

    It has a separate `setup_context`, because `torch.func` transforms need this.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(after_backward: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.after_backward = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.after_backward()
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, after_backward: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return tuple(tangent.view_as(tangent) for tangent in tangents)


def watch_inputs(inputs: Any, after_backward: Callable[[], None]) -> Any:
    """Return `inputs` with an alias for each tensor that needs a gradient. A backward that reaches them calls `after_backward`."""
    tensors = tensors_with_grad(inputs) if torch.is_grad_enabled() else []
    if not tensors:
        return inputs
    if len(tensors) == 1 and not compat.in_transforms():
        alias = tensors[0].view_as(tensors[0])
        assert alias.grad_fn is not None, "a view of a tensor that needs a gradient has a history"
        alias.grad_fn.register_prehook(lambda grads: after_backward())
        return replace_tensors_with_grad(inputs, [alias])
    outputs: tuple[Tensor, ...] = PostBackward.apply(after_backward, *tensors)  # type: ignore[no-untyped-call]
    return replace_tensors_with_grad(inputs, list(outputs))
