"""`record` sees all collectives, memory and optimizers from outside, and leaves no trace behind."""

from __future__ import annotations

import contextlib
import functools
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed import all_reduce, distributed_c10d, irecv, isend
from torch.distributed.distributed_c10d import P2POp

from hwfsdp import EventLog, StateError, launch, record
from hwfsdp.comm.shared_memory import SharedMemoryGroup
from hwfsdp.compat import fake_process_group, functional_operators
from hwfsdp.observe import events, recording
from hwfsdp.observe.events import Event
from models import Stem, stem
from oracles import Library, objective, ours, theirs, wrap

N = 6  # elements of a block

# --- Every collective, called in every way -----------------------------------------------------------------

Arguments = dict[str, Any]  # by name, in order


def block(dtype: torch.dtype) -> Tensor:
    return torch.ones(N, dtype=dtype)


def whole(dtype: torch.dtype) -> Tensor:
    return torch.ones(N * dist.get_world_size(), dtype=dtype)


def blocks(dtype: torch.dtype) -> list[Tensor]:
    return [block(dtype) for _ in range(dist.get_world_size())]


def gathers(dtype: torch.dtype) -> Arguments:
    return {"output_tensor": whole(dtype), "input_tensor": block(dtype)}


def scatters(dtype: torch.dtype) -> Arguments:
    return {"output": block(dtype), "input": whole(dtype)}


# op, bytes of the whole tensor in blocks, and the arguments
CALLS: dict[str, tuple[str, int, Callable[[torch.dtype], Arguments]]] = {
    "all_gather_single": ("all_gather", 2, gathers),
    "all_gather_into_tensor": ("all_gather", 2, gathers),
    "all_gather": ("all_gather", 2, lambda d: {"tensor_list": blocks(d), "tensor": block(d)}),
    "reduce_scatter_single": ("reduce_scatter", 2, scatters),
    "reduce_scatter_tensor": ("reduce_scatter", 2, scatters),
    "reduce_scatter": ("reduce_scatter", 2, lambda d: {"output": block(d), "input_list": blocks(d)}),
    "all_reduce": ("all_reduce", 1, lambda d: {"tensor": block(d)}),
    "broadcast": ("broadcast", 1, lambda d: {"tensor": block(d), "src": 0}),
    "all_to_all_single": ("all_to_all", 2, lambda d: {"output": whole(d), "input": whole(d)}),
}
NAMES = [name for name in CALLS if hasattr(dist, name)]  # the set depends on torch's version
PLACES = (dist, distributed_c10d)


class Way(NamedTuple):
    """A way to call a collective. `positional`: number of positional arguments; the others are keywords."""

    place: Any
    positional: int
    asynchronous: bool
    dtype: torch.dtype


WAYS = [
    Way(dist, 9, False, torch.float32),
    Way(dist, 0, True, torch.float64),
    Way(distributed_c10d, 1, False, torch.int64),
    Way(distributed_c10d, 9, True, torch.int64),
]


def call(name: str, way: Way) -> None:
    """Call a collective of two ranks, and return when it is done."""
    arguments = list(CALLS[name][2](way.dtype).items())
    values = [value for _, value in arguments[: way.positional]]
    options = {"async_op": True} if way.asynchronous else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, at the older names
        work = getattr(way.place, name)(*values, **dict(arguments[way.positional :]), **options)
    if work is not None:
        work.wait()


def recorded(function: Callable[[], Any]) -> EventLog:
    with record() as log:
        function()
    return log


def called_each_way() -> dict[str, list[EventLog]]:
    return {name: [recorded(functools.partial(call, name, way)) for way in WAYS] for name in NAMES}


def assert_compute_waits(way: Way, event: Event, waits: list[Event]) -> None:
    """Check that compute waits while a call blocks the host, or when somebody waits for its work."""
    if event.stream == "compute" and not way.asynchronous:
        assert waits == []
        return
    (wait,) = waits
    assert (wait.stream, wait.after) == ("compute", (event.seq,))
    assert wait.end_us >= event.end_us or way.asynchronous
    assert wait.start_us <= event.start_us or way.asynchronous


def test_a_collective_is_seen_once_with_its_bytes_and_memory_and_compute_waits_however_it_is_called() -> None:
    for name in NAMES:
        op, blocks_in_whole, _ = CALLS[name]
        for rank, found in enumerate(on_ranks(called_each_way)):
            for way, log in zip(WAYS, found[name], strict=True):
                (event,) = log.collectives()
                assert (event.rank, event.op) == (rank, op)
                others = "other" if way.asynchronous else "compute"
                assert event.stream == (
                    op if op in ("all_gather", "reduce_scatter", "all_reduce") else others
                )
                assert event.dtype == str(way.dtype).removeprefix("torch.")
                assert event.bytes == blocks_in_whole * N * way.dtype.itemsize
                assert (event.reads == event.writes) == (name in ("all_reduce", "broadcast"))
                assert len(event.reads) == (2 if name == "reduce_scatter" else 1)
                assert len(event.writes) == (2 if name == "all_gather" else 1)
                assert_compute_waits(way, event, log.select("wait"))


# --- The rest of them --------------------------------------------------------------------------------------


FUNCTIONAL: dict[str, tuple[int, Callable[[Tensor], Any]]] = {  # op: blocks in the whole tensor, call
    "all_reduce": (2, lambda x: funcol.all_reduce(x, "sum", [0, 1])),
    "all_gather": (4, lambda x: funcol.all_gather_tensor(x, 0, [0, 1])),
    "reduce_scatter": (2, lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, [0, 1])),
    "all_to_all": (2, lambda x: funcol.all_to_all_single(x, None, None, [0, 1])),
    "broadcast": (2, lambda x: funcol.broadcast(x, 0, [0, 1])),
}


def called_functionally() -> dict[str, tuple[EventLog, bool]]:
    found, x = {}, torch.arange(2.0 * N)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, at the older names
        for name, (_, function) in FUNCTIONAL.items():
            expected = function(x) + 0
            with record() as log:
                got = function(x) + 0
            found[name] = log, bool(torch.equal(got, expected))
    return found


def test_functional_collectives_are_seen_and_over_when_their_result_was_waited_for() -> None:
    for op in FUNCTIONAL:
        for log, is_equal in (found[op] for found in on_ranks(called_functionally)):
            (event,), (wait,) = log.collectives(), log.select("wait")
            assert (event.op, event.dtype, event.bytes) == (op, "float32", FUNCTIONAL[op][0] * N * 4)
            assert (wait.stream, wait.after) == ("compute", (event.seq,))
            assert event.start_us < event.end_us <= wait.end_us
            assert is_equal


def failing_calls() -> dict[str, Any]:
    """Return the errors of wrong calls without and with a recording, and the last event of the recording."""

    def message_of(call: Callable[[], Any]) -> str:
        with pytest.raises((TypeError, ValueError, RuntimeError)) as failure:
            call()
        return f"{failure.type.__name__}: {failure.value}"

    wrong_calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce("no tensor"),
        lambda: dist.all_gather([torch.zeros(1)] * 5, torch.zeros(1)),
        lambda: dist.broadcast(torch.zeros(1), src=7),
    ]
    plain = [message_of(wrong) for wrong in wrong_calls]
    with record() as log:
        during = [message_of(wrong) for wrong in wrong_calls]
        dist.barrier()
    return {"plain": plain, "recorded": during, "last": log.collectives()[-1].op}


def test_a_failing_collective_raises_the_same_error_as_without_a_recording() -> None:
    for found in on_ranks(failing_calls):
        assert found["recorded"] == found["plain"]
        assert found["last"] == "barrier"  # the recording goes on


# --- Send and receive --------------------------------------------------------------------------------------


def sent_in_all_ways() -> list[list[tuple[Any, ...]]]:
    found = []
    for place in PLACES:
        with record() as log:
            if dist.get_rank() == 0:
                place.send(torch.zeros(N), 1)
                dist.isend(tensor=torch.zeros(N, dtype=torch.int64), dst=1).wait()
            else:
                place.recv(tensor=torch.zeros(N), src=0)
                dist.irecv(torch.zeros(N, dtype=torch.int64), 0).wait()
        found.append([(e.op, e.dtype, e.bytes, e.stream) for e in log.collectives()])
    return found


def test_sends_and_receives_are_seen_once_each() -> None:
    for op, found in zip(("send", "recv"), on_ranks(sent_in_all_ways), strict=True):
        assert found == [[(op, "float32", 4 * N, "compute"), (op, "int64", 8 * N, "other")]] * 2


def ring_ops(send: Any, receive: Any) -> tuple[list[P2POp], Tensor]:
    """Return operations that send each rank's number to the next rank of the ring."""
    rank, world_size, received = dist.get_rank(), dist.get_world_size(), torch.zeros(N)
    sending = P2POp(send, torch.full((N,), float(rank)), (rank + 1) % world_size)
    return [sending, P2POp(receive, received, (rank - 1) % world_size)], received


def passed_around() -> list[tuple[float, list[str]]]:
    """Use batches made in an earlier recording, before the recording (from functions imported earlier), and in it."""
    with record():
        batches = [ring_ops(dist.isend, dist.irecv)]
    batches.append(ring_ops(isend, irecv))
    found = []
    for made in (*batches, None):
        with record() as log:
            ops, received = made or ring_ops(dist.isend, dist.irecv)
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        found.append((received[0].item(), [e.op for e in log.collectives()]))
    return found


def test_batches_of_sends_and_receives_work_and_are_seen_wherever_they_were_made() -> None:
    for left, found in zip((1, 0), on_ranks(passed_around), strict=True):
        assert found == [(left, ["send", "recv"])] * 3


def test_messages_of_a_batch_end_with_the_one_work_that_nccl_makes_of_them() -> None:
    """The group gives no work inside a batch, as NCCL. It is a fake one, whose messages take no time."""
    nccl = mock.Mock(supports_coalescing=True)

    def no_work(*args: Any) -> None:
        return None

    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_process_group(0, 2))
        for name, method in (("_get_backend", lambda *args: nccl), ("send", no_work), ("recv", no_work)):
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, method))
        with record() as log:
            (work,) = dist.batch_isend_irecv(ring_ops(dist.isend, dist.irecv)[0])
            resize()
            work.wait()
    assert [(e.op, e.after) for e in log.events] == [("send", ()), ("recv", ()), ("free", ()), ("wait", (1,))]


# --- One recording at a time, and nothing left behind ------------------------------------------------------


def in_place_now() -> dict[str, Any]:
    """Return name → the current function, for functions that a recording replaces, and functions that it must not replace."""
    places = (*PLACES, dist.ProcessGroup, SharedMemoryGroup, dist.Work, *functional_operators())
    found = {f"{place.__name__}.{name}": f for place in places for name, f in vars(place).items()}
    return {**found, "resize_": torch.UntypedStorage.resize_}


def resize() -> None:
    """Free memory, which is an event."""
    torch.zeros(4).untyped_storage().resize_(0)


def test_a_recording_replaces_methods_of_groups_but_no_function_and_puts_them_back_after_an_exception() -> (
    None
):
    before = in_place_now()
    with pytest.raises(KeyError, match="of the user"), record() as log:
        during = in_place_now()
        resize()
        raise KeyError("of the user")
    after = in_place_now()
    replaced = {name for name, function in before.items() if function is not during[name]}
    calls = (
        "_allgather_base",
        "allreduce",
        "barrier",
        "broadcast",
        "gather",
        "recv",
        "reduce",
        "scatter",
        "send",
    )
    assert replaced >= {"Work.wait", "resize_", *(f"ProcessGroup.{name}" for name in calls)}
    assert "SharedMemoryGroup._allgather_base" in replaced
    assert not any(name.startswith("torch.distributed.") for name in replaced)
    assert all(function is after[name] for name, function in before.items())
    assert events.active() is None
    assert [e.op for e in log.events] == ["free"]


def test_a_nested_recording_is_refused_and_the_outer_one_goes_on() -> None:
    with record() as outer:
        with pytest.raises(StateError, match="nested"), record():
            pytest.fail("two recordings at a time")
        resize()
        assert (outer.events, outer.samples) == ([], {})  # filled when it ends
    resize()
    assert [e.op for e in outer.events] == ["free"]


# --- Memory and optimizers ---------------------------------------------------------------------------------


def test_resizing_a_storage_is_an_allocation_or_a_release_of_the_difference() -> None:
    tensor = torch.zeros(10)
    with record() as log:
        for nbytes in (40, 0, 0, 24, 40, 8):
            tensor.untyped_storage().resize_(nbytes)
    changes = [(e.op, e.bytes) for e in log.events]
    assert changes == [("free", 40), ("alloc", 24), ("alloc", 16), ("free", 32)]
    assert {(e.stream, e.dur_us, e.writes) for e in log.events} == {("compute", 0, log.events[0].writes)}


def optimizer(**options: Any) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.zeros(10))
    weight.grad = torch.zeros(10)
    return torch.optim.SGD([weight], **options)


def test_memory_is_sampled_by_kind_and_state_that_was_there_counts_from_the_beginning() -> None:
    with_state = optimizer(momentum=0.9)
    with_state.step()
    with record() as log:
        resize()
        with_state.step()
    assert [sample.bytes_by_kind["optimizer_state"] for sample in log.samples[0]] == [40, 40]


@pytest.mark.parametrize("beside", [1, 2])
def test_a_step_is_over_when_every_optimizer_has_stepped_and_counts_from_the_first_that_is_given(
    beside: int,
) -> None:
    found = [optimizer() for _ in range(beside)]
    with record(first_step=7) as log:
        for _ in range(3):
            resize()
            for each in found:
                each.step()
        resize()
    spans = log.select("optimizer")
    assert [e.step for e in spans] == [7] * beside + [8] * beside + [9] * beside
    assert {(e.phase, e.owner) for e in spans} == {("optimizer", "")}
    assert [e.step for e in log.select("free")] == [7, 8, 9, 10]
    whole_time = spans[-1].end_us - log.events[0].start_us
    assert EventLog(log.events).summary()["step_us"] * 3 == pytest.approx(whole_time)


def test_the_work_of_a_closure_belongs_to_the_step_but_not_to_the_event_of_the_optimizer() -> None:
    def closure() -> float:
        resize()
        return 0.5

    def failing() -> float:
        raise ZeroDivisionError

    found = optimizer()
    with record() as log:
        assert found.step(closure=closure) == found.step(closure) == 0.5
        with pytest.raises(ZeroDivisionError):
            found.step(failing)
    assert [(e.op, e.step) for e in log.events] == [
        (op, step) for step in range(2) for op in ("free", "optimizer")
    ]
    assert all(a.end_us <= b.start_us for a, b in zip(log.events, log.events[1:], strict=False))


def test_a_recording_that_begins_in_a_closure_has_the_step_that_is_running() -> None:
    found, stack = optimizer(), contextlib.ExitStack()
    logs: list[EventLog] = []

    def closure() -> float:
        if not logs:
            logs.append(stack.enter_context(record()))
        resize()
        return 0.5

    for _ in range(2):
        found.step(closure)
    stack.close()
    assert [(e.op, e.step) for e in logs[0].events] == [
        (op, step) for step in range(2) for op in ("free", "optimizer")
    ]


# --- Whole models, of any library --------------------------------------------------------------------------


def step(library: Library) -> EventLog:
    """Run forward and backward of four groups: three blocks, and the root, which stays unsharded in between."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of FSDP2
        model: Stem = wrap(stem(), library)
        return recorded(lambda: objective(model(*model.inputs(4, seed=0))).backward())


def a_step_of_each() -> dict[str, EventLog]:
    return {"ours": step(ours), "theirs": step(theirs)}


def test_a_step_of_any_library_has_its_collectives_and_the_memory_that_they_and_the_modules_use() -> None:
    logs = on_ranks(a_step_of_each)
    for log in (log for found in logs for log in found.values()):
        assert Counter(e.op for e in log.collectives()) == {"all_gather": 3 * 2 + 1, "reduce_scatter": 3 + 1}
        # memory of unsharded parameters, seen by the recording
        assert sum(e.bytes for e in log.select("alloc")) > 0 < sum(e.bytes for e in log.select("free"))
    for found in logs:
        written = {e.owner: set(e.writes) for e in found["ours"].select("copy_out")}
        for span in found["ours"].select("forward", "backward"):
            assert set(span.reads) == written[span.owner]


def two_backwards() -> EventLog:
    model: Stem = wrap(stem(), ours)
    with record() as log:
        for seed in range(2):
            objective(model(*model.inputs(4, seed))).backward()
    return log


def test_memory_is_numbered_not_addressed_and_a_flat_buffer_that_is_let_go_is_freed() -> None:
    """The second backward adds its results to the gradients, so they are released in the call that made them."""
    for log in on_ranks(two_backwards):
        let_go = [e for e in log.select("free") if e.bytes == 0]
        assert {e.stream for e in let_go} == {"copy", "compute", "reduce_scatter"}
        assert {e.owner for e in let_go} == {""}
        gathered = {e.writes for e in log.select("all_gather")}
        assert len(gathered) == len(log.select("all_gather"))  # each into a buffer of its own
        assert {e.writes for e in let_go if e.stream == "copy"} <= gathered
        numbers = {number for e in log.events for number in (*e.reads, *e.writes)}
        assert numbers == set(range(1, len(numbers) + 1))


def test_samples_count_whole_parameters_from_their_allocation_on_also_in_the_first_forward() -> None:
    """The log's allocations and frees of the memory that forwards read say how many bytes are alive."""
    for rank, log in enumerate(on_ranks(two_backwards)):
        whole, alive = {number for span in log.select("forward") for number in span.reads}, Counter[int]()
        for event in log.events:
            if event.op == "forward":
                sampled = [s for s in log.samples[rank] if s.us <= event.start_us][-1]
                assert sampled.bytes_by_kind["unsharded_param"] == alive.total() > 0
            for number in {*event.writes} & whole if event.op in ("alloc", "free") else ():
                alive[number] = event.bytes if event.op == "alloc" else 0


def test_whole_gradients_and_the_buffer_of_their_reduction_are_alive_together() -> None:
    for rank, log in enumerate(on_ranks(two_backwards)):
        for copy in [e for e in log.select("copy_in") if e.stream == "compute"]:
            sampled = [s for s in log.samples[rank] if s.us <= copy.start_us][-1].bytes_by_kind
            assert sampled["reduce_scatter_buffer"] >= copy.bytes
            assert sampled["unsharded_grad"] > 0
        first = log.select("backward")[0].start_us
        assert not any(s.bytes_by_kind["reduce_scatter_buffer"] for s in log.samples[rank] if s.us < first)


def gradients_differ_if_recorded() -> bool:
    def gradients(recorded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model: Stem = wrap(stem(), ours)
        for seed in range(3):
            with record() if recorded else contextlib.nullcontext():
                objective(model(*model.inputs(4, seed))).backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    return any(not torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


def test_recording_changes_no_number() -> None:
    assert not any(on_ranks(gradients_differ_if_recorded))


# --- Checks on ranks, in one launch ------------------------------------------------------------------------

ON_RANKS = (
    *(called_each_way, called_functionally, sent_in_all_ways, failing_calls, passed_around),
    *(a_step_of_each, two_backwards, gradients_differ_if_recorded),
)


@functools.cache
def launched() -> list[dict[str, Any]]:
    return launch(lambda: {f.__name__: f() for f in ON_RANKS}, 2, timeout=100)


def on_ranks(function: Callable[[], Any]) -> list[Any]:
    """Return the function's result on each rank."""
    return [of_rank[function.__name__] for of_rank in launched()]


def called_by_an_earlier_name_and_on_the_group() -> list[str]:
    with record() as log:
        all_reduce(torch.ones(2))
        dist.group.WORLD.allreduce([torch.ones(2)]).wait()
    return [event.op for event in log.collectives()]


def test_a_function_that_was_imported_by_name_is_logged_and_a_call_on_the_group_itself_is_not() -> None:
    assert launch(called_by_an_earlier_name_and_on_the_group, 1) == [["all_reduce"]]


# --- Logs of several ranks, with clocks of several machines that are pretended on one ----------------------

AHEAD = 1e9  # µs that each rank's clock is ahead of the one before


def around_a_barrier(machine: str | None) -> EventLog | None:
    """Record a span before the ranks meet and one after. With `machine`, each rank pretends to be on its own machine."""
    rank, real = dist.get_rank(), time.perf_counter
    ahead = AHEAD / 1e6 * rank if machine else 0.0
    here = f"{machine} {rank}" if machine else recording.this_machine()
    with mock.patch.object(time, "perf_counter", lambda: real() + ahead):
        with mock.patch.object(recording, "this_machine", lambda: here):
            with record() as log:
                with events.span("copy_in", "compute"):
                    pass
                with events.paused():
                    dist.barrier()
                with events.span("copy_out", "compute"):
                    pass
            return recording.gather_log(log)


def gathered_of_two() -> list[int] | None:
    """Gather the logs of the first rank, and of the other two ranks."""
    parts = [dist.new_group([0]), dist.new_group([1, 2])]
    with record() as log, events.span("copy_in", "compute"):
        pass
    found = recording.gather_log(log, parts[min(1, dist.get_rank())])
    return found and found.ranks


def test_gathered_logs_are_on_one_axis_on_one_machine_and_on_several() -> None:
    """Spans of all ranks before a barrier end before spans of all ranks after it begin."""

    def on_a_rank() -> tuple[Any, ...]:
        return around_a_barrier(None), around_a_barrier("machine"), gathered_of_two()

    ranks = launch(on_a_rank, 3, timeout=60)
    assert [found[2] for found in ranks] == [[0], [1, 2], None]
    # for a round trip; small against the 1 s between the clocks
    for (first, *others), slack in zip(zip(*ranks, strict=True), (0.0, AHEAD / 1e3), strict=False):
        assert others == [None, None]
        assert first.ranks == [0, 1, 2]
        assert len(set(first.clocks.values())) == 1
        for before in first.select("copy_in"):
            for after in first.select("copy_out"):
                assert before.end_us <= after.start_us + slack
                assert after.start_us - before.end_us < AHEAD / 2
        assert min(e.start_us for e in first.events) >= 0 - slack


def test_containers_of_one_host_name_are_told_apart_by_the_start_of_their_machine() -> None:
    with mock.patch.object(socket, "gethostname", lambda: "node"):
        assert recording.this_machine() not in ("node", "")
