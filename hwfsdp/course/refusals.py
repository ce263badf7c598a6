"""Refusals of the system, told so that a user can fix them."""

from __future__ import annotations

from collections.abc import Iterator
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


def check_new_folder(verb: str, folder: Path) -> None:
    """Raise UsageError if something is at the place where a verb writes a folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{verb} {folder}",
            expected="a new folder",
            got="one with something in it",
            remedy="Choose another.",
        )
