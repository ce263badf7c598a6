"""docs/own_exercise.md, followed to the letter in a copy of the tree: its files are written, its commands run, wrong answers fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own_exercise.md"
BLOCK = re.compile(
    r"(?:(At\sthe\send\sof|In\sa\snew\sfile)\s`([\w/.]+)`:\n\n)?```(\w+)\n(.*?)```", re.DOTALL
)  # (where, path, language, text)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for name in ("exercises", "solutions", "hwfsdp"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", ".hwfsdp"))
    shutil.copy(ROOT / "setup.cfg", root)  # pytest reads it instead of the course's
    return root


def run(command: str, root: Path) -> subprocess.CompletedProcess[str]:
    tools = root / "tools"
    tools.mkdir(exist_ok=True)
    for name, module in (("pytest", " -m pytest"), ("python", ""), ("hwfsdp", " -m hwfsdp")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
        (tools / name).chmod(0o755)
    env = os.environ | {"PYTHONPATH": str(root), "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, shell=True, cwd=root, env=env, capture_output=True, text=True)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command, and the misconception with which it must fail, or ""."""
    for line in text.splitlines():
        command, _, why = line.partition("# must fail: ")
        yield command.strip(), why


@pytest.mark.long
def test_every_snippet_works_as_the_page_says(tree: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    assert [language for *_, language, _ in blocks].count("sh") == 2 and len(blocks) == 7
    for where, name, language, text in blocks:
        if language != "sh":
            path = tree / name
            assert path.exists() == where.startswith("At"), name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(f"\n\n{text}" if path.exists() and path.stat().st_size else text)
            continue
        for command, why in commands(text):
            ended = run(command, tree)
            said = f"{command}\n{ended.stdout}\n{ended.stderr}"
            assert (ended.returncode != 0) == bool(why), said
            assert f"{why}: " in ended.stdout or not why, said
    assert "Global norm" in ended.stdout and "2 points" in ended.stdout


def test_points_change_in_the_marker_and_an_exercise_leaves_with_its_folder(tree: Path) -> None:
    before = run("hwfsdp list", tree).stdout
    path = tree / "exercises" / "01_rows" / "test_rows.py"
    [points, *_] = re.findall(r"points\((\d)", path.read_text())
    path.write_text(path.read_text().replace(f"points({points}", "points(100", 1))
    shutil.rmtree(tree / "exercises" / "02_ring")
    after = run("hwfsdp list", tree).stdout
    totals = [int(re.findall(r"(\d+) points for the exercises", text)[0]) for text in (before, after)]
    ring = int(re.findall(r" 02 .*?(\d+) points", before)[0])
    assert totals[1] - totals[0] == 100 - int(points) - ring
    assert " 02 " in before and " 02 " not in after
