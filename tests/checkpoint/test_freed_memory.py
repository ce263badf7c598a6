"""Tensors whose memory is gone are refused by all that would read or write it."""

from __future__ import annotations

import pytest
import torch
from models import uneven

from hwfsdp import UsageError, checkpoint, fully_shard, launch
from hwfsdp.checkpoint import dcp, parts
from hwfsdp.checkpoint.state_dict import copy_state_dict, gather_state_dict


def freed() -> torch.Tensor:
    tensor = torch.arange(8.0)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "use",
    [
        lambda path: checkpoint.save({"t": freed()}, path / "new"),
        lambda path: checkpoint.load({"t": freed()}, path / "store"),
        lambda path: parts.save(path / "new", {"t": freed()}),
        lambda path: parts.load_into(path / "part", {"t": freed()}),
        lambda path: dcp.save({"t": freed()}, path / "new"),
        lambda path: dcp.load({"t": freed()}, path / "dcp"),
        lambda path: copy_state_dict({"t": freed()}, {"t": torch.zeros(8)}),
        lambda path: copy_state_dict({"t": torch.zeros(8)}, {"t": freed()}),
        lambda path: gather_state_dict({"t": freed()}),
    ],
)
def test_freed_memory_is_refused_by_name(use, tmp_path):
    checkpoint.save({"t": torch.ones(8)}, tmp_path / "store")
    parts.save(tmp_path / "part", {"t": torch.ones(8)})
    dcp.save({"t": torch.ones(8)}, tmp_path / "dcp")
    with pytest.raises(
        UsageError, match=r"\['?t'?\].*expected a tensor with memory; got one whose memory was freed"
    ):
        use(tmp_path)
    assert not (tmp_path / "new").exists()


def save_parameters_of_before(path):
    model = uneven()
    fully_shard(model)
    model.unshard()
    whole = dict(model.named_parameters())
    model.reshard()
    with pytest.raises(UsageError, match="whose memory was freed. Take the state dict of the sharded model"):
        checkpoint.save(whole, path)


def test_parameters_that_were_whole_once_are_refused(tmp_path):
    launch(save_parameters_of_before, 2, tmp_path, timeout=60)


def test_a_save_does_not_go_into_another(tmp_path):
    save_id = checkpoint.save({"t": torch.ones(3)}, tmp_path)
    for path in (tmp_path / save_id, tmp_path / save_id / "x"):
        with pytest.raises(UsageError, match="got one save, 000001-"):
            checkpoint.save({"t": torch.zeros(3)}, path, overwrite=True)
    assert checkpoint.load({"t": torch.zeros(3)}, tmp_path)["t"].all()
