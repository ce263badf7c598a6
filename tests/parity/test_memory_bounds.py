"""Live memory from the ledger, against closed forms: bytes follow from shapes, dtypes and the world size."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import models
from hwfsdp import EventLog, FSDPModule, launch, record
from hwfsdp.collectives import DefaultAllGather, DefaultReduceScatter
from hwfsdp.observe import events
from hwfsdp.observe.accounting import GroupSizes, peak_unsharded_bytes, unsharded_bytes
from oracles import Policy, Shapes, Training, ours, shapes_by_group

WORLD_SIZE = 3  # nothing divides evenly
BF16: Policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Setup(NamedTuple):
    """A model, the way to wrap it, and the groups that follow."""

    build: Callable[[], models.Model]
    how: str = "blocks"
    reshard_after_forward: bool | None = None
    policy: Policy | None = None

    def shapes(self) -> tuple[list[Shapes], Shapes]:
        return shapes_by_group(self.build(), self.how)

    def groups(self) -> tuple[list[GroupSizes], list[GroupSizes]]:
        """Return the groups that stay unsharded from forward to backward, and the groups that reshard, in forward order."""
        below, root = self.shapes()
        itemsize = 2 if self.policy else 4
        passing = [GroupSizes(shapes, gather_itemsize=itemsize) for shapes in below]
        kept = [GroupSizes(root, gather_itemsize=itemsize)] if root else []
        if self.reshard_after_forward is False:
            return kept + passing, []
        return kept, passing


SETUPS = {
    "three blocks": Setup(models.graded),
    "blocks and root that stay": Setup(models.wandering, reshard_after_forward=False),
    "blocks and root in bf16": Setup(models.wandering, policy=BF16),
    "uneven, layer by layer": Setup(models.uneven, how="nested"),
    "tied": Setup(models.Transformer),
}


def training_of(setup: Setup) -> Training:
    options: dict[str, Any] = {"policy": setup.policy, "reshard_after_forward": setup.reshard_after_forward}
    return Training(setup.build, ours, setup.how, **options)


def log_of(setup: Setup) -> EventLog:
    training = training_of(setup)
    with record() as log:
        for seed in range(2):
            training.loss(seed).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        dist.barrier()
        events.active().sample()
    return log


class Buffers:
    """The peak bytes of flat buffers of one kind, counted at each new buffer.

    A buffer counts for as long as hwfsdp refers to it. The backend gets an alias, because gloo's threads keep their tensors for some
    moments after they have finished.
    """

    def __init__(self) -> None:
        self.alive: list[weakref.ref[Tensor]] = []
        self.peak = 0

    def add(self, buffer: Tensor) -> None:
        self.alive.append(weakref.ref(buffer))
        tensors = [tensor for ref in self.alive if (tensor := ref()) is not None]
        self.peak = max(self.peak, sum(t.numel() * t.element_size() for t in tensors))


class CountingGather(DefaultAllGather):
    def __init__(self) -> None:
        self.buffers = Buffers()

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.buffers.add(output_tensor)
        return super().__call__(output_tensor.detach(), input_tensor.detach(), group, async_op)


class CountingReduction(DefaultReduceScatter):
    def __init__(self) -> None:
        self.buffers = Buffers()

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.buffers.add(input_tensor)
        return super().__call__(output_tensor.detach(), input_tensor.detach(), group, op, async_op)


def buffer_peaks_of(setup: Setup) -> tuple[int, int]:
    training, gather, reduction = training_of(setup), CountingGather(), CountingReduction()
    for module in training.model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduction)
    for seed in range(2):
        training.loss(seed).backward()
    return gather.buffers.peak, reduction.buffers.peak


def gradients_alive_when_reductions_begin() -> list[int]:
    alive: list[int] = []

    class Sampling(DefaultReduceScatter):
        def __call__(self, *args, **kwargs):
            events.active().sample()
            alive.append(events.active().samples[-1].bytes_by_kind["unsharded_grad"])
            return super().__call__(*args, **kwargs)

    training = training_of(SETUPS["three blocks"])
    for block in training.model.blocks:
        block.set_custom_reduce_scatter(Sampling())
    with record():
        training.loss(0).backward()
    return alive


class Found(NamedTuple):
    """The results of one rank by setup: a log of two training steps with a sample after them, and the peaks of flat buffers."""

    logs: dict[str, EventLog]
    buffer_peaks: dict[str, tuple[int, int]]
    gradients_alive: list[int]


@functools.cache
def ranks() -> list[Found]:
    def on_a_rank() -> Found:
        logs = {name: log_of(setup) for name, setup in SETUPS.items()}
        peaks = {name: buffer_peaks_of(setup) for name, setup in SETUPS.items()}
        return Found(logs, peaks, gradients_alive_when_reductions_begin())

    return launch(on_a_rank, WORLD_SIZE, timeout=100)


@pytest.fixture(params=SETUPS)
def name(request) -> str:
    return request.param


@pytest.fixture
def setup(name) -> Setup:
    return SETUPS[name]


@pytest.fixture
def logs(name) -> list[EventLog]:
    """Return one log per rank."""
    return [found.logs[name] for found in ranks()]


def test_whole_parameters_peak_at_the_root_and_the_largest_block_and_gradients_at_the_largest_group(
    setup, logs
):
    parameters = peak_unsharded_bytes(*setup.groups(), WORLD_SIZE)
    below, root = setup.shapes()
    itemsize = 2 if setup.policy else 4
    gradients = itemsize * max(sum(shape.numel() for shape in shapes) for shapes in [*below, root])
    for summary in (log.summary() for log in logs):
        assert summary["peak_unsharded_bytes"] == parameters
        assert summary["peak_bytes_by_kind"]["unsharded_grad"] == gradients


def test_two_gathers_and_one_reduction_are_in_flight_at_most(setup, name):
    """These are gathers of neighbors: in forward from the second step on, and in backward."""
    kept, passing = setup.groups()
    in_order = [unsharded_bytes(group, WORLD_SIZE) for group in kept + passing]
    gathers = max(map(sum, pairwise(in_order)), default=in_order[0])
    reductions = max(4 * group.padded_numel(WORLD_SIZE) for group in kept + passing)
    assert [found.buffer_peaks[name] for found in ranks()] == [(gathers, reductions)] * WORLD_SIZE


def test_whole_gradients_are_gone_when_their_reduction_begins():
    assert [found.gradients_alive for found in ranks()] == [[0, 0, 0]] * WORLD_SIZE


def test_after_a_step_only_shards_and_optimizer_state_are_left_and_every_byte_allocated_is_freed(logs):
    """The test looks at the second step, because the first one makes parameters."""
    for rank, log in enumerate(logs):
        left = log.samples[rank][-1].bytes_by_kind
        assert {kind for kind, nbytes in left.items() if nbytes} == {"sharded_param", "optimizer_state"}
        allocated, freed = (sum(e.bytes for e in log.select(op, step=1)) for op in ("alloc", "free"))
        assert allocated == freed > 0
