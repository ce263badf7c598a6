"""The grader, graded: wrong answers get the verdict they deserve, right ones all points however they are written.

A wrong answer to a station is an edit of the reference as it is there; a right one is the reference itself, which later stations
write differently. `make test` has one wrong answer for each check. Right answers there are the solutions, in tests/exercises.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from hwfsdp.learn.grade import Options, checks_of
from hwfsdp.learn.manifest import Exercise, find_course
from hwfsdp.learn.misconceptions import MISCONCEPTIONS
from hwfsdp.learn.pool import WORKERS, grading_pool
from hwfsdp.learn.stations.stages import LAST, stage
from hwfsdp.learn.submission import solution
from hwfsdp.learn.verdict import Grade
from hwfsdp.learn.workbook import SEED, failures, graded
from suites import long

sys.path.insert(0, str(Path(__file__).parent))
from answers import stations  # noqa: E402
from answers.shapes import Right, Wrong, answer  # noqa: E402

COURSE = find_course(Path(__file__))
STATIONS = [exercise for exercise in COURSE.exercises if exercise.is_station]
ELECTIVES = [exercise for exercise in COURSE.exercises if not exercise.is_station]


def answers(kind: str) -> list[tuple[Exercise, Any]]:
    """All answers of one kind, WRONG or RIGHT, to electives."""
    found = []
    for exercise in ELECTIVES:
        module = importlib.import_module(f"answers.{exercise.topic}")
        found += [(exercise, each) for each in getattr(module, kind)]
    return found


# written from the pages of the course alone, by people who had not seen the reference
OTHER_MAKES = sorted(Path(__file__).parent.glob("answers/right/*.py"))
AS_IT_WAS = Right("as it is at the station", {})
WRONG = [(COURSE.exercise(wrong.station), wrong) for wrong in stations.WRONG] + answers("WRONG")
RIGHT = [(station, AS_IT_WAS) for station in STATIONS] + answers("RIGHT")


def text_of(exercise: Exercise, each: Any) -> str:
    """What is handed in."""
    if exercise.is_station:
        return stage(int(exercise.number)) if each is AS_IT_WAS else str(each.text)
    return answer(solution(exercise), each.functions, each.also)


def one_for_each_check(found: list[tuple[Exercise, Any]]) -> list[Any]:
    """The answers; all but the first one for a check are long."""
    first = {wrong.check: wrong for _, wrong in reversed(found)}
    return [case if first[case[1].check] is case[1] else long(*case) for case in found]


def named(value: object) -> str | None:
    return value.directory if isinstance(value, Exercise) else getattr(value, "name", None)


@pytest.fixture(scope="module")
def grades(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Grade]]]:
    """By test, the grade that it asks for; several are being made at once."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ  # otherwise the other cores have tests of their own
    with grading_pool(COURSE, WORKERS if alone else 1) as pool:
        chosen = [
            item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
        ]
        found = {}
        for item in chosen:
            exercise, *answers = item.callspec.params.values()
            for each in answers:
                options = Options(seed=SEED, only=getattr(each, "check", None))
                found[item.name] = pool.submit(exercise, text_of(exercise, each), options)
        yield found


@pytest.mark.parametrize(("exercise", "wrong"), one_for_each_check(WRONG), ids=named)
def test_a_wrong_answer_is_told_what_is_wrong(
    exercise: Exercise,
    wrong: Wrong | stations.Wrong,
    grades: dict[str, Future[Grade]],
    request: pytest.FixtureRequest,
) -> None:
    result = grades[request.node.name].result()
    verdicts = {r.check.id: r.finding.misconception for r in result.results if r.finding}
    assert verdicts.get(wrong.check) == wrong.misconception, failures(result)
    assert result.score < exercise.points


@pytest.mark.long
@pytest.mark.parametrize(("exercise", "right"), RIGHT, ids=named)
def test_a_right_answer_gets_full_marks_however_it_is_written(
    exercise: Exercise, right: Right, grades: dict[str, Future[Grade]], request: pytest.FixtureRequest
) -> None:
    result = grades[request.node.name].result()
    assert (result.status, result.score) == ("passed", exercise.points), failures(result)


@pytest.mark.long
@pytest.mark.parametrize("path", OTHER_MAKES, ids=lambda path: path.stem)
def test_a_file_of_another_make_gets_full_marks_at_every_station(path: Path) -> None:
    for number in (2, 10):  # the checks of all earlier ones are run as well
        result = graded(COURSE.exercise(number), COURSE, path.read_text(), Options(seed=SEED, mine=True))
        assert result.status == "passed", failures(result)


@pytest.mark.parametrize("exercise", COURSE.exercises, ids=named)
def test_every_exercise_is_graded_on_enough_answers(exercise: Exercise) -> None:
    wrong = [each for of, each in WRONG if of is exercise]
    assert all(each.misconception in MISCONCEPTIONS for each in wrong)
    assert len(wrong) >= (8 if not exercise.is_station else 6 if int(exercise.number) <= LAST else 3)
    assert sum(of is exercise for of, _ in RIGHT) >= (1 if exercise.is_station else 3)
    if exercise.is_station:
        assert {each.check for each in wrong} == {check.id for check in checks_of(exercise)}
