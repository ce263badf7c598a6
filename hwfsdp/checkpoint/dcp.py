"""Checkpoints of torch's DCP (`torch.distributed.checkpoint`), written and read.

    save(state_dict, path)       what torch.distributed.checkpoint.load can read
    load(state_dict, path)       what torch.distributed.checkpoint.save has written

DCP's own writer makes the files. This module tells it which boxes to write, and reads them itself. What DCP would do
silently does not happen, or is an error:

    which box of a tensor a rank holds is computed by `layout`, not by torch, which errs for strided uneven cuts
    shapes and dtypes are compared; DCP casts, float to int, too
    keys on one side only are errors; DCP ignores what it was not asked for
    a directory appears when it is complete; DCP overwrites a checkpoint file by file
    nothing in a checkpoint is run (`dcp_metadata`); DCP unpickles the metadata and all values
    checksums are compared; DCP reads over flipped bits
    a tensor on the meta device gets memory where it is; DCP loads into another one, which the model does not have

All is checked before anything changes, and ranks agree on it: an error on one is raised on all.

Keys are DCP's: paths of dict keys and list positions, joined by dots; a list is taken apart only if a tensor or a
dict is in it. Everything else is a value, stored as it is, and found again under the same path. So dicts with int
keys, as optimizers have, come back with int keys.

Left out: empty dicts, which DCP does not store, `ShardedTensor`, and objects with a `state_dict` method in the state
dict.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint import dcp_metadata
from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.archives import loading_error, replaced
from hwfsdp.checkpoint.boxes import Box, intersection, within
from hwfsdp.checkpoint.dcp_metadata import METADATA, Blob, Manifest, Stored
from hwfsdp.checkpoint.matching import check_can_change, put
from hwfsdp.checkpoint.messages import KeyPath, damaged, listed, refusal, refuse, show, told
from hwfsdp.checkpoint.meta import NewMemory
from hwfsdp.checkpoint.plan import box_of
from hwfsdp.checkpoint.tensors import check_data, check_no_sum, check_writable, part_of
from hwfsdp.checkpoint.traverse import Leaf, leaves_of, traverse_state_dict
from hwfsdp.errors import CheckpointError

_WHAT = "DCP checkpoint"
Slices = tuple[slice, ...]


def save(
    state_dict: dict[Any, Any],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a DCP checkpoint. A collective over the group, or for one process alone if there is none.

    The directory is written beside `path`, on disk (fsync) before it gets that name; until then, whatever happens, `path`
    is what it was. With `overwrite` the old checkpoint and the new one exchange their names. A process that is killed
    leaves a hidden directory beside `path`, which the next save removes.

    Args:
        state_dict: tensors, DTensors of any layout, and values that `torch.load(weights_only=True)` takes. What is not a
            DTensor is written as one of the ranks has it. Ranks may have different keys.
        path: a directory on a file system that all ranks share; does not exist, or is empty.
        overwrite: replace a DCP checkpoint at `path`.

    Raises:
        UsageError: `path` exists; a tensor on the meta device or not dense, a value that could not be loaded again, a
            DTensor whose local shape is not what its placements say, or a key that has other shapes or dtypes on
            another rank. UnsupportedError: a `Partial` placement or a ShardedTensor. CheckpointError: writing failed.
            The same on all ranks; `path` is what it was.
    """
    target = Path(os.path.realpath(path))
    agreement = Agreement(process_group, _WHAT)

    def prepare() -> dict[str, str]:
        entries = entries_of(state_dict)
        for path, value in entries.values():
            _check_entry(path, value, state_dict)
            if not isinstance(value, Tensor):
                _check_storable(path, value)
        return {key: kind_of(entry.value) for key, entry in entries.items()}

    agreement.step("checking", prepare, _check_same)
    check = partial(_check_target, target, overwrite)
    with replaced(target, agreement, check, dcp_metadata.write_digest) as (draft, _):
        _write(state_dict, draft, f"save to {target}", process_group)


def load(
    state_dict: dict[Any, Any] | nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
    model: nn.Module | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Read a DCP checkpoint into the tensors of `state_dict`, in place. A collective over the group, if there is one.

    It may have been written by any number of ranks, with any layout. Each rank reads the chunks it has elements of,
    twice: to check them, which takes the memory of one chunk, then to copy them.

    Args:
        state_dict: tensors are written where they are; other values are replaced. Or a module, for its state dict.
        path: the directory.
        strict: the keys of the checkpoint and of all ranks together must be the same. Otherwise what one side
            alone has is left out.
        device, model: for what is on the meta device; see `store.load`.

    Raises:
        UsageError: keys that one side alone has (`strict`); a shape or dtype differs, a tensor faces a value; a tensor
            that cannot be written to, or one on the meta device that the checkpoint does not have, `strict` or not.
            UnsupportedError: a `Partial` placement, or what `meta.init_state_dict` raises it for, as StateError.
            CheckpointError: the checkpoint is missing, damaged, or asks for code to be run (see `dcp_metadata`).
            The same on all ranks. Nothing was changed then, unless the checkpoint is changed by others meanwhile.
    """
    agreement = Agreement(process_group, _WHAT)
    with NewMemory(state_dict, device, model) as target:
        loading = _Loading(Path(path), target)
        agreement.step("preparing", loading.prepare, partial(loading.check_keys, strict))
        agreement.step("checking", loading.check_parts)
        agreement.step("filling", loading.fill)


# --- Keys --------------------------------------------------------------------------------------------------


def entries_of(state_dict: dict[Any, Any]) -> dict[str, Leaf]:
    """DCP's key of every entry."""
    entries: dict[str, Leaf] = {}

    def visit(path: KeyPath, value: Any) -> None:
        if isinstance(value, Mapping):
            return  # an empty one
        name = ".".join(map(str, path))
        if name in entries:
            got = f"{name!r}; {show(entries[name].path)} has the same name"
            refuse(path, "a flat key of its own", got, "Rename one of the two.")
        entries[name] = Leaf(path, value)

    traverse_state_dict(state_dict, visit, lambda item: isinstance(item, Tensor))
    return entries


def kind_of(value: Any) -> str:
    dtype, shape = (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else (None, ())
    return str(Stored(dtype, shape, []))


def _check_entry(path: KeyPath, value: Any, state_dict: dict[Any, Any]) -> None:
    """Raise unless the value can be replaced: its container must be mutable."""
    if not isinstance(value, Tensor):
        check_can_change(path, state_dict)
        return
    check_data(path, value)
    if value.layout != torch.strided:
        refuse(path, "a dense tensor", str(value.layout), "Call to_dense.")
    check_no_sum(path, value)


# --- Saving ------------------------------------------------------------------------------------------------


def _check_storable(path: KeyPath, value: Any) -> None:
    """Raise unless it is a value that can be loaded again."""
    error = loading_error(value)
    if any(isinstance(leaf.value, Tensor) for leaf in leaves_of(value)):
        error = TypeError("a tensor in a container that DCP does not look into")
    if error is not None:
        got = " ".join(f"{type(value).__name__} ({error}".split())[:200]
        remedy = "Use dicts and lists for tensors, plain values for the rest, and state_dict() of objects that have it."
        refuse(path, "a tensor, or a value that torch.load(weights_only=True) takes", f"{got})", remedy)


def _check_same(kinds: list[dict[str, str]]) -> list[None]:
    """Raise if a key is not the same tensor, or a value, on all ranks that have it; otherwise there is nothing to answer."""
    first: dict[str, tuple[int, str]] = {}
    for rank, theirs in enumerate(kinds):
        for key, kind in theirs.items():
            known_rank, known = first.setdefault(key, (rank, kind))
            if kind != known:
                expected = f"the same on all ranks; rank {known_rank} has {known}"
                remedy = "Shard with DTensors; other tensors count as replicas. Or rename one of the two."
                refuse(f"key {key!r}", expected, f"{kind} on rank {rank}", remedy)
    return [None] * len(kinds)


def _check_target(target: Path, overwrite: bool) -> None:
    is_empty = target.is_dir() and not any(target.iterdir())
    is_ours = (target / METADATA).is_file()
    if os.path.lexists(target) and not is_empty and not (overwrite and is_ours):
        expected = "a path where nothing is, or a DCP checkpoint and overwrite=True"
        got = "a DCP checkpoint" if is_ours else "something else"
        remedy = "Choose another path, or pass overwrite=True for a DCP checkpoint."
        refuse(f"save to {target}", expected, got, remedy)


def _write(state_dict: dict[Any, Any], draft: Path, what: str, group: dist.ProcessGroup | None) -> None:
    """Let DCP write the files. Turn its errors, which all ranks get, into ours."""
    writer = FileSystemWriter(draft, sync_files=True, thread_count=1, overwrite=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process
            dcp_save(state_dict, storage_writer=writer, planner=_BoxPlanner(), process_group=group)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        failures = getattr(error, "failures", None) or {}
        rank, cause = next(((f"rank {rank}: ", cause) for rank, (cause, _) in failures.items()), ("", error))
        got, remedy = rank + told(cause)[:300], "Look at the disk, and at the ranks' tracebacks."
        raise refusal(what, "DCP to move the data", got, remedy, CheckpointError) from error


class _BoxPlanner(DefaultSavePlanner):
    """Tells DCP which boxes this rank writes, as `layout` knows them; parts without elements are not written.

    DCP's own asks torch where a DTensor's local part lies in the whole, which is wrong for some strided and uneven cuts.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=True, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = [item for key, value in self.state_dict.items() for item in _write_items(key, value)]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if not isinstance(value, Tensor):
            return value
        if value.numel() == 0:
            return torch.empty(value.shape, dtype=value.dtype)
        return part_of(value).resolve_conj().resolve_neg()


def _write_items(key: str, value: Any) -> list[WriteItem]:
    if not isinstance(value, Tensor):
        return [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)]
    box = box_of(value)
    if value.numel() == 0:  # written nevertheless, once: its shape has to be known
        box = Box((0,) * value.ndim, tuple(value.shape))
    if box is None:
        return []
    kind = WriteItemType.SHARD if isinstance(value, DTensor) else WriteItemType.TENSOR
    chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
    data = TensorWriteData(chunk, TensorProperties(dtype=value.dtype), torch.Size(value.shape))
    return [WriteItem(MetadataIndex(key, chunk.offsets), kind, tensor_data=data)]


# --- Loading -----------------------------------------------------------------------------------------------


def _shared(target: Tensor, stored: Stored) -> Iterator[tuple[Blob, Slices, Slices]]:
    """Every chunk that this rank needs something of: which elements of its part of the target are which of the chunk."""
    box = box_of(target)
    for blob in stored.blobs:
        both = intersection(box, blob.box) if box and blob.box else None
        if box and blob.box and both:
            yield blob, within(both, box).slices, within(both, blob.box).slices


class _Loading:
    """The entries that this rank wants, the entries that exist, and the way from one to the other.

    Attributes:
        entries: of the state dict, by key. manifest: of the checkpoint. values: what is no tensor, by path, read already.
    """

    manifest: Manifest

    def __init__(self, directory: Path, memory: NewMemory) -> None:
        self.directory, self.memory, self.state_dict = directory, memory, memory.state_dict
        self.entries: dict[str, Leaf] = {}
        self.values: dict[KeyPath, Any] = {}

    def prepare(self) -> tuple[list[str], str]:
        """Return the keys and the digest of the metadata."""
        self.memory.give()
        self.entries = entries_of(self.state_dict)
        for path, value in self.entries.values():
            _check_entry(path, value, self.state_dict)
            if isinstance(value, Tensor):
                check_writable(path, value)
        self.manifest = dcp_metadata.read_metadata(self.directory)
        return sorted(self.entries), self.manifest.digest

    def check_keys(self, strict: bool, known: list[Any]) -> list[None]:
        """Raise unless all ranks see one checkpoint and, if `strict`, it has their keys; `known`: what `prepare` returned."""
        if len({digest for _, digest in known}) > 1:
            remedy = "Use a file system that all ranks share, and replace no checkpoint that is being read."
            raise damaged(self.directory, "the same checkpoint on all ranks", "different ones", remedy=remedy)
        wanted, there = {key for keys, _ in known for key in keys}, self.manifest.entries.keys()
        missing, unexpected = (list(map(repr, sorted(keys))) for keys in (wanted - there, there - wanted))
        if strict and (missing or unexpected):
            parts = [f"{listed(missing)} missing in the checkpoint"] if missing else []
            parts += [f"{listed(unexpected)} only in the checkpoint"] if unexpected else []
            expected = "the same keys in the state dict and in the checkpoint"
            remedy = "Compare the models, or pass strict=False to load what both have."
            refuse(f"load from {self.directory}", expected, ", ".join(parts), remedy)
        return [None] * len(known)

    def check_parts(self) -> None:
        """Compare every entry with what is stored, then read all that is no tensor, and check all that is."""
        stored = self.manifest.entries
        self.entries = {key: entry for key, entry in self.entries.items() if key in stored}
        self.memory.check_loaded({entry.path for entry in self.entries.values()})
        for key, (path, value) in self.entries.items():
            if str(stored[key]) != kind_of(value):
                remedy = "Compare the models; nothing is cast or cut."
                refuse(path, kind_of(value), f"{stored[key]} in the checkpoint", remedy)
            if not isinstance(value, Tensor):
                self.values[path] = dcp_metadata.read_value(key, stored[key])
            else:
                for blob, _, _ in _shared(value, stored[key]):
                    dcp_metadata.read_chunk(key, stored[key], blob, check=True)

    @torch.no_grad()
    def fill(self) -> None:
        for key, (_, value) in self.entries.items():
            stored = self.manifest.entries[key]
            for blob, here, there in _shared(value, stored) if isinstance(value, Tensor) else ():
                chunk = dcp_metadata.read_chunk(key, stored, blob, check=False)
                part_of(value)[here].copy_(chunk[there])
        put(self.state_dict, (), self.values)
