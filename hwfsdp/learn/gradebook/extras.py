"""What is graded besides the exercises, apart from their points: the capstone, the lab.

Each is a package of its own, imported only when a course has its folder; a course without it is graded all the same.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hwfsdp.learn.grade import Options
from hwfsdp.learn.manifest import Course
from hwfsdp.learn.verdict import OnCheck


class Extra(NamedTuple):
    """A grader of its own.

    Attributes:
        name: of its folder, below `exercises/` and in a submission.
        module, function: what grades it, called with a submission's folder and the course; if `has_checks`, with options and a
            function for each check's result, too. What it returns has `as_dict()`, with score and max_score.
    """

    name: str
    module: str
    function: str
    has_checks: bool


EXTRAS = (
    Extra("capstone", "hwfsdp.learn.capstone", "grade_capstone", True),
    Extra("lab", "hwfsdp.learn.lab", "grade_lab", False),
)


def available(course: Course, extras: tuple[Extra, ...] = EXTRAS) -> list[Extra]:
    """Those that this course has, and this package can grade."""
    return [
        extra
        for extra in extras
        if (course.root / "exercises" / extra.name).is_dir() and importlib.util.find_spec(extra.module)
    ]


def grade_extra(
    name: str, folder: Path, course: Course, options: Options, on_check: OnCheck
) -> dict[str, Any]:
    """What one of them came to, as data.

    Raises:
        Exception: whatever its grader raises.
    """
    extra = next(extra for extra in available(course) if extra.name == name)
    function: Callable[..., Any] = getattr(importlib.import_module(extra.module), extra.function)
    graded = function(folder, course, options, on_check) if extra.has_checks else function(folder, course)
    return dict(graded.as_dict())
