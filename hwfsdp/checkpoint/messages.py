"""The errors of checkpoints, and how they name their subjects.

The subject of an error is an entry of a state dict (named by its path of keys), a place in a file, or an argument. There is one
function for each kind of subject: `refuse` for entries and arguments, `damaged` for files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn

from hwfsdp.errors import CheckpointError, FSDPError, UsageError, in_one_line

KeyPath = tuple[Any, ...]  # the keys that lead to an entry of a state dict
Subject = KeyPath | str | os.PathLike[str]
_COMPARE = "Compare the model with the one that the values come from."
_SHOWN = 4  # most names in a message; the others are only counted


class Attribute(str):
    """A step of a path that leads to an attribute."""


def show(path: KeyPath) -> str:
    """Return the path as Python code would index it: state_dict['state'][0]['exp_avg']."""
    return "state_dict" + "".join(f".{key}" if isinstance(key, Attribute) else f"[{key!r}]" for key in path)


def refusal(
    subject: Subject, expected: str, got: str, remedy: str = _COMPARE, kind: type[FSDPError] = UsageError
) -> FSDPError:
    """Make the error for an entry, an argument or a directory. A path of keys is shown as Python code would index it."""
    named = show(subject) if isinstance(subject, tuple) else str(subject)
    return kind(named, expected=expected, got=got, remedy=remedy)


def refuse(
    subject: Subject, expected: str, got: str, remedy: str = _COMPARE, kind: type[FSDPError] = UsageError
) -> NoReturn:
    """Raise the error that `refusal` makes."""
    raise refusal(subject, expected, got, remedy, kind)


def damaged(
    file: str | os.PathLike[str],
    expected: str,
    got: str,
    offset: int | None = None,
    key: str | None = None,
    remedy: str = "Load another checkpoint. If there are other saves beside it, load one of them by its own path.",
) -> CheckpointError:
    """Make the error for a file that is not as expected, in any format.

    Args:
        offset: the byte at which the damage is or begins. key: the entry concerned, as Python code would index it.
    """
    subject = str(file) if offset is None else f"{file}, byte {offset}"
    subject = f"{subject}, {key}" if key else subject
    error = CheckpointError(subject, expected=expected, got=got, remedy=remedy)
    return error.at(file, key, offset)


def told(error: BaseException) -> str:
    """Describe an error of Python, torch or the disk in one line."""
    return in_one_line(f"{type(error).__name__}: {error}")


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
