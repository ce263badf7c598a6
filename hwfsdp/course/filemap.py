"""A map of a learner's `my_fsdp.py`: what it defines, station by station, and what is still to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

_HEADING = re.compile(r"# -+ (\d\d) ")
_TODO = re.compile(r"TODO\((\d\d)\)")


class Defined(NamedTuple):
    """A function or class of the file: its name, its lines, and the numbers of the stations in its TODOs."""

    name: str
    lines: int
    todo: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} (to do)" if self.todo else f"{self.name} {self.lines}"


def file_map(text: str) -> dict[str, list[Defined]]:
    """By station, in whose section it stands, what a file defines. "" is for what stands above or below all sections.

    Sections begin with a comment like `# --- 03 Fully sharded ---`, as in the starter. A file that is no Python has no map.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
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
    """Numbers of the sections that began in these lines, the last one first; "" where a heading has none."""
    for line in reversed(lines):
        if line.startswith("# ---"):
            match = _HEADING.match(line)
            yield match[1] if match else ""
