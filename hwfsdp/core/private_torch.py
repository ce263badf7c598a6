"""Private parts of torch that the core needs. No other module of the core uses private parts of torch, except
`api`: its class overrides `nn.Module._apply`.

Supported: torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# --- Collectives -------------------------------------------------------------------------------------------

Work = dist.Work | None

# torch 2.13 gave them these names. Since then, torch warns of the older names.


def all_gather_single(output: Tensor, input: Tensor, group: Any, async_op: bool) -> Work:
    """Call `torch.distributed.all_gather_single`, or in torch 2.11 and 2.12 `all_gather_into_tensor`."""
    gather: Callable[..., Work] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, input, group=group, async_op=async_op)


def reduce_scatter_single(output: Tensor, input: Tensor, op: Any, group: Any, async_op: bool) -> Work:
    """Call `torch.distributed.reduce_scatter_single`, or in torch 2.11 and 2.12 `reduce_scatter_tensor`."""
    scatter: Callable[..., Work] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, input, op, group=group, async_op=async_op)


# --- Autograd ----------------------------------------------------------------------------------------------


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` once, when the backward in progress has executed its last node. Call this only inside a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def number_of_backward() -> int:
    """Return a number of the backward that this thread is executing. Each backward has another one. -1 outside of backwards."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """True if this thread is executing a backward, also during the recomputation of a checkpoint."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_transforms() -> bool:
    """True if a `torch.func` transform, such as `grad` or `vmap`, or forward-mode AD is running."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def may_need_grad(tensor: Tensor) -> bool:
    """True if a backward may reach the tensor. Inside a transform, it may reach a value or a tangent that the tensor wraps."""
    return tensor.requires_grad or (in_transforms() and (tensor.is_floating_point() or tensor.is_complex()))


def no_autograd() -> AbstractContextManager[Any]:
    """Keep the operations of the block out of autograd, and out of any `torch.func` transform.

    This costs almost nothing if autograd is off already, as in a backward.
    """
    if torch._C._are_functorch_transforms_active():
        return _no_transforms()
    return _NO_GRAD if torch.is_grad_enabled() else NOTHING


class Nothing:
    """A context manager that does nothing. Its methods are C functions, so it costs half as much as `nullcontext`."""

    __enter__ = __exit__ = staticmethod("".format)


class _NoGrad:
    """`torch.no_grad` for blocks around which autograd is on. It has no state, so one object serves all of them."""

    def __enter__(self) -> None:
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(True)


NOTHING = cast(AbstractContextManager[Any], Nothing())
_NO_GRAD = _NoGrad()


@contextmanager
def _no_transforms() -> Iterator[None]:
    # nn.Parameter(DTensor) calls requires_grad_, which transforms forbid
    with torch._C._DisableFuncTorch(), torch.no_grad(), enable_inplace_requires_grad(True):
        yield


def base_of_view(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which this tensor is a view, as autograd knows it; None if it is not a view."""
    return tensor._base


def hooks_of(tensor: Tensor) -> Iterable[Callable[[Tensor], Any]]:
    """Return the hooks of `Tensor.register_hook` that a backward which reaches this tensor will call."""
    return (tensor._backward_hooks or {}).values()


def post_accumulate_grad_hooks(param: Tensor) -> list[Callable[[Tensor], None]]:
    """Return the hooks of `register_post_accumulate_grad_hook`. FSDP sets gradients itself, so it must also call these hooks itself."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None)
    return list(hooks.values()) if hooks else []


# --- dtypes of gradients -----------------------------------------------------------------------------------

# FSDP2 of torch 2.13 and 2.14 reduces gradients in their own dtype, and ignores `Tensor.grad_dtype`.
REDUCES_IN_GRAD_DTYPE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)  # nightly builds, too


def has_grad_dtype(param: Tensor) -> bool:
    """True if the user has set the parameter's `grad_dtype`, and this torch's FSDP2 uses it."""
    return REDUCES_IN_GRAD_DTYPE and bool(param._has_grad_dtype_override)  # type: ignore[attr-defined]


def inherit_grad_dtype(param: Tensor, of: Tensor) -> None:
    """If the user has set `grad_dtype` on `of` and not on `param`, which replaces `of`, copy it to `param`."""
    if has_grad_dtype(of) and not has_grad_dtype(param):
        param.grad_dtype = of.grad_dtype


def accept_grads(unsharded: Tensor | None, reduce: torch.dtype | None, cast_later: bool) -> None:
    """Make the backward that begins leave gradients in the dtype `reduce`. None: do not cast them. Needs `REDUCES_IN_GRAD_DTYPE`.

    With `cast_later`, gradients with fewer bits keep their dtype until they are copied in or added up. But gradients of a DTensor
    are cast at once, because they may be reduced before that.
    """
    if unsharded is not None and unsharded.requires_grad:
        fewer = reduce is not None and unsharded.dtype.itemsize < reduce.itemsize
        unsharded.grad_dtype = None if cast_later and fewer and not isinstance(unsharded, DTensor) else reduce


# --- Tensors -----------------------------------------------------------------------------------------------


def copy_each(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Call `output.copy_(input)` for every pair, casting where dtypes differ; on CUDA, one kernel does all that are contiguous.

    From pinned host memory the copies are asynchronous.
    """
    if outputs:
        torch._foreach_copy_(list(outputs), list(inputs), non_blocking=True)


def cat_chunks(grads: Sequence[Tensor], flat: Tensor, on_host: bool) -> bool:
    """Fill `flat` as `flat_collectives.copy_in_grads` does, in one call; return False if torch has no quick one for these gradients.

    A device has one kernel that pads and casts. The host does this quickly only if there is nothing to pad or cast.
    """
    dtypes, ranks = {grad.dtype for grad in grads}, flat.shape[0]
    nothing_to_do = dtypes == {flat.dtype} and all([grad.shape[0] % ranks == 0 for grad in grads])
    one_kind = len(dtypes) == 1 and all([grad.is_contiguous() and grad.numel() for grad in grads])
    if quick := one_kind and (nothing_to_do or not on_host):
        torch._chunk_cat(list(grads), 0, ranks, out=flat)
    return quick


def move_in_place(tensor: Tensor, device: torch.device) -> None:
    """Move a parameter or buffer to `device`; it stays the same object."""
    wraps: bool = is_traceable_wrapper_subclass(tensor)
    if wraps:  # its `.data` cannot be replaced
        with torch.no_grad():
            moved = nn.Parameter(tensor.to(device), requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, moved)
    else:
        tensor.data = tensor.data.to(device)


def address_of(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    """Return where a tensor begins (storage and offset), and its dtype. Unlike `data_ptr`, this works for fake and freed memory."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset()), tensor.dtype


# --- DTensors ----------------------------------------------------------------------------------------------


def dtensor(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """Return a DTensor of this global shape, with `local` as this rank's part.

    `DTensor.from_local` would move a part that is offloaded to the CPU to the mesh's device.
    """
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def wrap_like(local: Tensor, like: DTensor) -> DTensor:
    """Return `local` as a DTensor with the global shape, stride, mesh and placements of `like`.

    `DTensor.from_local` does the same, but takes 300 µs a call, for every gradient of every step.
    """
    if local.dtype != like.dtype:
        return dtensor(local, like.device_mesh, like.placements, like.shape, like.stride())
    # DTensor's __init__ does nothing, so it is not called.
    made: DTensor = DTensor.__new__(DTensor, local, like._spec, requires_grad=False)
    return made


def writes_to(tensors: Iterable[Tensor]) -> list[int]:
    """Return the number of in-place writes to each tensor that torch has counted; of a DTensor, also those to its local part."""
    return [t._version + t._local_tensor._version if isinstance(t, DTensor) else t._version for t in tensors]


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor. Unlike `to_local`, this adds no autograd node. Return other tensors unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def replace_local(tensor: DTensor, local: Tensor) -> None:
    """Replace the rank's part of a DTensor that optimizers and users already hold."""
    tensor._local_tensor = local


# --- Modules -----------------------------------------------------------------------------------------------


def register_parameter(places: Iterable[tuple[nn.Module, str]], param: nn.Parameter) -> None:
    """Set `module.name = param` for each (module, name). The module must have a parameter of this name already.

    `nn.Module.__setattr__` first looks for the name in several places. That would cost time at every transition of every
    parameter. But a module may have its own `__setattr__`, such as `nn.RNN`, which keeps a list. Then we call this method.
    """
    for module, name in places:
        if type(module).__setattr__ is nn.Module.__setattr__:
            module._parameters[name] = param
        else:
            setattr(module, name, param)
