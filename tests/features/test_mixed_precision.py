"""dtypes of parameters, gradients and outputs in every combination, also where FSDP2 has no answer.

The oracle is torch's FSDP2 in the same processes, bit for bit. Where torch 2.13 raises an error or computes something else, the oracle
is the unsharded model in the same dtypes: each rank runs its own rows in the param dtype, adds gradients in the reduce dtype, and the
ranks take the mean in the reduce dtype, too.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

import models
from hwfsdp import fully_shard, launch
from hwfsdp.core.precision import resolve_dtypes
from hwfsdp.features.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from oracles import (
    BF16_FP32,
    BITS,
    ROWS,
    Case,
    Policy,
    Promises,
    Trace,
    Training,
    differences,
    fresh,
    objective,
    ours,
    rank_rows,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FLOATING = [FP64, FP32, BF16, FP16]


# --- Every combination -------------------------------------------------------------------------------------


def uneven_in(dtype: torch.dtype) -> models.Model:
    """Make two layers in which 2 divides no output size."""
    model = models.Model([models.Block(5, 3, 1)])
    model.width = 5
    return model.to(dtype)


def run_dtypes(training: Training) -> None:
    """Run two micro-batches, the first unreduced, and a step. Keep the output, because the policy has its dtype."""
    for micro in range(2):
        training.call("set_requires_gradient_sync", micro == 1)
        output = training.model(*training.batch(micro))
        training.trace.keep("output (local)", output)
        objective(output).backward()
    training.keep_local_grads()
    training.optimizer.step()
    for name, param in training.model.named_parameters():
        training.trace.keep(f"param {name} (local)", param.to_local())


def combined(
    orig: torch.dtype, param: torch.dtype | None, reduce: torch.dtype | None, output: torch.dtype | None
) -> tuple[str, Case]:
    """Return a name and a case for the dtype of the original parameters and the dtypes of the policy."""
    policy = {"param_dtype": param, "reduce_dtype": reduce, "output_dtype": output}
    name = f"{orig}, param {param}, reduce {reduce}, output {output}".replace("torch.", "")
    return name, Case(functools.partial(uneven_in, orig), run_dtypes, "root", {"policy": policy})


COMBINATIONS = [  # `test_casts_have_the_same_results_as_fsdp2s` tries every combination
    combined(FP32, FP16, BF16, None),
    combined(BF16, FP64, None, FP32),
    combined(FP64, None, FP32, FP16),
]
PROMISES = Promises()
PROMISES.trains("dtypes are combined as in FSDP2", dict(COMBINATIONS))


# --- Inputs of a forward, and values that do not change ----------------------------------------------------


class Tables(nn.Module):
    """A module with integers everywhere: a parameter, buffers, inputs and outputs. It keeps the tensors that reach its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.ranks = nn.Parameter(torch.arange(3, dtype=torch.int32), requires_grad=False)
        self.register_buffer("order", torch.arange(7, -1, -1))
        self.register_buffer("mask", torch.arange(8) % 3 > 0)
        self.register_buffer("shift", torch.linspace(0, 1, 8))
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor, index: Tensor, *, options: dict[str, Any]) -> dict[str, Any]:
        given = {"x": x, "index": index, "scale": options["scale"], "given mask": options["mask"]}
        self.seen = given | {"weight": self.linear.weight, "ranks": self.ranks} | dict(self.named_buffers())
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
        assert tables.seen["index"] is index and tables.seen["given mask"] is mask
        return found


def name_dtypes(training: Training) -> None:
    """Train, and keep the dtypes of everything that the block saw and returned."""
    for seed in range(2):
        output = training.model(*training.batch(seed))
        [tables] = training.model.blocks
        training.trace.keep("out (local)", output["out"])
        training.trace.keep("index (local)", output["index"])
        for name, tensor in tables.seen.items():
            training.trace.keep(f"dtype of {name} (local)", torch.empty(0, dtype=tensor.dtype))
        objective(output["out"]).backward()
        training.update()
    training.keep_params()


INPUTS: dict[str, Policy] = {
    "bf16": {"param_dtype": BF16},
    "fp64, inputs as they are, output fp16": {
        **{"param_dtype": FP64, "output_dtype": FP16},
        "cast_forward_inputs": False,
    },
}


# --- Another dtype after wrapping --------------------------------------------------------------------------


def change_dtype(training: Training, dtype: torch.dtype) -> None:
    """Change the dtype before the first forward."""
    training.model.to(dtype)
    run_dtypes(training)


CHANGED = Case(
    models.uneven, functools.partial(change_dtype, dtype=BF16), options={"policy": {"param_dtype": FP64}}
)


def change_between_steps(training: Training) -> None:
    """Take a step in one dtype, then two in another dtype with a new optimizer."""
    training.steps(1)
    training.model.to(FP64)
    training.optimizer = training.new_optimizer()
    training.steps(2, first_seed=1)


# --- All of these -------------------------------------------------------------------------------------------


PROMISES.trains(
    "integers stay integers and inputs are cast as in FSDP2",
    {name: Case(Tabled, name_dtypes, "blocks", {"policy": policy}) for name, policy in INPUTS.items()},
)
PROMISES.trains(
    "a model may change its dtype",
    {"before the first": CHANGED, "between steps": Case(models.uneven, change_between_steps)},
    not_fsdp2=["between steps"],  # it has noted the dtypes in the first forward
)


# --- Where torch 2.13 has no answer ------------------------------------------------------------------------

MicroBatch = Callable[[models.Model], None]  # what is switched on a model before its forward


def walk(*path: Any) -> MicroBatch:
    def switch(model: models.Model) -> None:
        model.path = path

    return switch


def train_only(*names: str) -> MicroBatch:
    def switch(model: models.Model) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith(names))

    return switch


class Beyond(NamedTuple):
    """Micro-batches in bf16, reduced in fp32. The gradients of the last one are compared.

    Attributes:
        accumulate: if True, the first micro-batches are unreduced, and count. Else their gradients are dropped.
    """

    build: Callable[[], models.Model]
    micro_batches: tuple[MicroBatch, ...]
    accumulate: bool = True

    def train(self, training: Training) -> None:
        last = len(self.micro_batches) - 1
        for number, switch in enumerate(self.micro_batches):
            switch(training.model)
            training.call("set_requires_gradient_sync", number == last or not self.accumulate)
            objective(training.model(*training.batch(number))).backward()
            if not self.accumulate and number < last:
                training.model.zero_grad()
        training.keep_grads()

    def unsharded(self) -> Trace:
        """Run each rank's own rows in bf16. Take sums and the mean in fp32."""
        model = fresh(self.build).to(BF16)
        sums: dict[str, Tensor] = {}
        for number, switch in enumerate(self.micro_batches):
            switch(model)
            (rows,) = model.inputs(ROWS, number)
            objective(model(rank_rows(rows).to(BF16))).backward()
            if not self.accumulate:
                sums.clear()
            for name, param in model.named_parameters():
                if param.grad is not None:
                    sums[name] = sums[name] + param.grad if name in sums else param.grad.to(FP32)
            model.zero_grad()
        trace = Trace()
        for name, _ in model.named_parameters():
            if name in sums:
                dist.all_reduce(sums[name])
                sums[name] = (sums[name] / dist.get_world_size()).to(FP32)
            trace.keep(f"grad {name}", sums.get(name))
        return trace


BEYOND: dict[str, Beyond] = {
    # FSDP2 raises: gradients that were accumulated are in the reduce dtype already, the new one is not
    "first used": Beyond(models.Branching, (walk("left"), walk("left"), walk("left", "right"))),
    # FSDP2 raises: it looks for a gradient of a parameter that was never gathered
    "first run": Beyond(models.wandering, (walk(0), walk(0, 1), walk(0))),
    # FSDP2 takes the dtypes of a group from the parameters that train in the first forward
    "frozen at first": Beyond(models.wandering, (train_only("stem"), train_only("")), accumulate=False),
    "frozen while others accumulate": Beyond(
        models.wandering, (train_only("stem"), train_only("stem", "blocks.1"))
    ),
}


def compare_beyond(case: Beyond) -> Any:
    got = Case(case.build, case.train, options={"policy": BF16_FP32}).run(ours)
    return {"unsharded": differences(got.gathered(), case.unsharded(), *BITS)}


PROMISES.add(
    "parameters that come into use one by one are reduced in their dtypes",
    {name: functools.partial(compare_beyond, case) for name, case in BEYOND.items()},
)


test_a_promise_is_kept = PROMISES.test()


# --- Dtypes and policies, without training -----------------------------------------------------------------

ORIGINALS = [*FLOATING, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64]


def noted_by_torch(orig: torch.dtype, param: torch.dtype | None, reduce: torch.dtype | None) -> Any:
    """Return the dtypes that FSDP2 keeps in its own parameter object. Since torch 2.15, the reduce dtype follows from these."""
    theirs = SimpleNamespace(sharded_param=torch.empty(1, dtype=orig), _has_sharded_grad_dtype_override=False)
    FSDPParam.init_dtype_attrs(theirs, fsdp.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce))
    follows = getattr(FSDPParam, "unsharded_grad_dtype", None)
    reduced_in = follows.fget(theirs) if follows else theirs.reduce_dtype
    return theirs.orig_dtype, theirs.param_dtype, reduced_in


@pytest.mark.parametrize("orig", ORIGINALS, ids=str)
def test_casts_have_the_same_results_as_fsdp2s(orig: torch.dtype) -> None:
    for param, reduce in itertools.product([None, *FLOATING], repeat=2):
        policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        dtypes = resolve_dtypes(torch.empty(1, dtype=orig), policy)
        # FSDP2 cannot reduce complex gradients in a real dtype
        asked = reduce if orig.is_floating_point else None
        theirs, cast, reduced_in = noted_by_torch(orig, param, asked)
        assert dtypes == (theirs, cast or orig, reduced_in, orig), (param, reduce)


def train_complex() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of a complex parameter under a policy, and the gradient without sharding."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4, dtype=torch.complex64)
    rows = torch.arange(1.0, 7.0).to(torch.complex64).view(2, 1, 3)
    whole = copy.deepcopy(model)
    torch.view_as_real(whole(1j * rows)).square().sum().div(2).backward()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    torch.view_as_real(model(1j * rows[dist.get_rank()])).square().sum().backward()
    return model.weight.grad.full_tensor(), whole.weight.grad


def test_a_policy_leaves_complex_parameters_and_their_gradients_alone() -> None:
    for found, expected in launch(train_complex, 2):
        assert found.is_complex() and torch.equal(found, expected)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (MixedPrecisionPolicy, fsdp.MixedPrecisionPolicy),
        (OffloadPolicy, fsdp.OffloadPolicy),
        (CPUOffloadPolicy, fsdp.CPUOffloadPolicy),
    ],
)
def test_policies_have_the_fields_and_defaults_of_fsdp2_and_are_frozen_alike(ours: Any, theirs: Any) -> None:
    names = [f.name for f in dataclasses.fields(theirs)]
    assert [f.name for f in dataclasses.fields(ours)][: len(names)] == names
    assert all(getattr(ours(), name) == getattr(theirs(), name) for name in names)
    new = {f.name for f in dataclasses.fields(ours)} - {*names}
    assert new <= {"param_dtype_override_fn"}, "what torch has since 2.15 only"
    assert isinstance(ours(), OffloadPolicy) == isinstance(theirs(), fsdp.OffloadPolicy)
    frozen = theirs.__dataclass_params__.frozen
    for name in dataclasses.asdict(ours()):
        with pytest.raises(dataclasses.FrozenInstanceError) if frozen else contextlib.nullcontext():
            setattr(ours(), name, None)
