"""The place where ranks diverge is found, named in one sentence, and shown: for made-up histories and for real ranks."""

from __future__ import annotations

import itertools
import os
import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

from hwfsdp import RankError
from hwfsdp.cli import command
from hwfsdp.comm.desync_report import Report, describe_divergence, place_in
from hwfsdp.comm.flight_recorder import SLOTS, NotedCall, State

# --- Made-up histories -------------------------------------------------------------------------------------


def calls(
    *owners: str, group: str = "0:0-3/1", last: State = State.WAIT, op: str = "all_gather"
) -> list[NotedCall]:
    """Make calls of a rank. All but the last one are done."""
    states = [State.DONE] * (len(owners) - 1) + [last]
    return [
        NotedCall(n, n, False, group, op, "float32", 1024, owner, state)
        for n, (owner, state) in enumerate(zip(owners, states, strict=True), 1)
    ]


def on_all(world_size: int, *owners: str, last: State = State.WAIT) -> list[Report]:
    group = f"0:0-{world_size - 1}/1"
    return [Report(rank, calls(*owners, group=group, last=last)) for rank in range(world_size)]


def sentence(reports: list[Report]) -> str:
    return describe_divergence(reports).partition("\n")[0]


def marked(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(">")]


def one_behind() -> list[Report]:
    reports = on_all(3, "a", "b", "c", last=State.OPEN)
    reports[1] = Report(1, reports[1].calls[:2])  # type: ignore[index]
    return reports


def got_over() -> list[Report]:
    """Make reports with an old difference in a group that no longer exists."""
    reports = []
    for rank, owner in enumerate("ab"):
        failed = calls(owner, group="old:0-1/1", last=State.FAILED)
        later = calls("c", "d", group="new:0-1/1", last=State.DONE)
        reports.append(Report(rank, failed + [c._replace(serial=c.serial + 1) for c in later]))
    return reports


IN_ORDER = {
    "agree and have ended": on_all(4, "a", "b", "c", last=State.DONE),
    "agree and wait for nothing": on_all(4, "a", "b", "c", last=State.OPEN),
    "nothing known": [],
    "no history": [Report(0, None), Report(1, [])],
    "one is behind while nobody waits": one_behind(),
    "a difference that was got over": got_over(),
}


def test_ranks_without_a_problem_get_no_table() -> None:
    for case in IN_ORDER:
        assert describe_divergence(IN_ORDER[case]) == ""


@given(st.integers(3, 8), st.integers(0, 30), st.integers(0, 7))
def test_the_table_marks_the_first_call_in_which_ranks_differ(world_size, place, rank):
    rank %= world_size
    owners = [f"blocks.{n}" for n in range(31)]
    reports = on_all(world_size, *owners)
    own = reports[rank].calls or []
    own[place] = own[place]._replace(op="reduce_scatter", owner="head")
    text = describe_divergence(reports)
    others = [r for r in range(world_size) if r != rank]
    assert text.startswith(f"rank {rank} called reduce_scatter of 'head' where ranks {others[0]}")
    called = f" called all_gather of 'blocks.{place}': collective {place + 1} of ranks 0–{world_size - 1}."
    assert called in text
    first, second = (line.split() for line in marked(text))
    assert first[1:4] == [str(place + 1), "all_gather", f"blocks.{place}"]
    assert second[1:3] == ["reduce_scatter", "head"]
    cells = [(a != "–", b != "–") for a, b in zip(first[-world_size:], second[-world_size:], strict=True)]
    assert cells == [(r != rank, r == rank) for r in range(world_size)]


def test_an_absent_rank_is_named_with_its_place_or_its_end() -> None:
    for left, place, says in [
        ("", "train.py:41, in load", "; rank 2 is in train.py:41, in load."),
        ("raised KeyError: 'x'", "t.py:3, in f", "; rank 2 raised KeyError: 'x' in t.py:3, in f."),
        ("has returned", "", "; rank 2 has returned."),
        ("", "", "."),
    ]:
        reports = on_all(4, "a", "b", "c")
        reports[2] = Report(2, calls("a", "b", last=State.DONE), left, place)
        waiting = "ranks 0, 1 and 3 wait in collective 3 of ranks 0–3, all_gather of 'c'"
        assert sentence(reports) == f"{waiting}; rank 2 has not called it{says}"
        assert len(marked(describe_divergence(reports))) == 1


def test_the_error_names_the_absent_rank_that_waits_for_no_other() -> None:
    """Rank 3 is lost. Rank 2 waits for it, so rank 2 does not reach the collective in which rank 0 waits."""
    reports = [
        Report(0, calls("a", "b", group="x:0-2/2")),
        Report(1, []),
        Report(2, calls("a", group="x:0-2/2", last=State.DONE) + calls("a", "b", group="y:2-3/1")),
        Report(3, calls("a", group="y:2-3/1", last=State.DONE), place="t.py:9, in f"),
    ]
    waiting = "rank 2 waits in collective 2 of ranks 2 and 3, all_gather of 'b'"
    assert sentence(reports) == f"{waiting}; rank 3 has not called it; rank 3 is in t.py:9, in f."


def test_ranks_that_wait_in_a_circle_are_both_shown() -> None:
    first, second = calls("a", group="x:0-1/1"), calls("b", group="y:0-1/1")
    text = describe_divergence([Report(0, first), Report(1, second)])
    assert text.startswith(
        "rank 0 waits in collective 1 of ranks 0 and 1, all_gather of 'a'; rank 1 has not called it; "
        "rank 1 waits in all_gather of 'b', collective 1 of ranks 0 and 1."
    )
    assert len(marked(text)) == 2


def test_a_silent_rank_and_one_whose_ring_has_lost_the_group_are_not_blamed() -> None:
    busy = [c._replace(serial=n, number=n) for n, c in enumerate(calls("a") * SLOTS, 5)]
    busy = [c._replace(group="y:1-1/1", state=State.DONE) for c in busy]
    for unknown in (None, busy):
        text = describe_divergence([Report(0, calls("a", "b", group="x:0-1/1")), Report(1, unknown)])
        known = "rank 0 waits in all_gather of 'b', collective 2 of ranks 0 and 1"
        assert text.startswith(f"{known}; nothing is known of rank 1 there.\n")
        assert [line.split()[-2:] for line in marked(text)] == [["wait", "?"]]


def test_a_table_is_aligned_and_fits_at_any_number_of_ranks() -> None:
    for world_size, name in itertools.product(
        (2, 8, 512), ("0", "_orig_mod.model.layers.31.feed_forward.w2")
    ):
        reports = on_all(world_size, *(f"{name}.{n}" for n in range(12)))
        reports[1] = Report(1, [*(reports[1].calls or [])[:9]], place="train.py:41, in load")
        text = describe_divergence(reports)
        rows = text.split("\n\n")[1].splitlines()
        assert len({len(row) for row in rows}) == 1 and len(rows[0]) <= 100
        assert max(map(len, text.splitlines())) <= 160
        if world_size > 8 or name == "0":  # else a column for each rank does not fit
            assert ("ranks 0, 2–" in rows[0]) == (world_size > 8)


def test_different_sizes_and_an_additional_collective_of_one_ranks_script_are_told_apart() -> None:
    recorded, waiting = calls("a", "b", group="0:0-1/1"), calls("a", group="0:0-1/1")
    larger = waiting[0]._replace(nbytes=2048)
    own = NotedCall(2, 2, True, "0:0-1/1", "all_reduce", "float32", 4, "", State.WAIT)
    for first, second, says in [
        (
            waiting,
            [larger],
            "'a' (2,048 bytes of float32) where rank 0 called all_gather of 'a' (1,024 bytes",
        ),
        ([recorded[0], own], recorded, "called all_reduce (yours) where rank 1 called all_gather of 'b': "),
    ]:
        assert says in sentence([Report(0, first), Report(1, second)])


def test_a_place_is_the_innermost_line_of_the_user() -> None:
    def frame(path: str, line: int, name: str) -> str:
        return f'  File "{path}", line {line}, in {name}\n    code\n'

    inside = (
        frame(threading.__file__, 3, "wait") + frame(torch.__file__, 4, "f") + frame(command.__file__, 5, "g")
    )
    user = frame("/elsewhere/train.py", 1, "main") + frame("/elsewhere/data.py", 2, "load")
    assert place_in(user + inside) == "/elsewhere/data.py:2, in load"
    assert place_in(frame(os.path.abspath("train.py"), 7, "main")) == "train.py:7, in main"
    assert place_in(inside).endswith(":5, in g")
    assert place_in("no stack") == ""


def test_the_command_prints_the_first_line_and_the_table_but_no_traceback(capsys, monkeypatch):
    error = RankError(1, "KeyError: 'x'", "Traceback\n  of rank 1", "The traceback below is that rank's.")
    error.table = "a sentence.\n\n> a table"
    assert command._fail(error, 1) == 1
    err = capsys.readouterr().err
    assert err.splitlines() == [
        *("hwfsdp: a sentence.", "", "> a table", ""),
        "rank 1 raised KeyError: 'x'. (HWFSDP_TRACEBACK=1 shows its traceback.)",
    ]
    monkeypatch.setenv("HWFSDP_TRACEBACK", "1")
    command._fail(error, 1)
    assert [*capsys.readouterr().err.splitlines()][-2:] == ["Traceback", "  of rank 1"]
