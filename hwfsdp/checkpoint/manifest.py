"""The manifest of a save: the list of its contents and their places. It is JSON, and the reader does not trust it.

    {"format": "hwfsdp checkpoint", "version": 1, "save": "000002-5e0c9f1a", "block_bytes": 1048576,
     "files": [{"name": "00000.bin", "bytes": 4194368}, …],
     "containers": [[[], "dict"], [["optim"], "dict"], …],
     "entries": [{"path": ["model", "weight"], "dtype": "float32", "shape": [8, 4], "chunks":
                    [{"file": 0, "at": 64, "offset": [0, 0], "shape": [4, 4], "crc32": ["1c291ca3"]}, …]},
                 {"path": ["optim", "lr"], "value": 0.001}, …],
     "sha256": "…"}

The last field is the hash of everything before it. So the hash protects the manifest itself and, through the checksums of the
blocks, every block of every file. `save` is also in the first bytes of every file, and `CURRENT` has it together with the hash
of the manifest. So files of two saves cannot be mixed. The directory of a save may get another name.

A manifest with a correct hash may still come from an attacker. So this module checks everything before it is used. It accepts only
what `to_bytes` would write for the same contents, byte by byte: so no field is missing, comes twice or has another form, and files
have the names that this module gives them. It also checks what a text can say and a save cannot mean: that chunks tile their
tensors, that chunks do not overlap in their files, and that everything is in a container.

A state dict also has small values that are not tensors: learning rates, counters, names, flags. Values of JSON's own types are written
as they are. Any other value becomes an object that names its type (`encode`). Types outside the list below are refused, because a
format that could write them could also run code when it is read.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

try:  # the same checksum as zlib's, several times as fast
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

from hwfsdp.checkpoint.boxes import Box, find_fault
from hwfsdp.checkpoint.error_messages import KeyPath, damaged, show

FORMAT, VERSION = "hwfsdp checkpoint", 1
checksum = crc32
BLOCK_BYTES = 1 << 20  # each block has a checksum
ALIGNMENT = 64  # bytes; every chunk begins at a multiple
LARGEST, _LARGEST_BLOCK = 1 << 29, 1 << 26  # most bytes of a manifest, of a block
SAVE_ID = re.compile("[0-9]{6,30}-[0-9a-f]{8}")
# how pickles begin, and the files of torch.save
PICKLES = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
KINDS = ("dict", "list", "tuple")


class Chunk(NamedTuple):
    """A part of a tensor and the bytes that hold it, row-major.

    Attributes:
        file: index into the files of the checkpoint. at: the byte of the file at which the chunk begins.
        box: the part of the tensor. crc32: one checksum for each block (`Manifest.block_bytes`); the last block may be shorter.
        nbytes: the bytes in the file, in formats of others. In ours, they follow from the box.
        seal: of DCP's chunks, see Note [Seals] in `dcp`; -1 if there is none.
        values: the values, if the file is mapped into memory (PART, safetensors). Then `file`, `at` and `nbytes` mean nothing.
    """

    file: int
    at: int
    box: Box
    crc32: tuple[int, ...] = ()
    nbytes: int = 0
    values: torch.Tensor | None = None
    seal: int = -1


@dataclass(frozen=True)
class TensorEntry:
    """A tensor; its chunks tile it. `same_as`: the path of another entry whose tensor had the same memory at the save, or None."""

    path: KeyPath
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()
    same_as: KeyPath | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"a tensor of shape {self.shape} and {self.dtype}"


@dataclass(frozen=True)
class ValueEntry:
    """A value that is not a tensor: the result of `encode`, or, in formats of others, the place of the value in the files."""

    path: KeyPath
    json_value: Any = None
    chunk: Chunk | None = None

    def __str__(self) -> str:
        if self.chunk is not None:
            return "a value"
        return f"the {type(decode(self.json_value)).__name__} {str(decode(self.json_value))[:40]!r}"


Entry = TensorEntry | ValueEntry


@dataclass(frozen=True)
class Manifest:
    """The description of a save: everything but the bytes of the tensors.

    Attributes:
        files: the bytes of each file; `name_of` gives its name.
        containers: by path, the kind of each container ("dict", "list", "tuple").
        digest: the SHA-256 of the text, in hex; "" before the manifest is written.
    """

    save_id: str
    files: tuple[int, ...]
    containers: dict[KeyPath, str]
    entries: dict[KeyPath, Entry]
    block_bytes: int = BLOCK_BYTES
    digest: str = field(default="", compare=False)

    @property
    def identity(self) -> str:
        """A text that is the same for two manifests only if they are of one save."""
        return f"{self.save_id} {self.digest}"

    def tensors(self) -> Iterator[TensorEntry]:
        """Yield the tensors that list their own chunks."""
        for entry in self.entries.values():
            if isinstance(entry, TensorEntry) and entry.same_as is None:
                yield entry

    def tensor(self, path: KeyPath) -> TensorEntry:
        """Return the entry of the tensor at this path."""
        entry = self.entries[path]
        assert isinstance(entry, TensorEntry)
        return entry

    def with_chunks(self, chunks_of: Callable[[TensorEntry], Iterable[Chunk]]) -> Manifest:
        """Return a copy with other chunks for each tensor."""
        entries = {
            path: replace(entry, chunks=tuple(chunks_of(entry))) if isinstance(entry, TensorEntry) else entry
            for path, entry in self.entries.items()
        }
        return replace(self, entries=entries)

    def shares(self) -> list[list[tuple[TensorEntry, Chunk]]]:
        """Return the entries and chunks of each file, in the order of the file."""
        found: list[list[tuple[TensorEntry, Chunk]]] = [[] for _ in self.files]
        for entry in self.tensors():
            for chunk in entry.chunks:
                found[chunk.file].append((entry, chunk))
        return [sorted(share, key=lambda pair: pair[1].at) for share in found]

    def chunks_of(self, entry: TensorEntry) -> tuple[Chunk, ...]:
        """Return the chunks of a tensor. If the tensor is the same as another one, the other entry lists them."""
        return entry.chunks if entry.same_as is None else self.tensor(entry.same_as).chunks


def header_of(save_id: str, file: int) -> bytes:
    """Return the first `ALIGNMENT` bytes of a file of a save."""
    return f"hwfsdp data {VERSION} {save_id} {file:05d}".encode().ljust(ALIGNMENT - 1) + b"\n"


def aligned(nbytes: int) -> int:
    """Return the next place at which a chunk may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def name_of(file: int) -> str:
    return f"{file:05d}.bin"


# --- Writing -----------------------------------------------------------------------------------------------


def to_bytes(manifest: Manifest) -> tuple[bytes, str]:
    """Return the text of the manifest, as it is written, and its hash, with which it ends."""
    tree = {
        "format": FORMAT,
        "version": VERSION,
        "save": manifest.save_id,
        "block_bytes": manifest.block_bytes,
        "files": [{"name": name_of(i), "bytes": nbytes} for i, nbytes in enumerate(manifest.files)],
        "containers": [[list(path), kind] for path, kind in manifest.containers.items()],
        "entries": [_entry_as_json(entry) for entry in manifest.entries.values()],
    }
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()[:-1]
    digest = hashlib.sha256(text).hexdigest()
    return text + f',"sha256":"{digest}"}}\n'.encode(), digest


def _entry_as_json(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, ValueEntry):
        return {"path": list(entry.path), "value": entry.json_value}
    tree: dict[str, Any] = {
        "path": list(entry.path),
        "dtype": name_of_constant(entry.dtype),
        "shape": list(entry.shape),
    }
    if entry.same_as is not None:
        return {**tree, "same_as": list(entry.same_as)}
    return {**tree, "chunks": [_chunk_as_json(chunk) for chunk in entry.chunks]}


def _chunk_as_json(chunk: Chunk) -> dict[str, Any]:
    crc32 = [f"{crc:08x}" for crc in chunk.crc32]
    box = {"offset": list(chunk.box.offset), "shape": list(chunk.box.shape)}
    return {"file": chunk.file, "at": chunk.at, **box, "crc32": crc32}


# --- Reading -----------------------------------------------------------------------------------------------


def from_bytes(data: bytes, file: Path) -> Manifest:
    """Parse a manifest and check every field.

    Args:
        file: the file that the bytes are from.

    Raises:
        CheckpointError: the manifest is damaged, is of another version, or contradicts itself.
    """
    tree = parse_json(data, file)
    try:
        manifest = _manifest_of(tree)
        written, digest = to_bytes(manifest)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise damaged(file, "the fields of a manifest", f"{type(error).__name__}: {error}") from error
    if written != data:
        at = len(os.path.commonprefix([written, data]))
        raise damaged(file, f"{bytes(written[at:][:40])!r}, as a save writes it", f"{data[at:][:40]!r}", at)
    check_manifest(manifest, file)
    return replace(manifest, digest=digest)


def parse_json(data: bytes, file: Path) -> Any:
    """Parse an object of this format and version. Its other fields may be anything.

    Raises:
        CheckpointError: the data is something else.
    """
    if data[:2] in PICKLES:
        raise damaged(file, "JSON", "a pickle, which is never opened", 0)
    try:
        tree = json.loads(data.decode())
    except (ValueError, RecursionError) as error:  # also for data that is not UTF-8
        offset = getattr(error, "pos", getattr(error, "start", 0))
        raise damaged(file, "JSON", f"{' '.join(str(error).split())}", offset) from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise damaged(file, f'an object with "format": "{FORMAT}"', _brief(tree))
    if type(tree.get("version")) is not int or tree["version"] != VERSION:
        got, remedy = f"version {_brief(tree.get('version'))}", "Read it with the hwfsdp that wrote it."
        raise damaged(file, f"version {VERSION}, which this hwfsdp reads", got, remedy=remedy)
    return tree


def _brief(value: Any) -> str:
    """Describe a JSON value in a few words, however large or deep the value is."""
    if isinstance(value, dict):
        return f"one with {_brief(value.get('format'))}" if "format" in value else "one without"
    return type(value).__name__ if isinstance(value, list) else repr(value)[:60]


def _manifest_of(tree: Any) -> Manifest:
    """Turn JSON into a manifest. A value of the wrong type raises KeyError, TypeError or ValueError."""
    save_id, block_bytes = tree["save"], _natural(tree["block_bytes"])
    if not SAVE_ID.fullmatch(save_id) or block_bytes % ALIGNMENT or not 0 < block_bytes <= _LARGEST_BLOCK:
        raise ValueError(f"save {str(save_id)[:60]!r} with blocks of {block_bytes} bytes")
    files = tuple(_natural(file["bytes"]) for file in tree["files"])
    containers = {_path(path): str(kind) for path, kind in tree["containers"]}
    entries = [_entry_of(entry, block_bytes) for entry in tree["entries"]]
    return Manifest(save_id, files, containers, {entry.path: entry for entry in entries}, block_bytes)


def _entry_of(tree: Any, block_bytes: int) -> Entry:
    path = _path(tree["path"])
    if "value" in tree:
        decode(tree["value"])
        return ValueEntry(path, tree["value"])
    dtype, shape = dtype_named(tree["dtype"]), _naturals(tree["shape"])
    if "same_as" in tree:
        return TensorEntry(path, dtype, shape, same_as=_path(tree["same_as"]))
    chunks = tuple(_chunk_of(chunk) for chunk in tree["chunks"])
    for chunk in chunks:
        if len(chunk.crc32) != -(-chunk.box.numel * dtype.itemsize // block_bytes):
            raise ValueError(f"{len(chunk.crc32)} checksums for a part of {show(path)}")
    return TensorEntry(path, dtype, shape, chunks)


def _chunk_of(tree: Any) -> Chunk:
    crc32 = tuple(int(text, 16) for text in tree["crc32"])
    box = Box(_naturals(tree["offset"]), _naturals(tree["shape"]))
    return Chunk(_natural(tree["file"]), _natural(tree["at"]), box, crc32)


def check_manifest(manifest: Manifest, source: Path) -> None:
    """Raise an error if the manifest, which is or will be in the file `source`, contradicts itself."""
    check_tree(manifest, source)
    _check_tensors(manifest, source)


def check_tree(manifest: Manifest, source: Path) -> None:
    """Raise an error unless every entry and container is inside a container, up to the outermost one, a dict, and lists have no gaps."""
    keys: dict[KeyPath, set[Any]] = {}
    for path in [*manifest.entries, *manifest.containers]:
        keys.setdefault(path[:-1], set()).update(path[-1:])
        if path and path[:-1] not in manifest.containers:
            raise damaged(source, "entries in containers", "one in what is no container", key=show(path))
        if path in manifest.entries and path in manifest.containers:
            raise damaged(source, "an entry or a container", "both", key=show(path))
    if not set(manifest.containers.values()) <= {*KINDS} or manifest.containers.get(()) != "dict":
        got = f"{str(set(manifest.containers.values()))[:60]}"
        raise damaged(source, f"containers of the kinds {KINDS}, the outermost a dict", got)
    for path, kind in manifest.containers.items():
        if kind != "dict" and (found := keys.get(path, set())) != {*range(len(found))}:
            raise damaged(source, f"a {kind} with the places 0 to {len(found) - 1}", "others", key=show(path))


def _check_tensors(manifest: Manifest, source: Path) -> None:
    """Raise an error unless chunks tile their tensors, share no byte of a file, and leave gaps only for alignment."""
    originals = {entry.path: (entry.dtype, entry.shape) for entry in manifest.tensors()}
    for entry in manifest.entries.values():
        if isinstance(entry, TensorEntry) and entry.same_as is not None:
            if originals.get(entry.same_as) != (entry.dtype, entry.shape):
                raise damaged(source, f"{entry} at {show(entry.same_as)}", "none", key=show(entry.path))
    for entry in manifest.tensors():
        fault = find_fault(entry.shape, [chunk.box for chunk in entry.chunks])
        if fault:
            raise damaged(source, "parts that make up the tensor", fault, key=show(entry.path))
        for chunk in entry.chunks:
            if chunk.file >= len(manifest.files):
                expected, got = f"one of {len(manifest.files)} files", f"a part in file {chunk.file}"
                raise damaged(source, expected, got, key=show(entry.path))
    for file, share in enumerate(manifest.shares()):
        end = ALIGNMENT
        for entry, chunk in share:
            if chunk.at != aligned(end):
                got = f"byte {chunk.at}, where bytes up to {end} are taken"
                raise damaged(source, f"the next place in {name_of(file)}", got, key=show(entry.path))
            end = chunk.at + chunk.box.numel * entry.dtype.itemsize
        if manifest.files[file] != end:
            raise damaged(source, f"{manifest.files[file]} bytes in {name_of(file)}", f"{end} that are used")


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]!r} where a size or an index should be")
    return value


def _naturals(values: Any) -> tuple[int, ...]:
    return tuple(_natural(value) for value in values)


def _path(keys: Any) -> KeyPath:
    if not all(type(key) in (int, str) for key in keys):
        raise ValueError(f"{str(keys)[:60]!r} where a path of keys should be")
    return tuple(keys)


# --- Values that are not tensors ---------------------------------------------------------------------------


def name_of_constant(value: Any) -> str:
    """Return the name of a dtype or another constant in torch: "float32" for torch.float32."""
    return str(value).removeprefix("torch.")


def _constant(kind: type) -> Callable[[Any], Any]:
    """Return a reader for constants of torch of this type, such as torch.float32."""

    def read(name: Any) -> Any:
        found = getattr(torch, name, None) if isinstance(name, str) else None
        if not isinstance(found, kind):
            raise ValueError(f"no {kind.__name__} of torch: {name!r}")
        return found

    return read


def _bytes(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


def _complex(real: str, imag: str) -> complex:
    return complex(float.fromhex(real), float.fromhex(imag))


# By type, a function that returns the JSON of a value, and the reverse function.
_FORMS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    float: (lambda value: str(float(value)), float),  # infinite, or not a number
    bytes: (lambda value: base64.b64encode(value).decode(), _bytes),
    bytearray: (lambda value: base64.b64encode(value).decode(), lambda text: bytearray(_bytes(text))),
    complex: (
        lambda value: [value.real.hex(), value.imag.hex()],
        lambda parts: _complex(*parts),
    ),
    torch.Size: (list, torch.Size),
    torch.dtype: (name_of_constant, _constant(torch.dtype)),
    torch.device: (str, torch.device),
    torch.layout: (name_of_constant, _constant(torch.layout)),
    torch.memory_format: (name_of_constant, _constant(torch.memory_format)),
}
_READERS = {kind.__name__: read for kind, (_, read) in _FORMS.items()}

dtype_named = _constant(torch.dtype)


def encode(value: Any) -> Any:
    """Return the value as JSON.

    Raises:
        TypeError: a checkpoint cannot hold values of this type.
    """
    if isinstance(value, enum.Enum):  # it may be an int or str, too, and would come back as a plain one
        raise TypeError(type(value).__name__)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | int):
        return str(value) if isinstance(value, str) else int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    for kind, (write, _) in _FORMS.items():
        if isinstance(value, kind):
            return {"type": kind.__name__, "value": write(value)}
    raise TypeError(type(value).__name__)


def decode(json_value: Any) -> Any:
    """Return the value that `encode` wrote.

    Raises:
        ValueError: `encode` writes no such JSON.
    """
    if json_value is None or isinstance(json_value, bool | int | float | str):
        return json_value
    try:
        read = _READERS[json_value["type"]]
        return read(json_value["value"])
    except Exception as error:
        raise ValueError(f"no value that a checkpoint can hold: {str(json_value)[:80]}") from error
