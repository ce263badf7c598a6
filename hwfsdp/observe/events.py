"""The event log: each event with its time and its stream.

Most instruments are outside the code that they watch. So they also see other implementations, even wrong ones:

- wrappers around the methods of process groups see collectives (`collective_calls`);
- a wrapper around `UntypedStorage.resize_` sees allocations and frees;
- the ledger sees dropped flat buffers: before the next buffer is made, it checks which buffers still exist;
- the optimizer's own hooks give optimizer spans;
- the ledger reads bytes from the storages (`ledger`).

The core reports forward and backward spans, copies and waits (`instrument`). Under `hwfsdp train`, `module_hooks` reports the spans of
other implementations. `hwfsdp trace run` gives a script with torch's FSDP2 no spans of modules.

Without an active recording there are no wrappers. Each hook then costs one comparison with `None`.

The module `recording` lists the events that the instruments do not see.

Note [Order without clocks]
    Times vary from run to run; the order of events does not. `seq` is the order in which the host issued the
    events of one rank. Events on one stream complete in this order. Two streams are ordered only at points where one waited for
    the other: `after` lists the events that this event waited for. So event a certainly ran before event b if there is a path
    from a to b along streams and `after`. Two events may overlap if there is no path in either direction. This is how tests
    assert overlap without a stopwatch.

Note [Clocks]
    A clock is a function from the name of a stream to a `Mark`, the point that the stream has reached. Each set of
    streams (`device_streams.StreamSet`) has a clock of its own, because two sets have streams of the same name. Code that runs on a
    set chooses the clock (`scope`, `Stream.run`). The clock that times the start of an event also times its end. Other code, for
    example an optimizer, uses the clock of the newest set, because all sets share the compute stream.
    The time of a mark may not be known yet. The device is asked for its times after the recording, so that recording never makes
    the host wait.

Note [Steps of several optimizers]
    A step is a round in which every optimizer steps once. The round ends when the last optimizer has stepped. The recorder knows
    the last optimizer only when the next round begins, because then an optimizer steps again. So steps are counted after the
    recording. This works for two optimizers side by side, and for one optimizer per parameter, each of which steps in the backward.

Note [When asynchronous work begins]
    gloo reports the end of a work, not its start. Works of one stream run in the order of issue. So a work begins at the later of
    two times: when it is issued, or when its predecessor ends.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from hwfsdp.comm import flight_recorder
from hwfsdp.comm.users_collectives import COLLECTIVES as COLLECTIVES
from hwfsdp.observe.ledger import Ledger
from hwfsdp.observe.call_sites import CallSites

# other: see `collective_calls`, Note [Streams of a collective]
STREAMS = ("compute", "copy", "all_gather", "reduce_scatter", "all_reduce", "other")
OPS = (*COLLECTIVES, "copy_in", "copy_out", "forward", "backward", "optimizer", "wait", "alloc", "free")
COMPUTE_OPS = ("forward", "backward", "optimizer", "copy_in", "copy_out")


@dataclass(frozen=True)
class Event:
    """One thing that happened on one rank.

    Attributes:
        rank: the rank; seq: place in the rank's order of issue.
        op: one of `OPS`; stream: one of `STREAMS`; owner: fqn of the parameter group, "" if unknown.
        phase: "forward", "backward", "optimizer" or "".
        step: the number of steps that were finished before this event (Note [Steps of several optimizers]). Steps count from the
            start of the recording, or from the start of the run if the recording got its `first_step`.
        dtype: dtype of the tensor moved, "" if none.
        bytes: bytes of the whole tensor (output of an all-gather, input of a reduce-scatter; else the tensor). For an alloc or a
            free, the bytes by which a storage was resized. A dropped flat buffer has 0 bytes and no owner.
        start_us, dur_us: start in microseconds since the recording began, and duration in microseconds. In a merged log, times
            count from the start of the first recording.
        after: seqs of the events that this event waited for on other streams (Note [Order without clocks]).
        reads, writes: numbers of the storages that it reads and writes. Each storage of the recording has its own number
            (`ledger.Ledger`).
        code: the places that issued it, from the inside out (`call_sites`); "" if unknown.
    """

    rank: int
    seq: int
    op: str
    stream: str
    owner: str = ""
    phase: str = ""
    step: int = 0
    dtype: str = ""
    bytes: int = 0
    start_us: float = 0.0
    dur_us: float = 0.0
    after: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    code: str = ""

    @property
    def end_us(self) -> float:
        return self.start_us + self.dur_us

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def changed(self, **fields: Any) -> Event:
        """Return a copy with other values of these fields. It is faster than `dataclasses.replace`."""
        return Event(**{**vars(self), **fields})


class Mark(Protocol):
    """A point in a stream's time. The host knows it at once. A device knows it only after it has reached the point."""

    def us(self) -> float: ...


class HostMark(float):
    """A time in µs that is known at once. Without a value, it is the host's time now."""

    __slots__ = ()

    def __new__(cls, value: float | None = None) -> HostMark:
        return float.__new__(cls, time.perf_counter() * 1e6 if value is None else value)

    def us(self) -> float:
        return float(self)


Clock = Callable[[str], Mark]  # Note [Clocks]


class Draft:
    """An event that has begun. `close` ends it, and so does the end of a `with` block. It has the fields of `Event` except times.

    Attributes:
        clock: the clock that times the event. begin, end: the marks of its start and its end. follows_stream: see `Recorder.begin`.
    """

    def __init__(self, recorder: Recorder, op: str, stream: str) -> None:
        self.recorder, self.seq, self.op, self.stream = recorder, len(recorder.drafts), op, stream
        self.owner, self.phase = recorder.owner, recorder.phase
        self.dtype, self.bytes, self.code = "", 0, recorder.call_sites.here()
        self.after: tuple[int, ...] = ()
        self.reads: tuple[int, ...] = ()
        self.writes: tuple[int, ...] = ()
        self.clock = recorder.clock or _clock
        self.begin = self.clock(stream)
        self.end: Mark | None = None
        self.follows_stream = False
        recorder.drafts.append(self)

    def close(self, mark: Mark | None = None) -> None:
        """End the event at `mark`, or at the point that its stream has reached. If the event has ended already, do nothing."""
        if self.end is None:
            self.end = mark or self.clock(self.stream)
            if not self.follows_stream:
                self.recorder.last_seq[self.stream] = self.seq

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.close()

    def timed(self, step: int, start_us: float, dur_us: float) -> Event:
        """Return the event with this step and these times."""
        return Event(
            *(self.recorder.rank, self.seq, self.op, self.stream, self.owner, self.phase, step),
            *(self.dtype, self.bytes, start_us, dur_us, self.after, self.reads, self.writes),
            self.code,
        )


@dataclass
class Sample:
    """Bytes alive at one moment, by kind."""

    us: float
    bytes_by_kind: dict[str, int]


@dataclass
class Recorder:
    """Collects drafts while a recording is active. A process has at most one active recorder.

    Attributes:
        owner, phase, stream, clock: the values for events that begin now and name no others; "" and None mean unknown.
        host_runs_stream: True if a collective that was called on `stream` and returned no work has ended.
        coalesced: collectives that have begun inside torch's coalescing manager, and whose work it will return at its end.
        ledger: watches memory, numbers storages for `Event.reads` and `writes`, and gives the samples.
        visited: one module of each `fully_shard` call, in the order in which they ran first. Each has the ids of its whole
            parameters, and the numbers of their storages.
        groups: parameter groups that `module_hooks` describes, because the modules that ran have no instruments.
        last_seq: the seq of the last event on each stream. waits: for each stream, the streams that it waited for, and the last
            seq on each of them that it waited for.
        origin: the time when the recording began. first_step: number of the step in which it began.
        in_flight: works that their callers will wait for. blocking: works that functions of torch wait for before they return.
        results: results of functional collectives that nobody has waited for,
            by the numbers of their storages. awaited: while deferred work runs, seqs of the events until whose end it was
            deferred.
        stepping: the steps of optimizers that run now, by the optimizer's id; one that raised stays.
        call_sites: names the lines that events come from.
    """

    rank: int
    drafts: list[Draft] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    first_step: int = 0
    owner: str = ""
    phase: str = ""
    stream: str = ""
    clock: Clock | None = None
    host_runs_stream: bool = True
    inside_collective: bool = False
    coalesced: list[Draft] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    visited: dict[Any, tuple[list[int], tuple[int, ...]]] = field(default_factory=dict)
    groups: Collection[Any] = ()
    last_seq: dict[str, int] = field(default_factory=dict)
    waits: dict[str, dict[str, int]] = field(default_factory=dict)
    origin: Mark = field(default_factory=HostMark)
    in_flight: WeakKeyDictionary[Any, Draft] = field(default_factory=WeakKeyDictionary)
    blocking: WeakKeyDictionary[Any, Draft] = field(default_factory=WeakKeyDictionary)
    results: dict[int, Draft] = field(default_factory=dict)
    awaited: tuple[int, ...] = ()
    stepping: dict[int, Draft] = field(default_factory=dict)
    call_sites: CallSites = field(default_factory=CallSites)
    _resizing: str = ""
    _round: WeakKeyDictionary[Any, None] = field(default_factory=WeakKeyDictionary)
    _round_over: int = 0
    _step_ends: list[int] = field(default_factory=list)

    def mark(self, stream: str) -> Mark:
        return (self.clock or _clock)(stream)

    def begin(
        self,
        op: str,
        stream: str,
        *,
        after: tuple[int, ...] = (),
        reads: Collection[Any] = (),
        writes: Collection[Any] = (),
        **details: Any,
    ) -> Draft:
        """Open an event on `stream`.

        Args:
            after: seqs of events that it waits for, in addition to the events that its stream waits for.
            reads, writes: the tensors or storages that it reads and writes.
            details: further fields of the event, or `follows_stream`: True if the event cannot begin before the previous event
                on its stream ends.
        """
        if self._resizing:
            self.sample()
        draft = Draft(self, op, stream)
        draft.after = tuple(dict.fromkeys([*self.waits.pop(stream, {}).values(), *self.awaited, *after]))
        if reads:
            draft.reads = self.ledger.numbers_of(reads)
        if writes:
            draft.writes = self.ledger.numbers_of(writes)
        for name, value in details.items():
            setattr(draft, name, value)
        if draft.follows_stream:  # it takes its place at issue; a span takes its place when it ends
            self.last_seq[stream] = draft.seq
        return draft

    def instant(self, op: str, stream: str, **details: Any) -> None:
        draft = self.begin(op, stream, **details)
        draft.close(draft.begin)

    def resized(self, storage: Any, by: int, to: int) -> None:
        """Log that a storage has grown or shrunk by `by` bytes, and now has `to` bytes.

        After several changes in the same direction, memory is sampled once.
        """
        op = "alloc" if by > 0 else "free"
        if self._resizing not in ("", op):
            self.sample()
        self._resizing = op
        stream = self.stream or "compute"
        draft = Draft(self, op, stream)
        draft.after = tuple(self.waits.pop(stream, {}).values())
        draft.bytes, draft.writes = abs(by), (self.ledger.resized(storage, to),)
        draft.end = draft.begin
        self.last_seq[stream] = draft.seq

    def buffer_made(self, buffer: Any) -> None:
        """Log that a flat buffer was made on the current stream. It may reuse the memory of this stream's dropped buffers.

        So dropped buffers count as freed now, not earlier: all events up to now must end before their memory is written again.
        """
        stream = self.stream or "compute"
        for number in self.ledger.released_flats(stream):
            draft = Draft(self, "free", stream)
            draft.owner, draft.writes = "", (number,)
            # The next event on the stream has the same waits, so they stay in `waits`.
            draft.after = tuple(self.waits.get(stream, {}).values())
            draft.close(draft.begin)
        self.ledger.keep_flat(buffer, stream)

    def ordered_after(self, stream: str, *seqs: int) -> None:
        """Let the next event on `stream` wait for these events of other streams. -1 means no event."""
        for seq in seqs:
            if seq >= 0:
                waits, other = self.waits.setdefault(stream, {}), self.drafts[seq].stream
                # A wait for an older event does not replace a wait for a newer one.
                waits[other] = max(seq, waits.get(other, -1))

    def over_on(self, stream: str) -> tuple[int, ...]:
        """Return the events that a wait for `stream` covers now: its last event, and the events that `stream` waited for afterwards."""
        last = (self.last_seq[stream],) if stream in self.last_seq else ()
        return (*last, *self.waits.get(stream, {}).values())

    def sample(self) -> None:
        self._resizing = ""
        self.samples.append(Sample(_host_now().us(), self.ledger.sums()))

    def stepped(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped (Note [Steps of several optimizers])."""
        if optimizer in self._round:
            self._step_ends.append(self._round_over)
            self._round.clear()
        self._round[optimizer] = None
        self._round_over = len(self.drafts)

    def finish(self) -> tuple[list[Event], list[Sample]]:
        """Return the drafts as events, with times from the origin of the recording. Optimizer steps that raised are left out."""
        if self._resizing:
            self.sample()
        step_ends = [*self._step_ends, *([self._round_over] if self._round else [])]
        origin = self.origin.us()
        ends: dict[str, float] = {}
        events = []
        raised = {draft.seq for draft in self.drafts if draft.op == "optimizer" and draft.end is None}
        for draft in self.drafts:
            if draft.seq in raised:
                continue
            draft.after = tuple(seq for seq in draft.after if seq not in raised)
            start, stream = draft.begin.us() - origin, draft.stream
            if draft.follows_stream:  # Note [When asynchronous work begins]
                start = max(start, ends.get(stream, start))
            end = max(start, draft.end.us() - origin) if draft.end else start
            if draft.follows_stream:
                ends[stream] = end
            step = self.first_step + bisect_right(step_ends, draft.seq)
            events.append(draft.timed(step, start, end - start))
        return events, [replace(s, us=s.us - origin) for s in self.samples]


_active: Recorder | None = None


def host_clock(stream: str) -> Mark:
    """Return the host's time. This is the clock of streams that the host runs."""
    return float.__new__(HostMark, time.perf_counter() * 1e6)


_clock: Clock = host_clock
_host_now: Callable[[], Mark] = HostMark


def use_clock(clock: Clock, host: Callable[[], Mark] = HostMark) -> None:
    """From now on, let `clock` time all events that name no clock (Note [Clocks]).

    Args:
        host: reads the host's time on the same axis, for samples of memory.
    """
    global _clock, _host_now
    _clock, _host_now = clock, host


@contextmanager
def keeping_clock() -> Iterator[None]:
    """Undo calls of `use_clock` at the end of the block. Code that makes streams and then drops them needs this."""
    global _clock, _host_now
    before = _clock, _host_now
    try:
        yield
    finally:
        _clock, _host_now = before


def active() -> Recorder | None:
    """Return the recorder of the recording in progress, or None."""
    return _active


def activate(recorder: Recorder | None) -> None:
    """Let all instruments report to `recorder`. None switches them off."""
    global _active
    _active = recorder


@contextmanager
def paused() -> Iterator[None]:
    """Log nothing inside the block. Set-up code uses this."""
    global _active
    recorder, _active = _active, None
    try:
        yield
    finally:
        _active = recorder


flight_recorder.unlogged = paused

_NOTHING = nullcontext()


def span(op: str, stream: str, **details: Any) -> AbstractContextManager[Any]:
    """Log an event that lasts as long as the block, if a recording is active. `details`: see `Recorder.begin`."""
    return _NOTHING if _active is None else _active.begin(op, stream, **details)


def scope(
    phase: str | None = None, owner: str | None = None, clock: Clock | None = None
) -> AbstractContextManager[Any]:
    """Give events inside the block this phase, this parameter group and this clock.

    None keeps the value from outside the block. Without a recording this does nothing.
    """
    if _active is None:
        return _NOTHING
    given = {"phase": phase, "owner": owner, "clock": clock}
    return holding(_active, **{name: value for name, value in given.items() if value is not None})


@contextmanager
def holding(recorder: Recorder, **fields: Any) -> Iterator[None]:
    """Set fields of the recorder for the block, and restore the old values afterwards."""
    outer = {name: getattr(recorder, name) for name in fields}
    vars(recorder).update(fields)
    try:
        yield
    finally:
        vars(recorder).update(outer)
