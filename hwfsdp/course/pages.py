"""What a student reads: the evidence of one failed test, and the verdict at the end of a run.

    ✓ 03.rows      Every parameter keeps its names, and is now this rank's rows of the old parameter.   2/2
    ✗ 03.trains    It trains: …                                                                         0/4
        summed-not-averaged: gradients are summed over the ranks, not averaged
        blocks.0.up.weight, rank 0, step 1 is 3, the number of ranks, times the mean over all ranks.
        same cause: 03.replicate
        → The loss of a step is a mean: over how many ranks' batches?

Findings of one misconception are shown once. One question is asked, about the likely cause of all of them (`findings`).
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TextIO

from hwfsdp.course.findings import Finding, Outcome, cause_of, folded
from hwfsdp.errors import shown_path

_CODES = {"green": "32", "red": "31", "grey": "90", "bold": "1"}
_MARKS = {"passed": ("✓", "green"), "failed": ("✗", "red"), "error": ("!", "red")}
_INDENT = " " * 6


class Style:
    """Colors on a terminal. There are no colors elsewhere, or if `NO_COLOR` is set (https://no-color.org)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.__stdout__ or sys.stdout
        self.colored = stream.isatty() and not os.environ.get("NO_COLOR")
        self.width = min(110, shutil.get_terminal_size((110, 24)).columns)

    def paint(self, text: str, color: str) -> str:
        return f"\033[{_CODES[color]}m{text}\033[0m" if self.colored else text

    def wrapped(self, text: str, indent: str = _INDENT, color: str = "") -> list[str]:
        """Wrap the text. A table in it keeps its lines."""
        lines: list[str] = []
        for line in text.splitlines():
            fits = len(line) + len(indent) <= self.width or line[:1] == " "
            lines += (
                [indent + line]
                if fits
                else textwrap.wrap(
                    line,
                    self.width,
                    initial_indent=indent,
                    subsequent_indent=indent,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )
        return [self.paint(line, color) if color else line for line in lines]


def evidence(outcome: Outcome, finding: Finding) -> str:
    """Return what pytest shows for one failed test."""
    return "\n".join([f"{outcome.test}: {outcome.sentence}", "", *_lines_of(finding, Style())])


def _lines_of(finding: Finding, style: Style) -> list[str]:
    lines = style.wrapped(f"{finding.misconception}: {finding.known.sentence}", color="red")
    lines += style.wrapped(finding.message)
    for word, value in (("expected  ", finding.expected), ("got       ", finding.actual)):
        lines += style.wrapped(f"{word}{value}") if value is not None else []
    return lines


def verdict(
    outcomes: Sequence[Outcome],
    style: Style,
    titles: Mapping[str, tuple[str, Path]] = {},
    seed: int | None = None,
) -> str:
    """Return the page of a run: a line for each test, the evidence for each misconception, one question, and the points.

    Earlier exercises come first, and of these only the tests that fail for a cause of their own.

    Args:
        titles: title and file of each exercise, by number. seed: the run's seed, if a student may know it.
    """
    blocks = {of[0].test: of for of in folded(outcomes)}
    cause, lines = cause_of(outcomes), list[str]()
    exercises = [(number, list(of)) for number, of in groupby(outcomes, key=lambda each: each.exercise)]
    for number, of in sorted(exercises, key=lambda each: (each[1][0].own, each[0])):
        title, path = titles.get(number, ("", Path()))
        shown = [each for each in of if each.own or each.test in blocks or each.status == "error"]
        if not shown:
            lines.append(style.paint(f"  {number} {title}: {_summary(of)}", "grey"))
            continue
        lines += [
            "",
            style.paint(f"{number} {title}", "bold") + style.paint(f"  {shown_path(path)}", "grey"),
            "",
        ]
        longest = max(len(each.test) for each in shown)
        for each in shown:
            lines += _line_of(each, longest, style)
            if each.test in blocks and each.finding:
                lines += _lines_of(each.finding, style)
                if others := [other.test for other in blocks[each.test][1:]]:
                    lines += style.wrapped(f"same cause: {', '.join(others)}", color="grey")
                lines += style.wrapped(f"→ {each.question}") if each is cause else []
        lines += ["", *_score(number, of, style)]
    figures = [f"{of}: {said}" for each in outcomes for of, said in each.measured.items()]
    if figures:
        lines += [
            "",
            style.paint("  Measured:", "grey"),
            *(line for each in figures for line in style.wrapped(each, "    ")),
        ]
    if any(each.status != "passed" for each in outcomes) and seed is not None:
        lines.append(style.paint(f"  The same inputs again: --seed {seed}", "grey"))
    return "\n".join(lines).lstrip("\n")


def _summary(outcomes: Sequence[Outcome]) -> str:
    """Return a few words about an earlier exercise without a failure of its own cause."""
    if all(each.status == "passed" for each in outcomes):
        return "still right"
    score = "{} of {} points".format(*_points([each for each in outcomes if not each.bonus]))
    return (
        f"{score}, for the same cause"
        if any(each.finding for each in outcomes)
        else f"{score}, not all tests ran"
    )


def _line_of(outcome: Outcome, longest: int, style: Style) -> list[str]:
    """Return a test's mark, name, sentence and points. A sentence that is too long continues on the next line."""
    mark, color = _MARKS.get(outcome.status, ("–", "grey"))
    below = " " * (6 + longest)
    first, *others = textwrap.wrap(
        outcome.sentence, max(20, style.width - len(below) - 6), break_on_hyphens=False
    )
    width = style.width - len(below) - 6
    points = (
        f"  {outcome.points if outcome.status == 'passed' else 0}/{outcome.points}" if outcome.points else ""
    )
    lines = [
        f"  {style.paint(mark, color)} {outcome.test:<{longest}}  {first:<{width if points else 0}}{points}".rstrip()
    ]
    lines += [below + line for line in others]
    if outcome.status == "error":
        lines += style.wrapped(
            f"This test is broken; it is not your mistake. Tell your instructor: {outcome.note}", below
        )
    elif outcome.note:
        lines += style.wrapped(outcome.note, below, "grey")
    return lines


def _score(number: str, outcomes: Sequence[Outcome], style: Style) -> list[str]:
    tasks, bonuses = [each for each in outcomes if not each.bonus], [each for each in outcomes if each.bonus]
    points, most = _points(tasks)
    left = sum(each.status == "not run" for each in tasks)
    findings = {each.finding.misconception for each in outcomes if each.finding}
    if not points and findings and findings <= {"not-written", "not-yet"}:
        return [f"  Not started, 0 of {most} points. Read the page of exercise {number}."]
    score = f"  {points} of {most} points{', {} of {} bonus points'.format(*_points(bonuses)) if bonuses else ''}."
    if any(each.status in ("failed", "error") for each in tasks):
        return [f"{score} A hint: hwfsdp hint {number.lstrip('0')}"]
    return [f"{score} Tests that did not run: {left}."] if left else [style.paint(score, "green")]


def _points(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Return the points of the tests that passed, and of all."""
    return sum(each.points for each in outcomes if each.status == "passed"), sum(
        each.points for each in outcomes
    )
