"""Backwards of every kind: accumulated, partial, repeated; and every switch of how their gradients are reduced.

The oracle is torch's FSDP2 in the same processes; besides, PyTorch without sharding wherever the same thing can be
said without sharding, and closed forms where FSDP2 has no answer on gloo.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import hwfsdp
import models
from hwfsdp import EventLog, RankError, launch, record
from oracles import (
    BITS,
    REGROUPING,
    ROUNDING,
    Case,
    Check,
    Library,
    Policy,
    Scenario,
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

Shape = tuple[int, int]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BF16_FP32: Policy = {"param_dtype": BF16, "reduce_dtype": FP32}


@functools.cache
def grid(shape: Shape) -> DeviceMesh:
    """Ranks that replicate, ranks that shard; one per process, since each makes process groups."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def shard(
    package: ModuleType,
    module: nn.Module,
    *,
    shape: Shape | None = None,
    policy: Policy | None = None,
    **options: Any,
) -> nn.Module:
    """The package's fully_shard, over all ranks or on a mesh of this shape."""
    mp_policy = package.MixedPrecisionPolicy(**policy or {})
    mesh = grid(shape) if shape else cpu_mesh()
    return package.fully_shard(module, mesh=mesh, mp_policy=mp_policy, **options)


def by(package: ModuleType) -> Library:
    return functools.partial(shard, package)


def sharded_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]


def compare(package: ModuleType, case: Case, fsdp2: Tolerance | None, plain: Tolerance | None) -> Any:
    """What differs from FSDP2, and from PyTorch without sharding."""
    got, found = case.run(by(package)), {}
    if fsdp2 is not None:
        found["FSDP2"] = differences(got, case.run(by(fsdp)), *fsdp2)
    if plain is not None:
        found["unsharded"] = differences(got.whole(), case.run(unsharded).whole(), *plain)
    return found


def exactness(world_size: int) -> Tolerance:
    """What FSDP2's numbers may be missed by; with 16 bits, the order of additions shows in the last of them."""
    return BITS if world_size <= 2 else ROUNDING


def keep_local_grads(training: Training) -> None:
    """What the shards' gradients are in between; nothing that the model without sharding has."""
    for name, param in training.model.named_parameters():
        grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        training.trace.keep(f"grad so far {name} (local)", grad)


# --- Accumulation ------------------------------------------------------------------------------------------

PATTERNS = ["".join(bits) for bits in itertools.product("01", repeat=3)]  # of micro-batches: reduced or not


def accumulate(
    training: Training, pattern: str, stay_whole: bool = False, say_which_is_last: bool = False
) -> None:
    """A step of micro-batches, of which those with a 1 are reduced; then one that reduces what was left over."""
    for micro, bit in enumerate(pattern):
        is_last = micro == len(pattern) - 1
        training.call("set_requires_gradient_sync", bit == "1")
        training.call("set_reshard_after_backward", is_last or not stay_whole)
        training.call("set_is_last_backward", is_last or not say_which_is_last)
        training.loss(micro).backward()
        keep_local_grads(training)
    training.update()
    training.call("set_requires_gradient_sync", True)
    training.steps(1, first_seed=99)


def accumulate_in_parts(training: Training) -> None:
    """One block is reduced in every micro-batch, the others in the last."""
    for step in range(2):
        for micro in range(3):
            training.call("set_requires_gradient_sync", micro == 2)
            if training.is_sharded:
                training.model.blocks[1].set_requires_gradient_sync(True, recurse=False)
            training.loss(10 * step + micro).backward()
            keep_local_grads(training)
        training.update()
    training.keep_params()


def wander(training: Training, paths: tuple[tuple[int, ...], ...], pattern: str) -> None:
    """Every micro-batch takes another path through the blocks."""
    for step in range(2):
        for micro, (training.model.path, bit) in enumerate(zip(paths, pattern, strict=True)):
            training.call("set_requires_gradient_sync", bit == "1")
            training.loss(10 * step + micro).backward()
            keep_local_grads(training)
        training.update()
    training.keep_params()


POLICIES: dict[str, Policy | None] = {
    "fp32": None,
    "bf16, reduce fp32": BF16_FP32,
    "reduce bf16": {"reduce_dtype": BF16},
    "bf16": {"param_dtype": BF16},
    "fp16, reduce fp32": {"param_dtype": FP16, "reduce_dtype": FP32},
}
PATHS = {
    "a block in the first micro-batch only": (((0, 1, 2), (0, 1), (0, 1)), "001"),
    "a block in the last micro-batch only": (((0, 1), (0, 1), (0, 1, 2)), "001"),
    "a block in a micro-batch that is reduced, then not": (((0, 1), (1, 2), (0,)), "101"),
    "another block each time": (((0,), (1,), (2,)), "011"),
}


def accumulations(world_size: int) -> dict[str, Case]:
    """At world size 2 all patterns in all policies, at the others what can differ there."""
    everything = world_size == 2
    wanted = {
        *((pattern, "fp32") for pattern in (PATTERNS if world_size <= 2 else ("001", "101"))),
        *((pattern, "bf16, reduce fp32") for pattern in (PATTERNS if everything else ("011",))),
        *(("001", name) for name in POLICIES if everything),
        *((pattern, "reduce bf16") for pattern in ("010", "101") if everything),
    }
    found = {
        f"{pattern}, {name}": Case(
            models.uneven,
            functools.partial(accumulate, pattern=pattern),
            "blocks",
            {"policy": POLICIES[name]},
        )
        for pattern, name in sorted(wanted)
    }
    if not everything:
        return found
    for pattern in ("001", "011", "101"):
        for option in ("stay_whole", "say_which_is_last"):
            scenario = functools.partial(accumulate, pattern=pattern, **{option: True})
            found[f"{pattern}, {option}"] = Case(models.stem, scenario)
            found[f"{pattern}, {option}, bf16, reduce fp32"] = Case(
                models.stem, scenario, "blocks", {"policy": BF16_FP32}
            )
    found["in parts"] = Case(models.stem, accumulate_in_parts)
    for name, (paths, pattern) in PATHS.items():
        wandering = functools.partial(wander, paths=paths, pattern=pattern)
        found[name] = Case(models.wandering, wandering)
        if set(paths[0]) == {
            0,
            1,
            2,
        }:  # FSDP2 cannot accumulate in another dtype before a module's first forward
            found[f"{name}, bf16, reduce fp32"] = Case(
                models.wandering, wandering, "blocks", {"policy": BF16_FP32}
            )
    for name, build in {"unused": models.Unused, "frozen": models.frozen, "twice": models.twice}.items():
        found[f"001, {name}"] = Case(build, functools.partial(accumulate, pattern="001"))
    return found


def reduces_in_the_end(case: Case) -> bool:
    """Whether every optimizer step sees all gradients so far, in full precision: as without sharding."""
    pattern = getattr(case.scenario, "keywords", {}).get("pattern", "1")
    return pattern.endswith("1") and not case.options.get("policy")


# --- Other orders of forward and backward ------------------------------------------------------------------


def two_forwards_one_backward(training: Training) -> None:
    for seed in range(2):
        (training.loss(seed) + training.loss(10 + seed)).backward()
        training.update()
    training.keep_params()


def two_forwards_two_backwards(training: Training) -> None:
    """Micro-batches whose backwards come in the order of their forwards, the first unreduced."""
    for seed in range(2):
        losses = training.loss(seed), training.loss(10 + seed)
        for loss, sync in zip(losses, (False, True), strict=True):
            training.call("set_requires_gradient_sync", sync)
            loss.backward()
        training.update()
    training.keep_params()


def one_forward_two_backwards(training: Training, first_is_reduced: bool) -> None:
    for seed in range(2):
        loss = training.loss(seed)
        training.call("set_requires_gradient_sync", first_is_reduced)
        loss.backward(retain_graph=True)
        keep_local_grads(training)
        training.call("set_requires_gradient_sync", True)
        loss.backward()
        training.update()
    training.keep_params()


ORDERS: dict[str, Scenario] = {
    "two forwards, one backward": two_forwards_one_backward,
    "two forwards, two backwards": two_forwards_two_backwards,
    "one forward, two backwards": functools.partial(one_forward_two_backwards, first_is_reduced=True),
    "one forward, two backwards, the first unreduced": functools.partial(
        one_forward_two_backwards, first_is_reduced=False
    ),
}


def orders(world_size: int) -> dict[str, Case]:
    builds: dict[str, Callable[[], models.Model]] = {"twice": models.twice, "transformer": models.Transformer}
    found = {
        f"{order}, {name}": Case(build, scenario, "nested" if name == "transformer" else "blocks")
        for order, scenario in ORDERS.items()
        for name, build in builds.items()
        if world_size == 2 or name == "twice"
    }
    if world_size == 2:
        for order, scenario in ORDERS.items():
            found[f"{order}, twice, bf16, reduce fp32"] = Case(
                models.twice, scenario, "blocks", {"policy": BF16_FP32}
            )
            found[f"{order}, twice, stay whole"] = Case(
                models.twice, scenario, "blocks", {"reshard_after_forward": False}
            )
    return found


# --- Freezing ----------------------------------------------------------------------------------------------


def freeze(training: Training, frozen: tuple[tuple[str, ...], ...]) -> None:
    """In every step the parameters whose names begin with one of these are frozen."""
    for seed, prefixes in enumerate(frozen):
        for name, param in training.model.named_parameters():
            param.requires_grad_(not name.startswith(prefixes))
        training.loss(seed).backward()
        training.update()
    training.keep_params()


def freeze_while_accumulating(training: Training) -> None:
    """A block's gradients are not reduced yet when it is frozen."""
    for step in range(2):
        for micro in range(2):
            training.call("set_requires_gradient_sync", micro == 1)
            training.model.blocks[1].requires_grad_(micro == 0)
            training.loss(10 * step + micro).backward()
        training.update()
    training.keep_params()


FREEZING: dict[str, tuple[tuple[str, ...], ...]] = {
    "a block in the second step": ((), ("blocks.1",), ()),
    "a bias, then its block": (("blocks.0.up.bias",), ("blocks.0",), ()),
    "one parameter after the other": (("stem.bias",), ("stem.bias", "stem.weight"), ("head",)),
    "all but the head": ((), ("stem", "blocks"), (), ("stem", "blocks.0", "blocks.1")),
    "what the input needs": ((), ("stem",), ("stem", "blocks.0"), ()),
}


def freezings(names: list[str]) -> dict[str, Case]:
    found = {
        f"{name}, {policy}": Case(
            models.stem,
            functools.partial(freeze, frozen=FREEZING[name]),
            "blocks",
            {"policy": POLICIES[policy]},
        )
        for name in names
        for policy in ("fp32", "bf16, reduce fp32", "reduce bf16")
    }
    found["a whole group from the start, fp32"] = Case(
        models.stem, functools.partial(freeze, frozen=(("blocks.1", "stem"), ("blocks.1",), ()))
    )
    found["while accumulating, fp32"] = Case(models.stem, freeze_while_accumulating)
    return found


# --- Hooks on parameters -----------------------------------------------------------------------------------


def optimizer_in_backward(training: Training, pattern: str = "11") -> None:
    """Every parameter has an optimizer of its own, which a hook runs as soon as the gradient is there."""
    optimizers = {p: torch.optim.AdamW([p], lr=0.02, eps=1e-3) for p in training.model.parameters()}
    calls: Counter[nn.Parameter] = Counter()

    def step(param: nn.Parameter) -> None:
        calls[param] += 1
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in training.model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(step)
    params = dict(training.model.named_parameters())
    for seed, bit in enumerate(pattern):
        training.call("set_requires_gradient_sync", bit == "1")
        training.loss(seed).backward()
        for name, param in params.items():
            training.trace.keep(f"calls {name}", torch.tensor(calls[param]))
            assert param.grad is None
    training.keep_params()


HOOKED: dict[str, Case] = {
    "uneven": Case(models.uneven, optimizer_in_backward),
    "transformer, nested": Case(models.Transformer, optimizer_in_backward, "nested"),
    "twice": Case(models.twice, optimizer_in_backward),
    "frozen": Case(models.frozen, optimizer_in_backward),
    "unused": Case(models.Unused, optimizer_in_backward),
    "bf16, reduce fp32": Case(models.stem, optimizer_in_backward, "blocks", {"policy": BF16_FP32}),
    "accumulate": Case(models.stem, functools.partial(optimizer_in_backward, pattern="001011")),
}


def hooked_once(case: Case, package: ModuleType, steps: int = 2) -> list[str]:
    """Hooks that were not called once a step: of parameters that train and are used."""
    names = {
        f"calls {n}" for n, p in fresh(case.build).named_parameters() if p.requires_grad and "spare" not in n
    }
    names = {name for name in names if case.build is not models.Unused or "blocks.1" not in name}
    trace = case.run(by(package))
    return [
        f"{name} #{step}: {trace.tensors[f'{name} #{step}']}"
        for name in sorted(names)
        for step in range(steps)
        if int(trace.tensors[f"{name} #{step}"]) != step + 1
    ]


def compare_hooked(package: ModuleType, case: Case, fsdp2: Tolerance) -> Any:
    found = compare(package, case, fsdp2, REGROUPING if case.scenario is optimizer_in_backward else None)
    if case.scenario is optimizer_in_backward:
        if case.options.get("policy"):
            found.pop("unsharded")
        found["once"] = hooked_once(case, package)
    return found


# --- One launch per world size -----------------------------------------------------------------------------

WORLD_SIZES = (1, 2, 3, 4)


def section(name: str, cases: dict[str, Case]) -> dict[str, Case]:
    return {f"{name}: {case_name}": case for case_name, case in cases.items()}


@functools.cache
def backward_cases(world_size: int) -> dict[str, Case]:
    found = section("accumulate", accumulations(world_size)) | section("order", orders(world_size))
    if world_size in (2, 3):
        found |= section(
            "freeze", freezings(list(FREEZING) if world_size == 2 else ["a bias, then its block"])
        )
    return found


def tolerance(world_size: int, case: Case) -> Tolerance:
    reduced_in_16_bits = case.options.get("policy") in (POLICIES["reduce bf16"], POLICIES["bf16"])
    return Tolerance(2e-2, 1e-4) if reduced_in_16_bits and world_size > 2 else exactness(world_size)


@functools.cache
def backwards(world_size: int) -> Any:
    checks: dict[str, Check] = {
        name: functools.partial(
            compare, HERE, case, tolerance(world_size, case), REGROUPING if reduces_in_the_end(case) else None
        )
        for name, case in backward_cases(world_size).items()
    }
    checks |= {
        f"hooks: {name}": functools.partial(compare_hooked, HERE, case, tolerance(world_size, case))
        for name, case in HOOKED.items()
        if world_size == 2 or name == "uneven"
    }
    return launch(run_checks, world_size, checks, timeout=300)


BACKWARDS = [(world_size, name) for world_size in WORLD_SIZES for name in backward_cases(world_size)]


@pytest.mark.parametrize("world_size, case", BACKWARDS)
def test_backwards_go_as_under_fsdp2(world_size, case):
    assert complaints(backwards(world_size), case, "FSDP2") == []


@pytest.mark.parametrize(
    "world_size, case", [(w, name) for w, name in BACKWARDS if reduces_in_the_end(backward_cases(w)[name])]
)
def test_backwards_that_reduce_in_the_end_go_as_without_sharding(world_size, case):
    assert complaints(backwards(world_size), case, "unsharded") == []


HOOKS = [(2, name) for name in HOOKED] + [(w, "uneven") for w in (1, 3, 4)]


@pytest.mark.parametrize("world_size, case", HOOKS)
def test_an_optimizer_in_backward_goes_as_under_fsdp2(world_size, case):
    assert complaints(backwards(world_size), f"hooks: {case}", "FSDP2") == []


@pytest.mark.parametrize(
    "world_size, case", [hook for hook in HOOKS if hook[1] not in ("accumulate", "bf16, reduce fp32")]
)
def test_an_optimizer_in_backward_goes_as_without_sharding(world_size, case):
    assert complaints(backwards(world_size), f"hooks: {case}", "unsharded") == []


@pytest.mark.parametrize("world_size, case", [hook for hook in HOOKS if hook[1] != "accumulate"])
def test_a_hook_is_called_once_a_step_and_parameter(world_size, case):
    assert complaints(backwards(world_size), f"hooks: {case}", "once") == []


# --- Parameters that only some ranks use -------------------------------------------------------------------


class Fork(nn.Module):
    """Two branches in one group; each part of the rows takes the one chosen for it."""

    choices = ("left",)

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = models.Block(8, 5, 8), models.Block(8, 7, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.choices, x.chunk(len(self.choices)), strict=True)
        return torch.cat([getattr(self, choice)(part) for choice, part in parts])


def forks() -> models.Stem:
    return models.Stem([Fork() for _ in range(3)])


def choose(training: Training, step: int) -> None:
    """Even ranks go left in the first block, odd ones right; then the other way round, and so on."""
    for depth, fork in enumerate(training.model.blocks):
        choices = [("left", "right")[(rank + depth + step) % 2] for rank in range(dist.get_world_size())]
        fork.choices = (choices[dist.get_rank()],) if training.is_sharded else tuple(choices)


def with_spares() -> models.Stem:
    """A layer of a block, and a parameter of the root, that no forward uses."""
    model = models.stem()
    model.blocks[0].spare = nn.Linear(3, 3)
    model.spare = nn.Parameter(torch.ones(5))
    return model


def choose_and_train(training: Training, pattern: str = "11") -> None:
    training.call("set_reduce_scatter_unused_params", True)
    for step, bit in enumerate(pattern):
        choose(training, step)
        training.call("set_requires_gradient_sync", bit == "1")
        training.loss(step).backward()
        if bit == "1":
            training.update()
    training.keep_params()


def reduce_unused(training: Training, recurse: bool = True) -> None:
    """What no rank uses gets zeros instead of nothing, where that was asked for."""
    if training.is_sharded:
        where = training.model if recurse else training.model.blocks[0]
        where.set_reduce_scatter_unused_params(True, recurse=recurse)
    training.steps(2)
    training.call("set_reduce_scatter_unused_params", False)
    training.steps(1, first_seed=2)


UNUSED: dict[str, Case] = {
    "ranks choose": Case(forks, choose_and_train),
    "ranks choose, accumulate": Case(forks, functools.partial(choose_and_train, pattern="0101")),
    "ranks choose, bf16, reduce fp32": Case(forks, choose_and_train, "blocks", {"policy": BF16_FP32}),
    "ranks choose, root": Case(forks, choose_and_train, "root"),
    "nobody uses": Case(with_spares, reduce_unused),
    "nobody uses, in one block": Case(with_spares, functools.partial(reduce_unused, recurse=False)),
    "nobody uses, root": Case(with_spares, reduce_unused, "root"),
    "nobody runs": Case(models.Unused, reduce_unused),
    "frozen": Case(models.frozen, reduce_unused),
}


def test_without_zeros_for_unused_parameters_ranks_that_use_others_do_not_match():
    def run_into_it(package: ModuleType) -> None:
        training = Training(forks, by(package))
        choose(training, 0)
        training.loss(0).backward()

    with pytest.raises(RankError):
        launch(run_into_it, 2, HERE, timeout=60)


# --- Divide factor -----------------------------------------------------------------------------------------


class Division(NamedTuple):
    """How gradients are reduced.

    Attributes:
        factor: what sums are divided by; None: the number of ranks.
        sums_only: no reduction but sums is used.
        dtype: of parameters and optimizer; policy: of the rest.
        shape: of the mesh; None: all ranks shard.
        pattern: of micro-batches: n reduces nothing, s among ranks that shard, a altogether.
    """

    factor: float | None
    sums_only: bool = False
    dtype: torch.dtype = FP32
    policy: Policy | None = None
    shape: Shape | None = None
    pattern: str = "a"

    def __str__(self) -> str:
        names = [f"divide by {self.factor}", "sums only" if self.sums_only else "", str(self.shape or "")]
        names += [str(self.dtype), str(self.policy or ""), "" if self.pattern == "a" else self.pattern]
        return " ".join(name for name in names if name).replace("torch.", "")

    @property
    def reduce_dtype(self) -> torch.dtype:
        policy = self.policy or {}
        return policy.get("reduce_dtype") or policy.get("param_dtype") or self.dtype

    @property
    def tolerance(self) -> Tolerance:
        """Rounding in the dtype of the reduction, and in that of the gradients before."""
        if self.policy and self.policy.get("param_dtype"):  # the closed form computes in it, too
            return ROUNDING
        return {
            FP64: Tolerance(1e-12, 1e-14),
            FP32: ROUNDING,
            FP16: Tolerance(4e-3, 2e-4),
            BF16: Tolerance(3e-2, 2e-3),
        }[self.reduce_dtype]

    def backward(
        self, model: nn.Module, rows: Callable[[Tensor], Tensor], configure: Callable[[str], None]
    ) -> None:
        """The backwards of all micro-batches."""
        for seed, reduces in enumerate(self.pattern):
            configure(reduces)
            inputs = [rows(t) for t in model.inputs(12, seed)]
            objective(model(*[t.to(self.dtype) for t in inputs])).backward()

    def reduced(self, package: ModuleType) -> Trace:
        """The gradients that the package comes to."""
        torch.manual_seed(0)
        model = models.uneven().to(self.dtype)
        for module in (*model.blocks, model):
            shard(package, module, shape=self.shape, policy=self.policy)
        for module in sharded_modules(model):
            if self.factor is not None:
                module.set_gradient_divide_factor(self.factor)
            module.set_force_sum_reduction_for_comms(self.sums_only)

        def configure(reduces: str) -> None:
            model.set_requires_gradient_sync(reduces != "n")
            if self.shape and reduces != "n":
                model.set_requires_all_reduce(reduces == "a")

        self.backward(model, rank_rows, configure)
        trace = Trace()
        for name, param in model.named_parameters():
            trace.keep(name, param.grad)
        return trace

    def closed_form(self) -> Trace:
        """The gradients of all ranks, each in the dtype of its backward, summed in float64 and divided once."""
        torch.manual_seed(0)
        model = models.uneven().to(self.dtype)
        compute = (self.policy or {}).get("param_dtype") or self.dtype
        model.to(compute)
        sums = {name: torch.zeros_like(param, dtype=FP64) for name, param in model.named_parameters()}

        def configure(_: str) -> None:
            collect(sums, model)

        model.inputs = lambda rows, seed: [t.to(compute) for t in models.Model.inputs(model, rows, seed)]
        plain = self._replace(dtype=compute)
        plain.backward(model, rank_rows, configure)
        collect(sums, model)
        trace = Trace()
        for name, total in sums.items():
            dist.all_reduce(total)
            factor = dist.get_world_size() if self.factor is None else self.factor
            trace.keep(name, (total / factor).to(self.dtype))
        return trace

    def is_right_in_fsdp2(self, world_size: int) -> bool:
        """On gloo, FSDP2 cannot multiply before it sums, and divides twice where one rank shards alone."""
        shards = self.shape[1] if self.shape else world_size
        in_16_or_64 = self.reduce_dtype not in (FP32, BF16)
        if self.factor is None:
            return True
        if shards == 1:
            return not (self.sums_only or in_16_or_64) or self.factor == 1
        return self.sums_only or in_16_or_64 or self.factor == shards


def collect(sums: dict[str, Tensor], model: nn.Module) -> None:
    """Adds the gradients of a backward, and drops them."""
    for name, param in model.named_parameters():
        if param.grad is not None:
            sums[name] += param.grad
    model.zero_grad()


def divisions(world_size: int) -> list[Division]:
    found = [
        Division(factor, sums_only)
        for factor in (None, 1.0, 3.0, 0.5, float(world_size), 2.0 * world_size)
        for sums_only in (False, True)
    ]
    for policy, dtype in (
        ({"reduce_dtype": FP16}, FP32),
        ({"reduce_dtype": BF16}, FP32),
        ({"reduce_dtype": FP64}, FP32),
        (BF16_FP32, FP32),
        (None, FP64),
        ({"reduce_dtype": FP32}, FP64),
    ):
        for factor, sums_only in ((None, True), (3.0, False), (6.0, True), (8.0, False)):
            found.append(Division(factor, sums_only, dtype, policy))
    if world_size in (2, 4):
        for shape in ((2, 2), (4, 1)) if world_size == 4 else ((2, 1),):
            for factor, sums_only in ((None, True), (2.0, False), (3.0, False), (3.0, True), (8.0, False)):
                found.append(Division(factor, sums_only, shape=shape))
            found.append(Division(3.0, shape=shape, policy={"reduce_dtype": FP16}))
            found.append(Division(6.0, True, shape=shape, policy=BF16_FP32))
            found += [Division(3.0, True, shape=shape, pattern=pattern) for pattern in ("ssa", "nsa")]
            found.append(Division(3.0, shape=shape, pattern="nsa"))
    return found


def compare_division(package: ModuleType, division: Division) -> Any:
    got = division.reduced(package)
    found = {"closed form": differences(got.whole(), division.closed_form(), *division.tolerance)}
    if division.is_right_in_fsdp2(dist.get_world_size()):
        replicas, shards = division.shape or (1, dist.get_world_size())
        divides_first = shards == 1 < replicas and division.factor is not None  # where no collective could
        exact = BITS if max(replicas, shards) <= 2 and not divides_first else division.tolerance
        found["FSDP2"] = differences(got, division.reduced(fsdp), *exact)
    return found


def divide_in_one_group(training: Training) -> None:
    """Each call is for one group only."""
    if training.is_sharded:
        training.model.blocks[1].set_gradient_divide_factor(3.0)
        training.model.blocks[1].set_force_sum_reduction_for_comms(True)
        training.model.set_gradient_divide_factor(5.0)
        training.model.set_force_sum_reduction_for_comms(True)
    training.steps(2)


@functools.cache
def divided(world_size: int) -> Any:
    checks: dict[str, Check] = {
        str(division): functools.partial(compare_division, HERE, division)
        for division in divisions(world_size)
    }
    case = Case(models.stem, divide_in_one_group)
    checks["one group"] = functools.partial(compare, HERE, case, exactness(world_size), None)
    return launch(run_checks, world_size, checks, timeout=300)


DIVISIONS = [(world_size, division) for world_size in WORLD_SIZES for division in divisions(world_size)]


@pytest.mark.parametrize("world_size, division", DIVISIONS, ids=str)
def test_sums_are_divided_by_the_factor(world_size, division):
    assert complaints(divided(world_size), str(division), "closed form") == []


@pytest.mark.parametrize(
    "world_size, division", [d for d in DIVISIONS if d[1].is_right_in_fsdp2(d[0])], ids=str
)
def test_sums_are_divided_as_under_fsdp2(world_size, division):
    assert complaints(divided(world_size), str(division), "FSDP2") == []


def test_a_factor_is_that_of_one_group():
    assert complaints(divided(2), "one group", "FSDP2") == []


def test_the_older_name_of_the_factor_warns_as_in_fsdp2():
    def use_it(package: ModuleType) -> list[Any]:
        division = Division(None)
        heard, grads = [], []
        for library in (package, fsdp):
            model = shard(library, fresh(models.stem))
            model.set_force_sum_reduction_for_comms(True)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.set_reduce_scatter_divide_factor(3.0)
            heard.append(
                [
                    (warning.category, "set_gradient_divide_factor" in str(warning.message))
                    for warning in caught
                ]
            )
            division.backward(model, rank_rows, lambda reduces: None)
            grads.append([param.grad.full_tensor() for param in model.parameters()])
        same = all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        return [*heard, same]

    [[ours, theirs, same]] = launch(use_it, 2, HERE, timeout=60)[:1]
    assert ours == theirs != []
    assert same


# --- Which collectives run, and where ----------------------------------------------------------------------


class Call(NamedTuple):
    """A collective: its name, its reduction, and the group of ranks that it ran in."""

    name: str
    op: str
    group: dist.ProcessGroup


@contextmanager
def watched() -> Iterator[list[Call]]:
    """Notes the collectives over single tensors, whoever runs them."""
    calls: list[Call] = []
    names = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
    found = {name: getattr(dist, name) for name in (*names, "all_reduce") if hasattr(dist, name)}

    def watch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs)
            arguments.apply_defaults()
            calls.append(Call(name, str(arguments.arguments.get("op", "")), arguments.arguments["group"]))
            return original(*args, **kwargs)

        return collective

    for name, original in found.items():
        setattr(dist, name, watch(name, original))
    try:
        yield calls
    finally:
        for name, original in found.items():
            setattr(dist, name, original)


def reductions_of_a_step(package: ModuleType, sums_only: bool, **options: Any) -> list[tuple[str, str]]:
    training = Training(models.stem, by(package), **options)
    for module in sharded_modules(training.model):
        module.set_force_sum_reduction_for_comms(sums_only)
    with watched() as calls:
        training.loss(0).backward()
    return [(call.name, call.op) for call in calls if "gather" not in call.name]


@pytest.mark.parametrize("shape", [None, (2, 1)], ids=str)
def test_reductions_are_sums_where_that_is_forced_and_else_those_of_fsdp2(shape):
    def compare_calls(package: ModuleType) -> list[Any]:
        return [
            [reductions_of_a_step(library, sums_only, shape=shape) for library in (package, fsdp)]
            for sums_only in (False, True)
        ]

    for default, forced in launch(compare_calls, 2, HERE, timeout=60):
        assert default[0] == default[1] != []
        assert forced[0] == forced[1]
        assert {op for _, op in forced[0]} == {str(dist.ReduceOp.SUM)}
        assert {op for _, op in default[0]} == {str(dist.ReduceOp.AVG)}


def separate(training: Training) -> None:
    """Reductions in a group of their own, then back in the one of the gathers."""
    training.call("set_separate_reduce_scatter_group")
    training.steps(2)
    training.call("set_separate_reduce_scatter_group", False)
    training.steps(1, first_seed=2)


def groups_of_a_step(training: Training) -> tuple[set[Any], set[Any], set[tuple[int, ...]]]:
    """The process groups of gathers and of reduce-scatters in a step, and the ranks of the latter."""
    with watched() as calls:
        training.loss(0).backward()
    gathers = {call.group.group_name for call in calls if "gather" in call.name}
    scatters = {call.group.group_name for call in calls if "scatter" in call.name}
    ranks = {tuple(dist.get_process_group_ranks(call.group)) for call in calls if "scatter" in call.name}
    return gathers, scatters, ranks


def separated_groups(package: ModuleType, shape: Shape | None) -> list[Any]:
    training = Training(models.stem, by(package), shape=shape)
    found = [groups_of_a_step(training)]
    for arguments in ((True,), (), (False,)):
        training.model.set_separate_reduce_scatter_group(*arguments)
        found.append(groups_of_a_step(training))
    training.model.blocks[0].set_separate_reduce_scatter_group(True, recurse=False)
    return [*found, groups_of_a_step(training)]


@pytest.mark.parametrize("shape, world_size", [(None, 2), ((2, 2), 4)], ids=str)
def test_reduce_scatters_run_in_a_group_of_their_own_if_told_to(shape, world_size):
    for rank, steps in enumerate(launch(separated_groups, world_size, HERE, shape, timeout=60)):
        together, separated, again, back, in_part = steps
        first = rank - rank % 2
        for gathers, scatters, ranks in steps:
            assert (len(gathers), ranks) == (1, {(first, first + 1)})
        assert together[0] == together[1]
        assert len(separated[1]) == 1
        assert separated[0] == together[0] != separated[1]
        assert again[1] == separated[1], "a second call made a second group"
        assert back[1] == together[1]
        assert len(in_part[1]) == 2


# --- Reductions in flight ----------------------------------------------------------------------------------


def deep() -> models.Stem:
    return models.Stem([models.Block(8, 12, 8) for _ in range(5)])


def buffers(training: Training, number: int, recurse: bool = True) -> None:
    """The number is given to all groups, or to that of one block."""
    if training.is_sharded:
        where = training.model if recurse else training.model.blocks[0]
        where.set_reduce_scatter_max_input_buffers(number, recurse=recurse)
    training.steps(2)
    for micro in range(3):
        training.call("set_requires_gradient_sync", micro != 1)
        training.call("set_is_last_backward", micro == 2)
        training.loss(10 + micro).backward()
    training.update()
    training.keep_params()


def log_with_buffers(package: ModuleType, number: int | None, recurse: bool) -> EventLog:
    training = Training(deep, by(package))
    if number is not None:
        where = training.model if recurse else training.model.blocks[3]
        where.set_reduce_scatter_max_input_buffers(number, recurse=recurse)
    with record() as log:
        for seed in range(2):
            training.loss(seed).backward()
            training.model.zero_grad()
    return log


@functools.cache
def logs_with_buffers() -> Any:
    """By rank, by (number of buffers, whether for all groups at once)."""

    def on_a_rank(package: ModuleType) -> Any:
        kinds = [(None, True), (1, True), (2, True), (3, True), (2, False), (100, True)]
        return {kind: log_with_buffers(package, *kind) for kind in kinds}

    return launch(on_a_rank, 2, hwfsdp, timeout=60)


@pytest.mark.parametrize(
    "kind, in_flight",
    [((None, True), 1), ((1, True), 1), ((2, True), 2), ((3, True), 3), ((2, False), 2), ((100, True), 6)],
    ids=str,
)
def test_as_many_reductions_are_in_flight_as_there_may_be_input_buffers(kind, in_flight):
    """A buffer is packed when the reduction that used it is over, and not later; the last given to any group counts."""
    for log in (found[kind] for found in logs_with_buffers()):
        reductions = log.select("reduce_scatter")
        packings = log.select("copy_in", stream="compute")
        assert len(reductions) == len(packings) == 12
        for step in (0, 6):
            for i, j in itertools.combinations(range(step, step + 6), 2):
                waited = log.happens_before(reductions[i], packings[j])
                assert waited == (j - i >= in_flight), (i, j)


@pytest.mark.parametrize("number", [True, 1.5, "2", None, 0, -1], ids=str)
def test_a_number_of_buffers_that_is_none_is_refused_as_in_fsdp2(number):
    def refuse(package: ModuleType) -> list[list[str]]:
        found = []
        for library in (package, fsdp):
            model = shard(library, models.stem())
            with pytest.raises((TypeError, ValueError)) as caught:
                model.set_reduce_scatter_max_input_buffers(number)
            kinds = (TypeError, ValueError)
            found.append([kind.__name__ for kind in kinds if isinstance(caught.value, kind)])
        return found

    [[ours, theirs]] = launch(refuse, 1, HERE, timeout=60)
    assert ours == theirs


# --- After the optimizer -----------------------------------------------------------------------------------


def give_event(training: Training, make_event: Callable[[], Any]) -> None:
    """The model is told each time when the optimizer is done, or at least in the steps with an even number."""
    for seed in range(4):
        training.loss(seed).backward()
        training.update()
        if seed % 2 == 0:
            training.call("set_post_optim_event", make_event())
    training.keep_params()


def give_event_to_a_part(training: Training) -> None:
    """The event is the root's, whichever module it is given to."""
    for seed in range(3):
        training.loss(seed).backward()
        training.update()
        if training.is_sharded:
            training.model.blocks[0].set_post_optim_event(torch.Event("cpu"))
    training.keep_params()


# --- Lists of what to gather next --------------------------------------------------------------------------

LISTS: dict[str, Callable[[list[Any]], dict[int, list[Any]]]] = (
    {  # by index of a module, the modules it lists
        "the next": lambda m: {i: [following] for i, (_, following) in enumerate(pairwise(m))},
        "the next two": lambda m: {i: m[i + 1 : i + 3] for i in range(len(m))},
        "all that follow": lambda m: {i: m[i + 1 :] for i in range(len(m))},
        "far ahead": lambda m: {i: m[i + 2 : i + 3] for i in range(len(m))},
        "oneself": lambda m: {i: [module] for i, module in enumerate(m)},
        "one lists all in the wrong order": lambda m: {0: m[:0:-1]},
        "one has an empty list": lambda m: {1: []},
    }
)


def list_ahead(training: Training, name: str) -> None:
    """In forward along the blocks, in backward against them."""
    if not training.is_sharded:
        return
    blocks = list(training.model.blocks)
    for index, listed in LISTS[name](blocks).items():
        blocks[index].set_modules_to_forward_prefetch(listed)
    blocks.reverse()
    for index, listed in LISTS[name](blocks).items():
        blocks[index].set_modules_to_backward_prefetch(listed)


def train_with_lists(training: Training, name: str) -> None:
    list_ahead(training, name)
    training.steps(2)
    for micro in range(2):
        training.call("set_requires_gradient_sync", micro == 1)
        training.loss(10 + micro).backward()
    training.update()
    training.keep_params()


def traffic_with_lists(package: ModuleType, name: str) -> list[Counter[Any]]:
    """What two steps move, step by step."""
    training = Training(deep, by(package))
    list_ahead(training, name)
    found = []
    for seed in range(2):
        with record() as log:
            training.loss(seed).backward()
        training.model.zero_grad()
        found.append(Counter((event.op, event.bytes) for event in log.collectives()))
    return found


@functools.cache
def all_traffic_with_lists() -> Any:
    def on_a_rank(package: ModuleType) -> Any:
        return {name: traffic_with_lists(package, name) for name in LISTS}

    return launch(on_a_rank, 2, HERE, timeout=60)


@pytest.mark.parametrize("name", LISTS)
def test_lists_move_nothing_twice(name):
    gathers, reductions = 5 * 2 + 1, 5 + 1
    for found in all_traffic_with_lists():
        assert found[name] == found["one has an empty list"]
        for step in found[name]:
            counts = Counter({op: 0 for op, _ in step})
            for (op, _), number in step.items():
                counts[op] += number
            assert counts == {"all_gather": gathers, "reduce_scatter": reductions}


# --- One launch for all these switches ---------------------------------------------------------------------

EVENTS: dict[str, Callable[[], Any]] = {
    "an event": lambda: torch.Event("cpu"),
    "an event of the CPU's streams": torch.cpu.Event,
    "what recording on a CPU stream returns": lambda: torch.cpu.current_stream().record_event(),
}


def switch_cases(world_size: int) -> dict[str, Case]:
    found = section("unused", UNUSED if world_size == 2 else {k: UNUSED[k] for k in list(UNUSED)[:2]})
    found["separate group"] = Case(models.uneven, separate)
    for number in (2, 3):
        found[f"buffers: {number}"] = Case(deep, functools.partial(buffers, number=number))
    if world_size != 2:
        return found
    found["separate group, bf16, reduce fp32"] = Case(
        models.uneven, separate, "blocks", {"policy": BF16_FP32}
    )
    found["buffers: 2 in a block"] = Case(deep, functools.partial(buffers, number=2, recurse=False))
    for name, make_event in EVENTS.items():
        found[f"event: {name}"] = Case(models.stem, functools.partial(give_event, make_event=make_event))
    found["event: given to a part"] = Case(models.stem, give_event_to_a_part)
    for name in LISTS:
        found[f"lists: {name}"] = Case(deep, functools.partial(train_with_lists, name=name))
    found["lists: the next two, bf16"] = Case(
        deep, functools.partial(train_with_lists, name="the next two"), "blocks", {"policy": BF16_FP32}
    )
    return found


@functools.cache
def switches(world_size: int) -> Any:
    checks: dict[str, Check] = {
        name: functools.partial(
            compare,
            HERE,
            case,
            exactness(world_size),
            REGROUPING if same_without_sharding(world_size, name) else None,
        )
        for name, case in switch_cases(world_size).items()
    }
    return launch(run_checks, world_size, checks, timeout=300)


def same_without_sharding(world_size: int, name: str) -> bool:
    """Zeros for what nobody uses are no gradients there."""
    return "bf16" not in name and "nobody" not in name and (world_size > 1 or "ranks choose" not in name)


SWITCHES = [(world_size, name) for world_size in WORLD_SIZES for name in switch_cases(world_size)]


@pytest.mark.parametrize("world_size, case", SWITCHES)
def test_a_switch_works_as_in_fsdp2(world_size, case):
    assert complaints(switches(world_size), case, "FSDP2") == []


@pytest.mark.parametrize("world_size, case", [s for s in SWITCHES if same_without_sharding(*s)])
def test_a_switch_makes_no_difference_to_the_numbers(world_size, case):
    assert complaints(switches(world_size), case, "unsharded") == []


# --- Frozen parameters are not reduced ---------------------------------------------------------------------


def traffic_while_freezing(package: ModuleType, policy: Policy | None) -> list[EventLog]:
    """Steps with nothing, something, everything in a group, and nothing again frozen."""
    training = Training(models.stem, by(package), policy=policy)
    logs = []
    for frozen in FROZEN_STEPS:
        for name, param in training.model.named_parameters():
            param.requires_grad_(not name.startswith(frozen))
        with record() as log:
            training.loss(0).backward()
        training.model.zero_grad()
        logs.append(log)
    return logs


FROZEN_STEPS: tuple[tuple[str, ...], ...] = (
    (),
    ("blocks.0.up", "stem.bias", "blocks.2.down"),
    ("blocks.1",),
    (),
)


def reduced_bytes(frozen: tuple[str, ...], world_size: int, itemsize: int) -> list[int]:
    """Of each group in the order of backward, the bytes of the padded parameters that train."""
    model = models.stem()
    groups = ["blocks.2.", "blocks.1.", "blocks.0.", ("stem.", "head.")]
    found = []
    for group in groups:
        found.append(
            sum(
                world_size * math.ceil(p.shape[0] / world_size) * math.prod(p.shape[1:]) * itemsize
                for name, p in model.named_parameters()
                if name.startswith(group) and not name.startswith(frozen)
            )
        )
    return [nbytes for nbytes in found if nbytes]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("policy", ["fp32", "bf16, reduce fp32", "bf16"])
def test_reductions_carry_the_parameters_that_train(world_size, policy):
    itemsize = 2 if policy == "bf16" else 4
    for logs in launch(traffic_while_freezing, world_size, HERE, POLICIES[policy], timeout=60):
        for frozen, log in zip(FROZEN_STEPS, logs, strict=True):
            reductions = [event.bytes for event in log.select("reduce_scatter")]
            assert reductions == reduced_bytes(frozen, world_size, itemsize)
