"""The grader, graded: wrong answers get the verdict they deserve, right ones all points however they are written."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from hwfsdp.learn.manifest import Exercise, find_course
from hwfsdp.learn.workbook import failures, graded

sys.path.insert(0, str(Path(__file__).parent))
from answers.shapes import Right, Wrong, answer  # noqa: E402

COURSE = find_course(Path(__file__))


def answers(kind: str) -> list[tuple[Exercise, Wrong | Right]]:
    """All answers of one kind, WRONG or RIGHT, with their exercises."""
    found = []
    for exercise in COURSE.exercises:
        module = importlib.import_module(f"answers.{exercise.topic}")
        found += [(exercise, each) for each in getattr(module, kind)]
    return found


def named(value: object) -> str | None:
    return value.directory if isinstance(value, Exercise) else getattr(value, "name", None)


@pytest.mark.parametrize(("exercise", "wrong"), answers("WRONG"), ids=named)
def test_a_wrong_answer_is_told_what_is_wrong(exercise: Exercise, wrong: Wrong) -> None:
    result = graded(exercise, COURSE, answer(exercise, wrong.functions, wrong.also))
    verdicts = {r.check.id: r.finding.misconception for r in result.results if r.finding}
    assert verdicts.get(wrong.check) == wrong.misconception, failures(result)
    assert result.score < exercise.points


@pytest.mark.parametrize(("exercise", "right"), answers("RIGHT"), ids=named)
def test_a_right_answer_gets_full_marks_however_it_is_written(exercise: Exercise, right: Right) -> None:
    result = graded(exercise, COURSE, answer(exercise, right.functions, right.also))
    assert (result.status, result.score) == ("passed", exercise.points), failures(result)


@pytest.mark.parametrize("exercise", COURSE.exercises, ids=named)
def test_every_exercise_is_graded_on_enough_answers(exercise: Exercise) -> None:
    module = importlib.import_module(f"answers.{exercise.topic}")
    assert len(module.WRONG) >= 8
    assert len(module.RIGHT) >= 3
