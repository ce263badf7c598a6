"""Checkpoints of torch's DCP (`torch.distributed.checkpoint`), written and read.

    save(state_dict, path)       torch.distributed.checkpoint.load can read the result
    load(state_dict, path)       reads a checkpoint that torch.distributed.checkpoint.save has written

The ranks divide the boxes as they do for a save of the store (`saving.writers_of`), and fill a state dict with the same reader
(`loading`). This module is what is particular to the format: its keys, its files and its metadata. Several things that DCP does
silently do not happen here, or are errors:

    `layout` computes the box of a tensor that a rank holds; torch computes it wrongly for strided uneven cuts
    shapes and dtypes are compared; DCP casts, even from float to int
    a key on only one side is an error; DCP ignores keys of the checkpoint that the state dict does not have
    a directory appears when it is complete; DCP overwrites a checkpoint file by file
    nothing in a checkpoint is run (Note [Metadata without trust]); DCP unpickles the metadata and all values
    checksums are compared (Note [Seals]); DCP reads over flipped bits, and takes one blob for another
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

Note [Seals]
    The checksums in a blob do not say which blob it is. So our metadata has a *seal* of each blob: a checksum of the blob's checksums.
    Torch ignores it. A blob that has changed places with another one, or comes from another save, does not have the right seal.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hwfsdp.checkpoint import commit
from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.boxes import Box, box_from, check_data, check_kind, find_fault, packed, values_in
from hwfsdp.checkpoint.boxes import whole
from hwfsdp.checkpoint.error_messages import KeyPath, check_format, damaged, path_of, refuse, told
from hwfsdp.checkpoint.error_messages import warn_left_out
from hwfsdp.checkpoint.loading import LoadPlan, Source, load_from
from hwfsdp.checkpoint.manifest import LARGEST, Chunk, Entry, Manifest, TensorEntry, ValueEntry, dtype_named
from hwfsdp.checkpoint.meta import NewMemory
from hwfsdp.checkpoint.saving import Boxed, brief, by_path, describe_tensor, holders_of, writers_of
from hwfsdp.checkpoint.traverse import Leaf, containers_in, flat_key, leaves_of, place_of
from hwfsdp.checkpoint.traverse import state_dict_of, traverse_state_dict
from hwfsdp.compat import dcp_place
from hwfsdp.errors import CheckpointError

METADATA, DIGEST = ".metadata", ".metadata.sha256"
_FILES = re.compile(r"\.metadata(\.sha256)?|.*\.distcp")


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
    mine = _Saving(agreement)
    share = agreement.step("planning", lambda: mine.describe(state_dict, path), mine.assign)
    check = partial(commit.check_replaceable, mine.target, _FILES, "a DCP checkpoint", overwrite)
    with commit.replaced(mine.target, agreement, check) as (draft, save_id):
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
    elements, each as a whole. Besides the memory of `loading.load`, it needs memory for a few chunks.

    Args:
        state_dict: tensors are filled in place; other values are replaced. It may also be a module, which stands for its state
            dict.
        path: the directory.
        strict: the checkpoint must have the same keys as all ranks together. Otherwise, keys on only one side are left out, and a
            warning on the first rank counts and names them.
        allow_cast: as for `loading.load`.
        device, model: for tensors on the meta device; see `loading.load`.

    Raises:
        UsageError: there is no checkpoint of this format; a key is on only one side (with `strict`), or no key is on both; a shape or dtype differs; one side has a tensor and
            the other a value; a tensor cannot be written to; or a tensor on the meta device is not in the checkpoint, with or
            without `strict`.
        UnsupportedError, StateError: a `Partial` placement (UnsupportedError), or an error of `meta.init_state_dict`.
        CheckpointError: the checkpoint is incomplete or damaged, or asks for code to be run (Note [Metadata without trust]).
        All ranks raise the same error. Then nothing was changed.
    """
    agreement = Agreement(process_group, "DCP checkpoint")
    with NewMemory(state_dict, device, model) as target:
        plan_of = partial(_plan_of, target, path)
        left_out = load_from(agreement, plan_of, f"load from {path}", strict, allow_cast, together=True)
    warn_left_out(left_out, path)


def _plan_of(target: NewMemory, path: str | os.PathLike[str], opened: ExitStack) -> LoadPlan:
    """Let the manifest list the entries by the paths of the state dict. The keys of both are the same, but not their steps: 0 and "0"."""
    target.give()
    leaves, blobs = entries_of(target.state_dict), read_metadata(path_of(path, "load"), opened)
    entries: dict[KeyPath, Entry] = {}
    for at, entry in blobs.manifest.entries.items():
        at = leaves[_key_of(at)].path if _key_of(at) in leaves else at
        entries[at] = replace(entry, path=at)
    blobs.manifest = replace(blobs.manifest, entries=entries)
    options: dict[str, Any] = {"name_of": lambda at: repr(_key_of(at)), "fresh": target.paths}
    return LoadPlan(blobs, target.state_dict, dict(leaves.values()), **options)


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
    """One save on one rank. The leader also calls `assign` and `finish`."""

    def __init__(self, agreement: Agreement) -> None:
        self.rank, self.size = agreement.rank, agreement.size
        self.target: Path
        self.entries: dict[str, Leaf] = {}
        self.shares: list[list[Any]] = []
        self.described: dict[KeyPath, dict[str, Any]] = {}  # by key, as on the first rank that has it

    def describe(self, given: Any, path_given: str | os.PathLike[str]) -> list[dict[str, Any]]:
        """Check the path and the entries. Describe each entry: its path; for a tensor, also dtype, shape and this rank's boxes."""
        self.target = Path(os.path.realpath(path_of(path_given, "save")))
        state_dict = state_dict_of(given)
        self.entries = entries_of(state_dict)
        containers = containers_in(state_dict)
        described = []
        for key, (path, value) in self.entries.items():
            # DCP writes keys of dicts as str, and positions in lists as int.
            tree = [k if isinstance(containers[path[:n]], list) else str(k) for n, k in enumerate(path)]
            described.append({"path": [key], "tree": tree})
            if isinstance(value, Tensor):
                check_data(path, value)
                check_kind(path, value)
                described[-1] |= describe_tensor(value)
            else:
                place_of(path, state_dict)  # raises, as a load would
                _check_storable(path, value)
        return described

    def assign(self, descriptions: list[list[dict[str, Any]]]) -> list[list[Any]]:
        """Tell each rank what to write: keys and boxes. Raise an error if a key has another shape, dtype or kind on another rank."""
        holders: dict[Boxed, list[int]] = {}
        itemsizes: dict[KeyPath, int] = {}
        for path, by_rank in by_path(descriptions).items():
            rank, first = next(iter(by_rank.items()))
            self.described[path] = first
            for other, entry in by_rank.items():
                if brief(entry) != brief(first):
                    expected = f"the same on all ranks; rank {rank} has {brief(first)}"
                    remedy = "Shard with DTensors; other tensors count as replicas. Or rename one of the two."
                    refuse(f"key {path[0]!r}", expected, f"{brief(entry)} on rank {other}", remedy)
            shape, dtype = first.get("shape", ()), first.get("dtype", "bool")
            itemsizes[path] = dtype_named(dtype).itemsize
            # A value has the box of a tensor without dims. Tensors without elements are written, too: a load needs their shape.
            one_blob = "shape" not in first or 0 in shape
            holders |= {(path, whole(shape)): [*by_rank]} if one_blob else holders_of(path, by_rank)
        self.shares = [[] for _ in range(self.size)]
        for ((key,), box), rank in writers_of(holders, itemsizes, self.size).items():
            self.shares[rank].append((key, box))
        return self.shares

    def write(self, draft: Path, share: list[Any]) -> list[tuple[int, int, int]]:
        """Write this rank's file. Return the place of each blob: offset, length and seal."""
        places: list[tuple[int, int, int]] = []
        items = [(self.entries[key].value, box_from(box)) for key, box in share]
        nbytes = sum(box.numel * value.itemsize for value, box in items if isinstance(value, Tensor))
        if items:
            with commit.archive_file(draft / _file_of(self.rank), nbytes) as file:
                for value, box in items:
                    start = file.tell()
                    torch.save(packed(values_in(value, box)) if isinstance(value, Tensor) else value, file)
                    places.append((start, file.tell() - start, commit.seal_of(file)))
        return places

    def finish(self, draft: Path, save_id: str, places: list[Any]) -> None:
        """Write the metadata, from the places of all blobs, and a checksum of it into a file that torch ignores."""
        from torch.distributed.checkpoint import metadata as torchs

        infos: dict[Any, Any] = {}
        entries: dict[str, Any] = {}
        for (key,), entry in self.described.items():
            entries[key] = torchs.BytesStorageMetadata()
            if "shape" in entry:
                properties = torchs.TensorProperties(dtype=dtype_named(entry["dtype"]))
                entries[key] = torchs.TensorStorageMetadata(properties, torch.Size(entry["shape"]), [])
        for rank, (share, of_share) in enumerate(zip(self.shares, places)):
            commit.check_written(*([draft / _file_of(rank)] if share else []))
            for (key, box), place in zip(share, of_share):
                at, size = map(torch.Size, box)
                is_tensor = "shape" in self.described[key,]
                infos[torchs.MetadataIndex(key, at if is_tensor else None)] = dcp_place(
                    _file_of(rank), *place
                )
                if is_tensor:
                    entries[key].chunks.append(torchs.ChunkStorageMetadata(at, size))
        paths = {key: tuple(entry["tree"]) for (key,), entry in self.described.items()}
        data = pickle.dumps(torchs.Metadata(entries, paths, infos, torchs.StorageMeta(save_id=save_id)))
        commit.write_small_file(draft / METADATA, data)
        commit.write_small_file(draft / DIGEST, f"{hashlib.sha256(data).hexdigest()}\n".encode())


def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _check_storable(path: KeyPath, value: Any) -> None:
    """Raise an error unless the value can be loaded again."""
    if any(isinstance(leaf.value, Tensor) for leaf in leaves_of(value)):
        expected, got = "tensors in dicts and lists", "a tensor in a container that DCP does not look into"
        refuse(path, expected, got, f"Make this {type(value).__name__} a list or a dict.")
    commit.check_loadable(path, value)


# --- Reading -----------------------------------------------------------------------------------------------


class Blobs(Source):
    """The files of a DCP checkpoint, as a source of a load (`loading.Source`).

    Attributes:
        manifest: it lists the entries by DCP's record of their paths, or by (key,) without one; in a load, by the paths of the state
            dict. Its digest is the SHA-256 of the metadata.
        metadata: the file `.metadata`. files: a chunk names its file by the place in this list.
    """

    def __init__(self, manifest: Manifest, opened: ExitStack, metadata: Path, files: list[Path]) -> None:
        super().__init__(manifest, opened)
        self.metadata, self.files = metadata, files

    def value(self, entry: ValueEntry) -> Any:
        assert entry.chunk is not None
        return self._read(entry, entry.chunk)

    def tensor(self, entry: TensorEntry, chunk: Chunk) -> Tensor:
        found = self._read(entry, chunk)
        expected = f"{entry.dtype} {list(chunk.box.shape)}"
        got = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        if got != expected or found.layout != torch.strided:
            raise damaged(self.files[chunk.file], f"a tensor {expected}", got, chunk.at, _key_of(entry.path))
        return cast(Tensor, found)

    def _read(self, entry: Entry, chunk: Chunk) -> Any:
        """Read a blob into memory, compare its checksums, and load it with `torch.load`. No code of it runs."""
        path, key = self.files[chunk.file], _key_of(entry.path)
        try:
            fd = self.open_file(path)
            if (size := os.fstat(fd).st_size) < chunk.at + chunk.nbytes:
                raise damaged(
                    path, f"{chunk.nbytes} bytes from byte {chunk.at} on", f"{size} in all", key=key
                )
            blob = io.BytesIO(bytes(chunk.nbytes))
            commit.read_exactly(fd, blob.getbuffer(), chunk.at, path, key)
            if commit.check_archive(blob, path, key, chunk.at) != chunk.seal and chunk.seal >= 0:
                got = "something else that was saved"
                raise damaged(path, "what was written there", got, chunk.at, key)
            return commit.load_archive(blob, path, {"map_location": "cpu"}, key, chunk.at)
        except CheckpointError:
            self.confirm()  # its error is the cause, if there is one
            raise

    def confirm(self) -> None:
        if hashlib.sha256(_contents_of(self.metadata)).hexdigest() != self.manifest.digest:
            remedy = "Load again, and replace no checkpoint that is being read."
            got = "another save, which has replaced this one"
            raise damaged(self.metadata, "the same save as when the load began", got, remedy=remedy)


def _key_of(path: KeyPath) -> str:
    return ".".join(map(str, path))


# --- Metadata ----------------------------------------------------------------------------------------------

T = TypeVar("T")
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_DCP}.metadata": "_MEM_FORMAT_ENCODING BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex"
    " StorageMeta TensorProperties TensorStorageMetadata".split(),
    f"{_DCP}.filesystem": ["_StorageInfo"],
    "torch": ["Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))],
    "torch.serialization": ["_get_layout"],
    "collections": ["OrderedDict"],
    "pathlib": ["Path", "PosixPath", "WindowsPath"],
}


def _list_of(n: int) -> Callable[[Any], None]:
    """Return a step of an unpickler that makes a list of the last n objects."""

    def step(unpickler: Any) -> None:
        unpickler.stack[-n:] = [unpickler.stack[-n:]]

    return step


def _refused(unpickler: Any) -> None:
    raise ValueError("what DCP's metadata does not have: sets or byte arrays")


class _Unpickler(pickle._Unpickler):
    """An unpickler that makes stand-ins for the classes of DCP's metadata, and refuses all other classes.

    It is the one in Python: a crafted pickle can make the one in C reserve any amount of memory, as byte arrays do in both. It makes
    lists in place of tuples, and no sets: Python hashes nested tuples and sets without any limit. `path`: what an error names.
    """

    path: Path
    dispatch = dict(pickle._Unpickler.dispatch)
    dispatch |= dict.fromkeys(
        (op[0] for op in (pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8)), _refused
    )
    dispatch |= {
        pickle.TUPLE[0]: dispatch[pickle.LIST[0]],
        pickle.EMPTY_TUPLE[0]: dispatch[pickle.EMPTY_LIST[0]],
    }
    dispatch |= {pickle.TUPLE1[0]: _list_of(1), pickle.TUPLE2[0]: _list_of(2), pickle.TUPLE3[0]: _list_of(3)}

    def find_class(self, module: str, name: str) -> Any:
        """Return a new class each time, because a pickle may change the classes that it gets."""
        if name not in _ALLOWED.get(module, ()):
            expected, got = "only the classes of DCP's metadata", f"{module}.{name}, which was not run"
            remedy = "Do not load this checkpoint with torch, which would run it; ask where it comes from."
            raise damaged(self.path, expected, got, remedy=remedy)
        if module == "torch":  # dtypes and torch.Size, which have no attributes to change
            return getattr(torch, name)
        if name == "OrderedDict":  # without its items, which come with steps of their own
            return type(name, (OrderedDict,), {"__init__": _StandIn.__init__})
        return type(name, (_StandIn,), {})


class _StandIn:
    """A stand-in for an object of DCP's metadata: it has the fields of the object."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        # The state of TensorProperties was a tuple that begins with the dtype. Other states are dicts.
        vars(self).update({"dtype": state[0]} if isinstance(state, list) else {**state})


def _class_of(thing: Any) -> str:
    return type(thing).__name__ if isinstance(thing, _StandIn) else "something else"


def _contents_of(path: Path) -> bytes:
    return commit.read_small_file(path, LARGEST, may_be_link=True)


def read_metadata(directory: Path, opened: ExitStack) -> Blobs:
    """Read and check the list of the checkpoint's contents.

    Args:
        directory: as DCP's `FileSystemWriter` leaves it. opened: closes the files of blobs, which are opened when they are read.

    Raises:
        UsageError: there is no directory, or one of another format.
        CheckpointError: there is no metadata; it asks for other classes than DCP's own, none of which was run; it is damaged;
            chunks overlap, leave gaps or exceed their tensor; or a blob is outside the directory.
    """
    path = directory / METADATA
    check_format(directory, "the directory of a DCP checkpoint", "dcp")
    data = _contents_of(path)
    expected = _contents_of(directory / DIGEST).strip() if (directory / DIGEST).exists() else None
    digest = hashlib.sha256(data).hexdigest()
    if expected not in (None, digest.encode()):  # torch writes none
        remedy = f"Take another checkpoint; if torch has written over this one, remove {DIGEST}."
        raise damaged(path, f"the metadata whose SHA-256 is in {DIGEST}", f"{digest[:12]}…", remedy=remedy)
    try:
        unpickler = _Unpickler(io.BytesIO(data))
        unpickler.path = path
        metadata = unpickler.load()
        if _class_of(metadata) != "Metadata":
            raise TypeError(f"a {type(metadata).__name__} instead of DCP's Metadata")
        entries, files = _checked_entries(path, metadata)
    except CheckpointError:
        raise
    except Exception as error:  # the file is crafted or cut short
        raise damaged(path, "a pickle of DCP's metadata", told(error)) from error
    return Blobs(Manifest("", (), {}, entries, digest=digest), opened, path, files)


def _checked_entries(path: Path, metadata: Any) -> tuple[dict[KeyPath, Entry], list[Path]]:
    """Return every tensor and value, and the files. Raise an error if the metadata is not consistent."""
    # The index of a value has no offset.
    infos = {
        (_a(str, at.fqn), getattr(at, "offset", None) and _sizes(at.offset)): info
        for at, info in metadata.storage_data.items()
    }
    entries: dict[KeyPath, Entry] = {}
    files: dict[Path, int] = {}
    paths = metadata.planner_data or {}

    def chunk_of(key: str, box: Box | None) -> Chunk:
        info = infos.get((key, box and box.offset))
        if info is None:
            raise damaged(path, f"where the part at {box and box.offset} is", "nothing", key=key)
        file, offset, length = _place_of(path, key, info)
        seal = _a(int, getattr(info, "seal", -1))  # torch writes none
        return Chunk(files.setdefault(file, len(files)), offset, box or whole(()), nbytes=length, seal=seal)

    for key, entry in metadata.state_dict_metadata.items():
        at = _path_of(key, paths.get(key))
        if _class_of(entry) == "TensorStorageMetadata":
            dtype, shape = _a(torch.dtype, entry.properties.dtype), _sizes(entry.size)
            boxes = [Box(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in entry.chunks]
            fault = find_fault(shape, [box for box in boxes if box.numel]) if boxes else "no chunk"
            if fault:
                raise damaged(path, f"chunks that make up the shape {shape}", fault, key=key)
            entries[at] = TensorEntry(at, dtype, shape, tuple(chunk_of(key, box) for box in boxes))
        elif _class_of(entry) == "BytesStorageMetadata":
            entries[at] = ValueEntry(at, chunk=chunk_of(key, None))
        else:
            raise damaged(path, "a tensor or a value", type(entry).__name__, key=key)
    return entries, [*files]


def _path_of(key: str, record: Any) -> KeyPath:
    """Return DCP's record of the path behind a key; the key alone if this is no record of it."""
    steps = tuple(record) if isinstance(record, list) else ()
    is_path = all(type(step) in (int, str) for step in steps) and _key_of(steps) == key
    return steps if steps and is_path else (key,)


def _a(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} in place of a {kind.__name__}")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise TypeError(f"{[n if type(n) is int else type(n).__name__ for n in sizes[:8]]} are no sizes")
    return sizes


def _place_of(path: Path, key: str, info: Any) -> tuple[Path, int, int]:
    """Return the file, offset and length of a blob."""
    name = info.relative_path
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or re.search(r"[\\:\0]", name) or not name:
        raise damaged(path, "a file in the directory of the checkpoint", f"the path {name!r}", key=key)
    offset, length = _sizes((info.offset, info.length))
    return path.parent / name, offset, length
