"""A commit watched: every operation on the files of a checkpoint, the directory before each, and what a crash would leave.

On a rank, `Watch` records operations and looks at the directory before each. Where grades are made, `crashes` computes what may
be found after a kill or a power cut at each of these moments.

Note [What a disk promises]
    A killed process leaves files and names as they are: its finished operations are done. A power cut leaves at least the
    content that a file had at its last fsync, and at least the names that a directory had at its own last fsync. Later changes
    may be there or not, for each directory and each file alike. CURRENT alone may have reached the disk. During the watch,
    fsync itself does nothing: this changes nothing that is recorded, and saves time.

Left out: an fsync that lies, torn sectors, a directory that is moved.
"""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

EVERYTHING = -1  # in place of an inode: everything was synced to the disk
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")
Moment = dict[str, Any]  # the state before an operation


# --- On the rank -------------------------------------------------------------------------------------------


class Watch:
    """Record the operations below a directory.

    Args:
        root: directory of the checkpoint. fails: number of the operation that raises an OSError; None: no operation fails.

    Attributes:
        moments: by operation, the state before it; the last one is the final state. Each has "op", "sync" (the inode, if
            the operation is an fsync), "files" {name below root: [inode, text]} and "folders" {name: inode}.
    """

    def __init__(self, root: Path, fails: int | None = None) -> None:
        self.root, self.fails = root, fails
        self.moments: list[Moment] = []
        self._held: dict[int, int] = {}  # inode → open descriptor, so that no inode number is reused
        self._looking = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record everything in the block."""
        global _watch
        _hear_of_changes()
        try:
            _watch = self
            with ExitStack() as stack:
                for name in ("fsync", "fdatasync"):
                    stack.enter_context(mock.patch(f"os.{name}", self._synced(name)))
                stack.enter_context(mock.patch("os.sync", lambda: self.note("sync", EVERYTHING)))
                stack.enter_context(mock.patch("os.write", self._written))
                for name in ("io.open", "builtins.open"):
                    stack.enter_context(mock.patch(name, self._opened))
                yield
        finally:
            _watch = None
            self.fails = None
            self.note("the end")
            for fd in self._held.values():
                os.close(fd)

    def note(self, op: str, sync: int | None = None) -> None:
        """Look at the directory before an operation. Raise OSError if this operation has to fail."""
        if self._looking:
            return
        self._looking = True
        try:
            self.moments.append({"op": op, "sync": sync, **self._look()})
        finally:
            self._looking = False
        if len(self.moments) - 1 == self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.root))

    def _look(self) -> dict[str, Any]:
        found: dict[str, Any] = {"files": {}, "folders": {".": self._inode(self.root)}}
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            if path.is_dir():
                found["folders"][name] = self._inode(path)
            else:
                found["files"][name] = [self._inode(path), path.read_bytes().decode("latin-1")]
        return found

    def _inode(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
        return inode

    def on_change(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handle an audit event: a file is about to be opened, renamed or removed."""
        if self._looking:
            return
        if event == "open" and (not isinstance(arguments[2], int) or not arguments[2] & _WRITES):
            return
        names = [self._name(path) for path in arguments[: 2 if event in ("os.rename", "os.link") else 1]]
        if any(names):
            self.note(" → ".join([f"{event.removeprefix('os.')} {names[0]}", *names[1:]]))

    def _name(self, path: Any) -> str:
        """Return the path below the root; "" if it is elsewhere."""
        if isinstance(path, int):
            return f"descriptor {path}"
        with suppress(ValueError, TypeError):
            return str(Path(os.fsdecode(path)).absolute().relative_to(self.root))
        return ""

    def _synced(self, name: str) -> Any:
        def sync(fd: Any) -> None:
            number = fd if isinstance(fd, int) else fd.fileno()
            inode = os.fstat(number).st_ino
            self.note(f"{name} {self._named(inode)}", inode)

        return sync

    def _named(self, inode: int) -> str:
        found = [p for p in (self.root, *self.root.rglob("*")) if p.stat().st_ino == inode]
        names = [str(p.relative_to(self.root)) for p in found]
        return "another file" if not names else "the directory" if names[0] == "." else names[0]

    def _written(self, fd: int, data: Any) -> int:
        name = "" if self._looking else self._named(os.fstat(fd).st_ino)
        if name not in ("", "another file", "the directory"):
            self.note(f"write {name}")
        return _WRITE(fd, data)

    def _opened(self, *arguments: Any, **options: Any) -> Any:
        file = _OPEN(*arguments, **options)
        if file.writable():
            self.note("write")
        return file


_WRITE, _OPEN = os.write, io.open
_watch: Watch | None = None
assert builtins.open is io.open


@cache  # an audit hook cannot be removed again
def _hear_of_changes() -> None:
    sys.addaudithook(lambda event, arguments: _on_event(event, arguments))


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if _watch is not None and (event == "open" or event in _CHANGES):
        _watch.on_change(event, arguments)


# --- Where grades are made ---------------------------------------------------------------------------------


class Crash(NamedTuple):
    """A state that may be found after a crash.

    Attributes:
        after, before: the operations around the moment. power: True for a power cut, False for a killed process.
        files: name → text. last: all operations were done.
    """

    after: str
    before: str
    power: bool
    files: dict[str, str]
    last: bool


@dataclass
class _Disk:
    """The state that is certain to be on the disk: texts by inode, and the names in each folder, by the folder's inode."""

    texts: dict[int, str] = field(default_factory=dict)
    names: dict[int, dict[str, int]] = field(default_factory=dict)

    def sync(self, moment: Moment, inode: int) -> None:
        for number, text in moment["files"].values():
            if inode in (number, EVERYTHING):
                self.texts[number] = text
        for folder, number in moment["folders"].items():
            if inode in (number, EVERYTHING):
                self.names[number] = names_in(moment, folder)


def names_in(moment: Moment, folder: str) -> dict[str, int]:
    """Return the names in a folder, with their inodes."""
    files = {name: number for name, (number, _) in moment["files"].items()}
    paths = {Path(name): number for name, number in (files | moment["folders"]).items() if name != "."}
    return {path.name: number for path, number in paths.items() if str(path.parent) == folder}


def crashes(moments: list[Moment], not_named: Mapping[str, set[str]]) -> Iterator[Crash]:
    """Yield, for every moment of a commit, the states that a kill and a power cut may leave (Note [What a disk promises]).

    Args:
        not_named: by folder, names that are there at first but may not be on the disk.
    """
    disk = _Disk()
    disk.sync(moments[0], EVERYTHING)
    for folder, names in not_named.items():
        certain = disk.names[moments[0]["folders"][folder]]
        for name in names:
            del certain[name]
    after, texts = "the beginning", dict(disk.texts)
    for index, moment in enumerate(moments):
        texts.update({number: text for number, text in moment["files"].values()})
        last = index == len(moments) - 1
        latest = {number: names_in(moment, folder) for folder, number in moment["folders"].items()}
        yield Crash(after, moment["op"], False, _found(moment, latest, texts), last)
        for chosen, known in itertools.product(_choices(moment, latest, disk.names), (texts, disk.texts)):
            yield Crash(after, moment["op"], True, _found(moment, chosen, known), last)
        if moment["sync"] is not None:
            disk.sync(moment, moment["sync"])
        after = moment["op"]


def _choices(
    moment: Moment, latest: dict[int, dict[str, int]], certain: dict[int, dict[str, int]]
) -> Iterator[dict[int, dict[str, int]]]:
    """Yield the names that may be on the disk: for each folder the latest or the certain ones, or these with the latest CURRENT."""
    root = moment["folders"]["."]
    inner = [number for number in latest if number != root]
    of_root = [latest[root], certain.get(root, {})]
    if "CURRENT" in latest[root]:
        of_root.append({**of_root[1], "CURRENT": latest[root]["CURRENT"]})
    for names in of_root:
        for source in (latest, certain):
            yield {root: names, **{number: source.get(number, {}) for number in inner}}


def _found(moment: Moment, names: dict[int, dict[str, int]], texts: Mapping[int, str]) -> dict[str, str]:
    """Return the files, name → text, that a process finds in the directory after the crash."""
    files: dict[str, str] = {}
    for name, number in names[moment["folders"]["."]].items():
        if number in names:
            files.update({f"{name}/{inner}": texts.get(n, "") for inner, n in names[number].items()})
        else:
            files[name] = texts.get(number, "")
    return files
