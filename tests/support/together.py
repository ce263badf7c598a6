"""Checks that share one launch of ranks, because a launch takes seconds, and most checks take far less.

    two = Together(2)

    @two.finds("rank 0", "rank 1")  # what each rank returns; one value counts for all ranks
    def a_rank_knows_its_number() -> str:
        return f"rank {dist.get_rank()}"

    @two  # raises nothing
    def ranks_meet() -> None:
        dist.barrier()

    test_on_two_ranks = two.test()

If checks need something that only the test has, such as a directory, the test passes it on:

    @pytest.mark.parametrize("check", two.checks)
    def test_on_ranks(check: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        two.assert_holds(check, tmp_path_factory.getbasetemp())

The checks run one after the other in the same processes. So a check that leaves the ranks at different places makes the next one fail,
too. `oracles.Promises` is built on this: its checks compare trainings, and each number of ranks has its `Together`.
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

Check = Callable[..., Any]


class Together:
    """Checks that run on `world_size` ranks, by name, with their expected results.

    Args:
        prepare: called on the ranks before each check, with its name and the arguments of `assert_holds`; returns the arguments of
            the check. None: the check gets the arguments of `assert_holds`.
        environ: environment variables of the ranks.
    """

    def __init__(
        self,
        world_size: int,
        prepare: Callable[..., tuple[Any, ...]] | None = None,
        timeout: float = 200,
        **environ: str,
    ) -> None:
        self.world_size, self.prepare, self.timeout, self.environ = world_size, prepare, timeout, environ
        self.checks: dict[str, Check] = {}
        self.expected: dict[str, list[Any]] = {}
        self.results = functools.cache(self._run)

    def __call__(self, check: Check) -> Check:
        """Register the decorated function as a check that returns None."""
        return self.finds(None)(check)

    def finds(self, *expected: Any) -> Callable[[Check], Check]:
        """Register the decorated function as a check. Each rank must return its value of `expected`; one value counts for all ranks."""

        def remember(check: Check) -> Check:
            self.add(check.__name__, check, *expected)
            return check

        return remember

    def add(self, name: str, check: Check, *expected: Any) -> None:
        self.checks[name] = check
        self.expected[name] = [*expected] * self.world_size if len(expected) == 1 else [*expected]

    def assert_holds(self, check: str, *args: Any) -> None:
        """Assert that each rank found what is expected. All checks run once, in one launch, with the same arguments."""
        found = [of_rank[check] for of_rank in self.results(*args)]
        assert found == self.expected[check], "\n".join(map(str, found))

    def test(self) -> Callable[..., None]:
        """Make a test that is parametrized over all checks, in order. An exception fails only the check that raised it."""

        @pytest.mark.parametrize("check", self.checks)
        def test_it(check: str) -> None:
            self.assert_holds(check)

        return test_it

    def _run(self, *args: Any) -> list[dict[str, Any]]:
        """Run all checks. Return for each rank: check → its result. If the launch fails, its message is every check's result."""
        checks = {
            name: functools.partial(prepared, self.prepare, name, check, args)
            for name, check in self.checks.items()
        }
        try:
            with mock.patch.dict(os.environ, self.environ):
                return launch(run_all, self.world_size, checks, timeout=self.timeout)
        except RankError as error:
            return [dict.fromkeys(checks, str(error))]


def prepared(
    prepare: Callable[..., tuple[Any, ...]] | None, name: str, check: Check, args: tuple[Any, ...]
) -> Any:
    """Run a check on a rank."""
    return check(*(prepare(name, *args) if prepare else args))


def run_all(checks: dict[str, Check]) -> dict[str, Any]:
    """Run checks on a rank, one after the other. If a check raises, its result is the traceback."""
    found = {}
    for name, check in checks.items():
        try:
            found[name] = check()
        except BaseException:  # a failed `pytest.raises` raises no `Exception`
            found[name] = traceback.format_exc()
    return found
