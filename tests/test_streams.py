"""Streams: what is issued in order ends in order, what is waited for is done, what fails says so once.

The host's streams are tested with works that keep a diary instead of communicating.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hwfsdp import UsageError, events, streams
from hwfsdp.errors import CollectiveError
from hwfsdp.events import STREAMS, HostMark, Recorder
from hwfsdp.streams import (
    HostStream,
    Stream,
    StreamSet,
    register_backend,
    streams_for,
)

NAMES = ("compute", "copy", "all_gather", "reduce_scatter", "all_reduce")


@pytest.fixture(autouse=True)
def the_clock_and_backends_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """New streams set the clock; a test's must not stay."""
    monkeypatch.setattr(events, "_clock", events._clock)
    monkeypatch.setattr(events, "_host_now", events._host_now)
    monkeypatch.setattr(streams, "_backends", dict(streams._backends))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(rank=0)
    events.activate(recorder)
    yield recorder
    events.activate(None)


@pytest.fixture
def as_rank_five(monkeypatch: pytest.MonkeyPatch) -> None:
    """For errors that name the rank."""
    monkeypatch.setattr(dist, "get_rank", lambda: 5)


class Diary(list[str]):
    """What happened, in order."""

    def collective(self, stream: Stream, name: str, error: Exception | None = None) -> None:
        """Issues a work on the stream; waiting for it is noted, and fails if there is an error."""
        diary = self

        class Work:
            def wait(self) -> None:
                diary.append(f"waited for {name}")
                if error:
                    raise error

        def issue(async_op: bool) -> Any:
            assert async_op
            diary.append(f"issued {name}")
            return Work()

        with stream.run():
            stream.collective(issue, name, "layers.0")

    def then(self, stream: Stream, name: str) -> None:
        with stream.run():
            stream.then(lambda: self.append(name))


@pytest.fixture
def diary() -> Diary:
    return Diary()


@pytest.fixture
def gathers() -> HostStream:
    return HostStream("all_gather")


@pytest.fixture
def compute() -> HostStream:
    return HostStream("compute")


# --- The queue of a host stream ----------------------------------------------------------------------------


def test_an_event_is_what_was_issued_before_it_and_no_more(gathers, compute, diary):
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


def test_deferred_work_runs_after_the_collectives_before_it_and_before_those_after(gathers, compute, diary):
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


def test_with_nothing_in_flight_deferred_work_runs_at_once(gathers, compute, diary):
    diary.then(gathers, "first")
    assert diary == ["first"]
    diary.collective(gathers, "a")
    compute.wait(gathers.record())
    diary.then(gathers, "second")
    assert diary[-1] == "second"


def test_a_collective_that_blocked_the_host_leaves_nothing_to_wait_for(gathers, compute, diary):
    with gathers.run():
        gathers.collective(lambda async_op: diary.append(f"ran {async_op}"), "a", "layers.0")
    diary.then(gathers, "cast")
    compute.wait(gathers.record())
    assert diary == ["ran True", "cast"]


@pytest.mark.parametrize("waiter", ["compute", "copy"])
def test_streams_do_not_wait_for_each_other_unasked(diary: Diary, waiter: str) -> None:
    first, second = HostStream("all_gather"), HostStream("reduce_scatter")
    diary.collective(first, "a")
    diary.collective(second, "b")
    HostStream(waiter).wait(second.record())
    assert diary == ["issued a", "issued b", "waited for b"]


def test_a_stream_waits_neither_for_itself_nor_for_nothing(gathers: HostStream, diary: Diary) -> None:
    diary.collective(gathers, "a")
    gathers.wait(gathers.record())
    gathers.wait(None)
    assert diary == ["issued a"]


# --- Failure -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_rank_five")
def test_a_work_that_fails_is_named_with_its_group_not_waited_for_again_and_nothing_follows_it(
    gathers, compute, diary
):
    cause = RuntimeError("Connection reset\n by peer")
    diary.collective(gathers, "all_gather", cause)
    diary.then(gathers, "use the result of it")
    diary.collective(gathers, "next")
    done = gathers.record()
    with pytest.raises(CollectiveError, match="Connection reset by peer") as failure:
        compute.wait(done)
    error = failure.value
    assert (error.collective, error.owner, error.rank) == ("all_gather", "layers.0", 5)
    assert error.__cause__ is cause
    assert diary[-1] == "waited for all_gather"
    compute.wait(done)
    assert diary[2:] == ["waited for all_gather", "waited for next"]


@pytest.mark.usefixtures("as_rank_five")
def test_a_collective_that_fails_when_issued_is_named_and_leaves_nothing_in_flight(gathers, compute):
    def issue(async_op: bool) -> None:
        raise RuntimeError("no such peer")

    with pytest.raises(CollectiveError) as failure, gathers.run():
        gathers.collective(issue, "all_gather", "layers.0")
    assert (failure.value.collective, failure.value.owner) == ("all_gather", "layers.0")
    compute.wait(gathers.record())


def test_other_exceptions_are_not_taken_for_failed_collectives(gathers, compute, diary):
    diary.collective(gathers, "a", KeyError("a bug"))
    with pytest.raises(KeyError):
        compute.wait(gathers.record())


def test_while_the_host_is_blocked_it_is_known_in_what(gathers: HostStream, compute: HostStream) -> None:
    seen = []

    class Work:
        def wait(self) -> None:
            seen.append(streams.pending_collective)

    with gathers.run():
        gathers.collective(lambda async_op: Work(), "all_gather", "layers.0")
    assert streams.pending_collective == ""
    compute.wait(gathers.record())
    assert seen == ["all_gather of parameter group 'layers.0'"]
    assert streams.pending_collective == ""


# --- What the log sees -------------------------------------------------------------------------------------


def after(recorder: Recorder) -> dict[str, tuple[int, ...]]:
    return {f"{e.op} on {e.stream}": e.after for e in recorder.finish()[0]}


def test_a_wait_of_compute_is_a_span_that_names_the_event_it_waited_for(recorder, gathers, compute):
    recorder.instant("copy_in", "copy")
    recorder.instant("all_gather", "all_gather")
    compute.wait(gathers.record())
    assert after(recorder)["wait on compute"] == (1,)


def test_a_wait_of_another_stream_is_noted_at_its_next_event(recorder: Recorder, gathers: HostStream) -> None:
    copies = HostStream("copy")
    recorder.instant("copy_in", "copy")
    gathers.wait(copies.record())
    recorder.instant("all_gather", "all_gather")
    assert after(recorder) == {"copy_in on copy": (), "all_gather on all_gather": (0,)}


def test_a_wait_for_a_stream_on_which_nothing_happened_names_no_event(recorder, gathers, compute):
    events.activate(None)
    done = gathers.record()
    assert (done.seq, done.stream) == (-1, "all_gather")
    events.activate(recorder)
    compute.wait(gathers.record())
    assert after(recorder) == {"wait on compute": ()}


def test_what_a_stream_waited_for_is_passed_on_and_does_not_pile_up(recorder, gathers, compute):
    """Given many steps on one rank, where nothing is gathered: the copy-out comes after the last copy-in."""
    copies = HostStream("copy")
    for _ in range(5):
        recorder.begin("copy_in", "copy", follows_stream=True).close()
        gathers.wait(copies.record())
    compute.wait(gathers.record())
    assert after(recorder)["wait on compute"] == (4,)


def test_a_point_inside_a_span_is_not_the_end_of_it(recorder, gathers, compute):
    """Given a gather for an inner module, issued while the outer one computes: neither waits for the other."""
    recorder.instant("copy_out", "compute")
    with events.span("forward", "compute"):
        gathers.wait(compute.record())
        recorder.instant("all_gather", "all_gather")
    gathers.wait(compute.record())
    recorder.instant("reduce_scatter", "all_gather")
    assert after(recorder)["all_gather on all_gather"] == (0,)
    assert after(recorder)["reduce_scatter on all_gather"] == (1,)


@pytest.mark.parametrize("fails", [False, True])
def test_inside_run_events_belong_to_the_stream_and_afterwards_to_the_one_around(
    fails: bool, recorder: Recorder, gathers: HostStream, compute: HostStream
) -> None:
    def inside() -> None:
        with gathers.run():
            assert recorder.stream == "all_gather"
            if fails:
                raise KeyError

    with compute.run():
        try:
            inside()
        except KeyError:
            assert fails
        assert recorder.stream == "compute"
    assert recorder.stream == ""


# --- Backends ----------------------------------------------------------------------------------------------


def test_the_cpu_has_five_streams_that_are_new_each_time() -> None:
    first, second = streams_for("cpu"), streams_for("cpu")
    for name in NAMES:
        stream = getattr(first, name)
        assert isinstance(stream, HostStream)
        assert stream.name == name
        assert stream is not getattr(second, name)
    assert set(NAMES) == set(STREAMS)


def pretended(us: float) -> StreamSet:
    """Streams on which it is always the same time."""
    return StreamSet(HostStream, lambda name: HostMark(us), lambda: HostMark(us))


def test_a_backend_that_registers_itself_is_used_from_then_on_and_one_for_a_block_only_there() -> None:
    register_backend("imagined", lambda: pretended(7.0))
    streams_for("imagined")
    assert Recorder(rank=0).mark("compute").us() == 7.0
    with streams.backend("imagined", lambda: pretended(8.0)), streams.backend("cpu", lambda: pretended(9.0)):
        for kind, us in (("imagined", 8.0), ("cpu", 9.0)):
            streams_for(kind)
            assert Recorder(rank=0).mark("compute").us() == us
    with streams.backend("another", lambda: pretended(8.0)):
        pass
    with pytest.raises(UsageError, match="imagined"):
        streams_for("another")
    streams_for("imagined")
    assert Recorder(rank=0).mark("compute").us() == 7.0


def test_streams_are_timed_by_the_clock_of_their_own_set(recorder: Recorder) -> None:
    """Given two sets, of the same names: each one's events by its own clock, all others by that of the last one."""
    recorder.origin = HostMark(0.0)
    first, _ = pretended(3.0), pretended(8.0)
    recorder.instant("optimizer", "compute")
    with first.copy.run():
        recorder.instant("copy_in", "copy")
    with events.scope("forward", "a", first.clock):
        recorder.instant("forward", "compute")
        with events.owned_by("b"):
            recorder.instant("copy_out", "compute")
    first.compute.wait(first.all_gather.record())
    times = {e.op: e.start_us for e in recorder.finish()[0]}
    assert times == {"optimizer": 8.0, "copy_in": 3.0, "forward": 3.0, "copy_out": 3.0, "wait": 3.0}


def test_an_event_ends_by_the_clock_that_it_began_by(recorder: Recorder) -> None:
    recorder.origin = HostMark(0.0)
    first, _ = pretended(3.0), pretended(8.0)
    with events.scope("forward", "a", first.clock):
        draft = recorder.begin("forward", "compute")
    draft.close()
    (event,) = recorder.finish()[0]
    assert (event.start_us, event.end_us) == (3.0, 3.0)


def test_samples_are_timed_by_the_host_of_the_last_set() -> None:
    recorder = Recorder(rank=0, origin=HostMark(1.0), sample_memory=lambda: {"x": 1})
    pretended(8.0)
    recorder.sample()
    assert [sample.us for sample in recorder.finish()[1]] == [7.0]


def test_a_clock_set_in_a_block_that_keeps_it_is_gone_afterwards() -> None:
    pretended(8.0)
    with events.keeping_clock():
        pretended(3.0)
        assert Recorder(rank=0).mark("compute").us() == 3.0
    assert Recorder(rank=0).mark("compute").us() == 8.0


def test_what_an_earlier_recording_logged_is_waited_for_by_no_number_of_this_one(gathers, compute):
    earlier, later = Recorder(rank=0), Recorder(rank=0)
    events.activate(earlier)
    earlier.instant("all_gather", "all_gather")
    done = gathers.record()
    events.activate(later)
    later.instant("copy_in", "copy")
    compute.wait(done)
    events.activate(None)
    assert after(later) == {"copy_in on copy": (), "wait on compute": ()}
    assert done.after == ()


def test_an_event_of_the_user_is_taken_for_all_that_compute_has_done(recorder, compute):
    copies: Any = HostStream("copy")
    recorder.instant("optimizer", "compute")
    copies.wait_for_device_event(None)
    recorder.instant("copy_in", "copy")
    assert after(recorder)["copy_in on copy"] == (0,)


@pytest.mark.parametrize("device_type", ["nowhere", "", "CPU"])
def test_a_device_that_is_not_there_is_refused_by_name(device_type: str) -> None:
    with pytest.raises(UsageError, match="expected one of .*cpu") as refusal:
        streams_for(device_type)
    assert repr(device_type) in str(refusal.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(UsageError, match="accelerator"):
        streams_for("cuda")


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
def test_device_work_is_deferred_by_nobody_and_waiting_does_not_stop_the_host() -> None:
    found, ran = streams_for("cuda"), []
    with found.reduce_scatter.run():
        found.reduce_scatter.collective(lambda async_op: ran.append(async_op), "reduce_scatter", "")
        found.reduce_scatter.then(lambda: ran.append("then"))
        torch.cuda._sleep(100_000_000)
    done = found.reduce_scatter.record()
    found.compute.wait(done)
    assert ran == [False, "then"]
    assert not done.event.query()
    torch.cuda.synchronize()


@pytest.mark.cuda
@needs_cuda
def test_device_times_of_one_stream_follow_each_other() -> None:
    found = streams_for("cuda")
    recorder = Recorder(rank=0)
    marks = []
    for _ in range(3):
        marks.append(recorder.mark("all_gather"))
        with found.all_gather.run():
            torch.zeros(1 << 20, device="cuda").add_(1)
    times = [mark.us() for mark in marks]
    assert times == sorted(times)


# --- Gates: collectives that wait for collectives of another stream ------------------------------------------


def test_a_collective_behind_a_gate_is_issued_when_somebody_waited_for_what_it_needs(gathers, compute, diary):
    reduced = HostStream("all_reduce")
    diary.collective(gathers, "scatter")
    scattered = gathers.record()
    reduced.wait(scattered)
    diary.collective(reduced, "all-reduce")
    diary.then(reduced, "add")
    assert diary == ["issued scatter"]
    compute.wait(scattered)
    assert diary[1:] == ["waited for scatter", "issued all-reduce"]
    compute.wait(reduced.record())
    assert diary[3:] == ["waited for all-reduce", "add"]


def test_each_gate_opens_for_its_own_event_and_settling_opens_all(gathers, compute, diary):
    reduced, points = HostStream("all_reduce"), []
    for name in "ab":
        diary.collective(gathers, f"scatter {name}")
        points.append(gathers.record())
        reduced.wait(points[-1])
        diary.collective(reduced, f"all-reduce {name}")
    diary.clear()
    compute.wait(points[0])
    assert diary == ["waited for scatter a", "issued all-reduce a"]
    reduced.settle()
    assert diary[2:] == [
        *("waited for all-reduce a", "waited for scatter b", "issued all-reduce b", "waited for all-reduce b")
    ]


@pytest.mark.usefixtures("as_rank_five")
def test_what_a_failed_collective_should_have_fed_is_lost_behind_its_gate_and_nothing_else(gathers, diary):
    reduced = HostStream("all_reduce")
    diary.collective(gathers, "scatter 1", RuntimeError("lost"))
    reduced.wait(gathers.record())
    diary.collective(reduced, "all-reduce 1")
    diary.then(reduced, "add 1")
    diary.collective(gathers, "scatter 2")
    reduced.wait(gathers.record())
    diary.collective(reduced, "all-reduce 2")
    diary.then(reduced, "add 2")
    with pytest.raises(CollectiveError, match="lost"):
        gathers.settle()
    gathers.settle()
    reduced.settle()
    assert diary[2:] == [
        "waited for scatter 1",
        "waited for scatter 2",
        "issued all-reduce 2",
        "waited for all-reduce 2",
        "add 2",
    ]
