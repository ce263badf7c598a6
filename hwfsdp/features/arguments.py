"""Types of arguments of `fully_shard`, with torch's names. torch's own types work in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from hwfsdp.core import precision
from hwfsdp.errors import UsageError


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


@dataclass(unsafe_hash=True)  # torch's can be changed, too
class DataParallelMeshDims:
    """The data-parallel axes of a mesh that also has other axes; see `fully_shard(dp_mesh_dims=…)`.

    Attributes:
        shard: name of the axis to shard over; several names are taken as one axis. None: replicate only.
        replicate: name of the axis to replicate over, or several. None: shard only.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise UsageError(
                "DataParallelMeshDims",
                expected="names of axes in shard, in replicate, or in both",
                got="neither",
                remedy="Name the data-parallel axis: DataParallelMeshDims(shard='dp').",
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


@dataclass(frozen=True)
class ShardPlacementResult:
    """A result of `shard_placement_fn`: the dimension along which a parameter is cut, and the mesh over which it is cut.

    Attributes:
        placement: `Shard(dim)`; None: `Shard(0)`.
        mesh_info: the mesh, 1D or 2D with names, as in `fully_shard(mesh=…)`; torch's `FSDPMeshInfo` works, too. torch's own
            `ShardPlacementResult` works in place of this class.
    """

    placement: Shard | None
    mesh_info: Any
