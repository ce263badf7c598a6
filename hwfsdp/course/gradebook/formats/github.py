"""What a workflow of GitHub reads: the result of an autograder, annotations, and a page for the run.

- The result is what the autograders of GitHub Classroom give to its reporter, in base64 as the output `result`:
  https://github.com/classroom-resources/autograding-grading-reporter . Its two notices, with points, are written as well,
  so that a workflow needs no reporter, which GitHub has retired with Classroom.
- Annotations and the page: https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions ; ten
  annotations of a kind are shown for a step.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from hwfsdp.course.gradebook.book import Data, Gradebook, evidence, verdict
from hwfsdp.course.gradebook.results import Result

ANNOTATIONS = 10
SUMMARY = 1 << 20  # bytes of a page that GitHub takes


def render_one(result: Result, book: Gradebook) -> str:
    """The file for one submission."""
    return json.dumps(as_data(result, book), indent=1) + "\n"


def as_data(result: Result, book: Gradebook) -> Data:
    """The same as data."""
    shown = book.for_student(result)
    tests = [_test(exercise, check, book) for exercise, check in shown.checks()]
    complete = all(test["status"] == "pass" for test in tests) and not result.errors
    return {
        "version": 1,
        "status": "pass" if complete else "error" if result.errors else "fail",
        "max_score": result.max_score,
        "tests": tests,
    }


def _test(exercise: Data, check: Data, book: Gradebook) -> Data:
    found, place = verdict(exercise, check), book.exercise(exercise["exercise"])
    return {
        "name": f"{check['id']}: {book.sentence(check['id'])}",
        "status": "pass" if found == "passed" else "error" if exercise["status"] == "error" else "fail",
        "score": check["points"],
        "max_score": check["max_points"],
        "message": "\n".join(evidence(exercise, check)) or None,
        "test_code": "",
        "filename": f"exercises/{place.target}",
        "line_no": 0,
        "duration": 0,
    }


def announce(result: Result, book: Gradebook, environ: Mapping[str, str]) -> Iterator[str]:
    """Writes outputs and the page to where the environment says, if it does; gives the lines to print."""
    data, standing = as_data(result, book), book.standing(result)
    if path := environ.get("GITHUB_OUTPUT"):
        encoded = base64.b64encode(json.dumps(data).encode()).decode()
        _append(path, f"result={encoded}\npoints={standing.final:g}\nmax_points={result.max_score}\n")
    if path := environ.get("GITHUB_STEP_SUMMARY"):
        _append(path, "".join(_page(book.for_student(result), book))[:SUMMARY])
    wrong = [test for test in data["tests"] if test["status"] != "pass" and test["message"]]
    for test in wrong[:ANNOTATIONS]:
        yield f"::error file={_property(test['filename'])},title={_property(test['name'])}::{_text(test['message'])}"
    points = {"totalPoints": standing.final, "maxPoints": result.max_score}
    yield f"::notice title=Autograding complete::Points {standing.final:g}/{result.max_score}"
    yield f"::notice title=Autograding report::{_text(json.dumps(points))}"


def _append(path: str, text: str) -> None:
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(text)


def _text(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _text(text).replace(":", "%3A").replace(",", "%2C")


def _page(result: Result, book: Gradebook) -> Iterator[str]:
    """The page, in Markdown."""
    yield f"## {result.score} of {result.max_score} points\n\n"
    for error in result.errors:
        yield f"- {_markdown(error)}\n"
    yield "\n| exercise | points | |\n| --- | ---: | --- |\n"
    for exercise in result.exercises:
        title = book.exercise(exercise["exercise"]).title
        status = exercise["status"].replace("_", " ")
        yield f"| {exercise['exercise']} {_markdown(title)} | {exercise['score']} of {exercise['max_score']} | {status} |\n"
    for exercise, check in result.checks():
        if verdict(exercise, check) == "failed":
            yield f"\n**{check['id']}: {_markdown(book.sentence(check['id']))}**\n\n"
            yield from (f"    {line}\n" for line in evidence(exercise, check))


def _markdown(text: str) -> str:
    """A text that Markdown and HTML take as it is."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return escaped.replace("`", "\\`").replace("*", "\\*").replace("_", "\\_").replace("[", "\\[")
