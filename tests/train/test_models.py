"""The GPT and its data: shapes, causality, and batches that depend only on their arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hwfsdp import UsageError
from hwfsdp.train.data import draw_batch, load_text, share
from hwfsdp.train.models import GPT, GPTConfig

SMALL = GPTConfig(dim=16, layers=2, heads=2, seq_len=12)


def test_a_position_sees_no_later_byte() -> None:
    torch.manual_seed(0)
    model, tokens = GPT(SMALL), torch.randint(256, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 12, 256)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7], after[:, 7])


@pytest.mark.parametrize("sizes", [{"dim": 10, "heads": 4}, {"layers": 0}, {"seq_len": -1}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="multiple of the number of heads"):
        GPTConfig(**sizes)


def test_a_file_is_read_byte_by_byte(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(bytes(range(256)))
    assert torch.equal(load_text(tmp_path / "t"), torch.arange(256, dtype=torch.uint8))


def test_a_file_that_is_not_there_and_a_text_too_short_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file") as caught:
        load_text(tmp_path / "none")
    assert "\n" not in str(caught.value)
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(UsageError, match="more than 3 bytes"):
        draw_batch(load_text(tmp_path / "short"), 3, 1, 0, 0)
    (tmp_path / "empty").touch()
    with pytest.raises(UsageError, match="0 bytes"):
        draw_batch(load_text(tmp_path / "empty"), 3, 1, 0, 0)


def test_targets_are_the_bytes_that_follow() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    inputs, targets = draw_batch(text, 9, 5, seed=1, step=2)
    assert torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_shares_are_the_whole_batch_cut_in_rank_order(world_size: int) -> None:
    batch = draw_batch(load_text(), 8, 12, seed=0, step=5)
    again = draw_batch(load_text(), 8, 12, seed=0, step=5)
    parts = [share(again, rank, world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat([p.inputs for p in parts]), batch.inputs)
    assert torch.equal(torch.cat([p.targets for p in parts]), batch.targets)


def test_steps_and_seeds_draw_different_batches() -> None:
    drawn = {
        tuple(draw_batch(load_text(), 8, 4, s, t).inputs.flatten().tolist())
        for s in range(3)
        for t in range(3)
    }
    assert len(drawn) == 9
