"""Streams of a virtual GPU with nobody around them: what a function of the schedule issues where, and what waits for what.

Work is a number of µs; no tensor is touched. A host that waits is seen as well, since its time moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from hwfsdp import events
from hwfsdp.group import FSDPCommContext
from hwfsdp.streams import Stream, StreamSet, backend
from hwfsdp.virtual.clock import Clock, VirtualStream, virtual_streams
from hwfsdp.virtual.devices import DEVICES


class Issued(NamedTuple):
    """Work that was issued: where, and from when to when it runs, in µs."""

    name: str
    stream: str
    begin: float
    end: float


class Lone:
    """A clock, its streams, a context that has them, and all work so far."""

    def __init__(self) -> None:
        self.clock = Clock(DEVICES["h100"])
        with events.keeping_clock():
            self.streams: StreamSet = virtual_streams(self.clock)
            with backend("cpu", lambda: self.streams):
                self.context = FSDPCommContext("cpu")
        self.issued: list[Issued] = []

    def work(self, name: str, us: float, stream: Stream | None = None) -> Issued:
        """Issues `us` µs of work on a stream; without one, on whichever is current."""
        if stream is not None:
            with stream.run():
                return self.work(name, us)
        self.clock.run(us)
        end = self.clock.ends[self.clock.current]
        self.issued.append(Issued(name, self.clock.current, end - us, end))
        return self.issued[-1]

    def facts(self) -> dict[str, Any]:
        """For a report: all work so far, when each stream is over with it, and the host's time."""
        ends = dict(self.clock.ends)
        return {"issued": [list(each) for each in self.issued], "ends": ends, "host": self.clock.host}


def work_of(facts: dict[str, Any]) -> dict[str, Issued]:
    """By name, what `Lone.facts` reported."""
    return {each[0]: Issued(*each) for each in facts["issued"]}


@contextmanager
def host_watched() -> Iterator[list[str]]:
    """Names of the streams that the host waits for meanwhile, other than the model's own reading."""
    waited: list[str] = []
    original = VirtualStream.synchronize

    def synchronize(self: VirtualStream) -> None:
        waited.append(self.name)
        original(self)

    with mock.patch.object(VirtualStream, "synchronize", synchronize):
        yield waited
