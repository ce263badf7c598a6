"""Grades as data: the reason why a check fails, the result of each check, and the grade of an exercise.

This module must load quickly, so it does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hwfsdp.course.manifest import Exercise
from hwfsdp.course.misconceptions import MISCONCEPTIONS

if TYPE_CHECKING:
    from hwfsdp.course.run import Ranks


class Seen(NamedTuple):
    """A moment of a run on a simulated machine, for the step player.

    Attributes:
        machine: the simulated machine, by its name in `clocked`. log: the log of the run, as data (`run.log_data`).
        us: the moment in µs of the log's time; None: the moment when most bytes are alive.
    """

    machine: str
    log: dict[str, Any]
    us: float | None


class Finding(Exception):
    """Why a check fails.

    Args:
        misconception: its id. message: the evidence, in one or two sentences with names and numbers.
        expected, actual: the two values to compare, if they help.

    Attributes:
        provisional: time ran out while other runs were graded at the same time. The check must be graded again, alone (`run`,
            Note [Slow or stuck]).
        seen: the moment to look at, if a run was recorded; it stays in the process that judged.
    """

    provisional = False
    seen: Seen | None = None

    def __init__(self, misconception: str, message: str, expected: Any = None, actual: Any = None) -> None:
        assert misconception in MISCONCEPTIONS, f"{misconception} is not listed"
        super().__init__(message)
        self.misconception, self.message = misconception, message
        self.expected, self.actual = _shown(expected), _shown(actual)

    def at(self, seen: Seen) -> Finding:
        """Set the moment to look at, and return this finding."""
        self.seen = seen
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Finding, (self.misconception, self.message, self.expected, self.actual)


class Undecided(Exception):
    """A check cannot decide because another check does not hold. The argument is the id of the other check."""


def _shown(value: Any) -> str | int | float | None:
    """Return a value as a report shows it: numbers unchanged, tensors with few elements, everything on one line."""
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "numel"):  # a tensor, known without loading torch
        is_long, shape = value.numel() > 16, tuple(value.shape)
        value = f"{value.flatten()[:8].tolist()}… {shape}" if is_long else value.tolist()
    return one_line(str(value), 300)


def one_line(text: str, longest: int) -> str:
    """Return a text without line breaks, shortened to `longest` characters."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 3]}…"


Judge: TypeAlias = "Callable[[Ranks, int], None]"  # called with ranks and a seed


class Check(NamedTuple):
    """A statement that must be true for a right answer.

    Attributes:
        id: for example "01.extent". sentence: the statement that is true when the check passes.
        judge: raises a Finding if the statement is not true, or Undecided. needs: ids of checks that must pass first.
    """

    id: str
    sentence: str
    points: int
    judge: Judge
    needs: tuple[str, ...] = ()

    @property
    def is_bonus(self) -> bool:
        """True if the check gives bonus points. An exercise can be passed without them."""
        return self.id.startswith(("bonus.", "ours."))


@dataclass
class CheckResult:
    """The result of a check. `passed` is None if it did not run; `dependency` is the check that kept it from running."""

    check: Check
    passed: bool | None = None
    finding: Finding | None = None
    dependency: str | None = None

    def as_dict(self) -> dict[str, Any]:
        finding = self.finding
        return {
            "id": self.check.id,
            "passed": self.passed,
            "points": self.check.points if self.passed else 0,
            "max_points": self.check.points,
            "misconception": finding.misconception if finding else None,
            "message": finding.message if finding else self._why_skipped(),
            "expected": finding.expected if finding else None,
            "actual": finding.actual if finding else None,
            "dependency": self.dependency,
        }

    def _why_skipped(self) -> str | None:
        return f"skipped, because {self.dependency} does not hold" if self.dependency else None


OnCheck = Callable[[CheckResult], None]


@dataclass
class Grade:
    """The grade of an exercise.

    Attributes:
        status: "passed", "failed", "not_started" or "error".
        finding: why nothing counts, if the status is "error".
        seconds: the time that grading took. printed: the output of the learner's code. seed: the seed of the inputs.
        before: results of the checks of earlier stations: their functions must still work. Their points do not count here.
        measured: figures by name, also if checks fail.
    """

    exercise: Exercise
    results: list[CheckResult]
    status: str = "not_started"
    finding: Finding | None = None
    seconds: float = 0.0
    printed: str = ""
    seed: int = 0
    before: list[CheckResult] = field(default_factory=list)
    measured: dict[str, str] = field(default_factory=dict)

    @property
    def shown_results(self) -> list[CheckResult]:
        """The failed checks of earlier stations, then the exercise's own checks."""
        return [*(result for result in self.before if result.finding), *self.results]

    @property
    def score(self) -> int:
        return self._points(is_bonus=False)

    @property
    def bonus(self) -> int:
        return self._points(is_bonus=True)

    def _points(self, is_bonus: bool) -> int:
        counted = [r.check for r in self.results if r.passed and r.check.is_bonus == is_bonus]
        return 0 if self.status == "error" else sum(check.points for check in counted)

    @property
    def max_score(self) -> int:
        return self.exercise.points

    @property
    def provisional(self) -> bool:
        """True if the exercise must be graded again, alone (see `Finding`)."""
        return any(result.finding is not None and result.finding.provisional for result in self.shown_results)

    @property
    def has_everything(self) -> bool:
        """True if the exercise has all its points, with all bonus points."""
        return self.status == "passed" and self.bonus == self.exercise.bonus

    @property
    def points(self) -> str:
        """The points in words."""
        more = f" and {self.bonus} of {self.exercise.bonus} bonus points" if self.exercise.bonus else ""
        return f"{self.score} of {self.max_score} points{more}"

    def as_dict(self) -> dict[str, Any]:
        checks = [result.as_dict() for result in self.shown_results]
        for result, check in zip(self.shown_results, checks, strict=True):
            if result not in self.results:
                check["max_points"] = 0
            if self.status == "error" or result not in self.results:
                check["points"] = 0
        most = self.exercise.bonus
        return {
            "exercise": self.exercise.number,
            "score": self.score,
            "max_score": self.max_score,
            **({"bonus": self.bonus, "max_bonus": most} if most else {}),
            "status": self.status,
            "checks": checks,
            "seconds": round(self.seconds, 3),
            **({"measured": self.measured} if self.measured else {}),
        }
