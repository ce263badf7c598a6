"""Reductions of gradients: over replicas, too; sums instead of means, other divisors, hooks, parameters without a gradient.

Under hybrid sharding, the result of the reduce-scatter is all-reduced over the replicas:

    copy-in, reduce-scatter as in the core                     (reduce-scatter stream)
    all-reduce of its result over the replicas                 (all-reduce stream)
    divide, add to the shards' gradients                       (all-reduce stream)

Note [Partial gradients]
    Gradients may add up between the reduce-scatter and the all-reduce. Then they have the size of a shard, not of the whole
    parameter. They are kept for each parameter, because another micro-batch may reach other parameters. The next reduction that
    ends with an all-reduce adds them to its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp.core.device_streams import Stream, StreamEvent
from hwfsdp.core.flat_collectives import Mean, Reducing, mean_over
from hwfsdp.core.group import Reducer, divided
from hwfsdp.core.mesh import Axis
from hwfsdp.core.observer import moment
from hwfsdp.core.param import FSDPParam
from hwfsdp.core.private_torch import no_autograd

if TYPE_CHECKING:
    from hwfsdp.features.feature_group import ParamGroup


class SettableReducer(Reducer):
    """A reducer that does what `FSDPModule`'s setters say: scatter, all-reduce over the replicas if there are any, divide, add.

    Attributes:
        divide_factor: the divisor of sums of gradients; None: the number of ranks.
        force_sum: if True, the backend only sums, and the division is a separate step.
        hook: called with each reduced flat gradient, before the division, unless the backend has divided; it may change the gradient.
            hook_stream: the stream of the hook; None: the all-reduce stream.
        reduce_unused: if True, parameters without a gradient are reduced as zeros, because other ranks may have a gradient.
        all_reduce_grads: if False, partial gradients add up (Note [Partial gradients]). It counts only if there are replicas.
        partial_grads: by parameter, the gradient of this rank's rows, reduced over the shard axis only: `local_shape`, reduce
            dtype.
    """

    group: ParamGroup

    def __init__(self) -> None:
        self.all_reduce_grads = True
        self.partial_grads: dict[FSDPParam, Tensor] = {}
        self.divide_factor: float | None = None
        self.force_sum = self.reduce_unused = False
        self.hook: Callable[[Tensor], None] | None = None
        self.hook_stream: Stream | None = None

    @property
    def replicas(self) -> Axis:
        """The ranks of the all-reduce."""
        return self.group.mesh.replicate

    def mean(self, dtype: torch.dtype) -> Mean:
        """Return the reduce-scatter's part of the mean over all ranks; `replica_operation` returns the all-reduce's part."""
        if self._backend_divides(dtype):
            return Mean(1, dist.ReduceOp.AVG, 1)
        return mean_over(self.group.mesh.size * self.replicas.size, dtype, self.divide_factor, only_sum=True)

    def replica_operation(self, dtype: torch.dtype) -> dist.ReduceOp.RedOpType:
        """Return the operation of the all-reduce: AVG if the backend divides and no other divisor is set, else SUM."""
        both = self._backend_divides(dtype) and self.divide_factor is None
        return dist.ReduceOp.AVG if both else dist.ReduceOp.SUM

    def _backend_divides(self, dtype: torch.dtype) -> bool:
        """True if the backend divides: the dtype has enough range, and the divisor is a number of ranks."""
        shards = self.group.mesh.size
        usual = self.divide_factor is None or self.divide_factor == shards > 1
        several = shards * self.replicas.size > 1
        return dtype in (torch.float32, torch.bfloat16) and several and usual and not self.force_sum

    def zeros_for(self, param: FSDPParam) -> Tensor | None:
        """Return zeros for a trained parameter if `reduce_unused`, but not before its first gather: no rank has used it then.

        Return zeros if a partial gradient waits, too. The reduction of these zeros takes the partial gradient to the replicas.
        """
        is_trained = param.sharded_param.requires_grad and param.unsharded_param is not None
        is_waiting = param in self.partial_grads and self.all_reduce_grads
        if not is_waiting and not (self.reduce_unused and is_trained):
            return None
        return torch.zeros(param.layout.shape, dtype=param.dtypes.compute, device=param.layout.mesh.device)

    def finish(self, params: Sequence[FSDPParam], reducing: Reducing) -> StreamEvent:
        """Queue everything that follows a reduction over the shard axis. The reduction may still be in flight; do not wait for it.

        Its result reaches the shards' gradients, or `partial_grads` if `all_reduce_grads` is off. Nothing that is queued may keep
        `reducing.flat` alive. If work continues on another stream, the context keeps the memory of the result (`FSDPCommContext.hold`).

        Returns:
            An event after which `reducing.flat` may be reused.
        """
        result, divisor, comm_ctx = reducing.result, reducing.mean.after, self.group.comm_ctx
        with reducing.stream.run():
            if self.replicas.group is not None and not self.all_reduce_grads:
                reducing.stream.then(lambda: self.add_partial_grads(params, result))
                return reducing.stream.record()
            if any(param in self.partial_grads for param in params):
                reducing.stream.then(lambda: self.take_partial_grads(params, result))
        if self.replicas.size == 1 and self.hook is None:
            return super().finish(params, reducing)
        stream, reduced = self.hook_stream or comm_ctx.streams.all_reduce, reducing.stream.record()
        with reducing.stream.run():
            reducing.stream.then(lambda: self.go_on(stream, params, result, divisor, reduced))
        comm_ctx.hold(result, stream)
        return reducing.stream.record()

    def go_on(
        self,
        stream: Stream,
        params: Sequence[FSDPParam],
        result: Tensor,
        divisor: float,
        reduced: StreamEvent,
    ) -> None:
        """On `stream`: reduce `result` over the replicas, in place; call the hook, divide, and add it to the shards' gradients.

        Called when the reduce-scatter is over or, on a device, as soon as it is issued. `reduced` is the event after it. Only `stream`
        waits: not compute, not the host, not the next group's reduce-scatter.
        """
        group, hook = self.group, self.hook
        stream.wait(reduced)
        with stream.run():
            if self.replicas.size > 1:
                with moment("all_reduce", group.transport):
                    operation = self.replica_operation(result.dtype)
                    stream.add(group.transport.all_reduce(result, operation, self.replicas, stream.is_host))
            if hook is not None:
                stream.then(lambda: hook(result))
            stream.then(lambda: group.add_sharded_grads(params, divided(result, divisor)))

    def add_partial_grads(self, params: Sequence[FSDPParam], result: Tensor) -> None:
        """Add a result [n] of a reduction over the shard axis only to the partial gradients of `params`.

        With one shard, `result` is memory that the compute stream will use again.
        """
        with no_autograd():
            if self.group.mesh.size == 1:  # the result is the input, which belongs to the compute stream
                result = result.clone()
            for param, grad in self.group.pieces(params, result):
                kept = self.partial_grads.get(param)
                self.partial_grads[param] = grad if kept is None else kept.add_(grad)

    def take_partial_grads(self, params: Sequence[FSDPParam], result: Tensor) -> None:
        """Add the partial gradients of `params` to `result` [n], in place. Each counts once."""
        with no_autograd():
            for param, grad in self.group.pieces(params, result):
                if param in self.partial_grads:
                    grad.add_(self.partial_grads.pop(param))
