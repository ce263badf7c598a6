"""Oracles that are computed where grades are made are what torch's FSDP2 gives in the same setting, bit for bit."""

from __future__ import annotations

import pytest
import torch

from hwfsdp.learn.checks import accumulation, accumulation_runs
from hwfsdp.learn.overlay import Overlay
from hwfsdp.learn.run import Ranks

SETTINGS = [s for s in accumulation_runs.SETTINGS if s is not accumulation_runs.PRECISE_PATHS]


@pytest.mark.parametrize("seed", [3, 20])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_what_unsharded_models_add_up_is_what_fsdp2_gives(
    setting: accumulation_runs.Setting, seed: int
) -> None:
    probe = accumulation_runs.probe_settings
    theirs = Ranks(Overlay({}, ())).reference(probe, 2, seed=seed, library="torch")[f"grads: {setting.name}"]
    ours = accumulation.oracle(accumulation.parts_of(setting, seed, 2), setting)
    for rank in range(2):
        assert theirs[rank].keys() == ours[rank].keys()
        for name, grad in theirs[rank].items():
            mine = ours[rank][name]
            assert (grad is None and mine is None) or torch.equal(grad, mine), f"{name} on rank {rank}"
