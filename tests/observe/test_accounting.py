"""The cost of a step in closed form. The oracle is the recording and the ledger of real ranks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hwfsdp import MixedPrecisionPolicy, UsageError, fully_shard, launch, record
from hwfsdp.observe.accounting import (
    GroupSizes,
    StateBytes,
    Strategy,
    bytes_sent,
    gathers_per_step,
    mesh_shape,
    model_state_bytes,
    peak_unsharded_bytes,
    strategy_traffic,
)
from hwfsdp.observe.ledger import Ledger
from models import Model, stem, uneven
from oracles import fresh, grid, objective, shapes_by_group, wrap

BF16_IN_FP32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
FP16_GRADIENTS = MixedPrecisionPolicy(reduce_dtype=torch.float16)


@dataclass(frozen=True)
class Case:
    """A model, its bytes per element on the wire, and the number of ranks that share one copy (None: all)."""

    build: Callable[[], Model]
    gathered: int = 4
    reduced: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    how: str = "blocks"
    shards: int | None = None

    @property
    def strategy(self) -> Strategy:
        return {None: Strategy.ZERO3, 1: Strategy.DDP}.get(self.shards, Strategy.HSDP)


CASES = {
    "uneven": Case(uneven),
    "uneven, gathered in bf16, reduced in fp32": Case(uneven, 2, 4, {"mp_policy": BF16_IN_FP32}),
    "stem, reduced in fp16": Case(stem, 4, 2, {"mp_policy": FP16_GRADIENTS}),
    "stem, the root resharded too": Case(stem, options={"reshard_after_forward": True}),
    "uneven, nothing resharded after forward": Case(uneven, options={"reshard_after_forward": False}),
    "stem, one group": Case(stem, how="root"),
}
REPLICATED = {
    "DDP": Case(uneven, shards=1),
    "HSDP in bf16": Case(stem, 2, 4, {"mp_policy": BF16_IN_FP32}, shards=2),
}
CASES_OF = {3: CASES, 4: REPLICATED}  # by world size


def predicted_groups(case: Case) -> tuple[list[GroupSizes], list[GroupSizes]]:
    """Return the groups of the blocks, and the root's group if it has parameters, from the plain model."""
    below, root = shapes_by_group(case.build(), case.how)
    reshard = case.options.get("reshard_after_forward")
    sizes = functools.partial(GroupSizes, gather_itemsize=case.gathered, reduce_itemsize=case.reduced)
    of_blocks = [sizes(shapes, resharded_after_forward=reshard is not False) for shapes in below]
    return of_blocks, [sizes(root, resharded_after_forward=reshard is True)] if root else []


def step(case: Case) -> tuple[dict[str, Any], StateBytes]:
    """Take a training step on this rank. Return its recording, and the bytes of the states while the gradients exist."""
    shards = case.shards or dist.get_world_size()
    mesh = grid((dist.get_world_size() // shards, shards))
    model = wrap(fresh(case.build), fully_shard, case.how, mesh=mesh, **case.options)
    optimizer = torch.optim.AdamW(model.parameters())
    with record() as log:
        objective(model(*model.inputs(2, seed=0))).backward()
    optimizer.step()
    ledger = Ledger()
    ledger.visit_params(model.parameters())
    ledger.visit_state(optimizer.state.values())
    alive, left = ledger.bytes_by_kind(), log.samples[dist.get_rank()][-1].bytes_by_kind
    params = alive["sharded_param"] + left["unsharded_param"]
    return log.summary(), StateBytes(params, alive["sharded_grad"], alive["optimizer_state"])


@pytest.mark.parametrize("world_size", CASES_OF)
def test_a_step_moves_the_predicted_bytes(world_size: int) -> None:
    ranks = launch(
        lambda: {n: step(case) for n, case in CASES_OF[world_size].items()}, world_size, timeout=60
    )
    for name, case in CASES_OF[world_size].items():
        of_blocks, of_root = predicted_groups(case)
        groups = of_blocks + of_root
        mesh = mesh_shape(case.strategy, world_size, case.shards)
        traffic = strategy_traffic(groups, case.strategy, world_size, case.shards)
        counts = {
            "all_gather": sum(map(gathers_per_step, groups)) * (mesh.shard > 1),
            "reduce_scatter": len(groups) * (mesh.shard > 1),
            "all_reduce": len(groups) * (mesh.replicate > 1),
        }
        # the root is whole around its blocks, resharded in between or not
        kept = [*of_root, *(group for group in of_blocks if not group.resharded_after_forward)]
        passing = [group for group in of_blocks if group.resharded_after_forward]
        shapes = [shape for group in groups for shape in group.shapes]
        for rank, found in enumerate(ranks):
            summary, states = found[name]
            assert Counter(summary["bytes_by_op"]) == Counter(traffic), name
            assert Counter(summary["count_by_op"]) == Counter(counts), name
            assert summary["peak_unsharded_bytes"] == peak_unsharded_bytes(kept, passing, mesh.shard), name
            expected = model_state_bytes(shapes, case.strategy, world_size, case.shards, rank)
            # and counts of steps
            assert states == expected._replace(optimizer=expected.optimizer + 4 * len(shapes)), name


# --- Strategies, by hand and by the paper ------------------------------------------------------------------

PAPER = StateBytes(params=2, grads=2, optimizer=12)  # fp16 training with Adam: K = 12


def test_states_and_traffic_of_strategies_are_those_of_the_zero_paper() -> None:
    """arXiv:1910.02054: table 1, for 7.5 B parameters on 64 devices; section 7, which leaves out the factor (W - 1) / W."""
    groups = [GroupSizes([(64, 10), (64,)], 2, 2), GroupSizes([(128, 5)], 2, 2)]
    for strategy, gigabytes, psi in [
        (Strategy.DDP, 120, 2),
        (Strategy.ZERO1, 31.4, 2),
        (Strategy.ZERO2, 16.6, 2),
        (Strategy.ZERO3, 1.88, 3),
    ]:
        states = model_state_bytes([(7_500_000_000,)], strategy, 64, per_element=PAPER)
        assert sum(states) / 1e9 == pytest.approx(gigabytes, rel=0.003)
        sent = bytes_sent(strategy_traffic(groups, strategy, 64), mesh_shape(strategy, 64))
        assert sum(sent.values()) * 64 == psi * 2 * (640 + 64 + 640) * 63


def test_bytes_of_model_states_equal_counts_made_by_hand() -> None:
    def states(strategy: Strategy, rank: int) -> StateBytes:
        return model_state_bytes([(5, 3), (1,)], strategy, 4, 2, rank, StateBytes(2, 4, 12))

    assert [states(Strategy.DDP, rank) for rank in range(4)] == [(2 * 16, 4 * 16, 12 * 16)] * 4
    for rank, rows in enumerate([6 + 1, 6, 3, 0]):
        assert states(Strategy.ZERO1, rank) == (2 * 28, 4 * 28, 12 * rows)
        assert states(Strategy.ZERO2, rank) == (2 * 28, 4 * 7, 12 * rows)
        assert states(Strategy.ZERO3, rank) == (2 * 7, 4 * 7, 12 * rows)
    for rank, rows in enumerate([9 + 1, 6, 9 + 1, 6]):
        assert states(Strategy.HSDP, rank) == (2 * 10, 4 * 10, 12 * rows)


def test_hybrid_sharding_needs_a_factor_of_the_ranks() -> None:
    for shards in [None, 0, 3]:
        with pytest.raises(UsageError, match="a factor of the 4 ranks"):
            mesh_shape(Strategy.HSDP, 4, shards)
