"""The corners of torch that have no public door, each opened in one place only.

Supported: torch 2.11 to 2.15. Everything else in this package uses documented API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# torch 2.13 renamed the two collectives over single tensors, and warns at the old names. They are looked up on
# `torch.distributed` at each call, because that is where a recording puts its wrappers (see `events`).
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


LATE_IMPORT = (
    "torch._dynamo"  # the first DTensor or optimizer of a process imports it, which takes half a second
)


def all_gather_single(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """`output` [W * n] receives every rank's `input` [n], in rank order. Returns the work if `async_op`."""
    work: dist.Work | None = getattr(dist, _GATHER)(output, input, group=group, async_op=async_op)
    return work


def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Any, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """`output` [n] receives this rank's part of the reduction of all ranks' `input` [W * n]."""
    work: dist.Work | None = getattr(dist, _SCATTER)(output, input, op=op, group=group, async_op=async_op)
    return work


def call_after_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` once, when the backward pass in progress has executed its last node.

    Only callable from inside a backward pass. No public hook exists for "the whole backward is done".
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread is executing a backward pass (true during the recomputation of a checkpoint)."""
    return bool(torch._C._current_graph_task_id() != -1)


def read_debug_level() -> None:
    """Takes `TORCH_DISTRIBUTED_DEBUG` from the environment as it is now, not as it was when torch was imported."""
    getattr(dist, "set_debug_level_from_env")()  # noqa: B009  (exported, but not declared)


def post_accumulate_grad_hooks(param: Tensor) -> list[Callable[[Tensor], None]]:
    """What `register_post_accumulate_grad_hook` registered; FSDP sets gradients itself, and so calls them."""
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def copy_each(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """`output.copy_(input)` for every pair, casting where dtypes differ; one kernel for all on CUDA."""
    if outputs:
        torch._foreach_copy_(list(outputs), list(inputs))


def wrap_like(local: Tensor, like: DTensor) -> DTensor:
    """`local` as a DTensor with the global shape, stride, mesh and placements of `like`.

    `DTensor.from_local` does the same for 300 µs a call, which every gradient of every step would pay.
    """
    return DTensor(local, like._spec, requires_grad=False)


def local_of(tensor: DTensor) -> Tensor:
    """The rank's part itself, with no autograd node between it and the DTensor (`to_local` makes one)."""
    return tensor._local_tensor


def replace_local(tensor: DTensor, local: Tensor) -> None:
    """Exchanges the rank's part of a DTensor that optimizers and users already hold."""
    tensor._local_tensor = local


def storage_key(of: Tensor | torch.UntypedStorage) -> int:
    """Identity of a storage, while it lives; unlike `data_ptr`, fake and freed ones have it too."""
    storage = of.untyped_storage() if isinstance(of, Tensor) else of
    return int(storage._cdata)


def base_of_view(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of, in autograd's eyes; None if it is not a view."""
    return tensor._base


def register_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """`module.name = param`, for a name that is a parameter already.

    `nn.Module.__setattr__` looks the name up in five places first, which every transition of every parameter would
    pay. A module with a `__setattr__` of its own, such as `nn.RNN`, which keeps a list, is not bypassed.
    """
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = param
    else:
        setattr(module, name, param)
