"""Grade a class of four with the command, as an instructor types it. Then write its journal in other formats."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hwfsdp.course import holes
from hwfsdp.course.lab.bugs import CHOSEN, read_bugs
from hwfsdp.course.lab.seals import read_key
from hwfsdp.course.manifest import HOMEWORK, OWN_FILE, PACKAGE, find_course, read_homework
from hwfsdp.course.submission import solution, starter

COURSE = find_course(Path(__file__))
ROWS, RINGS = COURSE.exercise(1), COURSE.exercise(2)
ALL = ROWS.points + RINGS.points
BUG = read_bugs(COURSE)[0]
SOLVED, BEGIN = solution(RINGS), "    pieces[rank] = part\n"
# rank 0 leaves out a collective that the others enter
LEAVES_OUT = "    if not rank:\n        return\n    dist.recv(torch.empty_like(part), 0)\n"
HANGING = SOLVED.replace(BEGIN, BEGIN + LEAVES_OUT)
HALF = starter(ROWS).replace(
    'raise NotImplementedError("TODO(01): padded_rows")', "return -(-n // world_size)"
)
HALF_CAPSTONE = holes.blank(
    read_homework(COURSE).solution_path.read_text(), "FSDPModule._backward_prefetch", HOMEWORK
)


def answered(evidence: str, *questions: str) -> str:
    """Answer these questions about the first bug of the lab, correctly."""
    key = read_key(COURSE)[BUG.directory]
    letters = [f'{question} = "{BUG.letter(question, key[question])}"' for question in questions]
    return "\n".join([f"[{BUG.directory}]", f'evidence = "{evidence}"', *letters])


def hand_in(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a course of two stations, capstone and lab, and a class."""
    root = tmp_path_factory.mktemp("door")
    given = root / "course" / "exercises"
    for name in (ROWS.directory, RINGS.directory, HOMEWORK, "lab"):
        shutil.copytree(COURSE.root / "exercises" / name, given / name)
    hand_in(given, {OWN_FILE: starter(ROWS)})
    capstone, lab = f"{HOMEWORK}/hw_fsdp.py", "lab/answers.toml"
    assert len({SOLVED, HANGING, HALF, starter(ROWS)}) == 4
    hand_in(
        root / "class" / "ada",
        {
            OWN_FILE: SOLVED,
            capstone: read_homework(COURSE).solution_path.read_text(),
            lab: answered("0", *CHOSEN),
        },
    )
    shutil.copytree(given, root / "class" / "bob")
    hand_in(
        root / "class" / "eve",
        {OWN_FILE: HALF, capstone: HALF_CAPSTONE, lab: answered("0", CHOSEN[0])},
    )
    hand_in(root / "class" / "zoe", {OWN_FILE: HANGING})
    (root / "tmp").mkdir()
    return root


def grade(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `hwfsdp grade` in the folder of the course."""
    environ = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "TMPDIR": str(here / "tmp")}
    return subprocess.run(
        [sys.executable, "-m", "hwfsdp", "grade", *words],
        cwd=here / "course",
        env=environ,
        capture_output=True,
        text=True,
    )


def graded(here: Path) -> int:
    """Count the lines in the journal for finished checks and exercises."""
    lines = map(json.loads, (here / "book.journal").read_text().splitlines())
    return sum(line["kind"] in ("check", "exercise") for line in lines)


@pytest.fixture(scope="module")
def book(here: Path) -> dict[str, dict[str, Any]]:
    """Return the first run's result for each submission. Its journal is `book.journal`."""
    found = grade(here, "../class", "--jobs", "2", "--seed", "3", "--format", "json", "--out", "../book")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "not graded" not in found.stderr and "Error" not in found.stderr
    made = json.loads((here / "book").read_text())["submissions"]
    (here / "book").rename(here / "book.json")
    return {each["name"]: each for each in made}


def checks_of(exercise: dict[str, Any]) -> dict[str, str | None]:
    return {check["id"]: check["misconception"] for check in exercise["checks"] if check["misconception"]}


@pytest.mark.long
def test_solved_exercises_get_their_points_and_untouched_ones_none_and_no_error(
    book: dict[str, dict[str, Any]],
) -> None:
    assert [(name, each["errors"]) for name, each in book.items()] == [
        (name, []) for name in ("ada", "bob", "eve", "zoe")
    ]
    assert {name: each["max_score"] for name, each in book.items()} == dict.fromkeys(book, ALL)
    assert (book["ada"]["score"], book["bob"]["score"]) == (ALL, 0)
    assert 0 < book["eve"]["score"] < ROWS.points
    assert "not-written" in checks_of(book["eve"]["exercises"][0]).values()
    assert [each["status"] for each in book["bob"]["exercises"]] == ["not_started"] * 2


@pytest.mark.long
def test_capstone_and_lab_are_graded_beside_the_exercises(book: dict[str, dict[str, Any]]) -> None:
    homework = read_homework(COURSE)
    told = {
        name: {extra: (found["status"], found["score"]) for extra, found in each["extra"].items()}
        for name, each in book.items()
    }
    assert told["ada"] == {HOMEWORK: ("passed", homework.points), "lab": ("failed", 3)}
    assert book["ada"]["extra"][HOMEWORK]["bonus"] == homework.bonus
    assert told["bob"] == {HOMEWORK: ("not_started", 0), "lab": ("not_started", 0)}
    assert told["eve"][HOMEWORK][0] == "failed" and told["eve"][HOMEWORK][1] < homework.points
    assert told["eve"]["lab"] == ("failed", 2)
    assert "not-written" in checks_of(book["eve"]["extra"][HOMEWORK]).values()


@pytest.mark.long
def test_a_hang_names_its_collective_and_loses_that_exercise_alone(
    here: Path, book: dict[str, dict[str, Any]]
) -> None:
    rows, rings = book["zoe"]["exercises"]
    assert (rows["score"], rings["score"], rings["status"]) == (ROWS.points, 0, "error")
    (told,) = [check["message"] for check in rings["checks"] if check["message"] and check["passed"] is False]
    assert "waiting in recv" in told and RINGS.file_name in told and "ring_all_gather" in told
    assert "repeated" not in told  # ranks that wait for each other are sure to hang, even in a crowd
    assert not list((here / "tmp").glob("hwfsdp*"))


# --- From the journal --------------------------------------------------------------------------------------

TOTALS = {"ada": ALL, "bob": 0, "zoe": ROWS.points}  # the tests above check eve's points


@pytest.mark.long
def test_another_format_is_written_from_the_journal_and_nothing_is_graded_again(
    here: Path, book: dict[str, dict[str, Any]]
) -> None:
    expected, before = {**TOTALS, "eve": book["eve"]["score"]}, graded(here)
    again = ("../class", "--jobs", "2", "--seed", "3", "--resume")
    for words in (("--format", "csv", "--out", "../book"), ("--format", "gradescope", "--out", "../book/")):
        out = here / "book"
        found = grade(here, *again, *words)
        assert found.returncode == 0, found.stderr
        assert graded(here) == before
        if out.is_dir():
            told = {each.parent.name: json.loads(each.read_text())["score"] for each in out.glob("*/*")}
            shutil.rmtree(out)
        else:
            told = {row["name"]: float(row["total"]) for row in csv.DictReader(io.StringIO(out.read_text()))}
            out.unlink()
        assert told == expected


@pytest.mark.long
def test_a_submission_of_untouched_starters_earns_nothing_and_is_no_error(here: Path) -> None:
    found = grade(here, "../class/bob")
    assert (found.returncode, found.stderr.count("Error")) == (1, 0)
    lines = found.stdout.splitlines()
    assert lines[-1] == f"0 of {ALL} points" and "  lab: 0 of 42, apart" in lines
    assert len([line for line in lines if line.endswith("not started")]) == 2
