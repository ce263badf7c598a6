"""Proof that no answer is left: the text of every hole's body is looked for in every file of an edition.

A body is known by its statements: lines without indentation and comments, long ones joined, as they would survive being copied
elsewhere and formatted anew. A file leaks if it has all of a short body's statements in a row, or a run of a long one's. In prose,
a hint for example, lines break anywhere and statements stand in sentences: there a run counts if hardly anything is between, and
a long statement by itself. Notebooks are searched cell by cell, archives and compressed files are opened.
"""

from __future__ import annotations

import ast
import gzip
import io
import json
import re
import textwrap
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hwfsdp.learn import holes
from hwfsdp.learn.capstone.homework import read_homework, solution_path
from hwfsdp.learn.manifest import Course

_RUN = 3  # statements in a row that are no coincidence
_SHORT = 12  # characters of a body that says nothing by itself
_GAP = 8  # characters between two statements of a run, in prose: "; then"
_TELLING = 40  # characters of a statement that says enough by itself, in prose
_LONGEST = 400  # characters of a line that somebody wrote
_NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)  # what the parser raises
_CODE = (".py", ".body", ".gz", ".zip")  # no prose: docstrings may say what a learner has to write
_LARGEST = 64 << 20  # bytes of an unpacked file that are searched


class Leak(NamedTuple):
    """A file that has the body of a hole, or a part of it, and the first statement of that part."""

    path: Path
    number: str
    hole: str
    statement: str

    def __str__(self) -> str:
        return f"{self.path}: {self.hole} of exercise {self.number}: {self.statement}"


class Secret(NamedTuple):
    """What must not be found: the statements of a body, in order."""

    number: str
    hole: str
    statements: tuple[str, ...]


def secrets_of(course: Course) -> list[Secret]:
    """One for each hole, of the exercises and of the homework. What is a hole's docstring or signature is no secret."""
    homework = read_homework(course)
    solved = solution_path(course).read_text()
    sources = [(e.number, hole.name, hole.source) for e in course.exercises for hole in e.holes]
    sources += [(homework.number, name, solved) for name in homework.hole_names]
    found = []
    for number, name, source in sources:
        body = statements(textwrap.dedent(holes.extract(source, name)))
        if body and sum(map(len, body)) >= _SHORT:
            found.append(Secret(number, name, tuple(body)))
    return found


def statements(function: str) -> list[str]:
    """The simple statements, and heads of the compound ones, of a function's body as Python writes them; no docstring."""
    node = ast.parse(function).body[0]
    assert isinstance(node, ast.FunctionDef)
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return [line.strip() for statement in body for line in ast.unparse(statement).splitlines()]


def find_leaks(root: Path, secrets: Sequence[Secret]) -> Iterator[Leak]:
    """What is left in a folder."""
    for path in sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink()):
        for text in _texts(path):
            lines, prose = _normalized(text), "" if path.suffix in _CODE else _squeezed(text)
            for secret in secrets:
                statement = _found(secret.statements, lines) or _said(secret.statements, prose)
                if statement is not None:
                    yield Leak(path.relative_to(root), secret.number, secret.hole, statement)


def _texts(path: Path) -> Iterator[str]:
    """A file's text, or those of the files in it; compiled ones have none."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        yield gzip.GzipFile(fileobj=io.BytesIO(data)).read(_LARGEST).decode(errors="replace")
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as file:
                    yield file.read(_LARGEST).decode(errors="replace")
    elif path.suffix == ".ipynb":
        for cell in json.loads(data).get("cells", []):
            yield "".join(cell.get("source", []))
    else:
        yield data.decode(errors="replace")


def _normalized(text: str) -> list[str]:
    """Lines that can be compared with statements: as Python writes them, all together or each by itself."""
    try:
        lines = ast.unparse(ast.parse(text)).splitlines()
    except _NOT_PYTHON:
        lines = [_as_statement(line.strip().removeprefix("> ")) for line in text.splitlines()]
    return [line.strip() for line in lines if line.strip()]


def _as_statement(line: str) -> str:
    """The line as Python writes it, be it a statement or the head of one; any other as it is."""
    if len(line) <= _LONGEST:
        for rest in ("", "\n    pass"):
            try:
                return ast.unparse(ast.parse(line + rest)).partition("\n")[0]
            except _NOT_PYTHON:
                continue
    return line


def _runs_of(body: Sequence[str]) -> set[tuple[str, ...]]:
    """Statements in a row that are no coincidence, wherever they are found."""
    size = min(len(body), _RUN)
    runs = {tuple(body[i : i + size]) for i in range(len(body) - size + 1)}
    return {run for run in runs if sum(map(len, run)) >= _SHORT * size}


def _squeezed(text: str) -> str:
    """Without what differs between code and a sentence with code in it: white space, backticks, kinds of quotes."""
    return "".join(text.replace("`", "").replace("'", '"').split())


def _said(body: Sequence[str], prose: str) -> str | None:
    """The first statement of a run of the body that is told in prose, or a long statement that is."""
    if not prose:
        return None
    for run in _runs_of(body):
        between = f".{{0,{_GAP}}}"
        if re.search(between.join(re.escape(_squeezed(each)) for each in run), prose, re.DOTALL):
            return run[0]
    return next(
        (each for each in body if len(_squeezed(each)) >= _TELLING and _squeezed(each) in prose), None
    )


def _found(body: Sequence[str], lines: Sequence[str]) -> str | None:
    """The first statement of a run of the body that is there, in one piece."""
    size, runs = min(len(body), _RUN), _runs_of(body)
    for i in range(len(lines) - size + 1):
        if (run := tuple(lines[i : i + size])) in runs:
            return run[0]
    return None
