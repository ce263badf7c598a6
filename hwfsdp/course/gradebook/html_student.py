"""A submission as a page: what holds, what does not, the evidence, and a question that leads on."""

from __future__ import annotations

from collections.abc import Iterator

from hwfsdp.course.checklist import question_of
from hwfsdp.course.gradebook.book import LONGEST, Data, Gradebook, verdict
from hwfsdp.course.gradebook.html_page import badge, legend, page, text
from hwfsdp.course.gradebook.results import Result
from hwfsdp.course.misconceptions import MISCONCEPTIONS
from hwfsdp.course.report import printable

EXTRA = {
    "exercise": "",
    "status": "",
    "score": "?",
    "max_score": "?",
    "checks": (),
}  # what graders may leave out
UNTOLD = dict.fromkeys(("misconception", "message", "expected", "actual", "dependency"))
_STATUS = {"passed": "passed", "failed": "failed", "error": "nothing counts", "not_started": "not started"}


def render_student(result: Result, book: Gradebook) -> Iterator[str]:
    """The page for a student: what they may read."""

    def body() -> Iterator[str]:
        yield "<h1>Your report</h1>\n"
        yield f'<p class="soft small">hwfsdp, graded {book.made:%Y-%m-%d %H:%M} UTC</p>\n'
        yield legend()
        yield from section(book.for_student(result), book, "report", open_failed=True)

    return page(f"{result.name}: hwfsdp", body())


def section(result: Result, book: Gradebook, anchor: str, open_failed: bool) -> Iterator[str]:
    """A submission's part of a page."""
    standing = book.standing(result)
    final = f"{standing.final:g} of {result.max_score}"
    yield f'<section class="student" id="{anchor}"><header><h3>{text(result.name)}</h3>'
    yield f'<span class="total">{final}</span></header>\n'
    yield f'<p class="soft small" style="margin:2px 0 0">{"; ".join(_facts(result, book))}</p>\n'
    for error in result.errors:
        yield f'<p class="note">{text(error)}</p>\n'
    for note in result.notes:
        yield f'<p class="remark small">{text(note)}</p>\n'
    for exercise in result.exercises:
        yield from _exercise(exercise, book.exercise(exercise["exercise"]).title, book, open_failed)
    for name, found in result.extra.items():
        yield from _exercise(
            {**EXTRA, **found}, f"{name.capitalize()}, apart from the score", book, open_failed
        )
    yield "</section>\n"


def _facts(result: Result, book: Gradebook) -> Iterator[str]:
    standing = book.standing(result)
    if standing.time_unknown:
        yield f"time unknown, counts as handed in when it was graded, {result.time:%Y-%m-%d %H:%M %z}"
    elif result.time:
        says = f", says {text(result.submitted_by)}" if result.submitted_by else ""
        yield f"handed in {result.time:%Y-%m-%d %H:%M %z}{says}"
    if standing.late_seconds:
        yield f"{standing.late_seconds / 3600:.1f} h late"
        yield f"{standing.raw:g} earned, {standing.penalty:g} taken off"
    seconds = sum(float(exercise["seconds"]) for exercise in result.exercises)
    yield f"{seconds:.1f} s of grading"


def _exercise(exercise: Data, title: str, book: Gradebook, open_failed: bool) -> Iterator[str]:
    number, status = exercise["exercise"], exercise["status"]
    checks = [{**UNTOLD, **check} for check in exercise["checks"]]
    wrong = status in ("failed", "error")
    signs = "".join(badge(verdict(exercise, check)) for check in checks)
    yield f'<details class="exercise"{" open" if wrong and open_failed else ""}><summary><span class="mono">{text(number if number.isdigit() else "")}</span>'
    yield f'<span class="grow">{text(title)} <span class="soft small">{_STATUS.get(status, status)}</span></span>'
    yield f'<span>{signs}</span><span class="right" style="min-width:70px">{exercise["score"]} of {exercise["max_score"]}</span>'
    yield "</summary>\n"
    for check in checks:
        yield from _check(exercise, check, book)
    yield "</details>\n"


def _check(exercise: Data, check: Data, book: Gradebook) -> Iterator[str]:
    found = verdict(exercise, check)
    quiet = "" if found == "failed" else " quiet"
    points = f"{check['points']}/{check['max_points']}"
    yield f'<div class="finding{quiet}"><p class="what">{badge(found)} {text(book.sentence(check["id"]))} '
    yield f'<span class="soft small mono">{text(check["id"])} {points}</span></p>\n'
    misconception = MISCONCEPTIONS.get(check["misconception"] or "")
    if misconception:
        yield f'<p><code>{text(check["misconception"])}</code> {text(misconception.sentence)}</p>\n'
    lines = _evidence(check)
    if lines and found == "skipped":
        yield f'<p class="soft small">{text(lines)}</p>\n'
    elif lines:
        yield f"<pre>{text(lines)}</pre>\n"
    if misconception:
        yield f'<p class="ask">{text(question_of(check["id"], check["misconception"]))}</p>\n'
    yield "</div>\n"


def _evidence(check: Data) -> str:
    """Message, expected and got, as text that no page stumbles over."""
    told = []
    if check["message"]:
        told.append(str(check["message"])[:LONGEST])
    if check["expected"] is not None:
        told.append(f"expected  {str(check['expected'])[:LONGEST]}")
    if check["actual"] is not None:
        told.append(f"got       {str(check['actual'])[:LONGEST]}")
    return "\n".join(printable(line) for part in told for line in part.splitlines())
