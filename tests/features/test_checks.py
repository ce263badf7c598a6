"""Mistakes: the error of each, and that it changed nothing.

Each mistake is a function that makes a model and an action. It runs on a rank, which checks the error and the model: the model must
have the same classes and parameters as before, and still be able to train.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import hwfsdp
import models
from hwfsdp.compat import note_applied
from hwfsdp import DataParallelMeshDims, StateError, UsageError, fully_shard, launch
from hwfsdp.errors import RefusedError, RuntimeRefusedError, UnsupportedError, WrongTypeError
from oracles import cpu_mesh, ours, wrap

Action = Callable[[], Any]
Make = Callable[[], tuple[nn.Module, Action]]

MISTAKES: dict[str, tuple[Make, type[Exception], tuple[str, ...]]] = {}


def mistake(error: type[Exception], *words: str) -> Callable[[Make], Make]:
    """Register a mistake with the type of its error and words in the message."""

    def remember(make: Make) -> Make:
        MISTAKES[make.__name__] = make, error, words
        return make

    return remember


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Return classes, parameters, values and hooks of a model."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        state[f"class of {name or 'the model'}"] = type(module)
        state[f"hooks of {name or 'the model'}"] = len(module._forward_hooks) + len(module._forward_pre_hooks)
        for key, param in module._parameters.items():
            state[f"parameter {name}.{key}"] = id(param)
            local = param.to_local() if isinstance(param, DTensor) else param
            state[f"values of {name}.{key}"] = None if local is None or local.is_meta else local.tolist()
    return state


def train_plainly(model: nn.Module) -> list[str]:
    """Train the model without sharding, and list its parameters without a gradient."""
    if not isinstance(model, models.Model):
        return []
    model(*model.inputs(2, 0)).float().sum().backward()
    return [f"no gradient of {name}" for name, param in model.named_parameters() if param.grad is None]


def wrong_with(name: str) -> list[str]:
    """On a rank: list the words that the error of a mistake lacks, and the changes of the model."""
    make, error, words = MISTAKES[name]
    model, action = make()
    before = snapshot(model)
    with pytest.raises(hwfsdp.FSDPError) as caught:
        action()
    found, message, after = caught.value, str(caught.value), snapshot(model)
    said = [found.expected, found.got, found.remedy, *words]
    wrong = [f"not in the message: {word!r}; {message}" for word in said if not word or word not in message]
    if type(found) is not error:
        wrong.append(f"a {type(found).__name__}")
    wrong += [what for what in before if before[what] != after.get(what)]
    if not any(isinstance(p, DTensor) or p.is_meta or p.ndim == 0 for p in model.parameters()):
        wrong += train_plainly(model)
    return wrong


# --- fully_shard -------------------------------------------------------------------------------------------


def shard(build: Callable[[], nn.Module] = models.stem, **options: Any) -> tuple[nn.Module, Action]:
    """Return the model, and a call of fully_shard on it."""
    model = build()
    options.setdefault("mesh", cpu_mesh())
    return model, lambda: fully_shard(model, **options)


NONSENSE = {
    "mesh": "cpu",
    "mp_policy": None,
    "reshard_after_forward": "no",
    "ignored_params": {"head.weight"},
    "comm_ctx": 3,
}
for _argument, _value in NONSENSE.items():
    MISTAKES[f"nonsense as {_argument}"] = (
        functools.partial(shard, **{_argument: _value}),
        UsageError,
        (_argument,),
    )


def mesh_of(*shape: int, **options: Any) -> tuple[nn.Module, Action]:
    return shard(mesh=init_device_mesh("cpu", shape, **options))


@mistake(UsageError, "nn.ModuleList", "forward", "one by one")
def a_module_list() -> tuple[nn.Module, Action]:
    model = models.stem()
    return model, lambda: ours(model.blocks)


@mistake(RefusedError, "Block", "children before their parents")
def a_module_twice() -> tuple[nn.Module, Action]:
    model = wrap(models.stem(), ours)
    return model, lambda: ours(model.blocks[0])


@mistake(WrongTypeError, "nn.Module", "Parameter")
def not_a_module() -> tuple[nn.Module, Action]:
    model = models.stem()
    return model, lambda: ours(model.stem.weight)


@mistake(RuntimeRefusedError, "ScriptModule", "before torch.jit.script")
def a_module_of_torchscript() -> tuple[nn.Module, Action]:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    return model, lambda: ours(model[0])


@mistake(RefusedError, "replicate()", "Choose one")
def a_replicated_module() -> tuple[nn.Module, Action]:
    model = models.stem()
    note_applied(model.blocks[0], "replicate")
    return model, lambda: ours(model.blocks[0])


@mistake(UsageError, "blocks.1.scale", "scalar", "1D")
def a_scalar_parameter() -> tuple[nn.Module, Action]:
    model = models.stem()
    model.blocks[1].scale = nn.Parameter(torch.tensor(1.0))
    return shard(lambda: model)


@mistake(UnsupportedError, "blocks.1.up.weight", "(1, 12)", "contiguous")
def a_parameter_that_is_not_contiguous() -> tuple[nn.Module, Action]:
    model = models.stem()
    linear = model.blocks[1].up
    linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
    return shard(lambda: model)


@mistake(RuntimeRefusedError, "head.weight", "DTensor", "slice both from it")
def a_dtensor_on_a_mesh_of_its_own() -> tuple[nn.Module, Action]:
    model = models.stem()
    weight = model.head.weight
    model.head.weight = nn.Parameter(DTensor.from_local(weight.detach(), cpu_mesh(), [Shard(0)]))
    return shard(lambda: model)


@mistake(UsageError, "'weight'", "tied", "fully_shard([a, b])")
def a_parameter_tied_over_two_groups() -> tuple[nn.Module, Action]:
    model = models.Transformer()
    ours(model.embed)
    return model, lambda: ours(model.head)


@mistake(RefusedError, "(1, 1)", "mesh_dim_names")
def an_unnamed_2d_mesh() -> tuple[nn.Module, Action]:
    return mesh_of(1, 1)


@mistake(UsageError, "reshard_after_forward", "factor of the 1 ranks", "got 2")
def reshard_to_a_number_that_does_not_divide() -> tuple[nn.Module, Action]:
    return shard(reshard_after_forward=2)


@mistake(
    RefusedError, "shard_placement_fn", "blocks.0.up.weight", "dimension of shape (12, 8)", "Shard(dim=2)"
)
def a_placement_beyond_the_shape() -> tuple[nn.Module, Action]:
    return shard(shard_placement_fn=lambda param: Shard(2))


@mistake(UsageError, "shard_placement_fn", "a Shard, or None", "got Replicate()")
def a_placement_that_is_no_shard() -> tuple[nn.Module, Action]:
    return shard(shard_placement_fn=lambda param: Replicate())


@mistake(UsageError, "blocks.0.up.weight", "plain tensor", "distribute_module")
def mesh_dims_for_plain_parameters() -> tuple[nn.Module, Action]:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    return shard(mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp"))


# --- Afterwards --------------------------------------------------------------------------------------------


def forward(model: models.Model) -> Any:
    return model(*model.inputs(2, 0))


def runs(model: models.Model) -> tuple[nn.Module, Action]:
    """Return a sharded model, and a forward of it."""
    wrap(model, ours)
    return model, lambda: forward(model)


@mistake(RefusedError, "'blocks.1'", "torch.float32 and torch.float64", "fully_shard of their own")
def trainable_parameters_of_two_dtypes() -> tuple[nn.Module, Action]:
    model = models.stem()
    model.blocks[1].up.to(torch.float64)
    return runs(model)


@mistake(StateError, "'blocks.1'", "root", "whole model once")
def a_child_before_its_root() -> tuple[nn.Module, Action]:
    model, action = runs(models.stem())
    model.blocks[1](torch.ones(2, 8))
    return model, action


@mistake(RuntimeRefusedError, "root", "fully_shard")
def a_list_as_root() -> tuple[nn.Module, Action]:
    model = models.stem()
    ours([model.stem, *model.blocks, model.head])
    return model, lambda: forward(model)


@mistake(UsageError, "set_modules_to_forward_prefetch", "Block", "fully_shard on it")
def forward_prefetch_of_a_plain_module() -> tuple[nn.Module, Action]:
    model = models.stem()
    first, second, _ = model.blocks
    ours(first)
    return model, lambda: first.set_modules_to_forward_prefetch([second])


@mistake(UsageError, "set_reshard_after_forward", "2", "True or False")
def set_reshard_to_a_number() -> tuple[nn.Module, Action]:
    model = wrap(models.stem(), ours)
    return model, lambda: model.set_reshard_after_forward(2)


@mistake(StateError, "reset_iter_state", "root")
def a_reset_below_the_root() -> tuple[nn.Module, Action]:
    model, action = runs(models.stem())
    action()
    return model, model.blocks[0].reset_iter_state


@functools.cache
def reports() -> dict[str, list[str]]:
    return launch(lambda: {name: wrong_with(name) for name in MISTAKES}, 1, timeout=60)[0]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_changes_nothing_and_its_error_says_expected_got_and_remedy(name):
    assert reports()[name] == []


# --- Recovery ----------------------------------------------------------------------------------------------


def test_without_a_process_group_the_remedy_is_named():
    model = models.stem()
    before = snapshot(model)
    with pytest.raises(StateError, match="process group.*hwfsdp.launch or torchrun"):
        fully_shard(model)
    assert snapshot(model) == before
    assert train_plainly(model) == []


def shard_rightly(model: nn.Module) -> None:
    wrap(model, ours)


REMEDIES: list[tuple[Make, Callable[[nn.Module], Any]]] = [
    (trainable_parameters_of_two_dtypes, lambda model: model.to(torch.float32)),
    *[(functools.partial(shard, reshard_after_forward=number), shard_rightly) for number in (3, 0, -1)],
    (a_list_as_root, ours),
    (functools.partial(mesh_of, 1, 2), shard_rightly),
    (a_module_list, shard_rightly),
]


def without_gradients_after_remedies() -> list[str]:
    """On a rank: make each mistake, apply the remedy in its message, take a step, and list parameters without a gradient."""
    wrong = []
    for make, remedy in REMEDIES:
        model, action = make()
        with pytest.raises(hwfsdp.FSDPError):
            action()
        remedy(model)
        forward(model).sum().backward()
        wrong += [name for name, param in model.named_parameters() if not isinstance(param.grad, DTensor)]
    return wrong


def test_the_remedies_that_errors_name_work():
    assert launch(without_gradients_after_remedies, 2, timeout=60) == [[], []]
