"""Mistakes: what is said, and that nothing was changed.

Each mistake is a function that makes a model, and what to do with it. It runs on a rank, which tells the error, and
whether the model was left as it was: the same classes, the same parameters, and still able to train.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import hwfsdp
import models
from hwfsdp import DataParallelMeshDims, StateError, UsageError, fully_shard, launch, record
from oracles import cpu_mesh, ours, wrap

Action = Callable[[], Any]


class Mistake(NamedTuple):
    """What is done, the error that says so, and words that its message contains."""

    make: Callable[[], tuple[nn.Module, Action]]
    error: type[Exception]
    words: tuple[str, ...]


class Report(NamedTuple):
    """What a rank tells."""

    bases: list[str]
    answers: tuple[str, str, str]
    message: str
    changes: list[str]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Classes, parameters, values and hooks of a model."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        state[f"class of {name or 'the model'}"] = type(module)
        state[f"hooks of {name or 'the model'}"] = len(module._forward_hooks) + len(module._forward_pre_hooks)
        for key, param in module._parameters.items():
            state[f"parameter {name}.{key}"] = id(param)
            local = param.to_local() if isinstance(param, DTensor) else param
            state[f"values of {name}.{key}"] = None if local is None or local.is_meta else local.tolist()
    return state


def report(mistake: Mistake) -> Report:
    model, action = mistake.make()
    before = snapshot(model)
    try:
        action()
    except hwfsdp.FSDPError as error:
        caught = error
    else:
        raise AssertionError("no error")
    after = snapshot(model)
    changes = [what for what in before if before[what] != after.get(what)]
    if not any(isinstance(p, DTensor) or p.is_meta or p.ndim == 0 for p in model.parameters()):
        changes += train_plainly(model)
    answers = (caught.expected, caught.got, caught.remedy)
    return Report([cls.__name__ for cls in type(caught).__mro__], answers, str(caught), changes)


def train_plainly(model: nn.Module) -> list[str]:
    """What keeps the model from training without sharding."""
    if not isinstance(model, models.Model):
        return []
    model(*model.inputs(2, 0)).float().sum().backward()
    return [f"no gradient of {name}" for name, param in model.named_parameters() if param.grad is None]


# --- fully_shard -------------------------------------------------------------------------------------------


def shard(build: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, Action]:
    """The model, and a call of fully_shard on it."""
    model = build()
    options.setdefault("mesh", cpu_mesh())
    return model, lambda: fully_shard(model, **options)


def module_list() -> tuple[nn.Module, Action]:
    model = models.stem()
    return model, lambda: ours(model.blocks)


def module_dict() -> tuple[nn.Module, Action]:
    model = nn.ModuleDict({"first": nn.Linear(2, 2)})
    return model, lambda: ours(model)


def twice() -> tuple[nn.Module, Action]:
    model = wrap(models.stem(), ours)
    return model, lambda: ours(model.blocks[0])


def not_a_module() -> tuple[nn.Module, Action]:
    model = models.stem()
    return model, lambda: ours(model.stem.weight)


def no_modules() -> tuple[nn.Module, Action]:
    return models.stem(), lambda: ours([])


def plain_on_named_axes() -> tuple[nn.Module, Action]:
    dims = DataParallelMeshDims("dp")
    return shard(
        models.stem, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")), dp_mesh_dims=dims
    )


def with_scalar() -> nn.Module:
    model = models.stem()
    model.blocks[1].scale = nn.Parameter(torch.tensor(1.0))
    return model


def with_transposed() -> nn.Module:
    model = models.stem()
    linear = model.blocks[1].up
    linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
    return model


def with_dtensor() -> nn.Module:
    model = models.stem()
    weight = model.head.weight
    model.head.weight = nn.Parameter(DTensor.from_local(weight.detach(), cpu_mesh(), [Shard(0)]))
    return model


def tied_over_groups() -> tuple[nn.Module, Action]:
    model = models.Transformer()
    ours(model.embed)
    return model, lambda: ours(model.head)


def tied_to_the_root() -> tuple[nn.Module, Action]:
    model = models.Transformer()
    ours(model.embed)
    return model, lambda: ours(model)


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> tuple[nn.Module, Action]:
    return shard(models.stem, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))


# --- Afterwards --------------------------------------------------------------------------------------------


def copied() -> tuple[nn.Module, Action]:
    model = wrap(models.stem(), ours)
    return model, lambda: copy.deepcopy(model)


def copied_from_above() -> tuple[nn.Module, Action]:
    model = models.stem()
    ours(model.blocks[1])
    return model, lambda: copy.deepcopy(model)


def forward(model: models.Model) -> Any:
    return model(*model.inputs(2, 0))


def on_meta() -> tuple[nn.Module, Action]:
    with torch.device("meta"):
        model = models.stem()
    wrap(model, ours)
    return model, lambda: forward(model)


def partly_on_meta() -> tuple[nn.Module, Action]:
    model = models.stem()
    model.blocks[2].down.to("meta")
    wrap(model, ours)
    return model, lambda: forward(model)


def mixed_dtypes() -> tuple[nn.Module, Action]:
    model = models.stem()
    model.blocks[1].up.to(torch.float64)
    wrap(model, ours)
    return model, lambda: forward(model)


def child_first() -> tuple[nn.Module, Action]:
    model = wrap(models.stem(), ours)
    model.blocks[1](torch.ones(2, 8))
    return model, lambda: forward(model)


def prefetch_unsharded(method: str) -> tuple[nn.Module, Action]:
    model = models.stem()
    ours(model.blocks[0])
    return model, lambda: getattr(model.blocks[0], method)([model.blocks[1]])


def reshard_to_a_number() -> tuple[nn.Module, Action]:
    model = wrap(models.stem(), ours)
    return model, lambda: model.set_reshard_after_forward(2)


def plain_state() -> tuple[nn.Module, Action]:
    model = wrap(models.stem(), ours)
    return model, lambda: model.load_state_dict(models.stem().state_dict(), assign=True)


def nested_record() -> tuple[nn.Module, Action]:
    def twice() -> None:
        with record(), record():
            pass

    return models.stem(), twice


MISTAKES: dict[str, Mistake] = {
    "a ModuleList": Mistake(module_list, UsageError, ("nn.ModuleList", "forward", "one by one")),
    "a ModuleDict": Mistake(module_dict, UsageError, ("nn.ModuleDict", "forward", "one by one")),
    "a module twice": Mistake(twice, UsageError, ("Block", "children before their parents")),
    "not a module": Mistake(not_a_module, UsageError, ("nn.Module", "Parameter")),
    "an empty list": Mistake(no_modules, UsageError, ("at least one module", "empty")),
    "a scalar parameter": Mistake(
        functools.partial(shard, with_scalar), UsageError, ("blocks.1.scale", "scalar", "1D")
    ),
    "a parameter that is not contiguous": Mistake(
        functools.partial(shard, with_transposed),
        hwfsdp.UnsupportedError,
        ("blocks.1.up.weight", "(1, 12)", "contiguous"),
    ),
    "a DTensor on a mesh of its own": Mistake(
        functools.partial(shard, with_dtensor), UsageError, ("head.weight", "DTensor", "slice both from it")
    ),
    "a parameter tied over two groups": Mistake(
        tied_over_groups, UsageError, ("'weight'", "tied", "fully_shard([a, b])")
    ),
    "a parameter tied to the root": Mistake(
        tied_to_the_root, UsageError, ("head.weight", "tied", "above both")
    ),
    "a 3D mesh": Mistake(functools.partial(mesh_of, 1, 1, 1), UsageError, ("1D", "(1, 1, 1)")),
    "an unnamed 2D mesh": Mistake(functools.partial(mesh_of, 1, 1), UsageError, ("(1, 1)", "mesh_dim_names")),
    "reshard to a number that does not divide": Mistake(
        functools.partial(shard, models.stem, reshard_after_forward=2),
        UsageError,
        ("reshard_after_forward", "factor of the 1 ranks", "got 2"),
    ),
    "a placement beyond the shape": Mistake(
        functools.partial(shard, models.stem, shard_placement_fn=lambda param: Shard(2)),
        UsageError,
        ("shard_placement_fn", "blocks.0.up.weight", "dimension of shape (12, 8)", "Shard(dim=2)"),
    ),
    "a placement that is none": Mistake(
        functools.partial(shard, models.stem, shard_placement_fn=lambda param: 1),
        UsageError,
        ("shard_placement_fn", "a Shard, or None", "got 1"),
    ),
    "mesh dims of another type": Mistake(
        functools.partial(shard, models.stem, dp_mesh_dims=("dp",)), UsageError, ("dp_mesh_dims", "('dp',)")
    ),
    "mesh dims that the mesh does not have": Mistake(
        functools.partial(shard, models.stem, dp_mesh_dims=DataParallelMeshDims("dp")),
        UsageError,
        ("dp_mesh_dims", "'dp'", "mesh_dim_names"),
    ),
    "mesh dims for plain parameters": Mistake(
        plain_on_named_axes, UsageError, ("blocks.0.up.weight", "plain tensor", "distribute_module")
    ),
    "a copy": Mistake(copied, UsageError, ("deepcopy", "FSDPStem", "state_dict")),
    "a copy from above": Mistake(copied_from_above, UsageError, ("deepcopy", "FSDPBlock", "state_dict")),
    "a forward on meta": Mistake(on_meta, StateError, ("stem.weight", "head.bias", "meta", "to_empty")),
    "a forward partly on meta": Mistake(
        partly_on_meta, StateError, ("'blocks.2'", "blocks.2.down.weight, blocks.2.down.bias on", "to_empty")
    ),
    "trainable parameters of two dtypes": Mistake(
        mixed_dtypes,
        UsageError,
        ("'blocks.1'", "torch.float32 and torch.float64", "fully_shard of their own"),
    ),
    "a child before its root": Mistake(child_first, StateError, ("'blocks.1'", "root", "whole model once")),
    "forward prefetch of a plain module": Mistake(
        functools.partial(prefetch_unsharded, "set_modules_to_forward_prefetch"),
        UsageError,
        ("set_modules_to_forward_prefetch", "Block", "fully_shard on it"),
    ),
    "backward prefetch of a plain module": Mistake(
        functools.partial(prefetch_unsharded, "set_modules_to_backward_prefetch"),
        UsageError,
        ("set_modules_to_backward_prefetch", "Block", "fully_shard on it"),
    ),
    "set reshard to a number": Mistake(
        reshard_to_a_number, UsageError, ("set_reshard_after_forward", "2", "True or False")
    ),
    "assigning a plain state": Mistake(
        plain_state, UsageError, ("weight", "DTensor of shape", "Parameter of shape", "state_dict")
    ),
    "a recording in a recording": Mistake(nested_record, StateError, ("record", "nested", "outermost")),
}
CHANGING = {"assigning a plain state"}  # PyTorch has assigned before anybody is asked


@functools.cache
def reports() -> dict[str, Report]:
    def on_a_rank() -> dict[str, Report]:
        return {name: report(mistake) for name, mistake in MISTAKES.items()}

    return launch(on_a_rank, 1, timeout=60)[0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_its_class_of_error(mistake):
    assert reports()[mistake].bases[0] == MISTAKES[mistake].error.__name__


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_is_also_the_builtin_one_that_a_caller_would_catch(mistake):
    builtin = {
        UsageError: "ValueError",
        hwfsdp.UnsupportedError: "NotImplementedError",
        StateError: "RuntimeError",
    }
    assert builtin[MISTAKES[mistake].error] in reports()[mistake].bases


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_says_what_was_expected_what_was_got_and_what_to_do(mistake):
    found = reports()[mistake]
    assert all(answer and answer in found.message for answer in found.answers)
    assert [word for word in MISTAKES[mistake].words if word not in found.message] == [], found.message


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if m not in CHANGING])
def test_a_mistake_leaves_the_model_as_it_was(mistake):
    assert reports()[mistake].changes == []


# --- Recovery ----------------------------------------------------------------------------------------------


def test_without_a_process_group_the_remedy_is_named():
    model = models.stem()
    before = snapshot(model)
    with pytest.raises(StateError, match="process group.*hwfsdp.launch or torchrun"):
        fully_shard(model)
    assert snapshot(model) == before
    assert train_plainly(model) == []


def recover(make: Callable[[], tuple[nn.Module, Action]], remedy: Callable[[nn.Module], Any]) -> list[str]:
    """On a rank: the mistake, the remedy that its message names, and a step; what is wrong afterwards."""
    model, action = make()
    with pytest.raises(hwfsdp.FSDPError):
        action()
    remedy(model)
    forward(model).sum().backward()
    return [name for name, param in model.named_parameters() if not isinstance(param.grad, DTensor)]


def fill(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param.to_local(), 0.1)


@pytest.mark.parametrize(
    "make, remedy",
    [
        (on_meta, fill),
        (partly_on_meta, fill),
        (mixed_dtypes, lambda model: model.to(torch.float32)),
        (functools.partial(shard, models.stem, reshard_after_forward=3), lambda model: wrap(model, ours)),
        (functools.partial(mesh_of, 1, 2), lambda model: wrap(model, ours)),
        (module_list, lambda model: wrap(model, ours)),
    ],
    ids=["meta", "partly meta", "dtypes", "argument", "mesh", "list"],
)
def test_after_a_mistake_its_remedy_works(make, remedy):
    assert launch(recover, 2, make, remedy, timeout=60) == [[], []]
