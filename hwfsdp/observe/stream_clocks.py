"""A clock for each set of streams (`events`, Note [Clocks]).

The streams of the core have no clocks. The host's clock times work of the host. Events of the device time work of the device,
and they are read after the recording. Other kinds of streams register their clock (`register`).
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
    """Ties the device's clock to the host's clock at its first use: both are read while the device is idle.

    The first use comes after a recording, so recording never stops the device. It comes soon after the timed work, because the
    two clocks drift apart. All marks made between two ties share one tie.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._event: torch.Event | None = None
        self._host_us = 0.0

    def us(self, event: torch.Event) -> float:
        """Return the host time in µs at which the device reached this event."""
        if self._event is None:
            _ties.pop(self._device_type, None)
            module: Any = torch.get_device_module(self._device_type)
            module.synchronize()
            self._event = module.Event(enable_timing=True)
            self._event.record()
            module.synchronize()
            self._host_us = HostMark().us()
        return float(self._host_us - event.elapsed_time(self._event) * 1e3)


_ties: dict[str, _Tie] = {}  # by device type: the tie for new marks


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


HostTime = Callable[[], Mark]  # the host's time on the same axis, for samples of memory
_kinds: dict[type[Stream], Callable[[StreamSet], tuple[Clock, HostTime]]] = {}
_made: WeakKeyDictionary[StreamSet, tuple[Clock, HostTime]] = WeakKeyDictionary()


def register(kind: type[Stream], clock: Callable[[StreamSet], tuple[Clock, HostTime]]) -> None:
    """Time streams of this kind with the clock that `clock` returns for a set of streams."""
    _kinds[kind] = clock


register(HostStream, lambda streams: (events.host_clock, HostMark))
register(
    DeviceStream,
    lambda streams: (
        lambda name: DeviceMark(getattr(streams, "compute" if name == "other" else name).native),
        HostMark,
    ),
)


def clock_of(streams: StreamSet) -> Clock:
    """Return the clock of a set of streams."""
    return _clocks(streams)[0]


def clock_of_stream(stream: Stream) -> Clock:
    """Return the clock of a stream. It is the clock of the stream's set, unless the set has another stream of this name."""
    around = clock_of(stream.streams)
    if not isinstance(stream, DeviceStream) or getattr(stream.streams, stream.name) is stream:
        return around
    return lambda name: DeviceMark(stream.native) if name == stream.name else around(name)


def _clocks(streams: StreamSet) -> tuple[Clock, HostTime]:
    if streams not in _made:
        _made[streams] = _kinds[type(streams.compute)](streams)
    return _made[streams]


def use_newest() -> None:
    """From now on, let the newest set's clock time all events that are on no stream of the core."""
    if StreamSet.newest is not None:
        events.use_clock(*_clocks(StreamSet.newest))
