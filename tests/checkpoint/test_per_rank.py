"""Values that belong to single ranks, and work that a single rank does while the others do something else."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from faults import exactly
from rank_checks import raised
from together import Together
from samples import line
from torch.distributed.tensor import Shard, distribute_tensor

from hwfsdp import UsageError, checkpoint
from hwfsdp.checkpoint import PerRank, dcp, parts
from hwfsdp.checkpoint.convert import convert
from hwfsdp.errors import UnsupportedError

on_ranks = Together(2)


def states_of_generators(seed: int) -> dict[str, Any]:
    """Return the state of the generators that a program has, and values whose number and keys differ between ranks."""
    torch.manual_seed(seed)
    return {
        "torch": torch.get_rng_state(),
        "python": random.Random(seed).getstate(),
        "seen": list(range(seed)),
        "half" if seed else "whole": torch.full((seed + 1,), seed),
    }


def state_of(seed: int) -> dict[str, Any]:
    weight = torch.arange(12.0).view(4, 3)
    cut = distribute_tensor(weight, line(), [Shard(0)], src_data_rank=None)
    return {"weight": cut, "rng": PerRank(states_of_generators(seed)), "step": 3}


@on_ranks
def every_rank_gets_its_own_value_back(path: Path) -> None:
    mine, rank = state_of(dist.get_rank()), dist.get_rank()
    checkpoint.save(mine, path / "c")
    checkpoint.async_save(mine, path / "async").wait()
    dcp.save(mine, path / "dcp")
    for load, name in ((checkpoint.load, "c"), (checkpoint.load, "async"), (dcp.load, "dcp")):
        target = state_of(rank)
        held = target["rng"].value["torch"]
        for tensor in (held, target["weight"].to_local()):
            tensor.zero_()
        target["rng"].value["seen"][:] = [-1] * rank
        load(target, path / name)
        assert target["rng"].value["torch"] is held
        assert exactly(target) == exactly(mine)


@on_ranks
def what_differs_is_refused_and_the_advice_is_right(path: Path) -> None:
    rank = dist.get_rank()
    value = torch.full((4,), rank)
    other = PerRank(value)
    other[1 - rank] = other.pop(rank)
    for state, advice in (
        ({"rng": value}, "hwfsdp.checkpoint.PerRank"),
        ({f"rng {rank}": value}, "hwfsdp.checkpoint.PerRank"),
        ({"w": PerRank(state_of(0)["weight"])}, "Take it out of the PerRank"),
        ({"rng": other}, "PerRank(value, group)"),
    ):
        assert advice in raised(lambda: checkpoint.save(state, path / "refused"))
    said = raised(lambda: parts.save(path / "refused", {"w": value}, others={"rng": PerRank(value)}))
    assert "['others']['rng']" in said and "dcp.save" in said
    assert not (path / "refused").exists()
    checkpoint.save({"rng": PerRank(value)}, path / "follows the advice")


@on_ranks
def one_rank_converts_and_the_others_do_something_else(path: Path) -> None:
    if dist.get_rank() == 1:
        torch.save({}, path / "unrelated.pt")
        convert(path / "c", path / "alone.safetensors", to="safetensors", key=("rng", 1))
        for to in ("store", "part", "dcp"):
            convert(path / "c", path / f"alone {to}", to=to)
            convert(path / f"alone {to}", path / f"back from {to}", to="store")
            checkpoint.verify(path / f"back from {to}")
    dist.barrier()
    target = state_of(dist.get_rank())
    target["weight"].to_local().zero_()
    checkpoint.load(target, path / "back from store")
    assert torch.equal(target["weight"].full_tensor(), torch.arange(12.0).view(4, 3))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    for name in on_ranks.checks:
        on_ranks.assert_holds(name, path)
    return path


@pytest.mark.parametrize("name", on_ranks.checks)
def test_on_ranks(name: str, saved: Path) -> None:
    on_ranks.assert_holds(name, saved)


def test_another_number_of_ranks_has_no_value_for_each_rank(saved: Path) -> None:
    weight = torch.zeros(4, 3)
    target: dict[str, Any] = {"weight": weight, "rng": PerRank({"seen": "mine"}), "step": 0}
    with pytest.raises(
        UsageError, match=r"state_dict\['rng'\]: expected values of 1 ranks.*of 2 ranks\. Leave"
    ):
        checkpoint.load(target, saved / "c")
    assert not weight.any()
    with pytest.warns(UserWarning, match=r"1 missing in the checkpoint: state_dict\['rng'\]\[0\]\['seen'\];"):
        checkpoint.load(target, saved / "c", strict=False)
    assert torch.equal(weight, torch.arange(12.0).view(4, 3)) and target["rng"].value == {"seen": "mine"}
    everyone = {"rng": {rank: states_of_generators(rank) for rank in (0, 1)}}
    everyone["rng"][1]["torch"].zero_()
    with pytest.warns(UserWarning, match="2 only in the checkpoint: state_dict..weight.., state_dict..step"):
        checkpoint.load(everyone, saved / "c", strict=False)
    assert torch.equal(everyone["rng"][1]["torch"], states_of_generators(1)["torch"])


def test_without_a_process_group_there_is_one_rank(tmp_path: Path) -> None:
    checkpoint.save({"rng": PerRank(torch.arange(3)), "none": PerRank(None)}, tmp_path / "c")
    target = {"rng": PerRank(torch.zeros(3, dtype=torch.int64)), "none": PerRank(5)}
    checkpoint.load(target, tmp_path / "c")
    assert target["rng"].value.tolist() == [0, 1, 2] and target["none"].value is None


def test_the_advice_for_a_value_that_cannot_be_saved_is_right(tmp_path: Path) -> None:
    for value, word, instead in (
        (np.arange(3.0), "torch.from_numpy", torch.from_numpy(np.arange(3.0))),
        (np.float32(2), "item()", 2.0),
        ({2, 1}, "sorted list", [1, 2]),
        (torch.nn.Linear(2, 2), "state_dict()", torch.nn.Linear(2, 2).state_dict()),
    ):
        with pytest.raises((UsageError, UnsupportedError), match=re.escape(word)):
            checkpoint.save({"x": value}, tmp_path / "c", overwrite=True)
        checkpoint.save({"x": instead}, tmp_path / "c", overwrite=True)
