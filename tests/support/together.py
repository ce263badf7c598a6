"""Checks that share one launch of ranks, because a launch takes seconds, and most checks take far less.

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
    """Checks that run on `world_size` ranks, with their expected results. `environ` sets environment variables of the ranks."""

    def __init__(self, world_size: int, timeout: float = 200, **environ: str) -> None:
        self.world_size, self.timeout, self.environ = world_size, timeout, environ
        self.checks: dict[str, Check] = {}
        self.expected: dict[str, list[Any]] = {}

    def finds(self, *expected: Any) -> Callable[[Check], Check]:
        """Register the decorated function as a check. Each rank must return its value of `expected`; one value counts for all ranks."""

        def remember(check: Check) -> Check:
            self.add(check.__name__, check, *expected)
            return check

        return remember

    def add(self, name: str, check: Check, *expected: Any) -> None:
        self.checks[name] = check
        self.expected[name] = [*expected] * (self.world_size if len(expected) == 1 else 1)

    @functools.cached_property
    def results(self) -> list[dict[str, Any]]:
        """Run all checks once. Return for each rank: check → its result."""
        with mock.patch.dict(os.environ, self.environ):
            return run_together(self.checks, self.world_size, self.timeout)

    def assert_finds(self, check: str) -> None:
        found = [of_rank[check] for of_rank in self.results]
        assert found == self.expected[check], "\n".join(map(str, found))

    def test(self) -> Callable[..., None]:
        """Make a test that is parametrized over all checks, in order. An exception fails only the check that raised it."""

        @pytest.mark.parametrize("check", self.checks)
        def test_it(check: str) -> None:
            self.assert_finds(check)

        return test_it


def run_together(checks: dict[str, Check], world_size: int, timeout: float = 200) -> list[dict[str, Any]]:
    """Run checks in one launch. Return for each rank: check → its result. If the launch fails, its message is every check's result."""
    try:
        return launch(run_all, world_size, checks, timeout=timeout)
    except RankError as error:
        return [dict.fromkeys(checks, str(error))]


def run_all(checks: dict[str, Check]) -> dict[str, Any]:
    """Run checks on a rank, one after the other. If a check raises, its result is the traceback."""
    found = {}
    for name, check in checks.items():
        try:
            found[name] = check()
        except BaseException:  # a failed `pytest.raises` raises no `Exception`
            found[name] = traceback.format_exc()
    return found
