"""A second reader and writer of the PART format, written from its description alone, in the simplest way.

They check nothing, and trust every file. The writer plays all ranks, one after the other. It deals out entries in turn, not by size:
a reader must accept both. Like earlier writers, it writes no save id, and cuts with `torch.chunk`.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


def is_large(value: Any, large_bytes: int) -> bool:
    return isinstance(value, Tensor) and value.numel() * value.element_size() > large_bytes


def cut(value: Tensor, rank: int, count: int, omit_empty: bool) -> list[tuple[torch.Size, Tensor]]:
    """Return a list with the rank's chunk; an empty list if the rank has none."""
    chunks = value.reshape(-1).chunk(count)
    if rank < len(chunks):
        return [(value.shape, chunks[rank].clone())]
    return [] if omit_empty else [(value.shape, value.new_empty(0))]


def write(
    directory: Path,
    models: list[State],
    optimizers: list[State] = [],
    others: State | None = None,
    *,
    count: int = 1,
    large_bytes: int = 256 * 2**20,
    omit_empty: bool = True,
) -> None:
    """Write `count` parts. Models and optimizers are state dicts of whole tensors."""
    directory.mkdir(exist_ok=True)
    for rank in range(count):
        part: dict[str, Any] = {"__nshards__": count, "__version__": "2.0.0", "model": [], "optimizer": []}
        for model in models:
            whole, chunks = OrderedDict(), {}
            for i, (name, value) in enumerate(model.items()):
                if is_large(value, large_bytes):
                    chunks.update({name: chunk for chunk in cut(value, rank, count, omit_empty)})
                elif i % count == rank:
                    whole[name] = value.clone()
            part["model"].append((whole, chunks))
        for optimizer in optimizers:
            state, chunks = {}, {}
            for i, (index, entry) in enumerate(optimizer["state"].items()):
                large = {key: value for key, value in entry.items() if is_large(value, large_bytes)}
                for key, value in large.items():
                    chunks.update({(index, key): chunk for chunk in cut(value, rank, count, omit_empty)})
                if i % count == rank:
                    state[index] = {key: value for key, value in entry.items() if key not in large}
            part["optimizer"].append(({**optimizer, "state": state}, chunks))
        torch.save(part | (others or {} if rank == 0 else {}), directory / f"PART_{rank:03d}.pt")


def read(directory: Path) -> dict[str, Any]:
    """Return "model", "optimizer", and all other keys at the top of part 0."""
    parts = [torch.load(path, weights_only=True) for path in sorted(directory.glob("PART_*.pt"))]
    assert all(part["__nshards__"] == len(parts) and part["__version__"] == "2.0.0" for part in parts)
    models, optimizers = [], []
    for i in range(len(parts[0]["model"])):
        model: State = {}
        for part in parts:
            model.update(part["model"][i][0])
        model.update(joined([part["model"][i][1] for part in parts]))
        models.append(model)
    for i in range(len(parts[0]["optimizer"])):
        optimizer = parts[0]["optimizer"][i][0]
        for part in parts[1:]:
            optimizer["state"].update(part["optimizer"][i][0]["state"])
        for (index, key), value in joined([part["optimizer"][i][1] for part in parts]).items():
            optimizer["state"][index][key] = value
        optimizers.append(optimizer)
    bare = [several[0] if len(several) == 1 else several for several in (models, optimizers)]
    return parts[0] | {"model": bare[0], "optimizer": bare[1]}


def joined(parts: list[dict[Any, Any]]) -> dict[Any, Tensor]:
    """Join tensors from their chunks, in the order of the parts."""
    keys = {key: None for chunks in parts for key in chunks}
    pairs = {key: [chunks[key] for chunks in parts if key in chunks] for key in keys}
    return {key: torch.cat([values for _, values in both]).view(both[0][0]) for key, both in pairs.items()}
