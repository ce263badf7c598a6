"""The models for a learner's file: small ones, each with something that breaks a naive FSDP, and ways to train them.

Sizes are drawn by the seed so that the ranks cannot share rows evenly, and some ranks get none. Every model has units: the modules
that are sharded, inner ones first, the model itself last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hwfsdp.train.models.gpt import GPT, GPTConfig, next_byte_loss

Units = list[tuple[str, nn.Module]]
EVEN = 12  # a multiple of 1, 2, 3 and 4
ROWS = 2  # of a micro-batch of one rank
# units much larger than activations of 4 tokens
DEEP = GPTConfig(dim=36, layers=8, heads=2, seq_len=12, vocab=12)


class Scenario(NamedTuple):
    """A model and how it is trained.

    Attributes:
        model: a name in `MODELS`. steps: of the optimizer. micros: micro-batches in each of them.
        sync_last: gradients are reduced after the last micro-batch only. keep: parameters stay whole until then.
        reshard: `reshard_after_forward`, or None to leave it out. policy: keywords of `MixedPrecisionPolicy`.
        evaluated: before each step of the optimizer there is a forward without gradients.
        peeked: before the second step there is a forward that no backward follows, as in a look at the loss.
    """

    name: str
    model: str = "gpt"
    steps: int = 3
    micros: int = 1
    sync_last: bool = False
    keep: bool = False
    reshard: bool | None = None
    policy: tuple[tuple[str, Any], ...] = ()
    evaluated: bool = False
    peeked: bool = False

    def options(self, is_root: bool) -> dict[str, Any]:
        """Keywords of `fully_shard`. All outputs have the dtype of the whole model's output."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        options: dict[str, Any] = {} if self.reshard is None else {"reshard_after_forward": self.reshard}
        policy = {name: dtype for name, dtype in self.policy if is_root or name != "output_dtype"}
        return options | ({"mp_policy": MixedPrecisionPolicy(**policy)} if policy else {})


class Built(NamedTuple):
    """A model that is not sharded, the same on every rank, and its units."""

    model: nn.Module
    units: Units


# --- Models ------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Numbers in, blocks one after the other, numbers out."""

    def __init__(self, width: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.inlet, self.blocks, self.outlet = nn.Linear(3, width), nn.ModuleList(blocks), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = self.through(block, x)
        out: Tensor = self.outlet(x)
        return out

    def through(self, block: nn.Module, x: Tensor) -> Any:
        return block(x)


class Perceptron(nn.Module):
    """Two layers and a gain with a single row, which only one rank can have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width + 3), nn.Linear(width + 3, width)
        self.gain = nn.Parameter(torch.ones(1, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x))) * self.gain
        return x + out


class Adapted(nn.Module):
    """A frozen layer with a small trained layer behind it. The frozen layer's backward comes last, and needs its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.adapter = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.base(x))
        out: Tensor = x + self.adapter(x)
        return out


class Twice(Stack):
    """Every block runs twice; tanh keeps numbers small, so that roundings stay small, too."""

    def through(self, block: nn.Module, x: Tensor) -> Any:
        return torch.tanh(block(torch.tanh(block(x))))


class Recomputed(Stack):
    """Blocks keep nothing for their backward; it computes them again."""

    def through(self, block: nn.Module, x: Tensor) -> Any:
        with set_checkpoint_early_stop(False):  # to the end of the block, and its hooks
            return checkpoint(block, x, use_reentrant=False)


class Unused(Stack):
    """The second block is left out, and the others have a parameter that nothing reads."""

    def __init__(self, width: int, blocks: list[nn.Module]) -> None:
        super().__init__(width, blocks)
        for block in blocks:
            block.spare = nn.Parameter(torch.ones(4, 2))

    def through(self, block: nn.Module, x: Tensor) -> Any:
        return x if block is self.blocks[1] else block(x)


class Changing(Stack):
    """An evaluation leaves the second block out."""

    def through(self, block: nn.Module, x: Tensor) -> Any:
        return block(x) if block is not self.blocks[1] or torch.is_grad_enabled() else x


class Shortened(Stack):
    """A batch of one row leaves out all blocks but the last. The first one has a parameter that nothing reads."""

    def __init__(self, width: int, blocks: list[nn.Module]) -> None:
        super().__init__(width, blocks)
        blocks[0].spare = nn.Parameter(torch.ones(4, 2))

    def through(self, block: nn.Module, x: Tensor) -> Any:
        return block(x) if len(x) > 1 or block is self.blocks[-1] else x


class Nested(nn.Module):
    """A block with a layer inside, of one parameter, that is sharded by itself; it returns two tensors in a dict.

    In a backward, the gradients of both outputs come first, and the gradient of the frozen layer's input comes last.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.inner, self.own = nn.Linear(width, width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.base(x))
        return {"out": self.own(torch.tanh(self.inner(x))), "less": -x}


class Nesting(Stack):
    """Blocks of blocks."""

    def through(self, block: nn.Module, x: Tensor) -> Any:
        found = block(x)
        return torch.tanh(found["out"]) - found["less"]


class Loud(nn.Module):
    """Its gradients are near the largest number of fp16: the mean over the ranks fits, and their sum does not."""

    volume = 15_000.0

    def __init__(self) -> None:
        super().__init__()
        self.outlet = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outlet(torch.sigmoid(x))
        return out


class Gained(GPT):
    """A GPT with a gain of one row, which any two ranks cannot share. A tied one has it under two names, in one module."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(1, config.dim))
        if config.tied:
            self.scale = self.gain

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x.float())  # which a block that computes in bf16 has to cast
        x = self.norm(x) * self.gain
        if hasattr(self, "scale"):
            x = x * self.scale
        logits: Tensor = self.head(x)
        return logits


class Checkpointed(GPT):
    """A GPT that keeps less for its backward: its first block is recomputed from outside, the second one's perceptron within."""

    def __init__(self, config: GPTConfig, reentrant: bool) -> None:
        super().__init__(config)
        self.reentrant = reentrant
        self.blocks[1].down = Checkpoint(self.blocks[1].down, reentrant)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        for block in self.blocks[1:]:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Checkpoint(nn.Module):
    """A module of which nothing is kept for its backward."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def _gpt(
    draw: random.Random, kind: type[GPT] = GPT, tied: bool = False, vocabs: Sequence[int] = (13, 17, 19)
) -> Built:
    config = GPTConfig(draw.choice([10, 14]), 3, 2, draw.choice([5, 7, 11]), draw.choice(vocabs), tied)
    return _built(kind(config))


_gained = partial(_gpt, kind=Gained)


def _stack(
    draw: random.Random,
    kind: type[Stack] = Stack,
    block: Callable[[int], nn.Module] = Perceptron,
    widths: Sequence[int] = (5, 7),
    blocks: int = 3,
) -> Built:
    width = draw.choice(widths)
    return _built(kind(width, [block(width) for _ in range(blocks)]))


def _frozen(draw: random.Random, widths: Sequence[int] = (5, 7)) -> Built:
    """The first unit's backward never comes; the third one's brings the gradient of an input alone."""
    built = _stack(draw, block=Adapted, widths=widths, blocks=4)
    model: Any = built.model
    for frozen in (model.inlet, model.blocks[0], model.blocks[2]):
        frozen.requires_grad_(False)
    return built


def _frozen_inlet(draw: random.Random) -> Built:
    """The root's backward is over before the blocks'."""
    built = _stack(draw)
    model: Any = built.model
    model.inlet.requires_grad_(False)
    return built


def _nested(draw: random.Random, widths: Sequence[int] = (5, 7)) -> Built:
    return _built(_stack(draw, Nesting, Nested, widths).model, "inner")


def _loud(draw: random.Random) -> Built:
    model = Loud()
    return Built(model, [("model", model)])


def _gained_frozen(draw: random.Random) -> Built:
    """A parameter of a block is frozen, and all of another, and the embedding."""
    built = _gained(draw)
    model: Any = built.model
    for frozen in (model.blocks[0].up.weight, *model.blocks[1].parameters(), model.tokens.weight):
        frozen.requires_grad_(False)
    return built


def _gained_nested(draw: random.Random) -> Built:
    """The attention of each block is a unit inside its block. So is the head, which has one parameter."""
    model: Any = _gained(draw).model
    *inner, root = _built(model, "attention").units
    return Built(model, [*inner, ("head", model.head), root])


def _even(draw: random.Random, reentrant: bool | None = None) -> Built:
    """Rows that 2, 3 and 4 ranks divide; `reentrant`: how parts are recomputed, if any are."""
    config = GPTConfig(EVEN * draw.choice([1, 2]), 3, 2, EVEN, EVEN * draw.choice([1, 2]))
    return _side_by_side(GPT(config) if reentrant is None else Checkpointed(config, reentrant))


def _side_by_side(model: GPT) -> Built:
    """Units side by side; the model itself is none."""
    parts = [(name, getattr(model, name)) for name in ("tokens", "positions", "norm", "head")]
    return Built(model, [*parts[:2], *_built(model).units[:-1], *parts[2:]])


def _built(model: nn.Module, inner: str = "") -> Built:
    """Its units are its blocks, and itself; before each block, the module with the name `inner` in it."""
    found: Units = []
    for name, block in model.get_submodule("blocks").named_children():
        found += [(f"blocks.{name}.{inner}", block.get_submodule(inner))] if inner else []
        found.append((f"blocks.{name}", block))
    return Built(model, [*found, ("model", model)])


WIDE = (37, 41)  # units much larger than activations of two rows
MODELS: dict[str, Callable[[random.Random], Built]] = {
    "gpt": _gpt,
    "deep": lambda draw: _built(GPT(DEEP)),
    "tied": partial(_gained, tied=True),
    "frozen": _frozen,
    "frozen inlet": _frozen_inlet,
    "stack": _stack,
    "twice": partial(_stack, kind=Twice),
    "unused": partial(_stack, kind=Unused),
    "changing": partial(_stack, kind=Changing),
    "shortened": partial(_stack, kind=Shortened),
    "recomputed": partial(_stack, kind=Recomputed),
    "nested": _nested,
    "loud": _loud,
    "gained": _gained,
    "gained and tied": partial(_gained, tied=True),
    "gained and frozen": _gained_frozen,
    "gained and nested": _gained_nested,
    "even": _even,
    "even and recomputed": partial(_even, reentrant=False),
    "even and recomputed, reentrant": partial(_even, reentrant=True),
    "even and deep": lambda draw: _side_by_side(GPT(DEEP)),
    "wide and tied": partial(_gained, tied=True, vocabs=(301, 307)),  # the root is the largest unit
    "wide and frozen": partial(_frozen, widths=WIDE),
    "wide and unused": partial(_stack, kind=Unused, widths=WIDE),
    "wide and twice": partial(_stack, kind=Twice, widths=WIDE),
    "wide and recomputed": partial(_stack, kind=Recomputed, widths=WIDE),
    "wide and nested": partial(_nested, widths=WIDE),
}


def build(scenario: Scenario, seed: int) -> Built:
    """The model of a scenario; the same values on every rank."""
    torch.manual_seed(seed)
    built = MODELS[scenario.model](random.Random(f"{scenario.model} {seed}"))
    with torch.no_grad():
        for param in built.model.parameters():
            param.add_(0.2 * torch.randn_like(param))  # norms and gains are not all ones
    return built


def batch_of(model: nn.Module, seed: int, rank: int, number: int) -> Tensor:
    """The input of one micro-batch of one rank: tokens [2, T] of a GPT, or numbers [2, 3]; each third of `Shortened` has one row."""
    draw = torch.Generator().manual_seed(seed * 1009 + rank * 101 + number)
    if isinstance(model, GPT):
        return torch.randint(0, model.config.vocab, (ROWS, model.config.seq_len), generator=draw)
    rows = 1 if isinstance(model, Shortened) and number % 3 == 2 else ROWS
    return torch.randn(rows, 3, generator=draw)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """One forward."""
    output: Tensor = model(batch).float()
    if isinstance(model, Loud):
        return model.volume * output.sum()
    return next_byte_loss(output, batch) if isinstance(model, GPT) else output.square().mean()
