"""Oracles of 11 and 12, computed without sharding, are what torch's FSDP2 gives in the same setting, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hwfsdp.learn.checks import grouped_buffers_runs, hybrid_sharding_gradients, hybrid_sharding_runs
from hwfsdp.learn.overlay import Overlay
from hwfsdp.learn.run import Ranks, Run
from hwfsdp.sharding import chunk_extent


def reference(probe, world_size: int, **arguments: object) -> Run:
    return Ranks(Overlay({}, ())).reference(probe, world_size, **arguments)


def is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


@pytest.mark.parametrize("seed", [3, 20])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_of_the_model_in_one_piece_is_that_of_fsdp2(world_size: int, seed: int) -> None:
    theirs = reference(grouped_buffers_runs.probe_fsdp2, world_size, seed=seed)
    model = grouped_buffers_runs.Model(seed, world_size)
    for rank in range(world_size):
        (grouped_buffers_runs.loss_of(model, seed, rank, world_size) / world_size).backward()
    for rank in range(world_size):
        for name, param in model.named_parameters(remove_duplicate=False):
            extent = chunk_extent(len(param), world_size, rank)
            rows = None if param.grad is None else param.grad.narrow(0, extent.start, extent.length)
            assert is_equal(theirs["grads"][rank][name], rows), f"{name} on rank {rank}"


SETTINGS = [  # FSDP2 leaves partial gradients of a skipped layer where they are, until the layer runs again
    setting for setting in hybrid_sharding_runs.SETTINGS if setting is not hybrid_sharding_runs.SKIPPED
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_what_replicas_have_is_what_fsdp2_gives_them(setting: hybrid_sharding_runs.Setting) -> None:
    theirs = reference(hybrid_sharding_runs.probe_fsdp2, 4, seed=20, replicas=2)[setting.name]
    parts = hybrid_sharding_runs.parts_of(setting, 20, 4)
    for micro, whole in enumerate(hybrid_sharding_gradients.oracle(parts, setting, 2)):
        for rank in range(4):
            for name, grad in whole.items():
                extent = chunk_extent(len(grad), 2, rank % 2) if grad is not None else None
                rows = grad.narrow(0, extent.start, extent.length) if extent is not None else None
                assert is_equal(
                    theirs[rank][micro][name], rows
                ), f"{name} on rank {rank}, micro-batch {micro}"
