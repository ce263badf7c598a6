"""The schedule with all features.

A feature that changes when something happens is a class. `FSDPState` derives from these classes, in an order that is written
down here once. Moments at which several features have something to do are methods of `FSDPState`: they read from top to bottom.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from hwfsdp.core import group as core, observer
from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.core.private_torch import in_backward
from hwfsdp.core.state import Args, Kwargs, Phase
from hwfsdp.core.device_streams import StreamEvent
from hwfsdp.errors import StateError, UsageError
from hwfsdp.features.advice import compare_models
from hwfsdp.features.checks import check_ready, check_root, refuse_tracing
from hwfsdp.features.containers import RunningForward, put
from hwfsdp.features.entries import PENDING, EnteredState
from hwfsdp.features.finalization import FinalizedState
from hwfsdp.features.lookup import all_groups
from hwfsdp.features.whole import explain_in_forward
from hwfsdp.features.feature_group import FSDPCommContext, ParamGroup
from hwfsdp.features.module_lists import SeveralModules
from hwfsdp.features.param_meshes import MeshesState
from hwfsdp.features.recovery import backward_broke
from hwfsdp.features.user_changes import warn_of_old_values
from hwfsdp.interop.pipelines import check_stage
from hwfsdp.interop.profiler import follow_profiler
from hwfsdp.interop.torch_view import ViewedState


class FSDPState(
    FinalizedState,  # the caller may end backwards; otherwise they end as in the core
    SeveralModules,  # a forward ends when the last module of a list has run
    MeshesState,  # a module with several groups, one for each mesh, gathers ahead all groups of the next one
    EnteredState,  # around the core: notes what a forward made
    ViewedState,  # torch's names, after the hooks that they name
):
    """The schedule of the modules of one `fully_shard` call.

    Attributes:
        forward_prefetch, backward_prefetch: states whose groups are gathered next. If empty, the expected group is gathered.
        post_optim_event: the event that the next iteration's gathers wait for, instead of all work on compute. Only the root's
            value counts.
        running: the forwards of the module that have not ended; usually one.
        max_reductions: the number of reductions that may be in flight. Of the states whose groups share streams, the largest number
            counts.

    If several bases have a method, the first one's runs first, and calls the next one's:

        finish_backward               finalization → core
        queue_final_callback          finalization → recovery, in place of the core
        break_off, end_unfinished     finalization → recovery
        begin_iteration, end_iteration    entries → core
        is_outermost                  recovery → core
        follow                        the base of all → core
        post_forward                  module_lists → core
        post_backward                 module_lists → param_meshes → core
        end_forward                   module_lists → entries → core
        end_iteration_forward         module_lists → entries → core
        note_forward_and_predict      entries → core
        note_backward_and_predict     param_meshes → core
    """

    forward_prefetch: Sequence[FSDPState] = ()
    backward_prefetch: Sequence[FSDPState] = ()
    post_optim_event: torch.Event | None = None
    max_reductions = 1

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParamGroup],
        comm_ctx: FSDPCommContext,
        policy: MixedPrecisionPolicy,
        device: torch.device,
        auto_reshard: bool,
        name: str,
    ) -> None:
        self.running: list[RunningForward] = []
        self.to_run: set[nn.Module] = set()
        self.forwards: deque[range] = deque(maxlen=PENDING)
        super().__init__(modules, groups, comm_ctx, policy, device, auto_reshard, name)
        for group in groups:
            group.join(self)

    # --- forward ---

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Prepare the forward. If a line raises, torch calls `post_forward`, too."""
        follow_profiler()
        running = RunningForward()
        self.running.append(running)  # before all lines that raise: `post_forward` takes it away
        self.refuse_pending_reduction()
        self.break_off_left_over()  # before all lines that look at the phase
        running.is_inner = self.phase is Phase.FORWARD and len(self.modules) == 1
        self.expect_all_modules()
        args, kwargs = super().pre_forward(module, args, kwargs)
        if running.visited is None and self.groups and torch.is_grad_enabled():
            # nothing was replaced, but the module may write into the containers
            args, kwargs = running.map_inputs(lambda tensor: tensor, (args, kwargs))
        running.is_entered = True
        return args, kwargs

    def post_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        """End the forward. torch calls this hook after an exception, too."""
        explain_in_forward(sys.exc_info()[1])
        try:
            if self.break_off_raised() or not (self.running and self.running[-1].is_entered):
                return output
            if self.running[-1].is_inner:  # the outer forward goes on
                return self.cast("cast_forward_outputs", output, self.policy.output_dtype)
            return super().post_forward(module, args, output)
        finally:
            if self.running:
                self.running.pop().give_back()

    def map_inputs(self, fn: Callable[[Tensor], Tensor], inputs: Any) -> Any:
        return self.running[-1].map_inputs(fn, inputs)

    def watch(self, output: Any, before_backward: Callable[[], None]) -> Any:
        """Watch what the module wrote into containers of its arguments, too."""
        if not (self.groups and self.running and self.running[-1].containers):
            return super().watch(output, before_backward)
        written = self.running[-1].written()
        output, values = super().watch((output, [value for *_, value in written]), before_backward)
        for (container, key, old), new in zip(written, values, strict=True):
            put(container, key, old, new)
        return output

    def begin_iteration(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Begin the outermost forward."""
        refuse_tracing(self)
        self.clear_up()  # becomes the root, if this is the first forward
        for state in self.states:  # after a KeyboardInterrupt, forwards are listed that did not end
            state.running = state.running[-1:] if state is self else []
            warn_of_old_values(state.groups)
        args, kwargs = super().begin_iteration(args, kwargs)
        check_stage(self)
        return args, kwargs

    def become_root(self) -> None:
        """Become the root, and check the whole model.

        Raises:
            StateError, UsageError: the model cannot run. Then it has no root yet: the user may correct it and try again.
        """
        check_root(self)
        super().become_root()
        for state in self.states:
            for group in state.groups:
                group.set_label("" if state is self else state.name)
        compare_models(self)
        self.share_max_reductions()
        self.name_for_other_ranks()
        try:
            for state in self.states:
                for group in state.groups:
                    check_ready(group)
            self.check_manual()
        except (StateError, UsageError):
            self.root.states = []
            raise

    def share_max_reductions(self) -> None:
        """Set the number of reductions that may be in flight: the largest that the state of any group with these streams asks for."""
        sharing = [group for group in all_groups() if group.comm_ctx is self.comm_ctx]
        self.comm_ctx.max_reductions = max([group.state.max_reductions for group in sharing], default=1)

    def name_for_other_ranks(self) -> None:
        """Name the groups for the other ranks, too (`comm.group_identity`)."""
        transports = [group.transport for state in self.states for group in state.groups]
        first: dict[object, int] = {}  # by process group
        for transport in transports:
            ranks = transport.ranks.group
            first[ranks] = min(first.get(ranks, transport.member.place), transport.member.place)
        for transport in transports:
            transport.member.rename(transport.name, first[transport.ranks.group])

    def wait_for_optimizer(self) -> None:
        """Let gathers wait for what the optimizer has issued, or for the event that the user has set."""
        root, streams = self.root_state, self.comm_ctx.streams
        if root.post_optim_event is None:
            super().wait_for_optimizer()
            return
        on_compute, root.post_optim_event = StreamEvent(streams.compute, root.post_optim_event), None
        if observer.slot is not None:
            # The user may have recorded the event anywhere. The recording assumes that it follows all work on compute so far.
            observer.slot.recorded(on_compute)
        streams.copy.wait(on_compute)

    # --- gathers ahead ---

    def note_forward_and_predict(self) -> list[core.ParamGroup]:
        """Return the groups to gather meanwhile: what the user's list says, or else the expected ones. None in a recomputation."""
        learned = super().note_forward_and_predict()  # also if a list decides: this notes the order
        if in_backward():
            return []
        return [group for state in self.forward_prefetch for group in state.groups] or learned

    def note_backward_and_predict(self) -> list[core.ParamGroup]:
        expected = super().note_backward_and_predict()
        if not self.backward_prefetch:
            return expected
        return [group for state in self.backward_prefetch for group in reversed(state.groups)]

    def prefetch_forward(self, groups: Sequence[core.ParamGroup]) -> None:
        self.copy_out_first()
        super().prefetch_forward(groups)

    def prefetch_backward(self, groups: Sequence[core.ParamGroup]) -> None:
        self.copy_out_first()
        super().prefetch_backward(groups)

    def copy_out_first(self) -> None:
        """Copy out before the next gather starts, if the user's collective may give one buffer to both."""
        for group in self.groups:
            if group.transport.reuses_buffers:
                group.copy_out()

    # --- backward ---

    def pre_backward(self) -> None:
        """Autograd calls this once per output. The group's method of the same name is called once per backward, as torch does."""
        follow_profiler()
        if self.groups and self.phase is not Phase.PRE_BACKWARD:
            self.groups[0].pre_backward()  # which calls `begin_backward`; a program may replace it
        else:
            super().pre_backward()

    def begin_backward(self) -> None:
        super().pre_backward()

    def finish_states(self) -> None:
        """End a backward. It may have run inside a forward, whose modules need their parameters until it ends."""
        outermost = cast("FSDPState | None", self.root.forward_root)
        super().finish_states()
        if outermost is not None and outermost.running:
            self.root.forward_root = outermost
        self.note_end_of_backward()

    def states_to_finish(self) -> list[FSDPState]:
        return [state for state in self.states if not state.running]

    # --- outside of the schedule ---

    def before_unshard(self) -> None:
        """Called before the user gathers by hand. Before the first forward, check what this forward would have checked."""
        follow_profiler()
        if backward_broke(self.comm_ctx):
            self.break_off()
        self.free_stale()
        for group in () if self.root.states else self.groups:
            group.adopt_registered()
            check_ready(group)
