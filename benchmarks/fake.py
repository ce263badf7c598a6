"""One process plays many ranks: a process group that only pretends to communicate.

Its collectives return at once and leave the data unchanged. A model that is sharded over such a group has the shapes and the
schedule of one rank in a large world, without the time for communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp import launch

R = TypeVar("R")


def in_fake_world(fn: Callable[..., R], world_size: int, *args: Any) -> R:
    """Call `fn(*args)` in a fresh process that is rank 0 of `world_size` pretended ranks.

    The process group is "fake" for tensors on every device. A process has one default group at a time, so every call
    uses its own process.
    """
    result: R = launch(_play, 1, fn, world_size, args)[0]
    return result


def _play(fn: Callable[..., R], world_size: int, args: tuple[Any, ...]) -> R:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()  # the real group of one rank with which a launched process begins
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    return fn(*args)


class Buffers:
    """The allocation that a custom collective of either library needs, in ordinary memory."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Silence(Buffers):
    """A gather or a reduction that leaves its output unchanged."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None
