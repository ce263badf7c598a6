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


def test_a_file_that_is_not_there_and_a_text_too_short_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file") as caught:
        load_text(tmp_path / "none")
    assert "\n" not in str(caught.value)
    for content, words in ((b"abc", "more than 3 bytes"), (b"", "0 bytes")):
        (tmp_path / "short").write_bytes(content)
        with pytest.raises(UsageError, match=words):
            draw_batch(load_text(tmp_path / "short"), 3, 1, 0, 0)


def test_targets_are_the_bytes_of_the_file_that_follow(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(bytes(range(200)))
    inputs, targets = draw_batch(load_text(tmp_path / "t"), 9, 5, seed=1, step=2)
    assert inputs.max() > 127
    assert torch.equal(targets, inputs + 1)


def test_shares_are_the_whole_batch_cut_in_rank_order_and_another_step_or_seed_draws_another() -> None:
    batch = draw_batch(load_text(), 8, 12, seed=0, step=5)
    for world_size in (2, 3):
        again = draw_batch(load_text(), 8, 12, seed=0, step=5)
        parts = [share(again, rank, world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat([p.inputs for p in parts]), batch.inputs)
        assert torch.equal(torch.cat([p.targets for p in parts]), batch.targets)
    for seed, step in ((1, 5), (0, 6)):
        assert not torch.equal(draw_batch(load_text(), 8, 12, seed, step).inputs, batch.inputs)
