"""The homework's grade: 10 points for three tasks, 9 more for the bonuses."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwfsdp.course import grade as grading
from hwfsdp.course.capstone.checks import BONUSES, TASKS
from hwfsdp.course.capstone.homework import FILE, Homework, handed_in, has_begun, read_homework
from hwfsdp.course.capstone.rules import check_rules
from hwfsdp.course.grade import Options
from hwfsdp.course.manifest import Course
from hwfsdp.course.overlay import Overlay, Submitted
from hwfsdp.course.run import RUN_SECONDS, Ranks, Times
from hwfsdp.course.verdict import Check, CheckResult, Finding, Grade, OnCheck

ALL_SECONDS = 40.0  # of all runs: there are more of them than in an exercise


@dataclass
class HomeworkGrade(Grade):
    """A grade with bonus points beside the score. Its status does not ask for the bonuses."""

    @property
    def score(self) -> int:
        return self._points(TASKS)

    @property
    def bonus(self) -> int:
        return self._points(BONUSES)

    @property
    def max_bonus(self) -> int:
        assert isinstance(self.exercise, Homework), "a grade of the homework"
        return self.exercise.bonus

    @property
    def has_everything(self) -> bool:
        return super().has_everything and self.bonus == self.max_bonus

    @property
    def points(self) -> str:
        return f"{super().points} and {self.bonus} of {self.max_bonus} bonus points"

    def _points(self, checks: Sequence[Check]) -> int:
        counted = [r for r in self.results if r.passed and r.check in checks]
        return 0 if self.status == "error" else sum(result.check.points for result in counted)

    def as_dict(self) -> dict[str, Any]:
        found = super().as_dict()
        return {
            "exercise": found["exercise"],
            "score": found["score"],
            "max_score": found["max_score"],
            "bonus": self.bonus,
            "max_bonus": self.max_bonus,
            **{key: found[key] for key in ("status", "checks", "seconds")},
        }


def grade_capstone(
    folder: Path,
    course: Course,
    options: Options = Options(),
    on_check: OnCheck = lambda result: None,
) -> HomeworkGrade:
    """Grade the homework of a submission.

    Args:
        folder: of the submission: it holds `capstone/hw_fsdp.py`, or the file itself.
        options: `mine` says nothing here: the file stands by itself.
        on_check: called with each check's result as soon as there is one.

    Returns:
        Its status is "passed" for all points of the tasks, with or without bonuses.

    Raises:
        UsageError: the file cannot be read, or the course has no homework.
    """
    began = time.monotonic()
    homework = read_homework(course)
    source = handed_in(homework, folder)
    results = [CheckResult(check) for check in (*TASKS, *BONUSES)]
    result = HomeworkGrade(homework, results, seed=options.draw_seed())
    if source.text is None or not has_begun(homework, source.text):
        return result
    printed: list[str] = []
    submitted = Submitted(homework.number, str(source.path), source.text, ())
    try:
        check_rules(source)
        off_limits = grading.off_limits(course, folder)
        overlay = Overlay({}, (submitted,))
        times = Times(options.run_seconds or RUN_SECONDS, ALL_SECONDS, options.repeat)
        ranks = Ranks(overlay, printed.append, times, options.world_size, off_limits)
        result.measured = ranks.measured
        grading.run_checks(result, ranks, [submitted.path], homework.hole_names, on_check, options)
    except Finding as finding:
        grading.reject(result, finding)
    if result.status == "failed" and result.score == result.max_score:
        result.status = "passed"
    result.seconds, result.printed = time.monotonic() - began, "".join(printed)
    return result


def graded_homework(course: Course, text: str, options: Options = Options()) -> HomeworkGrade:
    """The grade of a text that is handed in as the homework."""
    with tempfile.TemporaryDirectory(prefix="hwfsdp-homework-") as folder:
        (Path(folder) / FILE).write_text(text)
        return grade_capstone(Path(folder), course, options)
