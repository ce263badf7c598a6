"""Find programs that run, but do not train as intended. Each mistake gets one warning; one that cannot be repaired, an error.

- An optimizer that was built before `fully_shard` updates the whole parameters, which are no longer the model's.
- An optimizer that was built while parameters were whole has them in place of the shards. Before its first step, it gets the shards.
- A trainable parameter that no group has is not averaged: it was added after `fully_shard`, or the root was forgotten.
- An embedding with `max_norm` shortens rows in the forward, and only the rank that holds a row keeps it short.
- Programs look for their own class of parameters, but shards are DTensors.
- Gradients that were accumulated without synchronization and never reduced are missing in the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hwfsdp import compat
from hwfsdp.core.api import Unclaimed
from hwfsdp.core.state import state_of
from hwfsdp.errors import StateError
from hwfsdp.features.lookup import (
    CLAIMED,
    IGNORED,
    STAND_INS,
    Living,
    outermost_caller,
    owners_of,
    warn,
)
from hwfsdp.features.user_changes import has_own_class

if TYPE_CHECKING:
    from hwfsdp.features.feature_group import ParamGroup
    from hwfsdp.features.feature_param import FSDPParam


@dataclass
class Checked:
    """The result of the check of an optimizer.

    Attributes:
        version, params: the number of changes of models, and the ids of the optimizer's parameters, at the check.
        is_older: True if a warning has said that the optimizer is older than the sharded model.
        unclaimed: parameters that no group has, and of which no warning was given: id → (name, parameter).
        told: the ids of those of which a warning was given.
    """

    version: int = -1
    params: list[int] = field(default_factory=list)
    is_older: bool = False
    unclaimed: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)


_checked: WeakKeyDictionary[Optimizer, Checked] = WeakKeyDictionary()
_told: WeakSet[ParamGroup] = WeakSet()  # groups that a warning has named since their gradients came
_models: Living[nn.Module] = Living()  # the outermost modules that had a forward with sharded modules in it
_version = 0  # counts calls of `fully_shard`, and models that ran their first forward


def look_at_optimizer(optimizer: Optimizer, *_: Any) -> None:
    """Check an optimizer before its step, and warn."""
    checked = _checked.setdefault(optimizer, Checked())
    ids = [id(param) for group in optimizer.param_groups for param in group["params"]]
    if checked.version != _version or checked.params != ids:
        _check(optimizer, checked)
    if checked.unclaimed:
        _warn_of_unclaimed(optimizer, checked)
    _warn_of_unsynchronized(optimizer)


def note_new_model(ignored: Iterable[nn.Parameter] = ()) -> None:
    """Check optimizers again at their next step, because a model has changed. Mark parameters that the user has excluded."""
    global _version
    _version += 1
    for param in ignored:
        setattr(param, IGNORED, True)


def warn_of_sharding(found: Sequence[Unclaimed], params: Sequence[FSDPParam]) -> None:
    """Warn of modules that write to their parameters in the forward, and of classes that shards do not have."""
    for param in params:
        if param.mesh.size > 1:
            warn_of_max_norm(param)
    warn_of_classes(found)


def warn_of_classes(found: Sequence[Unclaimed]) -> None:
    """Warn once about each class that the program derived from `nn.Parameter`."""
    for kind, name in {
        type(param): name for param, name, _ in reversed(found) if has_own_class(type(param))
    }.items():
        warn(
            f"parameter {name!r} is a {kind.__name__}. Its shard is a DTensor and keeps its attributes, but "
            f"isinstance(param, {kind.__name__}) is False for the parameters of a sharded model. Select parameters by "
            "name or attribute instead."
        )


def warn_of_max_norm(param: FSDPParam) -> None:
    """Warn if the parameter belongs to an embedding that shortens its rows in the forward."""
    for module, _ in param.places:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            warn(
                f"parameter {param.name!r} belongs to an {type(module).__name__.removeprefix('FSDP')} with max_norm={module.max_norm}. Each rank "
                "shortens the rows of its own tokens, and only the rank that holds a row keeps it short. To shorten "
                "all rows on all ranks, build it without max_norm, and shorten its rows after each optimizer step."
            )


def _check(optimizer: Optimizer, checked: Checked) -> None:
    """Check the parameters of an optimizer, because they are new to it, or models have changed."""
    _put_shards_into(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    checked.version, checked.params = _version, [*map(id, params)]
    _warn_of_claimed(optimizer, checked, params)
    wanted = {*checked.params} - checked.told
    found = [named for model in _models.listed() for named in unclaimed_below(model)]
    checked.unclaimed = {id(param): (name, param) for name, param in found if id(param) in wanted}


def _put_shards_into(optimizer: Optimizer) -> None:
    """Replace whole parameters, and other stand-ins, by the sharded parameters. Warn about it.

    Raises:
        StateError: the optimizer has a state for them already, of their shape.
    """
    params = [
        (group["params"], i, p) for group in optimizer.param_groups for i, p in enumerate(group["params"])
    ]
    owners = [(*place, STAND_INS[place[2]]()) for place in params if place[2] in STAND_INS]
    found = [(listed, i, param, owner) for listed, i, param, owner in owners if owner is not None]
    if not found:
        return
    kind = type(optimizer).__name__
    got = f"{len(found)} parameters that were whole when it was built, for example {found[0][3].name!r}"
    remedy = "Build the optimizer before the first forward, or call reshard() on the model before."
    if any(optimizer.state.get(param) for _, _, param, _ in found):
        raise StateError(f"{kind}.step", expected="sharded parameters", got=got, remedy=remedy)
    for listed, i, _, owner in found:
        listed[i] = owner.sharded_param
    warn(
        f"{kind} has {got}. Whole parameters come and go, and are never trained, so hwfsdp has put the sharded ones in "
        f"their place. Other lists of parameters made at that time still have the whole ones. {remedy}"
    )


def _warn_of_claimed(optimizer: Optimizer, checked: Checked, params: Sequence[Tensor]) -> None:
    stale = [getattr(p, CLAIMED) for p in params if hasattr(p, CLAIMED)]
    if stale and not checked.is_older:
        checked.is_older = True
        warn(
            f"{type(optimizer).__name__} was built before fully_shard. It has {len(stale)} parameters that are no longer "
            f"the model's, for example {stale[0]!r}, and its steps change nothing. "
            "Build the optimizer after fully_shard, from model.parameters()."
        )


def unclaimed_below(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter that no group has and whose gradients nothing is known to average, with its name for a message.

    Not yielded: parameters that the user has excluded; those of modules that DDP or `replicate()` average; DTensors that lie on
    all ranks over which the model is averaged. If this is one rank, there is nothing to average.
    """
    states = {state for module in model.modules() if (state := state_of(module)) is not None}
    groups = [cast("ParamGroup", group) for state in states for group in state.groups]
    ranks = {
        rank for g in groups if g.mesh.size * g.mesh.replicate.size > 1 for rank in ranks_on(g.mesh.mesh)
    }
    claimed = {id(param) for g in groups for p in g.params for param in (p.sharded_param, p.unsharded_param)}
    stack = [("", model)] if ranks else []
    while stack:
        prefix, module = stack.pop()
        if isinstance(module, DistributedDataParallel) or "replicate" in compat.applied_to(module):
            continue
        stack.extend(reversed([(f"{prefix}{name}.", child) for name, child in module.named_children()]))
        for name, param in module.named_parameters(recurse=False):
            everywhere = isinstance(param, DTensor) and ranks <= {*ranks_on(param.device_mesh)}
            if id(param) not in claimed and not hasattr(param, IGNORED) and not everywhere:
                yield f"{prefix + name!r} of {type(model).__name__.removeprefix('FSDP')}", param


def ranks_on(mesh: DeviceMesh) -> list[int]:
    """Return the ranks of a mesh."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def _warn_of_unclaimed(optimizer: Optimizer, checked: Checked) -> None:
    """Warn once of trained parameters that no group has. Parameters without a gradient are not trained, such as unused ones."""
    names = [name for name, p in checked.unclaimed.values() if p.requires_grad and p.grad is not None]
    if names:
        checked.told.update(checked.unclaimed)
        checked.unclaimed = {}
        warn(
            f"{type(optimizer).__name__} trains parameters that no fully_shard has sharded, {len(names)} parameters: "
            f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}. Nothing averages their gradients, so they differ more "
            "and more between ranks. Add parameters before fully_shard, and call it on the whole model, too. If your own "
            "code averages their gradients, pass them as ignored_params."
        )


def _warn_of_unsynchronized(optimizer: Optimizer) -> None:
    """Warn once about each group, until its gradients are reduced or dropped."""
    held = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
    groups = {param.group for param in owners_of(held)}
    left = {group for group in groups if any(param.has_unreduced_grad for param in group.params)}
    new = left - {*_told}
    _told.difference_update(groups - left)
    _told.update(new)
    names = sorted(group.name for group in new)
    if names:
        warn(
            f"{type(optimizer).__name__}.step() runs without the gradients of parameter group {names[0]!r}"
            f"{f' and {len(names) - 1} more' if len(names) > 1 else ''}: no backward since the last step synchronized "
            "them. Call set_requires_gradient_sync(True) before the last backward of the step."
        )


def note_outermost(root: nn.Module) -> None:
    """Remember the outermost module around a new root. The next optimizer steps look for parameters of no group in it."""
    _models.add(outermost_caller(root))
    note_new_model()
