"""The function that users call: `fully_shard`.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())  # after, so that it sees the shards

Call it on children before their parents, because each call claims all parameters below its module that no call has claimed
before. The module stays the same object. Its class becomes a subclass that also derives from `FSDPModule`.

This module leaves out meshes of several axes (such as hybrid sharding), lists of modules, offloading, methods that steer the
schedule by hand, checks, such as whether two calls share a tied parameter, and recovery after an exception. These are in
`hwfsdp.features`, built on this core. `hwfsdp.fully_shard` has both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hwfsdp.core import private_torch
from hwfsdp.core.context import FSDPCommContext
from hwfsdp.core.base_errors import UsageError
from hwfsdp.core.group import ParamGroup, Reducer
from hwfsdp.core.layout import Layout
from hwfsdp.core.mesh import Transport, shard_mesh
from hwfsdp.core.param import FSDPParam, Place, ShardedState
from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.core.state import FSDPState, state_of

M = TypeVar("M", bound=nn.Module)


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
) -> M:
    """Shard the parameters of `module` over the ranks of `mesh`, in place; return it.

    Args:
        module: its parameters that no call has claimed yet become one group: gathered in one collective, reduced in one. They
            become DTensors, `Shard(0)`, original dtype.
        mesh: 1D; by default all ranks, on the accelerator if there is one.
        reshard_after_forward: True frees the whole parameters after forward and gathers them again in backward; False keeps
            them. None: the root keeps them if a backward can follow; all others free them.
        mp_policy: dtypes. ignored_params: stay as they are: neither sharded nor reduced.

    After a backward, `.grad` of each shard is its part of the mean gradient over the ranks.

    Raises:
        UsageError: the module was sharded before, a module below it belongs to another group, too, or the mesh has several axes.
        StateError: no mesh is given, and there is no process group.

        After any of these errors, the module is unchanged.
    """
    if state_of(module) is not None:
        raise UsageError(
            "fully_shard",
            expected="a module that was not sharded yet",
            got=f"{type(module).__name__}, which was",
            remedy="Call it once per module, children before their parents.",
        )
    over = shard_mesh(mesh)
    found = unclaimed_params([module], ignored_params or set())
    move_to(over.device, [module], found)
    params = [FSDPParam(param, places, name, mp_policy, Layout(param, over)) for param, name, places in found]
    comm_ctx, groups = FSDPCommContext(over.device.type), []
    if params:
        transport = Transport(over.shard, over.device)
        groups = [ParamGroup(type(module).__name__, params, over, comm_ctx, transport, Reducer())]
        groups[0].reshard_after_forward = reshard_after_forward is not False
        follow_state_dicts(groups[0])
    FSDPState([module], groups, comm_ctx, mp_policy, over.device, auto_reshard=reshard_after_forward is None)
    become_fsdp_module(module, FSDPModule)
    return module


# --- What a call claims --------------------------------------------------------------------------------------


class Unclaimed(NamedTuple):
    """A parameter that no group has: its first name, and all places where it is registered, the first one first."""

    param: nn.Parameter
    name: str
    places: list[Place]


def unclaimed_params(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[Unclaimed]:
    """Return the parameters from which one call of `fully_shard` makes a group, frozen ones included.

    They come in the order of `unclaimed_modules`, and of their registration. The order must follow from the model alone, because
    the flat buffers of all ranks must fit together. A *tied* parameter, one object with several names, is listed once, with all
    its places, so that it can be replaced at all of them.

    Raises:
        UsageError: an earlier call has claimed a parameter of a module that is below both.
    """
    found: dict[nn.Parameter, Unclaimed] = {}
    for prefix, module in unclaimed_modules(modules):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param not in ignored:
                if owner := _claimed.get((id(module), name)):
                    raise UsageError(
                        f"fully_shard: parameter {prefix + name!r}",
                        expected="a parameter of one group only",
                        got=f"one of the group {owner.name!r}: both modules share a {type(module).__name__}",
                        remedy="Call it on children before parents: first on the shared module, or once on a module above both.",
                    )
                unclaimed = found.setdefault(param, Unclaimed(param, prefix + name, []))
                unclaimed.places.append(Place(module, name))
    return list(found.values())


def unclaimed_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield `modules` and all modules below, each once, with their prefixes. Stop at modules that are sharded already.

    A module comes after its children, as in FSDP2. With three ranks or more, the place of a gradient in the flat buffer may decide
    the order in which the backend adds the ranks' parts, and so the last bit. A prefix goes before the names of a module's
    parameters, such as "blocks.0.mlp.".
    """
    seen = set[nn.Module]()

    def below(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        seen.add(module)
        for name, child in module.named_children():
            if child not in seen and state_of(child) is None:
                yield from below(f"{prefix}{name}.", child)
        yield prefix, module

    for module in modules:
        if module not in seen:
            yield from below("", module)


def move_to(device: torch.device, modules: Sequence[nn.Module], found: Sequence[Unclaimed]) -> None:
    """Move parameters and buffers to the mesh's device. Meta tensors stay on meta until `to_empty`."""
    buffers = [b for _, owner in unclaimed_modules(modules) for b in owner.buffers(recurse=False)]
    for tensor in (*(unclaimed.param for unclaimed in found), *buffers):
        if not tensor.is_meta and tensor.device != device:
            private_torch.move_in_place(tensor, device)


# the groups of parameters, by id of the module and name of the parameter
_claimed: WeakValueDictionary[tuple[int, str], ParamGroup] = WeakValueDictionary()


def follow_state_dicts(group: ParamGroup) -> None:
    """Make state dicts hold the shards of a group. Note the group that has each parameter.

    Before a save or a load, hooks of the modules that have the parameters put the shards of the whole group back. After a load, the
    parameters of the loaded module adopt new shards.
    """
    by_module: dict[nn.Module, list[FSDPParam]] = {}
    for param in group.params:
        for module, name in param.places:
            _claimed[id(module), name] = group
            by_module.setdefault(module, []).append(param)

    def reshard(*_: Any) -> None:
        group.drop_gather()  # the values may change next
        if any(param.state is not ShardedState.SHARDED for param in group.params):
            group.reshard()

    def adopt(module: nn.Module, *_: Any) -> None:
        for param in by_module[module]:
            param.adopt_registered()

    for module in by_module:
        module.register_state_dict_pre_hook(reshard)
        module.register_load_state_dict_pre_hook(reshard)
        module.register_load_state_dict_post_hook(adopt)


# --- What every sharded module also is -----------------------------------------------------------------------


class FSDPModule:
    """A sharded module: a base class beside the module's own. Extension point. With `recurse`, a method also sets the modules below."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the original class: slicing a sharded nn.Sequential gives a plain one."""
        original: Any = cls.__bases__[-1]  # see `become_fsdp_module`
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether backwards reduce gradients. If not, gradients add up. Switch it on for the last micro-batch."""
        for group in self._groups(recurse):
            group.reduce_grads = requires_gradient_sync

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Choose whether to free the whole parameters after a backward. If not, the next forward gathers nothing."""
        for group in self._groups(recurse):
            group.reshard_after_backward = reshard_after_backward

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Apply `to`, `to_empty`, `half` and other conversions to the shards."""
        groups = self._groups(recurse=False)
        for group in groups:
            group.drop_gather()
            group.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for group in groups:
            group.adopt_registered()
        return result

    def _states(self, recurse: bool) -> list[FSDPState]:
        assert isinstance(self, nn.Module)
        modules = self.modules() if recurse else [self]
        return list(dict.fromkeys(state for m in modules if (state := state_of(m)) is not None))

    def _groups(self, recurse: bool) -> list[ParamGroup]:
        return [group for state in self._states(recurse) for group in state.groups]


_classes: dict[tuple[type, type], type] = {}


def become_fsdp_module(module: nn.Module, base: type[FSDPModule]) -> None:
    """Replace the module's class `Name` by `FSDPName`, which derives from `base` and `Name`."""
    cls = type(module)
    if (cls, base) not in _classes:
        _classes[cls, base] = type(f"FSDP{cls.__name__}", (base, cls), {})
    module.__class__ = _classes[cls, base]
