"""A learner's file on two virtual machines: who waits for whom, and how long bytes travel while nothing is computed.

    a GPU     the host issues and goes on. Every operator is an event, so a read that does not wait for its write shows on every run,
              and so does memory that is let go while another stream still reads it
    a host    computes by itself: only what was started before a computation can hide behind it

Times are arithmetic, the same wherever they are worked out. Both machines are made up: a module computes about twice as long as its
bytes travel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from hwfsdp.learn.capstone import clock
from hwfsdp.learn.capstone.clock import GPU, GPUS, HOST, NARROW, WIDE
from hwfsdp.learn.capstone.runs import attempt_together
from hwfsdp.learn.checks.virtual_clock import simulate_here
from hwfsdp.learn.run import Report, log_data
from hwfsdp.learn.stations.facts import learners
from hwfsdp.models.gpt import Block, GPTConfig


def stack_of_blocks(config: GPTConfig) -> nn.Sequential:
    """Blocks of a transformer, each a unit, and the whole, which has no parameters of its own."""
    shard = learners().fully_shard
    model = nn.Sequential(*(Block(config) for _ in range(config.layers)))
    for block in model:
        shard(block)
    shard(model)
    return model


class Ordered(clock.Ordered):
    """Two steps of a narrow model, every operator an event."""

    def __init__(self) -> None:
        super().__init__(shard=None)  # type: ignore[arg-type]

    def build(self) -> nn.Sequential:
        return stack_of_blocks(NARROW)


class Timed(clock.Runner):
    """A step of a wide model, or its forward alone."""

    def __init__(self, with_backward: bool) -> None:
        super().__init__(shard=None, with_backward=with_backward)  # type: ignore[arg-type]

    def build(self) -> nn.Sequential:
        return stack_of_blocks(WIDE)


def probe_order(report: Report, seed: int) -> None:
    attempt_together(report, "order", ordered)


def ordered() -> dict[str, Any]:
    """Two steps on the GPU; the number of events before the end of each forward, backward and optimizer step."""
    runner = Ordered()
    found = simulate_here(lambda: runner.start(), GPUS, GPU)
    return {"log": log_data(found.log), "ends": runner.ends}


def probe_clock(report: Report, seed: int) -> None:
    """Steps on both machines, and a forward on the host."""
    for name, device, backward in (("gpu", GPU, True), ("host", HOST, True), ("forward", HOST, False)):
        attempt_together(report, name, partial(timed, device, backward))


def timed(device: Any, with_backward: bool) -> dict[str, Any]:
    """As `capstone.clock.timed`."""
    return clock.figures_of(Timed(with_backward), device)
