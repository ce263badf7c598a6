"""Classroom 50's result.json for one submission, and its scores.json for a class.

Schemas: result-v1 and scores-v1, https://github.com/foundation50/classroom50/tree/main/schemas . In its workflow the
environment names the submission (CLASSROOM, ASSIGNMENT, SUBMISSION_TAG, COMMIT_URL, RELEASE_URL, REVIEW_URL); its runner
then stamps owner, mode and times. Outside of it the submission stands for itself: its name, its time, a tag made of both.

Points are what was earned: it is Classroom 50 that marks who is late.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from datetime import timezone

from hwfsdp.course.gradebook.book import Data, Gradebook, evidence, records, title, verdict
from hwfsdp.course.gradebook.results import Result

RESULT, SCORES = "classroom50/result/v1", "classroom50/scores/v1"
_SHORT_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,99}")


def as_data(result: Result, book: Gradebook, environ: Mapping[str, str] = os.environ) -> Data:
    """The file for one submission, as data."""
    shown = book.for_student(result)
    at = (result.time or book.made).astimezone(timezone.utc)
    tag = f"submit/{at:%Y-%m-%dT%H-%M-%SZ}-{result.digest[:7] or '0000000'}"
    commit = environ.get("COMMIT_URL") or f"local:{result.digest}"
    return {
        "schema": RESULT,
        "classroom": environ.get("CLASSROOM") or "hwfsdp",
        "assignment": environ.get("ASSIGNMENT") or "hwfsdp",
        "assignment_type": "group" if environ.get("MODE") == "group" else "individual",
        "owner": environ.get("OWNER") or result.name,
        "submission": environ.get("SUBMISSION_TAG") or tag,
        "commit": commit,
        "release": environ.get("RELEASE_URL") or commit,
        "review": environ.get("REVIEW_URL") or commit,
        "datetime": f"{at:%Y-%m-%dT%H:%M:%SZ}",
        "graded_at": f"{book.made.astimezone(timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
        "score": result.score,
        "max-score": result.max_score,
        "tests": [_test(exercise, check) for exercise, check in shown.checks()],
    }


def _test(exercise: Data, check: Data) -> Data:
    return {
        "test-name": title(check),
        "passed": verdict(exercise, check) == "passed",
        "score": check["points"],
        "max-score": check["max_points"],
        "message": "\n".join(evidence(exercise, check)),
    }


def render(book: Gradebook) -> Iterator[str]:
    """The gradebook of a class."""
    name = os.environ.get("ASSIGNMENT", "")
    slug = name if _SHORT_NAME.fullmatch(name) else "hwfsdp"
    yield f'{{"schema": "{SCORES}", "assignments": {{"{slug}": {{"type": "individual", "entries": ['
    yield from records(_entry(result, book, slug) for result in book.results())
    yield "\n]}}}\n"


def _entry(result: Result, book: Gradebook, slug: str) -> Data:
    record = as_data(result, book, {"ASSIGNMENT": slug})
    del record["assignment"]
    if book.policy.deadline:
        record["late"] = book.policy.standing(result).late_seconds > 0
    return {"owner": result.name, "submissions": [record]}
