"""Fully sharded data parallel training (FSDP), in one file.

Every rank keeps a chunk of rows of every parameter. Before a module computes, the ranks gather its parameters; afterwards they
free them. The backward does the same, and averages the gradients: each rank gets the rows that it keeps.

    padded_rows, rows_of      station 01: which rows a rank keeps
    ring_all_gather, ring_reduce_scatter      02: what collectives are made of
    replicate                 03: data parallel training without sharding
    fully_shard               03: shards the parameters of a module
    traffic                   05: the bytes that a training step moves, in closed form

How `fully_shard` works: the module gets a subclass of its class, whose `__call__` makes the parameters whole, computes, and frees
them. In the graph, `Unshard` stands between rows and whole parameters; its backward takes the gradients of all uses, and starts to
average them. The backward of a forward begins with the first gradient of its outputs. A `Unit` holds the parameters of one such
module, a `Model` what the units around and inside each other have in common: streams, and what is under way on them.

Collectives and streams come from `hwfsdp`. Everything else is here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from answers.beginning import padded_rows, rows_of, tree_leaves, tree_map
from hwfsdp.collectives import all_gather_flat, reduce_scatter_flat
from hwfsdp.streams import StreamEvent, after_backward, streams_for

Places = list[tuple[nn.Module, str]]  # modules, and names in them


# --- 03 Fully sharded ----------------------------------------------------------------------------------------


class Run:
    """One forward of a unit, as the backward will meet it."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.before: Run | None = None  # the one that ended before, whose backward will probably come next


class Unshard(torch.autograd.Function):
    """Stands in the graph between the rows of a unit and its whole parameters.

    It is made at the beginning of the unit's forward. Autograd runs what was made later first, so that its backward comes after all
    other backwards of this forward, with the gradients of all uses.
    """

    @staticmethod
    def forward(ctx: Any, run: Run, trained: list[int], *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.trained = run, trained
        ctx.set_materialize_grads(False)
        return tuple(run.unit.alias(index) for index in trained)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        unit = ctx.run.unit
        unit.end_backward(ctx.run)
        unit.take({index: grad for index, grad in zip(ctx.trained, grads, strict=True) if grad is not None})
        return (None,) * (2 + len(grads))  # the rows have theirs already, or will get them


# --- 08 Streams, with what is gathered ahead (09, 10) and reduced behind (10) ------------------------------


class Gather(NamedTuple):
    """An all-gather that has been started."""

    unit: Unit
    buffer: Tensor
    event: StreamEvent


class Reduction(NamedTuple):
    """A reduce-scatter that has been started: of the parameters with these indices, with full chunks of these sizes."""

    unit: Unit
    indices: list[int]
    sizes: list[int]
    packed: Tensor
    part: Tensor
    event: StreamEvent


class Model:
    """What the units of one model have in common: streams, and what is under way on them.

    Gathered buffers belong to the all-gather stream, everything else to compute.
    """

    def __init__(self, device: torch.device) -> None:
        self.units: list[Unit] = []
        self.streams = streams_for(device.type)
        self.ahead: Gather | None = None  # of a unit that will probably be next
        self.reduction: Reduction | None = None
        self.orders: dict[bool, list[Unit]] = (
            {}
        )  # of the last forward with gradients, and of the last one without
        self.order: list[Unit] = []  # of this forward, so far
        self.expected: deque[Unit] = deque()  # in the rest of this forward
        self.last: Run | None = None  # that has ended in this forward, and has a backward
        self.depth = 0  # of the forwards that are running
        self.in_backward = False

    def begin_forward(self) -> None:
        """Forget what an earlier forward has left, when a new one begins."""
        if not self.depth and self.in_backward and not backward_is_running():
            self.forget_backward()
        if not self.depth and not self.in_backward:
            for unit in self.units:
                if not unit.kept:
                    unit.free()
            # All that has been written to the rows so far comes before the gathers of this step.
            self.streams.all_gather.wait(self.streams.compute.record())
            self.order, self.expected = [], deque(self.orders.get(torch.is_grad_enabled(), []))
        self.depth += 1

    def enter(self, unit: Unit) -> None:
        """Make a unit whole that begins its forward, and start the gather of the one that came next in the last forward."""
        self.need(unit)
        if not self.in_backward:
            self.order.append(unit)
            if unit in self.expected:
                while self.expected.popleft() is not unit:
                    pass
            if self.expected:
                self.prefetch(self.expected[0])

    def end_forward(self) -> None:
        """Keep the order of the forward that is over, and drop a gather that no unit has used."""
        self.depth -= 1
        if not self.depth and not self.in_backward:
            self.orders[torch.is_grad_enabled()] = self.order
            self.last = None
            self.drop_ahead()

    def begin_backward(self) -> None:
        """Ask to be told when the backward that runs is over."""
        if not self.in_backward:
            self.in_backward = True
            after_backward(self.end_backward)

    def end_backward(self) -> None:
        """Complete the gradients, also of units that this backward did not reach, and leave nothing else of it."""
        for unit in self.units:
            unit.take({})
        self.finish_reduction()
        self.forget_backward()

    def forget_backward(self) -> None:
        """Leave nothing of a backward that is over, or has failed."""
        self.in_backward = False
        for unit in self.units:
            unit.runs.clear()
            unit.leave_backward()
        self.drop_ahead()
        if self.reduction is not None:
            self.streams.compute.wait(self.reduction.event)
            self.reduction = None

    # Gathers

    def need(self, unit: Unit) -> None:
        """Make a unit whole, with the gather that is under way for it if there is one."""
        if unit.whole:
            return
        if self.ahead is None or self.ahead.unit is not unit:
            self.drop_ahead()
            self.ahead = self.start_gather(unit)
        self.finish_gather(self.ahead)
        self.ahead = None
        unit.whole = True

    def prefetch(self, unit: Unit) -> None:
        """Start the gather of a unit that will probably be needed next, unless one is ahead already."""
        if self.ahead is None and not unit.whole:
            self.ahead = self.start_gather(unit)

    def drop_ahead(self) -> None:
        """Drop a wrong guess. What compute writes to the rows comes after its reads."""
        if self.ahead is not None:
            self.streams.compute.wait(self.ahead.event)
            self.ahead = None

    @torch.no_grad()
    def start_gather(self, unit: Unit) -> Gather:
        """Copy the rows to this rank's place in a new buffer, and gather the other places."""
        with self.streams.all_gather.run():
            buffer = unit.buffer(unit.sizes, unit.memory.dtype)
            mine = buffer.chunk(unit.world_size)[unit.rank]
            pieces = [
                piece[: rows.numel()].view(rows.shape)
                for piece, rows in zip(mine.split(unit.sizes), unit.rows, strict=True)
            ]
            torch._foreach_copy_(pieces, unit.rows)
        return Gather(unit, buffer, all_gather_flat(buffer, mine, None, self.streams.all_gather, unit.name))

    @torch.no_grad()
    def finish_gather(self, gather: Gather) -> None:
        """Copy what has been gathered to its place. The buffer's memory is not used again before that."""
        unit, buffer, event = gather
        self.streams.compute.wait(event)
        unit.memory.untyped_storage().resize_(unit.memory.numel() * unit.memory.element_size())
        targets = unit.memory.data.split([unit.world_size * size for size in unit.sizes])
        torch.split_with_sizes_copy(
            buffer.view(unit.world_size, -1),
            unit.sizes,
            dim=1,
            out=[target.view(unit.world_size, -1) for target in targets],
        )
        self.streams.all_gather.wait(self.streams.compute.record())

    # Reductions

    def start_reduction(self, unit: Unit, indices: list[int], sizes: list[int], packed: Tensor) -> None:
        """Start to average what compute has packed."""
        part = packed.new_empty(sum(sizes))
        self.streams.reduce_scatter.wait(self.streams.compute.record())
        event = reduce_scatter_flat(part, packed, None, self.streams.reduce_scatter, unit.name)
        self.reduction = Reduction(unit, indices, sizes, packed, part, event)

    @torch.no_grad()
    def finish_reduction(self) -> None:
        """Add this rank's rows of the mean to the gradients of the rows, and let the buffers go."""
        if self.reduction is None:
            return
        unit, indices, sizes, _, part, event = self.reduction
        self.streams.compute.wait(event)
        sums, means = [], []
        for index, piece in zip(indices, part.split(sizes), strict=True):
            rows = unit.rows[index]
            mean = piece[: rows.numel()].view(rows.shape).to(rows.dtype)
            if rows.grad is None:
                rows.grad = mean
            else:
                sums.append(rows.grad)
                means.append(mean)
        if sums:
            torch._foreach_add_(sums, means)
        self.reduction = None


# --- 05 Groups ---------------------------------------------------------------------------------------------


class Unit:
    """The parameters that one call of `fully_shard` has claimed: their rows, and memory for them as a whole.

    The whole parameters lie one after the other in `memory`, each with its padding, which is empty between uses. It is the same storage
    in every use: what autograd has saved of a forward is there again when the backward has gathered.
    """

    def __init__(
        self,
        model: Model,
        name: str,
        claimed: dict[nn.Parameter, Places],
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool,
    ) -> None:
        self.model, self.name, self.policy = model, name, policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.sync = True
        self.places = list(claimed.values())
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.runs: set[Run] = set()  # whose backward has begun and is not over
        self.whole = False
        self.kept = False  # whole since an earlier backward
        self.sums: dict[int, Tensor] = {}  # whole gradients of backwards that have not been reduced
        self.rows: list[nn.Parameter] = []
        self.sizes: list[int] = []  # elements of a full chunk
        self.memory: Tensor | None = None
        self.wholes: list[Tensor] = []  # parts of `memory`
        if not claimed:
            return

        first = next(iter(claimed))
        dtypes = {policy.param_dtype or parameter.dtype for parameter in claimed}
        if len(dtypes) > 1:
            raise ValueError(f"the parameters of {name} have several dtypes: {dtypes}")
        for parameter in claimed:
            if not parameter.dim():
                raise ValueError(f"{name} has a parameter without rows")
            start, stop = rows_of(len(parameter), self.world_size, self.rank)
            rows = nn.Parameter(parameter.detach()[start:stop].clone(), requires_grad=parameter.requires_grad)
            self.rows.append(rows)
            self.sizes.append(padded_rows(len(parameter), self.world_size) * math.prod(parameter.shape[1:]))
        dtype = policy.param_dtype or first.dtype
        self.memory = torch.empty(self.world_size * sum(self.sizes), dtype=dtype, device=first.device)
        self.padded = any(len(parameter) % self.world_size for parameter in claimed)
        offset = 0
        for parameter, size in zip(claimed, self.sizes, strict=True):
            self.wholes.append(self.memory[offset : offset + parameter.numel()].view(parameter.shape))
            offset += self.world_size * size
        self.memory.untyped_storage().resize_(0)
        self.register(self.rows)

    # Parameters of the module

    def register(self, tensors: Sequence[Tensor]) -> None:
        """Make `tensors` the parameters that the module computes with."""
        for places, tensor in zip(self.places, tensors, strict=True):
            for module, name in places:
                module._parameters[name] = tensor

    def registered(self) -> list[Tensor]:
        """Return what the module computes with at the moment."""
        return [module._parameters[name] for (module, name), *_ in self.places]

    def alias(self, index: int) -> Tensor:
        """Return a new tensor in the memory of a whole parameter; autograd counts no writes in it but its own."""
        return self.wholes[index].data

    # Memory

    def free(self) -> None:
        """Give the memory of the whole parameters back, if there is some and no backward needs it."""
        if self.whole and not self.runs:
            self.whole = self.kept = False
            self.memory.untyped_storage().resize_(0)

    def buffer(self, sizes: list[int], dtype: torch.dtype) -> Tensor:
        """Make memory for the full chunks of all ranks."""
        make = torch.zeros if self.padded else torch.empty
        return make(self.world_size * sum(sizes), dtype=dtype, device=self.memory.device)

    # Gradients

    @torch.no_grad()
    def take(self, grads: dict[int, Tensor]) -> None:
        """Add whole gradients to what this rank has kept of earlier backwards; reduce the sums, or keep them."""
        if self.sums or not self.sync:
            for index, grad in grads.items():
                if index in self.sums:
                    self.sums[index] += grad
                else:
                    self.sums[index] = grad.to(self.policy.reduce_dtype or grad.dtype, copy=True)
            grads = self.sums
        if self.sync and grads:
            self.sums = {}
            self.reduce(grads)

    def reduce(self, grads: dict[int, Tensor]) -> None:
        """Lay out whole gradients by the ranks that they are for, and start to average them."""
        self.model.finish_reduction()  # it had the time of this unit's backward; now its buffer can go
        sizes = [self.sizes[index] for index in grads]
        packed = self.buffer(sizes, self.policy.reduce_dtype or next(iter(grads.values())).dtype)
        pieces, sources = [], []
        columns = packed.view(self.world_size, -1).split(sizes, dim=1)
        for grad, column in zip(grads.values(), columns, strict=True):
            chunk = padded_rows(len(grad), self.world_size)
            full = len(grad) // max(chunk, 1)  # ranks with a full chunk; one more may have a part of one
            pieces.append(column[:full])
            sources.append(grad[: full * chunk].reshape(full, column.shape[1]))
            if rest := grad[full * chunk :].reshape(-1).numel():
                pieces.append(column[full, :rest])
                sources.append(grad[full * chunk :].reshape(-1))
        torch._foreach_copy_(pieces, sources)
        self.model.start_reduction(self, list(grads), sizes, packed)

    # Forward

    def begin_forward(self, run: Run, args: Any, kwargs: Any) -> tuple[Any, Any, set[int]]:
        """Make the parameters whole and known to autograd; return inputs that tell when their gradients are there."""
        self.model.begin_forward()
        inputs: set[int] = set()
        if self.policy.cast_forward_inputs:
            args, kwargs = cast(args, self.policy.param_dtype), cast(kwargs, self.policy.param_dtype)

        def watch(value: Any) -> Any:
            if isinstance(value, Tensor) and value.requires_grad:
                value = value.view_as(value)
                value.register_hook(lambda grad: self.end_backward(run))
                inputs.add(id(value))
            return value

        if torch.is_grad_enabled():
            args, kwargs = tree_map(watch, args), tree_map(watch, kwargs)
        if self.rows:
            self.model.enter(self)
            trained = [index for index, rows in enumerate(self.rows) if rows.requires_grad]
            wholes = [self.alias(index) for index in range(len(self.rows))]
            for index, whole in zip(
                trained, Unshard.apply(run, trained, *[self.rows[index] for index in trained]), strict=True
            ):
                wholes[index] = whole
            self.register(wholes)
        return args, kwargs, inputs

    def end_forward(self, run: Run, output: Any, inputs: set[int]) -> Any:
        """Wait for the gradients of the outputs; return these."""
        output = cast(output, self.policy.output_dtype)
        watched = [
            value
            for value in tree_leaves(output)
            if isinstance(value, Tensor) and value.requires_grad and id(value) not in inputs
        ]
        for value in watched:
            value.register_hook(lambda grad: self.begin_backward(run))
        if watched and self.rows and not self.model.in_backward:
            run.before, self.model.last = self.model.last, run
        return output

    def leave_forward(self, before: list[Tensor]) -> None:
        """Register what was registered before this forward, and free what the backward can gather again."""
        self.register(before)
        self.kept = False
        if self.reshard_after_forward or not torch.is_grad_enabled():
            self.free()
        self.model.end_forward()

    # Backward

    def begin_backward(self, run: Run) -> None:
        """Make the parameters whole. Layers that run again in this backward find them registered."""
        self.model.begin_backward()
        self.runs.add(run)
        if self.rows:
            self.model.need(self)
            self.register(
                [self.alias(index).requires_grad_(rows.requires_grad) for index, rows in enumerate(self.rows)]
            )
            if run.before is not None:
                self.model.prefetch(run.before.unit)

    def end_backward(self, run: Run) -> None:
        """Close a run, if its backward has begun."""
        if run in self.runs:
            self.runs.remove(run)
            self.leave_backward()

    def leave_backward(self) -> None:
        """Register the rows, and free the whole parameters unless the switch says to keep them."""
        if self.whole and not self.runs:
            self.register(self.rows)
            self.kept = True
            if self.reshard_after_backward:
                self.free()


# --- 03 Modules, and the switches of 07 --------------------------------------------------------------------


class Sharded(nn.Module):
    """What `fully_shard` adds to the class of a module."""

    _unit: Unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit, run = self._unit, Run(self._unit)
        before = unit.registered()
        try:
            args, kwargs, inputs = unit.begin_forward(run, args, kwargs)
            return unit.end_forward(run, super().__call__(*args, **kwargs), inputs)
        finally:  # a forward that is run again in a backward may stop halfway
            unit.leave_forward(before)

    def set_requires_gradient_sync(self, value: bool) -> None:
        """Say whether backwards reduce gradients, or only add them up on this rank; for this module and all below."""
        for unit in units_of(self):
            unit.sync = value

    def set_reshard_after_backward(self, value: bool) -> None:
        """Say whether backwards free the whole parameters; for this module and all below."""
        for unit in units_of(self):
            unit.reshard_after_backward = value


def backward_is_running() -> bool:
    """Tell a layer that runs again in a backward from a forward after a backward that has failed."""
    try:
        after_backward(lambda: None)
    except RuntimeError:  # there is no backward that could end
        return False
    return True


def units_of(module: nn.Module) -> list[Unit]:
    """Return the units of a module and of all modules in it."""
    return [inner._unit for inner in module.modules() if isinstance(inner, Sharded)]


# --- 06 Casts ----------------------------------------------------------------------------------------------


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Cast all floating-point tensors in nested lists, tuples and dicts."""

    def to(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree if dtype is None else tree_map(to, tree)


# --- 03 The entrance ---------------------------------------------------------------------------------------


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
    below = units_of(module)
    if isinstance(module, Sharded):
        raise ValueError("this module has been sharded before")
    known = {rows for unit in below for rows in unit.rows}
    claimed: dict[nn.Parameter, Places] = {}
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None and parameter not in known:
                claimed.setdefault(parameter, []).append((inner, name))

    tensors = [*claimed, *known]
    model = Model(tensors[0].device if tensors else torch.device("cpu"))
    module._unit = Unit(model, type(module).__name__, claimed, mp_policy, reshard_after_forward)
    module.__class__ = type(f"Sharded{type(module).__name__}", (Sharded, type(module)), {})
    model.units = units_of(module)
    for unit in model.units:
        unit.model = model
    for name, inner in module.named_modules():
        if isinstance(inner, Sharded) and name:
            inner._unit.name = name
    return module
