"""torch's pipeline stages treat hwfsdp's modules as FSDP2's: one reduction per group and step, in any schedule.

The oracle is FSDP2 under the same schedule in the same processes, before `hwfsdp.install()`: the same bits, the same counts of
collectives. A second oracle is the whole model without a pipeline, up to rounding. Two ranks share a stage, or two stages.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp, pipelining
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh

import hwfsdp
import models
from hwfsdp import record
from oracles import BITS, REGROUPING, Trace, differences, fresh, grid
from together import Together

four, two = Together(4), Together(2)
MICRO_BATCHES, ROWS, WIDTH, STEPS = 8, 32, 8, 2
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # each backward is two
COUNTED = ("all_gather", "reduce_scatter", "all_reduce")


def two_for_each_stage() -> DeviceMesh:
    return grid((torch.distributed.get_world_size() // 2, 2), ("pp", "dp"))


def parts(count: int) -> nn.Sequential:
    """Make `count` parts of two groups each."""
    return nn.Sequential(
        *(nn.Sequential(*(models.Block(WIDTH, 12, WIDTH) for _ in range(2))) for _ in range(count))
    )


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2 * step + rank)
    x, y = torch.randn(2, ROWS, WIDTH)
    return x, y


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def sharded(part: Any, library: Any = fsdp, root: bool = True, **options: Any) -> nn.Module:
    """Shard the first block as one group, and the rest of the part as another."""
    mesh = two_for_each_stage()["dp"]
    for module in (part[0], part) if root else part:
        library.fully_shard(module, mesh=mesh, **options)
    return part  # type: ignore[no-any-return]


def replicated(part: nn.Module) -> nn.Module:
    """Apply torch's `replicate`, which is built on torch's FSDP2."""
    return replicate(part, mesh=two_for_each_stage()["dp"])


def places(schedule: str) -> list[int]:
    """Return the stages of this rank: one, two in turn, or both ends of a V."""
    rank, size = two_for_each_stage()["pp"].get_local_rank(), two_for_each_stage()["pp"].size()
    if schedule in SINGLE:
        return [rank]
    return [rank, 2 * size - 1 - rank] if schedule in V_SHAPED else [rank, rank + size]


class Run:
    """Two steps under a schedule: gradients of this rank's stages, and the collectives of each step.

    Stages get their shapes as arguments, or find them by a forward and a backward before the first step.
    """

    def __init__(self, schedule: str, wrap: Callable[..., nn.Module] = sharded, **options: Any) -> None:
        indices = places(schedule)
        self.last, self.trace = two_for_each_stage()["pp"].size() * len(indices) - 1, Trace()
        whole = fresh(lambda: parts(self.last + 1))
        self.parts = {index: wrap(whole[index], **options) for index in indices}
        made = [self.stage(index) for index in indices]
        make = getattr(pipelining.schedules, schedule)
        self.runner = make(made[0] if schedule in SINGLE else made, MICRO_BATCHES, loss_fn=loss_of)
        self.calls = [self.step(step) for step in range(STEPS)]

    def stage(self, index: int) -> pipelining.PipelineStage:
        rows = torch.zeros(ROWS // MICRO_BATCHES, WIDTH, requires_grad=True)
        shapes = {"input_args": rows if index else rows.detach(), "output_args": rows} if index % 2 else {}
        return pipelining.PipelineStage(
            self.parts[index],
            index,
            self.last + 1,
            torch.device("cpu"),
            group=two_for_each_stage().get_group("pp"),
            **shapes,
        )

    def step(self, step: int) -> dict[str, int]:
        x, y = batch(step, two_for_each_stage()["dp"].get_local_rank())
        with record() as log:
            self.runner.step(*[x] * (0 in self.parts), **({"target": y} if self.last in self.parts else {}))
        for index, part in self.parts.items():
            for name, param in part.named_parameters():
                self.trace.keep(f"grad {index}.{name}", param.grad)
            part.zero_grad()
        return {op: len(log.select(op)) for op in COUNTED}


def unsharded(run: Run) -> Trace:
    """Return the same gradients from the whole model on one rank."""
    trace = Trace()
    model, ranks = fresh(lambda: parts(run.last + 1)), two_for_each_stage()["dp"].size()
    for step in range(STEPS):
        for rank in range(ranks):
            x, y = batch(step, rank)
            (loss_of(model(x), y) / ranks).backward()
        for name, param in model.named_parameters():
            if int(name.partition(".")[0]) in run.parts:
                trace.keep(f"grad {name}", param.grad)
        model.zero_grad()
    return trace


# --- Side by side ------------------------------------------------------------------------------------------------

KEPT = {"reshard_after_forward": False}  # schedules that split backwards need this
RUNS: dict[str, Callable[[], Run]] = {
    "ScheduleGPipe": functools.partial(Run, "ScheduleGPipe", **KEPT),
    "ScheduleInterleaved1F1B": functools.partial(Run, "ScheduleInterleaved1F1B", **KEPT),
    "ScheduleInterleaved1F1B, freed": functools.partial(Run, "ScheduleInterleaved1F1B"),
    "ScheduleZBVZeroBubble": functools.partial(Run, "ScheduleZBVZeroBubble", **KEPT),
    "ScheduleDualPipeV": functools.partial(Run, "ScheduleDualPipeV", **KEPT),
    "ScheduleZBVZeroBubble, replicated": functools.partial(Run, "ScheduleZBVZeroBubble", replicated),
}


@functools.cache
def theirs() -> dict[str, Run]:
    """Run the cases on FSDP2. Then install hwfsdp in this process."""
    runs = {name: run() for name, run in RUNS.items()}
    hwfsdp.install()
    return runs


def compared(name: str) -> list[Any]:
    """Return differences of bits and of counts of collectives from FSDP2, and of numbers from the whole model."""
    expected, got = theirs()[name], RUNS[name]()
    ours = all(isinstance(part, hwfsdp.FSDPModule) for part in got.parts.values())
    found: list[Any] = [] if ours == ("replicated" not in name) else [got.parts]
    found += differences(got.trace, expected.trace, *BITS)
    found += differences(got.trace.gathered(), unsharded(got), *REGROUPING)
    return found + [(got.calls, expected.calls)] * (got.calls != expected.calls)


for _name in RUNS:
    four.add(_name, functools.partial(compared, _name), [])


# --- Refusals ------------------------------------------------------------------------------------------------------


def refused(words: str, **options: Any) -> None:
    """Check that a schedule that splits backwards refuses a stage in these words."""
    with pytest.raises(
        hwfsdp.UsageError, match=f"expected parameters that stay whole after forward.*{words}"
    ):
        Run("ScheduleZBVZeroBubble", **options)


@two.finds([1, [[16, 0], [16, 0]], []])
def imported_alone_a_stage_is_warned_of_that_it_reduces_each_micro_batch() -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run("Schedule1F1B", library=hwfsdp)
    said = [str(warning.message) for warning in caught]
    told = [text for text in said if "once per micro-batch. Call hwfsdp.install()" in text]
    wrong = differences(run.trace.gathered(), unsharded(run), *REGROUPING)
    return [len(told), [[calls["reduce_scatter"], calls["all_reduce"]] for calls in run.calls], wrong]


@two.finds([])
def a_stage_that_cannot_split_backwards_is_refused_with_a_remedy_and_the_right_one_trains_afterwards() -> Any:
    refused("a stage of torch's that does not know .* Call hwfsdp.install()", library=hwfsdp, **KEPT)
    hwfsdp.install()
    refused("group '0', which frees them. Pass reshard_after_forward=False to fully_shard")
    refused("whose own module, Sequential, is not sharded. Call fully_shard on", root=False, **KEPT)
    run = Run("ScheduleZBVZeroBubble", **KEPT)
    return differences(run.trace.gathered(), unsharded(run), *REGROUPING)


test_on_four_ranks = four.test()
test_on_two_ranks = two.test()
