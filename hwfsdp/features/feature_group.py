"""The group that features work with, what groups share, and what the states below one root share.

Each class is the core's, with what features note.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from hwfsdp.comm.transport import GroupTransport
from hwfsdp.core import context
from hwfsdp.core import param as core
from hwfsdp.core.device_streams import Stream, StreamEvent
from hwfsdp.core.param import ShardedState
from hwfsdp.core.private_torch import no_autograd
from hwfsdp.errors import UnsupportedError
from hwfsdp.features.feature_param import FSDPParam
from hwfsdp.features.lookup import remember
from hwfsdp.features.post_forward_mesh import POST_FORWARD, keep_larger_shards, over_fewer
from hwfsdp.features.private_autograd import find_new_memory, plain_class
from hwfsdp.features.user_changes import Seen, check_in_place, keep_changes, watch
from hwfsdp.interop.torch_view import NamedGroup

if TYPE_CHECKING:
    from hwfsdp.core.mesh import ShardMesh
    from hwfsdp.features.finalization import GradientReductionHandle
    from hwfsdp.features.hybrid_sharding import HybridMesh
    from hwfsdp.features.reductions import SettableReducer
    from hwfsdp.features.schedule import FSDPState


class FSDPCommContext(context.FSDPCommContext):
    """The streams and buffers that the groups of a model share. Several models may share one context.

    Args:
        device_type: the device type of the mesh, for example "cuda".

    Attributes:
        streams: see `core.device_streams.StreamSet`. all_gather_stream, reduce_scatter_stream: two of them, under torch's names.
        post_forward_order: groups in the order in which their forwards ended, once per forward.
        callbacks: the functions that the backward in progress calls at its end, by root and state; the state is None for the
            root's own. References are weak: autograd holds the only strong ones (`recovery`).
        reduction: the reduction that the caller has not waited for; None if there is none (`finalization`).
    """

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.callbacks: dict[tuple[RootContext, FSDPState | None], ref[Callable[[], None]]] = {}
        self.reduction: GradientReductionHandle | None = None
        self._held: dict[Stream, list[Tensor]] = {}
        self._left: list[tuple[StreamEvent, list[Tensor]]] = []

    @property
    def all_gather_stream(self) -> Stream:
        return self.streams.all_gather

    @property
    def reduce_scatter_stream(self) -> Stream:
        return self.streams.reduce_scatter

    @property
    def backward_broke(self) -> bool:
        """True if a backward ended without calling the functions that it should call at its end."""
        return any([callback() is None for callback in self.callbacks.values()])

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        """Keep the result of a reduction until the work on `stream` has used it.

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


class RootContext(context.RootContext):
    """The data that the states below one root share. Before the first forward, each state has its own.

    Attributes:
        is_stale: True if an optimizer has stepped, or an iteration was broken off, since the parameters that are whole now were
            gathered (`recovery`).
        handled: the id of the exception that was being handled when the outermost forward began; a later exception has another id.
        backwards_before: the number of backwards that had ended when the outermost forward began (`entries`).
        post_optim_event: the event that the next iteration's gathers wait for, instead of all work on compute.
        manual: True if the caller ends backwards (`finalization`).
        is_open: True from the first backward of an iteration until its end. Meanwhile, `manual` cannot change.
        stage_checked: for each group below, `reshard_after_forward` when the pipeline stage was checked (`interop.pipelines`). None
            before the check.
    """

    states: list[FSDPState]  # type: ignore[assignment]
    forward_root: FSDPState | None
    is_stale = manual = is_open = False
    handled = backwards_before = 0
    post_optim_event: torch.Event | None = None
    stage_checked: list[bool | None] | None = None


class ParamGroup(NamedGroup):
    """The core's group, and what features note about it.

    Attributes:
        state: the schedule of its module.
        suffix: what comes after the module's name in its name, if the module has groups over several meshes: the axes or the size
            of its mesh; "" on the mesh of the call.
        seen, has_stepped: what FSDP has seen of the parameters, and whether an optimizer has stepped, since they were gathered
            (`user_changes`).
        smaller: the mesh over which parameters stay sharded after forward (`post_forward_mesh`); None: the whole mesh.
    """

    state: FSDPState
    suffix = ""
    seen: Seen
    has_stepped = False
    smaller: ShardMesh | None = None

    mesh: HybridMesh
    params: list[FSDPParam]  # type: ignore[assignment]
    comm_ctx: FSDPCommContext
    transport: GroupTransport
    reducer: SettableReducer

    def unshard(self) -> bool:
        """Start the gather. Conversions of a module below, such as `model.head.to(dtype)`, may have replaced the memory of shards."""
        if self.is_unsharded:
            return False
        if changed := find_new_memory(self.params):
            self.drop_gather()  # of the other memory
            for param in changed:
                param.adopt_registered()
            streams = self.comm_ctx.streams
            streams.copy.wait(streams.compute.record())  # which may have copied rows
        return super().unshard()

    def copy_out(self) -> None:
        if self._gathering is None:
            return
        try:
            check_in_place(self.params)
            super().copy_out()
        except BaseException:  # a refusal, or no memory
            for param in self.params:
                if param.state is ShardedState.SHARDED:
                    param.free_whole()
            self.drop_gather()
            raise
        watch(self)

    @property
    def gather_transport(self) -> GroupTransport:
        """The transport of the next gather: from the ranks that hold larger shards, if there are such shards."""
        if self.smaller is None or self.params[0].state is not POST_FORWARD:
            return self.transport
        return over_fewer(self.transport, self.smaller)

    def post_forward(self) -> None:
        """Free the parameters after the group's forward, or keep them, or larger shards of them, for the backward."""
        if self.smaller is not None and self.reshard_after_forward:
            keep_larger_shards(self, self.smaller)
        else:
            super().post_forward()

    def reshard(self) -> None:
        """Put the shards back. A gather may be reading larger shards, so it is dropped before they are freed."""
        if self.params[0].state is POST_FORWARD:
            with no_autograd():
                self.wait_for_gather()
                self.drop_gather()
        keep_changes(self)
        super().reshard()

    @property
    def has_late_gradients(self) -> bool:
        with plain_class():  # reads of freed parameters' gradients are faster
            return super().has_late_gradients

    def take_grads(self) -> tuple[list[core.FSDPParam], list[Tensor]]:
        """Return the parameters that have a gradient to reduce, and these gradients.

        Raises:
            UnsupportedError: a gradient is sparse, and cannot be cut into rows.
        """
        params, grads = super().take_grads()
        for param, grad in zip(params, grads, strict=True):
            if grad.layout is not torch.strided:
                raise UnsupportedError(
                    f"gradient of parameter {param.name!r}",
                    expected="a dense gradient",
                    got=f"one of layout {grad.layout}",
                    remedy="Build the layer with sparse=False, or leave it out: fully_shard(…, ignored_params={its weight}).",
                )
        return params, grads

    def join(self, state: FSDPState) -> None:
        """Belong to a schedule from now on."""
        self.state, self.seen = state, Seen([], [], set())
        for param in self.params:
            param.group = self
        remember(self)

    def rename(self, name: str) -> None:
        super().rename(name + self.suffix)
