"""Sharding over the data-parallel axes of a mesh whose last axis is tensor parallel.

Three runs of the same task are compared: hwfsdp over a model cut by torch's tensor parallelism, FSDP2 over the same, and the original
model on the whole batch. Along an axis of two ranks, sums have one order; so where no axis is longer, bits are compared with FSDP2.
Each rank compares its own part. The tests compute which part this is without DTensor: chunks of chunks, the last axis of the mesh
first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import hwfsdp
import models
from hwfsdp import launch
from oracles import (
    BF16_FP32,
    BITS,
    REGROUPING,
    Case,
    Policy,
    Promises,
    Scenario,
    Shape,
    accumulate,
    clip,
    differences,
    fresh,
    grid,
    ours,
    theirs,
    two_steps,
    unsharded,
)

# --- Meshes ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def without_checks_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off torch's checks of collectives: with them, functional collectives of DTensors sometimes corrupt the heap of a rank."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")


AXES = ("replicate", "shard", "tp")


def chunk(tensor: Tensor, parts: int, index: int, dim: int) -> Tensor:
    """Return the chunk of `torch.chunk` with this index, or an empty one."""
    chunks = tensor.chunk(parts, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def part_of(
    whole: Tensor, sizes: Shape, placements: Sequence[Placement], coordinate: Sequence[int]
) -> Tensor:
    """Return the part of a tensor for the rank at `coordinate`: chunks of chunks, cut along the last axis first."""
    for size, placement, index in reversed(list(zip(sizes, placements, coordinate, strict=True))):
        if isinstance(placement, Shard | _StridedShard):
            whole = chunk(whole, size, index, placement.dim)
    return whole


def part_like(tensor: DTensor, whole: Tensor) -> Tensor:
    """Return the part of `whole` that this rank should hold of a DTensor."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return part_of(whole, tuple(tensor.device_mesh.shape), tensor.placements, coordinate)


# --- Models ------------------------------------------------------------------------------------------------

PLAN = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}


def cut_blocks(module: nn.Module, tp: DeviceMesh) -> None:
    """Cut the first linear of a block along its outputs, and the second along its inputs."""
    if isinstance(module, models.Block):
        parallelize_module(module, tp, PLAN)


class Norm(nn.Module):
    """A residual around a norm and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = models.Block(8, 12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Sequences(models.Stem):
    """A model with four vectors per row."""

    def __init__(self) -> None:
        super().__init__([Norm() for _ in range(2)])

    def inputs(self, rows: int, seed: int) -> tuple[Tensor, ...]:
        return (torch.randn(rows, 4, 8, generator=torch.Generator().manual_seed(seed)),)


def cut_mlps(module: nn.Module, tp: DeviceMesh) -> None:
    """Cut only the MLPs. Norms, stem and head stay plain; each norm is in one group with a cut MLP."""
    if isinstance(module, Norm):
        parallelize_module(module.mlp, tp, PLAN)


def cut_sequence(module: nn.Module, tp: DeviceMesh) -> None:
    """Cut the sequence between the blocks. So norms see a part of it, and their gradients are sums over tp."""
    plan: dict[str, Any] = {
        "stem": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    if isinstance(module, Norm):
        plan = {
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    parallelize_module(module, tp, plan)


def cut_tied(module: nn.Module, tp: DeviceMesh) -> None:
    """Cut embedding and head along the vocabulary. This makes two parameters of one, so tie them again."""
    cut_blocks(module, tp)
    if isinstance(module, models.Transformer):
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(module, tp, plan)
        module.head.weight = module.embed.weight


# --- Trainings ---------------------------------------------------------------------------------------------


def cut_and_shard(
    package: ModuleType,
    module: nn.Module,
    *,
    shape: Shape,
    cut: Callable[[nn.Module, DeviceMesh], None],
    policy: Policy | None = None,
    **options: Any,
) -> nn.Module:
    mesh = grid(shape, AXES)
    cut(module, mesh["tp"])
    mp_policy = package.MixedPrecisionPolicy(**policy or {})
    return package.fully_shard(module, mesh=mesh[AXES[-len(shape) : -1]], mp_policy=mp_policy, **options)


def cut_case(
    shape: Shape,
    build: Callable[[], models.Model] = models.uneven,
    cut: Callable[[nn.Module, DeviceMesh], None] = cut_blocks,
    scenario: Scenario = two_steps,
    **options: Any,
) -> Case:
    return Case(build, scenario, "blocks", {"shape": shape, "cut": cut, **options}, cut_and_shard, shape[-1])


UNREDUCED = functools.partial(accumulate, pattern="nnb", say_last=True)
CASES: dict[str, Case] = {
    "uneven, one shard": cut_case((2, 1)),
    "clip": cut_case((1, 2), scenario=clip),
    "bf16, sequence parallel": cut_case((1, 2), Sequences, cut_sequence, policy=BF16_FP32),
    "uneven": cut_case((2, 2)),
    "plain norms in one group with cut layers": cut_case((2, 2), Sequences, cut_mlps),
    "tied embedding": cut_case((2, 2), lambda: models.Transformer(models.Block(6, 8, 6)), cut_tied),
    "sharded along the last dim": cut_case(
        (2, 2), models.even, shard_placement_fn=lambda param: Shard(param.ndim - 1)
    ),
    "accumulate unreduced": cut_case((2, 2), scenario=UNREDUCED),
    "accumulate over replicas": cut_case(
        (2, 1, 2), Sequences, cut_sequence, functools.partial(accumulate, pattern="ssa")
    ),
}


def compare(case: Case) -> dict[str, list[str]]:
    """Return the differences from FSDP2, and from the model that is neither sharded nor cut."""
    got = case.run(ours)
    found = {"FSDP2": differences(got, case.run(theirs), *BITS)}
    if "policy" not in case.options:
        plain = case.run(unsharded)
        for name, tensor in got.tensors.items():
            if isinstance(tensor, DTensor):
                got.tensors[name] = tensor.to_local()
                plain.tensors[name] = part_like(tensor, plain.tensors[name])
        found["unsharded"] = differences(got.whole(), plain.whole(), *REGROUPING)
    return found


PROMISES = Promises()
for _name, _case in CASES.items():
    PROMISES.add(
        "a cut model trains as under FSDP2 and as if neither sharded nor cut",
        {_name: functools.partial(compare, _case)},
        torch.Size(_case.options["shape"]).numel(),
    )
test_a_promise_is_kept = PROMISES.test()


# --- Layouts -----------------------------------------------------------------------------------------------

AXES_CUT: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "nothing": Replicate()}


class Rows(nn.Module):
    """A module with parameters of 1 to 9 rows."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows in itertools.product(AXES_CUT, range(1, 10)):
            self.register_parameter(f"{name}_{rows}", nn.Parameter(torch.randn(rows, 3)))


def cut_rows(model: nn.Module, tp: DeviceMesh) -> None:
    """Cut along rows, along columns or not at all, as the parameter's name says."""
    for name, param in list(model.named_parameters()):
        placement = AXES_CUT[name.split("_")[0]]
        local = part_of(param.detach(), (tp.size(),), (placement,), (tp.get_local_rank(),))
        shape = {"shape": param.shape, "stride": param.stride()}
        cut = DTensor.from_local(local.contiguous(), tp, [placement], run_check=False, **shape)
        setattr(model, name, nn.Parameter(cut))


def fake_layouts() -> list[str]:
    """Play every rank of some meshes in turn, in one process. Sharding needs no communication.

    torch 2.13 gives the rank at (2, 0) one of 7 rows on (3, 2), but no row is left for it.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    wrong = []
    dist.destroy_process_group()
    # the check would need collectives, which a fake group does not have
    dist.set_debug_level(dist.DebugLevel.OFF)
    plain = fresh(Rows)
    shapes: tuple[Shape, ...] = ((2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (5, 2))
    for shape, rank in ((shape, rank) for shape in shapes for rank in range(torch.Size(shape).numel())):
        size = torch.Size(shape).numel()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES[1:])
        model = fresh(Rows)
        cut_rows(model, mesh["tp"])
        hwfsdp.fully_shard(model, mesh=mesh["shard"])
        for name, param in model.named_parameters():
            whole, local = plain.get_parameter(name), param.to_local()
            part = part_of(whole, shape, param.placements, mesh.get_coordinate() or ())
            same_shape = (param.shape, param.stride()) == (whole.shape, whole.stride())
            in_place = param.device_mesh == mesh and local.is_contiguous()
            if not (same_shape and in_place and torch.equal(local, part)):
                wrong.append(f"{name} at {mesh.get_coordinate()} of {shape}: {local.tolist()}")
        dist.destroy_process_group()
    return wrong


def test_ranks_hold_the_chunks_of_their_tensor_parallel_chunks():
    assert launch(fake_layouts, 1, timeout=60) == [[]]
