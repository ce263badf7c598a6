"""A finished log: its arithmetic on intervals, its answers about logs made by hand, and its file."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from figures import events_of, training_log
from hwfsdp import UsageError
from hwfsdp.observe.clocks import RankClock
from hwfsdp.observe.eventlog import EventLog, clocks_about
from hwfsdp.observe.events import Event, Sample
from hwfsdp.observe.step_times import Interval, intersect, length, subtract, union
from hwfsdp.observe.perfetto import to_trace
from hwfsdp.observe.run_info import GroupAbout, ParamAbout

# --- Intervals: the oracle is the set of the integers in them ----------------------------------------------

intervals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    max_size=8,
)


def points(of: list[Interval]) -> set[int]:
    """Return the integers i for which [i, i + 1] is covered."""
    return {i for start, end in of for i in range(int(start), int(end))}


@given(intervals, intervals)
def test_intervals_are_sets_of_points(a: list[Interval], b: list[Interval]) -> None:
    first, second = union(a), union(b)
    assert points(first) == points(a) and union(first) == first
    assert all(one[1] < other[0] for one, other in zip(first, first[1:], strict=False))
    both, left = intersect(first, second), subtract(first, second)
    assert points(both) == points(a) & points(b)
    assert points(left) == points(a) - points(b)
    for found in (first, both, left):
        assert length(found) == len(points(found))


# --- Selecting and merging ---------------------------------------------------------------------------------

STEP = (
    ("all_gather", "all_gather", 0, 10, {"bytes": 100, "owner": "a"}),
    ("wait", "compute", 0, 10, {"after": (0,)}),
    ("all_gather", "all_gather", 10, 30, {"bytes": 300, "owner": "b"}),
    ("forward", "compute", 10, 20, {"owner": "a"}),
    ("reduce_scatter", "reduce_scatter", 25, 35, {"bytes": 40, "owner": "b"}),
    ("backward", "compute", 20, 40, {"owner": "b"}),
    ("wait", "compute", 28, 30, {"after": (2,)}),
    ("optimizer", "compute", 40, 50),
)


# --- The summary -------------------------------------------------------------------------------------------


def test_the_summary_of_a_small_step_equals_the_one_computed_by_hand() -> None:
    """Communication 0–35; compute is busy 10–50 except for the wait 28–30: 12 µs are exposed, 23 hidden."""
    log = EventLog(
        events_of(0, *STEP),
        {0: [Sample(0, {"unsharded_param": 7, "x": 1}), Sample(5, {"unsharded_param": 3, "x": 2})]},
    )
    alone = {
        "step_us": 50,
        "exposed_comm_us": 12,
        "overlap_fraction": pytest.approx(23 / 35),
        "blocking": False,
        "peak_bytes_by_kind": {"unsharded_param": 7, "x": 2},
    }
    assert log.summary() == alone | {
        "bytes_by_op": {"all_gather": 400, "reduce_scatter": 40},
        "count_by_op": {"all_gather": 2, "reduce_scatter": 1},
        "peak_unsharded_bytes": 7,
        "by_rank": {0: alone},
        "skew_us": 0.0,
        "skew_max_us": 0.0,
        "slowest_rank": None,
    }


OUTER = ("forward", "compute", 0, 100)  # the module around the group, which is open all the time
GATHER = ("all_gather", "all_gather", 10, 20)
WAIT = ("wait", "compute", 14, 20, {"after": (1,)})
AGAIN = ("all_gather", "all_gather", 20, 30)
SCATTER = ("reduce_scatter", "reduce_scatter", 10, 20)


def test_communication_is_exposed_where_compute_does_nothing_or_waits_for_it_at_once() -> None:
    for rows, blocking, exposed, overlap in [
        ([OUTER, GATHER, WAIT, ("forward", "compute", 20, 30)], True, 10, 0),
        ([OUTER, GATHER, ("forward", "compute", 12, 13), WAIT], False, 6, 0.4),
        ([OUTER, GATHER, ("forward", "compute", 5, 12), WAIT], False, 6, 0.4),
        ([OUTER, GATHER, ("copy_in", "copy", 12, 13), WAIT], True, 10, 0),
        ([OUTER, GATHER], False, 0, 1),  # nothing waits for it
        ([OUTER, ("broadcast", "compute", 10, 20)], True, 10, 0),
        ([OUTER, GATHER, AGAIN, WAIT], False, 10, 0.5),
        ([OUTER], False, 0, 0),
        ([GATHER, ("copy_in", "copy", 10, 20)], False, 10, 0),
        ([GATHER, ("copy_in", "compute", 10, 20)], False, 0, 1),
        ([GATHER, ("alloc", "compute", 10, 20)], False, 10, 0),
        ([GATHER, SCATTER, ("backward", "compute", 10, 15)], False, 5, 0.5),
    ]:
        summary = EventLog(events_of(0, *rows)).summary()
        assert (summary["blocking"], summary["by_rank"][0]["blocking"]) == (blocking, blocking), rows
        assert (summary["exposed_comm_us"], summary["overlap_fraction"]) == (exposed, pytest.approx(overlap))


def test_times_are_per_optimizer_step_and_bytes_are_not() -> None:
    once, both = (training_log(1, 2, steps).summary() for steps in (1, 2))
    for times in ("step_us", "exposed_comm_us", "overlap_fraction"):
        assert both[times] == pytest.approx(once[times], rel=0.1)
    assert both["count_by_op"] == {op: 2 * n for op, n in once["count_by_op"].items()}


def test_a_summary_of_several_ranks_has_mean_times_maximum_memory_and_one_ranks_bytes() -> None:
    fast = [("all_gather", "all_gather", 0, 10, {"bytes": 8}), ("forward", "compute", 0, 10)]
    slow = [("all_gather", "all_gather", 0, 10, {"bytes": 8}), ("forward", "compute", 10, 30)]
    log = EventLog.merge(
        EventLog(events_of(rank, *rows), {rank: [Sample(0, {"unsharded_param": peak})]})
        for rank, rows, peak in ((0, fast, 5), (1, slow, 9))
    )
    found = log.summary()
    assert (found["step_us"], found["exposed_comm_us"], found["overlap_fraction"]) == (20, 5, 0.5)
    assert (found["bytes_by_op"], found["count_by_op"]) == ({"all_gather": 8}, {"all_gather": 1})
    assert found["peak_unsharded_bytes"] == found["peak_bytes_by_kind"]["unsharded_param"] == 9
    for rank, times in found["by_rank"].items():
        alone = log.of_rank(rank).summary()
        assert times == {name: alone[name] for name in times}
    assert (found["skew_us"], found["skew_max_us"], found["slowest_rank"]) == (0.0, 0.0, None)


def gathers(rank: int, *begins: float, owner: str = "a") -> list[Event]:
    return events_of(rank, *(("all_gather", "all_gather", t, t + 1, {"owner": owner}) for t in begins))


def test_skew_measures_how_late_the_last_rank_is_and_names_it() -> None:
    for events, skew, most, slowest in [
        ([*gathers(0, 0, 10, 20), *gathers(1, 3, 10, 29), *gathers(2, 1, 4, 20)], (3 + 6 + 9) / 3, 9, 1),
        ([*gathers(0, 1, 11, 21, 30), *gathers(1, 0, 10, 20, 90)], (1 + 1 + 1 + 60) / 4, 60, 1),
        ([*gathers(0, 0, 50), *gathers(1, 2), *gathers(2, 90, owner="b")], 2, 2, 1),
        ([*gathers(0, 0, 10, 20), *gathers(1, 5, 15, 20), *gathers(2, 0, 10, 28)], (5 + 5 + 8) / 3, 8, 1),
    ]:
        found = EventLog(events).summary()
        assert (found["skew_us"], found["skew_max_us"], found["slowest_rank"]) == (skew, most, slowest)


# --- One axis ----------------------------------------------------------------------------------------------


def clocked(rank: int, origin: float, machine: str = "here") -> EventLog:
    """Make a log with a gather 5 µs after the beginning, and a sample."""
    clocks = clocks_about({rank: RankClock(origin, machine)})
    return EventLog(gathers(rank, 5), {rank: [Sample(6, {"x": 1})]}, {"torch": "2", **clocks})


def test_ranks_of_one_machine_are_put_on_one_axis_that_begins_with_the_first() -> None:
    merged = EventLog.merge([clocked(0, 1030.0), clocked(1, 1000.0)])
    assert [(e.rank, e.start_us, e.dur_us) for e in merged.events] == [(0, 35, 1), (1, 5, 1)]
    assert [merged.samples[rank][0].us for rank in (0, 1)] == [36, 6]
    assert set(merged.clocks.values()) == {RankClock(1000.0, "here")}
    assert merged.about["torch"] == "2"
    assert merged.summary()["skew_us"] == 30


def test_ranks_of_machines_that_were_not_compared_keep_their_own_time_and_have_no_skew() -> None:
    merged = EventLog.merge([clocked(0, 1030.0), clocked(1, 7.0, "there")])
    assert [e.start_us for e in merged.events] == [5, 5]
    assert merged.clocks == {0: RankClock(1030.0, "here"), 1: RankClock(7.0, "there")}
    assert merged.summary()["skew_us"] is None


def test_ranks_in_lockstep_have_equal_steps_even_if_one_begins_or_ends_late() -> None:
    early, late = clocked(0, 1000.0), clocked(1, 1040.0)
    ends = [("optimizer", "compute", at, at + 10, {"step": n}) for n, at in enumerate((90, 190))]
    more = ("all_reduce", "compute", 200, 280, {"step": 2})
    early.events = events_of(0, ("forward", "compute", 0, 90), *ends, more)
    late.events = events_of(1, *((op, stream, a - 40, b - 40, step) for op, stream, a, b, step in ends))
    by_rank = EventLog.merge([early, late]).summary()["by_rank"]
    assert [by_rank[rank]["step_us"] for rank in (0, 1)] == [100, 100]


def test_an_empty_log_has_a_summary_of_zeros() -> None:
    summary = EventLog().summary()
    assert not any(value for value in summary.values())
    assert set(summary) == set(EventLog(events_of(0, *STEP)).summary())


# --- Order across ranks; for one rank, see test_races.py ----------------------------------------------------


def test_nothing_happens_before_itself_or_before_events_of_another_rank() -> None:
    rows = [GATHER, ("wait", "compute", 10, 22, {"after": (0,)})]
    log = EventLog(events_of(0, *rows) + events_of(1, *rows))
    ordered = [
        (a.rank, a.seq, b.rank, b.seq) for a in log.events for b in log.events if log.happens_before(a, b)
    ]
    assert ordered == [(0, 0, 0, 1), (1, 0, 1, 1)]
    log.events += events_of(2, *rows)  # a log may grow
    assert log.happens_before(*log.events[-2:])


# --- The file ----------------------------------------------------------------------------------------------


PARAM = ParamAbout("weight", (3, 2), "float32", "float32", 4, "float32", 4, True)
ABOUT: dict[str, Any] = {
    "world_size": 2,
    "torch": "2.13",
    "device": "cpu",
    "clocks": {"0": [1.5, "here"]},
    "groups": [asdict(GroupAbout("", 2, 1, 0, (PARAM,)))],
}
GONE = "this field is taken away"


def forged(place: str, field: str, value: Any) -> str:
    """Make a trace of one event and one sample with one value replaced. A string between @ is written without quotes."""
    log = EventLog([Event(0, 0, "forward", "compute")], {0: [Sample(0, {"x": 1})]}, ABOUT)
    trace = json.loads(json.dumps(to_trace(log.events, log.samples, log.about)))
    counter = next(e for e in trace["traceEvents"] if e["ph"] == "C")
    about = trace["otherData"]["hwfsdp"]
    places = {
        "event": next(e for e in trace["traceEvents"] if e["ph"] == "X")["args"],
        "sample": counter,
        "sample's args": counter["args"],
        "about": about,
        "group": about["groups"][0],
        "param": about["groups"][0]["params"][0],
    }
    places[place][field] = value
    if value == GONE:
        del places[place][field]
    return re.sub('"@(.*?)@"', r"\1", json.dumps(trace))


FORGED = [
    *(("event", "dur_us", value) for value in ("@1e999@", -5.0, "long", True)),
    *(("event", "bytes", value) for value in (10**400, -5, 1.5)),
    ("event", "rank", 10**18),
    *(("event", field, GONE) for field in ("seq", "after")),
    *(("event", "after", value) for value in ([True], 7, [10**30])),
    ("event", "reads", [-1]),
    ("event", "owner", 3),
    *(("event", field, "unknown") for field in ("op", "stream", "color")),
    *(("sample", field, value) for field, value in (("pid", 0), ("ts", "@1e999@"), ("name", 7))),
    *(("sample's args", "bytes", value) for value in ("many", -1, GONE)),
    *(("about", "clocks", value) for value in (7, {"0": [1]}, {"zero": [1, "m"]}, {"-1": [1, "m"]})),
    *(("about", "world_size", value) for value in (0, "2", 10**30)),
    *(("about", "groups", value) for value in (7, [3])),
    ("group", "shards", 0),
    *(("param", "shape", value) for value in ([], [-3], 3)),
    *(("param", field, 10**9) for field in ("gather_itemsize", "fqn", "trained")),
]


def test_a_value_that_no_recording_writes_is_refused_in_one_line_that_names_its_field(tmp_path: Path) -> None:
    for place, field, value in FORGED:
        path = tmp_path / "trace.json"
        path.write_text(forged(place, field, value))
        with pytest.raises(UsageError) as refusal:
            EventLog.load(path)
        said = str(refusal.value)
        assert said.startswith(f"trace {str(path)!r}: ")
        assert field in said and said.isprintable() and len(said) < 300 + len(str(path))


def test_a_file_that_is_no_log_is_refused_in_one_line_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for content in [
        None,
        b"",
        b"{}",
        b'{"traceEvents": [null]}',
        b'{"traceEvents": [{"name": "no phase"}]}',
        json.dumps(to_trace([Event(0, 0, "forward", "compute")] * 2, {})).encode(),  # two of one number
        b"[" * 100_000,
        b'{"traceEvents": ' + b"9" * 5000 + b"}",
        bytes(range(256)),
    ]:
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UsageError) as refusal:
            EventLog.load(path)
        assert str(path) in str(refusal.value)
        assert "\n" not in str(refusal.value) and "ValueError" not in str(refusal.value)
