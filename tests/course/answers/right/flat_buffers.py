"""Fully sharded data parallel training (FSDP), in one file.

Every rank keeps a chunk of rows of every parameter. Before a module computes, the ranks gather its parameters; afterwards they
free them. The backward does the same, and averages the gradients: each rank gets the rows that it keeps.

All parameters that one `fully_shard` claims are one flat buffer on each rank, and travel as one. Gradients are divided by the
number of ranks before they are summed, so that a sum stays in the range of its terms.

    padded_rows, rows_of      station 01: which rows a rank keeps
    ring_all_gather, ring_reduce_scatter      02: what collectives are made of
    replicate                 03: data parallel training without sharding
    fully_shard               03: shards the parameters of a module
    traffic                   05: the bytes that a training step moves, in closed form

Collectives and streams come from `hwfsdp`. Everything else is here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from answers.beginning import padded_rows, rows_of, tree_leaves, tree_map
from hwfsdp.collectives import all_gather_flat
from hwfsdp.streams import StreamEvent, StreamSet, after_backward, streams_for

try:  # by name, before anything is recorded
    from torch.distributed import reduce_scatter_single
except ImportError:  # its name before torch 2.13
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

Places = list[tuple[nn.Module, str]]  # modules, and names in them


# --- 03 Flat parameters and gradients ----------------------------------------------------------------------------------------


class Piece:
    """One parameter of a unit: where it is registered, and where it lies in the unit's flat buffers."""

    def __init__(self, rows: nn.Parameter, places: Places, start: int, world_size: int) -> None:
        self.rows = rows  # the parameter itself; from now on it has this rank's rows only
        self.places = places
        self.shape = rows.shape
        if not self.shape:
            raise ValueError("a parameter without dimensions has no rows; give it the shape [1]")
        self.chunk = padded_rows(self.shape[0], world_size) * math.prod(self.shape[1:])
        self.start = start  # of its chunk in the flat rows
        self.whole: Tensor  # all rows, a view into the flat whole buffer

    def register(self, tensor: Tensor) -> None:
        """Let the modules compute with `tensor`."""
        for module, name in self.places:
            module._parameters[name] = tensor


class GradientTable:
    """Whole gradients of some parameters of a unit, with a line for each rank: what a reduction sends."""

    def __init__(self, pieces: list[Piece], world_size: int, dtype: torch.dtype) -> None:
        self.starts: dict[Piece, int] = {}
        size = 0
        for piece in pieces:
            self.starts[piece] = size
            size += piece.chunk
        self.table = torch.zeros(world_size, size, dtype=dtype, device=pieces[0].rows.device)
        self.arrived: set[Piece] = set()

    def add(self, piece: Piece, grad: Tensor) -> None:
        """Add a whole gradient; the ranks' parts of it lie in the lines, each at the same columns."""
        start, chunk = self.starts[piece], piece.chunk
        flat, columns = grad.reshape(-1), self.table[:, start : start + chunk]
        full, rest = divmod(
            flat.numel(), max(chunk, 1)
        )  # ranks with a full chunk, and the elements of the rank after them
        targets = [(columns[:full], flat[: full * chunk].view(full, chunk))]
        if rest:
            targets.append((columns[full, :rest], flat[full * chunk :]))
        for target, source in targets:
            target.add_(source) if piece in self.arrived else target.copy_(source)
        self.arrived.add(piece)

    def rows_of(self, piece: Piece, part: Tensor) -> Tensor:
        """Return this rank's rows of a parameter's gradient, a view into `part`, this rank's line."""
        start, rows = self.starts[piece], piece.rows
        return part[start : start + rows.numel()].view(rows.shape)


# --- 09 What units share: streams and orders -----------------------------------------------------------------


class Run:
    """What all units of a model share while they run."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.depth = 0  # forwards that are running, one inside the other
        self.in_backward = False
        self.reduction: tuple[StreamEvent, GradientTable] | None = (
            None  # the one in flight, and what it reads
        )
        self.ahead: Unit | None = None  # whose gather was started before it was needed
        self.forwards: list[Unit] = []  # of this step, in the order of their beginnings
        self.followers: dict[tuple[Unit, int], Unit] = (
            {}
        )  # what came in the last step after the n-th forward of a unit
        self.calls: list[Call] = (
            []
        )  # of this step, in the order of their ends; their backwards come the other way round

    @cached_property
    def streams(self) -> StreamSet:
        """The streams of all units, made at the first use."""
        return streams_for(self.units[0].device.type)

    def begin_step(self) -> None:
        """Called before an outermost forward: forget the last step but for its order, and gather anew."""
        self.drop_ahead()
        for unit in self.units:
            if not unit.is_kept:
                unit.reshard()
        self.streams.all_gather.wait(self.streams.compute.record())  # the optimizer has written the rows
        times: Counter[Unit] = Counter()
        self.followers = {}
        for unit, follower in pairwise(self.forwards):
            self.followers[unit, times[unit]] = follower
            times[unit] += 1
        self.forwards, self.calls = [], []

    def begin_forward(self, unit: Unit) -> None:
        """Called when a unit is whole and about to compute: start the gather of the one that followed in the last step."""
        follower = self.followers.get((unit, self.forwards.count(unit)))
        self.forwards.append(unit)
        if follower is not None:
            self.gather_ahead(follower)

    def end_forward(self) -> None:
        """Called after an outermost forward."""
        self.drop_ahead()

    def gather_ahead(self, unit: Unit) -> None:
        """Start the gather of a unit that comes next, and forget any other one."""
        if self.ahead is not unit:
            self.drop_ahead()
        if not unit.is_whole:
            unit.start_gather()
            self.ahead = unit

    def drop_ahead(self) -> None:
        """Give up the gather that was started ahead, if nobody came for it."""
        if self.ahead is not None and self.ahead.arriving is not None:
            self.streams.compute.wait(self.ahead.arriving[0])  # later writes to the rows come after it
            self.ahead.arriving = None
        self.ahead = None

    def end_reduction(self) -> None:
        """Let compute wait for the reduction in flight, and give its memory away."""
        if self.reduction is not None:
            self.streams.compute.wait(self.reduction[0])
            self.reduction = None

    def begin_backward(self) -> None:
        """Called at any sign of a backward: have its end announced."""
        if not self.in_backward:
            self.in_backward = True
            after_backward(self.end_backward)

    def end_backward(self) -> None:
        """Called when the whole backward is over: settle what still waits for gradients that never came."""
        self.in_backward = False
        for unit in self.units:
            unit.calls.clear()
            unit.finish_backward()
        self.end_reduction()
        self.drop_ahead()


# --- 03 Fully sharded ----------------------------------------------------------------------------------------


class Unit:
    """A module and the parameters that it claimed, as one flat parameter.

    `flat_rows` is this rank's share of all parameters: the padded rows of the first one, of the second one, and so on. The
    parameters of the module are views into it. `flat_whole` has all rows of the first parameter, all of the second one, and
    so on. Its memory is there only while the module computes. A gather gives a table with a line for each rank, which is that
    rank's flat rows.
    """

    def __init__(
        self,
        module: nn.Module,
        claimed: dict[nn.Parameter, Places],
        run: Run,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool,
    ) -> None:
        self.name = type(module).__name__
        self.run = run
        self.policy = policy
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.reduce_gradients = True
        self.is_whole = False
        self.arriving: tuple[StreamEvent, Tensor] | None = None  # the table of a gather on its way
        self.is_kept = False  # whole from one micro-batch to the next
        self.calls: set[Call] = set()  # whose backward has begun and is not over
        self.call: Call | None = None  # of the forward that runs
        self.gradients: GradientTable | None = None  # those that are not reduced yet
        self.pieces: list[Piece] = []
        self.size = 0
        self.device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        for parameter, places in claimed.items():
            self.pieces.append(Piece(parameter, places, self.size, self.world_size))
            self.size += self.pieces[-1].chunk
        if self.pieces:
            self.make_flat()
        module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after_forward, always_call=True)

    def make_flat(self) -> None:
        """Make the flat buffers, and the parameters views into this rank's."""
        dtypes = {piece.rows.dtype for piece in self.pieces}
        if len(dtypes) > 1:
            raise ValueError(
                f"the parameters of {self.name} have different dtypes, and one flat buffer cannot: {dtypes}"
            )
        dtype = dtypes.pop()
        self.flat_rows = torch.zeros(self.size, dtype=dtype, device=self.device)
        self.flat_whole = torch.empty(
            self.world_size * self.size, dtype=self.policy.param_dtype or dtype, device=self.device
        )
        for piece in self.pieces:
            start, stop = rows_of(piece.shape[0], self.world_size, self.rank)
            kept = piece.rows.data[start:stop]
            mine = self.flat_rows[piece.start : piece.start + kept.numel()].view(kept.shape)
            mine.copy_(kept)
            piece.rows.data, piece.rows.grad = mine, None
            begin = self.world_size * piece.start
            piece.whole = self.flat_whole.data[begin : begin + math.prod(piece.shape)].view(piece.shape)
        self.flat_whole.untyped_storage().resize_(0)

    # Whole and rows

    def gather(self) -> None:
        """Make the parameters whole, unless they are, and let the modules compute with them."""
        run = self.run
        if self.pieces and not self.is_whole and run.ahead is not self:
            run.drop_ahead()  # a wrong guess
        self.start_gather()
        if self.arriving is not None:
            event, table = self.arriving
            streams = run.streams
            streams.compute.wait(event)
            self.unpack(table)
            streams.all_gather.wait(
                streams.compute.record()
            )  # the table's memory is that stream's, and was read on compute
            self.arriving = run.ahead = None
        self.is_whole = True
        for piece in self.pieces:
            piece.whole.requires_grad_(piece.rows.requires_grad)
            piece.register(piece.whole)

    def start_gather(self) -> None:
        """Put a gather on its stream, unless the parameters are whole or on their way."""
        if self.is_whole or self.arriving is not None or not self.pieces:
            return
        stream = self.run.streams.all_gather
        with stream.run():
            table = torch.empty(self.world_size, self.size, dtype=self.flat_whole.dtype, device=self.device)
            line = table[self.rank]
            line.copy_(self.flat_rows)
            event = all_gather_flat(table.view(-1), line, None, stream, self.name)
        self.arriving = (event, table)

    def unpack(self, table: Tensor) -> None:
        """Copy what was gathered to the whole parameters, which have no memory yet."""
        flat = self.flat_whole.data  # autograd does not count what is written here
        flat.untyped_storage().resize_(flat.numel() * flat.element_size())
        for piece in self.pieces:
            begin, end = self.world_size * piece.start, self.world_size * (piece.start + piece.chunk)
            flat[begin:end].view(self.world_size, piece.chunk).copy_(
                table[:, piece.start : piece.start + piece.chunk]
            )

    def hide(self) -> None:
        """Let the modules have their rows, whether the parameters are whole or not."""
        for piece in self.pieces:
            piece.register(piece.rows)

    def reshard(self) -> None:
        """Let the modules have their rows, and free what is whole."""
        if self.is_whole:
            self.hide()
            self.is_whole = self.is_kept = False
            if self.pieces:
                self.flat_whole.untyped_storage().resize_(0)

    # Forward

    def before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Gather, and put one node below everything that this forward computes from parameters and inputs."""
        if not self.run.in_backward:
            if self.run.depth == 0:
                self.run.begin_step()
            self.run.depth += 1
        self.gather()
        if self.pieces and not self.run.in_backward:
            self.run.begin_forward(self)
        if self.policy.cast_forward_inputs:
            args, kwargs = cast((args, kwargs), self.policy.param_dtype)
        if not torch.is_grad_enabled():
            return args, kwargs
        trained = [piece for piece in self.pieces if piece.rows.requires_grad]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if is_trained(leaf)]
        self.call = Call(self, trained)
        if not trained and not inputs:
            return args, kwargs
        anchor = torch.empty(
            0, requires_grad=True
        )  # without it, a node with integers as inputs would have no gradient
        outputs = iter(Enter.apply(self.call, anchor, *inputs))
        for piece in trained:
            piece.register(next(outputs))
        return tree_map(lambda leaf: next(outputs) if is_trained(leaf) else leaf, (args, kwargs))

    def after_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Listen to the gradients of the outputs, and free unless a backward is going on: then this is a recomputation."""
        if self.call is not None:
            outputs = [leaf for leaf in tree_leaves(output) if is_trained(leaf)]
            for leaf in outputs:
                leaf.register_hook(self.call.begin_backward)
            if outputs and self.pieces and not self.run.in_backward:
                self.call.order, self.call.position = self.run.calls, len(self.run.calls)
                self.run.calls.append(self.call)
            self.call = None
        if not self.run.in_backward:
            self.run.depth -= 1
            if self.run.depth == 0:
                self.run.end_forward()
            self.hide()
            if self.reshard_after_forward or not (torch.is_grad_enabled() or self.is_kept):
                self.reshard()
        return cast(output, self.policy.output_dtype)

    # Backward

    def add_gradients(self, pieces: list[Piece], grads: Sequence[Tensor | None]) -> None:
        """Add whole gradients to those that are not reduced yet."""
        for piece, grad in zip(pieces, grads, strict=True):
            if grad is not None:
                if self.gradients is None:
                    self.run.end_reduction()  # its memory is given away before more is taken
                    self.gradients = GradientTable(
                        pieces, self.world_size, self.policy.reduce_dtype or grad.dtype
                    )
                self.gradients.add(piece, grad)

    def finish_backward(self) -> None:
        """Free the parameters and reduce the gradients, as far as the switches say."""
        if self.reshard_after_backward:
            self.reshard()
        else:
            self.hide()
            self.is_kept = self.is_whole
        if self.reduce_gradients and self.gradients is not None:
            self.reduce()

    def reduce(self) -> None:
        """Average the gradients over the ranks, and add this rank's rows to those of the parameters."""
        self.run.end_reduction()
        sent, self.gradients = self.gradients, None
        sent.table.div_(self.world_size)
        streams = self.run.streams
        stream = streams.reduce_scatter
        stream.wait(streams.compute.record())
        with stream.run():
            part = torch.empty(sent.table.shape[1], dtype=sent.table.dtype, device=self.device)
            work = reduce_scatter_single(part, sent.table.view(-1), async_op=True)

            def finish() -> None:
                work.wait()
                self.add_to_rows(sent, part.to(self.flat_rows.dtype))

            stream.then(finish)
        self.run.reduction = (stream.record(), sent)

    def add_to_rows(self, sent: GradientTable, part: Tensor) -> None:
        """Add the mean gradients of this rank's rows to those that the rows have."""
        for piece in sent.arrived:
            mine = sent.rows_of(piece, part)
            if piece.rows.grad is None:
                piece.rows.grad = mine
            else:
                piece.rows.grad.add_(mine)


class Call:
    """One forward of a unit, and its backward."""

    def __init__(self, unit: Unit, trained: list[Piece]) -> None:
        self.unit, self.trained = unit, trained
        self.order: list[Call] = []  # all calls of the step, in the order of their forwards' ends
        self.position = 0  # in this order
        self.has_begun = False

    def begin_backward(self, grad: Tensor) -> None:
        """Called with the gradient of each output; the first one begins the backward."""
        self.unit.run.begin_backward()
        self.unit.calls.add(self)
        self.unit.gather()
        if not self.has_begun:
            self.has_begun = True
            self.gather_next()

    def gather_next(self) -> None:
        """Start the gather of the unit whose backward comes next."""
        for call in reversed(self.order[: self.position]):
            if call.unit is self.unit:
                return  # it is whole now, and will not be when the other call's backward begins
            if not call.has_begun and not call.unit.is_whole:
                self.unit.run.gather_ahead(call.unit)
                return

    def end_backward(self, grads: Sequence[Tensor | None]) -> None:
        """Called when nothing of this call's backward reads parameters any more, with the gradients of the trained ones."""
        unit = self.unit
        unit.run.begin_backward()
        unit.calls.discard(self)
        if not unit.calls and unit.reshard_after_backward:
            unit.reshard()  # before the gradients are packed, which takes memory
        unit.add_gradients(self.trained, grads)
        if not unit.calls:
            unit.finish_backward()


class Enter(torch.autograd.Function):
    """The way from a unit's inputs and parameters into its computation.

    In a backward, this node runs when all gradients of trained parameters and of inputs are there: the backward of the unit is
    over.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the trained parameters, whole, and the inputs."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        return (
            *(piece.whole.detach() for piece in call.trained),
            *(tensor.view_as(tensor) for tensor in inputs),
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Hand the gradients of the parameters to the unit, and those of the inputs on."""
        count = len(ctx.call.trained)
        ctx.call.end_backward(grads[:count])
        return (None, None, *grads[count:])


def is_trained(leaf: Any) -> bool:
    """Tell whether something is a tensor with a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return nested lists, tuples and dicts with the floating-point tensors in `dtype`; None casts nothing."""
    if dtype is None:
        return tree
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, tree
    )


# --- 07 Switches -------------------------------------------------------------------------------------------


class Sharded:
    """The methods that a sharded module gets in addition to its own."""

    def set_requires_gradient_sync(self, value: bool) -> None:
        """Choose whether backwards reduce gradients, here and in all sharded modules below, or add them up on each rank."""
        for unit in units_in(self):
            unit.reduce_gradients = value

    def set_reshard_after_backward(self, value: bool) -> None:
        """Choose whether parameters are freed after a backward, here and in all sharded modules below, or stay whole."""
        for unit in units_in(self):
            unit.reshard_after_backward = value


def units_in(module: nn.Module) -> list[Unit]:
    """Return the units of a module and of all modules below."""
    return [child._unit for child in module.modules() if isinstance(child, Sharded)]


def fully_shard(
    module: nn.Module,
    *,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008, it cannot be changed
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Shard the parameters of `module`, in place, over all ranks; return it.

    Parameters that an earlier call has sharded are left alone, so call it for inner modules first. From then on
    `module.parameters()` are this rank's rows, forwards and backwards compute with whole parameters, and the rows' `grad` is their
    part of the mean gradient.

    Args:
        mp_policy: the dtypes of parameters while they are whole, of reductions, of inputs and outputs.
        reshard_after_forward: whether the parameters are freed between forward and backward.
    """
    if isinstance(module, Sharded):
        raise ValueError(f"this {type(module).__name__} is sharded already")
    inner = units_in(module)
    sharded = {piece.rows for unit in inner for piece in unit.pieces}
    claimed: dict[nn.Parameter, Places] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and parameter not in sharded:
                claimed.setdefault(parameter, []).append((child, name))
    run = Run()
    unit = Unit(module, claimed, run, mp_policy, reshard_after_forward)
    run.units = [unit, *inner]
    for each in inner:
        each.run = run
    module._unit = unit
    module.__class__ = type(f"Sharded{type(module).__name__}", (Sharded, type(module)), {})
    return module
