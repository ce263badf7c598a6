"""Small models for the tests. Each is awkward to shard in its own way.

`blocks` lists the modules below the root that the variants of `wrap` shard. `model.inputs(rows, seed)` makes the positional
arguments of a batch; dim 0 of each tensor is the batch.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    """Blocks one after the other. Each row of the input is a vector of `width` elements."""

    width = 8

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def inputs(self, rows: int, seed: int) -> tuple[Tensor, ...]:
        return (torch.randn(rows, self.width, generator=torch.Generator().manual_seed(seed)),)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """Linear, tanh, linear."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def even() -> Model:
    """Return a model in which every dim 0 is a multiple of 1, 2, 3 and 4."""
    model = Model([Block(12, 24, 12) for _ in range(3)])
    model.width = 12
    return model


def uneven() -> Model:
    """Return a model in which no dim 0 is a multiple of 2. Some parameters have fewer rows than there are ranks, or a single element."""
    model = Model([Block(5, 7, 3), Block(3, 5, 1), Block(1, 3, 1)])
    model.width = 5
    return model


def graded() -> Model:
    """Return three blocks of different sizes, the largest in the middle."""
    return Model([Block(8, hidden, 8) for hidden in (4, 12, 8)])


class Stem(Model):
    """Blocks between two linear layers of the root, so that the blocks' inputs need gradients."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.stem = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def stem() -> Stem:
    return Stem([Block(8, 12, 8) for _ in range(3)])


class Checkpointed(Stem):
    """A model that runs its blocks under activation checkpointing."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def checkpointed(reentrant: bool) -> Checkpointed:
    """Return a model with checkpoints around sharded blocks."""
    model = Checkpointed([Block(8, 12, 8) for _ in range(3)])
    model.reentrant = reentrant
    return model


class CheckpointedInside(nn.Module):
    """A block that checkpoints the module inside it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = Block(8, 12, 8)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def checkpointed_inside(reentrant: bool) -> Stem:
    """Return a model with sharded blocks around checkpoints."""
    return Stem([CheckpointedInside(reentrant) for _ in range(3)])


# --- Transformer -------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        # no bias: the gradient of the keys' bias is zero except for rounding
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, time, width = x.shape
        q, k, v = (t.view(rows, time, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, time, width))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = Block(width, 2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm(x))


class Transformer(Model):
    """A model from integer tokens to logits. Embedding and head are one parameter. By default, its blocks make it a transformer."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__([*blocks] or [TransformerBlock(6, 2) for _ in range(2)])
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def inputs(self, rows: int, seed: int) -> tuple[Tensor, ...]:
        return (torch.randint(11, (rows, 4), generator=torch.Generator().manual_seed(seed)),)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(super().forward(self.embed(tokens))))


# --- Structures in and out ---------------------------------------------------------------------------------


@dataclass
class Sides:
    left: Tensor
    others: dict[str, Any]
    label: str = "not a tensor"


Named = namedtuple("Named", ["first", "second"])


class Split(nn.Module):
    """A block that takes a tensor and keywords, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 6), nn.Linear(8, 7)

    def forward(self, x: Tensor, *, scale: float, shift: dict[str, Tensor]) -> tuple[Tensor, list[Any]]:
        return self.left(x) * scale, [self.right(x + shift["by"]), None, "right"]


class Cross(nn.Module):
    """A block that takes a dataclass, and returns a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 5), nn.Linear(7, 5)

    def forward(self, sides: Sides) -> Named:
        return Named(torch.tanh(self.left(sides.left)), (self.right(sides.others["right"]), sides.label))


class Join(nn.Module):
    """A block that takes a named tuple, and returns a dict with a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)

    def forward(self, named: Named) -> dict[str, Any]:
        first, (second, label) = named
        return {"sides": Sides(self.out(first), {"second": self.out(second)}, label), "constant": 1}


class Structured(Model):
    def __init__(self) -> None:
        super().__init__([Split(), Cross(), Join()])
        self.shift = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, x: Tensor) -> Any:
        split, cross, join = self.blocks
        left, (right, *_) = split(x, scale=0.5, shift={"by": self.shift})
        return join(cross(Sides(left, {"right": right})))


class Embedded(Model):
    """An embedding of 11 rows, and a block. The embedding's gradient needs no parameters."""

    def __init__(self) -> None:
        super().__init__([nn.Embedding(11, 6), Block(6, 5, 3)])

    inputs = Transformer.inputs


# --- Modules used oddly ------------------------------------------------------------------------------------


class Twice(Stem):
    """A model whose first block runs twice: before and after the others."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in [*self.blocks, self.blocks[0]]:
            x = x + block(x)
        return self.head(x)


def twice() -> Twice:
    return Twice([Block(8, 5, 8) for _ in range(2)])


class Wandering(Stem):
    """A model that runs its blocks in the order of `path`. The order may change from step to step."""

    path = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index in self.path:
            x = x + self.blocks[index](x)
        return self.head(x)


def wandering() -> Wandering:
    return Wandering([Block(8, hidden, 8) for hidden in (4, 12, 8)])


class Branches(nn.Module):
    """Two branches in one group. The forward runs the branches named in `used`."""

    used: Sequence[str] = ("left",)

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(8, 5, 8), Block(8, 7, 8)

    def forward(self, x: Tensor) -> Tensor:
        return sum(getattr(self, branch)(x) for branch in self.used)


class Branching(Model):
    """Blocks of two branches. The forward runs the branches named in `path`."""

    path: Sequence[str] = ("left",)

    def __init__(self) -> None:
        super().__init__([Branches() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.used = self.path
        return super().forward(x)


class Grouped(Model):
    """A model that runs its layers in the order of `path`. Each entry of `blocks` is a list of layers, which are one group."""

    groups: Sequence[tuple[int, ...]] = ((0, 1), (2,))
    path: tuple[int, ...] = (0, 1, 2)
    reentrant: bool | None = None  # None: no activation checkpointing

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList([Block(8, hidden, 8) for hidden in (5, 12, 7)])

    @property
    def blocks(self) -> list[Any]:
        return [[self.layers[number] for number in group] for group in self.groups]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number in self.path:
            layer = self.layers[number]
            out = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
            x = x + out
        return self.head(x)


class Chunked(Model):
    """A model whose forward ends with the norm. The training loop calls the head. Norm and head are one group."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Block(8, hidden, 8) for hidden in (5, 12)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 9)

    @property
    def blocks(self) -> list[Any]:
        return [*self.layers, [self.norm, self.head]]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


def frozen() -> Stem:
    """Return a model with a frozen block, and with one frozen parameter in each other block and in the root."""
    model = stem()
    model.blocks[1].requires_grad_(False)
    for linear in (model.blocks[0].up, model.blocks[2].down, model.stem):
        linear.bias.requires_grad_(False)
    return model


class Unused(Stem):
    """A model whose forward does not use one block, one layer of another block, and one parameter of the root."""

    def __init__(self) -> None:
        super().__init__([Block(8, 12, 8) for _ in range(3)])
        self.blocks[0].spare = nn.Linear(3, 3)
        self.spare = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.blocks[2](self.blocks[0](x)))


class Hollow(Block):
    """A block with a parameter that has no elements."""

    def __init__(self) -> None:
        super().__init__(8, 12, 8)
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


def hollow() -> Stem:
    return Stem([Hollow() for _ in range(2)])


class Convolution(Model):
    def __init__(self) -> None:
        super().__init__(
            [nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh()), nn.Sequential(nn.Conv2d(5, 4, 2), nn.Tanh())]
        )
        self.head = nn.Linear(4, 3)

    def inputs(self, rows: int, seed: int) -> tuple[Tensor, ...]:
        return (torch.randn(rows, 3, 5, 5, generator=torch.Generator().manual_seed(seed)),)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x).mean((2, 3)))


class Recurrent(Model):
    """A model of modules that also keep their parameters in a list."""

    def __init__(self) -> None:
        super().__init__([nn.LSTM(4, 5, batch_first=True), nn.GRU(5, 3, batch_first=True)])
        self.head = nn.Linear(3, 2)

    def inputs(self, rows: int, seed: int) -> tuple[Tensor, ...]:
        return (torch.randn(rows, 4, 4, generator=torch.Generator().manual_seed(seed)),)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)


class Normalized(Stem):
    """A model with buffers. The forward updates them with the statistics of the rank's own rows."""

    def __init__(self) -> None:
        super().__init__([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2)])


# --- Outputs changed in place ------------------------------------------------------------------------------


class Reshaping(nn.Module):
    """A block whose output is a view of another tensor."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Block(8, 12, 8)
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        return self.view(self.inner(x))


class InPlace(Stem):
    """A model that adds to each block's output, or to a view of it, in place. It runs all blocks `rounds` times."""

    rounds = 1
    reshape = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in [*self.blocks] * self.rounds:
            out = block(x)
            if self.reshape:
                out = out.view(-1, 8)
            out += 0.5
            x = x + torch.tanh(out)
        return self.head(x)


def in_place(view: Callable[[Tensor], Tensor] | None, reshape: bool = False, rounds: int = 1) -> InPlace:
    """Return a model whose blocks return a `view` of their result (None: the result itself). `reshape`: the root changes a view of it."""
    blocks = [Block(8, 12, 8) if view is None else Reshaping(view) for _ in range(2)]
    model = InPlace(blocks)
    model.reshape, model.rounds = reshape, rounds
    return model


ZOO: dict[str, Callable[[], Model]] = {
    "even": even,
    "uneven": uneven,
    "transformer": Transformer,
    "structured": Structured,
    "twice": twice,
    "frozen": frozen,
    "unused": Unused,
    "convolution": Convolution,
    "recurrent": Recurrent,
    "normalized": Normalized,
}
