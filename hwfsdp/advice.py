"""Mistakes that run, but do not train: said once, as warnings.

- An optimizer that was built before `fully_shard` updates the whole parameters, which are no longer the model's.
- Gradients that were accumulated without synchronization and never reduced are not in the step.
- Ranks whose models differ reduce gradients of different parameters into each other, or hang. Comparing them costs a
  collective, so it is done only where collectives are checked anyway: with `TORCH_DISTRIBUTED_DEBUG=DETAIL`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hwfsdp import compat, events, history
from hwfsdp.mesh import Axis
from hwfsdp.streams import run_named

_CLAIMED = "_hwfsdp_claimed"
_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # → claims when it was looked at
_warned: WeakSet[Optimizer] = WeakSet()
_unsynchronized: WeakSet[Any] = WeakSet()
_claims = 0
# Begun and ended, of optimizers that hold DTensors: what was gathered before the last one is not what the shards hold now.
# Others do not count: a rank may have one of its own, and all ranks have to gather again at the same time.
optimizer_steps = 0


def mark_claimed(param: Tensor, fqn: str) -> None:
    """The model has a sharded parameter in place of this one."""
    global _claims
    setattr(param, _CLAIMED, fqn)
    if not _claims:
        register_optimizer_step_pre_hook(_before_step)
        count: Any = torch.compiler.disable(_count_step, reason="it counts")
        register_optimizer_step_pre_hook(count)
        register_optimizer_step_post_hook(count)
    _claims += 1


def is_claimed(param: Tensor) -> bool:
    """Whether a sharded parameter took the place of this one."""
    return hasattr(param, _CLAIMED)


def note_unsynchronized(group: Any, unsynchronized: bool) -> None:
    """A parameter group's gradients were left unreduced by a backward, or reduced by a later one."""
    if unsynchronized:
        _unsynchronized.add(group)
    elif _unsynchronized:
        _unsynchronized.discard(group)


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    global optimizer_steps
    if any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        optimizer_steps += 1


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _warned and _checked.get(optimizer) != _claims:
        _checked[optimizer] = _claims
        _warn_of_claimed(optimizer)
    if _unsynchronized:
        _warn_of_unsynchronized(optimizer)


def _warn_of_claimed(optimizer: Optimizer) -> None:
    stale = [
        getattr(p, _CLAIMED) for group in optimizer.param_groups for p in group["params"] if is_claimed(p)
    ]
    if stale:
        _warned.add(optimizer)
        warnings.warn(
            f"{type(optimizer).__name__} has {len(stale)} parameters that are no longer the model's, "
            f"{stale[0]!r} among them: it was built before fully_shard, and its steps change nothing. "
            "Build the optimizer after fully_shard, from model.parameters().",
            UserWarning,
            stacklevel=4,
        )


def _warn_of_unsynchronized(optimizer: Optimizer) -> None:
    params = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [g for g in _unsynchronized if any(id(p.sharded_param) in params for p in g.params)]
    for group in left:
        _unsynchronized.discard(group)
    names = sorted(group.fqn for group in left if any(p.has_unreduced_grad for p in group.params))
    if names:
        warnings.warn(
            f"{type(optimizer).__name__}.step() without the gradients of parameter group {names[0]!r}"
            f"{f' and {len(names) - 1} more' if len(names) > 1 else ''}: no backward since the last step synchronized "
            "them. Call set_requires_gradient_sync(True) before the last backward of the step.",
            UserWarning,
            stacklevel=4,
        )


def compare_structure(axis: Axis, owner: str, lines: Sequence[str]) -> None:
    """Warns if another rank of `axis` describes its model by other lines; only under DETAIL debugging.

    Args:
        owner: the parameter group to name, should the comparison fail or hang.
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
