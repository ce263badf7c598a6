"""Fully sharded data parallel training (FSDP), in one file.

Every rank keeps a chunk of rows of every parameter. Before a module computes, the ranks gather its parameters; afterwards they
free them. The backward does the same, and averages the gradients: each rank gets the rows that it keeps.

    padded_rows, rows_of      station 01: which rows a rank keeps
    ring_all_gather, ring_reduce_scatter      02: what collectives are made of
    replicate                 03: data parallel training without sharding
    Weight                    03: one parameter: the rows that stay, and how the whole is laid out
    Enter, Exit               03: autograd functions around a unit: in a backward, Exit is its beginning and Enter its end
    Hooks                     03: lets autograd save handles in place of whole parameters
    Unit                      03: the parameters that one module owns, how they come and go, and what becomes of their gradients
    fully_shard               03: gives a module its unit
    traffic                   05: the bytes that a training step moves, in closed form
    FSDPModule                07: the switches that a training loop sets
    Context                   08: streams, and the order of forwards, shared by all groups of a model


Collectives and streams come from `hwfsdp`. Everything else is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from my_fsdp import padded_rows, rows_of, tree_leaves, tree_map
from hwfsdp.collectives import all_gather_flat, reduce_scatter_flat
from hwfsdp.streams import StreamEvent, after_backward, streams_for

Places = list[tuple[nn.Module, str]]  # modules, and names in them


# --- 03 Fully sharded ----------------------------------------------------------------------------------------


class Weight:
    """One parameter: the rows that stay on this rank, and how the whole is laid out."""

    def __init__(self, param: nn.Parameter, places: Places) -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        self.rows, self.places = param, places
        self.shape, self.numel = param.shape, param.numel()
        n = param.shape[0] if param.dim() else 1
        whole = param.detach().reshape(n, *param.shape[1:])
        start, stop = rows_of(n, world_size, rank)
        self.chunk = padded_rows(n, world_size) * math.prod(param.shape[1:])  # elements of a full chunk
        # The parameter stays the same object: whoever has it sees its rows from now on.
        param.data = whole[start:stop].clone()
        param._sharded_by_my_fsdp = True


class Call:
    """One forward of a unit that autograd remembers, from its `Exit` to its `Enter` in the backward."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        # The units whose forward ended before this one's. Backwards probably begin in the reverse order.
        self.order: list[Unit] = []
        self.position = 0


class Enter(torch.autograd.Function):
    """Forward: inputs and whole parameters come into a unit. Backward: the unit has the gradients of all of them, and is over."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, wholes: list[Tensor], n_inputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.n_inputs = call, n_inputs
        inputs, rows = tensors[:n_inputs], tensors[n_inputs:]
        outputs = [whole.detach() for whole in wholes]
        ctx.mark_non_differentiable(
            *(out for out, row in zip(outputs, rows, strict=True) if not row.requires_grad)
        )
        return *(tensor.detach() for tensor in inputs), *outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        n = ctx.n_inputs
        ctx.call.unit.end_backward(ctx.call, list(grads[n:]))
        return None, None, None, *grads[:n], *(None for _ in grads[n:])


class Exit(torch.autograd.Function):
    """Forward: outputs leave a unit. Backward: the unit's backward begins."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.call.unit.begin_backward(ctx.call)
        return None, *grads


class Handle(NamedTuple):
    """What autograd saves in place of a whole parameter, or of a view of it."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Keep(torch.autograd.Function):
    """Saves a tensor as any operation would: through the saved-tensors hooks that are now in force, if there are some."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.detach()


class Hooks(torch.autograd.graph.saved_tensors_hooks):
    """Saves a handle in place of each whole parameter of a unit. All else is saved as it would be without these hooks.

    Of several saved-tensors hooks, only the innermost are called. So these step aside to let those around them work, such as
    the hooks of a checkpoint.
    """

    def __init__(self, unit: Unit) -> None:
        super().__init__(self.pack, self.unpack)
        self.unit = unit
        self.index_of = {whole.untyped_storage()._cdata: index for index, whole in enumerate(unit.wholes)}

    def pack(self, tensor: Tensor) -> Any:
        index = self.index_of.get(tensor.untyped_storage()._cdata)
        if index is not None:
            return Handle(index, tensor.size(), tensor.stride(), tensor.storage_offset())
        self.__exit__()
        try:
            with torch.enable_grad():
                return Keep.apply(
                    tensor.new_empty(0, dtype=torch.float32).requires_grad_(), tensor.detach()
                ).grad_fn
        finally:
            self.__enter__()

    def unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, Handle):
            return saved.saved_tensors[0]
        self.unit.gather_in_backward()
        return self.unit.wholes[saved.index].as_strided(*saved[1:])


def through(
    function: type[torch.autograd.Function], head: tuple[Any, ...], tree: Any, more: Sequence[Tensor]
) -> Any:
    """Send the tensors of a tree that need gradients through a function. Return the tree of what came out, and the rest."""
    tensors: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.requires_grad and not any(leaf is tensor for tensor in tensors):
            tensors.append(leaf)
    if function is Enter:
        head = *head, len(tensors)
    if not tensors and not any(tensor.requires_grad for tensor in more):
        return tree, None
    made = function.apply(*head, *tensors, *more)
    of = {id(tensor): out for tensor, out in zip(tensors, made, strict=False)}
    return tree_map(lambda leaf: of.get(id(leaf), leaf), tree), made[len(tensors) :]


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors of a tree; None casts nothing."""
    if dtype is None:
        return tree
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, tree
    )


class Reduction(NamedTuple):
    """Gradients on their way: a packed buffer and this rank's part of it, to be kept until the event, and what to do then."""

    packed: Tensor
    part: Tensor
    over: StreamEvent
    add_to_rows: Callable[[Tensor], None]


class Context:
    """What the units of a model share: streams, the orders of forwards and backwards, and what is on its way."""

    def __init__(self, units: list[Unit], device_type: str) -> None:
        self.units = units
        self.streams = streams_for(device_type)
        self.rows_written: StreamEvent | None = None  # after the optimizer's last writes
        self.ahead: Unit | None = None  # gathered ahead, or about to be
        self.lingering: Unit | None = None  # recomputed last, and still whole for its backward
        self.reduction: Reduction | None = None  # the one in flight
        self.waiting_for_end = False
        # Forwards, as they begin: those of the last forward of the model, and of this one.
        self.depth = 0
        self.last_order: list[Unit] = []
        self.order: list[Unit] = []
        self.position = 0  # in the last order
        # Forwards, as they end.
        self.ended: list[Unit] = []
        self.cursor = 0  # the backward has come down to here

    # Gathers.

    def start(self, unit: Unit) -> None:
        if self.rows_written is None:
            self.rows_written = self.streams.compute.record()
        unit.start_gather()

    def fetch(self, unit: Unit) -> None:
        """Make a unit whole that is not."""
        if self.ahead is not unit:
            self.drop_ahead()
            self.start(unit)
        self.ahead = None
        unit.finish_gather()

    def prefetch(self, current: Unit, following: Sequence[Unit]) -> None:
        """Start to gather the first of these units that has to be."""
        for unit in following if self.ahead is None else ():
            if unit is current:
                return
            if unit.wholes is None:
                self.ahead = unit
                return self.start(unit)

    def drop_ahead(self) -> None:
        """Forget a gather that was a wrong guess."""
        if self.ahead is not None:
            self.ahead.drop_gather()
            self.ahead = None

    def only(self, unit: Unit) -> None:
        """Let no unit but this one linger."""
        if self.lingering is not None and self.lingering is not unit:
            self.lingering.release()
            self.lingering = None

    # Forwards.

    def begin_forward(self, unit: Unit) -> None:
        """A unit is about to compute its forward."""
        if self.depth == 0:
            self.rows_written = self.streams.compute.record()
            self.order, self.ended, self.position = [], [], 0
            for other in self.units:
                other.forget_stale()
        self.depth += 1
        unit.gather()
        if unit.weights:
            self.order.append(unit)
            for start in (self.position, 0):
                if unit in self.last_order[start:]:
                    self.position = self.last_order.index(unit, start) + 1
                    break
            self.prefetch(unit, self.last_order[self.position :])

    def end_forward(self, call: Call) -> None:
        call.order, call.position = self.ended, len(self.ended)
        if call.unit.weights:
            self.ended.append(call.unit)
        self.depth -= 1
        if self.depth == 0:
            self.drop_ahead()
            self.last_order, self.order, self.cursor = self.order, [], len(self.ended)

    # Backwards.

    def begin_forward_again(self, call: Call) -> None:
        """A unit is about to compute its forward in a backward."""
        call.order, call.position = self.ended, self.cursor
        while call.position > 0 and (
            call.position == len(self.ended) or self.ended[call.position] is not call.unit
        ):
            call.position -= 1
        self.begin_backward(call)

    def begin_backward(self, call: Call) -> None:
        """A unit is about to compute its backward."""
        self.only(call.unit)
        call.unit.gather()
        if call.order is self.ended:
            self.cursor = call.position
        self.prefetch(call.unit, call.order[: call.position][::-1])

    def hears_the_end(self) -> bool:
        """Say whether a backward is running. If so, its end will be heard."""
        try:
            after_backward(self.end if not self.waiting_for_end else lambda: None)
            self.waiting_for_end = True
        except RuntimeError:  # no backward is running
            if self.waiting_for_end:
                self.forget()
            self.waiting_for_end = False
        return self.waiting_for_end

    def forget(self) -> None:
        """Leave nothing of a backward that has failed."""
        self.lingering = None
        self.drop_ahead()
        if self.reduction is not None:
            self.streams.compute.wait(self.reduction.over)
            self.reduction = None
        for unit in self.units:
            unit.users.clear()
            unit.expected.clear()
            unit.packed, unit.packed_weights, unit.kept = None, {}, False
            unit.release()

    def finish_reduction(self) -> None:
        """Wait for the reduction in flight, and give its buffers back."""
        if self.reduction is not None:
            self.streams.compute.wait(self.reduction.over)
            self.reduction.add_to_rows(self.reduction.part)
            self.reduction = None

    def end(self) -> None:
        """Finish a backward."""
        self.waiting_for_end = False
        self.lingering = None
        self.drop_ahead()
        for unit in self.units:
            unit.end()
        self.finish_reduction()
        self.rows_written, self.ended, self.cursor = None, [], 0


class Unit:
    """The parameters that one module owns, and what happens around its forwards and backwards."""

    def __init__(
        self, weights: list[Weight], name: str, policy: MixedPrecisionPolicy, reshard_after_forward: bool
    ) -> None:
        self.weights, self.name, self.policy = weights, name, policy
        self.reshard_after_forward, self.reshard_after_backward, self.sync = reshard_after_forward, True, True
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.context: Context | None = (
            None  # shared with the units around it and in it, from the first forward on
        )
        self.chunks = sum(weight.chunk for weight in weights)
        self.wholes: list[Tensor] | None = None  # while this unit is whole
        self.users: set[Call] = set()  # forwards and backwards that need it whole
        self.arriving: tuple[Tensor, StreamEvent] | None = (
            None  # a buffer, and when the gather into it is over
        )
        self.expected: set[Call] = set()  # forwards whose backward shall find this unit whole
        self.kept = False  # whole from a backward to a forward
        self.versions: list[int] = []  # of the rows, when they were gathered
        self.installed: list[Tensor] = [weight.rows for weight in weights]
        # Gradients of the weights that have some, packed for their reduction: for each rank, its chunks side by side.
        self.packed: Tensor | None = None
        self.packed_weights: dict[int, Weight] = {}

    # Parameters: gathered, installed, freed.

    def gather(self) -> None:
        """Make the parameters whole, if they are not."""
        if not self.weights:
            self.wholes = []
        elif self.wholes is None:
            self.context.fetch(self)

    def start_gather(self) -> None:
        """Send for the parameters."""
        streams = self.context.streams
        streams.all_gather.wait(self.context.rows_written)
        self.versions = [weight.rows._version for weight in self.weights]
        with torch.no_grad(), streams.all_gather.run():
            rows = self.weights[0].rows
            buffer = rows.new_empty(self.world_size, self.chunks, dtype=self.policy.param_dtype or rows.dtype)
            part, rows = buffer[self.rank], [weight.rows.view(-1) for weight in self.weights]
            pieces = part.split([weight.chunk for weight in self.weights])
            torch._foreach_copy_([piece[: len(own)] for piece, own in zip(pieces, rows, strict=True)], rows)
        self.arriving = buffer, all_gather_flat(buffer.view(-1), part, None, streams.all_gather, self.name)

    def finish_gather(self) -> None:
        """Let compute wait for the parameters, and lay each of them out."""
        streams = self.context.streams
        buffer, arrived = self.arriving
        streams.compute.wait(arrived)
        with torch.no_grad():
            padded = [buffer.new_empty(self.world_size, weight.chunk) for weight in self.weights]
            torch.split_with_sizes_copy(buffer, [weight.chunk for weight in self.weights], dim=1, out=padded)
            self.wholes = [
                whole.view(-1)[: weight.numel].view(weight.shape)
                for whole, weight in zip(padded, self.weights, strict=True)
            ]
        # The buffer's memory goes back to the gather stream, which must not write to it while compute still reads.
        streams.all_gather.wait(streams.compute.record())
        self.arriving = None

    def drop_gather(self) -> None:
        """Forget parameters that are on their way."""
        self.context.streams.compute.wait(self.arriving[1])
        self.arriving = None

    def forget_stale(self) -> None:
        """Give back parameters that were kept, if their rows have been written to since they were gathered."""
        if (
            self.weights
            and self.wholes is not None
            and self.versions != [weight.rows._version for weight in self.weights]
        ):
            self.expected.clear()
            self.kept = False
            self.release()

    def install(self, tensors: list[Tensor]) -> list[Tensor]:
        """Put tensors where the module looks for its parameters. Return those that were there."""
        before, self.installed = self.installed, tensors
        for weight, tensor in zip(self.weights, tensors, strict=True):
            for module, name in weight.places:
                module._parameters[name] = tensor
        return before

    def release(self) -> None:
        """Give back the memory of the whole parameters, if nothing needs them."""
        if not self.users:
            self.install([weight.rows for weight in self.weights])
            if not self.kept and not self.expected:
                self.wholes = None

    # Forward.

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward with whole parameters."""
        context, call = self.context, Call(self)
        again = torch.is_grad_enabled() and context.hears_the_end()
        before = self.installed
        self.users.add(call)
        context.begin_forward_again(call) if again else context.begin_forward(self)
        if self.policy.cast_forward_inputs:
            args, kwargs = cast((args, kwargs), self.policy.param_dtype)
        try:
            self.kept = False
            if not torch.is_grad_enabled():
                self.install(self.wholes)
                return cast(forward(*args, **kwargs), self.policy.output_dtype)
            rows = [weight.rows for weight in self.weights]
            (args, kwargs), wholes = through(Enter, (call, self.wholes), (args, kwargs), rows)
            self.install(list(wholes) if wholes is not None else self.wholes)
            with Hooks(self):
                output = cast(forward(*args, **kwargs), self.policy.output_dtype)
            output, begins = through(Exit, (call,), output, ())
            if begins is not None and not self.reshard_after_forward:
                self.expected.add(call)
            return output
        finally:
            self.install(before)
            self.users.discard(call)
            if again:
                # Its backward probably comes next. If that of another unit does, or another forward, this one is freed.
                context.only(self)
                context.lingering = self
            else:
                self.release()
                context.end_forward(call)

    # Backward.

    def gather_in_backward(self) -> None:
        """Make the parameters whole until the backward of this unit is over, at the latest until the whole backward is."""
        self.context.hears_the_end()
        self.gather()
        self.install_leaves()

    def install_leaves(self) -> None:
        """Put whole parameters in place for what the backward recomputes."""
        if self.weights and self.installed[0] is self.weights[0].rows:
            self.install(
                [
                    w.detach().requires_grad_(weight.rows.requires_grad)
                    for w, weight in zip(self.wholes, self.weights)
                ]
            )

    def begin_backward(self, call: Call) -> None:
        self.context.hears_the_end()
        self.users.add(call)
        self.context.begin_backward(call)
        self.install_leaves()

    def end_backward(self, call: Call, grads: list[Tensor | None]) -> None:
        self.context.hears_the_end()
        self.users.discard(call)
        self.expected.discard(call)
        self.take_leaf_grads(grads)
        self.kept = self.wholes is not None and not self.reshard_after_backward
        self.release()
        self.add(grads)
        if self.sync:
            self.reduce()

    def take_leaf_grads(self, grads: list[Tensor | None]) -> None:
        """Add the gradients from backwards inside the backward, which reentrant checkpoints run. They end in installed leaves."""
        for index, (weight, tensor) in enumerate(zip(self.weights, self.installed, strict=True)):
            if tensor is not weight.rows and tensor.grad is not None:
                grads[index] = tensor.grad if grads[index] is None else grads[index] + tensor.grad
                tensor.grad = None

    def end(self) -> None:
        """The backward of the model is over."""
        grads: list[Tensor | None] = [None] * len(self.weights)
        self.take_leaf_grads(grads)
        self.users.clear()
        self.expected.clear()
        self.kept = self.wholes is not None and not self.reshard_after_backward
        self.release()
        if any(grad is not None for grad in grads):
            self.add(grads)
        if self.sync:
            self.reduce()

    # Gradients.

    def add(self, grads: list[Tensor | None]) -> None:
        """Add gradients of whole parameters to the packed ones."""
        weights = [weight for weight in self.weights if weight.rows.requires_grad]
        if not weights:
            return
        sizes = [weight.chunk for weight in weights]
        if self.packed is None:
            self.context.finish_reduction()
            rows = weights[0].rows
            dtype = self.policy.reduce_dtype or self.policy.param_dtype or rows.dtype
            self.packed = rows.new_zeros(self.world_size, sum(sizes), dtype=dtype)
        pieces_of = dict(zip(map(id, weights), self.packed.split(sizes, dim=1), strict=True))
        for index, (weight, grad) in enumerate(zip(self.weights, grads, strict=True)):
            if grad is not None:
                self.packed_weights[index] = weight
                pieces, flat = pieces_of[id(weight)], grad.reshape(-1)
                full, rest = divmod(weight.numel, weight.chunk) if weight.chunk else (0, 0)
                if full:
                    pieces[:full].add_(flat[: weight.numel - rest].view(full, -1))
                if rest:
                    pieces[full, :rest].add_(flat[weight.numel - rest :])

    def reduce(self) -> None:
        """Send the packed gradients away, to be averaged over the ranks."""
        if self.packed is None:
            return
        self.context.finish_reduction()
        packed, used, streams = self.packed, self.packed_weights, self.context.streams
        self.packed, self.packed_weights = None, {}
        trainable = [
            (index, weight.chunk) for index, weight in enumerate(self.weights) if weight.rows.requires_grad
        ]

        def add_to_rows(part: Tensor) -> None:
            pieces = part.split([chunk for _, chunk in trainable])
            for (index, _), piece in zip(trainable, pieces, strict=True):
                if index in used:
                    rows = used[index].rows
                    grad = piece[: rows.numel()].view(rows.shape)
                    if rows.grad is None:
                        rows.grad = grad.to(rows.dtype, copy=True)
                    else:
                        rows.grad += grad

        # Both buffers are compute's, which waits for the end of the reduction before it gives them back.
        part = packed.new_empty(packed.shape[1])
        streams.reduce_scatter.wait(streams.compute.record())
        over = reduce_scatter_flat(part, packed.view(-1), None, streams.reduce_scatter, self.name)
        self.context.reduction = Reduction(packed, part, over, add_to_rows)


class FSDPModule:
    """What `fully_shard` adds to a module's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._unit.context is None:
            units = self._units()
            context = Context(units, next(self.parameters()).device.type)
            for unit in units:
                unit.context = context
        return self._unit.call(super().__call__, args, kwargs)

    def _units(self) -> list[Unit]:
        return [module._unit for module in self.modules() if isinstance(module, FSDPModule)]

    def set_requires_gradient_sync(self, value: bool) -> None:
        """Let backwards reduce gradients, or else add them up on each rank, for this module and all sharded ones in it."""
        for unit in self._units():
            unit.sync = value

    def set_reshard_after_backward(self, value: bool) -> None:
        """Let parameters be freed after a backward, or else stay whole for the next forward, here and in all sharded modules."""
        for unit in self._units():
            unit.reshard_after_backward = value


def fully_shard(
    module: nn.Module,
    *,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Shard the parameters of `module`, in place, over all ranks; return it.

    Parameters that an earlier call has sharded are left alone, so call it for inner modules first. From then on
    `module.parameters()` are this rank's rows, forwards and backwards compute with whole parameters, and the rows' `grad` is their
    part of the mean gradient. The policy says in which dtypes parameters are gathered and used, gradients are averaged, inputs
    come and outputs go. Without `reshard_after_forward`, parameters stay whole from a forward to the end of its backward.
    """
    params: dict[int, tuple[nn.Parameter, Places]] = {}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None and not hasattr(param, "_sharded_by_my_fsdp"):
                params.setdefault(id(param), (param, []))[1].append((owner, name))
    weights = [Weight(param, places) for param, places in params.values()]
    module._unit = Unit(weights, type(module).__name__, mp_policy, reshard_after_forward)
    module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {})
    return module
