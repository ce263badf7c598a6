"""Ranks diverge by calling, hanging, dying or raising. The error says where and how."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hwfsdp import RankError, UsageError, fully_shard, launch, record
from suites import fast_are


class Net(nn.Module):
    """A model whose neighboring blocks differ in size, so that none can be taken for another."""

    def __init__(self, wide: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, wide)])
        self.head = nn.Linear(wide, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def shard(mesh: Any = None, **sizes: int) -> Net:
    model = Net(**sizes)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model: nn.Module) -> None:
    model(torch.ones(3, 4)).sum().backward()


def is_one() -> bool:
    return dist.get_rank() == 1


class Case(NamedTuple):
    """The program of the ranks, its limit in seconds, and the beginning of the sentence above the table."""

    run: Callable[[], None]
    world_size: int
    says: str
    timeout: float = 60
    debug: str = "OFF"
    shared_memory: str = "1"


CASES: dict[str, Case] = {}
WAITED = "all_gather of 'Net'"
LATE = 4.0  # seconds


def parts(name: str, world_size: int, says: str, **options: Any) -> Callable[..., Any]:
    def remember(run: Callable[[], None]) -> Callable[[], None]:
        CASES[name] = Case(run, world_size, says, **options)
        return run

    return remember


SWAPPED = r"rank 1 called all_gather of 'blocks.1' where rank 0 called all_gather of 'blocks.0': "


@parts("two groups swapped", 2, SWAPPED)
def swap_two_groups() -> None:
    model = shard()
    step(model)
    blocks = model.blocks
    for place in (1, 0) if is_one() else (0, 1):
        blocks[place](torch.ones(2, 4 + place))


SKIPPED = r"rank 1 called \w+ of 'blocks\.2' where ranks 0 and 2 called all_gather of 'blocks\.0': "


@parts("a forward skipped", 3, SKIPPED)
def skip_a_forward() -> None:
    model = shard()
    step(model)
    if not is_one():
        model(torch.ones(3, 4))
    step(model)


SIZES = r"rank 1 called all_gather of '\S+' \([\d,]+ bytes"


@parts("sizes differ", 3, SIZES + r" .* where ranks 0 and 2 called .* \([\d,]+ b")
@parts("sizes differ, checked by torch", 2, SIZES, debug="DETAIL", shared_memory="0")
def differ_in_size() -> None:
    step(shard(wide=10 if is_one() else 6))


HANGING = rf"ranks 0 and 2 wait in collective \d+ of ranks 0–2, {WAITED}; rank 1 has not called it; "


@parts("one hangs", 3, HANGING + r"rank 1 is in \S+:\d+, in hang\.", timeout=LATE)
def hang() -> None:
    model = shard()
    step(model)
    if is_one():
        threading.Event().wait()  # hang
    step(model)


GONE = rf"ranks? .* waits? in collective \d+ .*, {WAITED}; rank 1 has not called it; rank 1 "


@parts("one is killed", 3, GONE + r"is gone: death by signal SIGKILL\.")
def die() -> None:
    model = shard()
    step(model)
    if is_one():
        os.kill(os.getpid(), signal.SIGKILL)
    step(model)


@parts("one raises", 3, GONE + r"raised KeyError: 'lost' in \S+:\d+, in fail\.")
def fail() -> None:
    model = shard()
    step(model)
    if is_one():
        raise KeyError("lost")
    step(model)


OF_THE_USER = r"rank 1 called broadcast\(src=1\) \(yours\) where rank 0 called all_reduce \(yours\): collective \d+ of ranks"


@parts("another collective of the user", 2, OF_THE_USER + r" 0 and 1\.", debug="DETAIL")
def call_another_of_the_users() -> None:
    with record():
        step(shard())
        if is_one():
            dist.broadcast(torch.ones(4), 1)
        else:
            dist.all_reduce(torch.ones(4))
        dist.barrier()


ANOTHER_ROOT = r"rank 1 called broadcast\(src=2\) \(yours\) where ranks 0 and 2 called broadcast\(src=0\) \(yours\): collective"


@parts("another root", 3, ANOTHER_ROOT + r" 1 of ranks 0–2\.")
def broadcast_from_another() -> None:
    dist.broadcast(torch.ones(4), 2 if is_one() else 0)


def fail_everywhere() -> None:
    step(shard())
    raise ValueError("everywhere")


FAST = ("another root", "two groups swapped", "one hangs", "one is killed", "one raises")


@pytest.mark.parametrize("name", fast_are(FAST, CASES))
def test_an_error_of_ranks_that_part_begins_with_one_line_and_says_where_and_how(name, monkeypatch):
    case = CASES[name]
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", case.debug)
    monkeypatch.setenv("HWFSDP_SHARED_MEMORY", case.shared_memory)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    with pytest.raises(RankError) as caught:
        launch(case.run, case.world_size, timeout=case.timeout)
    sentence, blank, *rest = str(caught.value).splitlines()
    headline = caught.value.headline
    assert blank == "" and rest.count(headline) == 1
    assert headline.startswith("rank ") and "expected" not in headline
    assert re.match(case.says, sentence), sentence
    marked = [line for line in caught.value.table.splitlines() if line.startswith(">")]
    assert len(marked) >= (2 if " where " in sentence else 1)
    assert caught.value.table.startswith(sentence + "\n\n   collectives of ")


def test_an_error_that_all_ranks_have_in_common_has_no_table() -> None:
    with pytest.raises(RankError, match="ValueError: everywhere") as caught:
        launch(fail_everywhere, 2, timeout=60)
    assert caught.value.table == ""


def test_an_error_before_any_collective_has_no_table() -> None:
    def refuse() -> None:
        raise UsageError("a call", expected="a", got="b", remedy="c.")

    with pytest.raises(RankError) as caught:
        launch(refuse, 2, timeout=60)
    assert caught.value.table == ""
