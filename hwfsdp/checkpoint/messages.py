"""The errors of checkpoints, and how they name what they are about.

An error is about an entry of a state dict (by its path of keys), about a place in a file, or about an argument. There is one
function for each: `refuse` for entries and arguments, `damaged` for files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn

from hwfsdp.errors import CheckpointError, FSDPError, UsageError, in_one_line

KeyPath = tuple[Any, ...]  # the keys that lead to an entry of a state dict
_SHOWN = 4  # names in a message; the rest is counted


class Attribute(str):
    """A step of a path that leads to an attribute."""


def show(path: KeyPath) -> str:
    """The path as one would index it: state_dict['state'][0]['exp_avg']."""
    return "state_dict" + "".join(f".{key}" if isinstance(key, Attribute) else f"[{key!r}]" for key in path)


def refusal(
    subject: KeyPath | str | os.PathLike[str],
    expected: str,
    got: str,
    remedy: str = "Compare the model with the one that the values come from.",
    kind: type[FSDPError] = UsageError,
) -> FSDPError:
    """The error about an entry, an argument or a directory. A path of keys is shown as one would index it."""
    named = show(subject) if isinstance(subject, tuple) else str(subject)
    return kind(named, expected=expected, got=got, remedy=remedy)


def refuse(
    subject: KeyPath | str | os.PathLike[str],
    expected: str,
    got: str,
    remedy: str = "Compare the model with the one that the values come from.",
    kind: type[FSDPError] = UsageError,
) -> NoReturn:
    """Raise the `refusal`."""
    raise refusal(subject, expected, got, remedy, kind)


def damaged(
    file: str | os.PathLike[str],
    expected: str,
    got: str,
    offset: int | None = None,
    key: str | None = None,
    remedy: str = "Load another checkpoint. If there are other saves beside it, load one of them by its own path.",
) -> CheckpointError:
    """The error for a file that is not what it should be, whatever its format.

    Args:
        offset: the byte at which the damage is, or begins. key: the entry concerned, as one would index it.
    """
    subject = str(file) if offset is None else f"{file}, byte {offset}"
    error = CheckpointError(
        f"{subject}, {key}" if key else subject, expected=expected, got=got, remedy=remedy
    )
    return error.at(file, key, offset)


def told(error: BaseException) -> str:
    """An error of Python, torch or the disk, in one line."""
    return in_one_line(f"{type(error).__name__}: {error}")


def listed(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
