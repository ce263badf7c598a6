"""Fully sharded data parallel training (FSDP), in one file.

Every rank keeps a chunk of rows of every parameter. Before a module computes, the ranks gather its parameters; afterwards they
free them. The backward does the same, and averages the gradients: each rank gets the rows that it keeps.

    padded_rows, rows_of      station 01: which rows a rank keeps
    ring_all_gather, ring_reduce_scatter      02: what collectives are made of
    replicate                 03: data parallel training without sharding
    fully_shard               03: shards the parameters of a module
    traffic                   05: the bytes that a training step moves, in closed form


Collectives and streams come from `hwfsdp`. Everything else is here.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from my_fsdp import padded_rows, rows_of, tree_leaves, tree_map
from hwfsdp.collectives import all_gather_flat
from hwfsdp.streams import StreamEvent, after_backward, streams_for

try:  # by name, before anything is recorded
    from torch.distributed import reduce_scatter_single
except ImportError:  # its name before torch 2.13
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

Places = list[tuple[nn.Module, str]]  # modules, and names in them


# --- 03 Fully sharded ----------------------------------------------------------------------------------------


class FSDPParam:
    """One parameter: `rows`, which stay on this rank, and `whole`, whose memory comes and goes.

    Both are parameters. `rows` is the parameter that the module had, and the module has it again whenever `whole` is free.
    """

    def __init__(self, rows: nn.Parameter, places: Places, dtype: torch.dtype | None) -> None:
        self.rows, self.places = rows, places
        full = rows.detach()
        n, self.world_size = full.shape[0], dist.get_world_size()
        start, stop = rows_of(n, self.world_size, dist.get_rank())
        self.part_numel = padded_rows(n, self.world_size) * math.prod(full.shape[1:])
        dtype = dtype if dtype is not None and full.is_floating_point() else full.dtype
        self.flat = torch.empty(self.part_numel * self.world_size, dtype=dtype, device=full.device)
        # `.data` has a count of writes of its own: gathering into `flat` does not count as a write to `whole`.
        self.whole = nn.Parameter(self.flat.data[: full.numel()].view(full.shape), requires_grad=False)
        self.nbytes = self.flat.untyped_storage().nbytes()
        self.flat.untyped_storage().resize_(0)
        self.sum: Tensor | None = None  # of gradients, where that needs another dtype than they have
        rows.data = full[start:stop].clone()
        rows.grad = None
        rows._fsdp_param = self

    def fill(self, parts: Tensor) -> None:
        """Make the parameter whole, from the parts of all ranks, [W, part]."""
        self.flat.untyped_storage().resize_(self.nbytes)
        self.flat.view(self.world_size, -1).copy_(parts)
        if self.whole.requires_grad != self.rows.requires_grad:
            self.whole.requires_grad_(self.rows.requires_grad)

    def free(self) -> None:
        self.flat.untyped_storage().resize_(0)

    def place(self, param: nn.Parameter) -> None:
        for module, name in self.places:
            module._parameters[name] = param

    def write_rows(self, part: Tensor) -> None:
        """Write this rank's rows, and padding, to a flat part."""
        part[: self.rows.numel()] = self.rows.detach().flatten()
        part[self.rows.numel() :] = 0

    @property
    def grad(self) -> Tensor | None:
        """Return the whole gradient that is still to be reduced."""
        return self.whole.grad if self.sum is None else self.sum

    def add_up(self, dtype: torch.dtype | None) -> None:
        """Add the gradient of a backward to those before it, in `dtype`."""
        grad = self.whole.grad
        if grad is not None and dtype is not None and (self.sum is not None or grad.dtype != dtype):
            self.sum = grad.to(dtype) if self.sum is None else self.sum.add_(grad)
            self.whole.grad = None

    def write_grad(self, parts: Tensor) -> None:
        """Move the whole gradient, and padding, to the parts of all ranks, [W, part]."""
        grad, size = self.grad.flatten(), self.part_numel
        self.whole.grad = self.sum = None
        for rank, part in enumerate(parts):
            values = grad[rank * size : (rank + 1) * size]
            part[: values.numel()] = values
            part[values.numel() :] = 0

    def add_grad(self, part: Tensor) -> None:
        """Add this rank's part of the mean gradient to the gradient of its rows."""
        grad = part[: self.rows.numel()].view(self.rows.shape)
        if self.rows.grad is None:
            self.rows.grad = grad.to(self.rows.dtype, copy=True)
        else:
            self.rows.grad += grad.to(self.rows.dtype)


class Call:
    """One forward of a unit that autograd has recorded. It lives as long as autograd's graph."""

    def __init__(self) -> None:
        self.watches_inputs = False
        self.exits: list[ParamGroup] = []  # that its forward had before this one ended


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a floating-point tensor in a dtype, and everything else as it is."""
    if dtype is not None and isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


class ParamGroup:
    """The parameters that one module owns, and the hooks that move them."""

    def __init__(
        self,
        module: nn.Module,
        params: list[FSDPParam],
        context: Context,
        policy: MixedPrecisionPolicy,
        reshard: bool,
    ) -> None:
        self.params, self.policy, self.name = params, policy, type(module).__name__
        self.world_size = dist.get_world_size()
        self.context = context
        self.reshard_after_forward, self.reshard_after_backward, self.sync = reshard, True, True
        self.is_whole = False
        self.versions: list[int] = []
        self.gathers: list[tuple[StreamEvent, list[FSDPParam], Sequence[Tensor]]] = []
        self.in_backward = False
        self.calls: weakref.WeakSet[Call] = weakref.WeakSet()  # whose backward is still to come
        self.running: list[Call | None] = []  # forwards
        self.watched: set[nn.Parameter] = set()  # parameters that say when their gradient is there
        self.done: set[nn.Parameter] = set()  # those of them that did so in this backward
        module.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        module.register_forward_hook(self.after_forward, always_call=True)

    def enter(self) -> None:
        """Let the module compute with whole parameters."""
        if self.params and not self.is_whole:
            if self.context.ahead is not self:
                self.context.drop_ahead()
                self.start_gather()
            self.context.ahead = None
            self.end_gather()
        for param in self.params:
            param.place(param.whole)

    def leave(self, free: bool) -> None:
        """Give the module its rows again."""
        for param in self.params:
            param.place(param.rows)
            if free:
                param.free()
        self.is_whole = self.is_whole and not free

    def is_stale(self) -> bool:
        """Tell whether rows have been written to since they were gathered."""
        return self.is_whole and self.versions != [param.rows._version for param in self.params]

    def start_gather(self) -> None:
        """Put a gather on its stream."""
        stream = self.context.streams.all_gather
        self.versions = [param.rows._version for param in self.params]
        with torch.no_grad(), stream.run():
            for dtype, params in self.by_dtype(self.params, lambda param: param.whole.dtype):
                sizes = [param.part_numel for param in params]
                gathered = params[0].rows.new_empty(self.world_size, sum(sizes), dtype=dtype)
                part = gathered[dist.get_rank()]
                for param, piece in zip(params, part.split(sizes), strict=True):
                    param.write_rows(piece)
                event = all_gather_flat(gathered.flatten(), part, None, stream, self.name)
                self.gathers.append((event, params, gathered.split(sizes, 1)))

    def end_gather(self) -> None:
        """Let compute wait for the gather, and unpack it."""
        streams = self.context.streams
        while self.gathers:
            event, params, parts = self.gathers.pop(0)
            streams.compute.wait(event)
            with torch.no_grad():
                for param, pieces in zip(params, parts, strict=True):
                    param.fill(pieces)
            # The buffer goes now, and the next gather may get its memory: not before it is read.
            streams.all_gather.wait(streams.compute.record())
        self.is_whole = True
        for param in self.params:
            if param.whole.requires_grad and param.whole not in self.watched:
                self.watched.add(param.whole)
                param.whole.register_post_accumulate_grad_hook(self.on_grad)

    def reduce(self) -> None:
        """Add the rows of the mean gradients to the rows' gradients, for all parameters that have one."""
        reduced = [param for param in self.params if param.grad is not None]
        if not reduced:
            return
        self.context.end_reduce()
        streams = self.context.streams
        with torch.no_grad():
            for dtype, params in self.by_dtype(
                reduced, lambda param: self.policy.reduce_dtype or param.grad.dtype
            ):
                sizes = [param.part_numel for param in params]
                grads = params[0].rows.new_empty(self.world_size, sum(sizes), dtype=dtype)
                for param, pieces in zip(params, grads.split(sizes, 1), strict=True):
                    param.write_grad(pieces)
                grads.div_(self.world_size)  # before they are summed: a sum stays in the range of its terms
                streams.reduce_scatter.wait(streams.compute.record())
                with streams.reduce_scatter.run():
                    part = grads.new_empty(sum(sizes))
                    work = reduce_scatter_single(part, grads.flatten(), async_op=True)
                    streams.reduce_scatter.then(partial(self.add_grads, work, params, part.split(sizes)))
                self.context.reduced.append((streams.reduce_scatter.record(), grads))

    def add_grads(self, work: Any, params: list[FSDPParam], parts: Sequence[Tensor]) -> None:
        work.wait()
        with torch.no_grad():
            for param, part in zip(params, parts, strict=True):
                param.add_grad(part)

    def by_dtype(self, params: list[FSDPParam], dtype_of: Callable[[FSDPParam], torch.dtype]) -> Any:
        """Return pairs of a dtype and the parameters that travel in one buffer of it."""
        lists: dict[torch.dtype, list[FSDPParam]] = {}
        for param in params:
            lists.setdefault(dtype_of(param), []).append(param)
        return lists.items()

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.context.begin_forward()
        self.enter()
        self.context.guess_forward(self)
        call = Call() if torch.is_grad_enabled() else None
        self.running.append(call)

        def take(value: Any) -> Any:
            # The gradient of an alias of an input is there after all of the module's backward.
            if call is not None and isinstance(value, Tensor) and value.requires_grad:
                call.watches_inputs = True
                value = value.view_as(value)
                value.register_hook(lambda grad: self.after_backward(call))
            return cast(value, self.policy.param_dtype) if self.policy.cast_forward_inputs else value

        return tree_map(take, args), tree_map(take, kwargs)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        call = self.running.pop()
        self.context.end_forward()
        if self.policy.output_dtype is not None:
            output = tree_map(lambda value: cast(value, self.policy.output_dtype), output)
        if call is not None:
            for value in tree_leaves(output):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(lambda grad: self.before_backward(call))
                    self.calls.add(call)
            if call in self.calls:
                call.exits = self.context.exit(self)
        if not self.in_backward:
            self.leave(free=self.reshard_after_forward or not self.calls)
        return output

    def before_backward(self, call: Call) -> None:
        if not self.in_backward:
            self.in_backward = True
            self.context.first = self.context.first or self
            after_backward(self.finish if self.context.first is not self else self.context.finish)
        self.enter()
        if call.exits:
            self.context.gather_ahead(call.exits[-1], self)

    def on_grad(self, whole: Tensor) -> None:
        """Without inputs to watch, the last gradient of a parameter ends the backward of the module."""
        self.done.add(whole)
        wholes = {param.whole for param in self.params if param.whole.requires_grad}
        if self.done >= wholes and not any(call.watches_inputs for call in self.calls):
            self.finish()

    def after_backward(self, call: Call) -> None:
        self.calls.discard(call)
        if not self.calls:
            self.finish()
        else:
            self.leave(free=self.reshard_after_forward and self.reshard_after_backward)

    def finish(self) -> None:
        """End the backward of the module."""
        self.calls.clear()
        self.done.clear()
        self.in_backward = False
        self.settle()

    def settle(self) -> None:
        """Free and reduce what no backward to come needs."""
        self.leave(free=self.reshard_after_backward and not self.calls)
        for param in self.params:
            if not self.sync or param.sum is not None:
                param.add_up(self.policy.reduce_dtype)
        if self.sync:
            self.reduce()


class Context:
    """What all groups of a model share."""

    def __init__(self) -> None:
        self.groups: list[ParamGroup] = []
        self.first: ParamGroup | None = None  # whose backward began the backward
        self.ahead: ParamGroup | None = None  # whose gather has been started before it is needed
        self.depth = 0  # of forwards within forwards
        self.entries: list[ParamGroup] = []  # in the order in which this forward began them
        self.exits: list[ParamGroup] = []  # in the order in which this forward ended them
        self.last_entries: deque[ParamGroup] = (
            deque()
        )  # those of the last forward that this one has not come to
        self.reduced: list[tuple[StreamEvent, Tensor]] = (
            []
        )  # ends of reductions, and what they read until then

    @cached_property
    def streams(self) -> Any:
        return streams_for(
            next((param.rows.device.type for group in self.groups for param in group.params), "cpu")
        )

    def begin_forward(self) -> None:
        if self.depth == 0 and self.first is None:
            self.drop_ahead()
            for group in self.groups:
                if group.is_stale():
                    group.leave(free=True)
            # From now on, gathers read what the optimizer has written until now.
            self.streams.all_gather.wait(self.streams.compute.record())
            self.last_entries, self.entries = deque(self.entries), []
            self.exits = []
        self.depth += 1

    def guess_forward(self, group: ParamGroup) -> None:
        """Gather what came after `group` in the last forward."""
        if self.first is not None or not group.params:
            return
        self.entries.append(group)
        if group in self.last_entries:
            while self.last_entries.popleft() is not group:
                pass
            if self.last_entries:
                self.gather_ahead(self.last_entries[0], group)

    def exit(self, group: ParamGroup) -> list[ParamGroup]:
        """Note that `group` ends a forward; return those that did so before, which is the order of the backward from its end."""
        before = self.exits[:]
        if self.first is None and group.params:
            self.exits.append(group)
            return before
        return []

    def end_forward(self) -> None:
        self.depth -= 1
        if self.depth == 0 and self.first is None:
            self.drop_ahead()

    def gather_ahead(self, group: ParamGroup, running: ParamGroup) -> None:
        """Start the gather of a group that will probably be next, if it is not whole by then."""
        again = group is running and group.reshard_after_forward and group.reshard_after_backward
        if self.ahead is None and (again or not group.is_whole):
            group.start_gather()
            self.ahead = group

    def drop_ahead(self) -> None:
        """Drop a gather that nobody needed, after it has read the rows."""
        if self.ahead is not None:
            for event, *_ in self.ahead.gathers:
                self.streams.compute.wait(event)
            self.ahead.gathers.clear()
            self.ahead = None

    def end_reduce(self) -> None:
        """Let compute wait for all reductions, and drop what they read."""
        for event, _ in self.reduced:
            self.streams.compute.wait(event)
        self.reduced.clear()

    def finish(self) -> None:
        """End a backward: of groups that took part, and of gradients that others have from earlier ones."""
        self.first = None
        self.drop_ahead()
        for group in self.groups:
            if group.in_backward:
                group.finish()
            else:
                group.settle()
        self.end_reduce()


class FSDPModule:
    """The switches of a module, for it and all sharded modules below."""

    def set_requires_gradient_sync(self, value: bool) -> None:
        """Reduce gradients after a backward, or let them add up on each rank."""
        for group in groups_of(self):
            group.sync = value

    def set_reshard_after_backward(self, value: bool) -> None:
        """Free parameters after a backward, or keep them for the next forward."""
        for group in groups_of(self):
            group.reshard_after_backward = value


def groups_of(module: nn.Module) -> list[ParamGroup]:
    """Return the groups of a module and of those below."""
    return [inner._fsdp_group for inner in module.modules() if hasattr(inner, "_fsdp_group")]


def fully_shard(
    module: nn.Module,
    *,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
) -> nn.Module:
    """Shard the parameters of `module`, in place, over all ranks; return it.

    Parameters that an earlier call has sharded are left alone, so call it for inner modules first. From then on
    `module.parameters()` are this rank's rows, forwards and backwards compute with whole parameters, and the rows' `grad` is their
    part of the mean gradient.
    """
    owned: dict[nn.Parameter, Places] = {}
    for inner in module.modules():
        for name, param in inner._parameters.items():
            if param is not None and not hasattr(param, "_fsdp_param"):
                owned.setdefault(param, []).append((inner, name))
    params = [FSDPParam(param, places, mp_policy.param_dtype) for param, places in owned.items()]
    context = Context()
    for group in groups_of(module):
        group.context = context
    cls = type(module)
    module._fsdp_group = ParamGroup(module, params, context, mp_policy, reshard_after_forward)
    module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    context.groups = groups_of(module)
    return module
