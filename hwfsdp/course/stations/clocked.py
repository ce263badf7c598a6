"""A learner's file on two simulated machines: which operator waits for which, and how long bytes travel while nothing is computed.

    a GPU     the host issues and goes on. Every operator is an event. So a read that does not wait for its write shows on every run,
              and so does memory that is freed while another stream still reads it
    a host    computes by itself: only work that was started before a computation can hide behind it

Times are arithmetic, so they are the same on every computer. Both machines are made up: the compute of a module takes about
twice as long as its bytes travel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from hwfsdp.core.streams import StreamSet
from hwfsdp.course.capstone.witness import witnessed
from hwfsdp.course.run import Report, log_data
from hwfsdp.course.stations.facts import attempt_together
from hwfsdp.course.stations.sharders import HOMEWORK, Shard, learners_shard
from hwfsdp.course.stations.watching import Watch
from hwfsdp.observe import events
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import COLLECTIVES
from hwfsdp.observe.intervals import Interval, intersect, length, union
from hwfsdp.train.models.gpt import Block, GPTConfig
from hwfsdp.virtual import world
from hwfsdp.virtual.clock import Clock, virtual_streams
from hwfsdp.virtual.devices import Device
from hwfsdp.virtual.programs import Target
from hwfsdp.virtual.run import Simulation, simulate

GPUS = 8
REDUCTIONS = tuple(op for op in COLLECTIVES if op != "all_gather")
WIDE = GPTConfig(dim=1024, layers=5, heads=8, seq_len=512)
NARROW = GPTConfig(dim=64, layers=3, heads=2, seq_len=16)


GPU = Device(
    name="a GPU",
    flops={"float32": 50e12},
    memory=80 << 30,
    memory_bandwidth=2e12,
    link=200e9,
    network=200e9,
    per_node=GPUS,
    efficiency=0.5,
    fitted_on="made up",
    source="made up",
    attention_efficiency=0.3,
    launch_us=5.0,
)
HOST = replace(
    GPU, name="a host", flops={"float32": 1e12}, memory_bandwidth=50e9, link=4e9, network=4e9, host=True
)
MACHINES = {"order": "GPU", "gpu": "GPU", "host": "host", "forward": "host"}  # key of a report → its machine


def simulate_here(target: Target, gpus: int, device: Device | str) -> Simulation:
    """Call `simulate` in the process of a rank, which has one rank and no further communication. Its process group is destroyed."""
    if dist.is_initialized():
        dist.destroy_process_group()
    return simulate(target, gpus, device)


Stack = Callable[[GPTConfig], nn.Module]


class Scaled(nn.Sequential):
    """Modules in sequence, and a gain, which belongs to the root."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.gain = nn.Parameter(torch.ones(NARROW.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) * self.gain  # type: ignore[no-untyped-call]
        return out


def stack_of_blocks(
    config: GPTConfig,
    shard: Shard,
    with_root: bool,
    kind: type[nn.Sequential] = nn.Sequential,
    inner: str = "",
) -> nn.Sequential:
    """Build blocks of a transformer, each a unit. With a root, the whole model is a unit too; `kind` decides what the root owns.

    With `inner`, the module of this name in each block is a unit inside its block.
    """
    model = kind(*(Block(config) for _ in range(config.layers)))
    for name, block in model.named_children():
        if inner:
            shard(block.get_submodule(inner), f"blocks.{name}.{inner}")
        shard(block, f"blocks.{name}")
    if with_root:
        shard(model, "model")
    return model


def learners_stack(config: GPTConfig, kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    """Build the same stack with the learner's file; the homework has no root."""
    with_root = HOMEWORK not in sys.modules
    return stack_of_blocks(config, learners_shard(), with_root, kind if with_root else nn.Sequential)


def nested_stack(config: GPTConfig) -> nn.Sequential:
    """Build the same stack with a unit inside each block."""
    return stack_of_blocks(config, learners_shard(), True, inner="attention")


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the name of each unit: in the homework as it was passed to `shard`, at a station as in the model."""
    prefix = "blocks." if HOMEWORK in sys.modules else ""
    return {each: f"{prefix}{name}" for name, each in model.named_modules() if isinstance(each, Block)}


# --- Order -------------------------------------------------------------------------------------------------


def probe_order(report: Report, seed: int) -> None:
    attempt_together(report, "order", ordered)


def ordered() -> dict[str, Any]:
    """Run two steps on the GPU. Return `Runner.witnessed_log`, and a player's log."""
    runner = Ordered(NARROW, partial(learners_stack, kind=Scaled))
    with sets_apart():
        found = runner.run(GPU)
    plain = EventLog([e.changed(stream=e.stream.partition(" ")[0]) for e in found.log.events])
    return {**runner.witnessed_log(found.log), "shown": log_data(runner.shown(plain))}


@contextmanager
def sets_apart() -> Iterator[None]:
    """Number the streams of the second set that a file makes, and of later ones: "all_gather 2". Each has an order of its own."""
    number = count()  # 0 is the world's own set

    def numbered(clock: Clock) -> StreamSet:
        made, place = virtual_streams(clock), next(number)
        for stream in (made.copy, made.all_gather, made.reduce_scatter, made.all_reduce) if place > 1 else ():
            stream.name += f" {place}"
        return made

    with mock.patch.object(world, "virtual_streams", numbered):
        yield


class Runner:
    """A step of a model, for `simulate`.

    Args:
        stack: builds the model. with_backward: False: a forward without gradients, and nothing else.

    Attributes:
        watch: watches the last step. ends: the number of events at the end of each part of it, "forward" or "backward".
    """

    def __init__(self, config: GPTConfig, stack: Stack, with_backward: bool = True) -> None:
        self.config, self.stack, self.with_backward = config, stack, with_backward
        self.watch, self.ends = Watch(), list[tuple[str, int]]()
        self.model: Any = None

    def run(self, device: Device | str, gpus: int = GPUS) -> Simulation:
        with self.watch.looking():
            return simulate_here(self.start, gpus, device)

    def start(self) -> Callable[[], None]:
        self.model = self.stack(self.config)
        self.batch = torch.zeros(1, self.config.seq_len, self.config.dim)
        return self.watched_step

    def watched_step(self) -> None:
        self.ends.clear()
        self.watch.begin(names_of(self.model))
        self.step()

    def step(self) -> None:
        if self.with_backward:
            self.model.zero_grad()
            self.micro_batch()
            return
        with torch.no_grad():
            self.model(self.batch)
        self.end("forward")

    def micro_batch(self) -> None:
        self.watch.enter("forward")
        loss = self.loss()
        self.end("forward")
        self.watch.enter("backward")
        loss.backward()
        self.end("backward")

    def loss(self) -> torch.Tensor:
        out: torch.Tensor = self.model(self.batch)
        return out.square().mean()

    def end(self, part: str) -> None:
        recorder = events.active()
        self.ends.append((part, len(recorder.drafts) if recorder else 0))

    def witnessed_log(self, log: EventLog) -> dict[str, Any]:
        """Return the log, the number of events at the end of each forward and backward, and the marks of the watch (`Watch.marks`)."""
        return {"log": log_data(log), "ends": self.ends, "marks": self.watch.marks}

    def shown(self, log: EventLog) -> EventLog:
        """Return the log of the step for a player."""
        starts = [0, *(end for _, end in self.ends)]
        begins = [(part, start) for (part, _), start in zip(self.ends, starts, strict=False)]
        return self.watch.log_of(log, begins)


class Ordered(Runner):
    """Two steps. If they are recorded, a witness makes every operator an event.

    The second step has two micro-batches, so that a gradient is added to one that is there.
    """

    def start(self) -> Callable[[], None]:
        step = super().start()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, foreach=False)
        return step

    def step(self) -> None:
        with witnessed() if events.active() else nullcontext() as witness:
            update = witness.unseen(self.optimizer.step) if witness else self.optimizer.step
            for micros in (1, 2):
                for _ in range(micros):
                    self.micro_batch()
                self.watch.enter("")
                update()  # it has its own event
                self.end("backward")  # the optimizer reads what the backward left
                self.optimizer.zero_grad()


# --- Times -------------------------------------------------------------------------------------------------


def probe_clock(report: Report, seed: int) -> None:
    """Run a step on each machine, and a forward on the host."""
    for name, device, backward in (("gpu", GPU, True), ("host", HOST, True), ("forward", HOST, False)):
        attempt_together(report, name, partial(timed, device, backward))


def probe_nested(report: Report, seed: int) -> None:
    """Run a step with nested units on the host."""
    attempt_together(report, "nested", partial(timed, HOST, True, nested_stack))


def timed(device: Device, with_backward: bool, stack: Stack = learners_stack) -> dict[str, Any]:
    """Run it twice. Return figures of the second time, in µs:

    gathers, reductions: of each, in order of issue, [begin, end, time alone (no compute), in backward?, owner].
    flying: whenever a reduction starts, the number of reductions that were started and not waited for, with this one.
    step_us: of the whole step. peak_bytes: most bytes alive at once. shown: the log for a player.
    The rest is `Runner.witnessed_log`: a witness takes no time.
    """
    runner = Timed(WIDE, stack, with_backward)
    found = runner.run(device)
    log, (_, forward_end) = found.log, runner.ends[0]
    plain = EventLog([e for e in log.events if e.op != "free" or e.bytes], log.samples)
    busy, gathers, reductions = union(runner.watch.kernels), log.select("all_gather"), log.select(*REDUCTIONS)
    # reductions are not to blame for a late gather
    waited = union([*busy, *((e.start_us, e.end_us) for e in gathers)])
    return {
        **figures_of(found),
        "gathers": _exposed(gathers, busy, forward_end),
        "reductions": _exposed(reductions, waited, 0),
        "flying": _in_flight(log),
        "shown": log_data(runner.shown(plain)),
        **runner.witnessed_log(log),
    }


def figures_of(found: Simulation) -> dict[str, Any]:
    return {"step_us": found.step_seconds * 1e6, "peak_bytes": round(found.peak_allocated_gib * (1 << 30))}


class Timed(Runner):
    """One step, with a witness if the step is recorded."""

    def step(self) -> None:
        with witnessed() if events.active() else nullcontext():
            super().step()


def _in_flight(log: EventLog) -> list[int]:
    """Count the reductions that compute has not waited for, whenever one starts."""
    reductions = log.select(*REDUCTIONS)
    stream_of = {e.seq: e.stream for e in log.events}
    # seq of a reduction → seq of the first wait for it, or for a later one on its stream
    over: dict[int, int] = {}
    for wait in log.select("wait", stream="compute"):
        for each in reductions:
            if any(seq >= each.seq and stream_of[seq] == each.stream for seq in wait.after):
                over.setdefault(each.seq, wait.seq)
    ends = [over.get(each.seq, len(log.events)) for each in reductions]
    return [
        sum(e.seq <= last.seq < end for e, end in zip(reductions, ends, strict=True)) for last in reductions
    ]


def _exposed(found: list[events.Event], busy: list[Interval], forward_end: int) -> list[list[Any]]:
    spans = [(e.start_us, e.end_us) for e in found]
    alone = [e.dur_us - length(intersect([span], busy)) for e, span in zip(found, spans, strict=True)]
    return [
        [*span, us, e.seq >= forward_end, e.owner] for e, span, us in zip(found, spans, alone, strict=True)
    ]


def exposed_of(figures: dict[str, Any]) -> dict[str, float]:
    """Return the µs in which bytes travel and nothing is computed: of gathers in forward and in backward, and of reductions."""
    total = {"forward": 0.0, "backward": 0.0, "reductions": 0.0}
    for _, _, us, in_backward, _ in figures["gathers"]:
        total["backward" if in_backward else "forward"] += us
    return total | {"reductions": sum(us for _, _, us, _, _ in figures["reductions"])}
