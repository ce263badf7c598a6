"""Results of submissions: data that outlive the run that made them.

An exercise is a dictionary as `hwfsdp check N --json` prints it (docs/course.md). What graders of other kinds found, of the
capstone say, stands apart under `extra` and never counts into the score.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

UNKNOWN = "grading"  # where a time comes from that nobody knows
OPAQUE = ("message", "expected", "actual")  # fields of a check that would tell of hidden inputs
# of extras, what a student may read of hidden inputs
TOLD = """id exercise status passed score max_score bonus max_bonus points max_points misconception dependency
    seconds""".split()


@dataclass(frozen=True)
class Result:
    """One submission's grade.

    Attributes:
        name: of the submission, unique in its class.
        exercises: by number, as docs/course.md has them. extra: by name, apart from the score.
        errors: what could not be read or graded, one line each. notes: what was read in a way worth knowing.
        submitted: when it was handed in, ISO 8601 with an offset.
        submitted_by: who says so: "--submitted", "commit", "archive" or "file"; "grading" if nobody knows, and it counts as
            handed in when it was graded.
        digest: of the files that were graded, hexadecimal.
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
        """Points, of at most `max_score`."""
        return sum(int(exercise["score"]) for exercise in self.exercises)

    @property
    def max_score(self) -> int:
        return sum(int(exercise["max_score"]) for exercise in self.exercises)

    @property
    def time(self) -> datetime | None:
        """When it was handed in."""
        return datetime.fromisoformat(self.submitted) if self.submitted else None

    def checks(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Every check with its exercise, in order."""
        for exercise in self.exercises:
            for check in exercise["checks"]:
                yield exercise, check

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it back."""
        return {**asdict(self), "score": self.score, "max_score": self.max_score}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        kept = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        for name in ("exercises", "errors", "notes"):
            kept[name] = tuple(kept.get(name, ()))
        return cls(**kept)


def opaque(result: Result) -> Result:
    """The same without what would tell of the inputs: no message, expected or actual."""
    exercises = tuple(
        {**exercise, "checks": [{**check, **dict.fromkeys(OPAQUE)} for check in exercise["checks"]]}
        for exercise in result.exercises
    )
    extra = {name: _opaque_extra(found) for name, found in result.extra.items()}
    return replace(result, exercises=exercises, extra=extra)


def _opaque_extra(found: dict[str, Any]) -> dict[str, Any]:
    """Only what is known to tell nothing, as its grader is another one."""
    kept = {key: found[key] for key in TOLD if key in found}
    checks = [{key: check[key] for key in TOLD if key in check} for check in found.get("checks", ())]
    return {**kept, "checks": checks} if checks else kept
