"""What ranks of 10 do: decisions about order, reductions by themselves, a step on virtual GPUs, backwards on real ranks."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hwfsdp import collectives, fully_shard, record
from hwfsdp.collectives import Reducing
from hwfsdp.compat import local_of
from hwfsdp.group import FSDPCommContext
from hwfsdp.learn.checks.forward_prefetch_runs import LAYERS, WIDTH, Equal, Path, Paths, Stack, data
from hwfsdp.learn.checks.lone_streams import Lone, host_watched
from hwfsdp.learn.checks.virtual_clock import figures_of, simulate_here
from hwfsdp.learn.checks.virtual_models import DEVICE, GPUS, training
from hwfsdp.learn.checks.watched import states_of
from hwfsdp.learn.run import Report, attempt, log_data
from hwfsdp.prefetch import next_in_backward
from hwfsdp.streams import Stream

REDUCTIONS = 4


# --- One rank ----------------------------------------------------------------------------------------------


def probe_alone(report: Report, seed: int) -> None:
    """Each part by itself, and a step on virtual GPUs."""
    attempt(report, "decisions", partial(_decisions, seed))
    attempt(report, "streams", partial(_streams, seed))
    for scenario in (one_after_the_other, all_reduced):
        attempt(report, scenario.__name__, partial(_reductions, scenario, seed))
    attempt(report, "put off", _put_off)
    attempt(report, "simulated", _simulated)


def drawn_orders(seed: int) -> list[Path]:
    draw = random.Random(seed)
    path = draw.sample(range(5), 4)
    twice = [path[0], path[1], path[2], path[1], path[3]]
    return [path, twice, [path[0], path[0]], path[:1], []] + [
        [draw.randrange(5) for _ in range(draw.randrange(7))] for _ in range(6)
    ]


def places_in(order: Path) -> range:
    """All indices to ask for: those of the order, and some outside it."""
    return range(-2, len(order) + 2)


def _decisions(seed: int) -> list[list[int | None]]:
    groups = [Equal(number) for number in range(5)]
    found = []
    for order in drawn_orders(seed):
        named = [groups[n] for n in order]
        answers = [next_in_backward(named, index) for index in places_in(order)]
        found.append([None if group is None else group.number for group in answers])
    return found


def _streams(seed: int) -> list[dict[str, Any]]:
    """Two reductions: the first while the stream is free, the second when it is still busy with that."""
    draw, lone, found = random.Random(seed), Lone(), []
    for number in range(2):
        packing = lone.work(f"pack {number}", draw.uniform(100.0, 200.0), lone.streams.compute)
        before, results = lone.facts(), [torch.zeros(1)]

        def reduce(number: int = number, result: Tensor = results[0]) -> Tensor:
            lone.work(f"reduce {number}", draw.uniform(700.0, 900.0))
            return result

        with host_watched() as waited:
            result, done = collectives.reduce_after_packing(lone.streams, reduce)
        facts = {**lone.facts(), "before": before, "host waited": list(waited), "packed": packing.end}
        same, event = result is results[0], [done.stream, done.us]  # type: ignore[attr-defined]
        found.append({**facts, "same result": same, "event": event})
    return found


Look = Callable[[str], None]


class Kept:
    """Reductions in flight, made up; which of their tensors someone still refers to."""

    def __init__(self, seed: int) -> None:
        self.lone, self.draw = Lone(), random.Random(seed)
        self.inputs: list[weakref.ref[Tensor]] = []
        self.results: list[weakref.ref[Tensor]] = []
        self.facts: list[dict[str, Any]] = []

    def add(self, follows_on: Stream) -> None:
        """One that begins on the reduce-scatter stream, and goes on where it is told."""
        lone, number = self.lone, len(self.inputs)
        flat, result, stream = torch.zeros(4), torch.zeros(2), lone.streams.reduce_scatter
        self.inputs.append(weakref.ref(flat))
        self.results.append(weakref.ref(result))
        lone.work(f"reduce {number}", self.draw.uniform(300.0, 600.0), stream)
        reducing = Reducing(f"group {number}", flat, result, 1.0, stream, stream.record())
        reduced = reducing
        if follows_on is not stream:
            follows_on.wait(stream.record())
            reduced = reducing._replace(flat=result, stream=follows_on)
        lone.work(f"rest {number}", self.draw.uniform(300.0, 600.0), follows_on)
        lone.context.add_reduction(reducing, reduced)

    def look(self, call: str) -> None:
        kept = {
            name: [n for n, ref in enumerate(refs) if ref() is not None]
            for name, refs in (("inputs", self.inputs), ("results", self.results))
        }
        self.facts.append({**self.lone.facts(), **kept, "call": call})


def one_after_the_other(found: Kept) -> None:
    """What follows a reduce-scatter is on its own stream."""
    context, stream = found.lone.context, found.lone.streams.reduce_scatter
    for _ in range(REDUCTIONS):
        found.add(stream)
    found.look("add_reduction, four times")
    for leave in (REDUCTIONS, 2, 2, 1):
        context.wait_for_reductions(leave=leave)
        found.look(f"wait_for_reductions(leave={leave})")
    found.add(stream)
    context.wait_for_reductions()
    found.look("wait_for_reductions()")
    for _ in range(2):
        found.add(stream)
    context.finish_reductions()
    found.look("finish_reductions()")
    context.finish_reductions()
    found.look("finish_reductions(), again")


def all_reduced(found: Kept) -> None:
    """An all-reduce follows, on a stream of its own; for the last, on yet another one."""
    context, streams = found.lone.context, found.lone.streams
    for stream in (streams.all_reduce, streams.all_reduce, streams.copy):
        found.add(stream)
    found.look("add_reduction, three times")
    context.wait_for_reductions(leave=1)
    found.look("wait_for_reductions(leave=1)")
    context.finish_reductions()
    found.look("finish_reductions()")


def _reductions(scenario: Callable[[Kept], None], seed: int) -> dict[str, Any]:
    found = Kept(seed)
    with host_watched() as waited:
        scenario(found)
    return {"facts": found.facts, "host waited": waited}


class Over:
    """A collective that is over."""

    def wait(self) -> None: ...


def _put_off() -> dict[str, list[str]]:
    """Streams of the CPU on which something was put off and is done now, before and after `finish_reductions`."""
    context, done = FSDPCommContext("cpu"), list[str]()
    for stream in (context.streams.reduce_scatter, context.streams.all_reduce):
        with stream.run():
            stream.collective(lambda async_op: Over(), stream.name, "group 0")
            stream.then(partial(done.append, stream.name))
    before = list(done)
    context.finish_reductions()
    return {"before": before, "after": done}


def _simulated() -> dict[str, Any]:
    with host_watched() as waited:
        simulation = simulate_here(training, GPUS, DEVICE)
    return figures_of(simulation) | {"host waited": waited}


# --- Backwards, on real ranks ------------------------------------------------------------------------------


class Embedded(nn.Module):
    """An embedding, whose backward needs no parameters, and a stack; nothing of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(7, WIDTH)
        self.embed.weight.data = torch.randint(-1, 2, (7, WIDTH), generator=draw).float()
        self.stack = Stack(draw)

    def forward(self, x: Tensor, path: Sequence[int]) -> Tensor:
        found: Tensor = self.stack(self.embed(x.abs().long()), path)
        return found


MODELS = {"embedding": Embedded}  # by the name of a case; all others: Paths
CASES = ("usual", "repeated", "listed", "embedding", "two in flight", "replicated", "not the last")


def drawn_path(case: str, seed: int) -> Path:
    path = random.Random(f"{case} {seed}").sample(range(LAYERS), LAYERS)
    return [path[0], path[1], path[2], path[1], path[3]] if case == "repeated" else path


def listed_at(case: str, path: Path) -> dict[int, Path]:
    """What the user lists for a layer: the two after the next, instead of the next."""
    return {path[3]: [path[1], path[0]]} if case in ("listed", "not the last") else {}


def backwards_of(case: str) -> int:
    return 2 if case == "not the last" else 1


def made(case: str, seed: int) -> nn.Module:
    return MODELS.get(case, Paths)(seed)


def probe_backwards(report: Report, seed: int) -> None:
    """All cases; the log of the backward, and each rank's gradients."""
    for case in CASES:
        report[case] = _run(case, seed)


def _run(case: str, seed: int) -> dict[str, Any]:
    model: Any = made(case, seed)
    options: dict[str, Any] = {}
    if case == "replicated":
        options["mesh"] = init_device_mesh(
            "cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicas", "shards")
        )
    embeddings: list[Any] = [model.embed] if isinstance(model, Embedded) else []
    for module in (*embeddings, *model.stack.layers, model.stack, model):
        fully_shard(module, **options)
    for embedding in embeddings:
        embedding.set_unshard_in_backward(False)
    path = drawn_path(case, seed)
    for at, after in listed_at(case, path).items():
        model.stack.layers[at].set_modules_to_backward_prefetch([model.stack.layers[n] for n in after])
    if case == "two in flight":
        model.set_reduce_scatter_max_input_buffers(2)
    facts: dict[str, Any] = {}
    for number in range(backwards_of(case)):
        model.set_is_last_backward(number == backwards_of(case) - 1)
        out = model(data(seed, number, dist.get_rank()), path)
        with record() as log:
            out.sum().backward()
        facts |= {f"log {number}": log_data(log), f"places {number}": _places(model)}
    return facts | {"grads": {name: _rows(p.grad) for name, p in model.named_parameters()}}


def _places(model: nn.Module) -> list[str]:
    """Groups that still have places in the order of forwards."""
    groups = [group for state in states_of(model) for group in state.groups]
    return [group.fqn for group in groups if group.post_forward_indices]


def _rows(grad: Tensor | None) -> Tensor | None:
    return local_of(grad) if isinstance(grad, DTensor) else grad
