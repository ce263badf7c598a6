"""Verdicts as text: plain in a file, colored on a terminal, and always with the evidence."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from hwfsdp.cli.doctor import _row
from hwfsdp.course.checklist import checks_of
from hwfsdp.course.manifest import find_course
from hwfsdp.course.report import Style, shown
from hwfsdp.course.verdict import CheckResult, Finding, Grade

EXERCISE = find_course(Path(__file__)).exercise(1)
FINDING = Finding("past-the-end", "chunk_extent(n=5) is\n  a  table\n  of  two rows", [1, 2], "x")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def graded(status: str, finding: Finding | None = None) -> Grade:
    results = [CheckResult(check, passed=finding is None) for check in checks_of(EXERCISE)]
    if finding:
        results[0].finding = finding
        results[1].passed, results[1].dependency = None, results[0].check.id
    return Grade(EXERCISE, results, status, finding, 1.25, "printed\n", 7)


def test_colors_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    grade = graded("failed", FINDING)
    assert "\033[31m" in shown(grade, Path("x.py"), Style(Terminal()))
    assert "\033" not in shown(grade, Path("x.py"), Style(io.StringIO()))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in shown(grade, Path("x.py"), Style(Terminal()))


def test_a_failure_has_evidence_question_and_time() -> None:
    text = shown(graded("failed", FINDING), Path("x.py"), Style(io.StringIO()))
    for words in (
        *("past-the-end: a chunk reaches past the last row", "expected  [1, 2]", "got       x"),
        *("  a  table", "→ With 5 rows", "skipped: needs 01.padded", "in 1.2 s", "--seed 7"),
        *("What your code printed:", "    printed", "hwfsdp hint 1"),
    ):
        assert words in text, text


def test_the_question_is_about_the_failure_that_explains_the_others() -> None:
    grade = graded("failed")
    lost, late = Finding("grad-lost", "It is zero."), Finding("left-in-flight", "One is late.")
    grade.before = [CheckResult(grade.results[0].check, passed=False, finding=lost)]
    grade.results[1].finding = late
    text = shown(grade, Path("x.py"), Style(io.StringIO()))
    assert text.count("→") == 1 and "→ Which code waits for the reductions" in text
    grade.results[1].finding = Finding("grad-kept", "It counts twice.")  # of the same rank: the station's own
    text = shown(grade, Path("x.py"), Style(io.StringIO()))
    assert text.count("→") == 1 and "→ Which code clears a gradient" in text


def test_an_error_says_that_nothing_counts_and_lists_no_checks() -> None:
    text = shown(graded("error", Finding("endless", "It is in f.")), Path("x.py"), Style(io.StringIO()))
    assert "endless: the code does not come to an end" in text and "nothing counts" in text
    assert "01.padded" not in text


def test_output_into_a_pipe_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", None)  # no terminal
    assert Style(io.StringIO()).width == 80
    assert max(map(len, _row("ok", "ranks", "many words " * 30).splitlines())) <= 80


def test_a_verdict_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for exercise in find_course(Path(__file__)).exercises:
        results = [CheckResult(check, passed=False) for check in checks_of(exercise)]
        text = shown(
            Grade(exercise, results, "failed", None, 1.25, "", 7), Path("x.py"), Style(io.StringIO())
        )
        assert max(map(len, text.splitlines())) <= 80
        assert all(word in text for check in checks_of(exercise) for word in check.sentence.split())
