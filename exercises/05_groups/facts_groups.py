"""What a rank reports about `traffic`."""

from __future__ import annotations

import operator
from typing import Any

import torch

from hwfsdp.course.probing import Report, attempt, submitted


def probe_traffic(report: Report, calls: list[dict[str, Any]]) -> None:
    """Call the closed form with each of these arguments."""
    attempt(report, "traffic", lambda: [bytes_of(submitted().traffic(**arguments)) for arguments in calls])


def bytes_of(found: Any) -> dict[str, Any]:
    """Keep integers, also numpy's, and turn anything else into text."""
    return {str(op): integer_of(nbytes) for op, nbytes in dict(found).items()}


def integer_of(value: Any) -> int | str:
    is_integer = hasattr(value, "__index__") and not isinstance(value, bool | torch.Tensor)
    return operator.index(value) if is_integer else repr(value)
