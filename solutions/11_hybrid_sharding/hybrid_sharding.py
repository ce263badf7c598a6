"""11 Hybrid sharding: parameters are sharded inside a node, and replicated across nodes.

A mesh (replicate, shard) arranges the ranks in a grid. The ranks of a row are a node: together they hold each parameter once. The
ranks of a column hold the same rows of it. One parameter in one micro-batch:

    gather             before the forward, and again before the backward: the whole parameter, from the ranks of this node
    Gradient.add       in the backward: its whole gradient becomes this rank's rows, which go on to the other nodes
    Gradient.finish    after the backward: the rows' mean over all ranks is there

You write what has a TODO. The rest is written: `hybrid_shard`, at the end, calls your functions from a module's forward and backward.
You may change all of it, except the names `axes_of`, `hybrid_shard` and `set_requires_all_reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hwfsdp.streams import after_backward


class Axis(NamedTuple):
    """Ranks that differ in one coordinate of the grid only, this rank among them.

    Attributes:
        group: their process group. ranks: their numbers among all ranks, in order. number: this rank's place in `ranks`.
    """

    group: dist.ProcessGroup
    ranks: list[int]
    number: int


class Axes(NamedTuple):
    """The two axes on which this rank lies: the ranks of its node, and the ranks that hold the same rows as it does."""

    shard: Axis
    replicate: Axis


def axes_of(mesh: DeviceMesh) -> Axes:
    """Return this rank's axes in a mesh with the dims (replicate, shard)."""
    # @11
    found = [
        Axis(mesh.get_group(dim), dist.get_process_group_ranks(mesh.get_group(dim)), mesh.get_local_rank(dim))
        for dim in range(2)
    ]
    return Axes(shard=found[1], replicate=found[0])
    # @00
    # |     raise NotImplementedError("TODO(11): axes_of")
    # @end


# @11
def padded(tensor: Tensor, rows: int) -> Tensor:
    """Return a tensor with `rows` rows; the new ones are zeros."""
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


# @end
def rows_of(whole: Tensor, axis: Axis) -> Tensor:
    """Copy the rows that this rank keeps: its chunk, as `torch.chunk` cuts dim 0 for the ranks of the axis. It may have no rows."""
    # @11
    size = -(-len(whole) // len(axis.ranks))
    return whole[axis.number * size :][:size].detach().clone()
    # @00
    # |     raise NotImplementedError("TODO(11): rows_of")
    # @end


def gather(rows: Tensor, n: int, axis: Axis) -> Tensor:
    """Return the whole parameter of `n` rows, in memory of its own, from the rows of all ranks of the axis.

    Ranks send chunks of the same size: zeros follow the rows of a shorter one. An axis of one rank sends nothing.
    """
    # @11
    if len(axis.ranks) == 1:
        return rows.clone()
    mine = padded(rows, -(-n // len(axis.ranks)))
    whole = mine.new_empty(len(axis.ranks) * len(mine), *rows.shape[1:])
    dist.all_gather_into_tensor(whole, mine, group=axis.group)
    return whole[:n]
    # @00
    # |     raise NotImplementedError("TODO(11): gather")
    # @end


class Gradient:
    """The gradient of one parameter, on its way to `rows.grad`: the mean over all ranks, for the rows that this rank keeps.

    Attributes:
        rows: this rank's rows. axes: this rank's axes.
        all_reduces: if False, nothing goes to other nodes: gradients add up, reduced in this node only, until it is True again.
    """

    def __init__(self, rows: nn.Parameter, axes: Axes) -> None:
        self.rows, self.axes, self.all_reduces = rows, axes, True
        # @11
        self.partial: Tensor | None = None  # reduced in this node only
        self.in_flight: list[tuple[Tensor, Any]] = []  # all-reduces, with the rows that they reduce
        # @end

    def add(self, whole: Tensor) -> None:
        """Take the whole gradient of one micro-batch. The memory of `whole` is not yours: autograd may read it again.

        It is reduced inside the node first, then across nodes. Do not wait for what goes across: the backward goes on meanwhile.
        """
        # @11
        rows, (shard, _) = whole.clone(), self.axes
        if len(shard.ranks) > 1:
            size = -(-len(whole) // len(shard.ranks))
            rows = whole.new_empty(size, *whole.shape[1:])
            dist.reduce_scatter_tensor(rows, padded(whole, len(shard.ranks) * size), group=shard.group)
            rows = rows[: len(self.rows)]
        if self.partial is not None:
            rows += self.partial
        self.partial = rows
        if self.all_reduces:
            self.start()
        # @00
        # |         raise NotImplementedError("TODO(11): Gradient.add")
        # @end

    # @11
    def start(self) -> None:
        """Start the all-reduce of the partial gradient."""
        rows, self.partial, across = self.partial, None, self.axes.replicate
        assert rows is not None
        work = None
        if len(across.ranks) > 1:
            work = dist.all_reduce(rows, group=across.group, async_op=True)
        self.in_flight.append((rows, work))

    # @end
    def finish(self) -> None:
        """The backward is over. Add the mean over all ranks to `rows.grad`, unless nothing may go to other nodes yet.

        If this backward has not used the parameter, gradients of earlier ones may still have to go to other nodes.
        """
        # @11
        if self.partial is not None and self.all_reduces:
            self.start()
        for rows, work in self.in_flight:
            if work is not None:
                work.wait()
            rows /= len(self.axes.shard.ranks) * len(self.axes.replicate.ranks)
            self.rows.grad = rows if self.rows.grad is None else self.rows.grad + rows
        self.in_flight.clear()
        # @00
        # |         raise NotImplementedError("TODO(11): Gradient.finish")
        # @end


# --- From here on, everything is written -------------------------------------------------------------------


class Sharded:
    """One parameter: its rows stay, the whole comes and goes.

    Attributes:
        owner, name: the module that has it, and its name there. n: the rows of the whole.
        whole: in a forward, the whole parameter. again: in a backward, the whole parameter, gathered again.
    """

    whole: Tensor | None = None
    again: Tensor | None = None

    def __init__(self, owner: nn.Module, name: str, param: nn.Parameter, axes: Axes) -> None:
        self.owner, self.name, self.n, self.axes = owner, name, len(param), axes
        self.rows = nn.Parameter(rows_of(param, axes.shard), param.requires_grad)
        self.gradient = Gradient(self.rows, axes)
        owner.register_parameter(name, self.rows)

    def gathered(self) -> Tensor:
        return gather(self.rows.detach(), self.n, self.axes.shard)

    def begin(self) -> None:
        """Let the module compute with the whole: an attribute is found before a parameter of the same name."""
        self.whole = Whole.apply(self.rows, self)  # type: ignore[no-untyped-call]
        vars(self.owner)[self.name] = self.whole

    def end(self) -> None:
        self.whole = None
        del vars(self.owner)[self.name]

    def once_more(self) -> Tensor:
        """Return the whole in a backward, which needs it a second time."""
        if self.again is None:
            self.again = self.gathered()
        return self.again


class Whole(torch.autograd.Function):
    """From the rows to the whole in a forward, and from its gradient to the rows' gradient in a backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sharded: Sharded) -> Tensor:
        ctx.sharded = sharded
        return sharded.gathered()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.sharded.again = None
        ctx.sharded.gradient.add(grad)
        return None, None  # `finish` sets the gradient


@contextmanager
def unsharded(params: list[Sharded]) -> Iterator[None]:
    """Make parameters whole for a forward. What autograd saves of them for the backward is not memory, but how to get it again."""

    def pack(tensor: Tensor) -> Any:
        for each in params:
            if each.whole is not None and each.whole.data_ptr() and _storage(each.whole) == _storage(tensor):
                return each, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        each, *view = saved
        whole: Tensor = each.once_more()
        return whole.as_strided(*view)

    for each in params:
        each.begin()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for each in params:
            each.end()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def sharded_in(module: nn.Module) -> list[Sharded]:
    """Return the sharded parameters of a module and of all modules in it."""
    return [each for inner in module.modules() for each in getattr(inner, "sharded", [])]


def hybrid_shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the parameters of a module that no call before has sharded: inner modules first. Return the module.

    The module's forward returns one tensor. Its parameters have at least one dim, and are not tied.
    """
    axes, done = axes_of(mesh), {each.rows for each in sharded_in(module)}
    params = [
        Sharded(owner, name, param, axes)
        for owner in module.modules()
        for name, param in list(owner.named_parameters(recurse=False))
        if param not in done
    ]
    forward: Callable[..., Tensor] = module.forward

    def finish() -> None:
        for each in sharded_in(module):
            each.again = None
            each.gradient.finish()

    def whole_forward(*args: Any, **kwargs: Any) -> Tensor:
        with unsharded(params):
            output = forward(*args, **kwargs)
        if output.requires_grad:
            output.register_hook(lambda grad: after_backward(finish))
        return output

    vars(module).update(sharded=params, forward=whole_forward)
    return module


def set_requires_all_reduce(module: nn.Module, requires_all_reduce: bool) -> None:
    """Choose whether gradients go to other nodes, in this module and all modules in it."""
    for each in sharded_in(module):
        each.gradient.all_reduces = requires_all_reduce
