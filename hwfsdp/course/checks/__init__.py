"""The checks of the electives, a module for each: `12_strided_shards` is graded by `checks.strided_shards`.

Each module has judges, which run where the grades are made; `<topic>_runs` has the probes, which run on ranks with a learner's
functions in the package. `checks.toml` lists them, `findings.toml` has what they say. What several of them need is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def piece(whole: Tensor, size: int, index: int, dim: int = 0) -> Tensor:
    """The oracle of shards: what `torch.chunk` gives one of `size` ranks. There may be fewer chunks than ranks."""
    chunks = whole.chunk(size, dim)
    return chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)


def with_nan(part: Callable[[], Any]) -> Any:
    """Memory that nobody wrote is full of NaN meanwhile."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return part()
    finally:
        torch.use_deterministic_algorithms(False)
