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
    During a forward, modules do not compute with `unsharded_param` but with what the identity `RegisterPostBackwardFunction`
    returns for it. Autograd runs the backward of that function once, when the gradients of all these parameters are complete,
    whatever the module's inputs are: post-backward of an embedding needs no special care, nor does a module that runs twice.
    Only reentrant checkpointing inside a module goes around it: that forward keeps no graph, and its recomputation finds
    `unsharded_param` registered. Then the gradient is in `unsharded_param.grad`, and post-backward takes it from there.

Note [Whose memory]
    Memory belongs to the stream on which it was allocated, which may reuse it once Python lets it go, whoever else still reads
    it. So buffers that another stream reads are kept (`copied_out`, `reductions`) until their own stream has waited for that.
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
    """A flat buffer that is in use until `done`: `flat` is [W, n], row r of rank r, or for it."""

    flat: Tensor
    done: StreamEvent


class FSDPCommContext:
    """What the sharded modules of one model share; `device_type` is that of the mesh, for example "cuda"."""

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
        """The all-gather stream may reuse the last gather's buffer once compute has copied out of it (Note [Whose memory])."""
        if self.copied_out is not None:
            self.all_gather_stream.wait(self.copied_out.done)
            self.copied_out = None

    def wait_for_reductions(self) -> None:
        """Compute waits for all reductions in flight; their gradients are there, their inputs are let go."""
        while self.reductions:
            self.compute_stream.wait(self.reductions.popleft().done)

    def forget_order(self) -> None:
        """No forward has ended."""
        self.post_forward_order.clear()
        for module in self.modules:
            module._post_forward_indices.clear()


class FSDPParam:
    """One parameter, sharded by rows over the ranks of a mesh.

    With W ranks and d0 rows, rank r has those from `r * chunk` on, `chunk = ceil(d0 / W)` of them. The last ranks may have
    fewer, or none; they pad with zeros, as all ranks send equally much. So the front of what is gathered is the parameter:

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
        """Sets `padded_shard` and `sharded_param`: this rank's rows of `param`, if there are any, in memory of their own."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def as_dtensor(self, local: Tensor) -> DTensor:
        """This rank's rows as a DTensor of the whole shape, which the rows alone do not tell."""
        shape, stride = self.shape, torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def to_unsharded(self) -> None:
        """From now on the modules have `unsharded_param`, filled already; it requires a gradient iff `sharded_param` does."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def to_sharded(self) -> None:
        """The modules have `sharded_param` from now on, and the memory of the whole parameter is given back."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def _setattr_on_modules(self, tensor: Tensor) -> None:
        """Makes `tensor` the modules' parameter, at every place where the parameter is registered."""
        for module, name in self.module_info:
            unsafe_setattr_param(module, name, tensor)

    def add_unsharded_grad(self, grad: Tensor) -> None:
        """Adds the gradient of one backward to `unsharded_grad`, in the dtype that it will be reduced in."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def take_unsharded_grad(self) -> Tensor:
        """`unsharded_grad`, which is None from now on, as [W, padded_numel]: row r is for rank r, padded with zeros."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def add_sharded_grad(self, reduced: Tensor) -> None:
        """Adds this rank's rows of `reduced`, [padded_numel], to `sharded_param.grad`, a DTensor laid out as the parameter."""
        # TODO(capstone, task 1)
        raise NotImplementedError


def alloc_storage(tensor: Tensor) -> None:
    """Memory for `tensor`, and for all that share its storage; what it holds is undefined."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def free_storage(tensor: Tensor) -> None:
    """Gives the memory of `tensor` back; the tensor stays, and its views do."""
    tensor.untyped_storage().resize_(0)


def unsafe_setattr_param(module: nn.Module, param_name: str, param: Tensor) -> None:
    """Registers `param`, which `setattr` would refuse if it is no nn.Parameter."""
    module._parameters[param_name] = param


class RegisterPostBackwardFunction(torch.autograd.Function):
    """The identity on the `unsharded_param` of parameters; when all their gradients are there, post-backward comes."""

    @staticmethod
    def forward(ctx: Any, module: FSDPModule, params: list[FSDPParam], *wholes: Tensor) -> tuple[Tensor, ...]:
        """Returns `wholes`; keeps the rest on `ctx`. Where there is no gradient, backward shall get None, not zeros."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        """Adds each gradient that there is to its parameter's, and calls `post_backward`; returns None for each argument."""
        # TODO(capstone, task 1)
        raise NotImplementedError


class FSDPModule:
    """What every sharded module also is: the owner of parameters that are gathered, freed and reduced together."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A plain module: `sequential[1:]` makes another of its own class, and that one is not sharded."""
        return cls.__mro__[2](*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(f"deepcopy of {type(self).__name__}: it is sharded; copy the plain module, or its state dict")

    def claim(self, fqn: str, params: list[FSDPParam], ctx: FSDPCommContext, reshard: bool, mp: Any) -> None:
        """Makes the module, whose class has just become this one, the owner of `params`."""
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
        """Around what a profiler shall show under this label and the module's name."""
        return record_function(f"FSDP::{label} ({self.module_fqn})")

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
        """Starts to gather the parameters in one collective on the all-gather stream, and returns before they are there.

        Does nothing if they are whole or on their way, or if there are none. `_gathered` holds what will be every rank's padded
        shards, each in the param dtype, end to end; the buffer before has been let go (`comm_ctx.release_gather_buffer`).
        """
        # TODO(capstone, tasks 1 and 2)
        raise NotImplementedError

    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        """Compute waits for the gather in flight, if there is one, and the modules get the whole parameters."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def reshard(self) -> None:
        """The modules have the shards afterwards, and the memory of the whole parameters is free."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def register_post_backward(self) -> None:
        """For one forward: the modules compute with what `RegisterPostBackwardFunction` returns for trainable parameters."""
        # TODO(capstone, task 1)
        raise NotImplementedError

    def record_post_forward(self) -> None:
        """Notes that a forward of this module has ended: its place in `comm_ctx.post_forward_order`, and here which that is."""
        # TODO(capstone, task 3)
        raise NotImplementedError

    def _backward_prefetch(self) -> None:
        """Starts the gather of the module whose backward comes next: the one whose forward ended just before this one's."""
        # TODO(capstone, task 3)
        raise NotImplementedError

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Averages the unsharded gradients over the ranks, and adds each rank's rows to the shards' gradients.

        Starts the reduction on its stream and returns; those before it are waited for first. One flat buffer has the gradients
        that there are, row r for rank r; `comm_ctx.reductions` keeps it. `Stream.then` runs what follows the collective.
        """
        # TODO(capstone, tasks 1 and 3)
        raise NotImplementedError


def pre_forward(module: FSDPModule, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Hook before the forward of a sharded module; returns the arguments, cast as the policy says.

    The first forward after a backward, or the first module's next one, begins an iteration: gathers must see what the optimizer
    wrote, and the order of an earlier forward is forgotten. A recomputation begins nothing. Afterwards the module computes with
    whole parameters (`register_post_backward`).
    """
    # TODO(capstone, task 1)
    raise NotImplementedError


def post_forward(module: FSDPModule, args: Any, output: Any) -> Any:
    """Hook after the forward of a sharded module; returns the output, floating-point tensors in `output_dtype` if there is one.

    Frees the parameters if `reshard_after_forward`; else, and in a recomputation, the modules have `unsharded_param` again. If
    there may be a backward, each output that requires a gradient calls `pre_backward` when it has it, and the forward is
    recorded, unless it is a recomputation.
    """
    # TODO(capstone, task 1 and the bonuses)
    raise NotImplementedError


def pre_backward(module: FSDPModule, grad: Tensor) -> None:
    """Hook on each output of a sharded module, when its gradient is there: gathers the parameters for the module's backward.

    The first one of a backward has `finish_backward` called at its end. Of a module's outputs, only the first one counts.
    """
    # TODO(capstone, tasks 1 and 3)
    raise NotImplementedError


def post_backward(module: FSDPModule) -> None:
    """When all gradients are there: adds those of a recomputation, frees if `reshard_after_backward`, reduces if asked to."""
    # TODO(capstone, task 1 and the bonuses)
    raise NotImplementedError


def finish_backward(ctx: FSDPCommContext) -> None:
    """When a backward is over: the shards have their gradients, and nothing is left in flight, or whole by mistake.

    Modules whose post-backward never came (frozen, or unused) are freed; gradients left by earlier micro-batches are reduced.
    """
    ctx.in_backward, ctx.first = False, None
    for module in ctx.modules:
        module._gathered = None  # a gather that nobody came for
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
    """Shards the parameters of `module`, in place, over the ranks of a mesh with one axis; returns it.

    It takes all parameters below it but for those that an earlier call has taken; so call it from the inside out. The module
    becomes an `FSDPModule`, too; buffers move to the device of the mesh. Options are those of torch's function of this name.
    """
    wrong = "is sharded already" if isinstance(module, FSDPModule) else ""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        wrong = f"is an nn.{type(module).__name__}, which has no forward; shard what is in it, one by one"
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
