"""A saved state dict and one to be loaded into: whether they fit, which bytes are needed, and where they go.

`match` compares keys, shapes and dtypes and touches nothing. `read_tensors` reads every part that this rank needs into
new memory, no byte without its checksum. `fill` puts the values in place; by then nothing can go wrong any more.

Note [From boxes to bytes]
    A chunk lies in its file row by row. What a rank needs of it is a box, and that may be scattered over the chunk, as
    columns are. A box is therefore halved along its outermost dim until each piece spans few bytes; the blocks that
    hold the span are read, checked, and the piece is cut out of them. Where all of a chunk goes to one place in
    memory, as when the world size has not changed, it is read there at once.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hwfsdp.checkpoint.blocks import BlockReader, check_header, open_file
from hwfsdp.checkpoint.boxes import Box, intersection, pieces_of, span_of, strides_of, within
from hwfsdp.checkpoint.manifest import ALIGNMENT, Chunk, Manifest, TensorEntry, ValueEntry, header_of
from hwfsdp.checkpoint.plan import box_of, check_kind, identity_of, part_of
from hwfsdp.checkpoint.state_dict import bytes_of, check_data
from hwfsdp.checkpoint.traverse import Path as KeyPath
from hwfsdp.checkpoint.traverse import child_of, items_of, leaves_of, rebuild, show
from hwfsdp.checkpoint.values import decode
from hwfsdp.errors import UsageError

_PIECE_BYTES = 4 << 20  # of a span that is read at once
_THREADS = min(4, os.cpu_count() or 1)
_CAST_AT_ONCE = 1 << 20  # values


@dataclass
class Match:
    """What has to be read, and what has to be put where.

    Attributes:
        tensors: path to the target of every tensor of which this rank has a part.
        values: path to the new value of everything else.
        fresh: paths of targets that hold no values yet, because they were on the meta device.
    """

    manifest: Manifest
    tensors: dict[KeyPath, Tensor] = field(default_factory=dict)
    values: dict[KeyPath, Any] = field(default_factory=dict)
    fresh: set[KeyPath] = field(default_factory=set)


# --- Matching ----------------------------------------------------------------------------------------------


def match(state_dict: Any, manifest: Manifest, *, strict: bool, allow_cast: bool) -> Match:
    """What loading will do.

    Raises:
        UsageError: the state dict and the save do not fit; see `store.load`.
    """
    if items_of(state_dict) is None or isinstance(state_dict, tuple):
        raise UsageError(
            "load", expected="a state dict", got=type(state_dict).__name__, remedy="Pass a dict."
        )
    leaves = dict(leaves_of(state_dict))
    _check_containers(leaves, state_dict, manifest)
    if strict:
        _check_keys(leaves, manifest)
    found = Match(manifest)
    for path, target in leaves.items():
        entry = manifest.entries.get(path)
        if isinstance(entry, TensorEntry):
            _check_tensor(path, target, entry, allow_cast)
            if box_of(target) is not None:
                found.tensors[path] = target
        elif isinstance(entry, ValueEntry):
            if isinstance(target, Tensor):
                _refuse(path, f"a tensor, as in the state dict, of shape {tuple(target.shape)}", str(entry))
            _check_can_change(path, state_dict)
            found.values[path] = decode(entry.json_value)
    _check_ties(found)
    return found


def _refuse(
    path: KeyPath, expected: str, got: str, remedy: str = "Compare the model with the one saved."
) -> None:
    raise UsageError(show(path), expected=expected, got=got, remedy=remedy)


def _check_containers(leaves: dict[KeyPath, Any], state_dict: Any, manifest: Manifest) -> None:
    """Dicts face dicts, sequences face sequences; no container faces a leaf."""
    known: dict[KeyPath, Any] = {(): state_dict}
    for path in leaves:
        for n in range(1, len(path)):
            if path[:n] not in known:
                known[path[:n]] = child_of(known[path[: n - 1]], path[n - 1])
    known.update({path: leaf for path, leaf in leaves.items() if items_of(leaf) is not None})
    for path, tree in known.items():
        kind = "dict" if not isinstance(tree, list | tuple) else "list"
        saved = manifest.containers.get(path)
        if path in manifest.entries:
            _refuse(path, f"a {type(tree).__name__}, as in the state dict", str(manifest.entries[path]))
        if saved is not None and (saved == "dict") != (kind == "dict"):
            _refuse(path, f"a {type(tree).__name__}, as in the state dict", f"a {saved}")
    for path, leaf in leaves.items():
        if items_of(leaf) is None and path in manifest.containers:
            _refuse(path, f"a {type(leaf).__name__}, as in the state dict", f"a {manifest.containers[path]}")


def _check_keys(leaves: dict[KeyPath, Any], manifest: Manifest) -> None:
    parents = {path[:-1] for path in [*manifest.entries, *manifest.containers] if path}
    saved = {*manifest.entries, *(path for path in manifest.containers if path and path not in parents)}
    missing = [path for path in leaves if path not in saved and not (items_of(leaves[path]) is not None)]
    missing += [p for p in leaves if items_of(leaves[p]) is not None and p not in manifest.containers and p]
    above = {path[:n] for path in leaves for n in range(len(path))}
    unexpected = [path for path in saved if path not in leaves and path not in above]
    if missing or unexpected:
        first = missing[0] if missing else min(unexpected, key=str)
        got = "no such entry in the checkpoint" if missing else "no place for it in the state dict"
        others = len(missing) + len(unexpected) - 1
        raise UsageError(
            show(first),
            expected="the same keys in the state dict and in the checkpoint",
            got=got + (f"; {others} more keys are on one side only" if others else ""),
            remedy="Compare with `hwfsdp checkpoint inspect` (a fresh optimizer has no state yet: "
            "hwfsdp.checkpoint.meta.init_optimizer_state), or pass strict=False to load what both have.",
        )


def _check_can_change(path: KeyPath, state_dict: Any) -> None:
    """Raises if the value at `path` can be given to no container: a tuple is made again, and given to the one above."""
    above, holder, at = state_dict, state_dict, ()
    for n, key in enumerate(path):
        if not isinstance(above, tuple):
            holder, at = above, path[:n]
        above = child_of(above, key)
    if isinstance(holder, Mapping) and not hasattr(holder, "__setitem__"):
        got = f"the read-only {type(holder).__name__}"
        _refuse(at, "a mapping that items can be assigned to", got, "Make it a dict.")


def _check_tensor(path: KeyPath, target: Any, entry: TensorEntry, allow_cast: bool) -> None:
    if not isinstance(target, Tensor):
        _refuse(path, f"a {type(target).__name__}, as in the state dict", str(entry))
    check_kind(path, target)
    check_data(path, target)
    if tuple(target.shape) != entry.shape:
        _refuse(
            path,
            f"shape {tuple(target.shape)}, as in the state dict",
            f"shape {entry.shape} in the checkpoint",
        )
    local = part_of(target)
    if any(step == 0 and n > 1 for n, step in zip(local.shape, local.stride())):
        _refuse(path, "memory for every element", "an expanded tensor", "Pass a clone of it.")
    if local.is_inference() and not torch.is_inference_mode_enabled():
        got = "one that was made in inference mode"
        _refuse(path, "a tensor that can be changed", got, "Load in inference mode, too, or make it outside.")
    if target.dtype != entry.dtype:
        expected, got = f"{target.dtype}, as in the state dict", f"{entry.dtype} in the checkpoint"
        if not allow_cast:
            _refuse(path, expected, got, "Pass allow_cast=True if precision may be lost.")
        if _kind_of(entry.dtype) > _kind_of(target.dtype):
            _refuse(path, expected, got, "No cast keeps such values; load into a tensor of the saved dtype.")


def _kind_of(dtype: torch.dtype) -> int:
    """bool, int, float, complex: each can hold the values of those before it, more or less precisely."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1


def _check_ties(found: Match) -> None:
    """Raises if one tensor of the target would get two different contents."""
    first: dict[Any, KeyPath] = {}
    for path, target in found.tensors.items():
        other = first.setdefault(identity_of(target), path)
        if other != path and _contents(found.manifest, path) != _contents(found.manifest, other):
            _refuse(
                path,
                f"the same values as for {show(other)}, as both are one tensor in the state dict",
                "others in the checkpoint",
                "Untie them before loading.",
            )


def _contents(manifest: Manifest, path: KeyPath) -> Any:
    entry = manifest.entries[path]
    assert isinstance(entry, TensorEntry)
    chunks = manifest.chunks_of(entry)
    return entry.dtype, entry.shape, sorted((chunk.box, chunk.crc32) for chunk in chunks)


# --- Reading -----------------------------------------------------------------------------------------------


def read_tensors(match: Match, folder: Path, check: Callable[[], None]) -> dict[KeyPath, Tensor]:
    """This rank's part of every tensor, dense, on the CPU, in the dtype of its target.

    Args:
        check: called before each piece; may raise to stop.

    Raises:
        CheckpointError: a file is missing, of another save, cut short, damaged, or cannot be read.
        UsageError: a value that the target's dtype cannot hold, or values for memory that targets share and that they
            cannot all hold.
    """
    with ExitStack() as opened:
        readers = _Readers(match.manifest, folder, opened)
        parts = _rooms_for(match)
        jobs: list[Callable[[], None]] = []
        for need in needs_of(match):
            reader = readers.of(need.entry, need.chunk)
            jobs += _jobs(reader, need.chunk.box, parts[need.entry.path], need.box, need.shared)
        with ThreadPoolExecutor(_THREADS) as pool:

            def run(job: Callable[[], None]) -> None:
                check()
                job()

            for _ in pool.map(run, jobs):
                pass
    for path in parts:  # one after the other, so that what was read in another dtype can go
        parts[path] = _cast(path, parts[path], match.tensors[path].dtype)
    _check_overlaps(match, parts)
    return parts


class Need(NamedTuple):
    """What this rank needs of one chunk of a save. All boxes count from the first element of the whole tensor.

    Attributes:
        entry: the tensor, as the manifest lists it at the path of the target. chunk: one of its chunks.
        box: what this rank has of the target. shared: what of it the chunk holds; never empty.
    """

    entry: TensorEntry
    chunk: Chunk
    box: Box
    shared: Box


def needs_of(matched: Match) -> Iterator[Need]:
    """What has to be read, from which chunks, and where it goes.

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
    for path, target in matched.tensors.items():
        entry, box = matched.manifest.entries[path], box_of(target)
        assert isinstance(entry, TensorEntry) and box is not None
        for chunk in matched.manifest.chunks_of(entry):
            shared = intersection(box, chunk.box)
            if shared:
                yield Need(entry, chunk, box, shared)


def _rooms_for(match: Match) -> dict[KeyPath, Tensor]:
    """New memory for every part, in the dtype that was saved.

    One piece for all, in large pages where the system has them: to be given 64 MiB in small ones takes as long as to
    read and check them. Parts that will be cast have memory of their own, which can go one by one. Targets without values
    are read into where they are.
    """
    rooms = _rooms_in_place(match)
    together: dict[KeyPath, int] = {}
    end = 0
    for path, target in match.tensors.items():
        if path in rooms:
            continue
        entry, box = match.manifest.entries[path], box_of(target)
        assert isinstance(entry, TensorEntry) and box is not None
        rooms[path] = torch.empty(0 if entry.dtype == target.dtype else box.shape, dtype=entry.dtype)
        if entry.dtype == target.dtype:
            together[path] = end
            end += -(-box.numel * entry.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    if together:
        memory = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        every = torch.frombuffer(memory, dtype=torch.uint8)
        for path, start in together.items():
            box, dtype = box_of(match.tensors[path]), rooms[path].dtype
            assert box is not None
            rooms[path] = every[start : start + box.numel * dtype.itemsize].view(dtype).view(box.shape)
    return rooms


def _rooms_in_place(match: Match) -> dict[KeyPath, Tensor]:
    """Fresh targets that can be read into: dense, on the CPU, of the saved dtype, and no two that partly overlap."""
    rooms: dict[KeyPath, Tensor] = {}
    by_storage: dict[int, dict[Any, Tensor]] = {}
    for path in match.fresh & match.tensors.keys():
        target, part = match.tensors[path], part_of(match.tensors[path])
        by_storage.setdefault(part.untyped_storage().data_ptr(), {})[identity_of(part)] = part
        entry = match.manifest.entries[path]
        assert isinstance(entry, TensorEntry)
        if part.is_cpu and part.is_contiguous() and target.dtype == entry.dtype:
            rooms[path] = part
    overlapping = {key for key, parts in by_storage.items() if _may_overlap(list(parts.values()))}
    return {
        path: part for path, part in rooms.items() if part.untyped_storage().data_ptr() not in overlapping
    }


class _Readers:
    """Open files of a save, each opened and recognized once."""

    def __init__(self, manifest: Manifest, folder: Path, opened: ExitStack) -> None:
        self.manifest, self.folder, self.opened = manifest, folder, opened
        self.fds: dict[int, int] = {}

    def of(self, entry: TensorEntry, chunk: Chunk) -> BlockReader:
        file = self.manifest.files[chunk.file]
        path = self.folder / file.name
        if chunk.file not in self.fds:
            fd = open_file(path, file.nbytes)
            self.opened.callback(os.close, fd)
            check_header(fd, path, header_of(self.manifest.save_id, chunk.file))
            self.fds[chunk.file] = fd
        nbytes = chunk.box.numel * entry.dtype.itemsize
        fd, block_bytes = self.fds[chunk.file], self.manifest.block_bytes
        return BlockReader(fd, path, chunk.at, nbytes, chunk.crc32, block_bytes, show(entry.path))


def _jobs(
    reader: BlockReader, chunk: Box, part: Tensor, box: Box, shared: Box
) -> Iterator[Callable[[], None]]:
    """Reads what a chunk and this rank's box share into the rank's part (Note [From boxes to bytes])."""
    itemsize = part.dtype.itemsize
    first, last = span_of(within(shared, box), box.shape)
    if shared == chunk and last - first == shared.numel:
        memory = _memory(part)[first * itemsize : last * itemsize]
        step = max(1, _PIECE_BYTES // reader.block_bytes) * reader.block_bytes
        for start in range(0, len(memory), step):
            yield lambda start=start: reader.read(memory[start : start + step], start)  # type: ignore[misc]
        return
    for piece in pieces_of(within(shared, chunk), chunk.shape, max(1, _PIECE_BYTES // itemsize)):
        yield lambda piece=piece: _read_piece(reader, chunk, piece, part, box)  # type: ignore[misc]


def _read_piece(reader: BlockReader, chunk: Box, piece: Box, part: Tensor, box: Box) -> None:
    """Reads one piece, a box within the chunk, into its place."""
    itemsize = part.dtype.itemsize
    first, last = span_of(piece, chunk.shape)
    start, stop = reader.covering(first * itemsize, last * itemsize)
    buffer = torch.empty(stop - start, dtype=torch.uint8)
    reader.read(_memory(buffer), start)
    values = buffer.view(part.dtype)
    found = values.as_strided(piece.shape, strides_of(chunk.shape), first - start // itemsize)
    offset = tuple(a + b for a, b in zip(piece.offset, chunk.offset))
    part[within(Box(offset, piece.shape), box).slices] = found


def _memory(dense: Tensor) -> memoryview:
    return dense.view(-1).view(torch.uint8).numpy().data


def _cast(path: KeyPath, part: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in another dtype; raises if one of them becomes something else than itself, rounded."""
    if part.dtype == dtype:
        return part
    cast = part.to(dtype)
    for values, new in zip(part.view(-1).split(_CAST_AT_ONCE), cast.view(-1).split(_CAST_AT_ONCE)):
        lost = _lost(values, new) if dtype.is_floating_point or dtype.is_complex else _outside(values, dtype)
        if bool(lost.any()):
            value = values[int(lost.nonzero()[0])].item()
            _refuse(
                path, f"values that {dtype} can hold", f"{value}", "Load into a tensor of the saved dtype."
            )
    return cast


def _lost(values: Tensor, new: Tensor) -> Tensor:
    """Which values are finite, and in another floating-point dtype infinite, at its limit, or of another sign."""
    wide, limits = torch.complex128 if new.is_complex() else torch.float64, torch.finfo(new.dtype)
    before, after = values.to(wide), new.to(wide)
    if new.is_complex():
        before, after = torch.view_as_real(before), torch.view_as_real(after)
    far = (before.abs() > limits.max * (1 + limits.eps)) | ~after.isfinite() | (before * after < 0)
    lost = before.isfinite() & far
    return lost.any(-1) if new.is_complex() else lost


def _outside(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Which integers an integer dtype does not have."""
    unsigned = (
        values.dtype == torch.uint64
    )  # above 2**63 it is negative as int64, which no other dtype has either
    whole, limits = values.view(torch.int64) if unsigned else values.long(), torch.iinfo(dtype)
    lowest = 0 if unsigned else limits.min
    return (whole < lowest) | (whole > min(limits.max, torch.iinfo(torch.int64).max))


def _check_overlaps(found: Match, parts: dict[KeyPath, Tensor]) -> None:
    """Raises if targets share memory and will not all hold their values. That is tried out, on a copy of that memory."""
    by_storage: dict[int, dict[Any, KeyPath]] = {}
    for path in parts:
        local = part_of(found.tensors[path])
        by_storage.setdefault(local.untyped_storage().data_ptr(), {}).setdefault(identity_of(local), path)
    for paths in by_storage.values():
        targets = {path: part_of(found.tensors[path]) for path in paths.values()}
        if not _may_overlap(list(targets.values())):
            continue
        copy = next(iter(targets.values())).untyped_storage().clone()
        trial = {}
        for path, local in targets.items():
            view = torch.empty(0, dtype=local.dtype, device=local.device)
            view.set_(copy, local.storage_offset(), local.shape, local.stride())
            trial[path] = view.conj() if local.is_conj() else view
            trial[path].copy_(parts[path])
        for path, view in trial.items():
            if not torch.equal(bytes_of(view.cpu()), bytes_of(parts[path])):
                got = "values for the same memory, which differ"
                _refuse(
                    path, "memory of its own, or the values of what shares it", got, "Pass a clone of it."
                )


def _may_overlap(locals_: list[Tensor]) -> bool:
    """Whether two elements, of one tensor or of two, may be in the same place."""
    spans = []
    for local in locals_:
        extent = 0
        for step, n in sorted((step, n) for n, step in zip(local.shape, local.stride()) if n > 1):
            if step <= extent:
                return True
            extent += step * (n - 1)
        spans.append((local.data_ptr(), local.data_ptr() + (extent + 1) * local.element_size()))
    spans.sort()
    return any(start < end for (_, end), (start, _) in zip(spans, spans[1:]))


# --- Filling -----------------------------------------------------------------------------------------------


@torch.no_grad()
def fill(state_dict: Any, match: Match, parts: dict[KeyPath, Tensor]) -> None:
    """Puts the parts into the tensors of the target, and the values where they belong."""
    for path, part in parts.items():
        if identity_of(part_of(match.tensors[path])) != identity_of(part):  # was it not read in place?
            part_of(match.tensors[path]).copy_(part)
    _put(state_dict, (), match.values)


def _put(tree: Any, path: KeyPath, values: dict[KeyPath, Any]) -> Any:
    """The container with new values in it: itself, or another one if it cannot be changed."""
    items = items_of(tree) or {}
    new = {}
    for key, child in items.items():
        at = (*path, key)
        is_leaf = isinstance(child, Tensor) or items_of(child) is None
        new[key] = values.get(at, child) if is_leaf else _put(child, at, values)
    changed = {key: value for key, value in new.items() if value is not items[key]}
    if changed and isinstance(tree, tuple):
        return rebuild(tree, new)
    for key, value in changed.items():
        if hasattr(tree, "__setitem__"):
            tree[key] = value
        else:
            object.__setattr__(tree, key, value)
    return tree
