"""Repair the states that an exception leaves behind.

An exception may come from anywhere, so there is no list of places. Two rules are enough:

1. A whole parameter is valid until the next optimizer step. So an iteration that begins after a step frees everything that was
   gathered before the step (`free_stale`). It is also valid only until its shard is written (`user_changes.free_changed`).
2. Once a hook notices that a forward or a backward was broken, everything unfinished ends (`FSDPState.break_off`).

| what was broken | what torch does then | who notices |
| --- | --- | --- |
| a forward, by an exception | it still calls the hook after the outermost forward | this hook: `break_off_raised` |
| a forward, by a KeyboardInterrupt | it calls no hook | the next forward: `break_off_left_over`, `clear_up` |
| a backward | it drops the functions to call at the end | the next hook of any model that shares the context: `call_at_end` |

Autograd holds the only strong reference to a function that it calls at the end of a backward, and `FSDPCommContext.callbacks` holds a weak
one. If the function is gone and has never run, its backward was broken. An exception in a forward inside a backward breaks nothing,
because checkpointing ends a recomputation by an exception.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import ref

from torch import nn

from hwfsdp.core.context import ForwardOrder
from hwfsdp.core.observer import moment
from hwfsdp.core.private_torch import call_after_backward, in_backward, no_autograd
from hwfsdp.core.state import Phase
from hwfsdp.errors import StateError
from hwfsdp.features.lookup import calls_in_progress

if TYPE_CHECKING:
    from hwfsdp.features.feature_group import FSDPCommContext, ParamGroup, RootContext
    from hwfsdp.features.schedule import FSDPState


# --- Is something stale or unfinished? -------------------------------------------------------------------------


def mark_step(groups: Sequence[ParamGroup]) -> None:
    """Mark the models of these groups: an optimizer's step begins or ends, and what was gathered before is stale."""
    for group in groups:
        group.state.root.is_stale = True


def is_stale(state: FSDPState) -> bool:
    """True if the gathered parameters are stale. False in a backward, because an optimizer may step there for some parameters."""
    return state.root.is_stale and not in_backward()


def is_inside_forward(state: FSDPState) -> bool:
    """True if the outermost forward on record is still running. A KeyboardInterrupt ends a forward and calls no hook.

    This is slow, because it looks at the stack. So it is called only in unusual cases: a module calls itself, a method calls
    the forward, or an optimizer steps in a forward.
    """
    outermost = state.root.forward_root
    return outermost is not None and calls_in_progress(outermost.modules) > (outermost is state)


def is_left_over(state: FSDPState) -> bool:
    """True if an exception ended the forward or backward that left this state in its phase, which is not IDLE."""
    if in_backward():
        return state.comm_ctx.backward_broke
    entered_again = state.phase is Phase.FORWARD and (state.is_root or is_stale(state))
    return bool(state.comm_ctx.callbacks) or (entered_again and not is_inside_forward(state))


# --- Before and after a forward --------------------------------------------------------------------------------


def break_off_left_over(state: FSDPState) -> None:
    """Break off an earlier forward or backward that an exception ended, before a forward of this module."""
    if state.phase is not Phase.IDLE and is_left_over(state):
        state.break_off()


def clear_up(state: FSDPState) -> None:
    """Before an iteration: have the shards that the optimizer left, and nothing left of an earlier iteration."""
    if (state.comm_ctx.callbacks or state.root.forward_root) and not in_backward():
        state.break_off()
    free_stale(state)
    state.root.handled = id(sys.exc_info()[1])
    for each in state.states:
        if each.phase is Phase.FORWARD:  # a module called by itself has left its group whole
            each.phase = Phase.IDLE
            for group in each.groups:
                group.reshard()


def free_stale(state: FSDPState) -> None:
    """Free what was gathered before the last optimizer step."""
    if is_stale(state):
        state.root.is_stale = False
        for group in state.root.groups or state.groups:
            group.drop_gather()
            group.reshard()


def break_off_raised(state: FSDPState) -> bool:
    """Break off the iteration if an exception leaves the outermost forward, and return True."""
    outermost = state.root.forward_root is state
    if not outermost or id(sys.exc_info()[1]) == state.root.handled or in_backward():
        return False
    with moment("post_forward", state):
        state.break_off()
    return True


# --- The end of a backward -------------------------------------------------------------------------------------


def call_at_end(
    state: FSDPState, key: tuple[RootContext, FSDPState | None], callback: Callable[[], None]
) -> None:
    """Let autograd call `callback` once, when this backward is over. Break off an earlier backward that did not end.

    Args:
        key: as in `FSDPCommContext.callbacks`.
    """
    callbacks = state.comm_ctx.callbacks
    queued = callbacks.get(key)
    if queued is not None and queued() is not None:
        return
    if state.comm_ctx.backward_broke:
        state.break_off()
    call_after_backward(callback)
    callbacks[key] = ref(callback)


def note_end_of_backward(state: FSDPState) -> None:
    """Note that autograd made its last call: the backward was not broken off."""
    for each in state.states:
        each.accumulated = any(map(has_accumulated, each.groups))
    state.comm_ctx.callbacks.pop((state.root, None), None)


# --- Putting back ----------------------------------------------------------------------------------------------


def reset_iteration(state: FSDPState) -> None:
    """After an exception in a forward or backward, put every state below the root back to its state before the iteration.

    Raises:
        StateError: this is not the root.
    """
    refuse_unless(state.is_root, f"reset_iter_state of {state.name}")
    state.break_off()
    state.comm_ctx.finish_reductions()
    state.comm_ctx.forget_forwards()
    for each in state.states:
        each.forward_order, each.accumulated = ForwardOrder(), False
        for group in each.groups:
            group.drop_gather()
            group.reshard()
            drop_grads(group)
    state.root.guessed.clear()


def refuse_unless(is_root: bool, subject: str) -> None:
    """Raise StateError if a call of the user that is for the root was made for a module below it."""
    if not is_root:
        raise StateError(
            subject,
            expected="the root module",
            got="a module below it",
            remedy="Call it on the module that is called first in a forward.",
        )


def end_everything(state: FSDPState) -> None:
    """End everything unfinished. Afterwards every state is idle, modules have their shards, no broken backward has reductions in flight.

    Gathers in flight stay. The next iteration drops them (`free_stale`).
    """
    # Models that share this communication context are broken off, too. Otherwise their reductions would end here, and add
    # gradients after their zero_grad.
    comm_ctx = state.comm_ctx
    broken = dict.fromkeys(root for root, _ in comm_ctx.callbacks)
    for root in broken:
        root.backwards += 1
    if broken:
        finish_broken_backward([each for root in broken for each in root.states], comm_ctx)
    comm_ctx.callbacks.clear()
    comm_ctx.forget_forwards(keep=0 if broken else state.root.forwards_before)
    for root in {**broken, state.root: None}:
        end_forwards(root, root.states or state.states)


def end_forwards(root: RootContext, states: Sequence[FSDPState]) -> None:
    """End the forwards of the states of one root, the innermost first. They have no root before the first forward."""
    for state in reversed(states):
        with moment("broken_off", state):
            state.phase = Phase.IDLE
            state.to_run.clear()
            for running in reversed(state.running):  # a KeyboardInterrupt leaves it
                running.give_back()
            for group in state.groups:
                group.reshard()
    root.forward_root = None
    root.is_stale, root.is_open = True, False


def has_accumulated(group: ParamGroup) -> bool:
    """True if a group that does not reduce over all ranks still has gradients of a backward."""
    reduces = group.reduce_grads and group.reducer.all_reduce_grads
    return not reduces and (
        bool(group.reducer.partial_grads) or any(p.has_unreduced_grad for p in group.params)
    )


def drop_grads(group: ParamGroup) -> None:
    """Forget gradients that were not reduced, or not over all ranks."""
    for param in group.params:
        param.accumulated_grad = None
        if param.unsharded_param is not None:
            param.unsharded_param.grad = None
    group.reducer.partial_grads.clear()


def finish_broken_backward(states: Sequence[FSDPState], comm_ctx: FSDPCommContext) -> None:
    """End the reductions that a broken backward started, and drop its gradients that are not on the shards yet.

    The user may have cleared or used the shards' gradients since then, so nothing may be added to them now. If earlier
    micro-batches left unreduced gradients (`accumulated`), their sum stays, with the gradients that the broken backward added.
    """
    groups = [g for state in states if not state.accumulated for g in state.groups]
    dropped = [(param, param.sharded_param) for group in groups for param in group.params]
    with no_autograd():
        for param, shard in dropped:  # a dummy without hooks; no code reads its gradient
            param.sharded_param = nn.Parameter(shard.detach(), requires_grad=shard.requires_grad)
        try:
            comm_ctx.finish_reductions()
        finally:
            for param, shard in dropped:
                param.sharded_param = shard
            for group in groups:
                drop_grads(group)
