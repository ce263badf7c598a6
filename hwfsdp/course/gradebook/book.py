"""A gradebook: the results of a class, with the data that a format needs to show them.

Formats read the results one by one, as often as they need. The results are never all in memory. This module also decides which parts of
a check students may read, so that all formats show the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from hwfsdp.course.checklist import question_of, sentence_of
from hwfsdp.course.gradebook.late import LatePolicy
from hwfsdp.course.gradebook.results import Result, opaque
from hwfsdp.course.manifest import Course
from hwfsdp.course.misconceptions import MISCONCEPTIONS
from hwfsdp.course.report import printable

LONGEST = 4000  # characters of a message in a report
Data = dict[str, Any]


@dataclass
class Gradebook:
    """Results and their course.

    Attributes:
        results: yields the results one by one, in order. Each call begins with the first result.
        hidden: the inputs of checks are hidden, so the texts for students must not reveal them.
        version: the version of the course. made: when the gradebook was made.
        limits: the limits of submissions, in the form of `hwfsdp doctor --json`.
    """

    course: Course
    results: Callable[[], Iterator[Result]]
    policy: LatePolicy = LatePolicy()
    hidden: bool = False
    version: str = ""
    made: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    limits: Sequence[Data] = ()

    def for_student(self, result: Result) -> Result:
        """Return the part of a result that its student may read."""
        return opaque(result) if self.hidden else result

    def count(self) -> int:
        """Return the number of results."""
        return sum(1 for _ in self.results())


def records(found: Iterable[Data]) -> Iterator[str]:
    """Yield the items of a JSON list in pieces, one item a line."""
    for index, each in enumerate(found):
        yield f"{',' if index else ''}\n{json.dumps(each)}"


def title(check: Data) -> str:
    """Return the id of a check and its sentence."""
    return f"{check['id']}: {sentence_of(check['id'])}"


def verdict(exercise: Data, check: Data) -> str:
    """Return the verdict of a check: "passed", "failed", "skipped" (not run), or "void" (passed, but the exercise does not count)."""
    if check["passed"]:
        return "void" if exercise["status"] == "error" and check["max_points"] else "passed"
    return "failed" if check["passed"] is False else "skipped"


def evidence(exercise: Data, check: Data) -> list[str]:
    """Say why a check does not count, in lines that any terminal can show; an empty list if it counts."""
    found = verdict(exercise, check)
    if found == "passed":
        return []
    if found == "void":
        return ["It holds, but nothing of this exercise counts before what failed is gone."]
    lines = told(check)
    if (name := check["misconception"]) in MISCONCEPTIONS:
        lines = [f"{name}: {MISCONCEPTIONS[name].sentence}", *lines, f"→ {question_of(check['id'], name)}"]
    return lines or [_unrun(exercise, check)]


def told(check: Data) -> list[str]:
    """Return the findings of a check: message, expected and actual. A check of an extra may have none of them."""
    found = [("", check.get("message") or None), ("expected  ", check.get("expected"))]
    found.append(("got       ", check.get("actual")))
    texts = [f"{label}{str(value)[:LONGEST]}" for label, value in found if value is not None]
    return [printable(line) for text in texts for line in text.splitlines()]


def _unrun(exercise: Data, check: Data) -> str:
    if exercise["status"] == "not_started":
        return "not started"
    return f"skipped, because {check['dependency']} does not hold" if check["dependency"] else "not run"
