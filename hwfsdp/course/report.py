"""Grades as text, for a learner at a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from hwfsdp.course.checklist import question_of
from hwfsdp.course.manifest import Exercise
from hwfsdp.course.misconceptions import MISCONCEPTIONS
from hwfsdp.course.verdict import CheckResult, Finding, Grade

_CODES = {"green": "32", "red": "31", "grey": "90", "bold": "1"}
MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("–", "grey")}
_INDENT = " " * 6


class Style:
    """Colors on a terminal, none elsewhere, and none if `NO_COLOR` is set (https://no-color.org)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        self.colored = stream.isatty() and not os.environ.get("NO_COLOR")
        self.width = min(110, shutil.get_terminal_size((100, 24)).columns)

    def paint(self, text: str, color: str) -> str:
        return f"\033[{_CODES[color]}m{text}\033[0m" if self.colored else text

    def wrapped(self, text: str, indent: str = _INDENT) -> Iterator[str]:
        """Wrap the text. A table in it keeps its lines."""
        for line in map(printable, text.splitlines()):
            if len(line) + len(indent) <= self.width or line[:1] == " ":
                yield indent + line
            else:
                yield from textwrap.wrap(
                    line,
                    self.width,
                    initial_indent=indent,
                    subsequent_indent=indent,
                    break_long_words=False,
                    break_on_hyphens=False,
                )


def printable(line: str) -> str:
    """Escape what a terminal cannot print: output of a learner's code must not move the cursor, or stop the report."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line.expandtabs())


def shown(
    grade: Grade, path: Path, style: Style, before: Mapping[str, str] = {}, page: Path | None = None
) -> str:
    """The verdict on one exercise: a line for each check, and the evidence for each failed one.

    Args:
        before: the figures of an earlier verdict. page: a player of what failed (`beside`).
    """
    seen = [f"  See it, beside the reference: open {page} in a browser."] if page else []
    return "\n".join([*_lines(grade, path, style, before), *seen])


def _lines(grade: Grade, path: Path, style: Style, before: Mapping[str, str]) -> Iterator[str]:
    exercise = grade.exercise
    yield style.paint(f"{exercise.number} {exercise.title}", "bold") + style.paint(f"  {path}", "grey")
    yield ""
    if grade.status == "not_started":
        yield from _not_started(grade, path, style)
        return
    if grade.status == "error" and grade.finding:
        yield from _finding_lines(grade.finding, style, asks="")
        yield ""
        yield from _printed(grade, style)
        is_forgone = grade.finding.misconception == "caught-up"
        why = "you gave them up." if is_forgone else "nothing counts until you fix this."
        yield f"  0 of {grade.max_score} points in {grade.seconds:.1f} s: {why}"
        return
    asked = False
    results = grade.shown_results
    widths = [max(len(text) for text in texts) for texts in zip(*map(_texts, results), strict=True)]
    for result in results:
        with_points = result in grade.results and bool(result.check.points)
        yield from _check_lines(result, widths, style, with_points)
        if result.finding:
            yield from _finding_lines(result.finding, style, None if asked else result.check.id)
            asked = True
    numbers = dict.fromkeys(result.check.id[:2] for result in grade.before)
    if numbers and all(result.passed for result in grade.before):
        yield style.paint(f"  Checked again, and still right: {', '.join(numbers)}.", "grey")
    yield ""
    if grade.measured:
        yield style.paint("  Measured:", "grey")
        for of, figures in grade.measured.items():
            yield from style.wrapped(f"{of}: {figures}", "    ")
            if before.get(of, figures) != figures:
                yield from (
                    style.paint(line, "grey") for line in style.wrapped(f"before: {before[of]}", "      ")
                )
        yield ""
    yield from _printed(grade, style)
    score = f"{grade.points} in {grade.seconds:.1f} s."
    if lost := dict.fromkeys(r.check.id[:2] for r in grade.before if r.passed is False):
        score += f" The station is not passed: {', '.join(lost)} no longer hold{'s' * (len(lost) == 1)}."
    if grade.status == "passed":
        yield "  " + style.paint(score, "green")
        return
    yield from style.wrapped(score, "  ")
    yield f"  A hint: hwfsdp hint {exercise.short_number}. The same inputs again: --seed {grade.seed}"


def _not_started(grade: Grade, path: Path, style: Style) -> Iterator[str]:
    exercise = grade.exercise
    yield f"  Not started, 0 of {grade.max_score} points. Read {shown_path(exercise.folder / 'README.md')}"
    if not path.exists():
        yield f"  {path.name} is missing. To write it again: hwfsdp reset {exercise.short_number}"
    if names := exercise.hole_names:
        yield from style.wrapped(f"{len(names)} TODOs: {', '.join(names)}.", "  ")


def _printed(grade: Grade, style: Style) -> Iterator[str]:
    if grade.printed:
        yield style.paint("  What your code printed:", "grey")
        yield from (f"    {printable(line)}" for line in grade.printed.splitlines())
        yield ""


def _texts(result: CheckResult) -> tuple[str, str]:
    return result.check.id, result.check.sentence


def _check_lines(
    result: CheckResult, widths: Sequence[int], style: Style, with_points: bool
) -> Iterator[str]:
    """A check's mark, id, sentence and points. A sentence too long for the terminal goes on below itself."""
    mark, color = MARKS[result.passed]
    place = 6 + widths[0]  # of the sentence
    width = max(20, min(widths[1], style.width - place - 5))
    first, *others = textwrap.wrap(result.check.sentence, width)
    points = f"  {result.check.points if result.passed else 0}/{result.check.points}" if with_points else ""
    yield f"  {style.paint(mark, color)} {result.check.id:<{widths[0]}}  {first:<{width}}{points}".rstrip()
    yield from (f"{'':{place}}{line}" for line in others)
    if result.dependency:
        yield f"{'':{place}}" + style.paint(f"skipped: needs {result.dependency}", "grey")


def _finding_lines(finding: Finding, style: Style, asks: str | None) -> Iterator[str]:
    """`asks`: id of the check whose question is asked, or None."""
    misconception = MISCONCEPTIONS[finding.misconception]
    for line in style.wrapped(f"{finding.misconception}: {misconception.sentence}"):
        yield style.paint(line, "red")
    yield from style.wrapped(finding.message)
    if finding.expected is not None:
        yield from style.wrapped(f"expected  {finding.expected}")
    if finding.actual is not None:
        yield from style.wrapped(f"got       {finding.actual}")
    if asks is not None:
        yield from style.wrapped(f"→ {question_of(asks, finding.misconception)}")


def listed(exercises: Sequence[Exercise]) -> str:
    """The exercises as a table of contents: stations, then electives."""
    width = max(len(exercise.title) for exercise in exercises)
    kinds = {
        "Stations, all in exercises/my_fsdp.py:": True,
        "Electives, each in a folder exercises/NN_name:": False,
    }
    lines = []
    for heading, is_station in kinds.items():
        lines += [heading] if any(exercise.is_station == is_station for exercise in exercises) else []
        for exercise in exercises:
            if exercise.is_station == is_station:
                file = "" if is_station else f"   {exercise.file_name}"
                lines.append(
                    f"  {exercise.number}  {exercise.title:<{width}} {exercise.points:>2} points{file}"
                )
    lines.append(f"{'':<{width + 6}}{sum(exercise.points for exercise in exercises):>3} points in all")
    return "\n".join(lines)


def shown_path(path: Path) -> Path:
    """A path as seen from the current folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
