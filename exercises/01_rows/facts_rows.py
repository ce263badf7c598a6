"""What a rank reports about the functions of station 01."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch

from hwfsdp.course.probing import Report, attempt, submitted


def probe_rows(report: Report, cases: list[tuple[int, int]]) -> None:
    """Call both functions for these numbers of rows and ranks."""
    attempt(report, "padded", lambda: [plain(submitted().padded_rows(n, w)) for n, w in cases])
    attempt(report, "rows", lambda: [of_all_ranks(n, w) for n, w in cases])


def of_all_ranks(n: int, world_size: int) -> list[Any]:
    return list(map(plain, map(partial(submitted().rows_of, n, world_size), range(world_size))))


def plain(value: Any) -> Any:
    """Keep integers, also numpy's, also in lists and tuples. Turn anything else into text: a float is not a number of rows."""
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    is_integer = hasattr(value, "__index__") and not isinstance(value, bool | torch.Tensor)
    return operator.index(value) if is_integer else repr(value)
