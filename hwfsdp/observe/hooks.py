"""Hooks on all storages and all optimizers of this process, inside a block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


@contextmanager
def after_each_resize(seen: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Inside the block, call `seen(storage, by)` after each resize of a storage by `by` bytes."""
    original = torch.UntypedStorage.resize_

    @functools.wraps(original)
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        seen(storage, size - before)
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


@contextmanager
def around_optimizer_steps(
    before: Callable[[Optimizer, Any, Any], None], after: Callable[[Optimizer, Any, Any], None]
) -> Iterator[None]:
    """Inside the block, call `before` and `after` around each step of any optimizer, with the arguments of torch's hooks."""
    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
