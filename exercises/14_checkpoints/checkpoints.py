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
    # TODO(14)
    raise NotImplementedError


def within(box: Box, outer: Box) -> Box:
    """Return the same box, counted from the first element of `outer`, in which it lies."""
    # TODO(14)
    raise NotImplementedError


def find_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Say in one phrase why the boxes do not cover a tensor of this shape, each element once; None if they do.

    The phrase names a box or counts elements: "the part [4:6] outside the shape [5]" (`str` of a Box gives the brackets). Boxes come in
    any order. They may be wrong in any way: in size, in place, in the number of dims. An empty box is a fault. There may be
    thousands of boxes, with billions of elements.
    """
    # TODO(14)
    raise NotImplementedError


def box_of(tensor: Tensor) -> Box | None:
    """Return the part of the whole tensor that this rank has; None if the part is empty, or this rank is outside the tensor's mesh.

    Every rank has all of a plain tensor. Padding belongs to no part. `offset` and `shape` of the box are tuples.
    """
    # TODO(14)
    raise NotImplementedError


def _holders_of(path: KeyPath, by_rank: list[dict[str, Any]]) -> dict[tuple[KeyPath, Box], list[int]]:
    """List which ranks have which part of one tensor: (path, box) to ranks. Parts and ranks are in the order of ranks.

    Args:
        by_rank: of each rank, "shape" (the caller has checked that all are equal), "box" ([offset, shape], or None) and, if the box
            may have replicas, "crc32" of its bytes.

    Raises:
        UsageError: copies of one box have different checksums (the error tells both), or the boxes do not make up the shape.
    """
    # TODO(14)
    raise NotImplementedError


def needs_of(matched: Match) -> Iterator[Need]:
    """List what this rank reads: a part of a chunk for each target and chunk of the same path that have elements in common.

    Together, the parts for one target make up its `box_of`.
    """
    # TODO(14)
    raise NotImplementedError


def finish(path: Path, save_id: str, manifest: bytes, digest: str) -> None:
    """Commit the save: write its manifest, then let `CURRENT` name it. The data files are in `path / save_id`; their names may be lost.

    At every moment, also after a power cut, a load must find the whole old save or the whole new one; on return, the new one. A
    power cut may undo everything except the bytes of a file and the names in a folder at their last fsync.

    Raises:
        OSError: the disk failed. Then the save from before still counts; if there was none, none counts.
    """
    # TODO(14)
    raise NotImplementedError
