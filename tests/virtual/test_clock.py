"""Virtual time, against the longest path through the graph of dependencies."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwfsdp.observe import events
from hwfsdp.observe.recording import record
from hwfsdp.virtual.clock import Clock, VirtualEvent, virtual_streams
from hwfsdp.virtual.devices import DEVICES

LAUNCH = 10.0
GPU = replace(DEVICES["h100"], launch_us=LAUNCH)
HOST = replace(GPU, host=True)
THREE = ("compute", "all_gather", "reduce_scatter")
STREAM = st.sampled_from(THREE)
# A kernel of so many µs on a stream, an event recorded there, a wait there for one of the events, or a view.
KINDS = st.sampled_from(["kernel", "record", "wait", "view"])
PROGRAMS = st.lists(st.tuples(KINDS, STREAM, st.integers(1, 200)), max_size=40)


@pytest.fixture(autouse=True, scope="module")
def clock_kept() -> Iterator[None]:
    """Restore the host's clock for other tests."""
    with events.keeping_clock():
        yield


class Virtual:
    """The package's streams with their own clock."""

    def __init__(self, device: Any = GPU) -> None:
        self.clock = Clock(device)
        self.streams = virtual_streams(self.clock)

    def stream(self, name: str) -> Any:
        return getattr(self.streams, name)

    def kernel(self, stream: str, us: float) -> None:
        with self.stream(stream).run():
            self.clock.run(us)


@dataclass(eq=False)
class Node:
    """A kernel, or a point between kernels (0 µs): its time of issue, and the nodes that it waits for."""

    us: float = 0.0
    issued: float = 0.0
    after: list[Node] = field(default_factory=list)

    @functools.cached_property
    def end(self) -> float:
        return max([self.issued, *(node.end for node in self.after)]) + self.us


def longest_paths(program: list[tuple[str, str, int]]) -> tuple[float, dict[str, float]]:
    """Return the host's time, and the end of the last kernel of each stream."""
    host, last, marks, kernels = 0.0, {name: Node() for name in THREE}, list[Node](), dict[str, Node]()
    for what, stream, number in program:
        if what == "kernel":
            host += LAUNCH
            last[stream] = kernels[stream] = Node(number, host, [last[stream]])
        elif what == "view":
            host += 0.4 * LAUNCH
        elif what == "record":
            marks.append(last[stream])
        elif marks:
            last[stream] = Node(after=[last[stream], marks[number % len(marks)]])
    return host, {stream: node.end for stream, node in kernels.items()}


@given(PROGRAMS)
def test_kernels_run_when_the_longest_path_to_them_is_over(program: list[tuple[str, str, int]]) -> None:
    virtual, marks, ends = Virtual(), list[VirtualEvent](), dict[str, float]()
    for what, stream, number in program:
        if what == "kernel":
            virtual.kernel(stream, number)
            ends[stream] = virtual.clock.ends[stream]
        elif what == "view":
            virtual.kernel(stream, 0.0)
        elif what == "record":
            marks.append(virtual.stream(stream).record())
        elif marks:
            virtual.stream(stream).wait(marks[number % len(marks)])
    host, expected = longest_paths(program)
    assert virtual.clock.host == pytest.approx(host)
    assert ends == pytest.approx(expected)


def test_the_host_runs_ahead_of_the_streams_until_it_synchronizes_with_one_or_with_all() -> None:
    virtual = Virtual()
    virtual.kernel("all_gather", 500.0)
    for _ in range(3):
        virtual.kernel("compute", 1000.0)
    assert virtual.clock.host == 4 * LAUNCH
    virtual.streams.all_gather.synchronize()
    assert virtual.clock.host == LAUNCH + 500.0
    virtual.clock.synchronize()
    assert virtual.clock.host == 2 * LAUNCH + 3 * 1000.0


def test_kernels_block_a_host_that_computes_and_collectives_run_beside_it_until_compute_waits() -> None:
    for stream in ("all_gather", "reduce_scatter", "all_reduce"):
        virtual = Virtual(HOST)
        for number, blocking in enumerate(("compute", "copy", "copy"), start=1):
            virtual.kernel(blocking, 100.0)
            assert virtual.clock.host == virtual.clock.ends[blocking] == number * (LAUNCH + 100.0)
        start = virtual.clock.host
        virtual.kernel(stream, 500.0)
        assert virtual.clock.host == start + LAUNCH
        virtual.kernel("compute", 100.0)
        assert virtual.clock.host == start + 2 * LAUNCH + 100.0
        virtual.streams.compute.wait(virtual.stream(stream).record())
        assert virtual.clock.host == start + LAUNCH + 500.0


def test_a_recording_of_the_streams_is_in_virtual_time() -> None:
    virtual = Virtual()
    with record() as log:
        virtual.kernel("all_gather", 500.0)
        with events.span("forward", "compute"):
            virtual.clock.run(100.0)
        virtual.streams.compute.wait(virtual.streams.all_gather.record())
    found = [(e.op, e.start_us, e.dur_us) for e in log.events]
    assert found == [("forward", LAUNCH, LAUNCH + 100.0), ("wait", 120.0, 390.0)]
