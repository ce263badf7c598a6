"""Starters: they import, they are not started, and with the package's bodies they do what the package does."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import hwfsdp
from hwfsdp import UsageError
from hwfsdp.learn.holes import functions
from hwfsdp.learn.manifest import find_course
from hwfsdp.learn.provided import Provided, block, described
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


GIVEN = '''
from enum import Enum, auto
from typing import NamedTuple

MANIFEST, _NEW = "manifest.json", "CURRENT.new"
Init = Callable[[str, Tensor], object]
LIMIT: int = 3


class Kind(Enum):
    ONE = auto()
    TWO = auto()


class Need(NamedTuple):
    """What is read."""

    entry: str
    box: tuple[int, ...] = ()
    seen: list[int] = field(default_factory=list)


class Base:
    def __init__(self, path: Path, *, keep: int | None = None) -> None:
        self.path, self.keep = path, keep


class Handle(Base):
    """A handle."""

    stream: Stream

    def begin(self, staged: Any, /, target: int = 3, *rest: str, by: bool, **more: int) -> None:
        self._count, self._word, self._set = 0, None, None
        self._thread = self._made()
        self.later: int | None = None

    def _made(self) -> Thread: ...

    @property
    def is_over(self) -> bool: ...

    @functools.cached_property
    def size(self): ...

    @staticmethod
    def of(tensor: Tensor) -> Handle: ...

    @classmethod
    def made_of(cls, tensor: Tensor) -> Handle: ...


def place_of(view: View, *, pad: bool = False) -> tuple[int, int]: ...
'''
DESCRIBED = {
    "place_of": "function place_of(view: View, *, pad: bool = False) -> tuple[int, int]",
    "Handle.begin": "method Handle.begin(staged: Any, target: int = 3, *rest: str, by: bool, **more: int) -> None",
    "Handle.is_over": "property Handle.is_over -> bool",
    "Handle.size": "property Handle.size",
    "Handle.of": "method Handle.of(tensor: Tensor) -> Handle",
    "Handle.made_of": "method Handle.made_of(tensor: Tensor) -> Handle",
    "Handle.stream": "attribute Handle.stream: Stream",
    "Handle._count": "attribute Handle._count: int",
    "Handle._word": "attribute Handle._word",
    "Handle._thread": "attribute Handle._thread: Thread",
    "Handle.later": "attribute Handle.later: int | None",
    "Base.path": "attribute Base.path: Path",
    "Handle": "class Handle(path: Path, *, keep: int | None = None)",
    "Need": "class Need(entry: str, box: tuple[int, ...] = (), seen: list[int] = …)",
    "Kind": "enum Kind: ONE, TWO",
    "_NEW": "constant _NEW = 'CURRENT.new'",
    "Init": "constant Init = Callable[[str, Tensor], object]",
    "LIMIT": "constant LIMIT: int",
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_name_of_the_package_is_described_as_it_is_defined(name):
    assert described(Provided("hwfsdp.given", GIVEN, name)) == DESCRIBED[name]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("plase_of", "'place_of'"),
        ("Handle.is_ower", "'is_over'"),
        ("Nobody.x", "none"),
        ("Handle.begin.x", "none"),
    ],
)
def test_a_name_that_is_not_in_the_module_is_refused(name, remedy):
    with pytest.raises(UsageError, match=f"calls: hwfsdp.given:{name}: .*{remedy}"):
        described(Provided("hwfsdp.given", GIVEN, name))


def test_names_stand_under_their_modules_in_lines_that_are_short_enough():
    names = [Provided("hwfsdp.given", GIVEN, name) for name in DESCRIBED]
    lines = block([*names, Provided("hwfsdp.other", GIVEN, "Kind")])
    assert lines[:3] == ["# The package's own, that the docstrings name:", "#", "# hwfsdp.given"]
    assert lines[-2:] == ["# hwfsdp.other", "#     enum       Kind: ONE, TWO"]
    assert all(line.startswith("#") and len(line) <= 110 for line in lines)
    joined = " ".join(" ".join(line[1:].split()) for line in lines)
    assert all(text in joined for text in DESCRIBED.values())
    assert block([]) == []


def test_starter_and_solution_have_the_names_as_comments():
    calls = [Provided("hwfsdp.given", GIVEN, "Handle.is_over")]
    for solved in (False, True):
        text = render([hole(name) for name in MIXED], "04", "T", solved=solved, calls=calls)
        assert text.count("#     property   Handle.is_over -> bool\n") == 1
        assert ast.unparse(ast.parse(text)) == ast.unparse(
            ast.parse(render([hole(name) for name in MIXED], "04", "T", solved=solved))
        )


def test_signatures_of_the_course_say_what_python_says():
    """Of functions: parameters in order; of properties, that they are some."""
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
