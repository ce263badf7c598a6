"""Ranks that call one collective for different parameter groups get an error. Programs in which the groups belong together run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hwfsdp import fully_shard
from hwfsdp.collectives import DefaultAllGather
from together import Together

in_memory = Together(2, TORCH_DISTRIBUTED_DEBUG="OFF")
over_gloo = Together(2, TORCH_DISTRIBUTED_DEBUG="DETAIL", HWFSDP_SHARED_MEMORY="0")
Shard = Callable[..., Any]


def linear(value: float = 1.0, rows: int = 4, columns: int = 4) -> nn.Linear:
    made = nn.Linear(columns, rows, bias=False)
    nn.init.constant_(made.weight, value)
    return made


def blocks(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(linear(number) for number in range(1, count + 1)))


def on_new_ranks(**options: Any) -> Shard:
    """Return `fully_shard` over a process group that no other check uses."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    return lambda module: fully_shard(module, mesh=mesh, **options)


def ones(rows: int = 2, columns: int = 4) -> torch.Tensor:
    return torch.ones(rows, columns, requires_grad=True)


# --- Groups that differ --------------------------------------------------------------------------------------

GROUP = r"'[^']*', number \d of the \d groups over these ranks"
DIFFER = rf"with different parameter groups: rank {{}} with {GROUP}, rank {{}} with {GROUP}; (they|their) "


def differs(run: Callable[[], Any]) -> Callable[[], Any]:
    """Register a program that must fail on both ranks, with the names of both groups."""

    def fails() -> bool | str:
        rank = dist.get_rank()
        try:
            run()
        except RuntimeError as error:
            return bool(re.search(DIFFER.format(rank, 1 - rank), str(error))) or str(error)
        return "no error"

    for together in (in_memory, over_gloo):
        together.add(run.__name__, fails, True)
    return run


@differs
def each_rank_runs_another_expert() -> None:
    shard = on_new_ranks()
    experts = nn.ModuleDict({name: shard(linear()) for name in "ab"})
    experts["ab"[dist.get_rank()]](ones())


@differs
def the_ranks_run_the_blocks_of_a_model_in_another_order() -> None:
    shard = on_new_ranks()
    model = blocks()
    for block in model:
        shard(block)
    shard(model)(ones())
    for number in (0, 1) if dist.get_rank() else (1, 0):
        model[number](ones())


@differs
def the_ranks_reduce_the_gradients_of_other_blocks() -> None:
    shard = on_new_ranks(reshard_after_forward=False)
    outputs = [shard(linear())(ones()) for _ in range(2)]
    outputs[dist.get_rank()].sum().backward()


@differs
def parameters_of_other_shapes_have_as_many_bytes() -> None:
    size = (2, 8) if dist.get_rank() else (8, 2)
    on_new_ranks()(linear(1.0, *size))(ones(2, size[1]))


class Pair(nn.Module):
    """Two parameters of the same shape. Ranks may register them in another order."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.first + self.second


@differs
def the_ranks_register_parameters_in_another_order() -> None:
    names = ("first", "second")
    on_new_ranks()(Pair(*names[:: -1 if dist.get_rank() else 1]))(ones())


# --- Groups that belong together ------------------------------------------------------------------------------


def agrees(run: Callable[[], Any]) -> Callable[[], Any]:
    """Register a program that must run, and return the sum of a result."""
    for together in (in_memory, over_gloo):
        together.add(run.__name__, lambda: float(run()), 2 * 4.0 * 4 * 8 * 12)
    return run


def trained(model: nn.Module) -> torch.Tensor:
    output: torch.Tensor = model(ones()).sum()
    output.backward()
    return output


@agrees
def the_ranks_give_their_modules_other_names() -> torch.Tensor:
    shard, rank = on_new_ranks(), dist.get_rank()
    model = nn.Sequential()
    for number, block in enumerate(blocks()):
        model.add_module(f"of_rank_{rank}_{number}", shard(block))
    return trained(shard(model))


@agrees
def the_ranks_shard_the_blocks_in_another_order() -> torch.Tensor:
    shard, model = on_new_ranks(), blocks()
    for number in (0, 1, 2) if dist.get_rank() else (2, 0, 1):
        shard(model[number])
    return trained(shard(model))


@agrees
def one_rank_has_sharded_a_model_that_it_does_not_run() -> torch.Tensor:
    shard, model = on_new_ranks(), blocks()
    if dist.get_rank():
        shard(blocks())
    for block in model:
        shard(block)
    return trained(shard(model))


@agrees
def the_user_gathers_by_hand_before_the_first_forward() -> torch.Tensor:
    shard, model = on_new_ranks(), blocks()
    for block in model:
        shard(block)
    shard(model)
    for block in reversed(model):
        block.unshard()
    return trained(model)


@agrees
def the_user_calls_collectives_over_the_same_ranks() -> torch.Tensor:
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    group, model = mesh.get_group(), blocks()
    whole = torch.zeros(2)
    for block in model:
        fully_shard(block, mesh=mesh)
        dist.all_reduce(torch.ones(2), group=group)
        DefaultAllGather(group)(whole, torch.ones(1), group)
    result = trained(fully_shard(model, mesh=mesh))
    DefaultAllGather(group)(whole, torch.ones(1), group)
    return result * whole.mean()


test_in_shared_memory = in_memory.test()
test_over_gloo_with_detail_debugging = over_gloo.test()
