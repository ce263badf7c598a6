"""DTensors that were flattened, so that a rank holds stripes of them. The oracle is the whole tensor, and torch's own gather."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from together import Together
from torch import Tensor
from torch.distributed._state_dict_utils import _gather_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as torchs_extent

from hwfsdp import UsageError, layout
from hwfsdp.checkpoint import StateDictStager, dcp, load, save
from hwfsdp.checkpoint.distribute import broadcast_state_dict, distribute_state_dict
from hwfsdp.checkpoint.meta import init_state_dict
from hwfsdp.checkpoint.state_dict import gather_state_dict

on_ranks = Together(4)
CASES: list[tuple[tuple[int, ...], tuple[int, ...], list[Any]]] = [
    ((4,), (2, 8), [Shard(1)]),
    ((4,), (3, 5, 2), [Shard(1)]),  # uneven: the last rank has nothing
    ((2, 2), (2, 8), [Shard(1), Shard(1)]),
    ((2, 2), (2, 8), [Replicate(), Shard(1)]),
    ((2, 2), (2, 3, 8), [Shard(2), Shard(1)]),
]


@functools.cache
def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes)


def cut(case: int) -> tuple[DTensor, Tensor]:
    """Return a DTensor whose first two dims were flattened, and the whole tensor."""
    sizes, shape, placements = CASES[case]
    whole = torch.arange(torch.Size(shape).numel() + 0.0).view(shape)
    mesh = mesh_of(sizes)
    striped = distribute_tensor(whole, mesh, placements, src_data_rank=None).flatten(0, 1)
    return striped, whole.flatten(0, 1)


def like(striped: DTensor, device: str = "cpu") -> DTensor:
    local = torch.zeros_like(striped.to_local(), device=device)
    shape, stride = striped.shape, striped.stride()
    return DTensor.from_local(local, striped.device_mesh, striped.placements, shape=shape, stride=stride)


@on_ranks
def stripes_are_gathered_cut_and_staged_as_torch_does(_: Path) -> None:
    for case in range(len(CASES)):
        striped, whole = cut(case)
        assert torch.equal(_gather_state_dict({"w": striped})["w"], whole)
        assert torch.equal(gather_state_dict({"w": striped})["w"], whole)
        args = striped.shape, striped.device_mesh, striped.placements
        assert layout.compute_local_shape_and_global_offset(*args) == torchs_extent(*args)
        for fill in (distribute_state_dict, broadcast_state_dict):
            for device in ("cpu", "meta"):
                target = {"w": like(striped, device)}
                fill({"w": whole}, target, torch.device("cpu"))
                assert torch.equal(target["w"].to_local(), striped.to_local())
        assert torch.equal(StateDictStager().stage({"w": striped})["w"].to_local(), striped.to_local())
        made = init_state_dict({"w": like(striped, "meta")})["w"]
        assert made.to_local().shape == striped.to_local().shape and not made.is_meta


@on_ranks
def stripes_are_saved_and_loaded_from_and_into_any_sharding(path: Path) -> None:
    for case in (1, 2, 3):
        striped, whole = cut(case)
        rows = distribute_tensor(whole, striped.device_mesh, [Shard(0)] * striped.device_mesh.ndim)
        for write, read, name in ((save, load, "store"), (dcp.save, dcp.load, "dcp")):
            for saved, targets in ((rows, [like(striped, "meta")]), (striped, [like(striped), like(rows)])):
                write({"w": saved, "plain": whole}, path / name, overwrite=True)
                for target in targets:
                    state = {"w": target, "plain": torch.zeros_like(whole)}
                    read(state, path / name)
                    assert torch.equal(gather_state_dict(state)["w"], whole)
        plain = {"w": torch.zeros_like(whole)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch_dcp.load(plain, checkpoint_id=path / "dcp")
        assert torch.equal(plain["w"], whole)


@on_ranks
def replicas_of_stripes_that_differ_are_not_saved(path: Path) -> None:
    striped, _ = cut(3)
    if dist.get_rank() == 0:
        striped.to_local().detach()[0] += 1
    with pytest.raises(
        UsageError, match=r"expected the same values \[.*\] on ranks 0 and 2, as both have them"
    ):
        save({"w": striped}, path / "differ")
    assert not (path / "differ").exists()


def test_stripes(tmp_path: Path) -> None:
    for name in on_ranks.checks:
        on_ranks.assert_holds(name, tmp_path)
