"""Hybrid sharding: parameters sharded along one axis of the mesh, replicated along another.

The oracle is torch's FSDP2 on a mesh of the same shape, in the same processes, and PyTorch without sharding. Where
every group of ranks has at most two members, the order of additions is no matter, and the bits are compared. What
travels is read from the event log; its bytes follow from the shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import hwfsdp
import models
from hwfsdp import Event, EventLog, launch, record
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
    differences,
    run_checks,
    train,
    unsharded,
)

HERE: ModuleType = hwfsdp  # what is tested; it has the names of `torch.distributed.fsdp`

Shape = tuple[int, ...]
AXES = ("replicate", "shard")
SHAPES: list[Shape] = [(2, 2), (2, 1), (1, 2), (4, 1), (1, 3)]  # ranks that replicate, ranks that shard
BF16_FP32: Policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@functools.cache
def grid(shape: Shape, axes: tuple[str, ...] = AXES) -> DeviceMesh:
    """A mesh on the CPU; one of each kind per process, since each makes process groups."""
    return init_device_mesh("cpu", shape, mesh_dim_names=axes[-len(shape) :])


def shard(
    package: ModuleType, module: nn.Module, *, shape: Shape, policy: Policy | None = None, **options: Any
) -> nn.Module:
    """The package's fully_shard on the mesh of this shape."""
    mp_policy = package.MixedPrecisionPolicy(**policy or {})
    return package.fully_shard(module, mesh=grid(shape), mp_policy=mp_policy, **options)


def by(package: ModuleType) -> Library:
    return functools.partial(shard, package)


def exactness(shape: Shape) -> Tolerance:
    """What FSDP2's numbers may be missed by."""
    return BITS if max(shape) <= 2 else ROUNDING


def compare(package: ModuleType, case: Case, fsdp2: Tolerance, plain: Tolerance | None) -> Any:
    """What differs from FSDP2 on the same mesh, and from PyTorch without sharding."""
    got = case.run(by(package))
    found = {"FSDP2": differences(got, case.run(by(fsdp)), *fsdp2)}
    if plain is not None:
        found["unsharded"] = differences(got.whole(), case.run(unsharded).whole(), *plain)
    return found


def sharded_modules(model: nn.Module, package: ModuleType) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, package.FSDPModule)]


# --- Numbers -----------------------------------------------------------------------------------------------

NOTHING, SCATTER, ALL, BOTH = "nsab"  # what a micro-batch reduces; BOTH is ALL in one call


def configure(training: Training, reduces: str) -> None:
    """The switches for a micro-batch: no reduction, the one among ranks that shard, or the whole one."""
    training.call("set_requires_gradient_sync", reduces != NOTHING)
    if reduces in (SCATTER, ALL):
        training.call("set_requires_all_reduce", reduces == ALL)


def accumulate(training: Training, pattern: str) -> None:
    """Micro-batches that reduce as the pattern says, twice; keeps what the shards' gradients are on the way."""
    for step in range(2):
        for micro, reduces in enumerate(pattern):
            configure(training, reduces)
            training.loss(10 * step + micro).backward()
            keep_local_grads(training)
        training.update()
    training.keep_params()


def keep_local_grads(training: Training) -> None:
    for name, param in training.model.named_parameters():
        grad = param.grad
        training.trace.keep(
            f"grad so far {name} (local)", grad.to_local() if isinstance(grad, DTensor) else grad
        )


def accumulate_in_a_block(training: Training) -> None:
    """One block reduces among the ranks that shard, the others altogether."""
    for seed, all_reduce in enumerate([False, True]):
        if training.is_sharded:
            training.model.blocks[1].set_requires_all_reduce(all_reduce, recurse=False)
        training.loss(seed).backward()
        keep_local_grads(training)
    training.update()
    training.keep_params()


def leave_sums_for_the_next_step(training: Training) -> None:
    """The optimizer finds no gradients after a step that only scatters; the next step has those of both."""
    for seed, reduces in enumerate([SCATTER, ALL, ALL]):
        configure(training, reduces)
        training.loss(seed).backward()
        training.update()
    training.keep_params()


def forget_sums(training: Training) -> None:
    """A reset drops the sums that were scattered and not yet all-reduced."""
    training.steps(1)
    configure(training, SCATTER)
    training.loss(7).backward()
    training.model.reset_iter_state()
    configure(training, ALL)
    training.steps(2, first_seed=1)


def not_the_last(training: Training) -> None:
    """Two backwards follow at once, the first with reductions left in flight."""
    for seed in range(2):
        for micro in range(2):
            training.call("set_is_last_backward", micro == 1)
            training.loss(10 * seed + micro).backward()
        training.update()
    training.keep_params()


def clip(training: Training) -> None:
    for seed in range(2):
        training.loss(seed).backward()
        norm = nn.utils.clip_grad_norm_(training.model.parameters(), max_norm=0.1)
        training.trace.keep("norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)
        training.update()
    training.keep_params()


def reload(training: Training) -> None:
    """A second model takes over the state of the first."""
    training.steps(1)
    state = {name: tensor.detach().clone() for name, tensor in training.model.state_dict().items()}
    training.steps(1, first_seed=1)
    training.model.load_state_dict(state)
    training.steps(2, first_seed=2)


PATTERNS = ["".join(first) + ALL for first in itertools.product((NOTHING, SCATTER, ALL), repeat=2)]
PATTERNS += [SCATTER + BOTH, NOTHING + SCATTER + BOTH]


def cases(shape: Shape) -> dict[str, Case]:
    """What is trained on a mesh of this shape."""
    mesh = {"shape": shape}
    mixed = mesh | {"policy": BF16_FP32}
    return {
        "uneven": Case(models.uneven, train, "blocks", mesh),
        "transformer, nested": Case(models.Transformer, train, "nested", mesh),
        "frozen": Case(models.frozen, train, "blocks", mesh),
        "unused, root": Case(models.Unused, train, "root", mesh),
        "twice": Case(models.twice, train, "blocks", mesh),
        "stay whole": Case(models.stem, train, "blocks", mesh | {"reshard_after_forward": False}),
        "bf16, reduce fp32": Case(models.uneven, train, "blocks", mixed),
        "reduce bf16": Case(
            models.uneven, train, "root", mesh | {"policy": {"reduce_dtype": torch.bfloat16}}
        ),
        "reduce fp16": Case(models.uneven, train, "root", mesh | {"policy": {"reduce_dtype": torch.float16}}),
        "clip": Case(models.uneven, clip, "blocks", mesh),
        "reload": Case(models.uneven, reload, "blocks", mesh),
        "not the last": Case(models.stem, not_the_last, "blocks", mesh),
        "sums left for the next step": Case(models.stem, leave_sums_for_the_next_step, "blocks", mesh),
        "sums forgotten": Case(models.stem, forget_sums, "blocks", mesh),
        "a block accumulates": Case(models.stem, accumulate_in_a_block, "blocks", mesh),
        **{
            f"accumulate {pattern}": Case(
                models.uneven, functools.partial(accumulate, pattern=pattern), "blocks", mesh
            )
            for pattern in PATTERNS
        },
        **{
            f"accumulate {pattern}, bf16, reduce fp32": Case(
                models.uneven, functools.partial(accumulate, pattern=pattern), "blocks", mixed
            )
            for pattern in ("ssa", "nsa")
        },
    }


NOT_AS_UNSHARDED = {  # by design: rounded on purpose, or with gradients of their own
    *("bf16, reduce fp32", "reduce bf16", "reduce fp16"),
    *("sums left for the next step", "sums forgotten"),
    *(name for name in cases((2, 2)) if name.endswith(", bf16, reduce fp32")),
}
EVERYWHERE = (
    "uneven",
    "transformer, nested",
    "bf16, reduce fp32",
    "reduce fp16",
    "accumulate nsa",
    "accumulate ssa",
)
CASES = [(shape, name) for shape in SHAPES for name in (cases(shape) if shape == (2, 2) else EVERYWHERE)]


def tolerance(shape: Shape, name: str) -> Tolerance:
    """Rounding to 16 bits is rounding to 16 bits."""
    coarse = {"reduce fp16": Tolerance(2e-3, 1e-5), "reduce bf16": Tolerance(2e-2, 1e-4)}
    return BITS if exactness(shape) == BITS else coarse.get(name, ROUNDING)


@functools.cache
def numbers(world_size: int) -> Any:
    checks: dict[str, Check] = {
        f"{shape} {name}": functools.partial(
            compare, HERE, case, tolerance(shape, name), None if name in NOT_AS_UNSHARDED else REGROUPING
        )
        for shape, name in CASES
        if math.prod(shape) == world_size
        for case in [cases(shape)[name]]
    }
    return launch(run_checks, world_size, checks, timeout=300)


@pytest.mark.parametrize("shape, case", CASES, ids=str)
def test_on_a_2d_mesh_training_goes_as_under_fsdp2(shape, case):
    assert complaints(numbers(math.prod(shape)), f"{shape} {case}", "FSDP2") == []


@pytest.mark.parametrize("shape, case", [c for c in CASES if c[1] not in NOT_AS_UNSHARDED], ids=str)
def test_on_a_2d_mesh_training_goes_as_without_sharding(shape, case):
    assert complaints(numbers(math.prod(shape)), f"{shape} {case}", "unsharded") == []


def test_on_a_1d_mesh_there_is_no_all_reduce_to_leave_out():
    case = Case(models.uneven, functools.partial(accumulate, pattern="sa"), options={"shape": (2,)})
    checks = {"1D": functools.partial(compare, HERE, case, BITS, REGROUPING)}
    results = launch(run_checks, 2, checks, timeout=60)
    assert complaints(results, "1D", "FSDP2") + complaints(results, "1D", "unsharded") == []


# --- Where torch 2.13 has no answer ------------------------------------------------------------------------


class Branches(nn.Module):
    """Two branches in one group; one of them at a time, or both."""

    used: Sequence[str] = ("left",)

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = models.Block(8, 5, 8), models.Block(8, 7, 8)

    def forward(self, x: Tensor) -> Tensor:
        return sum(getattr(self, branch)(x) for branch in self.used)


def branches() -> models.Stem:
    return models.Stem([Branches() for _ in range(2)])


def branch_off(training: Training, path: Sequence[Sequence[str]], pattern: str) -> None:
    """Every micro-batch takes other branches."""
    for step in range(2):
        for micro, (used, reduces) in enumerate(zip(path, pattern, strict=True)):
            for block in training.model.blocks:
                block.used = used
            configure(training, reduces)
            training.loss(10 * step + micro).backward()
        training.update()
    training.keep_params()


def leave_a_block_out(training: Training) -> None:
    """A block is reduced among the ranks that shard, and takes no part in the micro-batch that all-reduces."""
    for step in range(2):
        for micro, (training.model.path, reduces) in enumerate([((0, 1, 2), SCATTER), ((0, 2), ALL)]):
            configure(training, reduces)
            training.loss(10 * step + micro).backward()
        training.update()
    training.keep_params()


LEFT, RIGHT = "left", "right"
BRANCHING = {
    "another one": (((LEFT,), (RIGHT,)), "sa"),
    "more": (((LEFT,), (LEFT, RIGHT)), "sa"),
    "fewer": (((LEFT, RIGHT), (RIGHT,)), "sa"),
    "other ones each time": (((LEFT,), (RIGHT,), (LEFT,), (RIGHT,)), "ssna"),
}


def compare_unsharded(package: ModuleType, case: Case) -> Any:
    found = differences(case.run(by(package)).whole(), case.run(unsharded).whole(), *REGROUPING)
    return {"unsharded": found}


@functools.cache
def branching() -> Any:
    checks: dict[str, Check] = {
        name: functools.partial(
            compare_unsharded,
            HERE,
            Case(
                branches,
                functools.partial(branch_off, path=path, pattern=pattern),
                options={"shape": (2, 2)},
            ),
        )
        for name, (path, pattern) in BRANCHING.items()
    }
    left_out = Case(models.wandering, leave_a_block_out, options={"shape": (2, 2)})
    checks["left out"] = functools.partial(compare_unsharded, HERE, left_out)
    return launch(run_checks, 4, checks, timeout=200)


@pytest.mark.parametrize("case", BRANCHING)
def test_sums_that_are_not_all_reduced_yet_may_be_of_other_parameters(case):
    """FSDP2 keeps one flat sum per group, and raises if the next has another size."""
    assert complaints(branching(), case, "unsharded") == []


def test_sums_of_a_block_that_the_last_micro_batch_leaves_out_are_all_reduced():
    """FSDP2 keeps them until the block runs again."""
    assert complaints(branching(), "left out", "unsharded") == []


# --- Placements and traffic --------------------------------------------------------------------------------

MEASURED: list[Shape] = [(2, 2), (4, 1), (2, 1), (1, 2)]
POLICIES: dict[str, Policy | None] = {
    "fp32": None,
    "bf16, reduce fp32": BF16_FP32,
    "reduce bf16": {"reduce_dtype": torch.bfloat16},
}
REDUCED = {  # pattern of micro-batches: how often a group is scattered, and all-reduced
    **{"nna": (1, 1), "ssa": (3, 1), "nsa": (2, 1), "aaa": (3, 3)},
    **{"sss": (3, 0), "nnn": (0, 0), "sb": (2, 1)},
}


def log_of(
    package: ModuleType,
    shape: Shape,
    build: Callable[[], models.Model] = models.uneven,
    pattern: str = ALL,
    steps: int = 1,
    policy: Policy | None = None,
) -> EventLog:
    """On a rank: the log of training steps, each of micro-batches that reduce as the pattern says."""
    training = Training(build, by(package), shape=shape, policy=policy)
    with record() as log:
        for step in range(steps):
            for reduces in pattern:
                configure(training, reduces)
                training.loss(step).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
    return log


def placed(package: ModuleType, shape: Shape) -> dict[str, Any]:
    """Of every parameter and its gradient: whether it is on the mesh, how it is placed, and this rank's rows."""
    training = Training(models.uneven, by(package), shape=shape)
    training.loss(0).backward()
    return {
        name: [
            (tensor.device_mesh == grid(shape), tensor.placements, tensor.shape, tensor.to_local().detach())
            for tensor in (param, param.grad)
        ]
        for name, param in training.model.named_parameters()
    }


def measure(package: ModuleType, world_size: int) -> dict[Any, Any]:
    """On a rank: placements and logs on all meshes of this size."""
    found: dict[Any, Any] = {}
    for shape in MEASURED:
        if math.prod(shape) == world_size:
            found[shape] = placed(package, shape)
            for name, policy in POLICIES.items():
                found[shape, name] = log_of(package, shape, policy=policy)
            if shape == (2, 2):
                for pattern in REDUCED:
                    found[shape, pattern] = log_of(package, shape, pattern=pattern)
            if shape[0] > 1:
                found[shape, "two steps"] = log_of(package, shape, models.graded, steps=2)
    return found


@functools.cache
def measured(world_size: int) -> Any:
    return launch(measure, world_size, HERE, world_size, timeout=200)


def logs_of(shape: Shape, what: str) -> list[EventLog]:
    """By rank."""
    return [found[shape, what] for found in measured(math.prod(shape))]


def chunk_bytes(module: nn.Module, ranks: int, itemsize: int = 4) -> int:
    """Bytes of one rank's chunks of all parameters, padding included."""
    return sum(math.ceil(p.shape[0] / ranks) * math.prod(p.shape[1:]) * itemsize for p in module.parameters())


def bytes_of(log: EventLog, op: str) -> list[int]:
    return [event.bytes for event in log.select(op)]


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_parameters_and_gradients_are_replicated_on_the_first_axis_and_sharded_on_the_second(shape):
    sizes = {name: param.shape for name, param in models.uneven().named_parameters()}
    ranks = [found[shape] for found in measured(math.prod(shape))]
    for rank, found in enumerate(ranks):
        assert found.keys() == sizes.keys()
        place = rank % shape[1]
        for name, size in sizes.items():
            rows = -(-size[0] // shape[1])
            local_shape = (len(range(size[0])[place * rows :][:rows]), *size[1:])
            for tensor, (on_mesh, placements, whole, local) in enumerate(found[name]):
                assert (on_mesh, placements, whole) == (True, (Replicate(), Shard(0)), size)
                assert local.shape == local_shape
                assert torch.equal(local, ranks[place][name][tensor][3]), "replicas differ"


@pytest.mark.parametrize("shape", [shape for shape in MEASURED if shape[0] > 1], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_all_reduce_carries_the_shard_of_a_group_in_the_reduce_dtype(shape, policy):
    itemsize = 2 if policy == "reduce bf16" else 4
    expected = [chunk_bytes(block, shape[1], itemsize) for block in reversed(models.uneven().blocks)]
    for log in logs_of(shape, policy):
        assert bytes_of(log, "all_reduce") == expected


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_gathers_and_reduce_scatters_stay_among_the_ranks_that_shard(shape):
    blocks = models.uneven().blocks
    wholes = [shape[1] * chunk_bytes(block, shape[1]) for block in blocks if shape[1] > 1]
    for log in logs_of(shape, "fp32"):
        assert bytes_of(log, "reduce_scatter") == wholes[::-1]
        assert bytes_of(log, "all_gather") == wholes + wholes[::-1]


def test_with_one_replica_there_is_nobody_to_all_reduce_with():
    for log in logs_of((1, 2), "fp32"):
        assert bytes_of(log, "all_reduce") == []


@pytest.mark.parametrize("pattern", REDUCED)
def test_a_micro_batch_reduces_what_it_was_told_to(pattern):
    scatters, reductions = REDUCED[pattern]
    for log in logs_of((2, 2), pattern):
        counts = Counter(event.op for event in log.collectives())
        assert (counts["reduce_scatter"], counts["all_reduce"]) == (3 * scatters, 3 * reductions)


# --- What overlaps: the events of hwfsdp -------------------------------------------------------------------

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.fixture(params=[(2, 2), (2, 1)], ids=str)
def logs(request) -> list[EventLog]:
    """Of two training steps, by rank."""
    return logs_of(request.param, "two steps")


def one(log: EventLog, op: str, owner: str, step: int) -> Event:
    [event] = log.select(op, owner=owner, step=step, phase="backward")
    return event


def test_every_group_is_all_reduced_once_a_step_on_a_stream_of_its_own(logs):
    for log in logs:
        events = log.select("all_reduce")
        assert {event.stream for event in events} == {"all_reduce"}
        assert Counter((e.owner, e.step) for e in events) == Counter(itertools.product(BLOCKS, (0, 1)))
        assert {event.phase for event in events} == {"backward"}


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("block", [2, 1])
def test_an_all_reduce_is_waited_for_by_no_later_backward(logs, block, step):
    for log in logs:
        reduction = one(log, "all_reduce", BLOCKS[block], step)
        for before in range(block):
            backward = one(log, "backward", BLOCKS[before], step)
            assert not log.happens_before(reduction, backward), BLOCKS[before]


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("block", [2, 1])
def test_the_reduce_scatter_before_it_is_not_waited_for_by_the_next_backward_either(block, step):
    for log in logs_of((2, 2), "two steps"):
        reduction = one(log, "reduce_scatter", BLOCKS[block], step)
        backward = one(log, "backward", BLOCKS[block - 1], step)
        assert reduction.seq < backward.seq
        assert not log.happens_before(reduction, backward)


@pytest.mark.parametrize("step", [0, 1])
def test_an_all_reduce_runs_under_a_later_backward(logs, step):
    """At the latest under that of the group after the next."""
    for log in logs:
        reduction = one(log, "all_reduce", "blocks.2", step)
        backward = one(log, "backward", "blocks.0", step)
        assert reduction.seq < backward.seq
        assert not log.happens_before(reduction, backward)
        assert not log.happens_before(backward, reduction)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("block", [2, 1])
def test_an_all_reduce_and_the_next_copy_in_may_run_at_once(logs, block, step):
    for log in logs:
        reduction = one(log, "all_reduce", BLOCKS[block], step)
        packings = log.select("copy_in", owner=BLOCKS[block - 1], step=step, stream="compute")
        assert len(packings) == 1
        assert not log.happens_before(reduction, packings[0])


def test_an_all_reduce_follows_the_reduce_scatter_of_its_group():
    for log, owner, step in itertools.product(logs_of((2, 2), "two steps"), BLOCKS, (0, 1)):
        scatter, reduction = (one(log, op, owner, step) for op in ("reduce_scatter", "all_reduce"))
        assert log.happens_before(scatter, reduction), (owner, step)


def test_the_optimizer_starts_when_every_all_reduce_is_done(logs):
    for log in logs:
        optimizers = log.select("optimizer")
        reductions = log.select("all_reduce")
        assert (len(optimizers), len(reductions)) == (2, 6)
        assert all(log.happens_before(event, optimizers[event.step]) for event in reductions)


# --- A hook in place of, or after, the all-reduce ----------------------------------------------------------


def with_hooks(training: Training, package: ModuleType, make_hook: Callable[[], Any], **options: Any) -> None:
    for module in sharded_modules(training.model, package):
        module.set_all_reduce_hook(make_hook(), **options)


def average_over_replicas(reduced: Tensor) -> None:
    dist.all_reduce(reduced, dist.ReduceOp.AVG, group=grid((2, 2)).get_group("replicate"))


def on_shard_axis(package: ModuleType, module: nn.Module, *, shape: Shape, **options: Any) -> nn.Module:
    """Plain sharding over the second axis; of the first it knows nothing."""
    mp_policy = package.MixedPrecisionPolicy(**options.pop("policy", None) or {})
    return package.fully_shard(module, mesh=grid(shape)["shard"], mp_policy=mp_policy, **options)


def hand_made(package: ModuleType, case: Case, **options: Any) -> Trace:
    """Hybrid sharding out of plain sharding and a hook."""
    library = functools.partial(on_shard_axis, package)
    training = Training(case.build, library, case.how, **case.options)
    with_hooks(training, package, lambda: average_over_replicas, **options)
    case.scenario(training)
    return training.trace


def compare_hand_made(package: ModuleType, case: Case, streams: bool = False) -> Any:
    options = {"stream": torch.cpu.Stream()} if streams else {}
    got = hand_made(package, case, **options)
    return {
        "native": differences(got, case.run(by(package)), *BITS),
        "FSDP2": differences(got, hand_made(fsdp, case, **options), *BITS),
    }


def hooked(package: ModuleType, case: Case) -> Trace:
    """Native hybrid sharding; a hook sees what was all-reduced, and doubles it."""
    training = Training(case.build, by(package), case.how, **case.options)
    seen: list[Tensor] = []

    def double(reduced: Tensor) -> None:
        seen.append(reduced.detach().clone())
        reduced.mul_(2)

    with_hooks(training, package, lambda: double)
    case.scenario(training)
    for number, reduced in enumerate(seen):  # the order of parameters in it is nobody's business
        training.trace.keep(f"reduced {number} (local)", reduced.flatten().sort().values)
    return training.trace


def compare_hooked(package: ModuleType, case: Case) -> Any:
    got, expected = hooked(package, case), hooked(fsdp, case)
    plain = case.run(by(package))
    first = next(
        name for name, tensor in got.tensors.items() if name.startswith("grad") and tensor is not None
    )
    doubled = torch.equal(got.tensors[first], 2 * plain.tensors[first])
    return {"FSDP2": differences(got, expected, *BITS) + ([] if doubled else [f"{first} is not doubled"])}


def remove_hook(package: ModuleType) -> Any:
    """A hook that was taken away again is not called."""
    training = Training(models.stem, by(package), shape=(2, 2))
    called: list[Tensor] = []
    with_hooks(training, package, lambda: called.append)
    with_hooks(training, package, lambda: None)
    training.steps(1)
    return {"FSDP2": [f"called {len(called)} times"] if called else []}


HOOKED: dict[str, Case] = {
    "train": Case(models.uneven, train, options={"shape": (2, 2)}),
    "bf16, reduce fp32": Case(models.uneven, train, options={"shape": (2, 2), "policy": BF16_FP32}),
    "nested": Case(models.Transformer, train, "nested", {"shape": (2, 2)}),
    "accumulate nna": Case(
        models.uneven, functools.partial(accumulate, pattern="nna"), options={"shape": (2, 2)}
    ),
    "accumulate aa": Case(
        models.uneven, functools.partial(accumulate, pattern="aa"), options={"shape": (2, 2)}
    ),
}
HOOKED_NATIVELY = HOOKED | {
    "accumulate ssa": Case(
        models.uneven, functools.partial(accumulate, pattern="ssa"), options={"shape": (2, 2)}
    )
}


@functools.cache
def hooks() -> Any:
    checks: dict[str, Check] = {
        **{
            f"hand-made, {name}": functools.partial(compare_hand_made, HERE, case)
            for name, case in HOOKED.items()
        },
        "hand-made, on a stream": functools.partial(compare_hand_made, HERE, HOOKED["train"], streams=True),
        **{
            f"native, {name}": functools.partial(compare_hooked, HERE, case)
            for name, case in HOOKED_NATIVELY.items()
        },
        "removed": functools.partial(remove_hook, HERE),
    }
    return launch(run_checks, 4, checks, timeout=300)


@pytest.mark.parametrize("case", [*HOOKED, "on a stream"])
def test_plain_sharding_with_an_all_reduce_as_hook_is_hybrid_sharding(case):
    assert complaints(hooks(), f"hand-made, {case}", "native") == []


@pytest.mark.parametrize("case", [*HOOKED, "on a stream"])
def test_plain_sharding_with_an_all_reduce_as_hook_goes_as_under_fsdp2(case):
    assert complaints(hooks(), f"hand-made, {case}", "FSDP2") == []


@pytest.mark.parametrize("case", HOOKED_NATIVELY)
def test_in_hybrid_sharding_a_hook_gets_what_was_all_reduced_as_under_fsdp2(case):
    assert complaints(hooks(), f"native, {case}", "FSDP2") == []


def test_a_hook_can_be_taken_away():
    assert complaints(hooks(), "removed", "FSDP2") == []


def test_hybrid_sharding_has_a_stream_already():
    def give_a_stream(package: ModuleType) -> None:
        training = Training(models.stem, by(package), shape=(2, 1))
        with pytest.raises(ValueError, match="stream"):
            training.model.set_all_reduce_hook(average_over_replicas, stream=torch.cpu.Stream())

    launch(give_a_stream, 2, HERE, timeout=60)


# --- Axes by name ------------------------------------------------------------------------------------------


class OnMesh(models.Stem):
    """Takes this rank's rows as a DTensor, if its parameters are DTensors."""

    def __init__(self) -> None:
        super().__init__([models.Block(8, 7, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weight = self.stem.weight
        if not isinstance(weight, DTensor):
            return super().forward(x)
        mesh = weight.device_mesh
        return super().forward(DTensor.from_local(x, mesh, [Shard(0)] * mesh.ndim)).to_local()


@dataclasses.dataclass(frozen=True)
class Axes:
    """A mesh, which of its axes do what, and the mesh on which that is plain or hybrid sharding of plain tensors."""

    shape: Shape
    names: tuple[str, ...]
    dims: dict[str, Any]
    same_as: Shape | None
    placements: tuple[Any, ...]


R, S = Replicate(), Shard(0)
NAMED: dict[str, Axes] = {
    "replicate": Axes((2,), ("r",), {"replicate": "r"}, None, (R,)),
    "shard": Axes((2,), ("s",), {"shard": "s"}, (2,), (S,)),
    "both": Axes((2, 2), ("r", "s"), {"replicate": "r", "shard": "s"}, (2, 2), (R, S)),
    "shard both": Axes((2, 2), ("a", "b"), {"shard": ("a", "b")}, (4,), (S,)),
    "replicate both": Axes((2, 2), ("a", "b"), {"replicate": ("a", "b")}, None, (R, R)),
    "replicate one, shard two": Axes(
        (2, 1, 2), ("a", "b", "c"), {"replicate": "a", "shard": ("b", "c")}, (2, 2), (R, S)
    ),
    "replicate two, shard one": Axes(
        (2, 1, 2), ("a", "b", "c"), {"replicate": ("a", "b"), "shard": "c"}, (2, 2), (R, R, S)
    ),
}


def shard_by_name(
    package: ModuleType, module: nn.Module, *, axes: Axes, policy: Policy | None = None, **options: Any
) -> nn.Module:
    """Makes the parameters DTensors on the whole mesh, every rank having all of them, and shards those."""
    mesh = grid(axes.shape, axes.names)
    for part in module.modules():
        for name, param in list(part.named_parameters(recurse=False)):
            if not isinstance(param, DTensor):
                spread = distribute_tensor(param.detach(), mesh, [Replicate()] * mesh.ndim)
                part.register_parameter(name, nn.Parameter(spread, param.requires_grad))
    dims = package.DataParallelMeshDims(**axes.dims)
    mp_policy = package.MixedPrecisionPolicy(**policy or {})
    return package.fully_shard(module, mesh=mesh, dp_mesh_dims=dims, mp_policy=mp_policy, **options)


def by_name(package: ModuleType, axes: Axes) -> Library:
    return functools.partial(shard_by_name, package, axes=axes)


def without_meshes(trace: Trace) -> Trace:
    """Whole tensors; which rank has which rows may differ between meshes."""
    return Trace({name: tensor for name, tensor in trace.tensors.items() if "(local)" not in name})


def compare_by_name(package: ModuleType, case: Case, axes: Axes) -> Any:
    exact = BITS if math.prod(axes.shape) == 2 or axes.same_as == (2, 2) else ROUNDING
    got = case.run(by_name(package, axes))
    found = {"FSDP2": differences(got, case.run(by_name(fsdp, axes)), *exact)}
    if case.scenario is train_briefly and "policy" not in case.options:
        found["unsharded"] = differences(got.whole(), case.run(unsharded).whole(), *REGROUPING)
    if axes.same_as:
        options = case.options | {"shape": axes.same_as}
        plain = dataclasses.replace(case, options=options).run(by(package))
        found["unnamed"] = differences(without_meshes(got), without_meshes(plain), *exact)
    return found


def compare_distributed(package: ModuleType) -> Any:
    """`distribute_module` over the whole mesh, then fully_shard of the parts."""
    axes = NAMED["both"]
    mesh = grid(axes.shape, axes.names)

    def run(library: ModuleType) -> Trace:
        training = Training(OnMesh, unsharded)
        training.library = by_name(library, axes)
        distribute_module(training.model, mesh)
        for module in (*training.model.blocks, training.model):
            library.fully_shard(module, mesh=mesh, dp_mesh_dims=library.DataParallelMeshDims(**axes.dims))
        training.steps(2)
        return training.trace

    return {"FSDP2": differences(run(package), run(fsdp), *BITS)}


def train_briefly(training: Training) -> None:
    training.steps(2)


NAMED_CASES: dict[str, Case] = {
    "train": Case(OnMesh, train_briefly),
    "root": Case(OnMesh, train_briefly, "root"),
    "bf16, reduce fp32": Case(OnMesh, train_briefly, "blocks", {"policy": BF16_FP32}),
    "accumulate nsa": Case(OnMesh, functools.partial(accumulate, pattern="nsa")),
    "accumulate ssa": Case(OnMesh, functools.partial(accumulate, pattern="ssa")),
    "clip": Case(OnMesh, clip),
}


NAMED_RUNS = [
    (axes, name)
    for axes in NAMED
    for name in (NAMED_CASES if axes in ("replicate", "both") else ("train", "bf16, reduce fp32"))
]


def measure_by_name(package: ModuleType, axes: Axes) -> Any:
    """How parameters are placed, and the log of a forward and backward."""
    training = Training(OnMesh, by_name(package, axes))
    placements = [(p.placements, p.device_mesh.size()) for p in training.model.parameters()]
    with record() as log:
        training.loss(0).backward()
    return placements, log


def refuse_to_reshard_to_two(package: ModuleType) -> Any:
    with pytest.raises(NotImplementedError):
        by_name(package, NAMED["shard both"])(OnMesh(), reshard_after_forward=2)
    return {"FSDP2": []}


@functools.cache
def named(world_size: int) -> Any:
    checks: dict[str, Any] = {
        f"{name}, {axes}": functools.partial(compare_by_name, HERE, case, NAMED[axes])
        for axes, name in NAMED_RUNS
        if math.prod(NAMED[axes].shape) == world_size
        for case in [NAMED_CASES[name]]
    }
    checks |= {
        f"measured, {name}": functools.partial(measure_by_name, HERE, axes)
        for name, axes in NAMED.items()
        if math.prod(axes.shape) == world_size
    }
    if world_size == 4:
        checks["distribute_module"] = functools.partial(compare_distributed, HERE)
        checks["two ranks to reshard to"] = functools.partial(refuse_to_reshard_to_two, HERE)
    return launch(run_checks, world_size, checks, timeout=300)


def named_results(axes: str) -> Any:
    return named(math.prod(NAMED[axes].shape))


@pytest.mark.parametrize("axes, case", NAMED_RUNS)
def test_axes_given_by_name_train_as_under_fsdp2(axes, case):
    assert complaints(named_results(axes), f"{case}, {axes}", "FSDP2") == []


@pytest.mark.parametrize("axes, case", [run for run in NAMED_RUNS if run[1] in ("train", "root")])
def test_axes_given_by_name_train_as_without_sharding(axes, case):
    assert complaints(named_results(axes), f"{case}, {axes}", "unsharded") == []


@pytest.mark.parametrize("axes, case", [run for run in NAMED_RUNS if NAMED[run[0]].same_as])
def test_axes_given_by_name_are_those_of_a_mesh_without_them(axes, case):
    assert complaints(named_results(axes), f"{case}, {axes}", "unnamed") == []


def test_a_distributed_module_trains_as_under_fsdp2():
    assert complaints(named(4), "distribute_module", "FSDP2") == []


def test_a_smaller_mesh_after_forward_is_not_built_for_axes_given_by_name():
    assert complaints(named(4), "two ranks to reshard to", "FSDP2") == []


@pytest.mark.parametrize("axes", NAMED)
def test_axes_given_by_name_give_the_placements(axes):
    for found in named_results(axes):
        placements, _ = found[f"measured, {axes}"]
        assert set(placements) == {(NAMED[axes].placements, math.prod(NAMED[axes].shape))}


@pytest.mark.parametrize("axes", ["replicate", "replicate both"])
def test_without_an_axis_to_shard_a_group_is_all_reduced_and_never_gathered(axes):
    model = OnMesh()
    root = nn.ModuleList([model.stem, model.head])
    expected = [("all_reduce", chunk_bytes(module, 1)) for module in (*reversed(model.blocks), root)]
    for found in named_results(axes):
        _, log = found[f"measured, {axes}"]
        assert [(event.op, event.bytes) for event in log.collectives()] == expected


# --- Refused -----------------------------------------------------------------------------------------------


def test_a_2d_mesh_without_names_is_refused_and_so_are_three_axes():
    def refuse(package: ModuleType) -> None:
        for mesh in (
            init_device_mesh("cpu", (2, 1)),
            init_device_mesh("cpu", (2, 1, 1)),
            init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c")),
        ):
            model = models.stem()
            with pytest.raises((ValueError, AssertionError), match="2D"):
                package.fully_shard(model, mesh=mesh)
            assert type(model) is models.Stem
            assert not any(isinstance(param, DTensor) for param in model.parameters())

    launch(refuse, 2, HERE, timeout=60)


def wrongly_named(package: ModuleType) -> dict[str, tuple[Callable[[], Any], type[Exception]]]:
    """By mistake: the call, and the error that it raises in FSDP2, too."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    dims = package.DataParallelMeshDims

    def spread(over: DeviceMesh, placements: Sequence[Any]) -> nn.Module:
        linear = nn.Linear(4, 4, bias=False)
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), over, placements))
        return linear

    def call(module: nn.Module, over: DeviceMesh, **options: Any) -> Callable[[], Any]:
        return lambda: package.fully_shard(module, mesh=over, **options)

    return {
        "an axis that is not there": (
            call(spread(mesh, [R, R]), mesh, dp_mesh_dims=dims(shard="c")),
            ValueError,
        ),
        "an axis to replicate that is not there": (
            call(spread(mesh, [R, R]), mesh, dp_mesh_dims=dims(shard="a", replicate="c")),
            ValueError,
        ),
        "a mesh without names": (
            call(nn.Linear(4, 4), init_device_mesh("cpu", (2, 1)), dp_mesh_dims=dims(shard="a")),
            ValueError,
        ),
        "plain tensors": (call(nn.Linear(4, 4), mesh, dp_mesh_dims=dims(shard="a")), ValueError),
        "parameters on another mesh": (
            call(spread(other, [R, R]), mesh, dp_mesh_dims=dims(shard="a")),
            ValueError,
        ),
        "sharded along the axis to shard": (
            call(spread(mesh, [S, R]), mesh, dp_mesh_dims=dims(shard="a")),
            ValueError,
        ),
        "sharded along the axis to replicate": (
            call(spread(mesh, [S, R]), mesh, dp_mesh_dims=dims(shard="b", replicate="a")),
            ValueError,
        ),
    }


def test_axes_that_do_not_fit_the_parameters_are_refused():
    def refuse(package: ModuleType) -> list[str]:
        unrefused = []
        for mistake, (call, error) in wrongly_named(package).items():
            try:
                call()
                unrefused.append(f"{mistake}: no error")
            except error:
                pass
            except Exception as other:
                unrefused.append(f"{mistake}: {other!r}")
        return unrefused

    assert launch(refuse, 2, HERE, timeout=60) == [[], []]


@pytest.mark.parametrize(
    "dims", [{"shard": "a"}, {"replicate": "a"}, {"shard": ("a", "b"), "replicate": "c"}], ids=str
)
def test_named_axes_have_the_fields_of_fsdp2(dims):
    ours, theirs = HERE.DataParallelMeshDims(**dims), fsdp.DataParallelMeshDims(**dims)
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
    assert (ours.shard_names, ours.replicate_names) == (theirs.shard_names, theirs.replicate_names)


def test_no_axis_at_all_is_refused():
    with pytest.raises(ValueError, match="shard"):
        HERE.DataParallelMeshDims()
