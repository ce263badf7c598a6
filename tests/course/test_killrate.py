"""The checks notice machine-made mistakes: a sample of them here, all of them in `make mutants`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hwfsdp.course import grader_report
from hwfsdp.course.__main__ import main
from hwfsdp.course.commands import everything
from hwfsdp.course.grader_report import Answers, ExerciseReport, KillRate, hole_mutants, kill
from hwfsdp.course.grader_report import known_equivalents
from hwfsdp.course.manifest import Exercise, find_course

COURSE = find_course(Path(__file__))
ELECTIVES = [exercise for exercise in COURSE.exercises if not exercise.is_station]
EVERYTHING = everything(COURSE)
SAMPLED = 8  # per elective; `make mutants` runs the stations, whose equivalent mutants are not all listed


def directory(exercise: Exercise) -> str:
    return exercise.directory


@pytest.mark.long
@pytest.mark.parametrize("exercise", ELECTIVES, ids=directory)
def test_a_sample_of_mutants_is_killed(exercise: Exercise) -> None:
    found = hole_mutants(exercise)
    rate = kill(COURSE, exercise, random.Random(int(exercise.number)).sample(found, SAMPLED))
    print(rate)
    assert not rate.survived, "\n".join(map(str, rate.survived))


@pytest.mark.parametrize("exercise", EVERYTHING, ids=directory)
def test_equivalent_mutants_that_are_listed_exist(exercise: Exercise) -> None:
    found = {(hole, mutant.before, mutant.after) for hole, mutant in hole_mutants(exercise)}
    assert known_equivalents(COURSE, exercise) <= found


@pytest.mark.parametrize("what", ["nothing", "a mutant that survived", "a right answer that failed"])
def test_the_command_fails_if_a_mutant_survives_or_a_right_answer_fails(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exercise = ELECTIVES[0]
    report = ExerciseReport(exercise, Answers(0, []), KillRate(exercise))
    if what == "a mutant that survived":
        report.rate.survived.append(hole_mutants(exercise)[0])
    if what == "a right answer that failed":
        report.false_failures.append("the solution on 3 ranks, seed 7")
    monkeypatch.setattr(grader_report, "examine", lambda course, exercises: iter([report]))
    assert main(["mutants", exercise.number]) == (what != "nothing")
    assert ("survived: " in capsys.readouterr().out) == (what == "a mutant that survived")
