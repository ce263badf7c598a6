"""Order and races: against a closure computed by hand, and in logs of real runs, whole and with an edge removed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import distributed_c10d

import models
from figures import events_of
from hwfsdp import EventLog, launch, record
from hwfsdp.observe.events import STREAMS, Event
from hwfsdp.observe.races import Order, find_races
from oracles import BF16_FP32, Case, Training, accumulate, ours

# --- The oracle: all paths, one by one ---------------------------------------------------------------------


def closure(events: Sequence[Event]) -> dict[int, int]:
    """Return seq → a set of bits: the seqs of all events that are certain to end before this event."""
    before: dict[int, int] = {}
    for index, event in enumerate(events):
        direct = {e.seq for e in events[:index] if e.stream == event.stream and e.end_us <= event.start_us}
        awaited = [e for e in events[:index] if e.seq in event.after]
        direct |= {
            e.seq for a in awaited for e in events[:index] if e.stream == a.stream and e.end_us <= a.end_us
        }
        before[event.seq] = sum(1 << seq for seq in direct)
        for seq in direct:
            before[event.seq] |= before[seq]
    return before


def is_safe(events: Sequence[Event]) -> bool:
    """Return True if any two accesses to one storage are in order, unless both only read."""
    before = closure(events)
    accesses: dict[int, list[tuple[int, bool]]] = {}
    for event in events:
        for storage in {*event.reads, *event.writes}:
            accesses.setdefault(storage, []).append((event.seq, storage in event.writes))
    return all(
        before[second] >> first & 1
        for of_storage in accesses.values()
        for index, (second, second_writes) in enumerate(of_storage)
        for first, first_writes in of_storage[:index]
        if first_writes or second_writes
    )


@st.composite
def schedules(draw: Any) -> list[Event]:
    """Draw events that follow each other on their streams, wait for any known or unknown event, and share a few storages."""
    now = dict.fromkeys(STREAMS, 0)
    events: list[Event] = []
    storages = st.lists(st.integers(1, 4), max_size=2, unique=True).map(tuple)
    for seq in range(draw(st.integers(0, 14))):
        stream = draw(st.sampled_from(STREAMS[:3]))
        start = now[stream] + draw(st.integers(0, 2))
        now[stream] = start + draw(st.integers(1, 3))
        after = tuple(draw(st.lists(st.integers(-1, seq + 1), max_size=2, unique=True)))
        span = {"start_us": float(start), "dur_us": float(now[stream] - start)}
        events.append(
            Event(0, seq, "copy_in", stream, after=after, reads=draw(storages), writes=draw(storages), **span)
        )
    return events


@given(schedules())
def test_two_events_are_in_order_exactly_where_there_is_a_path(events: list[Event]) -> None:
    order, before = Order(events), closure(events)
    for second in events:
        found = [first.seq for first in events if order.happens_before(first, second)]
        assert found == [first.seq for first in events if before[second.seq] >> first.seq & 1]


@given(schedules())
def test_there_is_a_race_exactly_where_accesses_to_one_memory_have_no_path(events: list[Event]) -> None:
    assert (find_races(EventLog(events)) == []) == is_safe(events)


def test_a_span_is_not_over_before_the_spans_inside_it_begin() -> None:
    times = [(0, 10), (2, 4), (5, 8), (11, 12)]
    events = [
        Event(0, seq, "forward", "compute", start_us=a, dur_us=b - a) for seq, (a, b) in enumerate(times)
    ]
    order = Order(events)
    found = {(a.seq, b.seq) for a in events for b in events if order.happens_before(a, b)}
    assert found == {(1, 2), (0, 3), (1, 3), (2, 3)}


# --- Races by hand -----------------------------------------------------------------------------------------


GATHER = ("all_gather", "all_gather", 0, 1, {"owner": "a", "writes": (7,)})
COPY_OUT = ("copy_out", "compute", 5, 6, {"owner": "a", "reads": (7,)})
READ = ("copy_out", "compute", 5, 6, {"owner": "a", "reads": (7,), "after": (0,)})
FORWARD = ("forward", "compute", 0, 10, {"reads": (7,)})
NEXT, FREE, EARLY_FREE = (
    (op, stream, start, start + 1, {"writes": (7,)})
    for op, stream, start in (("copy_in", "copy", 9), ("free", "copy", 9), ("free", "compute", 5))
)


def test_a_race_names_both_events_the_memory_and_the_danger() -> None:
    for rows, said in [
        (
            [GATHER, COPY_OUT],
            "Rank 3, memory 7: copy_out of 'a' (event 1) may read what all_gather of 'a' (event 0) has not written yet; "
            "compute does not wait for all_gather.",
        ),
        ([GATHER, READ, NEXT], "may overwrite the memory that copy_out of 'a' (event 1) still reads"),
        ([GATHER, READ, FREE], "may give the memory away that copy_out of 'a' (event 1)"),
        ([GATHER, NEXT], "may come before all_gather of 'a' (event 0) has written there"),
        ([FORWARD, EARLY_FREE], "on compute it begins before the other has ended"),
    ]:
        log = EventLog(events_of(3, *rows))
        (race,) = find_races(log)
        assert (race.first, race.second, race.storage) == (*log.events[-2:], 7)
        assert said in race.sentence
    gather, read = events_of(0, GATHER, COPY_OUT)  # memory of another rank is other memory
    assert find_races(EventLog([gather, replace(read, rank=1)])) == []


# --- Real runs ---------------------------------------------------------------------------------------------


def step_with_a_closure(training: Training) -> None:
    def closure() -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(0)
        loss.backward()
        return loss

    for _ in range(2):
        training.optimizer.step(closure)


def step_in_the_backward(training: Training) -> None:
    optimizers = {param: torch.optim.SGD([param], 0.1) for param in training.model.parameters()}
    for param, optimizer in optimizers.items():
        param.register_post_accumulate_grad_hook(lambda param, optimizer=optimizer: optimizer.step())
    for seed in range(2):
        training.loss(seed).backward()


def reduce_in_the_backward(training: Training) -> None:
    for param in training.model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: dist.all_reduce(param.grad.to_local()))
    training.steps()


class Gathering(torch.optim.SGD):
    """An optimizer that gathers each parameter, and then changes it."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.sub_(param.full_tensor().mean())


def gather_in_the_optimizer(training: Training) -> None:
    training.optimizer = Gathering(training.model.parameters(), 0.1)
    training.steps()


RUNS: dict[str, Case] = {
    "blocks": Case(models.graded),
    "root with parameters": Case(models.stem),
    "bf16": Case(models.stem, options={"policy": BF16_FP32}),
    "a module twice": Case(models.twice),
    "checkpointing": Case(functools.partial(models.checkpointed, False)),
    "accumulation": Case(models.stem, functools.partial(accumulate, pattern="nb")),
    "a step with a closure": Case(models.stem, step_with_a_closure),
    "steps in the backward": Case(models.stem, step_in_the_backward),
    "reductions in the backward": Case(models.graded, reduce_in_the_backward),
    "gathers in the optimizer": Case(models.stem, gather_in_the_optimizer),
}


def recorded(case: Case) -> EventLog:
    """Record one run on a rank."""
    training = case.training(ours)
    with record() as log:
        case.scenario(training)
    return log


@functools.cache
def logs_of_runs() -> dict[str, EventLog]:
    ranks = launch(lambda: {name: recorded(case) for name, case in RUNS.items()}, 2, timeout=120)
    return {name: EventLog.merge(rank[name] for rank in ranks) for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_no_run_of_ours_has_a_race(name: str) -> None:
    log = logs_of_runs()[name]
    assert log.select("all_gather", "all_reduce") and log.select("optimizer")
    assert [race.sentence for race in find_races(log)] == []


def without(log: EventLog, cut: Callable[[Event, Event], bool]) -> EventLog:
    """Return the log without the waits of the second event for the first for which `cut` is true."""
    by_place = {(e.rank, e.seq): e for e in log.events}
    return EventLog(
        [
            replace(e, after=tuple(seq for seq in e.after if not cut(by_place[e.rank, seq], e)))
            for e in log.events
        ]
    )


EDGES = [  # (the waiting stream, the other stream), and words about at least one race
    ("compute", "all_gather", "copy_out of 'blocks.1' .* may read what all_gather of 'blocks.1'"),
    ("all_gather", "copy", "all_gather of 'blocks.1' .* may come before copy_in of 'blocks.1'"),
    ("copy", "compute", "free .* may give the memory away that copy_out of 'blocks.1' .* still reads"),
    ("copy", "compute", "copy_in of 'blocks.1' .* may read what optimizer .* has not written"),
    ("reduce_scatter", "compute", "reduce_scatter of 'blocks.1' .* may read what copy_in of 'blocks.1'"),
    ("compute", "reduce_scatter", "free .* may give the memory away that reduce_scatter of 'blocks.1'"),
]
EDGES_OF_HYBRID = [
    ("all_reduce", "reduce_scatter", "all_reduce of 'blocks.1' .* reduce_scatter of 'blocks.1'"),
    ("compute", "all_reduce", "optimizer .* may read what all_reduce of 'blocks.1'"),
]


def assert_missing_waits_are_found(log: EventLog, edges: list[tuple[str, str, str]]) -> None:
    for waiting, awaited, sentence in edges:
        races = find_races(
            without(log, lambda a, b: (b.stream, a.stream) == (waiting, awaited))
        )  # noqa: B023
        assert any(re.search(sentence, race.sentence) for race in races), (waiting, awaited)


def test_a_stream_that_does_not_wait_for_another_is_found_and_named() -> None:
    assert_missing_waits_are_found(logs_of_runs()["blocks"], EDGES)


@pytest.mark.long
def test_hybrid_sharding_has_no_race_unless_a_stream_does_not_wait_for_its_all_reduce() -> None:
    hybrid = Case(models.graded, options={"shape": (2, 2)})
    log = EventLog.merge(launch(recorded, 4, hybrid, timeout=120))
    assert log.select("all_reduce") and find_races(log) == []
    assert_missing_waits_are_found(log, EDGES_OF_HYBRID)


# --- Plain collectives of torch.distributed ----------------------------------------------------------------

Works = Sequence[Any]  # with `wait`


def peer() -> int:
    return 1 - dist.get_rank()


def coalesced(weight: Tensor, grad: Tensor, asynchronous: bool = True) -> Works:
    manager = getattr(distributed_c10d, "_coalescing_manager")  # noqa: B009
    with manager(async_ops=asynchronous) as managed:
        for tensor in (grad, torch.ones(4)):
            dist.all_reduce(tensor, async_op=asynchronous)
    return [managed]


def exchanged(weight: Tensor, grad: Tensor) -> Works:
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, weight, peer()), dist.P2POp(dist.irecv, grad, peer())]
    )


# Each returns works that the program must wait for before an optimizer reads the gradient and writes the weight.
ASYNCHRONOUS: dict[str, Callable[[Tensor, Tensor], Works]] = {
    "all_gather": lambda weight, grad: [dist.all_gather([grad, torch.ones(4)], weight, async_op=True)],
    "all_reduce": lambda weight, grad: [dist.all_reduce(grad, async_op=True)],
    "a batch": exchanged,
    "coalesced": coalesced,
}


def blocking(weight: Tensor, grad: Tensor, group: dist.ProcessGroup) -> None:
    """Call collectives that torch orders after the work before them, and that block the work after them."""
    gathered, both = torch.zeros(8), torch.zeros(8)
    dist.all_gather(list(gathered.split(4)), weight, group=group)
    dist.all_reduce(gathered)
    dist.broadcast(gathered, 0, group=group)
    dist.all_to_all_single(both, gathered)
    dist.reduce_scatter(grad, list(both.split(4)))
    coalesced(weight, grad, asynchronous=False)
    for call in (dist.send, dist.recv) if dist.get_rank() == 0 else (dist.recv, dist.send):
        call(grad, peer())


def races_between(program: Callable[[Tensor, Tensor], Works]) -> list[str]:
    """Run optimizer step, program, optimizer step, and only then wait for the works of the program."""
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    optimizer = torch.optim.SGD([weight], 0.1)
    with record() as log:
        optimizer.step()
        works = program(weight.detach(), weight.grad)
        optimizer.step()
    for work in works:
        work.wait()
    return [race.sentence for race in find_races(log)]


def races_of_plain_programs() -> dict[str, tuple[list[str], list[str]]]:
    """Return the races of each program, if it waits for its works, and if it does not."""

    def waited(program: Callable[[Tensor, Tensor], Works], weight: Tensor, grad: Tensor) -> Works:
        for work in program(weight, grad):
            work.wait()
        return ()

    found = {
        name: (races_between(functools.partial(waited, program)), races_between(program))
        for name, program in ASYNCHRONOUS.items()
    }
    group = dist.new_group([0, 1])
    right = races_between(lambda weight, grad: blocking(weight, grad, group) or ())  # type: ignore[func-returns-value]
    return {**found, "blocking": (right, [])}


def test_a_plain_collective_waits_for_compute_and_only_a_program_that_forgets_to_wait_has_races() -> None:
    for found in launch(races_of_plain_programs, 2, timeout=60):
        for name, (right, wrong) in found.items():
            assert right == [], name
            forgotten = [said for said in wrong if re.match(r"Rank \d, memory .*optimizer .* may", said)]
            assert forgotten or name == "blocking", name
