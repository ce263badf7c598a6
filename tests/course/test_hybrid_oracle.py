"""The oracle of hybrid sharding is computed without sharding. It equals torch's FSDP2 in the same setting, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hwfsdp.core.sharding import chunk_extent
from hwfsdp.course.checks import hybrid_sharding_gradients, hybrid_sharding_runs
from hwfsdp.course.overlay import Overlay
from hwfsdp.course.run import Ranks, Run


def reference(probe, world_size: int, **arguments: object) -> Run:
    return Ranks(Overlay({}, ())).reference(probe, world_size, **arguments)


def is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


SETTINGS = [  # FSDP2 leaves partial gradients of a skipped layer where they are, until the layer runs again
    setting for setting in hybrid_sharding_runs.SETTINGS if setting is not hybrid_sharding_runs.SKIPPED
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_replicas_have_the_values_that_fsdp2_gives_them(setting: hybrid_sharding_runs.Setting) -> None:
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
