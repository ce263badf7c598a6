"""Mark cases of tests as long. `make test` leaves out all tests marked `long`; `make test-all` runs everything.

`@pytest.mark.long` marks a test, and `pytestmark = pytest.mark.long` marks a file. The functions below mark single cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long(*values: Any, id: str | None = None) -> Any:
    """Return a case for `pytest.mark.parametrize` that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.long, id=id)


def fast_are(fast: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases, and mark all of them as long except those in `fast`.

    Raises:
        ValueError: `fast` has an element that is not a case.
    """
    cases, fast = list(cases), list(fast)
    if unknown := [case for case in fast if case not in cases]:
        raise ValueError(f"not among the cases: {unknown}")
    return [case if case in fast else long(*(case if type(case) is tuple else (case,))) for case in cases]
