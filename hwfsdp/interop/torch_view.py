"""torch's names for attributes of sharded modules that its pipeline stages, and some programs, read.

    fully_shard.state(module), module._get_fsdp_state()     the state of a sharded module. Programs read:
        _mp_policy                                          the policy of the call
        _comm_ctx                                           the context that the groups of a model share
        _state_ctx.all_states                               the states of all modules below the root
        _root_post_backward_final_callback()                ends a backward, as autograd's last call does
        _lazy_init(), _is_root                              becomes the root, as the first forward does; whether it is the root
        _modules, _device                                   the modules of the call, and where they compute
        _pre_forward, _post_forward                         its forward hooks; with `_hook_handle`, the handles that remove them
        _fsdp_param_groups, _fsdp_param_group               its groups, one for each mesh
            fsdp_params                                     of each: sharded_param, unsharded_param, _unsharded_param
            pre_backward(), post_backward()                 set dtypes of gradients; reduce, or accumulate

Most of these are only other names of things that exist anyway. If a stage recognizes a module as torch's own, it switches
reductions off for all of its micro-batches, and reduces once. torch's memory tracker replaces the forward hooks, and two methods
of a group, by functions of its own. So the schedule calls these by the names that the tracker replaces, and there are handles that
remove the hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn

from hwfsdp import compat
from hwfsdp.core import group
from hwfsdp.core.param import FSDPParam, ShardedState
from hwfsdp.core.state import FSDPState


def renamed(path: str) -> property:
    """Return another name for an attribute, which may be read and set. `path`: owner and name, such as "reducer.divide_factor"."""
    owner, _, name = path.rpartition(".")
    return property(attrgetter(path), lambda group, value: setattr(getattr(group, owner), name, value))


class NamedGroup(group.ParamGroup):
    """Attributes of groups that programs read or set, by torch's names."""

    _module_fqn = property(attrgetter("transport.label"))
    _all_gather_comm = renamed("transport.gather")
    _reduce_scatter_comm = renamed("transport.scatter")
    gradient_divide_factor = renamed("reducer.divide_factor")
    force_sum_reduction_for_comms = renamed("reducer.force_sum")
    reduce_scatter_unused_params = renamed("reducer.reduce_unused")
    all_reduce_grads = renamed("reducer.all_reduce_grads")
    _reshard_after_forward = property(attrgetter("reshard_after_forward"))
    is_sharded = property(lambda group: group.params[0].state is ShardedState.SHARDED)
    _orig_dtype = property(lambda group: group.params[0].dtypes.orig)
    _reduce_dtype = property(lambda group: group.params[0].dtypes.reduce)

    @cached_property
    def fsdp_params(self) -> list[ParamView]:
        return [ParamView(param) for param in self.params]


class SharedView(NamedTuple):
    """What the states below one root share."""

    all_states: list[FSDPState]
    is_last_backward: bool


class ParamView:
    """A parameter with torch's names."""

    def __init__(self, param: FSDPParam) -> None:
        self._param = param

    _param_fqn = property(attrgetter("_param.name"))
    sharded_param = property(attrgetter("_param.sharded_param"))
    unsharded_param = _unsharded_param = property(attrgetter("_param.unsharded_param"))


class HookView(NamedTuple):
    """A forward hook of a state, which a program can remove. The program then registers another one, and may repeat this."""

    modules: tuple[nn.Module, ...]
    hook: Callable[..., Any]

    def remove(self) -> None:
        for module in self.modules:
            compat.remove_hook(module, self.hook)


class NamedState(FSDPState):
    """The core's schedule, with torch's names for what it has."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pre_forward, self._post_forward = self.pre_forward_hook, self.post_forward_hook
        self._pre_forward_hook_handle: Any = HookView(self.modules, self._pre_forward)
        self._post_forward_hook_handle: Any = HookView(self.modules, self._post_forward)

    _mp_policy = property(attrgetter("policy"))
    _comm_ctx = property(attrgetter("comm_ctx"))
    _fsdp_param_groups = property(attrgetter("groups"))
    _fsdp_param_group = property(lambda state: state.groups[0] if state.groups else None)

    _modules = property(attrgetter("modules"))
    _device = property(attrgetter("device"))

    @property
    def _is_root(self) -> bool | None:
        return self.root.states[0] is self if self.root.states else None

    def _lazy_init(self) -> None:
        self.ensure_root()

    @property
    def _state_ctx(self) -> SharedView:
        return SharedView(self.root.states or [self], self.root.is_last_backward)

    def _root_post_backward_final_callback(self) -> None:
        self.finish_backward()
