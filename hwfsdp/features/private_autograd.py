"""Private parts of torch that features need: of autograd, and of the places where modules and parameters keep what they have.

Supported: torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node

from hwfsdp.core.param import Place

if TYPE_CHECKING:
    from hwfsdp.features.feature_param import FSDPParam

Inputs = Sequence[Tensor | GradientEdge]

# The node that adds a gradient to a leaf, its `variable`. torch does not declare it.
AccumulateGrad: Any = vars(torch._C._functions)["AccumulateGrad"]
# A block whose operations do not call `__torch_function__` of tensor classes
plain_class: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass


class _Engine(type(Variable._execution_engine)):  # type: ignore[misc]
    """Autograd's engine, which first tells which backward begins, and explains errors that autograd raises."""

    before: Callable[[list[Node]], None] = staticmethod(lambda begin: None)
    explain: Callable[[RuntimeError, Inputs], Exception | None] = staticmethod(lambda error, inputs: None)
    reached: Callable[[Inputs], Inputs] = staticmethod(lambda inputs: inputs)

    def run_backward(self, roots: Sequence[Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
        inputs = (
            tuple(args[3] or ()) if len(args) > 3 else ()
        )  # after the roots' gradients, retain_graph, create_graph
        if inputs and kwargs.get("accumulate_grad", False):
            args = (*args[:3], _Engine.reached(inputs), *args[4:])
        nodes = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
        _Engine.before([node for node in nodes if node is not None])
        try:
            return super().run_backward(roots, *args, **kwargs)
        except RuntimeError as error:
            explained = _Engine.explain(error, inputs)
            if explained is None:
                raise
            raise explained from error


def watch_backwards(
    before: Callable[[list[Node]], None],
    explain: Callable[[RuntimeError, Inputs], Exception | None],
    reached: Callable[[Inputs], Inputs],
) -> None:
    """Call functions around every backward of this process. torch has no hook for the beginning of a backward.

    Args:
        before: called before each backward, with the nodes where it begins.
        explain: called with a RuntimeError that ends a backward or `autograd.grad`, and its `inputs`; returns the error to raise
            instead, or None.
        reached: called with the `inputs` of a backward, if there are any; returns those to use.
    """
    if not isinstance(Variable._execution_engine, _Engine):
        Variable._execution_engine = _Engine()
    _Engine.before, _Engine.explain, _Engine.reached = before, explain, reached


def find_new_memory(params: Iterable[FSDPParam]) -> list[FSDPParam]:
    """Return the parameters whose shard has other memory than at the last gather, if there was one. Remember the memory."""
    found = []
    for param in params:
        shard: Any = param.sharded_param
        if param.read_from is not shard._local_tensor:
            found += [param] if param.read_from is not None else []
            param.read_from = shard._local_tensor
    return found


def displaced(
    params: Sequence[FSDPParam], registered: Sequence[nn.Parameter]
) -> list[tuple[FSDPParam, Place]]:
    """Return where modules have another parameter than the one that is given for each of `params`, or none."""
    return [
        (param, place)
        for param, given in zip(params, registered, strict=True)
        for place in param.places
        if place.module._parameters.get(place.name) is not given and not param.is_own(*place)
    ]


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
