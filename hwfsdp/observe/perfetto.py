"""Conversion of an event log to Chrome trace JSON, which https://ui.perfetto.dev opens, and back.

The trace has one process per rank, one track per stream, one arrow per dependency between streams, one counter track per
kind of memory, and one track per parameter group. A group's track shows its states (`group_states`). Each slice's `args` contain the
full event, and `otherData` contains the description of the run. So saving loses nothing.

Format: "Trace Event Format" (a document of the Chrome project); times are in µs. Three rules of the viewer shape the code.
Slices of one track may nest but not partly overlap. An arrow must start inside the slice that it comes from. A span that begins
with `b` ends with an `e` of the same category and id, innermost first, and an id is local to a process.

Note [Times on a grid]
    The viewer rounds start and duration separately from µs to whole ns. If a slice ends together with the slice around it, it
    may then end one nanosecond later, overlap the outer slice in part, and be dropped. So slices are drawn on a grid of 1/8 µs:
    such numbers are exact as floats, and so are their differences and their multiples by 1000. The true times are in the
    arguments. If a slice begins together with the slice around it, it is drawn one step later, so that an arrow can touch the
    outer slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import floor, inf
from typing import Any, NamedTuple

from hwfsdp.observe.events import OPS, STREAMS, Event, Sample
from hwfsdp.observe.group_states import find_lifetimes
from hwfsdp.observe import validate

FORMAT = 1  # the number of this format; a reader refuses other numbers
TraceEvent = dict[str, Any]
SamplesByRank = dict[int, list[Sample]]


class Contents(NamedTuple):
    """The contents of a trace file: the three parts of an `EventLog`."""

    events: list[Event]
    samples: SamplesByRank
    about: dict[str, Any]


def to_trace(
    events: Sequence[Event], samples: SamplesByRank, about: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the log as a JSON-ready object.

    It is `{"traceEvents": […], "displayTimeUnit": "ms", "otherData": {"hwfsdp": {"format": 1, **about}}}`.
    """
    entries = [*_tracks(events), *_slices_and_arrows(events), *_lifetimes(events), *_counters(samples)]
    return {
        "traceEvents": entries,
        "displayTimeUnit": "ms",
        "otherData": {"hwfsdp": {"format": FORMAT, **(about or {})}},
    }


def from_trace(trace: dict[str, Any]) -> Contents:
    """Read the log back: the inverse of `to_trace`.

    Raises:
        KeyError, TypeError, ValueError: `to_trace` did not write this. The message names the entry and the field, if it can.
    """
    about = trace.get("otherData", {}).get("hwfsdp", {})
    if not isinstance(about, dict):
        raise TypeError(f"otherData is {about!r}")
    about = dict(about)
    if (number := about.pop("format", FORMAT)) != FORMAT:  # early logs have no number
        raise ValueError(f"its format is {validate.shown(number)}, and this hwfsdp reads format {FORMAT}")
    entries = trace["traceEvents"]
    events = [
        _event(f"traceEvents[{i}].args", entry["args"])
        for i, entry in enumerate(entries)
        if entry["ph"] == "X"
    ]
    if len({(e.rank, e.seq) for e in events}) < len(events):
        raise ValueError("two events of one rank have the same number")
    samples: SamplesByRank = {}
    for i, entry in enumerate(entries):
        if entry["ph"] == "C":
            where = f"traceEvents[{i}]"
            rank = validate.whole(f"{where}.pid", entry["pid"], 1, validate.MOST_RANKS) - 1
            us = validate.time_us(f"{where}.ts", entry["ts"])
            kind = validate.text(f"{where}.name", entry["name"]).removeprefix("memory: ")
            nbytes, found = validate.whole(f"{where}.args.bytes", entry["args"]["bytes"]), samples.setdefault(
                rank, []
            )
            if not found or found[-1].us != us or kind in found[-1].bytes_by_kind:
                found.append(Sample(us, {}))  # virtual clocks stand still: two samples may have the same time
            found[-1].bytes_by_kind[kind] = nbytes
    return Contents(sorted(events, key=lambda e: (e.rank, e.seq)), samples, about)


def _event(where: str, args: Any) -> Event:
    given = {"code": "", **validate.named(where, args)}  # early logs of hwfsdp 0.1 have no `code`
    found = {**given, **validate.fields_of(Event, where, given)}
    for name, known in (("stream", STREAMS), ("op", OPS)):
        if found[name] not in known:
            raise ValueError(f"{where}: no {name} is called {found[name]!r}")
    return Event(**found)


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


_GRID = 1 / 8  # µs; Note [Times on a grid]
ROUNDING = 1e-6  # µs; equal times may differ by this after a shift

Place = tuple[int, int]  # rank, seq


@dataclass(eq=False)
class Drawn:
    """A drawn event.

    Attributes:
        start, end: its drawn times, in µs. depth: the number of slices around it. inner: the slices directly inside it, in order.
    """

    event: Event
    start: float
    end: float
    depth: int
    inner: list[Drawn] = field(default_factory=list)

    @property
    def free_until(self) -> float:
        """Return when the first slice inside it begins, or else its end. From then on, the viewer ties an arrow to that inner slice."""
        return self.inner[0].start if self.inner else self.end

    def last_moment(self, before: float) -> float:
        """Return the latest time, not after `before`, at which an arrow touches this slice."""
        end = max(self.start, min(self.free_until, before))
        return max((self.start + end) / 2, end - _INSIDE)


def draw(events: Sequence[Event], apart: float = 0.0) -> dict[Place, Drawn]:
    """Return the drawn slice of each event by (rank, seq), outer slices first. On each track, slices nest or do not overlap.

    If an event crosses the end of an earlier event, its slice ends there. Only the drawing changes.

    Args:
        apart: a slice begins at least so many µs after the slice around it begins, if the outer slice is long enough.
    """
    drawn: dict[Place, Drawn] = {}
    tracks: dict[tuple[int, str], list[Drawn]] = {}
    for event in sorted(events, key=lambda e: (e.rank, e.stream, e.start_us, -e.dur_us, e.seq)):
        open_ones = tracks.setdefault((event.rank, event.stream), [])
        while open_ones and open_ones[-1].end <= event.start_us + ROUNDING:
            open_ones.pop()
        end = min([event.end_us, *(other.end for other in open_ones)])
        start = event.start_us
        if open_ones:
            start = max(start, min(open_ones[-1].start + apart, open_ones[-1].end))
        slice_ = drawn[event.rank, event.seq] = Drawn(event, start, max(start, end), len(open_ones))
        if open_ones:
            open_ones[-1].inner.append(slice_)
        open_ones.append(slice_)
    return drawn


def _on_grid(event: Event) -> Event:
    """Move start and end of the event to the grid, up to one step earlier. Nested intervals stay nested, separate ones separate."""
    start, end = (floor(us / _GRID) * _GRID for us in (event.start_us, event.end_us))
    return event.changed(start_us=start, dur_us=end - start)


def _slices_and_arrows(events: Sequence[Event]) -> Iterator[TraceEvent]:
    """Return each slice, directly followed by the ends of the arrows that touch it.

    The order matters. At equal times, the viewer takes longer slices first, and entries without length in the order of the
    file. It ties an arrow to the innermost slice that is open on its track at this point.
    """
    drawn = draw([_on_grid(event) for event in events], apart=_GRID)
    arrows = _arrows(events, drawn)
    for event in events:
        place = event.rank, event.seq
        yield {
            "ph": "X",
            "name": f"{event.op} {event.owner}".strip(),
            "cat": event.op,
            "pid": event.rank + 1,
            "tid": _tid(event.stream),
            "ts": drawn[place].start,
            "dur": drawn[place].end - drawn[place].start,
            "args": event.as_dict(),
        }
        yield from arrows.get(place, ())


_INSIDE = 0.05  # µs before the end of a slice, where an arrow touches it: after the end it touches nothing


def _arrows(events: Sequence[Event], drawn: dict[Place, Drawn]) -> dict[Place, list[TraceEvent]]:
    """Return an arrow from each recorded event that was waited for to the event that waited. Each end is listed under its slice.

    An arrow leaves at the last moment of its source. It arrives at the last moment of a wait, or at the first moment of
    any other event, and never before it leaves.
    """
    arrows: dict[Place, list[TraceEvent]] = {}
    by_place = {(e.rank, e.seq): e for e in events}
    pairs = [(by_place.get((e.rank, seq)), e) for e in events for seq in e.after]
    for number, (source, event) in enumerate(pairs, start=1):
        if source is None:
            continue
        begin, end = (source.rank, source.seq), (event.rank, event.seq)
        arrival = drawn[end].last_moment(inf) if event.op == "wait" else drawn[end].start
        departure = drawn[begin].last_moment(before=arrival)
        if departure <= arrival:
            arrows.setdefault(begin, []).append(_flow("s", number, source, departure))
            arrows.setdefault(end, []).append({**_flow("f", number, event, arrival), "bp": "e"})
    return arrows


def _flow(phase: str, number: int, event: Event, ts: float) -> TraceEvent:
    place = {"pid": event.rank + 1, "tid": _tid(event.stream), "ts": ts}
    return {"ph": phase, "id": number, "name": "waits for", "cat": "order", **place}


def _lifetimes(events: Sequence[Event]) -> Iterator[TraceEvent]:
    """Return for each group a span with the group's name, which names the track, and inside it the group's states."""
    tracks: dict[tuple[int, str], list[TraceEvent]] = {}
    for rank, owner, state, start, end in find_lifetimes(events):
        inside = tracks.setdefault((rank, owner), [])
        place = {"pid": rank + 1, "tid": 0, "cat": "parameters", "id2": {"local": hex(len(tracks))}}
        if not inside:
            inside += [{"ph": "b", "name": owner, "ts": start, **place}, {"ph": "e", "name": owner, **place}]
        inside[-1:-1] = [
            {"ph": "b", "name": state, "ts": start, **place, "args": {"group": owner}},
            {"ph": "e", "name": state, "ts": end, **place},
        ]
        inside[-1]["ts"] = end
    for inside in tracks.values():
        yield from inside


def _counters(samples: SamplesByRank) -> Iterator[TraceEvent]:
    for rank, found in sorted(samples.items()):
        for sample in found:
            for kind, nbytes in sample.bytes_by_kind.items():
                name, args = f"memory: {kind}", {"bytes": nbytes}
                yield {"ph": "C", "name": name, "pid": rank + 1, "tid": 0, "ts": sample.us, "args": args}
