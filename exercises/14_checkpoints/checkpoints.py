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
from hwfsdp.checkpoint.plan import _refuse
from hwfsdp.checkpoint.saves import CURRENT, MANIFEST, _NEW, _current_bytes, _put_back
from hwfsdp.checkpoint.traverse import Path as KeyPath
from hwfsdp.layout.extents import compute_local_shape_and_global_offset

# The package's own, that the docstrings name:
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
    """The box that two parts of one tensor share.

    Both count from the tensor's first element, and have as many dims as it has: one or more, or none, if the tensor is a
    single number, which then is what they have in common. A box may be empty (0 along some dim).

    Returns:
        The box of the elements that are in both, in the same coordinates, a `Box` of two tuples; None if there are none.
    """
    # TODO(14)
    raise NotImplementedError


def within(box: Box, outer: Box) -> Box:
    """The same elements, counted from another origin.

    Args:
        box: counted from the tensor's first element. outer: the same; `box` lies in it.

    Returns:
        A box of the same shape whose offset is counted from the first element of `outer`: it cuts out of `outer`'s values
        (`outer_values[within(box, outer).slices]`) what `box` cuts out of the tensor.
    """
    # TODO(14)
    raise NotImplementedError


def find_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why the boxes do not tile a tensor of this shape, every element once; None if they do.

    A save asks this of the parts that its ranks have, a load of what a manifest says. So whatever it is given, it answers:
    boxes may come in any order, from different ranks and of different sizes, cut along any dims, none at all, or nonsense.
    There may be thousands, of tensors with billions of elements: count with integers, do not mark elements one by one.

    Args:
        shape: of the tensor; () of a single number, whose one part is `Box((), ())`. Elements: `prod(shape)`.
        boxes: counted from its first element. An empty box is a fault, too: it holds nothing and has no place.

    Returns:
        None, if every element is in exactly one box; else one phrase that names a box, or counts elements, such as
        "the part [4:6] outside the shape [5]" (`str` of a Box is such a bracket). It is a fault if a box has another number
        of dims than the tensor; if it does not lie within the shape; if two have an element in common (`find_overlap` finds
        such a pair among boxes within the shape); or if, all that being well, some elements are in none.
    """
    # TODO(14)
    raise NotImplementedError


def box_of(tensor: Tensor) -> Box | None:
    """Which part of the whole this rank has, counted from the first element of the whole.

    A save asks it of what it writes, a load of what it fills, each on its own mesh: whatever depends on the number of ranks
    is in here, and a checkpoint itself knows none.

    Args:
        tensor: a plain tensor, of which every rank has all; or a DTensor, of which this rank has what its placements say, on
            a mesh that this rank may not be in (`device_mesh.get_coordinate()` is then None).

    Returns:
        None if this rank has no element: it is not in the mesh, its shard is empty, or the tensor has no elements at all.
        Otherwise a `Box` of two tuples (not lists: boxes are keys of dicts). Of a DTensor, `layout.
        compute_local_shape_and_global_offset(shape, mesh, placements)` gives shape and offset, in this order, for any
        number of cuts, even or not. Padding is no part of either.
    """
    # TODO(14)
    raise NotImplementedError


def _holders_of(path: KeyPath, by_rank: list[dict[str, Any]]) -> dict[tuple[KeyPath, Box], list[int]]:
    """List which ranks have which part of one tensor. Check that copies are equal, and that the parts make up the whole.

    The leader of a save calls it for every tensor. What comes out decides who writes: each box once, by one of its ranks.

    Args:
        path: of the tensor in the state dict.
        by_rank: what each rank says of the tensor, in the order of ranks, as JSON: "shape", a list, the same on all; "box",
            [offset, shape], two lists, or None if the rank has nothing of it; where other ranks may have the same box
            (replicas), "crc32", a checksum of its bytes, which is left out otherwise.

    Returns:
        By (path, box), the ranks that have the box, in their order. Boxes are `Box`es of tuples, in the order in which they
        are met; those that several ranks have are there once.

    Raises:
        UsageError: by `_refuse(path, expected, got)`, which raises it. Two ranks have the same box with different
            checksums: `got` shows both, in decimal or hexadecimal digits. Or the distinct boxes do not tile the shape: `got`
            is what `find_fault(shape, boxes)` says.
    """
    # TODO(14)
    raise NotImplementedError


def needs_of(matched: Match) -> Iterator[Need]:
    """List what this rank reads, from which chunks, and where it goes.

    This is where a save of W ranks meets a load on W': chunks are cut as the saving ranks had the tensor, `box_of` a target
    says what this rank has of it now, and only what is in both is read.

    Args:
        matched: `matched.tensors` holds, by path, every target of which this rank has a part;
            `matched.manifest.entries[path]` is the saved tensor of the same path. Which chunks that has,
            `matched.manifest.chunks_of(entry)` knows: a tensor that was one object with another at the save lists none
            itself.

    Returns:
        One after the other, in any order, a `Need(entry, chunk, box, shared)` for each pair of a target and a chunk that have
        elements in common, for others none. `entry`: the `TensorEntry` at the path of the target. `chunk`: one of the
        `Chunk`s of that tensor, whose part of it is `chunk.box`. `box`: what `box_of` says of the target. `shared`: what
        `box` and `chunk.box` have in common. All three boxes count from the first element of the whole tensor. The `shared`
        of one target tile its `box`.
    """
    # TODO(14)
    raise NotImplementedError


def finish(path: Path, save_id: str, manifest: bytes, digest: str) -> None:
    """Bring manifest and name to the disk, then let the save count: the commit.

    The leader calls it when the data files of all ranks are in `path / save_id`, their bytes on the disk, but neither the
    names of these files nor that of the folder. The process may be killed between any two operations, and the machine may
    lose its power. A file then has at least the bytes that it had at its last fsync, and a directory at least the names that
    it had at its own; of what came later, any part may be lost. Whenever that happens, a load finds either the save that
    counted before, all of it, or the new one, all of it. When this function has returned, it is the new one.

    What there is to do:
        `MANIFEST` in the folder holds `manifest`. A folder in which a file of this name exists passes for a finished save:
        so the name appears (`os.replace`) when all bytes are on the disk under another name. The folder then has the data
        files and the manifest, and nothing else.
        `CURRENT` in `path` holds `_current_bytes(save_id, digest)`. It is replaced in one step, by the file `_NEW` in
        `path`, and when nothing that it stands for can be lost any more. A save that died may have left a `_NEW`, which
        has to go: `blocks.write_small_file(path, data)` writes and fsyncs a file that is not there yet.
        Names get to the disk by `blocks.sync_directory` of the directory that holds them.

    Args:
        path: of the checkpoint. save_id: the name of the new save's folder in it. manifest: its text. digest: the SHA-256
            of the manifest, for `CURRENT`.

    Raises:
        OSError: the disk failed. The save from before counts, and if there was none, there is no `CURRENT`: after a failure
            of the last step, which makes the replaced name last, `_put_back(path, before)` sees to that, with the bytes that
            `CURRENT` had before it was replaced, or None.
    """
    # TODO(14)
    raise NotImplementedError
