"""Our homework file alone: against torch's FSDP2, bit for bit, and against unsharded PyTorch."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hwfsdp import launch
from hwfsdp.course.capstone import cases
from hwfsdp.course.manifest import find_course, read_homework
from hwfsdp.course.stations import laws
from hwfsdp.course.stations.course import BREAKING, CHANGING
from hwfsdp.course.stations.facts import trained
from hwfsdp.course.stations.sharders import homeworks_shard, torchs
from hwfsdp.course.stations.scenarios import Scenario
from suites import long

PATH = read_homework(find_course(Path(__file__))).solution_path


def homework() -> Any:
    module = types.ModuleType("hw_fsdp")
    exec(compile(PATH.read_text(), str(PATH), "exec"), module.__dict__)
    return module


SCENARIOS = (*cases.TASKS.scenarios, *cases.BONUSES.scenarios)


def both_trained(seed: int) -> dict[str, Any]:
    """On a rank: train every scenario with our file and with FSDP2."""
    warnings.simplefilter("ignore")
    shards = {"ours": lambda: homeworks_shard(homework()), "theirs": torchs}
    return {
        who: {each.name: trained(each, seed, shard()) for each in SCENARIOS} for who, shard in shards.items()
    }


@pytest.fixture(scope="module", params=[long(2), long(3)])
def compared(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch(both_trained, request.param, 7)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_losses_and_gradients_of_all_steps_equal_fsdp2(
    compared: list[dict[str, Any]], scenario: Scenario
) -> None:
    for of_rank in compared:
        ours, theirs = of_rank["ours"][scenario.name], of_rank["theirs"][scenario.name]
        assert _all(torch.equal, ours["losses"], theirs["losses"])
        assert ours["grads"][0].keys() == theirs["grads"][0].keys()
        for a, b in zip(ours["grads"], theirs["grads"], strict=True):
            assert all(_same(a[name], b[name]) for name in a)


def _all(same: Callable[[Tensor, Tensor], bool], a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return all(same(x, y) for of_a, of_b in zip(a, b, strict=True) for x, y in zip(of_a, of_b, strict=True))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


# --- Against PyTorch without sharding ----------------------------------------------------------------------

ASKED = (*BREAKING, CHANGING)  # more than the homework asks for: its models run no layer twice, and skip none


def broken_trained(seed: int) -> dict[str, Any]:
    """On a rank: train models that break a naive FSDP, with our file."""
    return {each.name: trained(each, seed, homeworks_shard(homework())) for each in ASKED}


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_modules_that_run_twice_are_recomputed_or_skipped_train_as_without_sharding(world_size: int) -> None:
    found = launch(broken_trained, world_size, 7)
    for scenario in ASKED:
        laws.same_numbers([of_rank[scenario.name] for of_rank in found], scenario, 7)


def misused() -> dict[str, Any]:
    """On a rank: return the errors for modules that cannot be sharded or copied, and properties of a sharded module."""
    hw, messages = homework(), []
    mesh, context = init_device_mesh("cpu", (1,)), hw.FSDPCommContext("cpu")
    options = {"module_fqn": "it", "comm_ctx": context, "mesh": mesh}
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    sharded = hw.fully_shard(nn.Linear(2, 2), **options)
    for module in (scalar, mixed, sharded, nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict()):
        with pytest.raises(ValueError) as refused:
            hw.fully_shard(module, **options)
        messages.append(str(refused.value))
    with pytest.raises(TypeError) as refused_copy:
        copy.deepcopy(nn.Sequential(sharded))
    stack = hw.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        stack(torch.ones(1, 2)).sum().backward()
    return {
        "refused": messages,
        "copy": str(refused_copy.value),
        "slice": type(stack[1:]).__name__,
        "classes": type(sharded) is type(hw.fully_shard(nn.Linear(3, 3), **options)),
        "shown": repr(sharded),
        "profiled": {e.name for e in profile.events() or () if e.name.startswith("FSDP::")},
    }


def test_a_module_that_cannot_be_sharded_is_refused_by_name() -> None:
    found = launch(misused, 1)[0]
    scalar, mixed, twice, listed, named = found["refused"]
    assert "scale" in scalar and "scalar" in scalar
    assert "bfloat16" in mixed and "it" in mixed
    assert "it is sharded already" in twice
    assert "nn.ModuleList, which has no forward" in listed and "nn.ModuleDict, which has no forward" in named
    assert "deepcopy of FSDPLinear" in found["copy"]
    assert (found["slice"], found["classes"]) == ("Sequential", True)
    assert found["shown"].startswith("FSDPLinear(")
    moments = ("pre_forward", "post_forward", "pre_backward", "post_backward_reshard", "post_backward_reduce")
    assert found["profiled"] == {f"FSDP::{moment} (it)" for moment in (*moments, "all_gather")}


def test_it_can_be_read_in_one_sitting() -> None:
    assert len(PATH.read_text().splitlines()) <= 500
