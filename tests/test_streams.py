"""Streams: what is issued in order ends in order, what is waited for is done, what fails says so once.

The host's streams are tested with works that keep a diary instead of communicating.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hwfsdp import UsageError, events, launch, record, streams
from hwfsdp.errors import CollectiveError
from hwfsdp.events import STREAMS, HostMark, Recorder
from hwfsdp.streams import (
    HostStream,
    Stream,
    StreamEvent,
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
def as_rank_five() -> Iterator[None]:
    """A process group without other processes, for errors that name the rank."""
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


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


def test_a_collective_is_issued_at_once_and_waited_for_only_when_somebody_waits(
    gathers: HostStream, compute: HostStream, diary: Diary
) -> None:
    diary.collective(gathers, "a")
    done = gathers.record()
    assert diary == ["issued a"]
    compute.wait(done)
    assert diary == ["issued a", "waited for a"]


def test_waiting_twice_waits_once(gathers: HostStream, compute: HostStream, diary: Diary) -> None:
    diary.collective(gathers, "a")
    for _ in range(2):
        compute.wait(gathers.record())
    assert diary.count("waited for a") == 1


def test_an_event_is_what_was_issued_before_it_and_no_more(
    gathers: HostStream, compute: HostStream, diary: Diary
) -> None:
    points = [gathers.record()]
    for name in "abc":
        diary.collective(gathers, name)
        points.append(gathers.record())
    diary.clear()
    compute.wait(points[0])
    assert diary == []
    compute.wait(points[2])
    assert diary == ["waited for a", "waited for b"]
    compute.wait(points[1])
    assert len(diary) == 2
    compute.wait(points[3])
    assert diary == ["waited for a", "waited for b", "waited for c"]


def test_deferred_work_runs_after_the_collectives_before_it_and_before_those_after(
    gathers: HostStream, compute: HostStream, diary: Diary
) -> None:
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


def test_with_nothing_in_flight_deferred_work_runs_at_once(
    gathers: HostStream, compute: HostStream, diary: Diary
) -> None:
    diary.then(gathers, "first")
    assert diary == ["first"]
    diary.collective(gathers, "a")
    compute.wait(gathers.record())
    diary.then(gathers, "second")
    assert diary[-1] == "second"


def test_a_collective_that_blocked_the_host_leaves_nothing_to_wait_for(
    gathers: HostStream, compute: HostStream, diary: Diary
) -> None:
    with gathers.run():
        gathers.collective(lambda async_op: diary.append(f"ran {async_op}"), "a", "layers.0")
    diary.then(gathers, "cast")
    compute.wait(gathers.record())
    assert diary == ["ran True", "cast"]


def test_streams_do_not_wait_for_each_other_unasked(diary: Diary, compute: HostStream) -> None:
    first, second = HostStream("all_gather"), HostStream("reduce_scatter")
    diary.collective(first, "a")
    diary.collective(second, "b")
    compute.wait(second.record())
    assert diary == ["issued a", "issued b", "waited for b"]


@pytest.mark.parametrize("waiter", ["compute", "copy"])
def test_whichever_stream_of_the_host_waits_the_host_finishes_the_work(
    waiter: str, gathers: HostStream, diary: Diary
) -> None:
    diary.collective(gathers, "a")
    HostStream(waiter).wait(gathers.record())
    assert diary[-1] == "waited for a"


def test_a_stream_waits_neither_for_itself_nor_for_nothing(gathers: HostStream, diary: Diary) -> None:
    diary.collective(gathers, "a")
    gathers.wait(gathers.record())
    gathers.wait(None)
    assert diary == ["issued a"]


# --- Failure -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_rank_five")
def test_a_work_that_fails_is_named_with_its_group_and_not_waited_for_again(
    gathers: HostStream, compute: HostStream, diary: Diary
) -> None:
    cause = RuntimeError("Connection reset\n by peer")
    diary.collective(gathers, "all_gather", cause)
    diary.collective(gathers, "next")
    done = gathers.record()
    with pytest.raises(CollectiveError, match="Connection reset by peer") as failure:
        compute.wait(done)
    error = failure.value
    assert (error.collective, error.owner, error.rank) == ("all_gather", "layers.0", 5)
    assert error.__cause__ is cause
    assert diary[-1] == "waited for all_gather"
    compute.wait(done)
    assert diary.count("waited for all_gather") == 1
    assert diary[-1] == "waited for next"


@pytest.mark.usefixtures("as_rank_five")
def test_a_collective_that_fails_when_issued_is_named_and_leaves_nothing_in_flight(
    gathers: HostStream, compute: HostStream
) -> None:
    def issue(async_op: bool) -> None:
        raise RuntimeError("no such peer")

    with pytest.raises(CollectiveError) as failure, gathers.run():
        gathers.collective(issue, "all_gather", "layers.0")
    assert (failure.value.collective, failure.value.owner) == ("all_gather", "layers.0")
    compute.wait(gathers.record())


@pytest.mark.usefixtures("as_rank_five")
def test_what_was_to_follow_a_collective_that_failed_does_not_happen(
    gathers: HostStream, compute: HostStream, diary: Diary
) -> None:
    diary.collective(gathers, "a", RuntimeError("lost"))
    diary.then(gathers, "use the result of a")
    done = gathers.record()
    with pytest.raises(CollectiveError):
        compute.wait(done)
    compute.wait(done)
    assert "use the result of a" not in diary


def test_other_exceptions_are_not_taken_for_failed_collectives(
    gathers: HostStream, compute: HostStream, diary: Diary
) -> None:
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


def test_a_wait_of_compute_is_a_span_that_names_the_event_it_waited_for(
    recorder: Recorder, gathers: HostStream, compute: HostStream
) -> None:
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


def test_a_wait_for_a_stream_on_which_nothing_happened_names_no_event(
    recorder: Recorder, gathers: HostStream, compute: HostStream
) -> None:
    compute.wait(gathers.record())
    assert after(recorder) == {"wait on compute": ()}


def test_what_a_stream_waited_for_is_passed_on_though_nothing_was_issued_there(
    recorder: Recorder, gathers: HostStream, compute: HostStream
) -> None:
    """Given one rank, where nothing is gathered: the copy-out still comes after the copy-in."""
    copies = HostStream("copy")
    recorder.instant("copy_in", "copy")
    gathers.wait(copies.record())
    compute.wait(gathers.record())
    assert after(recorder)["wait on compute"] == (0,)


def test_what_is_passed_on_does_not_pile_up(
    recorder: Recorder, gathers: HostStream, compute: HostStream
) -> None:
    """Given many steps on one rank, where nothing is gathered: only the last copy-in need be named."""
    copies = HostStream("copy")
    for _ in range(5):
        recorder.begin("copy_in", "copy", follows_stream=True).close()
        gathers.wait(copies.record())
    compute.wait(gathers.record())
    assert after(recorder)["wait on compute"] == (4,)


def test_a_point_inside_a_span_is_not_the_end_of_it(
    recorder: Recorder, gathers: HostStream, compute: HostStream
) -> None:
    """Given a gather for an inner module, issued while the outer one computes: neither waits for the other."""
    recorder.instant("copy_out", "compute")
    with events.span("forward", "compute"):
        gathers.wait(compute.record())
        recorder.instant("all_gather", "all_gather")
    gathers.wait(compute.record())
    recorder.instant("reduce_scatter", "all_gather")
    assert after(recorder)["all_gather on all_gather"] == (0,)
    assert after(recorder)["reduce_scatter on all_gather"] == (1,)


def test_an_event_recorded_while_nothing_was_logged_names_none(gathers: HostStream) -> None:
    assert (gathers.record().seq, gathers.record().stream) == (-1, "all_gather")


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


class DiaryStream(Stream):
    """A backend of its own, on which everything happens at once and is written down."""

    diary: Diary

    def record(self) -> StreamEvent:
        return DiaryEvent(self.name)

    def collective(self, issue: Callable[[bool], Any], name: str, owner: str) -> None:
        issue(False)
        self.diary.append(f"{name} of {owner} on {self.name}")

    def then(self, function: Callable[[], None]) -> None:
        function()

    def _wait(self, event: StreamEvent) -> None:
        self.diary.append(f"{self.name} waits for {event.stream}")

    def _current(self) -> Any:
        return torch.no_grad()


class DiaryEvent(StreamEvent):
    """A point on a diary's stream."""


def test_the_cpu_has_five_streams_that_are_new_each_time() -> None:
    first, second = streams_for("cpu"), streams_for("cpu")
    for name in NAMES:
        stream = getattr(first, name)
        assert isinstance(stream, HostStream)
        assert stream.name == name
        assert stream is not getattr(second, name)
    assert set(NAMES) == set(STREAMS)


def test_a_backend_that_registers_itself_is_used_from_then_on(diary: Diary) -> None:
    DiaryStream.diary = diary
    register_backend("imagined", lambda: StreamSet(DiaryStream, lambda name: HostMark(7.0)))
    found = streams_for("imagined")
    with found.all_gather.run():
        assert not torch.is_grad_enabled()
        found.all_gather.collective(lambda async_op: None, "all_gather", "layers.0")
    found.compute.wait(found.all_gather.record())
    found.compute.wait(found.compute.record())
    assert diary == ["all_gather of layers.0 on all_gather", "compute waits for all_gather"]
    assert Recorder(rank=0).mark("compute").us() == 7.0


def test_a_backend_may_replace_the_one_of_the_cpu(diary: Diary) -> None:
    register_backend("cpu", lambda: StreamSet(DiaryStream, lambda name: HostMark()))
    assert isinstance(streams_for("cpu").compute, DiaryStream)


def pretended(us: float) -> StreamSet:
    """Streams on which it is always the same time."""
    return StreamSet(HostStream, lambda name: HostMark(us), lambda: HostMark(us))


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


def test_what_an_earlier_recording_logged_is_waited_for_by_no_number_of_this_one(
    gathers: HostStream, compute: HostStream
) -> None:
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


def test_an_event_of_the_user_is_taken_for_all_that_compute_has_done(
    recorder: Recorder, compute: HostStream
) -> None:
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


# --- With a real backend -----------------------------------------------------------------------------------


def test_gloo_works_in_flight_end_in_order_of_issue_when_compute_waits() -> None:
    def gather_then_double() -> dict[str, Any]:
        found = streams_for("cpu")
        results = [torch.zeros(2) for _ in range(3)]
        mine = torch.tensor([dist.get_rank() + 1.0])
        with record() as log:
            for result in results:
                with found.all_gather.run():
                    found.all_gather.collective(
                        lambda async_op, out=result: dist.all_gather(
                            list(out.split(1)), mine, async_op=async_op
                        ),
                        "all_gather",
                        "layers.0",
                    )
                    found.all_gather.then(lambda out=result: out.mul_(2))
            found.compute.wait(found.all_gather.record())
        waits = log.select("wait", stream="compute")
        return {
            "results": [result.tolist() for result in results],
            "streams": [e.stream for e in log.collectives()],
            "waited for": [e.after for e in waits],
            "last": log.collectives()[-1].seq,
        }

    for found in launch(gather_then_double, 2, timeout=60):
        assert found["results"] == [[2.0, 4.0]] * 3
        assert found["streams"] == ["all_gather"] * 3
        assert found["waited for"] == [(found["last"],)]


def test_a_peer_that_is_gone_is_a_collective_error_at_the_next_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")  # else torch notices when the collective is issued

    def lose_a_peer() -> tuple[str, str, int] | None:
        found = streams_for("cpu")
        if dist.get_rank() == 1:
            return None
        with found.all_gather.run():
            found.all_gather.collective(
                lambda async_op: dist.broadcast(torch.zeros(1), src=1, async_op=async_op),
                "broadcast",
                "layers.7",
            )
        try:
            found.compute.wait(found.all_gather.record())
        except CollectiveError as error:
            return error.collective, error.owner, error.rank
        return None

    assert launch(lose_a_peer, 2, timeout=20)[0] == ("broadcast", "layers.7", 0)


# --- On a device -------------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.cuda
@needs_cuda
def test_a_device_stream_sees_what_the_stream_it_waited_for_wrote() -> None:
    found = streams_for("cuda")
    x = torch.zeros(1 << 22, device="cuda")
    for round_ in range(1, 6):
        found.copy.wait(found.compute.record())
        with found.copy.run():
            for _ in range(20):
                x.add_(1.0)
        found.compute.wait(found.copy.record())
        assert x.min().item() == x.max().item() == 20.0 * round_


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


def test_a_collective_behind_a_gate_is_issued_when_somebody_waited_for_what_it_needs(
    gathers: HostStream, compute: HostStream, diary: Diary
) -> None:
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


def test_each_gate_opens_for_its_own_event_and_settling_opens_all(
    gathers: HostStream, compute: HostStream, diary: Diary
) -> None:
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


def test_what_a_failed_collective_should_have_fed_is_lost_behind_its_gate_and_nothing_else(
    gathers: HostStream, compute: HostStream, diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    reduced = HostStream("all_reduce")

    class Broken:
        def wait(self) -> None:
            raise RuntimeError("lost")

    gathers.collective(lambda async_op: Broken(), "reduce_scatter", "first")  # type: ignore[arg-type, return-value]
    reduced.wait(gathers.record())
    diary.collective(reduced, "all-reduce first")
    diary.then(reduced, "add first")
    diary.collective(gathers, "scatter second")
    reduced.wait(gathers.record())
    diary.collective(reduced, "all-reduce second")
    diary.then(reduced, "add second")
    with pytest.raises(CollectiveError, match="first"):
        gathers.settle()
    gathers.settle()
    reduced.settle()
    assert not [line for line in diary if "first" in line]
    assert diary[-2:] == ["waited for all-reduce second", "add second"]
