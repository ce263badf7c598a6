"""The table that nbgrader's CSV exporter writes, so that what reads a course's grades from there reads ours.

Columns: https://github.com/jupyter/nbgrader/blob/main/nbgrader/plugins/export.py . Each exercise is an assignment; the
penalty for being late is shared among the exercises as their points are, so that scores add up to what counts.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from hwfsdp.course.gradebook.book import Gradebook
from hwfsdp.course.gradebook.formats.table import safe_cell
from hwfsdp.course.gradebook.results import Result

COLUMNS = (
    """assignment duedate timestamp student_id last_name first_name email raw_score late_submission_penalty
    score max_score""".split()
)


def render(book: Gradebook) -> Iterator[str]:
    """The gradebook: a row for each exercise of each submission."""
    yield ",".join(COLUMNS) + "\n"
    due = book.policy.deadline
    for result in book.results():
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        email = result.name if "@" in result.name else ""
        for exercise, penalty in zip(result.exercises, shares(result, book), strict=True):
            title = book.exercise(exercise["exercise"]).directory
            when = [due.isoformat(sep=" ") if due else "", str(result.time or "")]
            who = [safe_cell(result.name), "", "", safe_cell(email)]
            points = [
                float(exercise["score"]),
                penalty,
                round(exercise["score"] - penalty, 2),
                float(exercise["max_score"]),
            ]
            rows.writerow([title, *when, *who, *points])
        yield text.getvalue()


def shares(result: Result, book: Gradebook) -> list[float]:
    """The penalty of each exercise in hundredths of points. Together they are the submission's penalty."""
    cents = round(100 * book.standing(result).penalty)
    found, given, points = [], 0, 0
    for exercise in result.exercises:
        points += int(exercise["score"])
        upto = round(cents * points / result.score) if result.score else 0
        found.append((upto - given) / 100)
        given = upto
    return found
