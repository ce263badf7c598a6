"""The site's pages: their Python runs, and a broken link fails the build and is named with its place."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import suites
import torch.distributed as dist
from sybil import Sybil
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser

from hwfsdp.core.context import FSDPCommContext
from hwfsdp.core.state import FSDPState

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TEXTS = [*DOCS.glob("*.md"), ROOT / "README.md", *(ROOT / "exercises").glob("[0-9]*/README.md")]
# without the capstone's, which takes the learner's own file
PAGES = [str(path.relative_to(ROOT)) for path in TEXTS if "```python" in path.read_text()]
FAST = ["README.md", "docs/checkpoints.md", "docs/virtual.md"]
READER = Sybil(parsers=[PythonCodeBlockParser()])


def read(path: Path) -> Document:
    """A page and its examples, in a namespace from which ranks can be started: functions travel by value."""
    document = READER.parse(path)
    document.namespace["__name__"] = "__main__"
    return document


@pytest.mark.parametrize("page", suites.fast_are(FAST, PAGES))
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for changed in (
        FSDPState,
        FSDPCommContext,
    ):  # by pages that show what goes wrong otherwise; afterwards all is back
        for name, method in vars(changed).items():
            if inspect.isfunction(method):
                monkeypatch.setattr(changed, name, method)
    try:
        for example in read(ROOT / page).examples():
            example.evaluate()
    finally:
        if dist.is_initialized():  # by a page, in a comment that readers do not see
            dist.destroy_process_group()


def test_a_broken_link_fails_the_build_of_the_site_and_is_named(tmp_path: Path) -> None:
    pages, site = tmp_path / "pages", tmp_path / "site"
    pages.mkdir()
    for each in ("conf.py", "book.py"):
        (pages / each).write_text(
            (DOCS / each).read_text().replace("extensions = [", 'extensions = ["myst_nb"]; _ = [')
        )
    (pages / "index.md").write_text("# Title\n\nSee [another page](nowhere.md).\n")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(pages), str(site)]
    built = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert built.returncode != 0
    assert "index.md:3" in built.stderr and "nowhere.md" in built.stderr
