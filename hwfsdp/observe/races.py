"""Accesses to the same memory whose order a log does not prove.

Two events are ordered if there is a path between them along streams and `after` (`events`, Note [Order without clocks]).
Two events that are not ordered may run at the same time, or in the other order in another run. They are a race if both access
the same memory and at least one of them writes to it. `find_races` finds races even in the log of a run without any error.

    races = find_races(log)
    print(*(race.sentence for race in races), sep="\\n")

Left out: memory that no event of a log touches (see `recording`), and waits that the log does not show, such as a host that
waits for the whole device. Streams of the same name on one rank count as one stream.

Note [One number per stream]
    The past of an event f is all work that has certainly ended when f begins. On each stream, this is all work that ended by
    a certain time *of this stream*. So the past is one time per stream. If f follows several events, it takes the latest of
    their times. Times of different streams are never compared. An event e comes before f if e was issued before f, and ended
    by the time that the past of f holds for e's stream. For f's own stream, this time is the start of f. For a stream that f
    waited for, it is the end of the awaited event. One pass over the events, in order of issue, finds every past.

Note [What must be ordered]
    Take the accesses to one storage in order of issue. A read must follow the last write before it. A write must follow the
    last write, and all reads since the last write. Resizing a storage and dropping a flat buffer count as writes, because the
    next owner of the memory writes to it. The order of issue is the intended order: every schedule issues its work in the right
    order. Two storages never have the same number (`ledger.Ledger`), so a storage at a reused address is a new storage.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from hwfsdp.observe.events import STREAMS, Event

Past = tuple[float, ...]  # nanoseconds, by stream, in the order of `Order`; Note [One number per stream]
_NEVER = float("-inf")


class HasEvents(Protocol):
    """An `EventLog`, or any other object with events."""

    @property
    def events(self) -> Sequence[Event]: ...


class Race(NamedTuple):
    """Two events of one rank that access the same memory without a guaranteed order.

    Attributes:
        first, second: the two events, in order of issue. storage: number of the memory. sentence: the possible error, in words.
    """

    first: Event
    second: Event
    storage: int
    sentence: str


class Order:
    """The order of the events of one rank.

    Args:
        events: the events of one rank, in order of issue.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._pasts: dict[int, Past] = {}  # by seq
        by_seq = {e.seq: e for e in events}
        names = dict.fromkeys([*STREAMS, *(e.stream for e in events)])
        self._index = {stream: index for index, stream in enumerate(names)}
        self._empty: Past = (_NEVER,) * len(names)
        streams = {stream: _Ended(self._empty) for stream in names}
        for event in events:
            stream = streams[event.stream]
            past = stream.past_at(_ns(event.start_us))
            for seq in event.after:
                if seq in self._pasts:
                    awaited = by_seq[seq]  # and all events inside it
                    past = _later(past, self._through(awaited, self._pasts[seq]))
                    past = _later(past, streams[awaited.stream].past_at(_ns(awaited.end_us)))
            self._pasts[event.seq] = past
            stream.add(event, self._through(event, past))

    def happens_before(self, first: Event, second: Event) -> bool:
        """True if `first` has certainly ended when `second` begins. If `second` is a wait for `first`: when `second` ends."""
        past = self._pasts.get(second.seq, self._empty)
        return first.seq < second.seq and _ns(first.end_us) <= past[self._index[first.stream]]

    def _through(self, event: Event, past: Past) -> Past:
        """Return the past that holds once the event has ended."""
        index = self._index[event.stream]
        return (*past[:index], max(past[index], _ns(event.end_us)), *past[index + 1 :])


class _Ended:
    """The ended events of one stream, and the past of events that follow them."""

    def __init__(self, empty: Past) -> None:
        self._empty = empty
        self._running: list[tuple[int, int, Past]] = []  # a heap by end
        self._times: list[int] = []
        self._pasts: list[Past] = []  # by the times above: the past of all events that have ended

    def add(self, event: Event, past: Past) -> None:
        heapq.heappush(self._running, (_ns(event.end_us), event.seq, past))

    def past_at(self, time: int) -> Past:
        while self._running and self._running[0][0] <= time:
            end, _, past = heapq.heappop(self._running)
            if self._times:
                end, past = max(end, self._times[-1]), _later(past, self._pasts[-1])
            self._times.append(end)
            self._pasts.append(past)
        count = bisect.bisect_right(self._times, time)
        return self._pasts[count - 1] if count else self._empty


def _ns(us: float) -> int:
    """Return a time in whole nanoseconds: the sum of a start and a duration differs from the true end by a rounding error."""
    return round(us * 1e3)


def _later(a: Past, b: Past) -> Past:
    return a if a == b else tuple(map(max, a, b))


def orders(events: Iterable[Event]) -> dict[int, Order]:
    """Return the order of each rank's events, by rank."""
    return {rank: Order(of_rank) for rank, of_rank in by_rank(events).items()}


def find_races(log: HasEvents) -> list[Race]:
    """Find accesses to the same memory without a guaranteed order. If there are none, the log proves that its schedule is right.

    Args:
        log: a log of any number of ranks. Each rank is examined separately.

    Returns:
        Races by rank, in order of issue of their second event. For one storage, each event is the second event of at most one race.
    """
    found = []
    for of_rank in by_rank(log.events).values():
        order, memory = Order(of_rank), dict[int, _Accesses]()
        for event in of_rank:
            for storage in dict.fromkeys((*event.reads, *event.writes)):
                accesses = memory.setdefault(storage, _Accesses())
                other = accesses.unordered(event, storage in event.writes, order)
                if other is not None:
                    found.append(Race(other, event, storage, _sentence(other, event, storage)))
                accesses.add(event, storage in event.writes)
    return found


def by_rank(events: Iterable[Event]) -> dict[int, list[Event]]:
    """Return the events of each rank, in order of issue."""
    found: dict[int, list[Event]] = {}
    for event in sorted(events, key=lambda e: (e.rank, e.seq)):
        found.setdefault(event.rank, []).append(event)
    return found


@dataclass
class _Accesses:
    """Accesses to one storage: the last write, and the reads after it."""

    write: Event | None = None
    reads: list[Event] = field(default_factory=list)

    def unordered(self, event: Event, writes: bool, order: Order) -> Event | None:
        """Return the first access that must end before this one but may still run (Note [What must be ordered])."""
        needed = [self.write] if self.write else []
        for earlier in [*self.reads, *needed] if writes else needed:
            if not order.happens_before(earlier, event):
                return earlier
        return None

    def add(self, event: Event, writes: bool) -> None:
        if writes:
            self.write, self.reads = event, []
        else:
            self.reads.append(event)


def _sentence(first: Event, second: Event, storage: int) -> str:
    """Describe the possible error, with the names of the log."""
    before, after = _named(first), _named(second)
    where = f"Rank {second.rank}, memory {storage}"
    missing = f"{second.stream} does not wait for {first.stream}"
    if first.stream == second.stream:
        missing = f"on {second.stream} it begins before the other has ended"
    if storage not in second.writes:
        return f"{where}: {after} may read what {before} has not written yet; {missing}."
    if storage in first.writes:
        return f"{where}: {after} may come before {before} has written there; {missing}."
    what = "give the memory away" if second.op == "free" else "overwrite the memory"
    return f"{where}: {after} may {what} that {before} still reads; {missing}."


def _named(event: Event) -> str:
    of = f" of {event.owner!r}" if event.owner else ""
    return f"{event.op}{of} (event {event.seq})"
