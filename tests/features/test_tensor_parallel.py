"""Sharding over the data-parallel axes of a mesh whose last axis is tensor parallel.

Three runs of the same task are compared: hwfsdp over a model cut by torch's tensor parallelism, FSDP2 over the same, and the original
model on the whole batch. Along an axis of two ranks, sums have one order; so where no axis is longer, bits are compared with FSDP2.
Each rank compares its own part. The tests compute which part this is without DTensor: chunks of chunks, the last axis of the mesh
first.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
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
    REGROUPING,
    ROWS,
    Promises,
    Shape,
    Trace,
    Training,
    accumulate,
    against_fsdp2,
    clip,
    differences,
    fresh,
    unsharded,
    wrap,
)

# --- Meshes ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def without_checks_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off torch's checks of collectives: with them, functional collectives of DTensors sometimes corrupt the heap of a rank."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")


@functools.cache
def mesh_of(shape: Shape) -> DeviceMesh:
    """Return all ranks as (dp, tp), or as (replicate, shard, tp). Make the mesh once, because process groups take time to make."""
    names = ("dp", "tp") if len(shape) == 2 else ("replicate", "shard", "tp")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes for fully_shard."""
    return mesh["dp"] if mesh.ndim == 2 else mesh["replicate", "shard"]


def is_cut(placement: Placement) -> bool:
    return isinstance(placement, Shard | _StridedShard)


def chunk(tensor: Tensor, parts: int, index: int, dim: int) -> Tensor:
    """Return the chunk of `torch.chunk` with this index, or an empty one."""
    chunks = tensor.chunk(parts, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def part_of(whole: Tensor, sizes: Shape, placements: tuple[Placement, ...], coordinate: Shape) -> Tensor:
    """Return the part of a tensor for the rank at `coordinate`: chunks of chunks, cut along the last axis first."""
    for size, placement, index in reversed(list(zip(sizes, placements, coordinate, strict=True))):
        if is_cut(placement):
            whole = chunk(whole, size, index, placement.dim)
    return whole


class Layout(NamedTuple):
    """The part of a tensor that a rank holds."""

    sizes: Shape
    placements: tuple[Placement, ...]
    coordinate: Shape

    def part(self, whole: Tensor) -> Tensor:
        return part_of(whole, *self)


def layout_of(tensor: DTensor) -> Layout:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return Layout(tuple(tensor.device_mesh.shape), tensor.placements, tuple(coordinate))


class LocalTrace(Trace):
    """A trace of local parts and their layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts: dict[str, Layout] = {}

    def keep(self, name: str, tensor: Tensor | None) -> None:
        if isinstance(tensor, DTensor):
            self.layouts[f"{name} #{self.counts[name]}"] = layout_of(tensor)
            tensor = tensor.to_local()
        super().keep(name, tensor)

    def parts(self, whole: Trace) -> Trace:
        """Return this rank's parts of a trace of whole tensors."""
        trace = Trace()
        for name, tensor in whole.tensors.items():
            is_part = tensor is not None and name in self.layouts
            trace.tensors[name] = self.layouts[name].part(tensor) if is_part else tensor
        return trace


# --- Models ------------------------------------------------------------------------------------------------

Cut = Callable[[models.Model, DeviceMesh], None]
PLAN = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}


def cut_blocks(model: models.Model, tp: DeviceMesh) -> None:
    """Cut the first linear of each block along its outputs, and the second along its inputs."""
    for block in model.blocks:
        parallelize_module(block, tp, PLAN)


class Norm(nn.Module):
    """A residual around a norm and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = models.Block(8, 12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Sequence(models.Stem):
    """A model with four vectors per row."""

    def __init__(self) -> None:
        super().__init__([Norm() for _ in range(2)])

    def inputs(self, rows: int, seed: int) -> tuple[Tensor, ...]:
        return (torch.randn(rows, 4, 8, generator=torch.Generator().manual_seed(seed)),)


def cut_mlps(model: models.Model, tp: DeviceMesh) -> None:
    """Cut only the MLPs. Norms, stem and head stay plain; each norm is in one group with a cut MLP."""
    for block in model.blocks:
        parallelize_module(block.mlp, tp, PLAN)


def cut_sequence(model: models.Model, tp: DeviceMesh) -> None:
    """Cut the sequence between the blocks. So norms see a part of it, and their gradients are sums over tp."""
    parallelize_module(
        model,
        tp,
        {
            "stem": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, tp, plan)


class Tied(models.Model):
    """A model whose embedding is also the head."""

    def __init__(self) -> None:
        super().__init__([models.Block(6, 8, 6)])
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    inputs = models.Transformer.inputs

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(super().forward(self.embed(tokens)))


def cut_tied(model: models.Model, tp: DeviceMesh) -> None:
    """Cut embedding and head along the vocabulary. This makes two parameters of one, so tie them again."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, tp, plan)
    model.head.weight = model.embed.weight
    cut_blocks(model, tp)


# --- Tasks -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, the way to cut and wrap it, and the scenario that trains it."""

    build: Callable[[], models.Model] = models.even
    cut: Cut = cut_blocks
    scenario: Callable[[Training], None] = functools.partial(Training.steps, number=2)
    how: str = "blocks"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)

    def shard(self, library: ModuleType, mesh: DeviceMesh) -> models.Model:
        model = fresh(self.build)
        self.cut(model, mesh["tp"])
        shard = functools.partial(
            library.fully_shard,
            mesh=data_axes(mesh),
            mp_policy=library.MixedPrecisionPolicy(**self.policy),
            **self.options,
        )
        return wrap(model, shard, self.how)

    def run(self, library: ModuleType | None, shape: Shape) -> LocalTrace:
        training = ParallelTraining(self, library, shape)
        self.scenario(training)
        return training.trace


class ParallelTraining(Training):
    """A training in which the ranks of a tensor-parallel group get the same rows. Without a library: not sharded, not cut, all rows."""

    def __init__(self, task: Task, library: ModuleType | None, shape: Shape) -> None:
        self.library = library or unsharded
        self.trace = LocalTrace()
        if library is None:
            self.model = fresh(task.build)
        else:
            mesh = mesh_of(shape)
            self.model = task.shard(library, mesh)
            self.parts = mesh.size() // shape[-1]
            self.part = dist.get_rank() // shape[-1]

    def batch(self, seed: int) -> tuple[Tensor, ...]:
        inputs = self.model.inputs(ROWS, seed)
        return tuple(t.chunk(self.parts)[self.part] if self.is_sharded else t for t in inputs)


UNREDUCED = functools.partial(accumulate, pattern="nnb", say_last=True)
TASKS: dict[str, Task] = {
    "uneven": Task(models.uneven),
    "plain norms in one group with cut layers": Task(Sequence, cut_mlps),
    "tied embedding": Task(Tied, cut_tied),
    "sharded along the last dim": Task(options={"shard_placement_fn": lambda param: Shard(param.ndim - 1)}),
    "accumulate unreduced": Task(models.uneven, scenario=UNREDUCED),
    "accumulate over replicas": Task(Sequence, cut_sequence, functools.partial(accumulate, pattern="ssa")),
    "clip": Task(models.uneven, scenario=clip),
    "bf16, sequence parallel": Task(Sequence, cut_sequence, policy=BF16_FP32),
}
WHERE: dict[Shape, tuple[str, ...]] = {
    (2, 1): ("uneven",),
    (1, 2): ("bf16, sequence parallel", "clip"),
    (2, 2): (
        *("uneven", "plain norms in one group with cut layers", "tied embedding"),
        *("sharded along the last dim", "accumulate unreduced"),
    ),
    (2, 1, 2): ("accumulate over replicas",),
}


def compare(task: str, shape: Shape) -> dict[str, list[str]]:
    """Return the differences from FSDP2, and from the model that is neither sharded nor cut."""
    todo = TASKS[task]
    got = todo.run(hwfsdp, shape)
    found = {"FSDP2": differences(got, todo.run(fsdp, shape), *against_fsdp2(max(shape)))}
    if not todo.policy:
        plain = got.parts(todo.run(None, shape))
        found["unsharded"] = differences(got.whole(), plain.whole(), *REGROUPING)
    return found


def world_size(shape: Shape) -> int:
    return int(torch.Size(shape).numel())


PROMISES = Promises()
for _ranks in (2, 4):
    PROMISES.add(
        "a cut model trains as under FSDP2 and as if neither sharded nor cut",
        {
            f"{task}, {shape}": functools.partial(compare, task, shape)
            for shape, tasks in WHERE.items()
            for task in tasks
            if world_size(shape) == _ranks
        },
        _ranks,
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
    for shape, rank in ((shape, rank) for shape in shapes for rank in range(world_size(shape))):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size(shape))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = fresh(Rows)
        cut_rows(model, mesh["tp"])
        hwfsdp.fully_shard(model, mesh=data_axes(mesh))
        for name, param in model.named_parameters():
            layout = Layout(shape, param.placements, tuple(mesh.get_coordinate() or ()))
            whole, local = plain.get_parameter(name), param.to_local()
            same_shape = (param.shape, param.stride()) == (whole.shape, whole.stride())
            in_place = param.device_mesh == mesh and local.is_contiguous()
            if not (same_shape and in_place and torch.equal(local, layout.part(whole))):
                wrong.append(f"{name} at {layout.coordinate} of {shape}: {local.tolist()}")
        dist.destroy_process_group()
    return wrong


def test_ranks_hold_the_chunks_of_their_tensor_parallel_chunks():
    assert launch(fake_layouts, 1, timeout=60) == [[]]
