"""The student's commands, on a small course: what they read, what they write, and what they say."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run_python

from hwfsdp.course import commands, stages
from hwfsdp.course.exercises import Course, find_course, read_course
from hwfsdp.course.findings import Outcome
from hwfsdp.course.progress import Progress, remember
from hwfsdp.errors import UsageError

REFERENCE = """# --- 01 Rows ---
def rows():
    # @01
    return 1
    # @00
    # |     raise NotImplementedError("TODO(01): rows")
    # @end
# @03


# --- 03 Naive FSDP ---
def shard():
    return 3
# @end
"""
ELECTIVE = """def save():
    # @14
    return 14
    # @00
    # |     raise NotImplementedError("TODO(14): save")
    # @end
"""
PAGE = """# A page

<details><summary>Hint 1: a question</summary>
What
is it?
</details>
<details><summary>Hint 2: steps</summary>
1. One
   step.
2. Another.
</details>
<details><summary>Answers</summary>
42
</details>
"""
MARKERS = '''import pytest
raise SystemExit("this file was run")
pytestmark = [pytest.mark.exercise("{number}", title="{title}", file="{file}")]
@pytest.mark.points(2, ask="Why?")
@pytest.mark.parametrize("n", [1, 2])
def test_one(n):
    """It is one.

    At length."""
@pytest.mark.points(1, ask="How?")
def test_two():
    """It is two."""
def helper(): ...
'''


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    """A course of stations 01, 02, 03 and 10, an elective, and the homework."""
    names = ("01_rows", "02_ring", "03_naive_fsdp", "10_backward", "14_checkpoints", "homework")
    for name in names:
        number, _, topic = name.partition("_")
        folder = tmp_path / "exercises" / name
        folder.mkdir(parents=True)
        file = {"14": "checkpoints.py", "homework": "hw_fsdp.py"}.get(number, "my_fsdp.py")
        markers = MARKERS.format(number=number, title=topic.capitalize() or "Homework", file=file)
        (folder / f"test_{topic or 'hw_fsdp'}.py").write_text(markers)
        (folder / "README.md").write_text(PAGE)
    solutions = {"my_fsdp.py": REFERENCE, "14_checkpoints/checkpoints.py": ELECTIVE}
    for path, text in solutions.items():
        (tmp_path / "solutions" / path).parent.mkdir(exist_ok=True)
        (tmp_path / "solutions" / path).write_text(text)
    stages.write(tmp_path)
    monkeypatch.chdir(tmp_path / "exercises")
    return find_course()


Say = Callable[..., "tuple[int, str]"]


@pytest.fixture
def say(course: Course, capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command; return its exit status and what it printed."""

    def run(command: Callable[..., int], *arguments: object) -> tuple[int, str]:
        return command(*arguments), capsys.readouterr().out

    return run


def passed(course: Course, *numbers: str) -> dict[str, str]:
    return {check.name: "passed" for number in numbers for check in course.exercise(number).checks}


def write(course: Course, text: str = "x = 1\n") -> None:
    (course.root / "exercises" / "my_fsdp.py").write_text(text)


# --- Reading -------------------------------------------------------------------------------------------------


def test_an_exercise_is_read_from_its_markers_without_running_its_tests(course: Course) -> None:
    station = course.exercise("3")
    assert (station.number, station.title, station.points) == ("03", "Naive_fsdp", 3)
    checks = [(check.name, check.sentence) for check in station.checks]
    assert checks == [("03.one", "It is one."), ("03.two", "It is two.")]
    assert course.exercise("exercises/14_checkpoints").target == Path("14_checkpoints/checkpoints.py")
    assert [each.number for each in course.exercises] == ["01", "02", "03", "10", "14", "homework"]


REFUSED: dict[str, Callable[[Course], object]] = {  # words of the error
    "--submission .*nowhere: expected a folder; got nothing": lambda course: commands.check(
        "3", course.root / "nowhere", None, False
    ),
    "hwfsdp hint 03_naive_fsdp": lambda course: course.exercise("03_naiv_fsdp", "hint"),
    "See: hwfsdp list": lambda course: course.exercise("4", "hint"),
    "expected a file with a starter": lambda course: commands.reset_exercise("homework", False),
    "a station from 02": lambda course: commands.catch_up("14", False),
    "Ask your instructor": lambda course: (course.root / "solutions" / "my_fsdp.py").unlink()
    or commands.catch_up("3", False),
}


def test_a_command_that_cannot_be_run_is_refused_with_a_remedy(course: Course) -> None:
    for words, run in REFUSED.items():
        with pytest.raises(UsageError, match=words):
            run(course)
    path = course.root / "exercises" / "03_naive_fsdp" / "test_naive_fsdp.py"
    path.write_text(path.read_text().replace("points(2,", "points(2 * N,"))
    with pytest.raises(UsageError, match="exercises/03_naive_fsdp/test_naive_fsdp.py: expected"):
        read_course(course.root)


def test_the_commands_that_run_no_tests_load_neither_torch_nor_pytest(course: Course) -> None:
    script = """import sys
from hwfsdp.course import commands
commands.list_exercises(False), commands.status(False), commands.hint("3", False), commands.check("3", None, None, False)
print(*sorted({"torch", "pytest", "numpy", "jinja2"} & set(sys.modules)))"""
    assert run_python("-c", script).stdout.splitlines()[-1] == ""


# --- Commands ------------------------------------------------------------------------------------------------


def test_the_list_counts_points_by_number(say: Say) -> None:
    found, text = say(commands.list_exercises, False)
    assert found == 0 and "15 points for the exercises with numbers" in text
    row = json.loads(say(commands.list_exercises, True)[1])[2]
    assert row == {"exercise": "03", "title": "Naive_fsdp", "points": 3, "file": "exercises/my_fsdp.py"}


def test_hints_come_one_more_each_call_and_leave_out_other_answers(say: Say) -> None:
    assert "What is it?" in say(commands.hint, "3", False)[1]
    found = json.loads(say(commands.hint, "3", True)[1])
    assert found == {"exercise": "03", "hints": ["What is it?", "1. One step.\n2. Another."], "left": 0}
    assert "This is the last hint" in say(commands.hint, "3", False)[1]


def test_a_file_goes_from_not_started_to_passed_and_stale(course: Course) -> None:
    progress, station = Progress.load(course), course.exercise("3")
    assert progress.standing(station).status == "not started"
    write(course)
    assert progress.standing(station).status == "not checked yet"
    progress.note({"03.one": "passed"}, "x = 1\n")
    assert progress.standing(station)[1:] == ("not checked yet", 2, False)
    progress.note({"03.two": "failed"}, "x = 1\n")
    assert Progress.load(course).standing(station)[1:] == ("failed", 2, False)
    progress.note({"03.two": "passed"}, "x = 1\n", {"03 bytes": "4"})
    assert Progress.load(course).standing(station)[1:] == ("passed", 3, False)
    write(course, "x = 2\n")
    assert progress.standing(station)[1:] == ("passed", 3, True)
    progress.note({"03.one": "failed"}, "x = 2\n")  # `pytest -k one`, after a change
    assert progress.standing(station)[1:] == ("failed", 1, True)
    progress.note({"03.one": "passed", "03.two": "passed"}, "x = 2\n")
    assert progress.standing(station)[1:] == ("passed", 3, False)


def test_the_status_shows_points_the_map_of_the_file_and_the_next_page(course: Course, say: Say) -> None:
    text = "# --- 01 Rows ---\ndef rows():\n    return 1\n# --- 03 Naive ---\ndef f(): TODO(3)\n# TODO(03)\n"
    write(course, text)
    Progress.load(course).note(passed(course, "01"), text)
    _, said = say(commands.status, False)
    assert "rows 2" in said and "f 1" in said and " 3 of 15 points" in said
    assert said.endswith("Next: 02_ring/README.md\n")


def test_reset_writes_the_starter_and_keeps_the_file(course: Course, say: Say) -> None:
    begun = (course.root / "exercises" / "my_fsdp.py").read_text()
    write(course)
    assert json.loads(say(commands.reset_exercise, "3", True)[1])["kept"].endswith("my_fsdp.py.1")
    assert (course.root / "exercises" / "my_fsdp.py").read_text() == begun
    assert (course.root / "exercises" / "my_fsdp.py.1").read_text() == "x = 1\n"
    assert json.loads(say(commands.reset_exercise, "14", True)[1]) == {"exercise": "14", "kept": None}


def test_catchup_gives_the_stage_before_and_names_what_is_not_the_students_own(
    course: Course, say: Say
) -> None:
    write(course)
    Progress.load(course).note(passed(course, "01"), "x = 1\n")
    found = json.loads(say(commands.catch_up, "10", True)[1])
    assert found["forgone"] == ["02", "03"]
    text = (course.root / "exercises" / "my_fsdp.py").read_text()
    assert "return 1" in text and "def shard" in text and "# @" not in text
    by_number = {each.exercise.number: each.status for each in Progress.load(course).standings()}
    assert (by_number["02"], by_number["01"]) == ("written by hwfsdp catchup", "passed")


def test_a_check_runs_its_own_tests_first_and_the_side_quest_only_by_itself(course: Course) -> None:
    def folders(number: str) -> list[str]:
        found = commands.arguments(course, course.exercise(number))
        return [Path(path).name for path in found[4:]]

    assert folders("10") == ["10_backward", "03_naive_fsdp", "01_rows"]
    assert (folders("2"), folders("14")) == (["02_ring"], ["14_checkpoints"])


def test_an_untouched_starter_needs_no_run(say: Say) -> None:
    found, text = say(commands.check, "3", None, None, False)
    assert (found, text) == (1, "my_fsdp.py is not started.\nRead 03_naive_fsdp/README.md. Then write.\n")


def test_watch_sees_each_save_once_and_chooses_the_first_station_that_is_left(course: Course) -> None:
    station, looks = course.exercise("3"), list[int]()

    def save_at_the_second_look(_: float) -> None:
        looks.append(1)
        if len(looks) == 2:
            write(course)
        assert len(looks) < 4

    saves = commands.saved([station], save_at_the_second_look)
    assert next(saves) is station
    with pytest.raises(AssertionError):
        next(saves)
    Progress.load(course).note(passed(course, "01", "02"), "x = 1\n")
    assert commands.current(course, course.exercise("1")).number == "03"


def test_the_certificate_needs_all_stations_but_the_side_quest_with_this_file(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = list[Path]()
    monkeypatch.setattr(commands, "_beside_the_reference", lambda file: drawn.append(file) or {})
    write(course)
    progress = Progress.load(course)
    progress.note(passed(course, "01", "03"), "x = 1\n")
    assert commands.write_certificate(progress) is None
    progress.note(passed(course, "10"), "x = 1\n", {"bytes of <a> step": "4"})
    page = commands.write_certificate(progress)
    assert page is not None and "bytes of &lt;a&gt; step" in page.read_text()
    assert "optional, not done" in page.read_text() and "0 of" not in page.read_text()
    assert commands.write_certificate(progress) == page and len(drawn) == 1
    progress.note(passed(course, "02"), "x = 1\n")
    commands.write_certificate(progress)
    assert "optional, not done" not in page.read_text() and len(drawn) == 2
    write(course, "x = 2\n")
    assert commands.write_certificate(progress) is None


def test_a_run_of_pytest_is_remembered_for_the_file_that_it_judged(course: Course) -> None:
    write(course)
    judged = {"03": (course.exercise("3").path, "x = 1\n"), "14": (course.exercise("14").path, "")}
    ran = [Outcome("03.one", "", 2, status="passed", measured={"bytes": "4"}), Outcome("03.two", "", 1)]
    remember([*ran, Outcome("14.one", "", 2, status="error")], judged)
    progress = Progress.load(course)
    assert [(name, status) for name, (status, _) in progress.outcomes["03"].items()] == [("03.one", "passed")]
    assert ("14" in progress.outcomes, progress.measured) == (False, {"bytes": "4"})


def test_a_run_for_json_prints_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    with commands._silent():
        os.write(1, b"from a rank")
    print("{}", flush=True)
    assert capfd.readouterr().out == "{}\n"
