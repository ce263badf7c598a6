"""Notebooks match their sources, run from top to bottom, show pictures, define no algorithm, and give readable errors."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
import suites

FOLDER = Path(__file__).parents[2] / "notebooks"
HANGS = 900.0  # seconds after which a notebook has stopped; `make notebooks` measures how long it takes
LONGEST = 30  # lines of a function in a notebook; it runs on ranks or draws


def load_tool() -> Any:
    spec = importlib.util.spec_from_file_location("write_notebooks", FOLDER / "write.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()
SOURCES = TOOL.sources([])
FIRST = next(cell.source for cell in TOOL.read_source(SOURCES[0]).cells if cell.cell_type == "code")


def test_a_notebook_equals_its_source_states_its_needs_and_defines_no_algorithm() -> None:
    for path in SOURCES:
        assert list(TOOL.problems(path)) == []
        cells = TOOL.read_source(path).cells
        assert cells[0].source.startswith(f"# {path.name[:2]} · ")
        assert next(cell.source for cell in cells if cell.cell_type == "code") == FIRST
        nodes = list(ast.walk(ast.parse(path.read_text())))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        assert [f.name for f in functions if (f.end_lineno or 0) - f.lineno >= LONGEST] == []
        for node in nodes:  # its imports exist
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hwfsdp"):
                exec(ast.unparse(node), {})


def test_no_notebook_prints_where_its_author_keeps_the_course() -> None:
    for path in SOURCES:
        cells = nbformat.read(path.with_suffix(".ipynb"), as_version=4).cells
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        printed = "".join(output.text for output in outputs if output.output_type == "stream")
        assert re.findall(r"(?<![\w.~])/\w+/[\w./]+\.(?:py|md)", printed) == [], path.name


def test_with_an_address_a_notebook_opens_on_a_hosted_one_and_installs_the_package_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "https://github.com/ada/hwfsdp"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "conf.py").write_text(f'version = "1"\nrepository = "{address}/"\n')
    source = tmp_path / "notebooks" / "01_x.py"
    source.parent.mkdir()
    source.write_text("# %% [markdown]\n# # 01 · Why\n#\n# So.\n\n# %%\n1 + 1\n")
    TOOL.nbformat.write(TOOL.read_source(source), source.with_suffix(".ipynb"))
    monkeypatch.setattr(TOOL, "FOLDER", source.parent)
    assert any("not what" in problem for problem in TOOL.problems(source))  # the address is new
    assert TOOL.take_over_text(source)
    title, install, _ = nbformat.read(source.with_suffix(".ipynb"), as_version=4).cells
    link = "https://colab.research.google.com/github/ada/hwfsdp/blob/main/notebooks/01_x.ipynb"
    assert title.source == f"# 01 · Why\n\n[Open in Colab]({link})\n\nSo."
    assert f"git clone --quiet --depth 1 {address} " in install.source
    assert "pip install --quiet --no-deps" in install.source
    assert not any("not what" in problem for problem in TOOL.problems(source))


@pytest.mark.long
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG")  # readers do not set it, and it adds collectives
    TOOL.run(TOOL.read_source(path), HANGS)


def shown(*cells: str) -> list[str]:
    """Run the cells in one kernel. Return the text of each, or of its error. If the kernel hangs, the time limit fails the test."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata = {"kernelspec": TOOL.KERNEL}
    TOOL.run(notebook, allow_errors=True)
    return [
        "".join(o.get("text") or "\n".join(o.get("traceback", ())) for o in c.outputs) for c in notebook.cells
    ]


@pytest.mark.parametrize(
    "broken",
    [
        suites.long("import sys; sys.modules['hwfsdp'] = None", id="no package"),
        pytest.param("import sys; sys.path.insert(0, '{folder}')", id="a Python that cannot read it"),
        suites.long("import sys; sys.version_info = (3, 10, 4)", id="a Python that is too old"),
    ],
)
def test_a_kernel_that_cannot_run_a_notebook_names_a_remedy(broken: str, tmp_path: Path) -> None:
    (tmp_path / "hwfsdp").mkdir()
    (tmp_path / "hwfsdp" / "__init__.py").write_text("type Size = int | None = 3\n")  # a syntax of no Python
    _, said = shown(broken.format(folder=tmp_path), FIRST)
    assert "README.md" in said and "kernel" in said and "Traceback" not in said


def test_the_first_cell_can_be_read_by_an_old_python() -> None:
    ast.parse(FIRST, feature_version=(3, 6))
