"""Gradescope's results.json, one for each submission, read by students.

Format: https://gradescope-autograders.readthedocs.io/en/latest/specs/ . Points that count are in `score`, which goes before
in `tests`; each check is a test. The only ranking is by points, under the name that each
student chose.
"""

from __future__ import annotations

from dataclasses import asdict

from hwfsdp.course.gradebook.book import Data, Gradebook, evidence, title, verdict
from hwfsdp.course.gradebook.results import Result


def as_data(result: Result, book: Gradebook) -> Data:
    """The file for one submission, as data."""
    shown, standing = book.for_student(result), book.policy.standing(result)
    return {
        "score": standing.final,
        "execution_time": round(sum(float(exercise["seconds"]) for exercise in result.exercises), 1),
        "output": "\n".join(_summary(result, book)),
        "output_format": "text",
        "test_output_format": "text",
        "test_name_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": [
            _test(each, i, check) for each in shown.exercises for i, check in enumerate(each["checks"], 1)
        ],
        "leaderboard": [{"name": "Points", "value": standing.final}],
        "extra_data": {"course": book.version, "extra": shown.extra, "late": asdict(standing)},
    }


def _summary(result: Result, book: Gradebook) -> list[str]:
    standing = book.policy.standing(result)
    lines = [f"{result.score} of {result.max_score} points."]
    if standing.late_seconds:
        less = f"{standing.penalty:g} points less, {standing.final:g} count."
        lines.append(f"{standing.late_seconds / 3600:.1f} h late: {less}")
    for name, found in result.extra.items():
        lines.append(f"{name}: {found.get('score', 0)} of {found.get('max_score', 0)}")
    return [*lines, *result.errors, *result.notes]


def _test(exercise: Data, index: int, check: Data) -> Data:
    misconception = check["misconception"]
    return {
        "name": title(check),
        "number": f"{int(exercise['exercise'])}.{index}",
        "score": check["points"],
        "max_score": check["max_points"],
        "status": "passed" if verdict(exercise, check) == "passed" else "failed",
        "output": "\n".join(evidence(exercise, check)),
        "output_format": "text",
        "tags": [exercise["exercise"], *([misconception] if misconception else [])],
        "visibility": "visible",
        "extra_data": {"misconception": misconception, "dependency": check["dependency"]},
    }
