"""Checkpoints that survive: the public functions.

    save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 100}, "runs/checkpoint")
    load(state_dict, "runs/checkpoint")         # into the tensors of state_dict, however they are sharded

    handle = async_save(state_dict, "runs/checkpoint", keep=3)      # returns when the values are copied
    handle.wait()                                                   # later: the id of the save, or its error

What a save promises: it counts when all of it is on the disk, or not at all, and whatever was there before is untouched
until then. What a load promises: either every value is what was saved, or an error that says what is wrong where, and
then not one value of the target has changed. Files hold nothing but numbers and JSON, so no checkpoint can make a
program run anything.

A load on one rank goes from a path to a state dict that is filled; all ranks agree at each arrow (see `agreement`):

    [leader: which save] → match the state dict with the manifest → read into new memory → into the state dict

Note [Read first, then write]
    A damaged block may be the last one that is read. So values go to memory of their own, as much as the rank's part of
    the state dict, and from there into the target when all ranks have all of theirs. It is the price of a load that
    happens or does not. What is on the meta device has no values that could be lost: it gets memory, which is read into at
    once, and goes back to the meta device if the load fails.

Note [A save that goes while it is read]
    Another job may save into the same directory, and sweep what is being read. Then something is missing, and another
    save counts. So after an error about a file, the leader looks again: if the save that counts is another one, that one
    is loaded; if it is the same, the error stands.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hwfsdp.checkpoint import blocks, saves
from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.background import SaveHandle, finish_saves, queue
from hwfsdp.checkpoint.manifest import Chunk, Manifest, TensorEntry, ValueEntry, header_of
from hwfsdp.checkpoint.matching import Match, fill, match
from hwfsdp.checkpoint.messages import KeyPath, show
from hwfsdp.checkpoint.meta import NewMemory
from hwfsdp.checkpoint.plan import shares_of
from hwfsdp.checkpoint.reading import read_tensors
from hwfsdp.checkpoint.saving import Target, save_agreed
from hwfsdp.checkpoint.values import decode
from hwfsdp.errors import CheckpointError

__all__ = ["Inspection", "SaveHandle", "async_save", "finish_saves", "inspect", "load", "save", "verify"]


def save(
    state_dict: Mapping[Any, Any],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> str:
    """Write a state dict; a collective, which every rank of the group calls with the same keys.

    Returns when everything is on the disk. Subclasses of int, float and str are saved as what they are a subclass of.

    Args:
        state_dict: dicts, lists and tuples of tensors, DTensors, numbers, strings, bytes, None; keys are str or int.
            A DTensor is written by the ranks that have its parts, anything else by one of the ranks, after it was found
            to be the same on all.
        path: a directory, on storage that all ranks see. It is made, with its parents.
        overwrite: there may be a checkpoint already; the new save takes its place when it is complete.
        keep: how many saves to have in `path`, this one included; older ones are removed. Given, it allows for a checkpoint
            being there. None: one.

    Returns:
        The id of the save; `path / id` can be loaded, too, as long as it is kept.

    Raises:
        UsageError: an entry that a checkpoint cannot hold, ranks that differ, or a target that is there already.
        UnsupportedError: a sparse, quantized or otherwise unusual tensor.
        StateError: another process is saving there.
        CheckpointError: a disk that is full or fails, a rank that raised, died, or hung. The same on all ranks, and what
            was there before is as it was.
    """
    agreement = Agreement(process_group, "save")
    queue.end_before(agreement)
    return save_agreed(agreement, state_dict, Target(Path(path).absolute(), overwrite, keep))


def async_save(
    state_dict: Mapping[Any, Any],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """`save`, which goes on after the call has returned; a collective, as that is.

    Returns when every tensor is copied to the CPU: changing them does not change the save. The copies' memory, as much as
    this rank's part of the state dict, is kept for the next call.

    Args:
        As for `save`.

    Returns:
        A handle; its `wait` raises what `save` would have raised.

    Raises:
        The error of the asynchronous save before this one, if nobody waited for it.
    """
    return queue.start(state_dict, process_group, Target(Path(path).absolute(), overwrite, keep))


def load(
    state_dict: Any,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    allow_cast: bool = False,
    device: torch.device | str | None = None,
    model: nn.Module | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Put what was saved into a state dict of the same keys, in place; a collective over the group.

    Each rank reads what it needs: of a DTensor the part that it has, at any world size and in any sharding, whatever they
    were at the save. Other values replace the state dict's values.

    Tensors on the meta device get memory, as `meta.init_state_dict` gives it: of a DTensor for this rank's part only, once
    for what shares memory, and in place, so that they are loaded wherever they are referred to. A load that fails puts
    them back.

    Args:
        state_dict: taken right before; of an optimizer that has made no step yet, after `meta.init_optimizer_state`.
            `optimizer.load_state_dict` then takes over what is not a tensor, the learning rate for example. Or a module,
            for its state dict.
        path: what `save` got, or one save in it.
        strict: the keys must be the same. Otherwise keys on only one side are left alone.
        allow_cast: tensors may have another dtype, of the same or a wider kind: precision may be lost, but no value
            becomes infinite, no fraction and no imaginary part is dropped.

    Returns:
        `state_dict`.

    Raises:
        UsageError: there is no checkpoint, or the state dict does not fit: a key, shape, rank or dtype, a tensor where
            another value was saved, a tensor without memory.
        CheckpointError: something in the checkpoint is missing or damaged, with file, key and offset. All ranks raise
            the same error, and the target is untouched.
    """
    with NewMemory(state_dict, device, model) as target:
        request = _Request(target, strict, allow_cast)
        _load_current(Agreement(process_group, "load"), request, Path(path).absolute())
    return state_dict


# --- One load, step by step --------------------------------------------------------------------------------


class _Request(NamedTuple):
    """A request to load."""

    target: NewMemory
    strict: bool
    allow_cast: bool


def _load_current(agreement: Agreement, request: _Request, path: Path) -> None:
    save_id, digest = _find(agreement, path)
    while True:
        try:
            _load_save(agreement, request, path, save_id, digest)
            return
        except CheckpointError as error:
            if error.file is None:  # a rank is lost, say
                raise
            before, (save_id, digest) = save_id, _find(agreement, path)
            if save_id == before:
                raise


def _find(agreement: Agreement, path: Path) -> list[Any]:
    """The id of the save that counts, and the hash of its manifest, as the leader sees them."""

    def choose(_: list[Any]) -> list[Any]:
        current = saves.find_current(path)
        manifest = saves.read_manifest(current)
        saves.check_files(current.folder, manifest)
        return [[current.folder.name, manifest.digest]] * agreement.size

    found: list[Any] = agreement.step("finding", lambda: None, choose)
    return found


def _load_save(agreement: Agreement, request: _Request, path: Path, save_id: str, digest: str) -> None:
    matched: list[Match] = []
    parts: dict[KeyPath, Tensor] = {}
    folder = path if path.name == save_id else path / save_id
    target, strict, allow_cast = request

    def match_mine() -> None:
        manifest = saves.read_manifest(saves.Current(folder, digest))
        target.give()
        matched.append(match(target.state_dict, manifest, strict=strict, allow_cast=allow_cast))
        target.check_loaded(manifest.entries)
        matched[0].fresh.update(target.paths)

    def read_mine() -> None:
        parts.update(read_tensors(matched[0], folder, agreement.check))

    agreement.step("matching", match_mine)
    agreement.step("reading", read_mine)
    fill(target.state_dict, matched[0], parts)


# --- Without loading ---------------------------------------------------------------------------------------
# Neither function needs the program that wrote the checkpoint, a process group, or more memory than one block.


@dataclass(frozen=True)
class Inspection:
    """The contents of a save.

    Attributes:
        path: directory of the save. save_id: its name. saves: the ids of all finished saves beside it, oldest first.
        tensors: by key, as one would index it. values: everything else, likewise.
        nbytes: of all files of the save, the manifest left out. ranks: how many wrote it.
    """

    path: Path
    save_id: str
    saves: tuple[str, ...]
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]
    nbytes: int
    ranks: int

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
    current = saves.find_current(Path(path).absolute())
    return _inspection(current, saves.read_manifest(current))


def _inspection(current: saves.Current, manifest: Manifest) -> Inspection:
    return Inspection(
        path=current.folder,
        save_id=manifest.save_id,
        saves=tuple(saves.find_saves(current.folder.parent)),
        tensors={show(p): e for p, e in manifest.entries.items() if isinstance(e, TensorEntry)},
        values={
            show(p): decode(e.json_value) for p, e in manifest.entries.items() if isinstance(e, ValueEntry)
        },
        nbytes=sum(file.nbytes for file in manifest.files),
        ranks=len(manifest.files),
    )


def verify(path: str | os.PathLike[str]) -> Inspection:
    """Read every byte of the save that counts, and compare it with its checksum.

    Returns:
        What `inspect` returns, if all is as it was written.

    Raises:
        UsageError: there is no checkpoint.
        CheckpointError: the first thing that is missing, damaged, or does not belong there, with file, key and offset.
    """
    current = saves.find_current(Path(path).absolute())
    manifest = saves.read_manifest(current)
    saves.check_files(current.folder, manifest)
    for index, share in enumerate(shares_of(manifest)):
        _verify_file(current.folder, manifest, index, share)
    return _inspection(current, manifest)


def _verify_file(
    folder: Path, manifest: Manifest, index: int, share: list[tuple[TensorEntry, Chunk]]
) -> None:
    file = manifest.files[index]
    path, header = folder / file.name, header_of(manifest.save_id, index)
    fd = blocks.open_file(path, file.nbytes)
    try:
        blocks.check_header(fd, path, header)
        end = len(header)
        for entry, chunk in share:
            blocks.check_zeros(fd, path, end, chunk.at)
            end = _verify_chunk(fd, path, entry, chunk, manifest.block_bytes)
        blocks.check_zeros(fd, path, end, file.nbytes)
    finally:
        os.close(fd)


def _verify_chunk(fd: int, path: Path, entry: TensorEntry, chunk: Chunk, block_bytes: int) -> int:
    """Check every block of a chunk; return the byte after it."""
    nbytes = chunk.box.numel * entry.dtype.itemsize
    reader = blocks.BlockReader(fd, path, chunk.at, nbytes, chunk.crc32, block_bytes, show(entry.path))
    for start in range(0, nbytes, block_bytes):
        reader.read(memoryview(bytearray(min(block_bytes, nbytes - start))), start)
    return chunk.at + nbytes
