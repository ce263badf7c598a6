"""A table for spreadsheets: one row for each submission."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator

from hwfsdp.course.gradebook.book import Gradebook

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what makes a spreadsheet take a text for a formula


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
        standing = book.standing(result)
        points = {exercise["exercise"]: exercise["score"] for exercise in result.exercises}
        yield _row(
            [
                safe_cell(result.name),
                *(points.get(number, 0) for number in numbers),
                *(f"{value:g}" for value in (standing.raw, standing.penalty, standing.final)),
                result.max_score,
                *(result.extra.get(name, {}).get("score", "") for name in extra),
                result.submitted or "",
                result.submitted_by,
                f"{standing.late_seconds / 3600:.2f}",
                safe_cell("; ".join(result.errors)),
            ]
        )


def _row(cells: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(list(cells))
    return text.getvalue()
