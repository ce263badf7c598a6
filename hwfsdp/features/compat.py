"""Private parts of torch's autograd that `entries` and `freed` need.

Supported: torch 2.13 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node

# The node that adds a gradient to a leaf, its `variable`. torch does not declare it.
AccumulateGrad: Any = vars(torch._C._functions)["AccumulateGrad"]
_GRAD: Any = torch.Tensor.grad  # the property


class _Engine(type(Variable._execution_engine)):  # type: ignore[misc]
    """Autograd's engine, which first tells which backward begins, and explains errors that autograd raises."""

    before: Callable[[list[Node]], None] = staticmethod(lambda begin: None)
    explain: Callable[[RuntimeError], Exception | None] = staticmethod(lambda error: None)

    def run_backward(self, roots: Sequence[Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
        nodes = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
        _Engine.before([node for node in nodes if node is not None])
        try:
            return super().run_backward(roots, *args, **kwargs)
        except RuntimeError as error:
            explained = _Engine.explain(error)
            if explained is None:
                raise
            raise explained from error


def watch_backwards(
    before: Callable[[list[Node]], None] | None = None,
    explain: Callable[[RuntimeError], Exception | None] | None = None,
) -> None:
    """Call functions around every backward of this process. torch has no hook for the beginning of a backward.

    Args:
        before: called before each backward, with the nodes where it begins.
        explain: called with a RuntimeError that ends a backward; returns the error to raise instead, or None.
    """
    if not isinstance(Variable._execution_engine, _Engine):
        Variable._execution_engine = _Engine()
    _Engine.before, _Engine.explain = before or _Engine.before, explain or _Engine.explain


def plain_class() -> AbstractContextManager[Any]:
    """Keep operations of the block from calling `__torch_function__` of tensor classes."""
    return torch._C.DisableTorchFunctionSubclass()


def grad_of(param: nn.Parameter) -> Tensor | None:
    """Return a parameter's gradient without `__torch_function__` of its class."""
    with plain_class():
        return cast("Tensor | None", _GRAD.__get__(param))


def set_grad_of(param: nn.Parameter, grad: Tensor | None) -> None:
    """Set a parameter's gradient without `__torch_function__` of its class."""
    with plain_class():
        _GRAD.__set__(param, grad)


def become(param: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Change the class of a parameter."""
    param.__class__ = kind


def registered_at(module: nn.Module, name: str) -> Any:
    """Return what a module has registered as a parameter; None if there is nothing."""
    return module._parameters.get(name)


def is_traced() -> bool:
    """True if torch.jit.trace or torch.export is running."""
    return torch._C._is_tracing() or torch.compiler.is_exporting()


def notes_of(node: Node) -> dict[str, Any]:
    """Return a node's metadata, in which anybody may note something."""
    notes: Any = node.metadata
    return cast(dict[str, Any], notes)


def next_node_number() -> int:
    """Return the number of the next node that this thread adds to an autograd graph."""
    return int(torch._C._autograd._get_sequence_nr())


def number_of(node: Node) -> int:
    """Return a node's number in the order in which its thread made nodes."""
    return node._sequence_nr()
