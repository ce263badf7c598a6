"""Streams, for schedules outside the package. `core.device_streams` explains them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hwfsdp.core import device_streams as core
from hwfsdp.core.private_torch import call_after_backward
from hwfsdp.core.device_streams import Stream as Stream
from hwfsdp.core.device_streams import StreamEvent as StreamEvent
from hwfsdp.core.device_streams import StreamSet as StreamSet
from hwfsdp.core.device_streams import _backends
from hwfsdp.errors import UsageError


def streams_for(device_type: str) -> StreamSet:
    """Make new streams on a device of this type.

    Raises:
        UsageError: there is no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = [*_backends, *([accelerator.type] if accelerator else [])]
    if device_type not in here:
        raise UsageError(
            f"streams on {device_type!r}",
            expected=f"one of {sorted(_backends)}, or this machine's accelerator",
            got=f"an accelerator of type {accelerator.type!r}" if accelerator else "no accelerator",
            remedy="Use a device that is here.",
        )
    return core.stream_maker(device_type)()


def after_backward(function: Callable[[], None]) -> None:
    """Call `function` once, when the backward in progress has issued all of its work. This is the place to wait for its collectives.

    Call this only inside a backward, for example from the hook of a tensor.
    """
    call_after_backward(function)
