"""A finished recording: questions about it, and its file.

The log of one rank comes out of `record`; `EventLog.merge` puts the logs of several ranks together.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hwfsdp.errors import UsageError
from hwfsdp.events import COLLECTIVES, COMPUTE_OPS, Event, Sample
from hwfsdp.perfetto import from_trace, to_trace

Interval = tuple[float, float]


@dataclass
class EventLog:
    """Events of one or several ranks, in the order (rank, seq), and samples of memory by rank."""

    events: list[Event] = field(default_factory=list)
    samples: dict[int, list[Sample]] = field(default_factory=dict)

    @classmethod
    def merge(cls, logs: Iterable[EventLog]) -> EventLog:
        """One log of all ranks."""
        merged = cls()
        for log in logs:
            merged.events.extend(log.events)
            merged.samples.update(log.samples)
        merged.events.sort(key=lambda e: (e.rank, e.seq))
        return merged

    @property
    def ranks(self) -> list[int]:
        return sorted({e.rank for e in self.events} | set(self.samples))

    def of_rank(self, rank: int) -> EventLog:
        """The part of one rank."""
        return EventLog([e for e in self.events if e.rank == rank], {rank: self.samples.get(rank, [])})

    def select(self, *ops: str, **attributes: Any) -> list[Event]:
        """Events whose op is one of `ops` (any, if none is given) and whose attributes equal these."""
        return [
            e
            for e in self.events
            if (not ops or e.op in ops) and all(getattr(e, k) == v for k, v in attributes.items())
        ]

    def collectives(self) -> list[Event]:
        """The collectives, in order of issue."""
        return self.select(*COLLECTIVES)

    def summary(self) -> dict[str, Any]:
        """The run in numbers; with several ranks, the mean of times and the maximum of bytes alive.

        Returns:
            step_us: from the first event to the last, per optimizer step (per recording if there was none).
            bytes_by_op, count_by_op: of the collectives of one rank, summed over the recording.
            exposed_comm_us: time per step in which a collective ran and this rank computed nothing.
            overlap_fraction: share of the collectives' time that compute hid; 0.0 if nothing was communicated.
            peak_unsharded_bytes: the most bytes that unsharded parameters held at once.
            peak_bytes_by_kind: the same for each kind of memory.
        """
        ranks = self.ranks
        times = [_rank_times(self.of_rank(rank).events) for rank in ranks]
        first = self.of_rank(ranks[0]).collectives() if ranks else []
        communicated, exposed = sum(t.comm for t in times), sum(t.exposed for t in times)
        peaks = self.peak_bytes_by_kind()
        return {
            "step_us": _mean([t.total / t.steps for t in times]),
            "bytes_by_op": dict(_totals((e.op, e.bytes) for e in first)),
            "count_by_op": dict(Counter(e.op for e in first)),
            "exposed_comm_us": _mean([t.exposed / t.steps for t in times]),
            "overlap_fraction": 1.0 - exposed / communicated if communicated else 0.0,
            "peak_unsharded_bytes": peaks.get("unsharded_param", 0),
            "peak_bytes_by_kind": peaks,
        }

    def peak_bytes_by_kind(self) -> dict[str, int]:
        """The most bytes of each kind that any rank held at once."""
        peaks: dict[str, int] = {}
        for samples in self.samples.values():
            for sample in samples:
                for kind, nbytes in sample.bytes_by_kind.items():
                    peaks[kind] = max(peaks.get(kind, 0), nbytes)
        return peaks

    def happens_before(self, first: Event, second: Event) -> bool:
        """Whether the log proves that `first` ended before `second` began, on one rank.

        Proof is a path along streams and `after` (see `events`, Note [Order without clocks]). On one stream an event
        follows those that were over when it began; a span is not over while one inside it runs.
        """
        if first.rank != second.rank:
            return False
        by_seq = {e.seq: e for e in self.events if e.rank == second.rank}
        on_stream: dict[str, list[Event]] = {}  # not reached yet, the first to end last
        for event in sorted(by_seq.values(), key=lambda e: (e.end_us, e.seq), reverse=True):
            on_stream.setdefault(event.stream, []).append(event)
        reached, frontier = set[int](), [second]
        while frontier:
            event = frontier.pop()
            queue = on_stream.get(event.stream, [])
            waiting: list[Event] = []
            while queue and queue[-1].end_us <= event.start_us:
                earlier = queue.pop()
                (frontier if earlier.seq < event.seq else waiting).append(earlier)
            queue.extend(reversed(waiting))
            frontier.extend(by_seq[seq] for seq in event.after if seq in by_seq and seq not in reached)
            reached.add(event.seq)
        return first.seq in reached and first.seq != second.seq

    def save(self, path: str | Path) -> None:
        """Writes the log as JSON that https://ui.perfetto.dev opens; `load` reads it back."""
        Path(path).write_text(json.dumps(to_trace(self.events, self.samples)))

    @classmethod
    def load(cls, path: str | Path) -> EventLog:
        """Reads what `save` wrote. Raises UsageError, in one line, for anything else."""
        try:
            events, samples = from_trace(json.loads(Path(path).read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(
                f"EventLog.load({str(path)!r})",
                expected="a trace written by EventLog.save",
                got=f"{type(error).__name__}: {' '.join(str(error).split())}",
                remedy="Check the path; traces of other programs cannot be read back.",
            ) from None
        return cls(events, samples)


@dataclass(frozen=True)
class _Times:
    """µs of one rank: from first to last event, of communication, of communication that was not hidden."""

    total: float
    comm: float
    exposed: float
    steps: int


def _rank_times(events: Sequence[Event]) -> _Times:
    if not events:
        return _Times(0.0, 0.0, 0.0, 1)
    total = max(e.end_us for e in events) - min(e.start_us for e in events)
    comm = union((e.start_us, e.end_us) for e in events if e.op in COLLECTIVES)
    waits = union((e.start_us, e.end_us) for e in events if e.op == "wait" and e.stream == "compute")
    busy = union((e.start_us, e.end_us) for e in events if e.op in COMPUTE_OPS and e.stream == "compute")
    exposed = length(comm) - length(intersect(comm, subtract(busy, waits)))
    steps = max(1, sum(e.op == "optimizer" for e in events))
    return _Times(total, length(comm), exposed, steps)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Points of both; `a` and `b` as `union` returns them."""
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
    """Points of `a` that are not in `b`; both as `union` returns them."""
    left: list[Interval] = []
    for start, end in a:
        for cut_start, cut_end in b:
            if cut_end <= start or cut_start >= end:
                continue
            if cut_start > start:
                left.append((start, cut_start))
            start = max(start, cut_end)
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _totals(pairs: Iterable[tuple[str, int]]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for key, value in pairs:
        totals[key] += value
    return totals
