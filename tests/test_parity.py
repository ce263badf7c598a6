"""hwfsdp computes what torch's FSDP2 computes, and what PyTorch computes without sharding.

Both oracles run in the same processes as what they check (see `oracles`). Against FSDP2 the bits are compared at
world sizes 1 and 2; at 3 the backend may add in another order, so there, and against the unsharded model on the whole
batch, rounding is allowed. Cases run in few launches, because starting ranks takes longer than a case.

Some ways to train that are only functions here are used by the tests of groups and of resharding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import models
from hwfsdp import FSDPCommContext
from hwfsdp.core.streams import DeviceStream, StreamSet, backend
from models import ZOO
from oracles import (
    BITS,
    REGROUPING,
    ROWS,
    Case,
    Promises,
    Training,
    accumulate,
    against_fsdp2,
    clip,
    compare,
    fresh,
    leaves,
    objective,
    ours,
    rank_rows,
    wrap,
)

# --- Every way to train ------------------------------------------------------------------------------------


def evaluate_in_the_middle(training: Training) -> None:
    """A forward without gradients between a forward and its backward."""
    for seed in range(2):
        loss = training.loss(seed)
        with torch.no_grad():
            training.loss(10 + seed)
        loss.backward()
        training.update()
    training.keep_params()


def share_streams(training: Training) -> None:
    """Blocks that are roots of their own take turns on one set of streams."""
    options = {"comm_ctx": FSDPCommContext("cpu")} if training.library is ours else {}
    training.model = wrap(fresh(training.build), training.library, "rootless", **options)
    training.steps()


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


def call_a_part(training: Training) -> None:
    """Once the root has run, a block can be trained by itself."""
    training.steps(1)
    for seed in range(2):
        x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(seed))
        objective(training.model.blocks[1](rank_rows(x) if training.is_sharded else x)).backward()
        training.update()
    training.steps(1)


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


def input_gradient(training: Training) -> None:
    """The batch itself gets a gradient."""
    for seed in range(2):
        (x,) = training.batch(seed)
        x.requires_grad_()
        objective(training.model(x)).backward()
        training.trace.keep("grad of the input (local)", x.grad)
        training.update()
    training.keep_params()


SCENARIOS: dict[str, Case] = {
    "keep after forward, nested": Case(
        models.Transformer, how="nested", options={"reshard_after_forward": False}
    ),
    "no_grad in the middle, nested": Case(models.Transformer, evaluate_in_the_middle, how="nested"),
    "parameters without elements": Case(models.hollow),
    "several roots, one runs twice": Case(models.twice, how="rootless"),
    "several roots, shared streams": Case(models.even, share_streams, how="rootless"),
    "two forwards, two backwards": Case(models.stem, two_forwards_two_backwards),
    "call a part": Case(models.stem, call_a_part),
    "input gradient": Case(models.even, input_gradient),
    "gradients clipped by their norm": Case(models.uneven, clip),
    "assign a state, recurrent": Case(models.Recurrent, functools.partial(reload, assign=True)),
    "load while running": Case(models.stem, reload_while_running),
    "checkpoints inside layers, reentrant": Case(
        functools.partial(models.checkpointed_inside, True), how="nested"
    ),
}
NOT_AS_FSDP2 = {"parameters without elements"}  # it cannot train those
NOT_AS_UNSHARDED = {
    "normalized, blocks",  # batch normalization sees the rows of its own rank only
    "several roots, one runs twice",  # its stem and head are nobody's, and see the rows of their own rank only
}

# --- Every model, and every way to train -------------------------------------------------------------------

AT_TWO_RANKS = {  # by how they are wrapped
    "blocks": tuple(ZOO),
    "root": ("uneven", "structured", "frozen", "unused"),
    "nested": ("uneven", "transformer", "twice", "frozen"),
}
WRAPPED = {
    1: {"blocks": ("uneven", "transformer", "twice", "recurrent")},
    2: AT_TWO_RANKS,
    3: {"blocks": tuple(name for name in ZOO if name != "even")},
}


def training_cases(world_size: int) -> dict[str, Case]:
    """Two ranks run every scenario; three ranks run the scenarios of a model with uneven rows."""
    wrapped = {
        f"{name}, {how}": Case(ZOO[name], how=how)
        for how, names in WRAPPED[world_size].items()
        for name in names
    }
    return wrapped | {
        name: case
        for name, case in SCENARIOS.items()
        if world_size == 2 or (world_size == 3 and case.build is models.uneven)
    }


FAST: dict[int, tuple[str, ...]] = {
    1: (),
    2: (
        *SCENARIOS,
        "uneven, blocks",
        "structured, blocks",
        "twice, blocks",
        "frozen, root",
        "transformer, nested",
    ),
    3: ("uneven, blocks", "unused, blocks"),
}
PROMISES = Promises()
for _ranks in WRAPPED:
    PROMISES.add(
        "a model trains as under FSDP2 and as without sharding",
        {
            name: functools.partial(
                compare,
                case,
                None if name in NOT_AS_FSDP2 else against_fsdp2(_ranks),
                None if name in NOT_AS_UNSHARDED else REGROUPING,
            )
            for name, case in training_cases(_ranks).items()
        },
        _ranks,
        FAST[_ranks],
    )


# --- Outputs changed in place ------------------------------------------------------------------------------

# FSDP2 warns of these and may compute something else, so the only oracle is the model without sharding.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {
    "tensor": None,
    "view": lambda t: t.view(t.shape),
    "slice": lambda t: torch.cat([t, t], 1)[:, :8],
}


def in_place_case(view: str, how: str, scenario: Any = Training.steps, **attributes: Any) -> Case:
    return Case(functools.partial(models.in_place, VIEWS[view], **attributes), scenario, how)


IN_PLACE: dict[str, Case] = {
    "a slice": in_place_case("slice", "nested"),
    "a tensor, seen through another view": in_place_case("tensor", "blocks", reshape=True),
    "a tensor, of a block that runs twice": in_place_case("tensor", "blocks", rounds=2),
    "a view, of a block that runs twice, with two backwards": in_place_case(
        "view", "nested", backward_twice, rounds=2
    ),
}
PROMISES.add(
    "what a module returned may be changed in place",
    {name: functools.partial(compare, case, None, REGROUPING) for name, case in IN_PLACE.items()},
)


# --- Mixed precision ---------------------------------------------------------------------------------------

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def run_dtypes(training: Training) -> None:
    """Two plain steps and two accumulated ones; keeps the output, whose dtype is part of the policy."""
    training.trace.keep(
        "output (local)", torch.cat([t.flatten() for t in leaves(training.model(*training.batch(9)))])
    )
    training.steps(2)
    accumulate(training, "nnb")


def frozen_in_bf16() -> models.Model:
    """One group with parameters of two dtypes, which is allowed as long as those that train have one."""
    model = models.Transformer()
    model.blocks[0].requires_grad_(False).to(BF16)
    model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0].to(BF16),))
    model.blocks[0].register_forward_hook(lambda _, args, out: out.to(FP32))
    return model


STRUCTURED = Case(
    models.Structured, run_dtypes, options={"policy": {"param_dtype": BF16, "output_dtype": FP16}}
)
PROMISES.add(
    "mixed precision is that of FSDP2",
    {
        "bf16, output fp16, structured": functools.partial(compare, STRUCTURED, BITS, None),
        "frozen in another dtype": functools.partial(
            compare, Case(frozen_in_bf16, run_dtypes, "root"), BITS, None
        ),
    },
)


# --- The streams of a device -------------------------------------------------------------------------------


def on_device_streams(case: Case) -> dict[str, list[str]]:
    """What differs from FSDP2 where hwfsdp takes the CPU for an accelerator, whose streams torch has: they run at once."""
    with backend("cpu", lambda: StreamSet(functools.partial(DeviceStream, device_type="cpu"))):
        return compare(case, BITS, None)


PROMISES.add(
    "a device's streams compute what FSDP2 computes",
    {
        "nested": functools.partial(on_device_streams, Case(models.Transformer, how="nested")),
        "replicated": functools.partial(
            on_device_streams,
            Case(models.even, functools.partial(accumulate, pattern="sa"), options={"shape": (2, 1)}),
        ),
    },
)


test_a_promise_is_kept = PROMISES.test()
