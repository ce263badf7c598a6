"""Virtual time: streams and events of a virtual device. Time passes only when an operator is called.

The host issues operators, and streams execute them. Every operator advances the host by the time of its launch. On its stream,
the operator begins when the stream is free and the host has issued it. It ends after its cost in time. An event is a point in a
stream's time. A wait moves a stream's end to this point. A real device does the same. The schedule sees only the interface of
`core.device_streams`, so it overlaps the same work on both. All times are arithmetic on floats: two runs give the same times.

Note [A host that computes]
    If the device is the host itself (`Device.host`), compute and copies block the host: its clock moves to the end of each
    operator. Collectives run beside the host, as in gloo's threads. A blocking collective that the user calls blocks the host,
    too, on any stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hwfsdp.core.device_streams import Stream, StreamEvent, StreamSet, Work
from hwfsdp.observe import clocks, events
from hwfsdp.observe.events import STREAMS, HostMark
from hwfsdp.virtual.devices import Device

_VIEW = 0.4  # host time to make a view, as a share of the time to launch a kernel


class Clock:
    """The time of the host and of each stream, in µs since the clock was made.

    Attributes:
        host: the host's time now. ends: for each stream, the time when all work issued on it ends. current: the stream on which
            operators run. restarts: how often the time was set to 0.
    """

    restarts = 0

    def __init__(self, device: Device) -> None:
        self.device = device
        self.host = 0.0
        self.ends = defaultdict(float, dict.fromkeys(STREAMS, 0.0))
        self.current = "compute"

    def now(self, stream: str) -> float:
        """Return the time at which an event that is recorded on the stream now completes."""
        return max(self.host, self.ends[stream])

    def run(self, us: float) -> None:
        """Issue a kernel of `us` µs on the current stream. 0 means that only the host works, as for a view."""
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
        """Let the host wait for all streams."""
        self.host = max(self.host, *self.ends.values())

    def restart(self) -> None:
        """Set the time of the host and of all streams to 0, without pending work."""
        self.host = 0.0
        self.ends = defaultdict(float, dict.fromkeys(STREAMS, 0.0))
        self.restarts += 1


class VirtualEvent(StreamEvent):
    """A point in a stream, and its time in µs. After a restart of the clock, the event is past."""

    def __init__(self, stream: Stream, us: float, restarts: int) -> None:
        super().__init__(stream)
        self.us, self.restarts = us, restarts


class VirtualStream(Stream):
    """A stream in the time of a `Clock`."""

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
        return VirtualEvent(self, self.clock.now(self.name), self.clock.restarts)

    def _wait(self, event: StreamEvent) -> None:
        if isinstance(event, VirtualEvent) and event.restarts == self.clock.restarts:
            self.clock.wait(self.name, event.us)

    @contextmanager
    def _current(self) -> Iterator[None]:
        outer, self.clock.current = self.clock.current, self.name
        try:
            yield
        finally:
            self.clock.current = outer


def virtual_streams(clock: Clock) -> StreamSet:
    """Return a set of streams in this clock's time."""
    return StreamSet(lambda name: VirtualStream(name, clock))


def _clocks(streams: StreamSet) -> tuple[events.Clock, Callable[[], HostMark]]:
    """Return the clock of these streams, and the time of memory samples: the time when the compute stream gets there."""
    assert isinstance(streams.compute, VirtualStream)
    clock = streams.compute.clock
    return lambda name: HostMark(clock.now(name)), lambda: HostMark(clock.now("compute"))


clocks.register(VirtualStream, _clocks)
