"""The trace file keeps the rules of ui.perfetto.dev (`trace_rules`), and says what the log says.

`Viewer` reads a trace as the viewer's importer does (v52): entries in order of time, those of one time the longest first and
otherwise in the order of the file, a stack of slices per track, and an arrow ends at whatever is on top of its track's stack.
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import even
from oracles import ours, wrap
from trace_rules import RULES, broken_rules

from hwfsdp import launch, record
from hwfsdp.eventlog import EventLog
from hwfsdp.events import OPS, STREAMS, Event, Sample
from hwfsdp.lifetimes import STATES, find_lifetimes
from hwfsdp.perfetto import from_trace, nested_intervals, to_trace

Entry = dict[str, Any]
Track = tuple[int, int]

LOG = [
    Event(0, 0, "copy_in", "copy", "a", start_us=0.0, dur_us=2.0, bytes=8),
    Event(0, 1, "all_gather", "all_gather", "a", start_us=2.0, dur_us=5.0, bytes=16, after=(0,)),
    Event(0, 2, "wait", "compute", "a", start_us=3.0, dur_us=4.5, after=(1,)),
    Event(0, 3, "forward", "compute", "a", start_us=8.0, dur_us=4.0),
    Event(0, 4, "alloc", "compute", "a", start_us=9.0, bytes=32),
    Event(2, 0, "forward", "compute", "", start_us=1.0, dur_us=1.0, phase="forward"),
    Event(2, 1, "reduce_scatter", "reduce_scatter", "b", start_us=2.0, dur_us=1.0, after=(0,)),
]
SAMPLES = {0: [Sample(1.0, {"sharded_param": 4, "unsharded_param": 0}), Sample(4.0, {"sharded_param": 8})]}


def entries(phase: str, trace: dict[str, Any] | None = None) -> list[Entry]:
    trace = trace or to_trace(LOG, SAMPLES)
    return [entry for entry in trace["traceEvents"] if entry["ph"] == phase]


def track(entry: Entry) -> Track:
    return entry["pid"], entry["tid"]


def is_inside(inner: tuple[float, float], outer: tuple[float, float]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


# --- The file ----------------------------------------------------------------------------------------------


def test_the_file_is_one_object_with_the_events_and_the_unit(tmp_path: Path) -> None:
    EventLog(LOG, SAMPLES).save(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)
    assert set(content) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert content["displayTimeUnit"] == "ms"
    assert len(content["traceEvents"]) > len(LOG)


def test_a_name_that_ends_in_gz_gives_a_compressed_file_and_both_read_alike(tmp_path: Path) -> None:
    log = EventLog(LOG, SAMPLES, {"world_size": 2, "torch": "2.13", "device": "cpu", "groups": []})
    for name in ("trace.json", "trace.json.gz"):
        log.save(tmp_path / name)
        assert EventLog.load(tmp_path / name) == log
    compressed = (tmp_path / "trace.json.gz").read_bytes()
    assert gzip.decompress(compressed) == (tmp_path / "trace.json").read_bytes()
    log.save(tmp_path / "again.json.gz")
    assert (tmp_path / "again.json.gz").read_bytes() == compressed


def test_processes_are_ranks_counted_from_one() -> None:
    for entry in to_trace(LOG, SAMPLES)["traceEvents"]:
        assert entry["pid"] in (1, 3)
    assert {e["pid"]: e["args"]["name"] for e in entries("M") if e["name"] == "process_name"} == {
        1: "rank 0",
        3: "rank 2",
    }


def test_a_track_is_a_stream_the_same_number_on_every_rank_and_has_its_name() -> None:
    names = {track(e): e["args"]["name"] for e in entries("M") if e["name"] == "thread_name"}
    for entry in entries("X"):
        assert names[track(entry)] == entry["args"]["stream"]
    numbers = {(tid, name) for (_, tid), name in names.items()}
    assert len(numbers) == len({tid for tid, _ in numbers}) == len({name for _, name in numbers})


@pytest.mark.parametrize("stream", STREAMS)
def test_no_stream_has_the_number_of_the_process_itself(stream: str) -> None:
    (entry,) = entries("X", to_trace([Event(0, 0, "wait", stream)], {}))
    assert entry["tid"] >= 1


@pytest.mark.parametrize(
    ("kind", "number_of"),
    [
        ("process_name", lambda e: e["pid"]),
        ("process_sort_index", lambda e: e["pid"]),
        ("thread_name", track),
        ("thread_sort_index", track),
    ],
)
def test_every_process_and_track_with_slices_is_described_once_and_no_other(
    kind: str, number_of: Callable[[Entry], Any]
) -> None:
    described = [number_of(e) for e in entries("M") if e["name"] == kind]
    assert sorted(described) == sorted({number_of(e) for e in entries("X")})


@pytest.mark.parametrize("kind", ["process_sort_index", "thread_sort_index"])
def test_ranks_and_streams_are_sorted_by_their_number(kind: str) -> None:
    place = {"process_sort_index": "pid", "thread_sort_index": "tid"}[kind]
    found = sorted((e["args"]["sort_index"], e[place]) for e in entries("M") if e["name"] == kind)
    assert [number for _, number in found] == sorted(number for _, number in found)


# --- Slices ------------------------------------------------------------------------------------------------

times = st.integers(0, 20).map(float)
any_log = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(STREAMS[:2]), times, times), max_size=12).map(
    lambda rows: [
        Event(rank, seq, "forward", stream, start_us=start, dur_us=dur)
        for seq, (rank, stream, start, dur) in enumerate(rows)
    ]
)


def test_a_slice_has_the_times_of_its_event_in_microseconds_and_all_of_it_as_arguments() -> None:
    for event, entry in zip(LOG, entries("X"), strict=True):
        assert (entry["ts"], entry["dur"]) == (event.start_us, event.dur_us)
        assert entry["ts"] * 1000 == int(entry["ts"] * 1000)
        assert entry["args"] == event.as_dict()
        assert entry["cat"] == event.op
        assert entry["name"] == f"{event.op} {event.owner}".strip()


@given(any_log)
def test_slices_of_one_track_nest_or_are_apart(log: list[Event]) -> None:
    drawn = [(track(e), (e["ts"], e["ts"] + e["dur"])) for e in entries("X", to_trace(log, {}))]
    assert len(drawn) == len(log)
    for i, (place, a) in enumerate(drawn):
        for other, b in drawn[:i]:
            apart = a[1] <= b[0] or b[1] <= a[0]
            assert place != other or apart or is_inside(a, b) or is_inside(b, a)


@given(any_log)
def test_drawing_moves_no_beginning_and_lengthens_nothing(log: list[Event]) -> None:
    drawn = nested_intervals(log)
    for event in log:
        start, end = drawn[event.rank, event.seq]
        assert start == event.start_us <= end <= event.end_us


@given(any_log)
def test_what_nests_already_is_drawn_as_it_is(log: list[Event]) -> None:
    apart = [Event(e.rank, e.seq, e.op, e.stream, start_us=100.0 * e.seq, dur_us=e.dur_us * 4) for e in log]
    inside = [
        Event(e.rank, e.seq + 100, e.op, e.stream, start_us=e.start_us + e.dur_us / 4, dur_us=e.dur_us / 2)
        for e in apart
    ]
    drawn = nested_intervals([*apart, *inside])
    assert all(drawn[e.rank, e.seq] == (e.start_us, e.end_us) for e in (*apart, *inside))


@pytest.mark.parametrize("durations", [(2.0, 5.0), (5.0, 2.0)])
def test_of_two_that_begin_together_the_shorter_lies_inside_the_longer(
    durations: tuple[float, float],
) -> None:
    log = [Event(0, seq, "forward", "compute", dur_us=dur) for seq, dur in enumerate(durations)]
    assert [nested_intervals(log)[0, seq] for seq in (0, 1)] == [(0, dur) for dur in durations]


def test_a_slice_that_would_cross_the_end_of_an_earlier_one_is_cut_there() -> None:
    log = [
        Event(0, 0, "forward", "compute", start_us=0, dur_us=10),
        Event(0, 1, "forward", "compute", start_us=5, dur_us=10),
        Event(0, 2, "forward", "copy", start_us=5, dur_us=10),
        Event(1, 0, "forward", "compute", start_us=5, dur_us=10),
    ]
    assert list(nested_intervals(log).values()) == [(0, 10), (5, 10), (5, 15), (5, 15)]


def test_a_slice_that_begins_where_the_one_before_ends_is_drawn_whole_though_rounding_says_otherwise() -> (
    None
):
    log = [
        Event(0, 0, "forward", "compute", start_us=0.1, dur_us=0.2),
        Event(0, 1, "forward", "compute", start_us=0.3, dur_us=1.0),
    ]
    assert log[0].end_us > log[1].start_us
    assert nested_intervals(log)[0, 1] == (0.3, 1.3)


def test_a_slice_that_ends_with_the_one_around_it_does_so_in_the_viewers_nanoseconds_too() -> None:
    log = [
        Event(0, 0, "forward", "compute", start_us=0.0009, dur_us=9.9995),
        Event(0, 1, "forward", "compute", start_us=5.0, dur_us=7.0),
    ]
    assert broken_rules(to_trace(log, {})) == {}


# --- Arrows ------------------------------------------------------------------------------------------------


def arrows(trace: dict[str, Any] | None = None) -> list[tuple[Entry, Entry]]:
    """Begin and end of each arrow, matched as the viewer does."""
    begins = {(e["cat"], e["name"], e["id"]): e for e in entries("s", trace)}
    ends = {(e["cat"], e["name"], e["id"]): e for e in entries("f", trace)}
    assert len(begins) == len(entries("s", trace)) == len(entries("f", trace))
    assert set(begins) == set(ends)
    return [(begins[key], ends[key]) for key in begins]


def test_each_wait_for_another_event_is_an_arrow() -> None:
    waits = [(e.rank + 1, seq, e.seq) for e in LOG for seq in e.after]
    assert len(arrows()) == len(waits) == 3


def test_an_event_waited_for_that_is_not_in_the_log_gives_no_arrow() -> None:
    log = [Event(1, 0, "forward", "compute"), Event(0, 5, "wait", "compute", after=(-1, 0, 3))]
    assert arrows(to_trace(log, {})) == []


def test_an_arrow_begins_inside_its_slice_and_binds_to_the_slice_around_its_end() -> None:
    slices = entries("X")
    for begin, end in arrows():
        assert end["bp"] == "e"
        for place in (begin, end):
            around = [s for s in slices if track(s) == track(place)]
            assert [s for s in around if s["ts"] <= place["ts"] <= s["ts"] + s["dur"]]


@given(any_log)
def test_an_arrow_begins_inside_its_slice_even_where_that_was_cut(log: list[Event]) -> None:
    waiting = [
        Event(
            e.rank, 100 + e.seq, "wait", STREAMS[2], start_us=100 + 50.0 * e.seq, dur_us=9.0, after=(e.seq,)
        )
        for e in log
    ]
    trace = to_trace([*log, *waiting], {})
    drawn = {(s["args"]["rank"], s["args"]["seq"]): s for s in entries("X", trace)}
    assert len(arrows(trace)) == len(log)
    for begin, end in arrows(trace):
        (target,) = [e for e in waiting if e.start_us <= end["ts"] <= e.end_us and e.rank + 1 == end["pid"]]
        source = drawn[target.rank, target.after[0]]
        assert track(begin) == track(source)
        assert source["ts"] <= begin["ts"] <= source["ts"] + source["dur"]


class Viewer:
    """Which slices the arrows of a trace connect, as (seq, seq), once the viewer has imported it."""

    def __init__(self, trace: dict[str, Any]) -> None:
        self.stacks: dict[Track, list[Entry]] = {}
        self.begun: dict[int, Entry] = {}
        self.connections: list[tuple[int, int]] = []
        timed = [e for e in trace["traceEvents"] if e["ph"] in "Xsf"]
        for entry in sorted(timed, key=lambda e: (e["ts"], -e.get("dur", 0))):  # stable
            {"X": self.slice, "s": self.begin, "f": self.end}[entry["ph"]](entry)

    def slice(self, entry: Entry) -> None:
        stack = self.stacks.setdefault(track(entry), [])
        while stack and self.is_over(stack[-1], entry):
            stack.pop()
        stack.append(entry)

    @staticmethod
    def is_over(open_one: Entry, new: Entry) -> bool:
        """Slices are open on the right; instants at the same time lie on top of each other."""
        end, both_instants = open_one["ts"] + open_one["dur"], open_one["dur"] == new["dur"] == 0
        return end < new["ts"] or (end == new["ts"] and not both_instants)

    def begin(self, entry: Entry) -> None:
        if stack := self.stacks.get(track(entry)):
            self.begun[entry["id"]] = stack[-1]

    def end(self, entry: Entry) -> None:
        stack = self.stacks.get(track(entry))
        if stack and entry["id"] in self.begun:
            source = self.begun[entry["id"]]
            self.connections.append((source["args"]["seq"], stack[-1]["args"]["seq"]))


def gather(seq: int, start: float, dur: float, after: tuple[int, ...] = ()) -> Event:
    return Event(0, seq, "all_gather", "all_gather", start_us=start, dur_us=dur, after=after)


def on_compute(seq: int, op: str, start: float, dur: float, after: tuple[int, ...] = ()) -> Event:
    return Event(0, seq, op, "compute", start_us=start, dur_us=dur, after=after)


@pytest.mark.parametrize(
    "log",
    [
        [gather(0, 0, 5), on_compute(1, "wait", 2, 4, after=(0,))],
        [gather(0, 0, 5), gather(1, 5, 5), on_compute(2, "wait", 2, 4, after=(0,))],
        [gather(0, 0, 5), gather(1, 5, 9), on_compute(2, "wait", 1, 14, after=(1,))],
        [
            on_compute(0, "forward", 0, 10),
            on_compute(1, "forward", 2, 3),
            gather(2, 11, 5, after=(0,)),
        ],
        [
            on_compute(0, "copy_in", 0, 10),
            gather(1, 10, 5, after=(0,)),
            on_compute(2, "forward", 10, 9),
        ],
        [
            gather(0, 0, 5),
            on_compute(1, "wait", 5, 1, after=(0,)),
            on_compute(2, "forward", 6, 1),
        ],
        [gather(0, 0, 5), on_compute(1, "backward", 1, 20), on_compute(2, "wait", 6, 2, after=(0,))],
        [gather(0, 0, 7), on_compute(1, "wait", 2, 4, after=(0,))],
        [gather(0, 4, 0), on_compute(1, "wait", 4, 0, after=(0,))],
        [
            gather(0, 0, 5),
            gather(1, 5, 0),
            on_compute(2, "copy_in", 1, 2),
            gather(3, 5, 4, after=(2,)),
            on_compute(4, "wait", 11, 1, after=(3,)),
        ],
        [gather(0, 0, 5), on_compute(1, "forward", 6, 9, after=(0,)), on_compute(2, "copy_out", 6, 2)],
        [gather(0, 0, 5.06), gather(1, 5.06, 4), on_compute(2, "wait", 2, 9, after=(0,))],
        LOG[:5],
    ],
    ids=[
        "a wait for a gather",
        "the next gather begins where this one ends",
        "the gather begins later than the wait for it",
        "the source has another slice inside",
        "the next slice begins where the source ends",
        "the next slice begins where the target ends",
        "the target is inside another slice",
        "the news of the gather's end came after the wait",
        "no time passed",
        "an instant begins with its neighbor",
        "the target has another slice inside from its beginning",
        "times between two points of the grid",
        "a bit of everything",
    ],
)
def test_the_viewer_draws_each_arrow_between_the_two_slices_it_is_about(log: list[Event]) -> None:
    expected = sorted((seq, e.seq) for e in log for seq in e.after)
    assert sorted(Viewer(to_trace(log, {})).connections) == expected


# --- Lifetimes and counters --------------------------------------------------------------------------------


def on_rank_0(*rows: tuple[Any, ...]) -> list[Event]:
    """Events of group "a" from rows (op, stream, start, end[, keys])."""
    return [
        Event(0, seq, op, stream, "a", start_us=start, dur_us=end - start, writes=tuple(*keys))
        for seq, (op, stream, start, end, *keys) in enumerate(rows)
    ]


GATHERED_TWICE = on_rank_0(
    ("forward", "compute", 0.0, 1.0),
    ("copy_in", "copy", 2.0, 3.0),
    ("all_gather", "all_gather", 3.0, 6.0),
    ("alloc", "compute", 6.0, 6.0, [1]),
    ("alloc", "compute", 6.5, 6.5, [2]),
    ("copy_out", "compute", 7.0, 8.0),
    ("free", "compute", 10.0, 10.0, [1]),
    ("free", "compute", 11.0, 11.0, [2]),
    ("copy_in", "copy", 12.0, 13.0),
    ("alloc", "compute", 14.0, 14.0, [1]),
    ("copy_out", "compute", 14.0, 15.0),
    ("copy_in", "compute", 16.0, 17.0),
    ("free", "compute", 18.0, 18.0, [9]),
    ("optimizer", "compute", 19.0, 20.0),
)


def test_a_group_is_sharded_then_gathering_until_the_copy_out_then_full_until_its_last_free() -> None:
    assert [lifetime[2:] for lifetime in find_lifetimes(GATHERED_TWICE)] == [
        ("sharded", 0.0, 2.0),
        ("gathering", 2.0, 8.0),
        ("full", 8.0, 11.0),
        ("freed", 11.0, 12.0),
        ("gathering", 12.0, 15.0),
        ("full", 15.0, 20.0),
    ]


def test_a_group_that_is_freed_before_any_gather_was_full_when_the_recording_began() -> None:
    log = on_rank_0(("forward", "compute", 1.0, 4.0), ("free", "compute", 4.0, 4.0, [7]))
    log += [Event(0, 9, "optimizer", "compute", start_us=4.0, dur_us=2.0)]
    assert [lifetime[2:] for lifetime in find_lifetimes(log)] == [("full", 1.0, 4.0), ("freed", 4.0, 6.0)]


def test_a_gather_that_nobody_came_for_goes_on_until_the_next_one() -> None:
    log = on_rank_0(("all_gather", "all_gather", 0.0, 2.0), ("copy_in", "copy", 5.0, 6.0))
    assert [lifetime[2:] for lifetime in find_lifetimes(log)] == [
        ("gathering", 0.0, 5.0),
        ("gathering", 5.0, 6.0),
    ]


def test_a_groups_track_has_its_name_around_its_states_and_an_id_of_its_own_in_its_process() -> None:
    other = [Event(e.rank, e.seq + 50, e.op, e.stream, "b", start_us=e.start_us) for e in GATHERED_TWICE]
    elsewhere = [Event(1, e.seq, e.op, e.stream, "a", start_us=e.start_us) for e in GATHERED_TWICE]
    trace = to_trace([*GATHERED_TWICE, *other, *elsewhere], {})
    ids: dict[tuple[int, str], str] = {}
    for entry in entries("b", trace):
        if entry["name"] in ("a", "b"):
            ids[entry["pid"], entry["id2"]["local"]] = entry["name"]
        else:
            assert entry["name"] in STATES
            assert ids[entry["pid"], entry["id2"]["local"]] == entry["args"]["group"]
    assert sorted((pid, name) for (pid, _), name in ids.items()) == [(1, "a"), (1, "b"), (2, "a")]
    assert broken_rules(trace) == {}


def test_a_kind_of_memory_is_a_counter_track_of_its_own_with_one_number() -> None:
    found = [(e["pid"], e["name"], e["ts"], e["args"]) for e in entries("C")]
    assert found == [
        (1, "memory: sharded_param", 1.0, {"bytes": 4}),
        (1, "memory: unsharded_param", 1.0, {"bytes": 0}),
        (1, "memory: sharded_param", 4.0, {"bytes": 8}),
    ]


# --- Back again --------------------------------------------------------------------------------------------


def test_reading_gives_back_events_and_samples_whatever_the_order_of_the_entries() -> None:
    trace = to_trace(LOG, SAMPLES)
    assert from_trace(trace) == (LOG, SAMPLES, {})
    assert from_trace(to_trace(LOG, SAMPLES, {"world_size": 2})).about == {"world_size": 2}
    slices_last = sorted(trace["traceEvents"], key=lambda e: (e["ph"] == "X", -e.get("ts", 0)))
    assert from_trace({"traceEvents": slices_last})[0] == LOG


@given(any_log)
def test_reading_gives_back_the_true_times_of_what_was_cut(log: list[Event]) -> None:
    found = from_trace(json.loads(json.dumps(to_trace(log, {}))))
    assert found.events == sorted(log, key=lambda e: (e.rank, e.seq))


@pytest.mark.parametrize("trace", [{}, {"traceEvents": [{"ph": "X", "args": {"colour": "red"}}]}])
def test_a_trace_of_another_program_is_a_key_or_type_error(trace: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError)):
        from_trace(trace)


@pytest.mark.parametrize(
    "change",
    [
        lambda trace: trace["traceEvents"].append(copy.deepcopy(entries("X", trace)[0])),
        lambda trace: entries("X", trace)[0]["args"].update(op="dance"),
        lambda trace: entries("X", trace)[0]["args"].update(stream="fifth"),
        lambda trace: trace["otherData"].update(hwfsdp=[3]),
    ],
    ids=["an event twice", "an unknown op", "an unknown stream", "otherData is a list"],
)
def test_a_trace_that_says_what_no_log_can_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    trace = to_trace(LOG, SAMPLES)
    change(trace)
    with pytest.raises((TypeError, ValueError)):
        from_trace(trace)


# --- The rules ---------------------------------------------------------------------------------------------


def two_steps(world_size: int) -> EventLog:
    """A small model, trained for two steps."""
    model = wrap(even(), ours)
    optimizer = torch.optim.AdamW(model.parameters())
    with record() as log:
        for step in range(2):
            model(*model.inputs(4, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return log


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_trace_of_a_real_run_keeps_every_rule_and_shows_all_of_it(ranks: int) -> None:
    log = EventLog.merge(launch(two_steps, ranks, ranks, timeout=60))
    trace = to_trace(log.events, log.samples, log.about)
    assert broken_rules(trace) == {}
    assert len(entries("X", trace)) == len(log.events)
    states = {(e["pid"], e["args"]["group"], e["name"]) for e in entries("b", trace) if "args" in e}
    groups = [group["fqn"] for group in log.about["groups"]]
    assert len(groups) == 3
    for group in groups[1:]:  # the root's stay whole from the forward to the backward
        assert {
            (rank + 1, group, state) for rank in range(ranks) for state in ("gathering", "full", "freed")
        } <= states
    waits = sum(len(e.after) for e in log.events)
    assert waits and len(entries("s", trace)) >= waits / 2


any_group = st.sampled_from(["", "a", "b.c", 'größe "ß"'])
any_times = st.floats(0, 1e7, allow_nan=False) | st.integers(0, 9).map(lambda n: n / 4)
anything = st.lists(
    st.builds(
        Event,
        rank=st.integers(0, 1),
        seq=st.just(0),
        op=st.sampled_from(OPS),
        stream=st.sampled_from(STREAMS),
        owner=any_group,
        start_us=any_times,
        dur_us=any_times,
        after=st.lists(st.integers(-1, 12), max_size=2, unique=True).map(tuple),
        writes=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    ),
    max_size=14,
).map(lambda events: [Event(**{**e.as_dict(), "seq": seq}) for seq, e in enumerate(events)])


@given(anything, any_times)
def test_the_trace_of_any_log_keeps_every_rule(log: list[Event], at: float) -> None:
    samples = {0: [Sample(at, {"unsharded_param": 3, "sharded_param": 0})]} if log else {}
    trace = json.loads(json.dumps(to_trace(log, samples)))
    assert broken_rules(trace) == {}
    assert from_trace(trace).events == sorted(log, key=lambda e: (e.rank, e.seq))


@given(anything)
def test_states_of_a_group_follow_each_other_without_gaps_from_the_first_event_to_the_last(
    log: list[Event],
) -> None:
    found = find_lifetimes(log)
    for rank, owner in {(e.rank, e.owner) for e in found}:
        states = [e for e in found if (e.rank, e.owner) == (rank, owner)]
        events = [e for e in log if e.rank == rank]
        assert states[0].start_us == min(e.start_us for e in events)
        assert states[-1].end_us == max(e.end_us for e in events)
        assert all(e.start_us < e.end_us and e.state in STATES for e in states)
        assert all(a.end_us == b.start_us for a, b in zip(states, states[1:], strict=False))


def first(trace: dict[str, Any], phase: str) -> Entry:
    return entries(phase, trace)[0]


def without(trace: dict[str, Any], entry: Entry) -> None:
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e is not entry]


BREAKS: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "no unit": ("document", lambda t: t.pop("displayTimeUnit")),
    "a time that is no number": ("document", lambda t: first(t, "X").update(ts=float("nan"))),
    "an unknown phase": ("fields", lambda t: first(t, "X").update(ph="Q")),
    "process 0": ("fields", lambda t: first(t, "X").update(pid=0)),
    "a name that is a number": ("fields", lambda t: first(t, "C").update(name=3)),
    "no time": ("fields", lambda t: first(t, "s").pop("ts")),
    "a time before the beginning": ("fields", lambda t: first(t, "b").update(ts=-1.0)),
    "a negative duration": ("fields", lambda t: first(t, "X").update(dur=-1.0)),
    "a slice on thread 0": ("threads", lambda t: first(t, "X").update(tid=0)),
    "a track without a name": (
        "names",
        lambda t: without(t, next(e for e in entries("M", t) if e["name"] == "thread_name")),
    ),
    "two tracks of one name": (
        "names",
        lambda t: [e["args"].update(name="x") for e in entries("M", t) if e["name"] == "thread_name"],
    ),
    "a slice that overlaps another": ("nesting", lambda t: entries("X", t)[0].update(dur=2.5)),
    "an arrow without an end": ("arrows", lambda t: without(t, first(t, "f"))),
    "an arrow without a beginning": ("arrows", lambda t: without(t, first(t, "s"))),
    "an arrow that begins in no slice": ("arrows", lambda t: first(t, "s").update(ts=900.0)),
    "an arrow that ends before it begins": ("arrows", lambda t: entries("f", t)[0].update(ts=3.0)),
    "an arrow that is not bound": ("arrows", lambda t: first(t, "f").pop("bp")),
    "two arrows of one id": ("arrows", lambda t: t["traceEvents"].append({**first(t, "s"), "ts": 4.0})),
    "an id that is not local": ("lifetimes", lambda t: first(t, "b").update(id="0x1")),
    "a state that does not end": ("lifetimes", lambda t: without(t, entries("e", t)[-1])),
    "a state that did not begin": ("lifetimes", lambda t: without(t, entries("b", t)[1])),
    "a state that ends as another": ("lifetimes", lambda t: first(t, "e").update(name="x")),
    "a state that goes back in time": ("lifetimes", lambda t: entries("b", t)[2].update(ts=0.5)),
    "a counter of two numbers": ("counters", lambda t: first(t, "C")["args"].update(more=1)),
    "a counter of a word": ("counters", lambda t: first(t, "C").update(args={"bytes": "many"})),
}


def with_an_arrow() -> dict[str, Any]:
    """A trace that keeps every rule, and has something for each of them."""
    log = [
        Event(0, 20, "all_gather", "reduce_scatter", start_us=2.0, dur_us=1.5),
        Event(0, 21, "wait", "reduce_scatter", start_us=4.0, dur_us=1.0, after=(2,)),
        Event(0, 22, "forward", "reduce_scatter", start_us=6.0, dur_us=1.0, after=(5,)),
    ]
    return copy.deepcopy(to_trace([*log[:1], *GATHERED_TWICE, *log[1:]], SAMPLES))


def test_every_rule_can_be_broken() -> None:
    assert {rule for rule, _ in BREAKS.values()} == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize(("rule", "change"), BREAKS.values(), ids=BREAKS)
def test_a_trace_that_breaks_a_rule_is_told_which(rule: str, change: Callable[[dict[str, Any]], Any]) -> None:
    trace = with_an_arrow()
    assert broken_rules(trace) == {}
    change(trace)
    assert rule in broken_rules(trace)
