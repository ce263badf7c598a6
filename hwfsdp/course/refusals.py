"""Files that users write and get; and refusals, of the system and of what is in a file, told so that a user can fix them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hwfsdp.errors import UsageError


@contextmanager
def refused(
    subject: str, expected: str, remedy: str, kinds: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """Around what may fail for reasons outside of the package.

    Raises:
        UsageError: the system refused; `got` has its words.
    """
    try:
        yield
    except kinds as error:
        got = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UsageError(subject, expected=expected, got=got, remedy=remedy) from None


@contextmanager
def misread(subject: str, expected: str, remedy: str) -> Iterator[None]:
    """Around the reading of a file that has to hold certain things.

    Raises:
        UsageError: something is missing there, or of another kind.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise UsageError(subject, expected=expected, got=got, remedy=remedy) from None


def read_text(path: Path, subject: str, expected: str, most: int) -> str:
    """The text of a file that anyone may have written.

    Raises:
        UsageError: it is no file, cannot be read, has more than `most` bytes, or is not UTF-8.
    """
    try:
        if not path.is_file():
            raise OSError(0, "something that is no file")
        with path.open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise OSError(0, f"more than {most:,} bytes")
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            subject,
            expected=expected,
            got=getattr(error, "strerror", None) or "bytes that are not UTF-8",
            remedy="Check the file, how it was saved, and its permissions.",
        ) from None


def write_whole(path: Path, texts: Iterable[str]) -> Path:
    """Write a text beside its place and move it there, so that a reader finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft_of(path).open("w", encoding="utf-8", newline="") as file:
        for text in texts:
            file.write(text)
    return draft_of(path).replace(path)


def draft_of(path: Path) -> Path:
    """The place beside a file where this process writes the next one."""
    return path.with_name(f".{path.name}.{os.getpid()}.draft")


def outdated(texts: Mapping[Path, str]) -> list[Path]:
    """The paths at which there is not the text that should be."""
    return [p for p, text in texts.items() if not p.exists() or p.read_text(encoding="utf-8") != text]


def update(texts: Mapping[Path, str]) -> list[Path]:
    """Write the texts that differ from what is there; return where."""
    changed = outdated(texts)
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path], encoding="utf-8")
    return changed


def check_new_folder(verb: str, folder: Path) -> None:
    """Raise UsageError if something is at the place where a verb writes a folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{verb} {folder}",
            expected="a new folder",
            got="one with something in it",
            remedy="Choose another.",
        )
