"""Which event is certain to be over before which, and where a log does not say so although it must.

Two events are ordered if there is a path between them along streams and `after` (`events`, Note [Order without clocks]).
What is not ordered may happen at once, or the other way round on another day: a race, if both touch the same memory and
one of them writes to it. `find_races` finds those in a log in which everything went well.

    races = find_races(log)
    print(*(race.sentence for race in races), sep="\\n")

Left out: memory that no event of a log touches (see `recording`), and waiting that it does not show, such as a host that
waits for the whole device. Streams of the same name on one rank count as one.

Note [One number per stream]
    What is over for whoever comes after an event is, on each stream, all that ended by a certain time *of that stream*. So
    the past of an event is one time per stream, and the past of what follows several is the latest of theirs. Times of
    different streams are never compared. Hence an event e comes before f if it was issued before, and ended by the time that
    the past of f holds for e's stream. For f's own stream that is when f begins, for a stream that it waited for the
    end of the last event there. One pass over the events, in order of issue, finds every past.

Note [What must be ordered]
    Accesses to one storage, in order of issue. A read needs the last write before it. A write must not overtake the reads
    since the last write, nor that write. Resizing a storage, and letting a flat buffer go, are writes: whoever gets the
    memory next will write to it. Order of issue says what was meant, since on every stream a schedule is issued in
    the order in which it is right. Storages have numbers that are never given twice (`memory.Identities`), so that one
    which got the address of another is not mistaken for it.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from hwfsdp.observe.events import STREAMS, Event

Past = tuple[float, ...]  # by stream, in the order of STREAMS; Note [One number per stream]
_NEVER = float("-inf")
_EMPTY: Past = (_NEVER,) * len(STREAMS)
_INDEX = {stream: index for index, stream in enumerate(STREAMS)}


class HasEvents(Protocol):
    """An `EventLog`, or anything with events."""

    @property
    def events(self) -> Sequence[Event]: ...


class Race(NamedTuple):
    """Two events of one rank that touch the same memory, and that nothing puts in order.

    Attributes:
        first, second: in order of issue. storage: number of the memory. sentence: what may happen.
    """

    first: Event
    second: Event
    storage: int
    sentence: str


class Order:
    """The order of the events of one rank.

    Args:
        events: those of one rank, in order of issue.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._pasts: dict[int, Past] = {}  # by seq
        by_seq = {e.seq: e for e in events}
        streams = {stream: _Ended() for stream in STREAMS}
        for event in events:
            stream = streams[event.stream]
            past = stream.past_at(event.start_us)
            for seq in event.after:
                if seq in self._pasts:
                    awaited = by_seq[seq]  # with all that it encloses
                    past = _later(past, _through(awaited, self._pasts[seq]))
                    past = _later(past, streams[awaited.stream].past_at(awaited.end_us))
            self._pasts[event.seq] = past
            stream.add(event, _through(event, past))

    def happens_before(self, first: Event, second: Event) -> bool:
        """Whether `first` is certain to be over when `second` begins, or ends if that is a wait for it."""
        past = self._pasts.get(second.seq, _EMPTY)
        return first.seq < second.seq and first.end_us <= past[_INDEX[first.stream]]


class _Ended:
    """The events of one stream that are over, and what is over for whoever comes after them."""

    def __init__(self) -> None:
        self._running: list[tuple[float, int, Past]] = []  # by end
        self._times: list[float] = []
        self._pasts: list[Past] = []  # of all that ended by then

    def add(self, event: Event, past: Past) -> None:
        heapq.heappush(self._running, (event.end_us, event.seq, past))

    def past_at(self, time: float) -> Past:
        while self._running and self._running[0][0] <= time:
            end, _, past = heapq.heappop(self._running)
            if self._times:
                end, past = max(end, self._times[-1]), _later(past, self._pasts[-1])
            self._times.append(end)
            self._pasts.append(past)
        count = bisect.bisect_right(self._times, time)
        return self._pasts[count - 1] if count else _EMPTY


def _later(a: Past, b: Past) -> Past:
    return a if a == b else tuple(map(max, a, b))


def _through(event: Event, past: Past) -> Past:
    """What is over when the event is."""
    index = _INDEX[event.stream]
    return (*past[:index], max(past[index], event.end_us), *past[index + 1 :])


def orders(events: Iterable[Event]) -> dict[int, Order]:
    """The order of each rank's events, by rank."""
    return {rank: Order(of_rank) for rank, of_rank in _by_rank(events).items()}


def find_races(log: HasEvents) -> list[Race]:
    """Accesses to the same memory that nothing puts in order; none if the log proves that its schedule is right.

    Args:
        log: of any number of ranks; each is looked at by itself.

    Returns:
        Races by rank, in order of issue of their second event. Of one memory, each event is found once as a second one.
    """
    found = []
    for of_rank in _by_rank(log.events).values():
        order, memory = Order(of_rank), dict[int, _Accesses]()
        for event in of_rank:
            for storage in dict.fromkeys((*event.reads, *event.writes)):
                accesses = memory.setdefault(storage, _Accesses())
                other = accesses.unordered(event, storage in event.writes, order)
                if other is not None:
                    found.append(Race(other, event, storage, _sentence(other, event, storage)))
                accesses.add(event, storage in event.writes)
    return found


def _by_rank(events: Iterable[Event]) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    for event in sorted(events, key=lambda e: (e.rank, e.seq)):
        found.setdefault(event.rank, []).append(event)
    return found


@dataclass
class _Accesses:
    """To one storage: the last write, and the reads since."""

    write: Event | None = None
    reads: list[Event] = field(default_factory=list)

    def unordered(self, event: Event, writes: bool, order: Order) -> Event | None:
        """The first access that must be over before this one, and is not certain to be (Note [What must be ordered])."""
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
    """What may happen, for a reader who knows the words of the log."""
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
