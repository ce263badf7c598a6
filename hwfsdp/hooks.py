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

Forward hooks are module hooks. Pre-backward is a hook on the tensors that the module returned: their gradient
is the first thing that the module's backward gets. Post-backward is an autograd function around the tensors
that the module was given: autograd calls it when their gradients, hence all others inside the module, are done.

The first module to run a forward becomes the *root* of all those below it. The root's forward begins and ends
an iteration, and when a backward has executed its last node, the root waits for what is still in flight.

Note [Groups without an input gradient]
    A module whose inputs need no gradient, such as an embedding of token ids, gets no post-backward call from
    autograd. The root's final callback makes it for every group that was left out.

Note [Recomputation]
    Activation checkpointing runs a forward inside the backward. Then the group's parameters are whole already,
    pre-backward saw to it, and post-backward will free them: the forward hooks stand aside.

Note [Views as outputs]
    An in-place operation on an output that is a view, such as `out += x` after `out = h.view(…)`, gives the output
    a new history in which the hook on it does not occur; that of the tensor it views still does. So a view's base
    gets a hook as well, which counts only if none of the outputs' own hooks came.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from hwfsdp import compat, events
from hwfsdp.errors import StateError, UsageError
from hwfsdp.events import Draft
from hwfsdp.group import FSDPCommContext, ParamGroup
from hwfsdp.nested import map_tensors, replace_tensors_with_grad, tensors_with_grad
from hwfsdp.precision import MixedPrecisionPolicy, cast_floating
from hwfsdp.prefetch import ForwardOrder, next_in_backward

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


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
        forward_order: the order in which groups run forward, learned for prefetching.
        guessed: groups that were gathered ahead in this forward; unused, they are stale after the next optimizer step.
        final_callback_queued: whether the backward in progress will call `finish_backward`.
        is_last_backward: whether the next backward's end may wait for the reductions and forget the order.
        backwards: how many are over.
    """

    def __init__(self) -> None:
        self.states: list[FSDPState] = []
        self.forward_root: FSDPState | None = None
        self.forwards_before = 0
        self.forward_order: ForwardOrder[ParamGroup] = ForwardOrder()
        self.guessed: list[ParamGroup] = []
        self.final_callback_queued = False
        self.is_last_backward = True
        self.backwards = 0


class FSDPState:
    """The schedule of one module.

    Attributes:
        module: the module given to `fully_shard`; fqn: its name from the root, the root's is its class.
        parent: the state of the closest sharded module above; None at the root.
        group: its parameters; None if every parameter below it was claimed by others.
        auto_reshard: `reshard_after_forward` was None: true below the root, false at the root.
        forward_prefetch, backward_prefetch: whose groups to gather next, if the user said so.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ParamGroup | None,
        comm_ctx: FSDPCommContext,
        policy: MixedPrecisionPolicy,
        device: torch.device,
        auto_reshard: bool,
    ) -> None:
        self.module, self.group, self.comm_ctx = module, group, comm_ctx
        self.policy, self.device, self.auto_reshard = policy, device, auto_reshard
        self.fqn = ""
        self.parent: FSDPState | None = None
        self.root = RootContext()
        self.phase = Phase.IDLE
        self.forward_prefetch: list[FSDPState] = []
        self.backward_prefetch: list[FSDPState] = []
        self._forward_spans: list[Draft] = []
        self._backward_span: Draft | None = None
        module.register_forward_pre_hook(self.on_pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.on_post_forward)

    # --- the outer edge of the hooks: what the event log sees ---

    def on_pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if events.active() is None:
            return self.pre_forward(args, kwargs)
        with events.scope("backward" if compat.in_backward() else "forward", self.fqn):
            if self.root.forward_root is None and (recorder := events.active()):
                self._sample(recorder)
            args, kwargs = self.pre_forward(args, kwargs)
            if recorder := events.active():
                self._sample(recorder)
                self._forward_spans.append(recorder.begin("forward", "compute"))
        return args, kwargs

    def on_post_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        recorder = events.active()
        if recorder is None:
            return self.post_forward(output)
        if self._forward_spans:
            self._forward_spans.pop().close()
        with events.scope("backward" if compat.in_backward() else "forward", self.fqn):
            self._sample(recorder)
            return self.post_forward(output)

    def on_pre_backward(self, grad: Tensor) -> Tensor:
        with events.scope("backward", self.fqn):
            entered = self.pre_backward()
            if entered and (recorder := events.active()):
                self._sample(recorder)
                self._open_backward_span(recorder)
        return grad

    def _open_backward_span(self, recorder: events.Recorder) -> None:
        """Spans nest as modules do, although a module and the last one inside it are entered in either order."""
        if self._backward_span is None and self.phase is not Phase.POST_BACKWARD:
            if self.parent:
                self.parent._open_backward_span(recorder)
            self._backward_span = recorder.begin("backward", "compute", owner=self.fqn)

    def on_post_backward(self) -> None:
        recorder = events.active()
        if recorder and self._backward_span:
            self._backward_span.close()
        self._backward_span = None
        with events.scope("backward", self.fqn):
            if recorder:
                self._sample(recorder)
            self.post_backward()

    def on_backward_end(self) -> None:
        with events.scope("backward", self.fqn):
            self.finish_backward()
            if recorder := events.active():
                self.root.states[0]._sample(recorder)

    def _sample(self, recorder: events.Recorder) -> None:
        if recorder.visit:
            recorder.visit(self.module)
        recorder.sample()

    # --- forward ---

    def pre_forward(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Before the module's forward.

        Afterwards the module has its whole parameters, the gather of the group expected next is in flight, and
        inputs are cast to the policy's param dtype and, if they need a gradient, wrapped so that autograd calls
        post-backward. In a recomputation only the parameters and the cast matter (Note [Recomputation]).
        """
        if self.phase is Phase.PRE_BACKWARD:
            self._check_recomputation()
            if self.group:
                self.group.unshard()
                self.group.wait_for_unshard()
            return self.cast_inputs(args, kwargs)
        if self.root.forward_root is None:
            args, kwargs = self.begin_iteration(args, kwargs)
        self.phase = Phase.FORWARD
        args, kwargs = self.cast_inputs(args, kwargs)
        if self.group:
            self.group.unshard()
            self.group.wait_for_gather()
        self.prefetch_forward()
        if self.group:
            self.group.finish_unshard()
            args, kwargs = self.watch_inputs(args, kwargs)
        return args, kwargs

    def _check_recomputation(self) -> None:
        if not compat.in_backward():
            raise StateError(
                f"forward of {self.fqn}",
                expected="the last backward to have ended",
                got="one that was broken off",
                remedy="After an exception in a backward, call reset_iter_state() on the root and zero the gradients.",
            )

    def prefetch_forward(self) -> None:
        """Starts the gathers to hide behind this forward: those the user listed, else the one learned."""
        learned = (
            self.root.forward_order.enter(self.group) if self.group and not compat.in_backward() else None
        )
        listed = [state.group for state in self.forward_prefetch if state.group]
        for group in listed or ([learned] if learned else []):
            group.unshard()
            self.root.guessed.append(group)

    def post_forward(self, output: Any) -> Any:
        """After the module's forward.

        Afterwards the parameters are freed unless they are to stay, the group's place in the order of forwards is
        noted for the backward, and outputs that need a gradient will call pre-backward. Returns the output, cast to
        the policy's output dtype. In a recomputation only the cast is left to do.
        """
        if self.phase is Phase.PRE_BACKWARD:
            return self.cast_outputs(output)
        if self.group and not compat.in_backward():
            if self.group.reshard_after_forward:
                self.group.reshard()
            self.comm_ctx.note_forward(self.group)
        self.phase = Phase.IDLE
        self.watch_outputs(output)
        if self.root.forward_root is self:
            self.end_iteration_forward()
        return self.cast_outputs(output)

    def begin_iteration(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The outermost forward begins: shards as the optimizer left them, inputs on the device."""
        if not self.root.states:
            self.become_root()
        self.root.forward_root = self
        self.root.forwards_before = len(self.comm_ctx.post_forward_order)
        self.comm_ctx.streams.copy.wait(self.comm_ctx.streams.compute.record())
        moved: tuple[Args, Kwargs] = map_tensors(lambda t: t.to(self.device), (args, kwargs))
        return moved

    def end_iteration_forward(self) -> None:
        """The outermost forward is over: wrong guesses are dropped, the order is learned."""
        for group in self.root.guessed:
            group.drop_gather()
        self.root.guessed.clear()
        if not compat.in_backward():  # a recomputation is a part of the model only
            self.root.forward_order.finish()
        if not torch.is_grad_enabled():  # no backward will come and forget it
            self.comm_ctx.forget_forwards(keep=self.root.forwards_before)
        self.comm_ctx.release_gather_buffer()
        self.root.forward_root = None

    def cast_inputs(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Floating-point tensors in the param dtype, if the policy has one and wants it."""
        if self.policy.param_dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        cast: tuple[Args, Kwargs] = cast_floating((args, kwargs), self.policy.param_dtype)
        return cast

    def cast_outputs(self, output: Any) -> Any:
        """Floating-point tensors in the output dtype, if the policy has one."""
        dtype = self.policy.output_dtype
        return output if dtype is None else cast_floating(output, dtype)

    # --- backward ---

    def watch_inputs(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Passes inputs that need a gradient through `PostBackward`."""
        if not torch.is_grad_enabled():
            return args, kwargs
        inputs = tensors_with_grad((args, kwargs))
        if not inputs:
            return args, kwargs
        outputs: tuple[Tensor, ...] = PostBackward.apply(self, *inputs)  # type: ignore[no-untyped-call]
        watched: tuple[Args, Kwargs] = replace_tensors_with_grad((args, kwargs), list(outputs))
        return watched

    def watch_outputs(self, output: Any) -> None:
        """Hooks pre-backward to outputs that need a gradient (Note [Views as outputs])."""
        if not torch.is_grad_enabled():
            return
        outputs = WatchedOutputs(self)
        for tensor in tensors_with_grad(output):
            tensor.register_hook(outputs.on_grad)
            base = compat.base_of_view(tensor)
            if base is not None and base.grad_fn is not None:
                base.grad_fn.register_prehook(outputs.on_base_grad)

    def pre_backward(self) -> bool:
        """Before the module's backward; called once per output that gets a gradient.

        Afterwards the module has its whole parameters, the gather of the group whose backward is expected next is in
        flight, and the root will be called when the backward is over.

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
        """Starts the gathers to hide behind this backward: those the user listed, else the one before in order."""
        index = self.group.post_forward_indices.pop() if self.group and self.group.post_forward_indices else 0
        if self.backward_prefetch:
            targets = [state.group for state in self.backward_prefetch]
        else:
            targets = [next_in_backward(self.comm_ctx.post_forward_order, index)]
        for target in targets:
            if target and target.unshard_in_backward:
                target.unshard()

    def post_backward(self) -> None:
        """After the module's backward: frees the parameters, and reduces the gradients or accumulates them."""
        self.phase = Phase.POST_BACKWARD
        if self.group:
            self.group.finish_gradients()

    def queue_final_callback(self) -> None:
        """Has the root called when this backward has executed its last node."""
        if not self.root.final_callback_queued:
            self.root.final_callback_queued = True
            compat.call_after_backward(self.on_backward_end)

    def finish_backward(self) -> None:
        """When a backward is over: groups left out are finished, what is in flight is waited for.

        Afterwards every state is idle. If this was the last backward of the iteration, all sharded gradients are
        there, no buffer is held, and the order of forwards is forgotten.
        """
        self.root.final_callback_queued = False
        self.root.forward_root = None
        self.root.backwards += 1
        for state in self.root.states:
            if state.phase is not Phase.POST_BACKWARD:  # Note [Groups without an input gradient]
                state.on_post_backward()
            state.phase = Phase.IDLE
        self.comm_ctx.streams.reduce_scatter.settle()  # gradients are looked at from here on
        if not self.root.is_last_backward:
            return
        self.comm_ctx.wait_for_reductions()
        self.comm_ctx.release_gather_buffer()
        self.comm_ctx.forget_forwards()
        for state in self.root.states:
            if state.group:
                state.group.drop_gather()

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
        self.comm_ctx.wait_for_reductions()
        self.comm_ctx.release_gather_buffer()
        self.comm_ctx.forget_forwards()
        for state in self.root.states or [self]:
            state.phase, state._backward_span = Phase.IDLE, None
            state._forward_spans.clear()
            if state.group:
                state.group.discard_iteration()
        self.root.guessed.clear()
        self.root.forward_order = ForwardOrder()
        self.root.forward_root, self.root.final_callback_queued = None, False
        self.root.backwards += 1

    def become_root(self) -> None:
        """At the first forward: gathers the states below, names everything, and checks that it can run.

        Raises:
            StateError: a module below ran a forward before, or has parameters on the meta device.
            UsageError: a group cannot be reduced as one.
        """
        named = [(fqn, state) for fqn, m in self.module.named_modules() if (state := state_of(m)) is not None]
        for fqn, state in named:
            if state.root.states:
                raise StateError(
                    f"fully_shard: module {fqn!r}",
                    expected="the root to run the first forward",
                    got="a forward of this module before that of its root",
                    remedy="Run the whole model once before calling a part of it by itself.",
                )
        self._name(named)
        groups = [state.group for _, state in named if state.group]
        for group in groups:
            group.adopt_registered()
            group.check_ready()
        for _, state in named:
            state.root, state.comm_ctx = self.root, self.comm_ctx
            if state.group:
                state.group.use(self.comm_ctx)
        if self.group and self.auto_reshard:
            self.group.reshard_after_forward = False
        self.root.states = [state for _, state in named]

    def _name(self, named: Sequence[tuple[str, FSDPState]]) -> None:
        """Gives states, groups and parameters their names from the root."""
        modules = {id(module): fqn for fqn, module in self.module.named_modules()}
        states = dict(named)
        for fqn, state in named:
            above = [fqn.rsplit(".", depth)[0] for depth in range(1, fqn.count(".") + 1)] + [""]
            state.parent = next((states[name] for name in above if name in states and name != fqn), None)
            state.fqn = state.fqn or fqn or type(self.module).__name__.removeprefix("FSDP")
            if state.group:
                state.group.rename(state.fqn)
                for param in state.group.params:
                    slot = param.slots[0]
                    param.fqn = f"{modules[id(slot.module)]}.{slot.name}".lstrip(".")


class WatchedOutputs:
    """What one forward of a module returned; tells its state when the backward comes to it."""

    def __init__(self, state: FSDPState) -> None:
        self.state = state
        self._seen_in = -1  # the backward in which an output's own hook came

    def on_grad(self, grad: Tensor) -> Tensor:
        self._seen_in = self.state.root.backwards
        return self.state.on_pre_backward(grad)

    def on_base_grad(self, grads: Sequence[Tensor]) -> None:
        """Only counts if no output's own hook came before (Note [Views as outputs])."""
        if self._seen_in != self.state.root.backwards:
            self.on_grad(grads[0])


class PostBackward(torch.autograd.Function):
    """The identity on the inputs of a module; its backward runs when the module's backward is done."""

    @staticmethod
    def forward(ctx: Any, state: FSDPState, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.state = state
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.state.on_post_backward()
        return (None, *grads)


_STATE = "_hwfsdp_state"


def attach_state(module: nn.Module, state: FSDPState) -> None:
    """Makes `state` the module's."""
    module.__dict__[_STATE] = state


def state_of(module: nn.Module) -> FSDPState | None:
    """The state that `fully_shard` gave the module; None if it was not called on it."""
    state: FSDPState | None = module.__dict__.get(_STATE)
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
