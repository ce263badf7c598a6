"""Record events by hand: order, scopes, times. Without a recording, nothing happens at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hwfsdp.observe import events
from hwfsdp.observe.events import Event, HostMark, Recorder


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Make an active recorder that counts times from 100 µs."""
    recorder = Recorder(rank=3, origin=HostMark(100.0))
    events.activate(recorder)
    yield recorder
    events.activate(None)


class Clock:
    """A clock that advances only when it is read: 101 µs, 102 µs, …"""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self, stream: str) -> HostMark:
        self.now += 1
        return HostMark(self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(events, "_clock", clock)
    return clock


def finished(recorder: Recorder) -> list[Event]:
    return recorder.finish()[0]


# --- Order -------------------------------------------------------------------------------------------------


def test_a_wait_is_noted_only_at_the_next_event_of_its_stream(recorder: Recorder) -> None:
    recorder.instant("copy_in", "copy")
    recorder.instant("reduce_scatter", "reduce_scatter")
    recorder.ordered_after("all_gather", 0)
    recorder.ordered_after("all_gather", 1, -1)  # -1: a stream on which nothing happened
    recorder.instant("forward", "compute")
    recorder.instant("all_gather", "all_gather")
    recorder.instant("all_gather", "all_gather")
    recorder.instant("copy_in", "copy")
    recorder.ordered_after("all_gather", 5)
    recorder.ordered_after("all_gather", 0)  # an older event does not hide the newer one
    recorder.instant("all_gather", "all_gather")
    assert [e.seq for e in finished(recorder)] == list(range(7))
    assert [set(e.after) for e in finished(recorder)] == [set(), set(), set(), {0, 1}, set(), set(), {5}]


# --- Scopes ------------------------------------------------------------------------------------------------


def test_events_get_phase_and_owner_of_the_innermost_scope(recorder: Recorder) -> None:
    recorder.instant("alloc", "compute")
    with events.scope("forward", "root"):
        recorder.instant("alloc", "compute")
        with events.scope("backward", "root.0"), events.scope(owner="root.1"):
            recorder.instant("alloc", "compute")
        # an event with its own phase and owner
        recorder.instant("optimizer", "compute", phase="optimizer", owner="")
        recorder.instant("alloc", "compute")
    recorder.instant("alloc", "compute")
    assert [(e.phase, e.owner) for e in finished(recorder)] == [
        ("", ""),
        ("forward", "root"),
        ("backward", "root.1"),
        ("optimizer", ""),
        ("forward", "root"),
        ("", ""),
    ]


@pytest.mark.parametrize("block", [events.scope, events.span])
def test_an_exception_leaves_the_scope_and_ends_the_span(
    block: Any, recorder: Recorder, clock: Clock
) -> None:
    with pytest.raises(KeyError), block("forward", "compute"):
        raise KeyError
    assert (recorder.phase, recorder.owner) == ("", "")
    assert all(draft.end is not None for draft in recorder.drafts)


# --- Times -------------------------------------------------------------------------------------------------


def test_times_count_from_the_beginning_of_the_recording(recorder: Recorder, clock: Clock) -> None:
    with events.span("forward", "compute"):
        recorder.instant("alloc", "compute")
    recorder.begin("backward", "compute")  # it never ends, so it lasts no time
    assert [(e.start_us, e.dur_us) for e in finished(recorder)] == [(1, 2), (2, 0), (4, 0)]


def test_asynchronous_work_begins_when_issued_or_when_its_predecessor_ends(
    recorder: Recorder, clock: Clock
) -> None:
    works = [recorder.begin("all_gather", "all_gather", follows_stream=True) for _ in range(3)]
    other = recorder.begin("reduce_scatter", "reduce_scatter", follows_stream=True)
    for work, end in zip((*works, other), (110.0, 107.0, 130.0, 120.0), strict=True):
        work.close(HostMark(end))
    times = [(e.start_us, e.end_us) for e in finished(recorder)]
    assert times == [(1, 10), (10, 10), (10, 30), (4, 20)]
