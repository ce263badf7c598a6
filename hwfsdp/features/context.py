"""What features keep beside the streams that groups share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hwfsdp.core import context
from hwfsdp.core.streams import Stream, StreamEvent

if TYPE_CHECKING:
    from hwfsdp.features.finalization import GradientReductionHandle
    from hwfsdp.features.recovery import Callbacks


class FSDPCommContext(context.FSDPCommContext):
    """The streams and buffers that the groups of a model share. Several models may share one context.

    Args:
        device_type: the device type of the mesh, for example "cuda".

    Attributes:
        streams: see `core.streams.StreamSet`. all_gather_stream, reduce_scatter_stream: two of them, under torch's names.
        post_forward_order: groups in the order in which their forwards ended, once per forward.
        callbacks: the functions that the backward in progress calls at its end (`recovery`).
        reduction: the reduction that the caller has not waited for; None if there is none (`finalization`).
    """

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.callbacks: Callbacks = {}
        self.reduction: GradientReductionHandle | None = None
        self._held: dict[Stream, list[Tensor]] = {}
        self._left: list[tuple[StreamEvent, list[Tensor]]] = []

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        """Keep a tensor that the reduce-scatter stream made, until the work on `stream` has used it.

        Tensors of a backward are kept until the next backward that holds some, or until `finish_reductions`.
        """
        self._drop_left()
        self._held.setdefault(stream, []).append(tensor)

    def settle(self) -> None:
        """Run the deferred work of both reduction streams. A backward is over, or the iteration is."""
        super().settle()
        self._left += [(stream.record(), tensors) for stream, tensors in self._held.items()]
        self._held = {}

    def finish_reductions(self) -> None:
        super().finish_reductions()
        self._drop_left()

    def _drop_left(self) -> None:
        """Drop the tensors of earlier backwards. The streams that may reuse their memory first wait for the work on them."""
        for used, _ in self._left:
            self.streams.reduce_scatter.wait(used)
            self.streams.compute.wait(used)
        self._left.clear()
