"""Repair the states that an exception leaves behind. Seam: the state.

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
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hwfsdp.core import wrap
from hwfsdp.core.compat import call_after_backward, in_backward, no_autograd
from hwfsdp.core.context import ForwardOrder, FSDPCommContext
from hwfsdp.core.group import ParamGroup
from hwfsdp.core.iteration import Phase, RootContext
from hwfsdp.core.observer import moment
from hwfsdp.core.param import ShardedState
from hwfsdp.core.state import Args, FSDPState, Kwargs
from hwfsdp.errors import StateError
from hwfsdp.features.call import Call, absent
from hwfsdp.features.lookup import calls_in_progress, checked_state

_states: WeakSet[RecoveringState] = WeakSet()
_lock = threading.Lock()  # threads may shard models, and step, at the same time
_watching = False

# By root and state; the state is None for the callback of the root itself.
Callbacks = dict[tuple[RootContext, FSDPState | None], "ref[Callable[[], None]]"]


def choose(call: Call) -> None:
    """Put this before the states chosen so far. Watch the steps of optimizers from now on."""
    global _watching
    call.states.insert(0, RecoveringState)
    if not _watching:
        watch: Any = torch.compiler.disable(_watch_step, reason="it marks states")
        register_optimizer_step_pre_hook(watch)
        register_optimizer_step_post_hook(watch)
        _watching = True


def _watch_step(optimizer: Optimizer, *_: Any) -> None:
    """Mark the models whose shards the optimizer holds: a step begins or ends, and what was gathered before is stale.

    If it holds other DTensors, which may share memory with shards, mark all models. Optimizers without DTensors do not count. They
    may exist on one rank only, and then only this rank would gather again.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    held = {id(p) for p in params if isinstance(p, DTensor)}
    with _lock:
        states = list(_states) if held else []
    owned = [(state, {id(p.sharded_param) for g in state.groups for p in g.params}) for state in states]
    has_others = not held.issubset(set().union(*(ids for _, ids in owned)))
    for state, ids in owned:
        if has_others or not held.isdisjoint(ids):
            state.stepped = (state.root.states or [state])[0].stepped = True  # type: ignore[attr-defined]


def callbacks_of(comm_ctx: FSDPCommContext) -> Callbacks:
    """Return the functions that the backward in progress calls at its end, for each root or part of a model that it reached."""
    found: Callbacks = vars(comm_ctx).setdefault("callbacks", {})
    return found


def backward_broke(comm_ctx: FSDPCommContext) -> bool:
    """True if a backward ended without calling the functions that it should call at its end."""
    return any(callback() is None for callback in callbacks_of(comm_ctx).values())


class RecoveringState(FSDPState):
    """A state that notices an exception of an earlier iteration.

    Attributes:
        stepped: True if an optimizer has stepped since the parameters that are whole now were gathered. From the first forward on,
            only the root's value counts.
        handled: the id of the exception that was being handled when the forward began; a later exception has another id.
        accumulated: True if the last backward that ended left gradients that are not reduced over all ranks.
    """

    always_call = True

    def __init__(self, *args: Any) -> None:
        self.stepped, self.handled, self.accumulated = False, 0, False
        super().__init__(*args)
        with _lock:
            _states.add(self)

    @property
    def head(self) -> RecoveringState:
        """The state of the root, or this state as long as there is no root."""
        head = self.root.states[0] if self.root.states else self
        if not isinstance(head, RecoveringState):
            raise StateError(
                f"forward of {head.fqn or 'the root module'}",
                expected="one fully_shard for the whole model",
                got="hwfsdp.core's for this module, hwfsdp's for a module in it",
                remedy="Shard this module with hwfsdp.fully_shard, too.",
            )
        return head

    # --- is something unfinished? ---

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if self.phase is not Phase.IDLE and self.is_left_over():
            self.break_off()
        return super().pre_forward(module, args, kwargs)

    def is_left_over(self) -> bool:
        """True if an exception ended the forward or backward that left this state in its phase, which is not IDLE."""
        if in_backward():
            return backward_broke(self.comm_ctx)
        entered_again = self.phase is Phase.FORWARD and (self.head is self or self.is_stale())
        return bool(callbacks_of(self.comm_ctx)) or (entered_again and not self.is_inside_forward())

    def is_inside_forward(self) -> bool:
        """True if the outermost forward on record is still running. A KeyboardInterrupt ends a forward and calls no hook.

        This is slow, because it looks at the stack. So it is called only in unusual cases: a module calls itself, a method calls
        the forward, or an optimizer steps in a forward.
        """
        outermost = self.root.forward_root
        return outermost is not None and calls_in_progress(outermost.modules) > (outermost is self)

    def is_stale(self) -> bool:
        """True if an optimizer has stepped since the last iteration began. False in a backward, where it may step for some parameters."""
        return self.head.stepped and not in_backward()

    def is_outermost(self) -> bool:
        return super().is_outermost() or (self.is_stale() and not self.is_inside_forward())

    def begin_iteration(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Begin an iteration with the shards that the optimizer left, and with nothing left of an earlier iteration."""
        if not self.root.states:
            with no_autograd():
                self.become_root()
            self.head.stepped = any(getattr(state, "stepped", False) for state in self.root.states)
        if (callbacks_of(self.comm_ctx) or self.root.forward_root) and not in_backward():
            self.break_off()
        self.free_stale()
        self.handled = id(sys.exc_info()[1])
        for state in self.root.states:
            if state.phase is Phase.FORWARD:  # a module called by itself has left its group whole
                state.phase = Phase.IDLE
                for group in state.groups:
                    group.reshard()
        return super().begin_iteration(args, kwargs)

    def post_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        """Break off the iteration if an exception leaves the outermost forward. torch calls this hook after an exception, too."""
        outermost = self.root.forward_root is self
        if outermost and id(sys.exc_info()[1]) != self.handled and not in_backward():
            with moment("post_forward", self):
                self.break_off()
            return output
        return super().post_forward(module, args, output)

    def free_stale(self) -> None:
        """Free what was gathered before the last optimizer step."""
        if self.is_stale():
            self.head.stepped = False
            for group in self.root.groups or self.groups:
                group.drop_gather()
                if group.params[0].state is not ShardedState.SHARDED:
                    group.reshard()

    def before_unshard(self) -> None:
        """Repair everything unfinished before the user gathers by hand."""
        if backward_broke(self.comm_ctx):
            self.break_off()
        self.free_stale()
        super().before_unshard()  # type: ignore[misc]

    # --- the end of a backward ---

    def queue_final_callback(self) -> None:
        self.queue_callback((self.root, None), self.finish_backward)

    def queue_part(self) -> None:
        self.queue_callback((self.root, self), self.finish_part)

    def queue_callback(self, key: tuple[RootContext, FSDPState | None], callback: Callable[[], None]) -> None:
        """Let autograd call `callback` once, when this backward is over. Break off an earlier backward that did not end."""
        callbacks = callbacks_of(self.comm_ctx)
        queued = callbacks.get(key)
        if queued is not None and queued() is not None:
            return
        if backward_broke(self.comm_ctx):
            self.break_off()
        call_after_backward(callback)
        callbacks[key] = ref(callback)

    def finish_part(self) -> None:
        callbacks_of(self.comm_ctx).pop((self.root, self), None)
        super().finish_part()  # type: ignore[misc]

    def finish_states(self) -> None:
        super().finish_states()
        self.note_end_of_backward()

    def note_end_of_backward(self) -> None:
        """Note that autograd made its last call: the backward was not broken off."""
        for state in self.root.states:
            if isinstance(state, RecoveringState):
                state.accumulated = any(map(has_accumulated, state.groups))
        callbacks_of(self.comm_ctx).pop((self.root, None), None)

    # --- putting back ---

    def reset_iteration(self) -> None:
        """After an exception in a forward or backward, put every state below the root back to its state before the iteration.

        Raises:
            StateError: this is not the root.
        """
        if self.head is not self:
            raise StateError(
                f"reset_iter_state of {self.fqn}",
                expected="the root module",
                got="a module below it",
                remedy="Call it on the module that is called first in a forward.",
            )
        self.break_off()
        self.comm_ctx.finish_reductions()
        self.comm_ctx.forget_forwards()
        for state in self.root.states or [self]:
            state.forward_order = ForwardOrder()
            for group in state.groups:
                group.drop_gather()
                group.reshard()
                drop_grads(group)
        self.root.guessed.clear()

    def break_off(self) -> None:
        """End everything unfinished. Afterwards every state is idle, modules have their shards, no reduction is in flight.

        Gathers in flight stay. The next iteration drops them (`free_stale`).
        """
        # Models that share this communication context are broken off, too. Otherwise their reductions would end here, and add
        # gradients after their zero_grad.
        callbacks = callbacks_of(self.comm_ctx)
        broken = dict.fromkeys(root for root, _ in callbacks)
        for root in broken:
            root.backwards += 1
        if broken:
            finish_broken_backward([state for root in broken for state in root.states], self.comm_ctx)
        callbacks.clear()
        self.comm_ctx.forget_forwards(keep=0 if broken else self.root.forwards_before)
        for root in {**broken, self.root: None}:
            self.end_unfinished(root)

    def end_unfinished(self, root: RootContext) -> None:
        """Do the work of `break_off` for the states of one root, of this model or of another one."""
        for state in root.states or [self]:
            with moment("broken_off", state):
                state.phase = Phase.IDLE
                getattr(state, "to_run", set()).clear()
                state.forward_order.forget()
                for group in state.groups:
                    group.reshard()
        root.forward_root = None
        (root.states or [self])[0].stepped = True  # type: ignore[attr-defined]


class RecoveringModule(wrap.FSDPModule):
    """Methods of sharded modules."""

    def reset_iter_state(self) -> None:
        """Drop everything that an exception in a forward or backward left, including unreduced gradients. Call it on the root.

        Without this call, the next forward repairs everything except these gradients. Before the next backward, zero the
        gradients that were reduced already.

        Raises:
            StateError: the module is below the root, or another model that shares the context waits for its reduction.
        """
        state: Any = checked_state(self, type(self).__name__)
        if not isinstance(state, RecoveringState):
            raise absent("reset_iter_state", "recovery")
        state.reset_iteration()


def has_accumulated(group: ParamGroup) -> bool:
    """True if a group that does not reduce over all ranks still has gradients of a backward."""
    partial = getattr(group.reducer, "partial_grads", {})
    reduces = group.reduce_grads and getattr(group.reducer, "all_reduce_grads", True)
    return not reduces and (bool(partial) or any(p.has_unreduced_grad for p in group.params))


def drop_grads(group: ParamGroup) -> None:
    """Forget gradients that were not reduced, or not over all ranks."""
    for param in group.params:
        param.accumulated_grad = None
        if param.unsharded_param is not None:
            param.unsharded_param.grad = None
    getattr(group.reducer, "partial_grads", {}).clear()


def finish_broken_backward(states: list[FSDPState], comm_ctx: FSDPCommContext) -> None:
    """End the reductions that a broken backward started, and drop its gradients that are not on the shards yet.

    The user may have cleared or used the shards' gradients since then, so nothing may be added to them now. If earlier
    micro-batches left unreduced gradients (`accumulated`), their sum stays, with the gradients that the broken backward added.
    """
    groups = [g for state in states if not getattr(state, "accumulated", False) for g in state.groups]
    dropped = [(param, param.sharded_param) for group in groups for param in group.params]
    with no_autograd():
        for param, shard in dropped:  # a stand-in without hooks; no code reads its gradient
            param.sharded_param = nn.Parameter(shard.detach(), requires_grad=shard.requires_grad)
        try:
            comm_ctx.finish_reductions()
        finally:
            for param, shard in dropped:
                param.sharded_param = shard
            for group in groups:
                drop_grads(group)
