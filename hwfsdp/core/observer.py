"""One slot for an instrument. It is empty by default.

The core names what it does: `with moment("copy_in", …)`. It does not know whether a recording, torch's profiler or nothing
listens. With an empty slot a moment costs one call and one test.

| moment | of | when |
| --- | --- | --- |
| pre_forward, post_forward, pre_backward, post_backward | state | a hook of `state` |
| root_pre_forward, finish_backward | state | an outermost forward begins; a backward has ended |
| inputs_to_device, cast_forward_inputs, cast_forward_outputs | state | inputs and outputs are moved or cast |
| forward_prefetch, backward_prefetch | group | the gather of another group is started ahead |
| all_gather, copy_in, copy_out | transport | the three steps of a gather; `copy_in` of a reduction, too |
| reduce_scatter, all_reduce, wait_for_reduction | transport | a reduction is started, or waited for |
| take_and_free, post_backward_rs_wait, …_reduce, …_accumulate | group | the steps of post-backward |
| part | group | the turn of one group, also if a module has only one: it is gathered, copied out, freed or reduced |
| broken_off | state | an exception has ended the iteration (`features.recovery`) |

Subjects have `name`: the name of a module or of a parameter group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from hwfsdp.core.private_torch import NOTHING

if TYPE_CHECKING:
    from hwfsdp.core.device_streams import Stream, StreamEvent


class Observer(Protocol):
    """An instrument. Extension point."""

    def moment(
        self, name: str, of: Any, stream: str, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> AbstractContextManager[Any]:
        """Wrap the block of a moment in the table. For a copy, also get its stream and the tensors that it reads and writes."""

    def made(self, buffer: Tensor) -> None:
        """Record that a flat buffer was made on the current stream."""

    def recorded(self, event: StreamEvent) -> None:
        """Record that a stream made an event."""

    def waiting(self, stream: Stream, event: StreamEvent) -> AbstractContextManager[Any]:
        """Wrap the block that makes a stream wait for an event of another stream."""

    def running(self, stream: Stream, current: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        """Wrap `current`, the block in which work is issued on a stream."""

    def deferred(self, stream: Stream, function: Callable[[], None]) -> Callable[[], None]:
        """Return the function that runs once the work in flight on a stream has ended: `function`, perhaps wrapped."""


slot: Observer | None = None


def put(observer: Observer | None) -> Observer | None:
    """Put an instrument into the slot, or take it out. Return the previous one; the new one may pass calls on to it."""
    global slot
    before, slot = slot, observer
    return before


def moment(
    name: str, of: Any, stream: str = "", reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
) -> AbstractContextManager[Any]:
    """Wrap a block in which something happens that an instrument may want to see."""
    return NOTHING if slot is None else slot.moment(name, of, stream, reads, writes)


def made(buffer: Tensor) -> Tensor:
    """Tell the instrument that this buffer was made; return the buffer."""
    if slot is not None:
        slot.made(buffer)
    return buffer
