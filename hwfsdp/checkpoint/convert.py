"""Checkpoints without a state dict to load into: looked at, checked, and converted from one format to another.

    inspect("runs/checkpoint")                  # what is in it
    verify("runs/checkpoint")                   # compares every byte with its checksum
    convert("runs/checkpoint", "everything.safetensors", to="safetensors")
    convert("runs/checkpoint", "model.safetensors", to="safetensors", key="model")     # what is under state["model"], alone

    store        ours: a directory with CURRENT
    part         PART_000.pt and so on (see `parts`)
    dcp          torch's: a directory with .metadata
    safetensors  one file; values that are not tensors go into its header, as JSON

One process reads the source into files beside the target, which are mapped into memory. Then it writes the target from them.
So a checkpoint may be larger than memory, but the disk needs room for one more copy of it. No process group takes part, even if
there is one: one rank converts, and the others need not call anything. They wait for it at a barrier before they load the target.

Note [What formats cannot say]
    PART has a place for models, for optimizers, and for other entries. A state dict with the key "model" is split in this way;
    its entry "optimizer" or "optim" becomes the optimizer. Any other state dict is written as one model.
    DCP writes the int keys of dicts as strings. When we read them, the keys of an optimizer's state become ints again.
    A safetensors file from another program is read as a flat dict. A safetensors file of ours returns everything as it was: tied
    tensors, types of containers and values, and empty containers, which come after the others. Its header also has checksums: of each
    tensor, and of itself.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hwfsdp.checkpoint import commit, dcp, parts
from hwfsdp.checkpoint.agreement import ALONE, Agreement
from hwfsdp.checkpoint.boxes import packed, view_bytes, whole
from hwfsdp.checkpoint.commit import sync_directory
from hwfsdp.checkpoint.error_messages import KeyPath, check_utf8, damaged, is_utf8, of_disk, path_of
from hwfsdp.checkpoint.error_messages import refusal, refuse, show, signs_in, with_size
from hwfsdp.checkpoint.loading import Blocks, LoadPlan, Source, read_tensors
from hwfsdp.checkpoint.manifest import ALIGNMENT, Chunk, Entry, Manifest, TensorEntry, ValueEntry, decode
from hwfsdp.checkpoint.manifest import check_tree, checksum, name_of_constant
from hwfsdp.checkpoint.part_files import read as read_parts
from hwfsdp.checkpoint.saving import Target, describe, save_agreed
from hwfsdp.checkpoint.traverse import container_like, items_of, leaves_of, nest
from hwfsdp.compat import storage_key
from hwfsdp.errors import CheckpointError, printable
from hwfsdp.optional_packages import needed_by

_HEADER, _SEAL = "hwfsdp", "hwfsdp.crc32"  # keys in a safetensors file's header


@dataclass(frozen=True)
class Conversion:
    """A finished conversion: the format of the source, the number of tensors, and their bytes."""

    source_format: str
    tensors: int
    nbytes: int


def format_of(path: Path) -> str:
    """Return the format of the checkpoint at `path`.

    Raises:
        UsageError: there is no checkpoint in a format that this module reads.
    """
    found = {*signs_in(path).values()}
    if path.is_file() and path.suffix == ".safetensors":
        found.add("safetensors")
    if len(found) != 1:
        got = f"signs of {' and '.join(sorted(found))}" if found else "none of them"
        got = got if path.exists() else "nothing"
        refuse(path, "a store, a DCP or a PART checkpoint, or a .safetensors file", got, "Check the path.")
    return found.pop()


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    overwrite: bool = False,
    key: str | Sequence[str | int] | None = None,
) -> Conversion:
    """Read one checkpoint and write its contents as another one, in another format or the same. One process calls it.

    Args:
        source: a checkpoint of any format. The function recognizes the format by the files.
        to: the format of the target: "store", "part", "dcp" or "safetensors".
        overwrite: replace the checkpoint of this format at the target as soon as the new one is complete. One of another format is
            refused.
        key: write only the dict under this key of the source, or under these keys, one inside the other. In the target, names begin
            below it: "weight", not "model.weight".

    Raises:
        UsageError: there is no source, the target exists already, there is no dict under `key`, or the target's format cannot hold
            an entry.
        CheckpointError: the source is damaged, or the disk fails. The target stays as it was.
    """
    source, target = path_of(source, "convert's source"), path_of(target, "convert's target")
    if to not in _WRITERS:
        refuse("convert", f"one of {sorted(_WRITERS)}", repr(to), "Choose one.")
    known = format_of(source)
    if os.path.lexists(target) and (not overwrite or os.path.samefile(source, target)):
        remedy = "Choose another path, or replace it with overwrite=True (--overwrite)."
        refuse(target, "no file or directory", "one", remedy)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        commit.sweep_beside(target)
        with commit.made_beside(target, secrets.token_hex(16)) as scratch:
            state = _under(key, _READERS[known](source, scratch))
            _WRITERS[to](state, target, overwrite)
            tensors = {id(v): v for _, v in leaves_of(state) if isinstance(v, Tensor)}
            del state
    except OSError as error:
        got, remedy = of_disk(error)
        expected = "room beside it for the contents of the source, and to write there"
        raise refusal(target, expected, got, remedy, CheckpointError) from error
    return Conversion(known, len(tensors), sum(tensor.nbytes for tensor in tensors.values()))


def _under(key: str | Sequence[str | int] | None, state: dict[Any, Any]) -> dict[Any, Any]:
    """Return the dict under the key, or under the keys, one inside the other."""
    path = () if key is None else (key,) if isinstance(key, str) else tuple(key)
    found: Any = state
    for n, step in enumerate(path, 1):
        items = items_of(found) or {}
        if not isinstance(found, dict) or not isinstance(items.get(step), dict):
            dicts = [k for k, value in items.items() if isinstance(value, dict)]
            refuse(path[:n], f"a dict of the source, such as {dicts}", "none", "Choose one of them as key=.")
        found = found[step]
    return found  # type: ignore[no-any-return]


_ZEROS = bytes(1 << 20)


def _tensor_in(directory: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make a tensor whose memory is a new file in the directory."""
    nbytes = prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    file = directory / secrets.token_hex(16)
    with open(file, "x+b") as made:
        try:  # on a full disk, a write to mapped memory without room would kill the process
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(made.fileno(), 0, nbytes)
            else:  # macOS has none
                for start in range(0, nbytes, len(_ZEROS)):
                    made.write(_ZEROS[: nbytes - start])
        except OSError as error:
            raise with_size(error, file, nbytes) from None
        mapped = mmap.mmap(made.fileno(), nbytes)
    return torch.frombuffer(mapped, dtype=torch.uint8).view(dtype).view(shape)


def _nested(leaves: dict[KeyPath, Any], kinds: dict[KeyPath, str]) -> dict[Any, Any]:
    """Build the containers around leaves. A container of unknown kind becomes a dict."""
    inner = {path[:n] for path in (*leaves, *kinds) for n in range(len(path))}

    def make(path: KeyPath, items: dict[Any, Any]) -> Any:
        kind = kinds.get(path, "dict")
        return container_like({} if kind == "dict" else [] if kind == "list" else (), items)

    tree: dict[Any, Any] = nest(leaves | {p: make(p, {}) for p in kinds if p and p not in inner}, make)
    return tree


# --- Readers -----------------------------------------------------------------------------------------------


def _read_all(source: Source, scratch: Path) -> dict[KeyPath, Any]:
    """Return all values, by path. Each tensor is in a new file, or in a file of the source that is mapped into memory as a whole."""
    mapped: dict[KeyPath, Tensor] = {}
    new: dict[KeyPath, Tensor] = {}
    for entry in source.manifest.tensors():
        if len(entry.chunks) == 1 and entry.chunks[0].values is not None:
            mapped[entry.path] = source.tensor(entry, entry.chunks[0])
        else:
            new[entry.path] = _tensor_in(scratch, entry.shape, entry.dtype)
    filled = {path: tensor for path, tensor in new.items() if tensor.numel()}
    read_tensors(LoadPlan(source, {}, {}, fresh=filled, tensors=filled), lambda: None)  # fresh: read in place
    tensors = mapped | new
    return {
        path: tensors[entry.same_as or path] if isinstance(entry, TensorEntry) else source.value(entry)
        for path, entry in source.manifest.entries.items()
    }


def _read_store(source: Path, scratch: Path) -> dict[Any, Any]:
    def read(current: commit.Current) -> dict[Any, Any]:
        folder, manifest = commit.read_complete(current)
        with ExitStack() as opened:
            return _nested(_read_all(Blocks(manifest, folder, opened), scratch), manifest.containers)

    return commit.unless_replaced(source, read)


def _read_part(source: Path, scratch: Path) -> dict[Any, Any]:
    found = read_parts(source, 8, {"map_location": "cpu", "mmap": True})
    state = found.state(_read_all(found, scratch))
    return {key: value for key, value in state.items() if not (key == "optimizer" and value == [])}


def _read_dcp(source: Path, scratch: Path) -> dict[Any, Any]:
    with ExitStack() as opened:
        leaves = _read_all(dcp.read_metadata(source, opened), scratch)
    tree: dict[Any, Any] = _with_int_keys(nest(leaves, lambda _, items: container_like(None, items)))
    return tree


def _with_int_keys(tree: Any) -> Any:
    """Return the same tree, with ints as keys of an optimizer's state (Note [What formats cannot say])."""
    if not isinstance(tree, dict):
        return tree
    if {"state", "param_groups"} <= tree.keys() and isinstance(tree["state"], dict):
        state = {int(k) if str(k).isdecimal() else k: value for k, value in tree["state"].items()}
        return {**tree, "state": state}
    return {key: _with_int_keys(value) for key, value in tree.items()}


def _read_safetensors(source: Path, scratch: Path) -> dict[Any, Any]:
    file = Safetensors(source)
    return _nested(_read_all(file, scratch), file.manifest.containers)


class Safetensors(Source):
    """A safetensors file, mapped into memory, as a source. Only a file of ours has checksums, and entries that are not tensors."""

    def __init__(self, path: Path) -> None:
        with needed_by("safetensors files"):
            import safetensors
        check_utf8(path, "safetensors")
        self.path = path
        try:
            with safetensors.safe_open(str(path), framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # mapped, not read yet
                metadata = file.metadata() or {}
        except (safetensors.SafetensorError, OSError) as error:
            raise damaged(path, "a safetensors file", str(error), remedy="Write it again.") from error
        text = metadata.get(_HEADER, "")
        ours = text or _SEAL in metadata  # both are there, unless one is damaged
        if ours and metadata.get(_SEAL) != _seal(text, tensors):
            got, remedy = "another one, by its CRC-32", "Write it again."
            raise damaged(path, "the header that was written", got, remedy=remedy)
        listed = [{"path": [name], "name": name} for name in tensors]
        entries: dict[KeyPath, Entry] = {}
        first: dict[str, KeyPath] = {}  # by name, the first path of a tensor
        try:
            header: Any = {"entries": listed, "containers": [[(), "dict"]], "crc32": {}}
            header = json.loads(text) if text else header
            for each in header["entries"]:
                at = tuple(each["path"])
                if "name" not in each:
                    decode(each["value"])
                    entries[at] = ValueEntry(at, each["value"])
                    continue
                tensor, crc32 = tensors[each["name"]], header["crc32"].get(each["name"])
                chunk = Chunk(0, 0, whole(tensor.shape), () if crc32 is None else (crc32,), values=tensor)
                same_as = first.get(each["name"])
                chunks = (chunk,) if same_as is None else ()
                entries[at] = TensorEntry(at, tensor.dtype, tuple(tensor.shape), chunks, same_as)
                first.setdefault(each["name"], at)
            containers = {tuple(at): kind for at, kind in header["containers"]}
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise damaged(path, "what hwfsdp wrote", str(error)[:80], remedy="Write it again.") from error
        self.manifest = Manifest("", (), containers, entries)
        check_tree(self.manifest, path)

    def tensor(self, entry: TensorEntry, chunk: Chunk) -> Tensor:
        found = super().tensor(entry, chunk)
        if chunk.crc32 and checksum(view_bytes(found)) != chunk.crc32[0]:
            expected, remedy = "the bytes that were written", "Write it again."
            raise damaged(self.path, expected, "others, by their CRC-32", key=show(entry.path), remedy=remedy)
        return found


def _seal(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum of a safetensors file's header: of our text, and of the names, dtypes and shapes of the tensors."""
    listed = [(name, str(tensor.dtype), [*tensor.shape]) for name, tensor in sorted(tensors.items())]
    return f"{checksum(f'{text}{listed}'.encode()):08x}"


# --- Writers -----------------------------------------------------------------------------------------------


def _write_part(state: dict[Any, Any], target: Path, overwrite: bool) -> None:
    if "model" not in state:
        parts.save(target, state, group=ALONE)
        return
    others = dict(state)
    model = others.pop("model")
    given = next((key for key in ("optimizer", "optim") if others.get(key)), "optimizer")
    optimizer = others.pop(given, None)
    parts.save(target, model, optimizer, others, ALONE)


def _write_dcp(state: dict[Any, Any], target: Path, overwrite: bool) -> None:
    dcp.save(state, target, overwrite=overwrite, process_group=ALONE)


def _write_store(state: dict[Any, Any], target: Path, overwrite: bool) -> None:
    save_agreed(Agreement(ALONE, "convert"), state, Target(target.absolute(), overwrite))


def _write_safetensors(state: dict[Any, Any], target: Path, overwrite: bool) -> None:
    if os.path.lexists(target) and (target.is_dir() or format_of(target) != "safetensors"):
        got = "a directory" if target.is_dir() else "another checkpoint"
        refuse(target, "a file of safetensors, or nothing", got, "Choose another path.")
    check_utf8(target, "safetensors")
    description, _ = describe(state, 1)  # raises for values that JSON and dense tensors cannot hold
    names: dict[KeyPath, str] = {}
    values = {leaf.path: leaf.value for leaf in leaves_of(state)}
    tensors: dict[str, Tensor] = {}
    entries = []
    for entry in description["entries"]:
        path = tuple(entry["path"])
        if "value" in entry:
            entries.append({"path": path, "value": entry["value"]})
            continue
        names[path] = names[tuple(entry["alias"])] if "alias" in entry else ".".join(map(str, path))
        entries.append({"path": path, "name": names[path]})
        if "alias" not in entry:
            _check_name(names[path], tensors)
            tensor = packed(values[path])
            is_view = storage_key(tensor) in map(storage_key, tensors.values())
            tensors[names[path]] = tensor.clone() if is_view else tensor  # safetensors refuses shared memory
    crc32 = {name: checksum(view_bytes(tensor)) for name, tensor in tensors.items()}
    containers = [(path, kind) for path, kind, _ in description["containers"]]
    header = json.dumps({"containers": containers, "entries": entries, "crc32": crc32})
    _commit_safetensors(tensors, target, {"format": "pt", _HEADER: header, _SEAL: _seal(header, tensors)})


def _check_name(name: str, taken: Collection[str]) -> None:
    """Raise an error if a safetensors file cannot have a tensor of this name."""
    if name in taken:
        expected, remedy = "a name of its own for every tensor", "Rename one of the two."
        refuse(name, expected, "two tensors of that name", remedy)
    if name == "__metadata__" or not is_utf8(name):
        expected = "a name in Unicode, and not __metadata__, which the format uses"
        refuse(ascii(name), expected, "a tensor of that name", "Rename it.")


def _commit_safetensors(tensors: dict[str, Tensor], target: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file under another name, then give it its own."""
    with needed_by("safetensors files"):
        import safetensors
        from safetensors.torch import save_file
    try:
        with commit.made_beside(target, secrets.token_hex(16)) as scratch:
            draft = scratch / target.name
            save_file(tensors, draft, metadata)
            with draft.open("rb+") as file:
                commit.sync(file.fileno())
            os.replace(draft, target)
        sync_directory(target.parent)
    except safetensors.SafetensorError as error:
        if code := re.search(r"os error (\d+)", str(error)):
            failed = OSError(int(code[1]), os.strerror(int(code[1])), str(draft))
            raise with_size(failed, draft, sum(tensor.nbytes for tensor in tensors.values())) from error
        raise
    except KeyError as error:  # safetensors raises it for a dtype that the format does not have
        expected, remedy = "dtypes that safetensors has", "Cast such tensors first."
        raise refusal(target, expected, str(error), remedy) from error


_READERS: dict[str, Callable[[Path, Path], dict[Any, Any]]] = {
    "dcp": _read_dcp,
    "part": _read_part,
    "safetensors": _read_safetensors,
    "store": _read_store,
}
_WRITERS: dict[str, Callable[[dict[Any, Any], Path, bool], Any]] = {
    "dcp": _write_dcp,
    "part": _write_part,
    "safetensors": _write_safetensors,
    "store": _write_store,
}
FORMATS = sorted(_WRITERS)


# --- Without loading ---------------------------------------------------------------------------------------
# These functions do not need the program that wrote the checkpoint or a process group. They hold one block in memory.


@dataclass(frozen=True)
class Inspection:
    """The contents of a save.

    Attributes:
        path: the directory of the save. save_id: its name. saves: the ids of all finished saves beside it, oldest first.
        tensors: by key, as Python code would index the state dict. values: everything else, by the same kind of key.
        nbytes: the bytes of all files of the save, without the manifest. ranks: the number of ranks that wrote it.
        unlisted: files in the directory of the save that are not part of it, such as notes. They change nothing.
    """

    path: Path
    save_id: str
    saves: tuple[str, ...]
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]
    nbytes: int
    ranks: int
    unlisted: tuple[str, ...] = ()

    def __str__(self) -> str:
        parameters = sum(entry.nbytes for entry in self.tensors.values() if entry.same_as is None)
        text = f"{printable(self.path)}: {len(self.tensors)} tensors of {parameters:,} bytes and {len(self.values)} other values"
        more = f" (beside files that are not part of it: {', '.join(self.unlisted)})" if self.unlisted else ""
        return f"{text}, written by {self.ranks} ranks{more}"


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Inspect the save that counts, or the save whose directory `path` is. Read only its manifest.

    Raises:
        UsageError: there is no checkpoint. CheckpointError: the manifest is missing or damaged.
    """

    def read(current: commit.Current) -> Inspection:
        return _inspection(current.folder, commit.read_manifest(current))

    return commit.unless_replaced(path_of(path, "inspect").absolute(), read)


def _inspection(folder: Path, manifest: Manifest) -> Inspection:
    return Inspection(
        path=folder,
        save_id=manifest.save_id,
        saves=tuple(commit.find_saves(folder.parent)),
        tensors={show(p): e for p, e in manifest.entries.items() if isinstance(e, TensorEntry)},
        values={
            show(p): decode(e.json_value) for p, e in manifest.entries.items() if isinstance(e, ValueEntry)
        },
        nbytes=sum(manifest.files),
        ranks=len(manifest.files),
        unlisted=tuple(sorted(set(os.listdir(folder)) - commit.files_of(manifest))),
    )


def verify(path: str | os.PathLike[str]) -> Inspection:
    """Read every byte of the save that counts, and compare it with its checksum.

    Returns:
        The result of `inspect`, if everything is as it was written.

    Raises:
        UsageError: there is no checkpoint.
        CheckpointError: names the first thing that is missing or damaged, with file, key and offset.
    """
    return commit.unless_replaced(path_of(path, "verify").absolute(), _verified)


def _verified(current: commit.Current) -> Inspection:
    folder, manifest = commit.read_complete(current)
    for index, share in enumerate(manifest.shares()):
        _verify_file(folder, manifest, index, share)
    return _inspection(folder, manifest)


def _verify_file(
    folder: Path, manifest: Manifest, index: int, share: list[tuple[TensorEntry, Chunk]]
) -> None:
    """Read a file from the first byte to the last: the header, each chunk, and the zeros between them."""
    with ExitStack() as opened:
        source = Blocks(manifest, folder, opened)
        (fd, path), end = source.open(index), ALIGNMENT
        for entry, chunk in share:
            between = memoryview(bytearray(chunk.at - end))  # after the last chunk, there is nothing
            commit.read_exactly(fd, between, end, path)
            if any(between):
                at = next(i for i, byte in enumerate(between) if byte)
                raise damaged(path, "zeros between two parts", f"{between[at]}", end + at)
            nbytes = chunk.box.numel * entry.dtype.itemsize
            for start in range(0, nbytes, manifest.block_bytes):
                block = bytearray(min(manifest.block_bytes, nbytes - start))
                source.read(entry, chunk, memoryview(block), start)
            end = chunk.at + nbytes


# --- The command -------------------------------------------------------------------------------------------


def show_inspection(path: Path, as_json: bool) -> int:
    """Print the contents of a checkpoint, and the list of its saves."""
    found = inspect(path)
    tensors: dict[str, dict[str, Any]] = {}
    for key, entry in found.tensors.items():
        about = {
            "dtype": name_of_constant(entry.dtype),
            "shape": list(entry.shape),
            "chunks": len(entry.chunks),
        }
        tensors[key.removeprefix("state_dict")] = about
    values = {key.removeprefix("state_dict"): str(value) for key, value in found.values.items()}
    if as_json:
        head = {"save": found.save_id, "saves": found.saves, "ranks": found.ranks, "bytes": found.nbytes}
        print(
            json.dumps({**head, "unlisted": found.unlisted, "tensors": tensors, "values": values}, indent=2)
        )
        return 0
    print(found)
    for (key, about), entry in zip(tensors.items(), found.tensors.values()):
        note = f"{about['chunks']} chunk{'s' if about['chunks'] != 1 else ''}"
        if entry.same_as is not None:
            note = f"the same tensor as {show(entry.same_as).removeprefix('state_dict')}"
        print(f"  {key:<48} {about['dtype']:<10} {str(about['shape']):<20} {note}")
    for key, value in values.items():
        print(f"  {key:<48} {value[:60]}")
    print(f"saves, oldest first: {', '.join(found.saves)}")
    return 0


def verify_all(path: Path, as_json: bool) -> int:
    """Read every byte of a checkpoint. Raise an error if something is wrong."""
    found = verify(path)
    answer = json.dumps({"intact": True, "save": found.save_id, "bytes": found.nbytes})
    print(answer if as_json else f"{found}: intact")
    return 0


def convert_to(source: Path, target: Path, to: str, overwrite: bool, key: str | None, as_json: bool) -> int:
    """Write a checkpoint in another format."""
    found = convert(source, target, to=to, overwrite=overwrite, key=key)
    if as_json:
        print(json.dumps({"from": found.source_format, "tensors": found.tensors, "bytes": found.nbytes}))
    else:
        sizes = f"{found.tensors} tensors of {found.nbytes:,} bytes"
        print(f"{printable(source)} ({found.source_format}) → {printable(target)} ({to}): {sizes}")
    return 0
