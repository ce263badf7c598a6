"""The stations of the course: the reference at each of them, wrong answers, commands.

The reference is one file that grows; a wrong answer is an edit of it. The difference is the mistake.
"""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

import pytest

from hwfsdp.learn.grade import Options
from hwfsdp.learn.manifest import find_course
from hwfsdp.learn.stations.__main__ import main
from hwfsdp.learn.stations.course import STATIONS
from hwfsdp.learn.stations.grading import graded
from hwfsdp.learn.stations.stages import LAST, stage
from hwfsdp.learn.verdict import Grade
from suites import fast_are, long

sys.path.insert(0, str(Path(__file__).parent))
from answers.stations import WRONG, Wrong  # noqa: E402

COURSE = find_course(Path(__file__))
OPTIONS = Options(seed=7)
NUMBERS = range(1, LAST + 1)


def shown(grade: Grade) -> str:
    findings = [(r.check.id, r.finding.misconception, r.finding.message) for r in grade.results if r.finding]
    return "\n".join([f"{grade.status} {grade.score} of {grade.max_score}", *map(str, findings)])


# --- One file that grows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(LAST + 1))
def test_the_file_of_each_station_is_python_without_marks(number: int) -> None:
    text = stage(number)
    ast.parse(text)
    assert "# @" not in text and "# |" not in text


def test_the_reference_is_small() -> None:
    lines = [line for line in stage(LAST).splitlines() if line.strip() and not line.strip().startswith("#")]
    docstrings = sum(
        len(ast.get_docstring(node, clean=False).splitlines())  # type: ignore[union-attr]
        for node in ast.walk(ast.parse(stage(LAST)))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
    )
    assert len(lines) - docstrings <= 320


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        ("# @end", "line 1: an end without a block"),
        ("# @03\na = 1", "a block of station 03 does not end"),
        ("# @03\na = 1\n# @03\n# | a = 2\n# @end", "line 3: 03 again"),
    ],
)
def test_marks_that_do_not_fit_together_are_refused(marked: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage(3, marked)


def test_the_newest_lines_that_are_old_enough_are_taken() -> None:
    marked = "x = 0\n# @08\nx = 8\n# @09\ny = 9\n# @08\n# @end\n# @03\n# | x = 3\n# @end\nz = 0"
    kept = {0: "x = 0\nz = 0\n", 3: "x = 0\nx = 3\nz = 0\n", 7: "x = 0\nx = 3\nz = 0\n"}
    kept |= {8: "x = 0\nx = 8\nz = 0\n", 9: "x = 0\nx = 8\ny = 9\nz = 0\n"}
    assert {number: stage(number, marked) for number in kept} == kept


# --- What it is worth --------------------------------------------------------------------------------------


@functools.cache
def grade_of_stage(station: int, file: int) -> Grade:
    return graded(station, stage(file), COURSE, OPTIONS)


@pytest.mark.parametrize("number", fast_are([1, 3, 10], NUMBERS))
def test_the_file_of_a_station_gets_full_marks_there(number: int) -> None:
    grade = grade_of_stage(number, number)
    assert (grade.status, grade.score) == ("passed", STATIONS[number - 1].points), shown(grade)


@pytest.mark.parametrize("number", fast_are([10], NUMBERS))
def test_the_file_of_the_station_before_does_not(number: int) -> None:
    grade = grade_of_stage(number, number - 1)
    assert grade.score < STATIONS[number - 1].points and grade.status in ("failed", "not_started"), shown(
        grade
    )


@pytest.mark.long
@pytest.mark.parametrize("number", NUMBERS)
def test_what_worked_at_a_station_works_in_the_last_file(number: int) -> None:
    grade = grade_of_stage(number, LAST)
    assert (grade.status, grade.score) == ("passed", STATIONS[number - 1].points), shown(grade)


def one_for_each_station(found: list[Wrong]) -> list[object]:
    """The wrong answers; all but the first one for a station are long."""
    first = {wrong.station: wrong for wrong in reversed(found)}
    return [wrong if first[wrong.station] is wrong else long(wrong) for wrong in found]


@pytest.mark.parametrize(
    "wrong", one_for_each_station(WRONG), ids=lambda wrong: f"{wrong.check} {wrong.name}"
)
def test_a_wrong_answer_is_told_what_is_wrong(wrong: Wrong) -> None:
    grade = graded(wrong.station, wrong.text, COURSE, Options(seed=7, only=wrong.check))
    verdicts = {r.check.id: r.finding.misconception for r in grade.results if r.finding}
    assert verdicts.get(wrong.check) == wrong.misconception, shown(grade)


# --- From a terminal ---------------------------------------------------------------------------------------


def test_what_is_there_stays_and_a_file_that_was_not_begun_is_said_to_be_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert main(["start", str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text() == "mine"
    assert (tmp_path / "my_fsdp.py").read_text() == stage(0)
    assert all((tmp_path / each.directory / "README.md").exists() for each in STATIONS)
    assert main(["check", "1", str(tmp_path)]) == 1
    assert capsys.readouterr().out.rstrip().endswith("Not started, 0 of 5 points.")


def test_catching_up_twice_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "my_fsdp.py"
    for text in ("one", "two"):
        file.write_text(text)
        assert main(["catchup", "3", str(tmp_path)]) == 0
        assert file.read_text() == stage(2)
    assert [(tmp_path / f"my_fsdp.before_{n}.py").read_text() for n in (1, 2)] == ["one", "two"]


@pytest.mark.parametrize(
    "arguments",
    [[], ["start"], ["check"], ["check", "11"], ["check", "x"], ["hint", "0"], ["hint", "3", "x"]],
)
def test_arguments_that_cannot_be_used_end_with_status_2(arguments: list[str]) -> None:
    assert main(arguments) == 2
