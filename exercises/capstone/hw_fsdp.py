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
        # TODO(capstone, task 1)
        raise NotImplementedError

    def as_dtensor(self, local: Tensor) -> DTensor:
        """Return this rank's rows as a DTensor with the shape of the whole parameter."""
        shape, stride = self.shape, torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def to_unsharded(self) -> None:
        """Register `unsharded_param`, already filled, in the modules. It requires a gradient iff `sharded_param` does."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def to_sharded(self) -> None:
        """Register `sharded_param` in the modules, and give the memory of the whole parameter back."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def _setattr_on_modules(self, tensor: Tensor) -> None:
        """Make `tensor` the modules' parameter, at every place where the parameter is registered."""
        for module, name in self.module_info:
            unsafe_setattr_param(module, name, tensor)

    def add_unsharded_grad(self, grad: Tensor) -> None:
        """Add the gradient of one backward to `unsharded_grad`, in the dtype of its reduction."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def take_unsharded_grad(self) -> Tensor:
        """Return `unsharded_grad` as [W, padded_numel]: row r is for rank r, padded with zeros. Afterwards it is None."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def add_sharded_grad(self, reduced: Tensor) -> None:
        """Add this rank's rows of `reduced`, [padded_numel], to `sharded_param.grad`, a DTensor like `sharded_param`."""
        # TODO(capstone, task 1)
        raise NotImplementedError


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
        # TODO(capstone, task 1)
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        """Add each gradient that is not None to its parameter's, and call `post_backward`. Return None for each argument."""
        # TODO(capstone, task 1)
        raise NotImplementedError


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
        # TODO(capstone, tasks 1 and 2)
        raise NotImplementedError

    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        """Let compute wait for the gather in flight, if there is one, and give the modules the whole parameters."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def reshard(self) -> None:
        """Give the modules the shards, and free the memory of the whole parameters."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def register_post_backward(self) -> None:
        """For one forward: let modules compute with the result of `RegisterPostBackwardFunction` for trainable parameters."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def record_post_forward(self) -> None:
        """Note that a forward of this module has ended: add it to `comm_ctx.post_forward_order`, and keep its index here."""
        # TODO(capstone, task 3)
        raise NotImplementedError

    def _backward_prefetch(self) -> None:
        """Start the gather of the module whose backward comes next: its forward ended just before this module's."""
        # TODO(capstone, task 3)
        raise NotImplementedError

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Average the unsharded gradients over the ranks, and add each rank's rows to the shards' gradients.

        First wait for the reductions before this one. Then start the reduction on its stream, and return. One flat buffer has
        all existing gradients, row r for rank r; `comm_ctx.reductions` keeps it. `Stream.then` runs work after the collective.
        """
        # TODO(capstone, tasks 1 and 3)
        raise NotImplementedError


def pre_forward(module: FSDPModule, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Hook before the forward of a sharded module; return the arguments, cast as the policy says.

    The first forward after a backward, or the first module's next one, begins an iteration: gathers must see the optimizer's
    writes, and the order of an earlier forward is forgotten. A recomputation begins no iteration. Afterwards the module computes
    with whole parameters (`register_post_backward`).
    """
    # TODO(capstone, task 1)
    raise NotImplementedError


def post_forward(module: FSDPModule, args: Any, output: Any) -> Any:
    """Hook after the forward of a sharded module; return the output, floating-point tensors in `output_dtype` if it is set.

    Free the parameters if `reshard_after_forward`. Otherwise, and in a recomputation, give the modules `unsharded_param` again.
    If a backward may follow, each output that requires a gradient calls `pre_backward` when its gradient is ready. Then also
    record the forward, unless it is a recomputation.
    """
    # TODO(capstone, task 1 and the bonuses)
    raise NotImplementedError


def pre_backward(module: FSDPModule, grad: Tensor) -> None:
    """Hook on each output of a sharded module, when its gradient is ready: gather the parameters for the module's backward.

    The first call in a backward arranges that `finish_backward` is called at the backward's end. For each module only the first
    output counts.
    """
    # TODO(capstone, tasks 1 and 3)
    raise NotImplementedError


def post_backward(module: FSDPModule) -> None:
    """When all gradients are ready: add a recomputation's, free if `reshard_after_backward`, reduce if synchronization is on."""
    # TODO(capstone, task 1 and the bonuses)
    raise NotImplementedError


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
