"""Read and write files of users, and raise errors that tell users how to fix the problem.

The texts of these errors are in `refusals.toml`, by part of the course and name: `raise unusable("late.rule", text="10%")`.
"""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hwfsdp.errors import UsageError, did_you_mean


@functools.cache
def refusals() -> dict[str, dict[str, list[str]]]:
    """Return the texts of all errors by part and name: subject, what was expected, what came, what to do."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def unusable(refusal: str, /, **words: Any) -> UsageError:
    """Return the error of this name. `words` fill the places in braces."""
    part, _, name = refusal.partition(".")
    subject, expected, got, remedy = (text.format(**words) for text in refusals()[part][name])
    return UsageError(subject, expected=expected, got=got, remedy=remedy)


def suggestion(name: str, known: Collection[str]) -> str:
    """Return the remedy for a name that is not known: the closest known name, or all of them."""
    return did_you_mean(name, known, f"There are: {', '.join(known) or 'none'}.")


@contextmanager
def refused(refusal: str, /, kinds: tuple[type[Exception], ...] = (OSError,), **words: Any) -> Iterator[None]:
    """Turn an error of the system in this `with` block into a `UsageError`.

    Raises:
        UsageError: the block raised one of `kinds`; `got` holds the system's message.
    """
    try:
        yield
    except kinds as error:
        got = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise unusable(refusal, got=got, **words) from None


@contextmanager
def misread(refusal: str, /, **words: Any) -> Iterator[None]:
    """Turn an error about the contents of a file, raised in this `with` block, into a `UsageError`.

    Raises:
        UsageError: a value is missing in the file, or has the wrong type, or the file cannot be read.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise unusable(refusal, got=f"{type(error).__name__}: {error}", **words) from None


def read_text(path: Path, refusal: str, most: int) -> str:
    """Return the text of a file, which anyone may have written.

    Raises:
        UsageError: the path is not a file, or the file cannot be read, has more than `most` bytes, or is not UTF-8.
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
    """Write a text to a draft and move the draft to `path`, so that a reader always finds the whole old or the whole new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft_of(path).open("w", encoding="utf-8", newline="") as file:
        for text in texts:
            file.write(text)
    return draft_of(path).replace(path)


def draft_of(path: Path) -> Path:
    """Return the path beside a file where this process writes the next version."""
    return path.with_name(f".{path.name}.{os.getpid()}.draft")


def outdated(texts: Mapping[Path, str]) -> list[Path]:
    """Return the paths whose file is missing or has another text."""
    return [p for p, text in texts.items() if not p.exists() or p.read_text(encoding="utf-8") != text]


def update(texts: Mapping[Path, str]) -> list[Path]:
    """Write the texts that differ from the files, and return their paths."""
    changed = outdated(texts)
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path], encoding="utf-8")
    return changed


def check_new_folder(verb: str, folder: Path) -> None:
    """Raise UsageError if there is a file, or a folder that is not empty, at the path where a command writes a folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise unusable("student.new_folder", verb=verb, folder=folder)
