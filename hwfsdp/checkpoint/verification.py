"""Looking at a checkpoint without loading it: `inspect` tells what is in it, `verify` whether all of it is intact.

Neither needs the program that wrote it, a process group, or more memory than one block.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwfsdp.checkpoint import blocks, saves
from hwfsdp.checkpoint.manifest import Chunk, Manifest, TensorEntry, ValueEntry, header_of
from hwfsdp.checkpoint.plan import shares_of
from hwfsdp.checkpoint.traverse import show
from hwfsdp.checkpoint.values import decode


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
