"""Warn once about mistakes that run, but do not train. Seams: the state at the root; otherwise torch's own hooks.

- An optimizer that was built before `fully_shard` updates the whole parameters, which are no longer the model's.
- Gradients that were accumulated without synchronization and never reduced are missing in the optimizer step.
- Ranks whose models differ add up gradients of different parameters, or hang. Comparing the models costs a collective. So the
  ranks compare them only if collectives are checked anyway, with `TORCH_DISTRIBUTED_DEBUG=DETAIL`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hwfsdp import compat
from hwfsdp.collectives import run_named
from hwfsdp.comm import history
from hwfsdp.core.group import ParamGroup
from hwfsdp.core.ranks import Axis
from hwfsdp.core.state import FSDPState
from hwfsdp.features.call import Call
from hwfsdp.features.lookup import CLAIMED, replicas_of
from hwfsdp.observe import events

_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # → the value of `_calls` at its check
_warned: WeakSet[Optimizer] = WeakSet()
_groups: WeakSet[ParamGroup] = WeakSet()
_told: WeakSet[ParamGroup] = WeakSet()  # groups that a warning has named since their gradients came
_calls = 0


def choose(call: Call) -> None:
    """Let a root compare its model with the other ranks' models. Watch each optimizer step from now on."""
    global _calls
    call.states.append(ComparingState)
    if not _calls:
        register_optimizer_step_pre_hook(_before_step)
    _calls += 1


def joined(call: Call, state: FSDPState) -> None:
    """Remember the groups, because their gradients may stay unreduced."""
    _groups.update(state.groups)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _warned and _checked.get(optimizer) != _calls:
        _checked[optimizer] = _calls
        _warn_of_claimed(optimizer)
    left = [group for group in _groups if any(param.has_unreduced_grad for param in group.params)]
    if left or _told:
        _warn_of_unsynchronized(optimizer, left)


def _warn_of_claimed(optimizer: Optimizer) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [getattr(p, CLAIMED) for p in params if hasattr(p, CLAIMED)]
    if stale:
        _warned.add(optimizer)
        warnings.warn(
            f"{type(optimizer).__name__} was built before fully_shard. It has {len(stale)} parameters that are no longer "
            f"the model's, for example {stale[0]!r}, and its steps change nothing. "
            "Build the optimizer after fully_shard, from model.parameters().",
            UserWarning,
            stacklevel=4,
        )


def _warn_of_unsynchronized(optimizer: Optimizer, left: Sequence[ParamGroup]) -> None:
    """Warn once about each group, until its gradients are reduced or dropped."""
    _told.intersection_update(left)
    params = {id(p) for group in optimizer.param_groups for p in group["params"]}
    new = [g for g in left if g not in _told and any(id(p.sharded_param) in params for p in g.params)]
    _told.update(new)
    names = sorted(group.fqn for group in new)
    if names:
        warnings.warn(
            f"{type(optimizer).__name__}.step() runs without the gradients of parameter group {names[0]!r}"
            f"{f' and {len(names) - 1} more' if len(names) > 1 else ''}: no backward since the last step synchronized "
            "them. Call set_requires_gradient_sync(True) before the last backward of the step.",
            UserWarning,
            stacklevel=4,
        )


class ComparingState(FSDPState):
    """A state that compares its model with the other ranks' models."""

    def become_root(self) -> None:
        super().become_root()
        groups = self.root.groups
        if groups:
            mesh, owner = groups[0].mesh, groups[0].fqn
            lines = [f"{p.fqn} {tuple(p.layout.shape)} in group {g.fqn!r}" for g in groups for p in g.params]
            compare_structure(mesh.shard if mesh.shard.group else replicas_of(mesh), owner, lines)


def compare_structure(axis: Axis, owner: str, lines: Sequence[str]) -> None:
    """Warn if another rank of `axis` has other `lines`, which describe its model. Do nothing without DETAIL debugging.

    Args:
        owner: the parameter group that the error names if the comparison fails or hangs.
    """
    if axis.group is None or not compat.collectives_are_checked():
        return
    everyone: list[Any] = [None] * axis.size
    with events.paused():
        gather = partial(dist.all_gather_object, everyone, list(lines), group=axis.group)
        note = history.begin("compare_models", owner, axis.group, torch.uint8, 0)
        run_named(partial(note.watch, gather), "all_gather", owner)
    other = next((rank for rank in range(axis.size) if everyone[rank] != everyone[0]), None)
    if other is None:
        return
    pairs = zip([*everyone[0], "nothing"], [*everyone[other], "nothing"], strict=False)
    first, second = next(pair for pair in pairs if pair[0] != pair[1])
    warnings.warn(
        f"rank {other} of the mesh has another model than rank 0: {second}, where rank 0 has {first}. "
        "Build and wrap the model in the same way on every rank.",
        UserWarning,
        stacklevel=2,
    )
