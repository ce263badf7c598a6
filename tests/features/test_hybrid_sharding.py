"""Hybrid sharding: parameters sharded along one axis of the mesh, replicated along another.

The oracle is torch's FSDP2 on a mesh of the same shape, in the same processes, and unsharded PyTorch. Where every group has at most
two ranks, the order of additions does not matter, and bits are compared. The event log shows the collectives; their bytes follow from
the shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hwfsdp
import models
from hwfsdp import Event, EventLog, launch
from oracles import (
    BF16_FP32,
    Case,
    Promises,
    Shape,
    Training,
    accumulate,
    compare_traffic,
    configure,
    grid,
    ours,
    recorded_steps,
    sharded_modules,
    two_steps,
    walk,
)

# --- Numbers -----------------------------------------------------------------------------------------------


def leave_sums_for_the_next_step(training: Training) -> None:
    """Take a step that only scatters: the optimizer finds no gradients. The next step has the gradients of both."""
    for seed, reduces in enumerate("saa"):
        configure(training, reduces)
        training.loss(seed).backward()
        training.update()
    training.keep_params()


def accumulated(pattern: str, **options: bool) -> Case:
    return Case(models.uneven, functools.partial(accumulate, pattern=pattern, **options))


EVERYWHERE: dict[str, Case] = {
    "uneven": Case(models.uneven),
    "bf16, reduce fp32": Case(models.uneven, options={"policy": BF16_FP32}),
    "accumulate nsa": accumulated("nsa"),
}
ON_FOUR: dict[str, Case] = {
    "sums left for the next step": Case(models.stem, leave_sums_for_the_next_step),
}


def on_mesh(shape: Shape, cases: dict[str, Case]) -> dict[str, Case]:
    return {
        f"{name} on {shape}": dataclasses.replace(case, options={"shape": shape, **case.options})
        for name, case in cases.items()
    }


TRAINS = "on a 2D mesh training goes as under FSDP2 and as without sharding"
PROMISES = Promises()
PROMISES.trains(TRAINS, on_mesh((2, 1), {"uneven": EVERYWHERE["uneven"]}))
PROMISES.trains(
    TRAINS,
    on_mesh((2, 2), EVERYWHERE | ON_FOUR),
    ranks=4,
    # gradients of their own, by design
    not_plain=("sums left for the next step on (2, 2)",),
)


# --- Where torch 2.13 has no answer ------------------------------------------------------------------------


ON_MESH = {"shape": (2, 2)}
PATHS: dict[str, tuple[Any, list[Any], str]] = {
    "other branches each time": (models.Branching, [("left",), ("right",)] * 2, "ssna"),
    "a block left out": (models.wandering, [(0, 1, 2), (0, 2)], "sa"),
}
SUMS = {
    name: Case(build, functools.partial(walk, paths=paths, pattern=pattern), options=ON_MESH)
    for name, (build, paths, pattern) in PATHS.items()
}
# FSDP2 keeps one flat sum per group: it raises if the next has another size, and waits for a block left out
PROMISES.trains(
    "sums that are not all-reduced yet may be of other parameters",
    SUMS,
    ranks=4,
    not_fsdp2=SUMS,
)


# --- Overlap, from hwfsdp's events -------------------------------------------------------------------------

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.fixture(scope="module")
def logs() -> list[EventLog]:
    """Return each rank's log of two training steps."""
    return launch(lambda: recorded_steps(Training(models.graded, ours, shape=(2, 2))), 4, timeout=200)


def one(log: EventLog, op: str, owner: str, step: int) -> Event:
    [event] = log.select(op, owner=owner, step=step, phase="backward")
    return event


def test_each_group_is_all_reduced_between_its_reduce_scatter_and_the_optimizer(logs):
    for log, owner, step in itertools.product(logs, BLOCKS, (0, 1)):
        scatter, reduction = (one(log, op, owner, step) for op in ("reduce_scatter", "all_reduce"))
        assert log.happens_before(scatter, reduction), (owner, step)
        assert log.happens_before(reduction, log.select("optimizer")[step]), (owner, step)


def test_neither_a_later_backward_nor_the_next_copy_in_waits_for_an_all_reduce(logs):
    for log, block, step in itertools.product(logs, (2, 1), (0, 1)):
        reduction = one(log, "all_reduce", BLOCKS[block], step)
        assert reduction.stream == "all_reduce"
        for before in BLOCKS[:block]:
            assert not log.happens_before(reduction, one(log, "backward", before, step)), before
        [packing] = log.select("copy_in", owner=BLOCKS[block - 1], step=step, stream="compute")
        assert not log.happens_before(reduction, packing)


# --- A hook in place of, or after, the all-reduce ----------------------------------------------------------


def with_hooks(training: Training, make_hook: Callable[[], Any], **options: Any) -> None:
    for module in sharded_modules(training.model):
        module.set_all_reduce_hook(make_hook(), **options)


def average_over_replicas(reduced: Tensor) -> None:
    dist.all_reduce(reduced, dist.ReduceOp.AVG, group=grid((2, 2)).get_group("replicate"))


def on_shard_axis(package: ModuleType, module: nn.Module, *, shape: Shape) -> nn.Module:
    """Shard plainly over the second axis, without the first."""
    return package.fully_shard(module, mesh=grid(shape)["shard"])


def by_hand(training: Training, pattern: str, on_stream: bool = False) -> None:
    """Build hybrid sharding from plain sharding and a hook."""
    options = {"stream": torch.cpu.Stream()} if on_stream else {}
    with_hooks(training, lambda: average_over_replicas, **options)
    accumulate(training, pattern)


def doubled(training: Training) -> None:
    """Double the all-reduced gradients in a hook of native hybrid sharding."""
    seen: list[Tensor] = []

    def double(reduced: Tensor) -> None:
        seen.append(reduced.detach().clone())
        reduced.mul_(2)

    with_hooks(training, lambda: double)
    accumulate(training, "ssa")
    for number, reduced in enumerate(seen):  # the order of parameters in it is nobody's business
        training.trace.keep(f"reduced {number} (local)", reduced.flatten().sort().values)


def remove_hook(training: Training) -> None:
    """Check that a removed hook is not called, and that a hook of hybrid sharding gets no stream of its own."""
    called: list[Tensor] = []
    with_hooks(training, lambda: called.append)
    with_hooks(training, lambda: None)
    training.steps(1)
    assert called == []
    with pytest.raises(ValueError, match="stream"):
        training.model.blocks[0].set_all_reduce_hook(average_over_replicas, stream=torch.cpu.Stream())


def hooked(scenario: Any, sharding: Any = None, **options: Any) -> Case:
    return Case(models.uneven, functools.partial(scenario, **options), "blocks", ON_MESH, sharding)


HOOKS: dict[str, Case] = {
    "hand-made, on a stream": hooked(by_hand, on_shard_axis, pattern="b", on_stream=True),
    "native, accumulate ssa": hooked(doubled),
    "removed": hooked(remove_hook),
}
PROMISES.trains(
    "an all-reduce as hook makes hybrid sharding, and a hook there gets what was all-reduced",
    HOOKS,
    ranks=4,
    not_plain=HOOKS,
)


# --- Axes by name ------------------------------------------------------------------------------------------


class OnMesh(models.Stem):
    """A model that takes this rank's rows as a DTensor if its parameters are DTensors."""

    def __init__(self) -> None:
        super().__init__([models.Block(8, 7, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weight = self.stem.weight
        if not isinstance(weight, DTensor):
            return super().forward(x)
        mesh = weight.device_mesh
        return super().forward(DTensor.from_local(x, mesh, [Shard(0)] * mesh.ndim)).to_local()


class Axes(NamedTuple):
    """A mesh, and the roles of its axes."""

    shape: Shape
    names: tuple[str, ...]
    dims: dict[str, Any]


R, S = Replicate(), Shard(0)
NAMED: dict[str, Axes] = {
    "replicate": Axes((2,), ("r",), {"replicate": "r"}),
    "both": Axes((2, 2), ("r", "s"), {"replicate": "r", "shard": "s"}),
    "shard both": Axes((2, 2), ("a", "b"), {"shard": ("a", "b")}),
}


def shard_by_name(package: ModuleType, module: nn.Module, *, axes: Axes, **options: Any) -> nn.Module:
    """Replicate the parameters as DTensors on the whole mesh, then shard these."""
    mesh = grid(axes.shape, axes.names)
    for part in module.modules():
        for name, param in list(part.named_parameters(recurse=False)):
            if not isinstance(param, DTensor):
                spread = distribute_tensor(param.detach(), mesh, [Replicate()] * mesh.ndim)
                part.register_parameter(name, nn.Parameter(spread, param.requires_grad))
    dims = package.DataParallelMeshDims(**axes.dims)
    return package.fully_shard(module, mesh=mesh, dp_mesh_dims=dims, **options)


def named(axes: str, scenario: Any = two_steps) -> Case:
    return Case(OnMesh, scenario, options={"axes": NAMED[axes]}, sharding=shard_by_name)


BY_NAME = "axes given by name train as under FSDP2 and as on a mesh without them"
PROMISES.trains(BY_NAME, {"train, replicate": named("replicate")})
PROMISES.trains(
    BY_NAME,
    {
        "accumulate nsa, both": named("both", functools.partial(accumulate, pattern="nsa")),
        "train, shard both": named("shard both"),
    },
    ranks=4,
)


def refuse_to_reshard_to_two() -> Any:
    with pytest.raises(NotImplementedError):
        shard_by_name(hwfsdp, OnMesh(), axes=NAMED["shard both"], reshard_after_forward=2)
    return {"refused": []}


def cut_by_another_axis() -> Any:
    """Compare parameters that tensor parallelism has cut over the other axis of the mesh."""
    mesh, different = grid((2, 2), ("dp", "tp")), []
    for over_tp in (Shard(0), Shard(1)):
        weights = []
        for package in (hwfsdp, fsdp):
            torch.manual_seed(0)
            module = spread(mesh, [R, over_tp], 6, 10)
            dims = package.DataParallelMeshDims(shard="dp")
            weights.append(package.fully_shard(module, mesh=mesh, dp_mesh_dims=dims).weight)
        mine, reference = weights
        local_parts = mine.to_local(), reference.to_local()
        if mine.placements != reference.placements or not torch.equal(*local_parts):
            different.append(f"{over_tp}: {mine.placements} is not {reference.placements}")
    return {"FSDP2": different}


def spread(over: DeviceMesh, placements: Sequence[Any], *sizes: int) -> nn.Module:
    linear = nn.Linear(*sizes or (4, 4), bias=False)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), over, placements))
    return linear


def refuse_wrong_axes() -> Any:
    """Check that each of these mistakes is refused, as by FSDP2."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    unrefused = []
    for mistake, (module, over, dims) in {
        "an axis that is not there": (spread(mesh, [R, R]), mesh, {"shard": "a", "replicate": "c"}),
        "parameters on another mesh": (spread(other, [R, R]), mesh, {"shard": "a"}),
        "sharded along the axis to shard": (spread(mesh, [S, R]), mesh, {"shard": "a"}),
    }.items():
        try:
            dp_mesh_dims = hwfsdp.DataParallelMeshDims(**dims)
            hwfsdp.fully_shard(module, mesh=over, dp_mesh_dims=dp_mesh_dims)
            unrefused.append(mistake)
        except ValueError:
            pass
    return {"unrefused": unrefused}


PROMISES.add(
    BY_NAME,
    {"only reduced": functools.partial(compare_traffic, named("replicate")), "refused": refuse_wrong_axes},
)
PROMISES.add(
    BY_NAME,
    {"no smaller mesh after forward": refuse_to_reshard_to_two, "cut by another axis": cut_by_another_axis},
    ranks=4,
)


test_a_promise_is_kept = PROMISES.test()


def test_named_axes_have_the_fields_of_fsdp2_and_are_at_least_one():
    for dims in ({"shard": "a"}, {"replicate": "a"}, {"shard": ("a", "b"), "replicate": "c"}):
        mine, reference = hwfsdp.DataParallelMeshDims(**dims), fsdp.DataParallelMeshDims(**dims)
        assert dataclasses.asdict(mine) == dataclasses.asdict(reference)
        assert mine.shard_names == reference.shard_names
        assert mine.replicate_names == reference.replicate_names
    with pytest.raises(ValueError, match="shard"):
        hwfsdp.DataParallelMeshDims()
