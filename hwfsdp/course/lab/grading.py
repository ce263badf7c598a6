"""Grading the lab: answers compared with evidence.

Each bug has three checks of one point: `NN.evidence`, then `NN.cause` and `NN.fix`. The last two are judged only if the evidence
is right: a diagnosis without evidence is a guess. No code of a learner is run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hwfsdp.course.lab.answers import Answers, Unreadable, agrees, find_answers, read_answers
from hwfsdp.course.lab.bugs import CHOSEN, LETTERS, Bug, Choice, read_bugs
from hwfsdp.course.lab.evidence import Measured, evidence_of
from hwfsdp.course.lab.seals import Seal, read_seals
from hwfsdp.course.manifest import Course
from hwfsdp.errors import UsageError
from hwfsdp.observe.validate import printable

POINTS = 1  # for each check


class LabCheck(NamedTuple):
    """The verdict on an answer.

    Attributes:
        passed: None if it was not judged. misconception: "not-answered", "unreadable-answer", "wrong-evidence",
            "not-measured", or the name of the wrong choice.
        message: why it does not count. dependency: the check that has to be right before this one is judged.
    """

    id: str
    passed: bool | None
    misconception: str | None = None
    message: str | None = None
    expected: str | None = None
    actual: str | None = None
    dependency: str | None = None

    def as_dict(self) -> dict[str, Any]:
        points = {"points": POINTS if self.passed else 0, "max_points": POINTS}
        return {"id": self.id, "passed": self.passed, **points, **dict(list(self._asdict().items())[2:])}


@dataclass
class LabGrade:
    """The verdict on the answers of one submission.

    Attributes:
        status: "passed", "failed", "not_started", or "error" if the file cannot be used. problem: the reason for "error".
    """

    checks: list[LabCheck]
    status: str = "not_started"
    problem: str = ""
    seconds: float = 0.0

    @property
    def score(self) -> int:
        return sum(POINTS for check in self.checks if check.passed)

    @property
    def max_score(self) -> int:
        return POINTS * len(self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "exercise": "lab",
            "score": self.score,
            "max_score": self.max_score,
            "status": self.status,
            "checks": [check.as_dict() for check in self.checks],
            "seconds": round(self.seconds, 3),
        }


def grade_lab(folder: Path, course: Course, only: str | None = None) -> LabGrade:
    """Grade the answers in a submission's folder, `lab/answers.toml` or `answers.toml` below it.

    Args:
        only: directory of one bug; None: all.

    Raises:
        UsageError: the course has no lab. Mistakes in the answers are in the result.
    """
    began = time.monotonic()
    bugs = read_bugs(course)
    seals = read_seals(course, bugs)
    chosen = [bug for bug in bugs if only in (None, bug.directory)]
    empty = [check for bug in chosen for check in _unanswered(bug)]
    try:
        answers = read_answers(find_answers(folder), bugs)
    except UsageError as error:
        first = LabCheck(empty[0].id, False, "unreadable-answer", printable(str(error)))
        return LabGrade([first, *empty[1:]], "error", str(error), time.monotonic() - began)
    answered = [bug for bug in chosen if any(answers[bug.directory])]
    if not answered:
        return LabGrade(empty)
    measured = evidence_of(answered, seals, course)
    checks: list[LabCheck] = []
    for bug in chosen:
        name = bug.directory
        is_answered = name in measured
        checks += _judge(bug, answers[name], seals[name], measured[name]) if is_answered else _unanswered(bug)
    status = "passed" if all(check.passed for check in checks) else "failed"
    return LabGrade(checks, status, "", time.monotonic() - began)


def _unanswered(bug: Bug) -> list[LabCheck]:
    return [LabCheck(f"{bug.number}.{question}", None) for question in ("evidence", *CHOSEN)]


def _judge(bug: Bug, answers: Answers, seal: Seal, measured: Measured) -> Iterator[LabCheck]:
    evidence = _judge_evidence(f"{bug.number}.evidence", bug, answers.evidence, measured)
    yield evidence
    for question in CHOSEN:
        name = f"{bug.number}.{question}"
        if evidence.passed:
            yield _judge_choice(name, bug, question, getattr(answers, question), seal, measured.value)
        else:
            message = f"not judged before {evidence.id} is right"
            yield LabCheck(name, None, message=message, dependency=evidence.id)


def _judge_evidence(name: str, bug: Bug, typed: str, measured: Measured) -> LabCheck:
    """Say what is wrong without showing the value."""
    shown = printable(typed)
    if measured.problem:
        return LabCheck(name, False, "not-measured", measured.problem)
    if not typed:
        return LabCheck(name, False, "not-answered", f"No evidence given. {bug.evidence.question}")
    try:
        if agrees(bug.evidence.kind, typed, measured.value):
            return LabCheck(name, True)
    except Unreadable as error:
        message = f"{shown!r} is not {error}. {bug.evidence.question}"
        return LabCheck(name, False, "unreadable-answer", message, str(error), shown)
    message = f"The run does not show {shown}. {bug.evidence.question}"
    return LabCheck(name, False, "wrong-evidence", message, None, shown)


def _judge_choice(name: str, bug: Bug, question: str, typed: str, seal: Seal, value: str) -> LabCheck:
    letters = LETTERS[: len(bug.choices[question])]
    if not typed:
        return LabCheck(name, False, "not-answered", f"No {question} chosen.", f"one of {letters}", None)
    choice = bug.choice(question, typed.upper())
    if choice is None:
        shown = printable(typed)
        message = f"{shown!r} is no letter of a choice."
        return LabCheck(name, False, "unreadable-answer", message, f"one of {', '.join(letters)}", shown)
    if seal.opens(question, choice.name, value):
        return LabCheck(name, True)
    message = refute(bug, choice, value)
    return LabCheck(name, False, choice.name, message, None, f"{typed.upper()}: {choice.text}")


def refute(bug: Bug, choice: Choice, value: str) -> str:
    """Say why the evidence contradicts a choice."""
    return f"{choice.if_so} {bug.shows.replace('{evidence}', said(value))}"


def said(value: str) -> str:
    """Format a value for a sentence: 65,536 for 65536."""
    return f"{int(value):,}" if value.isdecimal() else value
