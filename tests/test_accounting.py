"""What a step costs, in closed form: the oracle is what a recording measures on real ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hwfsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    UsageError,
    fully_shard,
    launch,
    record,
)
from hwfsdp.accounting import (
    GroupSizes,
    MeshShape,
    StateBytes,
    Strategy,
    bytes_sent,
    gathers_per_step,
    mesh_shape,
    model_state_bytes,
    on_the_wire,
    peak_unsharded_bytes,
    step_traffic,
    strategy_traffic,
    unsharded_bytes,
)
from hwfsdp.collectives import RingAllGather, RingReduceScatter
from hwfsdp.compat import all_gather_single, reduce_scatter_single
from hwfsdp.memory import Ledger
from hwfsdp.ring import ring_all_gather, ring_reduce_scatter
from hwfsdp.sharding import chunk_extent, padded_length
from models import Convolution, Model, even, stem, uneven
from oracles import fresh, objective, ours, rank_rows, wrap

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


@given(st.integers(1, 16), st.integers(0, 1000))
def test_ranks_of_an_all_reduce_with_uneven_blocks_send_that_much_on_average(world_size: int, n: int) -> None:
    blocks = [n * (i + 1) // world_size - n * i // world_size for i in range(world_size)]
    passed_on = [
        blocks[(rank - step) % world_size] for rank in range(world_size) for step in range(1, world_size)
    ]
    assert on_the_wire("all_reduce", n, world_size) == 2 * sum(passed_on) // world_size


# --- Strategies, on real ranks -----------------------------------------------------------------------------
#
# A way to train is a class here: ZERO3 and HSDP are hwfsdp's, DDP is hwfsdp's over one shard and once
# more by hand; the first two stages of ZeRO are by hand. All of them learn the same.


class Training:
    """A model that is trained on this rank; `step` leaves its gradients in place."""

    def __init__(self, build: Callable[[], Model]) -> None:
        self.model = fresh(build)
        self.optimizer: torch.optim.Optimizer

    def step(self, seed: int) -> None:
        self.zero_grad()
        objective(self.model(*map(rank_rows, self.model.inputs(12, seed)))).backward()
        self.reduce()
        self.optimizer.step()
        self.gather()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def reduce(self) -> None:
        """What is left to do for the gradients after backward."""

    def gather(self) -> None:
        """What is left to do for the parameters after the update."""

    def gradients(self) -> list[Tensor]:
        """All that are kept when the optimizer runs."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def new_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.02, eps=1e-3)


class Sharded(Training):
    """hwfsdp, on a mesh of this shape."""

    def __init__(
        self,
        build: Callable[[], Model],
        mesh: MeshShape,
        rings: bool = False,
        policy: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(build)
        grid = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("replicate", "shard"))
        options |= {"mesh": grid, "mp_policy": MixedPrecisionPolicy(**policy or {})}
        for module in [*self.model.blocks, self.model]:
            fully_shard(module, **options)
        for module in self.model.modules():
            if isinstance(module, FSDPModule) and rings:
                module.set_custom_all_gather(RingAllGather())
                module.set_custom_reduce_scatter(RingReduceScatter())
        self.optimizer = self.new_optimizer(self.model.parameters())


class ByHand(Training):
    """DDP: whole parameters, gradients all-reduced one by one."""

    def __init__(self, build: Callable[[], Model], mesh: MeshShape, rings: bool = False) -> None:
        super().__init__(build)
        self.rings, self.rank, self.world_size = rings, dist.get_rank(), dist.get_world_size()
        self.optimizer = self.new_optimizer(self.model.parameters())

    def reduce(self) -> None:
        for param in self.model.parameters():
            if self.world_size > 1 and param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= self.world_size


class Zero(ByHand):
    """What both stages share: parameters lie in memory that is padded to a full chunk for each rank, `wholes`.

    The optimizer has this rank's rows of each, `own`, as views. After the update all chunks are gathered into place.
    """

    def __init__(self, build: Callable[[], Model], mesh: MeshShape, rings: bool = False) -> None:
        super().__init__(build, mesh, rings)
        self.params = list(self.model.parameters())
        self.wholes = [self.padded(p.detach()) for p in self.params]
        for param, whole in zip(self.params, self.wholes, strict=True):
            param.data = whole[: len(param)]
        self.own = [nn.Parameter(self.own_rows(p.detach(), len(p))) for p in self.params]
        self.optimizer = self.new_optimizer(self.own)

    def padded(self, rows: Tensor) -> Tensor:
        memory = rows.new_zeros(padded_length(len(rows), self.world_size), *rows.shape[1:])
        memory[: len(rows)] = rows
        return memory

    def own_rows(self, whole: Tensor, n: int) -> Tensor:
        return whole.narrow(0, *chunk_extent(n, self.world_size, self.rank))

    def own_chunk(self, whole: Tensor) -> Tensor:
        return whole.view(self.world_size, -1)[self.rank]

    def gather(self) -> None:
        for whole in self.wholes if self.world_size > 1 else ():
            mine = self.own_chunk(whole).clone()
            if self.rings:
                ring_all_gather(whole.view(-1), mine, None)
            else:
                all_gather_single(whole.view(-1), mine, None, False)

    def scatter(self, gradient: Tensor) -> Tensor:
        """This rank's chunk, flat, of the mean of padded gradients; if there is nobody else, no copy."""
        if self.world_size == 1:
            return gradient.view(-1)
        mine = torch.empty_like(self.own_chunk(gradient))
        if self.rings:
            ring_reduce_scatter(mine, gradient.view(-1), None, mean=True)
        else:
            reduce_scatter_single(mine, gradient.view(-1), dist.ReduceOp.SUM, None, False)
            mine /= self.world_size
        return mine


class Stage1(Zero):
    """Gradients stay whole and padded; the mean of this rank's rows replaces what was there."""

    def __init__(self, build: Callable[[], Model], mesh: MeshShape, rings: bool = False) -> None:
        super().__init__(build, mesh, rings)
        self.whole_grads = [torch.zeros_like(whole) for whole in self.wholes]

    def zero_grad(self) -> None:
        for param, grad in zip(self.params, self.whole_grads, strict=True):
            param.grad = grad.zero_()[: len(param)]

    def reduce(self) -> None:
        for param, own, grad in zip(self.params, self.own, self.whole_grads, strict=True):
            self.own_chunk(grad).copy_(self.scatter(grad))
            own.grad = self.own_rows(grad[: len(param)], len(param))


class Stage2(Zero):
    """A gradient is reduced, and its memory given up, as soon as backward has made it."""

    def __init__(self, build: Callable[[], Model], mesh: MeshShape, rings: bool = False) -> None:
        super().__init__(build, mesh, rings)
        for param, own in zip(self.params, self.own, strict=True):
            param.register_post_accumulate_grad_hook(functools.partial(self.reduce_one, own))

    def reduce_one(self, own: nn.Parameter, param: Tensor) -> None:
        assert param.grad is not None
        mine = self.scatter(self.padded(param.grad))
        own.grad, param.grad = mine[: own.numel()].view(own.shape), None

    def gradients(self) -> list[Tensor]:
        return super().gradients() + [own.grad for own in self.own if own.grad is not None]


def ring_all_reduce(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> None:
    """In the place of `dist.all_reduce`, for tensors that the ranks divide evenly."""
    flat = tensor.view(-1)
    mine = flat.new_empty(flat.numel() // dist.get_world_size(group))
    ring_reduce_scatter(mine, flat, group, mean=op == dist.ReduceOp.AVG)
    ring_all_gather(flat, mine, group)


class Found(NamedTuple):
    """What one rank found in the second step; `sent`: bytes by send, when all collectives are rings."""

    states: StateBytes
    traffic: dict[str, int]
    sent: int | None
    learned: list[Tensor]


@dataclass(frozen=True)
class Way:
    """A strategy, what carries it out, and what that implies: bytes per element of gathers and reductions."""

    strategy: Strategy
    train: Callable[..., Training]
    options: dict[str, Any] = field(default_factory=dict)
    shards: int | None = None
    gathered: int = 4

    def mesh(self, world_size: int) -> MeshShape:
        shards = self.shards or (1 if self.strategy is Strategy.DDP else world_size)
        return MeshShape(world_size // shards, shards)

    def groups(self, build: Callable[[], Model]) -> list[GroupSizes]:
        options = {k: v for k, v in self.options.items() if k == "reshard_after_forward"}
        of_blocks, of_root = predicted_groups(Case(build, self.gathered, 4, options))
        return of_blocks + of_root


BUILDS = {"even": even, "uneven": uneven, "stem": stem}
WAYS = {
    "DDP by hand": Way(Strategy.DDP, ByHand),
    "DDP": Way(Strategy.DDP, Sharded),
    "ZERO1": Way(Strategy.ZERO1, Stage1),
    "ZERO2": Way(Strategy.ZERO2, Stage2),
    "ZERO3": Way(Strategy.ZERO3, Sharded),
    "ZERO3, the root resharded too": Way(Strategy.ZERO3, Sharded, {"reshard_after_forward": True}),
    "ZERO3, nothing resharded after forward": Way(Strategy.ZERO3, Sharded, {"reshard_after_forward": False}),
    "ZERO3 in bf16": Way(Strategy.ZERO3, Sharded, {"policy": BF16_IN_FP32}, gathered=2),
    **{f"HSDP over {s}": Way(Strategy.HSDP, Sharded, shards=s) for s in WORLD_SIZES},
    "HSDP over 2 in bf16": Way(Strategy.HSDP, Sharded, {"policy": BF16_IN_FP32}, shards=2, gathered=2),
}
COMBINATIONS = [
    (world_size, way, build)
    for world_size in WORLD_SIZES
    for way in WAYS
    for build in BUILDS
    if world_size % (WAYS[way].shards or 1) == 0
]
for_each_combination = pytest.mark.parametrize(("world_size", "way", "build"), COMBINATIONS)


def states_of(training: Training) -> StateBytes:
    """From the ledger, after a step, while its gradients are there."""
    ledger = Ledger()
    ledger.visit(training.model)
    for grad in training.gradients():
        ledger.watch(grad, "sharded_grad")
    ledger.visit_state(training.optimizer.state.values())
    alive = ledger.bytes_by_kind()
    params = alive["sharded_param"] + alive["unsharded_param"]
    return StateBytes(params, alive["sharded_grad"] + alive["unsharded_grad"], alive["optimizer_state"])


def find(way: Way, build: Callable[[], Model]) -> Found:
    mesh = way.mesh(dist.get_world_size())
    training = way.train(build, mesh, **way.options)
    training.step(0)
    with record() as log:
        training.step(1)
    states = states_of(training)
    left = log.samples[dist.get_rank()][-1].bytes_by_kind if log.samples[dist.get_rank()] else {}
    states = states._replace(params=states.params + left.get("unsharded_param", 0))
    traffic = log.summary()["bytes_by_op"]
    learned = [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for p in training.model.parameters()
    ]
    sent = None
    if build is even:  # then all blocks of all rings are of the same size
        training = way.train(build, mesh, rings=True, **way.options)
        with record() as log, mock.patch.object(dist, "all_reduce", ring_all_reduce):
            training.step(0)
        assert {e.op for e in log.collectives()} <= {"send", "recv"}
        sent = sum(e.bytes for e in log.select("send"))
    return Found(states, traffic, sent, learned)


@functools.cache
def found(world_size: int) -> list[dict[tuple[str, str], Found]]:
    """By way and model, of every rank."""

    def on_a_rank() -> dict[tuple[str, str], Found]:
        return {(w, b): find(WAYS[w], BUILDS[b]) for n, w, b in COMBINATIONS if n == world_size}

    return launch(on_a_rank, world_size, timeout=120)


def shapes_of(build: Callable[[], Model]) -> list[torch.Size]:
    return [p.shape for p in build().parameters()]


@for_each_combination
def test_states_are_those_in_memory(world_size: int, way: str, build: str) -> None:
    shapes = shapes_of(BUILDS[build])
    step_counts = 4 * len(shapes)
    for rank, result in enumerate(found(world_size)):
        expected = model_state_bytes(shapes, WAYS[way].strategy, world_size, WAYS[way].shards, rank)
        measured = result[way, build].states
        assert measured == expected._replace(optimizer=expected.optimizer + step_counts)


@for_each_combination
def test_traffic_is_what_travels(world_size: int, way: str, build: str) -> None:
    groups = WAYS[way].groups(BUILDS[build])
    traffic = strategy_traffic(groups, WAYS[way].strategy, world_size, WAYS[way].shards)
    assert set(traffic) == {"all_gather", "reduce_scatter", "all_reduce"}
    for result in found(world_size):
        assert {op: nbytes for op, nbytes in traffic.items() if nbytes} == result[way, build].traffic


@pytest.mark.parametrize(("world_size", "way"), dict.fromkeys((n, way) for n, way, _ in COMBINATIONS))
def test_a_rank_sends_what_rings_send(world_size: int, way: str) -> None:
    setup = WAYS[way]
    traffic = strategy_traffic(setup.groups(even), setup.strategy, world_size, setup.shards)
    sent = bytes_sent(traffic, mesh_shape(setup.strategy, world_size, setup.shards))
    assert set(sent) == set(traffic)
    assert [result[way, "even"].sent for result in found(world_size)] == [sum(sent.values())] * world_size


@for_each_combination
def test_whoever_holds_the_states_the_model_learns_the_same(world_size: int, way: str, build: str) -> None:
    rtol, atol = (0.05, 0.05) if "bf16" in way else (1e-4, 1e-5)
    for result in found(world_size):
        learned, expected = result[way, build].learned, result["DDP by hand", build].learned
        for ours_, theirs in zip(learned, expected, strict=True):
            torch.testing.assert_close(ours_, theirs, rtol=rtol, atol=atol)


# --- Strategies, by hand and by the paper ------------------------------------------------------------------

some_shapes = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=4)
some_ranks = st.tuples(st.integers(1, 5), st.integers(1, 5))  # that replicate, and that shard
PAPER = StateBytes(params=2, grads=2, optimizer=12)  # fp16 training with Adam: K = 12


@pytest.mark.parametrize(
    ("strategy", "gigabytes"),
    [(Strategy.DDP, "120"), (Strategy.ZERO1, "31.4"), (Strategy.ZERO2, "16.6"), (Strategy.ZERO3, "1.88")],
)
def test_model_states_are_those_of_the_zero_paper(strategy: Strategy, gigabytes: str) -> None:
    """Figure 1 and table 1 of arXiv:1910.02054: 7.5 B parameters on 64 devices."""
    states = model_state_bytes([(7_500_000_000,)], strategy, 64, per_element=PAPER)
    decimals = len(gigabytes.partition(".")[2])
    assert round(sum(states) / 1e9, decimals) == float(gigabytes)


@pytest.mark.parametrize(
    ("strategy", "psi"), [(Strategy.DDP, 2), (Strategy.ZERO1, 2), (Strategy.ZERO2, 2), (Strategy.ZERO3, 3)]
)
def test_a_rank_sends_twice_the_model_or_three_times_as_in_the_zero_paper(
    strategy: Strategy, psi: int
) -> None:
    """Section 7 of the paper, which leaves out the factor (W - 1) / W."""
    groups = [GroupSizes([(64, 10), (64,)], 2, 2), GroupSizes([(128, 5)], 2, 2)]
    sent = bytes_sent(strategy_traffic(groups, strategy, 64), mesh_shape(strategy, 64))
    assert sum(sent.values()) * 64 == psi * 2 * (640 + 64 + 640) * 63


def test_states_in_the_sizes_of_the_docstring() -> None:
    def states(strategy: Strategy, rank: int) -> StateBytes:
        return model_state_bytes([(5, 3), (1,)], strategy, 4, 2, rank, StateBytes(2, 4, 12))

    assert [states(Strategy.DDP, rank) for rank in range(4)] == [(2 * 16, 4 * 16, 12 * 16)] * 4
    for rank, rows in enumerate([6 + 1, 6, 3, 0]):
        assert states(Strategy.ZERO1, rank) == (2 * 28, 4 * 28, 12 * rows)
        assert states(Strategy.ZERO2, rank) == (2 * 28, 4 * 7, 12 * rows)
        assert states(Strategy.ZERO3, rank) == (2 * 7, 4 * 7, 12 * rows)
    for rank, rows in enumerate([9 + 1, 6, 9 + 1, 6]):
        assert states(Strategy.HSDP, rank) == (2 * 10, 4 * 10, 12 * rows)


@given(some_shapes, st.sampled_from(Strategy), some_ranks)
def test_one_copy_of_the_optimizer_state_per_replica(
    shapes: list[list[int]], strategy: Strategy, ranks: tuple[int, int]
) -> None:
    world_size = prod(ranks)
    states = [model_state_bytes(shapes, strategy, world_size, ranks[1], rank) for rank in range(world_size)]
    copies = mesh_shape(strategy, world_size, ranks[1]).replicate
    assert sum(state.optimizer for state in states) == copies * 8 * sum(map(prod, shapes))
    assert states[0] == max(states, key=sum)


@given(some_shapes)
def test_alone_every_strategy_costs_the_same(shapes: list[list[int]]) -> None:
    n = sum(map(prod, shapes))
    for strategy in Strategy:
        assert model_state_bytes(shapes, strategy, 1, 1) == (4 * n, 4 * n, 8 * n)
        assert set(strategy_traffic([GroupSizes(shapes)], strategy, 1, 1).values()) == {0}


@given(some_shapes, st.integers(1, 8))
def test_hybrid_sharding_has_ddp_and_zero3_at_its_ends(shapes: Sequence[list[int]], world_size: int) -> None:
    groups = [GroupSizes(shapes, 2, 4)]
    for shards, strategy in [(1, Strategy.DDP), (world_size, Strategy.ZERO3)]:
        hybrid = strategy_traffic(groups, Strategy.HSDP, world_size, shards)
        assert hybrid == strategy_traffic(groups, strategy, world_size)
        assert mesh_shape(Strategy.HSDP, world_size, shards) == mesh_shape(strategy, world_size)


@given(some_shapes, st.integers(1, 8))
def test_parameters_that_stay_from_forward_to_backward_move_as_in_zero2(
    shapes: list[list[int]], world_size: int
) -> None:
    kept = [GroupSizes(shapes, 2, 4, resharded_after_forward=False)]
    passing = [GroupSizes(shapes, 2, 4)]
    zero3 = strategy_traffic(kept, Strategy.ZERO3, world_size)
    for strategy in (Strategy.ZERO1, Strategy.ZERO2):
        assert strategy_traffic(passing, strategy, world_size) == zero3


@pytest.mark.parametrize("shards", [None, 0, -2, 3, 8])
def test_hybrid_sharding_needs_a_factor_of_the_ranks(shards: int | None) -> None:
    with pytest.raises(UsageError, match="a factor of the 4 ranks"):
        mesh_shape(Strategy.HSDP, 4, shards)


def test_gathers_are_sent_within_shards_and_all_reduces_across_replicas() -> None:
    traffic = {"all_gather": 80, "all_reduce": 30}
    assert bytes_sent(traffic, MeshShape(3, 8)) == {"all_gather": 70, "all_reduce": 40}
    assert bytes_sent(traffic, MeshShape(1, 1)) == {"all_gather": 0, "all_reduce": 0}
