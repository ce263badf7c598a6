"""dtypes of parameters, gradients and outputs in every combination; and where FSDP2 has no answer, the right one.

The oracle is torch's FSDP2 in the same processes, bit for bit. Where torch 2.13 raises, or computes something else,
it is the unsharded model in the same dtypes: each rank runs it in the param dtype on its own rows, adds gradients up
in the reduce dtype, and the mean over the ranks is taken in that, too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

import hwfsdp
import models
from hwfsdp import launch
from oracles import (
    BITS,
    REGROUPING,
    ROUNDING,
    Case,
    Check,
    Library,
    Policy,
    Tolerance,
    Trace,
    Training,
    complaints,
    cpu_mesh,
    differences,
    fresh,
    objective,
    rank_rows,
    run_checks,
    unsharded,
)

HERE: ModuleType = hwfsdp  # what is tested; it has the names of `torch.distributed.fsdp`

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BF16_FP32: Policy = {"param_dtype": BF16, "reduce_dtype": FP32}


def shard(
    package: ModuleType, module: nn.Module, *, policy: Policy | None = None, **options: Any
) -> nn.Module:
    """The package's fully_shard over all ranks."""
    mp_policy = package.MixedPrecisionPolicy(**policy or {})
    return package.fully_shard(module, mesh=cpu_mesh(), mp_policy=mp_policy, **options)


def by(package: ModuleType) -> Library:
    return functools.partial(shard, package)


def compare(package: ModuleType, case: Case, tolerance: Tolerance) -> Any:
    return {"FSDP2": differences(case.run(by(package)), case.run(by(fsdp)), *tolerance)}


# --- Every combination -------------------------------------------------------------------------------------

ORIGINALS = (FP32, FP64, BF16)
CHOICES = (None, FP16, BF16, FP32, FP64)


@dataclasses.dataclass(frozen=True)
class Combination:
    """dtypes of the original parameters, and those of the policy."""

    orig: torch.dtype
    param: torch.dtype | None
    reduce: torch.dtype | None
    output: torch.dtype | None

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in dataclasses.astuple(self)]
        return "{}, param {}, reduce {}, output {}".format(*names)

    @property
    def policy(self) -> Policy:
        return {"param_dtype": self.param, "reduce_dtype": self.reduce, "output_dtype": self.output}

    def case(self, how: str = "root") -> Case:
        return Case(functools.partial(uneven_in, self.orig), run_dtypes, how, {"policy": self.policy})


COMBINATIONS = [Combination(*dtypes) for dtypes in itertools.product(ORIGINALS, CHOICES, CHOICES, CHOICES)]


def uneven_in(dtype: torch.dtype) -> models.Model:
    """Two layers of which nothing divides by 2."""
    model = models.Model([models.Block(5, 3, 1)])
    model.width = 5
    return model.to(dtype)


def run_dtypes(training: Training) -> None:
    """Two micro-batches, the first unreduced, and a step; keeps the output, whose dtype is part of the policy."""
    for micro in range(2):
        training.call("set_requires_gradient_sync", micro == 1)
        output = training.model(*training.batch(micro))
        training.trace.keep("output (local)", output)
        objective(output).backward()
    keep_local_grads(training)
    training.optimizer.step()
    for name, param in training.model.named_parameters():
        training.trace.keep(f"param {name} (local)", param.to_local())


def keep_local_grads(training: Training) -> None:
    for name, param in training.model.named_parameters():
        grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        training.trace.keep(f"grad {name} (local)", grad)


@functools.cache
def combinations() -> Any:
    checks: dict[str, Check] = {
        str(combination): functools.partial(compare, HERE, combination.case(), BITS)
        for combination in COMBINATIONS
    }
    return launch(run_checks, 2, checks, timeout=300)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_dtypes_are_combined_as_in_fsdp2(combination):
    assert complaints(combinations(), str(combination), "FSDP2") == []


# --- Other world sizes -------------------------------------------------------------------------------------


def sample(world_size: int) -> list[Combination]:
    """Every pair of param and reduce dtype for one rank, some for three, which add in an order of their own."""
    pairs = itertools.product(CHOICES, CHOICES)
    if world_size == 3:
        pairs = itertools.product((None, BF16, FP64), (None, FP16, FP32, FP64))
    return [Combination(FP32, param, reduce, None) for param, reduce in pairs]


def tolerance(world_size: int, combination: Combination) -> Tolerance:
    """Some steps of the coarsest dtype that sums pass through."""
    if world_size <= 2:
        return BITS
    dtype = combination.reduce or combination.param or combination.orig
    return {FP16: Tolerance(4e-3, 1e-4), BF16: Tolerance(3e-2, 1e-3)}.get(dtype, ROUNDING)


@functools.cache
def samples(world_size: int) -> Any:
    checks: dict[str, Check] = {
        str(c): functools.partial(compare, HERE, c.case(), tolerance(world_size, c))
        for c in sample(world_size)
    }
    return launch(run_checks, world_size, checks, timeout=300)


@pytest.mark.parametrize("world_size, combination", [(w, c) for w in (1, 3) for c in sample(w)], ids=str)
def test_dtypes_are_combined_as_in_fsdp2_at_other_world_sizes(world_size, combination):
    assert complaints(samples(world_size), str(combination), "FSDP2") == []


# --- What goes into a forward, and what does not change ----------------------------------------------------


class Tables(nn.Module):
    """Integers everywhere: a parameter, buffers, inputs and outputs; notes what reaches its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.ranks = nn.Parameter(torch.arange(3, dtype=torch.int32), requires_grad=False)
        self.register_buffer("order", torch.arange(7, -1, -1))
        self.register_buffer("mask", torch.arange(8) % 3 > 0)
        self.register_buffer("shift", torch.linspace(0, 1, 8))
        self.seen: list[Any] = []

    def forward(self, x: Tensor, index: Tensor, *, options: dict[str, Any]) -> dict[str, Any]:
        self.seen = [self.linear.weight.dtype, self.ranks.dtype, x.dtype, index, options]
        self.seen += [self.order.dtype, self.mask.dtype, self.shift.dtype]
        y = self.linear(x.to(self.linear.weight.dtype))[:, self.order]
        y = torch.where(self.mask & options["mask"], y, 2 * y) + self.shift.to(y.dtype)
        return {"out": y * options["scale"].to(y.dtype), "index": index + self.ranks.sum(), "name": "tables"}


class Tabled(models.Model):
    def __init__(self) -> None:
        super().__init__([Tables()])

    def forward(self, x: Tensor) -> Any:
        [tables] = self.blocks
        index, mask = torch.arange(len(x)), torch.ones(8, dtype=torch.bool)
        options = {"mask": mask, "scale": torch.tensor(0.5), "none": None, "number": 2}
        found = tables(x, index, options=options)
        assert tables.seen[3] is index
        assert tables.seen[4]["mask"] is mask
        return found


def name_dtypes(training: Training) -> None:
    """Keeps the dtypes of everything that the block saw and returned, and trains."""
    for seed in range(2):
        output = training.model(*training.batch(seed))
        [tables] = training.model.blocks
        training.trace.keep("out (local)", output["out"])
        training.trace.keep("index (local)", output["index"])
        seen = [*tables.seen[:3], *tables.seen[5:], tables.seen[4]["scale"].dtype]
        for name, dtype in zip(
            ("weight", "ranks", "x", "order", "mask", "shift", "scale"), seen, strict=True
        ):
            training.trace.keep(f"dtype of {name} (local)", torch.empty(0, dtype=dtype))
        objective(output["out"]).backward()
        training.update()
    training.keep_params()


INPUTS: dict[str, Policy] = {
    "bf16": {"param_dtype": BF16},
    "bf16, output fp64": {"param_dtype": BF16, "output_dtype": FP64},
    "bf16, inputs as they are": {"param_dtype": BF16, "cast_forward_inputs": False},
    "fp64, inputs as they are, output fp16": {
        **{"param_dtype": FP64, "output_dtype": FP16},
        "cast_forward_inputs": False,
    },
    "inputs as they are": {"cast_forward_inputs": False},
    "reduce fp64": {"reduce_dtype": FP64},
}


# --- Several policies in one model -------------------------------------------------------------------------


def shard_by_kind(
    package: ModuleType, module: nn.Module, *, policies: dict[str, Policy], **options: Any
) -> nn.Module:
    """The policy is that of the module's hidden width, or of its class."""
    hidden = str(module.up.out_features) if isinstance(module, models.Block) else type(module).__name__
    return shard(package, module, policy=policies.get(hidden), **options)


MIXTURES: dict[str, Case] = {
    "every block another": Case(
        models.wandering,
        how="blocks",
        options={
            "policies": {
                "4": {"param_dtype": BF16, "output_dtype": FP32},
                "12": {"param_dtype": FP16, "reduce_dtype": FP32, "output_dtype": FP32},
                "8": {"reduce_dtype": FP64},
            }
        },
    ),
    "norms in fp32 in blocks in bf16": Case(
        models.Transformer,
        how="nested",
        options={
            "policies": {
                "LayerNorm": {"param_dtype": FP32, "output_dtype": BF16},
                "Attention": {"param_dtype": BF16, "reduce_dtype": FP32},
                "Block": BF16_FP32,
                "13": BF16_FP32,
                "TransformerBlock": {"param_dtype": BF16},
                "Transformer": {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32},
            }
        },
    ),
    "the root casts, the blocks do not": Case(
        models.stem,
        how="blocks",
        options={
            "policies": {
                "Stem": {"param_dtype": BF16},
                "12": {"param_dtype": BF16, "cast_forward_inputs": False, "reduce_dtype": FP64},
            }
        },
    ),
}


# --- Another dtype after wrapping --------------------------------------------------------------------------


def change_dtype(training: Training, dtype: torch.dtype) -> None:
    """Before the first forward."""
    training.model.to(dtype)
    run_dtypes(training)


CHANGED: dict[str, Case] = {
    f"{name} to {dtype}".replace("torch.", ""): Case(
        models.uneven, functools.partial(change_dtype, dtype=dtype), "blocks", {"policy": policy}
    )
    for name, policy in {
        "fp32": None,
        "bf16, reduce fp32": BF16_FP32,
        "fp64": {"param_dtype": FP64},
        "reduce fp32": {"reduce_dtype": FP32},
    }.items()
    for dtype in (BF16, FP16, FP64)
}


def change_between_steps(training: Training) -> None:
    """A step in one dtype, two in another, which a new optimizer makes."""
    training.steps(1)
    training.model.to(FP64)
    training.optimizer = training.new_optimizer()
    training.steps(2, first_seed=1)


# --- One launch --------------------------------------------------------------------------------------------


def compare_mixture(package: ModuleType, case: Case) -> Any:
    runs = [case.run(functools.partial(shard_by_kind, library)) for library in (package, fsdp)]
    return {"FSDP2": differences(*runs, *BITS)}


def compare_unsharded(package: ModuleType, case: Case, tolerance: Tolerance) -> Any:
    found = differences(case.run(by(package)).whole(), case.run(unsharded).whole(), *tolerance)
    return {"unsharded": found}


@functools.cache
def others() -> Any:
    checks: dict[str, Check] = {
        f"inputs: {name}": functools.partial(
            compare, HERE, Case(Tabled, name_dtypes, "blocks", {"policy": policy}), BITS
        )
        for name, policy in INPUTS.items()
    }
    checks |= {
        f"mixture: {name}": functools.partial(compare_mixture, HERE, case) for name, case in MIXTURES.items()
    }
    checks |= {
        f"changed: {name}": functools.partial(compare, HERE, case, BITS) for name, case in CHANGED.items()
    }
    between = Case(models.uneven, change_between_steps)
    checks["between steps"] = functools.partial(compare_unsharded, HERE, between, REGROUPING)
    return launch(run_checks, 2, checks, timeout=300)


@pytest.mark.parametrize("policy", INPUTS)
def test_integers_stay_integers_and_inputs_are_cast_as_in_fsdp2(policy):
    assert complaints(others(), f"inputs: {policy}", "FSDP2") == []


@pytest.mark.parametrize("mixture", MIXTURES)
def test_modules_of_one_model_may_have_policies_of_their_own(mixture):
    assert complaints(others(), f"mixture: {mixture}", "FSDP2") == []


@pytest.mark.parametrize("change", CHANGED)
def test_a_model_may_change_its_dtype_before_the_first_forward(change):
    assert complaints(others(), f"changed: {change}", "FSDP2") == []


def test_a_model_may_change_its_dtype_between_steps():
    """FSDP2 raises: it has noted the dtypes in the first forward."""
    assert complaints(others(), "between steps", "unsharded") == []


# --- Where torch 2.13 has no answer ------------------------------------------------------------------------

MicroBatch = Callable[[models.Model], None]  # what is switched on a model before its forward


class Branches(nn.Module):
    """Two branches in one group, of which `used` are used."""

    used: Sequence[str] = ("left",)

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = models.Block(8, 5, 8), models.Block(8, 7, 8)

    def forward(self, x: Tensor) -> Tensor:
        return sum(getattr(self, branch)(x) for branch in self.used)


def branches() -> models.Model:
    return models.Model([Branches() for _ in range(2)])


def use(*branches: str) -> MicroBatch:
    def switch(model: models.Model) -> None:
        for block in model.blocks:
            block.used = branches

    return switch


def walk(*path: int) -> MicroBatch:
    def switch(model: models.Model) -> None:
        model.path = path

    return switch


def train_only(*names: str) -> MicroBatch:
    def switch(model: models.Model) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith(names))

    return switch


@dataclasses.dataclass(frozen=True)
class Beyond:
    """Micro-batches, the gradients of the last of which are compared.

    Attributes:
        policy: param and reduce dtype.
        accumulate: the first micro-batches are not reduced, and count; else their gradients are dropped.
    """

    build: Callable[[], models.Model]
    micro_batches: tuple[MicroBatch, ...]
    policy: Policy
    accumulate: bool = True

    def sharded(self, package: ModuleType) -> Trace:
        """What the package makes of it."""
        model = fresh(self.build)
        for module in (*model.blocks, model):
            shard(package, module, policy=self.policy)
        last = len(self.micro_batches) - 1
        for number, switch in enumerate(self.micro_batches):
            switch(model)
            model.set_requires_gradient_sync(number == last or not self.accumulate)
            (rows,) = model.inputs(12, number)
            objective(model(rank_rows(rows))).backward()
            if not self.accumulate and number < last:
                model.zero_grad()
        trace = Trace()
        for name, param in model.named_parameters():
            trace.keep(name, None if param.grad is None else param.grad.full_tensor())
        return trace

    def unsharded(self) -> Trace:
        """Each rank on its own rows, in the param dtype; sums and the mean in the reduce dtype."""
        compute = self.policy.get("param_dtype") or FP32
        reduce = self.policy.get("reduce_dtype") or compute
        model = fresh(self.build).to(compute)
        sums: dict[str, Tensor] = {}
        for number, switch in enumerate(self.micro_batches):
            switch(model)
            (rows,) = model.inputs(12, number)
            objective(model(rank_rows(rows).to(compute))).backward()
            if not self.accumulate:
                sums.clear()
            for name, param in model.named_parameters():
                if param.grad is not None:
                    sums[name] = sums[name] + param.grad if name in sums else param.grad.to(reduce)
            model.zero_grad()
        trace = Trace()
        for name, _ in model.named_parameters():
            if name in sums:
                dist.all_reduce(sums[name])
                sums[name] /= dist.get_world_size()
            trace.keep(name, sums[name].to(FP32) if name in sums else None)
        return trace


BEYOND: dict[str, Beyond] = {
    "first used": Beyond(branches, (use("left"), use("left"), use("left", "right")), BF16_FP32),
    "first used alone": Beyond(branches, (use("left"), use("right")), BF16_FP32),
    "first used, reduce fp64": Beyond(
        branches, (use("left"), use("right", "left")), {"param_dtype": FP16, "reduce_dtype": FP64}
    ),
    "first run": Beyond(models.wandering, (walk(0), walk(0, 1), walk(0, 1, 2)), BF16_FP32),
    "never run": Beyond(models.wandering, (walk(0), walk(2), walk(0)), BF16_FP32),
    "frozen at first": Beyond(
        models.wandering, (train_only("stem"), train_only("")), BF16_FP32, accumulate=False
    ),
    "frozen at first, reduce bf16": Beyond(
        models.wandering, (train_only("stem"), train_only("")), {"param_dtype": BF16}, accumulate=False
    ),
    "all frozen at first": Beyond(
        models.wandering,
        (train_only("head"), train_only("blocks.1"), train_only("blocks")),
        BF16_FP32,
        accumulate=False,
    ),
    "frozen while others accumulate": Beyond(
        models.wandering, (train_only("stem"), train_only("stem", "blocks.1")), BF16_FP32
    ),
}


def compare_beyond(package: ModuleType, beyond: Beyond) -> Any:
    rounding = ROUNDING if "reduce_dtype" in beyond.policy else Tolerance(3e-2, 2e-3)
    exact = BITS if dist.get_world_size() <= 2 else rounding
    return {"unsharded": differences(beyond.sharded(package), beyond.unsharded(), *exact)}


@functools.cache
def beyond(world_size: int) -> Any:
    checks: dict[str, Check] = {
        name: functools.partial(compare_beyond, HERE, case) for name, case in BEYOND.items()
    }
    return launch(run_checks, world_size, checks, timeout=200)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", ["first used", "first used alone", "first used, reduce fp64"])
def test_a_parameter_first_used_in_the_last_micro_batch_is_reduced_with_the_others(world_size, case):
    """FSDP2 raises: gradients that were accumulated are in the reduce dtype already, the new one is not."""
    assert complaints(beyond(world_size), case, "unsharded") == []


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", ["first run", "never run"])
def test_a_module_that_has_not_run_yet_has_nothing_to_accumulate(world_size, case):
    """FSDP2 raises: it looks for a gradient of a parameter that was never gathered."""
    assert complaints(beyond(world_size), case, "unsharded") == []


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", [name for name in BEYOND if "frozen" in name])
def test_a_group_that_was_frozen_at_first_is_reduced_in_its_dtypes_when_it_trains(world_size, case):
    """FSDP2 takes the dtypes of a group from the parameters that train in the first forward."""
    assert complaints(beyond(world_size), case, "unsharded") == []
