"""Find the submissions of a class, and copy from each the files that exercises judge.

A submission is a folder, a zip or a tar. Its files may lie at any depth: `my_fsdp.py`, or `12_strided_shards/strided_shards.py`, at the
top, in `exercises/`, or in a folder with the student's name. Of two files for one exercise, the one in `exercises/` counts, then the one
in the exercise's own folder, then the one that lies higher; if both are alike, neither counts, and the report names them.

A single file is a submission, too, if its name ends with the name of a judged file, as Canvas names the files that it
downloads: `doejane_123_4567_my_fsdp.py`, or `…_my_fsdp-1.py` for a file that was handed in again.

An archive may be an attack. Nothing is unpacked to disk: a file is read into memory, up to a limit, and written to a place of ours. Links
are not followed. What cannot be read is named, and the other files are graded.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from hwfsdp.errors import UsageError

SUFFIXES = (".tar.gz", ".tar.bz2", ".tar.xz", ".tgz", ".tar", ".zip")
NOT_THEIRS = frozenset(
    "__macosx .git __pycache__ .venv venv node_modules .ipynb_checkpoints .pytest_cache".split()
)
# bytes of an archive, of all that is in it, and of one file
ARCHIVE, UNPACKED, FILE = 64 << 20, 256 << 20, 1 << 20
ENTRIES = 20_000
MEMORY = 512 << 20  # bytes that reading an archive may take
KEY = 200  # bytes of a key: a file name has at most 255 on most systems


class Submission(NamedTuple):
    """A folder or an archive. `name` is the student's; `key` is the name as part of a file name, unique in the class."""

    name: str
    key: str
    path: Path


class Entry(NamedTuple):
    """A file of a submission. `read` returns its bytes, at most so many. `refused` says why the file is not read."""

    path: str
    read: Callable[[int], bytes]
    refused: str = ""


@dataclass
class Collected:
    """What a submission holds, and what is wrong.

    Attributes:
        files: the SHA-256 of each file that was copied, by its path in `exercises/`. unread: why a file was not copied, by the same path.
    """

    files: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def judged_files(exercises: Path) -> list[str]:
    """Return the paths, in the folder of exercises, of the files that students write."""
    found = [*exercises.glob("*.py"), *exercises.glob("*/*.py"), *exercises.glob("*/answers.toml")]
    ours = ("test_", "facts", "conftest", "_", ".")
    return sorted(path.relative_to(exercises).as_posix() for path in found if not path.name.startswith(ours))


def find(
    paths: Sequence[Path], judged: Sequence[str], single: bool = False, but: Iterable[Path] = ()
) -> list[Submission]:
    """Return the submissions at these paths: a folder that holds exercises is one, another folder holds one in each entry.

    Args:
        single: each path is one submission, whatever it holds. but: files and folders that are the instructor's.

    Raises:
        UsageError: a path does not exist, or a folder is empty.
    """
    found: list[Path] = []
    ours = {path.resolve() for path in but}
    for path in paths:
        if not path.exists():
            raise UsageError(
                "grade",
                expected="a folder or an archive",
                got=f"{path}, which does not exist",
                remedy="Check the path.",
            )
        if single or not path.is_dir() or _holds_exercises(path, judged):
            found.append(path)
            continue
        entries = sorted(
            each
            for each in path.iterdir()
            if not each.name.startswith((".", "__MACOSX")) and each.resolve() not in ours
        )
        if not entries:
            remedy = f"Give a folder with one folder or archive for each student, with files such as {min(judged, key=len)}."
            raise UsageError("grade", expected="submissions", got=f"{path}, which is empty", remedy=remedy)
        found += entries
    return _named(found)


def _holds_exercises(folder: Path, judged: Sequence[str]) -> bool:
    tops = {name.partition("/")[0].casefold() for name in judged} | {
        Path(name).name.casefold() for name in judged
    }
    return any(
        each.name.casefold() in tops
        for inner in (folder, folder / "exercises")
        for each in (inner.iterdir() if inner.is_dir() else ())
    )


def _named(paths: Sequence[Path]) -> list[Submission]:
    """Give each path a name and a key. Two submissions with the same key or name get numbers."""
    found, names = dict[str, Submission](), set[str]()
    for path in paths:
        full = os.fsencode(path.absolute().name).decode(errors="backslashreplace")
        end = next((end for end in SUFFIXES if full.casefold().endswith(end)), "")
        name = "".join(each if each.isprintable() else "?" for each in full[: len(full) - len(end)])
        plain = re.sub(r"[^\w+@=.-]+", "_", name).strip(".").encode()[:KEY].decode(errors="ignore") or "_"
        key, shown, number = plain, name, 1
        while key.casefold() in found or shown in names:
            number += 1
            key, shown = f"{plain}-{number}", f"{name} ({number})"
        names.add(shown)
        found[key.casefold()] = Submission(shown, key, path)
    return list(found.values())


def collect(path: Path, judged: Sequence[str], into: Path) -> Collected:
    """Copy the judged files of the submission at `path` to the folder `into`. Say what could not be read, and never raise for it."""
    found = Collected()
    try:
        with little_memory(), ExitStack() as opened:
            _take(_entries(path, judged, opened), judged, into, found)
    except (
        Exception
    ) as error:  # readers of archives raise whatever a library below them raises, such as zlib.error
        found.problems.append(f"cannot be read: {_said(error)}")
        found.unread |= {target: f"the submission cannot be read: {_said(error)}" for target in judged}
    return found


def _said(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@contextmanager
def little_memory() -> Iterator[None]:
    """Limit the memory of this process in a `with` block: the sizes that an archive states are not believed."""
    limits, used = resource.getrlimit(resource.RLIMIT_AS), Path("/proc/self/statm")
    if used.exists():
        most = int(used.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most if limits[0] < 0 else min(most, limits[0]), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _take(entries: Iterator[Entry], judged: Sequence[str], into: Path, found: Collected) -> None:
    names = {Path(target).name.casefold() for target in judged}
    kept: dict[str, Entry] = {}
    try:
        for number, entry in enumerate(entries):
            parts = entry.path.replace("\\", "/").split("/")
            if number >= ENTRIES:
                raise ValueError(f"more than {ENTRIES:,} files")
            if entry.path.startswith(("/", "\\")) or ".." in parts or entry.path[1:2] == ":":
                found.problems.append(f"{entry.path!r} leads out of the submission; it was left out")
            elif parts[-1].casefold() in names and NOT_THEIRS.isdisjoint(map(str.casefold, parts)):
                kept["/".join(part for part in parts if part not in ("", "."))] = entry
    except tarfile.TarError as error:
        last = f" after {next(reversed(kept))!r}" if kept else ""
        found.problems.append(f"the archive is damaged{last}: {_said(error)}; what follows was not read")
    for target in judged:
        best = _best(target, kept)
        if len(best) > 1:
            found.unread[target] = why = (
                f"there are {len(best)} files for {target}: {', '.join(best[:3])}; expected one"
            )
            found.problems.append(why)
        for path in best[:1] if len(best) == 1 else ():
            _copy(kept[path], path, target, into, found)
    if not found.files and not found.problems:
        found.problems.append(f"no file of any exercise; expected files such as {min(judged, key=len)}")


def _best(target: str, paths: Iterable[str]) -> list[str]:
    """Return the paths that answer a target best: usually one; more if they are alike."""
    folder, _, name = target.casefold().rpartition("/")
    ranked: dict[tuple[object, ...], list[str]] = {}
    for path in paths:
        *above, last = path.casefold().split("/")
        if last == name:
            own = not folder or above[-1:] == [folder]
            rank = (
                "solutions" in above,
                "exercises" not in above,
                not own,
                len(above),
                Path(path).name != Path(target).name,
            )
            ranked.setdefault(rank, []).append(path)
    return ranked[min(ranked)] if ranked else []


def _copy(entry: Entry, path: str, target: str, into: Path, found: Collected) -> None:
    try:
        content = b"" if entry.refused else entry.read(FILE + 1)
        why = entry.refused or (f"more than {FILE:,} bytes" if len(content) > FILE else "")
        content.decode("utf-8-sig")
    except UnicodeDecodeError:
        why = "its bytes are not UTF-8"
    except Exception as error:
        why = f"damaged: {_said(error)}"
    if why:
        found.unread[target] = why
        found.problems.append(f"{path}: {why}")
        return
    (into / target).parent.mkdir(parents=True, exist_ok=True)
    (into / target).write_bytes(content)
    found.files[target] = hashlib.sha256(content).hexdigest()


# --- Kinds of submissions ------------------------------------------------------------------------------------


def _entries(path: Path, judged: Sequence[str], opened: ExitStack) -> Iterator[Entry]:
    if path.is_dir():
        return _of_folder(path)
    for name in {Path(target).name for target in judged}:
        stem, _, suffix = name.rpartition(".")
        if re.fullmatch(rf"(.*[_-])?{stem}(-\d+)?\.{suffix}", path.name, re.DOTALL | re.IGNORECASE):
            return iter([Entry(name, partial(_read, path))])
    size = path.stat().st_size
    if size > ARCHIVE:
        raise ValueError(f"an archive of {size:,} bytes; the limit is {ARCHIVE:,}")
    if zipfile.is_zipfile(path):
        return _of_zip(opened.enter_context(zipfile.ZipFile(path)))
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\3\4"
    if is_zip or not tarfile.is_tarfile(path):
        what = (
            "a zip without its end; was it uploaded whole?"
            if is_zip
            else "neither a folder, nor a zip, nor a tar archive, nor a file such as NAME_my_fsdp.py"
        )
        raise ValueError(what if size else "an empty file")
    return _of_tar(opened.enter_context(tarfile.open(path)))


def _of_folder(root: Path) -> Iterator[Entry]:
    for here, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name.casefold() not in NOT_THEIRS)
        for name in (*sorted(names), *folders):
            path = Path(here, name)
            mode = path.lstat().st_mode
            refused = "a symbolic link, which is not followed" if stat.S_ISLNK(mode) else "not a plain file"
            if not stat.S_ISDIR(mode):
                shown = path.relative_to(root).as_posix()
                yield Entry(shown, partial(_read, path), "" if stat.S_ISREG(mode) else refused)


def _read(path: Path, most: int) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        return file.read(most)


def _read_packed(open_: Callable[[Any], IO[bytes] | None], entry: Any, most: int) -> bytes:
    file = open_(entry)
    assert file is not None, "a plain file"
    with file:
        return file.read(most)


def _of_zip(archive: zipfile.ZipFile) -> Iterator[Entry]:
    for info in archive.infolist():
        if not info.is_dir():
            link = stat.S_ISLNK(info.external_attr >> 16)
            yield Entry(
                info.filename,
                partial(_read_packed, archive.open, info),
                "a link, which is not followed" if link else "",
            )


def _of_tar(archive: tarfile.TarFile) -> Iterator[Entry]:
    total = 0
    for member in archive:
        total += member.size
        if total > UNPACKED:
            raise ValueError(f"more than {UNPACKED:,} bytes when unpacked")
        if not member.isdir():
            yield Entry(member.name, partial(_read_packed, archive.extractfile, member), _why_not(member))
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if archive.fileobj.read(512).strip(b"\0"):
        raise tarfile.ReadError("a header that is none")  # tarfile takes this for the end


def _why_not(member: tarfile.TarInfo) -> str:
    if member.isreg():
        return ""
    return "a link, which is not followed" if member.issym() or member.islnk() else "not a plain file"
