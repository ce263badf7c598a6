"""The lab: symptoms of its scripts, evidence of their runs, and what counts as an answer.

Oracles: the repaired scripts and the key in `solutions/`, and closed forms for bytes.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run_python

from hwfsdp.course import lab, lab_runs
from hwfsdp.course.findings import Finding
from hwfsdp.course.lab import CHOSEN, QUESTIONS, Bug
from hwfsdp.course.lab_runs import Run, measure, run_script
from hwfsdp.errors import UsageError
from hwfsdp.observe.eventlog import EventLog

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "exercises" / "lab"
BUGS = lab.read_bugs(FOLDER)
KEY = tomllib.loads((ROOT / "solutions" / "lab" / "key.toml").read_text())
every_bug = pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
LAYER = 128 * 128 * 4  # bytes


def made_up(bug: Bug) -> str:
    """Evidence that needs no run."""
    return "bfloat16" if bug.kind == "name" else f"1{bug.number}" + (".25" if bug.kind == "ratio" else "")


def sealed(bug: Bug) -> Bug:
    """The bug with seals of made-up evidence."""
    value = made_up(bug)
    seals = {question: bug.sealed(question, value, KEY[bug.name][question]) for question in CHOSEN}
    return replace(bug, seals={"script": bug.digest, "evidence": bug.sealed("evidence", value), **seals})


def right(bug: Bug, **other: str) -> dict[str, str]:
    """The right answers, except for some."""
    return {"evidence": made_up(bug), **KEY[bug.name], **other}


# --- Runs ----------------------------------------------------------------------------------------------------


@functools.cache
def ran(script: Path) -> Run:
    return run_script(script)


@pytest.mark.long
@every_bug
def test_a_broken_script_shows_the_sealed_evidence_and_the_mended_one_does_not(
    bug: Bug,
) -> None:
    value, run = measure(bug, ran(bug.script)), ran(ROOT / "solutions" / "lab" / bug.name / "train.py")
    assert bug.holds(value) and bug.digest == bug.seals["script"]
    assert not any(run.raised) and not run.hung
    try:
        assert measure(bug, run) != value
    except UsageError:
        pass  # nothing to measure
    for question in CHOSEN:
        assert bug.seals[question] == bug.sealed(question, value, KEY[bug.name][question])


@pytest.mark.long
def test_bytes_in_evidence_equal_closed_forms() -> None:
    values = {bug.name: measure(bug, ran(bug.script)) for bug in BUGS if bug.kind == "whole"}
    block = 64 * 128 + 128 + 128 * 64 + 64
    head = 2 * 64 + 2  # one row of weight and bias, padded to the two ranks
    assert int(values["04_out_of_memory"]) == 4 * (8 * block + head)
    assert int(values["05_memory_of_accumulation"]) == int(values["09_memory_after_logging"]) == 6 * LAYER
    assert int(values["11_drifting_apart"]) == 4 * (2 * 256 * 32 + 32 * 32 + 32)
    image, body = 32 * 64 + 64 + 64 * 64 + 64, 24 * 64 + 64 + 64 * 64 + 64
    assert int(values["10_mixed_tensors"]) == 4 * (64 * 16 + 16 + image + body)


@pytest.mark.long
def test_a_run_that_hangs_is_told_and_leaves_a_trace_that_ends_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FOLDER)
    assert lab_runs.run("2", tmp_path, False) == 0
    said = capsys.readouterr().out
    assert "its trace does where the ranks hang" in said and "Collectives of rank 0" not in said
    last = EventLog.load(tmp_path / "trace.json").collectives()[-1]
    assert (last.rank, last.op, last.owner) == (1, "all_gather", "Sequential")
    assert (tmp_path / "player.html").exists()


def test_a_run_shows_what_rank_0_moved_and_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FOLDER)
    assert lab_runs.run("10", tmp_path, False) == 0
    said = capsys.readouterr().out
    assert "got mixed torch.Tensor and DTensor" in said and "Most bytes that rank 0 held at once" in said
    assert {path.name for path in tmp_path.iterdir()} >= {"trace.json", "player.html", "timeline.png"}


def test_the_mended_script_differs_in_few_lines() -> None:
    for bug in BUGS:
        given = bug.script.read_text().splitlines()
        fixed = (ROOT / "solutions" / "lab" / bug.name / "train.py").read_text().splitlines()
        changed = [line for line in difflib.ndiff(given, fixed) if line[0] in "+-" and line[2:].strip()]
        assert 0 < len(changed) <= 10


# --- What counts ---------------------------------------------------------------------------------------------


def test_right_answers_count_and_each_wrong_choice_is_refuted() -> None:
    for bug in BUGS:
        bug = sealed(bug)
        assert lab.is_solved(bug, right(bug))
        assert {status for status, _ in lab.verdicts(bug, right(bug)).values()} == {"passed"}
        for question in CHOSEN:
            for letter, if_so in bug.choices[question].items():
                if letter != KEY[bug.name][question]:
                    with pytest.raises(Finding) as told:
                        lab.judge(bug, question, right(bug, **{question: letter.lower()}))
                    assert if_so in told.value.message and told.value.actual == letter
                    assert "{" not in told.value.message


def test_no_choice_counts_before_the_evidence_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in BUGS:
        bug = sealed(bug)
        monkeypatch.setattr(lab_runs, "measured", made_up)
        assert {status for status, _ in lab.verdicts(bug, right(bug, evidence="")).values()} == {"skipped"}
        for wrong in ("7.77", "12345678", "float64", "?"):
            found = lab.verdicts(bug, right(bug, evidence=wrong))
            assert [status for status, _ in found.values()] == ["failed", "skipped", "skipped"]
            assert made_up(bug) not in found["evidence"][1].replace(wrong, "").removeprefix(bug.number)


def test_neither_other_evidence_of_a_machine_nor_a_changed_script_is_blamed_on_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = sealed(BUGS[0])
    monkeypatch.setattr(lab_runs, "measured", lambda bug: "123")
    status, said = lab.verdicts(bug, right(bug, evidence="42"))["evidence"]
    assert status == "error" and "this machine measures 123" in said
    monkeypatch.undo()
    bug = replace(bug, folder=tmp_path)
    bug.script.write_text("raise SystemExit('a student was here')\n")
    assert "is not the given script" in lab.verdicts(bug, right(bug, evidence="42"))["evidence"][1]
    assert lab.is_solved(bug, right(bug))  # whose evidence is from the given script


def test_a_letter_may_stand_in_parentheses_or_before_a_dot_and_other_answers_are_refused() -> None:
    bug = sealed(BUGS[0])
    for form in ("{}", "{}.", "({})", " {})", "{}:"):
        for letter in (right(bug)["cause"], right(bug)["cause"].lower()):
            lab.judge(bug, "cause", right(bug, cause=form.format(letter)))
    for typed in ["Z", "AB", "1", "__import__('os')._exit(1)"]:
        with pytest.raises(Finding, match="is not one of the letters A, B, C, D, E"):
            lab.judge(bug, "cause", right(bug, cause=typed))


EVIDENCE = {  # what was measured → what is right, and what is wrong
    ("whole", "65536"): (["65,536", "65_536 B", "65536 bytes", "65536.0"], ["65537"]),
    ("whole", "0"): (["-0"], []),
    ("ratio", "0.25"): (["1/4", "0.254", "0,25"], ["0.26", "-0.25"]),
    ("ratio", "1.21"): (["1.21×", "1.21 times"], []),
    ("name", "bfloat16"): (["torch.bfloat16", "BF16"], ["float16"]),
}


def test_evidence_is_read_as_people_write_it() -> None:
    for (kind, measured), (rights, wrongs) in EVIDENCE.items():
        bug = replace(BUGS[0], kind=kind, seals={"evidence": BUGS[0].sealed("evidence", measured)})
        assert {lab.evidence_in(bug, typed) for typed in rights} == {measured}
        assert not [typed for typed in wrongs if lab.evidence_in(bug, typed)]
    for typed in ["many", "64 KiB", "1e999999999", "1/0", "nan", "inf", "0x10", "²"]:
        with pytest.raises(ValueError, match="such as 65536"):
            lab.evidence_in(replace(BUGS[0], kind="whole"), typed)


BAD_FILES = {
    "binary": b"\xff\xfe\x00\x01" * 9,
    "huge": b"# " + b"x" * 70_000,
    "not TOML": b"[01_flat_loss\ncause = 3",
    "nested too deeply": b"a = " + b"[" * 20_000,
    "a table that is none": b"01_flat_loss = 3",
    "a mistyped table": b'[01_flat_los]\ncause = "B"',
    "a mistyped key": b'[01_flat_loss]\ncauses = "B"',
    "a list": b'[01_flat_loss]\ncause = ["A", "B"]',
    "a truth": b"[01_flat_loss]\nevidence = true",
    "a date": b"[01_flat_loss]\nevidence = 2020-01-01",
    "a long text": b'[01_flat_loss]\nevidence = "' + b"9" * 200 + b'"',
    "a long number": b"[01_flat_loss]\nevidence = " + b"9" * 4_000,
}


def test_a_file_that_holds_no_answers_is_an_error_in_one_line(tmp_path: Path) -> None:
    for content in BAD_FILES.values():
        (tmp_path / "answers.toml").write_bytes(content)
        with pytest.raises(UsageError, match="expected") as told:
            lab.read_answers(lab.find_answers(tmp_path), BUGS)
        assert "\n" not in str(told.value) and len(str(told.value)) < 500


def test_a_file_that_holds_no_answers_is_the_students_mistake(tmp_path: Path) -> None:
    (tmp_path / "answers.toml").write_bytes(BAD_FILES["a mistyped table"])
    command = ["-m", "pytest", "-q", "exercises/lab", "--submission", tmp_path, "-k", "01_flat"]
    done = run_python(*command, cwd=ROOT)
    assert " answers.toml: expected" in done.stdout, done.stdout
    assert "itself failed" not in done.stdout and done.returncode == 1


# --- The files -----------------------------------------------------------------------------------------------


def test_each_bug_has_a_page_with_all_its_choices_and_empty_answers() -> None:
    empty = tomllib.loads((FOLDER / "answers.toml").read_text())
    assert empty == {bug.name: dict.fromkeys(QUESTIONS, "") for bug in BUGS}
    for bug in BUGS:
        assert bug.page.startswith(f"## Lab {bug.number} · ") and bug.page.count(f"/{bug.name}/") == 1
        assert re.findall(r"^- ([A-Z])\. ", bug.page, re.M) == [a for q in CHOSEN for a in bug.choices[q]]


def test_seals_are_made_from_the_key_and_the_evidence() -> None:
    made = tomllib.loads(lab.seals(ROOT, {bug.name: made_up(bug) for bug in BUGS}))
    assert made == {bug.name: sealed(bug).seals for bug in BUGS}


# --- The command ---------------------------------------------------------------------------------------------


def test_the_command_lists_shows_and_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(FOLDER, tmp_path / "exercises" / "lab")
    monkeypatch.chdir(tmp_path)
    bug = sealed(BUGS[0])
    seals = "".join(f'{name} = "{seal}"\n' for name, seal in bug.seals.items())
    (tmp_path / "exercises" / "lab" / "seals.toml").write_text(f"[{bug.name}]\n{seals}")
    assert lab.list_bugs(False) == 0 and f"0 of {len(BUGS)} solved" in capsys.readouterr().out
    assert lab.show("3", False) == 0 and BUGS[2].title in capsys.readouterr().out
    lines = [f'{question} = "{said}"' for question, said in right(bug).items()]
    (tmp_path / "exercises" / "lab" / "answers.toml").write_text("\n".join([f"[{bug.name}]", *lines]))
    assert lab.check("1", None, False) == 0 and "3 of 3 points" in capsys.readouterr().out
    assert lab.check(None, None, False) == 1 and "3 of 42 points" in capsys.readouterr().out
    assert lab.list_bugs(True) == 0
    assert [each["solved"] for each in json.loads(capsys.readouterr().out)] == [True] + [False] * 13
