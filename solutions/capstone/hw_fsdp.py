"""Fully sharded data parallel training, in one file.

Every rank keeps one chunk of rows of every parameter. Before a module computes, its parameters are gathered. Afterwards they
are freed. Gradients are averaged over the ranks, and each rank keeps the gradients of its own rows. Streams and collectives come
from `hwfsdp`. Left out: meshes of several axes, the meta device, offloading, parameters tied between two groups.

    fully_shard     turns a module into an `FSDPModule`, which owns all parameters below it that have no owner yet
    FSDPParam       one parameter: the shard that stays, and the whole that comes and goes
    FSDPModule      parameters that travel together: unshard, wait_for_unshard, reshard, reduce_gradients
    pre_forward, post_forward, pre_backward, post_backward      the hooks that call these methods

Note [Memory that comes and goes]
    Autograd keeps the weights of a forward for the backward. If each gather made a new tensor, the old ones would stay alive.
    So a whole parameter is always the same tensor, and only its storage is resized. Autograd also counts writes, and refuses a
    weight that was written to after autograd kept it. Gathers write to `gathered`, modules compute with `unsharded_param`. The
    two share a storage, but not the count of writes, because of `.data`.

Note [Who hands over the gradients]
    During a forward, modules do not compute with `unsharded_param`. `RegisterPostBackwardFunction`, an identity, returns another
    tensor for it, and modules compute with that. Autograd runs the function's backward once, when the gradients of all these
    parameters are complete, whatever the module's inputs are. So an embedding and a module that runs twice need no special care.
    With reentrant checkpointing inside a module, recomputation finds `unsharded_param`. Post-backward takes its `grad` then.

Note [Whose memory]
    Memory belongs to the stream that allocated it. Once Python lets it go, this stream may reuse it, even if another stream still
    reads it. So a buffer is kept (`copied_out`, `reductions`) until its own stream has waited for the reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves, tree_map

from hwfsdp.collectives import all_gather_flat, reduce_scatter_flat
from hwfsdp.streams import StreamEvent, after_backward, streams_for

# Where a sharded module is: PRE_BACKWARD from pre_backward to post_backward, POST_BACKWARD from there to the end of the backward
TrainingState = Enum("TrainingState", ["IDLE", "PRE_BACKWARD", "POST_BACKWARD"])
cls_to_fsdp_cls: dict[type, type] = {}  # one class for all sharded modules of a class


class ParamModuleInfo(NamedTuple):
    """A place where a parameter is registered; a tied parameter has several, even in one module."""

    module: nn.Module
    param_name: str


class InFlight(NamedTuple):
    """A flat buffer that is in use until `done`: `flat` is [W, n], row r from rank r, or for rank r."""

    flat: Tensor
    done: StreamEvent


class FSDPCommContext:
    """The state that all sharded modules of a model share. `device_type` is the mesh's, for example "cuda"."""

    def __init__(self, device_type: str) -> None:
        streams = streams_for(device_type)
        self.compute_stream, self.all_gather_stream = streams.compute, streams.all_gather
        self.reduce_scatter_stream = streams.reduce_scatter
        self.modules: list[FSDPModule] = []  # all sharded ones, in the order in which they were sharded
        self.first: FSDPModule | None = None  # whose forward began the iteration; None after a backward
        self.post_forward_order: list[FSDPModule] = []  # one for each forward that ended, in that order
        self.in_backward = False  # while a backward is running, a forward is a recomputation (checkpointing)
        self.copied_out: InFlight | None = None  # the last gather's buffer, until it is copied out
        self.reductions: deque[InFlight] = deque()  # inputs of reductions, until the gradients are there

    def release_gather_buffer(self) -> None:
        """Let the all-gather stream reuse the last gather's buffer once compute has copied out of it (Note [Whose memory])."""
        if self.copied_out is not None:
            self.all_gather_stream.wait(self.copied_out.done)
            self.copied_out = None

    def wait_for_reductions(self) -> None:
        """Let compute wait for all reductions in flight. Then their gradients are ready, and their inputs are let go."""
        while self.reductions:
            self.compute_stream.wait(self.reductions.popleft().done)

    def forget_order(self) -> None:
        """Forget all ended forwards."""
        self.post_forward_order.clear()
        for module in self.modules:
            module._post_forward_indices.clear()


class FSDPParam:
    """One parameter, sharded by rows over the ranks of a mesh.

    With W ranks and d0 rows, rank r has `chunk = ceil(d0 / W)` rows, from row `r * chunk` on. The last ranks may have fewer
    rows, or none. They pad with zeros: all ranks must send equally much. So the gathered buffer begins with the parameter:

        d0 = 5, W = 2, chunk = 3        rank 0: 0 1 2        rank 1: 3 4 .

    Attributes:
        padded_shard: [chunk * rest], original dtype: this rank's rows, then zeros.
        sharded_param: DTensor, Shard(0) on the mesh: `param` for optimizers and state dicts. Its local part is the front of
            `padded_shard`, so what an optimizer updates is what the next gather sends.
        gathered: [W, chunk * rest], param dtype: the memory of the whole parameter (Note [Memory that comes and goes]).
        unsharded_param: the shape of `param`, param dtype: the front of `gathered`.
    """

    def __init__(
        self,
        param: nn.Parameter,  # as the user made it; it may be on another device
        module_info: Sequence[ParamModuleInfo],  # all places where it is registered
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
        self.gathered = torch.empty(self.world_size, self.padded_numel, dtype=self.dtype, device=device)
        whole = self.gathered.data.view(-1)[: self.shape.numel()].view(self.shape)
        self.unsharded_param = nn.Parameter(whole, requires_grad=param.requires_grad)
        self.to_sharded()

    @torch.no_grad()
    def shard(self, param: nn.Parameter, device: torch.device) -> None:
        """Set `padded_shard` and `sharded_param`: this rank's rows of `param`, if it has any, in memory of their own."""
        first = min(self.mesh.get_local_rank() * self.chunk, self.shape[0])
        rows = param.detach()[first : first + self.chunk].to(device)
        self.local_shape = rows.shape
        self.padded_shard = torch.zeros(self.padded_numel, dtype=self.orig_dtype, device=device)
        local = self.padded_shard[: rows.numel()].view(rows.shape)
        local.copy_(rows)
        self.sharded_param = nn.Parameter(self.as_dtensor(local), requires_grad=param.requires_grad)

    def as_dtensor(self, local: Tensor) -> DTensor:
        """Return this rank's rows as a DTensor with the shape of the whole parameter."""
        shape, stride = self.shape, torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def to_unsharded(self) -> None:
        """Register `unsharded_param`, already filled, in the modules. It requires a gradient iff `sharded_param` does."""
        self.unsharded_param.requires_grad_(self.sharded_param.requires_grad)
        self._setattr_on_modules(self.unsharded_param)

    def to_sharded(self) -> None:
        """Register `sharded_param` in the modules, and give the memory of the whole parameter back."""
        self._setattr_on_modules(self.sharded_param)
        free_storage(self.gathered)

    def _setattr_on_modules(self, tensor: Tensor) -> None:
        """Make `tensor` the modules' parameter, at every place where the parameter is registered."""
        for module, name in self.module_info:
            unsafe_setattr_param(module, name, tensor)

    def add_unsharded_grad(self, grad: Tensor) -> None:
        """Add the gradient of one backward to `unsharded_grad`, in the dtype of its reduction."""
        grad = grad.to(self.reduce_dtype or grad.dtype)
        self.unsharded_grad = grad if self.unsharded_grad is None else self.unsharded_grad + grad

    def take_unsharded_grad(self) -> Tensor:
        """Return `unsharded_grad` as [W, padded_numel]: row r is for rank r, padded with zeros. Afterwards it is None."""
        assert self.unsharded_grad is not None, self.fqn
        grad, self.unsharded_grad = self.unsharded_grad.reshape(-1), None
        padding = grad.new_zeros(self.world_size * self.padded_numel - grad.numel())
        return (torch.cat([grad, padding]) if padding.numel() else grad).view(self.world_size, -1)

    def add_sharded_grad(self, reduced: Tensor) -> None:
        """Add this rank's rows of `reduced`, [padded_numel], to `sharded_param.grad`, a DTensor like `sharded_param`."""
        rows = reduced[: self.local_shape.numel()].view(self.local_shape).to(self.orig_dtype)
        grad, before = self.as_dtensor(rows), self.sharded_param.grad
        self.sharded_param.grad = grad if before is None else before + grad


def alloc_storage(tensor: Tensor) -> None:
    """Give `tensor` memory, and all tensors that share its storage. The memory's contents are undefined."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def free_storage(tensor: Tensor) -> None:
    """Give the memory of `tensor` back. The tensor and its views stay."""
    tensor.untyped_storage().resize_(0)


def unsafe_setattr_param(module: nn.Module, param_name: str, param: Tensor) -> None:
    """Register `param`. (`setattr` would refuse a tensor that is not an nn.Parameter.)"""
    module._parameters[param_name] = param


class RegisterPostBackwardFunction(torch.autograd.Function):
    """The identity on the `unsharded_param` of parameters. When all their gradients are ready, it calls post-backward."""

    @staticmethod
    def forward(ctx: Any, module: FSDPModule, params: list[FSDPParam], *wholes: Tensor) -> tuple[Tensor, ...]:
        """Return `wholes`; keep the rest on `ctx`. If a gradient is missing, backward must get None, not zeros."""
        ctx.module, ctx.params = module, params
        ctx.set_materialize_grads(False)
        return wholes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        """Add each gradient that is not None to its parameter's, and call `post_backward`. Return None for each argument."""
        for p, grad in zip(ctx.params, grads, strict=True):
            if grad is not None:
                p.add_unsharded_grad(grad)
        post_backward(ctx.module)
        return (None, None, *(None for _ in grads))


class FSDPModule:
    """A sharded module: the owner of parameters that are gathered, freed and reduced together."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain module: `sequential[1:]` makes another module of its class, and that one is not sharded."""
        return cls.__mro__[2](*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(f"deepcopy of {type(self).__name__}: it is sharded; copy the plain module, or its state dict")

    def claim(self, fqn: str, params: list[FSDPParam], ctx: FSDPCommContext, reshard: bool, mp: Any) -> None:
        """Make the module, which has just got this class, the owner of `params`."""
        self.module_fqn, self.comm_ctx = fqn, ctx  # the name is for errors, profiles and the event log
        self.fsdp_params = params  # in the order of flat buffers; one collective moves all of them
        self.mp_policy: MixedPrecisionPolicy = mp
        self.reshard_after_forward = reshard  # free parameters after forward, gather them again for backward
        self.reshard_after_backward = True  # free them after backward; off: keep them for the next forward
        self.requires_gradient_sync = True  # reduce in backward; off: whole gradients add up on each rank
        self.is_unsharded = False  # the modules have the whole parameters
        self._training_state = TrainingState.IDLE
        self._gathered: InFlight | None = None
        self._post_forward_indices: list[int] = []  # in comm_ctx.post_forward_order
        ctx.modules.append(self)

    def profiled(self, label: str) -> Any:
        """Return a context: a profiler shows the block under this label and the module's name."""
        return record_function(f"FSDP::{label} ({self.module_fqn})")

    def set_requires_gradient_sync(self: Any, value: bool) -> None:
        """Set whether the next backwards reduce gradients of this module and all below it; see torch's method of this name."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.requires_gradient_sync = value

    def set_reshard_after_backward(self: Any, value: bool) -> None:
        """Set whether the next backwards free the whole parameters of this module and all below it; see torch's method."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard_after_backward = value

    @torch.no_grad()
    def unshard(self) -> None:
        """Start to gather the parameters in one collective on the all-gather stream; return before they have arrived.

        Do nothing if they are whole or on their way, or if there are none. `_gathered` holds the buffer, which will have every
        rank's padded shards, each in the param dtype, end to end. The buffer before is let go first
        (`comm_ctx.release_gather_buffer`).
        """
        if self.is_unsharded or self._gathered is not None or not self.fsdp_params:
            return
        self.comm_ctx.release_gather_buffer()
        stream, sizes = self.comm_ctx.all_gather_stream, [p.padded_numel for p in self.fsdp_params]
        first, mesh = self.fsdp_params[0], self.fsdp_params[0].mesh
        with self.profiled("all_gather"), stream.run():
            flat = first.gathered.new_empty(mesh.size(), sum(sizes))
            part = flat[mesh.get_local_rank()]
            for p, piece in zip(self.fsdp_params, part.split(sizes), strict=True):
                piece.copy_(p.padded_shard)
            done = all_gather_flat(flat.view(-1), part, mesh.get_group(), stream, self.module_fqn)
        self._gathered = InFlight(flat, done)

    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        """Let compute wait for the gather in flight, if there is one, and give the modules the whole parameters."""
        if self._gathered is None:
            return
        gathered, self._gathered = self._gathered, None
        compute = self.comm_ctx.compute_stream
        compute.wait(gathered.done)
        columns = gathered.flat.split([p.padded_numel for p in self.fsdp_params], dim=1)
        for p, part in zip(self.fsdp_params, columns, strict=True):
            alloc_storage(p.gathered)
            p.gathered.copy_(part)
            p.to_unsharded()
        self.comm_ctx.copied_out = InFlight(gathered.flat, compute.record())
        self.is_unsharded = True

    def reshard(self) -> None:
        """Give the modules the shards, and free the memory of the whole parameters."""
        for p in self.fsdp_params:
            p.to_sharded()
        self.is_unsharded = False

    def register_post_backward(self) -> None:
        """For one forward: let modules compute with the result of `RegisterPostBackwardFunction` for trainable parameters."""
        trainable = [p for p in self.fsdp_params if p.unsharded_param.requires_grad]
        if trainable and torch.is_grad_enabled():
            wholes = RegisterPostBackwardFunction.apply(self, trainable, *(p.unsharded_param for p in trainable))
            for p, whole in zip(trainable, wholes, strict=True):
                p._setattr_on_modules(whole)

    def record_post_forward(self) -> None:
        """Note that a forward of this module has ended: add it to `comm_ctx.post_forward_order`, and keep its index here."""
        self._post_forward_indices.append(len(self.comm_ctx.post_forward_order))
        self.comm_ctx.post_forward_order.append(self)

    def _backward_prefetch(self) -> None:
        """Start the gather of the module whose backward comes next: its forward ended just before this module's."""
        index = self._post_forward_indices.pop() if self._post_forward_indices else 0
        if index > 0:
            with self.profiled("backward_prefetch"):
                self.comm_ctx.post_forward_order[index - 1].unshard()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Average the unsharded gradients over the ranks, and add each rank's rows to the shards' gradients.

        First wait for the reductions before this one. Then start the reduction on its stream, and return. One flat buffer has
        all existing gradients, row r for rank r; `comm_ctx.reductions` keeps it. `Stream.then` runs work after the collective.
        """
        self.comm_ctx.wait_for_reductions()
        params = [p for p in self.fsdp_params if p.unsharded_grad is not None]
        if not params:
            return
        stream, sizes = self.comm_ctx.reduce_scatter_stream, [p.padded_numel for p in params]
        flat = torch.cat([p.take_unsharded_grad() for p in params], dim=1)
        stream.wait(self.comm_ctx.compute_stream.record())
        with stream.run():
            result = flat.new_empty(sum(sizes))
        reduce_scatter_flat(result, flat.view(-1), params[0].mesh.get_group(), stream, self.module_fqn)

        @torch.no_grad()
        def add() -> None:
            for p, piece in zip(params, result.split(sizes), strict=True):
                p.add_sharded_grad(piece)

        with stream.run():
            stream.then(add)
        self.comm_ctx.reductions.append(InFlight(flat, stream.record()))


def pre_forward(module: FSDPModule, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Hook before the forward of a sharded module; return the arguments, cast as the policy says.

    The first forward after a backward, or the first module's next one, begins an iteration: gathers must see the optimizer's
    writes, and the order of an earlier forward is forgotten. A recomputation begins no iteration. Afterwards the module computes
    with whole parameters (`register_post_backward`).
    """
    ctx, policy = module.comm_ctx, module.mp_policy
    with module.profiled("pre_forward"):
        if ctx.first in (None, module) and not ctx.in_backward:
            ctx.first = module
            ctx.all_gather_stream.wait(ctx.compute_stream.record())
            ctx.forget_order()
        module.unshard()
        module.wait_for_unshard()
        module.register_post_backward()
        return cast_floating((args, kwargs), policy.param_dtype if policy.cast_forward_inputs else None)


def post_forward(module: FSDPModule, args: Any, output: Any) -> Any:
    """Hook after the forward of a sharded module; return the output, floating-point tensors in `output_dtype` if it is set.

    Free the parameters if `reshard_after_forward`. Otherwise, and in a recomputation, give the modules `unsharded_param` again.
    If a backward may follow, each output that requires a gradient calls `pre_backward` when its gradient is ready. Then also
    record the forward, unless it is a recomputation.
    """
    ctx = module.comm_ctx
    with module.profiled("post_forward"):
        if module.reshard_after_forward and not ctx.in_backward:
            module.reshard()
        else:
            for p in module.fsdp_params:
                p._setattr_on_modules(p.unsharded_param)
        if torch.is_grad_enabled():
            if not ctx.in_backward:
                module.record_post_forward()
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(pre_backward, module))
        ctx.release_gather_buffer()
        return cast_floating(output, module.mp_policy.output_dtype)


def pre_backward(module: FSDPModule, grad: Tensor) -> None:
    """Hook on each output of a sharded module, when its gradient is ready: gather the parameters for the module's backward.

    The first call in a backward arranges that `finish_backward` is called at the backward's end. For each module only the first
    output counts.
    """
    ctx = module.comm_ctx
    if not ctx.in_backward:
        ctx.in_backward = True
        after_backward(partial(finish_backward, ctx))
    if module._training_state is not TrainingState.PRE_BACKWARD:
        with module.profiled("pre_backward"):
            module._training_state = TrainingState.PRE_BACKWARD
            module.unshard()
            module.wait_for_unshard()
            module._backward_prefetch()


def post_backward(module: FSDPModule) -> None:
    """When all gradients are ready: add a recomputation's, free if `reshard_after_backward`, reduce if synchronization is on."""
    module._training_state = TrainingState.POST_BACKWARD
    for p in module.fsdp_params:
        if p.unsharded_param.grad is not None:
            p.add_unsharded_grad(p.unsharded_param.grad)
            p.unsharded_param.grad = None
    with module.profiled("post_backward_reshard"):
        if module.reshard_after_backward:
            module.reshard()
    with module.profiled("post_backward_reduce"):
        if module.requires_gradient_sync:
            module.reduce_gradients()


def finish_backward(ctx: FSDPCommContext) -> None:
    """End a backward: the shards get their gradients, and nothing stays in flight, or whole by mistake.

    Free modules whose post-backward never came (frozen, or unused). Reduce gradients left by earlier micro-batches.
    """
    ctx.in_backward, ctx.first = False, None
    for module in ctx.modules:
        module._gathered = None  # an unused gather
        late = any(p.unsharded_grad is not None for p in module.fsdp_params) and module.requires_gradient_sync
        if module._training_state is TrainingState.PRE_BACKWARD or late:
            post_backward(module)
        module._training_state = TrainingState.IDLE
    ctx.wait_for_reductions()
    ctx.release_gather_buffer()
    ctx.forget_order()


def fully_shard(
    module: nn.Module,
    *,
    module_fqn: str,  # its name in the model
    comm_ctx: FSDPCommContext,  # one for all modules of a model
    mesh: DeviceMesh,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
) -> nn.Module:
    """Shard the parameters of `module`, in place, over the ranks of a mesh with one axis; return it.

    It takes all parameters below it that no earlier call has taken. So call it from the inside out. The module also becomes an
    `FSDPModule`. Buffers move to the device of the mesh. Options mean the same as in torch's function of this name.
    """
    wrong = "is sharded already" if isinstance(module, FSDPModule) else ""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        wrong = f"is an nn.{type(module).__name__}, which has no forward; shard its children one by one"
    if wrong or mesh.ndim != 1:
        wrong = wrong or f"got a mesh of {mesh.ndim} axes; take one of them"
        raise ValueError(f"fully_shard: {module_fqn or type(module).__name__} {wrong}")
    device = torch.device(mesh.device_type)
    found = unclaimed_params(module)
    if len(dtypes := {mp_policy.param_dtype or param.dtype for _, param, _ in found}) > 1:
        raise ValueError(f"fully_shard: parameters of {module_fqn} have dtypes {dtypes}; set param_dtype")
    params = [FSDPParam(param, places, fqn, mesh, device, mp_policy) for fqn, param, places in found]
    for submodule in module.modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            setattr(submodule, name, buffer.to(device))
    cls = type(module)
    module.__class__ = cls_to_fsdp_cls.setdefault(cls, type(f"FSDP{cls.__name__}", (FSDPModule, cls), {}))
    module.claim(module_fqn, params, comm_ctx, reshard_after_forward, mp_policy)
    module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(post_forward)
    return module


def unclaimed_params(module: nn.Module) -> list[tuple[str, nn.Parameter, list[ParamModuleInfo]]]:
    """What `module.named_parameters` does, each with all its places, but for what `fully_shard` has taken before."""
    names: dict[nn.Parameter, str] = {}
    places: dict[nn.Parameter, list[ParamModuleInfo]] = {}
    for fqn, param in module.named_parameters(remove_duplicate=False):
        if not isinstance(param, DTensor):
            path, _, name = fqn.rpartition(".")
            names.setdefault(param, fqn)
            places.setdefault(param, []).append(ParamModuleInfo(module.get_submodule(path), name))
    return [(name, param, places[param]) for param, name in names.items()]


def cast_floating(tree: Any, dtype: torch.dtype | None) -> Any:
    """The same with floating-point tensors in `dtype`, if there is one; token ids, masks and all else stay as they are."""
    if dtype is None:
        return tree
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)
