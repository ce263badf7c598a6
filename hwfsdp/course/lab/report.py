"""The lab as text: bugs, questions, what a run showed, and the verdicts on answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hwfsdp.course.lab.bugs import LETTERS, Bug
from hwfsdp.course.pages import filled
from hwfsdp.course.report import MARKS, Style, printable, shown_path

if TYPE_CHECKING:
    from hwfsdp.course.lab.grading import LabGrade
    from hwfsdp.course.lab.running import Run

OF_BUG = 3  # points for each bug


class Standing(NamedTuple):
    """A learner's state with a bug: "passed", "failed", "unchecked" or "not_answered", and its points in the last check."""

    bug: Bug
    status: str
    score: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "bug": self.bug.directory,
            "title": self.bug.title,
            "status": self.status,
            "score": self.score,
            "max_score": OF_BUG,
        }


def listed(standings: Sequence[Standing], style: Style) -> str:
    """List all bugs, one line each."""
    return filled("lab_bugs.txt", standings=standings, style=style, most=OF_BUG).rstrip()


def shown(bug: Bug, style: Style) -> str:
    """Return symptom and questions of one bug."""
    script = shown_path(bug.script)
    return filled("lab_bug.txt", bug=bug, script=script, style=style, letters=LETTERS).rstrip()


def described(run: Run) -> str:
    """Say what a run printed, what ended it, and what rank 0 moved and held."""
    moved: dict[tuple[object, ...], list[int]] = {}  # by step, phase, op and dtype: bytes of each collective
    peaks: Mapping[str, int] | None = None
    if run.log and run.seconds is None:  # otherwise, the reason for its end says more
        log = run.log.of_rank(0)
        for event in log.collectives():
            place = event.step, event.phase or "-", event.op, event.dtype
            moved.setdefault(place, []).append(event.bytes)
        peaks = log.peak_bytes_by_kind()
    return filled("lab_run.txt", run=run, moved=moved, peaks=peaks, printable=printable).rstrip()


def judged(grade: LabGrade, titles: Mapping[str, str], style: Style) -> str:
    """Return the verdicts on answers. `titles`: by number of the bug."""
    if grade.status == "error":
        return f"  {printable(grade.problem)}"
    groups = {n: [check for check in grade.checks if check.id.startswith(f"{n}.")] for n in titles}
    bugs = {f"{number} {title}": groups[number] for number, title in titles.items()}
    return filled("lab_verdict.txt", grade=grade, bugs=bugs, marks=MARKS, style=style).rstrip()
