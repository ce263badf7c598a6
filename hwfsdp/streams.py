"""Several things at once: streams and events, the same on every device.

FSDP hides communication behind compute by issuing them on different *streams*. Work on one stream runs in
order; work on two streams may overlap; a stream that needs another's result waits for an *event* recorded
there. This is the only module that knows what a stream is made of:

- On an accelerator, a device stream and device events. The host issues and goes on.
- On the CPU there are no streams, but gloo's collectives run on threads of their own. A stream is a queue
  of works in flight and of things to do once they end; waiting for an event makes the host finish the queue up
  to it. Compute is the host itself.
- Further backends register themselves (`register_backend`).

Note [What a wait costs]
    On a device, `wait` makes the *stream* wait and returns at once. On the CPU it blocks the host, since the host
    is what computes. Both mean the same to the schedule: what is issued on the stream after the wait sees what
    the other stream wrote before the event. So one schedule serves both: issue early, wait late.

Note [Deferred work]
    What has to happen on a communication stream after a collective, such as casting what was reduced, is handed
    over as a function (`Stream.then`). A device runs it at once, in stream order. The CPU keeps it until somebody
    waits for the stream, or until the end of the backward; before that its effects are not there.

Note [Deferred collectives]
    One collective may need the result of another, on another stream: the all-reduce of hybrid sharding takes what the
    reduce-scatter gives. A device stream waits for the other's event and the host goes on. On the CPU the host must
    not block here either, or nothing would overlap. So the wait becomes an entry of the queue, a gate, and whatever
    comes after it is not even issued until somebody waited for the first collective. That happens at the same point
    of the program on every rank, as collectives must; asking whether it is done would not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hwfsdp import compat, divergence, events, history
from hwfsdp.errors import CollectiveError, UsageError
from hwfsdp.events import HostMark, Mark

_NOTHING = nullcontext()
pending_collective = ""  # what the host is blocked in, for whoever has to say where a rank hangs


class Work(Protocol):
    """A collective in flight: a `torch.distributed.Work`, or what does the same."""

    def wait(self) -> Any:
        """Returns when it is done."""


def is_host(device: torch.device) -> bool:
    """Whether the host computes on this device itself, in memory that other processes could share."""
    return device.type == "cpu"


class StreamEvent(ABC):
    """A point in a stream: all that was issued there before.

    Attributes:
        stream: name of the stream.
        after: seqs of the logged events that are over at this point, as far as they are not implied (see `events`).
    """

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self._recorder = recorder = events.active()
        self._after = recorder.over_on(stream) if recorder else ()

    @property
    def after(self) -> tuple[int, ...]:
        """Those of the recording in progress; what an earlier one logged has other numbers."""
        return self._after if self._recorder is events.active() else ()

    @property
    def is_over(self) -> bool:
        """Whether nothing that was issued there before is still to be done, as far as the host knows."""
        return False

    @property
    def seq(self) -> int:
        """The last event that ended on the stream before this point; -1 if none was logged."""
        return self.after[0] if self.after else -1


class Stream(ABC):
    """A queue of work that runs in order, possibly beside other streams.

    Attributes:
        clock: times what runs here, and on the other streams of the set; None: whatever clock counts around it.
        host_runs_it: whether what was called here, and returned, is over.
    """

    clock: events.Clock | None = None
    host_runs_it = False

    def __init__(self, name: str) -> None:
        self.name = name

    def wait(self, event: StreamEvent | None) -> None:
        """What is issued here from now on runs after `event`. None, or an event of this stream: no effect."""
        if event is None or event.stream == self.name:
            return
        if events.active() is None:
            self._wait(event)
        elif self.name == "compute":
            with events.timed_by(self.clock), events.span("wait", self.name, after=event.after):
                self._wait(event)
        else:
            self._wait(event)
            self._note_order(event)

    def _note_order(self, event: StreamEvent) -> None:
        if recorder := events.active():
            recorder.ordered_after(self.name, *event.after)

    def run(self) -> AbstractContextManager[Any]:
        """Tensor operations in the block run on this stream."""
        recorder = events.active()
        return self._current() if recorder is None else self._run_recorded(recorder)

    @contextmanager
    def _run_recorded(self, recorder: events.Recorder) -> Iterator[None]:
        outer = recorder.stream, recorder.clock, recorder.host_runs_stream
        recorder.stream, recorder.host_runs_stream = self.name, self.host_runs_it
        recorder.clock = self.clock or recorder.clock
        try:
            with self._current():
                yield
        finally:
            recorder.stream, recorder.clock, recorder.host_runs_stream = outer

    @abstractmethod
    def record(self) -> StreamEvent:
        """An event after all that was issued here so far."""

    @abstractmethod
    def collective(self, issue: Callable[[bool], Work | None], name: str, owner: str) -> None:
        """Issues a collective here. Called inside `run`.

        Args:
            issue: calls the collective with the `async_op` it is given.
            name, owner: the collective and its parameter group, for errors.
        """

    @abstractmethod
    def then(self, function: Callable[[], None]) -> None:
        """Runs `function` here, in order (Note [Deferred work]). Called inside `run`."""

    def settle(self) -> None:
        """Does what was put off until somebody waits; a device puts nothing off (Note [Deferred work])."""

    def synchronize(self) -> None:
        """The host waits for all that was issued here."""
        self.settle()

    def wait_for_device_event(self, event: torch.Event) -> None:
        """As `wait`, for an event that the user recorded; without a device there is nothing to wait for.

        Nobody knows after what the user recorded it. The log takes it for the end of what compute has done so far.
        """
        if recorder := events.active():
            recorder.ordered_after(self.name, *recorder.over_on("compute"))

    def over(self, native: Any) -> Stream:
        """A stream of this one's kind and name over a device's own stream object; without a device, this one."""
        return self

    @abstractmethod
    def _wait(self, event: StreamEvent) -> None: ...

    @abstractmethod
    def _current(self) -> AbstractContextManager[Any]: ...


class StreamSet:
    """The streams of one device.

    Attributes:
        compute: forward, backward and optimizer; the stream that is current when FSDP is called.
        copy: packs what is gathered next. all_gather, reduce_scatter, all_reduce: one per kind of traffic.
        clock: times what runs on them (`events`, Note [Clocks]).

    Args:
        read_clock: the clock. read_host: the host's time on the same axis, for what is sampled.
    """

    def __init__(
        self,
        make_stream: Callable[[str], Stream],
        read_clock: events.Clock,
        read_host: Callable[[], Mark] = HostMark,
    ) -> None:
        self.clock = read_clock
        self.compute = self._timed(make_stream("compute"))
        self.copy = self._timed(make_stream("copy"))
        self.all_gather = self._timed(make_stream("all_gather"))
        self.reduce_scatter = self._timed(make_stream("reduce_scatter"))
        self.all_reduce = self._timed(make_stream("all_reduce"))
        events.use_clock(read_clock, read_host)

    def _timed(self, stream: Stream) -> Stream:
        stream.clock = self.clock
        return stream


# --- CPU ---------------------------------------------------------------------------------------------------


class HostEvent(StreamEvent):
    """The first `ticket` entries of a host stream's queue are done."""

    def __init__(self, stream: HostStream, ticket: int) -> None:
        super().__init__(stream.name)
        self.queue, self.ticket = stream, ticket

    @property
    def is_over(self) -> bool:
        return self.queue._finished >= self.ticket

    @property
    def is_lost(self) -> bool:
        """Whether the last entry before it failed, or was dropped."""
        return any(start < self.ticket <= stop for start, stop in self.queue._lost)


@dataclass
class _Entry:
    """Something that a host stream has yet to finish.

    Attributes:
        finish: blocks until it is done.
        start: called before, as soon as all gates before it are open.
        gate: an event of another stream; if there is one, nothing behind it starts before that is over.
    """

    finish: Callable[[], Any]
    is_collective: bool = False
    start: Callable[[], Any] = lambda: None
    gate: HostEvent | None = None


class HostStream(Stream):
    """A queue of works in flight and of functions to run once they ended."""

    host_runs_it = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._is_host = name in ("compute", "copy")  # work there is done when its function returns
        self._queue: deque[_Entry] = deque()
        self._issued = self._started = self._finished = 0  # entries ever
        self._lost: list[tuple[int, int]] = []  # runs of entries that failed or were dropped
        self._followers: list[HostStream] = []  # streams with a gate that waits for this one

    def record(self) -> HostEvent:
        return HostEvent(self, self._issued)

    def wait(self, event: StreamEvent | None) -> None:
        if not isinstance(event, HostEvent) or event.stream == self.name:
            return
        if event.is_over or self._is_host:
            if events.active() is not None:
                super().wait(event)
            elif not event.is_over:
                self._wait(event)
            return
        if self not in event.queue._followers:
            event.queue._followers.append(self)
        finish, note = partial(event.queue.finish, event.ticket), partial(self._note_order, event)
        self._append(_Entry(finish, start=note, gate=event))

    def collective(self, issue: Callable[[bool], Work | None], name: str, owner: str) -> None:
        work: Work | None = None

        def start() -> None:
            nonlocal work
            with events.owned_by(owner), self.run():
                work = run_named(partial(issue, True), name, owner)

        def finish() -> None:
            if work is not None:
                run_named(work.wait, name, owner)

        if self._started != self._issued:  # a gate ahead
            self._append(_Entry(finish, is_collective=True, start=start))
            return
        start()
        if work is not None:
            self._append(_Entry(finish, is_collective=True))

    def then(self, function: Callable[[], None]) -> None:
        if self._queue:
            self._append(_Entry(function))
        else:
            function()

    def settle(self) -> None:
        self.finish(self._issued)

    def finish(self, ticket: int) -> None:
        """Blocks until the first `ticket` entries ever queued are done.

        If an entry fails, what was to follow it is dropped, here and behind gates: its input never came.
        """
        while self._finished < ticket:
            try:
                if self._finished == self._started:  # a closed gate: finish what it waits for
                    self._queue[0].finish()
                    self._start()
                self._queue[0].finish()
            except BaseException:
                dropped = self._drop(1, and_collectives=self._queue[0].gate is not None)
                self._lost.append((self._finished, self._finished + 1 + dropped))
                raise
            finally:
                self._finished += 1
                self._started = max(self._started, self._finished)
                self._queue.popleft()
        for stream in self._followers:
            stream._start()

    def _start(self) -> None:
        """Starts entries in order, up to a gate that is closed (Note [Deferred collectives])."""
        while self._started < self._issued:
            index = self._started - self._finished
            gate = self._queue[index].gate
            if gate and not gate.is_over:
                return
            if gate and gate.is_lost:
                self._drop(index + 1, and_collectives=True)
            self._queue[index].start()
            self._started += 1

    def _drop(self, index: int, and_collectives: bool) -> int:
        """Makes nothing of the entries from `index` on, up to the next that does not depend on them; how many."""
        for number, entry in enumerate(list(self._queue)[index:]):
            if entry.gate or (entry.is_collective and not and_collectives):
                return number
            self._queue[index + number] = _Entry(lambda: None)
        return max(0, len(self._queue) - index)

    def _append(self, entry: _Entry) -> None:
        self._queue.append(entry)
        self._issued += 1
        if self._started == self._issued - 1:
            self._start()

    def _wait(self, event: StreamEvent) -> None:
        assert isinstance(event, HostEvent)
        event.queue.finish(event.ticket)

    def _current(self) -> AbstractContextManager[Any]:
        return _NOTHING


def run_named(call: Callable[[], Any], name: str, owner: str) -> Any:
    """Calls, and names the collective and the parameter group if that fails or hangs."""
    global pending_collective
    pending_collective = f"{name} of parameter group {owner!r}"
    try:
        return call()
    except RuntimeError as error:
        raise _collective_error(name, owner, error) from error
    finally:
        pending_collective = ""


def _collective_error(name: str, owner: str, cause: RuntimeError) -> CollectiveError:
    """With a table of what all ranks called last, if they have to find that out themselves (`history.exchange`)."""
    error = CollectiveError(name, owner, dist.get_rank(), cause)
    told = history.exchange()
    error.table = divergence.describe_divergence(
        [
            (
                divergence.Report(rank, said.calls, place=divergence.place_in(said.stack))
                if said
                else divergence.Report(rank, None)
            )
            for rank, said in told.items()
        ]
    )
    return error


# --- Accelerators ------------------------------------------------------------------------------------------


class DeviceEvent(StreamEvent):
    """An event of the device."""

    def __init__(self, stream: str, event: torch.Event) -> None:
        super().__init__(stream)
        self.event = event


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

    def __init__(self, device_type: str, stream: Any) -> None:
        self._tie = _ties.setdefault(device_type, _Tie(device_type))
        self._event = torch.get_device_module(device_type).Event(enable_timing=True)
        self._event.record(stream)

    def us(self) -> float:
        return self._tie.us(self._event)


class DeviceStream(Stream):
    """A stream of an accelerator; communication has priority, so that it starts as soon as it can."""

    def __init__(self, name: str, device_type: str, native: Any = None) -> None:
        super().__init__(name)
        self._module: Any = torch.get_device_module(device_type)
        high = -1 if name in ("all_gather", "reduce_scatter", "copy") else 0
        self._stream = native or (None if name == "compute" else self._module.Stream(priority=high))

    @property
    def native(self) -> Any:
        """The device's own stream object."""
        return self._module.current_stream() if self._stream is None else self._stream

    def record(self) -> DeviceEvent:
        return DeviceEvent(self.name, self.native.record_event())

    def collective(self, issue: Callable[[bool], Work | None], name: str, owner: str) -> None:
        run_named(lambda: issue(False), name, owner)

    def then(self, function: Callable[[], None]) -> None:
        function()

    def over(self, native: Any) -> Stream:
        found = DeviceStream(self.name, native.device.type, native)
        around = self.clock
        found.clock = lambda name: found.mark() if name == found.name or around is None else around(name)
        return found

    def mark(self) -> DeviceMark:
        """What has been issued here so far."""
        return DeviceMark(self.native.device.type, self.native)

    def synchronize(self) -> None:
        self.native.synchronize()

    def wait_for_device_event(self, event: torch.Event) -> None:
        self.native.wait_event(event)

    def _wait(self, event: StreamEvent) -> None:
        assert isinstance(event, DeviceEvent)
        self.native.wait_event(event.event)

    def _current(self) -> AbstractContextManager[Any]:
        return _NOTHING if self._stream is None else self._module.stream(self._stream)


def _device_streams(device_type: str) -> StreamSet:
    made: dict[str, DeviceStream] = {}

    def make(name: str) -> Stream:
        made[name] = DeviceStream(name, device_type)
        return made[name]

    return StreamSet(make, lambda name: made[name].mark())


# --- Choice of backend -------------------------------------------------------------------------------------


_backends: dict[str, Callable[[], StreamSet]] = {
    "cpu": lambda: StreamSet(HostStream, events.host_clock),
}


def register_backend(device_type: str, make: Callable[[], StreamSet]) -> None:
    """`streams_for(device_type)` calls `make` from now on."""
    _backends[device_type] = make


@contextmanager
def backend(device_type: str, make: Callable[[], StreamSet]) -> Iterator[None]:
    """`register_backend` for the time of the block; afterwards what was there before is there again."""
    before = _backends.get(device_type)
    register_backend(device_type, make)
    try:
        yield
    finally:
        if before is None:
            del _backends[device_type]
        else:
            register_backend(device_type, before)


def streams_for(device_type: str) -> StreamSet:
    """New streams on a device of this type.

    Raises:
        UsageError: there is no such device.
    """
    if device_type in _backends:
        return _backends[device_type]()
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device_type:
        raise UsageError(
            f"streams on {device_type!r}",
            expected=f"one of {sorted(_backends)}, or this machine's accelerator",
            got=f"an accelerator of type {accelerator.type!r}" if accelerator else "no accelerator",
            remedy="Use a mesh on a device that is here.",
        )
    return _device_streams(device_type)


def after_backward(function: Callable[[], None]) -> None:
    """Calls `function` once, when the backward in progress has issued all of its work; there one waits for what is in flight.

    Only callable from inside a backward, such as from the hook of a tensor.
    """
    compat.call_after_backward(function)
