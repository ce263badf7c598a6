"""The clock of each set of streams, and one time axis for the logs of several ranks.

The streams of the core have no clocks (`events`, Note [Clocks]). The host's clock times work of the host. Events of the device time
work of the device, and they are read after the recording. Other kinds of streams register their clock (`register`).

Times in a log count from the beginning of its recording. The log also keeps the host's time at this beginning (`RankClock`),
so that several logs can be put on one axis later. Processes of one machine share the host's clock (`perf_counter` is the time
since the machine started), so their clocks need no measurement. Between machines, `measure_offset` compares the clocks by
messages.

Note [Round trips]
    A rank asks another rank for its time. The answer arrives one round trip later. The other rank read its clock at some moment
    of this round trip. If we assume the middle, the error is at most half a round trip. The shortest of several round trips
    gives the best estimate. (This is Cristian's algorithm: F. Cristian, Probabilistic clock synchronization, 1989.) Drift
    during a recording is left out; good clocks drift by some µs per second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hwfsdp.core.device_streams import DeviceStream, HostStream, Stream, StreamSet
from hwfsdp.observe import events
from hwfsdp.observe.events import Clock, HostMark, Mark
from hwfsdp.observe.validate import MOST_RANKS, many, named, shown, text, time_us, whole

ROUND_TRIPS = 32


# --- Clocks of streams -------------------------------------------------------------------------------------


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
    if (streams := StreamSet.newest()) is not None:
        events.use_clock(*_clocks(streams))


# --- Clocks of ranks ---------------------------------------------------------------------------------------


class RankClock(NamedTuple):
    """The origin of a rank's times.

    Attributes:
        origin_us: time of the machine's clock when the recording began, µs.
        machine: a name of the machine, and so of its clock. Ranks of one machine share a clock.
    """

    origin_us: float
    machine: str


def read_clocks(about: Mapping[str, Any]) -> dict[int, RankClock]:
    """Read the clocks by rank from `EventLog.about`; empty for logs made by hand. Raises ValueError if an entry is no clock."""
    found = {}
    for key, clock in named("clocks", about.get("clocks", {})).items():
        where = f"clocks[{shown(key)}]"
        parts = many(where, clock)
        if not re.fullmatch(_NUMBER, str(key)) or len(parts) != 2:
            raise ValueError(f"{where} is {shown(clock)}, not [µs, machine] by the number of a rank")
        rank = whole(where, int(key), 0, MOST_RANKS - 1)
        found[rank] = RankClock(float(time_us(f"{where}[0]", parts[0])), text(f"{where}[1]", parts[1]))
    return found


_NUMBER = r"[0-9]{1,8}"


def shifts_to_one_axis(clocks: Mapping[int, RankClock]) -> dict[int, float]:
    """Return the µs to add to the times of each rank, so that all times count from the earliest origin.

    A rank whose clock is not the first rank's cannot be compared with the first rank, unless `measure_offset` was called. Such a
    rank is not shifted: its times count from its own origin.
    """
    if not clocks:
        return {}
    common = clocks[min(clocks)].machine
    zero = min(clock.origin_us for clock in clocks.values() if clock.machine == common)
    shifts = {rank: clock.origin_us - zero for rank, clock in clocks.items()}
    return {rank: us if clocks[rank].machine == common else 0.0 for rank, us in shifts.items()}


def measure_offset(peer: int, group: dist.ProcessGroup) -> float:
    """Ask a rank for its time, while that rank calls `answer_with_time`. See Note [Round trips].

    Args:
        peer: number of the other rank in `group`. The group must send CPU tensors.

    Returns:
        The other rank's clock minus this rank's clock, in µs.
    """
    question, answer = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    offset, shortest = 0.0, float("inf")
    for _ in range(ROUND_TRIPS):
        asked = HostMark().us()
        group.send([question], peer, 0).wait()
        group.recv([answer], peer, 0).wait()
        heard = HostMark().us()
        if heard - asked < shortest:
            offset, shortest = answer.item() - (asked + heard) / 2, heard - asked
    return offset


def answer_with_time(peer: int, group: dist.ProcessGroup) -> None:
    """Answer a rank that calls `measure_offset`. The arguments are the same."""
    question = torch.zeros(1)
    for _ in range(ROUND_TRIPS):
        group.recv([question], peer, 0).wait()
        group.send([torch.tensor([HostMark().us()], dtype=torch.float64)], peer, 0).wait()
