"""The two policies of a call: in which dtypes parameters compute, and where their shards live. `fully_shard` takes torch's policies, too.

With `param_dtype_override_fn`, a parameter may compute in a dtype of its own, such as norms that stay in fp32 among layers in bf16.
A group can gather several dtypes in one collective (`core.flat_collectives`). So it is enough to choose a policy for each parameter.

With `CPUOffloadPolicy`, shards, their gradients, and so optimizer states live on the host. A gather copies them to the device as part
of its copy-in. A reduced gradient is copied to the host on the stream that made it. The host waits for all these copies when a
backward is over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hwfsdp.core import precision
from hwfsdp.core.group import ParamGroup
from hwfsdp.core.param import ShardMemory
from hwfsdp.core.device_streams import StreamSet
from hwfsdp.errors import StateError, UsageError

# --- dtypes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixedPrecisionPolicy(precision.MixedPrecisionPolicy):
    """The dtypes of one module.

    Attributes:
        param_dtype: the dtype of unsharded parameters, and so of gathers and computation. None: the original dtype.
        reduce_dtype: the dtype of the gradient reduction. None: before torch 2.15, the dtype of the gradients, which is the param
            dtype. With torch 2.15, each parameter's `grad_dtype` as set before the first forward, or else its original dtype.
        output_dtype: floating-point outputs of forward are cast to it. None: no cast.
        cast_forward_inputs: if True, floating-point inputs of forward are cast to `param_dtype`.
        param_dtype_override_fn: called once for each parameter. It returns the parameter's own dtype, which the parameter then
            keeps, or None (or `param_dtype`) for `param_dtype`. It must return the same on every rank. torch has this since 2.15;
            here it works with every torch.
    """

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )


def policy_of(param: nn.Parameter, name: str, policy: Any) -> Any:
    """Return the policy of one parameter: `policy`, or what its function says.

    Raises:
        UsageError: the function returned a dtype that is neither the parameter's nor `param_dtype`.
    """
    override = getattr(policy, "param_dtype_override_fn", None)
    if override is None:
        return policy
    dtype = override(param)
    if dtype not in (None, policy.param_dtype, param.dtype):
        raise UsageError(
            f"param_dtype_override_fn: parameter {name!r}",
            expected=f"None, or a dtype: {policy.param_dtype} or {param.dtype}",
            got=repr(dtype),
            remedy="Return the parameter's own dtype to keep it, None for the policy's.",
        )
    return dataclasses.replace(policy, param_dtype=dtype or policy.param_dtype, param_dtype_override_fn=None)


# --- Memory of the shards -------------------------------------------------------------------------------------


@dataclass(unsafe_hash=True)  # torch's can be changed, too
class OffloadPolicy:
    """No offloading: shards live on the mesh's device."""


@dataclass(unsafe_hash=True)  # torch's can be changed, too
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, sharded gradients and optimizer state live in host memory.

    Attributes:
        pin_memory: if True, this memory is page-locked, so that copies to and from the device overlap with compute.
    """

    pin_memory: bool = True


def memory_of(policy: Any, device: torch.device) -> ShardMemory:
    """Return where shards live under an offload policy, ours or torch's. `device`: the device that computes."""
    return HostMemory(device, policy.pin_memory) if hasattr(policy, "pin_memory") else ShardMemory()


class HostMemory(ShardMemory):
    """Host memory.

    Args:
        device: the device that computes. pin: page-lock the memory.
    """

    def __init__(self, device: torch.device, pin: bool) -> None:
        self.device, self.pin = device, pin

    def place(self, shard: Tensor) -> Tensor:
        if shard.is_meta:
            return shard
        shard = shard.cpu()
        pin = self.pin and self.device.type != "cpu" and not shard.is_pinned()
        return shard.pin_memory() if pin else shard

    def place_grad(self, grad: Tensor, used_at_once: bool) -> Tensor:
        return grad.to("cpu", non_blocking=self.pin and not used_at_once)

    def wait_until_readable(self, streams: StreamSet) -> None:
        """Make the host wait, because it is about to read gradients."""
        streams.compute.synchronize()


def is_offloaded(group: ParamGroup) -> bool:
    """True if the shards of a group live in host memory."""
    return any(isinstance(param.memory, HostMemory) for param in group.params)


def check_in_host_memory(group: ParamGroup) -> None:
    """Raise StateError if a shard that should be in host memory is on the device."""
    shards = {p.name: p.padded_shard for p in group.params} if is_offloaded(group) else {}
    on_device = [name for name, shard in shards.items() if shard.device.type not in ("cpu", "meta")]
    if on_device:
        raise StateError(
            f"parameter group {group.name!r}",
            expected="offloaded parameters in host memory",
            got=f"{', '.join(on_device)} on {group.mesh.device}",
            remedy='Call model.to_empty(device="cpu"), or load a state dict that is on the CPU.',
        )
