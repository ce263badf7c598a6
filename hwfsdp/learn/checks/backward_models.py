"""06: the models that backwards are run through, and their batches; the same wherever they are made.

Weights and inputs are small integers, and each rank's loss is W times what it adds to that of the whole batch. Then the mean
over the ranks has no rounding, in whatever order it is made, and has to equal the gradient without sharding bit for bit.
With `kind="floats"` they are ordinary numbers, and the oracle is FSDP2.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH, VOCABULARY = 4, 3, 5
HIDDEN = (5, 7, 1)  # of the three blocks: no multiple of 2 or 3, and fewer rows than ranks
HUGE = 40_000.0  # two or three of them exceed what fp16 can hold, half their sum does not


class Block(nn.Module):
    """Takes two tensors and returns two, so that its backward is announced twice."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = x + self.down(self.up(x).abs())
        return out, y - out


class Chain(nn.Module):
    """Blocks in a row; no parameters of its own. `path`: which blocks run; `wrap`: how to call one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for hidden in HIDDEN)
        self.path: Sequence[int] = range(len(HIDDEN))
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number in self.path:
            block = self.blocks[number]
            x, y = checkpoint(block, x, y, use_reentrant=False) if self.recompute else block(x, y)
        return x + y


class Tied(Chain):
    """Embeds tokens, and ends with the same weight; parts are frozen, others take part in nothing; a block runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.blocks.append(Block(2))  # never runs
        self.blocks[0].add_module("spare", nn.Linear(WIDTH, 2))
        self.blocks[2].get_parameter("down.weight").requires_grad_(False)
        self.path = (0, 1, 1, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(super().forward(self.embed(tokens)))
        return out


class Untied(Chain):
    """Embeds tokens with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(self.embed(tokens))


class Headed(nn.Module):
    """Its forward ends before the head, which is called by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.stem(x).abs())
        return out


class Vector(nn.Module):
    """One parameter whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


MODELS: dict[str, type[nn.Module]] = {
    each.__name__: each for each in (Chain, Tied, Untied, Headed, Vector)  # by name, as data travel
}


def drawing(seed: int, *what: Any) -> torch.Generator:
    """Random numbers for this purpose: others for every other."""
    return torch.Generator().manual_seed(zlib.crc32(repr((seed, *what)).encode()))


def numbers(shape: Sequence[int], bound: int, kind: str, draw: torch.Generator) -> Tensor:
    if kind == "floats":
        return torch.randn(*shape, generator=draw)
    return torch.randint(-bound, bound + 1, tuple(shape), generator=draw).float()


def build(name: str, seed: int, kind: str = "integers") -> nn.Module:
    """A model with weights that depend on the seed and on nothing else."""
    model = MODELS[name]()
    with torch.no_grad():
        for fqn, param in model.named_parameters():
            param.copy_(numbers(param.shape, 1, kind, drawing(seed, name, fqn)))
    return model


def batch(name: str, seed: int, step: int, rank: int, kind: str = "integers") -> tuple[Tensor, Tensor]:
    """A rank's input, and by how much each element of the output counts; the last rank's count for nothing in `Tied`."""
    draw = drawing(seed, "batch", name, step, rank)
    if name == "Vector":
        exact = (
            torch.randint(-3, 4, (5,), generator=draw) * 192.0
        )  # halves, thirds and quarters of sums stay exact in fp16
        return (HUGE if rank < 3 else 0.0) + exact, torch.ones(5)
    width = VOCABULARY if name == "Tied" else WIDTH
    counts = numbers((ROWS, width), 2, kind, draw)
    if name == "Tied" and rank == 1:
        counts = torch.zeros_like(counts)
    if name in ("Tied", "Untied"):
        return torch.randint(VOCABULARY, (ROWS,), generator=draw), counts
    return numbers((ROWS, WIDTH), 2, kind, draw), counts


def loss_of(model: Callable[..., Tensor], given: tuple[Tensor, Tensor], world_size: int) -> Tensor:
    x, counts = given
    return (model(x) * counts).sum() * (1 if isinstance(model, Vector) else world_size)
