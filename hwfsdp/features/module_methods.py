"""Methods of sharded modules that set when a model gathers, frees and reduces.

Their names, arguments and meanings are the same as in torch's `FSDPModule`, version 2.15. A method with the argument `recurse`
also applies to all sharded modules below. Every other method applies to the module's own group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from hwfsdp.core import api, compat, observer
from hwfsdp.core.group import ParamGroup
from hwfsdp.core.param import ShardedState
from hwfsdp.core.state import state_of
from hwfsdp.core.streams import StreamEvent
from hwfsdp.errors import CopyRefusedError, RefusedError, RuntimeRefusedError, UsageError, WrongTypeError
from hwfsdp.features import compat as features_compat
from hwfsdp.features.lookup import FeatureModule, FeatureState, checked_state

if TYPE_CHECKING:
    from hwfsdp.features.state import FSDPState


class UnshardHandle:
    """The result of `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, group: ParamGroup | None) -> None:
        self._group = group

    def wait(self) -> None:
        """Wait until the module has its whole parameters. A second call does nothing."""
        group, self._group = self._group, None
        if group:
            group.wait_for_gather()
            group.copy_out()


class SettableState(FeatureState):
    """A state with settings.

    Attributes:
        forward_prefetch, backward_prefetch: states whose groups are gathered next. If empty, the expected group is gathered.
        post_optim_event: the event that the next iteration's gathers wait for, instead of all work on compute. Only the root's
            value counts.
        max_reductions: the number of reductions that may be in flight. The largest number of a model's states counts.
    """

    forward_prefetch: Sequence[FSDPState] = ()
    backward_prefetch: Sequence[FSDPState] = ()
    post_optim_event: torch.Event | None = None
    max_reductions = 1

    def note_forward_and_predict(self) -> list[ParamGroup]:
        learned = super().note_forward_and_predict()  # also if a list decides: this notes the order
        return [group for state in self.forward_prefetch for group in state.groups] or learned

    def note_backward_and_predict(self) -> list[ParamGroup]:
        expected = super().note_backward_and_predict()
        if not self.backward_prefetch:
            return expected
        return [group for state in self.backward_prefetch for group in reversed(state.groups)]

    def wait_for_optimizer(self) -> None:
        root, streams = self.root_state, self.comm_ctx.streams
        if root.post_optim_event is None:
            super().wait_for_optimizer()
            return
        on_compute, root.post_optim_event = StreamEvent(streams.compute, root.post_optim_event), None
        if observer.slot is not None:
            # The user may have recorded the event anywhere. The recording assumes that it follows all work on compute so far.
            observer.slot.recorded(on_compute)
        streams.copy.wait(on_compute)

    def refuse_tracing(self) -> None:
        if features_compat.is_traced():
            raise not_compiled(f"trace or export of {self.name or 'the root module'}")

    def share_max_reductions(self) -> None:
        """Set the number of reductions that may be in flight: the largest that any state asks for. All groups share this limit."""
        asked = [state.max_reductions for state in self.states if state.groups]
        self.comm_ctx.max_reductions = max(asked, default=1)


class ModuleMethods(FeatureModule):
    """Methods of sharded modules."""

    # --- parameters ---

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module's own group.

        Args:
            async_op: return at once, with a handle. Its `wait`, or the next forward, puts the parameters in place.
        """
        state = self._state()
        state.before_unshard()
        if state.group:
            state.comm_ctx.streams.copy.wait(state.comm_ctx.streams.compute.record())
            state.group.unshard()
        handle = UnshardHandle(state.group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the whole parameters of this module's own group, and register the shards."""
        for group in self._groups(recurse=False):
            group.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether to free the whole parameters after forward, also at the root."""
        if not isinstance(reshard_after_forward, bool):
            raise UsageError(
                "set_reshard_after_forward",
                expected="True or False",
                got=repr(reshard_after_forward),
                remedy="Only fully_shard takes a number of ranks, as reshard_after_forward.",
            )
        for state in self._states(recurse):
            state.auto_reshard = False
            for group in state.groups:
                group.reshard_after_forward = reshard_after_forward and group.mesh.shard.group is not None
                if group.smaller is not None and not group.is_unsharded:  # it may have larger shards
                    group.reshard()
                group.smaller = None

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether whole parameters keep their memory, and so their addresses, while sharded. CUDA graphs need this."""
        for group in self._groups(recurse):
            for param in group.params:
                param.keeps_memory = keep or param.is_lent
                if not keep and param.state is ShardedState.SHARDED:
                    param.free_whole()

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing. FSDP2 then allocates gathers on the compute stream; the results are the same."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether the backward gathers the parameters of this module's own group."""
        for group in self._groups(recurse=False):
            group.unshard_in_backward = unshard_in_backward

    # --- gradients ---

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the next backward waits for its reductions at its end; False if another backward follows at once."""
        self._state().root.is_last_backward = is_last_backward

    # --- order ---

    def set_modules_to_forward_prefetch(self, modules: Sequence[api.FSDPModule]) -> None:
        """Set the modules to gather during this module's forward, instead of the learned one."""
        self._state().forward_prefetch = checked_states(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[api.FSDPModule]) -> None:
        """Set the modules to gather during this module's backward, instead of the previous one in the order."""
        self._state().backward_prefetch = checked_states(modules, "set_modules_to_backward_prefetch")

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Set what the next forward's gathers wait for, instead of everything on the current stream. Call it on the root.

        Args:
            event: recorded after the optimizer step. It counts for one forward.
        """
        self._state().post_optim_event = event

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many reductions may be in flight. Each holds a buffer of its group's gradients.

        All groups below one root share this limit: the largest number that was set on any of them counts.

        Raises:
            WrongTypeError: not an int. UsageError: below 1.
        """
        if not isinstance(max_input_buffers, int) or isinstance(max_input_buffers, bool):
            raise WrongTypeError(
                "set_reduce_scatter_max_input_buffers",
                expected="an int",
                got=repr(max_input_buffers),
                remedy="Pass the number of buffers.",
            )
        if max_input_buffers < 1:
            raise UsageError(
                "set_reduce_scatter_max_input_buffers",
                expected="at least 1",
                got=str(max_input_buffers),
                remedy="1 is the default; 2 lets a slow reduction overlap with the next copy-in.",
            )
        for state in self._states(recurse):
            state.max_reductions = max_input_buffers
            if state.root.states:
                state.share_max_reductions()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply `to`, `half` and other conversions to the shards. A gradient whose dtype the user has set keeps this dtype."""
        params = [p for group in self._groups(recurse=False) for p in group.params]
        own = [p for p in params if compat.has_grad_dtype(p.sharded_param)]
        kept = [(p, p.sharded_param.grad_dtype, p.sharded_param.grad) for p in own]
        for param, _, _ in kept:
            param.sharded_param.grad = None
        result = super()._apply(fn, recurse)
        for param, dtype, grad in kept:
            param.sharded_param.grad_dtype = dtype  # it was lost with the data
            param.adopt_registered()
            param.sharded_param.grad = None if grad is None else grad.to(param.sharded_param.device)
        return result

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the shards' gradients, as `zero_grad` of any module does, also while modules have their whole parameters."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        below = {*self.modules()}  # type: ignore[attr-defined]  # a group may have modules beside this one
        params = [p for group in self._groups(recurse=True) for p in group.params]
        for shard in [p.sharded_param for p in params if any(place.module in below for place in p.places)]:
            if shard.grad is not None:
                shard.grad = None if set_to_none else shard.grad.zero_()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RefusedError(
            f"deepcopy of {type(self).__name__}",
            expected="a module that is not sharded",
            got="one whose parameters, hooks and buffers in flight belong to a group",
            remedy="Copy before fully_shard, or build a second model and load this one's state_dict.",
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CopyRefusedError(
            f"copy or pickle of {type(self).__name__}",
            expected="a module that is not sharded",
            got="one whose parameters, hooks and buffers in flight belong to a group of this process",
            remedy="Save its state instead: hwfsdp.checkpoint.save(model.state_dict(), path). Load it into a "
            "model that is built and sharded in the same way.",
        )

    def share_memory(self) -> NoReturn:
        """Refuse: a DTensor has no memory that processes could share."""
        raise RuntimeRefusedError(
            f"share_memory of {type(self).__name__}",
            expected="a module that is not sharded",
            got="one with DTensors, whose memory belongs to one rank",
            remedy="Call it before fully_shard.",
        )

    def __prepare_scriptable__(self) -> NoReturn:  # torch.jit.script asks for it
        raise not_compiled(f"torch.jit.script of {type(self).__name__}")


def not_compiled(subject: str) -> RuntimeRefusedError:
    """Make the error of a compiler that does not run the hooks of `fully_shard`."""
    return RuntimeRefusedError(
        subject,
        expected="a module that is not sharded",
        got="one whose hooks gather and free parameters",
        remedy="Load its state into a model that is not sharded, and compile or export this one. For training, use torch.compile.",
    )


def checked_states(modules: Iterable[Any], caller: str) -> list[FSDPState]:
    """Return the states of sharded modules.

    Raises:
        UsageError: one of them is not sharded.
    """
    return [checked_state(module, caller) for module in modules]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a sharded module gather and free as its `forward` does. On other modules, do nothing.

    Raises:
        UsageError: the module has no such method.
    """
    if state_of(module) is None:
        return
    state = checked_state(module, "register_fsdp_forward_method")
    method = getattr(module, method_name, None)
    if method is None:
        raise UsageError(
            "register_fsdp_forward_method",
            expected="the name of a method",
            got=f"{method_name!r}, which {type(module).__name__} does not have",
            remedy="Check the spelling, or define it.",
        )

    @functools.wraps(method)
    def call_as_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # `recovery` knows it by its name
        output = None
        try:
            args, kwargs = state.pre_forward_hook(self, args, kwargs)
            output = method(*args, **kwargs)
        finally:
            output = state.post_forward_hook(self, args, output)
        return output

    setattr(module, method_name, MethodType(call_as_forward, module))


def share_comm_ctx(modules: Sequence[api.FSDPModule]) -> None:
    """Let several roots communicate through the context of the first, such as the stages of a pipeline on one rank."""
    states = checked_states(modules, "share_comm_ctx")
    for state in states[1:]:
        for member in state.states:
            member.comm_ctx = states[0].comm_ctx
            for group in member.groups:
                group.comm_ctx = states[0].comm_ctx
