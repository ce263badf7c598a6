"""Models that watch themselves: whose memory is there while each layer computes, and whether its own is.

All numbers are small integers, so that results of a sharded model are equal to those of the same model in one piece,
whatever the order of sums. Layers compute through a function that would rather raise than read memory that was given
back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hwfsdp import compat
from hwfsdp.collectives import Gathered
from hwfsdp.eventlog import EventLog
from hwfsdp.events import Event
from hwfsdp.group import ParamGroup
from hwfsdp.hooks import FSDPState, state_of
from hwfsdp.learn.checks.lifetimes import Watched, watch

WIDTHS = (4, 6, 3, 5, 2)  # of the chain's layers; no two groups have the same size
Data = dict[str, Any]


class Unusable(RuntimeError):
    """A layer was about to compute with a parameter that is not there."""


class Affine(torch.autograd.Function):
    """x W^T + b; its backward looks before it reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: Layer) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.layer.check("backward", weight)
        grad = grads[0]
        return grad @ weight, grad.t() @ x, grad.sum(0), None


class Layer(nn.Module):
    """An affine layer with small integers for weights."""

    def __init__(self, name: str, fan_in: int, fan_out: int, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed * 31 + sum(map(ord, name)))
        self.name = name
        self.weight = nn.Parameter(torch.randint(-2, 3, (fan_out, fan_in), generator=draw).float())
        self.bias = nn.Parameter(torch.randint(-2, 3, (fan_out,), generator=draw).float())
        self.watcher: Watcher | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.check("forward", self.weight)
        y: Tensor = Affine.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        if self.watcher is not None:
            self.watcher.outputs.setdefault(self.name, []).append(watch(y))
        return y

    def check(self, phase: str, weight: Tensor) -> None:
        if self.watcher is not None:
            self.watcher.look(self, phase, weight)


class Chain(nn.Module):
    """Layers one after the other; with `checkpoints`, each is run again in backward."""

    def __init__(self, seed: int, checkpoints: str = "") -> None:
        super().__init__()
        sizes = zip(WIDTHS, WIDTHS[1:], strict=False)
        self.layers = nn.ModuleList(Layer(f"layers.{i}", *size, seed) for i, size in enumerate(sizes))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.checkpoints:
                x = checkpoint(layer, x, use_reentrant=self.checkpoints == "reentrant")
            else:
                x = layer(x)
        return x


class Branch(nn.Module):
    """A layer of its own, and one inside it; returns a dict."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.own, self.leaf = Layer("branch.own", 3, 5, seed), Layer("branch.leaf", 5, 3, seed)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"count": 3, "parts": [self.leaf(self.own(x))]}


class Tree(nn.Module):
    """Layers of the root's own, before and after a branch; returns what it was given, too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.stem, self.branch = Layer("stem", 4, 3, seed), Branch(seed)
        self.head = Layer("head", 3, 2, seed)

    def forward(self, x: Tensor) -> dict[str, Any]:
        found = self.branch(self.stem(x))
        return {"given": x, "out": (self.head(found["parts"][0]), found["count"])}


def inputs(seed: int, step: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed * 101 + step * 11 + rank)
    return torch.randint(-2, 3, (3, WIDTHS[0]), generator=draw).float()


def loss_of(out: Tensor, rank: int) -> Tensor:
    return (out * torch.arange(1.0, out.shape[1] + 1)).sum() * (rank + 1)


class Watcher:
    """Sees, from inside each layer, which groups have memory, and whether the layer's own parameter is there.

    Attributes:
        outputs: by layer, what it has returned. buffers: by group, what was gathered. Only the memory, and only watched.
    """

    def __init__(self, model: nn.Module) -> None:
        self.states = states_of(model)
        self.looks: list[Data] = []
        self.unusable: list[list[str]] = []
        self.outputs: dict[str, list[Watched]] = {}
        self.buffers: dict[str, list[Watched]] = {}
        for group in (group for state in self.states for group in state.groups):
            self._watch_gathers(group)
        for layer in model.modules():
            if isinstance(layer, Layer):
                layer.watcher = self

    def _watch_gathers(self, group: ParamGroup) -> None:
        gather = group._gather

        def spy() -> Gathered:
            gathered = gather()
            self.buffers.setdefault(group.fqn, []).append(watch(gathered.flat))
            return gathered

        group._gather = spy  # type: ignore[method-assign]

    def look(self, layer: Layer, phase: str, weight: Tensor) -> None:
        if phase == "forward":
            again = compat.in_backward()
            self.looks.append({"in": layer.name, "alive": self.alive(), "recomputed": again})
        what = ""
        if isinstance(weight, DTensor):
            what = "a shard"
        elif weight.untyped_storage().nbytes() < weight.numel() * weight.element_size():
            what = "without memory"
        if what:
            self.unusable.append([layer.name, phase, what])
            raise Unusable(f"the weight of {layer.name} is {what} in its {phase}")

    def alive(self) -> dict[str, int]:
        """Bytes of whole parameters, by group; groups without any are left out."""
        found = {state.fqn: bytes_of(group) for state in self.states for group in state.groups}
        return {fqn: nbytes for fqn, nbytes in found.items() if nbytes}


def states_of(model: nn.Module) -> list[FSDPState]:
    found = [state_of(module) for module in model.modules()]
    return list(dict.fromkeys(state for state in found if state is not None))


def bytes_of(group: ParamGroup) -> int:
    return sum(p.gathered.untyped_storage().nbytes() for p in group.params if hasattr(p, "gathered"))


FILLED_FOR = {"copy": "all_gather", "compute": "reduce_scatter"}  # by the stream of a copy-in


def with_collectives(log: EventLog) -> EventLog:
    """A lone rank sends nothing: in its log, each copy-in is followed by the collective whose buffer it fills, without a dtype.

    So one expectation holds for every number of ranks: which collectives there are, in what order, of how many bytes.
    """
    if dist.get_world_size() > 1:
        return log
    events: list[Event] = []
    for event in log.events:
        events.append(event)
        if event.op == "copy_in":
            events.append(replace(event, op=FILLED_FOR[event.stream]))
    return EventLog(events, log.samples, log.about)


class Oracle:
    """The same model in one piece, on every rank's inputs."""

    def __init__(self, seed: int, world_size: int, kind: type[Chain] | type[Tree] = Chain) -> None:
        self.seed, self.world_size, self.model = seed, world_size, kind(seed)

    def out(self, step: int, rank: int) -> Tensor:
        found: Any = self.model(inputs(self.seed, step, rank))
        return found if isinstance(found, Tensor) else found["out"][0]

    def grads(self, step: int) -> dict[str, Tensor]:
        """The mean over the ranks."""
        self.model.zero_grad()
        for rank in range(self.world_size):
            loss_of(self.out(step, rank), rank).backward()
        return {
            name: p.grad / self.world_size for name, p in self.model.named_parameters() if p.grad is not None
        }

    def sizes(self) -> dict[str, int]:
        """Bytes of each layer when whole, padding included."""
        return {
            layer.name: sum(
                -(-p.shape[0] // self.world_size) * self.world_size * p[0].numel() * p.element_size()
                for p in layer.parameters()
            )
            for layer in self.model.modules()
            if isinstance(layer, Layer)
        }
