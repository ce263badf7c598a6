"""Which suite a case belongs to. `make test` leaves out what is marked `long`; `make test-all` runs everything.

A test is marked by `@pytest.mark.long`, a file by `pytestmark = pytest.mark.long`, a case by what follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long(*values: Any, id: str | None = None) -> Any:
    """A case of `pytest.mark.parametrize` that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.long, id=id)


def fast_are(fast: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, all of them long except for some.

    Raises:
        ValueError: one of the fast ones is not among the cases.
    """
    cases, fast = list(cases), list(fast)
    if unknown := [case for case in fast if case not in cases]:
        raise ValueError(f"not among the cases: {unknown}")
    return [case if case in fast else long(*(case if type(case) is tuple else (case,))) for case in cases]
