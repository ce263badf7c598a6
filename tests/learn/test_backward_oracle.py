"""What 06 is graded by: its closed form for the mean of integers is what FSDP2 gives, on 2 and on 3 ranks."""

from __future__ import annotations

import pytest
import torch

from hwfsdp.learn.checks.backward import means, names_of, parts_of
from hwfsdp.learn.checks.backward_runs import probe_fsdp2
from hwfsdp.learn.overlay import Overlay
from hwfsdp.learn.run import Ranks

SEED = 6


@pytest.mark.parametrize("model", ["Chain", "Tied"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_mean_of_integers_is_that_of_fsdp2_bit_for_bit(world_size: int, model: str) -> None:
    run = Ranks(Overlay({}, ())).reference(probe_fsdp2, world_size, seed=SEED, kind="integers")
    expected = means(names_of(model, SEED), parts_of(model, SEED, world_size, (0,)))
    for grads, right in zip(run[f"integers {model}"], expected, strict=True):
        assert grads.keys() == right.keys()
        for name, rows in right.items():
            found = grads[name]
            assert (found is None) == (rows is None), name
            assert rows is None or torch.equal(found["rows"], rows), name
