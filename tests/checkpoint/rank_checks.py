"""Run the checks of a file on ranks, one after the other. The ranks start once for each world size.

So a check that leaves the ranks at different places makes the next check fail, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from hwfsdp.errors import FSDPError, UsageError
from together import run_together

Check = Callable[..., None]


def pass_on(_: str, *args: Any) -> tuple[Any, ...]:
    return args


class RankChecks(dict[str, Check]):
    """Checks by name. As a decorator, it adds a function. It keeps the results, so that ranks start only once.

    Args:
        prepare: called on the ranks before each check, with its name and the arguments of `assert_holds`; returns the arguments
            of the check.
    """

    def __init__(self, prepare: Callable[..., tuple[Any, ...]] = pass_on) -> None:
        super().__init__()
        self.prepare = prepare
        self.found: dict[Any, list[dict[str, Any]]] = {}

    def __call__(self, check: Check) -> Check:
        self[check.__name__] = check
        return check

    def assert_holds(self, name: str, world_size: int, *args: Any) -> None:
        """Assert that this check holds on every rank. All checks run together, with the same arguments."""
        if (world_size, args) not in self.found:
            self.found[world_size, args] = self._run(world_size, args)
        complaints = [
            f"rank {rank}:\n{found[name]}"
            for rank, found in enumerate(self.found[world_size, args])
            if found[name]
        ]
        assert not complaints, "\n".join(complaints)

    def _run(self, world_size: int, args: Any) -> list[dict[str, Any]]:
        return run_together({name: functools.partial(self._call, name, *args) for name in self}, world_size)

    def _call(self, name: str, *args: Any) -> None:
        """Run a check on a rank."""
        self[name](*self.prepare(name, *args))


def every_rank_says(value: Any) -> list[Any]:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said


def raised(go: Callable[[], Any], kind: type[FSDPError] | tuple[type[FSDPError], ...] = UsageError) -> str:
    """Return the message of the error that `go` raises. Check that it is one line, and the same on all ranks."""
    with pytest.raises(kind) as info:
        go()
    messages = every_rank_says(str(info.value))
    assert len(set(messages)) == 1 and "\n" not in messages[0], messages
    return str(info.value)


def is_first() -> bool:
    return dist.get_rank() == 0


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1
