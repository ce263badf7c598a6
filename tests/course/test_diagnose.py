"""Signatures, and the misconceptions that they reveal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hwfsdp.course import findings
from hwfsdp.course.checklist import ENTRIES
from hwfsdp.course.diagnose import (
    compare_order,
    explain_broken,
    explain_failure,
    largest_difference,
    ratio,
)
from hwfsdp.course.findings import FINDINGS, compare, told
from hwfsdp.course.misconceptions import FATAL, MISCONCEPTIONS
from hwfsdp.course.run import Broken, Raised, Run
from hwfsdp.course.stations import laws, machines
from hwfsdp.course.stations.scenarios import Scenario
from hwfsdp.course.verdict import Finding
from hwfsdp.observe.events import Event

ORACLE = torch.tensor([[1.0, -2.0], [0.5, 4.0]])


def test_a_ratio_is_one_number_or_none() -> None:
    assert ratio(ORACLE * 3, ORACLE) == pytest.approx(3)
    assert ratio(ORACLE + 1, ORACLE) is None
    assert ratio(ORACLE, torch.zeros(2, 2)) is None
    assert ratio(ORACLE[0], ORACLE) is None


def test_the_largest_difference_has_its_place_and_both_values() -> None:
    other = ORACLE.clone()
    other[1, 0] = 9
    other[0] += 1e-7
    assert largest_difference(other, ORACLE) == "at [1, 0]: 9 instead of 0.5"
    other[1, 1] = float("nan")
    assert largest_difference(other, ORACLE).startswith("at [1, 1]: nan instead of ")
    got, right = torch.tensor([0.5, 0.0120640001]), torch.tensor([0.5, 0.0120640012])
    assert largest_difference(got, right) == "at [1]: 0.0120639997 instead of 0.0120640015"


# --- Logs --------------------------------------------------------------------------------------------------


def events(rank: int, *ops: str) -> list[Event]:
    return [Event(rank, seq, op, op, owner=f"layers.{seq}", bytes=1024) for seq, op in enumerate(ops)]


def test_logs_of_ranks_that_part_are_shown_side_by_side() -> None:
    logs = {
        0: events(0, "all_gather", "all_gather", "reduce_scatter"),
        1: events(1, "all_gather", "reduce_scatter"),
    }
    with pytest.raises(Finding) as caught:
        compare_order(logs)
    assert caught.value.misconception == "order-diverged"
    title, header, *rows = caught.value.message.splitlines()
    assert title == "Collective number 2 differs between ranks 0 and 1:"
    assert re.split(r"  +", rows[1]) == [
        "2.",
        "all_gather layers.1 1,024 B",
        "reduce_scatter layers.1 1,024 B",
    ]
    assert rows[2].endswith("–")
    columns = {row.index("layers") for row in rows[:2]}
    assert len(columns) <= 2 and header.split() == ["rank", "0", "rank", "1"]


def test_logs_that_agree_are_nothing_to_report() -> None:
    compare_order({0: events(0, "all_gather"), 1: events(1, "all_gather")})


# --- Failures ----------------------------------------------------------------------------------------------


def raised(
    kind: str, message: str, *frames: tuple[str, int, str, str], rank: int = 1, lost: bool = False
) -> Run:
    keys = ("file", "line", "function", "text")
    rows = [dict(zip(keys, frame, strict=True)) for frame in frames]
    return Run([{}, {}], [Raised(rank, kind, message, rows, lost)])


FILE = "/somewhere/exercises/04/sharded_parameter.py"
LINE = (FILE, 12, "to_sharded", "self.fre()")


@pytest.mark.parametrize(
    ("run", "misconception", "words"),
    [
        (raised("AttributeError", "no fre", LINE), "crashed", "sharded_parameter.py, line 12: `self.fre()`"),
        (raised("TypeError", "odd", ("/x/torch.py", 3, "f", "x")), "crashed", "outside your file"),
        (
            raised("NotImplementedError", "", (FILE, 3, "register", "raise NotImplementedError")),
            "not-written",
            "FSDPParam.register",
        ),
        (raised("NotImplementedError", "mine", LINE), "crashed", "NotImplementedError"),
        (raised("MissingHole", "x.py does not define free"), "missing", "free"),
        (raised("MemoryError", "", LINE), "too-much-memory", ""),
        (raised("RuntimeError", "DefaultCPUAllocator: can't allocate memory", LINE), "too-much-memory", ""),
        (
            raised("CollectiveError", "ranks call different collectives: number 3", LINE),
            "order-diverged",
            "3",
        ),
        (
            raised("RuntimeError", "Connection closed by peer", LINE, lost=True),
            "left-early",
            "waited for rank 0",
        ),
        (raised("CollectiveError", "Timed out after 10 s waiting for rank 0", LINE), "stuck-in", "rank 0"),
        (Run([{}]), "left-early", ""),
    ],
)
def test_a_failure_is_explained_with_its_place(run: Run, misconception: str, words: str) -> None:
    finding = explain_failure(run, [FILE], ["FSDPParam.register", "free"])
    assert finding.misconception == misconception
    assert words in finding.message


@pytest.mark.parametrize(
    ("reason", "got", "misconception"),
    [
        ("late", "no return within 10 s (rank 0 waiting in all_gather; rank 1 in no collective)", "stuck-in"),
        ("late", "no return within 10 s (rank 0 in no collective)", "endless"),
        ("died", "death by signal SIGSEGV", "died"),
        ("exited", "exit with status 0 before the function returned", "left-early"),
        ("processes", "too many processes", "too-many-processes"),
    ],
)
def test_a_run_that_was_ended_is_explained(reason: str, got: str, misconception: str) -> None:
    stacks = f'--- rank 0 ---\n  File "{FILE}", line 7, in free\n    while True: pass\n'
    finding = explain_broken(Broken(reason, 1, got, stacks), [FILE])
    assert finding.misconception == misconception
    assert misconception in FATAL
    if reason == "late":
        assert "free (sharded_parameter.py, line 7)" in finding.message


def test_a_rank_that_gloo_ended_for_a_mismatch_did_not_touch_wrong_memory() -> None:
    stacks = "  what():  [enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 140 vs 28. "
    stacks += "Is there a distributed collective mismatch in your code?\n"
    finding = explain_broken(Broken("died", 0, "death by signal SIGABRT", stacks), [FILE])
    assert finding.misconception == "order-diverged" and "140 vs 28" in finding.message


# --- The list ----------------------------------------------------------------------------------------------


def test_every_misconception_has_a_sentence_and_a_question() -> None:
    for name, (sentence, question, *_) in MISCONCEPTIONS.items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name), name
        assert sentence and not sentence.endswith("."), name
        assert question.endswith("?") and question[0].isupper(), name
    assert FATAL <= set(MISCONCEPTIONS)


def test_every_misconception_is_used_somewhere() -> None:
    import hwfsdp.course

    package = Path(hwfsdp.course.__file__).parent
    in_findings = {name for of in FINDINGS.values() for *names, _ in of.values() for name in names}
    text = "".join(path.read_text() for path in package.rglob("*.py"))
    assert in_findings <= set(MISCONCEPTIONS)
    assert not [name for name in MISCONCEPTIONS if name not in in_findings and f'"{name}"' not in text]


def test_judges_tell_every_finding_and_no_other() -> None:
    package = Path(findings.__file__).parent
    text = "".join(path.read_text() for path in package.rglob("*.py"))
    known = {f"{exercise}.{name}" for exercise, of in FINDINGS.items() for name in of}
    named = re.findall(r'"((?:02|1[1-5]|laws|capstone)\.[a-z_0-9]+)"', text)
    named = [name for name in named if not name.endswith(".toml")]
    assert set(named) - set(ENTRIES) <= known
    assert not [
        name for name in known if f'"{name}"' not in text and f'"{name.partition(".")[2]}"' not in text
    ]


def test_a_finding_shows_the_actual_and_the_expected_value() -> None:
    finding = told("13.calls", "Rank 0:", 2, 3)
    assert (finding.misconception, finding.expected, finding.actual) == ("not-initialized", 3, 2)
    assert finding.message == "Rank 0: init is called for 2 rows; this rank has 3."
    assert told("13.calls", "Rank 0:", 4, 3).misconception == "rows-of-others"
    with pytest.raises(Finding, match=r"at \[1, 1\]: 8 instead of 4"):
        compare("It", {"part": ORACLE * 2}, {"13.part": ORACLE})
    compare("It", {"part": ORACLE}, {"13.part": ORACLE.clone()})
    with pytest.raises(Finding, match=r"being torch.float64, \(2, 2\)"):
        compare("It", {"part": ORACLE.double()}, {"13.part": ORACLE})


def test_a_gather_too_many_is_told_with_its_unit_and_phase() -> None:
    units = ["0", "1", "2", "3", "4"]
    gathered = {"machine": "host", "shown": None, "gathers": [[0, 0, 0, False, owner] for owner in units]}
    machines._gathered_once(gathered, "forward")
    gathered["gathers"].append([7, 0, 0, False, "1"])
    with pytest.raises(Finding, match=r"^A forward on .* has 6 .*; too often: 1 \(2×\)\.$") as caught:
        machines._gathered_once(gathered, "forward")
    assert caught.value.seen.us == 7, "the player opens at the second gather"
    facts = {"moves": {"backward 0": [["all_gather", "blocks.0", 12, "float32"]]}}
    with pytest.raises(Finding, match=r"backward 0 of step 2.*; too often: blocks.0 \(1×\)\.$"):
        laws.carried([facts], Scenario("plain"), "backward 0", "all_gather", 0, ("gathered-again", "missing"))


def test_values_are_shown_in_one_line_of_moderate_length() -> None:
    finding = Finding("wrong-value", "…", torch.arange(100), list(range(1000)))
    assert str(finding.expected).startswith("[0, 1, 2, 3, 4, 5, 6, 7]… (100,)")
    assert len(str(finding.actual)) <= 300
    short = Finding("wrong-value", "…", torch.ones(2), True)
    assert (short.expected, short.actual) == ("[1.0, 1.0]", True)
