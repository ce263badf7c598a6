"""The directory of a checkpoint: its saves, and the save that counts.

    path/CURRENT                    which save is loaded, and the hash of its manifest
    path/000002-5e0c9f1a/           one save: a number that grows, and eight random hexadecimal digits
        manifest.json               written last: a save without it was never finished
        00000.bin, 00001.bin, …     the bytes that each rank wrote

A save is written into its own directory, and changes nothing in the directories of other saves. When everything is on the disk,
`CURRENT` is replaced by a file that names the new save. For every reader this is one step: before it, a load finds the old save;
after it, the new one. Old saves are removed afterwards.

Note [Who is still writing]
    The files of a killed save look like a save that is under way. So the leader of a save holds a lock on the checkpoint's
    directory. The lock ends with its process, however the process ends. A leader that gets the lock knows that no other save is
    writing, and removes leftovers. If the file system has no locks, the user must prevent two saves at the same time.

Note [Removing a save]
    The manifest is removed first. If the removal is interrupted, it leaves an unfinished save, which does not count and is
    removed later. It never leaves a save that looks complete and has no data.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hwfsdp.checkpoint import blocks
from hwfsdp.checkpoint.manifest import FORMAT, LARGEST, SAVE_ID, VERSION, Manifest
from hwfsdp.checkpoint.manifest import from_bytes, name_of, parse_json
from hwfsdp.checkpoint.messages import damaged, refusal, refuse
from hwfsdp.errors import CheckpointError, StateError, UsageError

CURRENT, MANIFEST = "CURRENT", "manifest.json"
_NEW = "CURRENT.new"
_LARGEST_CURRENT = 4096  # bytes
_DIGEST = re.compile("[0-9a-f]{64}")


class Current(NamedTuple):
    """The save that counts: its directory, the SHA-256 of its manifest, and its id. None: accept what the manifest says."""

    folder: Path
    digest: str | None
    save_id: str | None = None


def find_saves(path: Path) -> list[str]:
    """Return the ids of the finished saves, oldest first."""
    if not path.is_dir():
        return []
    ids = [entry.name for entry in path.iterdir() if SAVE_ID.fullmatch(entry.name)]
    finished = [save_id for save_id in ids if (path / save_id / MANIFEST).is_file()]
    return sorted(finished, key=lambda save_id: (int(save_id.split("-")[0]), save_id))


def newest(path: Path) -> Path | None:
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
        got = "one without the file CURRENT" if path.is_dir() else "a file" if path.exists() else "nothing"
        refuse(path, "the directory of a checkpoint", got, f"{remedy}.")
    data = blocks.read_small_file(file, _LARGEST_CURRENT)
    tree = parse_json(data, file)
    try:
        save_id, digest = tree["save"], tree["manifest_sha256"]
        named = SAVE_ID.fullmatch(save_id) and _DIGEST.fullmatch(digest)
        intact = named and data == _current_bytes(save_id, digest)
    except (KeyError, TypeError):
        intact = None
    if not intact:
        raise damaged(file, "what a save writes", "something else", 0)
    return Current(path / save_id, digest, save_id)


def _current_bytes(save_id: str, digest: str) -> bytes:
    """Return what `CURRENT` holds: the id of the save that counts, and the SHA-256 of its manifest."""
    tree = {"format": FORMAT, "version": VERSION, "save": save_id, "manifest_sha256": digest}
    text = json.dumps(tree)[:-1]
    return f'{text}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def read_manifest(current: Current) -> Manifest:
    """Read the manifest of a save.

    Raises:
        CheckpointError: the manifest is missing or damaged, or is not the one whose hash is in `CURRENT`.
    """
    if not current.folder.is_dir():
        expected = "the directory of the save that CURRENT names"
        raise damaged(current.folder, expected, "none: it is missing")
    file = current.folder / MANIFEST
    manifest = from_bytes(blocks.read_small_file(file, LARGEST), file)
    if current.digest is not None and manifest.digest != current.digest:
        got = f"one with SHA-256 {manifest.digest[:12]}…"
        raise damaged(file, f"the manifest that CURRENT names, with {current.digest[:12]}…", got)
    if current.save_id is not None and manifest.save_id != current.save_id:
        raise damaged(file, f"the manifest of save {current.save_id}", f"that of {manifest.save_id}")
    return manifest


def find_complete(path: Path) -> tuple[Path, Manifest]:
    """Find the save that counts, and check that it has the files of its manifest. Return its directory and its manifest.

    Raises:
        UsageError, CheckpointError: as `find_current` and `read_manifest`. CheckpointError: a file is missing.
    """
    current = find_current(path)
    folder, manifest = current.folder, read_manifest(current)
    found = set(os.listdir(folder))
    for name in sorted(_files_of(manifest) - found):
        raise damaged(folder / name, "a file of the checkpoint", "none: it is missing")
    return folder, manifest


def _files_of(manifest: Manifest) -> set[str]:
    return {MANIFEST, *map(name_of, range(len(manifest.files)))}


def unlisted(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """Return the names in the directory of a save that its manifest does not list: notes of a user, files of the system."""
    return tuple(sorted(set(os.listdir(folder)) - _files_of(manifest)))


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
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                got, remedy = "another process that is saving there", "Wait for it, or choose another path."
                raise refusal(path, "one save at a time", got, remedy, StateError) from None
        try:
            yield
        finally:
            with suppress(OSError):
                # To close the descriptor is not enough, because a forked child may have it, too.
                fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
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
    blocks.write_small_file(folder / f"{MANIFEST}.new", manifest)
    os.replace(folder / f"{MANIFEST}.new", folder / MANIFEST)  # a manifest with this name is complete
    blocks.sync_directory(folder)
    (path / _NEW).unlink(missing_ok=True)
    blocks.write_small_file(path / _NEW, _current_bytes(save_id, digest))
    blocks.sync_directory(path)
    before = (path / CURRENT).read_bytes() if (path / CURRENT).is_file() else None
    os.replace(path / _NEW, path / CURRENT)
    try:
        blocks.sync_directory(path)
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


def sweep(path: Path, current: str | None, keep: int) -> None:
    """Remove everything that killed saves left. Of the finished saves, keep the newest `keep`, which include `current`.

    Args:
        current: the save that has just finished. None: a save is about to begin. Then keep all finished saves, except those newer
            than the save that counts: they never counted.
    """
    finished, counting = find_saves(path), newest_of(path)
    others = [save_id for save_id in finished if save_id != current]
    if current:
        kept = {current, *others[max(0, len(others) - (keep - 1)) :]}
    else:
        kept = set(finished[: finished.index(counting) + 1] if counting in finished else finished)
    for entry in list(path.iterdir()):
        if SAVE_ID.fullmatch(entry.name) and entry.name not in kept and not entry.is_symlink():
            remove(entry)
    (path / _NEW).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Remove a save (Note [Removing a save])."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def newest_of(path: Path) -> str | None:
    """Return the id of the save that `CURRENT` names; None if `CURRENT` cannot be read."""
    try:
        return find_current(path).folder.name
    except (UsageError, CheckpointError):
        return None
