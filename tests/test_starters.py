"""Starters differ from their solutions only in bodies, and their descriptions of the package are right.

tests/course/test_workbook.py compares the files of the course with its manifests.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import hwfsdp
from hwfsdp import UsageError
from hwfsdp.course.manifest import find_course
from hwfsdp.course.provided import Definition, described
from hwfsdp.course.starters import render

PACKAGE = Path(hwfsdp.__file__).parent


def hole(name: str) -> Definition:
    """Return a hole: `module.function` or `module.Class.method` of the package."""
    module, _, function = name.removeprefix("core.").partition(".")
    folder = "core." if name.startswith("core.") else ""
    source = PACKAGE / f"{folder}{module}".replace(".", "/")
    return Definition(f"hwfsdp.{folder}{module}", source.with_suffix(".py").read_text(), function)


SHARDING = [
    f"core.sharding.{name}" for name in ("chunk_length", "padded_length", "chunk_extent", "local_shape")
]
MIXED = [
    "core.sharding.chunk_extent",
    "core.param.FSDPParam.shard",
    "core.param.FSDPParam.to_sharded",
    "core.form.free",
]


def test_starter_and_solution_differ_in_bodies_only():
    for names in (SHARDING, MIXED):
        starter, solution = (render([hole(n) for n in names], "04", "T", solved=s) for s in (False, True))
        assert starter.count("# TODO(04)") == len(names) and "TODO" not in solution
        own = {line.strip() for line in starter.splitlines() if line not in solution.splitlines()}
        assert own == {"# TODO(04)", "raise NotImplementedError"}


GIVEN = """
class Handle:
    def begin(self, staged: Any) -> None: ...

    @property
    def is_over(self) -> bool: ...


def place_of(view: View) -> tuple[int, int]: ...
"""


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("plase_of", "Did you mean: place_of"),
        ("Handle.is_ower", "Did you mean: is_over"),
        ("Nobody.x", "none"),
        ("Handle.begin.x", "none"),
    ],
)
def test_a_name_that_is_not_in_the_module_is_refused(name, remedy):
    with pytest.raises(UsageError, match=f"calls: hwfsdp.given:{name}: .*{remedy}"):
        described(Definition("hwfsdp.given", GIVEN, name))


def test_signatures_of_the_course_match_python():
    """Functions have their parameters in order; properties are called properties."""
    for exercise in find_course(PACKAGE).exercises:
        for name in exercise.provided:
            kind, _, text = described(name).partition(" ")
            found: Any = importlib.import_module(name.module)
            for part in name.name.split("."):
                found = getattr(found, part, None)
            if kind in ("function", "method"):
                function = getattr(found, "__wrapped__", found)
                parameters = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
                assert [p for p in parameters if p not in text] == []
            elif kind in ("property", "attribute"):
                assert isinstance(found, property) == (kind == "property"), name.name
