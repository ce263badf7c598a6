"""Hooks that torch calls in the whole process: around each backward, and around each step of an optimizer.

They are registered once, by the first call of `fully_shard`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hwfsdp.features import advice, compat, entries, freed, param_changes, recovery
from hwfsdp.features.group import ParamGroup
from hwfsdp.features.lookup import all_groups


@functools.cache
def register() -> None:
    """Register the hooks, once. Two of them change something that a compiler cannot see, so the compiler must not trace them."""
    compat.watch_backwards(entries.watch_entries, freed.explained_in_backward, freed.with_wholes)
    disable: Any = torch.compiler.disable
    register_optimizer_step_pre_hook(disable(before_step, reason="FSDP hooks"))
    register_optimizer_step_pre_hook(advice.look_at_optimizer)
    register_optimizer_step_post_hook(disable(after_step, reason="FSDP hooks"))


def before_step(optimizer: Optimizer, *_: Any) -> None:
    groups = changed_by(optimizer)
    param_changes.keep_writes_before_step(groups)
    recovery.mark_step(groups)


def after_step(optimizer: Optimizer, *_: Any) -> None:
    recovery.mark_step(changed_by(optimizer))


def changed_by(optimizer: Optimizer) -> list[ParamGroup]:
    """Return the groups whose shards a step of this optimizer may change. These are the groups whose parameters it holds.

    If it also holds other DTensors, return all groups, because these DTensors may share memory with shards. For an optimizer without
    DTensors, return none. Such an optimizer may exist on one rank only, and then only this rank would gather again.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)}
    owned = [(group, {id(p.sharded_param) for p in group.params}) for group in (all_groups() if held else ())]
    has_others = not held.issubset(set().union(*(ids for _, ids in owned)))
    return [group for group, ids in owned if has_others or not held.isdisjoint(ids)]
