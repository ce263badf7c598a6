"""What stays the same object, and which of a parameter's two forms a module shows when."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import models
from hwfsdp import FSDPModule, fully_shard
from models import ZOO
from oracles import Library, Training, cpu_mesh, fresh, objective, ours, theirs, wrap
from together import Together

one, two, three = Together(1), Together(2), Together(3)


def forms(model: nn.Module) -> dict[str, str]:
    """Which form of each parameter is registered."""
    return {
        name: "sharded" if isinstance(param, DTensor) else "whole" for name, param in model.named_parameters()
    }


# --- Objects -----------------------------------------------------------------------------------------------


def watch_a_training(reshard_after_forward: bool | None) -> list[str]:
    """What is wrong with the parameter objects seen at every turn of three training steps.

    Gathering again is no write that autograd could notice.
    """
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
    wrong = [f"{name}: {len(seen)} times" for name, seen in whole.items() if len(seen) != 3]
    wrong += [f"{name}: several whole objects" for name, seen in whole.items() if len({*map(id, seen)}) != 1]
    wrong += [f"{name}: versions {seen}" for name, seen in versions.items() if len({*seen}) != 1]
    wrong += ["several shards" for turns in zip(*sharded, strict=True) if len({*map(id, turns)}) != 1]
    return wrong if whole else ["nothing seen"]


@one.finds([])
@two.finds([])
def a_parameter_is_two_objects_for_life() -> list[str]:
    return [wrong for reshard in (None, True, False) for wrong in watch_a_training(reshard)]


@two.finds([True, True, True])
def memory_of_a_whole_parameter_returns_to_the_object_that_autograd_saved() -> list[bool]:
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


# --- Names -------------------------------------------------------------------------------------------------


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


@one.finds({})
def names_and_their_order_never_change() -> dict[str, Any]:
    """Of every model whose names are others when wrapped, in forward, after it or after backward."""
    found = {}
    for kind, build in ZOO.items():
        for how in ("root", "nested"):
            model = build()
            plain = names_of(model)
            wrap(model, ours, how)
            turns = [names_of(model)]
            model.register_forward_pre_hook(lambda module, _, turns=turns: turns.append(names_of(module)))
            loss = objective(model(*model.inputs(4, 0)))
            turns.append(names_of(model))
            loss.backward()
            turns.append(names_of(model))
            if turns != [plain] * 4:
                found[f"{kind}, {how}"] = turns
    return found


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


WRAPPED = [("blocks", None), ("blocks", False), ("nested", True), ("root", None), ("root", True)]


@one.finds({})
@two.finds({})
def the_form_registered_is_that_of_fsdp2_at_every_turn() -> dict[Any, Any]:
    found = {}
    for how, reshard in WRAPPED:
        mine, reference = (forms_at_every_turn(library, how, reshard) for library in (ours, theirs))
        found |= {(how, reshard, t): mine[t] for t in reference if mine[t] != reference[t]}
    return found


@two.finds([True, True, True])
def both_names_of_a_tied_parameter_show_the_same_object() -> list[bool]:
    model = wrap(models.Transformer(), ours)
    same = [model.head.weight is model.embed.weight]
    model(*model.inputs(2, 0)).sum().backward()
    same.append(model.head.weight is model.embed.weight)
    model.unshard()
    return [*same, model.head.weight is model.embed.weight]


# --- Classes -----------------------------------------------------------------------------------------------


@two.finds(("FSDPBlock", True, True, True, True, True))
def the_class_of_a_sharded_module_is_derived_from_both() -> Any:
    model = wrap(models.even(), ours)
    first, second, _ = model.blocks
    return (
        type(first).__name__,
        ours(module := models.Block(2, 2, 2)) is module,
        isinstance(first, FSDPModule) and isinstance(first, models.Block),
        type(first) is type(second),
        type(first.up) is nn.Linear and type(model.blocks) is nn.ModuleList,
        type(models.even()) is models.Model,
    )


@two.finds(("FSDPSequential", True, True, 2))
def a_slice_of_a_sharded_sequential_is_plain() -> Any:
    model = ours(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)))
    part = model[:2]
    return type(model).__name__, type(part) is nn.Sequential, part[0] is model[0], len(part)


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


@three.finds({})
def shards_are_the_rows_that_torch_chunk_gives_the_rank() -> dict[Any, list[str]]:
    """By shape, what does not hold of a shard."""
    rank, mesh = dist.get_rank(), cpu_mesh()
    plain, model = fresh(Shapes), fully_shard(fresh(Shapes), mesh=mesh)
    found = {}
    for shape, whole, param in zip(SHAPES, plain.parameters(), model.parameters(), strict=True):
        chunks = [*whole.chunk(3)]
        rows, local = chunks[rank] if rank < len(chunks) else whole[:0], param.to_local()
        facts = {
            "parameter": isinstance(param, nn.Parameter) and isinstance(param, DTensor),
            "rows": local.shape == rows.shape and torch.equal(local, rows),
            "whole": torch.equal(param.full_tensor(), whole),
            "shape": (param.shape, param.stride()) == (whole.shape, whole.stride()),
            "placement": (param.placements, param.device_mesh) == ((Shard(0),), mesh),
            "requires_grad": param.requires_grad == whole.requires_grad,
            "dtype": param.dtype == whole.dtype,
        }
        if not all(facts.values()):
            found[shape] = [name for name, holds in facts.items() if not holds]
    return found


@two.finds([True] * 24)
def optimizer_state_is_sharded_like_its_parameter() -> list[bool]:
    training = Training(models.uneven, ours, policy={"param_dtype": torch.bfloat16})
    training.loss(0).backward()
    training.optimizer.step()
    return [
        isinstance(state, DTensor)
        and state.placements == param.placements == param.grad.placements == (Shard(0),)
        and state.dtype == param.dtype == param.grad.dtype == torch.float32
        and state.to_local().shape == param.to_local().shape == param.grad.to_local().shape
        for param in training.model.parameters()
        for name in ("exp_avg", "exp_avg_sq")
        for state in (training.optimizer.state[param][name],)
    ]


@two.finds((True, True))
def ignored_parameters_stay_as_they_were() -> tuple[bool, bool]:
    model = fresh(models.stem)
    ignored = {model.stem.weight, *model.blocks[0].parameters()}
    fully_shard(model, mesh=cpu_mesh(), ignored_params=ignored)
    model(*model.inputs(4, seed=dist.get_rank())).sum().backward()
    left = {param for param in model.parameters() if not isinstance(param, DTensor)}
    return left == ignored, model.stem.weight.grad.sum().item() != 0


@one.finds([True, True])
def what_moves_or_casts_a_module_returns_it() -> list[bool]:
    model = fully_shard(fresh(models.stem), mesh=cpu_mesh())
    return [model.to("cpu") is model, model.double() is model]


test_on_one_rank = one.test()
test_on_two_ranks = two.test()
test_on_three_ranks = three.test()
