"""`hwfsdp grade`: a class with broken, hanging and malicious files is graded to its end, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from classes import FILES, RIGHT, SMALL, command, graded, write_class, zipped

from hwfsdp import UsageError
from hwfsdp.course.gradebook import grade
from hwfsdp.course.pool import Options
from hwfsdp.course.results import Gradebook

OfClass = tuple[Path, subprocess.CompletedProcess[str]]  # the gradebook, and what the command said
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends processes with their parent")


def outcome(out: Path, key: str) -> Any:
    return json.loads((out / "outcomes" / f"{key}.json").read_text())


def statuses(out: Path, key: str) -> dict[str, str]:
    return {test["test"]: test["status"] for test in outcome(out, key)["tests"]}


def running(words: bytes) -> list[int]:
    """Return the processes whose command line has these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def gone(words: bytes) -> bool:
    """True if no process has these words, now or soon."""
    until = time.monotonic() + 20
    while running(words) and time.monotonic() < until:
        time.sleep(0.1)
    return not running(words)


@pytest.fixture(scope="module")
def of_class(tmp_path_factory: pytest.TempPathFactory) -> OfClass:
    """The gradebook of a class in which nearly everyone does something else, and what the command said."""
    folder = tmp_path_factory.mktemp("grading")
    write_class(folder / "class", *(name for name in FILES if name != "hangs"))
    (folder / "temporary").mkdir()
    (folder / "class" / "zip.zip").write_bytes(zipped(FILES["ada"]))
    (folder / "class" / "damaged.zip").write_bytes(zipped(FILES["ada"])[:60])
    options = ["--jobs", 3, "--format", "csv,json,gradescope"]
    said = graded(folder / "class", "--out", folder / "out", *options, temporary=folder / "temporary")
    return folder / "out", said


POINTS = {  # student → points of 9, and words that the instructor reads
    "ada": (9, ""),
    "bob": (0, ""),
    "breaks the judge": (5, "02.counts: the test itself failed"),
    "damaged": (0, "a zip without its end"),
    "empty": (0, "no file of any exercise"),
    "kills": (3, "it ended by SIGKILL"),
    "leaves": (9, ""),
    "two": (4, "there are 2 files for my_fsdp.py"),
    "zip": (9, ""),
}


def test_each_submission_gets_its_own_points(of_class: OfClass) -> None:
    out, said = of_class
    for student, (points, words) in POINTS.items():
        (line,) = [line for line in said.stdout.splitlines() if line.startswith(f"{student} ")]
        found = line.removeprefix(student).split()[:3]
        assert found == [str(points), "of", "9"] and words in line, said.stderr
    assert {path.name for path in out.iterdir()} >= {"grades.csv", "grades.json", "gradescope"}
    assert len({outcome(out, path.stem)["settings"]["seed"] for path in (out / "outcomes").iterdir()}) == 1
    assert len((out / "grades.csv").read_text().splitlines()) == 1 + len(POINTS)


@linux
def test_a_grading_leaves_no_process_of_a_submission_and_no_temporary_files(of_class: OfClass) -> None:
    assert not running(b"61616")
    left = [path.name for path in (of_class[0].parent / "temporary").iterdir()]
    assert not [name for name in left if not name.startswith("torchinductor")]  # torch's own cache


@pytest.mark.long
def test_when_the_clock_runs_out_earlier_tests_keep_their_points(tmp_path: Path) -> None:
    write_class(tmp_path / "class", "hangs")
    said = graded(tmp_path / "class", "--out", tmp_path / "out", "--minutes", 0.5)
    assert "the clock of 0.5 minutes ran out" in said.stdout
    expected = {"01.starts": "passed", "01.runs": "not run", "02.counts": "not run"}
    assert statuses(tmp_path / "out", "hangs") == expected


def test_an_exception_of_a_test_is_the_instructors_error(of_class: OfClass) -> None:
    out, said = of_class
    found = outcome(out, "breaks_the_judge")
    assert statuses(out, "breaks_the_judge")["02.counts"] == "error" and said.returncode == 1
    assert len(found["errors"]) == 1 and not found["problems"]
    assert "ZeroDivisionError" in (out / "logs" / "breaks_the_judge.txt").read_text()
    shown = (out / "gradescope" / "breaks_the_judge" / "results.json").read_text()
    assert "a mistake of the grader, not yours" in shown and "see " not in shown


@pytest.mark.long
def test_an_interrupted_grading_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_class(tmp_path / "class", "ada", "bob", "two")
    monkeypatch.chdir(tmp_path)
    out = Path("out")
    assert graded(tmp_path / "class", "--out", out, "--secret", __file__).returncode == 0
    before = {name: (out / "outcomes" / f"{name}.json").stat().st_mtime_ns for name in ("ada", "bob", "two")}
    (out / "outcomes" / "two.json").unlink()
    (out / "outcomes" / "two.new").write_text("{")
    (tmp_path / "class" / "bob" / "exercises" / "my_fsdp.py").write_text(RIGHT)
    again = graded(tmp_path / "class", "--out", out)
    assert again.returncode == 2 and "--resume" in again.stderr
    again = graded(tmp_path / "class", "--out", out, "--resume", "--secret", __file__)
    assert again.returncode == 0, again.stderr
    assert (out / "outcomes" / "ada.json").stat().st_mtime_ns == before["ada"]
    assert statuses(out, "bob")["01.starts"] == "passed"
    assert outcome(out, "ada")["seed"] == 1234


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command that grades a file without an end."""
    write_class(tmp_path / "class", "ada", "hangs")
    (tmp_path / "class" / "hangs" / "my_fsdp.py").write_text(
        '"""Mine."""\nimport subprocess\nsubprocess.run(["sleep", "62626"])\n'
    )
    process = subprocess.Popen(
        command(tmp_path / "class", "--out", tmp_path / "out"),
        stderr=subprocess.PIPE,
        # a shell that runs the tests in the background lets them, and what they start, ignore this signal
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    until = time.monotonic() + 100
    while (
        not (running(b"62626") and (tmp_path / "out/outcomes/ada.json").exists()) and time.monotonic() < until
    ):
        time.sleep(0.1)
    yield process
    process.kill()
    process.communicate()


@linux
@pytest.mark.long
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_is_ended_leaves_no_process(
    hanging: subprocess.Popen[bytes], by: signal.Signals, tmp_path: Path
) -> None:
    assert running(b"62626")
    os.kill(hanging.pid, by)
    _, said = hanging.communicate(timeout=60)
    assert gone(b"62626") and gone(str(tmp_path).encode())
    assert statuses(tmp_path / "out", "ada")["01.runs"] == "passed"
    if by != signal.SIGKILL:
        assert hanging.returncode == 130 and b"1 of 2 submissions graded" in said


def test_an_instructor_chooses_exercises(tmp_path: Path) -> None:
    both = ["01_first", "02_second"]
    for options, folders in [({}, both), ({"upto": 1}, both[:1]), ({"only": ("2", "01_f")}, both)]:
        assert [each.name for each in Options(SMALL, tmp_path, **options).folders] == folders
    for folder, only, words in [
        (tmp_path, ("02", "99"), "none of 99 in"),
        (tmp_path / "none", (), "does not exist"),
        (tmp_path, (), "which is empty"),
    ]:
        with pytest.raises(UsageError, match=words):
            grade([folder], Options(SMALL, tmp_path / "out", only=only))


def test_each_score_is_counted_in_the_column_that_names_it() -> None:
    for most in (1, 5, 33, 100):
        for points in range(most + 1):
            book = SimpleNamespace(most=most, results=[points], score=lambda result: result)
            [name] = [name for name, count in Gradebook.columns(book) if count]
            begin, _, end = name.partition("–")
            assert int(begin) <= points <= int(end or begin)
