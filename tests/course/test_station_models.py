"""The stations' models train so calmly that other rounding of right answers stays below the laws' limits. Memory is counted.

Their oracle means the same with every torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp

from hwfsdp.course.stations import facts, laws, scenarios, sharders
from hwfsdp.course.stations.course import BROKEN, GRADUAL, NAIVE
from hwfsdp.course.stations.scenarios import Built, Scenario

SEEDS = (0, 18, 263)  # with these, some models once doubled every rounding in every layer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because in such small models threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("scenario", [each for group in (NAIVE, BROKEN, GRADUAL) for each in group.scenarios])
def test_weights_that_differ_by_a_rounding_give_the_same_gradients(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, train = scenarios.build, laws.unsharded.__wrapped__

    def rounded(scenario: Scenario, seed: int) -> Built:
        built, draw = build(scenario, seed), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in built.model.parameters():
                param.mul_(1 + 2**-23 * (torch.rand(param.shape, generator=draw) - 0.5))
        return built

    for seed in SEEDS:
        expected = train(scenario, seed, 3)["grads"][-1]
        with monkeypatch.context() as patched:
            patched.setattr(scenarios, "build", rounded)
            found = train(scenario, seed, 3)["grads"][-1]
        for name, grad in expected.items():
            if grad is not None:
                most = laws.TIGHT * float(grad.abs().max()) + 1e-7
                assert float((found[name] - grad).abs().max()) < most, (name, seed)


def test_each_moment_waits_for_buffers_that_are_let_go_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_leaks", False)
    monkeypatch.setattr(facts.time, "sleep", lambda seconds: None)
    few, unit = 84, 10_000
    for kept in [0, few] * 100:  # moments at which nothing is in flight
        nothing: Any = Alive([kept])
        facts._wait_for_threads(nothing, 0, unit)
    for _ in range(10):  # of a machine with much else to do
        late: Any = Alive([unit + few] * 500 + [few])
        facts._wait_for_threads(late, 0, unit)
        assert late.alive() == few


def test_after_a_moment_that_leaks_no_time_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(facts, "_leaks", False)
    monkeypatch.setattr(facts.time, "sleep", naps.append)
    for _ in range(5):
        leaking: Any = Alive([10_000])
        facts._wait_for_threads(leaking, 0, 10_000)
    assert len(naps) == facts.LOOKS


class Alive:
    """A witness that sees these numbers, one per look, and the last one forever."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def alive(self) -> int:
        return self.seen.pop(0) if len(self.seen) > 1 else self.seen[0]


def test_fsdp2_as_an_oracle_reduces_in_the_dtype_of_the_backward_with_every_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[fsdp.MixedPrecisionPolicy] = []
    monkeypatch.setattr(sharders, "mesh_of_all", lambda: None)
    monkeypatch.setattr(fsdp, "fully_shard", lambda module, *, mesh, mp_policy: given.append(mp_policy))
    shard = sharders.torchs()
    shard(nn.Linear(1, 1), "", mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16))
    shard(nn.Linear(1, 1), "", mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert [policy.reduce_dtype for policy in given] == [torch.bfloat16, torch.float32]
