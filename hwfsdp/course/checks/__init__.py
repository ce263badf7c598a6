"""The checks of the electives, one module for each: `checks.strided_shards` grades `12_strided_shards`.

The module of a topic has judges, which run where the grades are made. `<topic>_runs` has the probes, which run on ranks with a
learner's functions in the package. `checks.toml` lists the checks, and `findings.toml` has their messages. This module has the
helpers that several checks need.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def piece(whole: Tensor, size: int, index: int, dim: int = 0) -> Tensor:
    """The oracle of shards: the chunk that `torch.chunk` gives one of `size` ranks; empty if there are fewer chunks than ranks."""
    chunks = whole.chunk(size, dim)
    return chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)


def plain(value: Any) -> Any:
    """Keep integers, also in lists and tuples, and turn anything else into text: a float is not a number of rows."""
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value if type(value) is int else repr(value)


def two_layers(width: int, hidden: int, out: int) -> nn.Sequential:
    """Return two linear layers, `up` and `down`, with a ReLU between them."""
    parts = {"up": nn.Linear(width, hidden), "relu": nn.ReLU(), "down": nn.Linear(hidden, out)}
    return nn.Sequential(OrderedDict(parts))


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Make a new directory that all ranks know. Remove it once all of them are done."""
    found = [tempfile.mkdtemp(prefix="hwfsdp-check-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found)
    yield Path(found[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(found[0], ignore_errors=True)


class Ended(BaseException):
    """An exception that does not derive from Exception, like KeyboardInterrupt and SystemExit."""


def raised_by(call: Callable[[], Any]) -> str | None:
    """Return the kind and text of the exception that a call raises, on one line."""
    try:
        call()
    except (Exception, Ended) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def with_nan(part: Callable[[], Any]) -> Any:
    """Call `part` while torch fills new memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return part()
    finally:
        torch.use_deterministic_algorithms(False)
