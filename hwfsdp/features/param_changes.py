"""What programs attach to parameters, and what they do to whole parameters. Seam: the parameter.

A sharded parameter takes the place of the program's parameter, and during computation, a whole one takes its place. So whatever
a program does to one of the three must reach the others:

    attributes, gradient hooks        given to the original parameter       → sharded and whole
    values, `requires_grad`           changed while the parameter is whole  → sharded
    another parameter in its place    after the first forward               refused, or put back with a warning

Note [Writes to whole parameters]
    Each rank keeps what it wrote to its own rows, so ranks should write the same. A tensor counts its in-place writes
    (`_version`), and gathers are not counted (`core.form`, Note [Writing without being noticed]). So a higher count when the shard
    comes back means that the program wrote. The whole parameter may have fewer bits than the shard, so only elements that differ
    from the shard in the compute dtype are copied. This comparison is wrong once an optimizer has changed the shard. So writes are
    copied before an optimizer steps, and later writes are lost, with a warning. Writes through `Tensor.data` are not counted.

Note [Which gradient a hook gets]
    A hook that `register_hook` put on the original parameter gets this rank's whole gradient before the mean, in each backward, as
    under DDP. A hook that it put on the sharded parameter gets the mean gradient, a DTensor, once per reduction. Both may return
    another gradient. `register_post_accumulate_grad_hook` puts its hook on the sharded parameter, before and after sharding.
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hwfsdp import compat
from hwfsdp.core import wrap
from hwfsdp.core.compat import local_of, wrap_like
from hwfsdp.core.group import ParamGroup
from hwfsdp.core.param import FSDPParam, ShardedState
from hwfsdp.core.state import FSDPState
from hwfsdp.errors import StateError, WrongTypeError
from hwfsdp.features.call import Call
from hwfsdp.features.lookup import STAND_INS

_groups: WeakSet[ParamGroup] = WeakSet()
_watching = False


def choose(call: Call) -> None:
    """Make parameters that notice changes. Look at whole parameters before each optimizer step from now on."""
    global _watching
    call.make_param = WatchedParam
    if not _watching:
        register_optimizer_step_pre_hook(torch.compiler.disable(_before_step, reason="it copies"))
        _watching = True


def joined(call: Call, state: FSDPState) -> None:
    """Tell parameters their group. Warn of modules that write to their parameters in the forward."""
    _groups.update(state.groups)
    for group in state.groups:
        for param in group.params:
            assert isinstance(param, WatchedParam)
            param.group = ref(group)
            if group.mesh.size > 1:
                warn_of_max_norm(param)
    warn_of_classes(call)


def warn_of_classes(call: Call) -> None:
    """Warn once about each class that the program derived from `nn.Parameter`."""
    for kind, fqn in {
        type(param): fqn for param, fqn, _ in reversed(call.found) if has_own_class(type(param))
    }.items():
        warn(
            f"parameter {fqn!r} is a {kind.__name__}. Its shard is a DTensor and keeps its attributes, but "
            f"isinstance(param, {kind.__name__}) is False for the parameters of a sharded model. Select parameters by "
            "name or attribute instead."
        )


def warn_of_max_norm(param: FSDPParam) -> None:
    """Warn if the parameter belongs to an embedding that shortens its rows in the forward."""
    for module, _ in param.places:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            warn(
                f"parameter {param.fqn!r} belongs to an {type(module).__name__.removeprefix('FSDP')} with max_norm={module.max_norm}. Each rank "
                "shortens the rows of its own tokens, and only the rank that holds a row keeps it short. To shorten "
                "all rows on all ranks, build it without max_norm, and shorten its rows after each optimizer step."
            )


def _before_step(*_: Any) -> None:
    for group in _groups:
        for param in group.params if group.is_unsharded else ():
            if isinstance(param, WatchedParam):
                param.become_stale()


class WatchedParam(FSDPParam):
    """A parameter that keeps what programs attach to it, and what they change while it is whole.

    Attributes:
        group: a weak reference to its group. told: the warnings that were given.
        stand_in: the last parameter that was registered in place of the sharded one; None after the sharded one has changed.
        original: the class of the original parameter, and the gradient hooks on it.
        writes: the number of writes to the whole parameter that are in the shard already.
        trained: `requires_grad` of the whole parameter at the gather. is_stale: True if an optimizer has stepped since the gather.
    """

    group: ref[ParamGroup]
    stand_in: nn.Parameter | None = None
    writes, trained, is_stale = 0, False, False

    def __init__(self, param: nn.Parameter, *args: Any) -> None:
        self.original = type(param), getattr(param, compat.GRAD_HOOKS, None)
        self.told = set[str]()
        super().__init__(param, *args)
        vars(self.sharded_param).update(own_attributes(param))
        share_hooks(self.sharded_param, param, compat.POST_ACCUMULATE_GRAD_HOOKS)

    # --- what is attached ---

    def set_unsharded(self, whole: Tensor) -> None:
        """Make a new `unsharded_param`, with the class and the gradient hooks of the original."""
        super().set_unsharded(whole)
        assert self.unsharded_param is not None
        kind, hooks = self.original
        if has_own_class(kind) and type(self.unsharded_param) is nn.Parameter:
            self.unsharded_param.__class__ = kind
        if hooks is not None:
            setattr(self.unsharded_param, compat.GRAD_HOOKS, hooks)

    def adopt_registered(self) -> None:
        """Adopt the parameter that is registered now. It inherits what was attached to the one before."""
        before, self.stand_in = self.sharded_param, None
        super().adopt_registered()
        if self.sharded_param is not before:
            inherit(self.sharded_param, vars(before))
            share_hooks(self.sharded_param, before, compat.GRAD_HOOKS, compat.POST_ACCUMULATE_GRAD_HOOKS)

    def add_sharded_grad(self, grad: Tensor) -> None:
        """Let the hooks on the sharded parameter see or replace `grad`, then add it."""
        for hook in [*(getattr(self.sharded_param, compat.GRAD_HOOKS, None) or {}).values()]:
            assert isinstance(self.sharded_param, DTensor)
            found = hook(wrap_like(grad, self.sharded_param))
            if found is not None and not isinstance(found, DTensor):
                raise WrongTypeError(
                    f"gradient hook of parameter {self.fqn!r}",
                    expected="a DTensor, as it gets, or None",
                    got=type(found).__name__,
                    remedy="Compute with the DTensor. A hook that needs the whole gradient is registered before fully_shard.",
                )
            if found is not None:
                grad = local_of(found.redistribute(placements=self.sharded_param.placements))
        super().add_sharded_grad(grad)

    # --- transitions ---

    def to_unsharded(self) -> None:
        """SHARDED → UNSHARDED, if the shard is still in its place.

        Raises:
            StateError: the program has assigned or deleted a parameter since the first forward.
        """
        there = compat.not_registered(self.places, self.sharded_param)
        if there is not None and self.state is ShardedState.SHARDED:
            raise StateError(
                f"parameter {self.fqn!r}",
                expected="the sharded parameter, which FSDP gathers and trains",
                got=describe(*there),
                remedy="After the first forward, change values instead: with torch.no_grad(): param.copy_(…), or "
                "load_state_dict. Assign or delete parameters before fully_shard.",
            )
        super().to_unsharded()
        whole = self.unsharded_param
        assert whole is not None
        self.writes, self.trained, self.is_stale = compat.writes_to(whole), whole.requires_grad, False

    def register(self, param: nn.Parameter) -> None:
        """Make `param` the modules' parameter. Before another one replaces the whole one, keep what the program changed on that."""
        if self.state is ShardedState.UNSHARDED and param is not self.unsharded_param:
            self.keep_changes()
        if param is not self.sharded_param and param is not self.stand_in:
            self.stand_in = param
            STAND_INS[param] = ref(self)
            if isinstance(param, DTensor) or type(param) is nn.Parameter or has_own_class(type(param)):
                param.__dict__ = vars(
                    self.sharded_param
                )  # so setting an attribute on one sets it on the other
            else:  # another subclass of Tensor may keep what it needs among its attributes
                inherit(param, vars(self.sharded_param))
        super().register(param)

    # --- changes of the whole parameter ---

    def keep_changes(self) -> None:
        """Take over what the program has changed on the whole parameter."""
        whole = self.unsharded_param
        assert whole is not None
        if (there := compat.not_registered(self.places, whole)) is not None:
            self.warn_once(
                f"was whole when the program put {describe(*there)} in its place. FSDP puts its own parameter back, and the "
                "change is lost. Write into it instead: with torch.no_grad(): param.copy_(…)."
            )
        if compat.writes_to(whole) != self.writes:
            self.keep_writes()
        if whole.requires_grad is not self.trained:
            self.trained = whole.requires_grad
            self.sharded_param.requires_grad_(self.trained)

    def warn_once(self, message: str) -> None:
        if message not in self.told:
            self.told.add(message)
            warn(f"parameter {self.fqn!r} {message}")

    def become_stale(self) -> None:
        """Keep what was written so far, because an optimizer is about to change the shard."""
        assert self.unsharded_param is not None
        if compat.writes_to(self.unsharded_param) != self.writes:
            self.keep_writes()
        self.is_stale = True

    @torch.no_grad()
    def keep_writes(self) -> None:
        """Copy what the program wrote to this rank's rows of the whole parameter (Note [Writes to whole parameters])."""
        whole, layout = self.unsharded_param, self.layout
        assert whole is not None
        self.writes = compat.writes_to(whole)
        if self.is_stale or not self.form.reads_rows:
            why = "an optimizer step came before" if self.is_stale else "it travels in a form of its own"
            self.warn_once(
                f"was written while it was whole, but {why}. The values are lost. Call reshard(), and write to the "
                "sharded parameter."
            )
            return
        rows = layout.own_rows(layout.whole_grad(whole.detach()))
        local = self.local.view(rows.shape)
        before = local.to(rows.device)
        local.copy_(torch.where(rows == before.to(rows.dtype), before, rows.to(local.dtype)))
        if (group := self.group()) is not None:  # the next gather reads the shard on the copy stream
            streams = group.comm_ctx.streams
            streams.copy.wait(streams.compute.record())


class KeepsAttributes(wrap.FSDPModule):
    """Methods of sharded modules."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Apply `to`, `to_empty` and other conversions. torch converts a DTensor by swapping it, and its attributes get lost."""
        params = [param for group in self._groups(recurse=False) for param in group.params]
        kept = [dict(vars(param.sharded_param)) for param in params]
        result = super()._apply(*args, **kwargs)
        for param, attributes in zip(params, kept, strict=True):
            inherit(param.sharded_param, attributes)
            param.stand_in = None  # type: ignore[attr-defined]
        return result


# --- Attributes ----------------------------------------------------------------------------------------------


def has_own_class(kind: type) -> bool:
    """True if a program derived this class of parameters from `nn.Parameter`."""
    return kind is not nn.Parameter and issubclass(kind, nn.Parameter)


def own_attributes(param: nn.Parameter) -> dict[str, Any]:
    """Return the attributes that the program has set on a parameter. A tensor subclass has others, such as its inner tensors."""
    own = vars(param)
    if not own:
        return {}
    made = vars(nn.Parameter(param.detach(), requires_grad=param.requires_grad))
    return {name: value for name, value in own.items() if name not in made and not name.startswith("_hwfsdp")}


def inherit(param: nn.Parameter, attributes: dict[str, Any]) -> None:
    """Give `param` the attributes that it does not have."""
    vars(param).update({name: value for name, value in attributes.items() if name not in vars(param)})


def share_hooks(param: nn.Parameter, of: nn.Parameter, *kinds: str) -> None:
    """Let `param` have the same hooks of these kinds as `of`, if it has none."""
    for kind in kinds:
        if getattr(param, kind, None) is None and getattr(of, kind, None) is not None:
            setattr(param, kind, getattr(of, kind))


def describe(module: nn.Module, name: str) -> str:
    """Return words for what a module has in the place of a parameter."""
    there, at = getattr(module, name, None), f"{type(module).__name__}.{name}"
    return (
        f"{type(there).__name__} of shape {tuple(there.shape)} at {at}"
        if isinstance(there, Tensor)
        else f"nothing at {at}"
    )


def warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)
