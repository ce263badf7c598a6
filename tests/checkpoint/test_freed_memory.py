"""Tensors with freed memory, or without any, are refused by everything that would read or write it."""

from __future__ import annotations

import itertools

import pytest
import torch
from models import uneven

from hwfsdp import UsageError, checkpoint, fully_shard, launch
from hwfsdp.checkpoint import dcp, parts
from hwfsdp.checkpoint.state_dict import copy_state_dict, gather_state_dict, offload_state_dict_to_cpu

LOADS = [  # these loads give memory to tensors on meta
    lambda t, path: checkpoint.load({"t": t}, path / "store"),
    lambda t, path: parts.load_into(path / "part", {"t": t}),
    lambda t, path: dcp.load({"t": t}, path / "dcp"),
]
USES = [
    *LOADS,
    lambda t, path: checkpoint.save({"t": t}, path / "new"),
    lambda t, path: parts.save(path / "new", {"t": t}),
    lambda t, path: dcp.save({"t": t}, path / "new"),
    lambda t, _: copy_state_dict({"t": t}, {"t": torch.zeros(8)}),
    lambda t, _: copy_state_dict({"t": torch.zeros(8)}, {"t": t}),
    lambda t, _: gather_state_dict({"t": t}),
    lambda t, _: offload_state_dict_to_cpu({"t": t}),
]


def test_freed_memory_is_refused_by_name(tmp_path):
    for name, save in (("store", checkpoint.save), ("dcp", dcp.save)):
        save({"t": torch.ones(8)}, tmp_path / name)
    parts.save(tmp_path / "part", {"t": torch.ones(8)})
    freed, meta = torch.arange(8.0), torch.ones(8, device="meta")
    freed.untyped_storage().resize_(0)
    unusable = {freed: "one whose memory was freed", meta: r"one on the meta device, of shape \(8,\)"}
    for use, (tensor, got) in itertools.product(USES, unusable.items()):
        if tensor is not meta or use not in LOADS:
            with pytest.raises(UsageError, match=rf"\['?t'?\].*expected a tensor with .*; got {got}\."):
                use(tensor, tmp_path)
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
