"""The errors of checkpoints, and how they name their subjects.

The subject of an error is an entry of a state dict (named by its path of keys), a place in a file, or an argument. There is one
function for each kind of subject: `refuse` for entries and arguments, `damaged` for files, `with_size` and `of_disk` for a disk
that does not take what is written.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hwfsdp.errors import CheckpointError, FSDPError, UsageError, WrongTypeError, in_one_line, printable

KeyPath = tuple[Any, ...]  # the keys that lead to an entry of a state dict
Subject = KeyPath | str | os.PathLike[str]
_COMPARE = "Compare the model with the one that the values come from."
_SHOWN = 5  # most names in a message; the others are only counted


class Attribute(str):
    """A step of a path that leads to an attribute."""


def show(path: KeyPath) -> str:
    """Return the path as Python code would index it: state_dict['state'][0]['exp_avg']."""
    return "state_dict" + "".join(f".{key}" if isinstance(key, Attribute) else f"[{key!r}]" for key in path)


def check_utf8(path: Path, who: str) -> None:
    """Raise `UsageError` if a path has bytes that are not UTF-8."""
    if not is_utf8(path):
        refuse(path, f"a path in UTF-8, the only ones that {who} takes", "another one", "Rename it.")


def is_utf8(name: object) -> bool:
    return str(name).encode(errors="replace").decode() == str(name)


def refusal(
    subject: Subject, expected: str, got: str, remedy: str = _COMPARE, kind: type[FSDPError] = UsageError
) -> FSDPError:
    """Make the error for an entry, an argument or a directory. A path of keys is shown as Python code would index it."""
    named = show(subject) if isinstance(subject, tuple) else printable(subject)
    return kind(named, expected=expected, got=printable(got), remedy=remedy)


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
    subject = printable(file) if offset is None else f"{printable(file)}, byte {offset}"
    subject = f"{subject}, {key}" if key else subject
    error = CheckpointError(subject, expected=expected, got=got, remedy=remedy)
    return error.at(file, key, offset)


def path_of(path: Any, what: str) -> Path:
    """Return the path that a user gave. An empty one would be the current directory, and is more likely a mistake.

    Raises:
        UsageError: it is empty, or no system could have it. WrongTypeError: it is no path, for example because arguments are in the wrong order.
    """
    if not isinstance(path, str | os.PathLike):
        remedy = "Give the path as a str or a Path, in its place among the arguments."
        refuse(what, "a path", f"a {type(path).__name__}", remedy, WrongTypeError)
    if not os.fspath(path):
        refuse(what, "a path", "an empty one", 'Give the path of a directory; "." is the current one.')
    if "\0" in os.fspath(path):
        refuse(what, "a path", f"one with a NUL character, {os.fspath(path)!r}", "Remove it.")
    return Path(path)


# By file, the format of a directory with such a file, and by format, the function that loads it.
_SIGNS = {"CURRENT": "store", "manifest.json": "store", ".metadata": "dcp", "PART_000.pt": "part"}
_LOADERS = {"store": "load", "dcp": "dcp.load", "part": "parts.load"}


def signs_in(path: Path) -> dict[str, str]:
    """Return the format of each file in a directory that tells formats apart."""
    return {name: kind for name, kind in _SIGNS.items() if os.path.lexists(path / name)}


def check_format(path: Path, expected: str, kind: str) -> None:
    """Raise `UsageError` if no directory is at the path, or a checkpoint that is not of this format."""
    if not path.is_dir():
        refuse(path, expected, "a file" if path.exists() else "nothing", "Check the path.")
    for name, other in signs_in(path).items() if kind not in signs_in(path).values() else ():
        got, remedy = f"one with the file {name}", f"Load it with hwfsdp.checkpoint.{_LOADERS[other]}."
        refuse(path, expected, got, remedy)


# --- Disks -------------------------------------------------------------------------------------------------

_REMEDIES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free space there, or choose a path on another disk.")
_REMEDIES |= dict.fromkeys((errno.EIO, errno.EFBIG, errno.EROFS), "Choose a path on another disk.")
_REMEDIES |= dict.fromkeys((errno.EACCES, errno.EPERM), "Change the permissions, or choose another path.")
_REMEDIES |= {errno.ENOTDIR: "Choose another path."}


def with_size(error: Exception, file: str | os.PathLike[str], nbytes: int) -> Exception:
    """Return the error of the disk behind the error of a writer, with the file and the bytes to write. No error of a disk: return `error`.

    A writer that fails may fail again while it closes the file. Python keeps the first error as the context of the second.
    """
    found: BaseException | None = error
    while not isinstance(found, OSError) or (found is not error and found.errno not in _REMEDIES):
        if found is None:
            return error
        found = found.__cause__ or found.__context__
    found.filename = found.filename or str(file)
    vars(found)["nbytes"] = nbytes
    return found


def of_disk(error: OSError) -> tuple[str, str]:
    """Say what a disk did not do, for `got`, and the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "Mend this, and try again.")
    nbytes = getattr(error, "nbytes", None)
    size = "" if nbytes is None else f"; {nbytes:,} bytes are to be written there"
    got = f"{error.strerror or error} ({printable(error.filename or 'no file')}){size}"
    return got, f"What was there before is as it was. {remedy}"


def told(error: BaseException) -> str:
    """Describe an error of Python, torch or the disk in one line."""
    return in_one_line(f"{type(error).__name__}: {error}")


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def on_one_side(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Say which keys only the state dict has (`missing`), and which only the checkpoint: how many, and the first of them."""
    sides = {"missing in the checkpoint": missing, "only in the checkpoint": unexpected}
    return "; ".join(f"{len(names)} {side}: {listed(names)}" for side, names in sides.items() if names)


def check_in_common(what: str, left_out: str, strict: bool, common: bool, compare: str) -> None:
    """Raise an error if keys are left out and `strict` is set, or if no key is `common` to both sides. `compare` begins the remedy."""
    if left_out and (strict or not common):
        fresh = "a fresh optimizer has no state yet: hwfsdp.checkpoint.meta.init_optimizer_state"
        then = "or pass strict=False to load what both have" if common else "and load under the saved keys"
        expected = "the same keys in the state dict and in the checkpoint" if strict else "a key in common"
        refuse(what, expected, left_out, f"{compare} ({fresh}), {then}.")


def said_once(texts: Sequence[str]) -> list[str]:
    """Return, for each rank, its text; "" if it is the text of rank 0, which says it for all."""
    return [texts[0], *("" if text == texts[0] else text for text in texts[1:])]


def warn_left_out(left_out: str, path: object) -> None:
    """Warn about keys that a load with strict=False has not loaded. `left_out` is the text of `on_one_side`; "" if there are none."""
    if left_out:
        text = f"load(strict=False) from {printable(path)}: expected the same keys on both sides; got {left_out}. "
        warnings.warn(
            text + "Entries of the state dict that are missing there keep their values.", stacklevel=3
        )
