"""A student's progress, in `.hwfsdp/progress.json` of the course: the last outcome of each test, hints seen, the last measurements.

An outcome belongs to one text of the student's file. When the file changes, it is still shown, but marked as stale. A run of a few
tests (`pytest -k`) replaces only their outcomes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hwfsdp.course.exercises import Course, Exercise, find_course, read_text
from hwfsdp.course.stages import is_given, starter_of
from hwfsdp.errors import UsageError
from hwfsdp.files import write_whole

if TYPE_CHECKING:
    from hwfsdp.course.findings import Outcome


class Standing(NamedTuple):
    """How far a student is with an exercise.

    Attributes:
        status: "passed", "failed", "not started", "not checked yet", or "written by hwfsdp catchup".
        stale: the file has changed since.
    """

    exercise: Exercise
    status: str
    score: int = 0
    stale: bool = False

    @property
    def is_over(self) -> bool:
        """True if there is nothing left to do."""
        return self.status in ("passed", "written by hwfsdp catchup")

    def as_dict(self) -> dict[str, Any]:
        exercise = self.exercise
        found = {
            "exercise": exercise.number,
            "title": exercise.title,
            "status": self.status,
            "score": self.score,
        }
        return {**found, "max_score": exercise.points, "stale": self.stale}


@dataclass
class Progress:
    """The progress of a course. `load` reads it; what changes it saves it.

    Attributes:
        hints: exercise → hints seen. outcomes: exercise → test → its status, and the digest of the file then.
        measured: the last figures by name.
    """

    course: Course
    hints: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)
    measured: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, course: Course) -> Progress:
        """Load the saved progress; an empty one if there is none, or if it is damaged or of an older release."""
        try:
            found = json.loads(_file(course).read_text(encoding="utf-8"))
            hints = {str(number): int(count) for number, count in found["hints"].items()}
            outcomes = {
                str(number): {str(test): (str(status), str(digest)) for test, (status, digest) in of.items()}
                for number, of in found["outcomes"].items()
            }
            measured = {str(of): str(figures) for of, figures in found["measured"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(course)
        return cls(course, hints, outcomes, measured)

    def save(self) -> None:
        """Replace the file as a whole. In a course that may only be read, nothing is kept, and a line on standard error says so."""
        path = _file(self.course)
        kept = {"hints": self.hints, "outcomes": self.outcomes, "measured": self.measured}
        try:
            write_whole(path, json.dumps(kept, indent=1))
        except OSError as error:
            print(f"hwfsdp: progress is not kept in {path.parent}: {error.strerror}", file=sys.stderr)

    def note(self, statuses: Mapping[str, str], text: str, measured: Mapping[str, str] = {}) -> None:
        """Remember a run of tests on a student's file.

        Args:
            statuses: by name of the test, such as "03.trains". Tests that did not run are left out. text: the text of the file.
        """
        digest = _digest(text)
        for name, status in statuses.items():
            self.outcomes.setdefault(name.partition(".")[0], {})[name] = status, digest
        self.measured |= measured
        self.save()

    def standing(self, exercise: Exercise) -> Standing:
        """Return how far the student is, from the last outcomes and the file as it is now."""
        text = read_text(exercise.path)
        begun = starter_of(self.course.root, exercise.target)
        if text is None or begun is not None and text.split() == begun.split():
            return Standing(exercise, "not started")
        if is_given(exercise.number, text):
            return Standing(exercise, "written by hwfsdp catchup")
        found = self.outcomes.get(exercise.number, {})
        tests = {name: status for name, (status, _) in found.items()}
        if not tests:
            return Standing(exercise, "not checked yet")
        stale = any(digest != _digest(text) for _, digest in found.values())
        tasks = [check for check in exercise.checks if not check.bonus]
        passed = [check for check in tasks if tests.get(check.name) == "passed"]
        has_failed = any(status != "passed" for status in tests.values())
        is_whole = len(passed) == len(tasks)
        status = "passed" if is_whole else "failed" if has_failed else "not checked yet"
        return Standing(exercise, status, sum(check.points for check in passed), stale)

    def standings(self) -> list[Standing]:
        return [self.standing(exercise) for exercise in self.course.exercises]

    def more_hints(self, exercise: Exercise) -> list[str]:
        """Return the hints that the student may see from now on: one more than before."""
        count = min(self.hints.get(exercise.number, 0) + 1, len(exercise.hints))
        self.hints[exercise.number] = count
        self.save()
        return exercise.hints[:count]


def remember(outcomes: Iterable[Outcome], judged: Mapping[str, tuple[Path, str]]) -> None:
    """Remember a run of pytest in the course around the student's files.

    Args:
        judged: path and text of the student's file, by number of the exercise.
    """
    ran = [each for each in outcomes if each.status not in ("not run", "error")]
    for path, text in dict.fromkeys(judged.values()):
        of = [each for each in ran if judged.get(each.exercise) == (path, text)]
        measured = {name: figures for each in of for name, figures in each.measured.items()}
        if of and path.exists():
            with suppress(UsageError):  # a course whose markers cannot be read; `hwfsdp list` says why
                Progress.load(find_course(path.parent)).note(
                    {each.test: each.status for each in of}, text, measured
                )


def _file(course: Course) -> Path:
    return course.root / ".hwfsdp" / "progress.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
