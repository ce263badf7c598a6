"""hwfsdp computes what torch's FSDP2 computes, and what PyTorch computes without sharding.

Both oracles run in the same processes as what they check (see `oracles`). Against FSDP2 the bits are compared at
world sizes 1 and 2; at 3 and 4 the backend may add in another order, so there, and against the unsharded model on
the whole batch, rounding is allowed. Cases run in few launches, because starting ranks takes longer than a case.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import models
from hwfsdp import FSDPCommContext, launch
from models import ZOO
from oracles import (
    BITS,
    REGROUPING,
    ROUNDING,
    ROWS,
    WRAPS,
    Policy,
    Case,
    Check,
    Tolerance,
    Training,
    compare,
    complaints,
    fresh,
    leaves,
    objective,
    ours,
    rank_rows,
    run_checks,
    wrap,
)

WORLD_SIZES = (1, 2, 3, 4)


def against_fsdp2(world_size: int) -> Tolerance:
    """What FSDP2's numbers may be missed by."""
    return BITS if world_size <= 2 else ROUNDING


# --- Every model -------------------------------------------------------------------------------------------


def zoo_cases(world_size: int) -> dict[str, Case]:
    """Every model; wrapped in every way at world size 2, in the usual way at the others."""
    hows = WRAPS if world_size == 2 else ("blocks",)
    return {f"{name}, {how}": Case(build, how=how) for name, build in ZOO.items() for how in hows}


@functools.cache
def zoo(world_size: int) -> Any:
    checks: dict[str, Check] = {
        name: functools.partial(compare, case, against_fsdp2(world_size), REGROUPING)
        for name, case in zoo_cases(world_size).items()
    }
    return launch(run_checks, world_size, checks, timeout=100)


ZOO_CASES = [(world_size, name) for world_size in WORLD_SIZES for name in zoo_cases(world_size)]


@pytest.mark.parametrize("world_size, case", ZOO_CASES)
def test_a_model_trains_as_under_fsdp2(world_size, case):
    assert complaints(zoo(world_size), case, "FSDP2") == []


@pytest.mark.parametrize("world_size, case", [c for c in ZOO_CASES if not c[1].startswith("normalized")])
def test_a_model_trains_as_without_sharding(world_size, case):
    """All but batch normalization, which sees the rows of its own rank only."""
    assert complaints(zoo(world_size), case, "unsharded") == []


# --- Every way to train ------------------------------------------------------------------------------------


def accumulate_unreduced(training: Training, keep_whole: bool) -> None:
    """Micro-batches without reduction, then one with it; `keep_whole`: parameters stay unsharded in between."""
    for step in range(2):
        for micro in range(3):
            is_last = micro == 2
            training.call("set_requires_gradient_sync", is_last)
            training.call("set_reshard_after_backward", is_last or not keep_whole)
            training.call("set_is_last_backward", is_last)
            training.loss(3 * step + micro).backward()
        training.update()
    training.keep_params()


def accumulate_reduced(training: Training) -> None:
    """Every micro-batch is reduced; the sharded gradients add up."""
    for step in range(2):
        for micro in range(3):
            training.loss(3 * step + micro).backward()
            training.keep_grads()
        training.update()
    training.keep_params()


def reduce_then_not(training: Training) -> None:
    """A reduced micro-batch first, then one that is only reduced together with the third."""
    for seed, sync in enumerate([True, False, True]):
        training.call("set_requires_gradient_sync", sync)
        training.loss(seed).backward()
    training.update()
    training.keep_params()


def not_last_backward(training: Training) -> None:
    """The first of two backwards leaves its reductions in flight."""
    training.call("set_is_last_backward", False)
    training.loss(0).backward()
    training.call("set_is_last_backward", True)
    training.loss(1).backward()
    training.update()
    training.steps(1, first_seed=2)


def evaluate_between(training: Training, mode: Callable[[], Any]) -> None:
    """A forward without gradients before, between and after the training steps."""
    for seed in range(3):
        with mode():
            training.loss(10 + seed)
        training.call("reshard")
        training.steps(1, first_seed=seed)


def evaluate_in_the_middle(training: Training) -> None:
    """A forward without gradients between a forward and its backward."""
    for seed in range(2):
        loss = training.loss(seed)
        with torch.no_grad():
            training.loss(10 + seed)
        loss.backward()
        training.update()
    training.keep_params()


def zero_in_place(training: Training) -> None:
    """Gradients are set to zero instead of being dropped."""
    for seed in range(3):
        training.loss(seed).backward()
        training.keep_grads()
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)
    training.keep_params()


def share_streams(training: Training) -> None:
    """Blocks that are roots of their own take turns on one set of streams."""
    options = {"comm_ctx": FSDPCommContext("cpu")} if training.library is ours else {}
    training.model = wrap(fresh(training.build), training.library, "rootless", **options)
    training.steps()


def clip(training: Training) -> None:
    for seed in range(3):
        training.loss(seed).backward()
        norm = nn.utils.clip_grad_norm_(training.model.parameters(), max_norm=0.1)
        training.trace.keep("norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)
        training.update()
    training.keep_params()


def two_forwards_one_backward(training: Training) -> None:
    for seed in range(2):
        (training.loss(seed) + training.loss(10 + seed)).backward()
        training.update()
    training.keep_params()


def two_forwards_two_backwards(training: Training) -> None:
    for seed in range(2):
        first, second = training.loss(seed), training.loss(10 + seed)
        second.backward()
        first.backward()
        training.update()
    training.keep_params()


def backward_twice(training: Training) -> None:
    for seed in range(2):
        loss = training.loss(seed)
        loss.backward(retain_graph=True)
        loss.backward()
        training.update()
    training.keep_params()


def step_in_backward(training: Training) -> None:
    """A post-accumulate hook keeps every gradient, makes the step and drops the gradient."""
    seen: dict[str, Tensor] = {}

    def descend(name: str, param: nn.Parameter) -> None:
        assert name not in seen, f"{name}: the hook came twice in one backward"
        seen[name] = param.grad
        with torch.no_grad():
            param.add_(param.grad, alpha=-0.1)
        param.grad = None

    for name, param in training.model.named_parameters():
        param.register_post_accumulate_grad_hook(functools.partial(descend, name))
    for seed in range(2):
        training.loss(seed).backward()
        for name in sorted(seen):
            training.trace.keep(f"grad {name}", seen[name])
        seen.clear()
    training.keep_params()


def train_in_float64(training: Training) -> None:
    """The dtype is changed after wrapping, before the first forward."""
    training.model.to(torch.float64)
    training.optimizer = training.new_optimizer()
    training.steps()


def freeze_later(training: Training) -> None:
    """A block is frozen after the first step, and trained again after the second."""
    for seed, trained in enumerate([True, False, True]):
        for param in training.model.blocks[1].parameters():
            param.requires_grad_(trained)
        training.steps(1, first_seed=seed)


def call_a_part(training: Training) -> None:
    """Once the root has run, a block can be trained by itself."""
    training.steps(1)
    for seed in range(2):
        x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(seed))
        objective(training.model.blocks[1](rank_rows(x) if training.is_sharded else x)).backward()
        training.update()
    training.steps(1)


def grow_batches(training: Training) -> None:
    """Two steps with rows of one kind of batch, one with another: shapes of activations are nobody's business."""
    training.steps(2)
    x, y = training.batch(5), training.batch(6)
    objective(training.model(*[torch.cat(pair) for pair in zip(x, y, strict=True)])).backward()
    training.update()
    training.keep_params()


def reload(training: Training, assign: bool) -> None:
    """One step; a second model takes over the state and trains on, and so does its state in a third."""
    training.steps(1)
    for seed in range(1, 3):
        state = {name: tensor.detach().clone() for name, tensor in training.model.state_dict().items()}
        for name, tensor in state.items():
            training.trace.keep(f"state {name}", tensor)
        training.model = wrap(training.build(), training.library, training.how, **training.options)
        training.model.load_state_dict(state, assign=assign)
        training.optimizer = training.new_optimizer()
        training.steps(1, first_seed=seed)


def reload_while_running(training: Training) -> None:
    """The model itself goes back to an earlier state, between steps and after a forward that kept parameters."""
    training.steps(1)
    state = {name: tensor.detach().clone() for name, tensor in training.model.state_dict().items()}
    training.steps(1, first_seed=1)
    with torch.no_grad():
        training.loss(7)
    training.model.load_state_dict(state)
    training.steps(2, first_seed=2)


def materialize(training: Training) -> None:
    """Wrapped on the meta device, given memory, filled shard by shard, trained."""
    values = fresh(training.build).state_dict()
    with torch.device("meta"):
        model = training.build()
    training.model = wrap(model, training.library, training.how, **training.options)
    training.model.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in training.model.state_dict().items():
            if isinstance(tensor, DTensor):
                size = -(-tensor.shape[0] // tensor.device_mesh.size())
                rows = values[name][tensor.device_mesh.get_local_rank() * size :][:size]
                tensor.to_local().copy_(rows)
            else:
                tensor.copy_(values[name])
    training.optimizer = training.new_optimizer()
    training.steps()


def input_gradient(training: Training) -> None:
    """The batch itself gets a gradient."""
    for seed in range(2):
        (x,) = training.batch(seed)
        x.requires_grad_()
        objective(training.model(x)).backward()
        training.trace.keep("grad of the input (local)", x.grad)
        training.update()
    training.keep_params()


def without_unshard_in_backward(training: Training) -> None:
    """The backward of an embedding needs no parameters."""
    if training.is_sharded:
        training.model.blocks[0].set_unshard_in_backward(False)
    training.steps()


class Embedded(models.Model):
    """The embedding is a block, hence a group of its own."""

    def __init__(self) -> None:
        super().__init__([nn.Embedding(11, 6), models.Block(6, 5, 3)])

    inputs = models.Transformer.inputs


SCENARIOS: dict[str, Case] = {
    "reshard after forward": Case(models.stem, options={"reshard_after_forward": True}),
    "keep after forward": Case(models.stem, options={"reshard_after_forward": False}),
    "keep after forward, nested": Case(
        models.Transformer, how="nested", options={"reshard_after_forward": False}
    ),
    "accumulate unreduced": Case(models.stem, functools.partial(accumulate_unreduced, keep_whole=False)),
    "accumulate unreduced, stay whole": Case(
        models.stem, functools.partial(accumulate_unreduced, keep_whole=True)
    ),
    "accumulate unreduced, twice": Case(
        models.twice, functools.partial(accumulate_unreduced, keep_whole=True)
    ),
    "accumulate reduced": Case(models.stem, accumulate_reduced),
    "reduce, then not": Case(models.uneven, reduce_then_not),
    "not the last backward": Case(models.uneven, not_last_backward),
    "no_grad in between": Case(models.stem, functools.partial(evaluate_between, mode=torch.no_grad)),
    "inference_mode first": Case(models.stem, functools.partial(evaluate_between, mode=torch.inference_mode)),
    "no_grad in the middle": Case(models.stem, evaluate_in_the_middle),
    "no_grad in the middle, nested": Case(models.Transformer, evaluate_in_the_middle, how="nested"),
    "zero in place": Case(models.uneven, zero_in_place),
    "parameters without elements": Case(models.hollow),
    "several roots": Case(models.even, how="rootless"),
    "several roots, one runs twice": Case(models.twice, how="rootless"),
    "several roots, two forwards": Case(models.even, two_forwards_two_backwards, how="rootless"),
    "several roots, shared streams": Case(models.even, share_streams, how="rootless"),
    "clip the gradient norm": Case(models.uneven, clip),
    "two forwards, one backward": Case(models.Transformer, two_forwards_one_backward),
    "two forwards, one backward, nested": Case(models.Transformer, two_forwards_one_backward, how="nested"),
    "two forwards, two backwards": Case(models.stem, two_forwards_two_backwards),
    "backward twice": Case(models.stem, backward_twice),
    "step in backward": Case(models.uneven, step_in_backward),
    "float64": Case(models.stem, train_in_float64),
    "freeze later": Case(models.stem, freeze_later),
    "call a part": Case(models.stem, call_a_part),
    "grow batches": Case(models.stem, grow_batches),
    "input gradient": Case(models.even, input_gradient),
    "embedding group": Case(Embedded),
    "embedding group, no unshard in backward": Case(Embedded, without_unshard_in_backward),
    "load a state": Case(models.uneven, functools.partial(reload, assign=False)),
    "assign a state": Case(models.uneven, functools.partial(reload, assign=True)),
    "assign a state, tied": Case(models.Transformer, functools.partial(reload, assign=True)),
    "assign a state, recurrent": Case(models.Recurrent, functools.partial(reload, assign=True)),
    "load while running": Case(models.stem, reload_while_running),
    "meta": Case(models.uneven, materialize),
    "meta, tied": Case(models.Transformer, materialize),
    "meta, buffers": Case(models.Normalized, materialize),
}
for _name, _reentrant in (("reentrant", True), ("non-reentrant", False)):
    for _how in ("blocks", "nested"):
        SCENARIOS |= {
            f"{_name} checkpoints around {_how}": Case(
                functools.partial(models.checkpointed, _reentrant), how=_how
            ),
            f"{_name} checkpoints inside {_how}": Case(
                functools.partial(models.checkpointed_inside, _reentrant), how=_how
            ),
        }

NOT_AS_FSDP2 = {
    "inference_mode first",  # it cannot train after that
    "parameters without elements",  # nor those
}
NOT_AS_UNSHARDED = {
    "meta, buffers",  # batch normalization sees the rows of its own rank only
    "meta, tied",  # PyTorch alone unties parameters there
    "assign a state, tied",
    "several roots, one runs twice",  # its stem and head are nobody's, and see the rows of their own rank only
}


UNEVEN = [name for name, case in SCENARIOS.items() if case.build is models.uneven]
SCENARIO_CASES = [(2, name) for name in SCENARIOS] + [(3, name) for name in UNEVEN]


@functools.cache
def scenarios(world_size: int) -> Any:
    checks: dict[str, Check] = {
        name: functools.partial(
            compare,
            SCENARIOS[name],
            None if name in NOT_AS_FSDP2 else against_fsdp2(world_size),
            None if name in NOT_AS_UNSHARDED else REGROUPING,
        )
        for size, name in SCENARIO_CASES
        if size == world_size
    }
    return launch(run_checks, world_size, checks, timeout=100)


@pytest.mark.parametrize("world_size, scenario", [c for c in SCENARIO_CASES if c[1] not in NOT_AS_FSDP2])
def test_a_scenario_goes_as_under_fsdp2(world_size, scenario):
    assert complaints(scenarios(world_size), scenario, "FSDP2") == []


@pytest.mark.parametrize("world_size, scenario", [c for c in SCENARIO_CASES if c[1] not in NOT_AS_UNSHARDED])
def test_a_scenario_goes_as_without_sharding(world_size, scenario):
    assert complaints(scenarios(world_size), scenario, "unsharded") == []


# --- Outputs changed in place ------------------------------------------------------------------------------

# FSDP2 warns of these and may compute something else, so the only oracle is the model without sharding.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {
    "tensor": None,
    "view": lambda t: t.view(t.shape),
    "view of a view": lambda t: t.unsqueeze(0)[0],
    "slice": lambda t: torch.cat([t, t], 1)[:, :8],
}
IN_PLACE: dict[str, Case] = {
    **{f"a {name}": Case(functools.partial(models.in_place, view)) for name, view in VIEWS.items()},
    **{
        f"a {name}, seen through another view": Case(functools.partial(models.in_place, view, reshape=True))
        for name, view in VIEWS.items()
    },
    **{
        f"a {name}, of a block that runs twice": Case(functools.partial(models.in_place, view, rounds=2))
        for name, view in VIEWS.items()
    },
    **{
        f"a {name}, with two backwards": Case(functools.partial(models.in_place, view), backward_twice)
        for name, view in VIEWS.items()
    },
    "a view, of a block that runs twice, with two backwards": Case(
        functools.partial(models.in_place, VIEWS["view"], rounds=2), backward_twice
    ),
}


@functools.cache
def in_place() -> Any:
    checks: dict[str, Check] = {
        f"{name}, {how}": functools.partial(compare, dataclasses.replace(case, how=how), None, REGROUPING)
        for name, case in IN_PLACE.items()
        for how in ("blocks", "nested")
    }
    return launch(run_checks, 2, checks, timeout=100)


@pytest.mark.parametrize("how", ["blocks", "nested"])
@pytest.mark.parametrize("changed", IN_PLACE)
def test_what_a_module_returned_may_be_changed_in_place(changed, how):
    assert complaints(in_place(), f"{changed}, {how}", "unsharded") == []


# --- Mixed precision ---------------------------------------------------------------------------------------

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def run_dtypes(training: Training) -> None:
    """Two plain steps and two accumulated ones; keeps the output, whose dtype is part of the policy."""
    training.trace.keep(
        "output (local)", torch.cat([t.flatten() for t in leaves(training.model(*training.batch(9)))])
    )
    training.steps(2)
    accumulate_unreduced(training, keep_whole=False)


def refuse_dtypes(training: Training) -> None:
    """The input stays as it is, so that the first layer cannot take it."""
    with pytest.raises(RuntimeError, match="dtype"):
        training.model(*training.batch(0))


def in_bf16() -> models.Model:
    return models.uneven().to(BF16)


def frozen_in_bf16() -> models.Model:
    """One group with parameters of two dtypes, which is allowed as long as those that train have one."""
    model = models.Transformer()
    model.blocks[0].requires_grad_(False).to(BF16)
    model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0].to(BF16),))
    model.blocks[0].register_forward_hook(lambda _, args, out: out.to(FP32))
    return model


POLICIES: dict[str, Policy] = {
    "bf16": {"param_dtype": BF16},
    "bf16, reduce fp32": {"param_dtype": BF16, "reduce_dtype": FP32},
    "bf16, reduce fp32, output fp32": {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32},
    "fp16": {"param_dtype": FP16},
    "fp16, reduce fp32": {"param_dtype": FP16, "reduce_dtype": FP32},
    "reduce fp16": {"reduce_dtype": FP16},
    "reduce bf16": {"reduce_dtype": BF16},
    "bf16, reduce fp16": {"param_dtype": BF16, "reduce_dtype": FP16},
    "output bf16": {"output_dtype": BF16},
    "bf16, output fp16": {"param_dtype": BF16, "output_dtype": FP16},
    "param fp32": {"param_dtype": FP32, "reduce_dtype": FP32},
}
PRECISION: dict[str, Case] = {
    **{
        f"{name}, uneven": Case(
            models.uneven, run_dtypes, "blocks" if "param_dtype" in policy else "root", {"policy": policy}
        )
        for name, policy in POLICIES.items()
    },
    **{
        f"{name}, transformer": Case(models.Transformer, run_dtypes, "blocks", {"policy": POLICIES[name]})
        for name in ("bf16, reduce fp32", "fp16", "reduce bf16")
    },
    **{
        f"{name}, structured": Case(models.Structured, run_dtypes, "blocks", {"policy": POLICIES[name]})
        for name in ("bf16, output fp16", "fp16, reduce fp32", "bf16, reduce fp32, output fp32")
    },
    "bf16, inputs not cast, transformer, blocks": Case(
        models.Transformer,
        run_dtypes,
        "blocks",
        {"policy": {"param_dtype": BF16, "cast_forward_inputs": False}},
    ),
    "fp16, inputs not cast, transformer, root": Case(
        models.Transformer,
        run_dtypes,
        "root",
        {"policy": {"param_dtype": FP16, "cast_forward_inputs": False}},
    ),
    "bf16, inputs not cast, wrong dtype": Case(
        models.uneven,
        refuse_dtypes,
        "blocks",
        {"policy": {"param_dtype": BF16, "cast_forward_inputs": False}},
    ),
    "bf16, recurrent": Case(models.Recurrent, run_dtypes, "blocks", {"policy": {"param_dtype": BF16}}),
    "bf16 shards, reduce fp32": Case(in_bf16, run_dtypes, "blocks", {"policy": {"reduce_dtype": FP32}}),
    "bf16 shards, param fp32": Case(in_bf16, run_dtypes, "blocks", {"policy": {"param_dtype": FP32}}),
    "frozen in another dtype": Case(frozen_in_bf16, run_dtypes, "root"),
}


IN_FP16 = ("fp16, uneven", "reduce fp16, uneven", "bf16, reduce fp16, uneven")  # scaled twice when reduced


@functools.cache
def precision(world_size: int) -> Any:
    tolerance = BITS if world_size <= 2 else Tolerance(2e-3, 1e-5)  # a bit of fp16
    checks: dict[str, Check] = {
        name: functools.partial(compare, case, tolerance, None)
        for name, case in PRECISION.items()
        if world_size <= 2 or name in IN_FP16
    }
    return launch(run_checks, world_size, checks, timeout=100)


@pytest.mark.parametrize(
    "world_size, case", [(w, name) for w in (1, 2) for name in PRECISION] + [(4, name) for name in IN_FP16]
)
def test_mixed_precision_is_that_of_fsdp2(world_size, case):
    assert complaints(precision(world_size), case, "FSDP2") == []
