"""Values of a save, read into new memory. Every byte is compared with its checksum.

Note [From boxes to bytes]
    A chunk lies in its file row by row. A rank needs a box of it, which may be scattered over the chunk, as columns are. So a
    box is halved along its outermost dim until each piece spans few bytes. Then the blocks that hold the span are read and
    checked, and the piece is cut out of them. If a whole chunk goes to one place in memory, for example with the same world
    size as in the save, it is read directly into this place.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hwfsdp.checkpoint import matching
from hwfsdp.checkpoint.blocks import BlockReader, check_header, open_file
from hwfsdp.checkpoint.boxes import Box, pieces_of, span_of, strides_of, within
from hwfsdp.checkpoint.manifest import ALIGNMENT, Chunk, Manifest, TensorEntry, header_of, name_of
from hwfsdp.checkpoint.matching import Match, Need
from hwfsdp.checkpoint.messages import KeyPath, refuse, show
from hwfsdp.checkpoint.plan import box_of
from hwfsdp.checkpoint.tensors import bytes_of, identity_of, part_of
from hwfsdp.checkpoint.views import overlaps_itself, view_of

_PIECE_BYTES = 4 << 20  # most bytes of one read
_THREADS = min(4, os.cpu_count() or 1)
_CAST_AT_ONCE = 1 << 20  # values that are checked at once after a cast


def read_tensors(match: Match, folder: Path, check: Callable[[], None]) -> dict[KeyPath, Tensor]:
    """Read this rank's part of every tensor: dense, on the CPU, in the dtype of its target.

    Args:
        check: called before each piece; may raise an error to stop the reading.

    Raises:
        CheckpointError: a file is missing, of another save, cut short, damaged, or cannot be read.
        UsageError: the target's dtype cannot hold a value, or targets that share memory would get different values.
    """
    with ExitStack() as opened:
        readers = Readers(match.manifest, folder, opened)
        parts = _rooms_for(match)
        jobs: list[Callable[[], None]] = []
        for need in matching.needs_of(match):
            jobs += _jobs(readers.of(need.entry, need.chunk), need, parts[need.entry.path])
        with ThreadPoolExecutor(_THREADS) as pool:

            def run(job: Callable[[], None]) -> None:
                check()
                job()

            for _ in pool.map(run, jobs):
                pass
    for path in parts:  # one after the other, so that the memory of each is freed before the next cast
        parts[path] = _cast(path, parts[path], match.tensors[path].dtype)
    _check_overlaps(match, parts)
    return parts


def _rooms_for(match: Match) -> dict[KeyPath, Tensor]:
    """Allocate memory for every part, in the dtype that was saved.

    All parts share one piece of memory, in large pages if the system has them: allocating 64 MiB in small pages takes as long as
    reading and checking 64 MiB. Parts that will be cast get memory of their own, so that each can be freed after its cast. Targets
    that hold no values yet need no new memory: the values are read directly into them.
    """
    rooms = _rooms_in_place(match)
    together: dict[KeyPath, tuple[int, Box]] = {}
    end = 0
    for path, target in match.tensors.items():
        if path in rooms:
            continue
        dtype, box = match.manifest.tensor(path).dtype, box_of(target)
        assert box is not None
        if dtype != target.dtype:
            rooms[path] = torch.empty(box.shape, dtype=dtype)
            continue
        together[path] = end, box
        end += -(-box.numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    if together:
        memory = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        every = torch.frombuffer(memory, dtype=torch.uint8)
        for path, (start, box) in together.items():
            dtype = match.tensors[path].dtype
            rooms[path] = every[start : start + box.numel * dtype.itemsize].view(dtype).view(box.shape)
    return rooms


def _rooms_in_place(match: Match) -> dict[KeyPath, Tensor]:
    """Return the fresh targets that values can be read into: dense, on the CPU, of the saved dtype, and not partly overlapping."""
    fresh = {path: part_of(match.tensors[path]) for path in match.fresh & match.tensors.keys()}
    shared = {_storage_of(fresh[paths[0]]) for paths in _overlapping(match, fresh)}
    return {
        path: part
        for path, part in fresh.items()
        if part.is_cpu and part.is_contiguous() and part.dtype == match.manifest.tensor(path).dtype
        if _storage_of(part) not in shared
    }


class Readers:
    """Open files of a save. Each file is opened and its header checked once. `opened` closes them."""

    def __init__(self, manifest: Manifest, folder: Path, opened: ExitStack) -> None:
        self.manifest, self.folder, self.opened = manifest, folder, opened
        self.fds: dict[int, int] = {}

    def open(self, index: int) -> int:
        """Return a descriptor of the file with this index."""
        if index not in self.fds:
            path = self.folder / name_of(index)
            fd = open_file(path, self.manifest.files[index])
            self.opened.callback(os.close, fd)
            check_header(fd, path, header_of(self.manifest.save_id, index))
            self.fds[index] = fd
        return self.fds[index]

    def of(self, entry: TensorEntry, chunk: Chunk) -> BlockReader:
        fd, path = self.open(chunk.file), self.folder / name_of(chunk.file)
        nbytes, key = chunk.box.numel * entry.dtype.itemsize, show(entry.path)
        return BlockReader(fd, path, chunk.at, nbytes, chunk.crc32, self.manifest.block_bytes, key)


def _jobs(reader: BlockReader, need: Need, part: Tensor) -> Iterator[Callable[[], None]]:
    """Yield functions that read the elements that a chunk and this rank's box share (Note [From boxes to bytes])."""
    chunk, itemsize = need.chunk.box, part.dtype.itemsize
    first, last = span_of(within(need.shared, need.box), need.box.shape)
    if need.shared == chunk and last - first == chunk.numel:
        memory = _memory(part)[first * itemsize : last * itemsize]
        step = max(1, _PIECE_BYTES // reader.block_bytes) * reader.block_bytes
        for start in range(0, len(memory), step):
            yield partial(reader.read, memory[start : start + step], start)
        return
    for piece in pieces_of(within(need.shared, chunk), chunk.shape, max(1, _PIECE_BYTES // itemsize)):
        yield partial(_read_piece, reader, need, piece, part)


def _read_piece(reader: BlockReader, need: Need, piece: Box, part: Tensor) -> None:
    """Read one piece, which is a box within the chunk, into its place."""
    chunk, itemsize = need.chunk.box, part.dtype.itemsize
    first, last = span_of(piece, chunk.shape)
    start, stop = reader.covering(first * itemsize, last * itemsize)
    buffer = torch.empty(stop - start, dtype=torch.uint8)
    reader.read(_memory(buffer), start)
    values = buffer.view(part.dtype)
    found = values.as_strided(piece.shape, strides_of(chunk.shape), first - start // itemsize)
    offset = tuple(a + b for a, b in zip(piece.offset, chunk.offset))
    part[within(Box(offset, piece.shape), need.box).slices] = found


def _memory(dense: Tensor) -> memoryview:
    return dense.view(-1).view(torch.uint8).numpy().data


def _cast(path: KeyPath, part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values in another dtype. Raise an error if a value changes by more than rounding."""
    if part.dtype == dtype:
        return part
    cast = part.to(dtype)
    for values, new in zip(part.view(-1).split(_CAST_AT_ONCE), cast.view(-1).split(_CAST_AT_ONCE)):
        lost = _lost(values, new) if dtype.is_floating_point or dtype.is_complex else _outside(values, dtype)
        if bool(lost.any()):
            value = values[int(lost.nonzero()[0])].item()
            refuse(
                path, f"values that {dtype} can hold", f"{value}", "Load into a tensor of the saved dtype."
            )
    return cast


def _lost(values: Tensor, new: Tensor) -> Tensor:
    """Find the finite values that the other floating-point dtype cannot hold: they become infinite, stop at its limit, or change sign."""
    wide, limits = torch.complex128 if new.is_complex() else torch.float64, torch.finfo(new.dtype)
    before, after = values.to(wide), new.to(wide)
    if new.is_complex():
        before, after = torch.view_as_real(before), torch.view_as_real(after)
    far = (before.abs() > limits.max * (1 + limits.eps)) | ~after.isfinite() | (before * after < 0)
    lost = before.isfinite() & far
    return lost.any(-1) if new.is_complex() else lost


def _outside(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Find the integers that the integer dtype `dtype` cannot hold."""
    # As int64, a uint64 of 2**63 or more is negative. No other integer dtype holds such values.
    unsigned = values.dtype == torch.uint64
    whole, limits = values.view(torch.int64) if unsigned else values.long(), torch.iinfo(dtype)
    lowest = 0 if unsigned else limits.min
    return (whole < lowest) | (whole > min(limits.max, torch.iinfo(torch.int64).max))


def _check_overlaps(found: Match, parts: dict[KeyPath, Tensor]) -> None:
    """Raise an error if targets that share memory would get different values. Try this on a copy of the memory."""
    for paths in _overlapping(found, parts):
        targets = {path: part_of(found.tensors[path]) for path in paths}
        copy = targets[paths[0]].untyped_storage().clone()
        trial = {}
        for path, local in targets.items():
            view = torch.empty(0, dtype=local.dtype, device=local.device)
            view.set_(copy, local.storage_offset(), local.shape, local.stride())
            trial[path] = view.conj() if local.is_conj() else view
            trial[path].copy_(parts[path])
        for path, view in trial.items():
            if not torch.equal(bytes_of(view.cpu()), bytes_of(parts[path])):
                got = "values for the same memory, which differ"
                refuse(path, "memory of its own, or the values of what shares it", got, "Pass a clone of it.")


def _overlapping(match: Match, paths: Iterable[KeyPath]) -> list[list[KeyPath]]:
    """List the distinct targets of each storage in which two elements, of one target or of two, may be in the same place."""
    by_storage: dict[int, dict[Any, KeyPath]] = {}
    for path in paths:
        local = part_of(match.tensors[path])
        by_storage.setdefault(_storage_of(local), {}).setdefault(identity_of(local), path)
    found = []
    for distinct in by_storage.values():
        views = [view_of(part_of(match.tensors[path])) for path in distinct.values()]
        views.sort(key=lambda view: view[:2])
        neighbors = zip(views, views[1:])
        if any(map(overlaps_itself, views)) or any(one.end > other.begin for one, other in neighbors):
            found.append(list(distinct.values()))
    return found


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
