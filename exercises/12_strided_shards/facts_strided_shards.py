"""12, on ranks: what the functions of the student's file return."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Shard

from hwfsdp.compat import StridedShard, storage_key
from hwfsdp.course.probing import Report, attempt, submitted

Calls = dict[str, list[tuple[Any, ...]]]  # arguments, by function


def probe_calls(report: Report, calls: Calls) -> None:
    """Call each function with each of its arguments. Report what it returns, as data, by its name."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory holds NaN, or the largest integer
    for name, cases in calls.items():
        attempt(report, name, partial(_answers, name, cases))


def _answers(name: str, cases: list[tuple[Any, ...]]) -> list[Any]:
    ways = {"shard_strided": _sharded, "unshard_strided": _unsharded, "misfits": _misfit}
    call = ways.get(name) or getattr(submitted(), name)
    found = list[Any]()
    for case in cases:
        try:
            found.append(plain(call(*case)))
        except ValueError as error:
            found.append(f"ValueError: {error}")
    return found


def plain(value: Any) -> Any:
    """Keep integers, tensors, facts by name, and lists. A dict becomes pairs, a placement and anything else text."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, dict | tuple | list):
        return [plain(item) for item in (sorted(value.items()) if isinstance(value, dict) else value)]
    if value is None or type(value) in (int, bool) or isinstance(value, Tensor):
        return value
    return shown(value) if isinstance(value, Placement) else value if isinstance(value, str) else repr(value)


def shown(placement: Placement) -> str:
    """Return a placement as text, the same with every version of torch."""
    if isinstance(placement, StridedShard):
        return f"StridedShard({placement.dim}, split_factor={placement.split_factor})"
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else f"{type(placement).__name__}()"


def _sharded(tensor: Tensor, mesh: Any, placements: Any, pad: bool) -> dict[str, Any]:
    """Cut a tensor. Report its shards, their memory, and the gradient of the sum of (rank + 1) * shard."""
    whole = tensor.clone().requires_grad_(tensor.is_floating_point())
    shards = submitted().shard_strided(whole, mesh, placements, pad=pad)
    if any(shard.requires_grad for shard in shards):
        sum((rank + 1) * shard.sum() for rank, shard in enumerate(shards)).backward()
    memory = [storage_key(shard) for shard in shards]
    return {
        "shards": [shard.detach() for shard in shards],
        "contiguous": all(shard.is_contiguous() for shard in shards),
        "view": storage_key(whole) in memory,
        "bytes": [shard.untyped_storage().nbytes() for shard in shards],
        "shared": len(set(memory)) < len(memory),
        "written": not torch.equal(whole.detach(), tensor),
        "grad": whole.grad,
    }


def _unsharded(shards: list[Tensor], *arguments: Any) -> dict[str, Any]:
    """Put a tensor together from shards. Report it, and whether gradients flow back; `touched`: a shard changed, or is its memory."""
    given = [shard.clone().requires_grad_(shard.is_floating_point()) for shard in shards]
    whole = submitted().unshard_strided(given, *arguments)
    shared = bool(whole.numel()) and storage_key(whole) in map(storage_key, given)
    touched = shared or not all(map(torch.equal, given, shards))
    return {
        "whole": whole.detach(),
        "attached": whole.requires_grad == given[0].requires_grad,
        "touched": touched,
    }


def _misfit(*arguments: Any) -> str:
    """Give `unshard_strided` shards that do not fit. Return what it raises."""
    try:
        submitted().unshard_strided(*arguments)
        return "returns a tensor"
    except Exception as error:
        return f"raises {type(error).__name__}"
