"""`record` sees collectives, memory and optimizers from outside, whoever uses them, and leaves no trace behind."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed import distributed_c10d, irecv, isend
from torch.distributed.distributed_c10d import P2POp, batch_isend_irecv
from torch.distributed.tensor import Shard, distribute_tensor

import hwfsdp
from hwfsdp import Event, EventLog, StateError, events, launch, record
from hwfsdp.compat import functional_operators
from models import Stem, stem
from oracles import Library, objective, ours, theirs, wrap

N = 6  # elements of a block

# --- Every collective, called in every way -----------------------------------------------------------------

# op, bytes of the whole tensor in elements as (ranks, blocks), and how to call it: arguments by name, in order.
Arguments = Callable[[torch.dtype], dict[str, Any]]


def block(dtype: torch.dtype) -> Tensor:
    return torch.ones(N, dtype=dtype)


def whole(dtype: torch.dtype) -> Tensor:
    return torch.ones(N * dist.get_world_size(), dtype=dtype)


def blocks(dtype: torch.dtype) -> list[Tensor]:
    return [block(dtype) for _ in range(dist.get_world_size())]


CALLS: dict[str, tuple[str, int, Arguments]] = {
    "all_gather_single": ("all_gather", 2, lambda d: {"output_tensor": whole(d), "input_tensor": block(d)}),
    "all_gather_into_tensor": (
        "all_gather",
        2,
        lambda d: {"output_tensor": whole(d), "input_tensor": block(d)},
    ),
    "all_gather": ("all_gather", 2, lambda d: {"tensor_list": blocks(d), "tensor": block(d)}),
    "reduce_scatter_single": ("reduce_scatter", 2, lambda d: {"output": block(d), "input": whole(d)}),
    "reduce_scatter_tensor": ("reduce_scatter", 2, lambda d: {"output": block(d), "input": whole(d)}),
    "reduce_scatter": ("reduce_scatter", 2, lambda d: {"output": block(d), "input_list": blocks(d)}),
    "all_reduce": ("all_reduce", 1, lambda d: {"tensor": block(d)}),
    "broadcast": ("broadcast", 1, lambda d: {"tensor": block(d), "src": 0}),
    "all_to_all_single": ("all_to_all", 2, lambda d: {"output": whole(d), "input": whole(d)}),
}
NAMES = [name for name in CALLS if hasattr(dist, name)]  # which of them there are depends on torch's version
DTYPES = (torch.float32, torch.float64, torch.int64)
PLACES = {"torch.distributed": dist, "torch.distributed.distributed_c10d": distributed_c10d}
STYLES = ("positional", "keyword", "mixed")


def call(place: Any, name: str, style: str, asynchronous: bool, dtype: torch.dtype) -> None:
    """Calls a collective of two ranks; returns when it is done."""
    arguments = CALLS[name][2](dtype)
    options = {"async_op": True} if asynchronous else {}
    positional = len(arguments) if style == "positional" else 1 if style == "mixed" else 0
    values = list(arguments.values())[:positional]
    named = dict(list(arguments.items())[positional:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, at the older names
        work = getattr(place, name)(*values, **named, **options)
    if work is not None:
        work.wait()


def call_each_way() -> dict[Any, list[Event]]:
    found = {}
    for place_name, place in PLACES.items():
        for name in NAMES:
            for style in STYLES:
                for asynchronous in (False, True):
                    for dtype in DTYPES:
                        with record() as log:
                            call(place, name, style, asynchronous, dtype)
                        found[place_name, name, style, asynchronous, dtype] = log.events
    return found


@functools.cache
def called() -> list[dict[Any, list[Event]]]:
    return launch(call_each_way, 2, timeout=60)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_collective_is_seen_once_with_op_dtype_and_bytes_however_it_is_called(
    place: str, name: str, style: str, asynchronous: bool
) -> None:
    op, blocks_in_whole, _ = CALLS[name]
    for rank, found in enumerate(called()):
        for dtype in DTYPES:
            log = EventLog(found[place, name, style, asynchronous, dtype])
            (event,) = log.collectives()
            assert (event.rank, event.op) == (rank, op)
            assert event.dtype == str(dtype).removeprefix("torch.")
            assert event.bytes == blocks_in_whole * N * dtype.itemsize


@pytest.mark.parametrize("name", NAMES)
def test_gathers_and_reductions_have_streams_of_their_own_and_the_rest_runs_where_it_is_called(
    name: str,
) -> None:
    for found in called():
        (event,) = EventLog(found["torch.distributed", name, "keyword", True, torch.float32]).collectives()
        own = event.op if event.op in ("all_gather", "reduce_scatter", "all_reduce") else "compute"
        assert event.stream == own


@pytest.mark.parametrize("name", NAMES)
def test_a_collective_says_which_memory_it_reads_and_which_it_writes(name: str) -> None:
    for found in called():
        (event,) = EventLog(found["torch.distributed", name, "keyword", True, torch.float32]).collectives()
        in_place = name in ("all_reduce", "broadcast")
        assert (event.reads == event.writes) == in_place
        assert len(event.reads) == (2 if name == "reduce_scatter" else 1)
        assert len(event.writes) == (2 if name == "all_gather" else 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_blocked_the_host_is_a_wait_of_compute_as_well(name: str) -> None:
    for found in called():
        log = EventLog(found["torch.distributed", name, "keyword", False, torch.float32])
        (event,), waits = log.collectives(), log.select("wait")
        if event.stream == "compute":
            assert waits == []
        else:
            assert [(w.stream, w.after) for w in waits] == [("compute", (event.seq,))]
            assert waits[0].start_us <= event.start_us
            assert waits[0].end_us >= event.end_us


@pytest.mark.parametrize("name", NAMES)
def test_an_asynchronous_call_is_waited_for_when_somebody_waits_for_its_work(name: str) -> None:
    for found in called():
        log = EventLog(found["torch.distributed", name, "keyword", True, torch.float32])
        (event,), (wait,) = log.collectives(), log.select("wait")
        assert (wait.stream, wait.after) == ("compute", (event.seq,))


# --- The rest of them --------------------------------------------------------------------------------------


def parts(n: int) -> list[Tensor]:
    return list(torch.ones(2 * n).split(n))


def on_first(value: Any) -> Any:
    return value if dist.get_rank() == 0 else None


RARE: dict[str, Callable[[], Any]] = {
    "reduce": lambda: dist.reduce(torch.ones(N), 0),
    "gather": lambda: dist.gather(torch.ones(N), on_first(parts(N)), 0),
    "scatter": lambda: dist.scatter(torch.ones(N), on_first(parts(N)), 0),
    "barrier": lambda: dist.barrier(),
    "monitored_barrier": lambda: dist.monitored_barrier(),
}


@functools.cache
def called_rarely() -> list[dict[str, EventLog]]:
    def call_each() -> dict[str, EventLog]:
        found = {}
        for name, function in RARE.items():
            with record() as log:
                function()
            found[name] = log
        return found

    return launch(call_each, 2, timeout=60)


@pytest.mark.parametrize("name", RARE)
def test_collectives_that_training_seldom_calls_are_seen_alike_by_all_ranks(name: str) -> None:
    for found in called_rarely():
        (event,) = found[name].collectives()
        op = name.removeprefix("monitored_")
        assert (event.op, event.bytes) == (op, 0 if op == "barrier" else 4 * N)


def test_object_collectives_are_seen_as_what_they_are_made_of() -> None:
    def ops() -> dict[str, list[str]]:
        found = {}
        objects: list[Any] = [{"a": 1}, None]
        calls: dict[str, Callable[[], Any]] = {
            "all_gather_object": lambda: dist.all_gather_object(objects, "mine"),
            "broadcast_object_list": lambda: dist.broadcast_object_list(objects, 0),
            "gather_object": lambda: dist.gather_object("mine", on_first(objects), 0),
        }
        for name, call_it in calls.items():
            with record() as log:
                call_it()
            found[name] = [e.op for e in log.collectives()]
        return found

    for found in launch(ops, 2, timeout=60):
        assert found == {
            "all_gather_object": ["all_gather", "all_gather"],
            "broadcast_object_list": ["broadcast", "broadcast"],
            "gather_object": ["all_gather", "gather"],
        }


FUNCTIONAL: dict[str, tuple[str, int, Callable[[Tensor], Any]]] = {  # op, blocks in the whole tensor, call
    "all_reduce": ("all_reduce", 2, lambda x: funcol.all_reduce(x, "sum", [0, 1])),
    "all_gather_tensor": ("all_gather", 4, lambda x: funcol.all_gather_tensor(x, 0, [0, 1])),
    "reduce_scatter_tensor": (
        "reduce_scatter",
        2,
        lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, [0, 1]),
    ),
    "all_to_all_single": ("all_to_all", 2, lambda x: funcol.all_to_all_single(x, None, None, [0, 1])),
    "broadcast": ("broadcast", 2, lambda x: funcol.broadcast(x, 0, [0, 1])),
}


@functools.cache
def called_functionally() -> list[dict[str, tuple[EventLog, bool]]]:
    def call_each() -> dict[str, tuple[EventLog, bool]]:
        warnings.simplefilter("ignore")  # torch's, at the older names
        found, x = {}, torch.arange(2.0 * N)
        for name, (_, _, function) in FUNCTIONAL.items():
            expected = function(x) + 0
            with record() as log:
                got = function(x) + 0
            found[name] = log, bool(torch.equal(got, expected))
        return found

    return launch(call_each, 2, timeout=60)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_collectives_are_seen_and_over_when_their_result_was_waited_for(name: str) -> None:
    op, blocks_in_whole, _ = FUNCTIONAL[name]
    for log, is_equal in (found[name] for found in called_functionally()):
        (event,), (wait,) = log.collectives(), log.select("wait")
        assert (event.op, event.dtype, event.bytes) == (op, "float32", blocks_in_whole * N * 4)
        assert (wait.stream, wait.after) == ("compute", (event.seq,))
        assert event.start_us < event.end_us <= wait.end_us
        assert is_equal


def test_the_collectives_of_dtensors_are_seen() -> None:
    def redistribute() -> list[str]:
        mesh = dist.init_device_mesh("cpu", (2,))
        with record() as log:
            sharded = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
            sharded.full_tensor()
            sharded.sum().full_tensor()
        return [e.op for e in log.collectives()]

    for ops in launch(redistribute, 2, timeout=60):
        assert ops[-2:] == ["all_gather", "all_reduce"]


def test_operators_are_as_before_when_a_recording_is_over() -> None:
    before = [dict(vars(namespace)) for namespace in functional_operators()]
    with record():
        overload = torch.ops._c10d_functional.all_reduce.default
    assert overload is torch.ops._c10d_functional.all_reduce.default
    after = [dict(vars(namespace)) for namespace in functional_operators()]
    for old, new in zip(before, after, strict=True):
        assert all(new[name] is value for name, value in old.items())


def test_memory_is_numbered_not_addressed_and_a_flat_buffer_that_is_let_go_is_freed() -> None:
    """Given two backwards: the second adds its results to the gradients, so they are let go where they were made."""

    def train_steps() -> EventLog:
        model: Stem = wrap(stem(), ours)
        with record() as log:
            for seed in range(2):
                objective(model(*model.inputs(4, seed))).backward()
        return log

    for log in launch(train_steps, 2, timeout=60):
        let_go = [e for e in log.select("free") if e.bytes == 0]
        assert {e.stream for e in let_go} == {"copy", "compute", "reduce_scatter"}
        assert {e.owner for e in let_go} == {""}
        gathered = {e.writes for e in log.select("all_gather")}
        assert len(gathered) == len(log.select("all_gather"))  # each into a buffer of its own
        assert {e.writes for e in let_go if e.stream == "copy"} <= gathered
        numbers = {number for e in log.events for number in (*e.reads, *e.writes)}
        assert numbers == set(range(1, len(numbers) + 1))


def test_forwards_and_backwards_read_the_whole_parameters_that_copy_outs_wrote() -> None:
    for logs in steps(2):
        log = logs["ours"]
        written = {e.owner: set(e.writes) for e in log.select("copy_out")}
        for span in log.select("forward", "backward"):
            assert set(span.reads) == written[span.owner]


# --- Send and receive --------------------------------------------------------------------------------------


def ring_ops(send: Any, receive: Any) -> tuple[list[P2POp], Tensor]:
    """Operations that pass the rank on to the next of the ring."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(N)
    ops = [
        P2POp(send, torch.full((N,), float(rank)), (rank + 1) % world_size),
        P2POp(receive, received, (rank - 1) % world_size),
    ]
    return ops, received


def run_batch(ops: list[P2POp], received: Tensor) -> float:
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received[0].item()


def send_in_all_ways() -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for place_name, place in PLACES.items():
        with record() as log:
            if rank == 0:
                place.send(torch.zeros(N), 1)
                dist.isend(tensor=torch.zeros(N, dtype=torch.int64), dst=1).wait()
            else:
                place.recv(tensor=torch.zeros(N), src=0)
                dist.irecv(torch.zeros(N, dtype=torch.int64), 0).wait()
        found[place_name] = [(e.op, e.dtype, e.bytes, e.stream) for e in log.collectives()]
    return found


def test_sends_and_receives_are_seen_once_each() -> None:
    for rank, found in enumerate(launch(send_in_all_ways, 2, timeout=60)):
        op = ("send", "recv")[rank]
        expected = [(op, "float32", 4 * N, "compute"), (op, "int64", 8 * N, "compute")]
        assert found == dict.fromkeys(PLACES, expected)


def batch_made_and_run_during_a_recording() -> tuple[float, list[str]]:
    with record() as log:
        received = run_batch(*ring_ops(dist.isend, dist.irecv))
    return received, [e.op for e in log.collectives()]


def batch_of_functions_imported_before_the_recording() -> tuple[float, list[str]]:
    with record() as log:
        received = run_batch(*ring_ops(isend, irecv))
    return received, [e.op for e in log.collectives()]


def batch_made_before_the_recording_and_run_in_it() -> tuple[float, list[str]]:
    ops = ring_ops(dist.isend, dist.irecv)
    with record() as log:
        received = run_batch(*ops)
    return received, [e.op for e in log.collectives()]


def batch_made_in_the_recording_and_run_after_it() -> tuple[float, list[str]]:
    with record():
        ops = ring_ops(dist.isend, dist.irecv)
    return run_batch(*ops), ["send", "recv"]


def batch_made_in_one_recording_and_run_in_the_next() -> tuple[float, list[str]]:
    with record():
        ops = ring_ops(dist.isend, dist.irecv)
    with record() as log:
        received = run_batch(*ops)
    return received, [e.op for e in log.collectives()]


def batch_run_by_a_function_imported_before_the_recording() -> tuple[float, list[str]]:
    """It is not seen, but it works."""
    ops, received = ring_ops(isend, irecv)
    with record():
        for work in batch_isend_irecv(ops):
            work.wait()
    return received[0].item(), ["send", "recv"]


@pytest.mark.parametrize(
    "batch",
    [
        batch_run_by_a_function_imported_before_the_recording,
        batch_made_and_run_during_a_recording,
        batch_of_functions_imported_before_the_recording,
        batch_made_before_the_recording_and_run_in_it,
        batch_made_in_the_recording_and_run_after_it,
        batch_made_in_one_recording_and_run_in_the_next,
    ],
)
def test_a_batch_of_sends_and_receives_works_and_is_seen(batch: Callable[[], Any]) -> None:
    assert launch(batch, 3, timeout=60) == [(float(left), ["send", "recv"]) for left in (2, 0, 1)]


# --- One recording at a time, and nothing left behind ------------------------------------------------------

WATCHED = (*CALLS, "send", "isend", "recv", "irecv")


def in_place_now() -> list[Any]:
    """The functions that a recording replaces, as they are at this moment."""
    found = [
        getattr(place, name)
        for place in PLACES.values()
        for name in WATCHED
        if hasattr(place, name) and (place is dist or name not in ("isend", "irecv"))
    ]
    return [*found, torch.UntypedStorage.resize_]


def test_a_recording_replaces_functions_at_all_their_names_and_puts_them_back() -> None:
    before = in_place_now()
    with record():
        during = in_place_now()
    assert all(a is b for a, b in zip(before, in_place_now(), strict=True))
    assert all(a is not b for a, b in zip(before, during, strict=True))
    assert events.active() is None


def test_an_exception_passes_through_and_everything_is_put_back() -> None:
    before = in_place_now()
    with pytest.raises(KeyError, match="of the user"), record() as log:
        torch.zeros(4).untyped_storage().resize_(0)
        raise KeyError("of the user")
    assert all(a is b for a, b in zip(before, in_place_now(), strict=True))
    assert events.active() is None
    assert [e.op for e in log.events] == ["free"]


def test_a_nested_recording_is_refused_and_the_outer_one_goes_on() -> None:
    with record() as outer:
        with pytest.raises(StateError, match="nested"), record():
            pytest.fail("two recordings at a time")
        torch.zeros(4).untyped_storage().resize_(0)
    assert [e.op for e in outer.events] == ["free"]
    with record() as next_one:
        pass
    assert next_one.events == []


def test_a_recording_begins_empty_is_filled_when_it_ends_and_then_stays_as_it_is() -> None:
    with record() as log:
        torch.zeros(4).untyped_storage().resize_(0)
        assert (log.events, log.samples) == ([], {})
    assert len(log.events) == 1
    torch.zeros(4).untyped_storage().resize_(0)
    assert len(log.events) == 1


def test_a_collective_that_fails_raises_what_it_would_have_raised_without_a_recording() -> None:
    def fail() -> list[str]:
        def message_of(call: Callable[[], Any]) -> str:
            try:
                call()
            except (TypeError, ValueError, RuntimeError) as error:
                return f"{type(error).__name__}: {error}"
            return "nothing"

        wrong_calls: list[Callable[[], Any]] = [
            lambda: dist.all_reduce("no tensor"),
            lambda: dist.all_gather([torch.zeros(1)] * 5, torch.zeros(1)),
            lambda: dist.broadcast(torch.zeros(1), src=7),
        ]
        plain = [message_of(wrong) for wrong in wrong_calls]
        with record():
            recorded = [message_of(wrong) for wrong in wrong_calls]
        with record() as log:
            dist.all_reduce(torch.zeros(2))
        assert "nothing" not in plain
        assert recorded == plain
        return [e.op for e in log.collectives()]

    assert launch(fail, 1, timeout=60) == [["all_reduce"]]


def test_the_rank_of_the_events_is_that_of_the_process_unless_it_is_given() -> None:
    def ranks() -> tuple[list[int], list[int]]:
        with record() as own, events.span("forward", "compute"):
            pass
        with record(rank=7) as given, events.span("forward", "compute"):
            pass
        return own.ranks, given.ranks

    assert launch(ranks, 2, timeout=60) == [([0], [7]), ([1], [7])]
    assert ranks() == ([0], [7])


# --- Memory ------------------------------------------------------------------------------------------------


def test_resizing_a_storage_is_an_allocation_or_a_release_of_the_difference() -> None:
    tensor = torch.zeros(10)
    with record() as log:
        for nbytes in (40, 0, 0, 24, 40, 8):
            tensor.untyped_storage().resize_(nbytes)
    changes = [(e.op, e.bytes, e.stream, e.dur_us) for e in log.events]
    assert changes == [
        ("free", 40, "compute", 0),
        ("alloc", 24, "compute", 0),
        ("alloc", 16, "compute", 0),
        ("free", 32, "compute", 0),
    ]
    assert len({e.writes for e in log.events}) == 1


def test_memory_is_sampled_by_kind_and_state_that_was_there_counts_from_the_beginning() -> None:
    weight = nn.Parameter(torch.zeros(10))
    weight.grad = torch.zeros(10)
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    optimizer.step()
    with record() as log:
        torch.zeros(1).untyped_storage().resize_(0)
        optimizer.step()
    assert [sample.bytes_by_kind["optimizer_state"] for sample in log.samples[0]] == [40, 40]


def test_an_optimizer_step_is_a_span_and_counts() -> None:
    weight = nn.Parameter(torch.zeros(10))
    weight.grad = torch.zeros(10)
    optimizer = torch.optim.SGD([weight])
    with record() as log:
        optimizer.step()
        optimizer.step()
    assert [(e.op, e.phase, e.owner, e.step) for e in log.events] == [
        ("optimizer", "optimizer", "", 0),
        ("optimizer", "optimizer", "", 1),
    ]


def optimizers(n: int) -> list[torch.optim.Optimizer]:
    found = []
    for _ in range(n):
        weight = nn.Parameter(torch.zeros(10))
        weight.grad = torch.zeros(10)
        found.append(torch.optim.SGD([weight]))
    return found


@pytest.mark.parametrize("beside", [1, 2, 3])
def test_a_step_is_over_when_every_optimizer_has_stepped_and_counts_from_the_first_that_is_given(
    beside: int,
) -> None:
    found = optimizers(beside)
    with record(first_step=7) as log:
        for _ in range(3):
            torch.zeros(1).untyped_storage().resize_(0)
            for optimizer in found:
                optimizer.step()
        torch.zeros(1).untyped_storage().resize_(0)
    assert [e.step for e in log.select("optimizer")] == [7] * beside + [8] * beside + [9] * beside
    assert [e.step for e in log.select("free")] == [7, 8, 9, 10]
    assert EventLog(log.events).summary()["step_us"] * 3 == pytest.approx(
        log.select("optimizer")[-1].end_us - log.events[0].start_us
    )


def test_an_optimizer_step_that_raises_is_no_step_and_the_next_one_is() -> None:
    (optimizer,) = optimizers(1)

    def refuse() -> float:
        raise ValueError("no")

    with record() as log:
        with pytest.raises(ValueError, match="no"):
            optimizer.step(refuse)
        torch.zeros(1).untyped_storage().resize_(0)
        optimizer.step()
    assert [(e.op, e.step) for e in log.events] == [("free", 0), ("optimizer", 0)]


def test_after_a_recording_optimizers_are_watched_no_more() -> None:
    weight = nn.Parameter(torch.zeros(10))
    weight.grad = torch.zeros(10)
    optimizer = torch.optim.SGD([weight])
    with record() as log:
        pass
    optimizer.step()
    assert log.events == []
    with record() as log:
        optimizer.step()
    assert len(log.events) == 1


# --- Whole models, of any library --------------------------------------------------------------------------


def step(library: Library) -> EventLog:
    """Forward and backward of four groups: three blocks, and the root, which stays whole in between."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP2's own
        model: Stem = wrap(stem(), library)
        with record() as log:
            objective(model(*model.inputs(4, seed=0))).backward()
    return log


@functools.cache
def steps(world_size: int) -> list[dict[str, EventLog]]:
    return launch(lambda: {"ours": step(ours), "theirs": step(theirs)}, world_size, timeout=60)


@pytest.mark.parametrize("library", ["ours", "theirs"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sharded_step_gathers_each_group_twice_but_the_root_and_reduces_each_once(
    library: str, world_size: int
) -> None:
    for logs in steps(world_size):
        counts = Counter(e.op for e in logs[library].collectives())
        assert counts == {"all_gather": 3 * 2 + 1, "reduce_scatter": 3 + 1}


@pytest.mark.parametrize("world_size", [2, 3])
def test_fsdp2_moves_the_same_bytes_in_the_same_dtypes(world_size: int) -> None:
    for logs in steps(world_size):
        moved = {
            library: Counter((e.op, e.dtype, e.bytes) for e in log.collectives())
            for library, log in logs.items()
        }
        assert moved["ours"] == moved["theirs"]


@pytest.mark.parametrize("library", ["ours", "theirs"])
def test_every_rank_issues_the_same_collectives_in_the_same_order(library: str) -> None:
    first, second = ([(e.op, e.bytes) for e in logs[library].collectives()] for logs in steps(2))
    assert first == second


@pytest.mark.parametrize("library", ["ours", "theirs"])
def test_the_whole_parameters_of_any_library_are_allocated_and_freed_before_our_eyes(library: str) -> None:
    for logs in steps(2):
        allocated = sum(e.bytes for e in logs[library].select("alloc"))
        freed = sum(e.bytes for e in logs[library].select("free"))
        assert allocated > 0
        assert freed > 0


def test_recording_changes_no_number() -> None:
    def gradients(recorded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model: Stem = wrap(stem(), ours)
        for seed in range(3):
            with record() if recorded else contextlib.nullcontext():
                objective(model(*model.inputs(4, seed))).backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    def differ() -> bool:
        return any(not torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))

    assert launch(differ, 2, timeout=60) == [False, False]


def test_a_recording_may_begin_between_forward_and_backward() -> None:
    def backward_only() -> list[str]:
        model: Stem = wrap(stem(), ours)
        loss = objective(model(*model.inputs(4, seed=0)))
        with record() as log:
            loss.backward()
        return [e.op for e in log.select("all_gather", "reduce_scatter")]

    for ops in launch(backward_only, 2, timeout=60):
        assert Counter(ops) == {"all_gather": 3, "reduce_scatter": 4}


def test_record_is_public() -> None:
    assert hwfsdp.record is record
