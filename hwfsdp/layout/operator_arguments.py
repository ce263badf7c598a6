"""Arguments of operators: sizes in every form that torch takes, and the mesh of the DTensors among them."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, SupportsIndex

import torch
from torch.distributed.device_mesh import DeviceMesh

from hwfsdp.errors import UsageError


def normalize_to_torch_size(
    size: SupportsIndex | Sequence[SupportsIndex] | Sequence[Sequence[SupportsIndex]],
) -> torch.Size:
    """Return a size as `torch.Size`. It may have any form that `torch.empty` takes: `3`, `(2, 3)`, `([2, 3],)`."""
    sizes: Any = size if isinstance(size, Sized) else (size,)
    if len(sizes) == 1 and isinstance(sizes[0], Sequence):
        (sizes,) = sizes
    return torch.Size(sizes)


def try_find_mesh_from_args(op_call: object, args: Sequence[object]) -> DeviceMesh:
    """Return the mesh of the first DTensor (or DTensor spec) in the arguments of an operator. Lists and tuples are searched, too.

    Raises:
        UsageError: there is no DTensor. The message names `op_call`.
    """
    for arg in args:
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            mesh = getattr(item, "device_mesh", None)
            if isinstance(mesh, DeviceMesh):
                return mesh
    raise UsageError(
        f"{op_call}",
        expected="a DTensor among its arguments",
        got=f"{[type(arg).__name__ for arg in args]}",
        remedy="Distribute one of them over a mesh.",
    )
