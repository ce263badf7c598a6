"""Grade the grader: a wrong answer gets its misconception, a right one gets all points, however it is written.

A wrong answer edits the reference of its station (`answers.shapes`). A right one is the reference itself, which later stations write
differently, or an edit that does the same. `make test` has one wrong answer for each check. Its right answers are the solutions, in
tests/exercises.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from hwfsdp.course.checklist import checks_of
from hwfsdp.course.grade import Options
from hwfsdp.course.manifest import Exercise, find_course
from hwfsdp.course.misconceptions import MISCONCEPTIONS
from hwfsdp.course.stations.stages import LAST, stage
from hwfsdp.course.submission import solution
from hwfsdp.course.verdict import Grade
from hwfsdp.course.workbook import SEED, WORKERS, failures, graded, grading_pool
from suites import long

sys.path.insert(0, str(Path(__file__).parent))
from answers.shapes import Answer, of_another_make, read  # noqa: E402
from answers.shapes import RIGHT as IS_RIGHT  # noqa: E402

COURSE = find_course(Path(__file__))
STATIONS = [exercise for exercise in COURSE.exercises if exercise.is_station]
ANSWERS = [
    (COURSE.exercise(int(each.exercise)), each) for each in read("stations.txt") + read("electives.txt")
]

# written from the pages of the course alone, by people who had not seen the reference
OTHER_MAKES = sorted(Path(__file__).parent.glob("answers/right/*.py"))
WRONG = [case for case in ANSWERS if case[1].misconception != IS_RIGHT]
RIGHT = [(each, Answer(each.number, IS_RIGHT, "as it is at the station", [])) for each in STATIONS]
RIGHT += [case for case in ANSWERS if case[1].misconception == IS_RIGHT]


def text_of(exercise: Exercise, each: Answer) -> str:
    """Return the text of the submitted file."""
    reference = stage(int(exercise.number)) if exercise.is_station else solution(exercise)
    return each.text(reference)


def one_for_each_check(found: list[tuple[Exercise, Any]]) -> list[Any]:
    """Return the answers. Mark all but the first one for each check as long."""
    first = {wrong.check: wrong for _, wrong in reversed(found)}
    return [case if first[case[1].check] is case[1] else long(*case) for case in found]


def named(value: object) -> str | None:
    return value.directory if isinstance(value, Exercise) else getattr(value, "name", None)


@pytest.fixture(scope="module")
def grades(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Grade]]]:
    """Return test → the grade that it needs. Several workers grade at the same time."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ  # otherwise the other cores have tests of their own
    with grading_pool(WORKERS if alone else 1) as pool:
        chosen = [
            item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
        ]
        found = {}
        for item in chosen:
            exercise, *answers = item.callspec.params.values()
            for each in answers:
                options = Options(seed=SEED, only=each.check if "." in each.check else None)
                found[item.name] = pool.submit(graded, exercise, COURSE, text_of(exercise, each), options)
        yield found


def test_every_answer_is_an_edit_of_the_reference_as_it_is() -> None:
    for exercise, each in ANSWERS:
        text_of(exercise, each)


@pytest.mark.parametrize(("exercise", "wrong"), one_for_each_check(WRONG), ids=named)
def test_a_wrong_answer_gets_its_misconception(
    exercise: Exercise,
    wrong: Answer,
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
    exercise: Exercise, right: Answer, grades: dict[str, Future[Grade]], request: pytest.FixtureRequest
) -> None:
    result = grades[request.node.name].result()
    assert (result.status, result.score) == ("passed", exercise.points), failures(result)


@pytest.mark.long
@pytest.mark.parametrize("path", OTHER_MAKES, ids=lambda path: path.stem)
def test_a_file_of_another_make_gets_full_marks_at_every_station(path: Path) -> None:
    for number in (2, 10):  # the checks of all earlier ones are run as well
        result = graded(COURSE.exercise(number), COURSE, of_another_make(path), Options(seed=SEED, mine=True))
        assert result.status == "passed", failures(result)


@pytest.mark.parametrize("exercise", COURSE.exercises, ids=named)
def test_every_exercise_is_graded_on_enough_answers(exercise: Exercise) -> None:
    wrong = [each for of, each in WRONG if of is exercise]
    assert all(each.misconception in MISCONCEPTIONS for each in wrong)
    assert len(wrong) >= (8 if not exercise.is_station else 10 if int(exercise.number) <= LAST else 3)
    assert sum(of is exercise for of, _ in RIGHT) >= (1 if exercise.is_station else 3)
    if exercise.is_station:
        assert {each.check for each in wrong} == {check.id for check in checks_of(exercise)}
