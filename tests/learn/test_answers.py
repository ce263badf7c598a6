"""The grader, graded: wrong answers get the verdict they deserve, right ones all points however they are written.

`make test` has one wrong answer for each check. Right answers there are the solutions, in tests/exercises.
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

from hwfsdp.learn.grade import Options
from hwfsdp.learn.manifest import Exercise, find_course
from hwfsdp.learn.pool import WORKERS, grading_pool
from hwfsdp.learn.submission import solution
from hwfsdp.learn.verdict import Grade
from hwfsdp.learn.workbook import SEED, failures
from suites import long

sys.path.insert(0, str(Path(__file__).parent))
from answers.shapes import Right, Wrong, answer  # noqa: E402

COURSE = find_course(Path(__file__))


def answers(kind: str) -> list[tuple[Exercise, Any]]:
    """All answers of one kind, WRONG or RIGHT, with their exercises."""
    found = []
    for exercise in COURSE.exercises:
        module = importlib.import_module(f"answers.{exercise.topic}")
        found += [(exercise, each) for each in getattr(module, kind)]
    return found


def one_for_each_check(found: list[tuple[Exercise, Wrong]]) -> list[Any]:
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
                text = answer(solution(exercise), each.functions, each.also)
                only = each.check if isinstance(each, Wrong) else None
                found[item.name] = pool.submit(exercise, text, Options(seed=SEED, only=only))
        yield found


@pytest.mark.parametrize(("exercise", "wrong"), one_for_each_check(answers("WRONG")), ids=named)
def test_a_wrong_answer_is_told_what_is_wrong(
    exercise: Exercise, wrong: Wrong, grades: dict[str, Future[Grade]], request: pytest.FixtureRequest
) -> None:
    result = grades[request.node.name].result()
    verdicts = {r.check.id: r.finding.misconception for r in result.results if r.finding}
    assert verdicts.get(wrong.check) == wrong.misconception, failures(result)
    assert result.score < exercise.points


@pytest.mark.long
@pytest.mark.parametrize(("exercise", "right"), answers("RIGHT"), ids=named)
def test_a_right_answer_gets_full_marks_however_it_is_written(
    exercise: Exercise, right: Right, grades: dict[str, Future[Grade]], request: pytest.FixtureRequest
) -> None:
    result = grades[request.node.name].result()
    assert (result.status, result.score) == ("passed", exercise.points), failures(result)


@pytest.mark.parametrize("exercise", COURSE.exercises, ids=named)
def test_every_exercise_is_graded_on_enough_answers(exercise: Exercise) -> None:
    module = importlib.import_module(f"answers.{exercise.topic}")
    assert len(module.WRONG) >= 8
    assert len(module.RIGHT) >= 3
