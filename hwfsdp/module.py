"""What every sharded module also is: the methods that steer a schedule from outside.

Their names, arguments and meanings are those of torch's `FSDPModule`, version 2.13. Those that take `recurse` apply to
all sharded modules below, too; the others to the module's own group.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hwfsdp.collectives import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    GroupAllocAllGather,
    GroupAllocReduceScatter,
    ReduceScatter,
)
from hwfsdp.errors import StateError, UnsupportedError, UsageError
from hwfsdp.group import ParamGroup
from hwfsdp.hooks import FSDPState, checked_state, state_of


class UnshardHandle:
    """What `FSDPModule.unshard(async_op=True)` returns."""

    def __init__(self, group: ParamGroup | None) -> None:
        self._group = group

    def wait(self) -> None:
        """The module has its whole parameters afterwards. Waiting again does nothing."""
        group, self._group = self._group, None
        if group:
            group.wait_for_unshard()
            group.comm_ctx.release_gather_buffer()


class FSDPModule:
    """A sharded module."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of the original class: slicing a sharded nn.Sequential makes a plain one."""
        original: Any = cls.__mro__[2]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    # --- parameters ---

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters of this module's own group.

        Args:
            async_op: return at once, with a handle; `wait` on it, or the next forward, puts them in place.
        """
        state = self._state()
        if state.comm_ctx.backward_broke:
            state.break_off()
        state.free_stale()
        if state.group and not state.root.states:  # before the first forward, which would check
            state.group.adopt_registered()
            state.group.check_ready()
        if state.group:
            state.comm_ctx.streams.copy.wait(state.comm_ctx.streams.compute.record())
            state.group.unshard()
        handle = UnshardHandle(state.group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees the whole parameters of this module's own group and registers the shards."""
        for group in self._groups(recurse=False):
            group.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to free the whole parameters after forward. Counts for the root, too."""
        if not isinstance(reshard_after_forward, bool):
            raise UsageError(
                "set_reshard_after_forward",
                expected="True or False",
                got=repr(reshard_after_forward),
                remedy="A world size to reshard to can only be given to fully_shard.",
            )
        for state in self._states(recurse):
            state.auto_reshard = False
            for group in state.groups:
                group.reshard_mesh = group.mesh if reshard_after_forward else None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether to free the whole parameters after backward; off saves gathers between micro-batches."""
        for group in self._groups(recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs the parameters of this module's own group."""
        for group in self._groups(recurse=False):
            group.unshard_in_backward = unshard_in_backward

    # --- gradients ---

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. Off for all micro-batches but the last, they add up unreduced."""
        for group in self._groups(recurse):
            group.reduce_grads = group.all_reduce_grads = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over the replicas, too, under hybrid sharding.

        Off for all micro-batches but the last, this rank's rows of them add up, reduced over the shard axis only.
        """
        for group in self._groups(recurse):
            group.all_reduce_grads = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward's end waits for its reductions; off if another backward follows at once."""
        self._state().root.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What sums of gradients over the ranks are divided by, in place of the number of ranks."""
        for group in self._groups(recurse=False):
            group.channel.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`; warns."""
        warnings.warn("Use `set_gradient_divide_factor` instead", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether collectives only ever sum, and divisions are made apart; some transports can do no more."""
        for group in self._groups(recurse=False):
            group.channel.force_sum = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters that got no gradient are reduced as zeros.

        Needed where ranks take different paths through the model, or else their reductions do not fit together.
        """
        for group in self._groups(recurse):
            group.reduce_unused = reduce_scatter_unused_params

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Calls `hook` with each reduced flat gradient of this module's own group, before it is divided.

        Args:
            hook: may change the tensor in place, for example all-reduce it over further ranks. Under hybrid sharding
                it is called after the all-reduce.
            stream: a stream of the device to call it on; not under hybrid sharding, which has one.
        """
        for group in self._groups(recurse=False):
            if stream is not None and group.mesh.replicate.group:
                raise UsageError(
                    "set_all_reduce_hook(stream=…)",
                    expected="no stream under hybrid sharding",
                    got=repr(stream),
                    remedy="Leave it out: the hook runs on the all-reduce stream.",
                )
            group.channel.all_reduce_hook = hook
            if stream is not None:
                group.channel.hook_stream = group.comm_ctx.streams.all_reduce.over(stream)

    def reset_iter_state(self) -> None:
        """Drops what an exception in forward or backward left, unreduced gradients included. Call it on the root.

        The next forward puts back the rest by itself. Zero the gradients that were reduced before the next backward.
        """
        self._state().reset_iteration()

    # --- order and transport ---

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The modules to gather under this module's forward, instead of the one learned."""
        self._state().forward_prefetch = states_of(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The modules to gather under this module's backward, instead of the previous one in order."""
        self._state().backward_prefetch = states_of(modules, "set_modules_to_backward_prefetch")

    def set_post_optim_event(self, event: torch.Event) -> None:
        """What the next forward's gathers wait for, in place of everything on the current stream.

        Args:
            event: recorded after the optimizer step; forgotten once it was waited for. Set it on the root.
        """
        self._state().root.post_optim_event = event

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """How this module's own group gathers; for example `collectives.RingAllGather()`."""
        for group in self._groups(recurse=False):
            group.channel.all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """How this module's own group reduces; for example `collectives.RingReduceScatter()`."""
        for group in self._groups(recurse=False):
            group.channel.reduce_scatter = comm

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be in flight, each holding a buffer of its group's gradients.

        Groups below one root share them: the largest number that any of them was given counts.

        Raises:
            TypeError: not an int. UsageError: below 1.
        """
        if not isinstance(max_input_buffers, int) or isinstance(max_input_buffers, bool):
            raise TypeError(
                f"set_reduce_scatter_max_input_buffers: expected an int; got {max_input_buffers!r}. "
                "Pass the number of buffers."
            )
        if max_input_buffers < 1:
            raise UsageError(
                "set_reduce_scatter_max_input_buffers",
                expected="at least 1",
                got=str(max_input_buffers),
                remedy="1 is the default; 2 lets a slow reduction overlap with the next copy-in.",
            )
        for state in self._states(recurse):
            for group in state.groups:
                group.max_reductions = max_input_buffers
            if state.root.states:
                state.set_max_reductions()

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether gradients are reduced in a process group of their own, beside the gathers of others.

        Collective: every rank of the mesh has to call it. Modules sharded over the same ranks share the group.
        """
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in self._groups(recurse):
            channel = group.channel
            if enable and channel.shard.group is not None:
                ranks = tuple(dist.get_process_group_ranks(channel.shard.group))
                if ranks not in made:
                    made[ranks] = channel.reduce_group or dist.new_group(
                        list(ranks), use_local_synchronization=True, group_desc="fsdp_reduce_scatter"
                    )
                channel.reduce_group = made[ranks]
            elif not enable:
                channel.reduce_group = None

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether buffers come from the process group's own allocator, where it has one.

        Raises:
            StateError: custom collectives are set, which allocate their own.
        """
        for group in self._groups(recurse=False):
            channel = group.channel
            defaults = (DefaultAllGather, GroupAllocAllGather, DefaultReduceScatter, GroupAllocReduceScatter)
            custom = [c for c in (channel.all_gather, channel.reduce_scatter) if type(c) not in defaults]
            if custom:
                raise StateError(
                    "set_allocate_memory_from_process_group_for_comm",
                    expected="the default collectives",
                    got=type(custom[0]).__name__,
                    remedy="Allocate in the custom collective's own `allocate`.",
                )
            shard, reduce = channel.shard.group, channel.reduce_group or channel.shard.group
            channel.all_gather = GroupAllocAllGather(shard) if enable else DefaultAllGather(shard)
            channel.reduce_scatter = (
                GroupAllocReduceScatter(reduce) if enable else DefaultReduceScatter(reduce)
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Not built: raises UnsupportedError, which names the alternative."""
        raise UnsupportedError(
            f"set_symm_mem_for_comm({backend!r})",
            expected="a feature that is built",
            got="buffers in symmetric memory, which is not",
            remedy="Use set_allocate_memory_from_process_group_for_comm(True), or an AllGather of your own whose "
            "`allocate` takes symmetric memory, with set_custom_all_gather.",
        )

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As that of every module, for the shards' gradients, also while modules have their whole parameters."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for shard in [p.sharded_param for group in self._groups(recurse=True) for p in group.params]:
            if shard.grad is not None:
                shard.grad = None if set_to_none else shard.grad.zero_()

    # --- inside ---

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """`to`, `to_empty`, `half` and the like act on the shards."""
        self.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for group in self._groups(recurse=False):
            group.adopt_registered()
        return result

    def _state(self) -> FSDPState:
        assert isinstance(self, nn.Module)
        return checked_state(self, f"{type(self).__name__}")

    def _states(self, recurse: bool) -> list[FSDPState]:
        assert isinstance(self, nn.Module)
        modules = self.modules() if recurse else [self]
        return list(dict.fromkeys(state for m in modules if (state := state_of(m)) is not None))

    def _groups(self, recurse: bool) -> list[ParamGroup]:
        return [group for state in self._states(recurse) for group in state.groups]


def states_of(modules: Iterable[Any], caller: str) -> list[FSDPState]:
    """The states of sharded modules.

    Raises:
        UsageError: one of them is not sharded.
    """
    return [checked_state(module, caller) for module in modules]


_classes: dict[type, type] = {}


def become_fsdp_module(module: nn.Module) -> None:
    """Replaces the module's class `Name` by `FSDPName`, which derives from `FSDPModule` and `Name`."""
    cls = type(module)
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _refuse_deepcopy})
    module.__class__ = _classes[cls]


def _refuse_deepcopy(module: nn.Module, memo: Any) -> NoReturn:
    raise UsageError(
        f"deepcopy of {type(module).__name__}",
        expected="a module that is not sharded",
        got="one whose parameters, hooks and buffers in flight belong to a group",
        remedy="Copy before fully_shard, or build a second model and load this one's state_dict.",
    )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of a sharded module gather and free as its `forward` does; nothing on other modules.

    Raises:
        UsageError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise UsageError(
            "register_fsdp_forward_method",
            expected="the name of a method",
            got=f"{method_name!r}, which {type(module).__name__} does not have",
            remedy="Check the spelling, or define it.",
        )
    state = module._state()

    @functools.wraps(method)
    def call_as_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # `compat` knows it by its name
        output = None
        try:
            args, kwargs = state.pre_forward_hook(self, args, kwargs)
            output = method(*args, **kwargs)
        finally:
            output = state.post_forward_hook(self, args, output)
        return output

    setattr(module, method_name, MethodType(call_as_forward, module))


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Has several roots communicate through the context of the first, as the stages of a pipeline on one rank do."""
    states = states_of(modules, "share_comm_ctx")
    for state in states[1:]:
        for member in state.root.states or [state]:
            member.comm_ctx = states[0].comm_ctx
            for group in member.groups:
                group.use(states[0].comm_ctx)
