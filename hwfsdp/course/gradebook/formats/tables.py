"""Gradebooks as tables.

    render            for spreadsheets: a row for each submission
    render_nbgrader   what nbgrader's CSV exporter writes, so that what reads a course's grades from there reads ours

nbgrader's columns: https://github.com/jupyter/nbgrader/blob/main/nbgrader/plugins/export.py . There each exercise is an assignment; the
penalty for being late is shared among the exercises as their points are, so that scores add up to what counts.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator

from hwfsdp.course.gradebook.book import Gradebook
from hwfsdp.course.gradebook.results import Result

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what makes a spreadsheet take a text for a formula
COLUMNS = (
    """assignment duedate timestamp student_id last_name first_name email raw_score late_submission_penalty
    score max_score""".split()
)


def safe_cell(text: str) -> str:
    """A text that no spreadsheet computes with."""
    return f"'{text}" if text.startswith(FORMULA) else text


def render(book: Gradebook) -> Iterator[str]:
    """The gradebook: name, points of each exercise, what was earned, taken off and counts, what is apart, the time."""
    numbers = [exercise.number for exercise in book.course.exercises]
    extra = sorted({name for result in book.results() for name in result.extra})
    head = ["name", *numbers, "raw", "penalty", "total", "max", *extra]
    yield _row([*head, "submitted", "submitted_by", "late_hours", "errors"])
    for result in book.results():
        standing = book.policy.standing(result)
        scores = {exercise["exercise"]: exercise["score"] for exercise in result.exercises}
        points = [scores.get(number, 0) for number in numbers]
        points += [f"{value:g}" for value in (standing.raw, standing.penalty, standing.final)]
        apart = [result.extra.get(name, {}).get("score", "") for name in extra]
        when = [result.submitted or "", result.submitted_by, f"{standing.late_seconds / 3600:.2f}"]
        errors = safe_cell("; ".join(result.errors))
        yield _row([safe_cell(result.name), *points, result.max_score, *apart, *when, errors])


def render_nbgrader(book: Gradebook) -> Iterator[str]:
    """The gradebook: a row for each exercise of each submission."""
    yield _row(COLUMNS)
    due = book.policy.deadline
    for result in book.results():
        email = result.name if "@" in result.name else ""
        when = [due.isoformat(sep=" ") if due else "", str(result.time or "")]
        who = [safe_cell(result.name), "", "", safe_cell(email)]
        for exercise, penalty in zip(result.exercises, shares(result, book), strict=True):
            score, most = exercise["score"], exercise["max_score"]
            points = [float(score), penalty, round(score - penalty, 2), float(most)]
            yield _row([book.course.exercise(exercise["exercise"]).directory, *when, *who, *points])


def shares(result: Result, book: Gradebook) -> list[float]:
    """The penalty of each exercise in hundredths of points. Together they are the submission's penalty."""
    cents = round(100 * book.policy.standing(result).penalty)
    found, given, points = [], 0, 0
    for exercise in result.exercises:
        points += int(exercise["score"])
        upto = round(cents * points / result.score) if result.score else 0
        found.append((upto - given) / 100)
        given = upto
    return found


def _row(cells: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(list(cells))
    return text.getvalue()
