"""A checkpoint of torch's DCP, read without trusting it.

Such a checkpoint is a directory: a file `.metadata`, and files of *blobs*, one blob for each chunk of a tensor and for
each value that is no tensor. The metadata is a pickle, and a pickle is a program: loading one that somebody has crafted
runs whatever they wanted. So it is read by an unpickler that knows the few classes DCP's metadata is made of, and
nothing else (`read_metadata`). What comes out is believed only as far as it was checked: chunks tile their tensors, and
blobs lie in files of this directory.

Blobs are zip files made by `torch.save`. They carry checksums, which `torch.load` ignores; here they are compared
(`read_value`, `check_chunk`), so a flipped bit is an error and not a weight. Values that are no tensors are read with
`weights_only=True`.

Left out: checkpoints from before torch 2.1, whose metadata has other classes, and experimental transforms of blobs.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import pickletools
import re
from enum import EnumMeta
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from hwfsdp.checkpoint.archives import find_damage
from hwfsdp.checkpoint.boxes import Box, find_fault
from hwfsdp.errors import CheckpointError

METADATA, DIGEST = ".metadata", ".metadata.sha256"

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
    """Where a chunk or a value is: `length` bytes from `offset` on, in a file of the directory."""

    file: Path
    offset: int
    length: int


class Manifest(NamedTuple):
    """What a checkpoint says about itself, after it was checked.

    Attributes:
        metadata: DCP's own object, for DCP's own reader.
        blobs: (key, offset of the chunk in its tensor) to where it is; the offset of a value is None.
        digest: of the metadata, to compare between ranks.
    """

    directory: Path
    metadata: Metadata
    blobs: dict[tuple[str, tuple[int, ...] | None], Blob]
    digest: str


class _Unpickler(pickle.Unpickler):
    """Makes objects of DCP's metadata classes, and of no other; the classes stay what they are."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.given: dict[int, tuple[Any, dict[str, Any]]] = {}  # what could be changed, with what was in it

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise _Refused(f"{module}.{name}, which was not run")
        if name == "_get_layout":
            return lambda layout: {"torch.strided": torch.strided}[layout]
        found = super().find_class(module, name)
        if isinstance(found, type):
            for thing in (found, *(found if isinstance(found, EnumMeta) else ())):
                self.given.setdefault(id(thing), (thing, dict(vars(thing))))
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused(f"a persistent id, {pid!r}")

    def load(self) -> Any:
        try:
            result = super().load()
        finally:
            changed = [thing for thing, was in self.given.values() if _put_back(thing, was)]
        if changed:
            raise _Refused(f"a change of {changed[0]!r}, which was undone")
        return result


def _put_back(thing: Any, was: dict[str, Any]) -> bool:
    """Makes attributes of a class, or of a member of an enum, what they were; returns whether they were others."""
    now = dict(vars(thing))
    for name in now.keys() - was.keys():
        delattr(thing, name)
    for name, value in was.items():
        if now.get(name) is not value:
            setattr(thing, name, value)
    return {name: id(value) for name, value in now.items()} != {
        name: id(value) for name, value in was.items()
    }


class _Refused(Exception):
    """What the metadata wanted to be given."""


def read_metadata(directory: Path) -> Manifest:
    """What is in the checkpoint.

    Args:
        directory: as DCP's `FileSystemWriter` leaves it.

    Raises:
        CheckpointError: there is no metadata; it asks for anything but DCP's own classes, and none of it was run; it
            is damaged; chunks overlap, leave gaps or exceed their tensor; a blob is missing, or not in the directory.
    """
    path = directory / METADATA
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _damaged(
            path, "the metadata of a DCP checkpoint", f"{type(error).__name__}: {error.strerror}"
        ) from error
    _check_digest(path, data)
    try:
        _check_opcodes(data)
        metadata = _Unpickler(data).load()
    except _Refused as error:
        raise CheckpointError(
            str(path),
            expected="only the classes that DCP's metadata is made of",
            got=str(error),
            remedy="Do not load this checkpoint with torch, which would run it; ask where it comes from.",
        ).at(path) from None
    except Exception as error:
        raise _damaged(path, "a pickle of DCP's metadata", _one_line(error)) from error
    try:
        blobs = _blobs_of(directory, metadata)
    except (AttributeError, TypeError, ValueError, KeyError) as error:  # crafted, or cut short
        raise _damaged(path, "the fields of DCP's metadata", _one_line(error)) from error
    return Manifest(directory, metadata, blobs, hashlib.sha256(data).hexdigest())


def write_digest(directory: Path) -> None:
    """Vouches for the metadata, which itself has no checksum, in a file that torch does not look at."""
    (directory / DIGEST).write_text(hashlib.sha256((directory / METADATA).read_bytes()).hexdigest() + "\n")


def _check_digest(path: Path, data: bytes) -> None:
    try:
        expected = (path.parent / DIGEST).read_text().strip()
    except FileNotFoundError:
        return  # written by torch
    except (OSError, ValueError) as error:
        raise _damaged(path.parent / DIGEST, "a SHA-256", _one_line(error)) from error
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise CheckpointError(
            str(path),
            expected=f"the metadata with SHA-256 {expected[:12]}…, as {DIGEST} says",
            got=f"{found[:12]}…",
            remedy=f"Take another checkpoint; if torch has written over this one, remove {DIGEST}.",
        ).at(path)


def _check_opcodes(data: bytes) -> None:
    """Refuses what makes an unpickler reserve memory out of proportion: memo indexes that no pickle would use."""
    for opcode, argument, position in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > (position or 0):
            raise ValueError(f"the memo index {argument} at byte {position}")


def _damaged(file: Path, expected: str, got: str, key: str | None = None) -> CheckpointError:
    subject = str(file) if key is None else f"{file}, {key}"
    remedy = "Take another checkpoint; this one is damaged, incomplete or of another format."
    return CheckpointError(subject, expected=expected, got=got, remedy=remedy).at(file, key)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


# --- Structure ---------------------------------------------------------------------------------------------


def _blobs_of(directory: Path, metadata: Any) -> dict[tuple[str, tuple[int, ...] | None], Blob]:
    """Where every chunk and value is, once the metadata turned out to be consistent."""
    path = directory / METADATA
    if not isinstance(metadata, Metadata):
        raise _damaged(path, "DCP's Metadata", type(metadata).__name__)
    places = {}
    for index, info in metadata.storage_data.items():
        offset = None if index.offset is None else _sizes(index.offset)
        places[_text(index.fqn), offset] = info
    blobs = {}
    files: dict[Path, int] = {}
    for key, entry in metadata.state_dict_metadata.items():
        offsets: list[tuple[int, ...] | None] = [None]
        if isinstance(entry, TensorStorageMetadata):
            _check_tiles(path, _text(key), entry)
            offsets = [tuple(chunk.offsets) for chunk in entry.chunks]
        elif not isinstance(entry, BytesStorageMetadata):
            raise _damaged(path, "a tensor or a value", type(entry).__name__, key)
        for offset in offsets:
            if (key, offset) not in places:
                raise _damaged(path, f"where the part at {offset} is", "nothing", key)
            blobs[key, offset] = _blob(directory, key, places[key, offset], files)
    _check_places(blobs)
    return blobs


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no key")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise TypeError(f"{sizes} are no sizes")
    return sizes


def _blob(directory: Path, key: str, info: Any, files: dict[Path, int]) -> Blob:
    name, path = _text(info.relative_path), directory / METADATA
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or re.search(r"[\\:\0]", name) or not name:
        raise _damaged(path, "a file in the directory of the checkpoint", f"the path {name!r}", key)
    offset, length = _sizes((info.offset, info.length))
    if getattr(info, "transform_descriptors", None):
        raise _damaged(
            path, "blobs as torch.save writes them", f"transforms {info.transform_descriptors}", key
        )
    file = directory / name
    if file not in files:
        try:
            files[file] = file.stat().st_size
        except OSError as error:
            raise _damaged(
                file, "a file with chunks of tensors", f"{type(error).__name__}: {error.strerror}"
            ) from error
    if offset + length > files[file]:
        got = f"{files[file]} bytes; the part at {offset} has {length}"
        raise _damaged(file, "the size that the metadata says", got, key)
    return Blob(file, offset, length)


def _check_tiles(path: Path, key: str, entry: TensorStorageMetadata) -> None:
    """Every element of the tensor is in exactly one chunk."""
    size = _sizes(entry.size)
    if not isinstance(entry.properties.dtype, torch.dtype):
        raise TypeError(f"{entry.properties.dtype!r} is no dtype")
    boxes = [Box(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in entry.chunks]
    fault = find_fault(size, [box for box in boxes if box.numel]) if boxes else "no chunk"
    if fault:
        raise _damaged(path, f"chunks that make up the shape {size}", fault, key)


def _check_places(blobs: dict[tuple[str, tuple[int, ...] | None], Blob]) -> None:
    """No two blobs share a byte."""
    by_place = sorted(blobs.items(), key=lambda item: (str(item[1].file), item[1].offset))
    for (_, one), ((key, _), other) in zip(by_place, by_place[1:]):
        if one.file == other.file and one.offset + one.length > other.offset:
            raise _damaged(
                one.file,
                f"a place of its own, after byte {one.offset + one.length}",
                f"byte {other.offset}",
                key,
            )


# --- Blobs -------------------------------------------------------------------------------------------------


def read_value(manifest: Manifest, key: str) -> Any:
    """The value, which is no tensor, under this key.

    Raises:
        CheckpointError: it is damaged, or made of more than `torch.load(weights_only=True)` allows; none of it was run.
    """
    blob = manifest.blobs[key, None]
    return _load(_read(blob, key), blob, key, map_location="cpu")


def check_chunk(manifest: Manifest, key: str, chunk: ChunkStorageMetadata) -> None:
    """Raises if the chunk of the tensor under this key cannot be read as what it should be.

    Raises:
        CheckpointError: a checksum is wrong, or it is no tensor, or one of another shape or dtype than the metadata says.
    """
    blob = manifest.blobs[key, tuple(chunk.offsets)]
    found = _load(_read(blob, key), blob, key, map_location="meta")
    entry = manifest.metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    expected = f"{entry.properties.dtype} {list(chunk.sizes)}"
    got = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    if got != expected or found.layout != torch.strided:
        raise _damaged(blob.file, f"a tensor {expected}", got, key).at(blob.file, key, blob.offset)


def _read(blob: Blob, key: str) -> io.BytesIO:
    """The bytes of the blob, an archive that is as it was written."""
    try:
        with blob.file.open("rb") as file:
            file.seek(blob.offset)
            data = io.BytesIO(file.read(blob.length))
    except OSError as error:
        raise _damaged(blob.file, "a file that can be read", _one_line(error), key) from error
    damage = find_damage(data)
    if damage is not None:
        got = f"{damage.got} ({damage.record})" if damage.record else damage.got
        raise _damaged(blob.file, damage.expected, got, key).at(blob.file, key, blob.offset + damage.offset)
    data.seek(0)
    return data


def _load(data: io.BytesIO, blob: Blob, key: str, map_location: str) -> Any:
    try:
        return torch.load(data, map_location=map_location, weights_only=True)
    except Exception as error:
        raise _damaged(
            blob.file, "what torch.load(weights_only=True) allows", _one_line(error)[:300], key
        ).at(blob.file, key, blob.offset) from error
