"""The site's pages: their Python runs, their commands exist, and a broken link or a failing example is named with its place."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from sybil import Sybil
from sybil.document import Document
from sybil.example import Example
from sybil.parsers.markdown import PythonCodeBlockParser

from hwfsdp.cli import build_parser
from hwfsdp.group import FSDPCommContext
from hwfsdp.hooks import FSDPState

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TEXTS = [*DOCS.glob("*.md"), ROOT / "README.md", *(ROOT / "exercises").glob("[0-9]*/README.md")]
# without the capstone's, which takes the learner's own file
PAGES = [path for path in TEXTS if "```python" in path.read_text()]
READER = Sybil(parsers=[PythonCodeBlockParser()])


def read(path: Path) -> Document:
    """A page and its examples, in a namespace from which ranks can be started: functions travel by value."""
    document = READER.parse(path)
    document.namespace["__name__"] = "__main__"
    return document


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_python_of_a_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for changed in (FSDPState, FSDPCommContext):  # by pages that show what goes wrong otherwise; afterwards all is back
        for name, method in vars(changed).items():
            if inspect.isfunction(method):
                monkeypatch.setattr(changed, name, method)
    try:
        for example in read(path).examples():
            example.evaluate()
    finally:
        if dist.is_initialized():  # by a page, in a comment that readers do not see
            dist.destroy_process_group()


def test_an_example_that_fails_is_named_with_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\none = 1\n```\n\nThen:\n\n```python\nassert one == 2\n```\n")
    examples: list[Example] = list(read(page).examples())
    examples[0].evaluate()
    with pytest.raises(AssertionError) as raised:
        examples[1].evaluate()
    last = raised.traceback[-1]
    assert (str(last.path), last.lineno + 1) == (str(page), 10)


def commands() -> Iterator[Any]:
    """Every `hwfsdp` line of a shell block, with its page."""
    for path in (*DOCS.glob("*.md"), ROOT / "README.md", *(ROOT / "exercises").rglob("README.md")):
        for block in re.findall(r"^```sh\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["hwfsdp"]:
                    yield pytest.param(words[1:], id=f"{path.relative_to(ROOT)}: {' '.join(words)}")


@pytest.mark.parametrize("words", list(commands()))
def test_a_command_of_a_page_is_one_that_exists(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        build_parser().parse_args(words)
    except SystemExit as stopped:
        assert stopped.code == 0, capsys.readouterr().err


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
