"""Our own format, JSON: everything that is known.

    {"course": {"version", "exercises": [{"exercise", "title", "points"}]}, "made", "limits": [{"name", "in_force", "why_not"}],
     "submissions": [{"name", "score", "max_score", "exercises", "extra", "errors", "notes", "submitted", "submitted_by",
                      "digest", "late"}]}

`exercises` of a submission are as docs/course.md has them; `score` is what was earned; `late` has raw, penalty, final,
late_seconds and time_unknown; `submitted_by` names the source of the time; `limits` are the limits of submissions on this
machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from hwfsdp.course.gradebook.book import Data, Gradebook
from hwfsdp.course.gradebook.results import Result


def submission(result: Result, book: Gradebook) -> Data:
    """One submission as data."""
    return {**result.as_dict(), "late": asdict(book.standing(result))}


def render(book: Gradebook) -> Iterator[str]:
    """The gradebook, one submission a line."""
    exercises = [{"exercise": e.number, "title": e.title, "points": e.points} for e in book.course.exercises]
    course = {"version": book.version, "exercises": exercises}
    yield f'{{"course": {json.dumps(course)},\n"made": "{book.made.isoformat(timespec="seconds")}",'
    yield f'\n"limits": {json.dumps(list(book.limits))},\n"submissions": ['
    comma = ""
    for result in book.results():
        yield f"{comma}\n{json.dumps(submission(result, book))}"
        comma = ","
    yield "\n]}\n"
