"""Our homework by itself: against torch's FSDP2, bit for bit, and against PyTorch without sharding."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hwfsdp import launch
from hwfsdp.learn.capstone import cases
from hwfsdp.learn.capstone.homework import solution_path
from hwfsdp.learn.capstone.runs import trained
from hwfsdp.learn.manifest import find_course
from suites import long

PATH = solution_path(find_course(Path(__file__)))


def homework() -> Any:
    module = types.ModuleType("hw_fsdp")
    exec(compile(PATH.read_text(), str(PATH), "exec"), module.__dict__)
    return module


def both_trained(seed: int) -> dict[str, Any]:
    """On a rank: every case with our file and with FSDP2."""
    warnings.simplefilter("ignore")
    shards: dict[str, Callable[[], cases.Shard]] = {
        "ours": lambda: cases.shard_with(homework()),
        "theirs": cases.torchs_shard,
    }
    return {
        who: {case.name: trained(case, seed, shard()) for case in cases.CASES}
        for who, shard in shards.items()
    }


@pytest.fixture(scope="module", params=[long(2), long(3)])
def compared(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch(both_trained, request.param, 7)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_losses_and_gradients_of_all_steps_are_those_of_fsdp2(
    compared: list[dict[str, Any]], case: cases.Case
) -> None:
    for of_rank in compared:
        ours, theirs = of_rank["ours"][case.name], of_rank["theirs"][case.name]
        assert _all(torch.equal, ours["losses"], theirs["losses"])
        assert ours["grads"][0].keys() == theirs["grads"][0].keys()
        for a, b in zip(ours["grads"], theirs["grads"], strict=True):
            assert all(_same(a[name], b[name]) for name in a)


def _all(same: Callable[[Tensor, Tensor], bool], a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return all(same(x, y) for of_a, of_b in zip(a, b, strict=True) for x, y in zip(of_a, of_b, strict=True))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


# --- Against PyTorch without sharding ----------------------------------------------------------------------


class Inside(nn.Module):
    """A part of it is recomputed in backward: the part runs without a graph first (reentrant), and has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.part, self.last = nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        part: Tensor = checkpoint(self.part, self.norm(x), use_reentrant=True)
        return x + self.last(part)  # type: ignore[no-any-return]


class Twice(nn.Module):
    """A layer that runs twice, some that are recomputed in backward, one that is skipped at will; a dict comes out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.again = nn.Linear(5, 5), nn.Linear(5, 5)
        self.inside, self.reentrant = Inside(), nn.Linear(5, 5)
        self.maybe, self.table = nn.Linear(5, 5), nn.Embedding(7, 5)
        self.register_buffer("shift", torch.ones(5))

    def forward(self, tokens: Tensor, *, use_maybe: bool) -> dict[str, Any]:
        x = self.shared(torch.tanh(self.shared(self.table(tokens)))) + self.shift
        x = checkpoint(self.again, x, use_reentrant=False)
        x = checkpoint(self.reentrant, self.inside(x), use_reentrant=True)
        return {"out": self.maybe(x) if use_maybe else x, "kept": (x.detach(), 3)}


def train_twice(shard: bool) -> list[Tensor]:
    """On a rank: gradients after three steps; unsharded, those of the batches of all ranks."""
    model: Any = Twice()
    world_size = dist.get_world_size()
    if shard:
        policy = types.SimpleNamespace(
            param_dtype=None, reduce_dtype=None, output_dtype=None, cast_forward_inputs=True
        )
        mesh, wrap = init_device_mesh("cpu", (world_size,)), cases.shard_with(homework())
        for name, module in (*model.named_children(), ("", model)):
            wrap(module, name, mesh, policy, True)
    found = []
    for step in range(3):
        model.zero_grad()
        with torch.no_grad():
            model(torch.zeros(2, dtype=torch.int64), use_maybe=True)  # an evaluation in between
        for rank in [dist.get_rank()] if shard else range(world_size):
            tokens = torch.arange(4) + rank
            loss = model(tokens, use_maybe=step != 1)["out"].square().sum()
            (loss if shard else loss / world_size).backward()
        for param in model.parameters():
            grad = param.grad
            found.append(torch.zeros(0) if grad is None else grad.full_tensor() if shard else grad.clone())
            if grad is not None:
                param.data.sub_(0.05 * grad)  # a step, on shards and on wholes alike
    assert not shard or all(isinstance(param, DTensor) for param in model.parameters())
    return found


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_modules_that_run_twice_are_recomputed_or_skipped_train_as_without_sharding(world_size: int) -> None:
    sharded, whole = launch(train_twice, world_size, True), launch(train_twice, world_size, False)
    for of_rank in sharded:
        for a, b in zip(of_rank, whole[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def misused() -> dict[str, Any]:
    """On a rank: what is said to who shards, or copies, what cannot be; and what a sharded module is."""
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


def test_what_cannot_be_sharded_is_refused_by_name_and_what_is_sharded_shows() -> None:
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
