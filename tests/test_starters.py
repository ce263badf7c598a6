"""Starters: they import, they are not started, and with the package's bodies they do what the package does."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

import hwfsdp
from hwfsdp import UsageError
from hwfsdp.learn.holes import functions
from hwfsdp.learn.starters import Hole, render

PACKAGE = Path(hwfsdp.__file__).parent
MODULES = (
    "sharding",
    "precision",
    "ring",
    "storage",
    "collectives",
    "prefetch",
    "group",
    "param",
    "hooks",
    "accounting",
)


def hole(name: str) -> Hole:
    """`module.function`, or `module.Class.method`, of the package."""
    module, _, function = name.partition(".")
    return Hole(f"hwfsdp.{module}", (PACKAGE / f"{module}.py").read_text(), function)


def loaded(text: str) -> dict[str, Any]:
    """The names of a file, run."""
    names: dict[str, Any] = {"__name__": "starter"}
    exec(compile(text, "starter", "exec", dont_inherit=True), names)
    return names


SHARDING = [
    "sharding.chunk_length",
    "sharding.padded_length",
    "sharding.chunk_extent",
    "sharding.local_shape",
]
MIXED = ["sharding.chunk_extent", "param.FSDPParam.shard", "param.FSDPParam.to_sharded", "storage.free"]


@pytest.mark.parametrize("module", MODULES)
def test_a_starter_of_any_function_can_be_loaded_and_has_all_names_it_uses(module):
    source = (PACKAGE / f"{module}.py").read_text()
    for name in functions(source):
        for solved in (False, True):
            names = loaded(render([hole(f"{module}.{name}")], "01", "T", solved=solved))
            original = importlib.import_module(f"hwfsdp.{module}")
            missing = {
                used
                for used in names_used(source, name)
                if used not in names and used in vars(original) and not used.startswith("__")
            }
            assert not missing, (name, missing)


def names_used(source: str, name: str) -> set[str]:
    span = functions(source)[name]
    text = "".join(source.splitlines(keepends=True)[span.start : span.stop])
    tree = ast.parse(f"if True:\n{text}" if text[:1].isspace() else text)
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_a_starter_is_not_started():
    names = loaded(render([hole(name) for name in SHARDING], "01", "T", solved=False))
    for name in SHARDING:
        function = names[name.rpartition(".")[2]]
        with pytest.raises(NotImplementedError):
            function(*range(1, 1 + function.__code__.co_argcount))


def test_a_solution_does_what_the_package_does():
    from hwfsdp import sharding

    names = loaded(render([hole(name) for name in SHARDING], "01", "T", solved=True))
    for n in range(20):
        for world_size in range(1, 6):
            assert names["padded_length"](n, world_size) == sharding.padded_length(n, world_size)
            for rank in range(world_size):
                assert names["chunk_extent"](n, world_size, rank) == sharding.chunk_extent(
                    n, world_size, rank
                )


def test_starter_and_solution_differ_in_bodies_only():
    for names in (SHARDING, MIXED):
        starter, solution = (render([hole(n) for n in names], "04", "T", solved=s) for s in (False, True))
        assert starter.count("# TODO(04)") == len(names) and "TODO" not in solution
        for line in starter.splitlines():
            assert line in solution.splitlines() or line.strip() in (
                "# TODO(04)",
                "raise NotImplementedError",
            )


def test_methods_are_in_a_class_and_what_is_in_the_file_is_not_imported():
    text = render([hole(name) for name in MIXED], "04", "An exercise.", solved=True)
    assert text.startswith('"""An exercise."""\n')
    tree = ast.parse(text)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = [[node.name for node in c.body if isinstance(node, ast.FunctionDef)] for c in classes]
    assert (classes[0].name, methods) == ("FSDPParam", [["shard", "to_sharded"]])
    assert "padded_shard: [ceil(d0 / W) * rest]" in str(ast.get_docstring(classes[0]))
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert "chunk_length" in imported and "ShardedState" in imported
    assert not imported & {"chunk_extent", "FSDPParam"}


def test_a_hole_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match="Did you mean 'padded_length'"):
        render([hole("sharding.padded_lenght")], "01", "T", solved=False)
