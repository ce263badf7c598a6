"""The homework on two virtual machines: how long bytes travel while nothing is computed.

    a GPU         the host issues and goes on, so the next gather is under way while this module computes, provided that it
                  has a stream of its own: task 2
    a host        computes itself, so nothing is under way that was not started on purpose: task 3

Times are arithmetic, the same wherever they are worked out. The devices are made up, so that a module computes about twice
as long as its bytes travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from hwfsdp import events
from hwfsdp.events import COLLECTIVES
from hwfsdp.eventlog import Interval, intersect, length, union
from hwfsdp.learn.capstone import cases
from hwfsdp.learn.capstone.runs import own
from hwfsdp.learn.checks.virtual_clock import simulate_here
from hwfsdp.learn.run import Report, attempt
from hwfsdp.models.gpt import GPT, GPTConfig, next_byte_loss
from hwfsdp.virtual import clock
from hwfsdp.virtual.devices import Device

GPUS = 8
WIDE = GPTConfig(dim=1024, layers=5, heads=8, seq_len=512, vocab=1024)


def _device(name: str, flops: float, memory_bandwidth: float, link: float, host: bool) -> Device:
    return Device(
        name=name,
        flops={"float32": flops, "bfloat16": flops},
        memory=80 << 30,
        memory_bandwidth=memory_bandwidth,
        link=link,
        network=link,
        per_node=GPUS,
        efficiency=0.5,
        fitted_on="made up",
        source="made up, for the homework",
        attention_efficiency=0.3,
        memory_efficiency=0.85,
        link_efficiency=0.8,
        launch_us=5.0,
        kernel_us=3.0,
        dtensor_us=60.0,
        collective_us=20.0,
        hop_us=1.5,
        node_hop_us=6.0,
        host=host,
    )


GPU = _device("a GPU", 50e12, 2e12, 200e9, host=False)
HOST = _device("a host", 1e12, 50e9, 4e9, host=True)


def probe_clock(report: Report, seed: int) -> None:
    """A forward on the GPU, and a step on the host, with the learner's file."""
    attempt(report, "forward on a GPU", partial(timed, GPU, cases.learners_shard(), False))
    attempt(report, "step on a host", partial(timed, HOST, cases.learners_shard(), True))


def timed(device: Device, shard: cases.Shard, with_backward: bool) -> dict[str, Any]:
    """Runs it twice; of the second time, in µs.

    Returns:
        gathers, reductions: of each, in order of issue, [begin, end, travelled while nothing was computed, backward?].
        step_us: of all. peak_bytes: alive at once.
    """
    runner = Runner(own(shard), with_backward)
    with watched_kernels(runner.kernels):
        found = simulate_here(lambda: runner.start(), GPUS, device)
    log = found.log
    busy = union(runner.kernels)
    return {
        "step_us": found.step_seconds * 1e6,
        "peak_bytes": round(found.peak_allocated_gib * (1 << 30)),
        "gathers": _exposed(log.select("all_gather"), busy, runner.forward_end),
        "reductions": _exposed(log.select(*(op for op in COLLECTIVES if op != "all_gather")), busy, 0),
    }


def _exposed(found: list[events.Event], busy: list[Interval], forward_end: int) -> list[list[Any]]:
    return [
        [
            e.start_us,
            e.end_us,
            e.dur_us - length(intersect([(e.start_us, e.end_us)], busy)),
            e.seq >= forward_end,
        ]
        for e in found
    ]


class Runner:
    """A step of the wide model, for `simulate`.

    Attributes:
        kernels: when compute was busy in the last step, in µs. forward_end: events of it before the backward began.
    """

    def __init__(self, shard: cases.Shard, with_backward: bool) -> None:
        self.shard, self.with_backward = shard, with_backward
        self.kernels: list[Interval] = []
        self.forward_end = 0
        self.model: Any = None

    def start(self) -> Callable[[], None]:
        self.model = cases.sharded(GPT(WIDE), cases.Case("wide"), self.shard, cases.mesh_of_all())
        self.tokens = torch.zeros(1, WIDE.seq_len, dtype=torch.int64)
        return self.step

    def step(self) -> None:
        self.kernels.clear()
        if not self.with_backward:
            with torch.no_grad():
                self.model(self.tokens)
            return
        self.model.zero_grad()
        loss = next_byte_loss(self.model(self.tokens), self.tokens)
        recorder = events.active()
        self.forward_end = len(recorder.drafts) if recorder else 0
        loss.backward()


@contextmanager
def watched_kernels(kernels: list[Interval]) -> Iterator[None]:
    """Notes when the compute stream of a virtual clock is busy."""
    original = clock.Clock.run

    def run(self: clock.Clock, us: float) -> None:
        original(self, us)
        if us and self.current == "compute":
            kernels.append((self.ends["compute"] - us, self.ends["compute"]))

    with mock.patch.object(clock.Clock, "run", run):
        yield


class Exposed(NamedTuple):
    """µs in which bytes travelled and nothing was computed: of gathers in forward and in backward, and of reductions."""

    forward: float
    backward: float
    reductions: float


def exposed_of(figures: dict[str, Any]) -> Exposed:
    """What `timed` found, in all."""
    gathers, reductions = figures["gathers"], figures["reductions"]
    return Exposed(
        sum(us for _, _, us, in_backward in gathers if not in_backward),
        sum(us for _, _, us, in_backward in gathers if in_backward),
        sum(us for _, _, us, _ in reductions),
    )
