"""Streams: work ends in its order of issue, a wait finishes the work, and a failure is reported once.

The tests of host streams use works that write a diary instead of communicating.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hwfsdp import UsageError
from hwfsdp.core import observer
from hwfsdp.core import device_streams as core_streams
from hwfsdp.core.device_streams import HostStream, Stream, StreamEvent, StreamSet
from hwfsdp.observe import clocks, events
from hwfsdp.observe.events import HostMark, Recorder
from hwfsdp.observe.instrument import Instrument
from hwfsdp.streams import streams_for

NAMES = ("compute", "copy", "all_gather", "reduce_scatter", "all_reduce")


@pytest.fixture(autouse=True)
def the_clock_and_backends_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the clock after a test, because new streams set it."""
    monkeypatch.setattr(events, "_clock", events._clock)
    monkeypatch.setattr(events, "_host_now", events._host_now)
    monkeypatch.setattr(StreamSet, "newest", StreamSet.newest)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(rank=0)
    before = observer.put(Instrument(None))
    events.activate(recorder)
    yield recorder
    events.activate(None)
    observer.put(before)


class Diary(list[str]):
    """A list of events, in order."""

    def collective(self, stream: Stream, name: str, error: Exception | None = None) -> None:
        """Issue a work on the stream. A wait for it is noted, and raises `error` if there is one."""
        diary = self

        class Work:
            def wait(self) -> None:
                diary.append(f"waited for {name}")
                if error:
                    raise error

        with stream.run():
            diary.append(f"issued {name}")
            stream.add(Work())

    def then(self, stream: Stream, name: str) -> None:
        with stream.run():
            stream.then(lambda: self.append(name))


@pytest.fixture
def diary() -> Diary:
    return Diary()


@pytest.fixture
def host() -> StreamSet:
    return StreamSet(HostStream)


@pytest.fixture
def gathers(host: StreamSet) -> Stream:
    return host.all_gather


@pytest.fixture
def compute(host: StreamSet) -> Stream:
    return host.compute


# --- The queue of a host stream ----------------------------------------------------------------------------


def test_waiting_for_an_event_finishes_only_work_issued_before_it(gathers, compute, diary):
    points = [gathers.record()]
    for name in "abc":
        diary.collective(gathers, name)
        points.append(gathers.record())
    compute.wait(points[0])
    assert diary == ["issued a", "issued b", "issued c"]
    diary.clear()
    compute.wait(points[2])
    assert diary == ["waited for a", "waited for b"]
    compute.wait(points[1])
    assert len(diary) == 2
    compute.wait(points[3])
    assert diary == ["waited for a", "waited for b", "waited for c"]


def test_deferred_work_runs_in_the_order_of_collectives(gathers, compute, diary):
    diary.collective(gathers, "a")
    diary.then(gathers, "cast a")
    first = gathers.record()
    diary.collective(gathers, "b")
    diary.then(gathers, "cast b")
    diary.then(gathers, "add b")
    assert diary == ["issued a", "issued b"]
    compute.wait(first)
    assert diary[2:] == ["waited for a", "cast a"]
    compute.wait(gathers.record())
    assert diary[4:] == ["waited for b", "cast b", "add b"]


def test_streams_wait_only_for_the_events_that_they_are_told_to_wait_for_and_not_for_themselves(host, diary):
    diary.collective(host.all_gather, "a")
    diary.collective(host.reduce_scatter, "b")
    host.all_gather.wait(host.all_gather.record())
    host.copy.wait(host.reduce_scatter.record())
    assert diary == ["issued a", "issued b", "waited for b"]


# --- Failure -----------------------------------------------------------------------------------------------


def test_a_work_that_fails_is_not_waited_for_again_and_nothing_follows_it(gathers, compute, diary):
    diary.collective(gathers, "a", KeyError("a bug"))
    diary.then(gathers, "use the result of it")
    diary.collective(gathers, "next")
    done = gathers.record()
    with pytest.raises(KeyError):
        compute.wait(done)
    assert diary[-1] == "waited for a"
    compute.wait(done)
    assert diary[2:] == ["waited for a", "waited for next"]


# --- Events in the log -------------------------------------------------------------------------------------


def after(recorder: Recorder) -> dict[str, tuple[int, ...]]:
    return {f"{e.op} on {e.stream}": e.after for e in recorder.finish()[0]}


def test_memory_that_grows_after_a_wait_is_ordered_after_the_awaited_event(recorder, gathers, compute):
    recorder.instant("all_gather", "all_gather")
    recorder.ordered_after("compute", 0)
    recorder.resized(torch.empty(4).untyped_storage(), 16, 16)
    assert after(recorder)["alloc on compute"] == (0,)


def test_waits_of_a_stream_are_passed_on_and_do_not_pile_up(recorder, gathers, compute):
    """In many steps on one rank, where nothing is gathered, the copy-out comes after the last copy-in."""
    copies = gathers.streams.copy
    for _ in range(5):
        recorder.begin("copy_in", "copy", follows_stream=True).close()
        gathers.wait(copies.record())
    compute.wait(gathers.record())
    assert after(recorder)["wait on compute"] == (4,)


def test_a_point_inside_a_span_is_not_the_end_of_it(recorder, gathers, compute):
    """A gather for an inner module is issued while the outer one computes. Neither waits for the other."""
    recorder.instant("copy_out", "compute")
    with events.span("forward", "compute"):
        gathers.wait(compute.record())
        recorder.instant("all_gather", "all_gather")
    gathers.wait(compute.record())
    recorder.instant("reduce_scatter", "all_gather")
    assert after(recorder)["all_gather on all_gather"] == (0,)
    assert after(recorder)["reduce_scatter on all_gather"] == (1,)


def test_events_inside_run_belong_to_that_stream_and_after_an_error_to_the_outer_one(
    recorder, gathers, compute
):
    with compute.run():
        with pytest.raises(KeyError), gathers.run():
            assert recorder.stream == "all_gather"
            raise KeyError
        assert recorder.stream == "compute"
    assert recorder.stream == ""


# --- Backends ----------------------------------------------------------------------------------------------


class Pretended(HostStream):
    """A stream whose time stands still."""

    us: float


clocks.register(
    Pretended,
    lambda streams: (lambda name: HostMark(streams.compute.us), lambda: HostMark(streams.compute.us)),  # type: ignore[attr-defined]
)


def pretended(us: float) -> StreamSet:
    made = StreamSet(Pretended)
    made.compute.us = us  # type: ignore[attr-defined]
    return made


def time_now() -> float:
    clocks.use_newest()
    return Recorder(rank=0).mark("compute").us()


def test_a_block_can_replace_the_streams_of_a_device_and_restores_them() -> None:
    with (
        core_streams.backend("imagined", lambda: pretended(8.0)),
        core_streams.backend("cpu", lambda: pretended(9.0)),
    ):
        for kind, us in (("imagined", 8.0), ("cpu", 9.0)):
            streams_for(kind)
            assert time_now() == us
    assert type(streams_for("cpu").compute) is HostStream
    with pytest.raises(UsageError, match="imagined"):
        streams_for("imagined")


def test_streams_are_timed_by_the_clock_of_their_own_set(recorder: Recorder) -> None:
    """There are two sets with the same names. Each set's events use its own clock, all others the clock of the last set."""
    recorder.origin = HostMark(0.0)
    first, _ = pretended(3.0), pretended(8.0)
    clocks.use_newest()
    recorder.instant("optimizer", "compute")
    with first.copy.run():
        recorder.instant("copy_in", "copy")
    with events.scope("forward", "a", clocks.clock_of(first)):
        recorder.instant("forward", "compute")
        with events.scope(owner="b"):
            recorder.instant("copy_out", "compute")
    first.compute.wait(first.all_gather.record())
    times = {e.op: e.start_us for e in recorder.finish()[0]}
    assert times == {"optimizer": 8.0, "copy_in": 3.0, "forward": 3.0, "copy_out": 3.0, "wait": 3.0}


def test_a_wait_does_not_refer_to_events_of_an_earlier_recording(recorder, gathers, compute):
    recorder.instant("all_gather", "all_gather")
    done, later = gathers.record(), Recorder(rank=0)
    observer.put(Instrument(None))
    events.activate(later)
    compute.wait(done)
    assert after(later) == {"wait on compute": ()}


def test_an_event_that_the_user_records_stands_for_all_earlier_work_of_compute(recorder, compute):
    copies, event = compute.streams.copy, StreamEvent(compute, "the user's")
    recorder.instant("optimizer", "compute")
    observer.slot.recorded(event)
    copies.wait(event)
    recorder.instant("copy_in", "copy")
    assert after(recorder)["copy_in on copy"] == (0,)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("device_type", ["CPU", "cuda"])
def test_a_device_that_is_not_there_is_refused_by_name(device_type: str) -> None:
    with pytest.raises(UsageError, match=f"'{device_type}'.*accelerator"):
        streams_for(device_type)


# --- On a device -------------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.cuda
@needs_cuda
def test_device_streams_are_apart_and_communication_has_priority() -> None:
    found: Any = streams_for("cuda")
    native = {name: getattr(found, name).native for name in NAMES}
    assert native["compute"] == torch.cuda.current_stream()
    assert len({stream.cuda_stream for stream in native.values()}) == len(NAMES)
    assert all(
        native[name].priority < native["all_reduce"].priority for name in ("all_gather", "reduce_scatter")
    )


@pytest.mark.cuda
@needs_cuda
def test_on_a_device_work_is_issued_at_once_and_a_wait_does_not_block_the_host() -> None:
    found, ran = streams_for("cuda"), []
    with found.reduce_scatter.run():
        found.reduce_scatter.add(None)
        found.reduce_scatter.then(lambda: ran.append("then"))
        torch.cuda._sleep(100_000_000)
    done = found.reduce_scatter.record()
    found.compute.wait(done)
    assert ran == ["then"]
    assert not done.native.query()
    torch.cuda.synchronize()


@pytest.mark.cuda
@needs_cuda
def test_device_times_of_one_stream_follow_each_other() -> None:
    found = streams_for("cuda")
    clocks.use_newest()
    recorder = Recorder(rank=0)
    marks = []
    for _ in range(3):
        marks.append(recorder.mark("all_gather"))
        with found.all_gather.run():
            torch.zeros(1 << 20, device="cuda").add_(1)
    times = [mark.us() for mark in marks]
    assert times == sorted(times)


# --- Collectives that follow collectives of another stream ---------------------------------------------------
