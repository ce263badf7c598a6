"""Sums instead of means, other divisors, hooks on reduced gradients, parameters without a gradient."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hwfsdp.core.collectives import Mean, Reducing, mean_over
from hwfsdp.core.group import Reducer, divided
from hwfsdp.core.param import FSDPParam
from hwfsdp.core.streams import DeviceStream, Stream, StreamEvent
from hwfsdp.errors import UsageError
from hwfsdp.features.lookup import FeatureModule, the_only

if TYPE_CHECKING:
    from hwfsdp.features.group import ParamGroup


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
        shards = self.group.mesh.size
        if self.divide_factor == shards > 1 and not self.force_sum:
            return mean_over(shards, dtype)
        return mean_over(shards, dtype, self.divide_factor, self.force_sum)

    def zeros_for(self, param: FSDPParam) -> Tensor | None:
        """If `reduce_unused`, return zeros for a trained parameter. Before its first gather return None: no rank has used it."""
        trained = param.sharded_param.requires_grad and param.unsharded_param is not None
        return self.zeros(param) if self.reduce_unused and trained else None

    def zeros(self, param: FSDPParam) -> Tensor:
        """Make a whole gradient of zeros."""
        return torch.zeros(param.layout.shape, dtype=param.dtypes.compute, device=param.mesh.device)

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


class ReductionMethods(FeatureModule):
    """Methods of sharded modules."""

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Set the number by which sums of gradients are divided. None: the number of ranks, which is the default.

        Raises:
            UsageError: `factor` is 0, or not a finite number.
        """
        usable = isinstance(factor, int | float) and factor and math.isfinite(factor)
        if factor is not None and not usable:
            raise UsageError(
                "set_gradient_divide_factor",
                expected="a finite number other than 0",
                got=repr(factor),
                remedy="Pass the number of ranks for a mean, or 1 for a sum.",
            )
        for reducer in self._reducers(recurse=False):
            reducer.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Warn, and call `set_gradient_divide_factor`: this is its old name."""
        warnings.warn("Use `set_gradient_divide_factor` instead", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Choose whether collectives only sum, and the division is a separate step; some transports can only sum."""
        for reducer in self._reducers(recurse=False):
            reducer.force_sum = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether parameters without a gradient are reduced as zeros.

        You need this if ranks take different paths through the model. Otherwise their reductions do not fit together.
        """
        for reducer in self._reducers(recurse):
            reducer.reduce_unused = reduce_scatter_unused_params

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with each reduced flat gradient of this module's own group, before the division.

        Args:
            hook: gets the gradients of this rank's padded shards, end to end: [n], reduce dtype. It may change the tensor in
                place, for example all-reduce it over further ranks. Under hybrid sharding it is called after the all-reduce.
            stream: the device's stream to call it on; not under hybrid sharding, which has its own.
        """
        the_only(self._groups(recurse=False), "set_all_reduce_hook")
        for reducer in self._reducers(recurse=False):
            if stream is not None and reducer.group.mesh.replicate.group:
                raise UsageError(
                    "set_all_reduce_hook(stream=…)",
                    expected="no stream under hybrid sharding",
                    got=repr(stream),
                    remedy="Leave it out: the hook runs on the all-reduce stream.",
                )
            reducer.hook = hook
            streams = reducer.group.comm_ctx.streams
            if stream is not None and isinstance(streams.all_reduce, DeviceStream):
                reducer.hook_stream = DeviceStream("all_reduce", stream.device.type, stream)
                reducer.hook_stream.streams = streams

    def _reducers(self, recurse: bool) -> list[SettableReducer]:
        return [group.reducer for group in self._groups(recurse)]
