"""The time of each step of a rank, and the part of it in which communication was not hidden.

Sets of times are sorted lists of intervals (start, end) without overlaps, in µs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from hwfsdp.observe.events import COLLECTIVES, COMPUTE_OPS, Event

WAITS_AT_ONCE = "each rank waits for a collective right after issuing it"  # why a summary says "blocking"
Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same points as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the points that are in `a` and in `b`. Both are sorted and disjoint, as `union` returns them."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the points of `a` that are not in `b`. Both are sorted and disjoint, as `union` returns them."""
    edges = [-inf, *(us for interval in b for us in interval), inf]
    return intersect(a, list(zip(edges[::2], edges[1::2], strict=True)))


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


# --- Steps -------------------------------------------------------------------------------------------------


class StepsOfRank(NamedTuple):
    """Times of one rank in µs.

    Attributes:
        steps: the time of each step. exposed: for each step, the part in which a collective ran and the rank computed nothing.
        communicated: the time in which collectives ran, in all steps together.
        blocking: True if every collective was waited for as soon as it was issued (`blocked`).
    """

    steps: list[float]
    exposed: list[float]
    communicated: float
    blocking: bool


def times_of_rank(events: Sequence[Event], from_zero: bool) -> StepsOfRank:
    """Return the times of the steps of one rank. Without optimizer steps, all events are one step.

    Args:
        from_zero: True if the first step begins at 0, the start of the log; False if it begins with the first event.
    """
    if not events:
        return StepsOfRank([0.0], [0.0], 0.0, False)
    last: dict[int, float] = {}
    for event in events:
        if event.op == "optimizer":
            last[event.step] = max(last.get(event.step, event.end_us), event.end_us)
    first = 0.0 if last and from_zero else min(e.start_us for e in events)
    ends = sorted(last.values()) or [max(e.end_us for e in events)]
    communicated = communicating(events)
    exposed = [0.0] * len(ends)
    cuts = [-inf, *ends[:-1], inf]  # time before the first step or after the last belongs to that step
    for start, end in intersect(subtract(communicated, computing(events)), list(pairwise(cuts))):
        exposed[bisect_right(cuts, start) - 1] += end - start
    steps = [end - start for start, end in pairwise([first, *ends])]
    return StepsOfRank(steps, exposed, length(communicated), blocked(events).always)


def communicating(events: Sequence[Event]) -> list[Interval]:
    """Return the intervals in which a rank's collectives ran."""
    return union((e.start_us, e.end_us) for e in events if e.op in COLLECTIVES)


def computing(events: Sequence[Event]) -> list[Interval]:
    """Return the intervals in which a rank's compute stream computed: without its waits, and not from a call that it waits for at once."""
    busy = union((e.start_us, e.end_us) for e in events if e.stream == "compute" and e.op in COMPUTE_OPS)
    return subtract(busy, blocked(events).intervals)


class Blocked(NamedTuple):
    """When collectives kept a rank's compute stream from computing; see `blocked`."""

    intervals: list[Interval]
    always: bool


def blocked(events: Sequence[Event]) -> Blocked:
    """Return when compute waited for collectives, and whether it always waited for them at once.

    Compute waits at once if it neither begins nor ends anything from the start of a collective to the wait for it. Then a
    module that is open all this time, such as the root, did not compute either: the time went into the call.
    """
    on_compute = [e for e in events if e.stream == "compute"]
    edges = sorted(us for e in on_compute if e.op in COMPUTE_OPS for us in (e.start_us, e.end_us))
    found = [(e.start_us, e.end_us) for e in on_compute if e.op == "wait" or e.op in COLLECTIVES]
    stream_of, pending = {e.seq: e.stream for e in events}, dict[str, list[Event]]()
    beside = 0
    for event in sorted(events, key=lambda e: e.seq):
        if event.op in COLLECTIVES and event.stream != "compute":
            pending.setdefault(event.stream, []).append(event)
        for seq in event.after if event.op == "wait" else ():
            awaited = pending.get(stream_of.get(seq, ""), [])
            while awaited and awaited[0].seq <= seq:
                start = awaited.pop(0).start_us
                if bisect_left(edges, start) == bisect_right(edges, event.start_us):
                    found.append((start, event.start_us))
                else:
                    beside += start < event.start_us
    return Blocked(union(found), bool(communicating(events)) and not beside and not any(pending.values()))
