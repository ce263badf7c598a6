"""Fully sharded data parallel training, in one file.

Every rank keeps one chunk of rows of every parameter. Before a module computes, its parameters are gathered. Afterwards they are freed.
Gradients are averaged over the ranks, and each rank keeps the gradients of its own rows. Streams and collectives come from `hwfsdp`.
You may use torch's instead, `torch.distributed` and `device_handle`: then no gather overtakes compute on a CPU, which has no streams.

    fully_shard        shards the parameters of one module, and makes the module an `FSDPModule`
    FSDPParam          one parameter: the shard that stays, and the whole that comes and goes
    FSDPModule         a sharded module: unshard, wait_for_unshard, reshard
    FSDPCommContext    what all sharded modules of a model share: streams, and the order of forwards
    pre_forward, post_forward, pre_backward, post_backward      the hooks that call these methods
"""

from __future__ import annotations

import contextlib
# @h1
from collections import deque
# @end
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
# @h1
from functools import cached_property, partial
# @00
# | from functools import partial
# @end
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh, _get_device_handle
from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import _get_param_module_infos
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.profiler import record_function
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hwfsdp.collectives import all_gather_flat, reduce_scatter_flat
from hwfsdp.streams import StreamEvent, streams_for

cls_to_fsdp_cls: dict[type, type] = {}  # one class for all sharded modules of a class


class TrainingState(Enum):
    """What a sharded module does now."""

    FORWARD = auto()
    PRE_BACKWARD = auto()  # from the gather for the backward until all gradients are ready
    POST_BACKWARD = auto()  # from there to the end of the whole backward
    IDLE = auto()


class ShardedState(Enum):
    """Which form of its parameters a module has registered."""

    SHARDED = auto()
    SHARDED_POST_FORWARD = auto()  # shards of a smaller group, kept between forward and backward; not used here
    UNSHARDED = auto()


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of gathers and compute, and of reductions. None: no cast."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    # @h4
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    # @end


# @h1
class InFlight(NamedTuple):
    """A flat buffer that is in use until `done`: `flat` is [W, n], row r from rank r, or for rank r."""

    flat: Tensor
    done: StreamEvent


# @end
class FSDPParam:
    """One parameter, sharded by rows over the ranks of a mesh.

    Note [Memory that comes and goes]
        Autograd keeps the weights of a forward for the backward. If each gather made a new tensor, the old ones would stay alive. So
        the memory of a whole parameter is always the same storage, which is resized. Autograd also counts writes, and refuses a
        weight that was written to after autograd kept it. So modules compute with a new Parameter of the same memory each time
        (`to_unsharded`), and gathers write to `unsharded_param`. A gradient arrives at the new one, which hands it over.

    Attributes:
        orig_dtype: of the parameter. param_dtype, reduce_dtype: of gathers, and of reductions; None if there is nothing to cast.
        _orig_size: the size of the whole parameter. sharded_size: of this rank's rows.
        sharded_param: an nn.Parameter around a DTensor, Shard(0) on the mesh: the parameter for optimizers and state dicts.
        _unsharded_param: the whole parameter, in the param dtype (Note [Memory that comes and goes]); None until it is needed.
            Its `grad` is the whole gradient.
        _sharding_spec, fsdp_placement: mesh, placement, size and dtype of `sharded_param`. sharded_state: what is registered.
    """

    def __init__(
        self,
        param: nn.Parameter,  # as the user made it
        module_info: ParamModuleInfo,  # where it is registered: module and param_name; and if it is tied, shared_modules, shared_param_names
        param_fqn: str,  # its name, for errors
        mesh: DeviceMesh,  # of one axis
        device: torch.device,  # where the parameter is to live
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        self._module_info, self._param_fqn = module_info, param_fqn
        self.mesh, self.device = mesh, device
        self._unsharded_param: nn.Parameter | None = None
        # @h4
        self.accumulated_grad: Tensor | None = None  # whole, in the reduce dtype: of micro-batches that did not reduce
        # @end
        self._init_sharded_param(param)
        self._init_dtype_attrs(mp_policy)

    @torch.no_grad()
    def _init_sharded_param(self, param: nn.Parameter) -> None:
        """Keep this rank's rows, and register them. The number of rows may be required to be a multiple of the number of ranks."""
        if param.ndim == 0:
            raise ValueError(f"{self._param_fqn}: a scalar has no rows to shard; make it a parameter of shape (1,)")
        self.orig_dtype, self._orig_size, self.fsdp_placement = param.dtype, param.size(), Shard(0)
        meta = TensorMeta(param.size(), torch.empty(param.size(), device="meta").stride(), param.dtype)
        self._sharding_spec = DTensorSpec(self.mesh, (self.fsdp_placement,), meta)
        # @h1
        # Ranks must send equally much, so the last ones pad with zeros:
        #     5 rows on 2 ranks, chunk = 3        rank 0: 0 1 2        rank 1: 3 4 .
        # Optimizers update `local`, the front of `padded_shard`, which the next gather sends.
        chunk = -(-len(param) // self.mesh.size())
        first = min(self.mesh.get_local_rank() * chunk, len(param))
        rows = param.detach()[first : first + chunk].to(self.device)
        self.sharded_size, self.padded_numel = rows.size(), chunk * param.shape[1:].numel()
        self.padded_shard = torch.zeros(self.padded_numel, dtype=param.dtype, device=self.device)
        local = self.padded_shard[: rows.numel()].view(rows.shape)
        local.copy_(rows)
        self.sharded_param = nn.Parameter(self.to_sharded_dtensor(local), requires_grad=param.requires_grad)
        # @00
        # |         raise NotImplementedError("TODO(h1): set sharded_size, and sharded_param with this rank's rows of param")
        # @end
        self.sharded_state = ShardedState.SHARDED
        self._setattr_on_module(self.sharded_param)

    def _init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        """Set the dtypes to cast to; None where a cast would change nothing."""
        compute = mp_policy.param_dtype or self.orig_dtype
        self.param_dtype = compute if compute != self.orig_dtype else None
        self.reduce_dtype = mp_policy.reduce_dtype if mp_policy.reduce_dtype != compute else None

    def to_sharded_dtensor(self, local: Tensor) -> DTensor:
        """Return this rank's rows, or their gradient, as a DTensor like `sharded_param`."""
        return DTensor(local, self._sharding_spec, requires_grad=False)

    def to_sharded(self) -> None:
        """Register the shard, and give the memory of the whole parameter back."""
        self._setattr_on_module(self.sharded_param)
        # @h1
        free_storage(self.unsharded_param)
        # @00
        # |         raise NotImplementedError("TODO(h1): free the unsharded parameter")
        # @end
        self.sharded_state = ShardedState.SHARDED

    def to_unsharded(self) -> None:
        """Register a new Parameter of the memory of `unsharded_param`, which is filled already."""
        whole = nn.Parameter(self.unsharded_param.data, requires_grad=self.sharded_param.requires_grad)
        if whole.requires_grad:
            whole.register_post_accumulate_grad_hook(self._hand_over)
        self._setattr_on_module(whole)
        self.sharded_state = ShardedState.UNSHARDED

    def _hand_over(self, whole: Tensor) -> None:
        """Add the gradient of a Parameter that modules computed with to `unsharded_param.grad`."""
        grad, whole.grad = whole.grad, None
        before = self.unsharded_param.grad
        self.unsharded_param.grad = grad if before is None or grad is None else before + grad

    def _setattr_on_module(self, param: nn.Parameter) -> None:
        """Register `param` at every place of the parameter."""
        info = self._module_info
        places = zip((info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True)
        for module, name in places:
            unsafe_setattr_param(module, name, param)

    def __repr__(self) -> str:
        return f"FSDPParam({self._param_fqn}, {tuple(self._orig_size)}, {self.sharded_state.name})"

    @property
    def unsharded_param(self) -> nn.Parameter:
        """The whole parameter. It is made at its first use, with memory, and kept."""
        # @h1
        if self._unsharded_param is None:
            whole = self.gathered.view(-1)[: self._orig_size.numel()].view(self._orig_size)
            self._unsharded_param = nn.Parameter(whole, requires_grad=self.sharded_param.requires_grad)
        return self._unsharded_param
        # @00
        # |         raise NotImplementedError("TODO(h1): make _unsharded_param at its first use, and return it")
        # @end

    # @h1
    @cached_property
    def gathered(self) -> Tensor:
        """The memory of the whole parameter, and of padding at its end: [W, padded_numel]."""
        dtype = self.param_dtype or self.orig_dtype
        return torch.empty(self.mesh.size(), self.padded_numel, dtype=dtype, device=self.device)

    # @end
    # @h4
    def accumulate_grad(self) -> None:
        """Add the gradient of one backward to `accumulated_grad`."""
        grad, self.unsharded_param.grad = self.unsharded_param.grad, None
        if grad is not None:
            grad = grad.to(self.reduce_dtype or grad.dtype)
            self.accumulated_grad = grad if self.accumulated_grad is None else self.accumulated_grad + grad

    # @end
    # @h1
    def take_unsharded_grad(self) -> Tensor:
        """Return the whole gradient as [W, padded_numel]: row r is for rank r, padded with zeros. Afterwards there is none."""
        # @h4
        grad, self.accumulated_grad = self.accumulated_grad, None
        assert grad is not None, self._param_fqn
        grad = grad.reshape(-1)
        # @h1
        # |         grad, self.unsharded_param.grad = self.unsharded_param.grad, None
        # |         assert grad is not None, self._param_fqn
        # |         grad = grad.to(self.reduce_dtype or grad.dtype).reshape(-1)
        # @end
        padding = grad.new_zeros(self.mesh.size() * self.padded_numel - grad.numel())
        return (torch.cat([grad, padding]) if padding.numel() else grad).view(self.mesh.size(), -1)

    def add_sharded_grad(self, reduced: Tensor) -> None:
        """Add this rank's rows of `reduced`, [padded_numel], to `sharded_param.grad`."""
        rows = reduced[: self.sharded_size.numel()].view(self.sharded_size).to(self.orig_dtype)
        grad, before = self.to_sharded_dtensor(rows), self.sharded_param.grad
        self.sharded_param.grad = grad if before is None else before + grad

    # @end


def alloc_storage(tensor: Tensor) -> None:
    """Give `tensor` memory, and all tensors that share its storage. The memory's contents are undefined."""
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() != nbytes:
        tensor.untyped_storage().resize_(nbytes)


def free_storage(tensor: Tensor) -> None:
    """Give the memory of `tensor` back. The tensor and its views stay."""
    if tensor.untyped_storage().nbytes():
        tensor.untyped_storage().resize_(0)


def unsafe_setattr_param(module: nn.Module, param_name: str, param: nn.Parameter) -> None:
    """Register `param`, without the checks of `nn.Module.__setattr__`, unless the module has a `__setattr__` of its own."""
    if getattr(module.__setattr__, "__func__", None) is nn.Module.__setattr__:
        module._parameters[param_name] = param
    else:
        setattr(module, param_name, param)


class FSDPCommContext:
    """What all sharded modules of a model share. `device_type` is the mesh's, for example "cuda".

    Note [Whose memory]
        Memory belongs to the stream that allocated it. Once Python lets it go, this stream may reuse it, even if another stream
        still reads it. So a buffer must be kept until its own stream has waited for the reader.

    Attributes:
        device_handle: torch's module for the device. compute_stream: where modules compute.
        all_gather_stream, reduce_scatter_stream: on a GPU, with a high priority.
        post_forward_order: the modules, in the order in which their forwards ended.
    """

    def __init__(self, device_type: str) -> None:
        self.device_handle = _get_device_handle(device_type)
        streams = streams_for(device_type)
        self.compute_stream = streams.compute
        self.all_gather_stream = streams.all_gather
        self.reduce_scatter_stream = streams.reduce_scatter
        self.post_forward_order: list[FSDPModule] = []
        # @h1
        self.reductions: deque[InFlight] = deque()  # inputs of reductions, until the gradients are there
        # @end
        # @h4
        self.modules: list[FSDPModule] = []  # all sharded ones
        self.first: FSDPModule | None = None  # whose forward began the iteration; None after a backward
        # @end

    # @h1
    def wait_for_reductions(self) -> None:
        """Let compute wait for all reductions in flight. Then their gradients are ready, and their inputs are let go."""
        while self.reductions:
            self.compute_stream.wait(self.reductions.popleft().done)

    # @end
    # @h4
    def forget_order(self) -> None:
        """Forget all ended forwards."""
        self.post_forward_order.clear()
        for module in self.modules:
            module._post_forward_indices.clear()

    # @end


def fully_shard(
    module: nn.Module,
    *,
    module_fqn: str,  # its name in the model
    comm_ctx: FSDPCommContext,  # one for all modules of a model
    mesh: DeviceMesh,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
) -> nn.Module:
    """Shard all parameters of a module over the ranks of a mesh with one axis; return the module, which becomes an `FSDPModule`."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        kind = type(module).__name__
        raise ValueError(f"fully_shard: {module_fqn} is an nn.{kind}, which has no forward; shard its children one by one")
    if mesh.ndim != 1:
        raise ValueError(f"fully_shard: {module_fqn} got a mesh of {mesh.ndim} axes; take one of them")
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, comm_ctx.device_handle.current_device())
    # @h4
    named = {name: param for name, param in module.named_parameters() if not isinstance(param, DTensor)}
    # @00
    # |     named = dict(module.named_parameters())
    # @end
    infos = _get_param_module_infos(list(named.values()), (module,))
    sharded: Any = module
    sharded.fsdp_params = [
        FSDPParam(param, info, f"{module_fqn}.{name}", mesh, device, mp_policy)
        for (name, param), info in zip(named.items(), infos, strict=True)
    ]
    # @h4
    if len(dtypes := {p.param_dtype or p.orig_dtype for p in sharded.fsdp_params}) > 1:
        raise ValueError(f"fully_shard: parameters of {module_fqn} have dtypes {dtypes}; set param_dtype")
    for submodule in module.modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            setattr(submodule, name, buffer.to(device))
    comm_ctx.modules.append(sharded)
    # @end
    sharded.comm_ctx, sharded.mp_policy, sharded._module_fqn = comm_ctx, mp_policy, module_fqn
    sharded._reshard_after_forward = reshard_after_forward
    sharded._reshard_after_backward = sharded._requires_gradient_sync = True
    sharded._training_state, sharded._sharded_state = TrainingState.IDLE, ShardedState.SHARDED
    sharded._all_gather_result = None
    sharded._post_forward_indices = []
    cls = type(module)
    if cls not in cls_to_fsdp_cls:
        namespace = {"__deepcopy__": unimplemented_deepcopy}
        cls_to_fsdp_cls[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), namespace)
    module.__class__ = cls_to_fsdp_cls[cls]
    sharded.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    sharded.register_forward_hook(post_forward, prepend=False)
    return module


def unimplemented_deepcopy(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("deepcopy of a sharded module: copy the plain module, or its state dict")


class FSDPModule:
    """A sharded module. Its parameters are gathered, freed and reduced together.

    Attributes:
        fsdp_params: its parameters. comm_ctx: what it shares with other sharded modules of the model.
        _all_gather_result: what a gather in flight brings; None if there is none. Yours to choose.
        _post_forward_indices: of its forwards, in `comm_ctx.post_forward_order`.
    """

    fsdp_params: list[FSDPParam]
    comm_ctx: FSDPCommContext
    mp_policy: MixedPrecisionPolicy
    # @h1
    _all_gather_result: InFlight | None
    # @00
    # |     _all_gather_result: Any
    # @end
    _post_forward_indices: list[int]
    _module_fqn: str
    _reshard_after_forward: bool
    _reshard_after_backward: bool
    _requires_gradient_sync: bool
    _training_state: TrainingState
    _sharded_state: ShardedState

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a module of the original class: `sequential[1:]` makes another module of its class, and that one is not sharded."""
        return cls.__mro__[2](*args, **kwargs)

    def set_requires_gradient_sync(self: Any, value: bool) -> None:
        """Set whether the next backwards of this module and of all below it reduce (bonus)."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module._requires_gradient_sync = value

    def set_reshard_after_backward(self: Any, value: bool) -> None:
        """Set whether the next backwards of this module and of all below it free the parameters (bonus)."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module._reshard_after_backward = value

    @torch.no_grad()
    def unshard(self) -> None:
        """Start to gather the parameters, and return before they have arrived. Do nothing if they are whole or on their way."""
        if self._all_gather_result is not None or self.is_unsharded:
            return
        with record_function(self.with_fqn("FSDP::all_gather")):
            # @h1
            if not self.fsdp_params:
                return
            ctx, mesh, sizes = self.comm_ctx, self.fsdp_params[0].mesh, [p.padded_numel for p in self.fsdp_params]
            stream = ctx.all_gather_stream
            # @h2
            if self._training_state is not TrainingState.PRE_BACKWARD and not ctx.post_forward_order:
                stream.wait(ctx.compute_stream.record())  # the first gather sends what the optimizer has written
            # @h1
            # |             stream.wait(ctx.compute_stream.record())
            # @end
            with stream.run():
                dtype = self.fsdp_params[0].param_dtype or self.fsdp_params[0].orig_dtype
                flat = self.fsdp_params[0].padded_shard.new_empty(mesh.size(), sum(sizes), dtype=dtype)
                part = flat[mesh.get_local_rank()]
                for p, piece in zip(self.fsdp_params, part.split(sizes), strict=True):
                    piece.copy_(p.padded_shard)
                done = all_gather_flat(flat.view(-1), part, mesh.get_group(), stream, self._module_fqn)
            self._all_gather_result = InFlight(flat, done)
            # @00
            # |             raise NotImplementedError("TODO(h1): allocate, all-gather, and keep what arrives in _all_gather_result")
            # @end

    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        """Wait for the gather in flight, if there is one, and give the modules the whole parameters."""
        if self._all_gather_result is None:
            return
        # @h1
        (flat, done), ctx = self._all_gather_result, self.comm_ctx
        ctx.compute_stream.wait(done)
        columns = flat.split([p.padded_numel for p in self.fsdp_params], dim=1)
        for p, column in zip(self.fsdp_params, columns, strict=True):
            alloc_storage(p.gathered)
            p.gathered.copy_(column)
        ctx.all_gather_stream.wait(ctx.compute_stream.record())  # before it reuses the memory of `flat`
        # @00
        # |         raise NotImplementedError("TODO(h1): wait, and fill each unsharded_param")
        # @end
        self._all_gather_result = None
        self._to_unsharded()

    def reshard(self) -> None:
        """Free the parameters, unless they are to stay whole after a forward."""
        if self._training_state is TrainingState.FORWARD and not self._reshard_after_forward:
            return
        # @h4
        if self._training_state is TrainingState.POST_BACKWARD and not self._reshard_after_backward:
            return
        # @end
        self._to_sharded()

    def record_post_forward(self) -> None:
        """Note that a forward of this module has ended."""
        self._post_forward_indices.append(len(self.comm_ctx.post_forward_order))
        self.comm_ctx.post_forward_order.append(self)

    def register_post_backward_final_callback(self) -> None:
        """Arrange that `_post_backward_final_callback` runs when the backward in progress has ended."""
        Variable._execution_engine.queue_callback(self._post_backward_final_callback)

    def _post_backward_final_callback(self) -> None:
        """End a backward: afterwards nothing is whole or in flight, and the gradients are there.

        A module whose inputs need no gradient, such as an embedding, gets its post-backward here.
        """
        # @h4
        late = self._training_state is TrainingState.PRE_BACKWARD
        # @00
        # |         late = self.is_unsharded
        # @end
        if late:
            post_backward(self)
        self._training_state = TrainingState.IDLE
        # @h1
        self.comm_ctx.wait_for_reductions()
        # @00
        # |         raise NotImplementedError("TODO(h1): wait for the reduce-scatter")
        # @end
        # @h4
        self.comm_ctx.first = None
        self.comm_ctx.forget_order()
        for module in self.comm_ctx.modules:
            module._all_gather_result = None  # a gather that no backward used
        # @00
        # |         self._post_forward_indices.clear()
        # |         self.comm_ctx.post_forward_order.clear()
        # @end

    def _backward_prefetch(self) -> None:
        """Start the gather of the module whose backward comes next: its forward ended just before this module's."""
        # @h3
        index = self._post_forward_indices.pop() if self._post_forward_indices else 0
        if index > 0:
            self._prefetch_unshard(self.comm_ctx.post_forward_order[index - 1])
        # @00
        # |         raise NotImplementedError("TODO(h3): call _prefetch_unshard with the right module, if there is one")
        # @end

    @staticmethod
    def _prefetch_unshard(target: FSDPModule) -> None:
        """Gather another module ahead, for its backward."""
        with record_function(target.with_fqn("FSDP::backward_prefetch")):
            with target.use_training_state(TrainingState.PRE_BACKWARD):
                target.unshard()

    def _to_sharded(self) -> None:
        if not self.is_sharded:
            for p in self.fsdp_params:
                p.to_sharded()
            self._sharded_state = ShardedState.SHARDED

    def _to_unsharded(self) -> None:
        if not self.is_unsharded:
            for p in self.fsdp_params:
                p.to_unsharded()
            self._sharded_state = ShardedState.UNSHARDED

    @property
    def is_sharded(self) -> bool:
        return self._sharded_state is ShardedState.SHARDED

    @property
    def is_unsharded(self) -> bool:
        return self._sharded_state is ShardedState.UNSHARDED

    @contextlib.contextmanager
    def use_training_state(self, state: TrainingState) -> Iterator[None]:
        """Be in another state inside the block."""
        outer, self._training_state = self._training_state, state
        try:
            yield
        finally:
            self._training_state = outer

    def with_fqn(self, label: str) -> str:
        """Return a label for profilers, with the module's name."""
        return f"{label} ({self._module_fqn})" if self._module_fqn else label


def pre_forward(module: FSDPModule, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Hook before the forward of a sharded module."""
    # @h4
    ctx, policy = module.comm_ctx, module.mp_policy
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
    # @end
    if module._training_state is TrainingState.PRE_BACKWARD:  # a recomputation: the backward has gathered already
        return args, kwargs
    with record_function(module.with_fqn("FSDP::pre_forward")):
        # @h4
        if ctx.first in (None, module):  # a new iteration: a forward before it may have had no backward
            ctx.first = module
            ctx.forget_order()
        # @end
        module._training_state = TrainingState.FORWARD
        module.unshard()
        module.wait_for_unshard()
        return register_post_backward_hook(module, args, kwargs)


def post_forward(module: FSDPModule, input: Any, output: Any) -> Any:
    """Hook after the forward of a sharded module."""
    # @h4
    if module.mp_policy.output_dtype is not None:
        output = cast_floating(output, module.mp_policy.output_dtype)
    # @end
    if module._training_state is TrainingState.PRE_BACKWARD:
        return output
    with record_function(module.with_fqn("FSDP::post_forward")):
        module.reshard()
        module._training_state = TrainingState.IDLE
        if torch.is_grad_enabled():
            module.record_post_forward()
        return register_pre_backward_hook(partial(pre_backward, module), output)


def pre_backward(module: FSDPModule, grad: Tensor) -> Tensor:
    """Hook on each output of a sharded module, when its gradient is ready. The first one of them gathers the parameters."""
    if module._training_state is TrainingState.PRE_BACKWARD:
        return grad
    with record_function(module.with_fqn("FSDP::pre_backward")):
        module._training_state = TrainingState.PRE_BACKWARD
        module.register_post_backward_final_callback()
        module.unshard()
        module.wait_for_unshard()
        # @h3
        module._backward_prefetch()
        # @00
        # |         # module._backward_prefetch()  # task 3
        # @end
    return grad


def post_backward(module: FSDPModule) -> None:
    """When the whole gradients of a module are ready: free its parameters, and reduce the gradients to this rank's rows."""
    module._training_state = TrainingState.POST_BACKWARD
    with record_function(module.with_fqn("FSDP::post_backward_reshard")):
        module.reshard()
    with record_function(module.with_fqn("FSDP::post_backward_reduce")), torch.no_grad():
        # @h1
        ctx, stream = module.comm_ctx, module.comm_ctx.reduce_scatter_stream
        # @h4
        for p in module.fsdp_params:
            p.accumulate_grad()
        params = [p for p in module.fsdp_params if p.accumulated_grad is not None]
        if not params or not module._requires_gradient_sync:
            return
        # @h1
        # |         params = [p for p in module.fsdp_params if p.unsharded_param.grad is not None]
        # @end
        ctx.wait_for_reductions()  # so that one reduction is in flight, not more
        sizes, group = [p.padded_numel for p in params], params[0].mesh.get_group()
        flat = torch.cat([p.take_unsharded_grad() for p in params], dim=1)
        stream.wait(ctx.compute_stream.record())
        with stream.run():
            result = flat.new_empty(sum(sizes))
            reduce_scatter_flat(result, flat.view(-1), group, stream, module._module_fqn)  # it averages

            @torch.no_grad()
            def add() -> None:
                for p, piece in zip(params, result.split(sizes), strict=True):
                    p.add_sharded_grad(piece)

            stream.then(add)
        ctx.reductions.append(InFlight(flat, stream.record()))
        # @h3
        # @h1
        # |         ctx.wait_for_reductions()
        # @end
        # @00
        # |         raise NotImplementedError("TODO(h1): reduce-scatter each unsharded_param.grad into sharded_param.grad, and free it")
        # @end


def register_pre_backward_hook(hook: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Call `hook` with the gradient of each tensor in a module's output, when it is ready."""
    if torch.is_grad_enabled():
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(hook)
    return output


def register_post_backward_hook(module: FSDPModule, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Call post-backward when the gradients of a module's inputs are ready. Then the gradients of its parameters are ready, too."""
    flat, spec = tree_flatten((args, kwargs))
    places = [i for i, each in enumerate(flat) if isinstance(each, Tensor) and each.requires_grad]
    if not torch.is_grad_enabled() or not places:
        return args, kwargs
    apply: Any = RegisterPostBackwardFunction.apply
    for i, tensor in zip(places, apply(module, *(flat[i] for i in places)), strict=True):
        flat[i] = tensor
    args, kwargs = tree_unflatten(flat, spec)
    return args, kwargs


class RegisterPostBackwardFunction(torch.autograd.Function):
    """The identity on a module's inputs. Its backward is the last of the module's, and hands over the gradients of the parameters."""

    @staticmethod
    def forward(ctx: Any, module: FSDPModule, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.module = module
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        for p in ctx.module.fsdp_params:
            if p.sharded_param.requires_grad and p.unsharded_param.grad is None:
                raise ValueError(f"{p._param_fqn} has no gradient after the backward of its module")
        post_backward(ctx.module)
        return (None, *grads)


# @h4
def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """The same with floating-point tensors in `dtype`; token ids, masks and all else stay as they are."""
    flat, spec = tree_flatten(tree)
    cast = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in flat]
    return tree_unflatten(cast, spec)


# @end
