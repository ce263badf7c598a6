"""The trace file keeps the rules of ui.perfetto.dev (`trace_rules`), and shows the contents of the log.

`connections` reads a trace as the viewer's importer does (v52). It takes entries in order of time, at the same time the longest first, and
else in the order of the file. It has a stack of slices per track; an arrow ends at the top of its track's stack.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from figures import events_of
from hypothesis import given
from hypothesis import strategies as st
from models import even
from oracles import ours, wrap
from trace_rules import broken_rules

from hwfsdp import launch, record
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import OPS, STREAMS, Event, Sample
from hwfsdp.observe.group_states import find_lifetimes
from hwfsdp.observe.perfetto import draw, from_trace, to_trace

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


# --- The file ----------------------------------------------------------------------------------------------


def test_a_name_that_ends_in_gz_gives_a_compressed_file_and_both_read_alike(tmp_path: Path) -> None:
    log = EventLog(LOG, SAMPLES, {"world_size": 2, "torch": "2.13", "device": "cpu", "groups": []})
    for name in ("trace.json", "trace.json.gz"):
        log.save(tmp_path / name)
        assert EventLog.load(tmp_path / name) == log
    compressed = (tmp_path / "trace.json.gz").read_bytes()
    assert gzip.decompress(compressed) == (tmp_path / "trace.json").read_bytes()
    log.save(tmp_path / "again.json.gz")
    assert (tmp_path / "again.json.gz").read_bytes() == compressed


# --- Slices ------------------------------------------------------------------------------------------------


def test_a_slice_has_the_times_and_the_words_of_its_event_on_the_track_of_its_rank_and_stream() -> None:
    named = [e for e in entries("M") if e["name"] in ("process_name", "thread_name")]
    names = {(e["name"], track(e)): e["args"]["name"] for e in named}
    for event, entry in zip(LOG, entries("X"), strict=True):
        assert (entry["ts"], entry["dur"]) == (event.start_us, event.dur_us)
        assert entry["args"] == event.as_dict() and entry["cat"] == event.op
        assert entry["name"] == f"{event.op} {event.owner}".strip()
        assert names["process_name", (entry["pid"], 0)] == f"rank {event.rank}"
        assert names["thread_name", track(entry)] == event.stream


def drawn(*rows: tuple[int, str, float, float]) -> list[tuple[float, float]]:
    """Draw slices from rows (rank, stream, start, length)."""
    log = [Event(row[0], n, "forward", row[1], start_us=row[2], dur_us=row[3]) for n, row in enumerate(rows)]
    return [(each.start, each.end) for _, each in sorted(draw(log).items())]


def test_slices_are_cut_only_where_they_cross_an_end_on_their_track() -> None:
    for first, second in ((2.0, 5.0), (5.0, 2.0)):  # they begin together
        assert drawn((0, "compute", 0, first), (0, "compute", 0, second)) == [(0, first), (0, second)]
    assert drawn((0, "compute", 0, 9), (0, "compute", 5, 9)) == [(0, 9), (5, 9)]
    others = (0, "copy", 5, 9), (1, "compute", 5, 9)
    assert drawn((0, "compute", 0, 9), *others) == [(0, 9), (5, 14), (5, 14)]
    rounded = drawn((0, "compute", 0.1, 0.2), (0, "compute", 0.3, 1.0))
    assert rounded == [(0.1, 0.1 + 0.2), (0.3, 1.3)] and rounded[0][1] > rounded[1][0]


# --- Arrows ------------------------------------------------------------------------------------------------


def connections(trace: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the (seq, seq) of the slices that the viewer connects with arrows."""
    stacks: dict[Track, list[Entry]] = {}
    begun: dict[int, Entry] = {}
    found = []
    timed = [e for e in trace["traceEvents"] if e["ph"] in "Xsf"]
    for entry in sorted(timed, key=lambda e: (e["ts"], -e.get("dur", 0))):  # stable
        stack = stacks.setdefault(track(entry), [])
        if entry["ph"] == "X":
            while stack and is_over(stack[-1], entry):
                stack.pop()
            stack.append(entry)
        elif stack and entry["ph"] == "s":
            begun[entry["id"]] = stack[-1]
        elif stack and entry["id"] in begun:
            found.append((begun[entry["id"]]["args"]["seq"], stack[-1]["args"]["seq"]))
    return sorted(found)


def is_over(open_one: Entry, new: Entry) -> bool:
    """Return True if a slice has ended. Slices are open on the right; instants at the same time lie on top of each other."""
    end, both_instants = open_one["ts"] + open_one["dur"], open_one["dur"] == new["dur"] == 0
    return end < new["ts"] or (end == new["ts"] and not both_instants)


GATHER = "all_gather"
CONNECTED = [  # rows (op, start, length, events waited for)
    # the next gather begins where this one ends
    [(GATHER, 0, 5), (GATHER, 5, 5), ("wait", 2, 4, 0)],
    # the gather begins later than the wait for it
    [(GATHER, 0, 5), (GATHER, 5, 9), ("wait", 1, 14, 1)],
    # the next begins where the target ends
    [(GATHER, 0, 5), ("wait", 5, 1, 0), ("forward", 6, 1)],
    # the news of the gather's end came after the wait
    [(GATHER, 0, 7), ("wait", 2, 4, 0)],
    # another is inside the target from the beginning
    [(GATHER, 0, 5), ("forward", 6, 9, 0), ("copy_out", 6, 2)],
    # between two points of the grid
    [(GATHER, 0, 5.06), (GATHER, 5.06, 4), ("wait", 2, 9, 0)],
]


def test_the_viewer_draws_each_arrow_between_the_two_slices_it_is_about() -> None:
    for rows in CONNECTED:
        log = [
            Event(0, seq, op, op if op == GATHER else "compute", start_us=start, dur_us=dur, after=(*after,))
            for seq, (op, start, dur, *after) in enumerate(rows)
        ]
        assert connections(to_trace(log, {})) == sorted((seq, e.seq) for e in log for seq in e.after), rows


# --- Lifetimes and counters --------------------------------------------------------------------------------


OF_A = {"owner": "a"}
GATHERED_TWICE = [
    ("forward", "compute", 0, 1, OF_A),
    ("copy_in", "copy", 2, 3, OF_A),
    ("all_gather", "all_gather", 3, 6, OF_A),
    ("alloc", "compute", 6, 6, OF_A | {"writes": (1,)}),
    ("copy_out", "compute", 7, 8, OF_A),
    ("free", "compute", 11, 11, OF_A | {"writes": (1,)}),
    ("copy_in", "copy", 12, 13, OF_A),
    ("alloc", "compute", 14, 14, OF_A | {"writes": (1,)}),
    ("copy_out", "compute", 14, 15, OF_A),
    ("copy_in", "compute", 16, 17, OF_A),
    ("free", "compute", 18, 18, OF_A | {"writes": (9,)}),
    ("optimizer", "compute", 19, 20, OF_A),
]


def test_a_group_is_sharded_then_gathering_until_the_copy_out_then_full_until_its_last_free() -> None:
    assert [lifetime[2:] for lifetime in find_lifetimes(events_of(0, *GATHERED_TWICE))] == [
        ("sharded", 0.0, 2.0),
        ("gathering", 2.0, 8.0),
        ("full", 8.0, 11.0),
        ("freed", 11.0, 12.0),
        ("gathering", 12.0, 15.0),
        ("full", 15.0, 20.0),
    ]


# --- The rules ---------------------------------------------------------------------------------------------


def two_steps() -> EventLog:
    """Train a small model for two steps."""
    model = wrap(even(), ours)
    optimizer = torch.optim.AdamW(model.parameters())
    with record() as log:
        for step in range(2):
            model(*model.inputs(4, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return log


def test_the_trace_of_a_real_run_keeps_every_rule_and_has_the_documented_words() -> None:
    log = EventLog.merge(launch(two_steps, 2, timeout=60))
    trace = to_trace(log.events, log.samples, log.about)
    assert broken_rules(trace) == {}
    assert from_trace(trace).events == log.events  # all of its ops and streams are known
    assert {e.phase for e in log.events} == {"forward", "backward", "optimizer"}
    assert all(0 <= seq < e.seq for e in log.events for seq in e.after)
    states = {(e["pid"], e["args"]["group"], e["name"]) for e in entries("b", trace) if "args" in e}
    groups = [group["fqn"] for group in log.about["groups"]]
    assert len(groups) == 3
    for group in groups[1:]:  # the root's stay whole from the forward to the backward
        assert {(pid, group, state) for pid in (1, 2) for state in ("gathering", "full", "freed")} <= states
    waits = sum(len(e.after) for e in log.events)
    assert waits and len(entries("s", trace)) >= waits / 2


any_group = st.sampled_from(["", "a", "b.c", 'größe "ß" \\ \n ☃'])
any_times = st.floats(0, 1e7, allow_nan=False) | st.integers(0, 9).map(lambda n: n / 4)
anything = st.lists(
    st.builds(
        Event,
        rank=st.integers(0, 1),
        seq=st.just(0),
        op=st.sampled_from(OPS),
        stream=st.sampled_from(STREAMS),
        owner=any_group,
        phase=st.sampled_from(["forward", "backward", "optimizer", ""]),
        step=st.integers(0, 3),
        dtype=st.sampled_from(["", "float32"]),
        bytes=st.integers(0, 2**40),
        start_us=any_times,
        dur_us=any_times,
        after=st.lists(st.integers(-1, 12), max_size=2, unique=True).map(tuple),
        reads=st.lists(st.integers(0, 2**48), max_size=2).map(tuple),
        writes=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    ),
    max_size=14,
).map(lambda events: [Event(**{**e.as_dict(), "seq": seq}) for seq, e in enumerate(events)])


@given(anything, st.lists(any_times, max_size=3))
def test_the_trace_of_any_log_keeps_every_rule_and_can_be_read_back(
    log: list[Event], at: list[float]
) -> None:
    samples = {rank: [Sample(us, {"a b": 3, "sharded_param": rank}) for us in at] for rank in (0, 3) if at}
    trace = json.loads(json.dumps(to_trace(log, samples, {"world_size": 2})))
    assert broken_rules(trace) == {}
    assert from_trace(trace) == (sorted(log, key=lambda e: (e.rank, e.seq)), samples, {"world_size": 2})
