"""Streams and events, with the same interface on every device.

FSDP hides communication behind compute by issuing them on different *streams*. Work on one stream runs in order. Work on
two streams may overlap. A stream that needs the result of another stream waits for an *event* recorded there. Only this module
knows how streams work:

- On an accelerator, they are device streams and device events. The host issues work and goes on.
- On the CPU there are no streams, but collectives run on their own threads. A communication stream is a queue of works in
  flight and of functions to call after them. To wait for an event, the host finishes the queue up to the event. The compute
  stream is the host itself.
- A simulation may put another kind of device in their place (`backend`).

Note [What a wait costs]
    On a device, `wait` makes the *stream* wait and returns at once. On the CPU it blocks the host, because the host computes.
    Both mean the same to the schedule: work that is issued after the wait sees everything that the other stream wrote before the
    event. So one schedule serves both: issue early, wait late.

Note [Deferred work]
    `Stream.then` takes the work that follows a collective as a function: for example the cast of its result. A device runs the
    function at once, in stream order. The CPU does so if no work is in flight on the stream. Otherwise it keeps the function until
    the host waits for the stream, or until the end of the backward. Every rank waits at the same points of its program, so such a
    function may issue a collective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Protocol
from weakref import ref

import torch

from hwfsdp.core import observer
from hwfsdp.core.private_torch import NOTHING

NAMES = ("compute", "copy", "all_gather", "reduce_scatter", "all_reduce")


class Work(Protocol):
    """A collective in flight: a `torch.distributed.Work`, or an object with the same method."""

    def wait(self) -> Any:
        """Return when the collective is done."""


class StreamEvent:
    """A point in a stream, after all work that was issued there before.

    Args:
        native: the device's own event; on the host, the number of the queue's entries that are done then.
    """

    def __init__(self, stream: Stream, native: Any = None) -> None:
        self.stream, self.native = stream, native


class Stream(ABC):
    """A queue of work that runs in order, possibly beside other streams.

    Attributes:
        streams: the set that it belongs to.
        is_host: True if the host runs it. Then a collective is issued asynchronously, and `add` keeps its work.
    """

    streams: StreamSet
    is_host = False

    def __init__(self, name: str) -> None:
        self.name = name

    def record(self) -> StreamEvent:
        """Return an event after all work that was issued here so far."""
        event = self._record()
        if observer.slot is not None:
            observer.slot.recorded(event)
        return event

    def wait(self, event: StreamEvent) -> None:
        """Let all work that is issued here from now on run after `event` (Note [What a wait costs])."""
        if event.stream is self:
            return
        if observer.slot is None:
            self._wait(event)
        else:
            with observer.slot.waiting(self, event):
                self._wait(event)

    def run(self) -> AbstractContextManager[Any]:
        """Issue the work of the block on this stream."""
        return self._current() if observer.slot is None else observer.slot.running(self, self._current())

    @abstractmethod
    def add(self, work: Work | None) -> None:
        """Keep the work of a collective that was just issued here; None: there is nothing to wait for. Called inside `run`."""

    @abstractmethod
    def then(self, function: Callable[[], None]) -> None:
        """Run `function` here, in order (Note [Deferred work]). Called inside `run`."""

    def settle(self) -> None:
        """Run the deferred work. A device defers nothing (Note [Deferred work])."""

    def synchronize(self) -> None:
        """Make the host wait for all work that was issued here."""
        self.settle()

    @abstractmethod
    def _record(self) -> StreamEvent: ...

    @abstractmethod
    def _wait(self, event: StreamEvent) -> None: ...

    def _current(self) -> AbstractContextManager[Any]:
        """Make this stream the one on which work is issued; on the host there is only one."""
        return NOTHING


class StreamSet:
    """The streams of one device.

    Attributes:
        compute: forward, backward and optimizer; the stream that is current when FSDP is called.
        copy: packs what is gathered next, also while a gather is in flight.
        all_gather, reduce_scatter, all_reduce: one per kind of traffic.
        newest: returns the set that was made last in this process, if it is still used.
    """

    newest: ClassVar[Callable[[], StreamSet | None]] = staticmethod(lambda: None)

    def __init__(self, make_stream: Callable[[str], Stream]) -> None:
        made = [make_stream(name) for name in NAMES]
        self.compute, self.copy, self.all_gather, self.reduce_scatter, self.all_reduce = made
        for stream in made:
            stream.streams = self
        StreamSet.newest = ref(self)  # deferred work refers to the model


# --- CPU ---------------------------------------------------------------------------------------------------


class HostStream(Stream):
    """A queue of works in flight, and of functions to run after them.

    Attributes:
        issued, finished: how many entries the queue ever had, and how many of them are done.
    """

    is_host = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.issued = self.finished = 0
        self._queue: deque[Work | Callable[[], None]] = deque()

    def add(self, work: Work | None) -> None:
        if work is not None:
            self._queue.append(work)
            self.issued += 1

    def then(self, function: Callable[[], None]) -> None:
        if self._queue:
            self._queue.append(observer.slot.deferred(self, function) if observer.slot else function)
            self.issued += 1
        else:
            function()

    def settle(self) -> None:
        self.finish(self.issued)

    def finish(self, count: int) -> None:
        """Block until the first `count` entries ever queued are done.

        If one fails, the functions after it are dropped, up to the next collective: their input never came.
        """
        while self.finished < count:
            self.finished += 1
            entry = self._queue.popleft()
            try:
                entry() if callable(entry) else entry.wait()
            except BaseException:
                while self._queue and callable(self._queue[0]):
                    self._queue.popleft()
                    self.finished += 1
                raise

    def _record(self) -> StreamEvent:
        return StreamEvent(self, self.issued)

    def _wait(self, event: StreamEvent) -> None:
        if isinstance(event.stream, HostStream) and isinstance(event.native, int):
            event.stream.finish(event.native)


# --- Accelerators ------------------------------------------------------------------------------------------


class DeviceStream(Stream):
    """A stream of an accelerator. Gathers and reduce-scatters have priority, so that they start as soon as they can.

    Args:
        native: the device's own stream object; by default a new one, or for compute the current one.
    """

    def __init__(self, name: str, device_type: str, native: Any = None) -> None:
        super().__init__(name)
        self._module: Any = torch.get_device_module(device_type)
        # with its index, torch need not look for the device each time
        self._device = self._module.current_device()
        high = -1 if name in ("all_gather", "reduce_scatter", "copy") else 0
        self._stream = native or (None if name == "compute" else self._module.Stream(priority=high))

    @property
    def native(self) -> Any:
        """The device's own stream object."""
        return self._stream or self._module.current_stream(self._device)

    def add(self, work: Work | None) -> None:
        if work is not None:  # a user's collective returned this work; the backend returns None here
            work.wait()

    def then(self, function: Callable[[], None]) -> None:
        function()

    def synchronize(self) -> None:
        self.native.synchronize()

    def _record(self) -> StreamEvent:
        return StreamEvent(self, self.native.record_event())

    def _wait(self, event: StreamEvent) -> None:
        self.native.wait_event(event.native)

    @contextmanager
    def _current(self) -> Iterator[None]:
        before = self._module.current_stream(self._device)
        self._module.set_stream(self.native)
        try:
            yield
        finally:
            self._module.set_stream(before)


# --- Choice of backend -------------------------------------------------------------------------------------

_backends: dict[str, Callable[[], StreamSet]] = {"cpu": lambda: StreamSet(HostStream)}


@contextmanager
def backend(device_type: str, make: Callable[[], StreamSet]) -> Iterator[None]:
    """Let `stream_maker(device_type)` return `make` inside the block."""
    before = dict(_backends)
    _backends[device_type] = make
    try:
        yield
    finally:
        _backends.clear()
        _backends.update(before)


def stream_maker(device_type: str) -> Callable[[], StreamSet]:
    """Return a function that makes new streams, on the device of this type that the process uses now."""
    if device_type in _backends:
        return _backends[device_type]
    module: Any = torch.get_device_module(device_type)
    index = module.current_device()

    def make() -> StreamSet:
        with module.device(index):
            return StreamSet(lambda name: DeviceStream(name, device_type))

    return make
