"""Repair the states that an exception leaves behind.

An exception may come from anywhere, so there is no list of places. Two rules are enough. First, a whole parameter is valid until
the next optimizer step: an iteration that begins after a step frees everything that was gathered before the step. Second,
`break_off` ends everything that is unfinished.

After an exception in a forward, torch still calls the outermost module's hook, and that hook calls `break_off`. After a
KeyboardInterrupt torch calls no hook; then the next forward calls it.

Autograd holds the only strong reference to the function that it calls at the end of a backward. `Callbacks` holds a weak one. If
the function is gone and has never run, an exception ended that backward. The next hook that runs notices this, for all models
that share the context. An exception in a forward inside a backward ends nothing, because checkpointing stops a recomputation by
an exception.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast
from weakref import ref

from torch import nn

from hwfsdp.core.private_torch import call_after_backward, in_backward, no_autograd
from hwfsdp.core.context import ForwardOrder, RootContext
from hwfsdp.core.observer import moment
from hwfsdp.core.state import FSDPState, Phase
from hwfsdp.errors import StateError
from hwfsdp.features.feature_state import FeatureState
from hwfsdp.features.lookup import calls_in_progress

if TYPE_CHECKING:
    from hwfsdp.features.schedule import FSDPState as WholeState
    from hwfsdp.features.feature_group import FSDPCommContext, ParamGroup

# By root and state; the state is None for the callback of the root itself.
Callbacks = dict[tuple[RootContext, FSDPState | None], "ref[Callable[[], None]]"]


def mark_step(groups: Sequence[ParamGroup]) -> None:
    """Mark the models of these groups: an optimizer's step begins or ends, and what was gathered before is stale."""
    for group in groups:
        group.state.stepped = group.state.root_state.stepped = True


def backward_broke(comm_ctx: FSDPCommContext) -> bool:
    """True if a backward ended without calling the functions that it should call at its end."""
    return any(callback() is None for callback in comm_ctx.callbacks.values())


class RecoveringState(FeatureState):
    """A state that notices an exception of an earlier iteration.

    Attributes:
        stepped: True if an optimizer has stepped, or an iteration was broken off, since the parameters that are whole now were
            gathered. From the first forward on, only the root's value counts.
        handled: the id of the exception that was being handled when the forward began; a later exception has another id.
        accumulated: True if the last backward that ended left gradients that are not reduced over all ranks.
    """

    always_call = True
    stepped, handled, accumulated = False, 0, False

    # --- is something unfinished? ---

    def break_off_left_over(self) -> None:
        """Break off an earlier forward or backward that an exception ended, before a forward of this module."""
        if self.phase is not Phase.IDLE and self.is_left_over():
            self.break_off()

    def is_left_over(self) -> bool:
        """True if an exception ended the forward or backward that left this state in its phase, which is not IDLE."""
        if in_backward():
            return backward_broke(self.comm_ctx)
        entered_again = self.phase is Phase.FORWARD and (self.root_state is self or self.is_stale())
        return bool(self.comm_ctx.callbacks) or (entered_again and not self.is_inside_forward())

    def is_inside_forward(self) -> bool:
        """True if the outermost forward on record is still running. A KeyboardInterrupt ends a forward and calls no hook.

        This is slow, because it looks at the stack. So it is called only in unusual cases: a module calls itself, a method calls
        the forward, or an optimizer steps in a forward.
        """
        outermost = self.root.forward_root
        return outermost is not None and calls_in_progress(outermost.modules) > (outermost is self)

    def is_stale(self) -> bool:
        """True if `stepped` was set since the last iteration began. False in a backward: an optimizer may step there for some parameters."""
        return self.root_state.stepped and not in_backward()

    def is_outermost(self) -> bool:
        return super().is_outermost() or (self.is_stale() and not self.is_inside_forward())

    def clear_up(self) -> None:
        """Before an iteration: have the shards that the optimizer left, and nothing left of an earlier iteration."""
        if not self.root.states:
            with no_autograd():
                self.become_root()
            self.stepped = any(state.stepped for state in self.states)
        if (self.comm_ctx.callbacks or self.root.forward_root) and not in_backward():
            self.break_off()
        self.free_stale()
        self.handled = id(sys.exc_info()[1])
        for state in self.states:
            if state.phase is Phase.FORWARD:  # a module called by itself has left its group whole
                state.phase = Phase.IDLE
                for group in state.groups:
                    group.reshard()

    def break_off_raised(self) -> bool:
        """Break off the iteration if an exception leaves the outermost forward, and return True."""
        outermost = self.root.forward_root is self
        if not outermost or id(sys.exc_info()[1]) == self.handled or in_backward():
            return False
        with moment("post_forward", self):
            self.break_off()
        return True

    def free_stale(self) -> None:
        """Free what was gathered before the last optimizer step."""
        if self.is_stale():
            self.root_state.stepped = False
            for group in self.root.groups or self.groups:
                group.drop_gather()
                group.reshard()

    # --- the end of a backward ---

    def queue_final_callback(self) -> None:
        self.queue_callback((self.root, None), self.finish_backward)

    def queue_callback(self, key: tuple[RootContext, FSDPState | None], callback: Callable[[], None]) -> None:
        """Let autograd call `callback` once, when this backward is over. Break off an earlier backward that did not end."""
        callbacks = self.comm_ctx.callbacks
        queued = callbacks.get(key)
        if queued is not None and queued() is not None:
            return
        if backward_broke(self.comm_ctx):
            self.break_off()
        call_after_backward(callback)
        callbacks[key] = ref(callback)

    def note_end_of_backward(self) -> None:
        """Note that autograd made its last call: the backward was not broken off."""
        for state in self.states:
            state.accumulated = any(map(has_accumulated, state.groups))
        self.comm_ctx.callbacks.pop((self.root, None), None)

    # --- putting back ---

    def reset_iteration(self) -> None:
        """After an exception in a forward or backward, put every state below the root back to its state before the iteration.

        Raises:
            StateError: this is not the root.
        """
        if self.root_state is not self:
            raise StateError(
                f"reset_iter_state of {self.name}",
                expected="the root module",
                got="a module below it",
                remedy="Call it on the module that is called first in a forward.",
            )
        self.break_off()
        self.comm_ctx.finish_reductions()
        self.comm_ctx.forget_forwards()
        for state in self.states:
            state.forward_order = ForwardOrder()
            for group in state.groups:
                group.drop_gather()
                group.reshard()
                drop_grads(group)
        self.root.guessed.clear()

    def break_off(self) -> None:
        """End everything unfinished. Afterwards every state is idle, modules have their shards, no broken backward has reductions in flight.

        Gathers in flight stay. The next iteration drops them (`free_stale`).
        """
        # Models that share this communication context are broken off, too. Otherwise their reductions would end here, and add
        # gradients after their zero_grad.
        callbacks = self.comm_ctx.callbacks
        broken = dict.fromkeys(root for root, _ in callbacks)
        for root in broken:
            root.backwards += 1
        if broken:
            finish_broken_backward([state for root in broken for state in states_of(root)], self.comm_ctx)
        callbacks.clear()
        self.comm_ctx.forget_forwards(keep=0 if broken else self.root.forwards_before)
        for root in {**broken, self.root: None}:
            self.end_unfinished(root)

    def end_unfinished(self, root: RootContext) -> None:
        """Do the work of `break_off` for the states of one root, of this model or of another one."""
        states = states_of(root) or self.states
        for state in reversed(states):  # the innermost first
            with moment("broken_off", state):
                state.phase = Phase.IDLE
                state.to_run.clear()
                for running in reversed(state.running):  # a KeyboardInterrupt leaves it
                    running.give_back()
                for group in state.groups:
                    group.reshard()
        root.forward_root = None
        states[0].stepped = True


def states_of(root: RootContext) -> list[WholeState]:
    """Return the states below a root."""
    return cast("list[WholeState]", root.states)


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


def finish_broken_backward(states: Sequence[WholeState], comm_ctx: FSDPCommContext) -> None:
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
