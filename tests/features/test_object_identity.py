"""Objects that stay the same. `test_resharding` tests which form of a parameter is registered at which time."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

import models
from hwfsdp import FSDPModule
from oracles import Training, ours, wrap
from together import Together

two = Together(2)


# --- Objects -----------------------------------------------------------------------------------------------


def watch_a_training(reshard_after_forward: bool | None) -> list[str]:
    """Return the problems with parameter objects, seen at every turn of three training steps.

    Autograd must not take a gather for a write.
    """
    training = Training(models.stem, ours, reshard_after_forward=reshard_after_forward)
    sharded: list[list[nn.Parameter]] = []
    whole: dict[str, list[nn.Parameter]] = {}
    versions: dict[str, list[int]] = {}

    def see(name: str, module: nn.Linear, *_: Any) -> None:
        assert isinstance(module.weight, nn.Parameter) and not isinstance(module.weight, DTensor), name
        whole.setdefault(name, []).append(module.weight)
        versions.setdefault(name, []).append(module.weight._version)

    for name, module in training.model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(functools.partial(see, name))
    for seed in range(3):
        sharded.append(list(training.model.parameters()))
        training.loss(seed).backward()
        sharded.append(list(training.model.parameters()))
        training.update()
        training.model.state_dict()
        training.model.unshard()
        training.model.reshard()
    sharded.append(list(training.model.parameters()))
    wrong = [f"{name}: {len(seen)} times" for name, seen in whole.items() if len(seen) != 3]
    wrong += [f"{name}: several whole objects" for name, seen in whole.items() if len({*map(id, seen)}) != 1]
    wrong += [f"{name}: versions {seen}" for name, seen in versions.items() if len({*seen}) != 1]
    wrong += ["several shards" for turns in zip(*sharded, strict=True) if len({*map(id, turns)}) != 1]
    return wrong if whole else ["nothing seen"]


@two.finds([])
def a_parameter_is_two_objects_for_life() -> list[str]:
    return [wrong for reshard in (None, True, False) for wrong in watch_a_training(reshard)]


@two.finds([True, True])
def both_names_of_a_tied_parameter_show_the_same_object() -> list[bool]:
    model = wrap(models.Transformer(), ours)
    same = [model.head.weight is model.embed.weight]
    model.unshard()
    return [*same, model.head.weight is model.embed.weight]


# --- Classes -----------------------------------------------------------------------------------------------


@two.finds([True] * 4)
def the_class_of_a_sharded_module_is_derived_from_both() -> list[bool]:
    module = models.Block(2, 2, 2)
    same = ours(module) is module
    is_both = isinstance(module, FSDPModule) and isinstance(module, models.Block)
    one_class = type(ours(models.Block(3, 3, 3))) is type(module)
    return [same, is_both, one_class, type(module.up) is nn.Linear]


test_on_two_ranks = two.test()
