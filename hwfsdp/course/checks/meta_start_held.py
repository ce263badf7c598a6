"""13, on the ranks: parameters that get other rows for their shard, in every way in which that happens."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp import compat
from hwfsdp.compat import local_of, storage_key
from hwfsdp.core.layout import Layout
from hwfsdp.core.param import FSDPParam, Place, ShardMemory
from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.course.checks import piece
from hwfsdp.course.checks.lifetimes import bytes_alive, copied, watch
from hwfsdp.features.hybrid_sharding import HybridMesh
from hwfsdp.features.layouts import CutLayout

Data = dict[str, Any]


def placed(param: FSDPParam, local: Tensor) -> Data:
    padded = param.padded_shard
    return {
        "padded": copied(padded),
        "bytes": padded.untyped_storage().nbytes(),
        "numel": param.padded_numel,
        "local numel": local.numel(),
        "front": not local.numel()
        or [storage_key(local), local.storage_offset()] == [storage_key(padded), padded.storage_offset()],
        "shape": list(local.shape) == list(param.layout.local_shape),
    }


class Held(NamedTuple):
    """A parameter whose shard gets other rows.

    Attributes:
        dim: the dim that is cut. how: what is given: "the same", "new", "transposed", "bf16", "kept on the host".
    """

    shape: tuple[int, ...]
    how: str = "new"
    dim: int = 0

    def given(self, rank: int, size: int, seed: int) -> Tensor:
        """Return new rows for this rank; none is zero."""
        whole = torch.arange(1, prod(self.shape) + 1).view(self.shape).float() + seed % 64
        rows = piece(whole, size, rank, self.dim).clone()
        if self.how == "transposed":
            rows = rows.t().contiguous().t()
        return rows.bfloat16() if self.how == "bf16" else rows

    def __str__(self) -> str:
        return f"shape {self.shape}, Shard({self.dim}), {self.how}"


SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "the same": ((5, 3), (12, 2)),
    "new": ((5, 3), (12, 2), (7,), (2, 3)),
    "transposed": ((12, 4), (7, 4)),
    "bf16": ((5, 3), (12, 3)),
    "kept on the host": ((12, 2), (5, 2)),
}
HELD = [Held(shape, how) for how, shapes in SHAPES.items() for shape in shapes] + [Held((3, 12), dim=1)]


class _Host(ShardMemory):
    """Keep a separate copy as host memory, as if the device were not the CPU."""

    kept: Tensor

    def place(self, shard: Tensor) -> Tensor:
        self.kept = shard.clone()
        return self.kept


def exchanged(case: Held, mesh: HybridMesh, seed: int) -> Data:
    """Report which tensors are where after `hold_rows`, and the bytes of memory that should be free."""
    whole = nn.Parameter(torch.zeros(case.shape))
    home = _Host() if case.how == "kept on the host" else ShardMemory()
    layout = CutLayout(whole, case.dim, mesh, "weight") if case.dim else Layout(whole, mesh)
    module = nn.Module()
    module.register_parameter("weight", whole)
    made = FSDPParam(whole, [Place(module, "weight")], "weight", MixedPrecisionPolicy(), layout, home)
    old, memory = made.padded_shard, watch(made.padded_shard)
    is_new, given, param = case.how != "the same", made.local, made.sharded_param
    assert isinstance(param, DTensor)
    if is_new:
        given = case.given(mesh.rank, mesh.size, seed)
        like = param.device_mesh, param.placements, param.shape, param.stride()
        param = nn.Parameter(compat.dtensor(given, *like))
    rows = watch(given)
    made.hold_rows(param)  # type: ignore[arg-type]
    local = local_of(param)
    key = storage_key(made.padded_shard)
    facts = placed(made, local) | {
        "rows": copied(local),
        "dtype": [made.padded_shard.dtype, local.dtype],
        "padded_shape": list(made.padded_shard.shape),
        "moved": key != storage_key(given),
        "untouched": is_new or key == storage_key(old),
        "on_host": not isinstance(home, _Host) or key == storage_key(home.kept),
        "leaf": param.is_leaf and param.requires_grad,
    }
    gone = [] if key == storage_key(old) else [memory]  # memory that should be free
    gone += [rows] if facts["moved"] else []
    del old, given, whole, module, local
    made.sharded_param = param  # as `adopt_registered` has done before
    for owner, name in made.places:
        compat.register_parameter([(owner, name)], made.sharded_param)
    return facts | {"kept": bytes_alive(gone)}
