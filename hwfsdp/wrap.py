"""The public door: `fully_shard` and what it turns a module into.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())  # after, so that it sees the shards

Bottom up, because a call claims the parameters below its module that no call has claimed before. The module stays
the object it was; only its class becomes a subclass that also derives from `FSDPModule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hwfsdp.collectives import AllGather, ReduceScatter
from hwfsdp.errors import UnsupportedError, UsageError
from hwfsdp.group import FSDPCommContext, ParamGroup
from hwfsdp.hooks import FSDPState, attach_state, checked_state, state_of
from hwfsdp.mesh import shard_mesh
from hwfsdp.param import FSDPParam, Slot
from hwfsdp.precision import MixedPrecisionPolicy, OffloadPolicy

M = TypeVar("M", bound=nn.Module)


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    module_fqn: str | None = None,
    comm_ctx: FSDPCommContext | None = None,
) -> M:
    """Shards the parameters of `module` over the ranks of `mesh`, in place.

    Arguments, defaults and effect are those of `torch.distributed.fsdp.fully_shard` (torch 2.13), but for the
    last two; what is not built yet is refused (UnsupportedError).

    Args:
        module: implements `forward`. Its parameters that no call has claimed yet become one group: gathered in
            one collective, reduced in one. They become DTensors, `Shard(0)`, original dtype.
        mesh: 1D; by default all ranks, on the accelerator if there is one.
        reshard_after_forward: True frees the whole parameters after forward and gathers them again in backward;
            False keeps them. None: False for the root, True for all others.
        mp_policy: dtypes; see `MixedPrecisionPolicy`.
        ignored_params: stay as they are: neither sharded nor reduced.
        module_fqn: the module's name in errors and traces; by default its name from the root.
        comm_ctx: streams to share with other roots; by default new ones.

    Returns:
        `module`, which now is an `FSDPModule` too.

    Raises:
        UsageError: the module, a parameter or the mesh cannot be sharded.
        UnsupportedError: an argument asks for what is not built.
        StateError: no process group. The module is unchanged after an error.
    """
    _refuse_unsupported(module, reshard_after_forward, shard_placement_fn, offload_policy, dp_mesh_dims)
    _check_module(module)
    _check_arguments(mesh, reshard_after_forward, mp_policy, comm_ctx)
    resolved = shard_mesh(mesh)
    slots = _unclaimed_slots(module, set(ignored_params or ()))
    for param, places in slots.items():
        _check_param(places[0][1], param)
    _move_to(resolved.device, slots, module)

    comm_ctx = comm_ctx or FSDPCommContext(resolved.device.type)
    params = [
        FSDPParam(param, [slot for slot, _ in places], places[0][1], resolved, mp_policy)
        for param, places in slots.items()
    ]
    for param in slots:
        param._hwfsdp_claimed = True  # type: ignore[attr-defined]
    group = ParamGroup(params, resolved, comm_ctx, reshard_after_forward is not False) if params else None
    state = FSDPState(module, group, comm_ctx, mp_policy, resolved.device, reshard_after_forward is None)
    state.fqn = module_fqn or ""
    attach_state(module, state)
    if group:
        _follow_state_dicts(group)
    _become_fsdp_module(module)
    return module


# --- checks: nothing is changed before all of them passed --------------------------------------------------


def _refuse_unsupported(
    module: object, reshard: bool | int | None, placement_fn: object, offload: OffloadPolicy, dims: object
) -> None:
    refused = {
        "module=[…]": (isinstance(module, list | tuple), "Shard the modules one by one."),
        "reshard_after_forward=<int>": (
            isinstance(reshard, int) and not isinstance(reshard, bool),
            "Pass True, False or None.",
        ),
        "shard_placement_fn": (placement_fn is not None, "Parameters are sharded along dim 0; leave it out."),
        "offload_policy": (
            type(offload).__name__ != "OffloadPolicy",
            "Leave it out; shards stay on the mesh's device.",
        ),
        "dp_mesh_dims": (dims is not None, "Pass the data-parallel axis as mesh: mesh['dp']."),
    }
    for argument, (given, remedy) in refused.items():
        if given:
            raise UnsupportedError(
                "fully_shard", expected="what is built so far", got=f"{argument}, which is not", remedy=remedy
            )


def _check_arguments(mesh: object, reshard: object, policy: object, comm_ctx: object) -> None:
    dtypes = [getattr(policy, name, "") for name in ("param_dtype", "reduce_dtype", "output_dtype")]
    wrong = {
        "mesh, a DeviceMesh": (mesh, mesh is None or isinstance(mesh, DeviceMesh)),
        "reshard_after_forward, True, False or None": (reshard, reshard is None or isinstance(reshard, bool)),
        "mp_policy, a MixedPrecisionPolicy of torch.dtypes": (
            policy,
            all(dtype is None or isinstance(dtype, torch.dtype) for dtype in dtypes),
        ),
        "comm_ctx, an FSDPCommContext": (comm_ctx, comm_ctx is None or isinstance(comm_ctx, FSDPCommContext)),
    }
    for argument, (given, usable) in wrong.items():
        if not usable:
            raise UsageError(
                "fully_shard", expected=argument, got=repr(given), remedy="Pass one, or leave it out."
            )


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(
            "fully_shard",
            expected="an nn.Module",
            got=type(module).__name__,
            remedy="Pass the module whose parameters are to be sharded.",
        )
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise UsageError(
            "fully_shard",
            expected="a module with a forward",
            got=f"nn.{type(module).__name__}, which has none",
            remedy="Shard its children one by one.",
        )
    if state_of(module) is not None:
        raise UsageError(
            "fully_shard",
            expected="a module that was not sharded yet",
            got=f"{type(module).__name__}, which was",
            remedy="Call it once per module, children before their parents.",
        )


def _check_param(name: str, param: nn.Parameter) -> None:
    subject = f"fully_shard: parameter {name!r}"
    if getattr(param, "_hwfsdp_claimed", False):
        raise UsageError(
            subject,
            expected="a parameter of one group only",
            got="one that is tied to a parameter of another group",
            remedy="Tied parameters belong to one fully_shard call: that of a module above both.",
        )
    if isinstance(param, DTensor):
        raise UnsupportedError(
            subject,
            expected="a plain tensor",
            got=f"a DTensor on the mesh {param.device_mesh}",
            remedy="Combining with tensor parallelism is not built yet.",
        )
    if param.ndim == 0:
        raise UsageError(
            subject,
            expected="at least one dimension to shard",
            got="a scalar",
            remedy="Make it 1D with one element: nn.Parameter(torch.tensor([value])).",
        )
    if not param.is_contiguous():
        raise UsageError(
            subject,
            expected="contiguous memory",
            got=f"shape {tuple(param.shape)} with strides {param.stride()}",
            remedy="Assign a contiguous copy first: nn.Parameter(p.detach().contiguous()).",
        )


# --- the model ---------------------------------------------------------------------------------------------


def _managed_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`module` and the modules below it that no other state manages, each once, with names relative to it."""
    seen = {module}
    stack = [("", module)]
    while stack:
        prefix, current = stack.pop()
        yield prefix, current
        children = [(name, child) for name, child in current.named_children() if child not in seen]
        seen.update(child for _, child in children)
        stack.extend((f"{prefix}{name}.", c) for name, c in reversed(children) if state_of(c) is None)


def _unclaimed_slots(
    module: nn.Module, ignored: set[nn.Parameter]
) -> dict[nn.Parameter, list[tuple[Slot, str]]]:
    """The parameters to claim, each with all its places and their names, in order of registration."""
    slots: dict[nn.Parameter, list[tuple[Slot, str]]] = {}
    for prefix, owner in _managed_modules(module):
        for name, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            if param not in ignored:
                slots.setdefault(param, []).append((Slot(owner, name), prefix + name))
    return slots


def _move_to(device: torch.device, params: Iterable[nn.Parameter], module: nn.Module) -> None:
    """Parameters and buffers to the mesh's device; those on meta stay there until `to_empty`."""
    buffers = [b for _, owner in _managed_modules(module) for b in owner.buffers(recurse=False)]
    tensors: list[Tensor] = [*params, *buffers]
    for tensor in tensors:
        if tensor.device.type not in (device.type, "meta"):
            tensor.data = tensor.data.to(device)


def _follow_state_dicts(group: ParamGroup) -> None:
    """State dicts hold the shards: they are registered before one is taken or loaded, and adopted after."""

    def reshard(*_: Any) -> None:
        group.drop_gather()  # of values that may be about to change
        group.reshard()

    def adopt(*_: Any) -> None:
        group.adopt_registered()

    for module in dict.fromkeys(slot.module for p in group.params for slot in p.slots):
        module.register_state_dict_pre_hook(reshard)
        module.register_load_state_dict_pre_hook(reshard)
        module.register_load_state_dict_post_hook(adopt)


_classes: dict[type, type] = {}


def _become_fsdp_module(module: nn.Module) -> None:
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
    """What every sharded module also is. Methods that take `recurse` apply to all sharded modules below, too."""

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
        if group := self._state().group:
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
            if state.group:
                state.group.reshard_after_forward = reshard_after_forward

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
            group.reduce_grads = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward's end waits for its reductions; off if another backward follows at once."""
        self._state().root.is_last_backward = is_last_backward

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: makes the next iteration possible. Call it on the root.

        Gradients that were not reduced are gone; zero the others before the next backward.
        """
        self._state().reset_iteration()

    # --- order and transport ---

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The modules to gather under this module's forward, instead of the one learned."""
        self._state().forward_prefetch = _states_of(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The modules to gather under this module's backward, instead of the previous one in order."""
        self._state().backward_prefetch = _states_of(modules, "set_modules_to_backward_prefetch")

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """How this module's own group gathers; for example `collectives.RingAllGather()`."""
        for group in self._groups(recurse=False):
            group.channel.all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """How this module's own group reduces; for example `collectives.RingReduceScatter()`."""
        for group in self._groups(recurse=False):
            group.channel.reduce_scatter = comm

    # --- inside ---

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """`to`, `to_empty`, `half` and the like act on the shards."""
        self.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        if group := self._state().group:
            group.adopt_registered()
        return result

    def _state(self) -> FSDPState:
        assert isinstance(self, nn.Module)
        return checked_state(self, f"{type(self).__name__}")

    def _states(self, recurse: bool) -> list[FSDPState]:
        assert isinstance(self, nn.Module)
        modules = self.modules() if recurse else [self]
        return [state for m in modules if (state := state_of(m)) is not None]

    def _groups(self, recurse: bool) -> list[ParamGroup]:
        return [state.group for state in self._states(recurse) if state.group]


def _not_built(name: str) -> Callable[..., NoReturn]:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"FSDPModule.{name}",
            expected="a method that is built",
            got="one that is not yet",
            remedy="Leave the call out, or use torch.distributed.fsdp for it.",
        )

    method.__name__, method.__doc__ = name, "Not built yet: raises UnsupportedError."
    return method


NOT_BUILT = (
    *("set_requires_all_reduce", "set_all_reduce_hook", "set_post_optim_event"),
    *("set_gradient_divide_factor", "set_reduce_scatter_divide_factor", "set_force_sum_reduction_for_comms"),
    *("set_reduce_scatter_unused_params", "set_reduce_scatter_max_input_buffers"),
    *("set_separate_reduce_scatter_group", "set_allocate_memory_from_process_group_for_comm"),
    "set_symm_mem_for_comm",
)
for _name in NOT_BUILT:
    setattr(FSDPModule, _name, _not_built(_name))


def _states_of(modules: Iterable[Any], caller: str) -> list[FSDPState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise UsageError(
                caller,
                expected="modules that fully_shard was called on",
                got=type(module).__name__,
                remedy="Call fully_shard on each of them first.",
            )
    return [module._state() for module in modules]
