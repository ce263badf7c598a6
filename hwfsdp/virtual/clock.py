"""Virtual time, which passes only when an operator is called: streams and events of a virtual device.

The host issues, streams execute. Every operator advances the host by the time to launch it, and its stream by the time
that it costs, from when the stream is free and the operator was issued. An event is a point in a stream's time, a wait
moves a stream's end to it. A real device does the same. The schedule sees only the interface of `streams`, so it overlaps
the same work here and there. Everything is arithmetic on floats: two runs give the same times.

Note [A host that computes]
    Where the device is the host (`Device.host`), compute and copies block it: the host's clock moves to the end of each.
    Collectives run beside it, as gloo's threads do. A blocking collective that the user calls blocks the host, too, on any
    stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from hwfsdp.core.streams import Stream, StreamEvent, StreamSet, Work
from hwfsdp.observe import events, stream_clocks
from hwfsdp.observe.events import STREAMS, HostMark
from hwfsdp.virtual.devices import Device

_VIEW = 0.4  # of the time to launch a kernel, what the host needs for a view


class Clock:
    """The time of the host and of each stream, in µs since the clock was made.

    Attributes:
        host: now. ends: by stream, when all that was issued there is over. current: where operators run.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.host = 0.0
        self.ends = dict.fromkeys(STREAMS, 0.0)
        self.current = "compute"

    def now(self, stream: str) -> float:
        """The time at which an event recorded on the stream now will be over."""
        return max(self.host, self.ends[stream])

    def run(self, us: float) -> None:
        """A kernel of this length is issued on the current stream; 0: only the host does something."""
        if not us:
            self.host += _VIEW * self.device.launch_us
            return
        self.host += self.device.launch_us
        self.ends[self.current] = self.now(self.current) + us
        if self.device.host and self.current in ("compute", "copy"):  # Note [A host that computes]
            self.host = self.ends[self.current]

    def wait(self, stream: str, until: float) -> None:
        """Let later work on the stream begin after `until`."""
        self.ends[stream] = max(self.ends[stream], until)
        if self.device.host and stream in ("compute", "copy"):
            self.host = max(self.host, until)

    def synchronize(self) -> None:
        """The host waits for all streams."""
        self.host = max(self.host, *self.ends.values())

    def restart(self) -> None:
        """The time is 0 again, and nothing is under way."""
        self.host = 0.0
        self.ends = dict.fromkeys(STREAMS, 0.0)


class VirtualEvent(StreamEvent):
    """A point in a stream, and its time in µs."""

    def __init__(self, stream: Stream, us: float) -> None:
        super().__init__(stream)
        self.us = us


class VirtualStream(Stream):
    """A stream of the clock."""

    def __init__(self, name: str, clock: Clock) -> None:
        super().__init__(name)
        self.clock = clock

    def add(self, work: Work | None) -> None:
        pass

    def then(self, function: Callable[[], None]) -> None:
        function()

    def synchronize(self) -> None:
        self.clock.host = self.clock.now(self.name)

    def _record(self) -> VirtualEvent:
        return VirtualEvent(self, self.clock.now(self.name))

    def _wait(self, event: StreamEvent) -> None:
        if isinstance(event, VirtualEvent):
            self.clock.wait(self.name, event.us)

    @contextmanager
    def _on(self) -> Iterator[None]:
        outer, self.clock.current = self.clock.current, self.name
        try:
            yield
        finally:
            self.clock.current = outer

    def _current(self) -> AbstractContextManager[None]:
        return self._on()


def virtual_streams(clock: Clock) -> StreamSet:
    """Streams that live in this clock's time."""
    return StreamSet(lambda name: VirtualStream(name, clock))


def _clocks(streams: StreamSet) -> tuple[events.Clock, Callable[[], HostMark]]:
    """Memory is sampled when the device gets there."""
    assert isinstance(streams.compute, VirtualStream)
    clock = streams.compute.clock
    return lambda name: HostMark(clock.now(name)), lambda: HostMark(clock.now("compute"))


stream_clocks.register(VirtualStream, _clocks)
