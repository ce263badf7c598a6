"""The metadata of a checkpoint of torch's DCP, read without trust.

Such a checkpoint is a directory with a file `.metadata` and files of *blobs*. There is one blob for each chunk of a tensor, and
one for each value that is not a tensor. The metadata is a pickle, and a pickle is a program: a crafted pickle runs its author's
code when it is loaded. So `read_metadata` uses an unpickler that knows only the few classes of DCP's metadata. Its result is
checked, too: chunks must tile their tensors, and blobs must lie in files of this directory.

Blobs are zip files made by `torch.save`. They carry checksums, which `torch.load` ignores. `read_value` and `read_chunk` compare
them, so a flipped bit causes an error instead of a wrong weight. Both read with `weights_only=True`.

Left out: checkpoints from before torch 2.1, whose metadata has other classes, and experimental transforms of blobs.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import pickletools
import re
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hwfsdp.checkpoint.archives import load_archive
from hwfsdp.checkpoint.blocks import write_small_file
from hwfsdp.checkpoint.boxes import Box, find_fault
from hwfsdp.checkpoint.messages import damaged, told

METADATA, DIGEST = ".metadata", ".metadata.sha256"
T = TypeVar("T")

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


class Blob(NamedTuple):
    """The place of a chunk or value: `length` bytes of a file, from `offset` on. `box` is the chunk's part of its tensor, or None."""

    file: Path
    offset: int
    length: int
    box: Box | None


class Stored(NamedTuple):
    """The entry under a key: a tensor and its chunks, or a value. A value has one blob, and its `dtype` is None."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    blobs: list[Blob]

    def __str__(self) -> str:
        return "a value" if self.dtype is None else f"a tensor {self.dtype} {list(self.shape)}"


class Manifest(NamedTuple):
    """The checked metadata of a checkpoint.

    Attributes:
        paths: DCP's record of the path in the state dict behind each key; empty if there is none.
        digest: the SHA-256 of the metadata, which ranks compare.
    """

    entries: dict[str, Stored]
    paths: dict[str, Any]
    digest: str


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


def _kind_of(thing: Any) -> str:
    return type(thing).__name__ if isinstance(thing, _StandIn) else "something else"


class _Refused(Exception):
    """The metadata asks for a class or function that it may not load."""


def read_metadata(directory: Path) -> Manifest:
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
    if _kind_of(metadata) != "Metadata":
        raise damaged(path, "DCP's Metadata", type(metadata).__name__)
    try:
        entries = _entries_of(path, metadata)
    except (AttributeError, TypeError, ValueError, KeyError) as error:  # the file is crafted or cut short
        raise damaged(path, "the fields of DCP's metadata", told(error)) from error
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return Manifest(entries, paths, hashlib.sha256(data).hexdigest())


def write_digest(directory: Path) -> None:
    """Write a checksum of the metadata into a file that torch ignores. The metadata itself has no checksum."""
    digest = hashlib.sha256((directory / METADATA).read_bytes()).hexdigest()
    write_small_file(directory / DIGEST, f"{digest}\n".encode())


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


def _entries_of(path: Path, metadata: Any) -> dict[str, Stored]:
    """Return every tensor and value. Raise an error if the metadata is not consistent."""
    # The index of a value has no offset.
    places = {
        (_of(str, index.fqn), getattr(index, "offset", None)): info
        for index, info in metadata.storage_data.items()
    }
    entries: dict[str, Stored] = {}
    for key, entry in metadata.state_dict_metadata.items():
        boxes: list[Box | None] = [None]
        stored = Stored(None, (), [])
        if _kind_of(entry) == "TensorStorageMetadata":
            stored = Stored(_of(torch.dtype, entry.properties.dtype), _sizes(entry.size), [])
            boxes = [Box(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in entry.chunks]
            filled = [box for box in boxes if box and box.numel]
            fault = find_fault(stored.shape, filled) if boxes else "no chunk"
            if fault:
                raise damaged(path, f"chunks that make up the shape {stored.shape}", fault, key=_of(str, key))
        elif _kind_of(entry) != "BytesStorageMetadata":
            raise damaged(path, "a tensor or a value", type(entry).__name__, key=key)
        for box in boxes:
            info = places.get((key, box and box.offset))
            if info is None:
                raise damaged(path, f"where the part at {box and box.offset} is", "nothing", key=key)
            stored.blobs.append(_blob(path, key, info, box))
        entries[key] = stored
    _check_places(entries)
    return entries


def _of(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise TypeError(f"{sizes} are no sizes")
    return sizes


def _blob(path: Path, key: str, info: Any, box: Box | None) -> Blob:
    name = _of(str, info.relative_path)
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or re.search(r"[\\:\0]", name) or not name:
        raise damaged(path, "a file in the directory of the checkpoint", f"the path {name!r}", key=key)
    offset, length = _sizes((info.offset, info.length))
    transforms = getattr(info, "transform_descriptors", None)
    if transforms:
        raise damaged(path, "blobs as torch.save writes them", f"transforms {transforms}", key=key)
    return Blob(path.parent / name, offset, length, box)


def _check_places(entries: dict[str, Stored]) -> None:
    """Raise an error unless every blob lies in an existing file and no two blobs share a byte."""
    places = [(str(blob.file), blob, key) for key, stored in entries.items() for blob in stored.blobs]
    file, end = None, 0
    for _, blob, key in sorted(places, key=lambda place: (place[0], place[1].offset)):
        if blob.file != file:
            file, end = blob.file, 0
            try:
                size = file.stat().st_size
            except OSError as error:
                raise damaged(file, "a file with chunks of tensors", told(error)) from error
        if blob.offset + blob.length > size:
            got = f"{size} bytes; the part at {blob.offset} has {blob.length}"
            raise damaged(file, "the size that the metadata says", got, key=key)
        if blob.offset < end:
            raise damaged(file, f"a place of its own, after byte {end}", f"byte {blob.offset}", key=key)
        end = blob.offset + blob.length


# --- Blobs -------------------------------------------------------------------------------------------------


def read_value(key: str, stored: Stored) -> Any:
    """Read the value under this key; it is not a tensor.

    Raises:
        CheckpointError: the blob is damaged, or contains something that `torch.load(weights_only=True)` does not allow. No code of
            it has run.
    """
    return _read(stored.blobs[0], key)


def read_chunk(key: str, stored: Stored, blob: Blob, *, check: bool) -> Tensor:
    """Read a chunk of the tensor under this key, to the CPU.

    Args:
        check: only compare checksums, and return a tensor on the meta device.

    Raises:
        CheckpointError: a checksum is wrong, or the blob is not a tensor with the shape and dtype that the metadata says.
    """
    found = _read(blob, key, check, "meta" if check else "cpu")
    expected = f"{stored.dtype} {list(blob.box.shape if blob.box else ())}"
    got = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    if got != expected or found.layout != torch.strided:
        raise damaged(blob.file, f"a tensor {expected}", got, blob.offset, key)
    chunk: Tensor = found
    return chunk


def _read(blob: Blob, key: str, check: bool = True, location: str = "cpu") -> Any:
    """Load a blob with `torch.load`. With `check`, first compare its checksums."""
    try:
        with blob.file.open("rb") as file:
            file.seek(blob.offset)
            data = io.BytesIO(file.read(blob.length))
    except OSError as error:
        raise damaged(blob.file, "a file that can be read", told(error), key=key) from error
    return load_archive(data, blob.file, {"map_location": location}, key, blob.offset, check)
