"""A saved state dict and a state dict to fill: do they fit, which bytes does this rank need, and where do the bytes go?

`match` compares keys, shapes and dtypes, and changes nothing. `needs_of` lists the part of each chunk that this rank needs, and
`reading` reads these parts into new memory. `fill` puts the values in place. All checks have been done before `fill`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint.boxes import Box, intersection
from hwfsdp.checkpoint.manifest import Chunk, Manifest, TensorEntry, ValueEntry
from hwfsdp.checkpoint.messages import KeyPath, check_in_common, on_one_side, refuse, show
from hwfsdp.checkpoint.per_rank import find_per_rank, is_within
from hwfsdp.checkpoint.plan import box_of, is_striped
from hwfsdp.checkpoint.tensors import check_data, check_kind, check_writable, identity_of, part_of
from hwfsdp.checkpoint.traverse import child_of, container_kind, containers_in, items_of, leaves_of, rebuild
from hwfsdp.checkpoint.values import decode
from hwfsdp.layout.extents import shard_of


@dataclass
class Match:
    """The entries to read, and their places.

    Attributes:
        tensors: by path, each target tensor of which this rank has a part.
        values: by path, the new value of each entry that is not a tensor.
        fresh: paths of targets that hold no values yet, because they were on the meta device.
        striped: by path, the targets of which this rank holds stripes. In `tensors`, a whole tensor stands for each.
        left_out: the keys that only one side has, in words. common: True if a key is on both sides.
    """

    manifest: Manifest
    tensors: dict[KeyPath, Tensor] = field(default_factory=dict)
    values: dict[KeyPath, Any] = field(default_factory=dict)
    fresh: set[KeyPath] = field(default_factory=set)
    striped: dict[KeyPath, DTensor] = field(default_factory=dict)
    left_out: str = ""
    common: bool = True


# --- Matching ----------------------------------------------------------------------------------------------


def match(
    state_dict: Any, manifest: Manifest, *, strict: bool, allow_cast: bool, rank: int = 0, size: int = 1
) -> Match:
    """Compare the state dict with the save, and list what a load has to do.

    Args:
        rank, size: of the ranks that load. Each loads its own value of a `PerRank`.

    Raises:
        UsageError: the state dict and the save do not fit; see `store.load`.
    """
    if items_of(state_dict) is None or isinstance(state_dict, tuple):
        refuse("load", "a state dict", type(state_dict).__name__, "Pass a dict.")
    leaves = dict(leaves_of(state_dict))
    others, apart = _of_ranks(state_dict, manifest, rank, size, strict)
    containers = {
        path: tree for path, tree in containers_in(state_dict).items() if not is_within(path, apart)
    }
    _check_containers(
        {p: leaf for p, leaf in leaves.items() if not is_within(p, apart)}, containers, manifest
    )
    missing, unexpected = _on_one_side(leaves, manifest, others)
    missing += [path for path in leaves if is_within(path, apart) and path not in missing]
    common = len(missing) < len(leaves)
    left_out = on_one_side(list(map(show, missing)), list(map(show, unexpected)))
    check_in_common("load", left_out, strict, common or not strict, COMPARE)
    found = Match(manifest, left_out=left_out, common=common)
    for path in set(missing):
        leaves.pop(path)
    for path, target in leaves.items():
        entry = manifest.entries.get(path)
        if isinstance(entry, TensorEntry):
            _check_tensor(path, target, entry, allow_cast)
            if is_striped(target):  # read the whole, and cut it in `fill`
                found.striped[path] = target
                target = torch.empty(target.shape, dtype=target.dtype)
                found.fresh.add(path)
            if box_of(target) is not None:
                found.tensors[path] = target
        elif isinstance(entry, ValueEntry):
            if isinstance(target, Tensor):
                refuse(path, f"a tensor, as in the state dict, of shape {tuple(target.shape)}", str(entry))
            check_can_change(path, state_dict)
            found.values[path] = decode(entry.json_value)
    _check_ties(found)
    return found


def _check_containers(leaves: dict[KeyPath, Any], containers: dict[KeyPath, Any], manifest: Manifest) -> None:
    """Raise an error if a dict meets a sequence, or a container meets a leaf."""
    for path, tree in containers.items():
        saved = manifest.containers.get(path)
        if path in manifest.entries:
            refuse(path, f"a {type(tree).__name__}, as in the state dict", str(manifest.entries[path]))
        if saved is not None and (saved == "dict") != (container_kind(tree) == "dict"):
            refuse(path, f"a {type(tree).__name__}, as in the state dict", f"a {saved}")
    for path, leaf in leaves.items():
        if items_of(leaf) is None and path in manifest.containers:
            refuse(path, f"a {type(leaf).__name__}, as in the state dict", f"a {manifest.containers[path]}")


COMPARE = "Compare them with `hwfsdp checkpoint inspect`"


def _on_one_side(
    leaves: dict[KeyPath, Any], manifest: Manifest, others: set[KeyPath]
) -> tuple[list[KeyPath], list[KeyPath]]:
    """List the keys that only the state dict has, and those that only the save has. `others` are paths to values of other ranks."""

    def is_saved(path: KeyPath, leaf: Any) -> bool:
        return path in (manifest.entries if items_of(leaf) is None else manifest.containers)

    parents = {path[:-1] for path in [*manifest.entries, *manifest.containers] if path}
    empty = [path for path in manifest.containers if path and path not in parents]
    above = {path[:n] for path in leaves for n in range(len(path))}
    missing = [path for path, leaf in leaves.items() if path and not is_saved(path, leaf)]
    unexpected = [p for p in (*manifest.entries, *empty) if p not in leaves and p not in above]
    return missing, [p for p in unexpected if p not in others and not is_within(p, others)]


def _of_ranks(
    state_dict: Any, manifest: Manifest, rank: int, size: int, strict: bool
) -> tuple[set[KeyPath], list[KeyPath]]:
    """Return the paths to other ranks' values, and the paths of `PerRank`s that another number of ranks has saved.

    Raises UsageError for the latter if `strict` is set.
    """
    others, apart = set[KeyPath](), list[KeyPath]()
    for path in find_per_rank(state_dict, rank):
        n = len(path)
        saved = {p[n] for p in (*manifest.entries, *manifest.containers) if len(p) > n and p[:n] == path}
        if saved == set(range(size)):
            others |= {(*path, other) for other in saved - {rank}}
        elif saved:
            apart.append(path)
            if strict:
                expected, got = f"values of {size} ranks, as many as load", f"those of {len(saved)}"
                remedy = "Leave it out with strict=False, or load a dict {rank: value} and choose."
                refuse(path, expected, got, remedy)
    return others, apart


def check_can_change(path: KeyPath, state_dict: Any) -> None:
    """Raise an error if no container can take a new value at `path`. A tuple is made again, and the container above takes the new one."""
    above, holder, at = state_dict, state_dict, ()
    for n, key in enumerate(path):
        if not isinstance(above, tuple):
            holder, at = above, path[:n]
        above = child_of(above, key)
    if isinstance(holder, Mapping) and not hasattr(holder, "__setitem__"):
        got = f"the read-only {type(holder).__name__}"
        refuse(at, "a mapping that items can be assigned to", got, "Make it a dict.")


def _check_tensor(path: KeyPath, target: Any, entry: TensorEntry, allow_cast: bool) -> None:
    if not isinstance(target, Tensor):
        array = type(target).__name__ == "ndarray"
        remedy = "Load into torch.from_numpy(array), which shares the array's memory." if array else COMPARE
        refuse(path, f"a {type(target).__name__}, as in the state dict", str(entry), remedy)
    check_kind(path, target)
    check_data(path, target)
    if tuple(target.shape) != entry.shape:
        expected = f"shape {tuple(target.shape)}, as in the state dict"
        refuse(path, expected, f"shape {entry.shape} in the checkpoint")
    check_writable(path, target)
    if target.dtype != entry.dtype:
        expected, got = f"{target.dtype}, as in the state dict", f"{entry.dtype} in the checkpoint"
        if not allow_cast:
            refuse(path, expected, got, "Pass allow_cast=True if precision may be lost.")
        if _kind_of(entry.dtype) > _kind_of(target.dtype):
            refuse(path, expected, got, "No cast keeps such values; load into a tensor of the saved dtype.")


def _kind_of(dtype: torch.dtype) -> int:
    """Return 0 for bool, 1 for int, 2 for float, 3 for complex. Each kind can hold the values of lower kinds, with limited precision."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1


def _check_ties(found: Match) -> None:
    """Raise an error if one target tensor would get two different contents."""
    first: dict[Any, KeyPath] = {}
    for path, target in found.tensors.items():
        other = first.setdefault(identity_of(target), path)
        if other != path and _contents(found.manifest, path) != _contents(found.manifest, other):
            expected = f"the same values as for {show(other)}, as both are one tensor in the state dict"
            refuse(path, expected, "others in the checkpoint", "Untie them before loading.")


def _contents(manifest: Manifest, path: KeyPath) -> Any:
    entry = manifest.tensor(path)
    chunks = sorted((chunk.box, chunk.crc32) for chunk in manifest.chunks_of(entry))
    return entry.dtype, entry.shape, chunks


# --- What is needed -----------------------------------------------------------------------------------------


class Need(NamedTuple):
    """The part of one saved chunk that this rank needs. All boxes count from the first element of the whole tensor.

    Attributes:
        entry: the tensor, as the manifest lists it at the path of the target. chunk: one of its chunks.
        box: what this rank has of the target. shared: what of it the chunk holds; never empty.
    """

    entry: TensorEntry
    chunk: Chunk
    box: Box
    shared: Box


def needs_of(matched: Match) -> Iterator[Need]:
    """List what this rank reads: a part of a chunk for each target and chunk of the same path that have elements in common.

    Together, the parts for one target make up its `box_of`.
    """
    for path, target in matched.tensors.items():
        entry, box = matched.manifest.entries[path], box_of(target)
        assert isinstance(entry, TensorEntry) and box is not None
        for chunk in matched.manifest.chunks_of(entry):
            shared = intersection(box, chunk.box)
            if shared:
                yield Need(entry, chunk, box, shared)


# --- Filling -----------------------------------------------------------------------------------------------


@torch.no_grad()
def fill(state_dict: Any, match: Match, parts: dict[KeyPath, Tensor]) -> None:
    """Put the parts into the tensors of the state dict, and the values into their containers."""
    for path, part in parts.items():
        if identity_of(part_of(match.tensors[path])) != identity_of(part):  # equal: it was read in place
            part_of(match.tensors[path]).copy_(part)
    for path, target in match.striped.items():
        if path in match.tensors:
            part = shard_of(match.tensors[path], target.device_mesh, target.placements)
            part_of(target).copy_(part)
    put(state_dict, (), match.values)


def put(tree: Any, path: KeyPath, values: dict[KeyPath, Any]) -> Any:
    """Put new values into the container, and return it. If it cannot be changed, return a new container."""
    items = items_of(tree) or {}
    new = {}
    for key, child in items.items():
        at = (*path, key)
        if at in values:  # a whole container may be one value, as lists in DCP are
            new[key] = values[at]
        else:
            new[key] = child if items_of(child) is None else put(child, at, values)
    changed = {key: value for key, value in new.items() if value is not items[key]}
    if changed and isinstance(tree, tuple):
        return rebuild(tree, new)
    for key, value in changed.items():
        if hasattr(tree, "__setitem__"):
            tree[key] = value
        else:
            object.__setattr__(tree, key, value)
    return tree
