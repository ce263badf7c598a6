"""What happened, when, on which stream: the event log.

Every instrument sits outside the code that it watches, so code that is written differently, or wrongly, is
seen all the same:

- collectives by wrappers that a recording puts around those of `torch.distributed`;
- allocation and freeing by a wrapper around `UntypedStorage.resize_`;
- forward and backward spans by the outer edge of the hooks, optimizer spans by the optimizer's own hooks;
- bytes by reading the storages (`memory`).

With no recording active there are no wrappers, and what remains is one comparison with `None` per hook.

Note [Order without clocks]
    Times vary from run to run, the order of events does not. `seq` is the order in which the host issued the
    events of one rank. Events on one stream complete in that order. Between streams there is order only where
    one waited for another: `after` lists the events that this one waited for. Hence "a ran before b is
    certain" means: there is a path from a to b along streams and `after`. Overlap is the absence of paths both
    ways, which is how tests assert it without a stopwatch.

Note [When asynchronous work begins]
    gloo says when a work ended, not when it began. Works of one stream run in the order of issue, so a work
    begins when it is issued or when its predecessor ends, whichever is later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

STREAMS = ("compute", "copy", "all_gather", "reduce_scatter", "all_reduce")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send", "recv")
OPS = (
    *COLLECTIVES,
    *("copy_in", "copy_out", "forward", "backward", "optimizer", "wait", "alloc", "free"),
)
COMPUTE_OPS = ("forward", "backward", "optimizer", "copy_in", "copy_out")


@dataclass(frozen=True)
class Event:
    """One thing that happened on one rank.

    Attributes:
        rank: the rank; seq: place in the rank's order of issue.
        op: one of `OPS`; stream: one of `STREAMS`; owner: fqn of the parameter group, "" if unknown.
        phase: "forward", "backward", "optimizer" or ""; step: optimizer steps finished before.
        dtype: of the tensor moved, "" if none.
        bytes: of the whole tensor (output of an all-gather, input of a reduce-scatter; else the tensor).
        start_us, dur_us: microseconds since the recording began.
        after: seqs of the events that this one waited for on other streams (Note [Order without clocks]).
        reads, writes: identities of the buffers involved.
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

    @property
    def end_us(self) -> float:
        return self.start_us + self.dur_us

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Mark(Protocol):
    """A point in a stream's time; known at once on the host, after the fact on a device."""

    def us(self) -> float: ...


class HostMark:
    """Host time, in µs; `None` means now."""

    __slots__ = ("value",)

    def __init__(self, value: float | None = None) -> None:
        self.value = time.perf_counter() * 1e6 if value is None else value

    def us(self) -> float:
        return self.value


class Draft:
    """An event that has begun; `close` ends it."""

    __slots__ = ("recorder", "event", "begin", "end", "follows_stream")

    def __init__(self, recorder: Recorder, event: Event, begin: Mark, follows_stream: bool) -> None:
        self.recorder, self.event, self.begin, self.follows_stream = recorder, event, begin, follows_stream
        self.end: Mark | None = None

    def close(self, mark: Mark | None = None) -> None:
        self.end = mark or self.recorder.mark(self.event.stream)
        if not self.follows_stream:
            self.recorder.last_seq[self.event.stream] = self.event.seq


@dataclass
class Sample:
    """Bytes alive at one moment, by kind."""

    us: float
    bytes_by_kind: dict[str, int]


@dataclass
class Recorder:
    """Collects drafts while a recording is active. One at a time per process."""

    rank: int
    drafts: list[Draft] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    step: int = 0
    owner: str = ""
    phase: str = ""
    stream: str = ""
    inside_collective: bool = False
    sample_memory: Callable[[], dict[str, int]] | None = None
    visit: Callable[[Any], None] | None = None
    watch: Callable[[Any, str], None] | None = None
    last_seq: dict[str, int] = field(default_factory=dict)
    waits: dict[str, dict[str, int]] = field(
        default_factory=dict
    )  # by stream: the last seq of each it waited for
    origin: Mark = field(default_factory=HostMark)

    def mark(self, stream: str) -> Mark:
        return _clock(stream)

    def begin(self, op: str, stream: str, *, follows_stream: bool = False, **details: Any) -> Draft:
        """Opens an event on `stream`. `follows_stream`: it cannot begin before its predecessor there ends."""
        seq = len(self.drafts)
        details.setdefault("owner", self.owner)
        details.setdefault("phase", self.phase)
        after = (*self.waits.pop(stream, {}).values(), *details.pop("after", ()))
        event = Event(self.rank, seq, op, stream, step=self.step, after=after, **details)
        draft = Draft(self, event, self.mark(stream), follows_stream)
        self.drafts.append(draft)
        if follows_stream:  # in its place on the stream as soon as it is issued; spans are once they are over
            self.last_seq[stream] = seq
        return draft

    def instant(self, op: str, stream: str, **details: Any) -> None:
        draft = self.begin(op, stream, **details)
        draft.close(draft.begin)

    def ordered_after(self, stream: str, *seqs: int) -> None:
        """The next event on `stream` waits for these of other streams; -1 stands for none."""
        for seq in seqs:
            if seq >= 0:
                self.waits.setdefault(stream, {})[self.drafts[seq].event.stream] = seq

    def over_on(self, stream: str) -> tuple[int, ...]:
        """What is over for whoever waits for `stream` now: the last event there, and what it has waited for since."""
        last = (self.last_seq[stream],) if stream in self.last_seq else ()
        return (*last, *self.waits.get(stream, {}).values())

    def sample(self) -> None:
        if self.sample_memory:
            self.samples.append(Sample(HostMark().us(), self.sample_memory()))

    def finish(self) -> tuple[list[Event], list[Sample]]:
        """The drafts as events, with times from the origin of the recording."""
        origin = self.origin.us()
        ends: dict[str, float] = {}
        events = []
        for draft in self.drafts:
            start, stream = draft.begin.us() - origin, draft.event.stream
            if draft.follows_stream:  # Note [When asynchronous work begins]
                start = max(start, ends.get(stream, start))
            end = max(start, draft.end.us() - origin) if draft.end else start
            if draft.follows_stream:
                ends[stream] = end
            events.append(replace(draft.event, start_us=start, dur_us=end - start))
        samples = [replace(s, us=s.us - origin) for s in self.samples]
        return events, samples


_active: Recorder | None = None
_clock: Callable[[str], Mark] = lambda stream: HostMark()


def use_clock(clock: Callable[[str], Mark]) -> None:
    """Time on a stream is read with `clock(stream name)` from now on; a backend of `streams` says so."""
    global _clock
    _clock = clock


def active() -> Recorder | None:
    """The recorder of the recording in progress, or None."""
    return _active


def activate(recorder: Recorder | None) -> None:
    """Makes `recorder` the one that instruments report to; None switches them off."""
    global _active
    _active = recorder


@contextmanager
def paused() -> Iterator[None]:
    """What happens inside the block is not logged: set-up, not data."""
    global _active
    recorder, _active = _active, None
    try:
        yield
    finally:
        _active = recorder


_NOTHING = nullcontext()


def span(op: str, stream: str, **details: Any) -> AbstractContextManager[Any]:
    """An event that lasts as long as the block; nothing when no recording is active."""
    return _NOTHING if _active is None else _open_span(_active, op, stream, details)


@contextmanager
def _open_span(recorder: Recorder, op: str, stream: str, details: dict[str, Any]) -> Iterator[None]:
    draft = recorder.begin(op, stream, **details)
    try:
        yield
    finally:
        draft.close()


def owned_by(owner: str) -> AbstractContextManager[Any]:
    """Events inside the block belong to this parameter group; nothing when not recording."""
    return _NOTHING if _active is None else _open_scope(_active, _active.phase, owner)


def scope(phase: str, owner: str) -> AbstractContextManager[Any]:
    """Events inside the block belong to this phase and parameter group; nothing when not recording."""
    return _NOTHING if _active is None else _open_scope(_active, phase, owner)


@contextmanager
def _open_scope(recorder: Recorder, phase: str, owner: str) -> Iterator[None]:
    outer = recorder.phase, recorder.owner
    recorder.phase, recorder.owner = phase, owner
    try:
        yield
    finally:
        recorder.phase, recorder.owner = outer
