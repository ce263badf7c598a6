"""Mistakes that run without an error, but train nothing, or something else: each is warned of once, and only then.

A case is a function that runs on a rank and makes a mistake, or something close to one; it returns the messages of the
warnings that came.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import models
from hwfsdp import launch
from oracles import BITS, Training, differences, fresh, objective, ours, rank_rows, theirs, wrap

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


def built_before_a_list() -> Messages:
    model = models.stem()
    optimizer = SGD(model.blocks[1].parameters(), lr=0.1)
    ours([*model.blocks])
    return steps_of(ours(model), optimizer)


def built_before_on_meta() -> Messages:
    with torch.device("meta"):
        model = models.stem()
    optimizer = SGD(model.parameters(), lr=0.1)
    wrap(model, ours).to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param.to_local(), 0.1)
    return steps_of(model, optimizer)


def given_old_parameters_later() -> Messages:
    """The optimizer itself was built after, from a list of parameters that was made before."""
    model = models.stem()
    params = [*model.parameters()]
    wrap(model, ours)
    return steps_of(model, SGD(params, lr=0.1))


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
    "before a list": (built_before_a_list, [("SGD", "up.weight")]),
    "before, on meta": (built_before_on_meta, [("SGD", "up.weight")]),
    "after, from old parameters": (given_old_parameters_later, [("SGD", "up.weight")]),
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


def of_another_model() -> Messages:
    wrap(models.stem(), ours)
    model = models.stem()
    return steps_of(model, SGD(model.parameters(), lr=0.1))


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


FINE: dict[str, Callable[[], Messages]] = {
    "built after": built_after,
    "over ignored parameters": over_ignored_parameters,
    "of another model": of_another_model,
    "of a model sharded by torch": of_a_model_sharded_by_torch,
    "after loading a state": after_loading_a_state,
}


@functools.cache
def optimizers() -> list[dict[str, Messages]]:
    def on_a_rank() -> dict[str, Messages]:
        cases = {**{name: case for name, (case, _) in STALE.items()}, **FINE}
        return {name: case() for name, case in cases.items()}

    return launch(on_a_rank, 2, timeout=100)


@pytest.mark.parametrize("case", STALE)
def test_an_optimizer_over_parameters_that_are_no_longer_the_models_warns_once(case):
    for rank in optimizers():
        messages, expected = rank[case], STALE[case][1]
        assert len(messages) == len(expected), messages
        for message, words in zip(messages, expected, strict=True):
            missing = [word for word in (*words, "no longer", "fully_shard") if word not in message]
            assert missing == [], message


@pytest.mark.parametrize("case", FINE)
def test_an_optimizer_over_parameters_of_its_model_does_not_warn(case):
    assert [rank[case] for rank in optimizers()] == [[], []]


def test_the_warning_points_at_the_step():
    def on_a_rank() -> list[str]:
        model = models.stem()
        optimizer = SGD(model.parameters(), lr=0.1)
        run(wrap(model, ours))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            optimizer.step()
        return [warning.filename for warning in found]

    for [filename] in launch(on_a_rank, 2, timeout=60):
        assert filename == __file__


def test_an_optimizer_of_old_parameters_changes_no_number():
    """Neither by its steps nor by the warning; a right one beside it trains as it would alone."""

    def on_a_rank() -> list[str]:
        plain = fresh(models.stem)
        old = AdamW(plain.parameters(), lr=0.5)
        with_old, alone = Training(models.stem, ours), Training(models.stem, ours)
        with_old.model = wrap(plain, ours)
        for training in (with_old, alone):
            with caught() as messages:
                for seed in range(3):
                    training.loss(seed).backward()
                    if training is with_old:
                        old.step()
                    training.update()
            assert len(messages) == (1 if training is with_old else 0)
            training.keep_params()
        return differences(with_old.trace, alone.trace, *BITS)

    assert launch(on_a_rank, 2, timeout=60) == [[], []]


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


def the_root(model: models.Stem) -> None:
    model.set_requires_gradient_sync(False, recurse=False)
    run(model)


def all_groups(model: models.Stem) -> None:
    model.set_requires_gradient_sync(False)
    for seed in range(3):
        run(model, seed)


def synchronized_later(model: models.Stem) -> None:
    for sync in (False, False, True):
        model.set_requires_gradient_sync(sync)
        run(model)


def always_synchronized(model: models.Stem) -> None:
    for seed in range(2):
        run(model, seed)


def no_backward(model: models.Stem) -> None:
    model.set_requires_gradient_sync(False)
    with torch.no_grad():
        model(*model.inputs(2, 0))


def frozen_block(model: models.Stem) -> None:
    for param in model.blocks[1].parameters():
        param.requires_grad_(False)
    one_block(model)


def unused_block(model: models.Stem) -> None:
    """The block takes no part, so that it has no gradients to lose."""
    model.blocks[1].set_requires_gradient_sync(False, recurse=False)
    run(model)
    model.blocks[1].set_requires_gradient_sync(True, recurse=False)
    model.set_requires_gradient_sync(True)
    run(model)


LOST: dict[str, tuple[Callable[[models.Stem], None], str]] = {
    "of one block": (one_block, "'blocks.1'"),
    "of the root": (the_root, "'Stem'"),
    "of all groups": (all_groups, "parameter group '"),
}
KEPT: dict[str, Callable[[models.Stem], None]] = {
    "synchronized later": synchronized_later,
    "always synchronized": always_synchronized,
    "no backward": no_backward,
    "a frozen block": frozen_block,
    "one block synchronized later": unused_block,
}
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


@functools.cache
def synchronization() -> list[dict[str, Any]]:
    def on_a_rank() -> dict[str, Any]:
        return {
            **{name: step_after(case) for name, (case, _) in LOST.items()},
            **{f"{name}, bf16": step_after(case, policy=BF16) for name, (case, _) in LOST.items()},
            **{name: step_after(case) for name, case in KEPT.items()},
            "another optimizer": of_another_optimizer(),
            "a step later": a_step_later(),
        }

    return launch(on_a_rank, 2, timeout=100)


@pytest.mark.parametrize("policy", ["", ", bf16"])
@pytest.mark.parametrize("case", LOST)
def test_a_step_without_gradients_that_were_never_synchronized_warns_once_and_names_the_group(case, policy):
    for rank in synchronization():
        [message] = rank[case + policy]
        assert LOST[case][1] in message and "set_requires_gradient_sync" in message, message


@pytest.mark.parametrize("case", KEPT)
def test_a_step_that_loses_no_gradient_does_not_warn(case):
    assert [rank[case] for rank in synchronization()] == [[], []]


def test_only_the_optimizer_of_the_group_warns_of_its_gradients():
    for rank in synchronization():
        other, rest, own = rank["another optimizer"]
        assert other == rest == [] and len(own) == 1


def test_the_next_step_is_judged_by_its_own_backwards():
    for rank in synchronization():
        first, second, third = rank["a step later"]
        assert len(first) == 1 and second == third == []


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


def grouped_the_other_way_round() -> models.Stem:
    """Two layers of the same shape belong to each other's groups."""
    model = fresh(models.stem)
    first, second, third = model.blocks
    pairs = ((first, second), third) if not dist.get_rank() else ((first, third), second)
    ours([*pairs[0]])
    ours(pairs[1])
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


def all_different() -> dict[str, Any]:
    cases = {"alike": alike, **{name: build for name, (build, _) in DIFFERENT.items()}}
    return {name: first_forward(build) for name, build in cases.items()}


@functools.cache
def structures() -> list[dict[str, Any]]:
    return launch(all_different, 2, timeout=100)


@pytest.mark.parametrize("case", DIFFERENT)
def test_under_detail_debugging_ranks_with_different_models_are_told_the_first_difference_once(case):
    for first, later, without_gradient in (rank[case] for rank in structures()):
        [message] = first
        assert [word for word in DIFFERENT[case][1] if word not in message] == [], message
        assert later == [] and without_gradient == []


def test_under_detail_debugging_ranks_with_the_same_model_are_told_nothing():
    assert [rank["alike"] for rank in structures()] == [([], [], [])] * 2


@pytest.mark.parametrize("level", ["OFF", "INFO"])
def test_without_detail_debugging_models_are_not_compared(level, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    for rank in launch(all_different, 2, timeout=100):
        assert {name: found for name, found in rank.items() if found != ([], [], [])} == {}


# --- A number of ranks that looks like a flag --------------------------------------------------------------


def test_a_smaller_world_of_one_rank_is_asked_back_since_it_may_be_meant_as_true():
    def on_a_rank() -> dict[str, Messages]:
        found = {}
        for value in (1, 2, True, False, None):
            with caught() as found[repr(value)]:
                ours(nn.Linear(4, 4), reshard_after_forward=value)
        return found

    for found in launch(on_a_rank, 2, timeout=60):
        [message] = found.pop("1")
        assert "reshard_after_forward=1" in message and "True" in message, message
        assert list(found.values()) == [[]] * 4
