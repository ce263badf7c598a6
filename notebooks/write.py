"""Run notebooks from top to bottom, and write each .ipynb from its source.

    python notebooks/write.py [NN ...]           run the sources, and write NN_topic.ipynb with their outputs
    python notebooks/write.py --text [NN ...]    copy changed text into the .ipynb if no code has changed; run nothing
    python notebooks/write.py --check            name each .ipynb that does not agree with its source; run nothing

The source of a notebook is NN_topic.py, a script with `# %%` between cells (jupytext's percent format). Edit, review and compare this
file. This tool makes the .ipynb beside it. The .ipynb is committed with its pictures, so that a reader sees them without running
anything.

If docs/conf.py names the repository, each .ipynb also has a link that opens it on a hosted notebook, and a cell that clones the repository
and installs hwfsdp there (`published`). A hosted notebook has torch already, and keeps it.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat

FOLDER = Path(__file__).parent
SECONDS = 120  # for all cells of a notebook, on two cores
HOSTED = "hosted"  # tag of the cell that installs hwfsdp
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def sources(numbers: list[str]) -> list[Path]:
    """Return the sources of the notebooks with these numbers, or of all notebooks."""
    found = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
    unknown = set(numbers) - {path.name[:2] for path in found}
    if unknown:
        sys.exit(
            f"notebooks: expected numbers of notebooks; got {', '.join(sorted(unknown))}. There are 01 to {found[-1].name[:2]}."
        )
    return [path for path in found if not numbers or path.name[:2] in numbers]


def read_source(path: Path) -> Any:
    """Return the notebook that a source describes, without outputs."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"  # jupytext chooses random ids
    return notebook


def repository() -> str:
    """Return the web address of the repository, of docs/conf.py; "" if it names none."""
    conf = ast.parse((FOLDER.parent / "docs" / "conf.py").read_text())
    for node in conf.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "repository":
            return str(ast.literal_eval(node.value)).removesuffix("/")
    return ""


def published(notebook: Any, name: str, address: str) -> Any:
    """Add what a hosted notebook needs: a link below the title that opens it there, and a cell that installs hwfsdp.

    Args:
        notebook: the notebook of a source. name: its file's name, "01_why_shard.ipynb".
        address: of the repository, such as "https://github.com/ada/hwfsdp". "": add nothing.
    """
    if not address:
        return notebook
    if address.startswith("https://github.com/"):
        hosted = address.replace("https://github.com/", "https://colab.research.google.com/github/")
        title, _, rest = notebook.cells[0].source.partition("\n")
        notebook.cells[0].source = f"{title}\n\n[Open in Colab]({hosted}/blob/main/notebooks/{name})\n{rest}"
    install = f"""from pathlib import Path
if Path.cwd().name != "notebooks":  # a hosted notebook: torch stays as it is
    !git clone --quiet --depth 1 {address} ~/hwfsdp && pip install --quiet --no-deps ~/hwfsdp
    %cd ~/hwfsdp/notebooks"""
    cell = nbformat.v4.new_code_cell(install, id="cell-hosted", metadata={"tags": [HOSTED, "remove-cell"]})
    notebook.cells.insert(1, cell)
    return notebook


def code_of(notebook: Any) -> list[Any]:
    """Return the cells of the source's code, without the one that `published` adds."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell for cell in code if HOSTED not in cell.metadata.get("tags", [])]


def run(notebook: Any, seconds: float = SECONDS, allow_errors: bool = False) -> None:
    """Run all cells in a new kernel within `seconds`, and put their outputs into the notebook.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised, and errors are not allowed. CellTimeoutError: the time ran out.
    """
    bin_folder = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([bin_folder, os.environ.get("PATH", "")])
    ends = time.monotonic() + seconds
    client = nbclient.NotebookClient(
        notebook,
        timeout_func=lambda cell: max(1, int(ends - time.monotonic())),
        kernel_name=KERNEL["name"],
        allow_errors=allow_errors,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of the run


def take_over_text(path: Path) -> bool:
    """If the notebook has the same code as its source, write the source's text into it and return True. Otherwise return False."""
    wanted, found = read_source(path), nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    ran, asked = code_of(found), code_of(wanted)
    if [cell.source for cell in asked] != [cell.source for cell in ran]:
        return False
    for cell, done in zip(asked, ran, strict=True):
        cell.outputs, cell.execution_count = done.outputs, done.execution_count
    wanted.metadata, target = found.metadata, path.with_suffix(".ipynb")
    nbformat.write(published(wanted, target.name, repository()), target)
    return True


def _written(cell: Any) -> tuple[str, str, list[str]]:
    """Return the properties of a cell that come from the source: its kind, its text, its tags."""
    return cell.cell_type, cell.source, cell.metadata.get("tags", [])


def problems(path: Path) -> Iterator[str]:
    """Yield the problems of a committed notebook. It must agree with its source, have run to its end, and show a picture."""
    target = path.with_suffix(".ipynb")
    if not target.exists():
        yield f"{target.name} is missing. Run: make notebooks"
        return
    wanted = published(read_source(path), target.name, repository())
    found = nbformat.read(target, as_version=4)
    if list(map(_written, wanted.cells)) != list(map(_written, found.cells)):
        yield f"{target.name} is not what {path.name} gives. Run: make notebooks"
    if found.metadata.kernelspec.name != KERNEL["name"]:
        yield f"{target.name} asks for the kernel {found.metadata.kernelspec.name!r}, which others may not have."
    code = code_of(found)
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        yield f"{target.name} was not run from top to bottom. Run: make notebooks"
    outputs = [output for cell in code for output in cell.outputs]
    if any(output.output_type == "error" for output in outputs):
        yield f"{target.name} ends with an error."
    if not any("image/png" in output.get("data", ()) for output in outputs):
        yield f"{target.name} shows no picture."


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs notebooks and writes them.")
    parser.add_argument("numbers", nargs="*", metavar="NN")
    parser.add_argument("--text", action="store_true", help="run nothing; take over changes of text")
    parser.add_argument("--check", action="store_true", help="run nothing; say what is not in step")
    arguments = parser.parse_args()
    chosen = sources(arguments.numbers)
    if arguments.check:
        found = [problem for path in chosen for problem in problems(path)]
        print("\n".join(found) or f"{len(chosen)} notebooks are what their sources give.")
        return 1 if found else 0
    if arguments.text:
        changed = [path.name for path in chosen if not take_over_text(path)]
        print("\n".join(f"{name}: its code has changed; run it." for name in changed) or "done")
        return 1 if changed else 0
    for path in chosen:
        notebook, began = read_source(path), time.monotonic()
        try:
            run(notebook)
        except (nbclient.exceptions.CellExecutionError, nbclient.exceptions.CellTimeoutError) as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            return 1
        target = path.with_suffix(".ipynb")
        nbformat.write(published(notebook, target.name, repository()), target)
        print(f"{target.name}  {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
