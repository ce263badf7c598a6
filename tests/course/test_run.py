"""Late runs: repeated, reported, or sure to hang. The test sets the clock and the load, and starts no process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hwfsdp.course import run
from hwfsdp.course.diagnose import explain_broken
from hwfsdp.course.overlay import Overlay
from hwfsdp.course.run import LONGER, MOST_LOAD, Broken, Ranks, Run, Times

DONE = Run([{"x": 1}])
# for each run: its seconds, and whether it surely hangs if these are too many
Steps = list[tuple[float, bool]]


class Machine:
    """A machine with its own clock. Its runs take the times in `steps`."""

    def __init__(self, steps: Steps, load: float = 0.5) -> None:
        self.steps, self.now, self.given, self.load = steps, 0.0, list[float](), load

    def launch(self, order: Any, world_size: int, seconds: float, write: Any) -> Run:
        takes, hangs = self.steps[min(len(self.given), len(self.steps) - 1)]
        self.given.append(seconds)
        self.now += min(takes, seconds)
        if takes <= seconds:
            return DONE
        late = Broken("late", 0, f"no return within {seconds:g} s (rank 0 waiting in barrier)")
        late.unsure = not hangs
        raise late


def probe() -> None:
    """Stand for any probe."""


Maker = Callable[..., tuple[Ranks, Machine]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Maker:
    monkeypatch.setenv(run.PATIENCE, "1")

    def make_ranks(steps: Steps, load: float = 0.5, repeat: bool = True) -> tuple[Ranks, Machine]:
        machine = Machine(steps, load)
        monkeypatch.setattr(run, "_launch", machine.launch)
        times = Times(8.0, 17.0, repeat, clock=lambda: machine.now, load=lambda: machine.load)
        return Ranks(Overlay({}, ()), times=times), machine

    return make_ranks


@pytest.mark.parametrize("load, longer", [(0.5, 1), (1.0, 1), (3.0, 3), (100.0, MOST_LOAD)])
def test_a_run_that_was_late_is_repeated_for_longer_and_counts_if_it_ends_then(
    make: Maker, load: float, longer: float
) -> None:
    ranks, machine = make([(9.0, False)], load)
    assert ranks.run(probe, 2) is DONE
    assert machine.given == [8.0, 8.0 * LONGER * longer]


def test_a_run_that_is_late_again_counts_and_tells_the_load_of_the_machine(make: Maker) -> None:
    ranks, machine = make([(1000.0, False)], 2.25)
    with pytest.raises(Broken) as caught:
        ranks.run(probe, 2)
    assert len(machine.given) == 2 and not caught.value.provisional
    finding = explain_broken(caught.value, [])
    assert finding.misconception == "stuck-in" and not finding.provisional
    assert "within 36 s (rank 0 waiting in barrier)" in finding.message
    assert "repeated with nothing beside it" in finding.message and "2.2 per core" in finding.message


def test_ranks_that_hang_for_sure_are_not_asked_twice(make: Maker) -> None:
    ranks, machine = make([(1000.0, True)])
    with pytest.raises(Broken) as caught:
        ranks.run(probe, 2)
    assert machine.given == [8.0] and "load" not in caught.value.got and not caught.value.provisional


def test_a_late_run_in_a_crowd_is_provisional_and_not_repeated(make: Maker) -> None:
    ranks, machine = make([(9.0, False)], repeat=False)
    with pytest.raises(Broken) as caught:
        ranks.run(probe, 2)
    assert machine.given == [8.0] and explain_broken(caught.value, []).provisional


def test_a_certain_hang_in_a_crowd_is_final(make: Maker) -> None:
    ranks, machine = make([(9.0, True)], repeat=False)
    with pytest.raises(Broken) as caught:
        ranks.run(probe, 2)
    assert not explain_broken(caught.value, []).provisional


def test_runs_that_are_all_slow_get_as_much_time_again_once(make: Maker) -> None:
    ranks, machine = make([(7.0, False)])
    for number in range(6):
        assert ranks.run(probe, 2, number=number) is DONE
    with pytest.raises(Broken, match="for all runs of the exercise, repeated") as caught:
        for number in range(6, 12):
            ranks.run(probe, 2, number=number)
    assert "0.5 per core" in caught.value.got and machine.now < 17.0 + 2 * 8.0 + 17.0 + 8.0


def test_all_times_grow_with_the_patience_that_is_asked_for(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(run.PATIENCE, "3")
    ranks, machine = make([(1000.0, True)])
    with pytest.raises(Broken):
        ranks.run(probe, 2)
    assert machine.given == [24.0]


def test_ranks_keep_no_private_variable_and_see_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    environ = run._environment(tmp_path)
    assert "TOKEN" not in environ and environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_part_that_raises_is_reported_with_the_notes_of_its_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def part() -> None:
        error = IndexError("out of range")
        error.add_note("when called with (3, 2)")
        raise error

    monkeypatch.setenv("RANK", "1")
    report: run.Report = {}
    run.attempt(report, "faults", part)
    assert report[run.FAILED]["faults"]["message"] == "out of range, when called with (3, 2)"
