"""The chapters can be read in order: each module imports only from those listed before it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import hwfsdp

PACKAGE = Path(hwfsdp.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
ORDER = re.findall(r"^         (\w+)  +\S", hwfsdp.__doc__ or "", re.MULTILINE)
OUTSIDE = {"__init__", "__main__"}  # the package's door and the interpreter's, not chapters


def chapter_of(path: Path) -> str:
    """The name in the table of contents: a module's, or that of the subpackage it is in."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def chapters_imported_by(path: Path) -> set[str]:
    """Every chapter of hwfsdp that the source imports, at any depth, type checking included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "hwfsdp":
            found |= {alias.name for alias in node.names if alias.name in ORDER}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hwfsdp."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("hwfsdp.")}
    return found


def test_every_chapter_is_in_the_table_of_contents_once() -> None:
    chapters = {chapter_of(path) for path in SOURCES} - OUTSIDE
    assert sorted(ORDER) == sorted(chapters)


def test_a_chapter_imports_only_earlier_ones() -> None:
    found = []
    for path in SOURCES:
        chapter = chapter_of(path)
        for imported in chapters_imported_by(path) if chapter not in OUTSIDE else ():
            own = imported == chapter and path.parent != PACKAGE
            if not own and ORDER.index(imported) >= ORDER.index(chapter):
                found.append(f"{path.relative_to(PACKAGE)} imports {imported}")
    assert found == []


PRIVATE = re.compile(
    r"torch\._(?!_)|\._(?:local_tensor|spec|cdata|base|parameters|execution_engine|foreach\w*)\b"
)


def test_private_torch_api_is_used_in_one_module() -> None:
    used = {path.relative_to(PACKAGE): PRIVATE.findall(code_of(path)) for path in SOURCES}
    closing = "learn/rules.py"  # names what a learner's file may not use
    assert {str(path) for path, names in used.items() if names} == {"compat.py", "core/compat.py", closing}


def code_of(path: Path) -> str:
    return ast.unparse(_without_docstrings(ast.parse(path.read_text())))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            if isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str):
                body[0].value.value = ""
    return tree


def test_only_the_streams_know_the_device() -> None:
    finds_devices = ("streams", "ranks", "wrap")
    codes = {path.stem: code_of(path) for path in HEART if path.stem not in finds_devices}
    assert [chapter for chapter, code in codes.items() if re.search(r"cuda|\.type\b|is_cpu", code)] == []


HEART = sorted((PACKAGE / "core").glob("*.py"))


def code_lines(path: Path) -> int:
    """Lines of code: no blanks, comments, docstrings."""
    source = path.read_text()
    documented = set[int]()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            documented |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(
        bool(text.strip()) and not text.strip().startswith("#") and n not in documented for n, text in lines
    )


def test_the_heart_is_small_and_imports_torch_and_itself_only() -> None:
    sizes = {path.stem: code_lines(path) for path in HEART}
    assert sum(sizes.values()) <= 1_400 and max(sizes.values()) <= 200, sizes
    imported = {
        path.stem: re.findall(r"(?:from|import) (hwfsdp(?!\.core)\S*)", code_of(path)) for path in HEART
    }
    assert not any(imported.values()), imported


def test_features_import_the_heart_and_what_moves_bytes() -> None:
    allowed = {"core", "features", "errors", "compat", "events", "history", "collectives"}
    found = {path.stem: chapters_imported_by(path) - allowed for path in (PACKAGE / "features").glob("*.py")}
    assert not any(found.values()), found
