"""The ranks that take part, and how bytes move between them.

A `DeviceMesh` arranges ranks in a grid with named axes. The core shards parameters over the one axis of a 1D mesh. It asks a
`Transport` for buffers and for two collectives: all-gather and reduce-scatter. The transport decides how bytes move. The
transport in this module calls `torch.distributed`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Shard

from hwfsdp.core.private_torch import all_gather_single, reduce_scatter_single
from hwfsdp.core.base_errors import StateError, UsageError

if TYPE_CHECKING:
    from hwfsdp.core.device_streams import Work


class Axis(NamedTuple):
    """One axis of a mesh, as this process sees it: `size` ranks. This process has number `rank`."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class ShardMesh:
    """The ranks over which parameters are sharded. Extension point.

    Attributes:
        mesh: the user's mesh. shard: its axis of ranks that hold different rows.
        device: where unsharded parameters live.
    """

    mesh: DeviceMesh
    shard: Axis
    device: torch.device

    @property
    def size(self) -> int:
        return self.shard.size

    @property
    def rank(self) -> int:
        return self.shard.rank

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Return the placements of a parameter that is sharded along `dim`: one for each axis of `mesh`."""
        return (Shard(dim),)


def shard_mesh(mesh: DeviceMesh | None) -> ShardMesh:
    """Return the mesh that was given to `fully_shard`, as this process sees it. None: a mesh of all ranks.

    Raises:
        UsageError: the mesh has more than one axis. StateError: no mesh is given, and there is no process group.
    """
    mesh = default_mesh() if mesh is None else mesh
    if mesh.ndim != 1:
        raise UsageError(
            "fully_shard(mesh=…)",
            expected="a 1D mesh",
            got=f"one of shape {tuple(mesh.shape)}",
            remedy="Take the data-parallel axis out of it: mesh['dp'].",
        )
    return ShardMesh(mesh, axis_along(mesh, 0), device_of(mesh.device_type))


def axis_along(mesh: DeviceMesh, dim: int) -> Axis:
    """Return this process's axis along one dimension of a mesh."""
    group = mesh.get_group(dim)
    return Axis(group, group.size(), group.rank())


def default_mesh() -> DeviceMesh:
    """Return a 1D mesh of all ranks: on the accelerator if there is one and the process group serves it, else on the CPU.

    A process group that has only gloo cannot gather on an accelerator. In a process that torchrun started, make the process group.
    """
    if not dist.is_initialized() and "RANK" in os.environ:  # started by torchrun
        dist.init_process_group()
    if not dist.is_initialized():
        raise StateError(
            "fully_shard",
            expected="an initialized process group, or mesh=…",
            got="neither",
            remedy="Run the function through hwfsdp.launch or torchrun, or call init_process_group first.",
        )
    accelerator = None
    if dist.get_backend() != "gloo":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def device_of(device_type: str) -> torch.device:
    """Return the device of this type that the process uses now."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


class Transport:
    """The way in which the bytes of one parameter group move. Extension point.

    A call with `async_op` returns a work to wait for. A call without it blocks the current stream, and returns None.

    Attributes:
        ranks: the W ranks between which bytes move. device: the device of its buffers.
        name: the group's name, for errors and instruments (`observer`).
    """

    name = ""

    def __init__(self, ranks: Axis, device: torch.device) -> None:
        self.ranks, self.device = ranks, device

    def allocate(self, purpose: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat buffer [numel], contents undefined.

        Args:
            purpose: "all_gather" or "reduce_scatter" for the [W * n] buffer of this collective; "result" for the [n] result of a
                reduce-scatter.
        """
        return torch.empty(numel, dtype=dtype, device=self.device)

    def allocate_for_gather(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return `whole` [W * n] and this rank's `part` [n] for `all_gather`, contents undefined. Here `part` is a view of `whole`."""
        whole = self.allocate("all_gather", self.ranks.size * numel, dtype)
        return whole, whole.narrow(0, self.ranks.rank * numel, numel)

    def all_gather(self, whole: Tensor, part: Tensor, async_op: bool) -> Work | None:
        """Gather every rank's `part` [n]; `rows` returns the result. Both tensors are from `allocate_for_gather`."""
        return all_gather_single(whole, part, self.ranks.group, async_op)

    def rows(self, whole: Tensor, work: Work | None) -> list[Tensor]:
        """Return the result of an `all_gather` that is over: the parts in rank order, as one tensor [W, n] or W tensors [1, n]."""
        return [whole.view(self.ranks.size, -1)]

    def reduce_scatter(self, part: Tensor, whole: Tensor, operation: Any, async_op: bool) -> Work | None:
        """Set `part` [n] to this rank's part of the reduction of every rank's `whole` [W * n]."""
        return reduce_scatter_single(part, whole, operation, self.ranks.group, async_op)
