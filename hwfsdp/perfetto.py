"""An event log as Chrome trace JSON, which https://ui.perfetto.dev opens, and back.

One process per rank, one track per stream, one arrow per dependency between streams, one counter track per
kind of memory. The full event travels in each slice's `args`, so nothing is lost by saving.

Format: "Trace Event Format" (the Chrome project's document of that name); times are in µs. Two rules of the
viewer shape the code: slices of one track may nest but not partly overlap, and an arrow must start inside the
slice that it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hwfsdp.events import STREAMS, Event, Sample

TraceEvent = dict[str, Any]
SamplesByRank = dict[int, list[Sample]]


def to_trace(events: Sequence[Event], samples: SamplesByRank) -> dict[str, Any]:
    """The log as one JSON-ready object: `{"traceEvents": […], "displayTimeUnit": "ms"}`."""
    entries = [*_tracks(events), *_slices(events), *_arrows(events), *_counters(samples)]
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def from_trace(trace: dict[str, Any]) -> tuple[list[Event], SamplesByRank]:
    """Inverse of `to_trace`. Raises KeyError or TypeError for a trace that this module did not write."""
    events = [_event(entry["args"]) for entry in trace["traceEvents"] if entry["ph"] == "X"]
    samples: dict[int, dict[float, dict[str, int]]] = {}
    for entry in trace["traceEvents"]:
        if entry["ph"] == "C":
            at = samples.setdefault(entry["pid"] - 1, {}).setdefault(entry["ts"], {})
            at[entry["name"].removeprefix("memory: ")] = entry["args"]["bytes"]
    by_rank = {rank: [Sample(us, kinds) for us, kinds in found.items()] for rank, found in samples.items()}
    return sorted(events, key=lambda e: (e.rank, e.seq)), by_rank


def _event(args: dict[str, Any]) -> Event:
    lists = {name: tuple(args[name]) for name in ("after", "reads", "writes")}
    return Event(**{**args, **lists})


def _tid(stream: str) -> int:
    return STREAMS.index(stream) + 1


def _tracks(events: Sequence[Event]) -> Iterator[TraceEvent]:
    for rank in sorted({e.rank for e in events}):
        yield _meta("process_name", rank + 1, 0, name=f"rank {rank}")
        yield _meta("process_sort_index", rank + 1, 0, sort_index=rank)
    for rank, stream in sorted({(e.rank, e.stream) for e in events}):
        yield _meta("thread_name", rank + 1, _tid(stream), name=stream)
        yield _meta("thread_sort_index", rank + 1, _tid(stream), sort_index=_tid(stream))


def _meta(kind: str, pid: int, tid: int, /, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _slices(events: Sequence[Event]) -> Iterator[TraceEvent]:
    drawn = nested_intervals(events)
    for event in events:
        start, end = drawn[event.rank, event.seq]
        yield {
            "ph": "X",
            "name": f"{event.op} {event.owner}".strip(),
            "cat": event.op,
            "pid": event.rank + 1,
            "tid": _tid(event.stream),
            "ts": start,
            "dur": end - start,
            "args": event.as_dict(),
        }


def nested_intervals(events: Sequence[Event]) -> dict[tuple[int, int], tuple[float, float]]:
    """Where to draw each event, by (rank, seq): on each track, intervals nest or are apart.

    An event that would cross the end of an earlier one is cut short there. Only the drawing changes.
    """
    drawn: dict[tuple[int, int], tuple[float, float]] = {}
    open_ends: dict[tuple[int, str], list[float]] = {}
    for event in sorted(events, key=lambda e: (e.rank, e.stream, e.start_us, -e.dur_us, e.seq)):
        stack = open_ends.setdefault((event.rank, event.stream), [])
        while stack and stack[-1] <= event.start_us:
            stack.pop()
        end = min([event.end_us, *stack])
        stack.append(end)
        drawn[event.rank, event.seq] = event.start_us, end
    return drawn


def _arrows(events: Sequence[Event]) -> Iterator[TraceEvent]:
    """A flow from the end of each event waited for to the one that waited."""
    drawn = nested_intervals(events)
    by_place = {(e.rank, e.seq): e for e in events}
    number = 0
    for event in events:
        for seq in event.after:
            source = by_place.get((event.rank, seq))
            if source is None:
                continue
            number += 1
            end = drawn[event.rank, seq][1]
            yield _flow("s", number, source, end)
            yield {**_flow("f", number, event, drawn[event.rank, event.seq][1]), "bp": "e"}


def _flow(phase: str, number: int, event: Event, ts: float) -> TraceEvent:
    place = {"pid": event.rank + 1, "tid": _tid(event.stream), "ts": ts}
    return {"ph": phase, "id": number, "name": "waits for", "cat": "order", **place}


def _counters(samples: SamplesByRank) -> Iterator[TraceEvent]:
    for rank, found in sorted(samples.items()):
        for sample in found:
            for kind, nbytes in sample.bytes_by_kind.items():
                name, args = f"memory: {kind}", {"bytes": nbytes}
                yield {"ph": "C", "name": name, "pid": rank + 1, "tid": 0, "ts": sample.us, "args": args}
