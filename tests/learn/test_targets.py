"""Targets of 09 and 10: READMEs state those that are graded, the package meets them, schedules that hide nothing do not."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

import pytest

from hwfsdp.group import FSDPCommContext
from hwfsdp.hooks import FSDPState
from hwfsdp.learn.checks import backward_prefetch, forward_prefetch
from hwfsdp.learn.checks.overlap import (
    Targets,
    check_ahead,
    check_figures,
    check_ordered,
    check_reductions,
    log_of,
)
from hwfsdp.learn.checks.virtual_clock import figures_of, simulate_here
from hwfsdp.learn.checks.virtual_models import DEVICE, GPUS, inference, training
from hwfsdp.learn.verdict import Finding

EXERCISES = Path(__file__).parents[2] / "exercises"
STEPS = {
    "forward_prefetch": (inference, "09_forward_prefetch", forward_prefetch.TARGETS),
    "backward_prefetch": (training, "10_backward_prefetch", backward_prefetch.TARGETS),
}


def figures(step: str, change: AbstractContextManager[object] = nullcontext()) -> dict:
    with change:
        return figures_of(simulate_here(STEPS[step][0], GPUS, DEVICE))


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, pattern
    return float(found[1].replace(",", ""))


def without(attribute: str) -> AbstractContextManager[object]:
    return mock.patch.object(FSDPState, attribute, lambda state: None)


def reductions_waited_for() -> AbstractContextManager[object]:
    add = FSDPCommContext.add_reduction
    return mock.patch.object(
        FSDPCommContext, "add_reduction", lambda c, *both: (add(c, *both), c.wait_for_reductions())
    )


def reductions_left() -> AbstractContextManager[object]:
    return mock.patch.object(FSDPCommContext, "wait_for_reductions", lambda context, leave=0: None)


@pytest.mark.parametrize("step", STEPS)
def test_a_readme_states_the_targets_that_are_graded(step: str) -> None:
    _, folder, targets = STEPS[step]
    [line] = re.findall(r"\*\*Target: .*?\*\*", (EXERCISES / folder / "README.md").read_text())
    assert targets == Targets(
        exposed_us=number(r"exposed communication ≤ ([\d,.]+) µs", line),
        step_ms=number(r"step ≤ ([\d.]+) ms", line),
        peak_gib=number(r"peak ≤ ([\d.]+) GiB", line),
    )


@pytest.mark.parametrize("step", STEPS)
def test_the_package_meets_the_targets_and_nearly_uses_them_up(step: str) -> None:
    found, targets = figures(step), STEPS[step][2]
    check_figures(found, targets, "A step")
    assert found["exposed_us"] > 0.95 * targets.exposed_us
    assert found["step_us"] > 0.95e3 * targets.step_ms
    assert found["peak_bytes"] > 0.95 * 2**30 * targets.peak_gib
    check_ordered(log_of(found), "A step")


@pytest.mark.parametrize(
    ("step", "attribute", "phase"),
    [
        ("forward_prefetch", "prefetch_forward", "forward"),
        ("backward_prefetch", "prefetch_backward", "backward"),
    ],
)
def test_a_step_without_gathering_ahead_misses_the_targets(step: str, attribute: str, phase: str) -> None:
    found, targets = figures(step, without(attribute)), STEPS[step][2]
    with pytest.raises(Finding, match="are exposed; target"):
        check_figures(found, targets, "A step")
    with pytest.raises(Finding, match="is not started"):
        check_ahead(log_of(found), phase, found, targets)


def test_a_step_that_waits_for_each_reduction_misses_the_targets() -> None:
    found = figures("backward_prefetch", reductions_waited_for())
    with pytest.raises(Finding, match="are exposed; target"):
        check_figures(found, backward_prefetch.TARGETS, "A step")
    with pytest.raises(Finding, match="compute waits for the reduction of blocks.4"):
        check_reductions(log_of(found), 1, "A step")


def test_a_step_that_waits_for_no_reduction_is_out_of_bounds_and_in_a_race_with_its_optimizer() -> None:
    found = figures("backward_prefetch", reductions_left())
    with pytest.raises(Finding, match="peak .* GiB .*; bound"):
        check_figures(found, backward_prefetch.TARGETS, "A step")
    with pytest.raises(Finding, match="2 in flight"):
        check_reductions(log_of(found), 1, "A step")
    with pytest.raises(Finding) as raised:
        check_ordered(log_of(found), "A step")
    assert raised.value.misconception == "left-in-flight"
