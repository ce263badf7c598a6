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
from torch.distributed.tensor import DTensor

from hwfsdp import checkpoint
from hwfsdp.checkpoint import dcp, parts
from hwfsdp.compat import dtensor
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
def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() if dist.is_initialized() else 1,))


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
