"""Fully sharded data parallel training, in one file.

Every rank keeps one chunk of rows of every parameter. Before a module computes, its parameters are gathered; after that
they are freed. Gradients are averaged over the ranks, and each rank keeps its own rows of them.

    fully_shard     turns a module into an `FSDPModule` that owns the parameters below it, but for those owned already
    FSDPParam       one parameter: the shard that stays, and the whole that comes and goes
    FSDPModule      parameters that travel together: unshard, wait_for_unshard, reshard, reduce_gradients
    pre_forward, post_forward, pre_backward, post_backward      the moments at which that happens

Streams and collectives are those of `hwfsdp`; all the rest is here. Left out: meshes of several axes, the meta device,
offloading, parameters tied between two groups.

Note [Memory that comes and goes]
    Autograd keeps the weights of a forward for the backward. If each gather made a new tensor, the old ones would stay alive
    and nothing would ever be freed. So a whole parameter is one tensor for good, and only the storage below it is resized.
    Autograd also counts writes, and refuses what was written since it was kept. `gathered`, which gathers write to, and
    `unsharded_param`, which modules compute with, share a storage but not that count, because of `.data`.

Note [Who hands over the gradients]
    During a forward, modules do not compute with `unsharded_param` but with what the identity `HandOverGradients` returns for
    it. Autograd runs the backward of that function once, when the gradients of all these parameters are complete, whatever
    the module's inputs are: post-backward of an embedding needs no special care, nor does a module that runs twice.

Note [Whose memory]
    Memory belongs to the stream on which it was allocated: that stream may reuse it as soon as Python lets it go, whoever
    else still reads it. So buffers that another stream reads are kept (`copied_out`, `reductions`) until their own
    stream has waited for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hwfsdp.collectives import all_gather_flat, reduce_scatter_flat
from hwfsdp.streams import StreamEvent, after_backward, streams_for

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


class Slot(NamedTuple):
    """A place where a parameter is registered; a tied parameter has several."""

    module: nn.Module
    name: str


class InFlight(NamedTuple):
    """A flat buffer that is in use until `done`: `flat` is [W, n], row r of rank r, or for it."""

    flat: Tensor
    done: StreamEvent


class FSDPCommContext:
    """What the sharded modules of one model share.

    Args:
        device_type: of the mesh, for example "cuda".

    Attributes:
        streams: `compute`, `all_gather` and `reduce_scatter` (see `hwfsdp.streams`).
        modules: all sharded modules, in the order in which they were sharded.
        outermost: whose forward is running, with all others inside it.
        post_forward_order: modules whose forward has ended, once per forward, to be gathered from the end in backward.
        in_backward: whether a backward is running; then a forward is a recomputation (activation checkpointing).
        copied_out: the last gather's buffer, until compute has copied out of it (Note [Whose memory]).
        reductions: inputs of reductions, until the gradients are there.
    """

    def __init__(self, device_type: str) -> None:
        self.streams = streams_for(device_type)
        self.modules: list[FSDPModule] = []
        self.outermost: FSDPModule | None = None
        self.post_forward_order: list[FSDPModule] = []
        self.in_backward = False
        self.copied_out: InFlight | None = None
        self.reductions: deque[InFlight] = deque()

    def release_gather_buffer(self) -> None:
        """The all-gather stream may reuse the last gather's buffer once compute has copied out of it."""
        if self.copied_out is not None:
            self.streams.all_gather.wait(self.copied_out.done)
            self.copied_out = None

    def wait_for_reductions(self) -> None:
        """Compute waits for all reductions in flight; their gradients are there, their inputs are let go."""
        while self.reductions:
            self.streams.compute.wait(self.reductions.popleft().done)


class FSDPParam:
    """One parameter, sharded by rows over the ranks of a mesh.

    With W ranks and d0 rows, rank r has the rows from `r * chunk` on, `chunk = ceil(d0 / W)` of them; the last ranks may have
    fewer, or none. Ranks contribute equally to collectives, so every shard is padded with zeros to a full chunk:

        d0 = 5, W = 2, chunk = 3        rank 0: 0 1 2        rank 1: 3 4 .

    All padding is at the end of what is gathered, whose front therefore is the parameter.

    Args:
        param: as the user made it; it may be on another device.
        module_info: all places where it is registered. param_fqn: its name in the model.
        mesh: one axis; device: of its kind, where the parameter is to live.
        mp_policy: `param_dtype` is gathered and computed with (None: the parameter's own), `reduce_dtype` is what gradients
            are reduced in (None: their own).

    Attributes:
        padded_shard: [chunk * rest], original dtype: this rank's rows, then zeros.
        sharded_param: DTensor, Shard(0) on the mesh: `param` for optimizers and state dicts. Its local part is the front of
            `padded_shard`, so what an optimizer updates is what the next gather sends.
        gathered: [W * chunk * rest], param dtype: the memory of the whole parameter (Note [Memory that comes and goes]).
        unsharded_param: the shape of `param`, param dtype: the front of `gathered`.
        unsharded_grad: the shape of `param`: the sum of gradients that are not reduced yet; else None.
    """

    def __init__(
        self,
        param: nn.Parameter,
        module_info: Sequence[Slot],
        param_fqn: str,
        mesh: DeviceMesh,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        if param.ndim == 0:
            raise ValueError(f"{param_fqn}: a scalar has no rows to shard; make it a parameter of shape (1,)")
        self.module_info, self.fqn, self.mesh = tuple(module_info), param_fqn, mesh
        self.shape, self.orig_dtype = param.shape, param.dtype
        self.dtype, self.reduce_dtype = mp_policy.param_dtype or param.dtype, mp_policy.reduce_dtype
        self.world_size = mesh.size()
        self.chunk = -(-param.shape[0] // self.world_size)
        self.padded_numel = self.chunk * param.shape[1:].numel()
        self.unsharded_grad: Tensor | None = None
        self.shard(param, device)
        self.gathered = torch.empty(self.world_size * self.padded_numel, dtype=self.dtype, device=device)
        whole = self.gathered.data[: self.shape.numel()].view(self.shape)
        self.unsharded_param = nn.Parameter(whole, requires_grad=param.requires_grad)
        self.to_sharded()

    @torch.no_grad()
    def shard(self, param: nn.Parameter, device: torch.device) -> None:
        """Sets `padded_shard` and `sharded_param`: this rank's rows of `param`, in memory of their own on `device`.

        The shard has the values, the dtype and the `requires_grad` of `param`. Any number of rows will do, fewer than ranks
        too. `as_dtensor` makes a DTensor of this rank's rows.
        """
        # TODO(capstone, task 1)
        raise NotImplementedError

    def as_dtensor(self, local: Tensor) -> DTensor:
        """This rank's rows as a DTensor of the whole shape, which the rows alone do not tell."""
        shape, stride = self.shape, torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def allocate(self) -> Tensor:
        """Memory for the whole parameter, contents undefined.

        Returns:
            [W, padded_numel]: row r is for what rank r has. Writing to it writes `unsharded_param`, unnoticed by autograd.
        """
        self.gathered.untyped_storage().resize_(self.gathered.numel() * self.gathered.element_size())
        return self.gathered.view(self.world_size, self.padded_numel)

    def to_unsharded(self) -> None:
        """The modules have `unsharded_param` from now on; its memory is there and filled.

        It requires a gradient if and only if `sharded_param` does: the user may have changed that.
        """
        # TODO(capstone, task 1)
        raise NotImplementedError

    def to_sharded(self) -> None:
        """The modules have `sharded_param` from now on, and the memory of the whole parameter is given back."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def register(self, tensor: Tensor) -> None:
        """Makes `tensor` the modules' parameter, at every place where the parameter is registered."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def add_unsharded_grad(self, grad: Tensor) -> None:
        """Adds the gradient of one backward to `unsharded_grad`, in the dtype that it will be reduced in."""
        # TODO(capstone, task 1 and the bonuses)
        raise NotImplementedError

    def take_unsharded_grad(self) -> Tensor:
        """`unsharded_grad`, which is None from now on, as [W, padded_numel]: row r is for rank r, padded with zeros."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def add_sharded_grad(self, reduced: Tensor) -> None:
        """Adds this rank's rows of a reduced gradient to `sharded_param.grad`, a DTensor laid out as the parameter.

        Args:
            reduced: [padded_numel], reduce dtype: the rows, then padding. The gradient has the parameter's own dtype.
        """
        # TODO(capstone, task 1)
        raise NotImplementedError


class HandOverGradients(torch.autograd.Function):
    """The identity on a module's whole parameters; its backward gives all their gradients to post-backward at once."""

    @staticmethod
    def forward(ctx: Any, module: FSDPModule, params: list[FSDPParam], *wholes: Tensor) -> tuple[Tensor, ...]:
        """Returns `wholes`, the `unsharded_param` of each of `params`.

        What backward needs is kept on `ctx`. Where there is no gradient, it shall get None, not zeros.
        """
        # TODO(capstone, task 1)
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        """Calls `post_backward(module, found)`, `found` being pairs of a parameter and its gradient, where there is one.

        Nothing is left to autograd: `unsharded_param.grad` stays None. Returns None for every argument of forward.
        """
        # TODO(capstone, task 1)
        raise NotImplementedError


class FSDPModule:
    """What every sharded module also is: the owner of parameters that are gathered, freed and reduced together.

    Attributes:
        module_fqn: names the group in errors and in the event log. fsdp_params: its parameters, in the order in which they
            lie in flat buffers; one collective moves all of them.
        reshard_after_forward: free the whole parameters after forward, and gather them again for backward.
        reshard_after_backward: free them after backward; off, they stay for the next micro-batch.
        requires_gradient_sync: reduce gradients in backward; off, whole gradients add up on each rank.
        is_unsharded: whether the modules have the whole parameters.
        has_backward: whether pre-backward came, and post-backward has not.
    """

    def claim(
        self, fqn: str, params: list[FSDPParam], comm_ctx: FSDPCommContext, reshard: bool, policy: Any
    ) -> None:
        """Makes the module, whose class has just become this one, the owner of `params`."""
        self.module_fqn, self.fsdp_params, self.comm_ctx = fqn, params, comm_ctx
        self.mp_policy: MixedPrecisionPolicy = policy
        self.reshard_after_forward = reshard
        self.reshard_after_backward = self.requires_gradient_sync = True
        self.is_unsharded = self.has_backward = False
        self._gathered: InFlight | None = None
        self._positions: list[int] = []  # in comm_ctx.post_forward_order
        comm_ctx.modules.append(self)

    def set_requires_gradient_sync(self, value: bool) -> None:
        """Whether the next backwards reduce gradients, of this module and all below it; see torch's method of this name."""
        for module in sharded_modules(self):
            module.requires_gradient_sync = value

    def set_reshard_after_backward(self, value: bool) -> None:
        """Whether the next backwards free the whole parameters, of this module and all below it; see torch's method."""
        for module in sharded_modules(self):
            module.reshard_after_backward = value

    @torch.no_grad()
    def unshard(self) -> None:
        """Starts to gather the parameters, and returns before they are there.

        Does nothing if they are whole or on their way, or if there are none. Otherwise `_gathered` holds the gather: every
        rank's padded shards, each in the param dtype, end to end. The buffer is made and filled on the all-gather stream, which
        has let go of the one before (`comm_ctx.release_gather_buffer`), and one `all_gather_flat` gathers it there.
        """
        # TODO(capstone, tasks 1 and 2)
        raise NotImplementedError

    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        """The modules have the whole parameters afterwards, if `unshard` was called before.

        Does nothing if no gather is in flight. Otherwise compute waits for it and copies every parameter's columns of the
        buffer to its own memory. The buffer is kept as `comm_ctx.copied_out`, until that is over.
        """
        # TODO(capstone, task 1)
        raise NotImplementedError

    def reshard(self) -> None:
        """The modules have the shards afterwards, and the memory of the whole parameters is free."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def hand_out(self) -> None:
        """For one forward: the modules compute with what `HandOverGradients` returns for the trainable parameters."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def record_post_forward(self) -> None:
        """Notes that a forward of this module has ended: its place in `comm_ctx.post_forward_order`, and here which that is."""
        # TODO(capstone, task 3)
        raise NotImplementedError

    def _backward_prefetch(self) -> None:
        """Starts the gather of the module whose backward comes next: the one whose forward ended just before this one's.

        For every forward of this module there is one backward, the last one first. Nothing to do for the very first forward.
        """
        # TODO(capstone, task 3)
        raise NotImplementedError

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Averages the unsharded gradients over the ranks, and adds each rank's rows to the shards' gradients.

        Starts the reduction and returns. Parameters without a gradient take no part, and if there are none, nothing happens.
        Otherwise the gradients are packed in one flat buffer, row r of it for rank r, in the dtype in which they were summed;
        one `reduce_scatter_flat` on the reduce-scatter stream, which waits for the packing. Then, on that stream
        (`Stream.then`), every parameter gets its piece of the result (`add_sharded_grad`).

        At most one reduction is in flight: those before it are waited for first. `comm_ctx.reductions` keeps the buffer.
        """
        # TODO(capstone, tasks 1 and 3)
        raise NotImplementedError


def pre_forward(module: FSDPModule, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Hook before the forward of a sharded module; returns the arguments, cast as the policy says.

    The outermost forward begins an iteration: gathers must see what the optimizer wrote, so the all-gather stream waits for
    compute, and the order of an earlier forward is forgotten (`forget_order`). A recomputation begins nothing.

    Afterwards the module has its whole parameters (`hand_out`). Floating-point tensors in the arguments are in `param_dtype`, if
    the policy has one and `cast_forward_inputs`.
    """
    # TODO(capstone, task 1)
    raise NotImplementedError


def post_forward(module: FSDPModule, args: Any, output: Any) -> Any:
    """Hook after the forward of a sharded module; returns the output, floating-point tensors in `output_dtype` if there is one.

    Frees the parameters, if they are to be freed; if they stay whole, the modules have `unsharded_param` again. If there may be
    a backward, the forward is recorded, and every tensor in the output that requires a gradient calls `pre_backward` when it
    has its own. In a recomputation the parameters stay, and nothing is recorded. When the outermost forward is over, no buffer
    of a gather is kept (`comm_ctx.release_gather_buffer`), and none is the outermost.
    """
    # TODO(capstone, task 1 and the bonuses)
    raise NotImplementedError


def pre_backward(module: FSDPModule, grad: Tensor) -> None:
    """Hook on each output of a sharded module, when its gradient is there: gathers the parameters for the module's backward.

    The first one of a backward has `finish_backward` called at its end (`after_backward`). Of several outputs only the first
    one counts. When the parameters are whole, the gather of those needed next is started (`_backward_prefetch`).
    """
    # TODO(capstone, tasks 1 and 3)
    raise NotImplementedError


def post_backward(module: FSDPModule, grads: Sequence[tuple[FSDPParam, Tensor]]) -> None:
    """When all gradients of a module's parameters are there: adds them up, frees the parameters, starts the reduction.

    The parameters stay whole if `reshard_after_backward` is off, the gradients stay whole if `requires_gradient_sync` is.
    """
    # TODO(capstone, task 1 and the bonuses)
    raise NotImplementedError


def finish_backward(ctx: FSDPCommContext) -> None:
    """When a backward is over: the shards have their gradients, and nothing is left in flight, or whole by mistake.

    Modules for which post-backward never came, because all of their parameters are frozen or nothing depends on them, are
    freed now, and gradients that earlier micro-batches left in modules that this one did not use are reduced.
    """
    ctx.in_backward = False
    for module in ctx.modules:
        module._gathered = None  # a gather that nobody came for
        late = any(p.unsharded_grad is not None for p in module.fsdp_params) and module.requires_gradient_sync
        if module.has_backward or late:
            post_backward(module, [])
    ctx.wait_for_reductions()
    ctx.release_gather_buffer()
    forget_order(ctx)


def forget_order(ctx: FSDPCommContext) -> None:
    """No forward has ended."""
    ctx.post_forward_order.clear()
    for module in ctx.modules:
        module._positions.clear()


def fully_shard(
    module: nn.Module,
    *,
    module_fqn: str,
    comm_ctx: FSDPCommContext,
    mesh: DeviceMesh,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy,
) -> nn.Module:
    """Shards the parameters of `module`, in place, over the ranks of a mesh with one axis; returns it.

    It takes all parameters below it but for those that an earlier call has taken; so call it from the inside out. The
    module's class becomes one that is an `FSDPModule`, too. Buffers move to the device of the mesh.

    Args:
        module_fqn: its name. comm_ctx: one for all modules of a model. The rest as for torch's function of this name.

    Raises:
        ValueError: the module is sharded already, the mesh has several axes, or the parameters would be gathered in several
            dtypes.
    """
    if isinstance(module, FSDPModule) or mesh.ndim != 1:
        what = "is sharded already" if mesh.ndim == 1 else f"got a mesh of {mesh.ndim} axes; take one of them"
        raise ValueError(f"fully_shard: {module_fqn or type(module).__name__} {what}")
    device = torch.device(mesh.device_type)
    found = list(unclaimed_params(module))
    if len(dtypes := {mp_policy.param_dtype or param.dtype for _, param, _ in found}) > 1:
        raise ValueError(
            f"fully_shard: parameters of {module_fqn} have several dtypes: {dtypes}; set param_dtype"
        )
    params = [FSDPParam(param, slots, fqn, mesh, device, mp_policy) for fqn, param, slots in found]
    for submodule in module.modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            setattr(submodule, name, buffer.to(device))
    whole: Any = module  # to a type checker it cannot be both
    module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {})
    whole.claim(module_fqn, params, comm_ctx, reshard_after_forward, mp_policy)
    whole.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    whole.register_forward_hook(post_forward)
    return module


def unclaimed_params(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[Slot]]]:
    """The parameters below `module` that no earlier call of `fully_shard` has taken, in the order of `named_parameters`.

    Yields:
        The name below `module`, the parameter, and all places where it is registered. Each parameter once, a tied one too.
    """
    # TODO(capstone, task 1)
    raise NotImplementedError


def sharded_modules(module: Any) -> list[FSDPModule]:
    """The sharded modules at `module` and below."""
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in whatever tuples, lists and dicts a forward takes or returns."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list | dict):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(value)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """The same with floating-point tensors in `dtype`; token ids and masks, and all that is no tensor, stay as they are."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return type(tree)((key, cast_floating(value, dtype)) for key, value in tree.items())
    if isinstance(tree, tuple | list):
        values = [cast_floating(value, dtype) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree
