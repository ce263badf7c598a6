"""Ranks diverge by calling or dying. The error says where and how. For ranks that hang, see launcher/test_launch.py."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import suites
import torch
import torch.distributed as dist
from torch import nn

from hwfsdp import RankError, UsageError, fully_shard, launch


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


def swap_two_groups() -> None:
    model = shard()
    step(model)
    blocks = model.blocks
    for place in (1, 0) if is_one() else (0, 1):
        blocks[place](torch.ones(2, 4 + place))


def differ_in_size() -> None:
    step(shard(wide=10 if is_one() else 6))


def die() -> None:
    model = shard()
    step(model)
    if is_one():
        os.kill(os.getpid(), signal.SIGKILL)
    step(model)


def broadcast_from_another() -> None:
    dist.broadcast(torch.ones(4), 2 if is_one() else 0)


SWAPPED = r"rank 1 called all_gather of 'blocks.1' where rank 0 called all_gather of 'blocks.0': "
SIZES = r"rank 1 called all_gather of '\S+' \([\d,]+ bytes"
DEAD = (
    r"ranks? .* waits? in collective \d+ .*, all_gather of 'Net'; rank 1 has not called it; "
    r"rank 1 is gone: death by signal SIGKILL\."
)
ANOTHER_ROOT = (
    r"rank 1 called broadcast\(src=2\) \(yours\) where ranks 0 and 2 called broadcast\(src=0\) \(yours\): "
    r"collective 1 of ranks 0–2\."
)
CHECKED_BY_TORCH = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "HWFSDP_SHARED_MEMORY": "0"}
CASES = [  # the program, the number of ranks, what the sentence above the table says, the environment
    (broadcast_from_another, 3, ANOTHER_ROOT, {}),
    (swap_two_groups, 2, SWAPPED, {}),
    (die, 3, DEAD, {}),
    suites.long(differ_in_size, 2, SIZES, CHECKED_BY_TORCH),
]


@pytest.mark.parametrize(("run", "world_size", "says", "environ"), CASES)
def test_an_error_of_ranks_that_part_begins_with_one_line_and_says_where_and_how(
    run, world_size, says, environ, monkeypatch
):
    for name, value in {"TORCH_DISTRIBUTED_DEBUG": "OFF", "PYTHONWARNINGS": "ignore", **environ}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError) as caught:
        launch(run, world_size, timeout=60)
    sentence, blank, *rest = str(caught.value).splitlines()
    headline = caught.value.headline
    assert blank == "" and rest.count(headline) == 1
    assert headline.startswith("rank ") and "expected" not in headline
    assert re.match(says, sentence), sentence
    marked = [line for line in caught.value.table.splitlines() if line.startswith(">")]
    assert len(marked) >= (2 if " where " in sentence else 1)
    assert caught.value.table.startswith(sentence + "\n\n   collectives of ")


def fail_everywhere() -> None:
    step(shard())
    raise ValueError("everywhere")


def refuse() -> None:
    raise UsageError("a call", expected="a", got="b", remedy="c.")


@pytest.mark.parametrize("run", [fail_everywhere, refuse])
def test_an_error_of_all_ranks_or_before_any_collective_has_no_table(run: Callable[[], None]) -> None:
    with pytest.raises(RankError) as caught:
        launch(run, 2, timeout=60)
    assert caught.value.table == ""
