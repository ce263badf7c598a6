"""The class of sharded modules, and functions on them.

The methods have the names and arguments of torch's `FSDPModule`, version 2.15. They have the same effects, with three exceptions:
`set_symm_mem_for_comm` raises an error, `_set_unshard_async_op` does nothing, and a divide factor divides after the sum. A method with the argument
`recurse` also applies to all sharded modules below. Every other method applies to the module's own groups or, where it says so, to the
whole model.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hwfsdp.comm.transport import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    GroupAllocAllGather,
    GroupAllocReduceScatter,
    ReduceScatter,
)
from hwfsdp.core import api, private_torch
from hwfsdp.core.param import ShardedState
from hwfsdp.core.state import each, state_of
from hwfsdp.core.device_streams import DeviceStream
from hwfsdp.errors import (
    CopyRefusedError,
    RefusedStateError,
    RuntimeRefusedError,
    UnsupportedError,
    UsageError,
    WrongTypeError,
)
from hwfsdp.features import finalization, recovery
from hwfsdp.features.checks import not_compiled
from hwfsdp.features.finalization import GradientReductionHandle
from hwfsdp.features.feature_group import ParamGroup
from hwfsdp.features.schedule import FSDPState, checked_state
from hwfsdp.features.user_changes import inherit, share_attributes

# The class of a sharded module has the module's own class as another base. Type checkers learn of this base, so that they accept a
# call of a sharded module and every method and child of modules.
if TYPE_CHECKING:
    Module = nn.Module
else:
    Module = object


class FSDPModule(api.FSDPModule, Module):
    """A sharded module."""

    # --- parameters ---

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module's own group.

        Args:
            async_op: return at once, with a handle. Its `wait`, or the next forward, puts the parameters in place.
        """
        state = self._state()
        state.before_unshard()
        state.comm_ctx.streams.copy.wait(state.comm_ctx.streams.compute.record())
        for group in each(state.groups):
            group.unshard()
        handle = UnshardHandle(state)
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

    # --- order ---

    def set_modules_to_forward_prefetch(self, modules: Sequence[api.FSDPModule]) -> None:
        """Set the modules to gather during this module's forward, instead of the learned one."""
        self._state().forward_prefetch = checked_states(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[api.FSDPModule]) -> None:
        """Set the modules to gather during this module's backward, instead of the previous one in the order."""
        self._state().backward_prefetch = checked_states(modules, "set_modules_to_backward_prefetch")

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Set what the next forward's gathers wait for, instead of everything on the current stream.

        Before the first forward, call it on the root. Afterwards, it counts for the whole model.

        Args:
            event: recorded after the optimizer step. It counts for one forward.
        """
        self._state().root.post_optim_event = event

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many reductions may be in flight. Each holds a buffer of its group's gradients.

        All groups that share streams share this limit: the largest number that was set on any of them counts.

        Raises:
            WrongTypeError: not an int. UsageError: below 1.
        """
        is_int = isinstance(max_input_buffers, int) and not isinstance(max_input_buffers, bool)
        if not is_int or max_input_buffers < 1:
            kind = UsageError if is_int else WrongTypeError
            raise kind(
                "set_reduce_scatter_max_input_buffers",
                expected="an int of at least 1",
                got=repr(max_input_buffers),
                remedy="1 is the default; 2 lets a slow reduction overlap with the next copy-in.",
            )
        for state in self._states(recurse):
            state.max_reductions = max_input_buffers
            if state.root.states:
                state.share_max_reductions()

    # --- gradients ---

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether each backward of the whole model ends the iteration: it waits for all reductions, and forgets the order.

        Set it to False before all backwards of an iteration but the last.
        """
        self._state().root.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether backwards reduce gradients. If not, they add up unreduced; switch it on for the last micro-batch."""
        super().set_requires_gradient_sync(requires_gradient_sync, recurse=recurse)
        self.set_requires_all_reduce(requires_gradient_sync, recurse=recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether backwards reduce gradients over the replicas, too, under hybrid sharding.

        If not, this rank's rows of the gradients add up, reduced over the shard axis only. Switch it on for the last micro-batch.
        """
        for group in self._groups(recurse):
            if group.mesh.replicate.group is not None:
                group.reducer.all_reduce_grads = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Set the number by which sums of gradients are divided. None: the number of ranks, which is the default.

        Raises:
            UsageError: `factor` is 0, or not a finite number.
        """
        usable = isinstance(factor, int | float) and factor and math.isfinite(factor)
        if factor is not None and not usable:
            raise UsageError(
                "set_gradient_divide_factor",
                expected="a finite number other than 0",
                got=repr(factor),
                remedy="Pass the number of ranks for a mean, or 1 for a sum.",
            )
        for group in self._groups(recurse=False):
            group.reducer.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Warn, and call `set_gradient_divide_factor`: this is its old name."""
        warnings.warn("Use `set_gradient_divide_factor` instead", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Choose whether collectives only sum, and the division is a separate step; some transports can only sum."""
        for group in self._groups(recurse=False):
            group.reducer.force_sum = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether parameters without a gradient are reduced as zeros.

        You need this if ranks take different paths through the model. Otherwise their reductions do not fit together.
        """
        for group in self._groups(recurse):
            group.reducer.reduce_unused = reduce_scatter_unused_params

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with each reduced flat gradient of this module's own group, before the division, unless the backend has divided.

        Args:
            hook: gets the gradients of this rank's padded shards, end to end: [n], reduce dtype. It may change the tensor in
                place, for example all-reduce it over further ranks. Under hybrid sharding it is called after the all-reduce.
            stream: the device's stream to call it on; not under hybrid sharding, which has its own.
        """
        for group in the_only(self._groups(recurse=False), "set_all_reduce_hook"):
            if stream is not None and group.mesh.replicate.group:
                raise UsageError(
                    "set_all_reduce_hook(stream=…)",
                    expected="no stream under hybrid sharding",
                    got=repr(stream),
                    remedy="Leave it out: the hook runs on the all-reduce stream.",
                )
            group.reducer.hook, streams = hook, group.comm_ctx.streams
            if stream is not None and isinstance(streams.all_reduce, DeviceStream):
                group.reducer.hook_stream = DeviceStream("all_reduce", stream.device.type, stream)
                group.reducer.hook_stream.streams = streams

    # --- the end of backwards ---

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose whether `finalize_backward` ends backwards, or each backward itself. Set it on the root, before the forward.

        If True, `set_is_last_backward` has no effect, and you may read and clear gradients only after `finalize_backward`.

        Raises:
            StateError: the module is below the root, or a backward has begun that was not finalized yet.
        """
        finalization.set_manual(self._state(), enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards since the last call: reduce gradients and free parameters, as the settings say now. Call it on the root.

        If several backwards belong together, switch `set_requires_gradient_sync` off before them, and on before this call.
        Before the first forward, this does nothing.

        Args:
            async_op: return a handle. Call its `wait` before gradients are used, and before the next forward.

        Raises:
            StateError: the module is below the root; a backward is running, or an exception ended it; manual finalization is off;
                a reduction was not waited for; gradients are reduced within a replica only.
        """
        return finalization.finalize(self._state(), async_op)

    def reset_iter_state(self) -> None:
        """Drop everything that an exception in a forward or backward left, including unreduced gradients. Call it on the root.

        Without this call, the next forward repairs everything except these gradients. Before the next backward, zero the
        gradients that were reduced already.

        Raises:
            StateError: the module is below the root, or another model that shares the context waits for its reduction.
        """
        recovery.reset_iteration(self._state())

    # --- collectives ---

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Choose how this module's own group gathers; for example `collectives.RingAllGather()`."""
        for group in the_only(self._groups(recurse=False), "set_custom_all_gather"):
            group.transport.gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Choose how this module's own group reduces; for example `collectives.RingReduceScatter()`."""
        for group in the_only(self._groups(recurse=False), "set_custom_reduce_scatter"):
            group.transport.scatter = comm

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Choose whether gradients are reduced in a separate process group, beside the gathers of other groups.

        This is a collective: every rank of the mesh has to call it. Modules sharded over the same ranks share the group.
        """
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in self._groups(recurse):
            transport = group.transport
            if enable and transport.ranks.group is not None:
                ranks = tuple(dist.get_process_group_ranks(transport.ranks.group))
                if ranks not in made:
                    made[ranks] = transport.reduce_group or dist.new_group(
                        list(ranks), use_local_synchronization=True, group_desc="fsdp_reduce_scatter"
                    )
                transport.reduce_group = made[ranks]
            elif not enable:
                transport.reduce_group = None

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Choose whether buffers come from the process group's own allocator, if it has one.

        Raises:
            RefusedStateError: custom collectives are set, and these allocate their own buffers.
        """
        for group in self._groups(recurse=False):
            transport = group.transport
            custom = [c for c in (transport.gather, transport.scatter) if type(c) not in _DEFAULTS]
            if custom:
                raise RefusedStateError(
                    "set_allocate_memory_from_process_group_for_comm",
                    expected="the default collectives",
                    got=type(custom[0]).__name__,
                    remedy="Allocate in the custom collective's own `allocate`.",
                )
            shard = transport.ranks.group
            reduce = transport.reduce_group or shard
            transport.gather = GroupAllocAllGather(shard) if enable else DefaultAllGather(shard)
            transport.scatter = GroupAllocReduceScatter(reduce) if enable else DefaultReduceScatter(reduce)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Raise UnsupportedError, because this is not built. The error names alternatives."""
        raise UnsupportedError(
            f"set_symm_mem_for_comm({backend!r})",
            expected="a feature that hwfsdp has",
            got="buffers in symmetric memory, which it does not have",
            remedy="Use set_allocate_memory_from_process_group_for_comm(True), or an AllGather of your own whose "
            "`allocate` takes symmetric memory, with set_custom_all_gather.",
        )

    # --- what every module has ---

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply `to`, `to_empty`, `half` and other conversions to the shards.

        torch converts a DTensor by swapping it, and its attributes get lost. They are attached again. A gradient whose dtype the
        user has set keeps this dtype.
        """
        params = [p for group in self._groups(recurse=False) for p in group.params]
        attributes = [dict(vars(p.sharded_param)) for p in params]
        own = [p for p in params if private_torch.has_grad_dtype(p.sharded_param)]
        kept = [(p, p.sharded_param.grad_dtype, p.sharded_param.grad) for p in own]
        for param, _, _ in kept:
            param.sharded_param.grad = None
        result = super()._apply(fn, recurse)
        for param, before in zip(params, attributes, strict=True):
            inherit(param.sharded_param, before)
            share_attributes(param)
        for param, dtype, grad in kept:
            param.sharded_param.grad_dtype = dtype  # it was lost with the data
            param.adopt_registered()
            param.sharded_param.grad = None if grad is None else grad.to(param.sharded_param.device)
        return result

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the shards' gradients, as `zero_grad` of any module does, also while modules have their whole parameters."""
        super().zero_grad(set_to_none)
        below = {*self.modules()}  # a group may have modules beside this one
        params = [p for group in self._groups(recurse=True) for p in group.params]
        for shard in [p.sharded_param for p in params if any(place.module in below for place in p.places)]:
            if shard.grad is not None:
                shard.grad = None if set_to_none else shard.grad.zero_()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # copy and deepcopy call it, too
        raise CopyRefusedError(
            f"copy, deepcopy or pickle of {type(self).__name__}",
            expected="a module that is not sharded",
            got="one whose parameters, hooks and buffers in flight belong to a group of this process",
            remedy="Copy before fully_shard. Or save its state, hwfsdp.checkpoint.save(model.state_dict(), path), and load it into a "
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

    def _state(self) -> FSDPState:
        """Return the state, or raise UsageError if there is none."""
        return checked_state(self, type(self).__name__)

    def _get_fsdp_state(self) -> Any:
        """Return the state, which has torch's names, too (`interop.torch_view`)."""
        return self._state()

    if TYPE_CHECKING:

        def _groups(self, recurse: bool) -> list[ParamGroup]: ...  # type: ignore[override]

        def _states(self, recurse: bool) -> list[FSDPState]: ...  # type: ignore[override]


_DEFAULTS = (DefaultAllGather, GroupAllocAllGather, DefaultReduceScatter, GroupAllocReduceScatter)


def the_only(groups: Sequence[ParamGroup], subject: str) -> Sequence[ParamGroup]:
    """Return a module's groups: one at most.

    Raises:
        UsageError: its parameters have several meshes, and the setting belongs to one mesh.
    """
    if len(groups) > 1:
        raise UsageError(
            subject,
            expected="a module whose parameters have one mesh",
            got=", ".join(repr(group.name) for group in groups),
            remedy="Shard the modules of each mesh in separate calls.",
        )
    return groups


def checked_states(modules: Iterable[Any], caller: str) -> list[FSDPState]:
    """Return the states of sharded modules.

    Raises:
        UsageError: one of them is not sharded.
    """
    return [checked_state(module, caller) for module in modules]


class UnshardHandle:
    """The result of `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, state: FSDPState) -> None:
        self._state: FSDPState | None = state

    def wait(self) -> None:
        """Wait until the module has its whole parameters. A second call does nothing."""
        state, self._state = self._state, None
        if state:
            for group in each(state.groups):
                group.wait_for_gather()
            state.copy_out()


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
    def call_as_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # `lookup` knows it by its name
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
    for state in states[:1]:
        state.share_max_reductions()
