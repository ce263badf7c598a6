"""What a step costs, in closed form: the oracle is what a recording measures on real ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hwfsdp import launch, record
from hwfsdp.accounting import (
    GroupSizes,
    gathers_per_step,
    on_the_wire,
    peak_unsharded_bytes,
    step_traffic,
    unsharded_bytes,
)
from models import Convolution, Model, even, stem, uneven
from oracles import objective, ours, wrap

WORLD_SIZES = (1, 2, 3, 4)
BF16_IN_FP32 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
ALL_BF16 = {"param_dtype": torch.bfloat16}
FP16_GRADIENTS = {"reduce_dtype": torch.float16}


@dataclass(frozen=True)
class Case:
    """A model, how it is sharded, and bytes per element on the wire."""

    build: Callable[[], Model]
    gathered: int = 4
    reduced: int = 4
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "even": Case(even),
    "uneven": Case(uneven),
    "stem": Case(stem),
    "convolution": Case(Convolution),
    "uneven, gathered in bf16, reduced in fp32": Case(uneven, 2, 4, {"policy": BF16_IN_FP32}),
    "stem, gathered in bf16, reduced in fp32": Case(stem, 2, 4, {"policy": BF16_IN_FP32}),
    "stem, all in bf16": Case(stem, 2, 2, {"policy": ALL_BF16}),
    "stem, reduced in fp16": Case(stem, 4, 2, {"policy": FP16_GRADIENTS}),
    "convolution in bf16": Case(Convolution, 2, 2, {"policy": ALL_BF16}),
    "stem, the root resharded too": Case(stem, options={"reshard_after_forward": True}),
    "uneven, nothing resharded after forward": Case(uneven, options={"reshard_after_forward": False}),
    "stem, one group": Case(stem, options={"how": "root"}),
}


def predicted_groups(case: Case) -> tuple[list[GroupSizes], list[GroupSizes]]:
    """The groups of the blocks, and that of the root if anything is left to it, read off the plain model."""
    model, options = case.build(), case.options
    reshard = options.get("reshard_after_forward")
    blocks = [] if options.get("how") == "root" else [list(block.parameters()) for block in model.blocks]
    claimed = {param for block in blocks for param in block}
    rest = [param for param in model.parameters() if param not in claimed]

    def group(params: list[nn.Parameter], resharded: bool) -> GroupSizes:
        return GroupSizes([tuple(p.shape) for p in params], case.gathered, case.reduced, resharded)

    of_blocks = [group(params, reshard is not False) for params in blocks]
    return of_blocks, [group(rest, reshard is True)] if rest else []


def step(case: Case) -> dict[str, Any]:
    """Forward and backward on this rank; what the recording says of it."""
    torch.manual_seed(0)
    model = wrap(case.build(), ours, **case.options)
    with record() as log:
        objective(model(*model.inputs(2, seed=0))).backward()
    return log.summary()


@functools.cache
def measured(world_size: int) -> list[dict[str, dict[str, Any]]]:
    """Summaries by case, of every rank."""
    return launch(lambda: {name: step(case) for name, case in CASES.items()}, world_size, timeout=60)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_bytes_by_collective_are_those_measured(name: str, world_size: int) -> None:
    of_blocks, of_root = predicted_groups(CASES[name])
    traffic = step_traffic(of_blocks + of_root, world_size)
    assert set(traffic) == {"all_gather", "reduce_scatter"}
    for summary in measured(world_size):
        assert {op: nbytes for op, nbytes in traffic.items() if nbytes} == summary[name]["bytes_by_op"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_gathers_per_step_are_those_counted(name: str, world_size: int) -> None:
    of_blocks, of_root = predicted_groups(CASES[name])
    groups = of_blocks + of_root
    counts = {"all_gather": sum(map(gathers_per_step, groups)), "reduce_scatter": len(groups)}
    for summary in measured(world_size):
        assert summary[name]["count_by_op"] == (counts if world_size > 1 else {})


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_unsharded_bytes_is_the_one_measured(name: str, world_size: int) -> None:
    of_blocks, of_root = predicted_groups(CASES[name])
    kept = [*of_root, *(group for group in of_blocks if not group.resharded_after_forward)]
    passing = [group for group in of_blocks if group.resharded_after_forward]
    for summary in measured(world_size):  # the root is whole around its blocks, resharded in between or not
        assert peak_unsharded_bytes(kept, passing, world_size) == summary[name]["peak_unsharded_bytes"]


# --- By hand -----------------------------------------------------------------------------------------------

WEIGHT_AND_BIAS = GroupSizes([(5, 3), (1,)], gather_itemsize=2, reduce_itemsize=4)


@pytest.mark.parametrize(("world_size", "padded"), [(1, 15 + 1), (2, 18 + 2), (4, 24 + 4), (8, 24 + 8)])
def test_parameters_are_padded_one_by_one(world_size: int, padded: int) -> None:
    assert WEIGHT_AND_BIAS.padded_numel(world_size) == padded
    assert unsharded_bytes(WEIGHT_AND_BIAS, world_size) == 2 * padded


def test_nothing_travels_on_one_rank_but_memory_is_needed() -> None:
    assert step_traffic([WEIGHT_AND_BIAS], 1) == {"all_gather": 0, "reduce_scatter": 0}
    assert unsharded_bytes(WEIGHT_AND_BIAS, 1) == 2 * 16


def test_no_groups_cost_nothing() -> None:
    assert step_traffic([], 4) == {"all_gather": 0, "reduce_scatter": 0}
    assert peak_unsharded_bytes([], [], 4) == 0


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    st.integers(1, 64),
    st.integers(0, 1000),
)
def test_every_rank_sends_all_blocks_but_one_per_round(collective: str, world_size: int, block: int) -> None:
    sent_by_steps = sum(block for _ in range(world_size - 1))
    rounds = 2 if collective == "all_reduce" else 1
    assert on_the_wire(collective, world_size * block, world_size) == rounds * sent_by_steps
