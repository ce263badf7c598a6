"""Read submissions, which are folders or archives, file by file. This module writes nothing.

A submission may be an attack. So this module does not trust stated sizes, and counts while it reads: the size of an archive, the number
of files, the number of unpacked bytes, and the ratio of unpacked to packed bytes. It does not follow links.

    with open_source(path) as source:
        source.paths            # path → None, or why it cannot be read
        source.read(path)       # bytes; Refused if there are too many

The first bytes of an archive decide its type, not its name. Passwords, and archives inside archives, are not supported.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import IO, Any

from hwfsdp.course.gradebook.layout import is_junk
from hwfsdp.course.submission import LARGEST

SUFFIXES = (".tar.gz", ".tar.bz2", ".tar.xz", ".tgz", ".tar", ".zip")
Opener = Callable[[Any], Any]
# the first bytes of a packed tar
PACKED: dict[bytes, Opener] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
OTHERS = {b"Rar!": "a RAR archive", b"7z\xbc\xaf": "a 7z archive", b"%PDF": "a PDF file"}
BROKEN = (  # errors of the readers of archives
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError),
    *(NotImplementedError, RuntimeError, ValueError, OverflowError, MemoryError),
)


LINK = "a symbolic link, which is not followed"


class Refused(Exception):
    """A submission, or one of its files, is not read. The text says why."""


@dataclass(frozen=True)
class Limits:
    """Limits that no honest submission reaches.

    Attributes:
        archive, unpacked, file: bytes of an archive, of all its unpacked files, and of one file that is graded.
        files: number of files in an archive or a folder.
        ratio: unpacked bytes for one packed byte. This limit applies only above `small` unpacked bytes.
        depth: levels of nested folders.
    """

    archive: int = 64 << 20
    unpacked: int = 256 << 20
    file: int = LARGEST
    files: int = 10_000
    ratio: int = 100
    small: int = 4 << 20
    depth: int = 12


@dataclass
class Source:
    """A submission.

    Attributes:
        paths: relative path, with `/` → None, or the reason why it cannot be read.
        problems: other problems, one line each. newest: when the newest file of an archive was written; None if unknown.
        told_by: the source of the time, "archive" or "file".
    """

    told_by = "archive"

    limits: Limits
    paths: dict[str, str | None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    newest: datetime | None = None

    def read(self, path: str) -> bytes:
        """Return the bytes of the file at one path.

        Raises:
            Refused: the file is a link, encrypted, broken, or larger than the limit.
        """
        reason = self.paths[path]
        if reason is not None:
            raise Refused(reason)
        try:
            content = self._read(path)
        except BROKEN as error:
            raise Refused(f"cannot be read: {_said(error)}") from None
        if len(content) > self.limits.file:
            raise Refused(f"more than {self.limits.file:,} bytes")
        return content

    def _read(self, path: str) -> bytes:
        raise NotImplementedError

    def written(self, chosen: Iterable[str]) -> datetime | None:
        """Return the time of the newest file: in an archive of all files, in a folder of the chosen ones; None if unknown."""
        return self.newest

    def add(self, path: str, reason: str | None) -> None:
        """Add a path, unless its name leads out of the submission.

        Raises:
            Refused: there are too many paths.
        """
        if len(self.paths) >= self.limits.files:
            raise Refused(f"more than {self.limits.files:,} files")
        clean, slashed = _clean(path), path.replace("\\", "/")
        if slashed.startswith("/") or ".." in clean.split("/") or path[1:2] == ":" or "\0" in path:
            self.problems.append(f"{path!r} leads out of the submission; it was left out")
        elif clean in self.paths:
            self.paths[clean] = "there are two files of this name in the archive"
        elif clean:
            self.paths[clean] = reason


def _clean(path: str) -> str:
    """Return a path of an archive in the form of `Source.paths`."""
    return "/".join(part for part in path.replace("\\", "/").split("/") if part not in ("", "."))


@contextmanager
def open_source(path: Path, zone: tzinfo = timezone.utc, limits: Limits = Limits()) -> Iterator[Source]:
    """Open the submission at a path: a folder, or an archive.

    Args:
        zone: the time zone of times in zips, which are wall clock times without a zone.

    Raises:
        Refused: the path is neither a folder nor an archive, or cannot be read, or is too large.
    """
    with ExitStack() as stack:
        try:
            source = _open(path, stack, zone, limits)
        except BROKEN as error:
            raise Refused(f"cannot be read: {_said(error)}") from None
        yield source


def _open(path: Path, stack: ExitStack, zone: tzinfo, limits: Limits) -> Source:
    if path.is_symlink():
        raise Refused(LINK)
    if path.is_dir():
        return _Folder(path, limits)
    if not path.is_file():
        raise Refused("neither a folder nor a file")
    return _archive(stack.enter_context(path.open("rb")), zone, limits)


def _said(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _archive(file: IO[bytes], zone: tzinfo, limits: Limits) -> Source:
    size = os.fstat(file.fileno()).st_size
    magic = file.read(512)
    file.seek(0)
    if not size:
        raise Refused("an empty file")
    if size > limits.archive:
        raise Refused(f"an archive of {size:,} bytes; the limit is {limits.archive:,}")
    if magic.startswith((b"PK\3\4", b"PK\5\6")):
        return _Zip(file, size, zone, limits)
    unpack = next((unpack for start, unpack in PACKED.items() if magic.startswith(start)), None)
    if unpack or magic[257:262] == b"ustar":
        return _Tar(unpack(file) if unpack else file, size, limits)
    what = next((said for start, said in OTHERS.items() if magic.startswith(start)), "another kind of file")
    raise Refused(f"{what}; expected a folder, a zip or a tar archive")


def _check_sizes(total: int, packed: int, limits: Limits) -> None:
    """Raise Refused if an archive unpacks to far more bytes than its size, as archive bombs do."""
    if total > limits.unpacked:
        raise Refused(f"more than {limits.unpacked:,} bytes when unpacked")
    if total > limits.small and total > limits.ratio * packed:
        raise Refused(f"unpacks to more than {limits.ratio} times its size, as archive bombs do")


class _Folder(Source):
    """A folder. Its links are listed, with the reason why they are not read."""

    told_by = "file"

    def __init__(self, root: Path, limits: Limits) -> None:
        super().__init__(limits)
        self.root, seen = root, 0
        for folder, folders, names in os.walk(root, onerror=self._note_unreadable):
            above = Path(folder).relative_to(root)
            seen += len(folders) + len(names)
            if seen > limits.files:
                raise Refused(f"more than {limits.files:,} files")
            folders[:] = sorted(name for name in folders if not is_junk(name))
            if len(above.parts) > limits.depth:
                self.problems.append(f"{above.as_posix()!r} lies too deep; it was left out")
                folders.clear()
                continue
            for name in (*folders, *sorted(name for name in names if not is_junk(name))):
                self._note(above / name, is_folder=name in folders)

    def _note(self, path: Path, is_folder: bool) -> None:
        mode = (self.root / path).lstat().st_mode
        if stat.S_ISLNK(mode):
            self.paths[path.as_posix()] = LINK
            if is_folder:
                self.problems.append(f"{path.as_posix()!r} is {LINK}")
        elif not is_folder:
            self.paths[path.as_posix()] = None if stat.S_ISREG(mode) else "no plain file"

    def _note_unreadable(self, error: OSError) -> None:
        path = Path(error.filename).relative_to(self.root).as_posix()
        self.problems.append(f"{path!r} cannot be read: {_said(error)}")

    def _read(self, path: str) -> bytes:
        number = os.open(self.root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise Refused("no plain file")
            return file.read(self.limits.file + 1)

    def written(self, chosen: Iterable[str]) -> datetime | None:
        return _newest((self.root / path).lstat().st_mtime for path in chosen if self.paths[path] is None)


class _Zip(Source):
    """A zip. Its stated sizes are checked when it is opened. `read` limits the bytes of each file, too."""

    def __init__(self, file: IO[bytes], size: int, zone: tzinfo, limits: Limits) -> None:
        super().__init__(limits)
        if _directory_bytes(file, size) > 512 * limits.files:
            raise Refused(f"more than {limits.files:,} files")
        self.archive = zipfile.ZipFile(file)
        self.entries: dict[str, zipfile.ZipInfo] = {}
        infos = [info for info in self.archive.infolist() if not info.is_dir()]
        for info in infos:
            self.add(info.filename, _why_not(info))
            self.entries[_clean(info.filename)] = info
        _check_sizes(sum(info.file_size for info in infos), size, limits)
        self.newest = max((_entry_time(info, zone) for info in infos), default=None)

    def _read(self, path: str) -> bytes:
        with self.archive.open(self.entries[path]) as file:
            return file.read(self.limits.file + 1)


def _why_not(info: zipfile.ZipInfo) -> str | None:
    if info.flag_bits & 0x1:
        return "encrypted"
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind == stat.S_IFLNK:
        return LINK
    return None if kind in (0, stat.S_IFREG) else "no plain file"


def _entry_time(info: zipfile.ZipInfo, zone: tzinfo) -> datetime:
    try:
        return datetime(*info.date_time, tzinfo=zone)
    except ValueError:  # some tools write a month 0
        return datetime(1980, 1, 1, tzinfo=zone)


def _directory_bytes(file: IO[bytes], size: int) -> int:
    """Return the size of a zip's list of files in bytes, so that a list of millions of files is never read.

    Source of the end record: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.16.
    """
    file.seek(max(0, size - 65_557))
    tail = file.read()
    file.seek(0)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) < at + 22:
        raise Refused("cannot be read: a zip without its end; was it uploaded whole?")
    (length,) = struct.unpack_from("<I", tail, at + 12)
    return int(length)


class _Tar(Source):
    """A tar archive, packed or not. Each read goes through it from the beginning."""

    def __init__(self, unpacked: Any, size: int, limits: Limits) -> None:
        super().__init__(limits)
        self.unpacked, self.size = unpacked, size
        times: list[float] = []
        last = ""
        try:
            for member, _ in self._members():
                last = member.name
                if not member.isdir():
                    self.add(member.name, _why_not_of_tar(member))
                    times.append(float(member.mtime))
        except _Torn as torn:
            if torn.name:
                self.add(torn.name, torn.reason)
            self.problems.append(f"the archive is damaged after {last!r}; what follows was not read")
        self.newest = _newest(times)

    def _members(self) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
        self.unpacked.seek(0)
        counted = _Counted(self.unpacked, self.size, self.limits)
        with tarfile.open(fileobj=counted, mode="r|", tarinfo=_Member) as archive:  # type: ignore[call-overload]
            for member in archive:
                yield member, archive

    def _read(self, path: str) -> bytes:
        for member, archive in self._members():
            if _clean(member.name) == path and member.isreg():
                file = archive.extractfile(member)
                return file.read(self.limits.file + 1) if file else b""
        raise Refused("no longer in the archive")


def _why_not_of_tar(member: tarfile.TarInfo) -> str | None:
    if member.issym() or member.islnk():
        return "a link, which is not followed"
    return None if member.isreg() else "no plain file"


def _newest(times: Iterable[float]) -> datetime | None:
    """Return the last of these times, given in seconds since 1970; None if there are none, or one is not a number or out of range."""
    begin = datetime(1970, 1, 1, tzinfo=timezone.utc)
    try:
        return max((begin + timedelta(seconds=seconds) for seconds in times), default=None)
    except (ValueError, OverflowError):
        return None


class _Torn(tarfile.ReadError):
    """A tar cannot be read from some place on. `name` is the file at this place, or "" if it is unknown."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name or 'a header'}: {reason}")
        self.name, self.reason = name, reason


class _Member(tarfile.TarInfo):
    """A file of a tar. `tarfile` treats an unreadable header as the end and accepts negative sizes. This class raises in both cases."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Member:
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            is_end = type(error).__name__ in ("EOFHeaderError", "EmptyHeaderError")
            if is_end or not archive.offset:
                raise
            raise _Torn("", str(error)) from None

    def _block(self, count: int) -> int:
        if count < 0:
            raise _Torn(self.name, "a size below zero")
        return int(super()._block(count))  # type: ignore[misc]


class _Counted:
    """A stream that raises Refused when too many bytes are read from it."""

    def __init__(self, file: Any, packed: int, limits: Limits) -> None:
        self.file, self.packed, self.limits, self.total = file, packed, limits, 0

    def read(self, size: int) -> bytes:
        data: bytes = self.file.read(size)
        self.total += len(data)
        _check_sizes(self.total, self.packed, self.limits)
        return data
