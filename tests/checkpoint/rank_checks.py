"""What checks on ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from hwfsdp.errors import FSDPError, UsageError


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
