"""Gradebooks in several formats, each made from outcome files alone (`results`).

Published formats:
    Gradescope    results.json   https://gradescope-autograders.readthedocs.io/en/latest/specs/
    Classroom 50  result.json and scores.json   https://github.com/foundation50/classroom50/tree/main/schemas
    PrairieLearn  results.json   https://docs.prairielearn.com/externalGrading/
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hwfsdp.course.findings import MISCONCEPTIONS
from hwfsdp.course.results import LONGEST, Data, Gradebook, Result
from hwfsdp.course.text import rendered
from hwfsdp.errors import UsageError
from hwfsdp.files import write_whole

PRAIRIELEARN = 1_000_000  # bytes of a result
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # with these, a spreadsheet computes


# --- Tables --------------------------------------------------------------------------------------------------


def table(book: Gradebook) -> str:
    """The text for a terminal: a line for each submission."""
    width = max((len(result.name) for result in book.results if len(result.name) <= 40), default=0)
    lines = []
    for result in book.results:
        n = len(result.remarks)
        said = [*result.errors, *result.problems] + [f"{n} remark{'s' * (n > 1)}"] * bool(n)
        lines.append(
            f"{result.name:<{width}}  {book.score(result):>3} of {book.most}  {'; '.join(said)}".rstrip()
        )
    return "".join(f"{line}\n" for line in lines)


def _csv(book: Gradebook) -> str:
    text = io.StringIO()
    write_row = csv.writer(text, lineterminator="\n").writerow
    write_row(["name", *book.exercises, "total", "most", "seconds", "problems", "errors", "remarks"])
    for result in book.results:
        points = [result.points_of(exercise) for exercise in book.exercises]
        words = ["; ".join(each) for each in (result.problems, result.errors, result.remarks)]
        write_row(
            [
                _cell(result.name),
                *points,
                book.score(result),
                book.most,
                result.data["seconds"],
                *map(_cell, words),
            ]
        )
    return text.getvalue()


def _cell(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text


def as_json(book: Gradebook) -> str:
    """What is known, for programs of the instructor."""
    found = [
        {**each.data, "score": book.score(each), "most": book.most, "remarks": list(each.remarks)}
        | {"functions": None}
        for each in book.results
    ]
    return json.dumps({"made": f"{book.made:%Y-%m-%dT%H:%M:%SZ}", "submissions": found}, indent=1) + "\n"


# --- Platforms -----------------------------------------------------------------------------------------------


def _gradescope(book: Gradebook, result: Result) -> Data:
    tests = [
        {
            "name": test.title,
            "score": test.points,
            "max_score": test.most,
            "status": "passed" if test.passed else "failed",
            "output": "\n".join(test.evidence()),
            "output_format": "text",
            "tags": [test.exercise],
            "visibility": "visible",
        }
        for test in result.tests
    ]
    return {
        "score": book.score(result),
        "execution_time": result.data["seconds"],
        "output": "\n".join([f"{book.score(result)} of {book.most} points.", *result.problems]),
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
        "leaderboard": [{"name": "Points", "value": book.score(result)}],
    }


def _classroom50(book: Gradebook, result: Result, environ: Mapping[str, str] = os.environ) -> Data:
    digest = hashlib.sha256(json.dumps(result.data["files"], sort_keys=True).encode()).hexdigest()
    commit, now = environ.get("COMMIT_URL") or f"local:{digest}", f"{book.made:%Y-%m-%dT%H:%M:%SZ}"
    tests = [
        {
            "test-name": test.title,
            "passed": test.passed,
            "score": test.points,
            "max-score": test.most,
            "message": "\n".join(test.evidence()),
        }
        for test in result.tests
        if test.exercise in book.counted
    ]
    return {
        "schema": "classroom50/result/v1",
        "classroom": environ.get("CLASSROOM") or "hwfsdp",
        "assignment": environ.get("ASSIGNMENT") or "hwfsdp",
        "assignment_type": "group" if environ.get("MODE") == "group" else "individual",
        "owner": environ.get("OWNER") or result.name,
        "submission": environ.get("SUBMISSION_TAG") or f"submit/{now.replace(':', '-')}-{digest[:7]}",
        "commit": commit,
        "release": environ.get("RELEASE_URL") or commit,
        "review": environ.get("REVIEW_URL") or commit,
        "datetime": now,
        "graded_at": now,
        "score": book.score(result),
        "max-score": book.most,
        "tests": tests,
    }


def _scores50(book: Gradebook) -> str:
    """Classroom 50's table of a class."""
    entries = []
    for result in book.results:
        record = _classroom50(book, result, {})
        record.pop("assignment")
        entries.append({"owner": result.name, "submissions": [record]})
    assignments = {"hwfsdp": {"type": "individual", "entries": entries}}
    return json.dumps({"schema": "classroom50/scores/v1", "assignments": assignments}, indent=1) + "\n"


def _prairielearn(book: Gradebook, result: Result, longest: int = LONGEST) -> Data:
    unreadable = bool(result.problems) and not result.data["files"]
    tests = [
        {
            "name": test.name,
            "description": test.data["sentence"],
            "points": test.points,
            "max_points": test.most,
            "output": "\n".join(test.evidence())[:longest],
        }
        for test in result.tests
    ]
    found = {
        "gradable": not unreadable,
        "score": min(1.0, book.score(result) / max(1, book.most)),
        "message": f"{book.score(result)} of {book.most} points.",
        "output": "\n".join(result.problems)[:longest],
        "tests": tests,
        "format_errors": [each[:longest] for each in result.problems] if unreadable else [],
    }
    return (
        found
        if len(json.dumps(found)) < PRAIRIELEARN or longest < 8
        else _prairielearn(book, result, longest // 2)
    )


def _page(book: Gradebook, result: Result | None = None) -> str:
    """The page of a student, or of the class."""
    template = "student.html" if result else "class.html"
    values = {"book": book, "result": result, "misconceptions": MISCONCEPTIONS}
    return rendered(template, for_student=result is not None, **values)


# --- Files ---------------------------------------------------------------------------------------------------

# name of a format → files of the class, and files of each student ("*" stands for the key): what makes their text
FORMATS: dict[
    str, tuple[dict[str, Callable[[Gradebook], str]], dict[str, Callable[[Gradebook, Result], Data | str]]]
] = {
    "csv": ({"grades.csv": _csv}, {}),
    "json": ({"grades.json": as_json}, {}),
    "html": ({"grades.html": _page}, {"students/*.html": _page}),
    "gradescope": ({}, {"gradescope/*/results.json": _gradescope}),
    "classroom50": ({"classroom50/scores.json": _scores50}, {"classroom50/*/result.json": _classroom50}),
    "prairielearn": ({}, {"prairielearn/*/results.json": _prairielearn}),
}


def chosen(names: str) -> tuple[str, ...]:
    """Return the formats in a text such as "csv,html".

    Raises:
        UsageError: there is no format of this name.
    """
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in found:
        if name not in FORMATS:
            raise UsageError(
                "--format",
                expected=f"some of {', '.join(FORMATS)}",
                got=name,
                remedy="For example: --format csv,html",
            )
    return found


def write(book: Gradebook, kinds: Iterable[str], folder: Path) -> list[Path]:
    """Write the gradebook in these formats, each file whole or not at all. Return the files of the class, and the folders of students."""
    written = []
    for kind in kinds:
        of_class, of_student = FORMATS[kind]
        for name, make in of_class.items():
            written.append(write_whole(folder / name, make(book)))
        for name, make_one in of_student.items():
            for result in book.results:
                found = make_one(book, result)
                text = found if isinstance(found, str) else json.dumps(found, indent=1) + "\n"
                write_whole(folder / name.replace("*", result.key), text)
            written.append(folder / name.partition("/")[0])
    return list(dict.fromkeys(written))
