"""Checks that share one launch of ranks: a launch takes seconds, most checks take none.

two = Together(2)

@two.finds("rank 0", "rank 1")
def a_rank_knows_its_number() -> str:
    return f"rank {dist.get_rank()}"

test_on_two_ranks = two.test()
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from hwfsdp import RankError, launch

Check = Callable[[], Any]


class Together:
    """Checks for so many ranks, and what each is expected to find; `environ`: variables that the ranks see."""

    def __init__(self, world_size: int, timeout: float = 200, **environ: str) -> None:
        self.world_size, self.timeout, self.environ = world_size, timeout, environ
        self.checks: dict[str, Check] = {}
        self.expected: dict[str, list[Any]] = {}

    def finds(self, *expected: Any) -> Callable[[Check], Check]:
        """Remembers a function that runs on each rank and returns this there; one value stands for all ranks."""

        def remember(check: Check) -> Check:
            self.add(check.__name__, check, *expected)
            return check

        return remember

    def add(self, name: str, check: Check, *expected: Any) -> None:
        self.checks[name] = check
        self.expected[name] = [*expected] * (self.world_size if len(expected) == 1 else 1)

    @functools.cached_property
    def results(self) -> list[dict[str, Any]]:
        """What was found, by name, on each rank."""
        with mock.patch.dict(os.environ, self.environ):
            return run_together(self.checks, self.world_size, self.timeout)

    def assert_finds(self, check: str) -> None:
        found = [of_rank[check] for of_rank in self.results]
        assert found == self.expected[check], "\n".join(map(str, found))

    def test(self) -> Callable[..., None]:
        """A test for each of the checks, in order; an exception fails the check that raised it."""

        @pytest.mark.parametrize("check", self.checks)
        def test_it(check: str) -> None:
            self.assert_finds(check)

        return test_it


def run_together(checks: dict[str, Check], world_size: int, timeout: float = 200) -> list[dict[str, Any]]:
    """What each check returned, by name, on each rank. If the launch itself failed, every check found its message."""
    try:
        return launch(run_all, world_size, checks, timeout=timeout)
    except RankError as error:
        return [dict.fromkeys(checks, str(error))]


def run_all(checks: dict[str, Check]) -> dict[str, Any]:
    """Run checks on a rank, one after the other. The traceback of an exception stands for what its check returns."""
    found = {}
    for name, check in checks.items():
        try:
            found[name] = check()
        except BaseException:  # also what `pytest.raises` raises
            found[name] = traceback.format_exc()
    return found
