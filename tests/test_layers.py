"""The chapters can be read in order: each module imports only from those listed before it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import hwfsdp

PACKAGE = Path(hwfsdp.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
ORDER = re.findall(r"^         (\w+)  +\S", hwfsdp.__doc__ or "", re.MULTILINE)
OUTSIDE = {"__init__", "__main__"}  # the package's door and the interpreter's, not chapters


def chapter_of(path: Path) -> str:
    """The name in the table of contents: a module's, or that of the subpackage it is in."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def names_imported_from_the_package(path: Path) -> set[tuple[str, str]]:
    """(chapter, module) for every import of hwfsdp in the source, at any depth, type checking included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "hwfsdp":
            found |= {(alias.name, alias.name) for alias in node.names if alias.name in ORDER}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hwfsdp."):
            found.add((str(node.module).split(".")[1], str(node.module).removeprefix("hwfsdp.")))
        elif isinstance(node, ast.Import):
            found |= {(a.name.split(".")[1], a.name) for a in node.names if a.name.startswith("hwfsdp.")}
    return found


def test_every_chapter_is_in_the_table_of_contents_once() -> None:
    chapters = {chapter_of(path) for path in SOURCES} - OUTSIDE
    assert sorted(ORDER) == sorted(chapters)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_chapter_imports_only_earlier_ones(path: Path) -> None:
    chapter = chapter_of(path)
    if chapter in OUTSIDE:
        return
    for imported, _ in names_imported_from_the_package(path):
        own = imported == chapter and path.parent != PACKAGE
        assert own or ORDER.index(imported) < ORDER.index(chapter), f"{path.name} imports {imported}"


PRIVATE = re.compile(r"torch\._|\._(?:local_tensor|spec|cdata|base|parameters|execution_engine|foreach\w*)\b")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_torch_api_is_used_in_one_module(path: Path) -> None:
    code = ast.unparse(_without_docstrings(ast.parse(path.read_text())))
    assert path.name == "compat.py" or not PRIVATE.findall(code)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            if isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str):
                body[0].value.value = ""
    return tree


@pytest.mark.parametrize("chapter", ORDER[ORDER.index("param") : ORDER.index("wrap")])
def test_only_the_streams_know_the_device(chapter: str) -> None:
    code = ast.unparse(_without_docstrings(ast.parse((PACKAGE / f"{chapter}.py").read_text())))
    assert chapter == "streams" or not re.search(r"cuda|\.type\b|is_cpu", code)
