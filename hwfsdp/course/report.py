"""Grades as text, for a learner at a terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from hwfsdp.course.checklist import question_of
from hwfsdp.course.misconceptions import MISCONCEPTIONS
from hwfsdp.course.pages import filled_for_terminal
from hwfsdp.course.verdict import CheckResult, Grade

_CODES = {"green": "32", "red": "31", "grey": "90", "bold": "1"}
MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("–", "grey")}
_INDENT = " " * 6


class Style:
    """Colors on a terminal. There are no colors elsewhere, or if `NO_COLOR` is set (https://no-color.org)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        self.colored = stream.isatty() and not os.environ.get("NO_COLOR")
        self.width = min(110, shutil.get_terminal_size((80, 24)).columns)

    def paint(self, text: str, color: str) -> str:
        return f"\033[{_CODES[color]}m{text}\033[0m" if self.colored else text

    def wrapped(self, text: str, indent: str = _INDENT, color: str = "") -> str:
        """Wrap the text. A table in it keeps its lines."""
        lines: list[str] = []
        for line in map(printable, text.splitlines()):
            fits = len(line) + len(indent) <= self.width or line[:1] == " "
            lines += [indent + line] if fits else wrapped(line, self.width, indent, indent)
        return "\n".join(self.paint(line, color) if color else line for line in lines)


def answer(as_json: bool, found: Any, text: Callable[[], str], holds: bool = True) -> int:
    """Print the result of a command as JSON, or else as text, which is made only then. Return the exit status: 0 if it holds."""
    print(json.dumps(found, indent=2) if as_json else text())
    return 0 if holds else 1


def wrapped(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    """Wrap a text to lines. The first line begins with `first`, the others with `others`. Words are never split."""
    wrapper = textwrap.TextWrapper(width, first, others, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


def printable(line: str) -> str:
    """Escape characters that a terminal cannot print: the output of a learner's code must not move the cursor or stop the report."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line.expandtabs())


def shown(
    grade: Grade, path: Path, style: Style, before: Mapping[str, str] = {}, page: Path | None = None
) -> str:
    """Return the verdict on one exercise as text: a line for each check, and the evidence for each failed check.

    Args:
        before: the figures of an earlier verdict. page: the path of a page that plays the failed run (`beside`).
    """
    results = grade.shown_results
    earlier = dict.fromkeys(result.check.id[:2] for result in grade.before)
    return filled_for_terminal(
        "verdict.txt",
        grade=grade,
        exercise=grade.exercise,
        results=results,
        path=path,
        style=style,
        before=before,
        page=page,
        printable=printable,
        question_of=question_of,
        misconceptions=MISCONCEPTIONS,
        readme=shown_path(grade.exercise.folder / "README.md"),
        is_void=grade.status == "error" and grade.finding,
        check_lines=lambda result: _check_lines(result, grade, style),
        asked=_cause(grade),
        still_right=earlier if all(result.passed for result in grade.before) else (),
        lost=dict.fromkeys(result.check.id[:2] for result in grade.before if result.passed is False),
    )


def _cause(grade: Grade) -> CheckResult | None:
    """Return the failed check that probably explains the others: by its misconception's rank, then the exercise's own, then the first."""
    failed = [(result.finding, result) for result in [*grade.results, *grade.before] if result.finding]
    ranks = [MISCONCEPTIONS[finding.misconception].rank for finding, _ in failed]
    return failed[ranks.index(min(ranks))][1] if failed else None


def _check_lines(result: CheckResult, grade: Grade, style: Style) -> str:
    """Return a check's mark, id, sentence and points. A sentence that is too long for the terminal continues on the next line."""
    checks = [each.check for each in grade.shown_results]
    names, longest = max(len(check.id) for check in checks), max(len(check.sentence) for check in checks)
    (mark, color), check = MARKS[result.passed], result.check
    below = " " * (6 + names)  # indentation of the sentence's further lines
    width = max(20, min(longest, style.width - len(below) - 5))
    first, *others = textwrap.wrap(check.sentence, width, break_on_hyphens=False)
    counts = result in grade.results and check.points
    points = f"  {check.points if result.passed else 0}/{check.points}" if counts else ""
    lines = [f"  {style.paint(mark, color)} {check.id:<{names}}  {first:<{width}}{points}".rstrip()]
    lines += [below + line for line in others]
    if result.dependency:
        lines.append(below + style.paint(f"skipped: needs {result.dependency}", "grey"))
    return "\n".join(lines)


def shown_path(path: Path) -> Path:
    """Return a path relative to the current folder, if it is below this folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
