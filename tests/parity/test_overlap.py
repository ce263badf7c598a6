"""Which events overlap, and which must not: read from the graph of events, without a clock.

Two events overlap if neither is certain to end before the other begins (`EventLog.happens_before`). In the first step, a model does not
know its order yet. From the second step on, forward prefetches, so the assertions are about the second step.
"""

from __future__ import annotations

import functools
from itertools import pairwise, product

import pytest

import models
from hwfsdp import Event, EventLog, launch, record
from oracles import Training, ours, recorded_steps

FIRST, SECOND = 0, 1  # steps
BLOCKS = (0, 1, 2)
MODELS = {"blocks only": models.graded, "root with parameters": models.wandering}


def one_backward(is_last: bool) -> EventLog:
    training = Training(models.graded, ours)
    training.model.set_is_last_backward(is_last)
    with record() as log:
        training.loss(0).backward()
    return log


@functools.cache
def logs() -> list[dict[str | bool, EventLog]]:
    """Record each rank: for each model, two training steps of three blocks; and one backward that is the last and one that is not."""

    def on_a_rank() -> dict[str | bool, EventLog]:
        found = {m: recorded_steps(Training(MODELS[m], ours)) for m in MODELS}
        return found | {last: one_backward(last) for last in (True, False)}

    return launch(on_a_rank, 2, timeout=60)


@pytest.fixture(params=[(0, "blocks only"), (1, "root with parameters")])
def rank_log(request) -> EventLog:
    """Return one rank's log."""
    rank, model = request.param
    return logs()[rank][model]


def only(log: EventLog, op: str, block: int, step: int, phase: str, stream: str | None = None) -> Event:
    """Return the only event of this kind."""
    found = log.select(op, owner=f"blocks.{block}", step=step, phase=phase)
    [event] = [e for e in found if stream in (None, e.stream)]
    return event


def overlap(log: EventLog, a: Event, b: Event) -> bool:
    return not log.happens_before(a, b) and not log.happens_before(b, a)


def previous(log: EventLog, op: str, event: Event) -> Event:
    """Return the last event of this operation for the same group that was issued before."""
    return [e for e in log.select(op, owner=event.owner) if e.seq < event.seq][-1]


# --- Overlap -----------------------------------------------------------------------------------------------


PHASES = [("forward", SECOND, (0, 1, 2)), ("backward", FIRST, (2, 1, 0)), ("backward", SECOND, (2, 1, 0))]


@pytest.mark.parametrize("phase, step, order", PHASES)
def test_the_next_gather_is_issued_before_a_block_is_copied_out_and_runs_under_its_work(
    rank_log, phase, step, order
):
    for block, following in pairwise(order):
        gather = only(rank_log, "all_gather", following, step, phase)
        for op in ("copy_out", phase):
            event = only(rank_log, op, block, step, phase)
            assert gather.seq < event.seq
            assert overlap(rank_log, gather, event)


def test_a_reduction_runs_under_the_next_backward_and_beside_a_gather(rank_log):
    for block, step in product((2, 1), (FIRST, SECOND)):
        reduction = only(rank_log, "reduce_scatter", block, step, "backward")
        backward = only(rank_log, "backward", block - 1, step, "backward")
        assert reduction.seq < backward.seq
        assert overlap(rank_log, reduction, backward)
        gathers = rank_log.select("all_gather", step=step, phase="backward")
        assert any(overlap(rank_log, reduction, gather) for gather in gathers)


# --- No overlap ------------------------------------------------------------------------------------------


def test_a_block_computes_only_after_its_gather_and_copy_out(rank_log):
    spans = [s for block in BLOCKS for s in rank_log.select("forward", "backward", owner=f"blocks.{block}")]
    assert len(spans) == 4 * len(BLOCKS)
    for span in spans:
        assert rank_log.happens_before(previous(rank_log, "all_gather", span), span), span
        assert rank_log.happens_before(previous(rank_log, "copy_out", span), span), span


def test_whole_parameters_are_freed_after_the_forward_or_backward_that_used_them(rank_log):
    for block in BLOCKS:
        spans = rank_log.select("forward", "backward", owner=f"blocks.{block}", step=SECOND)
        frees = rank_log.select("free", owner=f"blocks.{block}", step=SECOND)
        assert len(frees) == 4 * len(spans)  # two weights, two biases
        for free in frees:
            span = [s for s in spans if s.seq < free.seq][-1]
            assert rank_log.happens_before(span, free), free


@pytest.mark.parametrize("is_last", [True, False])
def test_only_the_last_backward_waits_for_its_last_reduction(is_last):
    log = logs()[0][is_last]
    *_, last = log.select("reduce_scatter")
    waits = [wait for wait in log.select("wait", stream="compute") if last.seq in wait.after]
    assert len(waits) == is_last
