"""Clocks of several machines, pretended on one: gathered logs are on one axis of time."""

from __future__ import annotations

import socket
import time
from typing import Any
from unittest import mock

import torch.distributed as dist

from hwfsdp import EventLog, launch, record
from hwfsdp.observe import events, recording

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
