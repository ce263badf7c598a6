"""Interrupted runs go on as if nothing had happened.

The oracle is the uninterrupted run: losses are equal at the same number of ranks.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hwfsdp import RankError, UsageError, checkpoint, launch
from hwfsdp.cli import main
from hwfsdp.launcher import launch as launching
from hwfsdp.launcher import worker
from hwfsdp.train.loop import TrainConfig, TrainResult, train
from hwfsdp.train.models import GPTConfig
from hwfsdp.train.snapshots import ROWS, SnapshotConfig

TINY = ["--layers", "2", "--dim", "32", "--seq-len", "16", "--batch", "6"]
CONFIG = TrainConfig(GPTConfig(dim=32, layers=2, heads=1, seq_len=16), batch=6, steps=9)


def losses_of(world_size: int, config: TrainConfig) -> list[float]:
    found = [result.losses for result in launch(train, world_size, config, timeout=120)]
    assert all(losses == found[0] for losses in found)
    return found[0]


@functools.cache
def uninterrupted() -> list[float]:
    return losses_of(2, CONFIG)


def saving(path: Path, **options: Any) -> TrainConfig:
    return replace(CONFIG, snapshots=SnapshotConfig(path, **options))


def interrupted(config: TrainConfig, after: int, how: signal.Signals) -> list[TrainResult]:
    """Train on two ranks. After `after` steps, rank 0 gets a signal."""
    steps = itertools.count(1)

    def after_each_step(*_: object) -> None:
        if next(steps) == after:
            os.kill(os.getpid(), how)

    return launch(train, 2, config, "cpu", after_each_step, timeout=120)


def test_saving_changes_no_loss_and_the_newest_saves_are_kept(tmp_path):
    assert losses_of(2, saving(tmp_path, every=2, keep=3)) == uninterrupted()
    assert [int(save.split("-")[0]) for save in checkpoint.inspect(tmp_path).saves] == [3, 4, 5]
    assert checkpoint.verify(tmp_path).tensors["state_dict['losses']"].shape == (CONFIG.steps,)


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path):
    config = saving(tmp_path, every=2, resume=True)
    with pytest.raises(RankError, match="SIGKILL"):
        interrupted(config, 5, signal.SIGKILL)
    assert losses_of(2, config) == uninterrupted()


@pytest.mark.long
def test_a_run_goes_on_from_a_save_that_was_killed_before_it_counted(tmp_path):
    config = saving(tmp_path, every=4, resume=True, keep=1)
    losses_of(2, replace(config, steps=4))
    (tmp_path / "CURRENT").unlink()
    with pytest.raises(UsageError, match="starts from the beginning"):
        SnapshotConfig(tmp_path)
    found = launch(train, 2, config, timeout=120)[0]
    assert found.resumed_at == 4 and found.losses == uninterrupted()


def test_asked_to_stop_all_ranks_save_after_the_same_step(tmp_path):
    config = saving(tmp_path, every=100, resume=True)
    results = interrupted(config, 4, signal.SIGTERM)
    assert [(r.stopped, len(r.losses), r.resumed_at) for r in results] == [(True, 4, 0)] * 2
    results = launch(train, 2, config, timeout=120)
    assert [(r.stopped, r.resumed_at) for r in results] == [(False, 4)] * 2
    assert results[0].losses == uninterrupted()


def test_at_another_world_size_a_run_goes_on_with_the_same_batches(tmp_path):
    config = saving(tmp_path, resume=True)
    losses_of(2, replace(config, steps=5))
    found = launch(train, 3, config, timeout=120)[0]
    assert found.resumed_at == 5
    assert found.losses == pytest.approx(uninterrupted(), abs=1e-5)


SIZES = GPTConfig(64, 2, 1, 16)
OTHER = [{"seed": 1}, {"lr": 0.5}, {"param_dtype": "bfloat16"}, {"model": SIZES}, {"batch": 2}]


def refusals(config: TrainConfig) -> list[str]:
    """Return the errors of going on with each of the other settings."""
    found = []
    for other in OTHER:
        with pytest.raises(UsageError) as caught:
            train(replace(config, **other))
        found.append(str(caught.value))
    return found


def test_another_setting_is_refused_by_name_and_ranks_that_cannot_share_the_batches(tmp_path):
    config = saving(tmp_path, resume=True)
    losses_of(1, replace(config, steps=1))
    for other, refusal in zip(OTHER, launch(refusals, 1, config, timeout=120)[0], strict=True):
        assert f"expected {ROWS if 'batch' in other else next(iter(other))}: " in refusal
    with pytest.raises(RankError, match="a number of ranks that divides its batches of 6 rows; got 4 ranks"):
        launch(train, 4, config, timeout=120)


def test_a_run_that_begins_anew_does_not_replace_a_checkpoint(tmp_path):
    checkpoint.save({"x": 1}, tmp_path)
    with pytest.raises(UsageError, match="this run starts from the beginning; got one. Resume from it"):
        SnapshotConfig(tmp_path)


def test_a_damaged_checkpoint_stops_a_run_that_would_resume(tmp_path, capsys):
    arguments = ["train", "--ranks", "1", "--steps", "1", "--checkpoint", str(tmp_path / "x"), *TINY]
    assert main(arguments) == 0
    file = next((tmp_path / "x").glob("*/00000.bin"))
    file.write_bytes(file.read_bytes()[:-1])
    assert main([*arguments, "--resume"]) == 1
    assert "00000.bin" in capsys.readouterr().err


def test_the_request_to_stop_ends_with_the_block():
    before = signal.getsignal(signal.SIGTERM)
    with launching.stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
        assert worker.stop_requested.wait(10)
    assert not worker.stop_requested.is_set() and signal.getsignal(signal.SIGTERM) == before
