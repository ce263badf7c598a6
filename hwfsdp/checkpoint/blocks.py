"""Files of a save, written and read block by block, each block with its checksum.

CRC-32 finds every error of a single bit and every burst of up to 32 bits. It misses about one of four billion other errors. Its
speed is a good part of the speed of memory, and every Python has it. It does not protect against an attacker, who can change the
checksums together with the files. The protection against attackers is that no code in the files ever runs.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from hwfsdp.checkpoint.manifest import BLOCK_BYTES, PICKLES
from hwfsdp.checkpoint.messages import damaged

_WRITE_BYTES = 8 * BLOCK_BYTES  # per call; between two calls, `check` may stop the writing


class Extent(NamedTuple):
    """A range of bytes of a file: the byte at which it begins, and the function that returns its data."""

    at: int
    data: Callable[[], memoryview]


def checksums_of(data: memoryview, block_bytes: int = BLOCK_BYTES) -> list[int]:
    """Return the CRC-32 of each block."""
    return [zlib.crc32(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes)]


def write_file(
    path: Path, header: bytes, extents: Iterable[Extent], check: Callable[[], None]
) -> list[list[int]]:
    """Write a new file and bring it to the disk. Return the checksums of each extent.

    Args:
        extents: in the order of the file. Gaps between them are filled with zeros.
        check: called now and then; may raise an error to stop the writing.

    Raises:
        OSError: the bytes could not be brought to the disk.
    """
    checksums = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        _write_all(fd, memoryview(header))
        end = len(header)
        for extent in extents:
            _write_all(fd, memoryview(bytes(extent.at - end)))
            data = extent.data()
            crc32 = []
            for start in range(0, len(data), _WRITE_BYTES):
                check()
                part = data[start : start + _WRITE_BYTES]
                crc32 += checksums_of(part)
                _write_all(fd, part)
            checksums.append(crc32)
            end = extent.at + len(data)
        os.fsync(fd)
    except OSError as error:
        error.filename = error.filename or str(path)  # an error of a descriptor names no file
        raise
    finally:
        os.close(fd)
    return checksums


def _write_all(fd: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(fd, data) :]


def write_small_file(path: Path, data: bytes) -> None:
    """Write a new file and bring it to the disk."""
    write_file(path, data, (), lambda: None)


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_file(path: Path, nbytes: int | None = None) -> int:
    """Return a descriptor of a regular file. The path must not be a symbolic link.

    Raises:
        CheckpointError: the file is missing, is not a regular file, or does not have `nbytes` bytes (None: any size).
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise damaged(path, "a file of the checkpoint", "none: it is missing") from None
    except OSError as error:
        got = "a symbolic link" if path.is_symlink() else error.strerror or type(error).__name__
        raise damaged(path, "a file that can be read", got) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or (nbytes is not None and found.st_size != nbytes):
        os.close(fd)
        if not stat.S_ISREG(found.st_mode):
            raise damaged(path, "a regular file", stat.filemode(found.st_mode))
        raise damaged(path, f"{nbytes} bytes", f"{found.st_size}", min(nbytes or 0, found.st_size))
    return fd


def read_small_file(path: Path, limit: int) -> bytes:
    """Return all bytes of a file of at most `limit` bytes.

    Raises:
        CheckpointError: the file is missing, too large, or cannot be read.
    """
    fd = open_file(path)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise damaged(path, f"at most {limit} bytes", f"{size}", limit)
        data = bytearray(size)
        read_exactly(fd, memoryview(data), 0, path)
        return bytes(data)
    finally:
        os.close(fd)


def read_exactly(fd: int, into: memoryview, at: int, path: Path, key: str | None = None) -> None:
    """Fill the memory `into` from the file, beginning at byte `at` of the file.

    Raises:
        CheckpointError: the file is too short, or the disk fails.
    """
    done = 0
    while done < len(into):
        try:
            n = os.preadv(fd, [into[done:]], at + done)
        except OSError as error:
            raise damaged(path, "bytes", error.strerror or str(error), at + done, key) from error
        if n == 0:
            raise damaged(path, f"{len(into) - done} bytes more", "the end of the file", at + done, key)
        done += n


class BlockReader(NamedTuple):
    """A reader for the blocks of one chunk. It compares each block with its checksum.

    Attributes:
        fd, path: the file. at: the byte of the file at which the chunk begins. nbytes: the size of the chunk.
        crc32: the checksum of each block. key: the entry that an error names.
    """

    fd: int
    path: Path
    at: int
    nbytes: int
    crc32: tuple[int, ...]
    block_bytes: int
    key: str

    def covering(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range [from, to) of whole blocks that holds the bytes `start` to `stop` of the chunk."""
        blocks = start // self.block_bytes, -(-stop // self.block_bytes)
        return blocks[0] * self.block_bytes, min(blocks[1] * self.block_bytes, self.nbytes)

    def read(self, into: memoryview, start: int) -> None:
        """Fill the memory with whole blocks. The first block begins at byte `start` of the chunk.

        Raises:
            CheckpointError: a block differs from what was written. The message names file, key and offset.
        """
        read_exactly(self.fd, into, self.at + start, self.path, self.key)
        for done in range(0, len(into), self.block_bytes):
            block = (start + done) // self.block_bytes
            crc = zlib.crc32(into[done : done + self.block_bytes])
            if crc != self.crc32[block]:
                expected = f"a block with the checksum {self.crc32[block]:08x}"
                got = f"{crc:08x}: it is damaged"
                raise damaged(self.path, expected, got, self.at + start + done, self.key)


def check_header(fd: int, path: Path, header: bytes) -> None:
    """Raise `CheckpointError` unless the file begins with this header."""
    found = bytearray(len(header))
    read_exactly(fd, memoryview(found), 0, path)
    if found != header:
        got = found.decode(errors="replace").strip()
        if bytes(found[:2]) in PICKLES:
            got = "a pickle, which is never opened"
        raise damaged(path, f"a file that begins with {header.decode().strip()!r}", f"{got!r}", 0)


def check_zeros(fd: int, path: Path, start: int, stop: int) -> None:
    """Raise `CheckpointError` unless these bytes of the file are zero."""
    found = bytearray(stop - start)
    read_exactly(fd, memoryview(found), start, path)
    for i, byte in enumerate(found):
        if byte:
            raise damaged(path, "zeros between two parts", f"{byte}", start + i)
