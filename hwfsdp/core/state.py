"""The schedule: hooks around forward and backward decide when a group gathers, frees and reduces.

Each `fully_shard` call makes one `FSDPState`. At four moments of its module, the state calls its group:

    pre-forward    gather, wait, start the next gather, give the module its parameters
    post-forward   free the parameters (unless they stay for the backward), note the order
    pre-backward   gather again, wait, start the next gather
    post-backward  free the parameters, reduce the gradients while other groups compute

An example with three groups A, B, C. Time runs to the right, each line is a stream. Computing a backward takes twice as long. C is
gathered again, because its forward has freed it:

    all-gather      A  B  C        |  C  B     A
    compute            A  B  C     |     C     B     A
    reduce-scatter                 |           C     B     A

The forward hooks are module hooks. The backward hooks are in `autograd_hooks`.

An iteration begins with a forward of the outermost module. It ends with the last backward, after which the optimizer steps. The
first module that runs a forward becomes the *root* of all modules below it. When a
backward has executed its last node, autograd calls `finish_backward`. At the end of the last backward of the iteration, this call
waits for everything that is still in flight.

After an exception in a forward, torch still calls the hooks after forward, so modules have their shards again. An exception in a
backward leaves states in the middle of an iteration, and later steps would be wrong. If the optimizer steps while parameters are
whole, they become stale. The core repairs neither; `hwfsdp.features.recovery` does.

Note [Groups without an input gradient]
    Autograd calls post-backward only for a module with an input that needs a gradient. An embedding of token ids has no such
    input. So `finish_backward` makes the call. It also repeats the call for a group that got gradients after post-backward. This
    happens if the group's module ran twice, and autograd reached one of the runs late.

Note [Recomputation]
    Activation checkpointing runs a forward again, inside the backward. With `use_reentrant=True`, it repeats a whole sharded module
    before pre-backward: the phase is IDLE, and the forward gathers. Otherwise pre-backward came first: the phase is PRE_BACKWARD, and
    the parameters are there. In both cases they are not freed after that forward, because the backward of the same module follows.
    The order of such forwards is not learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from hwfsdp.core import private_torch
from hwfsdp.core.autograd_hooks import WatchedOutputs, watch_inputs
from hwfsdp.core.context import ForwardOrder, FSDPCommContext, RootContext
from hwfsdp.core.group import ParamGroup
from hwfsdp.core.observer import moment
from hwfsdp.core.precision import MapTree, MixedPrecisionPolicy, cast_floating, map_tensors

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Phase(Enum):
    """The place of a state in the iteration. In a step: IDLE, FORWARD, IDLE, PRE_BACKWARD, POST_BACKWARD, IDLE.

    Attributes:
        IDLE: outside of forward and backward, and between the two.
        FORWARD: between pre-forward and post-forward.
        PRE_BACKWARD: between pre-backward and post-backward.
        POST_BACKWARD: from post-backward to the end of the whole backward.
    """

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class FSDPState:
    """The schedule of the module of one `fully_shard` call. Extension point.

    Attributes:
        modules: the module given to `fully_shard`, in a tuple. name: its name from the root; the root's is its class. Empty until
            there is a root, unless the caller has given a name.
        root: the `RootContext` that all states below one root share. comm_ctx: the context that their groups share.
        groups: the module's parameters: one group in the core, none if other calls have claimed every parameter below it. A feature
            makes several.
        policy: its dtypes. device: where it computes. phase: its place in the iteration.
        auto_reshard: True if the caller gave no `reshard_after_forward`. Then the root keeps its parameters after a forward that
            a backward can follow, and all other modules free them.
        forward_order: the order in which states with groups ran when this state's forward was the outermost one.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParamGroup],
        comm_ctx: FSDPCommContext,
        policy: MixedPrecisionPolicy,
        device: torch.device,
        auto_reshard: bool,
        name: str = "",
    ) -> None:
        self.modules, self.groups, self.comm_ctx = tuple(modules), list(groups), comm_ctx
        self.policy, self.device, self.auto_reshard = policy, device, auto_reshard
        self.name, self.root, self.phase = name, RootContext(), Phase.IDLE
        self.forward_order = ForwardOrder()
        # a compiler must not trace the hooks, because it cannot see their effects
        self.pre_forward_hook = torch.compiler.disable(self.pre_forward, reason="FSDP hooks")
        self.post_forward_hook = torch.compiler.disable(self.post_forward, reason="FSDP hooks")
        for module in self.modules:
            module.__dict__["_hwfsdp_state"] = self  # not as a submodule
            module.register_forward_pre_hook(self.pre_forward_hook, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward_hook, always_call=True)  # after an exception, too

    # --- forward ---

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Prepare the module's forward: its parameters are whole afterwards, and the next gather is in flight.

        The next gather starts between the wait and the copy-out. On the CPU, it would compete with this group's gather if it
        started before the wait. After the copy-out it could not overlap with the copy-out: on a device, it would even wait for
        it (`ParamGroup.copy_out`). The state casts the inputs. Then it watches them, so that autograd calls post-backward.
        """
        with moment("pre_forward", self):
            starts = self.starts_forward()
            if starts:
                if self.is_outermost():
                    with moment("root_pre_forward", self):
                        args, kwargs = self.begin_iteration(args, kwargs)
                self.phase = Phase.FORWARD
            if dtype := self.policy.cast_forward_inputs and self.policy.param_dtype:
                args, kwargs = self.cast("cast_forward_inputs", (args, kwargs), dtype, self.map_inputs)
            self.gather(self.groups)
            if starts:
                self.prefetch_forward(self.note_forward_and_predict())
            self.copy_out()
            if starts and self.groups:
                args, kwargs = watch_inputs((args, kwargs), self.post_backward, self.map_inputs)
        return args, kwargs

    def gather(self, groups: Sequence[ParamGroup]) -> None:
        """Start the gathers of these groups of the module, unless they are whole. Make compute wait for all gathers of the module."""
        for group in each(groups):
            group.unshard()
        for group in each(self.groups):
            group.wait_for_gather()

    def copy_out(self) -> None:
        """Give the module its whole parameters, after `gather`."""
        for group in each(self.groups):
            group.copy_out()

    def map_inputs(self, fn: Callable[[Tensor], Tensor], inputs: Any) -> Any:
        """Return the args and kwargs of a forward with fn(t) in place of every tensor t. Each `fn` visits all of them."""
        return map_tensors(fn, inputs)

    def starts_forward(self) -> bool:
        """True if this call starts a forward: the module is neither in a forward nor between pre-backward and post-backward."""
        return self.phase not in (Phase.FORWARD, Phase.PRE_BACKWARD)

    def is_outermost(self) -> bool:
        """True if the forward that begins now is the outermost one."""
        return self.root.forward_root is None

    def prefetch_forward(self, groups: Sequence[ParamGroup]) -> None:
        """Start the gathers that should overlap with this forward.

        Each group is a guess. The end of the forward drops unused gathers, because the optimizer will change the parameters.
        """
        for group in groups:
            with moment("forward_prefetch", group):
                if group.unshard():
                    self.root.guessed.append(group)

    def note_forward_and_predict(self) -> list[ParamGroup]:
        """Record that the forward enters this module. Return the groups to gather meanwhile: none in a recomputation."""
        if not self.groups or not self.root.forward_root or private_torch.in_backward():
            return []
        following = self.root.forward_root.forward_order.note_and_predict(self)
        return following.groups if following else []

    def post_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        """End the module's forward, and return its output, cast to the policy's output dtype."""
        with moment("post_forward", self):
            if self.phase is not Phase.PRE_BACKWARD:  # Note [Recomputation]
                output = self.end_forward(output)
                if self.root.forward_root is self:
                    output = self.end_iteration_forward(output)
            return self.cast("cast_forward_outputs", output, self.policy.output_dtype)

    def end_forward(self, output: Any) -> Any:
        """Free the parameters unless the backward needs them soon. A backward that reaches the returned output calls `pre_backward`.

        A forward inside a backward is a recomputation: the parameters stay for the backward that follows.
        """
        if not private_torch.in_backward():
            stays = self.is_read_later(output)
            for group in each(self.groups):
                if not stays:
                    group.post_forward()
                self.comm_ctx.note_end_of_forward(group)
        self.phase = Phase.IDLE
        return self.watch(output, self.pre_backward)

    def is_read_later(self, output: Any) -> bool:
        """True if the caller may still read the parameters after this forward, so that they must stay whole."""
        return False

    def watch(self, output: Any, before_backward: Callable[[], None]) -> Any:
        """Return the output. A backward that reaches it calls `before_backward`."""
        return WatchedOutputs(before_backward).watch(output)

    def cast(self, name: str, tree: Any, dtype: torch.dtype | None, map_tree: MapTree = map_tensors) -> Any:
        """Return inputs or outputs of the forward with their floating-point tensors in `dtype`; None casts nothing."""
        if dtype is None:
            return tree
        with moment(name, self):
            return cast_floating(tree, dtype, map_tree)

    # --- backward ---

    def pre_backward(self) -> None:
        """Prepare the module's backward, as `pre_forward` its forward. Autograd calls this once per output."""
        with moment("pre_backward", self):
            self.queue_final_callback()
            if self.phase is Phase.PRE_BACKWARD:
                return
            self.phase = Phase.PRE_BACKWARD
            self.gather([group for group in self.groups if group.unshard_in_backward])
            self.prefetch_backward(self.note_backward_and_predict())
            self.copy_out()
            for group in self.groups:
                group.pre_backward()

    def prefetch_backward(self, groups: Sequence[ParamGroup]) -> None:
        """Start the gathers that should overlap with this backward."""
        for group in groups:
            if group.unshard_in_backward:
                with moment("backward_prefetch", group):
                    group.unshard()

    def note_backward_and_predict(self) -> list[ParamGroup]:
        """Record that the backward enters this module. Return the groups to gather meanwhile: the one whose forward ended before."""
        before = [self.comm_ctx.take_previous(group) for group in self.groups]
        return before[0] if before else []

    def post_backward(self) -> None:
        """End the module's backward: free the parameters, and reduce the gradients or accumulate them."""
        with moment("post_backward", self):
            self.phase = Phase.POST_BACKWARD
            for group in each(self.groups[::-1]):
                group.post_backward()

    def queue_final_callback(self) -> None:
        """Let autograd call `finish_backward` once, when this backward has executed its last node."""
        if not self.root.finish_queued:
            self.root.finish_queued = True
            private_torch.call_after_backward(self.finish_backward)

    def finish_backward(self) -> None:
        """End a backward: finish the groups that it left out. Afterwards the states of `states_to_finish` are idle.

        If this was the last backward of the iteration, all sharded gradients are there, no buffer is held, and the order of
        forwards is forgotten.
        """
        with moment("finish_backward", self):
            self.finish_states()
            if self.root.is_last_backward:
                self.end_iteration()

    def finish_states(self) -> None:
        """Make the calls that autograd did not make (Note [Groups without an input gradient]). Afterwards, these states are idle.

        States that this backward did not reach get the call, too, and free what they hold.
        """
        self.root.forward_root = None  # checkpointing may have cut a recomputation short
        self.root.backwards += 1
        self.root.finish_queued = False
        for state in self.states_to_finish():
            late = any(group.has_late_gradients for group in state.groups)
            if state.phase is not Phase.POST_BACKWARD or late:
                state.post_backward()
            state.phase = Phase.IDLE
        self.comm_ctx.settle()

    def states_to_finish(self) -> Sequence[FSDPState]:
        """Return the states below the root whose part of a backward is over when the backward is over."""
        return self.root.states

    def end_iteration(self) -> None:
        """Leave nothing in flight, no buffer, no unused gather, and no order of forwards. The optimizer comes next."""
        self.comm_ctx.finish_reductions()
        self.comm_ctx.forget_forwards()
        for group in self.root.groups:
            group.drop_gather()
            group.wait_until_readable()

    # --- the outermost forward ---

    def begin_iteration(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Begin the outermost forward: gathers wait for what the optimizer has written, and inputs move to the device."""
        self.ensure_root()
        self.root.forward_root = self
        self.forward_order.begin()
        self.root.forwards_before = len(self.comm_ctx.post_forward_order)
        self.wait_for_optimizer()
        if self.device != torch.device("cpu"):
            with moment("inputs_to_device", self):
                args, kwargs = self.map_inputs(lambda t: t.to(self.device), (args, kwargs))
        return args, kwargs

    def wait_for_optimizer(self) -> None:
        """Let gathers wait for what the optimizer has issued on the compute stream."""
        streams = self.comm_ctx.streams
        streams.copy.wait(streams.compute.record())

    def end_iteration_forward(self, output: Any) -> Any:
        """End the outermost forward: drop wrong guesses, and learn the order."""
        for group in self.root.guessed:
            group.drop_gather()
        self.root.guessed.clear()
        if not private_torch.in_backward():  # a recomputation runs only a part of the model
            self.forward_order.finish()
        if not torch.is_grad_enabled():  # no backward will follow and forget the order
            self.comm_ctx.forget_forwards(keep=self.root.forwards_before)
        self.root.forward_root = None
        return output

    def ensure_root(self) -> None:
        """Become the root, if this is the first forward."""
        if not self.root.states:
            with private_torch.no_autograd():
                self.become_root()

    def become_root(self) -> None:
        """Take charge of the states below, and name everything by its place in this module."""
        states = self.name_states()
        for state in states:
            state.follow(self)
        self.root.states = states
        for group in self.groups if self.auto_reshard else ():
            group.reshard_after_forward = None

    def follow(self, root: FSDPState) -> None:
        """Belong to the model of this root, and share its streams."""
        self.root, self.comm_ctx = root.root, root.comm_ctx
        for group in self.groups:
            group.comm_ctx = self.comm_ctx
            group.adopt_registered()

    def name_states(self) -> list[FSDPState]:
        """Name the states below, their groups and their parameters by their place below the root; return the states."""
        prefixes = {module: name for name, module in self.modules[0].named_modules()}
        order = {module: place for place, module in enumerate(prefixes)}
        found: dict[FSDPState, list[str]] = {}
        for module, name in prefixes.items():
            if (state := state_of(module)) is not None:
                found.setdefault(state, []).append(name)
        for state, names in found.items():
            state.name = state.name or ", ".join(names) or type(self.modules[0]).__name__.removeprefix("FSDP")
            for group in state.groups:
                group.rename(state.name)
                for param in group.params:
                    # the first name of a tied one, as in `named_parameters`
                    module, name = min(param.places, key=lambda place: order.get(place.module, len(order)))
                    param.name = f"{prefixes.get(module, '')}.{name}".lstrip(".")
        return list(found)


def each(groups: Sequence[ParamGroup]) -> Iterator[ParamGroup]:
    """Yield the groups. For the observer, all work of a turn belongs to the group of that turn."""
    for group in groups:
        with moment("part", group):
            yield group


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state that `fully_shard` gave the module; None if the module has none."""
    state: FSDPState | None = getattr(module, "__dict__", {}).get("_hwfsdp_state")
    return state
