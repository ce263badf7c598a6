"""13, on the ranks: parameters whose shard is exchanged for other rows, in all the ways in which that happens."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp import compat
from hwfsdp.compat import storage_key
from hwfsdp.core.form import Layout
from hwfsdp.core.param import FSDPParam, Home, Place
from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.core.ranks import ShardMesh
from hwfsdp.course.checks import piece
from hwfsdp.course.checks.lifetimes import Watched, bytes_alive, local_part, watch
from hwfsdp.features.layouts import CutLayout

Data = dict[str, Any]


def copied(tensor: Tensor) -> Tensor | None:
    """None if there is no memory to copy."""
    return None if tensor.is_meta else tensor.detach().clone()


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
    """A parameter whose shard is exchanged.

    Attributes:
        dim: that is cut. how: what is given: "the same", "new", "transposed", "bf16", "kept on the host".
    """

    shape: tuple[int, ...]
    how: str = "new"
    dim: int = 0

    def local(self, rank: int, size: int, seed: int) -> Tensor:
        """This rank's rows, new; none is zero."""
        whole = torch.arange(1, prod(self.shape) + 1).view(self.shape).float() + seed % 64
        return piece(whole, size, rank, self.dim).clone()

    def given(self, rank: int, size: int, seed: int) -> Tensor:
        rows = self.local(rank, size, seed)
        if self.how == "transposed":
            rows = rows.t().contiguous().t()
        return rows.bfloat16() if self.how == "bf16" else rows

    def __str__(self) -> str:
        return f"shape {self.shape}, Shard({self.dim}), {self.how}"


HELD = (
    Held((5, 3), "the same"),
    Held((12, 2), "the same"),
    Held((5, 3)),
    Held((12, 2)),
    Held((7,)),
    Held((2, 3)),
    Held((12, 4), "transposed"),
    Held((7, 4), "transposed"),
    Held((5, 3), "bf16"),
    Held((12, 3), "bf16"),
    Held((12, 2), "kept on the host"),
    Held((5, 2), "kept on the host"),
    Held((3, 12), dim=1),
)


class _Host(Home):
    """Host memory is memory of its own here, as it is where the device is another one."""

    kept: Tensor

    def keep(self, shard: Tensor) -> Tensor:
        self.kept = shard.clone()
        return self.kept


def held(seed: int, mesh: ShardMesh) -> list[Data]:
    return [_exchange(case, mesh, seed) for case in HELD]


def _exchange(case: Held, mesh: ShardMesh, seed: int) -> Data:
    whole = nn.Parameter(torch.zeros(case.shape))
    on_host = case.how == "kept on the host"
    home = _Host() if on_host else Home()
    layout = CutLayout(whole, case.dim, mesh, "weight") if case.dim else Layout(whole, mesh)
    module = nn.Module()
    module.register_parameter("weight", whole)
    made = FSDPParam(whole, [Place(module, "weight")], "weight", MixedPrecisionPolicy(), layout, home)
    old, memory = made.padded_shard, watch(made.padded_shard)
    given, param = (
        made.local if case.how == "the same" else case.given(mesh.rank, mesh.size, seed)
    ), made.sharded_param
    assert isinstance(param, DTensor)
    if case.how != "the same":
        param = nn.Parameter(_as_dtensor(given, param))
    rows = watch(given)
    made.hold_rows(param)  # type: ignore[arg-type]
    local = local_part(param)
    facts = placed(made, local)
    facts |= {
        "rows": copied(local),
        "dtype": [made.padded_shard.dtype, local.dtype],
        "padded shape": list(made.padded_shard.shape),
        "moved": storage_key(made.padded_shard) != storage_key(given),
        "untouched": case.how != "the same"
        or made.padded_shard is old
        or storage_key(old) == storage_key(made.padded_shard),
        "on host": not on_host
        or (isinstance(home, _Host) and storage_key(home.kept) == storage_key(made.padded_shard)),
        "leaf": param.is_leaf and param.requires_grad,
    }
    same = storage_key(old) == storage_key(made.padded_shard)
    del old, given, whole, module, local
    made.sharded_param = param  # as `adopt_registered` has done before
    kept = [ref for ref, current in ((memory, same), (rows, not facts["moved"])) if not current]
    facts["kept"] = _alive_besides(kept, made)
    return facts


def _as_dtensor(local: Tensor, like: DTensor) -> DTensor:
    shape, stride = like.shape, like.stride()
    return compat.dtensor(local, like.device_mesh, like.placements, shape, stride)


def _alive_besides(watched: Sequence[Watched], param: FSDPParam) -> int:
    """Bytes of memory that should be gone."""
    for module, name in param.places:
        compat.register_parameter(module, name, param.sharded_param)
    return bytes_alive(watched)
