"""Values that several tests save in checkpoints, and a way to compare the loaded values."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hwfsdp import checkpoint
from hwfsdp.checkpoint import dcp, parts
from hwfsdp.compat import StridedShard, dtensor
from hwfsdp.layout import shard_of


class Format(NamedTuple):
    """A format: its functions, and the file that holds the values that one rank has saved."""

    save: Callable[..., Any]
    load: Callable[..., Any]
    file: str


def load_part(target: Any, path: Path, **options: Any) -> Any:
    return parts.load_into(path, target, **options)


FORMATS = {
    "store": Format(checkpoint.save, checkpoint.load, "0*/00000.bin"),
    "dcp": Format(dcp.save, dcp.load, "__0_0.distcp"),
    "part": Format(lambda state, path: parts.save(path, state), load_part, "PART_000.pt"),
}


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclasses.dataclass
class Record:
    first: Any
    second: Any = None


class Bomb:
    """An object that makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@functools.cache
def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def line() -> DeviceMesh:
    return mesh(dist.get_world_size() if dist.is_initialized() else 1)


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a tensor whose elements are all different and not 0."""
    return (torch.arange(torch.Size(shape).numel()) + 1).view(shape).to(dtype)


def cut(whole: Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    """Return this rank's part in its own memory. Nested chunking makes it, which is right even where torch is wrong."""
    local = shard_of(whole, mesh, placements).clone(memory_format=torch.contiguous_format)
    return dtensor(local, mesh, placements, whole.shape, whole.stride())


def assert_same(mine: Any, theirs: Any, at: str = "", exact: bool = False) -> None:
    """Assert the same keys, values and types; of plain tensors, dtype, shape and elements. `exact`: also the order and type of dicts."""
    if isinstance(theirs, Tensor):
        assert type(mine) is Tensor and mine.dtype == theirs.dtype and mine.shape == theirs.shape, at
        assert torch.equal(mine, theirs), at
    elif isinstance(theirs, dict):
        assert isinstance(mine, dict) and mine.keys() == theirs.keys(), (at, list(mine), list(theirs))
        assert not exact or (type(mine) is type(theirs) and list(mine) == list(theirs)), at
        for key in theirs:
            assert_same(mine[key], theirs[key], f"{at}[{key!r}]", exact)
    elif isinstance(theirs, list | tuple):
        assert type(mine) is type(theirs) and len(mine) == len(theirs), at
        for i, (one, other) in enumerate(zip(mine, theirs)):
            assert_same(one, other, f"{at}[{i}]", exact)
    elif dataclasses.is_dataclass(theirs):
        assert type(mine) is type(theirs), at
        assert_same(vars(mine), vars(theirs), at, exact)
    else:
        assert type(mine) is type(theirs) and mine == theirs, at


# --- Tensors cut in every way, on four ranks -----------------------------------------------------------------


def layouts() -> dict[str, tuple[DeviceMesh, tuple[Placement, ...]]]:
    ways = {"line": Shard(0), "columns": Shard(1), "replicas": Replicate()}
    found: dict[str, tuple[DeviceMesh, tuple[Placement, ...]]]
    found = {name: (line(), (placement,)) for name, placement in ways.items()}
    for sizes in ((1, 4), (4, 1), (2, 2), (2, 1, 2)):
        rest = [Replicate()] * (len(sizes) - 2)
        for name, placements in {
            "both": (Shard(0), *rest, Shard(0)),
            "fsdp over tp": (StridedShard(0, split_factor=sizes[-1]), *rest, Shard(0)),
            "rows and columns": (Shard(0), *rest, Shard(1)),
            "columns and rows": (Shard(1), *rest, Shard(0)),
            "hsdp": (Replicate(), *rest, Shard(0)),
            "hsdp turned": (Shard(1), *rest, Replicate()),
        }.items():
            found[f"{name} {sizes}"] = (mesh(*sizes), placements)
    return found


SHAPES = [(7, 5), (2, 3), (0, 3), (5, 1, 2)]


def wholes() -> dict[str, Tensor]:
    """Return a whole tensor for every layout and every shape."""
    return {f"{name} {shape}": numbered(*shape) for name in layouts() for shape in SHAPES}


def sharded(fill: float | None = None) -> dict[str, DTensor]:
    """Cut the tensors of `wholes` as their layouts say. `fill`: one value for all elements."""
    found = {}
    for name, (among, placements) in layouts().items():
        for shape in SHAPES:
            whole = numbered(*shape) if fill is None else torch.full(shape, float(fill))
            found[f"{name} {shape}"] = cut(whole, among, *placements)
    return found
