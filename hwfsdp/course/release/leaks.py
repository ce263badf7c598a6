"""Prove that no answer is left: search every file of an edition for the body of every hole, and of every function of the
stations' reference.

A body is known by its statements: lines without indentation and comments, with long ones joined, as they would be after copying
and reformatting. A file leaks if it has all statements of a short body in a row, or a run of the statements of a long one. In
prose, for example a hint, lines break anywhere and statements stand in sentences. There a run counts if hardly anything is
between its statements, and a long statement counts by itself. Notebooks are searched cell by cell, with the code that their step
players show. Archives and compressed files are opened.
"""

from __future__ import annotations

import ast
import gzip
import html
import json
import re
import textwrap
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hwfsdp.course import holes
from hwfsdp.course.manifest import PACKAGE, Course, read_homework
from hwfsdp.course.overlay import blanked
from hwfsdp.course.stations.stages import LAST, stage
from hwfsdp.course.submission import NOT_PYTHON, solution, starter

_RUN = 3  # statements in a row that are no coincidence
_SHORT = 12  # characters of a statement, on average; a run of shorter ones says nothing
_GAP = 8  # characters between two statements of a run, in prose: "; then"
_TELLING = 40  # characters of a statement in prose that is telling by itself
_LONGEST = 400  # characters of a line; longer ones are not written by hand
_CODE = (".py", ".body", ".gz", ".zip")  # not prose: docstrings may say what a learner has to write
_LARGEST = 64 << 20  # most bytes of an unpacked file that are searched


class Leak(NamedTuple):
    """A file with the body of a hole, or a part of it, and the first statement of that part."""

    path: Path
    number: str
    hole: str
    statement: str

    def __str__(self) -> str:
        return f"{self.path}: {self.hole} of exercise {self.number}: {self.statement}"


class Secret(NamedTuple):
    """A body that no file may contain: its statements in order, and runs of them that are no coincidence."""

    number: str
    hole: str
    statements: tuple[str, ...]
    runs: frozenset[tuple[str, ...]]


def secrets_of(course: Course) -> list[Secret]:
    """Return one secret for each hole of electives and homework, and for each function of the stations' reference.

    Given text is not secret: docstrings and signatures. The answers of stations and homework are FSDPs, like the package. For these,
    the package outside its holes and the homework's starter are not secret either.
    """
    homework = read_homework(course)
    solved = solution(homework)
    given = _given(course, starter(homework))
    bodies = [(homework.number, name, statements(solved, name)) for name in homework.hole_names]
    secrets = [Secret(*each, frozenset(_runs_of(each[2]) - given)) for each in (*_of_stations(), *bodies)]
    for exercise in course.exercises:
        for hole in exercise.holes:
            body = statements(hole.source, hole.name)
            secrets.append(Secret(exercise.number, hole.name, body, frozenset(_runs_of(body))))
    return [secret for secret in secrets if secret.runs]


def _of_stations() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (number, name, body) of each function of the reference after each station, without the given ones."""
    known = {_body(node) for _, node in holes.definitions(stage(0))}
    for number in range(1, LAST + 1):
        for name, node in holes.definitions(stage(number)):
            body = _body(node)
            if body not in known:
                yield f"{number:02}", name, body
            known.add(body)


def _given(course: Course, given: str) -> set[tuple[str, ...]]:
    """Return all runs of statements in the package, without its teaching code and with blank holes, and in the `given` text."""
    blank = blanked(course.exercises)
    texts = [given]
    for path in PACKAGE.rglob("*.py"):
        module = ".".join((PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts))
        if not module.startswith("hwfsdp.course.") or module.startswith("hwfsdp.course.pictures."):
            texts.append(blank.get(module) or path.read_text())
    found = set()
    for lines in map(_normalized, texts):
        for size in range(1, _RUN + 1):
            found |= {*_runs(lines, size)}
    return found


def statements(source: str, name: str) -> tuple[str, ...]:
    """Return the simple statements of a function's body, and the heads of compound ones, as Python writes them; no docstring."""
    return _body(dict(holes.definitions(source))[name])


def _body(node: holes.Function) -> tuple[str, ...]:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return tuple(line.strip() for statement in body for line in ast.unparse(statement).splitlines())


def find_leaks(root: Path, secrets: Sequence[Secret]) -> Iterator[Leak]:
    """Yield answers that are left in a folder."""
    for path in sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink()):
        for text in _texts(path):
            lines, prose = _normalized(text), "" if path.suffix in _CODE else _squeezed(text)
            for secret in secrets:
                statement = _found(secret, lines) or _said(secret, prose)
                if statement is not None:
                    yield Leak(path.relative_to(root), secret.number, secret.hole, statement)


def _texts(path: Path) -> Iterator[str]:
    """Yield a file's text, or the texts of the files in an archive. Compiled files have no text."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        yield gzip.open(path).read(_LARGEST).decode(errors="replace")
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as file:
                    yield file.read(_LARGEST).decode(errors="replace")
    elif path.suffix == ".ipynb":
        for cell in json.loads(data).get("cells", []):
            yield "".join(cell.get("source", []))
            for output in cell.get("outputs", []):
                yield from _played("".join(output.get("data", {}).get("text/html", [])))
    else:
        yield data.decode(errors="replace")


def _played(page: str) -> Iterator[str]:
    """Yield the functions in a step player that a notebook shows: the code that ran."""
    for found in re.findall(r'id="data">(.*?)</script>', html.unescape(page), re.DOTALL):
        for function in json.loads(found)["functions"].values():
            yield textwrap.dedent("\n".join(function.get("lines", [])))


def _normalized(text: str) -> list[str]:
    """Return lines to compare with statements: formatted by Python, all together, or one by one if the text does not parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # prose that is nearly Python
        try:
            lines = ast.unparse(ast.parse(text)).splitlines()
        except NOT_PYTHON:
            lines = [_as_statement(line.strip().removeprefix("> ")) for line in text.splitlines()]
    return [line.strip() for line in lines if line.strip()]


def _as_statement(line: str) -> str:
    """Return the line as Python formats it, if it is a statement or the head of one; otherwise unchanged."""
    if len(line) <= _LONGEST:
        for rest in ("", "\n    pass"):
            try:
                return ast.unparse(ast.parse(line + rest)).partition("\n")[0]
            except NOT_PYTHON:
                continue
    return line


def _runs(lines: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """Return all runs of `size` lines."""
    return (tuple(lines[i : i + size]) for i in range(len(lines) - size + 1))


def _runs_of(body: Sequence[str]) -> set[tuple[str, ...]]:
    """Return runs of statements that are no coincidence in any file."""
    size = min(len(body), _RUN)
    return {run for run in _runs(body, size) if sum(map(len, run)) >= _SHORT * size}


def _squeezed(text: str) -> str:
    """Remove the differences between code and a sentence with code in it: white space, backticks, kinds of quotes."""
    return "".join(text.replace("`", "").replace("'", '"').split())


def _said(secret: Secret, prose: str) -> str | None:
    """Return the first statement of a run that the prose contains, or a long statement that it contains."""
    if not prose:
        return None
    for run in secret.runs:
        between = f".{{0,{_GAP}}}"
        if re.search(between.join(re.escape(_squeezed(each)) for each in run), prose, re.DOTALL):
            return run[0]
    long = (each for each in secret.statements if len(_squeezed(each)) >= _TELLING)
    return next((each for each in long if _squeezed(each) in prose), None)


def _found(secret: Secret, lines: Sequence[str]) -> str | None:
    """Return the first statement of a run that the lines contain in one piece."""
    runs = _runs(lines, min(len(secret.statements), _RUN))
    return next((run[0] for run in runs if run in secret.runs), None)
