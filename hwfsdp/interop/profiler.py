"""The ranges of FSDP2 in torch's profiler, and its debug messages, which `TORCH_LOGS=+fsdp` shows.

The instrument is in the slot only while a profiler is running or the messages are on, so other steps do not pay for it. torch
does not tell when a profiler starts. So each state looks for one where its work begins: before a forward, before a backward, and
before the user gathers by hand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hwfsdp.compat import profiler_is_running, profiler_range
from hwfsdp.core import observer
from hwfsdp.core.private_torch import NOTHING, REDUCES_IN_GRAD_DTYPE
from hwfsdp.core.mesh import Transport
from hwfsdp.core.state import FSDPState, Phase
from hwfsdp.core.device_streams import Stream, StreamEvent
from hwfsdp.torch_releases import release_of

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")  # the one of FSDP2

_NAMES = {  # moments that have another name in FSDP2
    "forward_prefetch": "forward_prefetch for",
    "backward_prefetch": "backward_prefetch for",
    "copy_out": "all_gather_copy_out",
    "finish_backward": "root_post_backward_callback",
    "take_and_free": "post_backward_reshard",
}
_OTHERS = (  # FSDP2 does not show them
    "copy_in",
    "reduce_scatter",
    "all_reduce",
    "wait_for_reduction",
    "post_backward",
    "part",
    *(("post_backward_accumulate",) if REDUCES_IN_GRAD_DTYPE else ()),  # since 2.15
    *(("post_backward_rs_wait",) if release_of(torch.__version__) < (2, 12) else ()),
)
_OF_GROUPS = ("pre_forward", "post_forward", "pre_backward")  # shown if the state has a group
_NAMELESS = ("inputs_to_device", "cast_forward_inputs", "cast_forward_outputs", "root_pre_forward")
_LOGGED = (*_OF_GROUPS, "post_backward")  # messages with the label of the module
_LOGGED_OF_ROOT = {"root_pre_forward": "root_pre_forward", "finish_backward": "root_post_backward"}


def follow_profiler() -> None:
    """While a profiler is running or messages are on, put the observer into the slot, or behind the instrument that is there.

    Otherwise take it out of the slot.
    """
    if not (profiler_is_running() or logger.isEnabledFor(logging.DEBUG)):
        if observer.slot is _RANGES:
            observer.put(None)
    elif observer.slot is None:
        observer.put(_RANGES)
    elif getattr(observer.slot, "behind", observer.slot) is None:
        vars(observer.slot)["behind"] = _RANGES


def shown(name: str, of: Any) -> AbstractContextManager[Any]:
    """Return the range of a moment. Return an empty context if no profiler is running, or if FSDP2 shows no range."""
    if not profiler_is_running() or name in _OTHERS or (isinstance(of, Transport) and of.ranks.size == 1):
        return NOTHING
    if name in _OF_GROUPS and isinstance(of, FSDPState) and is_left_out(name, of):
        return NOTHING
    if name == "post_backward_rs_wait" and len(of.comm_ctx.reducing) < of.comm_ctx.max_reductions:
        return NOTHING
    nameless = name in _NAMELESS or name == "finish_backward"
    shards = getattr(transport_of(of), "shards", 0)  # 0 unless the module has several groups
    shards = 0 if name.endswith("_prefetch") else shards
    return profiler_range(_NAMES.get(name, name), "" if nameless else label_of(of), shards)


def log(name: str, of: Any) -> None:
    """Write the message of a moment, if FSDP2 has one."""
    if name in _LOGGED and not is_left_out(name, of):
        label = label_of(of)
        logger.debug("FSDP::%s%s", name, f" ({label})" if label else "")
    elif name in _LOGGED_OF_ROOT:
        logger.debug("FSDP::%s", _LOGGED_OF_ROOT[name])


def is_left_out(name: str, state: FSDPState) -> bool:
    """True if FSDP2 does nothing in this hook: the state has no group, or has begun its backward before."""
    return not state.groups or (name in _OF_GROUPS and state.phase is Phase.PRE_BACKWARD)


def label_of(of: Any) -> str:
    """Return torch's name for the module of a state, a group or a transport; the core's have no label."""
    return getattr(transport_of(of), "label", None) or ""


def transport_of(of: Any) -> Any:
    """Return the transport of a state's first group, or of a group. A state without groups has none."""
    group = of.groups[0] if isinstance(of, FSDPState) and of.groups else of
    return getattr(group, "transport", group)


class ProfilerRanges:
    """Show the moments as FSDP2's ranges and messages."""

    def moment(
        self, name: str, of: Any, stream: str, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> AbstractContextManager[Any]:
        log(name, of)
        return shown(name, of)

    def made(self, buffer: Tensor) -> None:
        pass

    def recorded(self, event: StreamEvent) -> None:
        pass

    def waiting(self, stream: Stream, event: StreamEvent) -> AbstractContextManager[Any]:
        return NOTHING

    def running(self, stream: Stream, current: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        return current

    def deferred(self, stream: Stream, function: Callable[[], None]) -> Callable[[], None]:
        return function


_RANGES = ProfilerRanges()
