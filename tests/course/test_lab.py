"""The broken lab: scripts that show their symptoms, measured evidence, and the grades of answers.

Oracles: the fixed scripts and the key in `solutions/`, and closed forms for bytes.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from hwfsdp import cli
from hwfsdp.course.lab import evidence, kept, report, workshop
from hwfsdp.course.lab.answers import Unreadable, agrees
from hwfsdp.course.lab.bugs import CHOSEN, LETTERS, Bug, read_bugs
from hwfsdp.course.lab.grading import LabCheck, LabGrade, grade_lab, refute
from hwfsdp.course.lab.running import Run
from hwfsdp.course.lab.seals import FILE, read_key, read_seals, seal, written
from hwfsdp.course.manifest import Course, find_course
from hwfsdp.course.report import Style
from hwfsdp.observe.eventlog import EventLog

COURSE = find_course(Path(__file__))
BUGS = read_bugs(COURSE)
KEY = read_key(COURSE)
every_bug = pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.directory)


@pytest.fixture(scope="module")
def broken() -> dict[str, Run]:
    """Run each script as it is given."""
    return workshop.run_all(BUGS, {bug.directory: bug.script for bug in BUGS})


@pytest.fixture(scope="module")
def mended() -> dict[str, Run]:
    """Run each script of the solutions."""
    return workshop.run_all(BUGS, workshop.mended_scripts(COURSE))


@pytest.fixture(scope="module")
def values(broken: dict[str, Run]) -> dict[str, str]:
    return {bug.directory: evidence.measure(bug, broken[bug.directory]) for bug in BUGS}


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    """Make a copy of the learners' lab, without measurements and without the key."""
    root = tmp_path_factory.mktemp("course")
    shutil.copytree(COURSE.root / "exercises" / "lab", root / "exercises" / "lab")
    return Course(root, COURSE.exercises)


MADE_UP = {bug.directory: str(1000 + number) for number, bug in enumerate(BUGS)}


@pytest.fixture(scope="module")
def sealed(course: Course, tmp_path_factory: pytest.TempPathFactory) -> Course:
    """Make a course with made-up evidence, so that no script has to run."""
    root = tmp_path_factory.mktemp("sealed")
    shutil.copytree(course.root, root, dirs_exist_ok=True)
    sealed = [seal(bug, MADE_UP[bug.directory], KEY[bug.directory]) for bug in BUGS]
    (root / "exercises" / "lab" / FILE).write_text(written(sealed))
    return Course(root, COURSE.exercises)


# --- Symptoms ------------------------------------------------------------------------------------------------


def numbers(run: Run, pattern: str) -> list[float]:
    return [float(text.replace(",", "")) for text in re.findall(pattern, run.printed)]


def peak(run: Run, kind: str) -> int:
    assert run.log is not None
    return run.log.peak_bytes_by_kind()[kind]


def quotient(run: Run, pattern: str) -> float:
    first, second = numbers(run, pattern)
    return first / second


def norms_differ(run: Run) -> bool:
    first, second = numbers(run, r"step 0  rank \d  grad norm ([\d.]+)")
    return abs(first - second) > 0.01


def reduces_in_bf16(run: Run) -> bool:
    return numbers(run, r"differ .* by ([\d.e+-]+)")[0] > 1e-4


LAYER = 128 * 128 * 4  # bytes
SYMPTOMS: dict[str, Callable[[Run], bool]] = {
    "01_flat_loss": lambda run: len(set(numbers(run, r"loss ([\d.]+)"))) == 1,
    "02_stuck_at_the_save": lambda run: run.seconds is not None,
    "03_norms_disagree": norms_differ,
    "04_out_of_memory": lambda run: all("out of memory" in raised for raised in run.raised),
    "05_memory_of_accumulation": lambda run: peak(run, "unsharded_grad") > 2 * LAYER,
    "06_slower_with_more_ranks": lambda run: abs(quotient(run, r"grad norm .* ([\d.]+)") - 1) > 0.01,
    "07_accumulation_diverges": lambda run: abs(quotient(run, r"grad norm .* ([\d.]+)") - 1) > 0.01,
    "08_coarse_gradients": reduces_in_bf16,
    "09_memory_after_logging": lambda run: max(numbers(run, r"begins: ([\d,]+) B")) > 2 * LAYER,
    "10_mixed_tensors": lambda run: all("DTensor" in raised for raised in run.raised),
    "11_drifting_apart": lambda run: max(numbers(run, r"differ by ([\d.]+)")) > 0,
    "12_stops_in_the_mixture": lambda run: all("Collective" in raised for raised in run.raised),
    "13_half_a_layer": lambda run: min(numbers(run, r"(\d+) of them different")) < 64,
    "14_pretrained_is_lost": lambda run: numbers(run, r"network ([\d.]+)")[0] > 0,
}


@pytest.mark.long
@every_bug
def test_a_broken_script_shows_its_symptom_and_the_mended_one_does_not(
    bug: Bug, broken: dict[str, Run], mended: dict[str, Run]
) -> None:
    shows = SYMPTOMS[bug.directory]
    assert shows(broken[bug.directory])
    assert not shows(mended[bug.directory])
    assert not any(mended[bug.directory].raised) and mended[bug.directory].seconds is None


@pytest.mark.long
@every_bug
def test_evidence_of_a_broken_script_is_sealed_and_that_of_the_mended_one_is_another(
    bug: Bug, values: dict[str, str], mended: dict[str, Run]
) -> None:
    assert read_seals(COURSE, BUGS)[bug.directory].holds(values[bug.directory])
    assert workshop.value_in(bug, mended[bug.directory]) != values[bug.directory]


@pytest.mark.long
def test_bytes_in_evidence_equal_closed_forms(values: dict[str, str]) -> None:
    block = 64 * 128 + 128 + 128 * 64 + 64
    head = 2 * 64 + 2  # one row of weight and bias, padded to the two ranks
    assert int(values["04_out_of_memory"]) == 4 * (8 * block + head)
    assert int(values["05_memory_of_accumulation"]) == int(values["09_memory_after_logging"]) == 6 * LAYER
    assert int(values["11_drifting_apart"]) == 4 * (2 * 256 * 32 + 32 * 32 + 32)
    image, body = 32 * 64 + 64 + 64 * 64 + 64, 24 * 64 + 64 + 64 * 64 + 64
    assert int(values["10_mixed_tensors"]) == 4 * (64 * 16 + 16 + image + body)


@pytest.mark.long
def test_files_made_from_others_are_up_to_date(values: dict[str, str]) -> None:
    for path, text in workshop.written_files(COURSE, values).items():
        assert path.read_text(encoding="utf-8") == text, path


@every_bug
def test_the_mended_script_differs_in_few_lines(bug: Bug) -> None:
    given = bug.script.read_text().splitlines()
    fixed = workshop.mended_scripts(COURSE)[bug.directory].read_text().splitlines()
    changed = [line for line in difflib.ndiff(given, fixed) if line[0] in "+-" and line[2:].strip()]
    assert 0 < len(changed) <= 10


# --- Grading -------------------------------------------------------------------------------------------------


def answer(bug: Bug, value: str, **chosen: str) -> str:
    """Return a table of right answers, except for `chosen`."""
    letters = {question: bug.letter(question, KEY[bug.directory][question]) for question in CHOSEN} | chosen
    lines = [f'{question} = "{letter}"' for question, letter in letters.items()]
    return "\n".join([f"[{bug.directory}]", f'evidence = "{value}"', *lines, ""])


def graded(course: Course, folder: Path, text: str | bytes) -> LabGrade:
    (folder / "lab").mkdir(exist_ok=True)
    path = folder / "lab" / "answers.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return grade_lab(folder, course)


@pytest.mark.long
def test_the_key_gets_full_marks_from_a_course_that_does_not_have_it(
    course: Course, values: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "_known", {})
    result = graded(course, tmp_path, "".join(answer(bug, values[bug.directory]) for bug in BUGS))
    assert (result.status, result.score) == ("passed", result.max_score)
    assert result.max_score == 3 * len(BUGS) >= 36
    assert all(check.passed and check.message is None for check in result.checks)

    def refuse(*_: object) -> None:
        raise AssertionError("evidence is measured once per course")

    monkeypatch.setattr(evidence, "_known", {})
    monkeypatch.setattr(evidence, "run_script", refuse)
    assert grade_lab(tmp_path, course).score == result.score


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Let the evidence of the sealed course be known."""
    monkeypatch.setattr(evidence, "_known", dict(MADE_UP))
    return MADE_UP


@every_bug
@pytest.mark.parametrize("question", CHOSEN)
def test_a_wrong_choice_is_refused_and_explained(
    bug: Bug, question: str, sealed: Course, measured: dict[str, str], tmp_path: Path
) -> None:
    value = measured[bug.directory]
    for letter, choice in zip(LETTERS, bug.choices[question]):
        result = graded(sealed, tmp_path, answer(bug, value, **{question: letter}))
        checks = {check.id: check for check in result.checks}
        found = checks[f"{bug.number}.{question}"]
        if choice.name == KEY[bug.directory][question]:
            assert found.passed
            continue
        assert (found.passed, found.misconception) == (False, choice.name)
        assert found.message == refute(bug, choice, value) and choice.if_so in found.message
        assert "{" not in found.message.replace("{evidence}", "{")
        assert result.score == 2


@every_bug
def test_right_choices_do_not_count_without_right_evidence(
    bug: Bug, sealed: Course, measured: dict[str, str], tmp_path: Path
) -> None:
    for wrong in ("", "7.77", "12345678", "float64", "?"):
        result = graded(sealed, tmp_path, answer(bug, wrong))
        found = {check.id: check for check in result.checks}
        assert result.score == 0 and found[f"{bug.number}.evidence"].passed is False
        assert found[f"{bug.number}.evidence"].message
        assert found[f"{bug.number}.cause"].dependency == f"{bug.number}.evidence"
        said = (
            str(found[f"{bug.number}.evidence"].message).replace(bug.evidence.question, "").replace(wrong, "")
        )
        assert measured[bug.directory] not in said


def test_each_bug_has_its_own_verdicts() -> None:
    wrong = LabCheck("02.cause", False, message="Not this one.")
    grade = LabGrade([LabCheck("01.cause", True), wrong, LabCheck("03.cause", None)], "failed")
    lines = report.judged(grade, {"01": "one", "02": "two", "03": "three"}, Style()).splitlines()
    assert [line.strip() for line in (lines[0], lines[2], lines[4], lines[5])] == [
        *("01 one", "02 two", "Not this one.", "03 three  not answered"),
    ]


def test_a_lab_without_a_file_or_with_the_given_file_is_not_started(course: Course, tmp_path: Path) -> None:
    assert grade_lab(tmp_path, course).status == "not_started"
    result = graded(course, tmp_path, (COURSE.root / "exercises" / "lab" / "answers.toml").read_bytes())
    assert (result.status, result.score, result.max_score) == ("not_started", 0, 3 * len(BUGS))


def test_json_has_the_keys_that_programs_read(
    sealed: Course, measured: dict[str, str], tmp_path: Path
) -> None:
    found = graded(sealed, tmp_path, answer(BUGS[0], measured[BUGS[0].directory])).as_dict()
    assert found.keys() == {"exercise", "score", "max_score", "status", "checks", "seconds"}
    assert (found["exercise"], found["score"], found["status"]) == ("lab", 3, "failed")
    keys = {"id", "passed", "points", "max_points", "misconception", "message"}
    assert all(check.keys() == keys | {"expected", "actual", "dependency"} for check in found["checks"])
    assert sum(check["points"] for check in found["checks"]) == 3
    assert json.loads(json.dumps(found)) == found


BAD_FILES = {
    "binary": b"\xff\xfe\x00\x01" * 9,
    "huge": b"# " + b"x" * 70_000,
    "not TOML": b"[01_flat_loss\ncause = 3",
    "half a string": b'[01_flat_loss]\ncause = "B',
    "nested too deeply": b"a = " + b"[" * 20_000,
    "a table that is none": b"01_flat_loss = 3",
    "a mistyped table": b'[01_flat_los]\ncause = "B"',
    "a mistyped key": b'[01_flat_loss]\ncauses = "B"',
    "a list": b'[01_flat_loss]\ncause = ["A", "B"]',
    "a truth": b"[01_flat_loss]\nevidence = true",
    "a date": b"[01_flat_loss]\nevidence = 2020-01-01",
    "a long text": b'[01_flat_loss]\nevidence = "' + b"9" * 200 + b'"',
    "a long number": b"[01_flat_loss]\nevidence = " + b"9" * 4_000,
    "not a number": b"[01_flat_loss]\nevidence = [nan]",
}


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_file_that_is_none_of_answers_is_an_error_in_one_line(
    content: bytes, course: Course, tmp_path: Path
) -> None:
    result = graded(course, tmp_path, content)
    assert (result.status, result.score, result.max_score) == ("error", 0, 3 * len(BUGS))
    message = result.checks[0].message
    assert message and "\n" not in message and "expected" in message and len(message) < 500


def test_a_folder_in_place_of_the_file_is_an_error(course: Course, tmp_path: Path) -> None:
    (tmp_path / "lab" / "answers.toml").mkdir(parents=True)
    assert grade_lab(tmp_path, course).status == "error"


@pytest.mark.parametrize(
    "chosen", ["Z", "AB", "1", "__import__('os')._exit(1)", "\x1b[2J".encode("unicode_escape").decode()]
)
def test_an_answer_that_is_no_letter_is_refused(
    chosen: str, sealed: Course, measured: dict[str, str], tmp_path: Path
) -> None:
    table = answer(BUGS[0], measured[BUGS[0].directory], cause=chosen.replace("\\", "\\\\"))
    found = graded(sealed, tmp_path, table).checks[1]
    assert (found.passed, found.misconception) == (False, "unreadable-answer")
    assert found.expected == "one of A, B, C, D, E"


@pytest.mark.parametrize(
    ("kind", "typed", "measured", "verdict"),
    [
        ("whole", "65,536", "65536", True),
        ("whole", "65_536 B", "65536", True),
        ("whole", "65536 bytes", "65536", True),
        ("whole", "65536.0", "65536", True),
        ("whole", "65537", "65536", False),
        ("whole", "-0", "0", True),
        ("ratio", "1/4", "0.25", True),
        ("ratio", "0.254", "0.25", True),
        ("ratio", "0.26", "0.25", False),
        ("ratio", "-0.25", "0.25", False),
        ("name", "torch.bfloat16", "bfloat16", True),
        ("name", "BF16", "bfloat16", True),
        ("name", "float16", "bfloat16", False),
    ],
)
def test_evidence_is_read_as_people_write_it(kind: str, typed: str, measured: str, verdict: bool) -> None:
    assert agrees(kind, typed, measured) is verdict


@pytest.mark.parametrize("typed", ["many", "64 KiB", "1e999999999", "1/0", "nan", "inf", "0x10", "²"])
def test_evidence_that_is_not_a_number_is_refused(typed: str) -> None:
    with pytest.raises(Unreadable):
        agrees("whole", typed, "65536")


# --- The course ----------------------------------------------------------------------------------------------


def test_the_key_is_in_plain_text_in_the_solutions_only() -> None:
    pairs = [f'{question} = "{KEY[bug.directory][question]}"' for bug in BUGS for question in CHOSEN]
    letters = [(bug, q, bug.letter(q, KEY[bug.directory][q])) for bug in BUGS for q in CHOSEN]
    for folder in ("exercises", "hwfsdp", "docs", "tests"):
        for path in (COURSE.root / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".toml", ".json", ".txt") and path.is_file():
                text = path.read_text(encoding="utf-8")
                assert not [pair for pair in pairs if pair in text], path
    given = tomllib.loads((COURSE.root / "exercises" / "lab" / "answers.toml").read_text())
    assert not [1 for bug, question, _ in letters if given[bug.directory][question]]


@every_bug
def test_the_order_of_choices_gives_no_hint(bug: Bug) -> None:
    found = tomllib.loads((bug.folder / "bug.toml").read_text())
    for question in CHOSEN:
        assert list(found[question]) == sorted(found[question])
        assert len({choice.text for choice in bug.choices[question]}) == len(found[question]) >= 4


def test_right_letters_are_spread() -> None:
    letters = [bug.letter(question, KEY[bug.directory][question]) for bug in BUGS for question in CHOSEN]
    assert max(letters.count(letter) for letter in "ABCD") <= len(letters) / 2
    assert min(letters.count(letter) for letter in "ABCD") >= 3


def test_a_script_that_was_changed_is_not_measured_and_the_check_says_so(
    sealed: Course, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "_known", {})
    copy = Course(tmp_path / "course", sealed.exercises)
    shutil.copytree(sealed.root / "exercises", copy.root / "exercises")
    bug = read_bugs(copy)[0]
    bug.script.write_text("raise SystemExit('a learner was here')\n")
    found = graded(copy, tmp_path, answer(bug, MADE_UP[bug.directory])).checks[0]
    assert found.misconception == "not-measured" and "is not the script that was given" in str(found.message)


def test_a_machine_that_measures_other_evidence_does_not_blame_the_learner(
    sealed: Course, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "_known", {})
    monkeypatch.setattr(kept, "load", lambda course, name: {})
    monkeypatch.setattr(evidence, "run_script", lambda script, seconds: None)
    monkeypatch.setattr(evidence, "measure", lambda bug, run: "123")
    result = graded(sealed, tmp_path, answer(BUGS[0], MADE_UP[BUGS[0].directory]))
    assert result.checks[0].misconception == "not-measured"
    assert "123" in str(result.checks[0].message) and result.score == 0


def test_a_forged_cache_does_not_count(
    sealed: Course, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "_known", {})
    monkeypatch.setattr(kept, "load", lambda course, name: {BUGS[0].directory: "42"})
    monkeypatch.setattr(evidence, "run_script", lambda script, seconds: None)
    monkeypatch.setattr(evidence, "measure", lambda bug, run: MADE_UP[bug.directory])
    assert graded(sealed, tmp_path, answer(BUGS[0], "42")).score == 0
    assert graded(sealed, tmp_path, answer(BUGS[0], MADE_UP[BUGS[0].directory])).score == 3


# --- The command ---------------------------------------------------------------------------------------------


def test_the_command_lists_shows_and_checks(
    sealed: Course,
    measured: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hwfsdp.course.lab.commands.find_course", lambda: sealed)
    assert cli.main(["lab"]) == 0
    assert f"0 of {len(BUGS)} solved" in capsys.readouterr().out
    assert cli.main(["lab", "3"]) == 0
    assert BUGS[2].evidence.question[:40] in capsys.readouterr().out
    own = sealed.root / "exercises" / "lab" / "answers.toml"
    given = own.read_text()
    own.write_text(answer(BUGS[0], measured[BUGS[0].directory]))
    assert cli.main(["lab", "check", "1"]) == 0
    assert "3 of 3 points" in capsys.readouterr().out
    assert cli.main(["lab", "check"]) == 1
    capsys.readouterr()
    assert cli.main(["lab", "--json"]) == 0
    standings = json.loads(capsys.readouterr().out)
    assert [each["status"] for each in standings] == ["passed"] + ["not_answered"] * (len(BUGS) - 1)
    own.write_text("[")
    assert cli.main(["lab", "check"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    own.write_text(given)


@pytest.mark.parametrize(
    "arguments",
    [
        ["99"],
        ["x"],
        ["3", "4"],
        ["--run"],
        ["check", "--run"],
        ["3", "--submission", "."],
        ["3", "--out", "x"],
    ],
)
def test_arguments_that_cannot_be_used_end_with_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["lab", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "expected" in said


def test_a_run_writes_its_trace_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a new folder" / "in another"
    assert cli.main(["lab", "10", "--run", "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} >= {"trace.json", "player.html", "timeline.png"}
    said = capsys.readouterr().out
    assert "got mixed torch.Tensor and DTensor" in said and "player.html plays the run in any browser" in said


def test_a_run_that_hangs_leaves_a_trace_that_ends_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["lab", "2", "--run", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "its trace does where the ranks hang" in said and "Collectives of rank 0" not in said
    log = EventLog.load(tmp_path / "trace.json")
    assert log.ranks == [0, 1] and (tmp_path / "player.html").exists()
    last = log.collectives()[-1]
    assert (last.rank, last.op, last.owner) == (1, "all_gather", "Sequential")
    assert last.end_us == pytest.approx(max(e.end_us for e in log.events if e.rank == 1), rel=0.01)
    assert last.dur_us > 1e6  # it has waited all this time
