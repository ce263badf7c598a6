"""What stays the same object, and which of a parameter's two forms a module shows when."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import models
from hwfsdp import FSDPModule, fully_shard, launch
from models import ZOO
from oracles import WRAPS, Library, Training, cpu_mesh, fresh, objective, ours, theirs, wrap

RESHARD = (None, True, False)


def forms(model: nn.Module) -> dict[str, str]:
    """Which form of each parameter is registered."""
    return {
        name: "sharded" if isinstance(param, DTensor) else "whole" for name, param in model.named_parameters()
    }


# --- Objects -----------------------------------------------------------------------------------------------


def watch_a_training(reshard_after_forward: bool | None) -> dict[str, Any]:
    """On a rank: the parameter objects seen at every turn of three training steps, and their versions."""
    training = Training(models.stem, ours, reshard_after_forward=reshard_after_forward)
    sharded: list[list[nn.Parameter]] = []
    whole: dict[str, list[nn.Parameter]] = {}
    versions: dict[str, list[int]] = {}

    def see(name: str, module: nn.Linear, *_: Any) -> None:
        assert type(module.weight) is nn.Parameter and not isinstance(module.weight, DTensor), name
        whole.setdefault(name, []).append(module.weight)
        versions.setdefault(name, []).append(module.weight._version)

    for name, module in training.model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(functools.partial(see, name))
    for seed in range(3):
        sharded.append(list(training.model.parameters()))
        training.loss(seed).backward()
        sharded.append(list(training.model.parameters()))
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.model.state_dict()
        for module in training.model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()
    sharded.append(list(training.model.parameters()))
    return {
        "sharded objects per parameter": {
            len({id(p) for p in turns}) for turns in zip(*sharded, strict=True)
        },
        "whole objects per layer": {name: len({id(p) for p in seen}) for name, seen in whole.items()},
        "versions per layer": {name: set(seen) for name, seen in versions.items()},
        "times seen": {len(seen) for seen in whole.values()},
    }


@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_is_two_objects_for_life(world_size, reshard_after_forward):
    """And gathering again is no write that autograd could notice."""
    for seen in launch(watch_a_training, world_size, reshard_after_forward, timeout=60):
        assert seen["times seen"] == {3}
        assert seen["sharded objects per parameter"] == {1}
        assert set(seen["whole objects per layer"].values()) == {1}
        assert all(len(versions) == 1 for versions in seen["versions per layer"].values())


def test_memory_of_a_whole_parameter_returns_to_the_object_that_autograd_saved():
    def on_a_rank() -> list[bool]:
        training = Training(models.even, ours)
        block = training.model.blocks[0]
        training.loss(0)
        block.unshard()
        saved = block.up.weight
        values = saved.detach().clone()
        block.reshard()
        freed = saved.untyped_storage().nbytes() == 0
        block.unshard()
        return [freed, block.up.weight is saved, torch.equal(saved, values)]

    assert launch(on_a_rank, 2, timeout=60) == [[True, True, True]] * 2


def test_fully_shard_returns_the_module_it_was_given():
    def on_a_rank() -> bool:
        model = models.even()
        return ours(model) is model

    assert all(launch(on_a_rank, 2, timeout=60))


# --- Names -------------------------------------------------------------------------------------------------


def names_at_every_turn(how: str) -> dict[str, list[list[str]]]:
    """By model: the names of its parameters when plain, wrapped, in forward, after it and after backward."""
    found = {}
    for kind, build in ZOO.items():
        model = build()
        turns = found[kind] = [names_of(model)]
        wrap(model, ours, how)
        turns.append(names_of(model))
        model.register_forward_pre_hook(lambda module, _, turns=turns: turns.append(names_of(module)))
        loss = objective(model(*model.inputs(4, 0)))
        turns.append(names_of(model))
        loss.backward()
        turns.append(names_of(model))
    return found


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


@functools.cache
def names(how: str) -> dict[str, list[list[str]]]:
    return launch(names_at_every_turn, 1, how, timeout=60)[0]


@pytest.mark.parametrize("how", WRAPS)
@pytest.mark.parametrize("model", ZOO)
def test_names_and_their_order_never_change(model, how):
    plain, *turns = names(how)[model]
    assert len(turns) == 4
    assert all(turn == plain for turn in turns)


# --- Forms -------------------------------------------------------------------------------------------------


def forms_at_every_turn(library: Library, how: str, reshard: bool | None) -> dict[str, dict[str, str]]:
    training = Training(models.Transformer, library, how, reshard_after_forward=reshard)
    model, turns = training.model, {}
    turns["wrapped"] = forms(model)
    with torch.no_grad():
        training.loss(0)
    turns["after a forward without gradients"] = forms(model)
    loss = training.loss(1)
    turns["after a forward"] = forms(model)
    loss.backward()
    turns["after a backward"] = forms(model)
    model.unshard()
    turns["unsharded by hand"] = forms(model)
    model.reshard()
    turns["resharded by hand"] = forms(model)
    training.loss(2)
    model.state_dict()
    turns["after a state dict"] = forms(model)
    model.set_reshard_after_backward(False)
    training.loss(3).backward()
    turns["after a backward that keeps"] = forms(model)
    model.set_reshard_after_forward(False)
    training.loss(4)
    turns["after a forward told to keep"] = forms(model)
    model.set_reshard_after_forward(True)
    training.loss(4)
    turns["after a forward told to reshard"] = forms(model)
    return turns


@functools.cache
def all_forms(world_size: int) -> Any:
    def on_a_rank() -> Any:
        return {
            (how, reshard): [forms_at_every_turn(library, how, reshard) for library in (ours, theirs)]
            for how in WRAPS
            for reshard in RESHARD
        }

    return launch(on_a_rank, world_size, timeout=60)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", WRAPS)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_the_form_registered_is_that_of_fsdp2_at_every_turn(world_size, how, reshard_after_forward):
    for rank in all_forms(world_size):
        mine, reference = rank[how, reshard_after_forward]
        for turn in reference:
            assert mine[turn] == reference[turn], turn


@pytest.mark.parametrize(
    "reshard_after_forward, root, block", [(None, "whole", "sharded"), (False,) + ("whole",) * 2]
)
def test_after_a_forward_the_root_stays_whole(reshard_after_forward, root, block):
    after = all_forms(2)[0]["blocks", reshard_after_forward][0]["after a forward"]
    assert {after["embed.weight"], after["norm.weight"]} == {root}
    assert {form for name, form in after.items() if name.startswith("blocks")} == {block}


def test_both_names_of_a_tied_parameter_show_the_same_object():
    def on_a_rank() -> list[bool]:
        model = wrap(models.Transformer(), ours)
        same = [model.head.weight is model.embed.weight]
        model(*model.inputs(2, 0)).sum().backward()
        same.append(model.head.weight is model.embed.weight)
        model.unshard()
        return [*same, model.head.weight is model.embed.weight]

    assert launch(on_a_rank, 2, timeout=60) == [[True] * 3] * 2


# --- Classes -----------------------------------------------------------------------------------------------


def on_one_rank(check: Callable[[], Any]) -> Any:
    return launch(check, 1, timeout=60)[0]


def test_the_class_of_a_sharded_module_is_derived_from_both():
    def check() -> Any:
        model = wrap(models.even(), ours)
        first, second, _ = model.blocks
        return (
            type(first).__name__,
            isinstance(first, FSDPModule) and isinstance(first, models.Block),
            type(first) is type(second),
            type(first.up) is nn.Linear and type(model.blocks) is nn.ModuleList,
            type(models.even()) is models.Model,
        )

    assert on_one_rank(check) == ("FSDPBlock", True, True, True, True)


def test_a_slice_of_a_sharded_sequential_is_plain():
    def check() -> Any:
        model = ours(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)))
        part = model[:2]
        return type(model).__name__, type(part) is nn.Sequential, part[0] is model[0], len(part)

    assert on_one_rank(check) == ("FSDPSequential", True, True, 2)


# --- Shards ------------------------------------------------------------------------------------------------

SHAPES = [(1,), (2,), (3,), (4,), (5,), (7, 3), (8, 2), (1, 4), (3, 1, 2), (6, 5), (9,)]


class Shapes(nn.Module):
    """A parameter of each shape; every second one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        for index, shape in enumerate(SHAPES):
            param = nn.Parameter(torch.randn(shape), requires_grad=index % 2 == 0)
            self.register_parameter(f"p{index}", param)

    def forward(self) -> torch.Tensor:
        return sum(p.square().sum() for p in self.parameters())


def shards() -> list[list[bool]]:
    """On a rank: what holds of each shard."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    plain, model = fresh(Shapes), fresh(Shapes)
    mesh = cpu_mesh()
    fully_shard(model, mesh=mesh)
    found = []
    for whole, param in zip(plain.parameters(), model.parameters(), strict=True):
        chunks = [*whole.chunk(world_size)]
        rows = chunks[rank] if rank < len(chunks) else whole[:0]
        local = param.to_local()
        facts = {
            "parameter": isinstance(param, nn.Parameter) and isinstance(param, DTensor),
            "rows": local.shape == rows.shape and torch.equal(local, rows),
            "whole": torch.equal(param.full_tensor(), whole),
            "shape": (param.shape, param.stride()) == (whole.shape, whole.stride()),
            "placement": (param.placements, param.device_mesh) == ((Shard(0),), mesh),
            "requires_grad": param.requires_grad == whole.requires_grad,
            "dtype": param.dtype == whole.dtype,
        }
        found.append([name for name, holds in facts.items() if not holds])
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shards_are_the_rows_that_torch_chunk_gives_the_rank(world_size):
    for wrong in launch(shards, world_size, timeout=60):
        assert dict(zip(SHAPES, wrong, strict=True)) == {shape: [] for shape in SHAPES}


def test_optimizer_state_is_sharded_like_its_parameter():
    def on_a_rank() -> list[bool]:
        training = Training(models.uneven, ours, policy={"param_dtype": torch.bfloat16})
        training.loss(0).backward()
        training.optimizer.step()
        facts = []
        for param in training.model.parameters():
            for name in ("exp_avg", "exp_avg_sq"):
                state = training.optimizer.state[param][name]
                facts.append(
                    isinstance(state, DTensor)
                    and state.placements == param.placements == param.grad.placements == (Shard(0),)
                    and state.dtype == param.dtype == param.grad.dtype == torch.float32
                    and state.to_local().shape == param.to_local().shape == param.grad.to_local().shape
                )
        return facts

    for facts in launch(on_a_rank, 2, timeout=60):
        assert len(facts) == 24 and all(facts)


def test_ignored_parameters_stay_as_they_were():
    def on_a_rank() -> Any:
        model = fresh(models.stem)
        ignored = {model.stem.weight, *model.blocks[0].parameters()}
        fully_shard(model, mesh=cpu_mesh(), ignored_params=ignored)
        model(*model.inputs(4, seed=torch.distributed.get_rank())).sum().backward()
        left = {param for param in model.parameters() if not isinstance(param, DTensor)}
        local = model.stem.weight.grad
        mean = DTensor.from_local(local, cpu_mesh(), [Replicate()]).full_tensor()
        return left == ignored, local.sum().item() != 0, torch.equal(local, mean)

    results = launch(on_a_rank, 2, timeout=60)
    assert [facts[:2] for facts in results] == [(True, True)] * 2
