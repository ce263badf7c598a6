"""Mistakes that raise no error, but train nothing, or something else. Each gets one warning; correct code gets none.

A check makes a mistake on a rank, or something close to a mistake. It returns the problems with the warnings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.optim import SGD, AdamW, Optimizer

import hwfsdp
import models
from hwfsdp import StateError
from oracles import fresh, objective, ours, rank_rows, theirs, wrap
from together import Together

Messages = list[str]
two = Together(2, TORCH_DISTRIBUTED_DEBUG="INFO")


@contextmanager
def caught() -> Iterator[Messages]:
    """Collect the messages of all UserWarnings in the block. They are available at its end."""
    messages: Messages = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in found if issubclass(warning.category, UserWarning)]


def other_than(messages: Messages, *expected: tuple[str, ...]) -> Messages:
    """Return [] if there is one message for each of `expected`, with all of its words. Else return the messages."""
    pairs = zip(messages, expected, strict=False)
    right = all(word in message for message, words in pairs for word in words)
    return [] if right and len(messages) == len(expected) else [f"{len(messages)} warnings", *messages]


def run(model: models.Model, seed: int = 0) -> None:
    """Run forward and backward."""
    objective(model(*map(rank_rows, model.inputs(4, seed)))).backward()


def steps_of(model: models.Model, *optimizers: Optimizer, number: int = 2) -> Messages:
    """Take training steps with all of these optimizers. Return the warnings."""
    with caught() as messages:
        for seed in range(number):
            run(model, seed)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return messages


# --- Optimizers built before fully_shard -------------------------------------------------------------------

STALE = ("no longer", "fully_shard")


@two.finds([])
def an_optimizer_built_before_warns_once_also_if_it_has_trained_the_plain_model() -> Messages:
    """A new `fully_shard` must not repeat the warning."""
    wrong = []
    for plain_steps in (0, 1):
        model = models.stem()
        optimizer = SGD(model.parameters(), lr=0.1)
        wrong += steps_of(model, optimizer, number=plain_steps)
        messages = steps_of(wrap(model, ours), optimizer)
        wrap(models.stem(), ours)
        messages += steps_of(model, optimizer, number=1)
        wrong += other_than(messages, (*STALE, "SGD", "up.weight"))
    return wrong


class OwnParameter(nn.Parameter):
    pass


@two.finds([__file__] * 4)
def warnings_of_a_call_a_forward_and_a_step_point_at_the_program() -> list[str]:
    model = nn.Sequential(nn.Embedding(4, 8, max_norm=1.0), nn.Linear(8, 2))
    model[1].weight = OwnParameter(model[1].weight.detach())
    optimizer = SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hwfsdp.fully_shard(model, reshard_after_forward=False)
        model(torch.arange(4))
        model[1].bias = nn.Parameter(torch.zeros(2))  # while the model is whole
        model.reshard()
        model(torch.arange(4)).sum().backward()
        optimizer.step()
    return [warning.filename for warning in found]


@two.finds([])
def one_over_ignored_parameters_or_built_after_or_of_a_model_sharded_by_torch_does_not_warn() -> Messages:
    model = models.stem()
    ignored = [*model.head.parameters()]
    optimizer = SGD(ignored, lr=0.1)
    wrap(model, ours, ignored_params={*ignored})
    of_torchs = models.stem()
    early = SGD(of_torchs.parameters(), lr=0.1)
    messages = steps_of(wrap(of_torchs, theirs), early)
    return messages + steps_of(model, optimizer, AdamW(model.blocks.parameters()))


# --- Optimizers built while parameters were whole ----------------------------------------------------------

WHOLE = ("whole", "reshard()", "'head.bias'")
KINDS: list[Callable[[Any], Optimizer]] = [
    lambda params: SGD(params, lr=0.1, momentum=0.9),
    lambda params: AdamW(params, fused=True),
]


def forward_of(model: models.Model) -> Any:
    return model(*model.inputs(2, 0))


@two.finds([])
def an_optimizer_built_while_parameters_are_whole_warns_once_and_trains() -> Messages:
    """The oracle is an optimizer that was built before."""
    wrong = []
    for make_whole in (forward_of, lambda model: model.unshard()):
        for kind in KINDS:
            models_, found = [wrap(fresh(models.stem), ours) for _ in range(2)], []
            for index, model in enumerate(models_):
                early = kind(model.parameters())
                make_whole(model)
                found.append(
                    steps_of(model, kind(reversed([*model.parameters()])) if index else early, number=3)
                )
            wrong += found[0] + other_than(found[1], WHOLE)
            pairs = zip(*(model.parameters() for model in models_), strict=True)
            wrong += ["not trained" for a, b in pairs if not torch.equal(a.full_tensor(), b.full_tensor())]
    return wrong


@two.finds("'weight'")
def one_that_has_states_of_whole_parameters_is_refused() -> str:
    model = ours(nn.Linear(4, 4, bias=False))
    model(torch.ones(1, 4)).sum()
    optimizer = torch.optim.Adagrad(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    try:
        optimizer.step()
    except StateError as error:
        return "'weight'" if "'weight'" in str(error) and "reshard()" in str(error) else str(error)
    return "no error"


# --- Trained parameters that no group has ------------------------------------------------------------------


class LoRA(nn.Module):
    """A layer with an adapter beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.down = layer, nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def with_adapter(model: models.Stem) -> models.Stem:
    model.blocks[1].up = LoRA(model.blocks[1].up)
    return model


def with_head(model: models.Stem) -> models.Stem:
    model.head = nn.Linear(8, 3)
    return model


def root_forgotten() -> models.Stem:
    model = models.stem()
    for block in model.blocks:
        ours(block)
    return model


UNCLAIMED = ("SGD trains", "no fully_shard", "ignored_params")


@two.finds([])
def parameters_that_no_group_has_are_named_once() -> Messages:
    wrong = []
    for build, name in (
        (lambda: with_adapter(wrap(models.stem(), ours)), "2 parameters: 'blocks.1.up.down.weight' of Stem"),
        (lambda: with_head(wrap(models.stem(), ours)), "2 parameters: 'head.weight' of Stem"),
        (root_forgotten, "4 parameters: 'stem.weight' of Stem"),
    ):
        model = build()
        wrong += other_than(steps_of(model, SGD(model.parameters(), lr=0.1), number=3), (*UNCLAIMED, name))
    return wrong


def with_ignored() -> models.Stem:
    model = models.stem()
    return wrap(model, ours, ignored_params={*model.head.parameters()})


def with_frozen_and_unused() -> models.Stem:
    model = wrap(models.stem(), ours)
    model.blocks[0].frozen = nn.Linear(8, 8).requires_grad_(False)
    model.average = models.stem()  # a copy that no gradient reaches
    return model


def with_replicated_parts() -> models.Stem:
    model = root_forgotten()
    model.stem = nn.parallel.DistributedDataParallel(model.stem)
    replicate(model.head)
    return model


def on_all_ranks() -> models.Stem:
    model = wrap(models.stem(), ours)
    mesh = init_device_mesh("cpu", (2,))
    model.stem.scale = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    model.stem.register_forward_hook(lambda module, args, output: output + module.scale.to_local().sum())
    return model


def on_one_rank() -> models.Stem:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "dp"))["dp"]
    model = models.stem()
    for block in model.blocks:
        hwfsdp.fully_shard(block, mesh=mesh)
    return model


@two.finds([])
def parameters_that_need_no_average_are_not_named() -> Messages:
    wrong = []
    for build in (with_ignored, with_frozen_and_unused, with_replicated_parts, on_all_ranks, on_one_rank):
        model, other = build(), nn.Linear(3, 1)  # another model, which learns from the output of this one
        optimizer = SGD([*model.parameters(), *other.parameters()], lr=0.1)
        model.head.register_forward_hook(lambda module, args, output: other(output))
        wrong += [f"{build.__name__}: {m}" for m in steps_of(model, optimizer)]
    return wrong


# --- Gradients that were never synchronized ----------------------------------------------------------------


def sharded(**options: Any) -> tuple[models.Stem, Optimizer]:
    model = wrap(models.stem(), ours, **options)
    return model, SGD(model.parameters(), lr=0.1)


def step_after(prepare: Callable[[models.Stem], Any], **options: Any) -> Messages:
    """Return the messages of an optimizer step. No message may come before it."""
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


def backwards(model: models.Stem, *syncs: bool) -> None:
    for sync in syncs:
        model.set_requires_gradient_sync(sync)
        run(model)


UNSYNCHRONIZED = "set_requires_gradient_sync"
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@two.finds([])
def a_step_without_gradients_of_one_block_names_its_group() -> Messages:
    found = [step_after(one_block), step_after(one_block, policy=BF16)]
    return [message for messages in found for message in other_than(messages, (UNSYNCHRONIZED, "'blocks.1'"))]


def freeze_a_block(model: models.Stem) -> None:
    model.blocks[1].requires_grad_(False)
    one_block(model)


def forward_alone(model: models.Stem) -> None:
    model.set_requires_gradient_sync(False)
    with torch.no_grad():
        model(*model.inputs(2, 0))


def synchronize_later(model: models.Stem) -> None:
    backwards(model, False, False, True)


@two.finds([])
def where_nothing_is_lost_nothing_is_said() -> Messages:
    return [m for each in (freeze_a_block, forward_alone, synchronize_later) for m in step_after(each)]


@two.finds([0, 1, 0])
def only_an_optimizer_of_the_group_warns_and_only_of_the_backwards_since_its_last_step() -> list[int]:
    model, optimizer = sharded()
    rest = SGD(model.blocks[0].parameters(), lr=0.1)
    found = []
    for each, backward in ((rest, one_block), (optimizer, one_block), (optimizer, synchronize_later)):
        backward(model)
        with caught() as messages:
            each.step()
            each.zero_grad()
        found.append(len(messages))
    return found


# --- A number of ranks that looks like a flag --------------------------------------------------------------


@two.finds([])
def a_smaller_world_of_one_rank_is_asked_back_since_it_may_be_meant_as_true() -> Messages:
    wrong = []
    for value in (1, 2, True, False, None):
        with caught() as messages:
            ours(nn.Linear(4, 4), reshard_after_forward=value)
        asked = [("reshard_after_forward=1", "True")] if value is not True and value == 1 else []
        wrong += other_than(messages, *asked)
    return wrong


@two.finds([])
def a_step_asks_only_about_the_groups_of_its_optimizer() -> Messages:
    """An optimizer for each parameter steps in the backward of large models, so a step must not look at all parameters."""
    model = wrap(fresh(models.stem), ours)
    optimizers = [SGD([param], lr=0.1) for param in model.parameters()]
    steps_of(model, *optimizers)
    with mock.patch("hwfsdp.features.lookup.all_groups", side_effect=AssertionError("all groups")):
        return steps_of(model, *optimizers)


test_on_two_ranks = two.test()
