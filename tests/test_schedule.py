"""Which collectives run, in which order, how often: read from the event log.

A gather of group g is written "+g", the reduction of its gradients "-g". Groups are numbered by their block; the
root's own is "root".
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import models
from hwfsdp import EventLog, launch, record
from oracles import (
    BITS,
    REGROUPING,
    WRAPS,
    Case,
    Library,
    Training,
    compare,
    complaints,
    ours,
    run_checks,
    theirs,
)

ONE_STEP = "+0 +1 +2 | +2 +1 -2 +0 -1 -0"
ONE_STEP_AND_ROOT = "+root +0 +1 +2 | +2 +1 -2 +0 -1 -0 -root"
SIGNS = {"all_gather": "+", "reduce_scatter": "-"}


def traffic(log: EventLog) -> str:
    """The collectives in order of issue, and a bar between forward and backward."""
    words, phase = [], "forward"
    for event in log.collectives():
        if event.phase != phase:
            phase = event.phase
            words.append("|")
        words.append(SIGNS[event.op] + event.owner.replace("blocks.", "").replace("Wandering", "root"))
    return " ".join(words)


def recorded(training: Training, seed: int = 0) -> EventLog:
    """The log of one forward and backward."""
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
    """On a rank: the logs of several training steps. `prepare` sees the training first, `before` each step."""
    training = Training(build, library, **options)
    prepare(training)
    logs = []
    for step in range(steps):
        before(training, step)
        logs.append(recorded(training, step))
    return logs


def steps_of_rank_0(world_size: int, *args: Any, **kwargs: Any) -> list[str]:
    return [traffic(log) for log in launch(logs_of, world_size, *args, timeout=60, **kwargs)[0]]


# --- Order and count ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
def test_backward_gathers_one_group_ahead_and_reduces_one_behind(world_size):
    assert steps_of_rank_0(world_size, 1) == [ONE_STEP]


def test_a_root_with_parameters_is_gathered_once_and_reduced_last():
    assert steps_of_rank_0(2, 1, models.wandering) == [ONE_STEP_AND_ROOT]


def test_groups_that_stay_whole_after_forward_are_not_gathered_in_backward():
    assert steps_of_rank_0(2, 2, reshard_after_forward=False) == ["+0 +1 +2 | -2 -1 -0"] * 2


def test_a_root_told_to_reshard_is_gathered_again():
    [step] = steps_of_rank_0(2, 1, models.wandering, how="root", reshard_after_forward=True)
    assert step == "+root | +root -root"


def test_one_rank_has_nobody_to_talk_to():
    assert steps_of_rank_0(1, 2) == ["", ""]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_gathers_nothing_more(reentrant):
    build = functools.partial(models.checkpointed, reentrant)
    [step] = steps_of_rank_0(2, 1, build)
    assert Counter(step.replace("Checkpointed", "root").split()) == Counter(ONE_STEP_AND_ROOT.split())


def test_frozen_groups_are_not_reduced():
    [step] = steps_of_rank_0(2, 1, models.wandering, lambda t: t.model.blocks[1].requires_grad_(False))
    assert step == ONE_STEP_AND_ROOT.replace(" -1", "")


MODELS: dict[str, Callable[[], models.Model]] = {
    "graded": models.graded,
    "wandering": models.wandering,
    "twice": models.twice,
    "unused": models.Unused,
    "frozen": models.frozen,
    "structured": models.Structured,
    "reentrant checkpoints around": functools.partial(models.checkpointed, True),
    "reentrant checkpoints inside": functools.partial(models.checkpointed_inside, True),
    "checkpoints around": functools.partial(models.checkpointed, False),
    "checkpoints inside": functools.partial(models.checkpointed_inside, False),
}


@functools.cache
def traffic_of_models(world_size: int) -> Any:
    """By rank, by (model, wrap): what one step of hwfsdp and one of FSDP2 move, and on hwfsdp's side for whom."""

    def on_a_rank() -> Any:
        found = {}
        for name, build in MODELS.items():
            for how in WRAPS:
                logs = [logs_of(1, build, library=library, how=how)[0] for library in (ours, theirs)]
                moved = [[(e.op, e.bytes, e.dtype) for e in log.collectives()] for log in logs]
                found[name, how] = (*moved, [e.owner for e in logs[0].collectives()])
        return found

    return launch(on_a_rank, world_size, timeout=60)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", WRAPS)
def test_the_first_step_moves_the_same_bytes_in_the_same_order_as_fsdp2(model, how):
    for rank in traffic_of_models(3):
        mine, reference, _ = rank[model, how]
        assert mine == reference != []


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", WRAPS)
def test_all_ranks_run_the_same_collectives_in_the_same_order(model, how):
    first, *others = [rank[model, how] for rank in traffic_of_models(3)]
    assert all(other == first for other in others)


# --- Prefetching in forward --------------------------------------------------------------------------------


def early_gathers(log: EventLog) -> list[str]:
    """The groups whose gather was issued before the forward of the block before them began."""
    early = []
    for index in range(1, 3):
        [gather] = log.select("all_gather", phase="forward", owner=f"blocks.{index}")
        [forward] = log.select("forward", phase="forward", owner=f"blocks.{index - 1}")
        if gather.seq < forward.seq:
            early.append(f"{index}")
    return early


def test_the_second_forward_gathers_one_group_ahead_with_the_same_traffic():
    first, second, third = launch(logs_of, 2, 3, timeout=60)[0]
    assert [early_gathers(log) for log in (first, second, third)] == [[], ["1", "2"], ["1", "2"]]
    assert traffic(first) == traffic(second) == traffic(third) == ONE_STEP


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_does_not_make_forward_forget_the_order(reentrant):
    build = functools.partial(models.checkpointed, reentrant)
    first, second = launch(logs_of, 2, 2, build, timeout=60)[0]
    assert [early_gathers(log) for log in (first, second)] == [[], ["1", "2"]]


def test_a_forward_never_gathers_two_groups_ahead():
    second = launch(logs_of, 2, 2, timeout=60)[0][1]
    [gather] = second.select("all_gather", phase="forward", owner="blocks.2")
    [forward] = second.select("forward", owner="blocks.0")
    assert gather.seq > forward.seq


def test_listed_modules_are_gathered_ahead_in_the_first_forward():
    def list_them(training: Training) -> None:
        first, second, third = training.model.blocks
        first.set_modules_to_forward_prefetch([second, third])

    [log] = launch(logs_of, 2, 1, prepare=list_them, timeout=60)[0]
    gathers = log.select("all_gather", phase="forward")
    [forward] = log.select("forward", owner="blocks.0")
    assert all(gather.seq < forward.seq for gather in gathers)
    assert traffic(log) == ONE_STEP


def test_listed_modules_are_gathered_ahead_in_backward():
    def list_them(training: Training) -> None:
        first, second, third = training.model.blocks
        third.set_modules_to_backward_prefetch([second, first])

    assert steps_of_rank_0(2, 2, prepare=list_them) == ["+0 +1 +2 | +2 +1 +0 -2 -1 -0"] * 2


def list_wrongly(training: Training) -> None:
    """Lists that are of little use: not the next module, and oneself."""
    first, second, third = training.model.blocks
    first.set_modules_to_forward_prefetch([third])
    second.set_modules_to_forward_prefetch([second])
    third.set_modules_to_backward_prefetch([first])


def test_wrong_lists_change_the_order_but_not_the_count():
    for step in steps_of_rank_0(2, 2, prepare=list_wrongly):
        assert step != ONE_STEP
        assert Counter(step.split()) == Counter(ONE_STEP.split())


# --- Another path ------------------------------------------------------------------------------------------

PATHS: dict[str, list[tuple[int, ...]]] = {
    "another order": [(0, 1, 2), (2, 0, 1), (0, 1, 2)],
    "a block left out": [(0, 1, 2), (0, 2), (0, 1, 2)],
    "the last block left out": [(0, 1, 2), (0, 1), (2, 1)],
    "another block at a time": [(0,), (1,), (2,), (0, 1, 2)],
    "a block that runs twice": [(0, 1), (0, 0, 1), (1, 2, 1, 0)],
    "no block": [(0, 1, 2), (), (0, 1, 2)],
}


def walk(training: Training, path: list[tuple[int, ...]]) -> None:
    for step, training.model.path in enumerate(path):
        training.loss(step).backward()
        training.update()
    training.keep_params()


def walk_with_lists(training: Training, path: list[tuple[int, ...]]) -> None:
    if training.is_sharded:
        list_wrongly(training)
    walk(training, path)


def walk_with_detours(training: Training, path: list[tuple[int, ...]]) -> None:
    """Before each step, a forward without gradients that leaves the path after its first block."""
    for step, whole in enumerate(path):
        training.model.path = whole
        training.loss(step).backward()
        training.model.path = whole[:1]
        with torch.no_grad():
            training.loss(step)
        training.call("reshard")
        training.update()
    training.keep_params()


def walk_with_lists_and_detours(training: Training, path: list[tuple[int, ...]]) -> None:
    if training.is_sharded:
        list_wrongly(training)
    walk_with_detours(training, path)


WALKS = (walk, walk_with_lists, walk_with_detours, walk_with_lists_and_detours)


@functools.cache
def walks() -> Any:
    checks = {
        f"{name}, {how.__name__}": functools.partial(
            compare, Case(models.wandering, functools.partial(how, path=path)), BITS, REGROUPING
        )
        for name, path in PATHS.items()
        for how in WALKS
    }
    return launch(run_checks, 2, checks, timeout=100)


@pytest.mark.parametrize("path", PATHS)
def test_another_path_is_walked_as_under_fsdp2(path):
    assert complaints(walks(), f"{path}, walk", "FSDP2") == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", [walk.__name__ for walk in WALKS])
def test_another_path_changes_no_number(path, how):
    """Neither does gathering what is not needed, nor forgetting about it when the parameters are about to change."""
    assert complaints(walks(), f"{path}, {how}", "unsharded") == []


def follow(training: Training, step: int, path: list[tuple[int, ...]]) -> None:
    training.model.path = path[step]


def test_blocks_in_another_order_cost_no_gather():
    path = functools.partial(follow, path=[(0, 1, 2), (2, 0, 1)])
    steps = steps_of_rank_0(2, 2, models.wandering, before=path)
    assert Counter(steps[1].split()) == Counter(ONE_STEP_AND_ROOT.split())


def test_a_block_left_out_costs_one_gather():
    path = functools.partial(follow, path=[(0, 1, 2), (0, 2), (0, 2)])
    _, wrong, learned = steps_of_rank_0(2, 3, models.wandering, before=path)
    assert wrong == "+root +0 +1 +2 | +2 +0 -2 -0 -root"
    assert learned == "+root +0 +2 | +2 +0 -2 -0 -root"


def test_a_forward_without_gradients_leaves_nothing_behind_for_the_next_step():
    def evaluate(training: Training, step: int) -> None:
        with torch.no_grad():
            training.loss(step)

    assert steps_of_rank_0(2, 2, before=evaluate) == [ONE_STEP] * 2


# --- Accumulation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "after_forward, after_backward, micro_batches",
    [
        (True, True, ["+0 +1 +2 | +2 +1 +0", "+0 +1 +2 | +2 +1 +0", ONE_STEP]),
        (True, False, ["+0 +1 +2 | +2 +1 +0", "| +2 +1 +0", "| +2 +1 -2 +0 -1 -0"]),
        (False, True, ["+0 +1 +2", "+0 +1 +2", "+0 +1 +2 | -2 -1 -0"]),
        (False, False, ["+0 +1 +2", "", "| -2 -1 -0"]),
    ],
)
def test_micro_batches_but_the_last_reduce_nothing(after_forward, after_backward, micro_batches):
    """`after_forward`, `after_backward`: whether parameters are resharded then."""

    def configure(training: Training, step: int) -> None:
        is_last = step == 2
        training.model.set_requires_gradient_sync(is_last)
        training.model.set_reshard_after_backward(is_last or after_backward)

    steps = steps_of_rank_0(2, 3, before=configure, reshard_after_forward=after_forward)
    assert steps == micro_batches


def test_without_unshard_in_backward_a_group_is_gathered_in_forward_only():
    def switch_off(training: Training) -> None:
        training.model.blocks[0].set_unshard_in_backward(False)

    class Embedded(models.Model):
        def __init__(self) -> None:
            super().__init__([torch.nn.Embedding(11, 6), models.Block(6, 5, 3)])

        inputs = models.Transformer.inputs

    assert steps_of_rank_0(2, 1, Embedded, switch_off) == ["+0 +1 | +1 -1 -0"]


# --- Bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("reshard", [True, False])
def test_the_bytes_of_a_step_are_those_of_the_closed_form(world_size, reshard):
    from hwfsdp.accounting import GroupSizes, step_traffic

    model = models.uneven()
    groups = [
        GroupSizes([p.shape for p in block.parameters()], resharded_after_forward=reshard)
        for block in model.blocks
    ]
    logs = launch(logs_of, world_size, 1, models.uneven, reshard_after_forward=reshard, timeout=60)
    assert logs[0][0].summary()["bytes_by_op"] == step_traffic(groups, world_size)
