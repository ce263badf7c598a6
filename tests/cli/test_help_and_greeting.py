"""`hwfsdp` alone names the next step; its help lists every verb, and each verb calls its function with all its options."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from commands import run_python

from hwfsdp.cli import build_parser, main
from hwfsdp.course.exercises import Course, find_course
from hwfsdp.course.progress import Progress
from hwfsdp.course.stages import starter_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    """Put two stations, an elective, the homework and the lab into the current folder."""
    for name in ("0[12]_*", "12_*", "homework", "lab"):
        for folder in (ROOT / "exercises").glob(name):
            shutil.copytree(folder, tmp_path / "exercises" / folder.name)
    shutil.copytree(ROOT / "solutions", tmp_path / "solutions")
    monkeypatch.chdir(tmp_path)
    found = find_course(tmp_path)
    for exercise in found.exercises:
        if begun := starter_of(ROOT, exercise.target):
            exercise.path.write_text(begun)
    return found


def passed(course: Course, number: int) -> None:
    exercise = course.exercise(str(number))
    text = (ROOT / "solutions" / exercise.target).read_text()
    exercise.path.write_text(text)
    Progress.load(course).note({check.name: "passed" for check in exercise.checks}, text)


def greeted(capsys: pytest.CaptureFixture[str]) -> str:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith("hwfsdp 0.") and "hwfsdp --help" in text
    assert text.count("\n") <= 12 and max(map(len, text.splitlines())) <= 80
    return text


def test_the_greeting_names_the_next_step_after_the_steps_already_done(
    course: Course, capsys: pytest.CaptureFixture[str]
) -> None:
    (course.root / ".hwfsdp").mkdir()
    (course.root / ".hwfsdp" / "progress.json").write_text("[1]")  # which counts as no progress
    text = greeted(capsys)
    assert "\n  hwfsdp demo\n" in text and "hwfsdp check" not in text

    (course.root / "runs" / "demo").mkdir(parents=True)
    (course.root / "runs" / "demo" / "summary.json").touch()
    text = greeted(capsys)
    assert text.index("exercises/README.md") < text.index("exercises/01_rows/README.md")
    assert "hwfsdp check 1\n" in text and "hwfsdp demo" not in text

    for number in (1, 12):
        passed(course, number)
    text = greeted(capsys)
    assert "2 of 3 exercises passed" in text and "hwfsdp check 2\n" in text
    assert "exercises/README.md" not in text
    main(["status"])
    following = re.search(r"Next: (\S+)", capsys.readouterr().out)
    assert following and f"  {following[1]}\n" in text

    assert main(["reset", "1"]) == 0  # its file is the starter again
    capsys.readouterr()
    assert "hwfsdp check 1\n" in greeted(capsys)

    for number in (1, 2):
        passed(course, number)
    text = greeted(capsys)
    assert "exercises/homework/README.md" in text
    assert text.index("hwfsdp check homework") < text.index("hwfsdp lab")


def test_the_greeting_does_not_import_torch(course: Course) -> None:
    passed(course, 1)
    code = "import sys; from hwfsdp.cli import main; status = main([]); sys.exit(status or 'torch' in sys.modules)"
    assert run_python("-c", code).returncode == 0


def test_help_has_every_verb_below_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out.partition("\nverbs:\n")[2]
    headings = re.findall(r"^  (\w+):$", listed, re.MULTILINE)
    assert headings == ["begin", "learn", "see", "train", "teach"]
    verbs = re.findall(r"^    (\w+) +\w", listed, re.MULTILINE)
    choices = next(list(a.choices) for a in build_parser()._actions if a.dest == "verb" and a.choices)
    assert verbs == choices and "VERB" not in listed.partition("hwfsdp VERB")[0]


def parsers_below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser, and the parsers of its verbs and their actions."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers_below(each)


VERBS = {
    "course DIR": "course.commands.write_course",
    "check 1 --seed 3 --submission DIR": "course.commands.check",
    "hint 1": "course.commands.hint",
    "watch --json": "course.commands.watch",
    "catchup 2": "course.commands.catch_up",
    "grade DIR --only 01,02": "course.gradebook.command",
    "release DIR": "course.release.release",
    "checkpoint inspect .": "checkpoint.convert.show_inspection",
    "checkpoint verify .": "checkpoint.convert.verify_all",
    "checkpoint convert . DIR --to dcp": "checkpoint.convert.convert_to",
}


def test_a_verb_calls_its_function_with_all_its_options() -> None:
    for argv, function in VERBS.items():
        with mock.patch(f"hwfsdp.{function}", autospec=True, return_value=0) as called:
            assert main(argv.split()) == 0
        called.assert_called_once()
        assert called.call_args.kwargs.get("as_json", False) is ("--json" in argv)


def test_every_help_fits_a_terminal_of_80_columns_and_describes_its_verb(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parsers = list(parsers_below(build_parser()))
    assert {"hwfsdp", "hwfsdp trace export", "hwfsdp checkpoint"} <= {parser.prog for parser in parsers}
    helps = [parser.format_help() for parser in parsers]
    assert [line for text in helps for line in text.splitlines() if len(line) > 80] == []
    assert [parser.prog for parser in parsers if not parser.description] == []
