"""The stations of the course: one file that grows, the functions that it may use, and how a learner catches up.

test_answers.py grades wrong and right answers. tests/exercises grades the last file at every station.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from answers.shapes import of_another_make
from hwfsdp.cli import main
from hwfsdp.course import commands
from hwfsdp.course.capstone.rules import check_rules
from hwfsdp.course.certificate import write_certificate
from hwfsdp.course.checklist import checks_of
from hwfsdp.course.grade import Options, own_file
from hwfsdp.course.manifest import Course, find_course
from hwfsdp.course.progress import Progress
from hwfsdp.course.report import Style, shown
from hwfsdp.course.run import Ranks
from hwfsdp.course.stations import machines
from hwfsdp.course.stations.clocked import probe_clock
from hwfsdp.course.stations.stages import LAST, caught_up, given, stage, undeclared
from hwfsdp.course.submission import Source, find_source
from hwfsdp.course.verdict import CheckResult, Finding, Grade
from hwfsdp.course.workbook import SEED, graded

COURSE = find_course(Path(__file__))


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    """Make a learner's copy of the stations the current folder. Nothing is written yet."""
    for station in (each for each in COURSE.exercises if each.is_station):
        shutil.copytree(station.folder, tmp_path / "exercises" / station.directory)
    (tmp_path / "exercises" / "my_fsdp.py").write_text(stage(0))
    monkeypatch.chdir(tmp_path)
    return find_course(tmp_path)


# --- Pages -------------------------------------------------------------------------------------------------


PAGES = {each.directory: (each.folder / "README.md").read_text() for each in COURSE.exercises}


@pytest.mark.parametrize("directory", [name for name, page in PAGES.items() if "\n| check |" in page])
def test_the_table_of_a_readme_has_the_checks_and_their_points(directory: str) -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| .+ \| (\d+) \|$", PAGES[directory], re.MULTILINE)
    (exercise,) = (each for each in COURSE.exercises if each.directory == directory)
    assert rows == [(check.id, str(check.points)) for check in checks_of(exercise)]


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


# --- Names that a file may use -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "def run(file):\n    open = file.open\n    return open\n",
        "def run(open):\n    return [open for _ in range(2)], lambda: open\n",
        "class Group:\n    def run(self):\n        self.open, self.eval = True, False\n",
    ],
)
def test_a_variable_or_an_attribute_may_be_called_open(text: str) -> None:
    check_rules(Source(Path("my_fsdp.py"), stage(LAST) + text), needed={})


@pytest.mark.parametrize(
    "text",
    [
        "def run():\n    return open('x')\n",
        "open = open\n",
        "def run(open=open):\n    pass\n",
        "def run():\n    open = 1\n    return open\n\n\nfile = [open(name) for name in 'x']\n",
        "def run():\n    global open\n    open = 1\n    open('x')\n",
        "class Group:\n    open = open\n",
    ],
)
def test_pythons_own_open_is_refused(text: str) -> None:
    with pytest.raises(Finding, match="my_fsdp.py, line .*: open, which gets at anything") as caught:
        check_rules(Source(Path("my_fsdp.py"), text), needed={})
    assert caught.value.misconception == "blocked"


def names_not_allowed() -> list[str]:
    """The names in the first column of the README's table."""
    page = (COURSE.root / "exercises" / "README.md").read_text()
    rows = page.partition("| not allowed |")[2].partition("\n\n")[0].splitlines()
    found = [
        name for row in rows if row.startswith("| ") for name in re.findall("`([^`]+)`", row.split("|")[1])
    ]
    # the first is allowed; the second is refused while the file runs (`doors`)
    return [name for name in found if name not in ("MixedPrecisionPolicy", "torch._subclasses")]


@pytest.mark.parametrize("name", names_not_allowed())
def test_every_name_that_the_readme_does_not_allow_is_refused(name: str) -> None:
    refused = []
    for line in (f"import {name}", f"print(torch.{name})", f"print({name})"):
        try:
            check_rules(Source(Path("my_fsdp.py"), f"{stage(LAST)}\n{line}\n"), needed={})
        except Finding as finding:
            refused.append(finding.misconception)
    assert refused and set(refused) <= {"blocked", "not-alone"}


# --- Earlier stations --------------------------------------------------------------------------------------


def noted(course: Course, number: int, wrong: str = "", text: str = "x = 1\n") -> set[str]:
    """Return the stations that count as passed after a check of one. All checks passed except `wrong`, of an earlier station."""
    station = course.exercise(number)
    earlier = [each for each in course.exercises if each.number < station.number and each.number != "02"]
    before = [CheckResult(c, passed=c.id != wrong) for each in earlier for c in checks_of(each)]
    own = [CheckResult(check, passed=True) for check in checks_of(station)]
    Progress.load(course).note(Grade(station, own, "passed", before=before), text)
    return Progress.load(course).passed


def test_earlier_stations_that_are_checked_again_are_noted_as_passed(course: Course) -> None:
    assert noted(course, 5) == {"01", "03", "04", "05"}
    first = course.exercise(1)
    (course.root / "exercises" / "my_fsdp.py").write_text("x = 1\n")
    assert Progress.load(course).standing(first)[1:] == ("passed", first.points, False)


def test_a_station_that_is_not_right_or_not_the_learners_is_not_noted(course: Course) -> None:
    assert noted(course, 5, wrong="04.tied") == {"01", "03", "05"}


def test_a_station_that_was_not_checked_again_keeps_its_verdict(course: Course) -> None:
    noted(course, 5)
    last = course.exercise(6)
    before = [
        CheckResult(check, passed=check.id[:2] == "01" or None)
        for n in (1, 4)
        for check in checks_of(course.exercise(n))
    ]
    Progress.load(course).note(Grade(last, [], "error", before=before), "x = 1\n")  # ended in station 04
    assert Progress.load(course).passed == {"01", "03", "04", "05"}


def test_points_that_are_forgone_are_not_noted(course: Course) -> None:
    assert noted(course, 5, text=given("03")) == {"01", "04", "05"}


def test_a_report_names_the_stations_that_are_still_right(course: Course) -> None:
    station = course.exercise(2)
    before = [CheckResult(check, passed=True) for check in checks_of(course.exercise(1))]
    own = [CheckResult(check, passed=True) for check in checks_of(station)]
    grade = Grade(station, own, "passed", before=before)
    line = "  Checked again, and still right: 01."
    assert line in shown(grade, station.path, Style(io.StringIO())).splitlines()
    before[0].passed, before[0].finding = False, Finding("wrong-value", "It is another one.")
    text = shown(grade, station.path, Style(io.StringIO()))
    assert line not in text and "✗ 01.padded" in text and "0/0" not in text
    assert "The station is not passed: 01 no longer holds." in text
    before.append(CheckResult(checks_of(course.exercise(3))[0], passed=True))
    assert "passed: 01 no longer holds." in shown(grade, station.path, Style(io.StringIO()))


def test_an_earlier_station_that_no_longer_works_is_told_without_points(course: Course) -> None:
    text = stage(2).replace("return -(-n // world_size)", "return n // world_size")
    grade = graded(course.exercise(2), course, text, Options(mine=True, seed=SEED))
    assert (grade.status, grade.score) == ("failed", 6)
    first = grade.as_dict()["checks"][0]
    assert (first["id"], first["misconception"]) == ("01.padded", "floor-instead-of-ceil")
    assert (first["points"], first["max_points"]) == (0, 0)


# --- Catching up -------------------------------------------------------------------------------------------


def caught(capsys: pytest.CaptureFixture[str], number: str) -> Any:
    assert main(["catchup", number, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_catchup_writes_the_file_and_keeps_the_learners_own(
    course: Course, capsys: pytest.CaptureFixture[str]
) -> None:
    file = course.root / "exercises" / "my_fsdp.py"
    for text in ("one", "two"):
        file.write_text(text)
        found = caught(capsys, "3")
        assert found["forgone"] == ["01", "02"] and Path(found["kept"]).read_text() == text
        assert file.read_text() == f"{given('01')}\n{given('02')}\n{stage(2)}"
    assert caught(capsys, "3")["kept"] is None
    assert main(["catchup", "4"]) == 0
    assert "You give up the points of 01, 02, 03." in capsys.readouterr().out


def test_earlier_stations_keep_their_points(course: Course, capsys: pytest.CaptureFixture[str]) -> None:
    noted(course, 1)
    assert caught(capsys, "3")["forgone"] == ["02"]
    text = (course.root / "exercises" / "my_fsdp.py").read_text()
    assert text == caught_up("3", {"01"}) and given("01") not in text and given("02") in text


def test_points_of_a_station_that_is_not_the_learners_are_forgone(course: Course) -> None:
    grade = graded(course.exercise(2), course, caught_up("3", {"01"}))
    assert (grade.status, grade.score) == ("error", 0) and grade.finding is not None
    assert grade.finding.misconception == "caught-up" and "wrote station 02" in grade.finding.message


def test_points_that_were_forgone_once_are_forgone_again(
    course: Course, capsys: pytest.CaptureFixture[str]
) -> None:
    noted(course, 1)
    (course.root / "exercises" / "my_fsdp.py").write_text(f"{given('01')}\n")
    assert caught(capsys, "2")["forgone"] == ["01"]


def test_a_deleted_line_does_not_hide_code_from_catchup() -> None:
    text = caught_up("5", set())
    assert undeclared(text) == {}
    without = text.replace(f"{given('03')}\n", "").replace('"""Gather', '"""Bring').replace("  # ", "  # my ")
    assert list(undeclared(without)) == ["03"] and undeclared(without)["03"] > 1
    lines = [line for line in text.splitlines() if "catchup" not in line]
    assert list(undeclared("\n".join([*lines, "def own():", "    pass"]))) == ["02", "03", "04"]
    assert undeclared(stage(0)) == undeclared("def half(") == {}
    for path in Path(__file__).parent.glob("answers/right/*.py"):  # by people who had not seen the reference
        assert undeclared(of_another_make(path)) == {}


@pytest.mark.parametrize("number", ["1", "12", "99"])
def test_there_is_nothing_to_catch_up_with_before_the_first_station_and_electives(
    number: str, course: Course, capsys: pytest.CaptureFixture[str]
) -> None:
    for exercise in COURSE.exercises:
        if exercise.number == "12":
            shutil.copytree(exercise.folder, course.root / "exercises" / exercise.directory)
    assert main(["catchup", number]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_students_edition_has_nothing_to_catch_up_with(
    course: Course, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "SOURCE", course.root / "not_there.py")
    assert main(["catchup", "3"]) == 2
    assert "Ask your instructor for my_fsdp.py as it is before station 03" in capsys.readouterr().err
    assert (course.root / "exercises" / "my_fsdp.py").read_text() == stage(0)


# --- Empty promises ----------------------------------------------------------------------------------------

EMPTY = """
import torch.nn as nn


def replicate(model):
    return model


def fully_shard(module, **options):
    return module


def traffic(shapes, strategy, world_size, shards=1):
    return {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
"""


GATHERS_ONE = """            if ctx.expected and ctx.expected.popleft() is self and ctx.expected:
                ctx.expected[0].unshard()
"""
GATHERS_MORE = """            if ctx.expected and ctx.expected.popleft() is self:
                for group in list(ctx.expected)[:{}]:
                    group.unshard()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "way, ahead", [("on demand", 0), ("one ahead", 1), ("two ahead", 2), ("all at once", 99)]
)
def test_the_board_of_gathers_ahead_has_the_measured_figures(way: str, ahead: int, tmp_path: Path) -> None:
    assert GATHERS_ONE in stage(LAST)
    (tmp_path / "my_fsdp.py").write_text(stage(LAST).replace(GATHERS_ONE, GATHERS_MORE.format(ahead)))
    station = COURSE.exercise(9)
    ranks = Ranks(own_file(station, find_source(station, tmp_path)))
    alone, peak = machines.board_figures(ranks.run(probe_clock, 1, seed=0)["forward"][0])
    assert (alone, peak) == machines.BOARD[way]
    better = machines._board(alone, peak).partition("better than yours")[2]
    assert ("one ahead" in better) is (ahead > 1)


@pytest.mark.long
@pytest.mark.parametrize("number", [3, 5, 6, 8, 9, 10, 16])
def test_a_file_that_shards_nothing_gets_nothing(number: int) -> None:
    assert graded(COURSE.exercise(number), COURSE, EMPTY, Options(seed=SEED)).score == 0


def test_nothing_stays_whole_in_a_file_that_shards_nothing_and_that_is_no_merit() -> None:
    options = Options(seed=SEED, only="04.memory")
    assert graded(COURSE.exercise(4), COURSE, EMPTY, options).score == 0


# --- The map and the certificate ---------------------------------------------------------------------------


def test_the_map_of_a_file_names_the_definitions_in_each_section(
    course: Course, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "# --- 03 Fully sharded ---\n\n\nclass Unit:\n    pass\n\n\ndef half():\n    # TODO(04)\n    pass\n"
    (course.root / "exercises" / "my_fsdp.py").write_text(own)
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("03 "))
    assert lines[place + 1].strip() == "Unit 2, half (to do)"


def test_a_certificate_is_written_when_all_stations_but_the_side_quest_are_passed(course: Course) -> None:
    text = stage(LAST)
    (course.root / "exercises" / "my_fsdp.py").write_text(text)
    assert noted(course, 9, text=text) and write_certificate(course, Progress.load(course)) is None
    noted(course, 10, text=text)
    path = write_certificate(course, Progress.load(course))
    assert path is not None
    page = path.read_text()
    assert hashlib.sha256(text.encode()).hexdigest() in page and f"{len(text.splitlines())} lines" in page
    (course.root / "exercises" / "my_fsdp.py").write_text(text + "\n")
    assert write_certificate(course, Progress.load(course)) is None
