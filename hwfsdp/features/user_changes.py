"""What programs attach to parameters, and what they do to whole parameters.

A sharded parameter takes the place of the program's parameter, and during computation, a whole one takes its place. So whatever
a program does to one of the three must reach the others:

    attributes                        given to the original parameter       → sharded and whole
    gradient hooks                    given to the original parameter       → whole, or sharded (Note [Which gradient a hook gets])
    values, `requires_grad`           changed while the parameter is whole  → sharded
    another parameter in its place    after the first forward               refused, or put back with a warning
    other memory under the shard      by `to` of a module in the group      read by the next gather
    whole memory given away           to numpy, for example                 not freed any more, with a warning

Note [Writes to whole parameters]
    Each rank keeps what it wrote to its own rows, so ranks should write the same. A tensor counts its in-place writes
    (`_version`), and gathers are not counted (`core.layout`, Note [Writing without being noticed]). So a higher count when the shard
    comes back means that the program wrote. The whole parameter may have fewer bits than the shard, so only elements that differ
    from the shard in the compute dtype are copied. This comparison is wrong once the shard has changed. So writes are copied before
    an optimizer steps, and writes that are found after any change of the shard are lost, with a warning. Writes through `Tensor.data`
    are not counted. So a program that takes the `data` of a whole parameter may have written, until the parameter is freed.

Note [Which gradient a hook gets]
    A hook that `register_hook` put on the original parameter gets this rank's whole gradient before the mean, in each backward, as
    under DDP. A hook that it put on the sharded parameter gets the mean gradient, a DTensor, once per reduction. Both may return
    another gradient. `register_post_accumulate_grad_hook` puts its hook on the sharded parameter, before and after sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp import compat
from hwfsdp.core.private_torch import local_of, wrap_like
from hwfsdp.core.layout import Layout
from hwfsdp.core.param import Place, ShardedState, ShardMemory
from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.errors import MissingParameterError, StateError, WrongTypeError
from hwfsdp.features.private_autograd import displaced, plain_class, registered_at, writes_to
from hwfsdp.features.extensions import ExtensionParam
from hwfsdp.features.lookup import STAND_INS, parameter_of, warn
from hwfsdp.features.whole import FreedParameter, WholeParameter

if TYPE_CHECKING:
    from hwfsdp.features.feature_group import ParamGroup


# --- What a group does at each gather and reshard ------------------------------------------------------------


def check_in_place(params: Sequence[FSDPParam]) -> None:
    """Check that modules have the sharded parameters.

    Raises:
        StateError: the program has assigned another parameter since the first forward, or deleted it. MissingParameterError: it has
            put a tensor in its place that is no parameter.
    """
    sharded = [param for param in params if param.state is ShardedState.SHARDED]
    for param, (module, name) in displaced(sharded, [param.sharded_param for param in sharded]):
        if registered_at(module, name) is not None:
            check_registered(param.name, [Place(module, name)])
        raise StateError(
            f"parameter {param.name!r}",
            expected="the sharded parameter, which FSDP gathers and trains",
            got=describe(module, name),
            remedy="After the first forward, change values instead: with torch.no_grad(): param.copy_(…), or "
            "load_state_dict. Assign or delete parameters before fully_shard.",
        )


def watch(params: Sequence[FSDPParam]) -> None:
    """Watch parameters that are whole now."""
    wholes, shards = wholes_of(params), [param.sharded_param for param in params]
    with plain_class():  # their attributes are read faster
        for param, whole, writes, of_shard in zip(
            params, wholes, writes_to(wholes), writes_to(shards), strict=True
        ):
            param.writes, param.shard_writes, param.trained = writes, of_shard, whole.requires_grad
            param.gave_data, param.has_stepped = param.is_lent, False


def keep_changes(params: Sequence[FSDPParam]) -> None:
    """Take over what the program has changed on whole parameters, before the shards come back."""
    wholes = wholes_of(params)
    for param, (module, name) in displaced(params, wholes):
        param.warn_once(
            f"was whole when the program put {describe(module, name)} in its place. FSDP puts its own parameter back, and "
            "the change is lost. Write into it instead: with torch.no_grad(): param.copy_(…)."
        )
    with plain_class():  # their attributes are read faster
        for param, whole, writes in zip(params, wholes, writes_to(wholes), strict=True):
            if param.gave_data or writes != param.writes:
                param.keep_writes()
            if whole.requires_grad is not param.trained:
                param.trained = whole.requires_grad
                param.sharded_param.requires_grad_(param.trained)


def keep_writes_before_step(groups: Sequence[ParamGroup]) -> None:
    """Keep what programs wrote to whole parameters so far, because an optimizer is about to change the shards."""
    for params in [group.params for group in groups if group.is_unsharded]:
        for param, writes in zip(params, writes_to(wholes_of(params)), strict=True):
            if param.gave_data or writes != param.writes:
                param.keep_writes()
            param.has_stepped = True


def warn_of_old_values(groups: Sequence[ParamGroup]) -> None:
    """Warn of groups that a forward is about to use whole, although their shards were written since the gather."""
    for group in [group for group in groups if group.is_unsharded]:
        writes = writes_to([param.sharded_param for param in group.params])
        written = [p for p, now in zip(group.params, writes, strict=True) if now != p.shard_writes]
        if written:
            written[0].warn_once(
                "was written, but its group is still whole, so this forward computes with the values before. Call reshard() on "
                "the module after writing to shards."
            )


def wholes_of(params: Sequence[FSDPParam]) -> list[nn.Parameter]:
    return [param.unsharded_param for param in params]  # type: ignore[misc]


# --- The parameter -------------------------------------------------------------------------------------------


class FSDPParam(ExtensionParam):
    """A parameter that keeps what programs attach to it, and what they change while it is whole.

    Attributes:
        group: its group. told: the warnings that were given.
        original: the class of the original parameter, and the gradient hooks on it.
        writes: the number of writes to the whole parameter that are in the shard already. gave_data: True if the program has taken
            the `data` of the whole parameter since the gather, and may have written to it. is_lent: True if another library has
            the memory of the whole parameter.
        shard_writes: the number of writes to the sharded parameter at the gather. has_stepped: True if an optimizer has stepped since.
        trained: `requires_grad` of the whole parameter at the gather.
        keeps_memory: if True, the memory of the whole parameter stays allocated even while the parameter is sharded.
        read_from: the local part of the shard when a gather read it last; None before the first gather.
    """

    group: ParamGroup
    writes, shard_writes, gave_data, is_lent, trained, has_stepped = 0, 0, False, False, False, False
    keeps_memory = False
    read_from: Tensor | None = None

    def __init__(
        self,
        param: nn.Parameter,
        places: Sequence[Place],
        name: str,
        policy: MixedPrecisionPolicy,
        layout: Layout,
        memory: ShardMemory,
    ) -> None:
        self.original = type(param), getattr(param, compat.GRAD_HOOKS, None)
        self.told = set[str]()
        super().__init__(param, places, name, policy, layout, memory)
        vars(self.sharded_param).update(own_attributes(param))
        share_hooks(self.sharded_param, param, compat.POST_ACCUMULATE_GRAD_HOOKS)

    # --- what is attached ---

    def set_unsharded(self, whole: Tensor) -> None:
        """Make a new `unsharded_param`, with the class and the gradient hooks of the original."""
        super().set_unsharded(whole)
        assert self.unsharded_param is not None
        kind, hooks = self.original
        if type(self.unsharded_param) is nn.Parameter:
            self.unsharded_param.__class__ = kind if has_own_class(kind) else WholeParameter
        if hooks is not None:
            setattr(self.unsharded_param, compat.GRAD_HOOKS, hooks)
        self.share_attributes()

    def inherit_from(self, before: nn.Parameter) -> None:
        """Attach to the sharded parameter what was attached to the one before."""
        inherit(self.sharded_param, vars(before))
        share_hooks(self.sharded_param, before, compat.GRAD_HOOKS, compat.POST_ACCUMULATE_GRAD_HOOKS)

    def share_attributes(self) -> None:
        """Share the attributes of the sharded parameter with the whole one, if there is one."""
        if self.unsharded_param is not None:
            self.stands_in(self.unsharded_param)

    def stands_in(self, param: nn.Parameter) -> None:
        """Note a parameter that modules have in place of the sharded one. Both share attributes, unless it is of another subclass."""
        STAND_INS[param] = ref(self)
        if isinstance(param, DTensor) or type(param) is nn.Parameter or has_own_class(type(param)):
            param.__dict__ = vars(self.sharded_param)
        else:  # another subclass of Tensor may keep what it needs among its attributes
            inherit(param, vars(self.sharded_param))

    def add_sharded_grad(self, grad: Tensor) -> None:
        """Let the hooks on the sharded parameter see or replace `grad`, then add it."""
        for hook in [*(getattr(self.sharded_param, compat.GRAD_HOOKS, None) or {}).values()]:
            assert isinstance(self.sharded_param, DTensor)
            found = hook(wrap_like(grad, self.sharded_param))
            if found is not None and not isinstance(found, DTensor):
                raise WrongTypeError(
                    f"gradient hook of parameter {self.name!r}",
                    expected="a DTensor, as it gets, or None",
                    got=type(found).__name__,
                    remedy="Compute with the DTensor. A hook that needs the whole gradient is registered before fully_shard.",
                )
            if found is not None:
                grad = local_of(found.redistribute(placements=self.sharded_param.placements))
        super().add_sharded_grad(grad)

    # --- changes of the whole parameter ---

    def is_own(self, module: nn.Module, name: str) -> bool:
        """True if a place has the sharded or the whole parameter. `functional_call` puts back the one that it found."""
        there = getattr(module, name, None)
        return isinstance(there, Tensor) and (there is self.sharded_param or parameter_of(there) is self)

    def warn_once(self, message: str) -> None:
        if message not in self.told:
            self.told.add(message)
            warn(f"parameter {self.name!r} {message}")

    @torch.no_grad()
    def keep_writes(self) -> None:
        """Copy what the program wrote to this rank's rows of the whole parameter (Note [Writes to whole parameters])."""
        whole, layout = self.unsharded_param, self.layout
        assert whole is not None
        known, (self.writes, shard_writes) = self.writes, writes_to([whole, self.sharded_param])
        is_changed = shard_writes != self.shard_writes
        if self.has_stepped or is_changed or self.is_extension:
            if self.writes == known:  # it gave its data, perhaps to be read only
                return
            changed = "an optimizer step came before" if self.has_stepped else "the shard was written, too"
            why = changed if self.has_stepped or is_changed else "its tensor extension gathers other data"
            self.warn_once(
                f"was written while it was whole, but {why}. The values are lost. Call reshard(), and write to the "
                "sharded parameter."
            )
            return
        rows = layout.own_rows(layout.whole_grad(whole.detach()))
        local = self.local.view(rows.shape)
        before = local.to(rows.device)
        local.copy_(torch.where(rows == before.to(rows.dtype), before, rows.to(local.dtype)))
        (self.shard_writes,) = writes_to([self.sharded_param])
        streams = self.group.comm_ctx.streams
        streams.copy.wait(streams.compute.record())  # the next gather reads the shard on the copy stream

    # --- gathers ---

    def free_whole(self) -> None:
        """Give back the memory of the whole parameter, unless another library has it, too: then torch refuses to free it."""
        if self.keeps_memory:
            return
        try:
            super().free_whole()
        except RuntimeError:
            if self.gathered is None or self.gathered.untyped_storage().resizable():
                raise
            self.share_memory()
            return
        if type(self.unsharded_param) is WholeParameter:
            self.unsharded_param.__class__ = FreedParameter  # type: ignore[assignment]

    def share_memory(self) -> None:
        """Keep the memory of the whole parameter from now on, because another library has it, too."""
        self.keeps_memory = self.is_lent = True
        if self.state is ShardedState.UNSHARDED:
            self.keep_writes()
        self.warn_once(
            "keeps the memory of its whole tensor from now on, because numpy or another library has it, too. To free it, "
            "give away a copy: weight.detach().clone().numpy()."
        )

    def to_unsharded(self) -> None:
        if type(self.unsharded_param) is FreedParameter:
            self.unsharded_param.__class__ = WholeParameter  # type: ignore[assignment]
        super().to_unsharded()

    # --- parameters replaced by the user ---

    def adopt_registered(self) -> None:
        """Adopt the parameter that is registered now. It inherits what was attached to the one before.

        Raises:
            MissingParameterError: there is none. UsageError: it is cut in another way.
        """
        if self.state is ShardedState.SHARDED:
            check_registered(self.name, self.places)
        before = self.sharded_param
        super().adopt_registered()
        self.read_from = self.local if self.read_from is not None else None
        if self.sharded_param is not before:
            self.inherit_from(before)
        self.share_attributes()


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


# --- What modules have in place of a parameter ---------------------------------------------------------------


def check_registered(param: str, places: Sequence[Place]) -> None:
    """Raise MissingParameterError if a module has no parameter at one of the places of the parameter with this name."""
    for module, name in places:
        if not isinstance(registered_at(module, name), nn.Parameter):
            got, remedy = what_is_at(module, name)
            expected = f"the DTensor that fully_shard registered as {name!r} of {type(module).__name__}"
            raise MissingParameterError(f"parameter {param!r}", expected=expected, got=got, remedy=remedy)


def what_is_at(module: nn.Module, name: str) -> tuple[str, str]:
    """Return what a module has in place of a parameter, and what to do."""
    if name in getattr(module, "parametrizations", ()):
        return (
            "a parametrization, registered after fully_shard",
            "Register parametrizations before fully_shard.",
        )
    found = registered_at(module, name)
    if found is None:
        return "none", "Delete or replace parameters (weight_norm does it, too) before fully_shard."
    return (
        f"a {type(found).__name__} that is no parameter",
        "Call the model with its own parameters: load others by load_state_dict, instead of torch.func.functional_call. Use "
        "weight_norm, spectral_norm and prune before fully_shard.",
    )
