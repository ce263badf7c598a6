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

from hwfsdp.course.gradebook.book import Data, Gradebook, evidence, title, verdict
from hwfsdp.course.gradebook.html_pages import NAMES, TEMPLATES
from hwfsdp.course.gradebook.results import Result
from hwfsdp.course.pages import template

ANNOTATIONS = 10
SUMMARY = 1 << 20  # bytes of a page that GitHub takes


def as_data(result: Result, book: Gradebook) -> Data:
    """The file for one submission, as data."""
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
    found, place = verdict(exercise, check), book.course.exercise(exercise["exercise"])
    return {
        "name": title(check),
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
    """Write outputs and the page to where the environment says, if it does; give the lines to print."""
    data, standing = as_data(result, book), book.policy.standing(result)
    if path := environ.get("GITHUB_OUTPUT"):
        encoded = base64.b64encode(json.dumps(data).encode()).decode()
        _append(path, f"result={encoded}\npoints={standing.final:g}\nmax_points={result.max_score}\n")
    if path := environ.get("GITHUB_STEP_SUMMARY"):
        page = template(TEMPLATES / "summary.md", markdown=_markdown, **NAMES)
        _append(path, page.render(result=book.for_student(result), book=book)[:SUMMARY])
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


def _markdown(text: str) -> str:
    """A text that Markdown and HTML take as it is."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return escaped.replace("`", "\\`").replace("*", "\\*").replace("_", "\\_").replace("[", "\\[")
