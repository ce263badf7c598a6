"""The student commands, run as a student runs them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hwfsdp.cli import main
from hwfsdp.course import submission
from hwfsdp.course.checking import current, saved
from hwfsdp.course.commands import wanted_exercise
from hwfsdp.course.manifest import find_course
from hwfsdp.course.progress import Progress
from hwfsdp.course.report import Style, shown
from hwfsdp.course.run import patience
from hwfsdp.course.submission import solution, starter
from hwfsdp.course.verdict import Grade

REPOSITORY = find_course(Path(__file__))
FLOOR = ("    return -(-n // world_size)\n", "    return n // world_size\n")


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a student's copy of the course the current folder."""
    shutil.copytree(
        REPOSITORY.root / "exercises", tmp_path / "exercises", ignore=shutil.ignore_patterns("*.png")
    )
    monkeypatch.chdir(tmp_path)
    for exercise in REPOSITORY.exercises:
        (tmp_path / "exercises" / exercise.target).write_text(starter(exercise))
    return tmp_path


def file_of(course: Path, number: int = 1) -> Path:
    return course / "exercises" / REPOSITORY.exercise(number).target


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    status = main(argv)
    return status, capsys.readouterr().out


def said_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    status, out = said(capsys, *argv, "--json")
    return status, json.loads(out)


def test_list_names_every_exercise(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = said_json(capsys, "list")
    assert status == 0
    assert [row["exercise"] for row in rows] == [e.number for e in REPOSITORY.exercises]
    assert all((course / row["file"]).exists() and row["points"] > 0 for row in rows)
    assert [row["exercise"] for row in rows if row["holes"]] == [str(number) for number in range(11, 16)]
    status, text = said(capsys, "list")
    assert status == 0 and all(e.title in text for e in REPOSITORY.exercises)
    assert "hwfsdp check capstone" in text and "Lab, 14 scripts" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_course_that_may_only_be_read_gives_hints_and_verdicts_all_the_same(
    course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (course / ".hwfsdp").write_text("in the way of the folder")
    for line, said_then in ("hint 1", "Hint 1 of"), ("check 1", "Not started"):
        main(line.split())
        out, err = capsys.readouterr()
        assert said_then in out
        assert err.count("\n") == 1 and f"progress is not kept in {course / '.hwfsdp'}: " in err, line


def test_status_says_where_the_next_exercise_is(
    course: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path("exercises", REPOSITORY.exercise(1).directory, "README.md")
    assert said(capsys, "status")[1].endswith(f"\nNext: {place}\n")
    monkeypatch.chdir(course / "exercises" / REPOSITORY.exercise(2).directory)
    assert said(capsys, "status")[1].endswith(f"\nNext: {course / place}\n")


def without_torch(course: Path, line: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must not load torch. If it does, the exit status is 9."""
    code = "import sys; from hwfsdp.cli import main; status = main(sys.argv[1:]); sys.exit(9 if 'torch' in sys.modules else status)"
    command = [sys.executable, "-c", code, *line.split()]
    return subprocess.run(command, cwd=course, capture_output=True, text=True)


@pytest.mark.parametrize("line", ["list", "status", "hint 1", "hint capstone", "reset 1", "lab", "lab 1"])
def test_a_command_that_needs_no_ranks_does_not_load_torch(course: Path, line: str) -> None:
    ran = without_torch(course, line)
    assert (ran.returncode, ran.stderr) == (0, "") and ran.stdout


@pytest.mark.parametrize("line", ["check 99", "watch 99", "lab check 99", "lab 99 --run"])
def test_an_unknown_number_is_refused_before_torch_is_loaded(course: Path, line: str) -> None:
    ran = without_torch(course, line)
    assert (ran.returncode, ran.stdout) == (2, "") and "99" in ran.stderr


@pytest.mark.parametrize(
    "line",
    [
        "check 1 --submission nope",
        "simulate --device nope",
        "trace show nope",
        "trace diff nope nope",
        "trace export nope --to html",
        "checkpoint inspect nope",
        "checkpoint verify nope",
        "checkpoint convert nope new --to dcp",
        "swap nope",
    ],
)
def test_an_unknown_device_or_path_is_refused_before_torch_is_loaded(course: Path, line: str) -> None:
    ran = without_torch(course, line)
    assert (ran.returncode, ran.stdout) == (2, "") and "nope" in ran.stderr and ran.stderr.count("\n") == 1


def test_an_untouched_starter_is_checked_without_torch(course: Path) -> None:
    file_of(course, 12).unlink()
    for line in ("check 1", "check 12", "check capstone --json"):
        ran = without_torch(course, line)
        assert (ran.returncode, ran.stderr) == (1, "") and ran.stdout, line
    assert len(json.loads(ran.stdout)["checks"]) > 10


@pytest.mark.parametrize("name", ["2", "02", "02_ring", "exercises/02_ring", "exercises/02_ring/"])
def test_an_exercise_has_a_number_and_a_folder(course: Path, name: str) -> None:
    assert find_course().exercise(name).number == "02"


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("chek 1", "check"),
        ("check rows", "check 01_rows"),
        ("hint exercises/01_row", "hint 01_rows"),
        ("lab chek", "lab check"),
        ("lab check 01_flat_los", "lab check 01_flat_loss"),
    ],
)
def test_a_mistyped_verb_or_name_gets_the_likely_one(
    course: Path, line: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert err.endswith(f". Did you mean: hwfsdp {meant}\n") and err.count("\n") == 1


def test_an_unknown_number_is_said_once(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "15"]) == 2
    assert (
        capsys.readouterr().err
        == "hwfsdp: bug of the lab: expected a number, 1 to 14; got '15'. See: hwfsdp lab\n"
    )


def test_an_error_is_wrapped_for_a_terminal_alone(
    course: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["hint", "99"]) == 2
    line = capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["hint", "99"]) == 2
    wrapped = capsys.readouterr().err
    assert line.count("\n") == 1 and max(map(len, wrapped.splitlines())) <= 40
    assert wrapped.split() == line.split()


def test_an_exercise_that_is_not_started_names_its_readme(course: Path) -> None:
    exercise = find_course().exercise(1)
    text = shown(Grade(exercise, [], "not_started"), exercise.path, Style())
    assert f"Read {Path('exercises', exercise.directory, 'README.md')}" in text


def test_a_student_goes_from_not_started_to_passed(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said_json(capsys, "check", "1")[1]["status"] == "not_started"
    right = solution(REPOSITORY.exercise(1))
    file_of(course).write_text(right.replace(*FLOOR))
    status, found = said_json(capsys, "check", "1")
    assert status == 1 and found["status"] == "failed" and (found["score"], found["max_score"]) == (0, 5)
    first = found["checks"][0]
    assert (first["misconception"], first["passed"], first["expected"], first["actual"]) == (
        "floor-instead-of-ceil",
        False,
        1,
        0,
    )
    file_of(course).write_text(right)
    status, text = said(capsys, "check", "01")
    assert status == 0 and "5 of 5 points" in text and "\033" not in text
    assert said_json(capsys, "status")[1]["score"] == 5
    file_of(course).write_text(right + "\n")
    assert said_json(capsys, "status")[1]["exercises"][0]["stale"] is True


def test_a_verdict_has_the_keys_that_other_programs_read(
    course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = said_json(capsys, "check", "1")[1]
    assert list(found) == ["exercise", "score", "max_score", "status", "checks", "seconds"]
    keys = [
        *("id", "passed", "points", "max_points", "misconception"),
        *("message", "expected", "actual", "dependency"),
    ]
    assert all(list(check) == keys for check in found["checks"])
    assert sum(check["max_points"] for check in found["checks"]) == found["max_score"]


def test_hints_come_one_more_each_call(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = [len(said_json(capsys, "hint", "1")[1]["hints"]) for _ in range(4)]
    assert counts == [1, 2, 3, 3]
    assert "This is the last hint" in said(capsys, "hint", "1")[1]


@pytest.mark.parametrize("number", ["1", "capstone"])
def test_reset_puts_the_starter_back_and_keeps_the_file(
    number: str, course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (course / "solutions").symlink_to(REPOSITORY.root / "solutions")
    file = wanted_exercise(find_course(), number).path
    for content in ("first", "second"):
        file.write_text(content)
        assert said(capsys, "reset", number)[0] == 0
        assert file.read_text() == starter(wanted_exercise(REPOSITORY, number))
    kept = sorted(path.read_text() for path in file.parent.glob("*.py.*"))
    assert kept == ["first", "second"]
    assert said_json(capsys, "reset", number)[1]["kept"] is None


def test_the_homework_of_an_installed_package_is_reset_to_the_file_that_the_package_carries(
    course: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["reset", "capstone"]) == 2 and "Ask your instructor" in capsys.readouterr().err
    monkeypatch.setattr(submission, "CARRIED", REPOSITORY.root)
    homework = wanted_exercise(find_course(), "capstone")
    homework.path.unlink()
    assert said(capsys, "reset", "capstone")[0] == 0
    assert homework.path.read_text() == (REPOSITORY.root / "exercises" / homework.target).read_text()


UNUSABLE = {
    "no such exercise": ["check", "99"],
    "no number": ["check", "one"],
    "negative": ["hint", "-1"],
    "no folder": ["check", "1", "--submission", "nowhere"],
    "empty folder": ["grade", "empty"],
    "a file": ["grade", "exercises/01_rows/exercise.toml"],
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_arguments_are_one_line_and_status_2(
    name: str, course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (course / "empty").mkdir()
    try:
        status = main(UNUSABLE[name])
    except SystemExit as unusable:  # argparse
        status = int(str(unusable.code))
    error = capsys.readouterr().err.strip().splitlines()
    assert status == 2 and error[-1].startswith("hwfsdp")
    assert len(error) == 1 or error[0].startswith("usage:")


def test_a_file_that_cannot_be_read_is_one_line_and_status_2(
    course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file_of(course).write_bytes(b"\xff\xfe")
    assert main(["check", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_damaged_progress_file_is_as_good_as_none(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (course / ".hwfsdp").mkdir()
    (course / ".hwfsdp" / "progress.json").write_text('{"hints": 3}')
    assert said_json(capsys, "status")[1]["score"] == 0
    assert said_json(capsys, "hint", "1")[1]["left"] == 2


def test_watch_sees_each_save_once(course: Path) -> None:
    exercise = find_course(course).exercise(1)
    script = iter(["write", "same", "replace", "delete", "write", "stop"])

    def act(seconds: float) -> None:
        path, action = exercise.path, next(script)
        if action == "write":
            path.write_text(path.read_text() + "# more\n" if path.exists() else "# new, and longer\n" * 9)
        elif action == "replace":
            draft = path.with_suffix(".draft")
            draft.write_text(path.read_text() + "# more\n")
            draft.replace(path)
        elif action == "delete":
            path.unlink()
        elif action == "stop":
            raise StopWatching

    seen = []
    with pytest.raises(StopWatching):
        for found in saved([exercise], act):
            seen.append(found.number)
    assert seen == ["01", "01", "01"]  # written, replaced, and there again


def test_watch_sees_a_save_while_the_first_check_runs(course: Path) -> None:
    exercise = find_course(course).exercise(1)
    saves = saved([exercise], lambda seconds: pytest.fail("nothing was seen"))
    file_of(course).write_text("x = 1\n")
    assert next(saves) is exercise


def test_watch_chooses_the_station_after_the_last_one_that_passed(course: Path) -> None:
    found = find_course(course)
    progress = Progress(found)
    watched = []
    for number in ("", "01", "03", "10"):  # 02 is a side quest
        progress.grades[number] = {"status": "passed"}
        progress.save()
        watched.append(current(found, found.exercise(5)).number)
    assert watched == ["01", "02", "04", "16"]
    assert current(found, found.exercise(12)).number == "12"


class StopWatching(Exception):
    """An exception that ends an endless loop."""


@pytest.fixture
def watching(course: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "hwfsdp", "watch", "1"]
    with subprocess.Popen(command, cwd=course, stdout=subprocess.PIPE, text=True) as process:
        limit = threading.Timer(120 * patience(), process.kill)  # in case the command hangs
        limit.start()
        yield process
        limit.cancel()
        process.kill()


@pytest.mark.long
def test_watch_checks_again_when_a_file_is_saved(course: Path, watching: subprocess.Popen[str]) -> None:
    assert watching.stdout is not None

    def read_until(words: str) -> None:
        assert watching.stdout is not None
        assert any(words in line for line in watching.stdout), f"watch ended before it said {words!r}"

    read_until("Not started")
    file_of(course).write_text(solution(REPOSITORY.exercise(1)).replace(*FLOOR))
    read_until("floor-instead-of-ceil")
    file_of(course).write_text(solution(REPOSITORY.exercise(1)))
    read_until("5 of 5 points")


@pytest.mark.long
def test_with_mine_earlier_exercises_are_the_learners_own(
    course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = solution(REPOSITORY.exercise(12))
    file_of(course, 12).write_text(right.replace("chunk_extent(", "-chunk_extent("))
    file_of(course, 14).write_text(solution(REPOSITORY.exercise(14)))
    assert said_json(capsys, "check", "14")[1]["status"] == "passed"
    assert said_json(capsys, "check", "14", "--mine")[1]["status"] != "passed"
    file_of(course, 12).write_text(right)
    assert said_json(capsys, "check", "14", "--mine")[1]["status"] == "passed"
