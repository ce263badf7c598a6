"""The plan of a save: each rank's part of a state dict, and the whole that the parts make up.

Every rank describes its tensors and values as JSON (`describe`). The leader compares the descriptions, since a checkpoint holds
one state dict and not one for each rank. Then it assigns every box to one of the ranks that have it (`divide`): the largest box
first, each to the rank with the fewest bytes so far. The result is the manifest, still without checksums.

Note [Replicas are compared]
    If several ranks hold the same part, one of them writes it. If their copies differ, something went wrong long before the
    save, such as a forgotten reduction or weights from different seeds. A checkpoint with one rank's copy would hide this. So a
    rank also sends checksums of parts that other ranks hold, too. If they differ, the error names the key and the ranks. Left out:
    DTensors of which ranks hold stripes (Note [Stripes] in `layout.stripes`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint.agreement import check_alike
from hwfsdp.checkpoint.boxes import Box, find_fault, intersection, slices_of, whole, within
from hwfsdp.checkpoint.manifest import ALIGNMENT, BLOCK_BYTES, Chunk, Entry, Manifest, TensorEntry, ValueEntry
from hwfsdp.checkpoint.messages import KeyPath, refusal, refuse, show
from hwfsdp.checkpoint.per_rank import find_per_rank, is_within
from hwfsdp.checkpoint.tensors import bytes_of, check_data, check_kind, identity_of, part_of
from hwfsdp.checkpoint.traverse import container_kind, containers_in, items_of, leaves_of
from hwfsdp.checkpoint.values import advice_for, dtype_named, encode
from hwfsdp.compat import is_shard
from hwfsdp.layout.extents import compute_local_shape_and_global_offset
from hwfsdp.layout.stripes import are_striped, stripes_of


@dataclass
class LocalParts:
    """This rank's parts of a state dict.

    Attributes:
        description: everything that the leader needs to know, as JSON.
        tensors: by path, for each tensor of which this rank has a part: the part, and the boxes that it is made of (`pieces_of`).
    """

    description: dict[str, Any]
    tensors: dict[KeyPath, tuple[Tensor, list[tuple[Box, Box]]]]

    def bytes_of(self, path: KeyPath, box: Box) -> memoryview:
        """Return the bytes of a box that lies within a box of this rank's part."""
        part, pieces = self.tensors[path]
        outer, own = next(piece for piece in pieces if not box.numel or intersection(box, piece[0]))
        return view_bytes(part[own.slices][within(box, outer).slices])


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the values as bytes on the CPU, row-major. If the tensor's memory has this order already, it is a view; else a copy."""
    data = bytes_of(tensor.cpu())
    return data.numpy().data


def box_of(tensor: Tensor) -> Box | None:
    """Return the part of the whole tensor that this rank has; None if the part is empty, or this rank is outside the tensor's mesh.

    Every rank has all of a plain tensor. Padding belongs to no part. `offset` and `shape` of the box are tuples.
    """
    if not isinstance(tensor, DTensor):
        box = whole(tensor.shape)
    elif tensor.device_mesh.get_coordinate() is None:
        return None
    else:
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        box = Box(tuple(offset), tuple(shape))
    return box if box.numel else None


def pieces_of(tensor: Tensor) -> list[tuple[Box, Box]]:
    """Return the boxes that this rank has: each in the whole tensor, and in this rank's part. Only stripes are more than one.

    See Note [Stripes] in `layout.stripes`.
    """
    if not is_striped(tensor):
        box = box_of(tensor)
        return [] if box is None else [(box, whole(box.shape))]
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    stripes = stripes_of(tensor.shape, mesh.shape, tensor.placements, coordinate) if coordinate else []
    return [(Box(offset, shape), Box(at, shape)) for shape, offset, at in stripes]


def is_striped(tensor: Tensor) -> TypeGuard[DTensor]:
    """True if a rank may have several boxes of the tensor."""
    return isinstance(tensor, DTensor) and are_striped(tensor.device_mesh.shape, tensor.placements)


# --- Describing --------------------------------------------------------------------------------------------


def describe(state_dict: Mapping[Any, Any], world_size: int, rank: int = 0) -> LocalParts:
    """Describe this rank's part of a state dict. What is inside a `PerRank` is described apart, as "own".

    Raises:
        UsageError: a checkpoint cannot hold a key, value or tensor; the message names it.
        UnsupportedError: a tensor is not strided, or has no memory of its own.
    """
    if not isinstance(state_dict, Mapping):
        refuse("save", "a state dict or a module", type(state_dict).__name__, "Pass a dict.")
    per_rank = find_per_rank(state_dict, rank)
    entries: list[dict[str, Any]] = []
    own: list[dict[str, Any]] = []
    tensors: dict[KeyPath, tuple[Tensor, list[tuple[Box, Box]]]] = {}
    first: dict[Any, dict[str, Any]] = {}
    for path, value in leaves_of(state_dict):
        _check_keys(path)
        if items_of(value) is not None:  # a container without entries
            continue
        is_own = is_within(path, per_rank)
        entry: dict[str, Any] = {"path": path}
        (own if is_own else entries).append(entry)
        if not isinstance(value, Tensor):
            entry["value"] = _encoded(path, value)
            continue
        if is_own:
            _check_plain(path, value)
        check_data(path, value)
        check_kind(path, value)
        part, pieces, memory = part_of(value), pieces_of(value), identity_of(value)
        box = pieces[0][0] if pieces else None
        dtype = str(value.dtype).removeprefix("torch.")
        entry |= {"dtype": dtype, "shape": list(value.shape), "box": box}
        if is_striped(value):
            entry["stripes"] = [box for box, _ in pieces]
        if box is not None:
            tensors[path] = part, pieces  # for an alias, too: on other ranks it may be a separate tensor
            if memory in first:
                entry |= {**first[memory], "path": path, "alias": first[memory]["path"]}
            else:
                first[memory] = entry
                if not is_own and not is_striped(value) and _has_replicas(value, world_size):
                    entry["crc32"] = zlib.crc32(view_bytes(part))
    kinds = [[path, container_kind(tree)] for path, tree in containers_in(state_dict).items()]
    own_kinds = [kind for kind in kinds if is_within(tuple(kind[0]), per_rank)]
    shared = {"containers": [kind for kind in kinds if kind not in own_kinds], "entries": entries}
    return LocalParts({**shared, "own": {"containers": own_kinds, "entries": own}}, tensors)


def _check_plain(path: KeyPath, value: Tensor) -> None:
    if isinstance(value, DTensor):
        remedy = "Take it out of the PerRank: the parts of a DTensor belong to ranks already."
        refuse(path, "a plain tensor in a PerRank", "a DTensor", remedy)


def _check_keys(path: KeyPath) -> None:
    for n, key in enumerate(path):
        if type(key) not in (int, str):
            got = f"the {type(key).__name__} {key!r}"
            refuse(path[: n + 1], "keys that are str or int", got, "Rename it.")


def _encoded(path: KeyPath, value: Any) -> Any:
    try:
        json_value = encode(value)
        if isinstance(json_value, int):
            str(json_value)  # raises for very long ints: Python neither writes nor reads them
        return json_value
    except (TypeError, ValueError) as error:
        got = "too many digits" if isinstance(error, ValueError) else " ".join(str(value)[:80].split())
        expected = "a tensor, number, string, bool, bytes, None, or a dtype, device or size of torch"
        raise refusal(path, expected, f"{type(value).__name__}: {got}", advice_for(value)) from None


def _has_replicas(tensor: Tensor, world_size: int) -> bool:
    """True if another rank may have the same box."""
    if not isinstance(tensor, DTensor):
        return world_size > 1
    mesh = tensor.device_mesh
    copies = any(mesh.size(dim) > 1 for dim, p in enumerate(tensor.placements) if not is_shard(p))
    return copies or mesh.size() != world_size


# --- Dividing ----------------------------------------------------------------------------------------------


def divide(descriptions: list[dict[str, Any]], save_id: str) -> Manifest:
    """Make the manifest of everything that the ranks have together, without checksums. Rank i writes file i.

    Raises:
        UsageError: the ranks have different keys, values, shapes or dtypes; copies of a tensor differ; or the parts do not make
            up a tensor. The message names key and ranks.
    """
    check_alike([_listing(description) for description in descriptions], _REMEDY)
    containers = {tuple(path): kind for path, kind in descriptions[0]["containers"]}
    entries: dict[KeyPath, Entry] = {}
    holders: dict[tuple[KeyPath, Box], list[int]] = {}
    for i, first in enumerate(descriptions[0]["entries"]):
        path = tuple(first["path"])
        if "value" in first:
            entries[path] = ValueEntry(path, first["value"])
            continue
        by_rank = [description["entries"][i] for description in descriptions]
        same_as = _alias_of(by_rank)
        entries[path] = TensorEntry(path, dtype_named(first["dtype"]), tuple(first["shape"]), same_as=same_as)
        if same_as is None:
            # A rank with stripes counts as a rank for each stripe.
            each = [
                (rank, {**e, "box": box})
                for rank, e in enumerate(by_rank)
                for box in e.get("stripes", [e["box"]])
            ]
            found = _holders_of(path, [entry for _, entry in each])
            holders.update({box: [each[n][0] for n in ranks] for box, ranks in found.items()})
    for rank, description in enumerate(descriptions):
        containers |= {tuple(path): kind for path, kind in description["own"]["containers"]}
        for entry in description["own"]["entries"]:
            path = tuple(entry["path"])
            if "value" in entry:
                entries[path] = ValueEntry(path, entry["value"])
                continue
            same_as, shape = tuple(entry.get("alias", ())) or None, tuple(entry["shape"])
            entries[path] = TensorEntry(path, dtype_named(entry["dtype"]), shape, same_as=same_as)
            if same_as is None and entry["box"] is not None:
                holders[path, Box(*map(tuple, entry["box"]))] = [rank]
    return _lay_out(Manifest(save_id, (), containers, entries), holders, len(descriptions))


def _alias_of(by_rank: list[dict[str, Any]]) -> KeyPath | None:
    """Return the path of another tensor that has the same memory, if this is so on every rank that has a part of it; else None."""
    aliases = {tuple(entry.get("alias", ())) for entry in by_rank if entry["box"] is not None}
    return (aliases.pop() or None) if len(aliases) == 1 else None


def _listing(description: dict[str, Any]) -> list[tuple[str, str]]:
    """List what must be the same on all ranks (`check_alike`). Only the boxes of tensors may differ."""
    kinds = [(show(tuple(path)), f"a {kind}") for path, kind in description["containers"]]
    return kinds + [(show(tuple(entry["path"])), _brief(entry)) for entry in description["entries"]]


def _brief(entry: dict[str, Any]) -> str:
    if "value" in entry:
        return f"the value {entry['value']!r}"
    return f"a tensor of shape {tuple(entry['shape'])} and {entry['dtype']}"


_REMEDY = "If it differs on purpose, wrap it in hwfsdp.checkpoint.PerRank, under the same key on all ranks. "
_REMEDY += "Otherwise find out why the ranks differ."


def _refuse(path: KeyPath, expected: str, got: str) -> None:
    """Raise UsageError: the ranks' parts of what is at `path` do not fit together."""
    refuse(path, expected, got, _REMEDY)


def _holders_of(path: KeyPath, by_rank: list[dict[str, Any]]) -> dict[tuple[KeyPath, Box], list[int]]:
    """List which ranks have which part of one tensor: (path, box) to ranks. Parts and ranks are in the order of ranks.

    Args:
        by_rank: of each rank, "shape" (the caller has checked that all are equal), "box" ([offset, shape], or None) and, if the box
            may have replicas, "crc32" of its bytes.

    Raises:
        UsageError: copies of one box have different checksums (the error tells both), or the boxes do not make up the shape.
    """
    holders: dict[tuple[KeyPath, Box], list[int]] = {}
    for rank, entry in enumerate(by_rank):
        if entry["box"] is None:
            continue
        box = Box(*map(tuple, entry["box"]))
        ranks = holders.setdefault((path, box), [])
        if ranks and by_rank[ranks[0]].get("crc32") != entry.get("crc32"):
            got = f"checksums {by_rank[ranks[0]].get('crc32', 0):08x} and {entry.get('crc32', 0):08x}"
            _refuse(path, f"the same values {box} on ranks {ranks[0]} and {rank}, as both have them", got)
        ranks.append(rank)
    fault = find_fault(by_rank[0]["shape"], [box for _, box in holders])
    if fault:
        _refuse(path, f"parts of {len(by_rank)} ranks that make up {tuple(by_rank[0]['shape'])}", fault)
    return holders


def _lay_out(manifest: Manifest, holders: dict[tuple[KeyPath, Box], list[int]], world_size: int) -> Manifest:
    """Return the manifest with a place in a rank's file for every box. Large boxes are divided among the ranks that have them."""

    def nbytes(item: tuple[KeyPath, Box]) -> int:
        return item[1].numel * manifest.tensor(item[0]).dtype.itemsize

    candidates: dict[tuple[KeyPath, Box], list[int]] = {}
    for (path, box), ranks in holders.items():
        parts = min(len(ranks), max(1, nbytes((path, box)) // BLOCK_BYTES))
        candidates.update({(path, part): ranks for part in slices_of(box, parts)})
    load = [0] * world_size
    chosen: dict[tuple[KeyPath, Box], int] = {}
    for item in sorted(candidates, key=lambda item: (len(candidates[item]) > 1, -nbytes(item))):
        # Boxes of a single rank come first, because they leave no choice.
        chosen[item] = min(candidates[item], key=lambda rank: load[rank])
        load[chosen[item]] += nbytes(item)
    ends = [ALIGNMENT] * world_size
    chunks: dict[KeyPath, list[Chunk]] = {}
    for item in candidates:
        file = chosen[item]
        at = -(-ends[file] // ALIGNMENT) * ALIGNMENT
        chunks.setdefault(item[0], []).append(Chunk(file, at, item[1]))
        ends[file] = at + nbytes(item)
    return replace(manifest.with_chunks(lambda entry: chunks.get(entry.path, ())), files=tuple(ends))


def shares_of(manifest: Manifest) -> list[list[tuple[TensorEntry, Chunk]]]:
    """Return the entries and chunks of each file, in the order of the file."""
    shares: list[list[tuple[TensorEntry, Chunk]]] = [[] for _ in manifest.files]
    for entry in manifest.tensors():
        for chunk in entry.chunks:
            shares[chunk.file].append((entry, chunk))
    return [sorted(share, key=lambda pair: pair[1].at) for share in shares]
