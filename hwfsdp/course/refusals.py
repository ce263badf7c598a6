"""Files that users write and get; and refusals, told so that a user can fix them.

The words of a refusal are in `refusals.toml`, by part of the course and name: `raise unusable("late.rule", text="10%")`.
"""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hwfsdp.errors import UsageError


@functools.cache
def refusals() -> dict[str, dict[str, list[str]]]:
    """By part and name: subject, what was expected, what was there, what to do."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def unusable(refusal: str, /, **words: Any) -> UsageError:
    """The error of this name. `words` fill the places in braces."""
    part, _, name = refusal.partition(".")
    subject, expected, got, remedy = (text.format(**words) for text in refusals()[part][name])
    return UsageError(subject, expected=expected, got=got, remedy=remedy)


@contextmanager
def refused(refusal: str, /, kinds: tuple[type[Exception], ...] = (OSError,), **words: Any) -> Iterator[None]:
    """Around what may fail for reasons outside of the package.

    Raises:
        UsageError: the system refused; `got` has its words.
    """
    try:
        yield
    except kinds as error:
        got = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise unusable(refusal, got=got, **words) from None


@contextmanager
def misread(refusal: str, /, **words: Any) -> Iterator[None]:
    """Around the reading of a file that has to hold certain things.

    Raises:
        UsageError: something is missing there, or of another kind.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise unusable(refusal, got=f"{type(error).__name__}: {error}", **words) from None


def read_text(path: Path, refusal: str, most: int) -> str:
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
        got = getattr(error, "strerror", None) or "bytes that are not UTF-8"
        raise unusable(refusal, path=path, got=got) from None


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
        raise unusable("student.new_folder", verb=verb, folder=folder)
