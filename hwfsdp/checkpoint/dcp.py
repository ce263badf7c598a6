"""Checkpoints of torch's DCP (`torch.distributed.checkpoint`), written and read.

    save(state_dict, path)       torch.distributed.checkpoint.load can read the result
    load(state_dict, path)       reads a checkpoint that torch.distributed.checkpoint.save has written

The ranks divide the boxes as they do for a save of the store (`saving.deal`), and fill a state dict with the same reader
(`loading`). This module is what is particular to the format: its keys, its files and its metadata. Several things that DCP does
silently do not happen here, or are errors:

    `layout` computes the box of a tensor that a rank holds; torch computes it wrongly for strided uneven cuts
    shapes and dtypes are compared; DCP casts, even from float to int
    a key on only one side is an error; DCP ignores keys of the checkpoint that the state dict does not have
    a directory appears when it is complete; DCP overwrites a checkpoint file by file
    nothing in a checkpoint is run (Note [Metadata without trust]); DCP unpickles the metadata and all values
    checksums are compared; DCP reads over flipped bits
    a tensor on the meta device gets memory in place; DCP loads into another tensor, which the model does not have

This module checks everything before it changes anything. Ranks agree on the result: an error on one rank is raised on all.

Keys are DCP's keys: paths of dict keys and list positions, joined by dots. A list is taken apart only if a tensor or a dict is
in it. Everything else is a value. It is stored unchanged, and found again under the same path. So dicts with int keys, such as
an optimizer's state, come back with int keys.

Left out: empty dicts, which DCP does not store, `ShardedTensor`, and objects with a `state_dict` method in the state dict.

Note [Metadata without trust]
    A checkpoint is a directory with a file `.metadata` and files of *blobs*. There is one blob for each chunk of a tensor, and one for
    each value that is not a tensor. The metadata is a pickle, and a pickle is a program: a crafted pickle runs its author's code when
    it is loaded. So `read_metadata` uses an unpickler that knows only the few classes of DCP's metadata. Its result is checked, too:
    chunks must tile their tensors, and blobs must lie in files of this directory. Blobs are zip files made by `torch.save`. They carry
    checksums, which `torch.load` ignores. We compare them, so a flipped bit causes an error instead of a wrong weight.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hwfsdp.checkpoint import archives, commit
from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.boxes import Box, box_from, check_data, check_no_sum, find_fault, part_of, pieces_of
from hwfsdp.checkpoint.boxes import whole, within
from hwfsdp.checkpoint.loading import Match, Need, Source, check_can_change, match_entries, read_and_fill
from hwfsdp.checkpoint.manifest import Chunk, Entry, Manifest, TensorEntry, ValueEntry, dtype_named
from hwfsdp.checkpoint.messages import KeyPath, check_in_common, damaged, on_one_side, path_of, refuse, told
from hwfsdp.checkpoint.messages import warn_left_out
from hwfsdp.checkpoint.meta import NewMemory
from hwfsdp.checkpoint.saving import by_path, deal, describe_tensor, holders_of
from hwfsdp.checkpoint.traverse import Leaf, child_of, flat_key, leaves_of, state_dict_of, traverse_state_dict
from hwfsdp.compat import dcp_place

METADATA, DIGEST = ".metadata", ".metadata.sha256"
T = TypeVar("T")


def save(
    state_dict: Mapping[Any, Any] | nn.Module,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a DCP checkpoint. A collective over the group; without a process group, one process calls it alone.

    The directory is written beside `path`. It is on the disk (fsync) before it gets the name `path`. Until then, `path` stays as it
    was, whatever happens. With `overwrite`, the old checkpoint and the new one exchange their names. A process that is killed
    leaves a hidden directory beside `path`, which the next save removes.

    Args:
        state_dict: tensors, DTensors of any layout, and values that `torch.load(weights_only=True)` accepts. For an entry that
            is not a DTensor, the copy of one rank is written. Ranks may have different keys. A module stands for its state dict.
        path: a directory on a file system that all ranks share. It must not exist, or must be empty.
        overwrite: replace a DCP checkpoint at `path`.

    Raises:
        UsageError: `path` exists; a tensor is on the meta device or not dense; a value could not be loaded again; a DTensor's
            local shape differs from the shape that its placements give; or a key has other shapes or dtypes on another rank.
        UnsupportedError: a `Partial` placement or a ShardedTensor.
        CheckpointError: writing failed.
        All ranks raise the same error, and `path` stays as it was.
    """
    agreement = Agreement(process_group, "DCP checkpoint")
    target = Path(os.path.realpath(path_of(path, "save")))
    mine = _Saving(agreement, state_dict_of(state_dict))
    share = agreement.step("planning", mine.describe, mine.divide)
    check = partial(_check_free, target, overwrite)
    with commit.replaced(target, agreement, check) as (draft, save_id):
        agreement.step("writing", lambda: mine.write(draft, share), partial(mine.finish, draft, save_id))


def load(
    state_dict: dict[Any, Any] | nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    allow_cast: bool = False,
    device: torch.device | str | None = None,
    model: nn.Module | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Read a DCP checkpoint into the tensors of `state_dict`, in place. A collective over the group, if there is one.

    Any number of ranks may have written the checkpoint, with any layout. Each rank reads the chunks that contain some of its
    elements twice: first to check them, then to copy them. It needs memory for a few chunks.

    Args:
        state_dict: tensors are filled in place; other values are replaced. It may also be a module, which stands for its state
            dict.
        path: the directory.
        strict: the checkpoint must have the same keys as all ranks together. Otherwise, keys on only one side are left out, and a
            warning on the first rank counts and names them.
        allow_cast: as for `loading.load`.
        device, model: for tensors on the meta device; see `loading.load`.

    Raises:
        UsageError: a key is on only one side (with `strict`), or no key is on both; a shape or dtype differs; one side has a tensor and
            the other a value; a tensor cannot be written to; or a tensor on the meta device is not in the checkpoint, with or
            without `strict`.
        UnsupportedError, StateError: a `Partial` placement (UnsupportedError), or an error of `meta.init_state_dict`.
        CheckpointError: the checkpoint is missing, is damaged, or asks for code to be run (Note [Metadata without trust]).
        All ranks raise the same error. Then nothing was changed.
    """
    agreement, directory = Agreement(process_group, "DCP checkpoint"), path_of(path, "load")
    entries: dict[str, Leaf] = {}
    found: list[tuple[Match, Blobs]] = []
    with NewMemory(state_dict, device, model) as target:

        def prepare() -> tuple[list[str], str]:
            target.give()
            entries.update(entries_of(target.state_dict))
            blobs = read_metadata(directory)
            found.append((Match(blobs.manifest), blobs))
            return sorted(entries), blobs.manifest.digest

        def match() -> None:
            blobs = found[0][1].at({key: path for key, (path, _) in entries.items()})
            target.check_loaded(blobs.manifest.entries)
            leaves = {path: value for path, value in entries.values() if path in blobs.manifest.entries}
            matched = match_entries(target.state_dict, leaves, blobs, allow_cast)
            matched.fresh.update(target.paths)
            found[0] = matched, blobs

        def compare(reports: list[Any]) -> list[str]:
            return _check_keys(directory, found[0][1], strict, reports)

        left_out: str = agreement.step("preparing", prepare, compare)
        agreement.step("checking", match)
        read_and_fill(agreement, target.state_dict, *found[0])
    if agreement.rank == 0:
        warn_left_out(left_out, path)


def _check_keys(directory: Path, blobs: Blobs, strict: bool, reports: list[Any]) -> list[str]:
    """Raise an error unless all ranks see one checkpoint, and its keys fit (see `load`). Return, for each rank, the keys left out."""
    if len({digest for _, digest in reports}) > 1:
        remedy = "Use a file system that all ranks share, and replace no checkpoint that is being read."
        raise damaged(directory, "the same checkpoint on all ranks", "different ones", remedy=remedy)
    wanted = {key for keys, _ in reports for key in keys}
    there = {key for (key,) in blobs.manifest.entries}
    missing, unexpected = (list(map(repr, sorted(keys))) for keys in (wanted - there, there - wanted))
    left_out = on_one_side(missing, unexpected)
    check_in_common(f"load from {directory}", left_out, strict, bool(wanted & there))
    return [left_out] * len(reports)


# --- Keys --------------------------------------------------------------------------------------------------


def entries_of(state_dict: Mapping[Any, Any]) -> dict[str, Leaf]:
    """Return the entries by DCP's keys."""
    entries: dict[str, Leaf] = {}
    paths: dict[str, KeyPath] = {}

    def visit(path: KeyPath, value: Any) -> None:
        if not isinstance(value, Mapping):  # DCP stores no empty dict
            key = flat_key(path, paths)
            entries[key], paths[key] = Leaf(path, value), path

    traverse_state_dict(state_dict, visit, lambda item: isinstance(item, Tensor))
    return entries


# --- Saving ------------------------------------------------------------------------------------------------


class _Saving:
    """One save on one rank. The leader also calls `divide` and `finish`."""

    def __init__(self, agreement: Agreement, state_dict: Mapping[Any, Any]) -> None:
        self.rank, self.size, self.state_dict = agreement.rank, agreement.size, state_dict
        self.entries: dict[str, Leaf] = {}
        self.shares: list[list[Any]] = []
        self.described: dict[KeyPath, dict[str, Any]] = {}  # by key, as on the first rank that has it

    def describe(self) -> list[dict[str, Any]]:
        """Check the entries. Describe each: its path; for a tensor, also dtype, shape and this rank's boxes."""
        self.entries = entries_of(self.state_dict)
        for path, value in self.entries.values():
            if isinstance(value, Tensor):
                _check_tensor(path, value)
            else:
                check_can_change(path, self.state_dict)
                _check_storable(path, value)
        return [
            {"path": [key], "tree": self._path_of(path)}
            | (describe_tensor(value) if isinstance(value, Tensor) else {})
            for key, (path, value) in self.entries.items()
        ]

    def _path_of(self, path: KeyPath) -> list[str | int]:
        """Return a path as DCP writes it: keys of dicts as str, positions in lists as int."""
        steps: list[str | int] = []
        tree: Any = self.state_dict
        for key in path:
            steps.append(str(key) if isinstance(tree, Mapping) else key)
            tree = child_of(tree, key)
        return steps

    def divide(self, descriptions: list[list[dict[str, Any]]]) -> list[list[Any]]:
        """Tell each rank what to write: keys and boxes; for a value, None in place of a box.

        Raises an error if a key has another shape, dtype or kind on another rank.
        """
        holders: dict[Any, list[int]] = {}
        sizes: dict[Any, int] = {}
        for path, by_rank in by_path(descriptions).items():
            rank, first = next(iter(by_rank.items()))
            self.described[path] = first
            for other, entry in by_rank.items():
                if _kind_of(entry) != _kind_of(first):
                    expected = f"the same on all ranks; rank {rank} has {_kind_of(first)}"
                    remedy = "Shard with DTensors; other tensors count as replicas. Or rename one of the two."
                    refuse(f"key {path[0]!r}", expected, f"{_kind_of(entry)} on rank {other}", remedy)
            found: dict[Any, list[int]] = {(path, None): [*by_rank]}
            if "shape" in first:  # a tensor without elements is written nevertheless: a load needs its shape
                empty = 0 in first["shape"]
                found = {(path, whole(first["shape"])): [*by_rank]} if empty else holders_of(path, by_rank)
                itemsize = dtype_named(first["dtype"]).itemsize
            holders |= found
            sizes |= {(at, box): box.numel * itemsize if box else 0 for at, box in found}
        self.shares = [[] for _ in range(self.size)]
        for ((key,), box), rank in deal(sizes, [0] * self.size, holders).items():
            self.shares[rank].append((key, box))
        return self.shares

    def write(self, draft: Path, share: list[Any]) -> list[tuple[int, int]]:
        """Write this rank's file. Return the place of each blob: offset and length."""
        places: list[tuple[int, int]] = []
        items = [(self.entries[key].value, box and box_from(box)) for key, box in share]
        nbytes = sum(box.numel * value.itemsize for value, box in items if box)
        if items:
            with archives.archive_file(draft / _file_of(self.rank), nbytes) as file:
                for value, box in items:
                    start = file.tell()
                    torch.save(_values_of(value, box) if box else value, file)
                    places.append((start, file.tell() - start))
        return places

    def finish(self, draft: Path, save_id: str, places: list[Any]) -> None:
        """Write the metadata, from the places of all blobs, and a checksum of it into a file that torch ignores."""
        from torch.distributed.checkpoint import metadata as torchs

        infos: dict[Any, Any] = {}
        chunks: dict[str, list[Any]] = {}
        for rank, (share, of_share) in enumerate(zip(self.shares, places)):
            if share:  # the leader sees the file: all ranks have written to one file system
                os.close(commit.open_file(draft / _file_of(rank)))
            for (key, box), (offset, length) in zip(share, of_share):
                at = torch.Size(box.offset) if box else None
                infos[torchs.MetadataIndex(key, at)] = dcp_place(_file_of(rank), offset, length)
                if box:
                    chunk = torchs.ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
                    chunks.setdefault(key, []).append(chunk)
        entries: dict[str, Any] = {}
        for (key,), entry in self.described.items():
            entries[key] = torchs.BytesStorageMetadata()
            if "shape" in entry:
                properties = torchs.TensorProperties(dtype=dtype_named(entry["dtype"]))
                size = torch.Size(entry["shape"])
                entries[key] = torchs.TensorStorageMetadata(properties, size, chunks[key])
        paths = {key: tuple(entry["tree"]) for (key,), entry in self.described.items()}
        data = pickle.dumps(torchs.Metadata(entries, paths, infos, torchs.StorageMeta(save_id=save_id)))
        commit.write_small_file(draft / METADATA, data)
        commit.write_small_file(draft / DIGEST, f"{hashlib.sha256(data).hexdigest()}\n".encode())


def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _kind_of(entry: dict[str, Any]) -> str:
    return f"a tensor torch.{entry['dtype']} {entry['shape']}" if "shape" in entry else "a value"


def _values_of(tensor: Tensor, box: Box) -> Tensor:
    """Return the values in a box of this rank's, row-major, without the rest of their storage, which torch.save would write, too."""
    if not box.numel:
        return torch.empty(box.shape, dtype=tensor.dtype)
    own = next(own for outer, own in pieces_of(tensor) if outer == box)
    values = part_of(tensor)[own.slices].cpu().resolve_conj().resolve_neg().contiguous()
    return values.clone() if values.untyped_storage().nbytes() > values.nbytes else values


def _check_tensor(path: KeyPath, tensor: Tensor) -> None:
    """Raise an error unless the tensor is dense and has data."""
    check_data(path, tensor)
    if tensor.layout != torch.strided:
        refuse(path, "a dense tensor", str(tensor.layout), "Call to_dense.")
    check_no_sum(path, tensor)


def _check_storable(path: KeyPath, value: Any) -> None:
    """Raise an error unless the value can be loaded again."""
    if any(isinstance(leaf.value, Tensor) for leaf in leaves_of(value)):
        expected, got = "tensors in dicts and lists", "a tensor in a container that DCP does not look into"
        refuse(path, expected, got, f"Make this {type(value).__name__} a list or a dict.")
    archives.check_loadable(path, value)


def _check_free(target: Path, overwrite: bool) -> None:
    is_empty = target.is_dir() and not any(target.iterdir())
    is_ours = (target / METADATA).is_file()
    if os.path.lexists(target) and not is_empty and not (overwrite and is_ours):
        expected = "a path where nothing is, or a DCP checkpoint and overwrite=True"
        got = "a DCP checkpoint" if is_ours else "something else"
        remedy = "Choose another path, or pass overwrite=True for a DCP checkpoint."
        refuse(f"save to {target}", expected, got, remedy)


# --- Reading -----------------------------------------------------------------------------------------------


@dataclass
class Blobs(Source):
    """The files of a DCP checkpoint, as a source of a load (`loading.Source`).

    Attributes:
        manifest: its entries are listed by the path (key,), or by the paths of a state dict (`at`). Its digest is the SHA-256 of the
            metadata.
        files: the files that the chunks count. paths: DCP's record of the path in the state dict behind each key; {} if there is none.
    """

    manifest: Manifest
    files: list[Path]
    paths: dict[str, Any]

    def at(self, paths: Mapping[str, KeyPath]) -> Blobs:
        """Return the source with the entries of these keys, listed by these paths."""
        known = {path: self.manifest.entries.get((key,)) for key, path in paths.items()}
        entries = {path: replace(entry, path=path) for path, entry in known.items() if entry is not None}
        return replace(self, manifest=replace(self.manifest, entries=entries))

    def value(self, entry: ValueEntry) -> Any:
        assert entry.chunk is not None
        self._check_archive(entry, entry.chunk)
        return self._read(entry, entry.chunk)

    def check(self, entry: TensorEntry, chunk: Chunk) -> None:
        """Compare the checksums of a chunk, and what it holds."""
        self._check_archive(entry, chunk)
        self._tensor(entry, chunk)

    def jobs(self, need: Need, part: Tensor) -> Iterator[Callable[[], None]]:
        yield partial(self._copy, need, part[need.place.slices])

    def _copy(self, need: Need, place: Tensor) -> None:
        place.copy_(self._tensor(need.entry, need.chunk)[within(need.shared, need.chunk.box).slices])

    def _tensor(self, entry: TensorEntry, chunk: Chunk) -> Tensor:
        found = self._read(entry, chunk)
        expected = f"{entry.dtype} {list(chunk.box.shape)}"
        got = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        if got != expected or found.layout != torch.strided:
            raise damaged(self.files[chunk.file], f"a tensor {expected}", got, chunk.at, _key_of(entry))
        return cast(Tensor, found)

    def _check_archive(self, entry: Entry, chunk: Chunk) -> None:
        path, key = self.files[chunk.file], _key_of(entry)
        with archives.extract(path, chunk.at, chunk.nbytes, key) as file:
            archives.check_archive(file, path, key, chunk.at)

    def _read(self, entry: Entry, chunk: Chunk) -> Any:
        """Load a blob with `torch.load`. No code of it runs."""
        path, key = self.files[chunk.file], _key_of(entry)
        with archives.extract(path, chunk.at, chunk.nbytes, key) as file:
            return archives.load_archive(file, path, {"map_location": "cpu"}, key, chunk.at)


def _key_of(entry: Entry) -> str:
    return ".".join(map(str, entry.path))


# --- Metadata ----------------------------------------------------------------------------------------------

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_DCP}.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that makes stand-ins for the classes of DCP's metadata, and refuses all other classes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a new class each time, because a pickle may change the classes that it gets."""
        if name not in _ALLOWED.get(module, ()):
            raise _Refused(f"{module}.{name}, which was not run")
        if module == "torch":  # dtypes and torch.Size, which have no attributes to change
            return getattr(torch, name)
        return type(name, (OrderedDict if name == "OrderedDict" else _StandIn,), {})


class _StandIn:
    """A stand-in for an object of DCP's metadata: it has the fields of the object."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        # The state of TensorProperties is a tuple that begins with the dtype. Other states are dicts.
        vars(self).update({"dtype": state[0]} if isinstance(state, tuple) else state)


def _class_of(thing: Any) -> str:
    return type(thing).__name__ if isinstance(thing, _StandIn) else "something else"


class _Refused(Exception):
    """The metadata asks for a class or function that it may not load."""


def read_metadata(directory: Path) -> Blobs:
    """Read and check the list of the checkpoint's contents.

    Args:
        directory: as DCP's `FileSystemWriter` leaves it.

    Raises:
        CheckpointError: there is no metadata; it asks for other classes than DCP's own, none of which was run; it is damaged;
            chunks overlap, leave gaps or exceed their tensor; or a blob is missing or outside the directory.
    """
    path = directory / METADATA
    try:
        data = path.read_bytes()
    except OSError as error:
        raise damaged(path, "the metadata of a DCP checkpoint", told(error)) from error
    _check_digest(path, data)
    try:
        _check_opcodes(data)
        metadata = _Unpickler(io.BytesIO(data)).load()
    except _Refused as error:
        expected = "only the classes that DCP's metadata is made of"
        remedy = "Do not load this checkpoint with torch, which would run it; ask where it comes from."
        raise damaged(path, expected, str(error), remedy=remedy) from None
    except Exception as error:
        raise damaged(path, "a pickle of DCP's metadata", told(error)) from error
    if _class_of(metadata) != "Metadata":
        raise damaged(path, "DCP's Metadata", type(metadata).__name__)
    try:
        entries, files = _checked_entries(path, metadata)
    except (AttributeError, TypeError, ValueError, KeyError) as error:  # the file is crafted or cut short
        raise damaged(path, "the fields of DCP's metadata", told(error)) from error
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    sizes = tuple(file.stat().st_size for file in files)
    return Blobs(Manifest("", sizes, {}, entries, digest=hashlib.sha256(data).hexdigest()), files, paths)


def _check_digest(path: Path, data: bytes) -> None:
    try:
        expected = (path.parent / DIGEST).read_text().strip()
    except FileNotFoundError:
        return  # torch wrote this checkpoint
    except (OSError, ValueError) as error:
        raise damaged(path.parent / DIGEST, "a SHA-256", told(error)) from error
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        expected = f"the metadata with SHA-256 {expected[:12]}…, as {DIGEST} says"
        remedy = f"Take another checkpoint; if torch has written over this one, remove {DIGEST}."
        raise damaged(path, expected, f"{found[:12]}…", remedy=remedy)


def _check_opcodes(data: bytes) -> None:
    """Refuse a memo index that no normal pickle has. It would make the unpickler reserve far too much memory."""
    for opcode, argument, position in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > (position or 0):
            raise ValueError(f"the memo index {argument} at byte {position}")


# --- Structure ---------------------------------------------------------------------------------------------


def _checked_entries(path: Path, metadata: Any) -> tuple[dict[KeyPath, Entry], list[Path]]:
    """Return every tensor and value, and the files. Raise an error if the metadata is not consistent."""
    # The index of a value has no offset.
    places = {
        (_of(str, index.fqn), getattr(index, "offset", None)): info
        for index, info in metadata.storage_data.items()
    }
    entries: dict[KeyPath, Entry] = {}
    files: dict[Path, int] = {}
    for key, entry in metadata.state_dict_metadata.items():
        boxes: list[Box | None] = [None]
        dtype: torch.dtype | None = None
        shape: tuple[int, ...] = ()
        if _class_of(entry) == "TensorStorageMetadata":
            dtype, shape = _of(torch.dtype, entry.properties.dtype), _sizes(entry.size)
            boxes = [Box(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in entry.chunks]
            fault = find_fault(shape, [box for box in boxes if box and box.numel]) if boxes else "no chunk"
            if fault:
                raise damaged(path, f"chunks that make up the shape {shape}", fault, key=_of(str, key))
        elif _class_of(entry) != "BytesStorageMetadata":
            raise damaged(path, "a tensor or a value", type(entry).__name__, key=key)
        chunks = []
        for box in boxes:
            info = places.get((key, box and box.offset))
            if info is None:
                raise damaged(path, f"where the part at {box and box.offset} is", "nothing", key=key)
            file, offset, length = _place_of(path, key, info)
            chunks.append(Chunk(files.setdefault(file, len(files)), offset, box or whole(()), nbytes=length))
        if dtype is None:
            entries[key,] = ValueEntry((key,), chunk=chunks[0])
        else:
            entries[key,] = TensorEntry((key,), dtype, shape, tuple(chunks))
    _check_places(entries, [*files])
    return entries, [*files]


def _of(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise TypeError(f"{sizes} are no sizes")
    return sizes


def _place_of(path: Path, key: str, info: Any) -> tuple[Path, int, int]:
    """Return the file, offset and length of a blob."""
    name = _of(str, info.relative_path)
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or re.search(r"[\\:\0]", name) or not name:
        raise damaged(path, "a file in the directory of the checkpoint", f"the path {name!r}", key=key)
    offset, length = _sizes((info.offset, info.length))
    transforms = getattr(info, "transform_descriptors", None)
    if transforms:
        raise damaged(path, "blobs as torch.save writes them", f"transforms {transforms}", key=key)
    return path.parent / name, offset, length


def _check_places(entries: dict[KeyPath, Entry], files: list[Path]) -> None:
    """Raise an error unless every blob lies in an existing file and no two blobs share a byte."""
    ends = [0] * len(files)
    sizes: dict[int, int] = {}
    chunks = [
        (chunk.file, chunk.at, chunk.nbytes, key)
        for (key,), entry in entries.items()
        for chunk in (entry.chunks if isinstance(entry, TensorEntry) else [entry.chunk])
        if chunk is not None
    ]
    for index, at, nbytes, key in sorted(chunks):
        file = files[index]
        try:
            size = sizes.setdefault(index, file.stat().st_size)
        except OSError as error:
            raise damaged(file, "a file with chunks of tensors", told(error)) from error
        if at + nbytes > size:
            got = f"{size} bytes; the part at {at} has {nbytes}"
            raise damaged(file, "the size that the metadata says", got, key=key)
        if at < ends[index]:
            raise damaged(file, f"a place of its own, after byte {ends[index]}", f"byte {at}", key=key)
        ends[index] = at + nbytes
