"""What ranks of 09 do: decisions about order, streams by themselves, a forward on virtual GPUs, paths on real ranks."""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hwfsdp import collectives, fully_shard, record
from hwfsdp.collectives import Gathered
from hwfsdp.compat import local_of
from hwfsdp.group import FSDPCommContext
from hwfsdp.hooks import FSDPState, state_of
from hwfsdp.learn.checks.lone_streams import Lone, host_watched
from hwfsdp.learn.checks.virtual_clock import figures_of, simulate_here
from hwfsdp.learn.checks.virtual_models import DEVICE, GPUS, inference
from hwfsdp.learn.checks.watched import states_of
from hwfsdp.learn.run import Report, attempt, log_data
from hwfsdp.prefetch import ForwardOrder, next_in_forward

Path = list[int]  # numbers of layers, in the order in which they run
WIDTH, LAYERS, BATCH = 5, 4, 2


# --- One rank ----------------------------------------------------------------------------------------------


def probe_alone(report: Report, seed: int) -> None:
    """Each part by itself, and a forward on virtual GPUs."""
    attempt(report, "decisions", partial(_decisions, seed))
    attempt(report, "learned", partial(_learned, seed))
    attempt(report, "streams", partial(_streams, seed))
    attempt(report, "buffers", partial(_buffers, seed))
    attempt(report, "host buffer", _host_buffer)
    attempt(report, "wait", partial(_wait, seed))
    attempt(report, "simulated", _simulated)


class Equal:
    """Equal to every other, so that only identity tells two apart."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 0


def drawn_orders(seed: int) -> list[tuple[Path, Path]]:
    """Pairs of forwards: what one entered, and what the next one does."""
    draw = random.Random(seed)
    groups = list(range(5))
    path = draw.sample(groups, 4)
    fixed = [
        (path, path),
        (path, path[:2] + path[3:]),
        (path, path[1:]),
        (path, [*path, 4]),
        ([*path[:2], *path], [*path[:2], *path]),  # two of them twice
        ([path[0], path[0], path[1]], [path[0], path[0], path[1]]),
        (path, path[:2]),
        ([], path),
        (path[:1], path),
    ]
    return fixed + [([draw.choice(groups) for _ in range(draw.randrange(7))] for _ in "ab") for _ in range(12)]  # type: ignore[misc]


def _decisions(seed: int) -> list[list[int | None]]:
    """For every pair, what `next_in_forward` says at each place of the second forward."""
    groups = [Equal(number) for number in range(5)]
    found = []
    for last, taken in drawn_orders(seed):
        order = [groups[n] for n in last]
        found.append([_number(next_in_forward(order, i, groups[n])) for i, n in enumerate(taken)])
    return found


def _learned(seed: int) -> list[list[list[int | None]]]:
    """For every pair, what `ForwardOrder.enter` says in the first forward, in the second, and in that once more."""
    groups = [Equal(number) for number in range(5)]
    found = []
    for last, taken in drawn_orders(seed):
        order: ForwardOrder[Equal] = ForwardOrder()
        answers = []
        for path in (last, taken, taken):
            answers.append([_number(order.enter(groups[n])) for n in path])
            order.finish()
        found.append(answers)
    return found


def _number(group: Equal | None) -> int | None:
    return None if group is None else group.number


BUSY = (10_000.0, 0.0)  # µs that compute has to do when gathers are issued


def _streams(seed: int) -> list[dict[str, Any]]:
    """Two gathers, one after the other: while compute is busy, and while it is not."""
    draw, found = random.Random(seed), []
    for busy in BUSY:
        lone = Lone()
        lone.work("compute", busy, lone.streams.compute)
        for number in range(2):
            before = lone.facts()
            pack = partial(lone.work, f"pack {number}", draw.uniform(50.0, 99.0))
            gather = partial(lone.work, f"gather {number}", draw.uniform(300.0, 600.0))
            with host_watched() as waited:
                done: Any = collectives.pack_then_gather(lone.streams, pack, gather)  # type: ignore[arg-type]
            event = [done.stream, done.us]
            facts = {**lone.facts(), "before": before, "event": event, "host waited": list(waited)}
            found.append(facts | {"number": number, "busy": busy})
    return found


def _buffers(seed: int) -> dict[str, Any]:
    """Two copy-outs, each followed by a forward; what is kept, and what the copy stream waits for."""
    draw, lone = random.Random(seed), Lone()
    kept: list[weakref.ref[Tensor]] = []
    facts = []

    def look(call: str) -> None:
        facts.append({**lone.facts(), "call": call, "kept": [ref() is not None for ref in kept]})

    with host_watched() as waited:
        lone.context.release_gather_buffer()
        look("release, nothing kept")
        for number in range(2):
            flat = torch.zeros(2, 3)
            kept.append(weakref.ref(flat))
            lone.work(f"copy-out {number}", draw.uniform(100.0, 200.0), lone.streams.compute)
            lone.context.keep_until_copied_out(Gathered(flat, [3], lone.streams.all_gather.record()))
            del flat
            look(f"keep {number}")
            lone.work(f"forward {number}", draw.uniform(1000.0, 2000.0), lone.streams.compute)
        lone.context.release_gather_buffer()
        look("release")
        lone.context.release_gather_buffer()
        look("release again")
    return {"facts": facts, "host waited": waited}


def _host_buffer() -> bool:
    """Whether a buffer is still kept on the CPU, where the host has copied when it is told to keep it."""
    context, flat = FSDPCommContext("cpu"), torch.zeros(2, 3)
    kept = weakref.ref(flat)
    context.keep_until_copied_out(Gathered(flat, [3], context.streams.all_gather.record()))
    del flat
    return kept() is not None


def _wait(seed: int) -> dict[str, Any]:
    """A group whose gather is in flight, and another gather behind it; a wait without any before that."""
    draw, lone = random.Random(seed), Lone()
    state = state_of(fully_shard(nn.Linear(2, 2)))
    assert state is not None and state.group is not None
    group = state.group
    group.use(lone.context)
    with host_watched() as waited:
        group.wait_for_gather()
        before = lone.facts()
        lone.work("own gather", draw.uniform(300.0, 600.0), lone.streams.all_gather)
        group._gathered = Gathered(torch.zeros(1, 6), [4, 2], lone.streams.all_gather.record())
        lone.work("next gather", draw.uniform(300.0, 600.0), lone.streams.all_gather)
        group.wait_for_gather()
        group.wait_for_gather()
    in_flight, group._gathered = group._gathered is not None, None
    return {**lone.facts(), "before": before, "in flight": in_flight, "host waited": waited}


def _simulated() -> dict[str, Any]:
    with host_watched() as waited:
        simulation = simulate_here(inference, GPUS, DEVICE)
    return figures_of(simulation) | {"host waited": waited}


# --- Paths, on real ranks ----------------------------------------------------------------------------------


class Stack(nn.Module):
    """Layers, run in any order; itself without parameters. `again`: they are recomputed in backward."""

    def __init__(self, draw: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.again = False
        for param in self.parameters():
            param.data = torch.randint(-1, 2, param.shape, generator=draw).float()

    def forward(self, x: Tensor, path: Sequence[int]) -> Tensor:
        for index in path:
            layer = self.layers[index]
            x = checkpoint(layer, x, use_reentrant=True) if self.again else layer(x)
        return x


class Paths(nn.Module):
    """A root with a parameter of its own, and a stack. All numbers are small integers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.stack = Stack(torch.Generator().manual_seed(seed))

    def forward(self, x: Tensor, path: Sequence[int]) -> Tensor:
        found: Tensor = self.stack(x + self.shift, path)
        return found


def drawn_paths(seed: int) -> dict[str, list[Path]]:
    """By name, the paths of a model's steps."""
    draw = random.Random(seed)
    path = draw.sample(range(LAYERS), LAYERS)
    shorter = [n for n in path if n != path[1]]
    turned = [path[0], path[2], path[1], path[2], path[3]]
    return {
        "changing": [path, path, shorter, shorter, turned, path[:2], path, path],
        "listed": [path, path, path, path],
        "recomputed": [path, path],
    }


def listed_at(path: Path, step: int) -> dict[int, Path]:
    """What the user lists for a layer of the path, in a step of "listed": with the one expected, and without it."""
    return {path[0]: {1: [path[2], path[1]], 2: [path[3]]}.get(step, [])}


def data(seed: int, step: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed * 101 + step * 11 + rank)
    return torch.randint(-1, 2, (BATCH, WIDTH), generator=draw).float()


def update(param: Tensor, grad: Tensor | None) -> None:
    """An optimizer whose results are small integers."""
    if grad is not None:
        param.sub_(grad.sign()).clamp_(-1, 1)


def probe_paths(report: Report, seed: int) -> None:
    """All models; of every step the output, the log of the forward, and what is left after it."""
    for name, paths in drawn_paths(seed).items():
        model: Any = Paths(seed)
        model.stack.again = name == "recomputed"
        for module in (*model.stack.layers, model.stack, model):
            fully_shard(module)
        steps = []
        for step, path in enumerate(paths):
            if name == "listed":
                for at, after in listed_at(path, step).items():
                    listed = [model.stack.layers[n] for n in after]
                    model.stack.layers[at].set_modules_to_forward_prefetch(listed)
            steps.append(_step(model, path, seed, step))
        report[name] = steps


def _step(model: nn.Module, path: Path, seed: int, step: int) -> dict[str, Any]:
    with record() as log:
        out = model(data(seed, step, dist.get_rank()), path)
    facts = {"out": out.detach(), "log": log_data(log), "in flight": _in_flight(states_of(model))}
    out.sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            assert isinstance(param, DTensor)
            update(local_of(param), None if param.grad is None else local_of(param.grad))  # type: ignore[arg-type]
            param.grad = None
    entered = {state.fqn: len(state.forward_order._current) for state in states_of(model)}
    return facts | {"entered": {fqn: count for fqn, count in entered.items() if count}}


def _in_flight(states: Sequence[FSDPState]) -> list[str]:
    return [group.fqn for state in states for group in state.groups if group._gathered is not None]
