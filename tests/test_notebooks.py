"""Notebooks are what their sources give, ran from top to bottom, show pictures, and define no algorithm."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
LONGEST = 30  # lines of a function in a notebook: what ranks run, or what to draw


def load_tool() -> Any:
    spec = importlib.util.spec_from_file_location("write_notebooks", FOLDER / "write.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()
SOURCES = TOOL.sources([])


def test_there_are_at_least_ten() -> None:
    assert len(SOURCES) >= 10


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_is_what_its_source_gives(path: Path) -> None:
    assert list(TOOL.problems(path)) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_begins_by_saying_what_it_needs(path: Path) -> None:
    first = next(cell for cell in TOOL.read_source(path).cells if cell.cell_type == "code")
    expected = next(cell for cell in TOOL.read_source(SOURCES[0]).cells if cell.cell_type == "code")
    assert first.source == expected.source


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_defines_no_algorithm(path: Path) -> None:
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    assert [f.name for f in functions if (f.end_lineno or 0) - f.lineno >= LONGEST] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_the_number_of_a_notebook_is_in_its_title(path: Path) -> None:
    assert TOOL.read_source(path).cells[0].source.startswith(f"# {path.name[:2]} · ")


def test_a_notebook_that_is_out_of_step_is_found(tmp_path: Path) -> None:
    source = tmp_path / "01_x.py"
    source.write_text("# %%\n1 + 1\n")
    assert list(TOOL.problems(source)) == ["01_x.ipynb is missing. Run: make notebooks"]
    notebook = TOOL.read_source(source)
    TOOL.nbformat.write(notebook, source.with_suffix(".ipynb"))
    source.write_text("# %%\n1 + 2\n")
    found = list(TOOL.problems(source))
    assert [
        part in problem for part, problem in zip(("not what", "not run", "no picture"), found, strict=True)
    ] == [True] * 3
