"""Checkpoints of torch's DCP (`torch.distributed.checkpoint`), written and read.

    save(state_dict, path)       torch.distributed.checkpoint.load can read the result
    load(state_dict, path)       reads a checkpoint that torch.distributed.checkpoint.save has written

DCP's own writer makes the files. This module tells the writer which boxes to write, and reads the files itself. Several things
that DCP does silently do not happen here, or are errors:

    `layout` computes the box of a tensor that a rank holds; torch computes it wrongly for strided uneven cuts
    shapes and dtypes are compared; DCP casts, even from float to int
    a key on only one side is an error; DCP ignores keys of the checkpoint that the state dict does not have
    a directory appears when it is complete; DCP overwrites a checkpoint file by file
    nothing in a checkpoint is run (`dcp_metadata`); DCP unpickles the metadata and all values
    checksums are compared; DCP reads over flipped bits
    a tensor on the meta device gets memory in place; DCP loads into another tensor, which the model does not have

This module checks everything before it changes anything. Ranks agree on the result: an error on one rank is raised on all.

Keys are DCP's keys: paths of dict keys and list positions, joined by dots. A list is taken apart only if a tensor or a dict is
in it. Everything else is a value. It is stored unchanged, and found again under the same path. So dicts with int keys, such as
an optimizer's state, come back with int keys.

Left out: empty dicts, which DCP does not store, `ShardedTensor`, and objects with a `state_dict` method in the state dict.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint import dcp_metadata
from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.archives import check_loadable, replaced
from hwfsdp.checkpoint.boxes import Box, intersection, whole, within
from hwfsdp.checkpoint.dcp_metadata import METADATA, Blob, Manifest, Stored
from hwfsdp.checkpoint.matching import check_can_change, put
from hwfsdp.checkpoint.messages import (
    KeyPath,
    check_in_common,
    damaged,
    of_disk,
    on_one_side,
    path_of,
    refusal,
    refuse,
    told,
    warn_left_out,
    with_size,
)
from hwfsdp.checkpoint.meta import NewMemory
from hwfsdp.checkpoint.plan import pieces_of
from hwfsdp.checkpoint.tensors import check_data, check_no_sum, check_writable, part_of
from hwfsdp.checkpoint.traverse import Leaf, flat_key, leaves_of, state_dict_of, traverse_state_dict
from hwfsdp.errors import CheckpointError

_WHAT = "DCP checkpoint"
Slices = tuple[slice, ...]


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
    save_agreed(Agreement(process_group, _WHAT), state_dict, path, overwrite, process_group)


def save_agreed(
    agreement: Agreement,
    state_dict: Mapping[Any, Any] | nn.Module,
    path: str | os.PathLike[str],
    overwrite: bool,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Do the work of `save`, in an agreement that was made before."""
    target = Path(os.path.realpath(path_of(path, "save")))
    entries_to_save: Mapping[Any, Any] = state_dict_of(state_dict)

    def prepare() -> dict[str, str]:
        entries = entries_of(entries_to_save)
        for path, value in entries.values():
            _check_entry(path, value, entries_to_save)
            if not isinstance(value, Tensor):
                _check_storable(path, value)
        return {key: kind_of(entry.value) for key, entry in entries.items()}

    agreement.step("checking", prepare, _check_same)
    check = partial(_check_target, target, overwrite)
    with replaced(target, agreement, check, dcp_metadata.write_digest) as (draft, _):
        _write(entries_to_save, draft, target, process_group, agreement.alone)


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

    Any number of ranks may have written the checkpoint, with any layout. Each rank reads the chunks that contain some of its
    elements, twice: first to check them, which takes the memory of one chunk, then to copy them.

    Args:
        state_dict: tensors are filled in place; other values are replaced. It may also be a module, which stands for its state
            dict.
        path: the directory.
        strict: the checkpoint must have the same keys as all ranks together. Otherwise, keys on only one side are left out, and a
            warning on the first rank counts and names them.
        device, model: for tensors on the meta device; see `store.load`.

    Raises:
        UsageError: a key is on only one side (with `strict`), or no key is on both; a shape or dtype differs; one side has a tensor and the other a
            value; a tensor cannot be written to; or a tensor on the meta device is not in the checkpoint, with or without
            `strict`.
        UnsupportedError, StateError: a `Partial` placement (UnsupportedError), or an error of `meta.init_state_dict`.
        CheckpointError: the checkpoint is missing, is damaged, or asks for code to be run (see `dcp_metadata`).
        All ranks raise the same error. Then nothing was changed, unless another process changed the checkpoint during the load.
    """
    agreement = Agreement(process_group, _WHAT)
    left_out = load_agreed(agreement, NewMemory(state_dict, device, model), path, strict)
    if agreement.rank == 0:
        warn_left_out(left_out, path)


def load_agreed(
    agreement: Agreement, memory: NewMemory, path: str | os.PathLike[str], strict: bool = True
) -> str:
    """Do the work of `load`, in an agreement that was made before. Return which keys were left out, in words."""
    with memory as target:
        loading = _Loading(path_of(path, "load"), target)
        left_out: str = agreement.step("preparing", loading.prepare, partial(loading.check_keys, strict))
        agreement.step("checking", loading.check_parts)
        agreement.step("filling", loading.fill)
    return left_out


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


def kind_of(value: Any) -> str:
    dtype, shape = (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else (None, ())
    return str(Stored(dtype, shape, []))


def _check_entry(path: KeyPath, value: Any, state_dict: Mapping[Any, Any]) -> None:
    """Raise an error unless the entry can be saved or replaced: a tensor must be dense and have data, a value needs a mutable container."""
    if not isinstance(value, Tensor):
        check_can_change(path, state_dict)
        return
    check_data(path, value)
    if value.layout != torch.strided:
        refuse(path, "a dense tensor", str(value.layout), "Call to_dense.")
    check_no_sum(path, value)


# --- Saving ------------------------------------------------------------------------------------------------


def _check_storable(path: KeyPath, value: Any) -> None:
    """Raise an error unless the value can be loaded again."""
    if any(isinstance(leaf.value, Tensor) for leaf in leaves_of(value)):
        expected, got = "tensors in dicts and lists", "a tensor in a container that DCP does not look into"
        refuse(path, expected, got, f"Make this {type(value).__name__} a list or a dict.")
    check_loadable(path, value)


def _check_same(kinds: list[dict[str, str]]) -> None:
    """Raise an error if a key has another shape, dtype or kind on another rank."""
    first: dict[str, tuple[int, str]] = {}
    for rank, theirs in enumerate(kinds):
        for key, kind in theirs.items():
            known_rank, known = first.setdefault(key, (rank, kind))
            if kind != known:
                expected = f"the same on all ranks; rank {known_rank} has {known}"
                remedy = "Shard with DTensors; other tensors count as replicas. Or rename one of the two."
                refuse(f"key {key!r}", expected, f"{kind} on rank {rank}", remedy)


def _check_target(target: Path, overwrite: bool) -> None:
    is_empty = target.is_dir() and not any(target.iterdir())
    is_ours = (target / METADATA).is_file()
    if os.path.lexists(target) and not is_empty and not (overwrite and is_ours):
        expected = "a path where nothing is, or a DCP checkpoint and overwrite=True"
        got = "a DCP checkpoint" if is_ours else "something else"
        remedy = "Choose another path, or pass overwrite=True for a DCP checkpoint."
        refuse(f"save to {target}", expected, got, remedy)


def _write(
    state_dict: Mapping[Any, Any], draft: Path, target: Path, group: dist.ProcessGroup | None, alone: bool
) -> None:
    """Let DCP write the files. Convert DCP's errors, which all ranks get, into our errors."""
    options: dict[str, Any] = {"process_group": group, "no_dist": alone}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process
            dcp_save(dict(state_dict), storage_writer=_Writer(draft), planner=_BoxPlanner(), **options)
    except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
        failures = getattr(error, "failures", None) or {}
        rank, cause = next(((f"rank {rank}: ", cause) for rank, (cause, _) in failures.items()), ("", error))
        got, remedy = told(cause)[:300], "Look at the disk, and at the ranks' tracebacks."
        if isinstance(cause, OSError):
            cause.filename = cause.filename or str(draft)
            got, remedy = of_disk(cause)
        what, expected = f"save to {target}", "DCP to move the data"
        raise refusal(what, expected, rank + got, remedy, CheckpointError) from error


class _Writer(FileSystemWriter):
    """DCP's writer. If the disk fails, the error is the disk's own, with the file and the bytes to write."""

    def __init__(self, draft: Path) -> None:
        super().__init__(draft, sync_files=True, thread_count=1, overwrite=False)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        chunks = [
            (item.tensor_data.chunk, item.tensor_data.properties) for item in plan.items if item.tensor_data
        ]
        nbytes = sum(chunk.sizes.numel() * properties.dtype.itemsize for chunk, properties in chunks)
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise with_size(error, self.path, nbytes) from error


class _BoxPlanner(DefaultSavePlanner):
    """Tells DCP which boxes this rank writes, as computed by `layout`. It skips parts without elements.

    DCP's own planner asks torch for the place of a DTensor's local part. The answer is wrong for some strided and uneven cuts.
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
        own = next(own for whole, own in pieces_of(value) if whole.offset == tuple(index.offset or ()))
        return part_of(value)[own.slices].resolve_conj().resolve_neg()


def _write_items(key: str, value: Any) -> list[WriteItem]:
    if not isinstance(value, Tensor):
        return [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)]
    # A tensor without elements is written nevertheless: a load needs its shape.
    boxes = [box for box, _ in pieces_of(value)] if value.numel() else [whole(value.shape)]
    kind = WriteItemType.SHARD if isinstance(value, DTensor) else WriteItemType.TENSOR
    items = []
    for box in boxes:
        chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
        data = TensorWriteData(chunk, TensorProperties(dtype=value.dtype), torch.Size(value.shape))
        items.append(WriteItem(MetadataIndex(key, chunk.offsets), kind, tensor_data=data))
    return items


# --- Loading -----------------------------------------------------------------------------------------------


def _shared(target: Tensor, stored: Stored) -> Iterator[tuple[Blob, Slices, Slices]]:
    """Yield each chunk that shares elements with this rank's part of the target: the chunk, the slices of the part, and of the chunk."""
    for box, own in pieces_of(target):
        for blob in stored.blobs:
            both = intersection(box, blob.box) if blob.box else None
            if blob.box and both:
                here = Box(tuple(map(add, within(both, box).offset, own.offset)), both.shape)
                yield blob, here.slices, within(both, blob.box).slices


class _Loading:
    """A load on one rank: the entries that this rank wants, the stored entries, and the steps from one to the other.

    Attributes:
        entries: the entries of the state dict, by key. manifest: the contents of the checkpoint.
        values: the values that are not tensors, by path; they are read before anything changes.
    """

    manifest: Manifest

    def __init__(self, directory: Path, memory: NewMemory) -> None:
        self.directory, self.memory, self.state_dict = directory, memory, memory.state_dict
        self.entries: dict[str, Leaf] = {}
        self.values: dict[KeyPath, Any] = {}

    def prepare(self) -> tuple[list[str], str]:
        """Give memory to tensors on meta, check the entries and read the metadata. Return this rank's keys and the metadata's digest."""
        self.memory.give()
        self.entries = entries_of(self.state_dict)
        for path, value in self.entries.values():
            _check_entry(path, value, self.state_dict)
            if isinstance(value, Tensor):
                check_writable(path, value)
        self.manifest = dcp_metadata.read_metadata(self.directory)
        return sorted(self.entries), self.manifest.digest

    def check_keys(self, strict: bool, known: list[Any]) -> list[str]:
        """Raise an error unless all ranks see one checkpoint, and its keys fit (see `load`). Return, for each rank, the keys left out.

        `known`: the results of `prepare`.
        """
        if len({digest for _, digest in known}) > 1:
            remedy = "Use a file system that all ranks share, and replace no checkpoint that is being read."
            raise damaged(self.directory, "the same checkpoint on all ranks", "different ones", remedy=remedy)
        wanted, there = {key for keys, _ in known for key in keys}, self.manifest.entries.keys()
        missing, unexpected = (list(map(repr, sorted(keys))) for keys in (wanted - there, there - wanted))
        left_out = on_one_side(missing, unexpected)
        check_in_common(f"load from {self.directory}", left_out, strict, bool(wanted & there))
        return [left_out] * len(known)

    def check_parts(self) -> None:
        """Compare every entry with the stored entry. Then read all values that are not tensors, and check the chunks of all tensors."""
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
