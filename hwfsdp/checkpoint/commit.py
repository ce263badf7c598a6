"""Files and directories of checkpoints: written, brought to the disk, put in place in one step, and read with checks.

Nothing that is written counts before one rename: of `CURRENT`, of a directory, or of a file. Everything is on the disk by then (fsync).
Until the rename, what was there before is not changed.

    path/CURRENT                    our store: which save is loaded, and the hash of its manifest
    path/000002-5e0c9f1a/           one save: a number that grows, and eight random hexadecimal digits
        manifest.json               written last: a save without it was never finished
        00000.bin, 00001.bin, …     the bytes that each rank wrote

A save of the store is written into its own directory, and changes nothing in the directories of other saves. When everything is on
the disk, `CURRENT` is replaced by a file that names the new save. For every reader this is one step: before it, a load finds the old
save; after it, the new one. Old saves are removed afterwards.

A checkpoint of another format is a directory of files of `torch.save`, which is replaced as a whole (`replaced`). So a directory with the
checkpoint's name is always complete. On Linux, the old and the new directory exchange their names in one step. On other systems,
there is a moment without any directory of this name. A killed save leaves a directory behind; the next save removes it.

DCP and PART write files of torch.save. Such a file is a zip file with a CRC-32 for each record, but torch's reader does not compare it.
It also differs from other zip readers: one flipped bit in the central directory can make a record look like a folder. Then torch reads
nothing, and the tensor keeps whatever its memory held. So `check_archive` compares the checksums. It also requires records as torch
writes them: not compressed, not encrypted, without attributes. `load_archive` then loads the values, and runs no code of the file.

Note [Who is still writing]
    The files of a killed save look like a save that is under way. So the leader of a save holds a lock on the checkpoint's
    directory. The lock ends with its process, however the process ends. A leader that gets the lock knows that no other save is
    writing, and removes leftovers. In the formats of torch.save, the lock is on the new directory beside the checkpoint, and
    leftovers are such directories without a lock. If the file system has no locks, the user must prevent two saves at the same time.

Note [Removing a save]
    The manifest is removed first. If the removal is interrupted, it leaves an unfinished save, which does not count and is
    removed later. It never leaves a save that looks complete and has no data.

Note [Checksums]
    CRC-32 finds every error of a single bit and every burst of up to 32 bits. It misses about one of four billion other errors. Its
    speed is a good part of the speed of memory, and every Python has it. It does not protect against an attacker, who can change the
    checksums together with the files. The protection against attackers is that no code in the files ever runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import json
import os
import re
import secrets
import shutil
import stat
import struct
import zipfile

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.error_messages import KeyPath, check_format, damaged, refusal, refuse, signs_in
from hwfsdp.checkpoint.error_messages import told, with_size
from hwfsdp.checkpoint.manifest import BLOCK_BYTES, FORMAT, LARGEST, SAVE_ID, VERSION, Manifest, from_bytes
from hwfsdp.checkpoint.manifest import checksum, name_of, parse_json
from hwfsdp.checkpoint.traverse import items_of, map_leaves
from hwfsdp.errors import CheckpointError, StateError, UsageError

# a range of bytes of a file: the byte at which it begins, and the function that returns its data
Extent = tuple[int, Callable[[], memoryview]]
_WRITE_BYTES = 8 * BLOCK_BYTES  # per call; between two calls, `check` may stop the writing


def checksums_of(data: memoryview, block_bytes: int = BLOCK_BYTES) -> list[int]:
    """Return the CRC-32 of each block."""
    return [checksum(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes)]


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
        for at, data_of in extents:
            _write_all(fd, memoryview(bytes(at - end)))
            data = data_of()
            crc32 = []
            for start in range(0, len(data), _WRITE_BYTES):
                check()
                part = data[start : start + _WRITE_BYTES]
                crc32 += checksums_of(part)
                _write_all(fd, part)
            checksums.append(crc32)
            end = at + len(data)
        sync(fd)
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


def sync(fd: int) -> None:
    """Bring the bytes of a file, or the names in a directory, to the disk."""
    os.fsync(fd)
    if hasattr(fcntl, "F_FULLFSYNC"):  # of macOS, where fsync leaves them in the disk's own memory
        with suppress(OSError):  # some file systems do not have it
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)


def open_file(path: Path, nbytes: int | None = None, may_be_link: bool = False) -> int:
    """Return a descriptor of a regular file. The path must not be a symbolic link, unless `may_be_link`.

    Raises:
        CheckpointError: the file is missing, is not a regular file, or does not have `nbytes` bytes (None: any size).
    """
    try:
        fd = os.open(path, os.O_RDONLY | (0 if may_be_link else os.O_NOFOLLOW) | os.O_CLOEXEC | os.O_NONBLOCK)
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


def read_small_file(path: Path, limit: int, may_be_link: bool = False) -> bytes:
    """Return all bytes of a file of at most `limit` bytes. `may_be_link`: as for `open_file`.

    Raises:
        CheckpointError: the file is missing, too large, or cannot be read.
    """
    fd = open_file(path, may_be_link=may_be_link)
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


# --- The directory of a checkpoint -------------------------------------------------------------------------

CURRENT, MANIFEST, _NEW = "CURRENT", "manifest.json", "CURRENT.new"
_LARGEST_CURRENT = 4096  # bytes
_DIGEST = re.compile("[0-9a-f]{64}")


class Current(NamedTuple):
    """The save that counts: its directory, and the SHA-256 of its manifest. None: accept what the manifest says."""

    folder: Path
    digest: str | None


def find_saves(path: Path) -> list[str]:
    """Return the ids of the finished saves, oldest first."""
    if not path.is_dir():
        return []
    saves = [entry for entry in path.iterdir() if SAVE_ID.fullmatch(entry.name)]
    finished = [entry.name for entry in saves if (entry / MANIFEST).is_file()]
    return sorted(finished, key=lambda save_id: (int(save_id.split("-")[0]), save_id))


def path_to_load(path: Path) -> Path | None:
    """Return the path to load from: `path` if one of its saves counts, else its newest finished save; None if it has no finished save.

    If no save counts although one is finished, a save was killed in its last moment, or somebody has deleted `CURRENT`.
    """
    if os.path.lexists(path / CURRENT):
        return path
    finished = find_saves(path)
    return path / finished[-1] if finished else None


def find_current(path: Path) -> Current:
    """Find the save that counts. `path` may also be the directory of one save, under any name, or a link to it.

    Raises:
        UsageError: there is no checkpoint. CheckpointError: `CURRENT` is damaged.
    """
    file = path / CURRENT
    if not os.path.lexists(file):
        if (path / MANIFEST).exists():
            return Current(path, None)
        saves = find_saves(path)
        remedy = f"There are saves in it: load {path / saves[-1]}" if saves else "Check the path"
        expected = "the directory of a checkpoint"
        check_format(path, expected, "store")
        refuse(path, expected, "one without the file CURRENT", f"{remedy}.")
    data = read_small_file(file, _LARGEST_CURRENT)
    tree = parse_json(data, file)
    try:
        save_id, digest = tree["save"], tree["manifest_sha256"]
        if SAVE_ID.fullmatch(save_id) and _DIGEST.fullmatch(digest):
            if data == _current_bytes(save_id, digest):
                return Current(path / save_id, digest)
    except (KeyError, TypeError):
        pass
    raise damaged(file, "what a save writes", "something else", 0)


def _current_bytes(save_id: str, digest: str) -> bytes:
    """Return what `CURRENT` holds: the id of the save that counts, and the SHA-256 of its manifest."""
    tree = {"format": FORMAT, "version": VERSION, "save": save_id, "manifest_sha256": digest}
    text = json.dumps(tree)[:-1]
    return f'{text}, "crc32": "{checksum(text.encode()):08x}"}}\n'.encode()


def read_manifest(current: Current) -> Manifest:
    """Read the manifest of a save.

    Raises:
        CheckpointError: the manifest is missing or damaged, or is not the one whose hash is in `CURRENT`.
    """
    if not current.folder.is_dir():
        expected = "the directory of the save that CURRENT names"
        raise damaged(current.folder, expected, "none: it is missing")
    file = current.folder / MANIFEST
    manifest = from_bytes(read_small_file(file, LARGEST), file)
    if current.digest is not None and manifest.digest != current.digest:
        got = f"one with SHA-256 {manifest.digest[:12]}…"
        raise damaged(file, f"the manifest that CURRENT names, with {current.digest[:12]}…", got)
    return manifest


def read_complete(current: Current) -> tuple[Path, Manifest]:
    """Return the directory of a save and its manifest. Raise an error if a file is missing."""
    folder, manifest = current.folder, read_manifest(current)
    for name in sorted(files_of(manifest) - set(os.listdir(folder))):
        raise damaged(folder / name, "a file of the checkpoint", "none: it is missing")
    return folder, manifest


T = TypeVar("T")


def unless_replaced(path: Path, read: Callable[[Current], T]) -> T:
    """Return what `read` returns for the save that counts. If it fails and another save counts now, read that one."""
    while True:
        current = find_current(path)
        try:
            return read(current)
        except (CheckpointError, FileNotFoundError):
            if find_current(path) == current:
                raise


def files_of(manifest: Manifest) -> set[str]:
    """Return the names of the files of a save."""
    return {MANIFEST, *map(name_of, range(len(manifest.files)))}


# --- Writing -----------------------------------------------------------------------------------------------


def check_target(path: Path, overwrite: bool) -> None:
    """Raise `UsageError` if a save may not write to this path."""
    within = next((p for p in (path, *path.parents) if SAVE_ID.fullmatch(p.name)), None)
    if within is not None:
        remedy = "Give the directory above it."
        refuse(path, "the directory of a checkpoint", f"one save, {within.name}", remedy)
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        got = "a link to nothing" if path.is_symlink() and not path.exists() else "a file"
        refuse(path, "a directory, or nothing", got, "Choose another path.")
    for sign in [sign for sign, kind in signs_in(path).items() if kind != "store"]:
        got = f"one of another format, which has {sign}"
        refuse(path, "a checkpoint of the store, or none", got, "Choose another path.")
    if overwrite:
        return
    saves = find_saves(path)
    others = [e.name for e in path.iterdir() if not SAVE_ID.fullmatch(e.name) and e.name != _NEW]
    if saves or others:
        got = f"the checkpoint {saves[-1]}" if saves else f"a directory with {sorted(others)[0]!r} in it"
        remedy = "Pass overwrite=True, keep=N to have several, or choose another path."
        refuse(path, "no checkpoint, or overwrite=True", got, remedy)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a checkpoint's directory (Note [Who is still writing]).

    Raises:
        StateError: another save holds the lock.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system may have no locks
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                got, remedy = "another process that is saving there", "Wait for it, or choose another path."
                raise refusal(path, "one save at a time", got, remedy, StateError) from None
        yield
    finally:
        with suppress(OSError):
            # To close the descriptor is not enough, because a forked child may have it, too.
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def begin(path: Path) -> str:
    """Make the directory of a new save. Its number is higher than all others. Return its id."""
    numbers = [int(e.name.split("-")[0]) for e in path.iterdir() if SAVE_ID.fullmatch(e.name)]
    save_id = f"{max(numbers, default=0) + 1:06d}-{secrets.token_hex(4)}"
    (path / save_id).mkdir()
    return save_id


def finish(path: Path, save_id: str, manifest: bytes, digest: str) -> None:
    """Commit the save: write its manifest, then let `CURRENT` name it. The data files are in `path / save_id`; their names may be lost.

    At every moment, also after a power cut, a load must find the whole old save or the whole new one; on return, the new one. A
    power cut may undo everything except the bytes of a file and the names in a folder at their last fsync.

    Raises:
        OSError: the disk failed. Then the save from before still counts; if there was none, none counts.
    """
    folder = path / save_id
    write_small_file(folder / f"{MANIFEST}.new", manifest)
    os.replace(folder / f"{MANIFEST}.new", folder / MANIFEST)  # a manifest with this name is complete
    sync_directory(folder)
    (path / _NEW).unlink(missing_ok=True)
    write_small_file(path / _NEW, _current_bytes(save_id, digest))
    sync_directory(path)
    before = (path / CURRENT).read_bytes() if (path / CURRENT).is_file() else None
    os.replace(path / _NEW, path / CURRENT)
    try:
        sync_directory(path)
    except OSError:
        _put_back(path, before)
        raise


def _put_back(path: Path, before: bytes | None) -> None:
    """Undo the last step of a save, as far as possible on a disk that has just failed."""
    with suppress(OSError):
        if before is None:
            (path / CURRENT).unlink()
        else:
            (path / _NEW).write_bytes(before)
            os.replace(path / _NEW, path / CURRENT)


def sweep(path: Path, keep: int | None = None) -> None:
    """Remove everything that killed saves left. Of the saves up to the one that counts, keep the newest `keep`. None: keep all.

    Finished saves after it never counted. If no save counts, keep all that are finished.
    """
    kept, counting = find_saves(path), current_id(path)
    if counting in kept:
        kept = kept[: kept.index(counting) + 1][-keep if keep else 0 :]
    for entry in list(path.iterdir()):
        if SAVE_ID.fullmatch(entry.name) and entry.name not in kept and not entry.is_symlink():
            remove(entry)
    (path / _NEW).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Remove a save (Note [Removing a save])."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def current_id(path: Path) -> str | None:
    """Return the id of the save that `CURRENT` names; None if `CURRENT` cannot be read."""
    try:
        return find_current(path).folder.name
    except (UsageError, CheckpointError):
        return None


# --- Directories -------------------------------------------------------------------------------------------


@contextmanager
def replaced(target: Path, agreement: Agreement, check: Callable[[], None]) -> Iterator[tuple[Path, str]]:
    """Provide a new directory beside `target`, and the id of the save. When all ranks have written there, the directory is renamed.

    It then has the name `target`. If a rank raises an error, `target` stays as it was, and the new directory is removed.

    Args:
        check: called on the first rank before the directory is made; raises if `target` must not be replaced.
    """

    def begin(_: list[Any]) -> list[str]:
        save_id = secrets.token_hex(16)
        check()
        held.enter_context(made_beside(target, save_id))
        return [save_id] * agreement.size

    with ExitStack() as held:
        save_id = agreement.step("beginning", lambda: None, begin)
        draft = name_beside(target, save_id)
        yield draft, save_id
        agreement.step("publishing", lambda: None, lambda _: put_in_place(draft, target))


@contextmanager
def made_beside(target: Path, save_id: str) -> Iterator[Path]:
    """Provide a directory beside `target`, until the context ends. If the process is killed, `sweep_beside` removes it."""
    draft = name_beside(target, save_id)
    draft.mkdir(parents=True)
    try:
        with locked(draft):
            yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_replaceable(target: Path, names: re.Pattern[str], what: str, overwrite: bool = True) -> None:
    """Raise `UsageError` if the directory holds a file whose name is none of the format's or, without `overwrite`, any file."""
    there = sorted(os.listdir(target)) if target.is_dir() else ["a file"] * os.path.lexists(target)
    foreign = [name for name in there if not names.fullmatch(name)]
    if foreign or (there and not overwrite):
        got, remedy = what, "Choose another path, or pass overwrite=True."
        if foreign:
            got, remedy = foreign[0], "Save into a directory of its own; it is replaced as a whole."
        refuse(target, f"a directory that holds nothing but {what}, or none yet", got, remedy)


def check_written(*files: Path) -> None:
    """Raise an error unless the first rank sees all these files, which the ranks have written."""
    for file in files:
        if not file.is_file():
            remedy = "Give all ranks the same directory, in a file system that they share."
            raise damaged(file, "the file that its rank wrote", "none", remedy=remedy)


def name_beside(target: Path, save_id: str) -> Path:
    """Return the path of the directory that a save writes before it renames it to `target`; `save_id` has 32 hexadecimal digits."""
    return target.with_name(f".{target.name}.{save_id}.saving")


def left_beside(target: Path) -> list[str]:
    """Return the names of the directories that killed saves left beside `target`."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{32}}\.(saving|previous)")
    there = os.listdir(target.parent) if target.parent.is_dir() else []
    return [name for name in there if pattern.fullmatch(name)]


def put_in_place(new: Path, target: Path) -> None:
    """Rename a complete directory to `target`, and remove the old `target`."""
    sync_directory(new)
    if not target.exists():
        os.rename(new, target)
    elif not _exchange(new, target):
        aside = new.with_suffix(".previous")
        os.rename(target, aside)
        try:
            os.rename(new, target)
        except OSError:
            os.rename(aside, target)
            raise
    with suppress(OSError):  # the directory has its name even if this fails
        sync_directory(target.parent)
    sweep_beside(target)


def sweep_beside(target: Path) -> None:
    """Remove the directories that killed processes left beside `target` (Note [Who is still writing])."""
    for name in left_beside(target):
        with suppress(OSError, StateError), locked(target.parent / name):
            shutil.rmtree(target.parent / name, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step. Return False, without any change, if the system cannot do this."""
    at_cwd, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of Linux
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return bool(rename and rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), swap) == 0)


# --- Files of torch.save ------------------------------------------------------------------------------------


def check_archive(file: IO[bytes], path: Path, key: str | None = None, offset: int | None = None) -> int:
    """Read every record and compare it with its checksum. Return a checksum of the checksums.

    Args:
        path, key: the file and the entry that an error names. Without a key, the error names the record.
        offset: the byte at which the archive begins in the file at `path`. None: the archive is the whole file.

    Raises:
        CheckpointError: a record differs from what torch.save wrote, or the file is not a zip archive.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            odd = [record for record in records if not _is_plain(record)]
            wrong = odd or [record for record in records if _crc_of(file, record) != record.CRC]
            seal = _seal(archive)
    except (OSError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError, struct.error) as error:
        raise damaged(path, "an undamaged zip file of torch.save", told(error), offset, key) from error
    if wrong:
        got = f"{'other attributes' if odd else 'others, by their CRC-32'}, in {wrong[0].filename}"
        at = (offset or 0) + wrong[0].header_offset
        raise damaged(path, "the bytes that were written", got, at, key or wrong[0].filename)
    return seal


def seal_of(file: IO[bytes]) -> int:
    """Return what `check_archive` will return for the archive that was just written at the end of a file."""
    with zipfile.ZipFile(file) as archive:
        seal = _seal(archive)
    file.seek(0, os.SEEK_END)
    return seal


def _seal(archive: zipfile.ZipFile) -> int:
    return checksum(repr([(record.filename, record.CRC) for record in archive.infolist()]).encode())


def _is_plain(record: zipfile.ZipInfo) -> bool:
    stored = record.compress_type == zipfile.ZIP_STORED and record.compress_size == record.file_size
    # the flags that may be set say that sizes follow the data, and that names are UTF-8
    return stored and record.external_attr == 0 and not record.flag_bits & ~0x0808


def _crc_of(file: IO[bytes], record: zipfile.ZipInfo) -> int:
    """Return the checksum of a record's bytes. They follow its header: 30 bytes, with the lengths of a name and of padding at the end."""
    file.seek(record.header_offset)
    sign, *lengths = struct.unpack("<4s22x2H", file.read(30))
    if sign != b"PK\3\4":
        raise zipfile.BadZipFile(f"no header of {record.filename}")
    file.seek(sum(lengths), os.SEEK_CUR)
    crc, left = 0, record.file_size
    while data := file.read(min(left, BLOCK_BYTES)):
        crc, left = checksum(data, crc), left - len(data)
    return crc


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
        unsafe = sorted({*re.findall(r"GLOBAL (\S+)", str(error))})
        if not unsafe:
            raise damaged(path, expected, got, offset, key) from error
        got = f"calls of {', '.join(unsafe)}, which were not made"
        remedy = "If you trust who wrote it, load it inside torch.serialization.safe_globals([those])."
        raise damaged(path, expected, got, offset, key, remedy) from error


@contextmanager
def archive_file(path: Path, nbytes: int) -> Iterator[IO[bytes]]:
    """Make a new file for `torch.save`, which adds checksums, and bring it to the disk at the end. `nbytes`: what an error says."""
    with_crcs = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(True)
        with open(path, "x+b") as file:
            yield file
            file.flush()
            sync(file.fileno())
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
