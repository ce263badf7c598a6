"""Several modules, one group: `fully_shard([a, b])`, and parts that are called by themselves.

The first of the modules to run opens the forward, and the last one ends it. If the root's forward is over before all modules have
run, the forward of the group ends there. Afterwards, one of the modules may be called by itself, such as a head that computes a
long sequence's loss in chunks. Each such call gathers if necessary. When a backward reaches the call's input, the gradients are reduced.
Until then the parameters stay whole, because nothing says how many calls will follow.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hwfsdp.core.observer import moment
from hwfsdp.core.state import Args, Phase
from hwfsdp.features.recovery import RecoveringState


class SeveralModules(RecoveringState):
    """A state whose module may be a list of several.

    Attributes:
        to_run: modules that must still run before the forward in progress ends. Empty if there is only one module.
    """

    def expect_all_modules(self) -> None:
        """At the beginning of a forward, expect all modules of a list."""
        if len(self.modules) > 1 and self.starts_forward():
            self.to_run = set(self.modules)

    def post_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        """End the forward, if this is the last of the modules."""
        if len(self.modules) == 1 or self.phase is Phase.PRE_BACKWARD:
            return super().post_forward(module, args, output)
        self.to_run.discard(module)
        with moment("post_forward", self):
            outermost = self.root.forward_root is self
            if not self.to_run:
                output = self.end_forward(output)
            elif outermost or self.root.forward_root is None:  # the module was called by itself
                output = self.watch(output, self.gather_part)
            if outermost:
                output = self.end_iteration_forward(output)
            return self.cast("cast_forward_outputs", output, self.policy.output_dtype)

    def end_forward(self, output: Any) -> Any:
        output = super().end_forward(output)
        self.to_run.clear()
        return output

    def end_iteration_forward(self, output: Any) -> Any:
        for state in reversed(self.states):
            if len(state.modules) > 1:
                output = state.end_with_root(output)
        return super().end_iteration_forward(output)

    def end_with_root(self, output: Any) -> Any:
        """End the forward of the group if some modules have not run, because they will not run any more."""
        if self.root.forward_root is self or self.phase is not Phase.FORWARD:
            return output
        with moment("post_forward", self):
            output = self.end_forward(output)
            return self.cast("cast_forward_outputs", output, self.policy.output_dtype)

    def post_backward(self) -> None:
        """After the backward of modules that were called by themselves, make compute wait now, because no later call does it."""
        by_themselves = len(self.modules) > 1 and self.phase is Phase.FORWARD
        super().post_backward()
        if by_themselves:
            self.comm_ctx.finish_reductions()

    # --- a part called by itself ---

    def gather_part(self) -> None:
        """Gather the parameters, if they are not there, before the backward of one module of the group."""
        self.gather(self.groups)
        self.copy_out()
        self.queue_callback((self.root, self), self.finish_part)

    def finish_part(self) -> None:
        """After the backward of a module that was called by itself, reduce gradients that came after post-backward.

        Gradients of a module whose inputs need no gradient wait for the model's own backward.
        """
        self.comm_ctx.callbacks.pop((self.root, self), None)
        late = any(group.has_late_gradients for group in self.groups)
        if late and self.phase is Phase.POST_BACKWARD:
            self.post_backward()
            self.comm_ctx.finish_reductions()
