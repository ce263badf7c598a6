"""Results of submissions, as data that later runs can read.

An exercise is a dictionary in the form that `hwfsdp check N --json` prints (docs/course.md). Results of other graders, for example of
the capstone, are kept separately under `extra`. They never count into the score.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from hwfsdp.course.rules import ATTRIBUTES, FRAMES, MODULES, NAMES

UNKNOWN = "grading"  # the source of a time that is unknown
OPAQUE = ("message", "expected", "actual")  # fields of a check that would reveal hidden inputs
# misconceptions that the grader finds in the text of a file. Their messages say nothing about inputs, unless a rank wrote them
OF_THE_TEXT = ("not-python", "blocked", "not-alone", "caught-up", "missing", "wrong-signature")
_OF_A_RANK = ("Rank ", "On rank ")
_CRASHED = re.compile(r"Rank \d+ raised [\w.]+ in ([\w<>.]+) \(([^()]+), line (\d{1,4})\b")
_USED = re.compile(r"On rank \d+, your code (imports|uses|uses the module) ([\w.]+)\.")
_CLOSED = ATTRIBUTES | FRAMES | MODULES | {f"{module}.{name}" for module in NAMES for name in NAMES[module]}
# fields of an extra that a student may read if inputs are hidden
TOLD = """id exercise status passed score max_score bonus max_bonus points max_points misconception dependency
    seconds""".split()


@dataclass(frozen=True)
class Result:
    """One submission's grade.

    Attributes:
        name: the name of the submission, unique in its class.
        exercises: in the order of their numbers, in the form of docs/course.md. extra: by name; not part of the score.
        errors: problems in reading or grading, one line each. notes: remarks on the reading, one line each.
        submitted: when the submission was handed in, ISO 8601 with an offset.
        submitted_by: the source of this time: "--submitted", "commit", "archive" or "file"; "grading" if the time is unknown, so
            the submission counts as handed in when it was graded.
        digest: hash of the graded files, hexadecimal.
    """

    name: str
    exercises: tuple[dict[str, Any], ...]
    extra: dict[str, Any] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    submitted: str | None = None
    digest: str = ""
    submitted_by: str = ""

    @property
    def score(self) -> int:
        """The points, at most `max_score`."""
        return sum(int(exercise["score"]) for exercise in self.exercises)

    @property
    def max_score(self) -> int:
        return sum(int(exercise["max_score"]) for exercise in self.exercises)

    @property
    def time(self) -> datetime | None:
        """The time when the submission was handed in; None if it is not set."""
        return datetime.fromisoformat(self.submitted) if self.submitted else None

    def checks(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield every exercise and check as a pair, in order."""
        for exercise in self.exercises:
            for check in exercise["checks"]:
                yield exercise, check

    def as_dict(self) -> dict[str, Any]:
        """Return the result as data for JSON. `from_dict` reads it back."""
        return {**asdict(self), "score": self.score, "max_score": self.max_score}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        kept = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        for name in ("exercises", "errors", "notes"):
            kept[name] = tuple(kept.get(name, ()))
        return cls(**kept)


def opaque(result: Result) -> Result:
    """Return the result without what would reveal the inputs: expected, actual, and most messages."""

    def hidden(check: dict[str, Any]) -> dict[str, Any]:
        return {**check, **dict.fromkeys(OPAQUE), "message": _told(check)}

    exercises = tuple({**each, "checks": [*map(hidden, each["checks"])]} for each in result.exercises)
    extra = {name: _opaque_extra(found) for name, found in result.extra.items()}
    return replace(result, exercises=exercises, extra=extra)


def _told(check: dict[str, Any]) -> str | None:
    """Return the part of a check's message that a student may read if inputs are hidden.

    A learner's code could write inputs into a message of a rank. So only a place in the file, or the name of something
    forbidden, is left of such a message.
    """
    name, message = check.get("misconception"), str(check.get("message") or "")
    if name in OF_THE_TEXT and not message.startswith(_OF_A_RANK):
        return message or None
    if name == "crashed" and (place := _CRASHED.match(message)):
        return f"The error is in {place[1]} ({place[2]}, line {place[3]})."
    if name == "blocked" and (use := _USED.fullmatch(message)) and use[2] in _CLOSED:
        return f"Your code {use[1]} {use[2]}."
    return None


def _opaque_extra(found: dict[str, Any]) -> dict[str, Any]:
    """Return only the fields in TOLD: another grader made this result, so its other fields may reveal inputs."""
    kept = {key: found[key] for key in TOLD if key in found}
    for check in found.get("checks", ()):
        told = {key: check[key] for key in TOLD if key in check}
        if message := _told(check):
            told["message"] = message
        kept.setdefault("checks", []).append(told)
    return kept
