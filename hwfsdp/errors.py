"""The errors of this package, and the form of their messages.

Every error of this package is an `FSDPError`. Its message answers three questions: what was expected, what came instead, and
what to do. Each class also derives from the built-in exception that a caller would think of first. So `except ValueError` works
even if you have never seen this module.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from pickle import PicklingError
from typing import Self

from hwfsdp.core.base_errors import FSDPError as FSDPError
from hwfsdp.core.base_errors import StateError as StateError
from hwfsdp.core.base_errors import UsageError as UsageError

_PLACE_IN_C = re.compile(r"\[\S+:\d+\] ")  # gloo puts the place in its own source in front of a message


def in_one_line(message: str) -> str:
    """Return the message of a backend or a user's exception without line breaks, and without places in the backend's source."""
    return _PLACE_IN_C.sub("", " ".join(message.split()))


def printable(said: object, kept: str = "") -> str:
    """Return the text without characters that would move a terminal's cursor, except `kept`. Each is written as in Python: "\\x1b"."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in str(said))


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", form: str = "{}") -> str:
    """Return the remedy for an unknown name: the closest known name, or else `otherwise`. `form` has a place for the known name."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"Did you mean: {form.format(close[0])}" if close else otherwise


def shown_path(path: Path | str) -> str:
    """Return a path as its user would type it: relative to the current folder, if it is below this folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


class WrongTypeError(UsageError, TypeError):
    """An argument of a type that the call cannot use."""


# torch's FSDP2 raises other types for some mistakes. Our errors derive from these types, too,
# because programs catch them.


class RefusedError(UsageError, AssertionError):
    """A module, mesh or dimension that torch answers with an AssertionError."""


class RefusedStateError(StateError, AssertionError):
    """A call at the wrong time that torch answers with an AssertionError."""


class RuntimeRefusedError(UsageError, RuntimeError):
    """A module or mesh that torch answers with a RuntimeError."""


class MissingParameterError(UsageError, AttributeError):
    """A sharded parameter that its module no longer has, which torch answers with an AttributeError."""


class CopyRefusedError(RefusedError, TypeError, PicklingError):
    """A copy or a pickle of a sharded module."""


class UnsupportedError(FSDPError, NotImplementedError):
    """A valid request that this package does not implement. The message names the alternative. The call changed nothing."""


class MissingPackageError(FSDPError, ImportError):
    """A package that only this part of hwfsdp needs is not installed. `name`: its module."""

    def __init__(self, subject: str, *, expected: str, got: str, remedy: str, name: str) -> None:
        super().__init__(subject, expected=expected, got=got, remedy=remedy)
        self.name = name


class CollectiveError(FSDPError, RuntimeError):
    """A collective that failed on this rank.

    Attributes:
        collective: its name, for example "all_gather".
        owner: fqn of the parameter group that it served.
        rank: the rank that raises, which is not always the rank with the mistake.
        table: the last calls of all ranks, side by side (`desync_report`); "" if this rank does not know them (`launch` does).
    """

    table: str = ""

    def __init__(self, collective: str, owner: str, rank: int, cause: BaseException) -> None:
        self.collective, self.owner, self.rank = collective, owner, rank
        super().__init__(
            f"{collective} of parameter group {owner!r} on rank {rank}",
            expected="every rank to run the same collectives in the same order",
            got=in_one_line(str(cause)) or type(cause).__name__,
            remedy="Look at the first rank that failed. If no rank failed, the ranks ran different modules.",
        )

    def __str__(self) -> str:
        return "\n\n".join(filter(None, [super().__str__(), self.table]))


class CheckpointError(FSDPError, RuntimeError):
    """A checkpoint that is damaged or incomplete, or could not be written or read.

    Attributes:
        file: its path, or its name within the checkpoint. key: the entry concerned, written as Python indexes it.
        offset: bytes from the beginning of the file. Each attribute is None if it does not apply.
    """

    file: str | None = None
    key: str | None = None
    offset: int | None = None

    def at(self, file: object = None, key: str | None = None, offset: int | None = None) -> Self:
        """Set the attributes. Return this error."""
        self.file, self.key, self.offset = None if file is None else str(file), key, offset
        return self


TRACEBACK_BELOW = "The traceback below is that rank's."


class RankError(FSDPError, RuntimeError):
    """A rank of `launch` raised, died or did not finish.

    Attributes:
        rank: the first rank that failed.
        traceback: that rank's traceback, or where each rank stood when time ran out.
        reason: "raised", "died" or "late".
        table: a sentence that says where ranks differ, and the last calls of all ranks, side by side (`desync_report`); "" if
            the table would not help.

    As text, the error begins with the sentence of the table: the rank that failed first is not always the one with the mistake.
    """

    table: str = ""

    def __init__(self, rank: int, got: str, traceback: str, remedy: str, reason: str = "raised") -> None:
        self.rank, self.traceback, self.reason = rank, traceback, reason
        super().__init__(f"rank {rank}", expected="every rank to return", got=got, remedy=remedy)

    def __str__(self) -> str:
        table = f"{self.table}\n\n" if self.table else ""
        return f"{table}{self.headline}\n{self.traceback}".rstrip()

    @property
    def headline(self) -> str:
        """One line: how that rank failed, and what to do."""
        verb = " raised" if self.reason == "raised" and self.traceback else ":"
        got = in_one_line(self.got)
        if self.reason == "late" and self.table:
            got = got.partition(" (")[0]  # the table shows better which rank waits for which
        if got.startswith("CollectiveError: "):
            # Its own message has three parts. Keep only which collective failed, and how.
            what, _, why = got.partition(": expected ")
            got = what if self.table or not why else f"{what}: {why.partition('; got ')[2]}"
        return f"rank {self.rank}{verb} {got.removesuffix('.')}. {self.remedy}"
