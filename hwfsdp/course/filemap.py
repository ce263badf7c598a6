"""A map of a learner's `my_fsdp.py`: the functions and classes of each station, and the open TODOs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from hwfsdp.course.submission import NOT_PYTHON

_HEADING = re.compile(r"# -+ (\d\d) ")
_TODO = re.compile(r"TODO\((\d\d)\)")


class Defined(NamedTuple):
    """A function or class of the file: its name, its number of lines, and the stations in its TODOs."""

    name: str
    lines: int
    todo: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} (to do)" if self.todo else f"{self.name} {self.lines}"


def file_map(text: str) -> dict[str, list[Defined]]:
    """Return the functions and classes of a file by the station of their section; "" holds those outside of all sections.

    A section begins with a comment like `# --- 03 Fully sharded ---`, as in the starter. If the file is not Python, the map is empty.
    """
    try:
        tree = ast.parse(text)
    except NOT_PYTHON:
        return {}
    lines = text.splitlines()
    found: dict[str, list[Defined]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            end = node.end_lineno or node.lineno
            own = lines[node.lineno - 1 : end]
            todo = dict.fromkeys(number for line in own for number in _TODO.findall(line))
            section = next(_headings(lines[: node.lineno]), "")
            found.setdefault(section, []).append(Defined(node.name, len(own), tuple(todo)))
    return found


def _headings(lines: list[str]) -> Iterator[str]:
    """Yield the numbers of the sections that begin in these lines, the last one first; "" for a heading without a number."""
    for line in reversed(lines):
        if line.startswith("# ---"):
            match = _HEADING.match(line)
            yield match[1] if match else ""
