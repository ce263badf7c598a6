"""What is alive, from the ledger, against closed forms: bytes follow from shapes, dtypes and the world size."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
from hwfsdp import EventLog, FSDPModule, events, launch, record
from hwfsdp.accounting import GroupSizes, peak_unsharded_bytes, unsharded_bytes
from hwfsdp.collectives import DefaultAllGather, DefaultReduceScatter
from hwfsdp.sharding import local_shape, padded_local_numel
from oracles import Policy, Training, ours

WORLD_SIZES = (1, 2, 3, 4)
BF16: Policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Setup(NamedTuple):
    """A model, how it is wrapped, and what follows from that."""

    build: Callable[[], models.Model]
    how: str = "blocks"
    reshard_after_forward: bool | None = None
    policy: Policy | None = None

    def shapes(self) -> tuple[list[list[torch.Size]], list[torch.Size]]:
        """Shapes of the parameters of each group below the root in forward order, and of the root's own."""
        model = self.build()
        below: list[list[torch.Size]] = []
        claimed: set[nn.Parameter] = set()
        for block in model.blocks if self.how != "root" else ():
            for module in (block.children() if self.how == "nested" else (block,)):
                below.append([p.shape for p in module.parameters()])
                claimed |= set(module.parameters())
        return below, [p.shape for p in model.parameters() if p not in claimed]

    def groups(self) -> tuple[list[GroupSizes], list[GroupSizes]]:
        """The groups that stay unsharded from forward to backward, and those that pass, in forward order."""
        below, root = self.shapes()
        itemsize = 2 if self.policy else 4
        passing = [GroupSizes(shapes, gather_itemsize=itemsize) for shapes in below]
        kept = [GroupSizes(root, gather_itemsize=itemsize)] if root else []
        if self.reshard_after_forward is False:
            return kept + passing, []
        return kept, passing


SETUPS = {
    "three blocks": Setup(models.graded),
    "three blocks that stay": Setup(models.graded, reshard_after_forward=False),
    "three blocks, layer by layer": Setup(models.graded, how="nested"),
    "three blocks in bf16": Setup(models.graded, policy=BF16),
    "blocks and root": Setup(models.wandering),
    "blocks and root that stay": Setup(models.wandering, reshard_after_forward=False),
    "blocks and root in bf16": Setup(models.wandering, policy=BF16),
    "root alone": Setup(models.wandering, how="root"),
    "uneven": Setup(models.uneven),
    "uneven, layer by layer": Setup(models.uneven, how="nested"),
    "tied": Setup(models.Transformer),
}


@functools.cache
def all_logs(world_size: int) -> dict[str, list[EventLog]]:
    """By setup, each rank's log of two training steps and a sample after them."""

    def on_a_rank() -> dict[str, EventLog]:
        return {name: log_of(setup) for name, setup in SETUPS.items()}

    ranks = launch(on_a_rank, world_size, timeout=60)
    return {name: [logs[name] for logs in ranks] for name in SETUPS}


def training_of(setup: Setup) -> Training:
    options: dict[str, Any] = {"reshard_after_forward": setup.reshard_after_forward, "policy": setup.policy}
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
    """The most bytes that flat buffers of one kind held at once, counted whenever one more is needed.

    A buffer counts for as long as hwfsdp refers to it. The backend is given an alias, because gloo's threads hold on
    to what they were given for some moments after they are done with it.
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


@functools.cache
def all_buffer_peaks(world_size: int) -> list[dict[str, tuple[int, int]]]:
    """By rank, by setup: the peaks of gather buffers and of reduction inputs in two training steps."""

    def on_a_rank() -> dict[str, tuple[int, int]]:
        return {name: buffer_peaks_of(setup) for name, setup in SETUPS.items()}

    return launch(on_a_rank, world_size, timeout=60)


def buffer_peaks_of(setup: Setup) -> tuple[int, int]:
    training, gather, reduction = training_of(setup), CountingGather(), CountingReduction()
    for module in training.model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduction)
    for seed in range(2):
        training.loss(seed).backward()
    return gather.buffers.peak, reduction.buffers.peak


@pytest.fixture(params=SETUPS)
def name(request) -> str:
    return request.param


@pytest.fixture
def setup(name) -> Setup:
    return SETUPS[name]


@pytest.fixture(params=WORLD_SIZES)
def world_size(request) -> int:
    return request.param


@pytest.fixture
def logs(name, world_size) -> list[EventLog]:
    """One per rank."""
    return all_logs(world_size)[name]


@pytest.fixture
def peaks(logs) -> list[dict[str, int]]:
    """Each rank's."""
    return [log.summary()["peak_bytes_by_kind"] for log in logs]


def test_whole_parameters_peak_at_the_root_and_the_largest_block(setup, world_size, logs):
    kept, passing = setup.groups()
    expected = peak_unsharded_bytes(kept, passing, world_size)
    assert [log.summary()["peak_unsharded_bytes"] for log in logs] == [expected] * world_size


def test_shards_take_their_padded_bytes(setup, world_size, peaks):
    below, root = setup.shapes()
    expected = 4 * sum(padded_local_numel(shape, world_size) for shapes in [*below, root] for shape in shapes)
    assert [peak["sharded_param"] for peak in peaks] == [expected] * world_size


def test_sharded_gradients_take_no_more_than_the_shards(world_size, peaks):
    assert [peak["sharded_grad"] for peak in peaks] == [peak["sharded_param"] for peak in peaks]


def test_adamw_keeps_two_numbers_for_each_row_of_the_rank(setup, world_size, peaks):
    below, root = setup.shapes()
    shapes = [shape for group in [*below, root] for shape in group]
    for rank, peak in enumerate(peaks):
        rows = sum(torch.Size(local_shape(shape, world_size, rank)).numel() for shape in shapes)
        assert peak["optimizer_state"] == 2 * 4 * rows + 4 * len(shapes)  # and a step count for each


@pytest.fixture(params=[2, 3])
def buffer_peaks(request, name) -> list[tuple[int, int, int]]:
    """The world size and each rank's peaks."""
    return [(request.param, *peaks[name]) for peaks in all_buffer_peaks(request.param)]


def test_two_gathers_are_in_flight_at_most(setup, buffer_peaks):
    """Those of neighbors: in forward from the second step on, and in backward."""
    kept, passing = setup.groups()
    for world_size, peak, _ in buffer_peaks:
        in_order = [unsharded_bytes(group, world_size) for group in kept + passing]
        assert peak == max(map(sum, pairwise(in_order)), default=in_order[0])


def test_one_reduction_is_in_flight_at_most(setup, buffer_peaks):
    kept, passing = setup.groups()
    for world_size, _, peak in buffer_peaks:
        assert peak == max(4 * group.padded_numel(world_size) for group in kept + passing)


def test_whole_gradients_peak_at_the_largest_group(setup, peaks):
    below, root = setup.shapes()
    itemsize = 2 if setup.policy else 4
    largest = max(sum(shape.numel() for shape in shapes) for shapes in [*below, root])
    assert [peak["unsharded_grad"] for peak in peaks] == [largest * itemsize] * len(peaks)


def test_whole_gradients_are_gone_when_their_reduction_begins():
    def on_a_rank() -> list[int]:
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

    assert launch(on_a_rank, 2, timeout=60) == [[0, 0, 0]] * 2


def test_after_a_step_only_shards_and_optimizer_state_are_left(logs):
    for rank, log in enumerate(logs):
        left = log.samples[rank][-1].bytes_by_kind
        assert {kind for kind, nbytes in left.items() if nbytes} == {"sharded_param", "optimizer_state"}


def test_a_step_frees_every_byte_that_it_allocates(logs):
    """The second one, as parameters are made in the first."""
    for log in logs:
        allocated, freed = (sum(e.bytes for e in log.select(op, step=1)) for op in ("alloc", "free"))
        assert allocated == freed > 0
