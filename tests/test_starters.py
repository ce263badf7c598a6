"""Starters differ from their solutions only in bodies, and their descriptions of the package are right.

tests/course/test_workbook.py compares the files of the course with its manifests.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import hwfsdp
from hwfsdp import UsageError
from hwfsdp.course.holes import extract
from hwfsdp.course.manifest import find_course
from hwfsdp.course.provided import Definition, described, summary
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
    "core.layout.free",
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
                assert isinstance(found, property | functools.cached_property) == (
                    kind == "property"
                ), name.name


def test_what_helps_is_explained_in_a_line():
    text = (
        'class Handle:\n    """Of a save.\n\n    Attributes:\n        at: see there. last: the save\n'
        '            before (Note [Order]). size: bytes.\n    """\n'
        '    def wait(self) -> str:\n        """Wait (Note [Order]); return the id.\n\n        Once."""\n'
    )
    for name, told in {
        "Handle": "Of a save.",
        "Handle.wait": "Wait; return the id.",
        "Handle.last": "the save before.",
        "Handle.size": "bytes.",
        "Handle.start": "",
        "Nobody.last": "",
    }.items():
        assert summary(Definition("hwfsdp.given", text, name)) == told, name


def test_specifications_of_electives_do_not_dictate_the_answers():
    """Half a line for each line of the answers, and a quarter of the names that they use."""
    told, answers = 0, 0
    for exercise in find_course(PACKAGE).exercises:
        known, used = 0, 0
        for hole in exercise.holes:
            function = ast.parse(textwrap.dedent(extract(hole.source, hole.name))).body[0]
            assert isinstance(function, ast.FunctionDef)
            specification, body = ast.get_docstring(function) or "", function.body[1:]
            told += sum(1 for line in specification.splitlines() if line.strip())
            answers += (function.end_lineno or 0) - body[0].lineno + 1
            names = {name for node in body for name in names_in(node)} - {a.arg for a in function.args.args}
            known += sum(1 for name in names if re.search(rf"\b{name}\b", specification))
            used += len(names)
        assert known <= used / 4, (exercise.directory, known, used)
    assert told <= answers / 2


def names_in(node: ast.AST) -> set[str]:
    loaded = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return loaded | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
