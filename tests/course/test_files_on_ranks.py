"""A student's file on ranks: facts come back, and whatever the file does is named and ended."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hwfsdp.course import failures, ranks
from hwfsdp.course.findings import Finding
from hwfsdp.course.ranks import RANKS, NotYet, StudentFile
from hwfsdp.errors import RankError
from hwfsdp.course.walls import descendants, in_force, running, server_pid

from suites import fast_are
from probes_of_tests import probe_answer, probe_attempt, probe_grouped, probe_pair, probe_sum

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def course(tmp_path: Path, *lines: str, may: str = "") -> StudentFile:
    """Return the runs of a file whose function `answer(number)` has these lines."""
    path = tmp_path / "theirs" / "my_fsdp.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "\n    ".join(["import torch, time, sys, os\n\n\ndef answer(number):", *lines, "return number\n"])
    )
    return StudentFile(path, [path.parent], f"os sys {may}".split())


def told(of: StudentFile, world_size: int = 1, probe: Any = probe_answer) -> Finding:
    assert of.refusal is None
    with pytest.raises(Finding) as caught:
        of.ranks(world_size).ask(probe, "answer", number=1)
    of.end()
    return caught.value


def test_facts_come_back_by_rank(tmp_path: Path) -> None:
    of = course(tmp_path)
    found = of.ranks(2).ask(probe_sum, "sum")
    assert all(torch.equal(fact, torch.full((2,), 2.0)) for fact in found) and len(found) == 2
    of.end()


def test_questions_are_one_question_if_all_numbers_of_their_tensors_are_equal(tmp_path: Path) -> None:
    of, numbers = course(tmp_path), torch.zeros(2000)  # `repr` shows the first and the last three
    of.asking, other = True, numbers.clone()
    other[1000] = 1
    for each in (numbers, numbers.clone(), other):
        of.ranks(1).ask(probe_answer, "answer", number=each)
    of.asking = False
    of.begin()
    of.end()
    assert of.progress()[1] == 2


def ask_ahead(of: StudentFile, *asked: tuple[int, int], probe: Any = probe_answer) -> None:
    """Ask these numbers on so many ranks, and begin the launches."""
    of.asking = True
    for world_size, number in asked:
        with pytest.raises(NotYet):
            list(of.ranks(world_size).ask(probe, "answer", number=number))
    of.asking = False
    of.begin()


def test_questions_asked_ahead_share_a_launch_and_one_that_raises_takes_no_answer_away(
    tmp_path: Path,
) -> None:
    of = course(tmp_path, "if number == 2: [][3]")
    ask_ahead(of, (1, 1), (1, 2), (1, 3))
    assert of.ranks(1).ask(probe_answer, "answer", number=3) == [3]
    assert of.ranks(1).ask(probe_answer, "answer", number=1) == [1]
    with pytest.raises(Finding, match=r"raised IndexError in answer \(my_fsdp.py, line 5") as caught:
        of.ranks(1).ask(probe_answer, "answer", number=2)
    assert caught.value.misconception == "crashed" and len(of.launches) == 2
    of.end()


def test_no_rank_begins_a_question_that_a_failed_rank_cannot_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without rank 1, rank 0 would wait for a new group until its time is up."""
    monkeypatch.setattr(ranks, "WAIT", 30.0)
    of = course(tmp_path, "if number == 1 and os.environ['RANK'] == '1': [][3]")
    ask_ahead(of, (2, 1), (2, 2), probe=probe_grouped)
    with pytest.raises(Finding, match="Rank 1 raised IndexError in answer"):
        of.ranks(2).ask(probe_grouped, "answer", number=1)
    assert of.ranks(2).ask(probe_grouped, "answer", number=2) == [2, 2]
    of.end()


def test_a_rank_that_leaves_ends_only_the_questions_of_its_exercise(tmp_path: Path) -> None:
    of = course(tmp_path, "if number < 10: sys.exit(3)")
    asked, said = [("02", 1), ("02", 11), ("03", 2), ("04", 12), ("05", 3), ("06", 13)], dict[str, bool]()
    for of.asking in (True, False):
        for of.asker, number in asked:
            try:
                assert list(of.ranks(1).ask(probe_answer, "answer", number=number)) == [number]
            except NotYet:
                pass
            except Finding as finding:
                assert finding.misconception == "left-early"
                said[f"{of.asker} {number}"] = finding.ends_file
    of.end()
    # 02 is over after its first question; after three exercises, so is the file
    assert said == {"02 1": False, "02 11": False, "03 2": False, "05 3": False, "06 13": True}


def test_a_launch_that_waits_for_room_is_not_begun_after_the_end(tmp_path: Path) -> None:
    of, said = course(tmp_path, "print('asleep')", "time.sleep(100)"), list[str]()
    of.show = said.append
    ask_ahead(of, (RANKS, 1), (1, 1))
    while not said:
        time.sleep(0.01)
    of.end()
    assert of.launches == [(RANKS, ["probe_answer"])]


def test_a_launch_that_waits_for_room_keeps_no_smaller_one_from_running(tmp_path: Path) -> None:
    of, said = course(tmp_path, "print('asleep')", "time.sleep(100 * number)"), list[str]()
    of.show = said.append
    ask_ahead(of, (2, 1))
    while not said:
        time.sleep(0.01)
    ask_ahead(of, (RANKS, 0), (1, 0))
    assert of.ranks(1).ask(probe_answer, "answer", number=0) == [0]
    assert [ranks for ranks, _ in of.launches] == [2, 1]
    of.end()


@LINUX
def test_one_endless_loop_ends_all_launches_of_a_students_own_check(tmp_path: Path) -> None:
    """Two ranks sleep. Meanwhile one rank computes, and others wait for room."""
    of = course(tmp_path, "print('begun')", "time.sleep(600 * (number == 2))", "while True: pass")
    said = list[str]()
    of.show, of.one_loop = said.append, True
    ask_ahead(of, (2, 2), (1, 1))
    while len(said) < 3:
        time.sleep(0.01)
    ask_ahead(of, (RANKS, 4))
    for world_size, number in ((1, 1), (2, 2), (RANKS, 4)):
        with pytest.raises(Finding, match="[Nn]othing has happened for 3 s") as caught:
            of.ranks(world_size).ask(probe_answer, "answer", number=number)
        assert caught.value.misconception == "endless" and caught.value.ends_file
    assert sorted(ranks for ranks, _ in of.launches) == [1, 2]
    of.end()


def test_of_the_launches_that_fit_the_one_with_the_most_ranks_is_next() -> None:
    room, order, sizes = ranks._Room(), list[int](), (RANKS - 2, RANKS - 1, RANKS)

    def run(size: int) -> None:
        with room.taken(size, lambda: False):
            order.append(size)

    with ThreadPoolExecutor(len(sizes)) as threads:
        with room.taken(RANKS, lambda: False):
            threads.map(run, sizes)
            while len(room._waiting) < len(sizes):
                time.sleep(0.001)
    assert order == sorted(sizes, reverse=True)


def test_two_launches_run_side_by_side_and_end_their_own_processes_only(tmp_path: Path) -> None:
    """The rank alone ends first; the two ranks, which meet afterwards, still live."""
    of = course(tmp_path, "time.sleep(1.5 if os.environ['WORLD_SIZE'] == '2' else 0)")
    ask_ahead(of, (2, 4), (1, 4))
    assert of.ranks(1).ask(probe_answer, "answer", number=4) == [4]
    assert of.ranks(2).ask(probe_answer, "answer", number=4) == [4, 4]
    of.end()


ENDS = {  # lines → the misconception, and words of the message
    "while True: pass": ("endless", "in answer (my_fsdp.py, line 5)"),
    "time.sleep(600)": ("endless", "in answer (my_fsdp.py, line 5)"),
    "sys.exit(0)": ("left-early", "SystemExit"),
    "os.kill(os.getpid(), 9)": ("died", "SIGKILL"),
    "bytearray(1 << 40)": ("too-much-memory", "GiB"),
    "[os.fork() or time.sleep(600) for _ in range(200)]": ("too-many-processes", "processes"),
    "raise NotImplementedError('TODO(01): answer')": ("not-written", "answer is called"),
    "torch.no_such_name": ("crashed", "AttributeError"),
    "os.fork() or (os.setsid(), time.sleep(600)); [][3]": ("crashed", "IndexError"),
}
SLOW = ("while True: pass", "[os.fork() or time.sleep(600) for _ in range(200)]")


@LINUX
@pytest.mark.parametrize("line", fast_are([line for line in ENDS if line not in SLOW], ENDS))
def test_a_file_that_does_not_come_to_an_end_is_named_and_leaves_nothing(line: str, tmp_path: Path) -> None:
    finding = told(course(tmp_path, line))
    assert finding.misconception == ENDS[line][0] and ENDS[line][1] in finding.message
    assert not descendants([server_pid() or 0], running())


def test_ranks_that_all_send_first_are_told_from_a_collective_that_one_skips() -> None:
    path = Path("/tmp/private/my_fsdp.py")
    for one, other, misconception in [
        ("send", "send", "all-wait"),
        ("recv", "recv", "all-wait"),
        ("send", "all_gather", "stuck-in"),
    ]:
        places = "; ".join(
            f"rank {n} waiting in {each}, at {path}:83, in f" for n, each in enumerate([one, other])
        )
        said = f"nothing has happened for 3 s ({places})"
        error = RankError(0, said, f'File "{path}", line 83, in f', "", "late")
        finding = failures.ended(error, "", Path(), path)
        assert finding.misconception == misconception
        assert "at my_fsdp.py:83" in finding.message and "private" not in finding.message


def test_a_rank_that_computes_without_an_end_is_in_a_loop_only_if_the_file_is(tmp_path: Path) -> None:
    error = RankError(1, "death by signal SIGXCPU", "", "", "died")
    for stack, misconception in [
        ("", "left-undone"),
        ("Stack:\n  <no Python frame>\n", "left-undone"),
        ('Stack:\n  File "/torch/distributed.py", line 5 in barrier\n', "left-undone"),
        ('Stack:\n  File "my_fsdp.py", line 5 in answer\n', "endless"),
    ]:
        (tmp_path / "1").write_text(stack)
        assert failures.ended(error, "", tmp_path, Path("my_fsdp.py")).misconception == misconception


@LINUX
@pytest.mark.parametrize(
    "line, misconception",
    [
        ("if torch.distributed.get_rank(): torch.distributed.barrier()", "stuck-in"),
        ("if torch.distributed.get_rank(): time.sleep(600)", "endless"),
    ],
    ids=["another collective", "sleeps"],
)
def test_ranks_that_wait_for_each_other_are_told_when_nothing_happens(
    line: str, misconception: str, tmp_path: Path
) -> None:
    finding = told(course(tmp_path, line, "torch.distributed.all_reduce(torch.ones(1))"), world_size=2)
    assert finding.misconception == misconception
    assert "nothing has happened for 3 s" in finding.message.lower()


def test_what_a_rank_changes_in_torch_is_named(tmp_path: Path) -> None:
    finding = told(course(tmp_path, "mine = type(torch.ones(1))", "mine.relu_ = None"))
    assert finding.misconception == "blocked" and "Tensor.relu_" in finding.message


def test_prints_belong_to_their_question_and_move_no_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = course(tmp_path, r"print(f'\x1b[2J {number}')", "print('x' * 10_000)")
    of.ranks(1).ask(probe_answer, "answer", number=1)
    assert capsys.readouterr().out.startswith("rank 0 | \\x1b[2J 1\n")
    of.ranks(1).ask(probe_answer, "answer", number=2)
    printed = capsys.readouterr().out
    assert " 2\n" in printed and " 1\n" not in printed and len(printed) < 4_200
    of.end()


def test_a_part_that_raises_is_explained_and_the_probe_goes_on(tmp_path: Path) -> None:
    finding = told(course(tmp_path, "{}[number]"), probe=probe_attempt)
    assert finding.misconception == "crashed" and "KeyError" in finding.message


def test_what_a_rank_reported_before_it_raised_counts(tmp_path: Path) -> None:
    of = course(tmp_path, "if number == 2: [][3]")
    assert of.ranks(1).ask(probe_pair, "answer 1") == [1]
    with pytest.raises(Finding, match="raised IndexError"):
        of.ranks(1).ask(probe_pair, "answer 2")
    of.end()


@LINUX
def test_the_file_cannot_read_other_files_nor_act_as_another_user(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("whatever")
    of = course(
        tmp_path,
        f"return [os.getuid(), os.path.exists(__file__), open({str(tmp_path / 'secret')!r}).read()]",
        may="open",
    )
    finding = told(of)
    limits = {limit.name: limit.in_force for limit in in_force()}
    assert "PermissionError" in finding.message or not limits["no files but Python's and its own"]
    assert all(bool(limit.why_not) != limit.in_force for limit in in_force())
    assert os.geteuid() or limits["a user of its own"]


def test_a_file_does_not_choose_the_name_that_is_said_to_be_missing() -> None:
    for by, misconception in (("probes.py", "missing"), ("my_fsdp.py", "crashed")):
        frames = [{"file": by, "line": 3, "function": "f", "text": "raise"}]
        said = "module 'submitted' has no attribute 'seed_7531'"
        raised = failures.Raised(0, "AttributeError", said, frames)
        assert failures.explain("key", [raised], 2, Path("my_fsdp.py")).misconception == misconception
