"""Shards in host memory.

Shards, their gradients, and so optimizer states live on the host. A gather copies them to the device as part of its copy-in. A
reduced gradient is copied to the host on the stream that made it. The host waits for all these copies when a backward is over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hwfsdp.core.group import ParamGroup
from hwfsdp.core.param import ShardMemory
from hwfsdp.core.streams import StreamSet
from hwfsdp.errors import StateError


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
