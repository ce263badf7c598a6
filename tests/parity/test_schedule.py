"""Which collectives run, in which order, how often: read from the event log.

"+g" is a gather of group g, "-g" is the reduction of its gradients. A group's number is the number of its block; the root's group is
"root".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import models
from hwfsdp import EventLog, launch, record
from oracles import (
    BITS,
    REGROUPING,
    Case,
    Library,
    Training,
    compare,
    compare_traffic,
    ours,
    walk,
)
from together import Together

ONE_STEP = "+0 +1 +2 | +2 +1 -2 +0 -1 -0"
ONE_STEP_AND_ROOT = "+root +0 +1 +2 | +2 +1 -2 +0 -1 -0 -root"
two = Together(2)
SIGNS = {"all_gather": "+", "reduce_scatter": "-"}


def traffic(log: EventLog) -> str:
    """Return the collectives in order of issue, with a bar between forward and backward."""
    words, phase = [], "forward"
    for event in log.collectives():
        if event.phase != phase:
            phase = event.phase
            words.append("|")
        words.append(SIGNS[event.op] + event.owner.replace("blocks.", "").replace("Wandering", "root"))
    return " ".join(words)


def recorded(training: Training, seed: int = 0) -> EventLog:
    """Return the log of one forward and backward."""
    with record() as log:
        training.loss(seed).backward()
    training.model.zero_grad()
    return log


def logs_of(
    steps: int,
    build: Callable[[], models.Model] = models.graded,
    prepare: Callable[[Training], None] = lambda training: None,
    before: Callable[[Training, int], None] = lambda training, step: None,
    library: Library = ours,
    **options: Any,
) -> list[EventLog]:
    """On a rank: return the logs of several training steps. `prepare` runs once at the start, `before` before each step."""
    training = Training(build, library, **options)
    prepare(training)
    logs = []
    for step in range(steps):
        before(training, step)
        logs.append(recorded(training, step))
    return logs


def steps(*args: Any, **kwargs: Any) -> list[str]:
    """Return the logs of `logs_of` in words."""
    return [traffic(log) for log in logs_of(*args, **kwargs)]


def sorted_words(step: str) -> list[str]:
    return sorted(step.split())


# --- Order and count ---------------------------------------------------------------------------------------


@two.finds([ONE_STEP_AND_ROOT])
def a_root_with_parameters_is_gathered_once_and_reduced_last() -> list[str]:
    return steps(1, models.wandering)


@two.finds(["+0 +1 +2 | -2 -1 -0"] * 2)
def groups_that_stay_whole_after_forward_are_not_gathered_in_backward() -> list[str]:
    return steps(2, reshard_after_forward=False)


@two.finds(["+root | +root -root"])
def a_root_told_to_reshard_is_gathered_again() -> list[str]:
    return steps(1, models.wandering, how="root", reshard_after_forward=True)


@two.finds([(sorted_words(ONE_STEP_AND_ROOT), [[], ["1", "2"]])] * 2)
def recomputation_gathers_nothing_more_and_does_not_make_forward_forget_the_order() -> list[Any]:
    def list_them(training: Training) -> None:
        first, second, third = training.model.blocks
        second.set_modules_to_forward_prefetch([third])

    found = []
    for reentrant in (True, False):
        logs = logs_of(2, functools.partial(models.checkpointed, reentrant))
        [listed] = logs_of(1, functools.partial(models.checkpointed, reentrant), list_them)
        words, others = (
            sorted_words(traffic(log).replace("Checkpointed", "root")) for log in (logs[0], listed)
        )
        assert words == others, "lists gather nothing in a recomputation"
        found.append((words, [early_gathers(log) for log in logs]))
    return found


@two.finds([ONE_STEP_AND_ROOT.replace(" -1", "")])
def frozen_groups_are_not_reduced() -> list[str]:
    return steps(1, models.wandering, lambda t: t.model.blocks[1].requires_grad_(False))


def test_one_rank_alone_calls_no_collective():
    assert launch(steps, 1, 2, timeout=60) == [["", ""]]


MODELS: dict[str, Callable[[], models.Model]] = {
    "twice": models.twice,
    "unused": models.Unused,
    "structured": models.Structured,
    "reentrant checkpoints inside": functools.partial(models.checkpointed_inside, True),
    "checkpoints around": functools.partial(models.checkpointed, False),
}


# torch compares the ranks' collectives, so one rank stands for all
for _name in MODELS:
    moved = functools.partial(compare_traffic, Case(MODELS[_name], how="nested"))
    two.add(f"{_name} moves in the first step what it moves under FSDP2", moved, {"FSDP2": []})


# --- Prefetching in forward --------------------------------------------------------------------------------


def early_gathers(log: EventLog) -> list[str]:
    """Return the groups whose gather was issued before the forward of the previous block began."""
    early = []
    for index in range(1, 3):
        [gather] = log.select("all_gather", phase="forward", owner=f"blocks.{index}")
        [forward] = log.select("forward", phase="forward", owner=f"blocks.{index - 1}")
        if gather.seq < forward.seq:
            early.append(f"{index}")
    return early


@two.finds(([[], ["1", "2"], ["1", "2"]], [ONE_STEP] * 3, True))
def the_second_forward_gathers_one_group_ahead_and_never_two_with_the_same_traffic() -> Any:
    logs = logs_of(3)
    [gather] = logs[1].select("all_gather", phase="forward", owner="blocks.2")
    [forward] = logs[1].select("forward", owner="blocks.0")
    return [early_gathers(log) for log in logs], list(map(traffic, logs)), gather.seq > forward.seq


@two.finds((True, "+0 +1 +2 | +2 +1 +0 -2 -1 -0"))
def listed_modules_are_gathered_ahead_in_the_first_forward_and_backward() -> Any:
    def list_them(training: Training) -> None:
        first, second, third = training.model.blocks
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])

    [log] = logs_of(1, prepare=list_them)
    [forward] = log.select("forward", owner="blocks.0")
    gathers = log.select("all_gather", phase="forward")
    return all(gather.seq < forward.seq for gather in gathers), traffic(log)


def list_wrongly(training: Training) -> None:
    """Set bad lists: a module that is not next, and the module itself."""
    first, second, third = training.model.blocks
    first.set_modules_to_forward_prefetch([third])
    second.set_modules_to_forward_prefetch([second])
    third.set_modules_to_backward_prefetch([first])


@two.finds([(True, sorted_words(ONE_STEP))] * 2)
def wrong_lists_change_the_order_but_not_the_count() -> list[Any]:
    return [(step != ONE_STEP, sorted_words(step)) for step in steps(2, prepare=list_wrongly)]


# --- Another path ------------------------------------------------------------------------------------------

PATHS: dict[str, list[tuple[int, ...]]] = {
    "another order": [(0, 1, 2), (2, 0, 1), (0, 1, 2)],
    "a block left out": [(0, 1, 2), (0, 2), (0, 1, 2)],
    "a block that runs twice": [(0, 1), (0, 0, 1), (1, 2, 1, 0)],
}


def walk_with_lists_and_detours(training: Training, path: list[tuple[int, ...]]) -> None:
    """Train with wrong lists. After each backward, a forward without gradients leaves the path after its first block."""
    if training.is_sharded:
        list_wrongly(training)
    for step, whole in enumerate(path):
        training.model.path = whole
        training.loss(step).backward()
        training.model.path = whole[:1]
        with torch.no_grad():
            training.loss(step)
        training.call("reshard")
        training.update()
    training.keep_params()


# gathering what is not needed changes no number, nor does forgetting about it
for name, path in PATHS.items():
    walked = Case(models.wandering, functools.partial(walk, paths=path))
    detoured = Case(models.wandering, functools.partial(walk_with_lists_and_detours, path=path))
    as_fsdp2 = functools.partial(compare, walked, BITS, REGROUPING)
    two.add(f"{name} is walked as under FSDP2", as_fsdp2, {"FSDP2": [], "unsharded": []})
    as_unsharded = functools.partial(compare, detoured, None, REGROUPING)
    two.add(f"{name}, with lists and detours, changes no number", as_unsharded, {"unsharded": []})


def follow(training: Training, step: int, path: list[tuple[int, ...]]) -> None:
    training.model.path = path[step]


@two.finds(sorted_words(ONE_STEP_AND_ROOT))
def blocks_in_another_order_cost_no_gather() -> list[str]:
    path = functools.partial(follow, path=[(0, 1, 2), (2, 0, 1)])
    return sorted_words(steps(2, models.wandering, before=path)[1])


@two.finds(["+root +0 +1 +2 | +2 +0 -2 -0 -root", "+root +0 +2 | +2 +0 -2 -0 -root"])
def a_block_left_out_costs_one_gather_once() -> list[str]:
    path = functools.partial(follow, path=[(0, 1, 2), (0, 2), (0, 2)])
    return steps(3, models.wandering, before=path)[1:]


@two.finds([ONE_STEP] * 2)
def a_forward_without_gradients_leaves_nothing_behind_for_the_next_step() -> list[str]:
    def evaluate(training: Training, step: int) -> None:
        with torch.no_grad():
            training.loss(step)

    return steps(2, before=evaluate)


# --- Accumulation ------------------------------------------------------------------------------------------

MICRO_BATCHES = {  # by whether parameters are resharded after forward, and after backward
    (True, True): ["+0 +1 +2 | +2 +1 +0", "+0 +1 +2 | +2 +1 +0", ONE_STEP],
    (True, False): ["+0 +1 +2 | +2 +1 +0", "| +2 +1 +0", "| +2 +1 -2 +0 -1 -0"],
    (False, True): ["+0 +1 +2", "+0 +1 +2", "+0 +1 +2 | -2 -1 -0"],
    (False, False): ["+0 +1 +2", "", "| -2 -1 -0"],
}


@two.finds(MICRO_BATCHES)
def micro_batches_but_the_last_reduce_nothing() -> dict[tuple[bool, bool], list[str]]:
    def configure(training: Training, step: int, after_backward: bool) -> None:
        training.model.set_requires_gradient_sync(step == 2)
        training.model.set_reshard_after_backward(step == 2 or after_backward)

    return {
        (forward, backward): steps(
            3,
            before=functools.partial(configure, after_backward=backward),
            reshard_after_forward=forward,
        )
        for forward, backward in MICRO_BATCHES
    }


@two.finds(["+0 +1 | +1 -1 -0"])
def without_unshard_in_backward_a_group_is_gathered_in_forward_only() -> list[str]:
    return steps(1, models.Embedded, lambda training: training.model.blocks[0].set_unshard_in_backward(False))


test_on_two_ranks = two.test()
