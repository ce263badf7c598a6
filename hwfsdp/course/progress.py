"""A learner's progress: hints seen, the last verdict of each exercise, and the last figures, in `.hwfsdp/progress.json` of the course.

A verdict belongs to one text of the file. When the file changes, the verdict is still shown, but marked as stale.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, field
from itertools import count, groupby
from pathlib import Path
from typing import Any, NamedTuple

from hwfsdp.course.manifest import Course, Exercise
from hwfsdp.course.refusals import write_whole
from hwfsdp.course.stations.stages import is_given
from hwfsdp.course.submission import find_source, is_started
from hwfsdp.course.verdict import Grade
from hwfsdp.errors import UsageError


class Standing(NamedTuple):
    """The state of one exercise.

    Attributes:
        status: "passed", "failed", "error", "not_started", "unchecked" or "forgone".
        stale: the file has changed since the verdict.
    """

    exercise: Exercise
    status: str
    score: int
    stale: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "exercise": self.exercise.number,
            "title": self.exercise.title,
            "status": self.status,
            "score": self.score,
            "max_score": self.exercise.points,
            "stale": self.stale,
        }


@dataclass
class Progress:
    """The progress of a course. `load` reads it from the course's folder, and `save` writes it back."""

    course: Course
    hints: dict[str, int] = field(default_factory=dict)
    grades: dict[str, dict[str, Any]] = field(default_factory=dict)
    measured: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, course: Course) -> Progress:
        """Load the saved progress. Return an empty one if there is none, or if it cannot be read."""
        try:
            found = json.loads(_file(course).read_text())
            hints = {str(number): int(count) for number, count in found["hints"].items()}
            grades = {str(number): dict(grade) for number, grade in found["grades"].items()}
            measured = {str(of): str(figures) for of, figures in found.get("measured", {}).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(course)
        return cls(course, hints, grades, measured)

    def save(self) -> None:
        """Replace the whole file at once, so that an interrupted command leaves the old file.

        If the course is read-only, the progress is not saved, and a line on standard error says so.
        """
        path = _file(self.course)
        kept = {"hints": self.hints, "grades": self.grades, "measured": self.measured}
        try:
            write_whole(path, [json.dumps(kept, indent=1)])
        except OSError as error:
            print(f"hwfsdp: progress is not kept in {path.parent}: {error.strerror}", file=sys.stderr)

    def note(self, grade: Grade, text: str) -> None:
        """Remember a verdict."""
        digest = _digest(text)
        self.grades[grade.exercise.number] = {"status": grade.status, "score": grade.score, "digest": digest}
        for number, results in groupby(grade.before, key=lambda result: result.check.id[:2]):
            found = list(results)
            was_checked = all(result.passed is not None or result.dependency for result in found)
            if was_checked and not is_given(number, text):
                status = "passed" if all(result.passed for result in found) else "failed"
                score = sum(result.check.points for result in found if result.passed)
                self.grades[number] = {"status": status, "score": score, "digest": digest}
        self.measured = grade.measured or self.measured
        self.save()

    @property
    def passed(self) -> set[str]:
        """The numbers of the exercises whose last verdict was "passed"."""
        return {number for number, known in self.grades.items() if known.get("status") == "passed"}

    def next_hint(self, exercise: Exercise) -> list[str]:
        """Return the hints that the learner may see from now on: one more than before."""
        count = min(self.hints.get(exercise.number, 0) + 1, len(exercise.hints))
        self.hints[exercise.number] = count
        self.save()
        return list(exercise.hints[:count])

    def standing(self, exercise: Exercise) -> Standing:
        """Return the state of an exercise, from the last verdict and the current file."""
        known = self.grades.get(exercise.number)
        try:
            text = find_source(exercise, self.course.root / "exercises").text
        except UsageError:  # it cannot be read
            return Standing(exercise, "error", 0, False)
        if text is None or not is_started(exercise, text):
            return Standing(exercise, "not_started", 0, False)
        if exercise.is_station and is_given(exercise.number, text):
            return Standing(exercise, "forgone", 0, False)
        if known is None:
            return Standing(exercise, "unchecked", 0, False)
        stale = known.get("digest") != _digest(text)
        return Standing(exercise, str(known.get("status")), int(known.get("score", 0)), stale)


def _file(course: Course) -> Path:
    return course.root / ".hwfsdp" / "progress.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def replace_file(exercise: Exercise, fresh: str) -> Path | None:
    """Write the learner's file. If the old file differs, keep it, and return its new path."""
    path, kept = exercise.path, None
    if path.exists() and path.read_bytes() != fresh.encode():
        names = (path.with_name(f"{path.name}.{number}") for number in count(1))
        kept = path.replace(next(name for name in names if not name.exists()))
    path.write_text(fresh)
    return kept
