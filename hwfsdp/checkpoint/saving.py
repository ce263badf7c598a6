"""A save on one rank, from a state dict to a save that counts.

    describe → [leader: compare, divide, make a directory] → write → [leader: manifest, CURRENT, sweep]

The steps in square brackets happen on the leader. At each arrow, all ranks have agreed (see `agreement`).
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hwfsdp.checkpoint import blocks, saves
from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.boxes import Box
from hwfsdp.checkpoint.manifest import (
    LARGEST,
    Chunk,
    Manifest,
    TensorEntry,
    from_bytes,
    header_of,
    name_of,
    to_bytes,
)
from hwfsdp.checkpoint.messages import refuse, with_size
from hwfsdp.checkpoint.plan import LocalParts, describe, divide, shares_of


@dataclass(frozen=True)
class Target:
    """The place of a save, and its options; see `store.save`."""

    path: Path
    overwrite: bool = False
    keep: int | None = None

    def check(self) -> None:
        if self.keep is not None and (type(self.keep) is not int or self.keep < 1):
            refuse("save", "keep=1 or more", f"keep={self.keep!r}", "Leave it out for one.")
        saves.check_target(self.path, self.overwrite or self.keep is not None)


class Unstaged(NamedTuple):
    """Stands for a state dict that could not be copied; `error` is the reason."""

    error: Exception


def save_agreed(agreement: Agreement, state_dict: Any, target: Target) -> str:
    """Do the work of `store.save`, in an agreement that was made before.

    Args:
        state_dict: the state dict, or an `Unstaged`. Then all ranks raise its error.
    """
    with ExitStack() as held:
        return _Saving(agreement, target, held).run(state_dict)


class _Saving:
    """One save on one rank. The leader also calls `begin` and `finish`."""

    def __init__(self, agreement: Agreement, target: Target, held: ExitStack) -> None:
        self.agreement, self.target, self.held = agreement, target, held
        self.parts: LocalParts
        self.manifest: Manifest

    def run(self, state_dict: Any) -> str:
        def describe_mine() -> Any:
            if isinstance(state_dict, Unstaged):
                raise state_dict.error
            self.parts = describe(state_dict, self.agreement.size, self.agreement.rank)
            return self.parts.description

        answer = self.agreement.step("planning", describe_mine, self.begin)
        folder: Path = self.target.path / answer["save"]
        try:
            self.agreement.step("writing", lambda: self.write(folder, answer["share"]), self.finish)
        except BaseException:
            with suppress(OSError):  # the next save removes the rest
                if self.agreement.rank == 0 and saves.newest_of(self.target.path) != folder.name:
                    saves.remove(folder)
            raise
        if self.agreement.rank == 0:
            with suppress(OSError):  # the save counts already
                saves.sweep(self.target.path, folder.name, self.target.keep or 1)
        return folder.name

    # Steps of the leader.

    def begin(self, descriptions: list[Any]) -> list[Any]:
        """Make the directory, and tell each rank what to write."""
        path = self.target.path
        self.target.check()
        manifest = divide(descriptions, "")  # raises its errors before any directory is made
        _make_directory(path)
        self.held.enter_context(saves.locked(path))
        self.target.check()  # again, because now no other save can write there
        saves.sweep(path, None, 1)
        self.manifest = replace(manifest, save_id=saves.begin(path))
        shares = [
            [[list(entry.path), chunk.at, chunk.box] for entry, chunk in share]
            for share in shares_of(self.manifest)
        ]
        return [{"save": self.manifest.save_id, "share": share} for share in shares]

    def finish(self, checksums: list[Any]) -> None:
        """Complete the manifest, and let the save count."""
        by_chunk: dict[tuple[int, int], tuple[int, ...]] = {}
        for share, crc32 in zip(shares_of(self.manifest), checksums, strict=True):
            for (_, chunk), of_blocks in zip(share, crc32, strict=True):
                by_chunk[chunk.file, chunk.at] = tuple(of_blocks)

        def complete(entry: TensorEntry) -> list[Chunk]:
            return [chunk._replace(crc32=by_chunk[chunk.file, chunk.at]) for chunk in entry.chunks]

        data = to_bytes(self.manifest.with_chunks(complete))
        path, save_id = self.target.path, self.manifest.save_id
        if len(data) > LARGEST:
            expected = f"a manifest of at most {LARGEST:,} bytes"
            got = f"{len(data):,} bytes: too many entries, or too long ones"
            refuse("save", expected, got, "Save long strings and bytes as tensors.")
        # Check the manifest as a load does: chunks tile every tensor, every byte is in its place.
        written = from_bytes(data, path / save_id / saves.MANIFEST)
        for i, nbytes in enumerate(written.files):
            os.close(blocks.open_file(path / save_id / name_of(i), nbytes))
        saves.finish(path, save_id, data, written.digest)

    # The step of every rank.

    def write(self, folder: Path, share: list[Any]) -> list[list[int]]:
        """Write this rank's file; return the checksums of its chunks."""
        rank = self.agreement.rank
        extents = [
            blocks.Extent(at, partial(self.parts.bytes_of, tuple(path), Box(*map(tuple, box))))
            for path, at, box in share
        ]
        sizes = [
            Box(*map(tuple, box)).numel * self.parts.tensors[tuple(path)][0].itemsize
            for path, _, box in share
        ]
        file, header = folder / name_of(rank), header_of(folder.name, rank)
        try:
            return blocks.write_file(file, header, extents, self.agreement.check)
        except OSError as error:
            raise with_size(error, file, len(header) + sum(sizes)) from error


def _make_directory(path: Path) -> None:
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        blocks.sync_directory(made.parent)
