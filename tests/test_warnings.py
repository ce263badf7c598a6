"""Mistakes that run without an error, but train nothing, or something else: each is warned of once, and only then.

A case is a function that runs on a rank and makes a mistake, or something close to one; it returns the messages of the
warnings that came.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import models
from hwfsdp import launch
from oracles import fresh, objective, ours, rank_rows, theirs, wrap

Messages = list[str]


@contextmanager
def caught() -> Iterator[Messages]:
    """The messages of all UserWarnings of the block, once it has ended."""
    messages: Messages = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in found if issubclass(warning.category, UserWarning)]


def run(model: models.Model, seed: int = 0) -> None:
    """Forward and backward."""
    objective(model(*map(rank_rows, model.inputs(4, seed)))).backward()


def steps_of(model: models.Model, *optimizers: Optimizer, number: int = 2) -> Messages:
    """Training steps with all of these optimizers."""
    with caught() as messages:
        for seed in range(number):
            run(model, seed)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return messages


# --- Optimizers built before fully_shard -------------------------------------------------------------------


def built_before() -> Messages:
    model = models.stem()
    optimizer = SGD(model.parameters(), lr=0.1)
    return steps_of(wrap(model, ours), optimizer, number=3)


def two_built_before() -> Messages:
    model = models.stem()
    optimizers = [SGD(model.blocks.parameters(), lr=0.1), AdamW(model.head.parameters())]
    return steps_of(wrap(model, ours), *optimizers)


def built_between() -> Messages:
    """The blocks were sharded, the root was not."""
    model = models.stem()
    for block in model.blocks:
        ours(block)
    optimizer = SGD(model.parameters(), lr=0.1)
    return steps_of(ours(model), optimizer)


def stepped_before() -> Messages:
    """The optimizer has trained the plain model, while another one was sharded."""
    wrap(models.stem(), ours)
    model = models.stem()
    optimizer = SGD(model.parameters(), lr=0.1)
    first = steps_of(model, optimizer, number=1)
    assert first == []
    return steps_of(wrap(model, ours), optimizer)


STALE: dict[str, tuple[Callable[[], Messages], list[tuple[str, ...]]]] = {
    "before": (built_before, [("SGD", "up.weight")]),
    "before, two of them": (two_built_before, [("SGD", "up.weight"), ("AdamW", "weight")]),
    "between two calls": (built_between, [("SGD", "'stem.weight'")]),
    "before, and used": (stepped_before, [("SGD", "up.weight")]),
}


def built_after() -> Messages:
    model = wrap(models.stem(), ours)
    return steps_of(model, SGD(model.parameters(), lr=0.1), AdamW(model.parameters()))


def over_ignored_parameters() -> Messages:
    model = models.stem()
    ignored = [*model.head.parameters()]
    optimizer = SGD(ignored, lr=0.1)
    return steps_of(wrap(model, ours, ignored_params={*ignored}), optimizer)


def of_a_model_sharded_by_torch() -> Messages:
    """What torch does with its own models is torch's business."""
    wrap(models.stem(), ours)
    model = models.stem()
    optimizer = SGD(model.parameters(), lr=0.1)
    return steps_of(wrap(model, theirs), optimizer)


def after_loading_a_state() -> Messages:
    """Assigned parameters are other objects, but an optimizer over them is up to date."""
    model, other = wrap(models.stem(), ours), wrap(models.stem(), ours)
    model.load_state_dict(other.state_dict(), assign=True)
    return steps_of(model, SGD(model.parameters(), lr=0.1))


FINE = (built_after, over_ignored_parameters, of_a_model_sharded_by_torch, after_loading_a_state)


# --- Gradients that were never synchronized ----------------------------------------------------------------


def sharded(**options: Any) -> tuple[models.Stem, Optimizer]:
    model = wrap(models.stem(), ours, **options)
    return model, SGD(model.parameters(), lr=0.1)


def step_after(prepare: Callable[[models.Stem], Any], **options: Any) -> Messages:
    """The messages of an optimizer step; nothing may be said before it."""
    model, optimizer = sharded(**options)
    with caught() as early:
        prepare(model)
    assert early == []
    with caught() as messages:
        optimizer.step()
    return messages


def one_block(model: models.Stem) -> None:
    model.blocks[1].set_requires_gradient_sync(False, recurse=False)
    run(model)


def all_groups(model: models.Stem) -> None:
    model.set_requires_gradient_sync(False)
    for seed in range(3):
        run(model, seed)


def synchronized_later(model: models.Stem) -> None:
    for sync in (False, False, True):
        model.set_requires_gradient_sync(sync)
        run(model)


def no_backward(model: models.Stem) -> None:
    model.set_requires_gradient_sync(False)
    with torch.no_grad():
        model(*model.inputs(2, 0))


def frozen_block(model: models.Stem) -> None:
    for param in model.blocks[1].parameters():
        param.requires_grad_(False)
    one_block(model)


LOST: dict[str, tuple[Callable[[models.Stem], None], str]] = {
    "of one block": (one_block, "'blocks.1'"),
    "of all groups": (all_groups, "parameter group '"),
}
KEPT = (synchronized_later, no_backward, frozen_block)
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def of_another_optimizer() -> list[Messages]:
    """Only an optimizer that has the group's parameters steps without their gradients."""
    model, optimizer = sharded()
    other = SGD(models.stem().parameters(), lr=0.1)
    rest = SGD(model.blocks[0].parameters(), lr=0.1)
    one_block(model)
    found = []
    for each in (other, rest, optimizer):
        with caught() as messages:
            each.step()
        found.append(messages)
    return found


def a_step_later() -> list[Messages]:
    """A step without the gradients, then one with them."""
    model, optimizer = sharded()
    found = []
    for sync in (False, True, True):
        model.set_requires_gradient_sync(sync)
        run(model)
        with caught() as messages:
            optimizer.step()
            optimizer.zero_grad()
        found.append(messages)
    return found


# --- Ranks whose models differ -----------------------------------------------------------------------------


def rename_a_layer(model: models.Stem) -> None:
    block = model.blocks[1]
    layers = block._modules
    block._modules = {"up": layers["up"], "lower": layers["down"]}
    block.forward = lambda x: block.lower(torch.tanh(block.up(x)))


class Wrapped(nn.Module):
    """A module with one inside, which has all its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.Block(8, 12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def alike() -> models.Stem:
    return wrap(fresh(models.stem), ours)


def renamed() -> models.Stem:
    model = fresh(models.stem)
    if dist.get_rank():
        rename_a_layer(model)
    return wrap(model, ours)


def sharded_one_level_deeper() -> models.Stem:
    """The same parameters in the same groups; only the module that is given to `fully_shard` differs."""
    torch.manual_seed(0)
    model = models.Stem([Wrapped(), Wrapped()])
    first, second = model.blocks
    ours(first.inner if dist.get_rank() else first)
    ours(second)
    return ours(model)


DIFFERENT: dict[str, tuple[Callable[[], models.Stem], tuple[str, ...]]] = {
    "a layer has another name": (renamed, ("rank 1", "blocks.1.down.weight", "blocks.1.lower.weight")),
    "sharded one level deeper": (sharded_one_level_deeper, ("rank 1", "'blocks.0'", "'blocks.0.inner'")),
}


def first_forward(build: Callable[[], models.Stem]) -> tuple[Messages, Messages, list[str]]:
    """The messages of wrapping and a forward, those of two steps after that, and parameters without a gradient."""
    with caught() as first:
        model = build()
        run(model)
    with caught() as later:
        for seed in range(2):
            run(model, seed)
    return first, later, [name for name, param in model.named_parameters() if param.grad is None]


# --- All of them -------------------------------------------------------------------------------------------


def where_it_points() -> list[str]:
    model = models.stem()
    optimizer = SGD(model.parameters(), lr=0.1)
    run(wrap(model, ours))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer.step()
    return [warning.filename for warning in found]


def a_number_that_looks_like_a_flag() -> dict[str, Messages]:
    found = {}
    for value in (1, 2, True, False, None):
        with caught() as found[repr(value)]:
            ours(nn.Linear(4, 4), reshard_after_forward=value)
    return found


def every_structure() -> dict[str, Any]:
    cases = {"alike": alike, **{name: build for name, (build, _) in DIFFERENT.items()}}
    return {name: first_forward(build) for name, build in cases.items()}


def everything() -> dict[str, Any]:
    return {
        **{name: case() for name, (case, _) in STALE.items()},
        **{case.__name__: case() for case in FINE},
        "where it points": where_it_points(),
        **{name: step_after(case) for name, (case, _) in LOST.items()},
        "of one block, bf16": step_after(one_block, policy=BF16),
        **{case.__name__: step_after(case) for case in KEPT},
        "another optimizer": of_another_optimizer(),
        "a step later": a_step_later(),
        "1 for True": a_number_that_looks_like_a_flag(),
        **every_structure(),
    }


@functools.cache
def found(level: str) -> list[dict[str, Any]]:
    """On each of two ranks; under DETAIL debugging, where models are compared, those only."""
    with mock.patch.dict(os.environ, TORCH_DISTRIBUTED_DEBUG=level):
        return launch(every_structure if level == "DETAIL" else everything, 2, timeout=100)


def of(case: str, level: str = "INFO") -> list[Any]:
    return [rank[case] for rank in found(level)]


@pytest.mark.parametrize("case", STALE)
def test_an_optimizer_over_parameters_that_are_no_longer_the_models_warns_once(case):
    for messages in of(case):
        for message, words in zip(messages, STALE[case][1], strict=True):
            missing = [word for word in (*words, "no longer", "fully_shard") if word not in message]
            assert missing == [], message


@pytest.mark.parametrize("case", FINE)
def test_an_optimizer_over_parameters_of_its_model_does_not_warn(case):
    assert of(case.__name__) == [[], []]


def test_the_warning_points_at_the_step():
    assert of("where it points") == [[__file__]] * 2


@pytest.mark.parametrize("case", [*LOST, "of one block, bf16"])
def test_a_step_without_gradients_that_were_never_synchronized_warns_once_and_names_the_group(case):
    for [message] in of(case):
        assert LOST[case.partition(",")[0]][1] in message and "set_requires_gradient_sync" in message, message


@pytest.mark.parametrize("case", KEPT)
def test_a_step_that_loses_no_gradient_does_not_warn(case):
    assert of(case.__name__) == [[], []]


def test_only_the_optimizer_of_the_group_warns_of_its_gradients():
    for other, rest, own in of("another optimizer"):
        assert other == rest == [] and len(own) == 1


def test_the_next_step_is_judged_by_its_own_backwards():
    for first, second, third in of("a step later"):
        assert len(first) == 1 and second == third == []


@pytest.mark.parametrize("case", DIFFERENT)
def test_under_detail_debugging_ranks_with_different_models_are_told_the_first_difference_once(case):
    for [message], later, without_gradient in of(case, "DETAIL"):
        assert [word for word in DIFFERENT[case][1] if word not in message] == [], message
        assert later == [] and without_gradient == []


@pytest.mark.parametrize("level", ["DETAIL", "INFO"])
def test_ranks_with_the_same_model_are_told_nothing(level):
    assert of("alike", level) == [([], [], [])] * 2


@pytest.mark.parametrize("case", DIFFERENT)
def test_without_detail_debugging_models_are_not_compared(case):
    assert of(case) == [([], [], [])] * 2


def test_a_smaller_world_of_one_rank_is_asked_back_since_it_may_be_meant_as_true():
    for messages in of("1 for True"):
        [message] = messages.pop("1")
        assert "reshard_after_forward=1" in message and "True" in message, message
        assert list(messages.values()) == [[]] * 4
