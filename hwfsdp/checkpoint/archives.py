"""Files of torch.save, which hold the parts of PART checkpoints and the blobs of DCP: written with checksums, and read with checks.

torch.save writes a zip file with a CRC-32 for each record, but torch's reader does not compare it. It also differs from other zip
readers: one flipped bit in the central directory can make a record look like a folder. Then torch reads nothing, and the tensor keeps
whatever its memory held. So `check_archive` compares the checksums. It also requires records as torch writes them: not compressed, not
encrypted, without attributes. `load_archive` then loads the values, and runs no code of the file.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from hwfsdp.checkpoint.messages import KeyPath, damaged, refuse, told, with_size
from hwfsdp.checkpoint.traverse import items_of, map_leaves

_FLAGS = 0x0808  # sizes follow the data; names are UTF-8


def check_archive(
    file: Path | IO[bytes], path: Path, key: str | None = None, offset: int | None = None
) -> None:
    """Read every record and compare it with its checksum.

    Args:
        path, key: the file and the entry that an error names. Without a key, the error names the record.
        offset: the byte at which the archive begins in the file at `path`. None: the archive is the whole file.

    Raises:
        CheckpointError: a record differs from what torch.save wrote, or the file is not a zip archive.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                plain = record.external_attr == 0 and record.compress_type == zipfile.ZIP_STORED
                if not plain or record.flag_bits & ~_FLAGS:
                    expected, got = "a record as torch.save writes it", "one with other attributes"
                    break
            else:
                name = archive.testzip()
                if name is None:
                    return
                record, expected = archive.getinfo(name), "the bytes that were written"
                got = "others, by their CRC-32"
    except (OSError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError, zlib.error) as error:
        raise damaged(path, "an undamaged zip file of torch.save", told(error), offset, key) from error
    got, at = f"{got}, in {record.filename}", (offset or 0) + record.header_offset
    raise damaged(path, expected, got, at, key or record.filename)


def load_archive(
    file: Path | IO[bytes],
    path: Path,
    options: Mapping[str, Any],
    key: str | None = None,
    offset: int | None = None,
) -> Any:
    """Load an archive with `torch.load(weights_only=True)`, which runs no code from the archive. Call `check_archive` first.

    Args:
        options: for torch.load. path, key, offset: as for `check_archive`.

    Raises:
        CheckpointError: the archive contains something that weights_only=True does not allow. No code of it has run.
    """
    try:
        if not isinstance(file, Path):
            file.seek(0)
        return torch.load(file, **{**options, "weights_only": True})
    except Exception as error:
        expected, got = "what torch.load(weights_only=True) allows", told(error)[:300]
        unsafe = _calls_in(file) if isinstance(error, pickle.UnpicklingError) else []
        if not unsafe:
            raise damaged(path, expected, got, offset, key) from error
        got = f"calls of {', '.join(unsafe)}, which were not made"
        remedy = "If you trust who wrote it, load it inside torch.serialization.safe_globals([those])."
        raise damaged(path, expected, got, offset, key, remedy) from error


@contextmanager
def extract(path: Path, start: int, nbytes: int, key: str) -> Iterator[IO[bytes]]:
    """Open a range of bytes of a file as a file. `key`: the entry that an error names."""
    try:
        with path.open("rb") as file:
            yield io.BufferedReader(_Range(file.fileno(), start, nbytes))
    except OSError as error:
        raise damaged(path, "a file that can be read", told(error), key=key) from error


class _Range(io.RawIOBase):
    """A range of bytes of a file, as a file that is read from. Others may read from the same descriptor at the same time."""

    def __init__(self, fd: int, start: int, nbytes: int) -> None:
        self.fd, self.start, self.nbytes, self.at = fd, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.nbytes}[whence]
        if self.at < 0:
            raise ValueError(f"a negative place in a file: {self.at}")
        return self.at

    def readinto(self, into: Any) -> int:
        n = min(len(into), max(0, self.nbytes - self.at))
        n = os.preadv(self.fd, [memoryview(into)[:n]], self.start + self.at) if n else 0
        self.at += n
        return n


def _calls_in(file: Path | IO[bytes]) -> list[str]:
    """Return the names of the classes and functions that loading the file would call. Leave out names that torch considers safe."""
    with suppress(Exception):  # the file may be damaged in any way
        if not isinstance(file, Path):
            file.seek(0)
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    return []


@contextmanager
def archive_file(path: Path, nbytes: int) -> Iterator[IO[bytes]]:
    """Make a new file for `torch.save`, which adds checksums, and bring it to the disk at the end. `nbytes`: what an error says."""
    with_crcs = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(True)
        with open(path, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except Exception as error:
        raise with_size(error, path, nbytes) from error
    finally:
        torch.serialization.set_crc32_options(with_crcs)


def check_loadable(path: KeyPath, tree: Any) -> None:
    """Raise an error if torch.load with weights_only=True would not accept the tree. Tensors are taken out before the test."""
    file = io.BytesIO()
    try:
        torch.save(map_leaves(lambda _, leaf, __: None if isinstance(leaf, Tensor) else leaf, tree), file)
        file.seek(0)
        torch.load(file, weights_only=True)
        return
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
    for key, child in (items_of(tree) or {}).items():
        check_loadable((*path, key), child)
    expected = "what torch.load takes with weights_only=True: tensors, numbers, str, and the plain containers"
    remedy = "Convert it, for example with its state_dict(), or both save and load it inside "
    remedy += "torch.serialization.safe_globals([its class])."
    refuse(path, expected, f"{type(tree).__name__} ({reason})", remedy)
