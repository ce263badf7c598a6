"""Fully sharded data parallel training, in one file.

Every rank keeps one chunk of rows of every parameter. Before a module computes, its parameters are gathered; after that they
are freed. Gradients are averaged over the ranks, and each rank keeps its own rows of them. Streams and collectives are those of
`hwfsdp`. Left out: meshes of several axes, the meta device, offloading, parameters tied between two groups.

    fully_shard     turns a module into an `FSDPModule` that owns the parameters below it, but for those owned already
    FSDPParam       one parameter: the shard that stays, and the whole that comes and goes
    FSDPModule      parameters that travel together: unshard, wait_for_unshard, reshard, reduce_gradients
    pre_forward, post_forward, pre_backward, post_backward      the moments at which that happens

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
    Memory belongs to the stream on which it was allocated, which may reuse it once Python lets it go, whoever else still reads
    it. So buffers that another stream reads are kept (`copied_out`, `reductions`) until their own stream has waited for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from hwfsdp.collectives import all_gather_flat, reduce_scatter_flat
from hwfsdp.streams import StreamEvent, after_backward, streams_for


class Slot(NamedTuple):
    """A place where a parameter is registered; a tied parameter has several, even in one module."""

    module: nn.Module
    name: str


class InFlight(NamedTuple):
    """A flat buffer that is in use until `done`: `flat` is [W, n], row r of rank r, or for it."""

    flat: Tensor
    done: StreamEvent


class FSDPCommContext:
    """What the sharded modules of one model share; `device_type` is that of the mesh, for example "cuda"."""

    def __init__(self, device_type: str) -> None:
        self.streams = streams_for(device_type)  # compute, all_gather and reduce_scatter
        self.modules: list[FSDPModule] = []  # all sharded ones, in the order in which they were sharded
        self.outermost: FSDPModule | None = None  # whose forward is running, with all others inside it
        self.post_forward_order: list[FSDPModule] = []  # one for each forward that ended, in that order
        self.in_backward = False  # while a backward is running, a forward is a recomputation (checkpointing)
        self.copied_out: InFlight | None = None  # the last gather's buffer, until it is copied out
        self.reductions: deque[InFlight] = deque()  # inputs of reductions, until the gradients are there

    def release_gather_buffer(self) -> None:
        """The all-gather stream may reuse the last gather's buffer once compute has copied out of it (Note [Whose memory])."""
        if self.copied_out is not None:
            self.streams.all_gather.wait(self.copied_out.done)
            self.copied_out = None

    def wait_for_reductions(self) -> None:
        """Compute waits for all reductions in flight; their gradients are there, their inputs are let go."""
        while self.reductions:
            self.streams.compute.wait(self.reductions.popleft().done)


class FSDPParam:
    """One parameter, sharded by rows over the ranks of a mesh.

    With W ranks and d0 rows, rank r has those from `r * chunk` on, `chunk = ceil(d0 / W)` of them. The last ranks may have
    fewer, or none; they pad with zeros, as all ranks send equally much. So the front of what is gathered is the parameter:

        d0 = 5, W = 2, chunk = 3        rank 0: 0 1 2        rank 1: 3 4 .

    Attributes:
        padded_shard: [chunk * rest], original dtype: this rank's rows, then zeros.
        sharded_param: DTensor, Shard(0) on the mesh: `param` for optimizers and state dicts. Its local part is the front of
            `padded_shard`, so what an optimizer updates is what the next gather sends.
        gathered: [W * chunk * rest], param dtype: the memory of the whole parameter (Note [Memory that comes and goes]).
        unsharded_param: the shape of `param`, param dtype: the front of `gathered`.
    """

    def __init__(
        self,
        param: nn.Parameter,  # as the user made it; it may be on another device
        module_info: Sequence[Slot],  # all places where it is registered
        param_fqn: str,  # its name, for errors
        mesh: DeviceMesh,  # of one axis
        device: torch.device,  # of the mesh's kind: where the parameter is to live
        mp_policy: MixedPrecisionPolicy,  # dtypes of gathers and compute, and of reductions; None: no cast
    ) -> None:
        if param.ndim == 0:
            raise ValueError(f"{param_fqn}: a scalar has no rows to shard; make it a parameter of shape (1,)")
        self.module_info, self.fqn = tuple(module_info), param_fqn
        self.shape, self.orig_dtype = param.shape, param.dtype
        self.dtype, self.reduce_dtype = mp_policy.param_dtype or param.dtype, mp_policy.reduce_dtype
        self.mesh, self.world_size = mesh, mesh.size()
        self.chunk = -(-param.shape[0] // self.world_size)
        self.padded_numel = self.chunk * param.shape[1:].numel()
        self.unsharded_grad: Tensor | None = None  # like `param`: the sum of gradients not reduced yet
        self.shard(param, device)
        self.gathered = torch.empty(self.world_size * self.padded_numel, dtype=self.dtype, device=device)
        whole = self.gathered.data[: self.shape.numel()].view(self.shape)
        self.unsharded_param = nn.Parameter(whole, requires_grad=param.requires_grad)
        self.to_sharded()

    @torch.no_grad()
    def shard(self, param: nn.Parameter, device: torch.device) -> None:
        """Sets `padded_shard` and `sharded_param`: this rank's rows of `param`, in memory of their own on `device`.

        Values, dtype and `requires_grad` are those of `param`. Any number of rows will do, fewer than ranks too (`as_dtensor`).
        """
        # TODO(capstone, task 1)
        raise NotImplementedError

    def as_dtensor(self, local: Tensor) -> DTensor:
        """This rank's rows as a DTensor of the whole shape, which the rows alone do not tell."""
        shape, stride = self.shape, torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def allocate(self) -> Tensor:
        """Memory for the whole parameter, [W, padded_numel], row r for rank r's shard; filling it fills `unsharded_param`."""
        self.gathered.untyped_storage().resize_(self.gathered.numel() * self.gathered.element_size())
        return self.gathered.view(self.world_size, self.padded_numel)

    def to_unsharded(self) -> None:
        """From now on the modules have `unsharded_param`, filled already; it requires a gradient iff `sharded_param` does."""
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

        `reduced` is [padded_numel], reduce dtype: the rows, then padding. The gradient has the parameter's own dtype.
        """
        # TODO(capstone, task 1)
        raise NotImplementedError


class HandOverGradients(torch.autograd.Function):
    """The identity on the `unsharded_param` of parameters; backward gives all their gradients to post-backward at once."""

    @staticmethod
    def forward(ctx: Any, module: FSDPModule, params: list[FSDPParam], *wholes: Tensor) -> tuple[Tensor, ...]:
        """Returns `wholes`; keeps the rest on `ctx`. Where there is no gradient, backward shall get None, not zeros."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        """Calls `post_backward` with pairs of parameter and gradient, where there is one; returns None for each argument."""
        # TODO(capstone, task 1)
        raise NotImplementedError


class FSDPModule:
    """What every sharded module also is: the owner of parameters that are gathered, freed and reduced together."""

    def claim(self, fqn: str, params: list[FSDPParam], ctx: FSDPCommContext, reshard: bool, mp: Any) -> None:
        """Makes the module, whose class has just become this one, the owner of `params`."""
        self.module_fqn, self.comm_ctx = fqn, ctx  # the name is for errors and the event log
        self.fsdp_params = params  # in the order of flat buffers; one collective moves all of them
        self.mp_policy: MixedPrecisionPolicy = mp
        self.reshard_after_forward = reshard  # free parameters after forward, gather them again for backward
        self.reshard_after_backward = True  # free them after backward; off: keep them for the next forward
        self.requires_gradient_sync = True  # reduce in backward; off: whole gradients add up on each rank
        self.is_unsharded = False  # the modules have the whole parameters
        self.has_backward = False  # pre-backward came, and post-backward has not
        self._gathered: InFlight | None = None
        self._positions: list[int] = []  # in comm_ctx.post_forward_order
        ctx.modules.append(self)

    def set_requires_gradient_sync(self: Any, value: bool) -> None:
        """Whether the next backwards reduce gradients, of this module and all below it; see torch's method of this name."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.requires_gradient_sync = value

    def set_reshard_after_backward(self: Any, value: bool) -> None:
        """Whether the next backwards free the whole parameters, of this module and all below it; see torch's method."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
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
        """The modules have the whole parameters afterwards, if a gather is in flight; else nothing happens.

        Compute waits and copies each parameter's columns to its memory; `comm_ctx.copied_out` keeps the buffer until it has.
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

        Starts the reduction and returns; at most one is in flight: those before it are waited for first. Parameters without a
        gradient take no part; if none has one, that is all. Otherwise gradients are packed in one flat buffer, row r for rank
        r, in the dtype in which they were summed; `comm_ctx.reductions` keeps it. On the reduce-scatter stream, which waits for
        the packing: one `reduce_scatter_flat`, then (`Stream.then`) every parameter gets its piece (`add_sharded_grad`).
        """
        # TODO(capstone, tasks 1 and 3)
        raise NotImplementedError


def pre_forward(module: FSDPModule, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Hook before the forward of a sharded module; returns the arguments, cast as the policy says.

    The outermost forward begins an iteration: gathers must see what the optimizer wrote, so the all-gather stream waits for
    compute, and the order of an earlier forward is forgotten (`forget_order`). A recomputation begins nothing. Afterwards the
    module has its whole parameters (`hand_out`), and floating-point tensors in the arguments are in `param_dtype`, if the
    policy has one and `cast_forward_inputs`.
    """
    # TODO(capstone, task 1)
    raise NotImplementedError


def post_forward(module: FSDPModule, args: Any, output: Any) -> Any:
    """Hook after the forward of a sharded module; returns the output, floating-point tensors in `output_dtype` if there is one.

    Frees the parameters if `reshard_after_forward`; else, and in a recomputation, the modules have `unsharded_param` again. If
    there may be a backward, every tensor in the output that requires a gradient calls `pre_backward` when it has its own, and
    the forward is recorded, unless it is a recomputation. When the outermost forward is over, none is the outermost, and no
    buffer of a gather is kept (`comm_ctx.release_gather_buffer`).
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
    """When all gradients are there: adds them up, frees if `reshard_after_backward`, reduces if `requires_gradient_sync`."""
    # TODO(capstone, task 1 and the bonuses)
    raise NotImplementedError


def finish_backward(ctx: FSDPCommContext) -> None:
    """When a backward is over: the shards have their gradients, and nothing is left in flight, or whole by mistake.

    Modules whose post-backward never came (frozen, or unused) are freed; gradients left by earlier micro-batches are reduced.
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
    module_fqn: str,  # its name in the model
    comm_ctx: FSDPCommContext,  # one for all modules of a model
    mesh: DeviceMesh,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy,
) -> nn.Module:
    """Shards the parameters of `module`, in place, over the ranks of a mesh with one axis; returns it.

    It takes all parameters below it but for those that an earlier call has taken; so call it from the inside out. The module
    becomes an `FSDPModule`, too; buffers move to the device of the mesh. Options are those of torch's function of this name.

    Raises:
        ValueError: it is sharded already, the mesh has several axes, or parameters would be gathered in several dtypes.
    """
    if isinstance(module, FSDPModule) or mesh.ndim != 1:
        what = "is sharded already" if mesh.ndim == 1 else f"got a mesh of {mesh.ndim} axes; take one of them"
        raise ValueError(f"fully_shard: {module_fqn or type(module).__name__} {what}")
    device = torch.device(mesh.device_type)
    found = list(unclaimed_params(module))
    if len(dtypes := {mp_policy.param_dtype or param.dtype for _, param, _ in found}) > 1:
        raise ValueError(f"fully_shard: parameters of {module_fqn} have dtypes {dtypes}; set param_dtype")
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
    """Yields what `module.named_parameters` does, each with all its places, but for what `fully_shard` has taken before."""
    # TODO(capstone, task 1)
    raise NotImplementedError


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
