"""The lab as text: bugs, questions, what a run showed, what answers came to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hwfsdp.course.lab.bugs import CHOSEN, LETTERS, Bug
from hwfsdp.course.report import MARKS, Style, printable, shown_path

if TYPE_CHECKING:
    from hwfsdp.course.lab.grading import LabCheck, LabGrade
    from hwfsdp.course.lab.running import Run
    from hwfsdp.observe.eventlog import EventLog

_INDENT = " " * 4
OF_BUG = 3  # points


class Standing(NamedTuple):
    """How far a learner is with a bug: "passed", "failed", "unchecked" or "not_answered", and its points in the last check."""

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
    """All bugs, a line each."""
    words = {
        "passed": ("solved", "green"),
        "failed": ("", "red"),
        "unchecked": ("answered, not checked yet", "grey"),
        "not_answered": ("not answered", "grey"),
    }
    lines = []
    for each in standings:
        word, color = words[each.status]
        word = word or f"{each.score} of {OF_BUG} points"
        lines.append(f"{each.bug.number}  {each.bug.title:<42} {style.paint(word, color)}")
    solved = sum(each.status == "passed" for each in standings)
    lines += ["", f"{solved} of {len(standings)} solved. The next one: hwfsdp lab {_next(standings)}"]
    return "\n".join(lines)


def _next(standings: Sequence[Standing]) -> str:
    found = next((each for each in standings if each.status != "passed"), standings[0])
    return str(int(found.bug.number))


def shown(bug: Bug, style: Style) -> str:
    """Symptom and questions of one bug."""
    return "\n".join(_bug_lines(bug, style))


def _bug_lines(bug: Bug, style: Style) -> Iterator[str]:
    yield style.paint(f"Lab {bug.number} {bug.title}", "bold") + style.paint(
        f"  {shown_path(bug.script)}", "grey"
    )
    yield ""
    yield from style.wrapped(bug.symptom, "  ")
    yield ""
    for text in bug.look:
        yield from _item("·", text, style)
    yield ""
    yield style.paint("  Evidence", "bold")
    yield from style.wrapped(bug.evidence.question)
    for question in CHOSEN:
        yield ""
        yield style.paint(f"  What is the {question}?", "bold")
        for letter, choice in zip(LETTERS, bug.choices[question]):
            yield from _item(letter, choice.text, style)
    number = int(bug.number)
    yield ""
    yield f"  See it: hwfsdp lab {number} --run"
    yield f"  Answer: exercises/lab/answers.toml, below [{bug.directory}]"
    yield f"  Then:   hwfsdp lab check {number}"


def _item(mark: str, text: str, style: Style) -> Iterator[str]:
    first, *others = style.wrapped(text)
    yield f"{_INDENT}{mark} {first.lstrip()}"
    yield from others


# --- A run ---------------------------------------------------------------------------------------------------


def described(run: Run) -> str:
    """What a run printed, what ended it, and what rank 0 moved and held."""
    lines = ["Output:", *(f"{_INDENT}{printable(line)}" for line in run.printed.splitlines()), ""]
    for rank, raised in enumerate(run.raised):
        if raised:
            name = "" if raised.startswith("rank ") else f"rank {rank}: "
            lines.append(f"{name}{printable(raised)}")
    lines += [""] if any(run.raised) else []
    if run.parted:
        lines += [run.parted, ""]
    if run.log and run.seconds is None:  # else the table says more
        lines += [*_traffic(run.log), "", *_memory(run.log)]
    return "\n".join(lines).rstrip()


def _traffic(log: EventLog) -> Iterator[str]:
    """Collectives of rank 0 by step, phase, op and dtype."""
    totals: dict[tuple[object, ...], list[int]] = {}
    for event in log.of_rank(0).collectives():
        place = event.step, event.phase or "-", event.op, event.dtype
        totals.setdefault(place, []).append(event.bytes)
    yield "Collectives of rank 0:"
    if not totals:
        yield f"{_INDENT}none"
        return
    yield f"{_INDENT}step  phase     op              dtype     count    largest B    together B"
    for (step, phase, op, dtype), sizes in totals.items():
        cells = f"{step:>4}  {phase:<9} {op:<15} {dtype:<9} {len(sizes):>5}"
        yield f"{_INDENT}{cells} {max(sizes):>12,} {sum(sizes):>13,}"


def _memory(log: EventLog) -> Iterator[str]:
    """The most bytes of each kind that rank 0 held."""
    yield "Most bytes that rank 0 held at once:"
    for kind, nbytes in log.of_rank(0).peak_bytes_by_kind().items():
        yield f"{_INDENT}{kind:<22} {nbytes:>12,}"


# --- Verdicts ------------------------------------------------------------------------------------------------


def judged(grade: LabGrade, titles: Mapping[str, str], style: Style) -> str:
    """What answers came to; `titles` of the bugs by number."""
    if grade.status == "error":
        return f"  {printable(grade.problem)}"
    lines: list[str] = []
    for number, title in titles.items():
        checks = [check for check in grade.checks if check.id.startswith(f"{number}.")]
        if all(check.passed is None and not check.dependency for check in checks):
            lines += [style.paint(f"{number} {title}  not answered", "grey")]
        elif checks:
            lines += [style.paint(f"{number} {title}", "bold")]
            lines += [line for check in checks for line in _check_lines(check, style)]
    lines += ["", f"{grade.score} of {grade.max_score} points in {grade.seconds:.1f} s."]
    return "\n".join(lines)


def _check_lines(check: LabCheck, style: Style) -> Iterator[str]:
    mark, color = MARKS[check.passed]
    yield f"  {style.paint(mark, color)} {check.id.partition('.')[2]}"
    if check.actual and check.message and check.actual not in check.message:  # the choice, in full
        yield from style.wrapped(check.actual)
    if check.message:
        yield from style.wrapped(check.message)
