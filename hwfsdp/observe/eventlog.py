"""A finished recording: questions about it, and its file.

`record` makes the log of one rank. `EventLog.merge` puts the logs of several ranks together.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import hwfsdp
from hwfsdp.errors import UsageError, printable
from hwfsdp.files import whole_file
from hwfsdp.observe.call_sites import checksums
from hwfsdp.observe.clocks import RankClock, read_clocks, shifts_to_one_axis
from hwfsdp.observe.events import COLLECTIVES, Event, Sample
from hwfsdp.observe.perfetto import from_trace, to_trace
from hwfsdp.observe.races import Order, orders
from hwfsdp.observe.run_info import read_about
from hwfsdp.observe.step_times import StepsOfRank, times_of_rank


@dataclass
class EventLog:
    """The events of one or several ranks, in the order (rank, seq), and samples of memory by rank.

    Attributes:
        about: the description of the run by `run_info.describe_run`, JSON-ready; empty for logs made by hand.
    """

    events: list[Event] = field(default_factory=list)
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    _orders: tuple[int, dict[int, Order]] | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def merge(cls, logs: Iterable[EventLog]) -> EventLog:
        """Merge the logs of all ranks on one time axis. Time 0 is the beginning of the first recording (see `clocks`)."""
        merged, clocks = cls(), dict[int, RankClock]()
        for log in logs:
            merged.events.extend(log.events)
            merged.samples.update(log.samples)
            merged.about = merged.about or log.about
            clocks.update(log.clocks)
        merged.events.sort(key=lambda e: (e.rank, e.seq))
        shifts = shifts_to_one_axis(clocks)
        if any(shifts.values()):
            merged.events = [e.changed(start_us=e.start_us + shifts.get(e.rank, 0.0)) for e in merged.events]
            for rank, samples in merged.samples.items():
                merged.samples[rank] = [replace(s, us=s.us + shifts.get(rank, 0.0)) for s in samples]
        moved = {r: c._replace(origin_us=c.origin_us - shifts[r]) for r, c in clocks.items()}
        merged.about = {**merged.about, **clocks_about(moved)}
        return merged

    @property
    def clocks(self) -> dict[int, RankClock]:
        """Return the origin of each rank's times. Ranks of logs made by hand are missing."""
        return read_clocks(self.about)

    @property
    def ranks(self) -> list[int]:
        return sorted({e.rank for e in self.events} | set(self.samples))

    def of_rank(self, rank: int) -> EventLog:
        """Return the part of the log that belongs to one rank."""
        return EventLog(self.select(rank=rank), {rank: self.samples.get(rank, [])}, self.about)

    def by_rank(self) -> dict[int, EventLog]:
        """Return the part of the log that belongs to each rank. There may be many ranks, so one pass makes all parts."""
        parts = {rank: EventLog([], {rank: self.samples.get(rank, [])}, self.about) for rank in self.ranks}
        for event in self.events:
            parts[event.rank].events.append(event)
        return parts

    def select(self, *ops: str, **attributes: Any) -> list[Event]:
        """Return the events with one of these `ops` and with these attributes. Without `ops`, events of every op count."""
        return [
            e
            for e in self.events
            if (not ops or e.op in ops) and all(getattr(e, k) == v for k, v in attributes.items())
        ]

    def chosen(self, subject: str, rank: int | None = None, step: int | None = None) -> list[Event]:
        """Return the events of this rank and this optimizer step. None means all ranks, or all steps.

        Args:
            subject: the name of the call, for the error.

        Raises:
            UsageError: there is no such event. The remedy names the ranks and steps in the log.
        """
        found = [e for e in self.events if rank in (None, e.rank) and step in (None, e.step)]
        if found:
            return found
        ranks, steps = sorted({e.rank for e in self.events}), sorted({e.step for e in self.events})
        asked = [f"{name}={value}" for name, value in (("rank", rank), ("step", step)) if value is not None]
        raise UsageError(
            f"{subject}({', '.join(asked)})",
            expected="a log with such events",
            got=f"none of {len(self.events)} events",
            remedy=f"The log has ranks {ranks} and steps {steps}." if self.events else "Record a step first.",
        )

    @property
    def finished_steps(self) -> list[int]:
        """Return the steps that an optimizer ended."""
        return sorted({e.step for e in self.select("optimizer")})

    def collectives(self) -> list[Event]:
        """Return the collectives, in order of issue."""
        return self.select(*COLLECTIVES)

    def summary(self) -> dict[str, Any]:
        """Return the run in numbers. Over several ranks, times are means, and bytes alive are the maximum.

        Returns:
            step_us: mean time of a step, from the end of one optimizer step to the end of the next. The first step begins with
                the log, or with the rank's first event if no clock is known. Without optimizer steps, this is the time from the
                first event to the end of the last.
            bytes_by_op, count_by_op: bytes and number of the collectives of one rank, summed over the recording.
            exposed_comm_us: time per step in which a collective ran and this rank computed nothing.
            overlap_fraction: share of the collectives' time that compute hid; 0.0 if nothing was communicated.
            blocking: True if every collective is waited for as soon as it is issued, so that compute can hide nothing.
            peak_unsharded_bytes: the most bytes that unsharded parameters held at once.
            peak_bytes_by_kind: the most bytes that each kind of memory held at once.
            by_rank: for each rank its step_us, exposed_comm_us, overlap_fraction, blocking and peak_bytes_by_kind.
            skew_us: mean time from the first rank's start of a collective to the last rank's start. skew_max_us: the longest
                such time. Both are 0.0 for one rank, and None if the ranks' clocks were not put on one axis (`clocks`).
            slowest_rank: the rank with the largest delay, summed over all collectives; None if there is no skew.
        """
        parts, times = self.by_rank(), self.times_by_rank()
        traffic = traffic_of(parts[min(parts)].collectives()) if parts else {}
        peaks = self.peak_bytes_by_kind()
        by_rank = {rank: self._summary_of(rank, t) for rank, t in times.items()}
        exposed = sum(sum(t.exposed) for t in times.values())
        return {
            "step_us": _mean([each["step_us"] for each in by_rank.values()]),
            "bytes_by_op": {op: moved.bytes for op, moved in traffic.items()},
            "count_by_op": {op: moved.calls for op, moved in traffic.items()},
            "exposed_comm_us": _mean([each["exposed_comm_us"] for each in by_rank.values()]),
            "overlap_fraction": _hidden(exposed, sum(t.communicated for t in times.values())),
            "blocking": any(t.blocking for t in times.values())
            and all(t.blocking or not t.communicated for t in times.values()),
            "peak_unsharded_bytes": peaks.get("unsharded_param", 0),
            "peak_bytes_by_kind": peaks,
            "by_rank": by_rank,
            **self._skew(),
        }

    def times_by_rank(self) -> dict[int, StepsOfRank]:
        """Return the times of the steps of each rank."""
        from_zero = bool(self.clocks)
        return {rank: times_of_rank(part.events, from_zero) for rank, part in self.by_rank().items()}

    def _summary_of(self, rank: int, times: StepsOfRank) -> dict[str, Any]:
        return {
            "step_us": _mean(times.steps),
            "exposed_comm_us": _mean(times.exposed),
            "overlap_fraction": _hidden(sum(times.exposed), times.communicated),
            "blocking": times.blocking,
            "peak_bytes_by_kind": _peaks(self.samples.get(rank, [])),
        }

    def _skew(self) -> dict[str, Any]:
        """Compare ranks at each collective that several ranks have: the n-th with the same op and owner."""
        if len(set(self.clocks.values())) > 1:
            return dict.fromkeys(("skew_us", "skew_max_us", "slowest_rank"))
        begins: dict[tuple[str, str, int], dict[int, float]] = {}
        seen: Counter[tuple[int, str, str]] = Counter()
        for event in self.collectives():
            place = event.rank, event.op, event.owner
            begins.setdefault((event.op, event.owner, seen[place]), {})[event.rank] = event.start_us
            seen[place] += 1
        compared = [of_ranks for of_ranks in begins.values() if len(of_ranks) > 1]
        skews = [max(of_ranks.values()) - min(of_ranks.values()) for of_ranks in compared]
        late: dict[int, float] = {}
        for of_ranks, skew in zip(compared, skews, strict=True):
            if skew:
                last = max(sorted(of_ranks), key=of_ranks.__getitem__)
                late[last] = late.get(last, 0.0) + skew
        slowest = min(late, key=lambda rank: (-late[rank], rank), default=None)
        return {"skew_us": _mean(skews), "skew_max_us": max(skews, default=0.0), "slowest_rank": slowest}

    def peak_bytes_by_kind(self) -> dict[str, int]:
        """Return the most bytes of each kind that any rank held at once."""
        return _peaks(sample for samples in self.samples.values() for sample in samples)

    def happens_before(self, first: Event, second: Event) -> bool:
        """True if the log proves that `first` ended before `second` began, on one rank.

        A path along streams and `after` is a proof (see `races`). On one stream, an event follows all events that had ended when
        it began. A span has not ended while a span inside it runs.
        """
        if first.rank != second.rank:
            return False
        if self._orders is None or self._orders[0] != len(self.events):
            self._orders = len(self.events), orders(self.events)
        order = self._orders[1].get(first.rank)
        return order is not None and order.happens_before(first, second)

    def view(self, other: EventLog | None = None, names: tuple[str, str] = ("A", "B")) -> Any:
        """Return the step player of this log, or of two logs side by side. A notebook shows it; `save(path)` writes one page.

        Args:
            other: the second log. names: the names of the two logs on the page.

        `plot.player` makes the page. It is loaded only when this method is called.
        """
        logs = [("log", self)] if other is None else [*zip(names, (self, other), strict=True)]
        return hwfsdp.plot.player.make_page(logs)

    @property
    def code(self) -> dict[str, int]:
        """Return the checksum of each file that events come from (`call_sites`): from the time of `save`, or else from now."""
        return self.about.get("code") or checksums(event.code for event in self.events)

    def save(self, path: str | Path) -> None:
        """Write the log as JSON that https://ui.perfetto.dev opens, compressed if the name ends in `.gz`.

        This also stores the checksums of the files that events come from in `about` (`code`).
        """
        if code := self.code:
            self.about = {**self.about, "code": code}
        text = json.dumps(to_trace(self.events, self.samples, self.about), separators=(",", ":"))
        data = text.encode()
        with whole_file(path) as draft:
            draft.write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)

    @classmethod
    def load(cls, path: str | Path) -> EventLog:
        """Read a file that `save` wrote. Raises UsageError for any other file, in one line that names the field."""
        try:
            data = Path(path).read_bytes()
            text = gzip.decompress(data) if data.startswith(_GZIP) else data
            log = cls(*from_trace(json.loads(text, parse_constant=_refuse)))
            read_about(log.about)
            read_clocks(log.about)
            return log
        except _UNREADABLE as error:
            raise UsageError(
                f"trace {str(path)!r}",
                expected="a file that hwfsdp has recorded",
                got=_said(error),
                remedy="Check the path. Traces of other programs or formats cannot be read back.",
            ) from None


_GZIP = b"\x1f\x8b"  # the first bytes of a gzip file (RFC 1952)
_UNREADABLE = (
    *(OSError, EOFError, zlib.error),  # no file, or an incomplete one
    *(ValueError, KeyError, TypeError, AttributeError, RecursionError),  # not JSON, or not a log of hwfsdp
)


def _said(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = printable(" ".join(str(error).split()))
    if isinstance(error, KeyError):
        return f"no {said}"
    return said if type(error) is ValueError else f"{type(error).__name__}: {said}"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no time")


def clocks_about(clocks: Mapping[int, RankClock]) -> dict[str, Any]:
    """Return the clocks as `EventLog.about` keeps them, JSON-ready; empty if there are none."""
    return {"clocks": {str(rank): list(clock) for rank, clock in sorted(clocks.items())}} if clocks else {}


class Traffic(NamedTuple):
    """The number of calls of one op, and the bytes of its whole tensors (see `accounting`)."""

    calls: int
    bytes: int


TrafficByOp = dict[str, Traffic]


def traffic_of(events: Iterable[Event]) -> TrafficByOp:
    """Return the calls and bytes of these events by op. Ops are in the order of their first events."""
    found: TrafficByOp = {}
    for event in events:
        calls, nbytes = found.get(event.op, (0, 0))
        found[event.op] = Traffic(calls + 1, nbytes + event.bytes)
    return found


def _hidden(exposed: float, communicated: float) -> float:
    return max(0.0, 1.0 - exposed / communicated) if communicated else 0.0  # sums of parts may round up


def _peaks(samples: Iterable[Sample]) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for sample in samples:
        for kind, nbytes in sample.bytes_by_kind.items():
            peaks[kind] = max(peaks.get(kind, 0), nbytes)
    return peaks


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
