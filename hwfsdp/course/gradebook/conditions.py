"""The conditions on a machine that grades a class, and which of them do not hold.

It leaves out what the limits of submissions are, and how they are put in force: that is `hwfsdp.course.confinement`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hwfsdp.course.confinement import Limit, limits_in_force
from hwfsdp.course.manifest import PACKAGE
from hwfsdp.course.refusals import unusable


def refuse_second_copy() -> None:
    """Refuse to grade with two copies of the package: only in the one that is used can its text be hidden from submissions.

    Raises:
        UsageError: there is another one.
    """
    for path in sys.path:
        copy = Path(path, PACKAGE.name)
        if any(copy.glob("__init__.py*")) and copy.resolve() != PACKAGE.resolve():
            raise unusable("grade.copies", package=PACKAGE, copy=copy.absolute())


def limits(required: bool = False) -> list[Limit]:
    """What keeps submissions in their place on this machine, and what does not.

    Args:
        required: everything has to.

    Raises:
        UsageError: it is required, and something does not.
    """
    found = limits_in_force()
    if required and (missing := in_one_line(found)):
        raise unusable("grade.isolation", missing=missing)
    return found


def in_one_line(limits: Sequence[Limit]) -> str:
    """The limits that are not in force, and why; "" if all are."""
    return "; ".join(f"{limit.name} ({limit.why_not})" for limit in limits if not limit.in_force)
