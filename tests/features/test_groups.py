"""The parameters that travel together, and the dimension along which each is cut.

Lists of modules as one group, heads called chunk by chunk, tied and ignored parameters, placements other than `Shard(0)`. The oracles
are the same as in `test_parity`: FSDP2 in the same processes, bit for bit on one rank and on two, and the unsharded model.

`blocks` of a model in this file may also contain lists of modules: each entry is one call of `fully_shard`.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import hwfsdp
import models
from hwfsdp import record
from oracles import (
    BF16_FP32,
    Case,
    Promises,
    Tolerance,
    Training,
    accumulate,
    compare_traffic,
    fresh,
    objective,
    ours,
    reload,
    shard,
    train,
    walk,
    wrap,
)

PROMISES = Promises()


# --- A list of modules is one group ------------------------------------------------------------------------


def grouped_case(scenario: Callable[[Training], None], **attributes: Any) -> Case:
    def grouped() -> models.Grouped:
        model = models.Grouped()
        for name, value in attributes.items():
            setattr(model, name, value)
        return model

    return Case(grouped, scenario)


LISTS: dict[str, Case] = {
    "another path each step": grouped_case(
        functools.partial(walk, paths=[(0, 1, 2), (2, 0, 1), (0, 2), (1, 0, 2), (0, 1, 2)])
    ),
    "accumulated, stay whole": grouped_case(
        functools.partial(accumulate, pattern="nnb", stay_whole=True, say_last=True)
    ),
}


class Nested(models.Grouped):
    """A model in which one layer of a member is its own group, one member lies inside another, and the root takes the rest."""

    groups = ()

    @property
    def blocks(self) -> list[nn.Module | list[nn.Module]]:
        first, second, third = self.layers
        return [first.up, [first, second, second.down]]


LISTS["nested"] = Case(Nested, train)


PROMISES.trains(
    "a group of several modules trains as under FSDP2 and as without sharding",
    LISTS,
)


def one_owner() -> dict[str, list[str]]:
    training = Training(models.Grouped, ours)
    with record() as log:
        training.loss(0).backward()
    with record() as by_hand:
        training.model.layers[0].unshard()
        training.model.layers[1].unshard()
    owners = Counter(event.owner for event in log.collectives())
    of_both = [owner for owner in owners if "layers.0" in owner and "layers.1" in owner]
    found = sorted(owners.values()), len(of_both), len(by_hand.collectives())
    return {"owners": [] if found == ([2, 3, 3], 1, 1) else [str(found)]}  # the root stays whole


PROMISES.add(
    "members of a list are one group",
    {"with one owner, gathered once": one_owner},
)


def list_of_the_root(package: ModuleType, module: nn.Module, **options: Any) -> nn.Module:
    given = [module]
    assert shard(package, given, **options) is given  # type: ignore[arg-type]
    return module


PROMISES.trains(
    "a module listed twice counts once, and a list of one may be the root",
    {
        "listed twice": grouped_case(train, groups=((0, 1, 0), (2,))),
        "the root alone": Case(models.uneven, how="root", sharding=list_of_the_root),
    },
    not_fsdp2=["listed twice"],
)


# --- A head that is called chunk by chunk ------------------------------------------------------------------


def chunk_losses(training: Training, hidden: Tensor, chunks: int = 3) -> Iterable[Tensor]:
    """Yield the head's loss on each part of the rows. The losses add up to the loss of all rows."""
    for chunk in hidden.chunk(chunks):
        yield objective(training.model.head(chunk)) * (len(chunk) / len(hidden))


def chunk_by_chunk(training: Training, seed: int) -> None:
    """Run forward and backward of the head for each chunk, then the backward of the rest."""
    hidden = training.model(*training.batch(seed))
    leaf = hidden.detach().requires_grad_()
    for loss in chunk_losses(training, leaf):
        loss.backward()
    hidden.backward(leaf.grad)


def chunks_in_one_graph(training: Training, seed: int) -> None:
    torch.stack([*chunk_losses(training, training.model(*training.batch(seed)))]).sum().backward()


def head_on_a_constant(training: Training, seed: int) -> None:
    """Give the head an input without a gradient. The body has its own loss."""
    hidden = training.model(*training.batch(seed))
    for loss in chunk_losses(training, hidden.detach()):
        loss.backward()
    objective(hidden).backward()


def head_in_one_piece(training: Training, seed: int) -> None:
    objective(training.model.head(training.model(*training.batch(seed)))).backward()


def no_head(training: Training, seed: int) -> None:
    """Leave one member of the list out of the step."""
    objective(training.model(*training.batch(seed))).backward()


def in_turn(training: Training) -> None:
    """Take a step in each of these ways, one of them twice."""
    steps = (
        *(head_in_one_piece, chunk_by_chunk, chunks_in_one_graph),
        *(head_on_a_constant, head_in_one_piece, no_head),
    )
    for seed, step in enumerate(steps):
        step(training, seed)
        training.update()
    training.keep_params()


CHUNKED: dict[str, Case] = {
    "every way in turn": Case(models.Chunked, in_turn),
    "every way in turn, bf16": Case(models.Chunked, in_turn, options={"policy": BF16_FP32}),
}
CANCELLING = Tolerance(1e-4, 4e-6)  # without a head, the gradients of the norm's bias almost cancel
PROMISES.trains(
    "a head called by the trainer trains as under FSDP2 and as without sharding",
    CHUNKED,
    plain=CANCELLING,
)
PROMISES.add(
    "a head called by the trainer moves what it moves under FSDP2 in the first step and the third",
    {"chunk by chunk": functools.partial(compare_traffic, Case(models.Chunked), chunk_by_chunk, (0, 2))},
)


# --- Tied parameters ---------------------------------------------------------------------------------------


class Tied(models.Model):
    """Tokens in, logits out. Embedding and head share one parameter of 11 rows, and are members of one list."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.embed = nn.Embedding(11, 6)
        self.layer = models.Block(6, 5, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    @property
    def blocks(self) -> list[nn.Module | list[nn.Module]]:
        return [self.layer, [self.embed, self.norm, self.head]]

    inputs = models.Transformer.inputs

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(self.embed(tokens))))


TIED: dict[str, Case] = {"over a list": Case(Tied)}
PROMISES.trains("a tied parameter with uneven rows trains as under FSDP2 and as without sharding", TIED)


# --- Parameters left out -----------------------------------------------------------------------------------


def without_some(training: Training) -> None:
    """Leave biases of the layers and a weight of the root out of all groups."""
    model = fresh(training.build)
    ignored = {p for p in model.parameters() if p.shape == (12,)} | {model.stem.weight}
    values = {p: (p.data_ptr(), p.detach().clone()) for p in ignored}
    training.model = wrap(model, training.library, training.how, ignored_params=ignored)
    assert {p for p in model.parameters() if not isinstance(p, DTensor)} == ignored
    for param, (pointer, value) in values.items():
        assert type(param) is nn.Parameter and torch.equal(param, value) and param.data_ptr() == pointer
    training.steps()


IGNORED = {"nested": Case(models.stem, without_some, "nested")}
PROMISES.trains(
    "ignored parameters are neither touched nor reduced, as in FSDP2",
    IGNORED,
    not_plain=IGNORED,  # each rank has its own gradients of them
)


# --- Where a parameter is cut ------------------------------------------------------------------------------

Placement = Callable[[nn.Parameter], Any]


def by_the_last_dim(param: nn.Parameter) -> Shard:
    return Shard(-1)


def by_kernel_rows(param: nn.Parameter) -> Shard | None:
    return Shard(2) if param.ndim == 4 and param.shape[2] % 2 == 0 else None


def by_the_longest_dim(param: nn.Parameter) -> Shard:
    """Cut the weights of one linear layer by rows, and of the next by columns."""
    assert type(param) is nn.Parameter, "it is asked about whole parameters"
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))


def embedding_by_columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.shape[0] == 11 else None


def cut(build: Callable[[], models.Model], fn: Placement, scenario: Any = train, **options: Any) -> Case:
    return Case(build, scenario, options={"shard_placement_fn": fn, **options})


PLACEMENTS: dict[str, Case] = {
    "by the longest dim, bf16": cut(models.even, by_the_longest_dim, policy=BF16_FP32),
    "kernels, by rows of the kernel": cut(models.Convolution, by_kernel_rows),
    "tied, by columns": cut(Tied, embedding_by_columns),
    "state assigned": cut(models.even, by_the_longest_dim, functools.partial(reload, assign=True)),
}
PROMISES.trains("parameters cut along any dim train as under FSDP2 and as without sharding", PLACEMENTS)


def refuse_five_columns() -> dict[str, list[str]]:
    """Check that two ranks refuse to share five columns."""
    model = models.Stem([models.Block(8, 6, 8), models.Block(8, 5, 8)])
    before = list(model.parameters())
    with pytest.raises(hwfsdp.errors.UnsupportedError, match="blocks.1.down.weight"):
        ours(model, shard_placement_fn=by_the_last_dim)
    same = all(map(operator.is_, model.parameters(), before)) and type(model) is models.Stem
    return {"unchanged": [] if same else ["the model has changed"]}


PROMISES.add("another dim than the first is cut evenly or not at all", {"five columns": refuse_five_columns})


# --- Traffic -----------------------------------------------------------------------------------------------

MOVED: dict[str, Case] = {
    "tied over a list": TIED["over a list"],
    "tied, by columns": PLACEMENTS["tied, by columns"],
}
PROMISES.add(
    "a first step moves the same bytes in the same order as in FSDP2",
    {name: functools.partial(compare_traffic, case) for name, case in MOVED.items()},
)


test_a_promise_is_kept = PROMISES.test()
