"""What time it is on a stream: a clock for each set of streams (`events`, Note [Clocks]).

The streams of the heart have no clocks. What the host runs is timed by the host, what a device runs by events of the device, which
are read when the recording is over. Other kinds of streams say how they are timed (`register`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hwfsdp.core.streams import DeviceStream, HostStream, Stream, StreamSet
from hwfsdp.observe import events
from hwfsdp.observe.events import Clock, HostMark, Mark


class _Tie:
    """Ties the device's clock to the host's, when it is first asked: both are read while the device is idle.

    That is when a recording is over, so that recording never stops the device, and soon after what is to be timed, for
    the two clocks drift apart. All marks made between two ties share one.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._event: torch.Event | None = None
        self._host_us = 0.0

    def us(self, event: torch.Event) -> float:
        """Host time, in µs, at which the device came to this event."""
        if self._event is None:
            _ties.pop(self._device_type, None)
            module: Any = torch.get_device_module(self._device_type)
            module.synchronize()
            self._event = module.Event(enable_timing=True)
            self._event.record()
            module.synchronize()
            self._host_us = HostMark().us()
        return float(self._host_us - event.elapsed_time(self._event) * 1e3)


_ties: dict[str, _Tie] = {}  # by device type: for the marks made now


class DeviceMark:
    """A point in a device stream's time, read without stopping the device."""

    __slots__ = ("_tie", "_event")

    def __init__(self, stream: Any) -> None:
        device_type = stream.device.type
        self._tie = _ties.setdefault(device_type, _Tie(device_type))
        self._event = torch.get_device_module(device_type).Event(enable_timing=True)
        self._event.record(stream)

    def us(self) -> float:
        return self._tie.us(self._event)


HostTime = Callable[[], Mark]  # the host's time on the same axis, for what is sampled
_kinds: dict[type[Stream], Callable[[StreamSet], tuple[Clock, HostTime]]] = {}
_made: WeakKeyDictionary[StreamSet, tuple[Clock, HostTime]] = WeakKeyDictionary()


def register(kind: type[Stream], clock: Callable[[StreamSet], tuple[Clock, HostTime]]) -> None:
    """Streams of this kind are timed by what `clock` gives for a set of them."""
    _kinds[kind] = clock


register(HostStream, lambda streams: (events.host_clock, HostMark))
register(DeviceStream, lambda streams: (lambda name: DeviceMark(getattr(streams, name).native), HostMark))


def clock_of(streams: StreamSet) -> Clock:
    """The clock of a set."""
    return _clocks(streams)[0]


def clock_of_stream(stream: Stream) -> Clock:
    """The clock of a stream: that of its set, unless it stands beside the one of its name there."""
    around = clock_of(stream.streams)
    if getattr(stream.streams, stream.name) is stream or not isinstance(stream, DeviceStream):
        return around
    return lambda name: DeviceMark(stream.native) if name == stream.name else around(name)


def _clocks(streams: StreamSet) -> tuple[Clock, HostTime]:
    if streams not in _made:
        _made[streams] = _kinds[type(streams.compute)](streams)
    return _made[streams]


def use_newest() -> None:
    """From now on, the clock of the set that was made last times what happens on no stream of the heart."""
    if StreamSet.newest is not None:
        events.use_clock(*_clocks(StreamSet.newest))
