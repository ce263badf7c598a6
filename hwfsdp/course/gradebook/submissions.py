"""Find and read submissions, and copy their files to a private folder for graders.

This module copies only files that an exercise needs. Each file is below the size limit and gets a name of ours. If a file cannot be
read, the report names it and the reason, and the other files are still graded.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone, tzinfo
from pathlib import Path
from typing import NamedTuple

from hwfsdp.course.gradebook.archives import SUFFIXES, Limits, Refused, Source, open_source
from hwfsdp.course.gradebook.commits import commit_time
from hwfsdp.course.gradebook.layout import EXTRA_FILES, choose, is_junk, is_submission
from hwfsdp.course.manifest import OWN_FILE, Exercise
from hwfsdp.course.refusals import unusable
from hwfsdp.course.stations.stages import undeclared


class Handed(NamedTuple):
    """One submission: a folder or an archive, and its unique name in the gradebook."""

    name: str
    path: Path


@dataclass
class Collected:
    """A submission whose files are copied for grading.

    Attributes:
        name: the name in the gradebook.
        folder: the folder that holds each readable file at its target, such as `NN_topic/topic.py`.
        digests: target of an exercise, or name of an extra → SHA-256 of its files; only for files that were read.
        problems: target of an exercise, or name of an extra → why its file is not graded.
        errors, notes: lines for the gradebook.
        submitted: when the submission was handed in, according to its files; None if unknown.
        submitted_by: the source of this time: "commit", "archive" or "file".
    """

    name: str
    folder: Path
    digests: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    submitted: datetime | None = None
    submitted_by: str = ""


def find_submissions(
    paths: Sequence[Path],
    exercises: Sequence[Exercise],
    single: bool = False,
    left_out: Iterable[Path] = (),
) -> list[Handed]:
    """Return the submissions at these paths. Each path is a submission or a folder of submissions.

    Args:
        single: every path is one submission, whatever is in it.
        left_out: files and folders of the grader, which may be in the same folder as the submissions.

    Raises:
        UsageError: a path does not exist, or a folder is empty.
    """
    found: list[Path] = []
    ours = {_placed(path) for path in left_out}
    for path in paths:
        if not path.exists():
            raise unusable("submission.missing", path=path)
        if single or not path.is_dir() or _holds_exercises(path, exercises):
            found.append(path.resolve() if path.is_symlink() else path)  # follow a link that the user names
            continue
        shown = (each for each in path.iterdir() if not each.name.startswith(".") and not is_junk(each.name))
        entries = sorted(entry for entry in shown if not _is_ours(entry, ours))
        if not entries:
            raise unusable("submission.no_class", path=path, target=exercises[0].target)
        found += entries
    return [Handed(name, path) for name, path in zip(unique_names(found), found, strict=True)]


def _placed(path: Path) -> Path:
    """Return the real place of a path. If the path itself is a link, this link is not followed."""
    return path.parent.resolve() / path.name


def _is_ours(path: Path, ours: set[Path]) -> bool:
    """True if a path belongs to the grader, or is a folder that holds only paths of the grader."""
    place = _placed(path)
    if place in ours:
        return True
    if path.is_symlink() or not path.is_dir() or not any(each.is_relative_to(place) for each in ours):
        return False
    return all(_is_ours(entry, ours) for entry in path.iterdir())


def _holds_exercises(folder: Path, exercises: Sequence[Exercise]) -> bool:
    """True if a folder has files or folders of exercises at its top. It does not walk deeper: the folder may hold a whole class."""
    wanted = {exercise.directory.casefold() for exercise in exercises}
    for inner in (folder, *(each for each in folder.iterdir() if each.name.casefold() == "exercises")):
        for entry in inner.iterdir() if inner.is_dir() else ():
            is_folder, name = entry.is_dir(), entry.relative_to(folder).as_posix()
            found = entry.name.casefold() in wanted if is_folder else is_submission([name], exercises)
            if found:
                return True
    return False


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each path: the file's name without its suffix, or more of the path if two names would be the same."""
    tries = [
        [printable(_stem(path.absolute().name)) for path in paths],
        [printable(path.absolute().name) for path in paths],
        [printable("/".join(path.absolute().parts[-2:])) for path in paths],
        [f"{printable(str(path))} ({index})" for index, path in enumerate(paths, 1)],
    ]
    counts = [Counter(map(str.casefold, names)) for names in tries]  # some disks ignore case
    return [
        next(name for name, count in zip(names, counts) if count[name.casefold()] == 1)
        for names in zip(*tries)
    ]


def _stem(name: str) -> str:
    end = next((end for end in SUFFIXES if name.casefold().endswith(end) and name != end), "")
    return name[: len(name) - len(end)]


def printable(text: str) -> str:
    """Return a name that any terminal, file or page can show."""
    text = os.fsencode(text).decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def collect(
    handed: Handed,
    folder: Path,
    exercises: Sequence[Exercise],
    zone: tzinfo = timezone.utc,
    limits: Limits = Limits(),
) -> Collected:
    """Read a submission, and write the files to grade below `folder`, which is private."""
    collected = Collected(handed.name, folder)
    try:
        with open_source(handed.path, zone, limits) as source:
            taken = _take(source, collected, exercises)
            collected.errors[:0] = source.problems
            collected.submitted, collected.submitted_by = _time_of(handed.path, source, taken)
    except Refused as refused:
        collected.errors.append(str(refused))
    return collected


def _take(source: Source, collected: Collected, exercises: Sequence[Exercise]) -> list[str]:
    """Write the files to grade, note which are not graded, and return the chosen paths in the submission."""
    choice = choose(source.paths, exercises)
    called = {e.target: OWN_FILE if e.is_station else f"exercise {e.number}" for e in exercises}
    keys = {t: t if t in called else t.split("/")[0] for t in (*choice.ambiguous, *choice.taken)}
    for target, paths in choice.ambiguous.items():
        some = " and ".join(paths[:3])
        collected.problems[keys[target]] = f"there are {len(paths)} files for it, {some}; expected one"
    counts: Counter[str] = Counter()
    for target, path in choice.taken.items():
        key = keys[target]
        counts[key] += 1
        if counts[key] > EXTRA_FILES:
            collected.problems[key] = f"more than {EXTRA_FILES} files"
            continue
        try:
            text = _write(collected, target, source.read(path), key)
        except Refused as refused:
            collected.problems[key] = f"{path}: {refused}"
            continue
        if target in choice.renamed:
            collected.notes.append(f"{path} was taken for {target}")
        if not text.strip():
            collected.notes.append(f"{path} is empty")
        if target == OWN_FILE and (words := undeclared(text)):
            of = ", ".join(f"{count} of station {number}" for number, count in words.items())
            what = "functions are the reference's word for word, and no line says so"
            collected.notes.append(f"{path}: {what}: {of}")
    collected.errors += [f"{called.get(key, key)}: {why}" for key, why in sorted(collected.problems.items())]
    deeper = "lies deeper than the other files, and was not graded"
    collected.errors += [f"{path} {deeper}" for path in choice.deeper]
    if not choice.taken and not choice.ambiguous and not source.problems:
        collected.errors.append(f"no file of any exercise; expected files such as {exercises[0].target}")
    return list(choice.taken.values())


def _write(collected: Collected, target: str, content: bytes, key: str) -> str:
    """Write a file to the path where graders look for it, and return its text."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Refused("bytes that are not UTF-8") from None
    path = collected.folder / target
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    both = f"{collected.digests.get(key, '')}{target}".encode() + content
    collected.digests[key] = hashlib.sha256(both).hexdigest()
    return text


def _time_of(path: Path, source: Source, taken: Iterable[str]) -> tuple[datetime | None, str]:
    """Return when a submission was handed in, and the source of this time.

    The source is the checked-out commit, the newest file of an archive, or the newest file that is graded.
    """
    if (committed := commit_time(path)) is not None:
        return committed, "commit"
    return source.written(taken), source.told_by
