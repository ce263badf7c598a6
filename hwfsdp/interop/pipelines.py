"""Checks before a model's first forward in one of torch's pipeline stages.

A zero-bubble schedule splits each backward in two. The first part computes the gradients of the inputs, a later part the
gradients of the weights. The first part looks up the weights among the module's parameters. If these are shards at that time,
torch finds no weights, and leaves out their gradients silently. So the parameters must stay whole from the forward on
(`reshard_after_forward=False`). torch's schedule gathers and frees them itself.

A stage recognizes only modules of torch's `FSDPModule`. After `hwfsdp.install()` it recognizes ours, too (`install`).
"""

from __future__ import annotations

import sys
import traceback
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hwfsdp.errors import UsageError
from hwfsdp.features.lookup import warn

if TYPE_CHECKING:
    from hwfsdp.features.schedule import FSDPState

_STAGES, _SCHEDULES = "torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules"
_INSTALL = "Call hwfsdp.install() before anything imports torch's FSDP2 names, or run the program by `hwfsdp swap SCRIPT`."


def check_stage(state: FSDPState) -> None:
    """Check the stage in which a forward of this root begins, if there is one and it was not checked with these settings."""
    stages = sys.modules.get(_STAGES)  # None: not imported, so there is no stage
    if stages is None or not torch.is_grad_enabled():
        return
    if state.root.stage_checked != [group.reshard_after_forward for group in state.root.groups]:
        look_up_stage(state, stages)


def look_up_stage(state: FSDPState, stages: ModuleType) -> None:
    """Look up the stage and the schedule that run this forward; warn if the stage does not know our modules.

    Raises:
        UsageError: the schedule would lose gradients of this model.
    """
    stage = running(_STAGES, "submod")
    schedule = running(_SCHEDULES, "pipeline_order") if stage is not None else None
    if schedule is None:
        return
    known = isinstance(stage.submod, stages.FSDPModule)
    if splits_backwards(schedule):
        check_split(state, stage.submod, known, type(schedule).__name__)
    elif stage.submod in state.modules and not known:
        warn(
            f"torch's pipeline stage takes {state.name!r} for a module that is not sharded, and lets it reduce its gradients once "
            f"per micro-batch. {_INSTALL}"
        )
    state.root.stage_checked = [group.reshard_after_forward for group in state.root.groups]


def check_split(state: FSDPState, module: nn.Module, known: bool, schedule: str) -> None:
    """Raise UsageError if the weights would not be there when a backward for the inputs of the stage begins."""
    trained = [g for g in state.root.groups if any(p.sharded_param.requires_grad for p in g.params)]
    freed = [group.name for group in trained if group.reshard_after_forward]
    if known and not freed:
        return
    got, remedy = (
        f"group {freed[0]!r}, which frees them" if freed else "",
        "Pass reshard_after_forward=False to fully_shard; the schedule gathers and frees the parameters of a stage itself.",
    )
    if not known and module in state.modules:
        got, remedy = "a stage of torch's that does not know hwfsdp's modules", _INSTALL
    elif not known:
        got = f"a stage whose own module, {type(module).__name__}, is not sharded"
        remedy = "Call fully_shard on the stage's module, too, with reshard_after_forward=False."
    raise UsageError(
        f"{schedule}, which splits backwards",
        expected="parameters that stay whole after forward",
        got=got,
        remedy=remedy,
    )


def running(home: str, attribute: str) -> Any:
    """Return the object of torch's module `home` whose method this thread runs, if it has this attribute; None if there is none."""
    for frame, _ in traceback.walk_stack(None):
        if frame.f_globals.get("__name__") == home:
            found = frame.f_locals.get("self")
            if hasattr(found, attribute):
                return found
    return None


def splits_backwards(schedule: Any) -> bool:
    """True if a schedule of torch has a backward for the inputs alone, which torch calls "I"."""
    actions = [action for of_rank in (schedule.pipeline_order or {}).values() for action in of_rank]
    return any(action is not None and action.computation_type == "I" for action in actions)
