"""The checks of the electives, a module for each: `12_strided_shards` is graded by `checks.strided_shards`.

Each module has judges, which run where the grades are made; `<topic>_runs` has the probes, which run on ranks with a learner's
functions in the package. `checks.toml` lists them, `findings.toml` has what they say. What several of them need is here.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def piece(whole: Tensor, size: int, index: int, dim: int = 0) -> Tensor:
    """The oracle of shards: what `torch.chunk` gives one of `size` ranks. There may be fewer chunks than ranks."""
    chunks = whole.chunk(size, dim)
    return chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A new directory that all ranks know, until all of them are through."""
    found = [tempfile.mkdtemp(prefix="hwfsdp-check-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found)
    yield Path(found[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(found[0], ignore_errors=True)


def raised_by(call: Callable[[], Any], *more: type[BaseException]) -> str | None:
    """The kind and text of what a call raises, on one line; `more`: kinds that are no Exception."""
    kinds: tuple[type[BaseException], ...] = (Exception, *more)
    try:
        call()
    except kinds as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def with_nan(part: Callable[[], Any]) -> Any:
    """Memory that nobody wrote is full of NaN meanwhile."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return part()
    finally:
        torch.use_deterministic_algorithms(False)
