"""Backwards that the caller ends.

    model.set_manual_backward_finalization(True)
    …                                             # any number of forwards and backwards
    model.finalize_backward()                     # afterwards the gradients are there

A pipeline runs many backwards as one, and reduces afterwards. So the end of a backward leaves the iteration open, and
`finalize_backward` ends it. torch has this since 2.15; here it works with every torch.
"""

from __future__ import annotations

from hwfsdp.core.private_torch import in_backward
from hwfsdp.core.context import RootContext
from hwfsdp.core.observer import moment
from hwfsdp.core.state import Phase
from hwfsdp.errors import StateError
from hwfsdp.features.recovery import RecoveringState, backward_broke, states_of


class GradientReductionHandle:
    """The result of `FSDPModule.finalize_backward(async_op=True)`."""

    def __init__(self, state: FinalizedState | None) -> None:
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
        state.close_iteration()
        self._state = None

    def is_of(self, state: FinalizedState) -> bool:
        """Whether this handle belongs to the model of this state."""
        return self._state is not None and self._state.root is state.root


def refused(subject: str, expected: str, got: str, remedy: str = "") -> StateError:
    return StateError(
        subject, expected=expected, got=got, remedy=remedy or "Run a forward and a backward again."
    )


class FinalizedState(RecoveringState):
    """A state whose backward the caller may end. An open backward is not broken, so this comes before the rules of `recovery`.

    Attributes:
        manual: True if the caller ends backwards. Only the root's value counts.
        is_open: True from the first backward of an iteration until its end. Meanwhile, `manual` cannot change.
    """

    manual = is_open = False

    # --- forward and backward ---

    def refuse_pending_reduction(self) -> None:
        """Raise StateError if a reduction was not waited for, before a forward."""
        if self.comm_ctx.reduction:
            raise refused("forward", *_PENDING)

    def queue_final_callback(self) -> None:
        self.root_state.is_open = True
        super().queue_final_callback()

    def finish_backward(self) -> None:
        """End the iteration, or leave it open if the caller ends it. Autograd calls this when a backward is over."""
        root_state = self.root_state
        if root_state.manual and root_state.is_open:
            with moment("finish_backward", self):
                root_state.leave_open()
            return
        super().finish_backward()
        if self.root.is_last_backward:
            root_state.is_open = False

    def leave_open(self) -> None:
        """Keep the iteration open, because more backwards may come. Groups that autograd left out wait for `finalize`, if they reduce."""
        self.root.forward_root = None
        self.root.backwards += 1
        for state in self.states:
            if state.phase is not Phase.POST_BACKWARD:
                if not any(group.reduce_grads for group in state.groups):
                    state.post_backward()
                state.phase = Phase.IDLE
        self.comm_ctx.settle()  # from here on, other code looks for partial gradients
        self.note_end_of_backward()

    # --- the end ---

    def finalize(self, async_op: bool) -> GradientReductionHandle | None:
        """Reduce all gradients that were not reduced yet. Wait for all reductions, or leave the wait to a handle."""
        if not self.root.states:
            return GradientReductionHandle(None) if async_op else None
        self.check_finalization(async_op)
        with moment("finish_backward", self):
            self.finish_states()
        if not async_op:
            self.close_iteration()
            return None
        handle = self.comm_ctx.reduction = GradientReductionHandle(self)
        return handle

    def close_iteration(self) -> None:
        self.end_iteration()
        self.comm_ctx.reduction = None
        self.is_open = False

    def check_finalization(self, async_op: bool) -> None:
        """Raise StateError if no backward can be ended now."""
        subject = "finalize_backward"
        groups = [group for state in self.states for group in state.groups]
        if self.root_state is not self:
            raise refused(subject, *_AT_ROOT)
        if self.comm_ctx.reduction:
            raise refused(subject, *_PENDING)
        if not self.manual:
            raise refused(
                subject,
                "set_manual_backward_finalization(True) before the forward",
                "a model whose backwards end by themselves",
                "Set it, or do not call finalize_backward.",
            )
        if backward_broke(self.comm_ctx):
            raise refused(
                subject,
                "backwards that ran to their end",
                "one that an exception ended",
                "Call reset_iter_state(), then run all forwards and backwards of the step again.",
            )
        if (self.root, None) in self.comm_ctx.callbacks:
            raise refused(subject, "a backward that is over", "one that runs", "Call it after backward().")
        if any(g.reducer.partial_grads or g.reduce_grads and not g.reducer.all_reduce_grads for g in groups):
            raise refused(
                subject,
                "gradients that are reduced over all replicas",
                "some that are reduced within a replica only",
                "Call set_requires_all_reduce(True) first, and reduce in one backward.",
            )
        if async_op and not {*self.comm_ctx.post_forward_order} <= {*self.root.groups}:
            raise refused(
                f"{subject}(async_op=True)",
                "no work of another model on the shared context",
                "forwards of another root",
                "Finish the other model's backward first.",
            )

    def set_manual(self, enabled: bool) -> None:
        """Choose who ends backwards: the caller, or each backward itself."""
        subject = "set_manual_backward_finalization"
        if self.root_state is not self:
            raise refused(subject, *_AT_ROOT)
        if enabled != self.manual and (in_backward() or self.is_open):
            raise refused(
                subject,
                "a call before the backward",
                "one after it began",
                "Finalize or reset the iteration first.",
            )
        self.manual = enabled

    def check_manual(self) -> None:
        """Raise StateError if a module below the root was set to manual finalization."""
        if any(state.manual for state in self.states[1:]):
            raise refused("set_manual_backward_finalization", *_AT_ROOT)

    def break_off(self) -> None:
        """Break off the iteration, and forget its reduction. `reset_iter_state` calls this, too."""
        reduction = self.comm_ctx.reduction
        if reduction and not reduction.is_of(self):
            raise refused("reset_iter_state", *_PENDING)
        super().break_off()
        self.comm_ctx.reduction = None

    def end_unfinished(self, root: RootContext) -> None:
        super().end_unfinished(root)
        (states_of(root) or self.states)[0].is_open = False


_AT_ROOT = "the root module", "a module below it", "Call it on the module that is called first in a forward."
_PENDING = (
    "the last reduction to be waited for",
    "one in flight",
    "Call wait() of the handle that finalize_backward(async_op=True) has returned.",
)
