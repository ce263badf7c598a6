"""Clocks of several machines, pretended on one. The error of the measurement is at most half a round trip."""

from __future__ import annotations

import functools
import socket
import time
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hwfsdp import EventLog, launch, record
from hwfsdp.observe import events, recording
from hwfsdp.observe.clocks import Offset, RankClock, answer_with_time, measure_offset, shifts_to_one_axis
from hwfsdp.observe.events import HostMark

AHEAD = 1e9  # µs that each rank's clock is ahead of the one before


def clock_ahead() -> float:
    return HostMark().us() + AHEAD * dist.get_rank()


def measured_by_the_first() -> dict[int, Offset]:
    found = {}
    for peer in range(1, dist.get_world_size()):
        if dist.get_rank() == 0:
            found[peer] = measure_offset(peer, dist.group.WORLD, now=clock_ahead)
        elif dist.get_rank() == peer:
            answer_with_time(0, dist.group.WORLD, now=clock_ahead)
    return found


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


def gather_in_parts() -> list[int] | None:
    parts = [dist.new_group([0]), dist.new_group([1, 2])]
    with record() as log, events.span("copy_in", "compute"):
        pass
    found = recording.gather_log(log, parts[min(1, dist.get_rank())])
    return found and found.ranks


@functools.cache
def on_three_ranks() -> list[tuple[dict[int, Offset], dict[str | None, EventLog | None], list[int] | None]]:
    def on_a_rank() -> Any:
        logs = {machine: around_a_barrier(machine) for machine in (None, "machine")}
        return measured_by_the_first(), logs, gather_in_parts()

    return launch(on_a_rank, 3, timeout=60)


def test_an_offset_is_wrong_by_half_of_the_shortest_round_trip_at_most() -> None:
    found = on_three_ranks()[0][0]
    assert sorted(found) == [1, 2]
    for peer, offset in found.items():
        assert abs(offset.us - AHEAD * peer) <= offset.error_us < AHEAD / 2


@pytest.mark.parametrize(
    ("given", "shifts"),
    [
        ({}, {}),
        ({3: RankClock(7.0, "a")}, {3: 0.0}),
        ({0: RankClock(7.0, "a"), 1: RankClock(4.0, "a")}, {0: 3.0, 1: 0.0}),
        ({0: RankClock(7.0, "a"), 1: RankClock(4.0, "b"), 2: RankClock(9.0, "a")}, {0: 0.0, 1: 0.0, 2: 2.0}),
    ],
)
def test_times_count_from_the_earliest_origin_of_the_first_machine(given, shifts):
    assert shifts_to_one_axis(given) == shifts


@pytest.mark.parametrize("machine", [None, "machine"])
def test_gathered_logs_are_on_one_axis_on_one_machine_and_on_several(machine: str | None) -> None:
    """Spans of all ranks before a barrier end before spans of all ranks after it begin."""
    first, *others = [logs[machine] for _, logs, _ in on_three_ranks()]
    assert others == [None, None]
    assert first is not None and first.ranks == [0, 1, 2]
    assert len(set(first.clocks.values())) == 1
    # for a round trip; small against the 1 s between the clocks
    slack = 0.0 if machine is None else AHEAD / 1e3
    for before in first.select("copy_in"):
        for after in first.select("copy_out"):
            assert before.end_us <= after.start_us + slack
            assert after.start_us - before.end_us < AHEAD / 2
    assert min(e.start_us for e in first.events) >= 0 - slack


def test_containers_of_one_host_name_are_told_apart_by_the_start_of_their_machine() -> None:
    with mock.patch.object(socket, "gethostname", lambda: "node"):
        assert recording.this_machine() not in ("node", "")


def test_ranks_outside_the_group_have_no_part_in_it() -> None:
    assert [ranks for _, _, ranks in on_three_ranks()] == [[0], [1, 2], None]
