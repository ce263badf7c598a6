"""Fully sharded data parallel training (FSDP), in one file.

Every rank keeps a chunk of rows of every parameter. Before a module computes, the ranks gather its parameters; afterwards they
free them. The backward does the same, and averages the gradients: each rank gets the rows that it keeps.

    padded_rows, rows_of      station 01: which rows a rank keeps
    ring_all_gather, ring_reduce_scatter      02: what collectives are made of
    replicate                 03: data parallel training without sharding
    # @03
    FSDPParam                 03: one parameter: the rows that stay, and the whole that comes and goes
    ParamGroup                03: the parameters that one module owns, and the hooks that move them
    # @end
    fully_shard               03: shards the parameters of a module
    traffic                   05: the bytes that a training step moves, in closed form
    # @07
    FSDPModule                07: the switches that a training loop sets
    # @end
    # @08
    Context                   08: streams, and the order of forwards, shared by all groups of a model
    # @end

Collectives and streams come from `hwfsdp`. Everything else is here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hwfsdp.collectives import all_gather_flat, reduce_scatter_flat
from hwfsdp.streams import StreamEvent, after_backward, streams_for

Shape = Sequence[int]
Places = list[tuple[nn.Module, str]]  # modules, and names in them

# --- 01 Rows -----------------------------------------------------------------------------------------------


def padded_rows(n: int, world_size: int) -> int:
    """Count the rows that each of `world_size` ranks sends for a parameter of `n` rows, padding included."""
    # @01
    return -(-n // world_size)
    # @00
    # |     raise NotImplementedError("TODO(01): padded_rows")
    # @end


def rows_of(n: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the first row that `rank` keeps, and the row after its last one. A rank without rows keeps `(n, n)`."""
    # @01
    chunk = padded_rows(n, world_size)
    return min(rank * chunk, n), min((rank + 1) * chunk, n)
    # @00
    # |     raise NotImplementedError("TODO(01): rows_of")
    # @end


# --- 02 Rings ----------------------------------------------------------------------------------------------


def ring_all_gather(whole: Tensor, part: Tensor) -> None:
    """Fill `whole`, [W * n], with the `part`, [n], of every rank, in the order of ranks.

    A rank sends only to the next rank, receives only from the previous one, and sends no more bytes than it must.
    """
    # @02
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = whole.view(world_size, -1)
    pieces[rank] = part
    for step in range(world_size - 1):
        pass_on(pieces[(rank - step) % world_size], pieces[(rank - step - 1) % world_size])
    # @00
    # |     raise NotImplementedError("TODO(02): ring_all_gather")
    # @end


def ring_reduce_scatter(part: Tensor, whole: Tensor) -> None:
    """Fill `part`, [n], with the sum of all ranks' pieces for this rank; `whole`, [W * n], has a piece for each rank.

    A rank sends only to the next rank, receives only from the previous one, and sends no more bytes than it must.
    """
    # @02
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = whole.view(world_size, -1)
    part.copy_(pieces[(rank - 1) % world_size])
    for step in range(1, world_size):
        received = torch.empty_like(part)
        pass_on(part, received)
        torch.add(received, pieces[(rank - step - 1) % world_size], out=part)
    # @00
    # |     raise NotImplementedError("TODO(02): ring_reduce_scatter")
    # @end


def pass_on(sent: Tensor, received: Tensor) -> None:
    """Send a tensor to the next rank of the ring, and receive one from the previous rank, at the same time."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    to_next = dist.P2POp(dist.isend, sent, (rank + 1) % world_size)
    from_previous = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
    for work in dist.batch_isend_irecv([to_next, from_previous]):
        work.wait()


# --- 03 Replicas -------------------------------------------------------------------------------------------


def replicate(model: nn.Module) -> nn.Module:
    """Make each backward average the gradients of `model` over the ranks. Every rank keeps all of `model`. Return it."""

    # @03
    def average(param: Tensor) -> None:
        assert param.grad is not None
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(average)
    return model
    # @00
    # |     raise NotImplementedError("TODO(03): replicate")
    # @end


# --- 05 Closed forms -----------------------------------------------------------------------------------------


def traffic(shapes: Sequence[Shape], strategy: str, world_size: int, shards: int = 1) -> dict[str, int]:
    """Count the bytes that one training step in float32 moves, by collective. A call counts the whole tensor that it works on.

    Args:
        shapes: of all parameters. strategy: "ddp", "zero1", "zero2", "zero3" (which is FSDP), or "hybrid".
        shards: for "hybrid", how many ranks share one copy of the parameters.
    """
    # @05
    shards = {"ddp": 1, "hybrid": shards}.get(strategy, world_size)
    whole = 4 * sum(shards * padded_rows(shape[0], shards) * math.prod(shape[1:]) for shape in shapes)
    gathers = 2 if strategy in ("zero3", "hybrid") else 1
    return {
        "all_gather": gathers * whole if shards > 1 else 0,
        "reduce_scatter": whole if shards > 1 else 0,
        "all_reduce": whole // shards if shards < world_size else 0,
    }
    # @00
    # |     raise NotImplementedError("TODO(05): traffic")
    # @end


# @08
# @00
# | # --- 03 Collectives --------------------------------------------------------------------------------------
# |
# |
# | def all_gather(whole: Tensor, part: Tensor, name: str) -> None:
# |     """Fill `whole`, [W * n], with the `part`, [n], of every rank; return when it is there. Traces show `name`."""
# |     streams = streams_for(whole.device.type)
# |     streams.all_gather.wait(streams.compute.record())
# |     streams.compute.wait(all_gather_flat(whole, part, None, streams.all_gather, name))
# |
# |
# | def reduce_scatter(part: Tensor, whole: Tensor, name: str) -> None:
# |     """Fill `part`, [n], with this rank's piece of the mean of all ranks' `whole`, [W * n]; return when it is there."""
# |     streams = streams_for(whole.device.type)
# |     streams.reduce_scatter.wait(streams.compute.record())
# |     streams.compute.wait(reduce_scatter_flat(part, whole, None, streams.reduce_scatter, name))
# |
# |
# @end
# --- 03 Fully sharded ----------------------------------------------------------------------------------------


# @03
class FSDPParam:
    """One parameter: the rows that stay on this rank, and the whole tensor that comes and goes.

    Autograd keeps the weights of a forward for its backward. If each gather made a new tensor, the old ones would stay alive. So
    the whole parameter is one tensor for good, and only the memory below it is taken and given back. Autograd also counts writes,
    and refuses a weight that was written to after its use. `gathered` is the same memory without that count.

    Attributes:
        places: where the parameter is registered; a tied parameter has several.
        padded: [chunk, *rest]: this rank's rows, then zeros. shard: the rows alone; the optimizer updates them.
        gathered: [W, chunk * rest], in the dtype of compute. whole: its front, in the shape of the original parameter.
        grad: of the whole parameter, in the dtype of the reduction, until it is reduced; or None.
    """

    # @06
    def __init__(self, param: nn.Parameter, places: Places, policy: MixedPrecisionPolicy) -> None:
        self.reduce_dtype = policy.reduce_dtype
        # @03
        # |     def __init__(self, param: nn.Parameter, places: Places) -> None:
        # @end
        world_size, n = dist.get_world_size(), len(param)
        start, stop = rows_of(n, world_size, dist.get_rank())
        self.places = places
        self.padded = param.data.new_zeros(padded_rows(n, world_size), *param.shape[1:])
        self.padded[: stop - start] = param.data[start:stop]
        self.shard = nn.Parameter(self.padded[: stop - start], param.requires_grad)
        self.shard.is_shard = True  # type: ignore[attr-defined]
        # @06
        self.gathered = param.data.new_empty(world_size, self.padded.numel(), dtype=policy.param_dtype)
        # @03
        # |         self.gathered = param.data.new_empty(world_size, self.padded.numel())
        # @end
        whole = self.gathered.data.view(-1)[: param.numel()].view(param.shape)
        self.whole = nn.Parameter(whole, param.requires_grad)
        self.grad: Tensor | None = None
        self.free()

    def register(self, tensor: nn.Parameter) -> None:
        """Make `tensor` the parameter of the modules."""
        for module, name in self.places:
            module.register_parameter(name, tensor)

    # @05
    def fill(self, rows: Tensor) -> None:
        """Give the whole parameter memory, fill it with all ranks' `rows`, [W, chunk * rest], and register it."""
        self.gathered.untyped_storage().resize_(self.gathered.numel() * self.gathered.element_size())
        self.gathered.copy_(rows)
        self.register(self.whole)

    # @03
    # |     def gather(self) -> None:
    # |         """Give the whole parameter memory, gather all ranks' rows into it, and register it."""
    # |         self.gathered.untyped_storage().resize_(self.gathered.numel() * self.gathered.element_size())
    # |         all_gather(self.gathered.view(-1), self.padded.view(-1), self.places[0][1])
    # |         self.register(self.whole)
    # |
    # @end

    def free(self) -> None:
        """Register the shard, and give the memory of the whole parameter back."""
        self.register(self.shard)
        self.gathered.untyped_storage().resize_(0)

    def take_grad(self) -> None:
        # @07
        """Add the gradient that a backward has left at the whole parameter to `grad`."""
        new, self.whole.grad = self.whole.grad, None
        assert new is not None
        new = new.to(self.reduce_dtype or new.dtype)
        self.grad = new if self.grad is None else self.grad + new
        # @06
        # |         """Move the gradient that a backward has left at the whole parameter to `grad`."""
        # |         new, self.whole.grad = self.whole.grad, None
        # |         assert new is not None
        # |         self.grad = new.to(self.reduce_dtype or new.dtype)
        # @03
        # |         """Move the gradient that a backward has left at the whole parameter to `grad`."""
        # |         self.grad, self.whole.grad = self.whole.grad, None
        # @end

    def hand_out_grad(self) -> Tensor:
        """Return `grad` as [W, chunk * rest], a row for each rank, with zeros for padding. Afterwards `grad` is None."""
        assert self.grad is not None
        rows = self.grad.new_zeros(self.gathered.shape)
        rows.view(-1)[: self.grad.numel()] = self.grad.flatten()
        self.grad = None
        return rows

    # @05
    # @03
    # |     def reduce(self) -> None:
    # |         """Average `grad` over the ranks."""
    # |         rows = self.hand_out_grad()
    # |         mean = rows.new_empty(rows.shape[1])
    # |         reduce_scatter(mean, rows.view(-1), self.places[0][1])
    # |         self.add_to_shard(mean)
    # |
    # @end
    def add_to_shard(self, reduced: Tensor) -> None:
        """Add this rank's rows of the mean gradient, [chunk * rest], to the gradient of the shard."""
        # @06
        rows = reduced[: self.shard.numel()].view_as(self.shard).to(self.shard.dtype)
        # @03
        # |         rows = reduced[: self.shard.numel()].view_as(self.shard)
        # @end
        self.shard.grad = rows if self.shard.grad is None else self.shard.grad + rows


# @08
class InFlight(NamedTuple):
    """A buffer that a stream still uses, until the event `done`."""

    buffer: Tensor  # [W, n]: row r is from rank r, or for it
    done: StreamEvent


# @03
# @end
# @04
class Context:
    # @08
    """What all groups of a model share: streams, the order of forwards, and what is in flight.

    Memory belongs to the stream that allocated it. As soon as Python lets it go, that stream may use it for something else,
    whoever still reads it. So a buffer is let go only when its own stream has been told to wait for its readers.
    """

    # @04
    # |     """What all groups of a model share."""
    # |
    # @end
    def __init__(self, root: nn.Module) -> None:
        # @08
        streams = streams_for(next(root.parameters()).device.type)
        self.compute = streams.compute
        self.gathers, self.reductions = streams.all_gather, streams.reduce_scatter
        # @04
        # @end
        self.groups: list[ParamGroup] = []
        for name, module in root.named_modules():
            group: ParamGroup | None = getattr(module, "fsdp_group", None)
            if group is not None:
                group.name, group.context = name or group.name, self
                self.groups.append(group)
        self.in_backward = False
        # @08
        self.root = self.groups[0]  # its forward contains all the others
        # @04
        # @end
        # @09
        self.began: list[ParamGroup] = []  # in this iteration, in the order in which forwards began
        self.expected: deque[ParamGroup] = deque()  # those of the iteration before that have not come yet
        # @04
        # @end
        # @10
        self.ended: list[ParamGroup] = []  # in the order in which forwards ended, until their backward comes
        self.reducing: InFlight | None = None
        # @04
        # @end

    # @08
    def begin_iteration(self) -> None:
        # @10
        """Let gathers wait for the optimizer's writes, and start a new list of forwards."""
        # @09
        # |         """Let gathers wait for the optimizer's writes, and start a new list of forwards."""
        # @08
        # |         """Let gathers wait for the optimizer's writes."""
        # @end
        self.gathers.wait(self.compute.record())
        # @09
        self.expected, self.began = deque(self.began), []
        for group in self.groups:
            group.gathering = None  # of a guess that was wrong: it holds what was there before the optimizer
        # @08
        # @end
        # @10
        self.ended.clear()
        # @08
        # @end

    # @04
    # @end
    # @10
    def finish_reduction(self) -> None:
        """Let compute wait for the reduction in flight, and drop its buffer. Then the shards have their gradients."""
        if self.reducing is not None:
            self.compute.wait(self.reducing.done)
            self.reducing = None

    # @04
    # @end
    def finish_backward(self) -> None:
        """At the end of a backward, reduce the gradients that are left, and free the groups that are still whole."""
        for group in self.groups:
            group.finish_backward()
        # @10
        self.compute.wait(self.gathers.record())  # gathers that no backward needed
        self.finish_reduction()
        # @04
        # @end
        self.in_backward = False


# @03
# @end
class ParamGroup:
    # @05
    """The parameters that one module owns. They travel together: one collective gathers them, one reduces their gradients."""
    # @03
    # |     """The parameters that one module owns, and the hooks that gather, free and reduce them."""
    # @end

    # @04
    context: Context | None = None  # is there from the first forward on

    # @03
    # @end
    # @07
    def __init__(
        self, name: str, params: list[FSDPParam], policy: MixedPrecisionPolicy, reshard: bool
    ) -> None:
        self.name, self.params, self.policy = name, params, policy
        self.reshard_after_forward = reshard
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        # @06
        # |     def __init__(self, name: str, params: list[FSDPParam], policy: MixedPrecisionPolicy) -> None:
        # |         self.name, self.params, self.policy = name, params, policy
        # @03
        # |     def __init__(self, name: str, params: list[FSDPParam]) -> None:
        # |         self.name, self.params = name, params
        # @end
        # @04
        self.is_whole = False
        self.in_backward = False
        self.watched: set[object] = set()  # a key for each input of the last forward that has a gradient
        self.inputs: set[object] = set()  # those whose gradient the next backward will bring
        self.missing: set[object] = set()  # gradients that the backward still owes before it is over
        # @03
        # @end
        # @08
        self.gathering: InFlight | None = None
        # @03
        # @end
        for param in params:
            # @04
            if param.whole.requires_grad:
                param.whole.register_post_accumulate_grad_hook(lambda _, param=param: self.take(param))
            # @03
            # |             param.whole.register_post_accumulate_grad_hook(lambda _, param=param: self.take(param))
            # @end

    # --- What moves

    @torch.no_grad()
    def unshard(self) -> None:
        # @08
        """Start to gather the parameters, unless they are whole or on their way."""
        ctx, sizes = self.context, [param.padded.numel() for param in self.params]
        if self.is_whole or self.gathering is not None or not self.params or ctx is None:
            return
        with ctx.gathers.run():
            buffer = self.params[0].gathered.new_empty(dist.get_world_size(), sum(sizes))
            part = buffer[dist.get_rank()]
            for param, piece in zip(self.params, part.split(sizes), strict=True):
                piece.copy_(param.padded.view(-1))
            done = all_gather_flat(buffer.view(-1), part, None, ctx.gathers, self.name)
        self.gathering = InFlight(buffer, done)

    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        """Let compute wait for the gather in flight, and copy the parameters out of its buffer."""
        ctx = self.context
        if self.gathering is None or ctx is None:
            return
        (buffer, done), self.gathering = self.gathering, None
        ctx.compute.wait(done)
        columns = buffer.split([param.padded.numel() for param in self.params], dim=1)
        for param, rows in zip(self.params, columns, strict=True):
            param.fill(rows)
        ctx.gathers.wait(ctx.compute.record())  # before the buffer's memory is used again
        self.is_whole = True
        # @05
        # |         """Gather the parameters in one collective, unless they are whole."""
        # |         sizes = [param.padded.numel() for param in self.params]
        # |         if self.is_whole or not self.params:
        # |             return
        # |         buffer = self.params[0].gathered.new_empty(dist.get_world_size(), sum(sizes))
        # |         part = torch.empty_like(buffer[0])
        # |         for param, piece in zip(self.params, part.split(sizes), strict=True):
        # |             piece.copy_(param.padded.view(-1))
        # |         all_gather(buffer.view(-1), part, self.name)
        # |         for param, rows in zip(self.params, buffer.split(sizes, dim=1), strict=True):
        # |             param.fill(rows)
        # |         self.is_whole = True
        # @04
        # |         """Gather the parameters, unless they are whole."""
        # |         if not self.is_whole:
        # |             for param in self.params:
        # |                 param.gather()
        # |         self.is_whole = True
        # @03
        # |         """Gather the parameters."""
        # |         for param in self.params:
        # |             param.gather()
        # @end

    def reshard(self) -> None:
        """Free the whole parameters."""
        for param in self.params:
            param.free()
        # @04
        self.is_whole = False
        # @03
        # @end

    # @04
    @torch.no_grad()
    def reduce(self) -> None:
        # @10
        """Start to average this group's gradients over the ranks. One reduction is in flight at a time."""
        ctx, params = self.context, [param for param in self.params if param.grad is not None]
        if not params or ctx is None:
            return
        ctx.finish_reduction()
        flat = torch.cat([param.hand_out_grad() for param in params], dim=1)
        # @08
        # |         """Average this group's gradients over the ranks."""
        # |         ctx, params = self.context, [param for param in self.params if param.grad is not None]
        # |         if not params or ctx is None:
        # |             return
        # |         flat = torch.cat([param.hand_out_grad() for param in params], dim=1)
        # @05
        # |         """Average this group's gradients over the ranks, in one collective."""
        # |         params = [param for param in self.params if param.grad is not None]
        # |         if not params:
        # |             return
        # |         flat = torch.cat([param.hand_out_grad() for param in params], dim=1)
        # |         mean = flat.new_empty(flat.shape[1])
        # |         reduce_scatter(mean, flat.view(-1), self.name)
        # |         for param, piece in zip(params, mean.split([p.padded.numel() for p in params]), strict=True):
        # |             param.add_to_shard(piece)
        # @04
        # |         """Average this group's gradients over the ranks."""
        # |         for param in self.params:
        # |             if param.grad is not None:
        # |                 param.reduce()
        # @end
        # @08
        ctx.reductions.wait(ctx.compute.record())
        with ctx.reductions.run():
            mean = flat.new_empty(flat.shape[1])
            reduce_scatter_flat(mean, flat.view(-1), None, ctx.reductions, self.name)

            @torch.no_grad()
            def add() -> None:
                for param, piece in zip(params, mean.split([p.padded.numel() for p in params]), strict=True):
                    param.add_to_shard(piece)

            ctx.reductions.then(add)
        # @04
        # @end
        # @10
        ctx.reducing = InFlight(flat, ctx.reductions.record())
        # @08
        # |         ctx.compute.wait(ctx.reductions.record())
        # @04
        # @end

    # @03
    # @end
    # --- When it moves

    # @06
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # @09
        """Gather the parameters before a forward, start the next gather, and cast and watch the inputs."""
        # @06
        # |         """Gather the parameters before a forward; cast and watch the inputs."""
        # @end
        # @08
        ctx = self.context or Context(module)
        if self is ctx.root and not ctx.in_backward:
            ctx.begin_iteration()
        self.unshard()
        self.wait_for_unshard()
        # @06
        # |         if self.context is None:
        # |             Context(module)
        # |         self.unshard()
        # @end
        # @09
        if not ctx.in_backward:
            ctx.began.append(self)
            if ctx.expected and ctx.expected.popleft() is self and ctx.expected:
                ctx.expected[0].unshard()
        # @06
        # @end
        if self.policy.cast_forward_inputs:
            args, kwargs = cast((args, kwargs), self.policy.param_dtype)
        self.watched = set()
        return tree_map(self.watch, (args, kwargs)) if torch.is_grad_enabled() else (args, kwargs)

    # @04
    # |     def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    # |         """Gather the parameters before a forward, and watch the inputs."""
    # |         if self.context is None:
    # |             Context(module)
    # |         self.unshard()
    # |         self.watched = set()
    # |         return tree_map(self.watch, (args, kwargs)) if torch.is_grad_enabled() else (args, kwargs)
    # |
    # @03
    # |     def pre_forward(self, module: nn.Module, args: Any) -> None:
    # |         """Gather the parameters before a forward."""
    # |         self.unshard()
    # |
    # @end
    # @04
    def watch(self, value: Any) -> Any:
        """Return a view of an input, and let this group know when the view's gradient is there."""
        if not (isinstance(value, Tensor) and value.requires_grad):
            return value
        own, key = value.view_as(value), object()
        own.register_hook(lambda grad: self.arrived(key))
        self.watched.add(key)
        return own

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Free the parameters after a forward, and gather them again when a gradient of its output is there."""
        ctx = self.context
        assert ctx is not None
        # @07
        if self.reshard_after_forward and not ctx.in_backward:  # a recomputation's backward follows at once
            self.reshard()
        # @04
        # |         if not ctx.in_backward:  # a recomputation's backward follows at once
        # |             self.reshard()
        # @end
        if torch.is_grad_enabled():
            # @10
            if not ctx.in_backward:
                ctx.ended.append(self)
            # @04
            # @end
            watched = self.watched
            if not ctx.in_backward:  # after a recomputation, perhaps only the first forward's graph is run
                self.inputs |= watched
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda grad: self.pre_backward(watched))
        # @06
        return cast(output, self.policy.output_dtype)
        # @04
        # |         return output
        # @end

    def pre_backward(self, inputs: set[object]) -> None:
        # @10
        """Gather the parameters before the module's backward, and start the gather of the module that comes next."""
        # @04
        # |         """Gather the parameters before the module's backward."""
        # @end
        ctx = self.context
        assert ctx is not None
        if not ctx.in_backward:
            ctx.in_backward = True
            after_backward(ctx.finish_backward)
        if self.in_backward:
            return  # another output was first
        self.in_backward = True
        trained: set[object] = {param for param in self.params if param.whole.requires_grad}
        self.missing = self.inputs | inputs or trained  # an input's gradient comes last
        self.inputs = set()
        self.unshard()
        # @08
        self.wait_for_unshard()
        # @04
        # @end
        # @10
        if self in ctx.ended:
            while ctx.ended.pop() is not self:
                pass
        if ctx.ended:
            ctx.ended[-1].unshard()
        # @04
        # @end

    def take(self, param: FSDPParam) -> None:
        """Take the gradient of a parameter; autograd has added up the gradients of all its uses."""
        param.take_grad()
        self.arrived(param)

    def arrived(self, key: object) -> None:
        """Note that a gradient is there. After the last one of an input the parameters are no longer needed."""
        self.missing.discard(key)
        if self.in_backward and not self.missing:
            self.post_backward()

    def post_backward(self) -> None:
        """Free the parameters after the module's backward, and reduce the gradients."""
        self.in_backward = False
        # @07
        if self.reshard_after_backward:
            self.reshard()
        if self.requires_gradient_sync:
            self.reduce()
        # @04
        # |         self.reshard()
        # |         self.reduce()
        # @end

    def finish_backward(self) -> None:
        """At the end of a backward, finish this group if it waits for a gradient, or has one that is not reduced."""
        # @08
        self.gathering = None
        # @04
        # @end
        # @07
        if self.in_backward or (self.requires_gradient_sync and any(p.grad is not None for p in self.params)):
            self.post_backward()
        # @04
        # |         if self.in_backward or any(param.grad is not None for param in self.params):
        # |             self.post_backward()
        # @end

    # @03
    # |     def post_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
    # |         """Free the parameters after a forward, and gather them again when the gradient of its output is there."""
    # |         self.reshard()
    # |         if output.requires_grad:
    # |             output.register_hook(self.pre_backward)
    # |
    # |     def pre_backward(self, grad: Tensor) -> None:
    # |         """Gather the parameters before the module's backward."""
    # |         self.unshard()
    # |
    # |     def take(self, param: FSDPParam) -> None:
    # |         """Reduce the gradient of a parameter, which autograd has summed up, and free the parameter."""
    # |         param.take_grad()
    # |         param.reduce()
    # |         param.free()
    # |
    # @end


# @07
class FSDPModule(nn.Module):
    """The second base class of every sharded module: its two switches."""

    fsdp_group: ParamGroup

    def set_requires_gradient_sync(self, value: bool) -> None:
        """Choose whether backwards reduce gradients, for this module and all below it. If not, whole gradients add up."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.fsdp_group.requires_gradient_sync = value

    def set_reshard_after_backward(self, value: bool) -> None:
        """Choose whether backwards free the whole parameters, for this module and all below it."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.fsdp_group.reshard_after_backward = value


# @03
# @end
# @00
# | # TODO(03): a class for one parameter, and one for the parameters of a module with the hooks that move them.
# |
# |
# @end
def fully_shard(
    module: nn.Module,
    # @06
    *,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    # @07
    reshard_after_forward: bool = True,
    # @06
    # @end
    # @00
    # @end
) -> nn.Module:
    """Shard the parameters of `module`, in place, over all ranks; return it.

    Parameters that an earlier call has sharded are left alone, so call it for inner modules first. From then on
    `module.parameters()` are this rank's rows, forwards and backwards compute with whole parameters, and the rows' `grad` is their
    part of the mean gradient.
    """
    # @04
    places: dict[nn.Parameter, Places] = {}
    for submodule in module.modules():
        for name, param in submodule.named_parameters(recurse=False, remove_duplicate=False):
            if not hasattr(param, "is_shard"):
                places.setdefault(param, []).append((submodule, name))
    # @03
    # |     params = []
    # |     for submodule in module.modules():
    # |         for name, param in submodule.named_parameters(recurse=False, remove_duplicate=False):
    # |             if not hasattr(param, "is_shard"):
    # |                 params.append(FSDPParam(param, [(submodule, name)]))
    # @00
    # |     raise NotImplementedError("TODO(03): fully_shard")
    # @end
    # @06
    params = [FSDPParam(param, where, mp_policy) for param, where in places.items()]
    # @04
    # |     params = [FSDPParam(param, where) for param, where in places.items()]
    # @00
    # @end
    # @07
    group = ParamGroup(type(module).__name__, params, mp_policy, reshard_after_forward)
    module.fsdp_group = group  # type: ignore[assignment]
    module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {})
    # @06
    # |     group = module.fsdp_group = ParamGroup(type(module).__name__, params, mp_policy)
    # @04
    # |     group = module.fsdp_group = ParamGroup(type(module).__name__, params)
    # @03
    # |     group = ParamGroup(type(module).__name__, params)
    # @00
    # @end
    # @04
    module.register_forward_pre_hook(group.pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(group.post_forward)
    return module
    # @03
    # |     module.register_forward_pre_hook(group.pre_forward)
    # |     module.register_forward_hook(group.post_forward)
    # |     return module
    # @00
    # @end


# @06
def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return the same with floating-point tensors in `dtype`, if there is one."""
    if dtype is None:
        return tree
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


# @00
# @end


# --- Given --------------------------------------------------------------------------------------------------


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return nested lists, tuples and dicts with what `function` makes of everything in them."""
    if isinstance(tree, dict):
        return {key: tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        made = [tree_map(function, value) for value in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    return function(tree)


def tree_leaves(tree: Any) -> list[Any]:
    """Return everything in nested lists, tuples and dicts, from left to right."""
    leaves: list[Any] = []
    tree_map(leaves.append, tree)
    return leaves
