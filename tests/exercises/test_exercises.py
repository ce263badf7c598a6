"""The checks of the exercises as tests: a failed check names its reason, and a check that depends on it is skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hwfsdp.course.checklist import checks_of
from hwfsdp.course.manifest import Exercise, find_course
from hwfsdp.course.misconceptions import MISCONCEPTIONS
from hwfsdp.course.verdict import Finding, Grade

COURSE = find_course(Path(__file__))
IS_OURS = (COURSE.root / "solutions").is_dir()  # or a student's edition, where each run grades all exercises
FAST = ("01", "02")  # exercises for `make test`; `make test-all` grades the others


def is_long(exercise: Exercise) -> bool:
    return IS_OURS and exercise.number not in FAST


CHECKS = [
    pytest.param(
        exercise.number,
        check.id,
        id=f"{check.id}: {check.sentence}",
        marks=[pytest.mark.long] if is_long(exercise) else [],
    )
    for exercise in COURSE.exercises
    for check in checks_of(exercise)
]


@pytest.mark.parametrize(("exercise", "check"), CHECKS)
def test(exercise: str, check: str, grade_of: Callable[[str], Grade]) -> None:
    grade = grade_of(exercise)
    if grade.status == "not_started":
        pytest.skip("not started")
    result = next(result for result in grade.results if result.check.id == check)
    if result.finding:
        pytest.fail(told(result.finding), pytrace=False)
    if result.dependency:
        pytest.skip(f"{result.dependency} does not hold")
    if grade.status == "error":
        assert grade.finding is not None
        pytest.fail(f"nothing of the exercise counts: {grade.finding.misconception}", pytrace=False)


def told(finding: Finding) -> str:
    """Return the text for the learner."""
    misconception = MISCONCEPTIONS[finding.misconception]
    lines = [f"{finding.misconception}: {misconception.sentence}", finding.message]
    if finding.expected is not None or finding.actual is not None:
        lines += [f"expected  {finding.expected}", f"got       {finding.actual}"]
    return "\n".join([*lines, f"→ {misconception.question}"])
