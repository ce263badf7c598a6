"""The results so far, written to disk after every check, so that a killed run loses nothing.

The journal is a file of JSON lines. Each line has a kind:

    run         how this run grades: the course version, the source of inputs, the folder for its copies of submissions
    check       one check of an exercise that is still being graded
    exercise    a graded exercise, with a key made from the graded files; `final` is false if it must be repeated
    submission  a complete submission

A killed run leaves its folder behind. The next run that opens the journal removes this folder, whether it continues or starts again.

A run that continues takes an exercise from the journal if its key is the same. If the last line is incomplete, it is cut off. Only
positions in the file are kept in memory, so a class can have any size. Two runs cannot write to one journal.
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
FOLDER = "hwfsdp-class-"  # the beginning of the names of folders with submissions
Line = dict[str, Any]


class Key(NamedTuple):
    """The key under which another run may reuse a result: the submission, the exercise, and a hash of files, course and inputs."""

    name: str
    number: str
    content: str


class Journal:
    """A journal that is open for one run.

    Args:
        path: the file; None: a temporary file that ends with this process.
        resume: continue with the results in the file. If False, the old file is kept as `….old`.

    Raises:
        UsageError: the file cannot be written, or another run is writing it.
    """

    def __init__(self, path: Path | None, resume: bool = False) -> None:
        self.path = path
        self.header: Line = {}
        self._exercises: dict[Key, int] = {}  # place in the file
        self._submissions: dict[str, int] = {}  # place in the file, for submissions of this run
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
        """Read the journal, and remove the folders of its runs. These runs have ended, because this process holds the lock.

        Returns:
            The end of the last complete line, in bytes.
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
        """Return the result of an exercise that was graded before with the same key; None if there is none."""
        place = self._exercises.get(key)
        return None if place is None else dict(self._at(place)["exercise"])

    def begin(self, **how: Any) -> None:
        """Record that a run begins or continues."""
        self._write({"kind": "run", "version": VERSION, **how})

    def check(self, name: str, number: str, check: Line) -> None:
        """Record a finished check."""
        self._write({"kind": "check", "name": name, "exercise": number, "check": check})

    def exercise(self, key: Key, exercise: Line, final: bool) -> None:
        """Record a finished exercise."""
        line = {"kind": "exercise", "name": key.name, "key": key.content, "final": final}
        place = self._write({**line, "exercise": exercise})
        if final:
            self._exercises[key] = place

    def submission(self, result: Result) -> None:
        """Record a finished submission."""
        self._submissions[result.name] = self._write({"kind": "submission", "result": result.as_dict()})

    def results(self, names: Sequence[str]) -> Iterator[Result]:
        """Yield the results of these submissions of this run, in this order, read one by one."""
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
    """Make a private folder for copies of submissions."""
    return Path(tempfile.mkdtemp(prefix=FOLDER))


def remove_folder(folder: Path) -> None:
    """Remove a folder that `make_folder` made for this user, with its contents. Leave anything else at this path alone."""
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
    """Yield each complete line of JSON, with its place. Stop at the first line that is not."""
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
