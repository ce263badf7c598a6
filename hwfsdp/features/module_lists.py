"""Several modules, one group: `fully_shard([a, b])`, and parts that are called by themselves.

The first of the modules to run opens the forward, and the last one ends it. If the root's forward is over before all modules have
run, the forward of the group ends there. Afterwards, one of the modules may be called by itself, such as a head that computes a
long sequence's loss in chunks. Each such call gathers if necessary. When a backward reaches the call's input, the gradients are reduced.
Until then the parameters stay whole, because nothing says how many calls will follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from hwfsdp.core.observer import moment
from hwfsdp.core.state import Phase

if TYPE_CHECKING:
    from hwfsdp.features.schedule import FSDPState


def end_of_one(state: FSDPState, module: nn.Module, output: Any) -> Any:
    """After the forward of one module of a list: end the forward of the group, if this is the last of the modules."""
    state.to_run.discard(module)
    with moment("post_forward", state):
        outermost = state.root.forward_root is state
        if not state.to_run:
            output = state.end_forward(output)
        elif outermost or state.root.forward_root is None:  # the module was called by itself
            output = state.watch(output, state.gather_part)
        if outermost:
            output = state.end_iteration_forward(output)
        return state.cast("cast_forward_outputs", output, state.policy.output_dtype)


def end_with_root(state: FSDPState, output: Any) -> Any:
    """End the forward of a list if some modules have not run: the root's forward is over, so they will not run any more."""
    if state.root.forward_root is state or state.phase is not Phase.FORWARD:
        return output
    with moment("post_forward", state):
        output = state.end_forward(output)
        return state.cast("cast_forward_outputs", output, state.policy.output_dtype)
