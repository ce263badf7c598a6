"""Checkpoints of torch's DCP (`torch.distributed.checkpoint`), written and read.

    save(state_dict, path)       what torch.distributed.checkpoint.load can read
    load(state_dict, path)       what torch.distributed.checkpoint.save has written

The format, the files and the collectives are DCP's. What is done here is to tell it the right things, and to refuse what
it would do silently:

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

import functools
import io
import os
import shutil
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hwfsdp.checkpoint.agreement import agree, gather
from hwfsdp.checkpoint.blocks import sync_directory
from hwfsdp.checkpoint.dcp_metadata import (
    METADATA,
    Manifest,
    check_chunk,
    read_metadata,
    read_value,
    write_digest,
)
from hwfsdp.checkpoint.dcp_plans import (
    BoxSavePlanner,
    CheckedLoadPlanner,
    CheckedReader,
    Entry,
    box_of,
    check_tensor,
    entries_of,
    kind_of,
    memory_of,
    refuse,
)
from hwfsdp.checkpoint.meta import NewMemory
from hwfsdp.checkpoint.traverse import leaves_of
from hwfsdp.errors import CheckpointError, UsageError

SHOWN = 4  # keys in a message; the rest is counted


def save(
    state_dict: dict[Any, Any],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a DCP checkpoint. A collective over the group, or for one process alone if there is none.

    The directory is written beside `path`, on disk (fsync) before it gets that name; until then, whatever happens, `path`
    is what it was. With `overwrite` the old checkpoint is moved aside for the moment of renaming. A process that is killed
    leaves a hidden directory beside `path`, which may be deleted.

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
    target = Path(path)
    entries: dict[str, Entry] = {}

    def prepare() -> None:
        entries.update(entries_of(state_dict))
        for entry in entries.values():
            _check_storable(entry)

    _agreed(prepare, process_group)
    _agreed(functools.partial(_check_same, entries, process_group), process_group)
    _on_first(lambda: _check_target(target, overwrite), process_group)
    draft = target.with_name(_same_everywhere(f".{target.name}.{uuid.uuid4().hex[:12]}", process_group))
    planner = BoxSavePlanner({key: entry.noted for key, entry in entries.items()})
    try:
        _run(
            functools.partial(dcp_save, {key: entry.value for key, entry in entries.items()}),
            f"save to {target}",
            storage_writer=FileSystemWriter(draft, sync_files=True, thread_count=1, overwrite=False),
            planner=planner,
            process_group=process_group,
        )
        _on_first(lambda: _publish(draft, target), process_group)
    except Exception:
        if _is_first(process_group):
            shutil.rmtree(draft, ignore_errors=True)
        raise


def load(
    state_dict: dict[Any, Any] | nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
    model: nn.Module | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Reads a DCP checkpoint into the tensors of `state_dict`, in place. A collective over the group, if there is one.

    It may have been written by any number of ranks, with any layout. Each rank reads the chunks it has elements of,
    twice: to check them, which takes the memory of one chunk, then to copy them.

    Args:
        state_dict: tensors are written where they are; other values are replaced. Or a module, for its state dict.
        path: the directory.
        strict: the keys of the checkpoint and those of all ranks together have to be the same. Otherwise what one side
            alone has is left out.
        device, model: for what is on the meta device; see `store.load`.

    Raises:
        UsageError: keys that one side alone has (`strict`); a shape or dtype differs, a tensor faces a value; a tensor
            that cannot be written to, or one on the meta device that the checkpoint does not have, `strict` or not.
            UnsupportedError: a `Partial` placement, or what `meta.init_state_dict` raises it for, as StateError.
            CheckpointError: the checkpoint is missing, damaged, or asks for code to be run (see `dcp_metadata`).
            The same on all ranks. Nothing was changed then, unless the checkpoint is changed by others meanwhile.
    """
    module = state_dict if isinstance(state_dict, nn.Module) else None
    target: dict[str, Any] = state_dict if not isinstance(state_dict, nn.Module) else state_dict.state_dict()
    memory = NewMemory(target, device, model if module is None else module)
    try:
        _load(_Loading(Path(path), memory), target, strict, process_group)
    except BaseException:
        memory.take_back()
        raise
    if module is not None:
        module.load_state_dict(target)  # what it holds besides tensors


def _load(loading: _Loading, state_dict: Any, strict: bool, process_group: dist.ProcessGroup | None) -> None:
    _agreed(lambda: loading.prepare(state_dict), process_group)
    known = _gathered((sorted(loading.entries), loading.manifest.digest), process_group)
    _agreed(lambda: loading.check_keys(known, strict), process_group)
    _agreed(loading.check_parts, process_group)
    _run(
        functools.partial(dcp_load, {key: entry.value for key, entry in loading.entries.items()}),
        f"load from {loading.directory}",
        storage_reader=CheckedReader(loading.manifest),
        planner=CheckedLoadPlanner(loading.entries, loading.items),
        process_group=process_group,
    )
    for key, value in loading.values.items():
        *above, last = loading.entries[key].keys
        functools.reduce(lambda tree, k: tree[k], above, state_dict)[last] = value


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return f"{', '.join(map(repr, keys[:SHOWN]))}{more}"


# --- Saving ------------------------------------------------------------------------------------------------


def _check_storable(entry: Entry) -> None:
    if isinstance(entry.value, Tensor):
        check_tensor(entry.keys, entry.value)
        return
    try:
        if any(isinstance(leaf.value, Tensor) for leaf in leaves_of(entry.value)):
            raise TypeError("a tensor in a container that DCP does not look into")
        stored = io.BytesIO()
        torch.save(entry.value, stored)
        stored.seek(0)
        torch.load(stored, weights_only=True)
    except Exception as error:
        text = " ".join(f"{type(entry.value).__name__} ({error}".split())[:200]
        remedy = "Use dicts and lists for tensors, plain values for the rest, and state_dict() of objects that have it."
        refuse(
            entry.keys, "a tensor, or a value that torch.load(weights_only=True) takes", f"{text})", remedy
        )


def _check_same(entries: dict[str, Entry], group: dist.ProcessGroup | None) -> None:
    """Raises if a key is not the same tensor, or a value, on all ranks that have it."""
    mine = {key: kind_of(entry.value) for key, entry in entries.items()}
    first: dict[str, tuple[int, str]] = {}
    for rank, theirs in enumerate(_gathered(mine, group)):
        for key, kind in theirs.items():
            known_rank, known = first.setdefault(key, (rank, kind))
            if kind != known:
                raise UsageError(
                    f"key {key!r}",
                    expected=f"the same on all ranks; rank {known_rank} has {known}",
                    got=f"{kind} on rank {rank}",
                    remedy="Shard with DTensors; other tensors are taken to be replicas. Or rename what is another thing.",
                )


def _check_target(target: Path, overwrite: bool) -> None:
    is_empty = target.is_dir() and not any(target.iterdir())
    if not os.path.lexists(target) or is_empty:
        target.parent.mkdir(parents=True, exist_ok=True)
        return
    if not overwrite or not (target / METADATA).is_file():
        raise UsageError(
            f"save to {target}",
            expected="a path where nothing is" + (", or a DCP checkpoint" if overwrite else ""),
            got="a DCP checkpoint" if (target / METADATA).is_file() else "something else",
            remedy="Choose another path"
            + ("." if overwrite else ", or pass overwrite=True for a DCP checkpoint."),
        )


def _publish(draft: Path, target: Path) -> None:
    """Gives the complete checkpoint its name."""
    write_digest(draft)
    sync_directory(draft)
    old = draft.with_name(f"{draft.name}.old")
    has_old = target.is_dir() and any(target.iterdir())
    if has_old:
        os.rename(target, old)
    try:
        os.rename(draft, target)
    except OSError:
        if has_old:
            os.rename(old, target)
        raise
    sync_directory(target.parent)
    if has_old:
        shutil.rmtree(old, ignore_errors=True)


# --- Loading -----------------------------------------------------------------------------------------------


class _Loading:
    """What this rank wants, what there is, and how the one comes from the other.

    Attributes:
        entries: of the state dict, by key. manifest: of the checkpoint.
        items: what is to be read, once `check_parts` has seen it. values: what is no tensor, read already.
    """

    manifest: Manifest

    def __init__(self, directory: Path, memory: NewMemory) -> None:
        self.directory, self.memory = directory, memory
        self.entries: dict[str, Entry] = {}
        self.items: list[ReadItem] = []
        self.values: dict[str, Any] = {}

    def prepare(self, state_dict: dict[Any, Any]) -> None:
        self.memory.give()
        self.entries = entries_of(state_dict)
        for keys, value, _ in self.entries.values():
            if isinstance(value, Tensor):
                check_tensor(keys, value)
                memory = memory_of(value)
                if any(step == 0 and n > 1 for n, step in zip(memory.shape, memory.stride())):
                    refuse(keys, "memory for every element", "an expanded tensor", "Call contiguous().")
        self.manifest = read_metadata(self.directory)

    def check_keys(self, known: list[tuple[list[str], str]], strict: bool) -> None:
        """
        Args:
            known: keys and the digest of the metadata, of each rank.
        """
        if len({digest for _, digest in known}) > 1:
            raise CheckpointError(
                str(self.directory),
                expected="the same checkpoint on all ranks",
                got="different ones",
                remedy="Use a file system that all ranks share, and replace no checkpoint that is being read.",
            ).at(self.directory)
        wanted, there = {key for keys, _ in known for key in keys}, set(
            self.manifest.metadata.state_dict_metadata
        )
        missing, unexpected = sorted(wanted - there), sorted(there - wanted)
        if strict and (missing or unexpected):
            parts = [f"{_listed(missing)} missing in the checkpoint"] if missing else []
            parts += [f"{_listed(unexpected)} only in the checkpoint"] if unexpected else []
            raise UsageError(
                f"load from {self.directory}",
                expected="the same keys in the state dict and in the checkpoint",
                got=", ".join(parts),
                remedy="Compare the models, or pass strict=False to load what both have.",
            )
        self.entries = {key: entry for key, entry in self.entries.items() if key in there}
        self.memory.check_loaded({entry.keys for entry in self.entries.values()})

    def check_parts(self) -> None:
        """Compares every entry with what is stored, then reads all that is no tensor, and checks all that is."""
        stored = self.manifest.metadata.state_dict_metadata
        for key, (keys, value, _) in self.entries.items():
            entry = stored[key]
            there = "a value"
            if isinstance(entry, TensorStorageMetadata):
                there = f"a tensor {entry.properties.dtype} {list(entry.size)}"
            if there != kind_of(value):
                refuse(
                    keys,
                    kind_of(value),
                    f"{there} in the checkpoint",
                    "Compare the models; nothing is cast or cut.",
                )
        for key, (_, value, _) in self.entries.items():
            entry = stored[key]
            if not isinstance(entry, TensorStorageMetadata):
                self.values[key] = read_value(self.manifest, key)
            elif (box := box_of(value)) is not None:
                items = create_read_items_for_chunk_list(key, entry, [box])
                self.items += items
                for item in items:
                    check_chunk(self.manifest, key, _chunk_at(entry, item.storage_index))


def _chunk_at(entry: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    assert index.index is not None
    return entry.chunks[index.index]


# --- Ranks -------------------------------------------------------------------------------------------------


def _run(call: Callable[..., Any], what: str, **options: Any) -> None:
    """One of DCP's functions; its errors, which all ranks get, as ours."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process
            call(**options)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        failures = getattr(error, "failures", None) or {}
        rank, cause = next(((f"rank {rank}: ", cause) for rank, (cause, _) in failures.items()), ("", error))
        raise CheckpointError(
            what,
            expected="DCP to move the data",
            got=rank + " ".join(f"{type(cause).__name__}: {cause}".split())[:300],
            remedy="Look at the disk, and at the ranks' tracebacks.",
        ) from error


def _agreed(check: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    agree("DCP checkpoint", check, group)


def _gathered(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    return gather("DCP checkpoint", lambda: mine, group)


def _same_everywhere(mine: str, group: dist.ProcessGroup | None) -> str:
    """The first rank's."""
    first: str = _gathered(mine, group)[0]
    return first


def _is_first(group: dist.ProcessGroup | None) -> bool:
    return not dist.is_initialized() or dist.get_rank(group) == 0


def _on_first(work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Does something on the first rank; what it raises is raised on all."""

    def attempt() -> None:
        try:
            if _is_first(group):
                work()
        except OSError as error:
            raise CheckpointError(
                str(error.filename),
                expected="a directory that can be written",
                got=f"{type(error).__name__}: {error.strerror}",
                remedy="Look at permissions and at the space on the disk.",
            ).at(error.filename) from error

    _agreed(attempt, group)
