"""A student's file on simulated machines: what a step issues, in which order, how long it takes, and how many bytes are alive.

    a GPU     the host issues and goes on. Every operator is an event. So a read that does not wait for its write shows on every run,
              and so does memory that is freed while another stream still reads it
    a host    computes by itself: only work that was started before a computation can hide behind it
    a cluster of 64 H100s, for the race

Times are arithmetic, so they are the same on every computer. The GPU and the host are made up, and so slow that small models take as
long as large ones on real machines: the compute of a module takes about twice as long as its bytes travel.
`stepped` runs on a rank and observes. `Step` has what it observed, in the process that judges; `timing` has the laws.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import count
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hwfsdp.core.device_streams import StreamSet
from hwfsdp.course.facts import Shard, students_shard
from hwfsdp.course.probing import Report, attempt, simulates
from hwfsdp.course.ranks import StudentFile
from hwfsdp.course.failures import SECONDS
from hwfsdp.course.walls import limit_processor
from hwfsdp.course.watching import logged, ready
from hwfsdp.observe import events
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import COLLECTIVES, Event
from hwfsdp.observe.step_times import Interval, intersect, length, union
from hwfsdp.observe.recording import record
from hwfsdp.train.models.gpt import GPT, Block, GPTConfig
from hwfsdp.virtual import world as virtual_world
from hwfsdp.virtual.clock import Clock, virtual_streams
from hwfsdp.virtual.devices import Device, device_named, placed
from hwfsdp.virtual.costs import collective_us, span_of
from hwfsdp.virtual.world import World

GPU = Device(
    name="a GPU",
    flops={"float32": 50e12 / 512},
    memory=80 << 24,
    memory_bandwidth=2e12 / 64,
    link=200e9 / 64,
    network=200e9 / 64,
    per_node=8,
    efficiency=0.5,
    fitted_on="made up",
    source="made up",
    attention_efficiency=0.3,
    launch_us=5.0,
)
HOST = replace(
    GPU,
    name="a host",
    flops={"float32": 1e12 / 512},
    memory_bandwidth=50e9 / 64,
    link=4e9 / 64,
    network=4e9 / 64,
    host=True,
)


class Machine(NamedTuple):
    """A simulated machine: its name in messages, its device, and the number of ranks. This process is rank 0."""

    name: str
    device: Device
    gpus: int
    small: bool = True

    @contextmanager
    def entered(self) -> Iterator[World]:
        if dist.is_initialized():
            dist.destroy_process_group()
        world = World(self.gpus, placed(self.device, self.gpus, None), self.small)
        with world.entered():
            yield world


MACHINES = {
    "gpu": Machine("the virtual GPU", GPU, 8),
    "host": Machine("the virtual host", HOST, 8),
    "cluster": Machine("64 virtual GPUs", device_named("h100"), 64, small=False),
}


@dataclass(frozen=True)
class Program:
    """A model of transformer blocks, each a unit, and a step of it. The root is a unit, too.

    Attributes:
        updates: the number of micro-batches before each update of an optimizer; (): one micro-batch without an update.
        gradients: False: the step is one forward without gradients.
        inner: the name of a module in each block; it is a unit inside its block.
        gain: True if the root has a parameter of its own. language: True for a language model, whose root has three.
        root: False: the whole model is no unit.
    """

    name: str
    config: GPTConfig
    updates: tuple[int, ...] = ()
    gradients: bool = True
    inner: str = ""
    gain: bool = False
    language: bool = False
    root: bool = True

    def __str__(self) -> str:
        return self.name

    def build(self, shard: Shard | None) -> nn.Module:
        """Build the model, sharded by `shard(module, name)`, if there is one."""
        blocks = [Block(self.config) for _ in range(self.config.layers)]
        model: nn.Module = GPT(self.config) if self.language else Scaled(self.gain * self.config.dim, *blocks)
        for name, block in [*model.named_modules()]:
            if shard and isinstance(block, Block):
                if self.inner:
                    shard(block.get_submodule(self.inner), f"{name}.{self.inner}")
                shard(block, name)
        if shard and self.root:
            shard(model, "model")
        return model


class Scaled(nn.Sequential):
    """Modules in sequence, and perhaps a gain of this many numbers, which belongs to the root."""

    def __init__(self, gain: int, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.gain = nn.Parameter(torch.ones(gain)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return out if self.gain is None else out * self.gain


NARROW = Program("narrow", GPTConfig(dim=64, layers=2, heads=2, seq_len=16), updates=(1, 2), gain=True)
WIDE = Program("wide", GPTConfig(dim=128, layers=5, heads=8, seq_len=64))
EVALUATION = replace(WIDE, name="evaluation", gradients=False)
NESTED = replace(WIDE, name="nested", inner="attention")
RACE = {
    "wide": Program("wide", GPTConfig(dim=2048, layers=6, heads=16, seq_len=1024), language=True),
    "deep": Program("deep", GPTConfig(dim=512, layers=16, heads=8, seq_len=512), language=True),
    "vocab": Program(
        "vocab", GPTConfig(dim=1024, layers=6, heads=8, seq_len=512, vocab=50304), language=True
    ),
}


REDUCTIONS = tuple(op for op in COLLECTIVES if op not in ("all_gather", "barrier"))
PRODUCTS = ("mm", "addmm")  # kernels that read a weight matrix
MOST = 6_000  # operators of a step
KERNELS = (*PRODUCTS, "native_layer_norm", "native_layer_norm_backward")  # all kernels that read parameters


# --- A step -------------------------------------------------------------------------------------------------


@simulates
def probe_step(report: Report, program: Program, machine: str) -> None:
    ready()
    if not MACHINES[machine].small:
        limit_processor(4 * SECONDS)  # models of real size
    attempt(report, named(program, machine), partial(stepped, program, machine, students_shard()))


def named(program: Program, machine: str) -> str:
    return f"{program} on {MACHINES[machine].name}"


def stepped(program: Program, machine: str, shard: Shard) -> dict[str, Any]:
    """Run a step of a program, after one that is not recorded.

    Returns:
        events: every operator, collective, wait and release of memory (`observe.events.Event`).
        marks, kernels, samples: see `UnitWatch`.
        ends: for each forward and backward: its part, the number of events at its end, and the µs at which compute is over.
        output: the numbers of the memory of a forward without gradients' output.
        stream_sets: the number of stream sets that the file makes in the step.
        step_us: until the host and all streams are done. peak_bytes: most bytes alive at once.
    """
    watch = UnitWatch()
    with sets_apart() as made, MACHINES[machine].entered() as world, watch.seeing_blocks():
        runner = Runner(program, world, shard, watch)
        with of_bounded_length(world.clock):
            runner.warm_up()
        gc.collect()
        world.allocator.reset_peak()
        world.restart()
        before = len(made)
        with record() as log:
            with watch.looking(world), logged() as watcher:
                runner.step(watcher.unseen)
            world.clock.synchronize()
        return {
            "events": [event.as_dict() for event in log.events],
            "marks": watch.marks,
            "kernels": watch.kernels,
            "samples": watch.samples,
            "ends": runner.ends,
            "output": runner.output,
            "stream_sets": len(made) - before,
            "step_us": world.clock.host,
            "peak_bytes": world.allocator.peak,
        }


class TooManyOperators(Exception):
    """A step issues so many operators that simulating it takes too long."""


@contextmanager
def of_bounded_length(clock: Clock) -> Iterator[None]:
    """Raise an error in a step that issues more than `MOST` operators."""
    run, issued = clock.run, count(1)

    def counted(us: float) -> None:
        if us and next(issued) > MOST:
            words = f"a step issues more than {MOST:,} operators. FSDP2's has at most 631, so that the host stays ahead of the GPU."
            raise TooManyOperators(f"too-many-operators: {words}")
        run(us)

    with mock.patch.object(clock, "run", counted):
        yield


@cache
def computing(program: Program, machine: str) -> dict[str, float]:
    """Return the µs in which the program's model computes on this machine if it is not sharded: "forward", "backward"."""
    with MACHINES[machine].entered() as world:
        runner = Runner(program, world, None, UnitWatch())
        runner.warm_up()
    times = [0.0, *(us for _, _, us in runner.ends)]
    return {part: end - begin for (part, _, end), begin in zip(runner.ends, times, strict=False)}


@contextmanager
def sets_apart() -> Iterator[list[int]]:
    """Number the streams of the second set that a file makes, and of later ones: "all_gather 2". Each has an order of its own.

    The block's value: the numbers so far. 0 is the world's own set.
    """
    number, made = count(), list[int]()

    def numbered(clock: Clock) -> StreamSet:
        streams, place = virtual_streams(clock), next(number)
        made.append(place)
        for stream in (streams.copy, streams.all_gather, streams.reduce_scatter, streams.all_reduce):
            stream.name += f" {place}" if place > 1 else ""
        return streams

    with mock.patch.object(virtual_world, "virtual_streams", numbered):
        yield made


class Runner:
    """Runs a program in an entered world.

    Attributes:
        watch: watches the step. ends, output: see `stepped`.
    """

    def __init__(self, program: Program, world: World, shard: Shard | None, watch: UnitWatch) -> None:
        self.program, self.world, self.config, self.watch = program, world, program.config, watch
        self.model = program.build(shard)
        if program.updates:  # torch's optimizers import its compiler, which takes a second
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, foreach=False)
        self.ends, self.output = list[tuple[str, int, float]](), tuple[int, ...]()
        watch.names |= {each: name for name, each in self.model.named_modules() if isinstance(each, Block)}
        if program.language:
            self.batch = torch.zeros(2, self.config.seq_len, dtype=torch.int64)
        else:
            self.batch = torch.zeros(1, self.config.seq_len, self.config.dim)

    def warm_up(self) -> None:
        self.model.zero_grad()
        self.micro_batch()
        if self.program.updates:
            self.optimizer.step()

    def step(self, unseen: Callable[[Any], Any]) -> None:
        """Run the step. `unseen` wraps a function whose operators are no events, because it has an event of its own."""
        self.ends.clear()
        self.model.zero_grad()
        for micros in self.program.updates or (1,):
            for _ in range(micros):
                self.micro_batch()
            if self.program.updates:
                self.watch.enter("")
                unseen(self.optimizer.step)()
                self.end("backward")  # the optimizer reads what the backward left
                self.optimizer.zero_grad()

    def micro_batch(self) -> None:
        self.watch.enter("forward")
        with torch.set_grad_enabled(self.program.gradients):
            out = self.model(self.batch)
            loss = out.mean() if self.program.language else out.square().mean()
        self.end("forward")
        if not self.program.gradients:
            recorder = events.active()
            self.output = recorder.ledger.numbers_of([out]) if recorder else ()
            return
        self.watch.enter("backward")
        loss.backward()
        self.end("backward")

    def end(self, part: str) -> None:
        recorder = events.active()
        self.ends.append((part, len(recorder.drafts) if recorder else 0, self.world.clock.ends["compute"]))


class UnitWatch:
    """Notes which unit computes, from outside the student's file.

    Attributes:
        names: the names of units.
        marks: (number of the first event, op, unit) whenever a forward or a backward of a unit begins, or ends: then the unit is "".
        kernels: (begin, end, number of the next event) of each kernel on the compute stream, in µs.
        samples: (µs, bytes alive) after each kernel, in the order of issue, where the bytes differ. The µs are those at which the
            compute stream gets there: the host of a GPU runs far ahead.
    """

    def __init__(self) -> None:
        self.names: dict[Block, str] = {}
        self.marks: list[tuple[int, str, str]] = []
        self.kernels: list[tuple[float, float, int]] = []
        self.samples: list[tuple[float, int]] = []

    def enter(self, op: str, unit: str = "") -> None:
        """Assign the next events to a forward or a backward, of a unit or of none. op "": an operation that has its own event."""
        if recorder := events.active():
            self.marks.append((len(recorder.drafts), op, unit))

    @contextmanager
    def seeing_blocks(self) -> Iterator[None]:
        """See the forward of each block, also if the file keeps the function when it shards the block."""
        forward, names = Block.forward, self.names

        def watched_forward(block: Block, x: Tensor) -> Tensor:
            self.enter("forward", names.get(block, ""))
            out = forward(block, x)
            self.enter("forward")
            if out.requires_grad:
                out.register_hook(lambda grad: self.enter("backward", names.get(block, "")))
            return out

        with mock.patch.object(Block, "forward", watched_forward):
            yield

    @contextmanager
    def looking(self, world: World) -> Iterator[None]:
        """Note the kernels and the memory of a step."""
        clock, memory = world.clock, world.allocator
        run = clock.run

        def watched_run(us: float) -> None:
            run(us)
            recorder = events.active()
            if us and clock.current == "compute" and recorder:
                self.kernels.append((clock.ends["compute"] - us, clock.ends["compute"], len(recorder.drafts)))
            if not self.samples or self.samples[-1][1] != memory.allocated:
                self.samples.append((clock.now("compute"), memory.allocated))

        with mock.patch.object(clock, "run", watched_run):
            yield


# --- What a step observed --------------------------------------------------------------------------------


class Section(NamedTuple):
    """The events of one unit's forward or backward, and the kernels among them. Between units, `unit` is ""."""

    op: str
    unit: str
    events: list[Event]
    kernels: list[Event]


class Step:
    """A step of a student's file on a simulated machine.

    Attributes:
        name: "narrow on the virtual GPU". events: the log. sections: the step in parts, in the order of issue.
        units: number of blocks. unit_bytes: of the parameters of one block, whole.
        step_us: until everything is done. peak_bytes: most bytes alive at once. stream_sets: made by the file in this step.
    """

    def __init__(self, program: Program, machine: str, facts: dict[str, Any]) -> None:
        self.program, self.machine, self.facts = program, machine, facts
        self.name = named(program, machine)
        self.events = [_event(fields) for fields in facts["events"]]
        self.log = EventLog(self.events)
        self.units = program.config.layers
        with torch.device("meta"):
            self.unit_bytes = sum(p.numel() * p.element_size() for p in Block(program.config).parameters())
        self.step_us: float = facts["step_us"]
        self.peak_bytes: int = facts["peak_bytes"]
        self.stream_sets: int = facts["stream_sets"]
        ends = [*(first for first, _, _ in facts["marks"][1:]), len(self.events)]
        self.sections = list[Section]()
        for (first, op, unit), end in zip(facts["marks"], ends, strict=True):
            inside = [e for e in self.events if first <= e.seq < end]
            self.sections.append(Section(op, unit, inside, [e for e in inside if e.op in KERNELS and unit]))

    @property
    def operators(self) -> list[Event]:
        """Return the collectives and the operators that run on a stream: what the host issues."""
        return [e for e in self.events if e.op not in ("alloc", "free", "wait")]

    @property
    def gather_us(self) -> float:
        """The time in which one unit's gather travels on this machine."""
        return travel_us("all_gather", self.unit_bytes, self.machine)

    @property
    def reduce_us(self) -> float:
        """The time in which one unit's reduction travels on this machine."""
        return travel_us("reduce_scatter", self.unit_bytes, self.machine)

    def compute_us(self, part: str) -> float:
        """Return the time in which the same model computes without sharding, in a forward or a backward."""
        return computing(self.program, self.machine)[part]

    def duration_us(self, part: str) -> float:
        """Return the time of the first forward or backward of the step."""
        times = [0.0, *(us for _, _, us in self.facts["ends"])]
        ends: list[tuple[str, int, float]] = self.facts["ends"]
        spans = zip(ends, times, strict=False)
        return next(float(end - begin) for (each, _, end), begin in spans if each == part)

    def part_of(self, event: Event) -> str:
        """Return the forward or backward in which an event is issued."""
        return next((part for part, end, _ in self.facts["ends"] if event.seq < end), "forward")

    def travels(self, part: str) -> list[Event]:
        """Return the gathers of forwards or of backwards, or the reductions of the step."""
        if part == "reduction":
            return self.log.select(*REDUCTIONS)
        return [e for e in self.log.select("all_gather") if self.part_of(e) == part]

    @cached_property
    def cover(self) -> list[Interval]:
        """When a unit computes something that the step needs (`timing`, Note [What hides a gather])."""
        needed, seen = set(self.facts["output"]), set[int]()
        for e in reversed(self.events):
            if e.op in (*COLLECTIVES, "optimizer") or (e.op != "free" and needed.intersection(e.writes)):
                seen.add(e.seq)
                needed.update(e.reads)
        own = {e.seq: e for section in self.sections if section.unit for e in section.events}
        found = []
        for begin, end, number in self.facts["kernels"]:
            while number in own and own[number].op in ("alloc", "free", "wait"):
                number += 1
            if number in own and number in seen:
                found.append((begin, end))
        return union(found)

    def exposed_us(self, part: str) -> list[float]:
        """Return, for each of `travels`, the µs in which it travels and no unit computes."""
        cover, travels = self.cover, self.travels(part)
        if part == "reduction":  # a late gather is not to be blamed on reductions
            cover = union([*cover, *((e.start_us, e.end_us) for e in self.log.select("all_gather"))])
        return [e.dur_us - length(intersect([(e.start_us, e.end_us)], cover)) for e in travels]

    def in_flight(self) -> list[int]:
        """Count, whenever a reduction starts, the reductions that compute has not waited for, with this one."""
        reductions, stream_of = self.travels("reduction"), {e.seq: e.stream for e in self.events}
        # seq of a reduction → seq of the first wait for it, or for a later event of its stream
        over: dict[int, int] = {}
        for wait in self.log.select("wait", stream="compute"):
            for each in reductions:
                if any(seq >= each.seq and stream_of[seq] == each.stream for seq in wait.after):
                    over.setdefault(each.seq, wait.seq)
        ends = [over.get(each.seq, len(self.events)) for each in reductions]
        return [
            sum(e.seq <= last.seq < end for e, end in zip(reductions, ends, strict=True))
            for last in reductions
        ]

    def figures(self) -> str:
        """Return a line for the page."""
        exposed = (
            f"{part} {sum(self.exposed_us(part)) / 1e3:.1f}" for part in ("forward", "backward", "reduction")
        )
        peak = f"peak {self.peak_bytes / 1e6:.1f} MB"
        return f"step {self.step_us / 1e3:.1f} ms, in which bytes travel alone for ms: {', '.join(exposed)}; {peak}"


def _event(fields: dict[str, Any]) -> Event:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return Event(**values)


def askers(file: StudentFile) -> dict[str, Callable[[Program], Step]]:
    """Return the fixtures that run a step of the student's file, by name of the machine: `gpu(WIDE)`, `host(WIDE)`."""

    def asker(machine: str) -> Callable[[Program], Step]:
        def step(program: Program) -> Step:
            name = named(program, machine)
            found: Any = file.ranks(1).ask(probe_step, name, program=program, machine=machine)
            if file.asking:
                return found  # type: ignore[no-any-return]
            if name not in file.steps:
                file.steps[name] = Step(program, machine, found[0])
            return file.steps[name]  # type: ignore[no-any-return]

        return step

    return {machine: asker(machine) for machine in MACHINES}


@cache
def travel_us(op: str, nbytes: int, machine: str) -> float:
    _, device, gpus, _ = MACHINES[machine]
    return collective_us(op, nbytes, span_of(range(gpus), device.per_node), device)
