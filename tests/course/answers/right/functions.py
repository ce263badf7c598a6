"""Fully sharded data parallel training (FSDP), in one file.

Every rank keeps a chunk of rows of every parameter. Before a module computes, the ranks gather its parameters; afterwards they
free them. The backward does the same, and averages the gradients: each rank gets the rows that it keeps.

    padded_rows, rows_of      station 01: which rows a rank keeps
    ring_all_gather, ring_reduce_scatter      02: what collectives are made of
    replicate                 03: data parallel training without sharding
    fully_shard               03: shards the parameters of a module
    traffic                   05: the bytes that a training step moves, in closed form

A `Unit` is a record of a sharded module, and plain functions work on it. A unit has its rows or is whole. Four hooks move it between
the two: before and after its forward, and when a gradient of its outputs or of its inputs is there, which is when its backward begins
and when it is over. A unit may be asked for one step ahead (`start_gather`), in the order of the forward before.

Collectives and streams come from `hwfsdp`. Everything else is here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from answers.beginning import padded_rows, rows_of, tree_leaves, tree_map
from hwfsdp.collectives import all_gather_flat, reduce_scatter_flat
from hwfsdp.streams import StreamEvent, StreamSet, after_backward, streams_for

Places = list[tuple[nn.Module, str]]  # modules, and names in them


# --- 03 Fully sharded ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Unit:
    """What is known of one sharded module; the functions below do everything.

    Parameter number i is in `places[i]` of the module, under all its names there. It is `rows[i]`, or `wholes[i]`, whose storage
    is empty while the unit is not whole. Autograd keeps the wholes, so they are the same objects in every step. `sizes[i]` elements
    of it travel from each rank.
    """

    name: str
    places: list[Places]
    rows: list[nn.Parameter]
    wholes: list[nn.Parameter]
    sizes: list[int]
    policy: MixedPrecisionPolicy
    frees_after_forward: bool
    root: Root
    below: list[Unit]  # the units inside
    frees_after_backward: bool = True
    reduces: bool = True
    is_whole: bool = False
    in_backward: bool = False
    is_kept: bool = False  # whole from a backward to the next forward
    sums: dict[int, Tensor] = field(
        default_factory=dict
    )  # whole gradients of earlier backwards, by parameter number
    gathered: Tensor | None = (
        None  # what travels, from the start of a gather until it is copied into the wholes
    )
    arrived: StreamEvent | None = None


@dataclass(eq=False)
class Root:
    """What all units of one model share."""

    units: list[Unit]  # the last one is that of the model
    device_type: str
    in_backward: bool = False
    streams: StreamSet | None = None
    rows_ready: StreamEvent | None = None  # in a forward or a backward: after the last write to rows
    reduction: Reduction | None = None
    orders: dict[bool, list[Unit]] = field(
        default_factory=dict
    )  # of the last forward with gradients, and of that without
    order: list[Unit] = field(default_factory=list)  # that of this forward, as far as it has come
    ran: list[Unit] = field(
        default_factory=list
    )  # units whose backward is to come, in the order in which their forwards ended
    expected: list[Unit] = field(default_factory=list)
    position: int = 0  # in what is expected
    ahead: Unit | None = None  # the unit whose gather was started before it was needed


class Reduction(NamedTuple):
    """Gradients that travel: `sent` has to live until `done`, then `mean` is there for the `rows`, one after the other."""

    done: StreamEvent
    sent: Tensor
    mean: Tensor
    rows: list[nn.Parameter]
    sizes: list[int]


class Sharded:
    """What a module can do in addition when it is sharded: switches for training with several backwards per step."""

    def set_requires_gradient_sync(self, value: bool) -> None:
        """Say whether backwards reduce gradients, here and in all sharded modules below. If not, they add up on each rank."""
        for unit in units_in(self):
            unit.reduces = value

    def set_reshard_after_backward(self, value: bool) -> None:
        """Say whether backwards free parameters, here and in all sharded modules below. If not, the next forward finds them."""
        for unit in units_in(self):
            unit.frees_after_backward = value


def units_in(module: nn.Module) -> list[Unit]:
    """Return the units of a module and of all modules in it."""
    return [inner._sharded for inner in module.modules() if isinstance(inner, Sharded)]


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

    Args:
        reshard_after_forward: if False, parameters stay whole from a forward until its backward is over.
        mp_policy: the dtypes in which parameters travel and compute, in which gradients are averaged, and of inputs and outputs. Rows
            and their gradients keep the original one.
    """
    if isinstance(module, Sharded):
        raise ValueError("this module is sharded already")
    root = Root(units_in(module), next((parameter.device.type for parameter in module.parameters()), "cpu"))
    claimed = {row for unit in root.units for row in unit.rows}
    places: dict[nn.Parameter, Places] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter not in claimed:
                places.setdefault(parameter, []).append((owner, name))
    rows = list(places)
    if len({row.dtype for row in rows}) > 1:
        raise ValueError("the parameters of a unit travel in one buffer, so they need one dtype")
    wholes = [cut(parameter, mp_policy.param_dtype or parameter.dtype) for parameter in rows]
    sizes = [part_size(whole.shape, dist.get_world_size()) for whole in wholes]
    unit = Unit(
        type(module).__name__,
        list(places.values()),
        rows,
        wholes,
        sizes,
        mp_policy,
        reshard_after_forward,
        root,
        units_in(module),
    )
    root.units.append(unit)
    for inner in root.units:
        inner.root = root
    module.__class__ = type(f"Sharded{type(module).__name__}", (Sharded, type(module)), {})
    module._sharded = unit
    module.register_forward_pre_hook(partial(before_forward, unit), prepend=True, with_kwargs=True)
    module.register_forward_hook(partial(after_forward, unit))
    return module


def cut(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Leave `parameter` with this rank's rows; return a whole parameter in `dtype`, with no memory yet."""
    if parameter.dim() == 0:
        raise ValueError("a parameter without dimensions has no rows to shard")
    world_size = dist.get_world_size()
    padded = parameter.data.new_empty(world_size * part_size(parameter.shape, world_size), dtype=dtype)
    whole = nn.Parameter(padded[: parameter.numel()].view(parameter.shape), parameter.requires_grad)
    whole.untyped_storage().resize_(0)
    start, stop = rows_of(len(parameter), world_size, dist.get_rank())
    parameter.data = parameter.data[start:stop].clone(memory_format=torch.contiguous_format)
    return whole


# --- 03 Two states: rows, and whole -----------------------------------------------------------------------


def make_whole(unit: Unit) -> None:
    """Make the parameters of a unit whole, and register them in their modules."""
    if unit.is_whole:
        return
    unit.is_whole = True
    if unit is unit.root.ahead:
        unit.root.ahead = None
    if unit.gathered is None:
        start_gather(unit)
    finish_gather(unit)
    for row, whole in zip(unit.rows, unit.wholes, strict=True):
        whole.requires_grad_(row.requires_grad)
    register(unit, unit.wholes)


def make_rows(unit: Unit) -> None:
    """Free the whole parameters of a unit, and register its rows."""
    if not unit.is_whole:
        return
    unit.is_whole = unit.is_kept = False
    register(unit, unit.rows)
    for whole in unit.wholes:
        whole.untyped_storage().resize_(0)


def register(unit: Unit, parameters: list[nn.Parameter]) -> None:
    """Put the parameters into the modules of a unit, under all their names."""
    for places, parameter in zip(unit.places, parameters, strict=True):
        for owner, name in places:
            owner._parameters[name] = parameter


def take_gradients(unit: Unit) -> bool:
    """Move the gradients of whole parameters into the unit's sums; return whether there was any."""
    found = False
    for number, whole in enumerate(unit.wholes):
        if whole.grad is None:
            continue
        found = True
        if number in unit.sums:
            unit.sums[number] += whole.grad
        elif unit.reduces:
            unit.sums[number] = whole.grad  # the buffer that travels has the reduce dtype anyway
        else:
            unit.sums[number] = whole.grad.to(unit.policy.reduce_dtype or whole.dtype)
        whole.grad = None
    return found


# --- 08 What travels: gathers on one stream, reductions on another ------------------------------------------


def streams_of(root: Root) -> StreamSet:
    """Return the streams of a model; they are made when it first runs."""
    if root.streams is None:
        root.streams = streams_for(root.device_type)
    return root.streams


def start_gather(unit: Unit) -> None:
    """Pack this rank's rows and gather those of all ranks, beside compute."""
    if not sum(unit.sizes):
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    streams = streams_of(unit.root)
    streams.all_gather.wait(unit.root.rows_ready or streams.compute.record())
    with streams.all_gather.run():
        unit.gathered = unit.wholes[0].new_zeros(world_size, sum(unit.sizes))
        for row, piece in zip(unit.rows, unit.gathered[rank].split(unit.sizes), strict=True):
            piece[: row.numel()] = row.data.view(-1)  # casts
    unit.arrived = all_gather_flat(
        unit.gathered.view(-1), unit.gathered[rank], None, streams.all_gather, unit.name
    )


def finish_gather(unit: Unit) -> None:
    """Let compute wait for a gather, and copy it into the whole parameters."""
    if unit.gathered is None:
        return
    streams = streams_of(unit.root)
    streams.compute.wait(unit.arrived)
    for whole, piece in zip(unit.wholes, unit.gathered.split(unit.sizes, dim=1), strict=True):
        storage = whole.untyped_storage()
        storage.resize_(piece.numel() * piece.element_size())  # with room for padding, after the last row
        piece.new_empty(0).set_(storage, 0, piece.shape).copy_(
            piece
        )  # a new tensor: autograd counts no write to the parameter
    streams.all_gather.wait(
        streams.compute.record()
    )  # the next gather may get this memory, and must not write before it is read
    unit.gathered = unit.arrived = None


def drop_gather(unit: Unit) -> None:
    """Forget a gather that was a wrong guess."""
    streams_of(unit.root).compute.wait(
        unit.arrived
    )  # before the optimizer may write to the rows that it reads
    unit.gathered = unit.arrived = unit.root.ahead = None


def start_reduction(unit: Unit) -> None:
    """Pack a unit's sums of whole gradients and average them over the ranks, beside compute, when the reduction before is over."""
    root = unit.root
    finish_reduction(root)
    numbers = sorted(unit.sums)
    sizes = [unit.sizes[number] for number in numbers]
    if not sum(sizes):
        unit.sums.clear()
        return
    streams = streams_of(root)
    sent = unit.sums[numbers[0]].new_zeros(dist.get_world_size(), sum(sizes), dtype=unit.policy.reduce_dtype)
    for number, piece in zip(numbers, sent.split(sizes, dim=1), strict=True):
        spread(unit.sums.pop(number).reshape(-1), piece)
    mean = sent.new_empty(sum(sizes))
    streams.reduce_scatter.wait(streams.compute.record())
    done = reduce_scatter_flat(mean, sent.view(-1), None, streams.reduce_scatter, unit.name)
    root.reduction = Reduction(done, sent, mean, [unit.rows[number] for number in numbers], sizes)


def finish_reduction(root: Root) -> None:
    """Let compute wait for the reduction that is under way, if any, and add it to the gradients of its rows."""
    if root.reduction is None:
        return
    streams_of(root).compute.wait(root.reduction.done)
    for row, piece in zip(root.reduction.rows, root.reduction.mean.split(root.reduction.sizes), strict=True):
        piece = piece[: row.numel()].view_as(row).to(row.dtype)
        row.grad = piece if row.grad is None else row.grad.add_(piece)
    root.reduction = None


def part_size(shape: torch.Size, world_size: int) -> int:
    """Count the elements of a full chunk of a parameter."""
    return padded_rows(shape[0], world_size) * math.prod(shape[1:]) if shape else 1


def spread(flat: Tensor, parts: Tensor) -> None:
    """Copy a flat tensor into a tensor with one line for each rank, from the first line on."""
    size = parts.shape[1]
    full = flat.numel() // size if size else 0
    parts[:full] = flat[: full * size].view(full, size)
    if full * size < flat.numel():
        parts[full, : flat.numel() - full * size] = flat[full * size :]


# --- 09 What comes next --------------------------------------------------------------------------------------


def make_whole_and_look_ahead(unit: Unit) -> None:
    """Make a unit whole, and start the gather of the one that probably comes after it."""
    root = unit.root
    following = successor(unit)
    if root.ahead is not None and root.ahead not in (unit, following):
        drop_gather(root.ahead)
    make_whole(unit)
    if following is not None and following is not root.ahead:
        start_gather(following)
        root.ahead = following


def successor(unit: Unit) -> Unit | None:
    """Find a unit in what is expected, from the current position on and then from the start; return the next to be gathered after it.

    A unit that is not expected tells nothing, and so leaves the guess as it is. Units that are whole are passed over: when a model
    returns the very tensor of its last layer, the layer's backward begins before the model's.
    """
    root = unit.root
    for place in (*range(root.position, len(root.expected)), *range(root.position)):
        if root.expected[place] is unit:
            root.position = place + 1
            later = root.expected[place + 1 :]
            return next((other for other in later if other is not unit and not other.is_whole), None)
    return root.ahead


def expect(root: Root, units: list[Unit]) -> None:
    """Begin a forward or a backward in which the units probably come in this order."""
    if root.ahead is not None:
        drop_gather(root.ahead)
    root.expected, root.position = units, 0


def begin_forward(root: Root) -> None:
    """Begin a forward of the whole model: everything gathered before may be older than the optimizer's last step."""
    root.rows_ready = streams_of(root).compute.record()
    for unit in root.units:
        if not unit.is_kept:
            make_rows(unit)
    root.order = []
    if torch.is_grad_enabled():
        root.ran = []
    expect(root, root.orders.get(torch.is_grad_enabled(), []))


def end_forward(root: Root) -> None:
    """End a forward of the whole model, and keep its order for the next one of its kind."""
    root.orders[torch.is_grad_enabled()] = root.order
    expect(root, [])
    root.rows_ready = None


# --- 03 Four moments: before and after a forward, before and after a backward -------------------------------


def before_forward(unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Gather, cast the inputs and mark them: when the gradient of one of them is there, the backward of this unit is over."""
    root = unit.root
    if unit is root.units[-1] and not root.in_backward:
        begin_forward(root)
    if root.in_backward:
        make_whole(unit)  # recomputed
    else:
        make_whole_and_look_ahead(unit)
        if sum(unit.sizes):
            root.order.append(unit)
    dtype = unit.policy.param_dtype if unit.policy.cast_forward_inputs else None

    def mark(value: Any) -> Any:
        value = cast(value, dtype)
        if not (isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()):
            return value
        value = value.view_as(
            value
        )  # a tensor of this unit alone: its gradient does not wait for other modules
        value.register_hook(lambda _: after_unit_backward(unit))
        return value

    return tree_map(mark, args), tree_map(mark, kwargs)


def after_forward(unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
    """Free, cast the outputs and mark them: when the gradient of one of them is there, the backward of this unit begins."""
    output = tree_map(lambda value: cast(value, unit.policy.output_dtype), output)
    marked = [value for value in tree_leaves(output) if isinstance(value, Tensor) and value.requires_grad]
    for value in marked:
        value.register_hook(lambda _: before_unit_backward(unit))
    if marked and sum(unit.sizes) and not unit.root.in_backward:
        unit.root.ran.append(unit)
    # In its own backward, activation checkpointing runs this forward again, and the backward goes on with its parameters.
    if not unit.in_backward and (unit.frees_after_forward or not marked):
        make_rows(unit)
    if unit is unit.root.units[-1] and not unit.root.in_backward:
        end_forward(unit.root)
    return output


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a tensor of floating-point numbers in `dtype`, and everything else as it is."""
    is_cast = dtype is not None and isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_cast else value


def before_unit_backward(unit: Unit) -> None:
    """Gather for a backward. Backwards come in the opposite order of forwards."""
    root = unit.root
    if not root.in_backward:
        root.in_backward = True
        root.rows_ready = streams_of(root).compute.record()
        expect(root, root.ran[::-1])
        after_backward(lambda: after_whole_backward(root))
    if not unit.in_backward:
        for (
            other
        ) in (
            root.units
        ):  # that began before and is not around or inside this one is over, whatever its inputs were
            if other.in_backward and unit not in other.below and other not in unit.below:
                after_unit_backward(other)
        unit.in_backward = True
        make_whole_and_look_ahead(unit)


def after_unit_backward(unit: Unit) -> None:
    """Free, and reduce the gradients that are there.

    Autograd runs what was made last first. A mark of an input is older than everything that the unit has computed with it, so all
    of that is done. A parameter gets one gradient in a backward, the sum over all uses.
    """
    unit.in_backward = False
    unit.is_kept = unit.is_whole and not unit.frees_after_backward
    if not unit.is_kept:
        make_rows(unit)
    if take_gradients(unit) and unit.reduces:
        start_reduction(unit)


def after_whole_backward(root: Root) -> None:
    """Finish the units whose inputs have no gradients, such as tokens, and those that have sums but were left out this time."""
    root.in_backward = False
    for unit in root.units:
        after_unit_backward(unit)
        if unit.reduces:
            start_reduction(unit)
    finish_reduction(root)
    expect(root, [])
    root.rows_ready = None
