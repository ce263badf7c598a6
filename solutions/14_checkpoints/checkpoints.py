"""Exercise 14: Checkpoints"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint import blocks
from hwfsdp.checkpoint.boxes import Box, find_overlap, whole
from hwfsdp.checkpoint.manifest import TensorEntry
from hwfsdp.checkpoint.matching import Match, Need
from hwfsdp.checkpoint.messages import KeyPath
from hwfsdp.checkpoint.plan import _refuse
from hwfsdp.checkpoint.saves import CURRENT, MANIFEST, _NEW, _current_bytes, _put_back
from hwfsdp.layout.extents import compute_local_shape_and_global_offset

# Names of the package that the docstrings mention:
#
# hwfsdp.checkpoint.boxes
#     class      Box(offset: tuple[int, ...], shape: tuple[int, ...])
#     property   Box.slices -> tuple[slice, ...]
#     function   find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None
# hwfsdp.layout.extents
#     function   compute_local_shape_and_global_offset(global_shape: Sequence[int], mesh: DeviceMesh,
#                    placements: Sequence[Placement], skip_offset: bool = False) -> tuple[tuple[int, ...],
#                    tuple[int, ...]]
# hwfsdp.checkpoint.plan
#     function   _refuse(path: KeyPath, expected: str, got: str) -> None
# hwfsdp.checkpoint.matching
#     class      Match(manifest: Manifest, tensors: dict[KeyPath, Tensor] = …, values: dict[KeyPath, Any] = …,
#                    fresh: set[KeyPath] = …)
#     class      Need(entry: TensorEntry, chunk: Chunk, box: Box, shared: Box)
# hwfsdp.checkpoint.manifest
#     attribute  Manifest.entries: dict[KeyPath, Entry]
#     method     Manifest.chunks_of(entry: TensorEntry) -> tuple[Chunk, ...]
#     class      TensorEntry(path: KeyPath, dtype: torch.dtype, shape: tuple[int, ...], chunks: tuple[Chunk,
#                    ...] = (), same_as: KeyPath | None = None)
#     class      Chunk(file: int, at: int, box: Box, crc32: tuple[int, ...] = ())
# hwfsdp.checkpoint.saves
#     constant   MANIFEST = 'manifest.json'
#     constant   CURRENT = 'CURRENT'
#     constant   _NEW = 'CURRENT.new'
#     function   _current_bytes(save_id: str, digest: str) -> bytes
#     function   _put_back(path: Path, before: bytes | None) -> None
# hwfsdp.checkpoint.blocks
#     function   write_small_file(path: Path, data: bytes) -> None
#     function   sync_directory(path: Path) -> None


def intersection(one: Box, other: Box) -> Box | None:
    """Return the box that two parts of one tensor share.

    Both parts count from the tensor's first element. They have as many dims as the tensor: one or more, or none if the tensor
    is a single number, which they then both contain. A box may be empty (0 along some dim).

    Returns:
        The elements that are in both parts, in the same coordinates: a `Box` of two tuples. None if there are no such elements.
    """
    starts = tuple(max(a, b) for a, b in zip(one.offset, other.offset))
    ends = [min(a + n, b + m) for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape)]
    shape = tuple(end - start for start, end in zip(starts, ends))
    return Box(starts, shape) if all(n > 0 for n in shape) else None


def within(box: Box, outer: Box) -> Box:
    """Return the same elements, counted from another origin.

    Args:
        box: counted from the tensor's first element. outer: counted in the same way; `box` lies in it.

    Returns:
        A box of the same shape, whose offset is counted from the first element of `outer`. So
        `outer_values[within(box, outer).slices]` has the same elements as `box` has in the tensor.
    """
    return Box(tuple(a - b for a, b in zip(box.offset, outer.offset)), box.shape)


def find_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Say why the boxes do not make up a tensor of this shape, with every element once; None if they do.

    A save calls this for the parts that its ranks have, and a load for the parts in a manifest. So it must give an answer for any
    input: boxes in any order, from different ranks, of different sizes, cut along any dims, no boxes at all, or boxes that make
    no sense. There may be thousands of boxes, and tensors with billions of elements. So count with integers, and do not mark
    single elements.

    Args:
        shape: of the tensor, which has `prod(shape)` elements. A single number has the shape (), and its one part is
            `Box((), ())`.
        boxes: counted from the tensor's first element. An empty box is a fault, too: it holds nothing and has no place.

    Returns:
        None if every element is in exactly one box. Otherwise one phrase that names a box or counts elements, such as
        "the part [4:6] outside the shape [5]" (`str` of a Box gives the brackets). There is a fault if

        - a box has a different number of dims than the tensor,
        - a box does not lie within the shape,
        - two boxes have an element in common (`find_overlap` finds such a pair among boxes within the shape),
        - none of these, but some elements are in no box.
    """
    for box in boxes:
        if len(box.shape) != len(shape) or len(box.offset) != len(shape):
            return f"a part with {len(box.shape)} dims of a tensor with {len(shape)}"
        if not all(0 <= a and 0 < n and a + n <= size for a, n, size in zip(box.offset, box.shape, shape)):
            return f"the part {box} outside the shape {list(shape)}"
    pair = find_overlap(boxes)
    if pair:
        return f"the parts {pair[0]} and {pair[1]}, which overlap"
    covered = sum(box.numel for box in boxes)
    return None if covered == prod(shape) else f"{covered} of {prod(shape)} elements"


def box_of(tensor: Tensor) -> Box | None:
    """Return the part of the whole tensor that this rank has, counted from the first element of the whole.

    A save calls this for what it writes, a load for what it fills, each on its own mesh. Everything that depends on the number of
    ranks is in this function. A checkpoint itself does not depend on this number.

    Args:
        tensor: a plain tensor, of which every rank has everything; or a DTensor, of which this rank has the part that the
            placements say. This rank may be outside the DTensor's mesh; then `device_mesh.get_coordinate()` is None.

    Returns:
        None if this rank has no element: it is not in the mesh, its shard is empty, or the tensor has no elements at all.
        Otherwise a `Box` of two tuples (not lists, because boxes are keys of dicts). For a DTensor,
        `layout.compute_local_shape_and_global_offset(shape, mesh, placements)` gives the shape and the offset, in this order,
        for any number of cuts, even or not. Neither of the two includes padding.
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


def _holders_of(path: KeyPath, by_rank: list[dict[str, Any]]) -> dict[tuple[KeyPath, Box], list[int]]:
    """List which ranks have which part of one tensor. Check that copies are equal, and that the parts make up the whole.

    The leader of a save calls this for every tensor. The result decides which rank writes a box: each box is written once, by one
    of its ranks.

    Args:
        path: of the tensor in the state dict.
        by_rank: the description of the tensor by each rank, in the order of ranks, as JSON: "shape", a list, the same on all;
            "box", [offset, shape], two lists, or None if the rank has no part of it. If other ranks may have the same box
            (replicas), there is also "crc32", a checksum of the box's bytes.

    Returns:
        A dict from (path, box) to the ranks that have the box, in their order. The boxes are `Box`es of tuples, in the order of
        their first rank. A box that several ranks have is there once.

    Raises:
        UsageError: call `_refuse(path, expected, got)`, which raises it, in two cases. Two ranks have the same box with
            different checksums: `got` shows both, in decimal or hexadecimal digits. Or the distinct boxes do not make up the
            shape: `got` is the answer of `find_fault(shape, boxes)`.
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


def needs_of(matched: Match) -> Iterator[Need]:
    """List the parts that this rank reads: from which chunk, and for which place.

    Here a save of W ranks meets a load on W' ranks. A chunk is a part that a saving rank had. `box_of` a target is the part
    that this rank has now. The rank reads only what is in both.

    Args:
        matched: `matched.tensors` holds, by path, every target of which this rank has a part.
            `matched.manifest.entries[path]` is the saved tensor of the same path, and
            `matched.manifest.chunks_of(entry)` returns its chunks. (If two tensors were one object at the save, one of them
            lists no chunks itself.)

    Returns:
        An iterator over one `Need(entry, chunk, box, shared)` for each pair of a target and a chunk that have elements in common,
        in any order. Other pairs give nothing. `entry`: the `TensorEntry` at the path of the target. `chunk`: one of the `Chunk`s
        of this tensor; its part of the tensor is `chunk.box`. `box`: the `box_of` the target. `shared`: the elements that `box`
        and `chunk.box` have in common. All three boxes count from the first element of the whole tensor. Together, the `shared`
        boxes of one target make up its `box`.
    """
    for path, target in matched.tensors.items():
        entry, box = matched.manifest.entries[path], box_of(target)
        assert isinstance(entry, TensorEntry) and box is not None
        for chunk in matched.manifest.chunks_of(entry):
            shared = intersection(box, chunk.box)
            if shared:
                yield Need(entry, chunk, box, shared)


def finish(path: Path, save_id: str, manifest: bytes, digest: str) -> None:
    """Commit the save: bring the manifest and the names to the disk, then let the save count.

    The leader calls this when the data files of all ranks are in `path / save_id`. Their bytes are on the disk, but their names
    and the name of the folder are not. Between any two operations, the process may be killed, or the machine may lose power.
    After a power cut, a file has at least the bytes that it had at its last fsync, and a directory has at least the names that it
    had at its own last fsync. Any later change may be lost. At every moment, a load must find either the whole save that counted
    before, or the whole new save. After this function has returned, it must find the new save.

    What to do:
        Write `manifest` to the file `MANIFEST` in the folder. A folder that has a file of this name counts as a finished
        save. So first write all bytes under another name and bring them to the disk; then give the file its name
        (`os.replace`). At the end, the folder has the data files and the manifest, and nothing else.
        Then make `CURRENT` in `path` hold `_current_bytes(save_id, digest)`. Replace it in one operation, by the file `_NEW`
        in `path`, and only when nothing that it refers to can be lost any more. A save that died may have left a `_NEW`.
        Remove it, because `blocks.write_small_file(path, data)`, which writes and fsyncs a file, needs a new name.
        `blocks.sync_directory` of a directory brings the names in this directory to the disk.

    Args:
        path: of the checkpoint. save_id: the name of the new save's folder in it. manifest: its text. digest: the SHA-256
            of the manifest, for `CURRENT`.

    Raises:
        OSError: the disk failed. Then the save from before must still count; if there was none, there must be no `CURRENT`.
            The last step brings the replaced name to the disk. If this step fails, call `_put_back(path, before)`, where
            `before` is the bytes that `CURRENT` had before you replaced it, or None.
    """
    folder = path / save_id
    blocks.write_small_file(folder / f"{MANIFEST}.new", manifest)
    os.replace(folder / f"{MANIFEST}.new", folder / MANIFEST)  # a manifest with this name is complete
    blocks.sync_directory(folder)
    (path / _NEW).unlink(missing_ok=True)
    blocks.write_small_file(path / _NEW, _current_bytes(save_id, digest))
    blocks.sync_directory(path)
    before = (path / CURRENT).read_bytes() if (path / CURRENT).is_file() else None
    os.replace(path / _NEW, path / CURRENT)
    try:
        blocks.sync_directory(path)
    except OSError:
        _put_back(path, before)
        raise
