"""Sums instead of means, other divisors, hooks on reduced gradients, parameters without a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hwfsdp.core.flat_collectives import Mean, Reducing, mean_over
from hwfsdp.core.group import Reducer, divided
from hwfsdp.core.param import FSDPParam
from hwfsdp.core.device_streams import Stream, StreamEvent

if TYPE_CHECKING:
    from hwfsdp.features.feature_group import ParamGroup


class SettableReducer(Reducer):
    """A reducer that does what `FSDPModule`'s setters say.

    Attributes:
        divide_factor: the divisor of sums of gradients; None: the number of ranks.
        force_sum: if True, the backend only sums, and the division is a separate step.
        hook: called with each reduced flat gradient, before the division; it may change the gradient. hook_stream: the stream of
            the hook; None: the all-reduce stream.
        reduce_unused: if True, parameters without a gradient are reduced as zeros, because other ranks may have a gradient.
        all_reduce_grads, partial_grads: of `hybrid_sharding`; without replicas, always True and empty.
    """

    group: ParamGroup

    def __init__(self) -> None:
        self.all_reduce_grads = True
        self.partial_grads: dict[FSDPParam, Tensor] = {}
        self.divide_factor: float | None = None
        self.force_sum = self.reduce_unused = False
        self.hook: Callable[[Tensor], None] | None = None
        self.hook_stream: Stream | None = None

    def mean(self, dtype: torch.dtype) -> Mean:
        return mean_over(self.group.mesh.size, dtype, self.divide_factor, self.force_sum)

    def zeros_for(self, param: FSDPParam) -> Tensor | None:
        """If `reduce_unused`, return zeros for a trained parameter. Before its first gather return None: no rank has used it."""
        trained = param.sharded_param.requires_grad and param.unsharded_param is not None
        return self.zeros(param) if self.reduce_unused and trained else None

    def zeros(self, param: FSDPParam) -> Tensor:
        """Make a whole gradient of zeros."""
        return torch.zeros(param.layout.shape, dtype=param.dtypes.compute, device=param.layout.mesh.device)

    def finish(self, params: Sequence[FSDPParam], reducing: Reducing) -> StreamEvent:
        """If there is a hook, continue on the hook's stream as soon as the result is there."""
        if self.hook is None:
            return super().finish(params, reducing)
        comm_ctx, reduced = self.group.comm_ctx, reducing.stream.record()
        stream = self.hook_stream or comm_ctx.streams.all_reduce
        result, divisor = reducing.result, reducing.mean.after

        def go_on() -> None:
            stream.wait(reduced)
            with stream.run():
                self.add_divided(stream, params, result, divisor)

        with reducing.stream.run():
            reducing.stream.then(go_on)
        comm_ctx.hold(result, stream)
        return reducing.stream.record()

    def add_divided(
        self, stream: Stream, params: Sequence[FSDPParam], result: Tensor, divisor: float
    ) -> None:
        """Queue on `stream`, which is current: call the hook, divide `result`, add it to the shards' gradients."""
        hook, group = self.hook, self.group
        if hook is not None:
            stream.then(lambda: hook(result))
        stream.then(lambda: group.add_sharded_grads(params, divided(result, divisor)))
