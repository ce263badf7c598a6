"""`hwfsdp grade` as an instructor runs it."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from classes import FILES, FIRST, SECOND, hand_in, small_course

from hwfsdp.cli import main
from hwfsdp.course.confinement import Limit
from hwfsdp.course.gradebook import command
from hwfsdp.course.gradebook.grading import ClassRun, Progress
from hwfsdp.course.gradebook.progress_bar import ProgressBar
from hwfsdp.course.gradebook.results import Result
from hwfsdp.course.manifest import PACKAGE
from hwfsdp.course.submission import solution

WRONG = solution(FIRST).replace("    return -(-n // world_size)\n", "    return n // world_size\n")
SECRET = "correct-horse-battery-staple"
LIMITS = [Limit("time", True), Limit("no network", False, "only root can")]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder of a course of two exercises the current folder."""
    small_course(tmp_path / "course")
    monkeypatch.chdir(tmp_path / "course")
    return tmp_path / "course"


@pytest.mark.long
def test_a_class_is_graded_with_hidden_inputs_and_the_secret_is_written_nowhere(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handed = tmp_path / "class"
    hand_in(handed, "ada", first=solution(FIRST), second=solution(SECOND))
    hand_in(tmp_path / "packed", "bob", first=WRONG)
    shutil.make_archive(str(handed / "bob"), "zip", tmp_path / "packed")
    (tmp_path / "secret").write_text(SECRET)
    out, reports = tmp_path / "out" / "grades.json", tmp_path / "reports"
    words = [
        "--secret",
        str(tmp_path / "secret"),
        "--jobs",
        "2",
        "--out",
        str(out),
        "--reports",
        str(reports),
    ]
    assert main(["grade", str(handed), *words]) == 0, capsys.readouterr().err
    found = {each["name"]: each for each in json.loads(out.read_text())["submissions"]}
    assert found["ada"]["score"] == found["ada"]["max_score"] == FIRST.points + SECOND.points
    failed = found["bob"]["exercises"][0]["checks"][0]
    assert found["bob"]["score"] < FIRST.points and failed["misconception"] == "floor-instead-of-ceil"
    page = (reports / "bob.html").read_text()
    assert failed["message"] and failed["message"] not in page and "floor-instead-of-ceil" in page
    written = [path for folder in (out.parent, reports) for path in folder.rglob("*") if path.is_file()]
    assert out.with_name("grades.json.journal") in written and len(written) == 4
    assert not any(SECRET in path.read_text() for path in written)
    assert SECRET not in str(capsys.readouterr())


class FakeRun(ClassRun):
    """A grading run of a class with made-up results."""

    made: list[Result] = []
    stop = False
    graded: list[str] = []  # names of submissions that runs were to grade
    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def results(self) -> Iterator[Result]:
        self.graded += self.names
        self.meanwhile()
        for result in self.made:
            self.journal.submission(result)
            yield result
        if self.stop:
            raise KeyboardInterrupt


@pytest.fixture
def fake(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[FakeRun]:
    for name in ("ada", "bob"):
        hand_in(tmp_path / "class", name, first="x")
    exercises = [
        {"exercise": n, "score": 1, "max_score": 5, "status": "failed", "checks": [], "seconds": 0}
        for n in FILES
    ]
    monkeypatch.setattr(
        FakeRun, "made", [Result(n, tuple(exercises), submitted="2026-01-02T00:00Z") for n in ("ada", "bob")]
    )
    monkeypatch.setattr(FakeRun, "graded", [])
    monkeypatch.setattr("hwfsdp.course.gradebook.command.ClassRun", FakeRun)
    return FakeRun


def test_an_interrupted_run_says_how_to_go_on(
    fake: type[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fake, "stop", True)
    out = tmp_path / "grades.csv"
    assert main(["grade", str(tmp_path / "class"), "--out", str(out)]) == 130
    error = capsys.readouterr().err
    assert "2 of 2 submissions" in error and "--resume" in error and f"{out}.journal" in error
    assert not out.exists() and out.with_name("grades.csv.journal").exists()


def test_a_failure_of_the_grader_is_told_as_its_own_fault(
    fake: type[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exercises = [{**each, "score": 0, "status": "not_started"} for each in fake.made[0].exercises]
    fault = "capstone was not graded: AttributeError: it is gone"
    monkeypatch.setattr(fake, "made", [Result("ada", tuple(exercises), errors=(fault,))])
    assert main(["grade", str(tmp_path / "class" / "ada")]) == 1
    out, error = capsys.readouterr()
    assert f"hwfsdp: ada: {fault}\n" in error and "Give the folder" not in error
    assert out.endswith("0 of 10 points\n")


def test_a_part_with_points_of_its_own_is_shown_for_a_class(
    fake: type[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"capstone": {"score": 7, "max_score": 10, "bonus": 2, "max_bonus": 3, "status": "failed"}}
    extra["lab"] = {"score": 0, "max_score": 42, "status": "not_started"}
    monkeypatch.setattr(fake, "made", [Result("ada", fake.made[0].exercises, extra), fake.made[1]])
    assert main(["grade", str(tmp_path / "class")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ada  2 of 10  capstone: 7 of 10 and 2 of 3 bonus points",
        "bob  2 of 10",
    ]


def test_the_gradebook_shows_raw_points_penalty_and_total(
    fake: type[FakeRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = ["--deadline", "2026-01-01T00:00+00:00", "--late", "25%/day"]
    assert main(["grade", str(tmp_path / "class"), "--format", "csv", *late]) == 0
    row = next(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert (row["raw"], row["penalty"], row["total"], row["late_hours"]) == ("2", "0.5", "1.5", "24.00")
    assert main(["grade", str(tmp_path / "class"), *late]) == 0
    assert "ada  1.5 of 10  24.0 h late, 2 earned" in capsys.readouterr().out


def test_with_a_deadline_a_time_that_nobody_knows_is_an_error(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(tmp_path / "eve.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("notes.txt"))
    words = ["grade", str(tmp_path / "eve.tar"), "--format", "csv"]
    for late, told in (([], False), (["--deadline", "2020-01-01T00:00Z"], True)):
        assert main([*words, *late]) == 1
        said = capsys.readouterr()
        assert ("hwfsdp: eve: time unknown" in said.err) is told
        row = next(csv.DictReader(io.StringIO(said.out)))
        assert row["submitted_by"] == "grading" and (float(row["late_hours"]) > 0) is told


UNUSABLE = {
    "nothing": [],
    "resume without out": ["CLASS", "--resume"],
    "late without deadline": ["CLASS", "--late", "1/h"],
    "no rule": ["CLASS", "--deadline", "2026-01-01", "--late", "lots"],
    "no time": ["CLASS", "--deadline", "soon"],
    "no format": ["CLASS", "--out", "grades"],
    "no secret": ["CLASS", "--secret", "nowhere"],
    "a short secret": ["CLASS", "--secret", "short"],
    "no jobs": ["CLASS", "--jobs", "0"],
    "endless": ["CLASS", "--timeout", "inf"],
    "no table": ["CLASS", "--submitted", "nowhere"],
    "one file for many": ["CLASS", "--format", "gradescope"],
    "one page for many": ["CLASS", "--format", "github"],
    "one results.json for many": ["CLASS", "--format", "gradescope", "--out", "results.json"],
    "a folder for one file": ["CLASS", "--format", "csv", "--out", "folder/"],
    "out below a file": ["CLASS", "--out", "short/grades.csv"],
    "out where nobody writes": ["CLASS", "--out", "/proc/none/grades.csv"],
    "a long name": ["CLASS", "--out", f"{'x' * 255}.csv"],
    "reports that are a file": ["CLASS", "--reports", "short"],
    "reports where nobody writes": ["CLASS", "--reports", "/proc/none"],
    "times of nobody": ["CLASS", "--submitted", "times"],
    "no isolation": ["CLASS", "--require-isolation"],
    "nowhere to write": ["--make-workflow", "/proc/none/x.yml"],
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_impossible_request_is_one_line_and_status_2(
    name: str,
    fake: type[FakeRun],
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (here / "short").write_text("abc")
    (here / "times").write_text("mallory,2026-01-01")
    monkeypatch.setattr(command, "limits_in_force", lambda: LIMITS)
    words = [str(tmp_path / "class") if word == "CLASS" else word for word in UNUSABLE[name]]
    try:
        status = main(["grade", *words])
    except SystemExit as unusable:  # argparse
        status = int(str(unusable.code))
    error = capsys.readouterr().err.strip().splitlines()
    assert status == 2 and error[-1].startswith("hwfsdp")
    assert len(error) == 1 or error[0].startswith("usage:")
    assert not fake.graded and not list(here.glob("*.journal"))


# --- Before and after grading ------------------------------------------------------------------------------


def test_the_gradebook_is_written_before_reports_and_their_error_says_how_to_go_on(
    fake: type[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, reports = tmp_path / "grades.csv", tmp_path / "reports"

    def spoil() -> None:
        reports.rmdir()
        reports.write_text("no folder any more")

    monkeypatch.setattr(fake, "meanwhile", staticmethod(spoil))
    assert main(["grade", str(tmp_path / "class"), "--out", str(out), "--reports", str(reports)]) == 2
    error = capsys.readouterr().err
    assert "reports" in error and "--resume" in error and f"{out}.journal" in error
    assert out.read_text().count("\n") == 3


def test_a_gradebook_that_cannot_be_written_after_all_is_not_lost(
    fake: type[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "grades.csv"
    monkeypatch.setattr(fake, "meanwhile", staticmethod(out.mkdir))
    assert main(["grade", str(tmp_path / "class"), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "--resume" in error and f"{out}.journal" in error


def test_files_of_the_grader_among_submissions_are_no_students(fake: type[FakeRun], tmp_path: Path) -> None:
    folder = tmp_path / "class"
    (folder / "secret").write_text(SECRET)
    (folder / "times.csv").write_text("ada,2026-01-01T00:00Z")
    words = ["--secret", str(folder / "secret"), "--submitted", str(folder / "times.csv")]
    words += ["--out", str(folder / "grades.csv"), "--reports", str(folder / "reports")]
    for _ in range(3):
        assert main(["grade", str(folder), *words]) == 0
    assert (folder / "grades.csv.journal.old").exists() and (folder / "reports" / "ada.html").exists()
    assert fake.graded == ["ada", "bob"] * 3


def test_a_second_copy_of_the_package_is_refused(
    fake: type[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "same").mkdir()
    (tmp_path / "same" / "hwfsdp").symlink_to(PACKAGE)
    (tmp_path / "notes" / "hwfsdp").mkdir(parents=True)
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path / "same"), str(tmp_path / "notes")])
    assert main(["grade", str(tmp_path / "class")]) == 0
    (tmp_path / "notes" / "hwfsdp" / "__init__.py").write_text("")
    capsys.readouterr()
    fake.graded.clear()
    assert main(["grade", str(tmp_path / "class")]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "notes" / "hwfsdp") in error and str(PACKAGE) in error and not fake.graded


def test_limits_that_are_not_in_force_are_told(
    fake: type[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "limits_in_force", lambda: LIMITS)
    for words in (["--json"], ["--format", "json"]):
        main(["grade", str(tmp_path / "class" / "ada"), *words])
        said = capsys.readouterr()
        assert said.err.splitlines() == [
            "hwfsdp: limits of submissions that are not in force: no network (only root can)"
        ]
        assert json.loads(said.out)["limits"] == [limit._asdict() for limit in LIMITS]


def test_with_all_limits_in_force_nothing_is_told(
    fake: type[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "limits_in_force", lambda: LIMITS[:1])
    assert main(["grade", str(tmp_path / "class"), "--require-isolation"]) == 0
    assert not capsys.readouterr().err


# --- The progress bar --------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_progress_and_a_file_does_not() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        bar = ProgressBar(stream)
        bar(Progress(3, 12, 7, "ada"))
        bar.clear()
    assert "3/12 submissions, 7 exercises" in terminal.getvalue() and terminal.getvalue().endswith("\r\033[K")
    assert file.getvalue() == ""


def test_progress_is_one_line_whatever_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert len(ProgressBar(Terminal()).line(Progress(3, 12, 7, "a" * 200))) < 40
