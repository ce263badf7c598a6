"""Laws of steps on simulated machines, tried on the package itself: its `fully_shard` keeps all of them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hwfsdp
from hwfsdp.course import timing
from hwfsdp.course.findings import Finding
from hwfsdp.course.machines import GPU, HOST, MACHINES, NARROW, RACE, WIDE, Program, Step, sets_apart, stepped
from hwfsdp.streams import streams_for

RACE_TEST = Path(__file__).parents[2] / "exercises/16_race/test_race.py"


def shard(module: nn.Module, name: str) -> nn.Module:
    return hwfsdp.fully_shard(module)


@pytest.fixture(scope="module")
def host() -> Step:
    return Step(WIDE, "host", stepped(WIDE, "host", shard))


@pytest.mark.parametrize("program", [NARROW, WIDE], ids=str)
def test_the_package_waits_for_everything_and_computes_with_what_travels(program: Program) -> None:
    step = Step(program, "gpu", stepped(program, "gpu", shard))
    timing.no_races(step)
    timing.computes_with_what_travels(step)


def test_the_package_hides_what_can_be_hidden(host: Step) -> None:
    timing.gathered_once(host, "backward")
    timing.exposed(host, "forward", at_most=2 * host.gather_us)
    timing.exposed(host, "backward", at_most=1.5 * host.gather_us)
    timing.exposed(host, "reduction", at_most=1.5 * host.reduce_us)
    timing.duration(host, "forward", at_most=1.2 * (host.compute_us("forward") + host.gather_us))
    timing.in_flight(host, at_most=2)


def test_times_are_those_of_the_pages(host: Step) -> None:
    """A unit's gather has 7/8 of its bytes to receive, and its forward two operations for each number and token."""
    gather = 7 / 8 * host.unit_bytes / (HOST.link * HOST.link_efficiency)
    assert host.gather_us == pytest.approx(gather * 1e6, rel=0.01)
    numbers, rate = host.unit_bytes / 4, HOST.flops["float32"] * HOST.efficiency
    products = 2 * numbers * WIDE.config.seq_len / rate * 1e6
    assert products < host.compute_us("forward") / WIDE.config.layers < 1.5 * products
    assert GPU.flops["float32"] / HOST.flops["float32"] == GPU.link / HOST.link


def test_work_that_nobody_needs_hides_nothing(host: Step) -> None:
    """Without the events that read the kernels' results, no kernel counts."""
    unread = {"all_gather": {"reads": []}, "reduce_scatter": {"reads": []}}
    events: Any = [each | unread.get(each["op"], {}) for each in host.facts["events"]]
    lost = Step(WIDE, "host", host.facts | {"events": events})
    with pytest.raises(Finding, match="while no unit computes"):
        timing.exposed(lost, "reduction", at_most=1.5 * lost.reduce_us)


def test_streams_of_two_sets_have_no_common_order() -> None:
    with sets_apart() as made, MACHINES["gpu"].entered():
        first, second = streams_for("cpu"), streams_for("cpu")
    assert (first.all_gather.name, second.all_gather.name) == ("all_gather", "all_gather 2")
    assert made == [0, 1, 2]


@pytest.mark.long
@pytest.mark.parametrize("name", RACE)
def test_the_table_of_the_race_has_the_packages_figures(name: str) -> None:
    step = Step(RACE[name], "cluster", stepped(RACE[name], "cluster", shard))
    computes_us, alone_us, _ = timing._spent(step)
    spans = ("copy_in", "copy_out", "forward", "backward")  # of the package alone; they hold operators
    operators = sum(e.op not in spans for e in step.operators)
    found = timing.Pace(step.step_us, step.peak_bytes, computes_us, alone_us, operators)
    assert tuple(found) == pytest.approx(tuple(runpy.run_path(str(RACE_TEST))["FSDP2"][name]), rel=0.02)
