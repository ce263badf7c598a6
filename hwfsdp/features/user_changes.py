"""What programs attach to parameters, and what they do to whole parameters.

A sharded parameter takes the place of the program's parameter, and during computation, a whole one takes its place. So whatever
a program does to one of the three must reach the others:

    attributes                        given to the original parameter       → sharded and whole
    gradient hooks                    given to the original parameter       → whole, or sharded (Note [Which gradient a hook gets])
    values, `requires_grad`           changed while the parameter is whole  → sharded
    the same, of the sharded one      changed while the parameter is whole  → whole, at the next forward
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
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp import compat
from hwfsdp.core.param import Place, ShardedState
from hwfsdp.core.private_torch import local_of, wrap_like, writes_to
from hwfsdp.errors import MissingParameterError, StateError, WrongTypeError
from hwfsdp.features.lookup import STAND_INS
from hwfsdp.features.private_autograd import displaced, plain_class, registered_at

if TYPE_CHECKING:
    from hwfsdp.features.feature_group import ParamGroup
    from hwfsdp.features.feature_param import FSDPParam


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


class Seen(NamedTuple):
    """What FSDP has seen of the parameters of a group, at a gather or since. The lists have one entry for each parameter.

    Attributes:
        writes: the number of writes to the whole parameter that are in the shard already.
        trained: `requires_grad` of the whole parameter.
        given: the parameters whose `data` the program has taken since the gather, or whose memory another library has. So they may have
            been written without being counted.
    """

    writes: list[int]
    trained: list[bool]
    given: set[FSDPParam]


def watch(group: ParamGroup) -> None:
    """Watch the parameters of a group that is whole now."""
    wholes = wholes_of(group.params)
    with plain_class():  # their attributes are read faster
        trained = [whole.requires_grad for whole in wholes]
        lent = {param for param in group.params if param.is_lent}
        group.seen, group.has_stepped = Seen(writes_to(wholes), trained, lent), False


def keep_changes(group: ParamGroup) -> None:
    """Take over what the program has changed on whole parameters, before the shards come back. Do nothing for a sharded group."""
    if not group.is_unsharded:
        return
    params, wholes, seen = group.params, wholes_of(group.params), group.seen
    for param, (module, name) in displaced(params, wholes):
        param.warn_once(
            f"was whole when the program put {describe(module, name)} in its place. FSDP puts its own parameter back, and "
            "the change is lost. Write into it instead: with torch.no_grad(): param.copy_(…)."
        )
    keep_writes(group)
    with plain_class():
        trained = [whole.requires_grad for whole in wholes]
    if trained != seen.trained:
        for param, is_trained in zip(params, trained, strict=True):
            param.sharded_param.requires_grad_(is_trained)
        seen.trained[:] = trained


def keep_writes_before_step(groups: Sequence[ParamGroup]) -> None:
    """Keep what programs wrote to whole parameters so far, because an optimizer is about to change the shards."""
    for group in [group for group in groups if group.is_unsharded]:
        keep_writes(group)
        group.has_stepped = True


def free_changed(groups: Sequence[ParamGroup]) -> None:
    """Free groups whose shards were written or frozen since the gather, so that a forward gathers them again."""
    for group in [group for group in groups if group.params[0].state is not ShardedState.SHARDED]:
        trained = [param.sharded_param.requires_grad for param in group.params]
        if group.was_written() or (group.is_unsharded and trained != group.seen.trained):
            group.reshard()


def wholes_of(params: Sequence[FSDPParam]) -> list[nn.Parameter]:
    return [param.unsharded_param for param in params]  # type: ignore[misc]


def keep_writes(group: ParamGroup) -> None:
    """Copy what the program wrote to this rank's rows of whole parameters (Note [Writes to whole parameters])."""
    seen = group.seen
    with plain_class():
        writes = writes_to(wholes_of(group.params))
    if writes != seen.writes or seen.given:
        for place, param in enumerate(group.params):
            if writes[place] != seen.writes[place] or param in seen.given:
                keep_written(param, place)


@torch.no_grad()
def keep_written(param: FSDPParam, place: int) -> None:
    """Copy to the shard what the program wrote to this rank's rows. `place`: the parameter's place in its group."""
    whole, layout, seen, has_stepped = (
        param.unsharded_param,
        param.layout,
        param.group.seen,
        param.group.has_stepped,
    )
    assert whole is not None
    known, (seen.writes[place], shard_writes) = seen.writes[place], writes_to([whole, param.sharded_param])
    is_changed = shard_writes != param.group.shard_writes[place]
    if has_stepped or is_changed or param.extension is not None:
        if seen.writes[place] == known:  # it gave its data, perhaps to be read only
            return
        changed = "an optimizer step came before" if has_stepped else "the shard was written, too"
        why = changed if has_stepped or is_changed else "its tensor extension gathers other data"
        param.warn_once(
            f"was written while it was whole, but {why}. The values are lost. Call reshard(), and write to the "
            "sharded parameter."
        )
        return
    rows = layout.own_rows(layout.whole_grad(whole.detach()))
    local = param.local.view(rows.shape)
    before = local.to(rows.device)
    local.copy_(torch.where(rows == before.to(rows.dtype), before, rows.to(local.dtype)))
    (param.group.shard_writes[place],) = writes_to([param.sharded_param])
    streams = param.group.comm_ctx.streams
    streams.copy.wait(streams.compute.record())  # the next gather reads the shard on the copy stream


# --- Attributes and hooks --------------------------------------------------------------------------------------


def take_attributes(sharded: nn.Parameter, param: nn.Parameter) -> None:
    """Give the sharded parameter what the program has attached to the original one."""
    vars(sharded).update(own_attributes(param))
    share_hooks(sharded, param, compat.POST_ACCUMULATE_GRAD_HOOKS)


def inherit_all(sharded: nn.Parameter, before: nn.Parameter) -> None:
    """Give the sharded parameter what was attached to the one before."""
    inherit(sharded, vars(before))
    share_hooks(sharded, before, compat.GRAD_HOOKS, compat.POST_ACCUMULATE_GRAD_HOOKS)


def share_attributes(param: FSDPParam) -> None:
    """Share the attributes of the sharded parameter with the whole one, if there is one."""
    if param.unsharded_param is not None:
        stand_in(param, param.unsharded_param)


def stand_in(param: FSDPParam, tensor: nn.Parameter) -> None:
    """Note what modules have in place of the sharded parameter. Both share attributes, unless `tensor` is of another subclass."""
    STAND_INS[tensor] = ref(param)
    if isinstance(tensor, DTensor) or type(tensor) is nn.Parameter or has_own_class(type(tensor)):
        tensor.__dict__ = vars(param.sharded_param)
    else:  # another subclass of Tensor may keep what it needs among its attributes
        inherit(tensor, vars(param.sharded_param))


def after_hooks(param: FSDPParam, grad: Tensor) -> Tensor:
    """Return a reduced gradient [`local_shape`], or what the hooks on the sharded parameter make of it.

    Raises:
        WrongTypeError: a hook returned a tensor that is no DTensor.
    """
    for hook in [*(getattr(param.sharded_param, compat.GRAD_HOOKS, None) or {}).values()]:
        assert isinstance(param.sharded_param, DTensor)
        found = hook(wrap_like(grad, param.sharded_param))
        if found is not None and not isinstance(found, DTensor):
            raise WrongTypeError(
                f"gradient hook of parameter {param.name!r}",
                expected="a DTensor, as it gets, or None",
                got=type(found).__name__,
                remedy="Compute with the DTensor. A hook that needs the whole gradient is registered before fully_shard.",
            )
        if found is not None:
            grad = local_of(found.redistribute(placements=param.sharded_param.placements))
    return grad


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
