"""Backwards that the caller ends.

    model.set_manual_backward_finalization(True)
    …                                             # any number of forwards and backwards
    model.finalize_backward()                     # afterwards the gradients are there

A pipeline runs many backwards as one, and reduces afterwards. So the end of a backward leaves the iteration open, and
`finalize_backward` ends it. torch has this since 2.15; here it works with every torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hwfsdp.core.observer import moment
from hwfsdp.core.private_torch import in_backward
from hwfsdp.core.state import Phase
from hwfsdp.errors import StateError
from hwfsdp.features.recovery import note_end_of_backward, refuse_unless

if TYPE_CHECKING:
    from hwfsdp.features.schedule import FSDPState


class GradientReductionHandle:
    """The result of `FSDPModule.finalize_backward(async_op=True)`."""

    def __init__(self, state: FSDPState | None) -> None:
        self._state = state

    def wait(self) -> None:
        """Wait for the reductions; afterwards the optimizer may step. A second call does nothing.

        Raises:
            StateError: `reset_iter_state` was called in between.
        """
        state = self._state
        if state is None:
            return
        if state.comm_ctx.reduction is not self:
            raise refused("GradientReductionHandle.wait", "a reduction in flight", "one that was reset")
        close_iteration(state)
        self._state = None

    def is_of(self, state: FSDPState) -> bool:
        """Whether this handle belongs to the model of this state."""
        return self._state is not None and self._state.root is state.root


def refused(subject: str, expected: str, got: str, remedy: str = "") -> StateError:
    return StateError(
        subject, expected=expected, got=got, remedy=remedy or "Run a forward and a backward again."
    )


# --- Forward and backward --------------------------------------------------------------------------------------


def refuse_pending_reduction(state: FSDPState) -> None:
    """Raise StateError if a reduction was not waited for, before a forward."""
    if state.comm_ctx.reduction:
        raise refused("forward", *_PENDING)


def refuse_reduction_of_other(state: FSDPState) -> None:
    """Raise StateError if another model that shares the context waits for its reduction, before this one is broken off."""
    reduction = state.comm_ctx.reduction
    if reduction and not reduction.is_of(state):
        raise refused("reset_iter_state", *_PENDING)


def leave_open(state: FSDPState) -> None:
    """Keep the iteration open, because more backwards may come. Groups that autograd left out wait for `finalize`, if they reduce."""
    state.root.forward_root = state.forward_around()
    state.root.backwards += 1
    for each in state.states_to_finish():
        if each.phase is not Phase.POST_BACKWARD:
            if not any(group.reduce_grads for group in each.groups):
                each.post_backward()
            each.phase = Phase.IDLE
    state.comm_ctx.settle()  # from here on, other code looks for partial gradients
    note_end_of_backward(state)


# --- The end ---------------------------------------------------------------------------------------------------


def finalize(state: FSDPState, async_op: bool) -> GradientReductionHandle | None:
    """Reduce all gradients that were not reduced yet. Wait for all reductions, or leave the wait to a handle."""
    if not state.root.states:
        return GradientReductionHandle(None) if async_op else None
    check_finalization(state, async_op)
    with moment("finish_backward", state):
        state.finish_states()
    if not async_op:
        close_iteration(state)
        return None
    handle = state.comm_ctx.reduction = GradientReductionHandle(state)
    return handle


def close_iteration(state: FSDPState) -> None:
    """Wait for all reductions, and end the iteration."""
    state.end_iteration()
    state.comm_ctx.reduction = None
    state.root.is_open = False


def check_finalization(state: FSDPState, async_op: bool) -> None:
    """Raise StateError if no backward can be ended now."""
    subject, comm_ctx = "finalize_backward", state.comm_ctx
    groups = [group for each in state.states for group in each.groups]
    refuse_unless(state.is_root, subject)
    if comm_ctx.reduction:
        raise refused(subject, *_PENDING)
    if not state.root.manual:
        raise refused(
            subject,
            "set_manual_backward_finalization(True) before the forward",
            "a model whose backwards end by themselves",
            "Set it, or do not call finalize_backward.",
        )
    if comm_ctx.backward_broke:
        raise refused(
            subject,
            "backwards that ran to their end",
            "one that an exception ended",
            "Call reset_iter_state(), then run all forwards and backwards of the step again.",
        )
    if (state.root, None) in comm_ctx.callbacks:
        raise refused(subject, "a backward that is over", "one that runs", "Call it after backward().")
    if any(g.reducer.partial_grads or g.reduce_grads and not g.reducer.all_reduce_grads for g in groups):
        raise refused(
            subject,
            "gradients that are reduced over all replicas",
            "some that are reduced within a replica only",
            "Call set_requires_all_reduce(True) first, and reduce in one backward.",
        )
    if async_op and not {*comm_ctx.post_forward_order} <= {*state.root.groups}:
        raise refused(
            f"{subject}(async_op=True)",
            "no work of another model on the shared context",
            "forwards of another root",
            "Finish the other model's backward first.",
        )


def set_manual(state: FSDPState, enabled: bool) -> None:
    """Choose who ends backwards: the caller, or each backward itself."""
    subject = "set_manual_backward_finalization"
    refuse_unless(state.is_root, subject)
    if enabled != state.root.manual and (in_backward() or state.root.is_open):
        raise refused(
            subject,
            "a call before the backward",
            "one after it began",
            "Finalize or reset the iteration first.",
        )
    state.root.manual = enabled


def check_manual(state: FSDPState, below: Sequence[FSDPState]) -> None:
    """Raise StateError if a module below the root was set to manual finalization. `below`: the states below the root, and its own."""
    is_root = not any(each.root.manual for each in below if each is not state)
    refuse_unless(is_root, "set_manual_backward_finalization")


_PENDING = (
    "the last reduction to be waited for",
    "one in flight",
    "Call wait() of the handle that finalize_backward(async_op=True) has returned.",
)
