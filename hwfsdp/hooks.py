"""When: the schedule, as hooks around forward and backward.

Each `fully_shard` call makes one `FSDPState`, which turns four moments of its module into calls of its group:

    pre-forward    gather, wait, start the next gather, give the module its parameters
    post-forward   free the parameters (if they are to be freed), note the order
    pre-backward   gather again, wait, start the next gather
    post-backward  free the parameters, reduce the gradients while other groups compute

Three groups A, B, C, time to the right; each line is a stream:

    all-gather      A  B  C        |  C  B     A
    compute            A  B  C     |     C     B     A
    reduce-scatter                 |           C     B     A

Forward hooks are module hooks; those of the backward are in `watch`.

The first module to run a forward becomes the *root* of all those below it. The root's forward begins and ends
an iteration, and when a backward has executed its last node, the root waits for what is still in flight.

Note [Groups without an input gradient]
    A module whose inputs need no gradient, such as an embedding of token ids, gets no post-backward call from
    autograd. The root's final callback makes it for every group that was left out, and once more for those that got
    gradients after it, because a module ran twice and autograd came to one of the runs late.

Note [Recomputation]
    Activation checkpointing runs a forward inside the backward. Then the group's parameters are whole already,
    pre-backward saw to it, and post-backward will free them: the forward hooks stand aside.

Note [Several modules, one group]
    `fully_shard([a, b])` makes one state for both. The first of them to run opens the forward, the last one ends it. If
    the root's forward is over before all have run, it ends then. A member may be called by itself afterwards, as a
    head that computes a long sequence's loss in chunks: each call gathers if it must, and a backward that reaches the
    input of such a call reduces; nobody knows how many calls will follow, so the parameters stay whole until then.

Note [What an exception leaves]
    Two rules put it back, and no list of places where one may be raised. First, a whole parameter is valid until the next
    optimizer step: an iteration that begins after one frees all that was gathered before. Second, `break_off` ends
    whatever is unfinished. For a forward, the outermost module's hook calls it, since torch calls that hook after an
    exception, too; or the next forward does, after a KeyboardInterrupt. For a backward, only autograd holds what it is to
    call at the end (`FSDPCommContext.callbacks` refers to it weakly): gone without a call, the backward was broken off, and
    whoever comes next finds out, for all models that share the context. A forward inside a backward ends nothing:
    checkpointing stops it by an exception.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from typing import Any
from weakref import ref

import torch
from torch import nn

from hwfsdp import advice, compat, events
from hwfsdp.errors import StateError, UsageError
from hwfsdp.events import Draft
from hwfsdp.group import FSDPCommContext, ParamGroup, finish_broken_backward
from hwfsdp.nested import map_tensors
from hwfsdp.precision import MixedPrecisionPolicy, cast_floating
from hwfsdp.prefetch import ForwardOrder, next_in_backward
from hwfsdp.watch import WatchedOutputs, watch_inputs

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Callback = tuple["RootContext", "FSDPState | None"]  # None: that of the root itself


class Phase(Enum):
    """Where a state is in the iteration."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class RootContext:
    """What the states below one root share.

    Attributes:
        states: of all modules below the root, in `named_modules` order; empty until a root is found.
        forward_root: whose forward is running: the root, or a part of the model called by itself; else None.
        forwards_before: how many forwards were noted when the iteration began (a second one before its backward).
        guessed: groups that were gathered ahead in this forward; unused, they are stale after the next optimizer step.
        post_optim_event: what the next iteration's gathers wait for, if the user said so.
        steps: of optimizers, when what is whole now was gathered (Note [What an exception leaves]).
        handled: the id of the exception that was being handled when the forward began; one raised since has another.
        is_last_backward: whether the next backward's end may wait for the reductions and forget the order.
        backwards: how many are over.
    """

    def __init__(self) -> None:
        self.states: list[FSDPState] = []
        self.forward_root: FSDPState | None = None
        self.forwards_before = 0
        self.guessed: list[ParamGroup] = []
        self.post_optim_event: torch.Event | None = None
        self.steps, self.handled = advice.optimizer_steps, 0
        self.is_last_backward = True
        self.backwards = 0

    @property
    def groups(self) -> list[ParamGroup]:
        return [group for state in self.states for group in state.groups]


class FSDPState:
    """The schedule of the modules of one `fully_shard` call.

    Attributes:
        modules: those given to `fully_shard`; fqn: their names from the root, the root's is its class.
        parent: the state of the closest sharded module above; None at the root.
        root: what all states below one root share, the same object (`RootContext`). comm_ctx: what their groups share.
        group: its parameters; None if every parameter below it was claimed by others.
        auto_reshard: `reshard_after_forward` was None: true below the root, false at the root.
        to_run: modules whose forward the one in progress waits for (Note [Several modules, one group]).
        forward_prefetch, backward_prefetch: states whose groups to gather next, if the user said so; else empty.
        forward_order: the order in which groups ran when this state's forward was the outermost one.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        group: ParamGroup | None,
        comm_ctx: FSDPCommContext,
        policy: MixedPrecisionPolicy,
        device: torch.device,
        auto_reshard: bool,
    ) -> None:
        self.modules, self.group, self.comm_ctx = tuple(modules), group, comm_ctx
        self.policy, self.device, self.auto_reshard = policy, device, auto_reshard
        self.fqn = ""
        self.parent: FSDPState | None = None
        self.root = RootContext()
        self.phase = Phase.IDLE
        self.to_run: set[nn.Module] = set()
        self.forward_prefetch: list[FSDPState] = []
        self.backward_prefetch: list[FSDPState] = []
        self.forward_order: ForwardOrder[ParamGroup] = ForwardOrder()
        self._forward_spans: list[Draft] = []
        self._backward_span: Draft | None = None
        # a compiler must not look inside the hooks: they do what it cannot see
        self.pre_forward_hook = torch.compiler.disable(self.on_pre_forward, reason="FSDP hooks")
        self.post_forward_hook = torch.compiler.disable(self.on_post_forward, reason="FSDP hooks")
        for module in self.modules:
            module.register_forward_pre_hook(self.pre_forward_hook, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward_hook, always_call=True)

    @property
    def groups(self) -> list[ParamGroup]:
        return [self.group] if self.group else []

    # --- the outer edge of the hooks: what the event log sees ---

    def on_pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if events.active() is None:
            return self.pre_forward(args, kwargs)
        with events.scope(
            "backward" if compat.in_backward() else "forward", self.fqn, self.comm_ctx.streams.clock
        ):
            if self.root.forward_root is None and (recorder := events.active()):
                self._visit(recorder)
            args, kwargs = self.pre_forward(args, kwargs)
            if recorder := events.active():
                self._forward_spans.append(self._begin_span("forward", recorder))
        return args, kwargs

    def on_post_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        recorder = events.active()
        if recorder is None:
            return self.post_forward(module, output)
        if self._forward_spans:
            self._forward_spans.pop().close()
        with events.scope(
            "backward" if compat.in_backward() else "forward", self.fqn, self.comm_ctx.streams.clock
        ):
            recorder.sample()
            return self.post_forward(module, output)

    def on_pre_backward(self) -> None:
        with events.scope("backward", self.fqn, self.comm_ctx.streams.clock):
            with self._profiled("pre_backward", self.phase is not Phase.PRE_BACKWARD):
                entered = self.pre_backward()
            if entered and (recorder := events.active()):
                self._open_backward_span(recorder)

    def _open_backward_span(self, recorder: events.Recorder) -> None:
        """Spans nest as modules do, although a module and the last one inside it are entered in either order."""
        if self._backward_span is None and self.phase is not Phase.POST_BACKWARD:
            if self.parent:
                self.parent._open_backward_span(recorder)
            self._backward_span = self._begin_span("backward", recorder)

    def on_post_backward(self) -> None:
        recorder = events.active()
        if recorder and self._backward_span:
            self._backward_span.close()
        self._backward_span = None
        with events.scope("backward", self.fqn, self.comm_ctx.streams.clock):
            if recorder:
                self._watch_grads(recorder, sharded=False)
                recorder.sample()
            self.post_backward()

    def on_backward_end(self) -> None:
        with events.scope("backward", self.fqn, self.comm_ctx.streams.clock):
            with compat.profiler_range("root_post_backward_callback"):
                self.finish_backward()
            if recorder := events.active():
                for state in self.root.states:
                    state._watch_grads(recorder, sharded=True)
                recorder.sample()

    def _profiled(self, moment: str, when: bool = True) -> AbstractContextManager[Any]:
        """A range of torch's profiler around a moment of the group, if there is one; nothing when no profiler runs."""
        return self.group.profiled(moment) if self.group and when else nullcontext()

    def _visit(self, recorder: events.Recorder) -> None:
        """Has all parameters below the modules counted, those of nobody's group too."""
        for module in self.modules:
            recorder.visit(module)
        recorder.sample()

    def _watch_grads(self, recorder: events.Recorder, sharded: bool) -> None:
        """Has the gradients counted that are there now: of the whole parameters, or of the shards."""
        for param in [p for group in self.groups for p in group.params] if recorder.watch else ():
            of = param.sharded_param if sharded else param.unsharded_param
            if of is not None and of.grad is not None:
                recorder.watch(of.grad, "sharded_grad" if sharded else "unsharded_grad")  # type: ignore[misc]

    def _begin_span(self, op: str, recorder: events.Recorder) -> Draft:
        """Of a forward or a backward, which reads the whole parameters, where they are there."""
        params = [p for group in self.groups if group.is_unsharded for p in group.params]
        whole = [p.unsharded_param for p in params if p.unsharded_param is not None]
        ids, known = list(map(id, whole)), recorder.visited.get(self.modules[0])
        if known is None or known[0] != ids:  # others than the last time
            known = recorder.visited[self.modules[0]] = ids, recorder.identify(whole)
            recorder.visit_params(whole)
        draft = recorder.begin(op, "compute", owner=self.fqn)
        draft.reads = known[1]
        return draft

    # --- forward ---

    def pre_forward(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Before the forward of one of the modules.

        Afterwards the module has its whole parameters, the gather of the group expected next is in flight, and
        inputs are cast to the policy's param dtype and, if they need a gradient, wrapped so that autograd calls
        post-backward. In a recomputation only the parameters and the cast matter (Note [Recomputation]), and in the
        forward of a further module of the group, too.
        """
        if self.phase is not Phase.IDLE and self.is_left_over():
            self.break_off()
        first = self.phase not in (Phase.PRE_BACKWARD, Phase.FORWARD)
        if first:
            if self.root.forward_root is None or (self.is_stale() and not self.is_inside_forward()):
                with compat.profiler_range("root_pre_forward"):
                    args, kwargs = self.begin_iteration(args, kwargs)
            self.phase, self.to_run = Phase.FORWARD, set(self.modules)
        args, kwargs = self.cast_inputs(args, kwargs)
        with self._profiled("pre_forward", self.phase is Phase.FORWARD):
            self.gather_for_forward(first)
            if first and self.group:
                args, kwargs = watch_inputs((args, kwargs), self.on_post_backward)
        return args, kwargs

    def gather_for_forward(self, prefetch: bool) -> None:
        """Gives the modules their whole parameters, before one of them computes with them.

        Four steps. The gather of every group in `groups` (one, or none where other states claimed all parameters) is
        started (`ParamGroup.unshard`, which knows whether it was started ahead), and compute waits for it
        (`wait_for_gather`). Then, if `prefetch`, the gather of the group expected next is started (`prefetch_forward`, whether
        or not there is a group here): not earlier, or this group would share the wire with it; not later, or it would miss
        the time that the copy-out takes. At last the unshards are finished (`finish_unshard`): the gathered bytes are copied
        out and the whole parameters registered.

        Args:
            prefetch: off in a recomputation, and for further modules of a group whose forward is open.
        """
        for group in self.groups:
            group.unshard()
            group.wait_for_gather()
        if prefetch:
            self.prefetch_forward()
        for group in self.groups:
            group.finish_unshard()

    def is_left_over(self) -> bool:
        """Whether the phase, which is not IDLE, is that of a forward or backward that an exception ended."""
        if compat.in_backward():
            return self.comm_ctx.backward_broke
        entered_again = self.phase is Phase.FORWARD and (self.parent is None or self.is_stale())
        return bool(self.comm_ctx.callbacks) or (entered_again and not self.is_inside_forward())

    def is_inside_forward(self) -> bool:
        """Whether the outermost forward, before which this state was entered, is still running.

        One that a KeyboardInterrupt ended is not, although no hook was called. Slow: it looks at the stack. So it is asked
        only when something is odd: a module calls itself, a method calls the forward, or an optimizer steps in a forward.
        """
        outermost = self.root.forward_root
        return outermost is not None and compat.calls_in_progress(outermost.modules) > (outermost is self)

    def is_stale(self) -> bool:
        """Whether an optimizer stepped since the last iteration began; in a backward, it may step for some parameters."""
        return self.root.steps != advice.optimizer_steps and not compat.in_backward()

    def prefetch_forward(self) -> None:
        """Starts the gathers to hide behind this forward: those the user listed, else the one learned.

        Called once per forward of this state, when compute has waited for its own gather and before it computes. Starting a
        gather is `ParamGroup.unshard`, which does nothing for a group that is whole or on its way.

        - The outermost forward in progress (`root.forward_root`, a state, or None) has a `forward_order`. It is told of
          every group that this iteration enters (`enter`), whether or not a list decides, and says which one is expected
          next. It is not told, and nothing is learned, if this state has no group, if there is no outermost forward, or in a
          recomputation (`compat.in_backward()`), whose order is another.
        - If the user listed states (`forward_prefetch`, not empty), the groups of all of these are gathered, in that
          order, in place of the one expected. A listed state may have no group.
        - Every group gathered here is a guess, and is noted in `root.guessed`: when the forward is over, those that nobody
          came for are dropped, because the optimizer is about to change what they hold.
        """
        learned, outermost = None, self.root.forward_root
        if self.group and outermost and not compat.in_backward():
            learned = outermost.forward_order.enter(self.group)
        listed = [group for state in self.forward_prefetch for group in state.groups]
        for group in listed or ([learned] if learned else []):
            with group.profiled("forward_prefetch for"):
                group.unshard()
            self.root.guessed.append(group)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """After the forward of one of the modules; returns the output, cast to the policy's output dtype.

        In a recomputation, and before the last module of the group has run, the cast is all there is to do. Called after
        an exception in the forward, too; if that leaves the outermost one, the iteration is broken off.
        """
        outermost = self.root.forward_root is self
        if outermost and id(sys.exc_info()[1]) != self.root.handled and not compat.in_backward():
            self.break_off()
            return output
        if self.phase is Phase.PRE_BACKWARD:
            return self.cast_outputs(output)
        self.to_run.discard(module)
        if not self.to_run:
            with self._profiled("post_forward"):
                self.complete_forward(output)
        elif outermost or self.root.forward_root is None:  # called by itself
            self.watch_part(output)
        if outermost:
            output = self.end_iteration_forward(output)
        return self.cast_outputs(output)

    def complete_forward(self, output: Any) -> None:
        """After the forward of all modules of this state: gives the memory back and prepares the backward.

        Args:
            output: what the last of the modules returned: a tensor, or anything that holds some. It is only read.

        In this order:
        - The group, if there is one, is freed if it is to be (`ParamGroup.reshard_after_forward` knows), and its forward
          is noted with `comm_ctx.note_forward`: the backward gathers ahead in the reverse order. Neither happens while a
          backward runs (`compat.in_backward`), that is, in a recomputation, whose parameters the backward needs next.
        - The phase is IDLE, and `to_run` empty.
        - If gradients are enabled, the tensors in `output` that need one will call `on_pre_backward` when theirs is
          there: `WatchedOutputs(self.on_pre_backward, lambda: self.root.backwards).watch(output)`.
        """
        if self.group and not compat.in_backward():
            self.group.reshard_after_forward()
            self.comm_ctx.note_forward(self.group)
        self.phase = Phase.IDLE
        self.to_run.clear()
        if torch.is_grad_enabled():
            WatchedOutputs(self.on_pre_backward, lambda: self.root.backwards).watch(output)

    def watch_part(self, output: Any) -> None:
        """Has the parameters gathered, should they not be there, for the backward of one module of the group."""

        def gather() -> None:
            for group in self.groups:
                group.unshard()
                group.wait_for_unshard()
            self.queue_callback((self.root, self), self.finish_part)

        if torch.is_grad_enabled():
            WatchedOutputs(gather, lambda: self.root.backwards).watch(output)

    def finish_part(self) -> None:
        """When the backward of a module called by itself is over.

        Gradients that came after post-backward are reduced now. Those of a module whose inputs need no gradient wait
        for the model's own backward; should there be none before the optimizer's step, it warns.
        """
        self.comm_ctx.callbacks.pop((self.root, self), None)
        late = any(group.has_late_gradients for group in self.groups)
        if late and self.phase is Phase.POST_BACKWARD:
            self.on_post_backward()
            self.comm_ctx.finish_reductions()
        elif late and self.group:
            advice.note_unsynchronized(self.group, True)

    def begin_iteration(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The outermost forward begins: shards as the optimizer left them, inputs on the device."""
        if not self.root.states:
            self.become_root()
        if (self.comm_ctx.callbacks or self.root.forward_root) and not compat.in_backward():
            self.break_off()
        self.free_stale()
        self.root.forward_root, self.root.handled = self, id(sys.exc_info()[1])
        self.root.forwards_before = len(self.comm_ctx.post_forward_order)
        self._close_open_forwards()
        streams = self.comm_ctx.streams
        if self.root.post_optim_event is not None:
            streams.copy.wait_for_device_event(self.root.post_optim_event)
            self.root.post_optim_event = None
        else:
            streams.copy.wait(streams.compute.record())
        if self.device == torch.device("cpu"):
            return args, kwargs
        with compat.profiler_range("inputs_to_device"):
            moved: tuple[Args, Kwargs] = map_tensors(lambda t: t.to(self.device), (args, kwargs))
        return moved

    def free_stale(self) -> None:
        """Frees what was gathered before the last optimizer step."""
        if self.is_stale():
            self.root.steps = advice.optimizer_steps
            for state in self.root.states or [self]:
                if state.group and not state.group.is_sharded:
                    state.group.drop_gather()
                    state.group.reshard()

    def _close_open_forwards(self) -> None:
        """Modules called by themselves have left their groups whole; the optimizer may have stepped since."""
        for state in self.root.states:
            if state.phase is Phase.FORWARD:
                state.phase = Phase.IDLE
                for group in state.groups:
                    group.reshard()

    def end_iteration_forward(self, output: Any) -> Any:
        """The outermost forward is over: so are all inside it. Wrong guesses are dropped, the order is learned.

        Returns:
            `output`, cast to the output dtypes of groups that it ends for.
        """
        for state in reversed(self.root.states):
            if state is not self and state.phase is Phase.FORWARD:  # Note [Several modules, one group]
                with state._profiled("post_forward"):
                    state.complete_forward(output)
                output = state.cast_outputs(output)
        for group in self.root.guessed:
            group.drop_gather()
        self.root.guessed.clear()
        if not compat.in_backward():  # a recomputation is a part of the model only
            self.forward_order.finish()
        if not torch.is_grad_enabled():  # no backward will come and forget it
            self.comm_ctx.forget_forwards(keep=self.root.forwards_before)
        self.comm_ctx.release_gather_buffer()
        self.root.forward_root = None
        return output

    def cast_inputs(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The inputs of a forward in the dtype of its parameters.

        Floating-point tensors anywhere in `args` and `kwargs` come back in the policy's `param_dtype`, if it has one and
        `cast_forward_inputs` is on; everything else, and everything otherwise, is the same object as before.
        """
        if self.policy.param_dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        with compat.profiler_range("cast_forward_inputs"):
            cast: tuple[Args, Kwargs] = cast_floating((args, kwargs), self.policy.param_dtype)
        return cast

    def cast_outputs(self, output: Any) -> Any:
        """The output of a forward, floating-point tensors in the policy's `output_dtype`.

        Without an output dtype it is returned as it is, the same object.
        """
        dtype = self.policy.output_dtype
        if dtype is None:
            return output
        with compat.profiler_range("cast_forward_outputs"):
            return cast_floating(output, dtype)

    # --- backward ---

    def pre_backward(self) -> bool:
        """Before the modules' backward; autograd calls it once per output that gets a gradient.

        Each call makes sure that the root is called when the backward is over (`queue_final_callback`). Only the first
        call of a backward, which finds another phase than PRE_BACKWARD, does more, and in this order:
        - The phase becomes PRE_BACKWARD.
        - The group, if there is one and its backward needs parameters (`unshard_in_backward`), starts its gather
          (`unshard`), and compute waits for it (`wait_for_gather`).
        - The gather of the group whose backward is expected next is started (`prefetch_backward`, group or not): not
          before this group's own, which it would delay.
        - The unshard of the group, if there is one, is finished (`finish_unshard`): the modules have their whole parameters.

        Returns:
            Whether this was the first call of this backward.
        """
        self.queue_final_callback()
        if self.phase is Phase.PRE_BACKWARD:
            return False
        self.phase = Phase.PRE_BACKWARD
        if self.group and self.group.unshard_in_backward:
            self.group.unshard()
            self.group.wait_for_gather()
        self.prefetch_backward()
        if self.group:
            self.group.finish_unshard()
        return True

    def prefetch_backward(self) -> None:
        """Starts the gathers to hide behind this backward: those the user listed, else the one before in order.

        Called once per backward of this state, when compute has waited for its own gather and before it computes. Starting a
        gather is `ParamGroup.unshard`, which does nothing for a group that is whole or on its way. One that needs no
        parameters in backward (`unshard_in_backward` is off) is left out.

        - If the user listed states (`backward_prefetch`, not empty), the groups of all of these are gathered, in that
          order. A listed state may have no group.
        - Else it is the one before this group in `comm_ctx.post_forward_order`, if there is one (`next_in_backward`). The places
          of a group there are in `group.post_forward_indices`, one per forward, in order; its backwards come in reverse, and
          each takes one away, from the end, whether or not a list decides. A state without a group, or a group without a
          place, expects nothing.
        """
        index = self.group.post_forward_indices.pop() if self.group and self.group.post_forward_indices else 0
        if self.backward_prefetch:
            targets = [group for state in self.backward_prefetch for group in state.groups]
        else:
            before = next_in_backward(self.comm_ctx.post_forward_order, index)
            targets = [before] if before else []
        for target in targets:
            if target.unshard_in_backward:
                with target.profiled("backward_prefetch for"):
                    target.unshard()

    def post_backward(self) -> None:
        """After the modules' backward: frees the parameters, and reduces the gradients or accumulates them.

        Called when autograd has computed the gradients of the modules' inputs, and by the root, when the backward is
        over, for states that autograd did not come to. The phase becomes POST_BACKWARD, and every group in `groups`
        finishes its gradients (`ParamGroup.finish_gradients`), which starts reductions and does not wait for them.

        A module that was called by itself, outside the root's forward, finds the phase FORWARD here; then nobody comes to
        wait later, so all reductions are finished before this returns (`comm_ctx.finish_reductions`).
        """
        called_by_itself = self.phase is Phase.FORWARD  # Note [Several modules, one group]
        self.phase = Phase.POST_BACKWARD
        for group in self.groups:
            group.finish_gradients()
        if called_by_itself:
            self.comm_ctx.finish_reductions()

    def queue_final_callback(self) -> None:
        """Has the root called when this backward has executed its last node."""
        self.queue_callback((self.root, None), self.on_backward_end)

    def queue_callback(self, key: Callback, callback: Callable[[], None]) -> None:
        """Has `callback` called when this backward is over, once; one before that never came to its end is broken off."""
        queued = self.comm_ctx.callbacks.get(key)
        if queued is not None and queued() is not None:
            return
        if self.comm_ctx.backward_broke:
            self.break_off()
        compat.call_after_backward(callback)
        self.comm_ctx.callbacks[key] = ref(callback)

    def finish_backward(self) -> None:
        """When a backward is over: groups left out are finished, what is in flight is waited for.

        Afterwards every state is idle. If this was the last backward of the iteration, all sharded gradients are
        there, no buffer is held, and the order of forwards is forgotten.
        """
        self.root.forward_root = None
        self.root.backwards += 1
        for state in self.root.states:
            late = any(group.has_late_gradients for group in state.groups)
            if state.phase is not Phase.POST_BACKWARD or late:  # Note [Groups without an input gradient]
                state.on_post_backward()
            state.phase = Phase.IDLE
            for group in state.groups:
                group.note_accumulated()
        self.comm_ctx.settle()  # gradients are looked at from here on
        self.comm_ctx.callbacks.pop((self.root, None), None)
        if not self.root.is_last_backward:
            return
        self.comm_ctx.finish_reductions()
        self.comm_ctx.release_gather_buffer()
        self.comm_ctx.forget_forwards()
        for group in self.root.groups:
            group.drop_gather()
        if any(group.is_offloaded for group in self.root.groups):
            self.comm_ctx.synchronize()

    # --- the root ---

    def reset_iteration(self) -> None:
        """After an exception in forward or backward: every state below the root is as before an iteration.

        Raises:
            StateError: this is not the root.
        """
        if self.root.states and self.root.states[0] is not self:
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
                group.discard_iteration()
        self.root.guessed.clear()

    def break_off(self) -> None:
        """Ends what is unfinished: every state is idle, modules have their shards, no reduction is in flight.

        Gathers in flight are left to whoever comes next, who has time to wait for them (`free_stale`).
        """
        # also of other models on the same wire: their reductions would end here, too, after their zero_grad
        broken = dict.fromkeys(root for root, _ in self.comm_ctx.callbacks)
        for root in broken:
            root.backwards += 1
        if broken:
            finish_broken_backward([group for root in broken for group in root.groups], self.comm_ctx)
        self.comm_ctx.callbacks.clear()
        self.comm_ctx.release_gather_buffer()
        self.comm_ctx.forget_forwards(keep=0 if broken else self.root.forwards_before)
        for root in {**broken, self.root: None}:
            self._end_unfinished(root)

    def _end_unfinished(self, root: RootContext) -> None:
        """`break_off` for the states of one root, this state's or that of another model."""
        for state in root.states or [self]:
            state.phase, state._backward_span = Phase.IDLE, None
            state.to_run.clear()
            state._forward_spans.clear()
            state.forward_order.forget()
            for group in state.groups:
                group.reshard()
        root.forward_root, root.steps = None, -1

    @compat.outside_transforms
    def become_root(self) -> None:
        """At the first forward: gathers the states below, names everything, and checks that it can run.

        Raises:
            StateError: a module below ran a forward before, or has parameters on the meta device.
            UsageError: a group cannot be reduced as one, or is asked to be the root with several modules.
        """
        named = self._name_states()
        groups = [group for state in named for group in state.groups]
        for group in groups:
            group.adopt_registered()
            group.check_ready()
        for state in named:
            state.root, state.comm_ctx = self.root, self.comm_ctx
            for group in state.groups:
                group.use(self.comm_ctx)
        if self.group and self.auto_reshard:
            self.group.reshard_mesh = None
        self.root.states = list(named)
        self.set_max_reductions()
        if groups:
            mesh, owner = groups[0].mesh, groups[0].fqn
            lines = [f"{p.fqn} {tuple(p.shape)} in group {g.fqn!r}" for g in groups for p in g.params]
            advice.compare_structure(mesh.shard if mesh.shard.group else mesh.replicate, owner, lines)

    def set_max_reductions(self) -> None:
        """The groups share one queue of reductions: the longest that any of them asks for."""
        self.comm_ctx.max_reductions = max((g.max_reductions for g in self.root.groups), default=1)

    def _name_states(self) -> dict[FSDPState, None]:
        """The states below, in order; they, groups and parameters have their names from the root afterwards."""
        if len(self.modules) > 1:
            raise UsageError(
                "fully_shard: the module whose forward comes first",
                expected="a single module, the root",
                got=f"one of the {len(self.modules)} of a group",
                remedy="Call fully_shard on the model as well, and run the forward of that.",
            )
        modules = {module: fqn for fqn, module in self.modules[0].named_modules()}
        above: dict[str, FSDPState] = {}
        found: dict[FSDPState, list[str]] = {}
        for module, fqn in modules.items():
            state = state_of(module)
            if state is None:
                continue
            if state.root.states:
                raise StateError(
                    f"fully_shard: module {fqn!r}",
                    expected="the root to run the first forward",
                    got="a forward of this module before that of its root",
                    remedy="Run the whole model once before calling a part of it by itself.",
                )
            if state not in found:  # `named_modules` gives parents before their children
                prefixes = [name for name in above if name == "" or fqn.startswith(f"{name}.")]
                state.parent = above[max(prefixes, key=len)] if prefixes else None
            above[fqn] = state
            found.setdefault(state, []).append(fqn)
        for state, fqns in found.items():
            state.fqn = state.fqn or ", ".join(fqns) or type(self.modules[0]).__name__.removeprefix("FSDP")
            for group in state.groups:
                group.rename(state.fqn, ", ".join(fqns))
                for param in group.params:
                    slot = param.slots[0]
                    param.fqn = f"{modules.get(slot.module, '')}.{slot.name}".lstrip(".")
        return dict.fromkeys(found)


_STATE = "_hwfsdp_state"


def attach_state(module: nn.Module, state: FSDPState) -> None:
    """Makes `state` the module's."""
    module.__dict__[_STATE] = state


def state_of(module: nn.Module) -> FSDPState | None:
    """The state that `fully_shard` gave the module; None if it was not called on it."""
    state: FSDPState | None = getattr(module, "__dict__", {}).get(_STATE)
    return state


def checked_state(module: nn.Module, caller: str) -> FSDPState:
    """`state_of`, for callers that need one."""
    state = state_of(module)
    if state is None:
        raise UsageError(
            caller,
            expected="a module that fully_shard was called on",
            got=type(module).__name__,
            remedy="Call fully_shard on it first.",
        )
    return state
