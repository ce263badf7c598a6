"""The models for a student's file: small ones, each with something that breaks a naive FSDP, and ways to train them.

The seed draws sizes so that the ranks cannot share rows evenly, and some ranks get none. Every model has units: the modules that
are sharded, inner ones first and the model itself last. "wide" models are for counting memory: six units, much larger than the
activations of two rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hwfsdp.train.models.gpt import GPT, GPTConfig, next_byte_loss

Units = list[tuple[str, nn.Module]]
EVEN = 12  # a multiple of 1, 2, 3 and 4
ROWS = 2  # rows of a micro-batch of one rank
MICROS = 4  # micro-batches of a step that has several; no test runs on as many ranks
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Scenario(NamedTuple):
    """A model and how it is trained.

    Attributes:
        model: a name in `MODELS`. steps: of the optimizer. micros: micro-batches in each of them.
        sync_last: gradients are reduced only after the last micro-batch. keep: parameters stay whole until then.
        reshard: `reshard_after_forward`, or None to leave it out. of_root: True if it is given to the root alone.
        one_off: True if the first unit does not reduce. policy: keywords of `MixedPrecisionPolicy`.
        evaluated: each step of the optimizer comes after a forward without gradients.
        peeked: before the second step there is a forward without a backward, as when only the loss is needed.
        about: what is unusual about this model; a sentence for a finding.
    """

    name: str
    model: str
    steps: int = 2
    micros: int = 1
    sync_last: bool = False
    keep: bool = False
    reshard: bool | None = None
    of_root: bool = False
    one_off: bool = False
    policy: tuple[tuple[str, Any], ...] = ()
    evaluated: bool = False
    peeked: bool = False
    about: str = ""

    def options(self, is_root: bool) -> dict[str, Any]:
        """Return keywords of `fully_shard`. All outputs have the dtype of the whole model's output."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        is_given = self.reshard is not None and (is_root or not self.of_root)
        options: dict[str, Any] = {"reshard_after_forward": self.reshard} if is_given else {}
        policy = {name: dtype for name, dtype in self.policy if is_root or name != "output_dtype"}
        return options | ({"mp_policy": MixedPrecisionPolicy(**policy)} if policy else {})

    def __str__(self) -> str:
        """The name, as it stands in the name of a test: "a-GPT"."""
        return self.name.replace(",", "").replace(" ", "-")


class Built(NamedTuple):
    """An unsharded model, the same on every rank, and its units."""

    model: nn.Module
    units: Units


# --- Models ------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Blocks in sequence between two linear layers: 3 numbers in, 2 numbers out.

    Attributes:
        spares: number of blocks with a parameter that nothing reads.
    """

    spares = 0

    def __init__(self, width: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.inlet, self.blocks, self.outlet = nn.Linear(3, width), nn.ModuleList(blocks), nn.Linear(width, 2)
        for block in blocks[: self.spares]:
            block.spare = nn.Parameter(torch.ones(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = self.through(block, x)
        out: Tensor = self.outlet(x)
        return out

    def through(self, block: nn.Module, x: Tensor) -> Any:
        return block(x)


class Perceptron(nn.Module):
    """Two layers, and a gain with a single row, which only one rank can hold."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width + 3), nn.Linear(width + 3, width)
        self.gain = nn.Parameter(torch.ones(1, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x))) * self.gain
        return x + out


class Adapted(nn.Module):
    """A frozen layer, and a small trained layer after it. The frozen layer's backward comes last, and needs its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.adapter = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.base(x))
        out: Tensor = x + self.adapter(x)
        return out


class Twice(Stack):
    """Every block runs twice. tanh keeps numbers small, so that rounding errors stay small too."""

    def through(self, block: nn.Module, x: Tensor) -> Any:
        return torch.tanh(block(torch.tanh(block(x))))


class Recomputed(Stack):
    """Blocks keep no activations for their backward, which computes them again."""

    def through(self, block: nn.Module, x: Tensor) -> Any:
        # an oracle: the same numbers, but without torch's compiler, which a checkpoint imports
        if not dist.is_initialized():
            return block(x)
        with set_checkpoint_early_stop(False):  # recompute to the end of the block, with its hooks
            return checkpoint(block, x, use_reentrant=False)


class Tied(Stack):
    """The first and the last layer have the same weight."""

    def __init__(self, width: int, blocks: list[nn.Module]) -> None:
        super().__init__(width, blocks)
        self.early, self.late = nn.Linear(width, width), nn.Linear(width, width)
        self.late.weight = self.early.weight

    def through(self, block: nn.Module, x: Tensor) -> Any:
        if block is self.blocks[0]:
            x = torch.tanh(self.early(x))
        x = block(x)
        return self.late(x) if block is self.blocks[-1] else x


class Unused(Stack):
    """The second block is skipped, and each block has a parameter that nothing reads."""

    spares = 9

    def through(self, block: nn.Module, x: Tensor) -> Any:
        return x if block is self.blocks[1] else block(x)


class Changing(Stack):
    """A forward without gradients skips the second block."""

    def through(self, block: nn.Module, x: Tensor) -> Any:
        return block(x) if block is not self.blocks[1] or torch.is_grad_enabled() else x


class Shortened(Stack):
    """A batch of one row skips all blocks except the last, and of this one the parameter `rare`.

    The first block has a parameter that nothing reads.
    """

    spares = 1

    def __init__(self, width: int, blocks: list[nn.Module]) -> None:
        super().__init__(width, blocks)
        blocks[-1].rare = nn.Parameter(torch.ones(4, width))

    def through(self, block: nn.Module, x: Tensor) -> Any:
        return block(x) if len(x) > 1 or block is self.blocks[-1] else x


class Rare(Perceptron):
    """Two layers, and perhaps a parameter that only a batch of several rows needs."""

    def forward(self, x: Tensor) -> Tensor:
        out, rare = super().forward(x), getattr(self, "rare", None)
        return out + rare.sum(0) if len(x) > 1 and rare is not None else out


class Nested(nn.Module):
    """A block with an inner layer of one parameter, which is sharded by itself. It returns two tensors in a dict.

    In backward, the gradients of both outputs come first, and the gradient of the frozen layer's input comes last.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.inner, self.own = nn.Linear(width, width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.base(x))
        return {"out": self.own(torch.tanh(self.inner(x))), "less": -x}


class Nesting(Stack):
    """A stack of nested blocks, which get their inputs by keyword."""

    def through(self, block: nn.Module, x: Tensor) -> Any:
        found = block(x=x.float())  # a block that computes in bf16 has to cast it
        return torch.tanh(found["out"]) - found["less"]


class Loud(nn.Module):
    """A model with gradients near the largest number of fp16: the mean over the ranks fits, and the sum does not."""

    volume = 15_000.0

    def __init__(self) -> None:
        super().__init__()
        self.outlet = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outlet(torch.sigmoid(x))
        return out


class Mixing(nn.Module):
    """A layer that casts its input itself, and adds the input as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x.add(self.layer(x.to(self.layer.weight.dtype)))


class Noting(nn.Module):
    """A module that notes the dtypes that it gets in `seen`. Its inputs and outputs lie in a dict and in a tuple.

    Args:
        width: None: the module has no parameters.
    """

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width) if width else None
        self.seen: list[str] = []

    def forward(self, given: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
        x, (more, mask, number) = given["x"], given["rest"]
        self.seen.append(", ".join(str(t.dtype).removeprefix("torch.") for t in (x, more, mask, number)))
        x = torch.where(mask, x, more) * x + number
        x = torch.tanh(x if self.layer is None else self.layer(x.to(self.layer.weight.dtype)))
        return {"x": x}, more


class Edges(Stack):
    """Blocks get and return nested tensors. The second block has no parameters, and the third one is recomputed."""

    def __init__(self, width: int) -> None:
        super().__init__(width, [Noting(width), Noting(), Noting(width)])

    def forward(self, x: Tensor) -> Any:
        return {"out": (super().forward(x), x.sum()), "rows": torch.tensor(len(x))}

    def through(self, block: nn.Module, x: Tensor) -> Any:
        given = {"x": x.float(), "rest": (x.float(), x > 0, torch.tensor(1))}
        if block is not self.blocks[2]:
            found, more = block(given)
        else:
            with set_checkpoint_early_stop(False):
                found, more = checkpoint(block, given, use_reentrant=False)
        return (found["x"] + more).to(self.outlet.weight.dtype)


class Gained(GPT):
    """A GPT with a gain of one row, which two ranks cannot share. A tied one has it under two names in one module.

    With `by_name`, blocks get their input as a keyword argument.
    """

    def __init__(self, config: GPTConfig, by_name: bool = False) -> None:
        super().__init__(config)
        self.by_name = by_name
        self.gain = nn.Parameter(torch.ones(1, config.dim))
        if config.tied:
            self.scale = self.gain

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = x.float()  # a block that computes in bf16 has to cast it
            x = block(x=x) if self.by_name else block(x)
        x = self.norm(x) * self.gain
        if hasattr(self, "scale"):
            x = x * self.scale
        logits: Tensor = self.head(x)
        return logits


class Checkpointed(GPT):
    """A GPT with checkpointing: its first block is recomputed from outside, and in the second block the down layer."""

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
    """A module that keeps no activations for its backward."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


# --- How they are built ------------------------------------------------------------------------------------


def _gained(draw: random.Random, tied: bool = False, layers: int = 3, by_name: bool = False) -> Built:
    dim, seq_len, vocab = (draw.choice(sizes) for sizes in ([10, 14], [5, 7, 11], [13, 17, 19]))
    return _built(Gained(GPTConfig(dim, layers, 2, seq_len, vocab, tied), by_name))


def _stack(
    draw: random.Random,
    kind: type[Stack] = Stack,
    block: Callable[[int], nn.Module] = Perceptron,
    widths: Sequence[int] = (5, 7),
    blocks: int = 3,
) -> Built:
    width = draw.choice(widths)
    return _built(kind(width, [block(width) for _ in range(blocks)]))


def _frozen(draw: random.Random, widths: Sequence[int] = (5, 7), blocks: int = 4) -> Built:
    """The first unit has no backward; the third unit's backward gives only the gradient of an input."""
    built = _stack(draw, block=Adapted, widths=widths, blocks=blocks)
    model: Any = built.model
    for frozen in (model.inlet, model.blocks[0], model.blocks[2]):
        frozen.requires_grad_(False)
    return built


def _twice(draw: random.Random, widths: Sequence[int] = (5, 7), blocks: int = 3) -> Built:
    """The second block has a frozen first layer: its backward comes last in each of the block's two backwards."""
    built = _stack(draw, Twice, widths=widths, blocks=blocks)
    built.model.get_submodule("blocks.1.up").requires_grad_(False)
    return built


def _frozen_inlet(draw: random.Random) -> Built:
    """The root's backward finishes before the blocks' backward."""
    built = _stack(draw)
    built.model.get_submodule("inlet").requires_grad_(False)
    return built


def _nested(draw: random.Random, widths: Sequence[int] = (5, 7), blocks: int = 3) -> Built:
    return _built(_stack(draw, Nesting, Nested, widths, blocks).model, "inner")


def _alone(draw: random.Random, kind: Callable[[], nn.Module]) -> Built:
    model = kind()
    return Built(model, [("model", model)])


def _gained_frozen(draw: random.Random) -> Built:
    """One block has a frozen parameter. Another block and the embedding, which is a unit, are frozen as a whole."""
    built = _gained(draw)
    model: Any = built.model
    for frozen in (model.blocks[0].up.weight, *model.blocks[1].parameters(), model.tokens.weight):
        frozen.requires_grad_(False)
    return Built(model, [("tokens", model.tokens), *built.units])


def _gained_nested(draw: random.Random) -> Built:
    """The attention of each block is a unit inside its block. In the last block, all parts are units, so nothing is left for the block.

    The head, which has one parameter, is a unit too.
    """
    model: Any = _gained(draw).model
    *inner, last, root = _built(model, "attention").units
    parts = [(f"{last[0]}.{name}", part) for name, part in last[1].named_children() if name != "attention"]
    return Built(model, [*inner, *parts, last, ("head", model.head), root])


def _even(draw: random.Random, reentrant: bool | None = None) -> Built:
    """Build a model with rows that 2, 3 and 4 ranks divide; `reentrant`: the mode of checkpointing; None: no checkpointing."""
    config = GPTConfig(EVEN * draw.choice([1, 2]), 2, 2, EVEN, EVEN * draw.choice([1, 2]))
    return _side_by_side(GPT(config) if reentrant is None else Checkpointed(config, reentrant))


def _even_and_deep(draw: random.Random) -> Built:
    """Build a wide stack of six blocks, with rows that 16 ranks divide. Only the blocks are units."""
    width = draw.choice([96, 144])
    layers = [
        (nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)) for _ in range(6)
    ]
    built = _built(Stack(width, [nn.Sequential(up, nn.Tanh(), down) for up, down in layers]))
    return Built(built.model, built.units[:-1])


def _side_by_side(model: GPT) -> Built:
    """Make units side by side; the model itself is not a unit."""
    parts = [(name, getattr(model, name)) for name in ("tokens", "positions", "norm", "head")]
    return Built(model, [*parts[:2], *_built(model).units[:-1], *parts[2:]])


def _built(model: nn.Module, inner: str = "") -> Built:
    """Make units of the blocks and of the model itself. With `inner`, the module of this name in a block is a unit before it."""
    found: Units = []
    for name, block in model.get_submodule("blocks").named_children():
        found += [(f"blocks.{name}.{inner}", block.get_submodule(inner))] if inner else []
        found.append((f"blocks.{name}", block))
    return Built(model, [*found, ("model", model)])


MODELS: dict[str, Callable[..., Built]] = {
    "gpt of two layers": partial(_gained, layers=2),
    "stack": partial(_stack, blocks=2),
    "tied": partial(_gained, tied=True),
    "frozen": _frozen,
    "frozen inlet": _frozen_inlet,
    "twice": _twice,
    "unused": partial(_stack, kind=Unused),
    "changing": partial(_stack, kind=Changing),
    "shortened": partial(_stack, kind=Shortened, block=Rare),
    "recomputed": partial(_stack, kind=Recomputed),
    "nested": _nested,
    "edges": lambda draw: _built(Edges(draw.choice([5, 7]))),
    "loud": partial(_alone, kind=Loud),
    "mixing": partial(_alone, kind=Mixing),
    "gained": _gained,
    "gained and called by name": partial(_gained, by_name=True),
    "gained and frozen": _gained_frozen,
    "gained and nested": _gained_nested,
    "even": _even,
    "even and recomputed": partial(_even, reentrant=False),
    "even and recomputed, reentrant": partial(_even, reentrant=True),
    "even and deep": _even_and_deep,
}
WIDENED = {
    name: MODELS[name] for name in ("stack", "frozen", "twice", "unused", "shortened", "recomputed", "nested")
}
WIDENED["tied"] = partial(_stack, kind=Tied)  # the root is as large as a block


def _wide(draw: random.Random, name: str) -> Built:
    """Build a wide model without biases and gains, which only cost time."""
    built = WIDENED[name](draw, widths=(61, 93), blocks=6)
    for module in built.model.modules():
        if isinstance(module, nn.Linear):
            module.register_parameter("bias", None)
        elif isinstance(module, Perceptron):
            del module.gain
            module.gain = 1.0  # type: ignore[assignment]
    return built


MODELS |= {f"wide and {name}": partial(_wide, name=name) for name in WIDENED}


def build(scenario: Scenario, seed: int) -> Built:
    """Build the model of a scenario, with the same values on every rank."""
    # not `torch.manual_seed`, which also seeds GPUs that may come, and takes longer than to build the model
    torch.default_generator.manual_seed(seed)
    built = MODELS[scenario.model](random.Random(f"{scenario.model} {seed}"))
    with torch.no_grad():
        for param in built.model.parameters():
            param.add_(0.2 * torch.randn_like(param))  # so that norms and gains are not all ones
    return built


def batch_of(model: nn.Module, seed: int, rank: int, number: int) -> Tensor:
    """Return the input of a micro-batch of a rank: GPT tokens [2, T], or numbers [2, 3].

    The last micro-batch of `Shortened` has one row.
    """
    draw = torch.Generator().manual_seed(seed * 1009 + rank * 101 + number)
    if isinstance(model, GPT):
        return torch.randint(0, model.config.vocab, (ROWS, model.config.seq_len), generator=draw)
    rows = 1 if isinstance(model, Shortened) and number % MICROS == MICROS - 1 else ROWS
    return torch.randn(rows, 3, generator=draw)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Run one forward, and return its loss."""
    found = model(batch)
    output: Tensor = (found["out"][0] if isinstance(model, Edges) else found).float()
    if isinstance(model, Loud):
        return model.volume * output.sum()
    return next_byte_loss(output, batch) if isinstance(model, GPT) else output.square().mean()


# --- What several exercises train --------------------------------------------------------------------------

PLAIN = Scenario("a GPT", "gpt of two layers", steps=3)  # one of its parameters has a single row
_ABOUT = {  # name, model → what is unusual about it
    ("tied weights", "tied"): "One parameter is registered in two places of a unit.",
    (
        "frozen layers",
        "frozen",
    ): "Some parameters are frozen; in some units all of them, in others a frozen layer comes before a trained one.",
    ("a layer that runs twice", "twice"): "A unit runs twice in one forward.",
    ("unused parameters", "unused"): "Some parameters, and a whole unit, take no part in the loss.",
    (
        "recomputed layers",
        "recomputed",
    ): "Each block runs its forward a second time, in the middle of the backward.",
    (
        "nested units",
        "nested",
    ): "Units lie inside units; they get a keyword argument, and return tensors in a dict.",
}
BREAKING = tuple(Scenario(name, model, about=about) for (name, model), about in _ABOUT.items())
TIED, FROZEN, TWICE, UNUSED, RECOMPUTED, NESTED = BREAKING
