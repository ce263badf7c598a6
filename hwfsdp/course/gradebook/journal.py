"""The results so far, on disk after every check: a killed run loses nothing.

A file of JSON lines, each with its kind:

    run         how this run grades: course version, where inputs come from, the folder that it lays submissions out in
    check       one check of an exercise that is still being graded
    exercise    an exercise, with a key made from what was graded; `final` is false if it is to be repeated
    submission  a submission, whole

A run that was killed leaves that folder behind; the next one that opens its journal, to go on or anew, removes it.

A run that goes on takes exercises from here whose key is still the same. The last line may be torn; it is cut off. Only
places in the file are kept in memory, so that a class of any size can be graded. Two runs cannot write one journal.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from hwfsdp.course.gradebook.results import Result
from hwfsdp.course.refusals import refused, unusable

VERSION = 1
FOLDER = "hwfsdp-class-"  # how the names of folders with submissions begin
Line = dict[str, Any]


class Key(NamedTuple):
    """The key under which another run may reuse a result: the submission, the graded files, the course, the options."""

    name: str
    number: str
    content: str


class Journal:
    """Opened for one run.

    Args:
        path: where it is; None: in a nameless file that goes away with this process.
        resume: whether to go on with what is there. If not, what is there is kept beside, as `….old`.

    Raises:
        UsageError: it cannot be written, or another run is writing it.
    """

    def __init__(self, path: Path | None, resume: bool = False) -> None:
        self.path = path
        self.header: Line = {}
        self._exercises: dict[Key, int] = {}  # place in the file
        self._submissions: dict[str, int] = {}  # of this run
        if path is None:
            self._file: IO[bytes] = tempfile.TemporaryFile()
            return
        self._file = _open(path)
        end = self._read()
        if resume:
            self._file.truncate(end)
        elif path.stat().st_size:
            os.replace(path, path.with_name(path.name + ".old"))
            self._file.close()
            self._file, self.header, self._exercises = _open(path), {}, {}

    def _read(self) -> int:
        """Note what is there, and remove the folders of its runs. They have ended, because this process holds the journal.

        Returns:
            The end of the last whole line.
        """
        end = 0
        for place, line in _lines(self._file):
            end = place + len(line)
            found = _parsed(line)
            if found.get("kind") == "run":
                self.header = found
                remove_folder(Path(str(found.get("folder"))))
            elif found.get("kind") == "exercise" and found.get("final"):
                key = Key(str(found["name"]), str(found["exercise"]["exercise"]), str(found["key"]))
                self._exercises[key] = place
        return end

    def known(self, key: Key) -> Line | None:
        """An exercise that was graded before, just like this."""
        place = self._exercises.get(key)
        return None if place is None else dict(self._at(place)["exercise"])

    def begin(self, **how: Any) -> None:
        """A new run begins, or goes on."""
        self._write({"kind": "run", "version": VERSION, **how})

    def check(self, name: str, number: str, check: Line) -> None:
        """A check came to its end."""
        self._write({"kind": "check", "name": name, "exercise": number, "check": check})

    def exercise(self, key: Key, exercise: Line, final: bool) -> None:
        """An exercise came to its end."""
        place = self._write(
            {"kind": "exercise", "name": key.name, "key": key.content, "final": final, "exercise": exercise}
        )
        if final:
            self._exercises[key] = place

    def submission(self, result: Result) -> None:
        """A submission came to its end."""
        self._submissions[result.name] = self._write({"kind": "submission", "result": result.as_dict()})

    def results(self, names: Sequence[str]) -> Iterator[Result]:
        """The submissions of this run, in this order, read one by one."""
        for name in names:
            if name in self._submissions:
                yield Result.from_dict(self._at(self._submissions[name])["result"])

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Line) -> int:
        place = self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps(line, ensure_ascii=True).encode() + b"\n")
        self._file.flush()
        if self.path is not None:
            os.fsync(self._file.fileno())
        return place

    def _at(self, place: int) -> Line:
        self._file.seek(place)
        return _parsed(self._file.readline())


def make_folder() -> Path:
    """A private folder to lay submissions out in."""
    return Path(tempfile.mkdtemp(prefix=FOLDER))


def remove_folder(folder: Path) -> None:
    """Remove a folder that `make_folder` made for this user, with what is in it; nothing else that lies at such a path."""
    try:
        about = folder.lstat()
    except (OSError, ValueError):
        return
    if folder.name.startswith(FOLDER) and stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
        shutil.rmtree(folder, ignore_errors=True)


def _open(path: Path) -> IO[bytes]:
    with refused("grade.journal", path=path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise unusable("grade.journal_used", path=path) from None
    return file


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Each whole line that is JSON, with its place; none after one that is not."""
    place = 0
    file.seek(0)
    while (line := file.readline()).endswith(b"\n") and _parsed(line):
        yield place, line
        place += len(line)


def _parsed(line: bytes) -> Line:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
