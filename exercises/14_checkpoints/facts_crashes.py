"""14, on ranks: every change of a folder as a step; saves that end at a step; and what a crash may leave on the disk.

Note [What a disk promises]
    A killed process leaves files and names as they are: its finished steps are done. A power cut leaves at least the content that a file
    had at its last fsync, and at least the names that a directory had at its own last fsync. Later changes may be there or not, for each
    directory and each file alike; a single new name may have reached the disk before all others. The name of a symbolic link brings its
    target along. While steps are watched, fsync
    itself does nothing: this changes nothing that is noted, and saves time.

Left out: an fsync that lies, torn sectors, files that are changed through mapped memory.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

EVERYTHING = -1  # in place of an inode: all of the disk
LINK = b"link:"  # begins the content of a symbolic link
SYNCS = ("fsync", "fdatasync", "sync")
CHANGES = (
    """rename replace remove unlink rmdir mkdir link symlink truncate ftruncate write pwrite writev sendfile
    copy_file_range posix_fallocate""".split()
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_OPEN, _OPEN_NUMBER, _HELD = io.open, os.open, os.O_PATH | os.O_NOFOLLOW
Tree = dict[
    str, bytes | None
]  # content by path below the folder; None for a folder; a link has its target after "link:"


class Killed(BaseException):
    """Ends the code of a killed process. It does no further step."""


class Moment(NamedTuple):
    """A folder before a step.

    Attributes:
        step: such as "replace CURRENT.new → CURRENT". sync: the inode that the step brings to the disk, or None.
        root: the folder's inode. names: by inode of a folder, its names and their inodes. data: by inode of a file, its content.
    """

    step: str
    sync: int | None
    root: int
    names: dict[int, dict[str, int]]
    data: dict[int, bytes]


class Steps:
    """The steps of this rank below a folder.

    Args:
        notes: a folder for the moments of all ranks, in their order; None: they are not noted.
        stop: the number of the step before which this rank fails, or None. is_killed: it is killed there; otherwise the step raises
            OSError.

    Attributes:
        last: the step at which this rank has failed; "" before. nbytes: what was read from files.
    """

    def __init__(
        self, root: Path, notes: Path | None = None, stop: int | None = None, is_killed: bool = False
    ) -> None:
        self.root, self.notes, self.stop, self.is_killed = root, notes, stop, is_killed
        self.count, self.nbytes, self.last, self.is_dead = 0, 0, "", False
        self._held: dict[int, int] = {}  # open files by inode, so that no inode's number is used again
        self._is_changing = False

    @contextmanager
    def watched(self, module: Any) -> Iterator[None]:
        """Watch all changes in the block, also by functions that `module` has imported by name."""
        watched: dict[Any, Any] = {
            getattr(os, name): self._changing(name) for name in (*CHANGES, *SYNCS) if hasattr(os, name)
        }
        watched |= {io.open: self._opened, os.open: self._opened_number}
        places = [
            (of, name, value) for of in (os, io, builtins, module) for name, value in list(vars(of).items())
        ]
        with ExitStack() as stack:
            for of, name, value in places:
                if callable(value) and value in watched:
                    stack.enter_context(mock.patch.object(of, name, watched[value]))
            try:
                yield
            finally:
                for number in self._held.values():
                    os.close(number)

    def step(self, name: str, change: Callable[[], Any], sync: int | None = None) -> Any:
        """Note the folder, then make the change; no other rank does a step meanwhile. A change within a change is part of it."""
        if self.is_dead:
            raise Killed
        if self._is_changing:  # the opener of a file, such as tempfile's, calls os.open
            return change()
        with _OPEN(self.root.parent / "lock", "wb") as lock, self._changing_now():
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.note(name, sync)
            self.count += 1
            if self.count - 1 == self.stop:
                self.last = name
                self.is_dead = self.is_killed
                raise Killed if self.is_dead else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
            return change()

    @contextmanager
    def _changing_now(self) -> Iterator[None]:
        self._is_changing = True
        try:
            yield
        finally:
            self._is_changing = False

    def note(self, name: str, sync: int | None = None) -> None:
        if self.notes is not None:
            moment = Moment(name, sync, *self._look())
            with _OPEN(self.notes / f"{len(os.listdir(self.notes)):05}", "wb") as file:
                pickle.dump(tuple(moment), file)

    def _look(self) -> tuple[int, dict[int, dict[str, int]], dict[int, bytes]]:
        names, data = dict[int, dict[str, int]](), dict[int, bytes]()
        for here, folders, files in os.walk(self.root):
            paths = {name: os.path.join(here, name) for name in folders + files}
            found = names[self._inode(here)] = {name: self._inode(path) for name, path in paths.items()}
            for name, path in paths.items():
                if os.path.islink(path):
                    data[found[name]] = LINK + os.fsencode(os.readlink(path))
                elif name in files:
                    with _OPEN(path, "rb") as file:
                        data[found[name]] = file.read()
        return self._inode(self.root), names, data

    def _inode(self, path: str | Path) -> int:
        inode = os.lstat(path).st_ino
        if inode not in self._held:
            self._held[inode] = _OPEN_NUMBER(path, _HELD)
        return inode

    def _below(self, path: Any, folder: int | None = None) -> str:
        """Return a path below the root; "" if it is elsewhere. `path` may be a descriptor, and start at a folder's descriptor."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        here = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else os.getcwd()
        found = os.path.relpath(os.path.join(here, os.fsdecode(path)), self.root)
        return "" if found.startswith("..") else found

    def _changing(self, name: str) -> Callable[..., Any]:
        function, count = getattr(os, name), 2 if name in ("rename", "replace", "link", "symlink") else 1

        def change(*args: Any, **kwargs: Any) -> Any:
            folder = kwargs.get("dir_fd", kwargs.get("src_dir_fd"))
            if name == "sync":
                return self.step(name, lambda: None, EVERYTHING)
            targets = args[1:2] if name in ("symlink", "copy_file_range") else args[:count]
            paths = [self._below(getattr(each, "fileno", lambda: each)(), folder) for each in targets]
            if not any(paths):
                return function(*args, **kwargs)
            if name in SYNCS:
                number = args[0] if isinstance(args[0], int) else args[0].fileno()
                return self.step(f"{name} {_shown(paths[0])}", lambda: None, os.fstat(number).st_ino)
            return self.step(f"{name} {' → '.join(map(_shown, paths))}", lambda: function(*args, **kwargs))

        return change

    def _opened_number(self, path: Any, flags: int, *rest: Any, **kwargs: Any) -> int:
        name = self._below(path, kwargs.get("dir_fd"))
        if not name or not flags & _WRITES:
            return _OPEN_NUMBER(path, flags, *rest, **kwargs)
        found: int = self.step(f"open {name}", lambda: _OPEN_NUMBER(path, flags, *rest, **kwargs))
        return found

    def _opened(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **kwargs: Any) -> Any:
        """Open a file as `open` does. Each write that reaches the system is a step."""
        name = self._below(file)
        if not name:
            return _OPEN(file, mode, buffering, *rest, **kwargs)
        own = {key: kwargs.pop(key) for key in ("closefd", "opener") if key in kwargs}
        is_read = not set(mode) & set("wax+")
        arguments = (file, mode.replace("t", "").replace("b", ""))
        raw = (
            File(*arguments, **own) if is_read else self.step(f"open {name}", lambda: File(*arguments, **own))
        )
        raw.step, raw.steps = (lambda change: self.step(f"write {name}", change)), self
        if buffering == 0:
            return raw
        kind = io.BufferedReader if is_read else io.BufferedRandom if "+" in mode else io.BufferedWriter
        buffer = kind(raw, max(buffering, io.DEFAULT_BUFFER_SIZE))
        return buffer if "b" in mode else io.TextIOWrapper(buffer, *rest, **kwargs)


class File(io.FileIO):
    """A file whose writes are steps, and whose bytes are counted when they are read."""

    step: Callable[[Callable[[], Any]], Any]
    steps: Steps

    def readinto(self, buffer: Any) -> Any:
        count = super().readinto(buffer)
        self.steps.nbytes += count or 0
        return count

    def readall(self) -> bytes:
        data = super().readall()
        self.steps.nbytes += len(data)
        return data

    def write(self, data: Any) -> Any:
        return self.step(lambda: io.FileIO.write(self, data))

    def truncate(self, size: int | None = None) -> Any:
        return self.step(lambda: io.FileIO.truncate(self, size))


def _shown(name: str) -> str:
    return "the folder" if name == "." else name


# --- What a crash leaves -----------------------------------------------------------------------------------


class Crash(NamedTuple):
    """A folder that may be found after a crash. after, before: the steps around the moment. is_last: all steps were done."""

    after: str
    before: str
    power: bool
    is_last: bool
    tree: Tree


def crashes(moments: Sequence[Moment]) -> Iterator[Crash]:
    """Yield, for every moment of a save, the folders that a kill and a power cut may leave (Note [What a disk promises])."""
    first, after, seen = moments[0], "the beginning", set[tuple[bool, bool, frozenset[Any]]]()
    names, data, latest = (
        dict(first.names),
        dict(first.data),
        dict(first.data),
    )  # what is certain; and what was last
    for moment in moments:
        latest |= moment.data
        data |= {inode: now for inode, now in moment.data.items() if now.startswith(LINK)}
        is_last = moment is moments[-1]
        found = [(False, tree_of(moment.root, moment.names, latest))]
        for chosen in _choices(names, moment.names):
            found += [(True, tree_of(moment.root, chosen, content)) for content in (latest, data)]
        for power, tree in found:
            key = (power, is_last, frozenset(tree.items()))
            if key not in seen:
                seen.add(key)
                yield Crash(after, moment.step, power, is_last, tree)
        for inode, now in moment.names.items():
            if moment.sync in (inode, EVERYTHING):
                names[inode] = now
        data |= {inode: now for inode, now in moment.data.items() if moment.sync in (inode, EVERYTHING)}
        after = moment.step


def _choices(certain: dict[int, Any], latest: dict[int, Any]) -> Iterator[dict[int, dict[str, int]]]:
    """Yield the names that may be on the disk: each folder's latest or certain ones, or those with one change."""
    old = {inode: certain.get(inode, {}) for inode in latest}
    yield from (latest, old)
    for inode, now in latest.items():
        if now != old[inode]:
            for others in (latest, old):
                yield {**others, inode: old[inode] if others is latest else now}
                for name in {**now, **old[inode]}:
                    if now.get(name) != old[inode].get(name):
                        one = {**old[inode], name: now.get(name)}
                        yield {**others, inode: {each: at for each, at in one.items() if at is not None}}


def tree_of(root: int, names: dict[int, dict[str, int]], data: dict[int, bytes], path: str = "") -> Tree:
    """Return everything below a folder, by path."""
    found: Tree = {}
    for name, inode in names.get(root, {}).items():
        here = f"{path}{name}"
        found[here] = None if inode in names else data.get(inode, b"")
        found |= tree_of(inode, names, data, f"{here}/") if inode in names else {}
    return found


def read(root: Path) -> Tree:
    paths = [(str(path.relative_to(root)), path) for path in sorted(root.rglob("*"))]
    link = {name: LINK + os.fsencode(os.readlink(path)) for name, path in paths if path.is_symlink()}
    return {name: link.get(name) or (None if path.is_dir() else path.read_bytes()) for name, path in paths}


def write(root: Path, tree: Tree) -> None:
    """Give a folder this content, and nothing else."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, content in sorted(tree.items()):
        if content is None:
            (root / name).mkdir()
        elif content.startswith(LINK):
            (root / name).symlink_to(os.fsdecode(content.removeprefix(LINK)))
        else:
            (root / name).write_bytes(content)


def read_moments(notes: Path) -> list[Moment]:
    return [Moment(*pickle.loads(path.read_bytes())) for path in sorted(notes.iterdir())]
