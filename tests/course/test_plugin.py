"""A run of pytest over a small course: outcomes, points, the page, and who is to blame."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hwfsdp

EXERCISE = '''
import pytest
from probes_of_tests import probe_answer
from hwfsdp.course.findings import Finding

pytestmark = pytest.mark.exercise("21", title="Doubling", file="doubling.py", may="sys")


@pytest.mark.points(2, ask="How much is twice three?")
@pytest.mark.parametrize("number", [1, 3])
def test_doubles(ranks, measured, number):
    """The answer is twice the number.

    More words.
    """
    found = ranks(1).ask(probe_answer, "answer", number=number)[0]
    measured("answer", str(found))
    if found != 2 * number:
        raise Finding("wrong-value", f"answer({number}) is {found}.", 2 * number, found)


@pytest.mark.points(1)
def test_of_zero(ranks):
    """The answer to zero is zero."""
    if ranks(1).ask(probe_answer, "answer", number=0) != [0]:
        raise Finding("wrong-value", "answer(0) is not 0.")


@pytest.mark.points(0)
def test_elsewhere(ranks):
    """It is skipped before it asks anything."""
    pytest.skip("there is nothing to test")


@pytest.mark.points(1)
def test_broken(ranks):
    """This test has a mistake of its own."""
    ranks(1).ask(probe_answer, "answer", number=0)[7]


@pytest.mark.points(1)
def test_large(ranks):
    """The answer to a large number comes to an end."""
    ranks(1).ask(probe_answer, "answer", number=99)


@pytest.mark.points(1)
def test_larger(ranks):
    """The answer to a larger number comes to an end."""
    ranks(1).ask(probe_answer, "answer", number=100)
'''
AGAIN = '''
import pytest
from probes_of_tests import probe_answer

pytestmark = pytest.mark.exercise("22", title="Again", file="doubling.py", may="sys")


@pytest.mark.points(1)
def test_of_one(ranks):
    """Another exercise asks the same file."""
    ranks(1).ask(probe_answer, "answer", number=2)
'''
LOST = AGAIN.replace("22", "23").replace("doubling.py", "lost.py")
WRONG = """import sys

def answer(number):
    print("asked for", number)
    if number > 9:
        sys.exit(3)
    return number * number
"""
PROBES = Path(__file__).with_name("probes_of_tests.py")


def run(root: Path, *options: str, inside: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Write the course, and run pytest on a wrong answer, `inside` another command."""
    files = {
        "exercises/pytest.ini": "[pytest]\naddopts = -p hwfsdp.course.plugin --tb=short\n",
        "exercises/21_doubling/test_doubling.py": EXERCISE,
        "exercises/21_doubling/probes_of_tests.py": PROBES.read_text(),
        "exercises/22_again/test_again.py": AGAIN,
        "exercises/23_lost/test_lost.py": LOST,
        "theirs/doubling.py": WRONG,
        "unread.json": '{"lost.py": "its bytes are not UTF-8"}',
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "exercises", "--submission", str(root / "theirs")]
    command += ["--seed", "5", "--unread", "unread.json", *options]
    path = os.pathsep.join([str(Path(hwfsdp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    how: Any = {"cwd": root, "env": os.environ | {"PYTHONPATH": path}, "stdin": subprocess.DEVNULL}
    return subprocess.run([*inside, *command], capture_output=True, text=True, **how)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    root = tmp_path_factory.mktemp("course")
    ended = run(root, "--outcomes", "outcomes.json")
    return ended, json.loads((root / "outcomes.json").read_text())


def by_name(ran: Any) -> dict[str, dict[str, Any]]:
    return {test["test"]: test for test in ran[1]["tests"]}


def test_the_outcomes_name_the_seed_the_file_and_each_test_once(ran: Any) -> None:
    assert ran[1]["seed"] == 5 and list(ran[1]["file"]) == ["doubling.py"]
    own = [f"21.{name}" for name in ("doubles", "of_zero", "elsewhere", "broken", "large", "larger")]
    assert list(by_name(ran)) == [*own, "22.of_one", "23.of_one"]


def test_one_wrong_variant_fails_the_test_and_both_are_measured(ran: Any) -> None:
    doubles = by_name(ran)["21.doubles"]
    assert (doubles["status"], doubles["misconception"]) == ("failed", "wrong-value")
    assert (doubles["expected"], doubles["actual"], doubles["points"]) == (2, 1, 2)
    assert doubles["sentence"] == "The answer is twice the number." and doubles["measured"] == {"answer": "9"}
    assert by_name(ran)["21.of_zero"]["status"] == "passed"
    assert by_name(ran)["21.elsewhere"]["status"] == "skipped"


def test_an_exception_of_a_test_is_the_instructors_error(ran: Any) -> None:
    broken = by_name(ran)["21.broken"]
    assert (broken["status"], broken["misconception"]) == ("error", None)
    assert "IndexError" in broken["message"]
    assert ran[0].returncode == 3 and "not your mistake" in ran[0].stdout


def test_a_rank_that_leaves_ends_the_runs_of_its_exercise_once(ran: Any) -> None:
    large, larger = by_name(ran)["21.large"], by_name(ran)["21.larger"]
    assert (large["status"], large["misconception"]) == ("failed", "left-early")
    assert larger["status"] == "skipped" and "21.large ended the run of doubling.py" in larger["message"]
    assert by_name(ran)["22.of_one"]["status"] == "passed"


def test_a_file_that_was_handed_in_but_not_read_is_not_said_to_be_missing(ran: Any) -> None:
    assert by_name(ran)["23.of_one"]["message"] == "lost.py was not read: its bytes are not UTF-8."


def test_the_page_asks_one_question_and_shows_what_ranks_printed(ran: Any) -> None:
    assert ran[0].stdout.count("→") == 1 and "rank 0 | asked for 3" in ran[0].stdout
    assert "--seed 5" in ran[0].stdout


@pytest.mark.long
def test_on_a_terminal_a_line_says_how_far_the_runs_are_until_the_page_is_there(tmp_path: Path) -> None:
    on_a_terminal = sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])"
    shown = run(tmp_path, "--page", inside=on_a_terminal).stdout
    lines, page = shown.rsplit("\033[K", 1)
    assert "loading torch" in lines and re.search(r"\d of \d runs are over", lines)
    assert "21 Doubling" in page and "runs are over" not in page
