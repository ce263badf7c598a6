"""The schedule with all features, in one class.

`FSDPState` derives from the core's schedule. Each of its methods is a moment of a step, or something that a program asks for. A
method calls the core's method, and each feature that has a part in this moment by its name. The core's method calls further methods
of this class. `core.state` has the order of a whole step, so read it first.

The features are modules of functions. What a feature notes about a state is an attribute that is declared here.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from hwfsdp.core import group as core, observer, state
from hwfsdp.core.device_streams import StreamEvent
from hwfsdp.core.observer import moment
from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.core.private_torch import NOTHING, in_backward
from hwfsdp.core.state import Args, Kwargs, Phase
from hwfsdp.errors import StateError, UsageError
from hwfsdp.features import entries, finalization, module_lists, param_meshes, recovery
from hwfsdp.features.advice import note_outermost
from hwfsdp.features.checks import check_ready, check_root, refuse_tracing
from hwfsdp.features.containers import RunningForward, put
from hwfsdp.features.feature_group import FSDPCommContext, ParamGroup, RootContext
from hwfsdp.features.lookup import all_groups
from hwfsdp.features.user_changes import free_changed
from hwfsdp.features.whole import explain_in_forward
from hwfsdp.interop.pipelines import check_stage
from hwfsdp.interop.profiler import follow_profiler
from hwfsdp.interop.torch_view import NamedState


class FSDPState(NamedState):
    """The schedule of the modules of one `fully_shard` call.

    Attributes:
        forward_prefetch, backward_prefetch: states whose groups are gathered next. If empty, the expected group is gathered.
        max_reductions: the number of reductions that may be in flight. Of the states whose groups share streams, the largest number
            counts.
        running: the forwards of the module that have not ended; usually one (`containers`).
        to_run: the modules of a list that must still run before the forward in progress ends (`module_lists`).
        accumulated: True if the last backward that ended left gradients that are not reduced over all ranks.
        hid_outputs: True if the module has returned an object of an unknown class since the last backward.
        forwards: if the group has frozen parameters, the nodes that its forwards made: since the last iteration that ended, and in a few
            before, whose graphs may have been retained.
        first_node: the number of the first node of the forward in progress.
    """

    root: RootContext
    comm_ctx: FSDPCommContext
    groups: list[ParamGroup]  # type: ignore[assignment]  # of the module, one for each mesh

    forward_prefetch: Sequence[FSDPState] = ()
    backward_prefetch: Sequence[FSDPState] = ()
    max_reductions = 1
    accumulated = hid_outputs = False
    first_node = 0

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
        self.forwards: deque[entries.Made] = deque(maxlen=entries.PENDING)
        super().__init__(modules, groups, comm_ctx, policy, device, auto_reshard, name)
        self.root = RootContext()
        for group in groups:
            group.join(self)

    @property
    def states(self) -> list[FSDPState]:
        """The states below the root, the root's first. As long as there is no root: only this state."""
        return self.root.states or [self]

    @property
    def is_root(self) -> bool:
        """True for the state of the root. As long as there is no root: for each state."""
        return self.states[0] is self

    # --- before a forward ---

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Prepare the forward. If a line raises, torch calls `post_forward`, too."""
        follow_profiler()
        running = RunningForward()
        self.running.append(running)  # before all lines that raise: `post_forward` takes it away
        finalization.refuse_pending_reduction(self)
        recovery.break_off_left_over(self)  # before all lines that look at the phase
        running.is_inner = self.phase is Phase.FORWARD and len(self.modules) == 1
        if len(self.modules) > 1 and self.starts_forward():
            self.to_run = set(self.modules)
        args, kwargs = super().pre_forward(module, args, kwargs)
        if running.visited is None and self.groups and torch.is_grad_enabled():
            # nothing was replaced, but the module may write into the containers
            args, kwargs = running.map_inputs(lambda tensor: tensor, (args, kwargs))
        running.is_entered = True
        return args, kwargs

    def is_outermost(self) -> bool:
        """True if the forward that begins now is the outermost one. An exception may have left the one on record."""
        return super().is_outermost() or (recovery.is_stale(self) and not recovery.is_inside_forward(self))

    def begin_iteration(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Begin the outermost forward."""
        refuse_tracing(self)
        self.ensure_root()
        recovery.clear_up(self)
        for each in self.states:  # after a KeyboardInterrupt, forwards are listed that did not end
            each.running = each.running[-1:] if each is self else []
            free_changed(each.groups)
        self.root.backwards_before = self.root.backwards
        args, kwargs = super().begin_iteration(args, kwargs)
        check_stage(self)
        return args, kwargs

    def wait_for_optimizer(self) -> None:
        """Let gathers wait for what the optimizer has issued, or for the event that the user has set."""
        root, streams = self.root, self.comm_ctx.streams
        if root.post_optim_event is None:
            super().wait_for_optimizer()
            return
        on_compute, root.post_optim_event = StreamEvent(streams.compute, root.post_optim_event), None
        if observer.slot is not None:
            # The user may have recorded the event anywhere. The recording assumes that it follows all work on compute so far.
            observer.slot.recorded(on_compute)
        streams.copy.wait(on_compute)

    def map_inputs(self, fn: Callable[[Tensor], Tensor], inputs: Any) -> Any:
        """Replace tensors in the caller's own containers, into which the module may write."""
        return self.running[-1].map_inputs(fn, inputs)

    def note_forward_and_predict(self) -> list[core.ParamGroup]:
        """Return the groups to gather meanwhile: what the user's list says, or else the expected ones. None in a recomputation."""
        entries.note_begin(self)
        learned = super().note_forward_and_predict()  # also if a list decides: this notes the order
        if in_backward():
            return []
        return [group for each in self.forward_prefetch for group in each.groups] or learned

    def prefetch_forward(self, groups: Sequence[core.ParamGroup]) -> None:
        """Start the gathers that should overlap with this forward. Gathers that the user's list asks for stay until they are used."""
        self.copy_out_first()
        guessed = len(self.root.guessed)
        super().prefetch_forward(groups)
        if self.forward_prefetch:
            del self.root.guessed[guessed:]

    def copy_out_first(self) -> None:
        """Copy out before the next gather starts, if the user's collective may give one buffer to both."""
        for group in self.groups:
            if group.transport.reuses_buffers:
                group.copy_out()

    # --- after a forward ---

    def post_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        """End the forward. torch calls this hook after an exception, too."""
        explain_in_forward(sys.exc_info()[1])
        try:
            if recovery.break_off_raised(self) or not (self.running and self.running[-1].is_entered):
                return output
            if self.running[-1].is_inner:  # the outer forward goes on
                return self.cast("cast_forward_outputs", output, self.policy.output_dtype)
            if len(self.modules) > 1 and self.phase is not Phase.PRE_BACKWARD:
                return module_lists.end_of_one(self, module, output)
            return super().post_forward(module, args, output)
        finally:
            if self.running:
                self.running.pop().give_back()

    def end_forward(self, output: Any) -> Any:
        """End the forward of the group."""
        output = super().end_forward(output)
        entries.note_end(self, output)
        self.to_run.clear()
        return output

    def is_read_later(self, output: Any) -> bool:
        """True if the output has a parameter, or is a generator, which computes later."""
        return bool(self.groups) and (isinstance(output, entries.LAZY) or entries.has_parameter(output))

    def watch(self, output: Any, before_backward: Callable[[], None]) -> Any:
        """Watch what the module wrote into containers of its arguments, too."""
        if not (self.groups and self.running and self.running[-1].containers):
            return super().watch(output, before_backward)
        written = self.running[-1].written()
        output, values = super().watch((output, [value for *_, value in written]), before_backward)
        for (container, key, old), new in zip(written, values, strict=True):
            put(container, key, old, new)
        return output

    def end_iteration_forward(self, output: Any) -> Any:
        """End the outermost forward."""
        for each in reversed(self.states):
            if len(each.modules) > 1:
                output = module_lists.end_with_root(each, output)
        output = super().end_iteration_forward(output)
        entries.mark_outputs(self, output)
        return output

    # --- backward ---

    def pre_backward(self) -> None:
        """Prepare the module's backward. Autograd calls this once per output."""
        follow_profiler()
        super().pre_backward()

    def enter_backward(self, *_: Any) -> None:
        """A node that uses parameters calls this (`entries`). Call pre-backward, unless the module is in its backward already."""
        if self.comm_ctx.backward_broke:
            self.break_off()
        if self.phase in (Phase.IDLE, Phase.POST_BACKWARD):
            self.pre_backward()

    def queue_final_callback(self) -> None:
        self.root.is_open = True
        recovery.call_at_end(self, (self.root, None), self.finish_backward)

    def note_backward_and_predict(self) -> list[core.ParamGroup]:
        """Return the groups to gather meanwhile: what the user's list says, or else the expected ones."""
        several = len(self.groups) > 1
        of_other = param_meshes.groups_before(self) if several else []  # before the core takes the place away
        expected = super().note_backward_and_predict()
        if self.backward_prefetch:
            return [group for each in self.backward_prefetch for group in reversed(each.groups)]
        return of_other if several else expected

    def prefetch_backward(self, groups: Sequence[core.ParamGroup]) -> None:
        self.copy_out_first()
        super().prefetch_backward(groups)

    def post_backward(self) -> None:
        """End the module's backward. A module of a list that was called by itself waits now, because no later call does it."""
        by_itself = len(self.modules) > 1 and self.phase is Phase.FORWARD
        with param_meshes.reduced_together(self) if len(self.groups) > 1 else NOTHING:
            super().post_backward()
        if by_itself:
            self.comm_ctx.finish_reductions()

    def gather_part(self) -> None:
        """Gather the parameters, if they are not there, before the backward of one module of a list that was called by itself."""
        self.gather(self.groups)
        self.copy_out()
        recovery.call_at_end(self, (self.root, self), self.finish_part)

    def finish_part(self) -> None:
        """After the backward of a module that was called by itself, reduce gradients that came after post-backward.

        Gradients of a module whose inputs need no gradient wait for the model's own backward.
        """
        self.comm_ctx.callbacks.pop((self.root, self), None)
        late = any(group.has_late_gradients for group in self.groups)
        if late and self.phase is Phase.POST_BACKWARD:
            self.post_backward()
            self.comm_ctx.finish_reductions()

    def finish_backward(self) -> None:
        """End the iteration, or leave it open if the caller ends it. Autograd calls this when a backward is over."""
        if self.root.manual and self.root.is_open:
            with moment("finish_backward", self):
                finalization.leave_open(self)
            return
        super().finish_backward()
        if self.root.is_last_backward:
            self.root.is_open = False

    def finish_states(self) -> None:
        """End a backward. The forward around it goes on, if there is one."""
        outermost = self.forward_around()
        super().finish_states()
        self.root.forward_root = outermost
        recovery.note_end_of_backward(self)

    def forward_around(self) -> FSDPState | None:
        """Return the state of the outermost forward, if this backward ran inside it. None for a recomputation that was cut short."""
        outermost = self.root.forward_root
        return outermost if outermost is not None and outermost.running else None

    def states_to_finish(self) -> list[FSDPState]:
        """Return the states that this backward may end: the modules of a forward around it need their parameters until it ends."""
        return [each for each in self.states if not each.running]

    def end_iteration(self) -> None:
        """Leave nothing in flight. The optimizer comes next."""
        super().end_iteration()
        for each in self.states:
            entries.forget_forwards(each)

    # --- the root ---

    def become_root(self) -> None:
        """Become the root, and check the whole model.

        Raises:
            StateError, UsageError: the model cannot run. Then it has no root yet: the user may correct it and try again.
        """
        check_root(self)
        below = cast("list[FSDPState]", self.name_states())  # errors have these names
        finalization.check_manual(self, below)
        for group in [group for each in below for group in each.groups]:
            group.adopt_registered()
            check_ready(group)
        self.root.is_stale = any(each.root.is_stale for each in below)
        super().become_root()
        for each in self.states:
            for group in each.groups:
                group.transport.label = "" if each is self else each.name
        note_outermost(self.modules[0])
        self.share_max_reductions()
        self.name_for_other_ranks()

    def follow(self, root: state.FSDPState) -> None:
        """Belong to the model of this root, and share its streams.

        Raises:
            StateError: `core.fully_shard` has sharded the root.
        """
        if not isinstance(root, FSDPState):
            raise StateError(
                f"forward of {root.name or 'the root module'}",
                expected="one fully_shard for the whole model",
                got="hwfsdp.core's for this module, hwfsdp's for a module in it",
                remedy="Shard this module with hwfsdp.fully_shard, too.",
            )
        super().follow(root)

    def share_max_reductions(self) -> None:
        """Set the number of reductions that may be in flight: the largest that the state of any group with these streams asks for."""
        sharing = [group for group in all_groups() if group.comm_ctx is self.comm_ctx]
        self.comm_ctx.max_reductions = max([group.state.max_reductions for group in sharing], default=1)

    def name_for_other_ranks(self) -> None:
        """Name the groups for the other ranks, too (`comm.group_identity`)."""
        transports = [group.transport for each in self.states for group in each.groups]
        first: dict[object, int] = {}  # by process group
        for transport in transports:
            ranks = transport.ranks.group
            first[ranks] = min(first.get(ranks, transport.member.place), transport.member.place)
        for transport in transports:
            transport.member.rename(transport.name, first[transport.ranks.group])

    # --- outside of the schedule ---

    def before_unshard(self) -> None:
        """Called before the user gathers by hand. Before the first forward, check what this forward would have checked."""
        follow_profiler()
        if self.comm_ctx.backward_broke:
            self.break_off()
        recovery.free_stale(self)
        for group in () if self.root.states else self.groups:
            group.adopt_registered()
            check_ready(group)

    def break_off(self) -> None:
        """End everything that an exception left unfinished, and forget a reduction that nobody has waited for.

        Raises:
            StateError: another model that shares the context waits for this reduction.
        """
        finalization.refuse_reduction_of_other(self)
        recovery.end_everything(self)
        self.comm_ctx.reduction = None


def checked_state(module: Any, caller: str) -> FSDPState:
    """Return the state of a module, or raise UsageError if `hwfsdp.fully_shard` was not called on it."""
    found = state.state_of(module)
    if not isinstance(found, FSDPState):
        by_core = "" if found is None else ", on which hwfsdp.core.fully_shard was called"
        raise UsageError(
            caller,
            expected="a module that hwfsdp.fully_shard was called on",
            got=type(module).__name__ + by_core,
            remedy="Call hwfsdp.fully_shard on it first.",
        )
    return found
