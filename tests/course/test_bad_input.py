"""For any submission, grading ends soon, gives a reason, leaves no process, and grades the other submissions as usual."""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hwfsdp import UsageError
from hwfsdp.course.grade import Options, grade
from hwfsdp.course.manifest import find_course
from hwfsdp.course.packing import pack
from hwfsdp.course.processes import descendants, server_pid
from hwfsdp.course.report import Style, shown
from hwfsdp.course.run import Probe, Ranks, Run, patience
from hwfsdp.course.submission import check_folder, solution, starter
from hwfsdp.course.verdict import Grade
from hwfsdp.course.workbook import graded
from suites import fast_are

COURSE = find_course(Path(__file__))
ROWS = COURSE.exercise(1)
RINGS = COURSE.exercise(2)
CUTS = COURSE.exercise(12)
SECONDS = 20.0  # limit for an exercise with any content


def with_line(line: str, function: str = "padded_rows", text: str = solution(ROWS)) -> str:
    """Insert a line at the beginning of a function of the reference, or of the file."""
    if not function:
        head, _, rest = text.partition("from hwfsdp")
        return f"{head}{line}\nfrom hwfsdp{rest}"
    first = next(row for row in text.splitlines() if row.startswith(f"def {function}("))
    at = text.index('"""', text.index('"""', text.index(first)) + 3) + 3
    return f"{text[:at]}\n    {line}{text[at:]}"


FORK = "import os, time; pid = os.fork(); pid or (os.setsid(), time.sleep(600))"
DAEMON = "import os, time; os.fork() or (os.setsid(), os.fork() or time.sleep(600), os._exit(0))"
BOMB = "import os, time\n    for _ in range(200):\n        os.fork() or time.sleep(600)"

WORTHLESS = {  # name → (text, misconception, words that the message has)
    "not python": ("def padded_rows(n, world_size:\n", "not-python", "line 1"),
    "a null byte": ("x = 0\0\n", "not-python", ""),
    "deeply nested": ("(" * 5000, "not-python", ""),
    "endless loop": (with_line("while True: pass"), "endless", "padded_rows"),
    "sleeps": (with_line("import time; time.sleep(600)"), "endless", "padded_rows"),
    "endless printing": (with_line("while True: print('hello ' * 1000)"), "endless", ""),
    "endless import": (with_line("while True: pass", ""), "endless", "my_fsdp.py"),
    "sys.exit": (with_line("import sys; sys.exit(0)"), "left-early", "SystemExit"),
    "sys.exit at import": (with_line("import sys; sys.exit()", ""), "left-early", "SystemExit"),
    "os._exit": (with_line("import os; os._exit(0)"), "left-early", "status 0"),
    "killed": (with_line("import os; os.kill(os.getpid(), 9)"), "died", "SIGKILL"),
    "segmentation fault": (with_line("import os; os.kill(os.getpid(), 11)"), "died", "SIGSEGV"),
    "memory": (with_line("x = bytearray(1 << 40)"), "too-much-memory", ""),
    "tensor memory": (with_line("import torch; x = torch.ones(1 << 33)"), "too-much-memory", ""),
    "too many processes": (with_line(BOMB), "too-many-processes", ""),
}


UNUSABLE = {  # changes of an elective, whose functions the package calls
    "missing function": ("def cut_after", "def cut_aft", "missing", "cut_after"),
    "other parameters": (", dim: int) -> Placement", ") -> Placement", "wrong-signature", "cut_after"),
    "parameters in another order": (
        "def cut_after(placements: Iterable[tuple[Placement, int]], dim: int)",
        "def cut_after(dim: int, placements: Iterable[tuple[Placement, int]])",
        "wrong-signature",
        "cut_after",
    ),
}


QUICK = Options(seed=1, run_seconds=4.0, repeat=False)  # for code that never ends


def is_worthless(result: Grade, misconception: str, words: str) -> None:
    """Check that status, score and reason are right, that grading ended in time, and that no process is left."""
    assert result.status == "error" and result.score == 0
    assert result.finding is not None
    assert (result.finding.misconception, words in result.finding.message) == (misconception, True), str(
        result.finding
    )
    as_dict = result.as_dict()
    assert as_dict["score"] == 0 and sum(check["points"] for check in as_dict["checks"]) == 0
    assert [check["misconception"] for check in as_dict["checks"]].count(misconception) == 1
    assert result.seconds <= SECONDS * patience()
    server = server_pid()
    assert server is None or descendants(server) == []


@pytest.mark.parametrize("name", fast_are(["endless loop", "sys.exit", "killed"], WORTHLESS))
def test_a_file_that_does_not_load_scores_nothing_and_is_told_why(name: str) -> None:
    text, misconception, words = WORTHLESS[name]
    options = QUICK if misconception == "endless" else Options(seed=1)
    is_worthless(graded(ROWS, COURSE, text, options), misconception, words)


@pytest.mark.parametrize("name", UNUSABLE)
def test_functions_that_the_package_cannot_call_are_named(name: str) -> None:
    old, new, misconception, words = UNUSABLE[name]
    is_worthless(graded(CUTS, COURSE, solution(CUTS).replace(old, new, 1)), misconception, words)


SAY = """import os
    for fd in range(3, 64):
        try:
            if os.readlink(f'/proc/self/fd/{fd}').startswith('socket'):
                os.write(fd, SAID)
        except OSError:
            pass"""
PARTIAL = SAY.replace("SAID", "b'\\0\\0\\1\\0'") + "\n    while True: pass"
FORGED = SAY + "\n    os._exit(0)"
FORGERIES: dict[str, Any] = {
    "no report": {},
    "a traceback of numbers": {"report": {}, "raised": {"rank": 0, "kind": 1, "message": 2, "frames": 3}},
    "frames of numbers": {"report": {}, "raised": {"rank": 0, "kind": "", "message": "", "frames": [1]}},
    "a list": [1, 2],
}
TOO_DEEP = {"sums": "x = " + "1+" * 20_000 + "1\n", "signs": "x = " + "-" * 50_000 + "1\n"}


@pytest.mark.parametrize("name", TOO_DEEP)
def test_a_text_that_the_parser_refuses_is_not_python(name: str) -> None:
    result = graded(ROWS, COURSE, TOO_DEEP[name])
    is_worthless(result, "not-python", ROWS.file_name)


@pytest.mark.long
def test_half_a_message_does_not_keep_the_grader_waiting() -> None:
    is_worthless(graded(ROWS, COURSE, with_line(PARTIAL), QUICK), "endless", "does not answer")


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_reports_are_worth_nothing(name: str) -> None:
    data = pickle.dumps(("return", pickle.dumps(pack(FORGERIES[name]))))
    text = with_line(FORGED.replace("SAID", repr(struct.pack("!i", len(data)) + data)))
    result = graded(ROWS, COURSE, text)
    assert (result.status, result.score) == ("error", 0), result.finding
    assert result.finding is not None and result.finding.misconception in ("left-early", "crashed")


@pytest.mark.long
@pytest.mark.parametrize("value", ["2 ** 20000", "object()", "'\\ud800'", "float('inf')"])
def test_odd_values_fail_their_checks_and_end_no_rank(value: str) -> None:
    result = graded(ROWS, COURSE, with_line(f"return {value}"))
    assert result.status == "failed"
    assert all(r.finding.misconception != "died" for r in result.results if r.finding)


def test_escapes_and_surrogates_that_are_printed_do_not_reach_the_terminal() -> None:
    result = graded(ROWS, COURSE, with_line(r"n or print('\ud800 \x1b[2J', end=chr(10))"))
    assert result.status == "passed"
    text = shown(result, Path("x.py"), Style(io.StringIO()))
    text.encode()
    assert "\x1b" not in text and r"\ud800 \x1b[2J" in text


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "large"])
def test_only_a_file_of_moderate_size_can_be_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ROWS.file_name
    make: dict[str, Callable[[], object]] = {
        "fifo": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
        "large": lambda: path.write_bytes(b"#" * (1 << 21)),
    }
    make[kind]()
    with pytest.raises(UsageError, match="expected a file of Python"):
        grade(ROWS, tmp_path, COURSE)


SKIPPED = {
    "one rank skips": ("if dist.get_rank() == 1: return", ""),
    "one rank hangs": ("import time\n    if dist.get_rank() == 1: time.sleep(600)", ""),
    "one rank adds one": ("if dist.get_rank() == 0: dist.recv(whole.clone(), 1)", ""),
    "one rank dies": ("import os\n    if dist.get_rank() == 1: os._exit(3)", "status 3"),
}


@pytest.mark.parametrize("name", fast_are(["one rank skips"], SKIPPED))
def test_a_collective_that_ranks_do_not_run_together_ends_in_time_and_is_named(name: str) -> None:
    body, words = SKIPPED[name]
    result = graded(RINGS, COURSE, with_line(body, "ring_all_gather"), QUICK)
    assert result.finding is not None
    assert result.finding.misconception in ("stuck-in", "endless", "left-early", "order-diverged", "died")
    is_worthless(result, result.finding.misconception, words)


@pytest.mark.long
@pytest.mark.parametrize("line", [FORK, DAEMON], ids=["child", "daemon"])
def test_processes_that_a_rank_leaves_behind_are_ended(line: str) -> None:
    once = f"import os\n    if 'done' not in os.environ: os.environ['done'] = '1'; {line}"
    graded(ROWS, COURSE, with_line(once))
    server = server_pid()
    assert server is not None and descendants(server) == []


@pytest.mark.long
def test_output_is_kept_up_to_a_limit() -> None:
    result = graded(ROWS, COURSE, with_line("print('hello', n)"))
    assert result.status == "passed"
    assert result.printed.startswith("hello 0\n") and len(result.printed) <= 4000


# --- Files -------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / ROWS.file_name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        grade(ROWS, tmp_path, COURSE, Options())


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_a_folder_without_exercises_is_refused(folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="submission"):
        check_folder(tmp_path / folder, COURSE.exercises)


@pytest.mark.long
def test_an_answer_that_hangs_is_run_once_and_not_once_for_every_check(tmp_path: Path) -> None:
    asked: list[int] = []

    class CountingRanks(Ranks):
        def run(self, probe: Probe, world_size: int, **arguments: Any) -> Run:
            asked.append(world_size)
            return super().run(probe, world_size, **arguments)

    (tmp_path / ROWS.file_name).write_text(with_line("while True: pass"))
    result = grade(ROWS, tmp_path, COURSE, QUICK, new_ranks=CountingRanks)
    assert result.status == "error" and len(asked) == 1


def test_an_unknown_check_is_refused(tmp_path: Path) -> None:
    (tmp_path / ROWS.file_name).write_text(solution(ROWS))
    with pytest.raises(UsageError, match=r"check 01\.nothing: expected one of 01\."):
        grade(ROWS, tmp_path, COURSE, Options(only="01.nothing"))


# --- Not started -------------------------------------------------------------------------------------------

UNTOUCHED = {
    "the starter": (CUTS, starter(CUTS)),
    "other line endings": (CUTS, starter(CUTS).replace("\n", "\r\n")),
    "comments and imports": (CUTS, f"# my name\nimport os\n{starter(CUTS)}# the end\n"),
    "pass instead of raise": (CUTS, starter(CUTS).replace("raise NotImplementedError", "pass")),
    "a message": (
        CUTS,
        starter(CUTS).replace("raise NotImplementedError", "raise NotImplementedError('later')"),
    ),
    "nothing": (CUTS, ""),
    "the stations' starter": (ROWS, starter(ROWS)),
    "with other line endings": (ROWS, starter(ROWS).replace("\n", "\r\n")),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_a_starter_without_any_function_in_it_is_not_started(name: str) -> None:
    result = graded(UNTOUCHED[name][0], COURSE, UNTOUCHED[name][1])
    assert (result.status, result.score) == ("not_started", 0)
    assert all(check["passed"] is None for check in result.as_dict()["checks"])


def test_an_exercise_without_a_file_is_not_started(tmp_path: Path) -> None:
    assert grade(ROWS, tmp_path, COURSE).status == "not_started"


def test_an_unwritten_function_fails_only_its_own_checks() -> None:
    text = starter(ROWS).replace(
        '    raise NotImplementedError("TODO(01): padded_rows")\n', "    return -(-n // world_size)\n", 1
    )
    result = graded(ROWS, COURSE, text)
    verdicts = {r.check.id: (r.passed, r.finding and r.finding.misconception) for r in result.results}
    assert result.status == "failed"
    assert verdicts == {"01.padded": (True, None), "01.rows": (False, "not-written")}
