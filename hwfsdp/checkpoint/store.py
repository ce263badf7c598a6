"""Checkpoints that survive: the public functions.

    save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 100}, "runs/checkpoint")
    load(state_dict, "runs/checkpoint")         # into the tensors of state_dict, however they are sharded

    handle = async_save(state_dict, "runs/checkpoint", keep=3)      # returns when the values are copied
    handle.wait()                                                   # later: the id of the save, or its error

A save promises this: it counts when all of it is on the disk, or not at all. Until then, an earlier checkpoint is not changed.
A load promises this: every value is the saved value. Otherwise it raises an error that says what is wrong and where, and has
changed no value of the target. Files hold nothing but numbers and JSON, so no checkpoint can make a program run code.

A load on one rank goes from a path to a state dict that is filled. All ranks agree at each arrow (see `agreement`):

    [leader: which save] → match the state dict with the manifest → read into new memory → into the state dict

Note [Read first, then write]
    The last block that is read may be damaged. So a rank reads all values into new memory, as much as its part of the state dict.
    It copies them into the target when all ranks have read all of theirs. This memory is the price of a load that happens
    completely or not at all. A tensor on the meta device has no values that could be lost. So it gets memory, and is read
    directly into it. If the load fails, the tensor goes back to the meta device.

Note [A save that goes while it is read]
    Another job may save into the same directory, and remove the save that is being read. Then a file is missing, and another
    save counts. So after an error about a file, the leader looks again. If another save counts now, all ranks load that one. If
    it is still the same save, the error is raised.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hwfsdp.checkpoint import blocks, saves
from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.background import SaveHandle, finish_saves, queue
from hwfsdp.checkpoint.manifest import ALIGNMENT, Chunk, Manifest, TensorEntry, ValueEntry, name_of
from hwfsdp.checkpoint.matching import COMPARE, Match, fill, match
from hwfsdp.checkpoint.messages import KeyPath, check_in_common, path_of, show, warn_left_out
from hwfsdp.checkpoint.meta import NewMemory
from hwfsdp.checkpoint.plan import shares_of
from hwfsdp.checkpoint.reading import Readers, read_tensors
from hwfsdp.checkpoint.saving import Target, save_agreed
from hwfsdp.checkpoint.traverse import state_dict_of
from hwfsdp.checkpoint.values import decode
from hwfsdp.errors import CheckpointError

__all__ = ["Inspection", "SaveHandle", "async_save", "finish_saves", "inspect", "load", "save", "verify"]

S = TypeVar("S", bound=Mapping[Any, Any] | nn.Module)


def save(
    state_dict: Mapping[Any, Any] | nn.Module,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> str:
    """Write a state dict. A collective: every rank of the group calls it with the same keys.

        save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 100}, "runs/checkpoint")
        save(model, "runs/weights")

    It returns when everything is on the disk. Values of subclasses of int, float and str are saved as int, float and str.

    Args:
        state_dict: dicts, lists and tuples of tensors, DTensors, numbers, strings, bytes, None; keys are str or int. The ranks
            that have the parts of a DTensor write it. Anything else must be the same on all ranks, and one of them writes it,
            except what is in a `PerRank`, which every rank writes. A module stands for its state dict.
        path: a directory, on storage that all ranks see. The directory and its parents are made if they do not exist.
        overwrite: replace an existing checkpoint when the new save is complete.
        keep: the number of saves to keep in `path`, including this one; older ones are removed. A checkpoint may exist already if
            `keep` is given. None: keep one.

    Returns:
        The id of the save. `path / id` can be loaded, too, as long as this save is kept.

    Raises:
        UsageError: a checkpoint cannot hold an entry, ranks differ, or the target exists already.
        UnsupportedError: a tensor is sparse, quantized or otherwise unusual.
        StateError: another process is saving there.
        CheckpointError: the disk is full or fails, or a rank raised another error, died, or hung. All ranks raise the same error,
            and an earlier checkpoint stays as it was.
    """
    agreement = Agreement(process_group, "save")
    queue.end_before(agreement)
    return save_agreed(agreement, state_dict_of(state_dict), _target(path, overwrite, keep))


def async_save(
    state_dict: Mapping[Any, Any] | nn.Module,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Start a `save` that goes on after this call has returned. A collective, like `save`.

    It returns when every tensor is copied to the CPU. After that, changes to the tensors do not change the save. The memory for the
    copies is as large as this rank's part of the state dict. It is kept for the next call.

    Args:
        As for `save`.

    Returns:
        A handle. Its `wait` raises the errors that `save` would have raised.

    Raises:
        The error of the previous asynchronous save, if no call of `wait` has raised it. UsageError: this process is not in the group.
    """
    return queue.start(state_dict_of(state_dict), process_group, _target(path, overwrite, keep))


def _target(path: str | os.PathLike[str], overwrite: bool, keep: int | None) -> Target:
    return Target(path_of(path, "save").absolute(), overwrite, keep)


def load(
    state_dict: S,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    allow_cast: bool = False,
    device: torch.device | str | None = None,
    model: nn.Module | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> S:
    """Fill a state dict, in place, with the values that were saved under the same keys. A collective over the group.

        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
        load(state, "runs/checkpoint")
        optimizer.load_state_dict(state["optimizer"])
        load(model, "runs/weights")

    Each rank reads what it needs. Of a DTensor, it reads its own part. The world size and the sharding may differ from the save.
    Values that are not tensors are replaced.

    Tensors on the meta device get memory, as in `meta.init_state_dict`: for a DTensor, only for this rank's part; for tensors that
    share memory, once; and in place, so that they are loaded wherever they are referred to. If the load fails, they go back to the
    meta device.

    Args:
        state_dict: take it right before the load. If an optimizer has made no step yet, call `meta.init_optimizer_state` first.
            After the load, `optimizer.load_state_dict` applies values that are not tensors, for example the learning rate.
            It may also be a module, which stands for its state dict.
        path: the path that `save` got, or the path of one save in it, of a copy of one, or of a link to any of them.
        strict: the keys must be the same. Otherwise, keys on only one side are left out, and a warning counts and names them.
        allow_cast: tensors may have another dtype, of the same or a wider kind. Values may lose precision, but no value becomes
            infinite, and no fraction or imaginary part is dropped.
        device, model: for tensors on the meta device; see `meta.init_state_dict`.

    Returns:
        `state_dict`.

    Raises:
        UsageError: there is no checkpoint, or the state dict does not fit: a key, shape, rank or dtype differs, another kind of
            value was saved for a tensor, a tensor has no memory, no key is in common, or another number of ranks has saved a
            `PerRank`.
        CheckpointError: something in the checkpoint is missing or damaged; it has file, key and offset. All ranks raise the same
            error, and the target is not changed.
    """
    agreement = Agreement(process_group, "load")
    options = {"strict": strict, "allow_cast": allow_cast, "rank": agreement.rank, "size": agreement.size}
    with NewMemory(state_dict, device, model) as target:
        left_out = _load_current(agreement, target, path_of(path, "load").absolute(), options)
    warn_left_out(left_out, path)
    return state_dict


# --- One load, step by step --------------------------------------------------------------------------------


def _load_current(agreement: Agreement, target: NewMemory, path: Path, options: dict[str, Any]) -> str:
    """Load the save that counts. Return which keys were left out, in words."""
    within, digest = _find(agreement, path)
    while True:
        try:
            return _load_save(agreement, target, saves.Current(path / within, digest), options)
        except CheckpointError as error:
            if error.file is None:  # for example, a rank is lost
                raise
            before, (within, digest) = within, _find(agreement, path)
            if within == before:
                raise


def _find(agreement: Agreement, path: Path) -> list[Any]:
    """Return where in `path` the save that counts is, and the hash of its manifest, as the leader sees them."""

    def choose(_: list[Any]) -> list[Any]:
        folder, manifest = saves.find_complete(path)
        return [[str(folder.relative_to(path)), manifest.digest]] * agreement.size

    found: list[Any] = agreement.step("finding", lambda: None, choose)
    return found


def _load_save(
    agreement: Agreement, target: NewMemory, current: saves.Current, options: dict[str, Any]
) -> str:
    matched: list[Match] = []
    parts: dict[KeyPath, Tensor] = {}

    def match_mine() -> list[Any]:
        manifest = saves.read_manifest(current)
        target.give()
        matched.append(match(target.state_dict, manifest, **options))
        target.check_loaded(manifest.entries)
        matched[0].fresh.update(target.paths)
        return [matched[0].left_out, bool(matched[0].tensors or matched[0].values)]

    def compare(found: list[Any]) -> list[str]:
        """Return, for each rank, what to warn it of. What rank 0 says, too, is said once."""
        nothing = not any(common for _, common in found)
        check_in_common("load", found[0][0], not nothing and options["strict"], not nothing, COMPARE)
        first = found[0][0]
        return [first, *("" if left_out == first else left_out for left_out, _ in found[1:])]

    def read_mine() -> None:
        parts.update(read_tensors(matched[0], current.folder, agreement.check))

    left_out: str = agreement.step("matching", match_mine, compare)
    agreement.step("reading", read_mine)
    fill(target.state_dict, matched[0], parts)
    return left_out


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
        return (
            f"{self.path}: {len(self.tensors)} tensors of {parameters:,} bytes and {len(self.values)} other values, "
            f"written by {self.ranks} ranks"
        )


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Inspect the save that counts, or the save whose directory `path` is. Read only its manifest.

    Raises:
        UsageError: there is no checkpoint. CheckpointError: the manifest is missing or damaged.
    """
    current = saves.find_current(path_of(path, "inspect").absolute())
    return _inspection(current.folder, saves.read_manifest(current))


def _inspection(folder: Path, manifest: Manifest) -> Inspection:
    return Inspection(
        path=folder,
        save_id=manifest.save_id,
        saves=tuple(saves.find_saves(folder.parent)),
        tensors={show(p): e for p, e in manifest.entries.items() if isinstance(e, TensorEntry)},
        values={
            show(p): decode(e.json_value) for p, e in manifest.entries.items() if isinstance(e, ValueEntry)
        },
        nbytes=sum(manifest.files),
        ranks=len(manifest.files),
        unlisted=saves.unlisted(folder, manifest),
    )


def verify(path: str | os.PathLike[str]) -> Inspection:
    """Read every byte of the save that counts, and compare it with its checksum.

    Returns:
        The result of `inspect`, if everything is as it was written.

    Raises:
        UsageError: there is no checkpoint.
        CheckpointError: names the first thing that is missing or damaged, with file, key and offset.
    """
    folder, manifest = saves.find_complete(path_of(path, "verify").absolute())
    for index, share in enumerate(shares_of(manifest)):
        _verify_file(folder, manifest, index, share)
    return _inspection(folder, manifest)


def _verify_file(
    folder: Path, manifest: Manifest, index: int, share: list[tuple[TensorEntry, Chunk]]
) -> None:
    """Read a file from the first byte to the last: the header, each chunk, and the zeros between them."""
    with ExitStack() as opened:
        readers = Readers(manifest, folder, opened)
        fd, path, end = readers.open(index), folder / name_of(index), ALIGNMENT
        for entry, chunk in share:
            blocks.check_zeros(fd, path, end, chunk.at)
            reader = readers.of(entry, chunk)
            for start in range(0, reader.nbytes, reader.block_bytes):
                reader.read(memoryview(bytearray(min(reader.block_bytes, reader.nbytes - start))), start)
            end = chunk.at + reader.nbytes
        blocks.check_zeros(fd, path, end, manifest.files[index])
