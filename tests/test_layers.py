"""The rules of the source tree: the imports allowed to a folder, the modules that it lists, and the length of files and functions."""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import hwfsdp

PACKAGE = Path(hwfsdp.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

BASE = {"core", "flat"}  # flat: errors, lazy_imports, compat, streams, which are in no folder
INSTRUMENTS = BASE | {"features", "comm", "observe"}
PAPER = INSTRUMENTS | {"layout", "launcher", "checkpoint", "optim"}
MAY: dict[str, set[str]] = {  # folder → the folders that it may import, besides itself
    "core": set(),
    "flat": {"core"},
    "comm": BASE,
    "collectives": BASE | {"comm"},
    "features": BASE | {"comm", "interop"},
    "interop": BASE | {"features"},
    "optim": BASE,
    "observe": INSTRUMENTS,
    "layout": BASE | {"features", "observe"},
    "launcher": BASE | {"comm", "observe"},
    "checkpoint": BASE | {"features", "layout"},
    "train": PAPER,
    "virtual": PAPER | {"train"},
    "plot": BASE | {"observe", "layout", "virtual"},
    "course": PAPER | {"train", "virtual", "plot"},
    "cli": PAPER | {"train", "virtual", "plot", "course"},
}
DOORS = {"__init__", "__main__"}  # hwfsdp's own
# these are read from the functions that users call downwards, as the core is; the course has circles
OUT_OF_ORDER = {"features", "course"}
DEEPEST = 15  # modules in a chain of imports
MOST_MODULES = 190
LONGEST = 400  # lines of code of a file
# files that are longer still, with their lines; may only shrink
LONG = {
    "course/laws.py": 460,
}
LONGEST_FUNCTION = 40  # lines of code of its body


# --- Imports -----------------------------------------------------------------------------------------------


def module_of(path: Path) -> str:
    """Return `observe.events` for its file, and `observe` for the folder's `__init__.py`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in SOURCES}


def folder_of(module: str) -> str:
    first = module.partition(".")[0]
    return first if first in MAY else "flat"


@functools.cache
def imported_by(path: Path) -> list[str]:
    """List every module of hwfsdp that the source imports, at any depth, also for type checking."""
    return modules_in(ast.parse(path.read_text()))


def modules_in(tree: ast.AST) -> list[str]:
    """List every module of hwfsdp that the tree imports."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hwfsdp":
            package = str(node.module).partition(".")[2]
            for alias in node.names:
                whole = f"{package}.{alias.name}".strip(".")
                found.append(whole if whole in MODULES else package)
        elif isinstance(node, ast.Import):
            found += [a.name.partition(".")[2] for a in node.names if a.name.startswith("hwfsdp.")]
    return found


def test_a_folder_imports_only_folders_that_the_table_allows() -> None:
    found = set()
    for module, path in MODULES.items():
        folder = folder_of(module)
        for imported in imported_by(path) if module not in DOORS else ():
            if imported and folder_of(imported) not in MAY[folder] | {folder}:
                found.add(f"{module} imports {imported}")
    assert sorted(found) == []


def imported_at_once(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the imports that run when the module is imported: not those inside functions, nor those for type checkers."""
    for each in statements:
        if isinstance(each, ast.Import | ast.ImportFrom):
            yield each
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            for_checkers = isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"
            yield from imported_at_once([] if for_checkers else getattr(each, "body", []))
            yield from imported_at_once(getattr(each, "orelse", []))


@functools.cache
def graph() -> dict[str, set[str]]:
    """Return module → the modules that it imports when it is imported."""
    found = {}
    for module, path in MODULES.items():
        statements = imported_at_once(ast.parse(path.read_text()).body)
        found[module] = {*modules_in(ast.Module([*statements], []))} - {module, ""}
    return found


def test_modules_import_each_other_in_no_cycle_and_in_short_chains() -> None:
    order = [*graphlib.TopologicalSorter(graph()).static_order()]  # raises CycleError, which names the cycle
    depth: dict[str, int] = {}
    for module in order:
        depth[module] = 1 + max((depth[imported] for imported in graph().get(module, ())), default=0)
    assert {module: number for module, number in depth.items() if number > DEEPEST} == {}
    assert depth["core.api"] < depth["features.fully_shard"]


def test_each_module_has_a_name_of_its_own() -> None:
    names = collections.Counter(path.stem for path in SOURCES if path.stem not in DOORS)
    assert [name for name, times in names.items() if times > 1] == []
    assert len(SOURCES) <= MOST_MODULES


# --- Lists of modules --------------------------------------------------------------------------------------


def listed_in(path: Path) -> list[str]:
    """List the modules in a docstring, in its order."""
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    there = {each.stem for each in path.parent.iterdir()} - DOORS
    return [name for name in re.findall(r"^ *(\w+)  +\S", said, re.MULTILINE) if name in there]


FOLDERS = ["."] + sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def chapters_of(folder: str) -> set[str]:
    """Return the modules and folders in a folder."""
    there = [
        *(PACKAGE / folder).glob("*.py"),
        *(path.parent for path in (PACKAGE / folder).glob("*/__init__.py")),
    ]
    return {each.stem for each in there} - DOORS


def test_every_module_is_listed_once_in_the_docstring_of_its_folder() -> None:
    for folder in FOLDERS:
        assert sorted(listed_in(PACKAGE / folder / "__init__.py")) == sorted(chapters_of(folder)), folder


def test_modules_are_listed_in_reading_order() -> None:
    """No module imports a later one of its folder when it is imported. The flat core is a folder, too."""
    found = []
    for folder in {*FOLDERS} - OUT_OF_ORDER:
        order = listed_in(PACKAGE / folder / "__init__.py")
        order = order[::-1] if folder == "core" else order  # users' functions come first
        front = "" if folder == "." else f"{folder}."
        for module, path in MODULES.items():
            own = module.removeprefix(front).partition(".")[0]
            if module == folder or not module.startswith(front) or own not in order or own in MAY:
                continue
            for imported in sorted(graph()[module]):
                other = imported.removeprefix(front).partition(".")[0]
                beside = imported.startswith(front) and other in order and other not in MAY
                if beside and order.index(other) > order.index(own):
                    found.append(f"{module} imports {imported}")
    assert sorted(found) == []


# --- How long files and functions are ----------------------------------------------------------------------


@functools.cache
def lines_of_code(path: Path) -> set[int]:
    """Return the numbers of the lines that are not blank, comment or docstring."""
    text = path.read_text()
    layout = {getattr(tokenize, name) for name in "COMMENT NL NEWLINE INDENT DEDENT ENDMARKER".split()}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    for said in _docstrings(ast.parse(text)):
        lines.difference_update(range(said.lineno, (said.end_lineno or 0) + 1))
    return lines


def code_lines(path: Path) -> int:
    return len(lines_of_code(path))


def test_files_are_short_and_long_ones_do_not_grow() -> None:
    counts = {str(path.relative_to(PACKAGE)): code_lines(path) for path in SOURCES}
    found = {name: lines for name, lines in counts.items() if lines > LONGEST}
    assert {name: lines for name, lines in found.items() if lines > LONG.get(name, LONGEST)} == {}
    assert {*LONG} <= {*found}, "some are short now: take them off the list"


def test_functions_are_short() -> None:
    found = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = lines_of_code(path) & {*range(node.body[0].lineno, (node.end_lineno or 0) + 1)}
                found[f"{path.relative_to(PACKAGE)}: {node.name}"] = len(lines)
    assert {name: lines for name, lines in found.items() if lines > LONGEST_FUNCTION} == {}


# --- Private names -----------------------------------------------------------------------------------------

PRIVATE = re.compile(
    r"torch(?:\.(?!ops\b)\w+)*\._(?!_)|\._(?:local_tensor|spec|cdata|base|parameters|execution_engine|foreach\w*)\b"
)


def test_private_torch_api_is_used_in_modules_called_compat() -> None:
    suspects = [path for path in SOURCES if PRIVATE.search(path.read_text())]
    users = [path.relative_to(PACKAGE) for path in suspects if PRIVATE.search(code_of(path))]
    naming = {"course/failures.py"}  # it knows the old names that a student's file may import
    assert {str(path) for path in users} == {
        "compat.py",
        "core/private_torch.py",
        "features/private_autograd.py",
    } | naming


def code_of(path: Path) -> str:
    tree = ast.parse(path.read_text())
    for said in _docstrings(tree):
        said.value = ast.Constant("")
    return ast.unparse(tree)


def _docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            if isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str):
                yield body[0]


# --- The core ----------------------------------------------------------------------------------------------

CORE = sorted((PACKAGE / "core").glob("*.py"))


def test_the_core_is_small_and_imports_torch_and_itself_only() -> None:
    sizes = {path.stem: code_lines(path) for path in CORE}
    assert sum(sizes.values()) <= 1_470 and max(sizes.values()) <= 220, sizes
    imported = {
        path.stem: re.findall(r"(?:from|import) (hwfsdp(?!\.core)\S*)", code_of(path)) for path in CORE
    }
    assert not any(imported.values()), imported


def test_only_the_streams_know_the_device() -> None:
    # the state moves the inputs of a model to its device
    finds_devices = ("device_streams", "mesh", "api", "state")
    codes = {path.stem: code_of(path) for path in CORE if path.stem not in finds_devices}
    assert [
        chapter for chapter, code in codes.items() if re.search(r"cuda|\.type\b|is_cpu|\bdevice\(", code)
    ] == []
