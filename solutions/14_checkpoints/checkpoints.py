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

# Names of the package that may help:
#
# hwfsdp.checkpoint.boxes
#     class      Box(offset: tuple[int, ...], shape: tuple[int, ...])
#                  A part of a tensor: the index of its first element, and its shape.
#     property   Box.slices -> tuple[slice, ...]
#                  The slices that cut the box out of the whole tensor.
#     function   find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None
#                  Return two boxes of one tensor that have an element in common; None if there are none.
# hwfsdp.layout.extents
#     function   compute_local_shape_and_global_offset(global_shape: Sequence[int], mesh: DeviceMesh,
#                    placements: Sequence[Placement], skip_offset: bool = False) -> tuple[tuple[int, ...],
#                    tuple[int, ...]]
#                  Return (shape, offset) of this rank's part (`local_extent_of`), or ((0,), ()) if this rank
#                  is not in the mesh.
# hwfsdp.checkpoint.plan
#     function   _refuse(path: KeyPath, expected: str, got: str) -> None
#                  Raise UsageError: the ranks' parts of what is at `path` do not fit together.
# hwfsdp.checkpoint.matching
#     class      Match(manifest: Manifest, tensors: dict[KeyPath, Tensor] = …, values: dict[KeyPath, Any] = …,
#                    fresh: set[KeyPath] = …, striped: dict[KeyPath, DTensor] = …, left_out: str = '',
#                    common: bool = True)
#                  The entries to read, and their places.
#     class      Need(entry: TensorEntry, chunk: Chunk, box: Box, shared: Box)
#                  The part of one saved chunk that this rank needs. All boxes count from the first element of
#                  the whole tensor.
# hwfsdp.checkpoint.manifest
#     attribute  Manifest.entries: dict[KeyPath, Entry]
#     method     Manifest.chunks_of(entry: TensorEntry) -> tuple[Chunk, ...]
#                  Return the chunks of a tensor. If the tensor is the same as another one, the other entry
#                  lists them.
#     class      TensorEntry(path: KeyPath, dtype: torch.dtype, shape: tuple[int, ...], chunks: tuple[Chunk,
#                    ...] = (), same_as: KeyPath | None = None)
#                  A tensor; its chunks tile it. `same_as`: the path of another entry whose tensor was the
#                  same object at the save, or None.
#     class      Chunk(file: int, at: int, box: Box, crc32: tuple[int, ...] = ())
#                  A part of a tensor and the bytes that hold it, row-major.
# hwfsdp.checkpoint.saves
#     constant   MANIFEST = 'manifest.json'
#     constant   CURRENT = 'CURRENT'
#     constant   _NEW = 'CURRENT.new'
#     function   _current_bytes(save_id: str, digest: str) -> bytes
#                  Return what `CURRENT` holds: the id of the save that counts, and the SHA-256 of its
#                  manifest.
#     function   _put_back(path: Path, before: bytes | None) -> None
#                  Undo the last step of a save, as far as possible on a disk that has just failed.
# hwfsdp.checkpoint.blocks
#     function   write_small_file(path: Path, data: bytes) -> None
#                  Write a new file and bring it to the disk.
#     function   sync_directory(path: Path) -> None
#                  Bring the names in a directory to the disk.


def intersection(one: Box, other: Box) -> Box | None:
    """Return the box of the elements that two parts of one tensor share; None if there are none. Parts may be empty, or without dims."""
    starts = tuple(max(a, b) for a, b in zip(one.offset, other.offset))
    ends = [min(a + n, b + m) for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape)]
    shape = tuple(end - start for start, end in zip(starts, ends))
    return Box(starts, shape) if all(n > 0 for n in shape) else None


def within(box: Box, outer: Box) -> Box:
    """Return the same box, counted from the first element of `outer`, in which it lies."""
    return Box(tuple(a - b for a, b in zip(box.offset, outer.offset)), box.shape)


def find_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Say in one phrase why the boxes do not cover a tensor of this shape, each element once; None if they do.

    The phrase names a box or counts elements: "the part [4:6] outside the shape [5]" (`str` of a Box gives the brackets). Boxes come in
    any order. They may be wrong in any way: in size, in place, in the number of dims. An empty box is a fault. There may be
    thousands of boxes, with billions of elements.
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


def finish(path: Path, save_id: str, manifest: bytes, digest: str) -> None:
    """Commit the save: write its manifest, then let `CURRENT` name it. The data files are in `path / save_id`; their names may be lost.

    At every moment, also after a power cut, a load must find the whole old save or the whole new one; on return, the new one. A
    power cut may undo everything except the bytes of a file and the names in a folder at their last fsync.

    Raises:
        OSError: the disk failed. Then the save from before still counts; if there was none, none counts.
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
