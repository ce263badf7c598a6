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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from my_fsdp import padded_rows, rows_of, tree_leaves, tree_map
from hwfsdp.collectives import all_gather_flat, reduce_scatter_flat
from hwfsdp.streams import StreamEvent, after_backward, streams_for

Places = list[tuple[nn.Module, str]]  # modules, and names in them


# --- 03 Fully sharded ----------------------------------------------------------------------------------------


class Unit:
    """A module and the parameters it claimed: one flat tensor of rows that stays, one flat tensor of wholes that comes and goes.

    `shard` is [chunk]: this rank's rows of each parameter, each filled up to a full chunk. The parameters are views of it.
    `flat` is [W * chunk]: all parameters whole, one after another, each with its padding at its end; `wholes` are views of it.
    """

    def __init__(
        self, module: nn.Module, places: dict[nn.Parameter, Places], policy: MixedPrecisionPolicy, keep: bool
    ) -> None:
        self.policy = policy
        self.reshard_after_forward = not keep
        self.reshard_after_backward = self.sync = True
        self.below = [inner._unit for inner in module.modules() if hasattr(inner, "_unit")]
        module._unit = self
        self.root = self
        for unit in self.below:
            unit.root = self
        self.outermost: Unit | None = None  # of a forward that runs
        self.ahead: Unit | None = None  # what is gathered ahead
        self.calls: list[tuple[int, Unit]] = []  # ends of calls that a backward may reach, in order
        self.order: list[Unit] = []  # of the last forward in which this unit was the outermost one
        self.ran: list[Unit] = []  # of this one
        self.at = 0  # how far this one has come in the order of the last one
        self.reducing: tuple[StreamEvent, Tensor] | None = None
        self.coming: tuple[StreamEvent, Tensor] | None = None  # what is gathered and not yet used
        module.set_requires_gradient_sync = lambda value: self.switch("sync", value)
        module.set_reshard_after_backward = lambda value: self.switch("reshard_after_backward", value)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        first = next(iter(places), next(module.parameters(), torch.empty(0)))
        self.streams = streams_for(first.device.type)  # this and the next three: only the root's are used
        self.places = list(places.values())
        self.sizes = [padded_rows(len(p), self.world_size) * math.prod(p.shape[1:]) for p in places]
        self.shard = torch.zeros(sum(self.sizes), dtype=first.dtype, device=first.device)
        self.flat = self.shard.new_empty(
            self.world_size * len(self.shard), dtype=policy.param_dtype or first.dtype
        )
        self.params: list[nn.Parameter] = []
        self.wholes: list[nn.Parameter] = []
        for param, mine, whole in zip(places, self.shard.split(self.sizes), self.regions(), strict=True):
            start, stop = rows_of(len(param), self.world_size, self.rank)
            rows = mine[: (stop - start) * math.prod(param.shape[1:])].view(stop - start, *param.shape[1:])
            rows.copy_(param.detach()[start:stop])
            self.params.append(nn.Parameter(rows, param.requires_grad))
            self.wholes.append(nn.Parameter(whole[: param.numel()].view(param.shape), param.requires_grad))
            self.params[-1]._unit = self
        self.name = type(module).__name__
        self.whole = True
        self.trained = [i for i, param in enumerate(self.params) if param.requires_grad]
        self.pieces: Tensor | None = (
            None  # sums of gradients that wait for a reduction, [W, elements of a rank]
        )
        self.with_grad: set[int] = set()  # whose gradients they are
        self.will_finish = False
        self.free()
        module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after_forward, with_kwargs=True)

    def regions(self) -> tuple[Tensor, ...]:
        return self.flat.data.split([self.world_size * size for size in self.sizes])

    def register(self, tensors: list[nn.Parameter]) -> None:
        for tensor, places in zip(tensors, self.places, strict=True):
            for module, name in places:
                module._parameters[name] = tensor

    def start_gather(self) -> None:
        gathers = self.root.streams.all_gather
        with gathers.run():
            gathered = self.flat.new_empty(self.world_size, len(self.shard))
            gathered[self.rank].copy_(self.shard)
        event = all_gather_flat(gathered.view(-1), gathered[self.rank], None, gathers, self.name)
        self.coming = event, gathered

    def gather_ahead(self) -> None:
        if self.params and not self.whole and self.root.ahead is None:
            self.start_gather()
            self.root.ahead = self

    def drop_ahead(self) -> None:
        """Forget a gather that no unit used; it still reads rows, so nobody may write to them before its end."""
        if self.root.ahead:
            self.root.streams.compute.wait(self.root.ahead.coming[0])
            self.root.ahead.coming = self.root.ahead = None

    def gather(self) -> None:
        self.register(self.wholes)
        if self.whole or not self.params:
            return
        if self.root.ahead is not self:
            self.root.drop_ahead()
            self.start_gather()
        self.root.ahead = None
        event, gathered = self.coming
        self.coming = None
        streams = self.root.streams
        streams.compute.wait(event)
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        for region, pieces in zip(self.regions(), gathered.split(self.sizes, 1), strict=True):
            region.view_as(pieces).copy_(pieces)
        streams.all_gather.wait(
            streams.compute.record()
        )  # so that no later gather gets the memory of `gathered` too early
        self.whole = True

    def free(self, reshard: bool = True) -> None:
        self.register(self.params)
        if not reshard:
            return
        self.flat.untyped_storage().resize_(0)
        self.whole = False

    def switch(self, name: str, value: bool) -> None:
        for unit in [self, *self.below]:
            setattr(unit, name, value)

    def wait_for_reduction(self) -> None:
        if self.root.reducing:
            self.root.streams.compute.wait(self.root.reducing[0])
            self.root.reducing = None

    def pack(self) -> bool:
        """Add the wholes' gradients to `pieces`, and say if there are any."""
        packed = [i for i in self.trained if self.wholes[i].grad is not None]
        if packed:
            self.wait_for_reduction()
        sizes = [self.sizes[i] for i in self.trained]
        if packed and self.pieces is None:
            dtype = self.policy.reduce_dtype or self.flat.dtype
            self.pieces = self.flat.new_zeros(self.world_size, sum(sizes), dtype=dtype)
        for i, piece in zip(self.trained, self.pieces.split(sizes, 1) if packed else (), strict=bool(packed)):
            if i in packed:
                grad, self.wholes[i].grad = self.wholes[i].grad, None
                piece += nn.functional.pad(grad.reshape(-1), (0, piece.numel() - grad.numel())).view_as(piece)
        self.with_grad.update(packed)
        return bool(packed)

    def reduce(self) -> None:
        """Add the mean of all ranks' `pieces` to the rows' gradients."""
        streams = self.root.streams
        self.wait_for_reduction()
        streams.reduce_scatter.wait(streams.compute.record())
        with streams.reduce_scatter.run():
            part = self.pieces.new_empty(self.pieces.shape[1])
        reduce_scatter_flat(part, self.pieces.view(-1), None, streams.reduce_scatter, self.name)
        pieces, self.pieces = self.pieces, None
        with_grad, self.with_grad = self.with_grad, set()

        def add() -> None:
            parts = part.to(self.shard.dtype).split([self.sizes[i] for i in self.trained])
            for i, mine in zip(self.trained, parts, strict=True):
                if i in with_grad:
                    param = self.params[i]
                    mine = mine[: param.numel()].view_as(param)
                    if param.grad is None:
                        param.grad = mine
                    else:
                        param.grad += mine

        with streams.reduce_scatter.run():
            streams.reduce_scatter.then(add)
        self.root.reducing = streams.reduce_scatter.record(), pieces

    # What follows are the hooks, in the order in which a step calls them.
    #
    # A call is known by the count of hooks at its start. A backward runs in the reverse order of its forward. So when a call
    # starts its backward, all calls that started after this one's end are over, even those that no input told about it.

    hooks = 0
    started: dict[int, "Unit"] = {}  # calls whose backward is under way, of all units

    def begin(self) -> None:
        """Begin a forward of which this unit is the outermost one."""
        root = self.root
        root.outermost = self
        root.drop_ahead()
        root.streams.all_gather.wait(root.streams.compute.record())  # the optimizer has written rows
        self.ran, self.at = [], 0

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        root = self.root
        if self is not root and any(unit.will_finish for unit in [root, *root.below]):  # a unit is recomputed
            self.gather()
        else:
            if self is root or root.outermost in (None, self):
                self.begin()
            self.gather()
            outer = root.outermost
            outer.ran.append(self)
            if self in outer.order[outer.at :]:
                outer.at = outer.order.index(self, outer.at) + 1
                if outer.at < len(outer.order):
                    outer.order[outer.at].gather_ahead()
        Unit.hooks += 1
        start = self.start = Unit.hooks
        inputs: list[Tensor] = []

        def watch(value: Any) -> Any:
            # A view is this call's own: its gradient is there when the call's backward is over, whoever else uses the input.
            if self.policy.cast_forward_inputs:
                value = cast(value, self.policy.param_dtype)
            if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
                value = value.view_as(value)
                inputs.append(value)
            return value

        args, kwargs = tree_map(watch, args), tree_map(watch, kwargs)
        if inputs:
            torch.autograd.graph.register_multi_grad_hook(inputs, lambda _: self.close(start))
        return args, kwargs

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        Unit.hooks += 1
        start, end = self.start, Unit.hooks
        if self.policy.output_dtype:
            output = tree_map(lambda value: cast(value, self.policy.output_dtype), output)
        tracked = [
            value for value in tree_leaves(output) if isinstance(value, Tensor) and value.requires_grad
        ]
        for value in tracked:
            value.register_hook(lambda _: self.before_backward(start, end))
        if tracked and self.params:
            self.root.calls.append((end, self))
        if self not in Unit.started.values():
            self.free(self.reshard_after_forward or not torch.is_grad_enabled())
        if self.root.outermost is self:
            self.root.outermost = None
            self.root.drop_ahead()
            self.order = self.ran
        return output

    def before_backward(self, start: int, end: int) -> None:
        for other in sorted(Unit.started, reverse=True):
            if other > end:
                Unit.started[other].close(other)
        first = start not in Unit.started
        Unit.started[start] = self
        self.gather()
        earlier = [unit for other, unit in self.root.calls if other < end]
        if first and earlier:
            earlier[-1].gather_ahead()
        if not self.will_finish:
            self.will_finish = True
            after_backward(self.finish)

    def close(self, start: int) -> None:
        Unit.started.pop(start, None)
        if self not in Unit.started.values():
            self.free(self.reshard_after_backward)
            if self.pack() and self.sync:
                self.reduce()

    def finish(self) -> None:
        self.will_finish = False
        self.root.outermost = None
        for unit in [self, *self.below]:
            Unit.started = {start: other for start, other in Unit.started.items() if other is not unit}
            unit.free(unit.reshard_after_backward)
            unit.pack()
            if unit.pieces is not None and unit.sync:
                unit.reduce()
        self.root.calls = [call for call in self.root.calls if call[1] not in (self, *self.below)]
        self.root.drop_ahead()
        self.wait_for_reduction()


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if dtype and isinstance(value, Tensor) and value.is_floating_point() else value


def fully_shard(
    module: nn.Module,
    *,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Shard the parameters of `module`, in place, over all ranks; return it.

    Parameters that an earlier call has sharded are left alone, so call it for inner modules first. From then on
    `module.parameters()` are this rank's rows, forwards and backwards compute with whole parameters, and the rows' `grad` is their
    part of the mean gradient.
    """
    places: dict[nn.Parameter, Places] = {}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None and not hasattr(param, "_unit"):
                places.setdefault(param, []).append((owner, name))
    Unit(module, places, mp_policy, keep=not reshard_after_forward)
    return module
