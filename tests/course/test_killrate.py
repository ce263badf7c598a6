"""The checks notice machine-made mistakes: a sample of them here, all of them in `make mutants`."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwfsdp.course.commands import everything
from hwfsdp.course.killrate import hole_mutants, hole_sample, kill, known_equivalents
from hwfsdp.course.manifest import Exercise, find_course

COURSE = find_course(Path(__file__))
ELECTIVES = [exercise for exercise in COURSE.exercises if not exercise.is_station]
EVERYTHING = everything(COURSE)
SAMPLED = 8  # of each elective; not all of stations that change nothing are listed yet, so only `make mutants` tells


def directory(exercise: Exercise) -> str:
    return exercise.directory


@pytest.mark.long
@pytest.mark.parametrize("exercise", ELECTIVES, ids=directory)
def test_a_sample_of_mutants_is_killed(exercise: Exercise) -> None:
    rate = kill(COURSE, exercise, hole_sample(exercise, SAMPLED, seed=int(exercise.number)))
    print(rate)
    assert not rate.survived, "\n".join(map(str, rate.survived))


@pytest.mark.parametrize("exercise", EVERYTHING, ids=directory)
def test_equivalent_mutants_that_are_listed_exist(exercise: Exercise) -> None:
    found = {(hole, mutant.before, mutant.after) for hole, mutant in hole_mutants(exercise)}
    assert known_equivalents(COURSE, exercise) <= found
