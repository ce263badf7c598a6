"""Holes: whole functions and methods, cut out of a module's source and put back.

A hole is named as Python would name it, `chunk_extent` or `FSDPParam.to_sharded`. Three operations, all on text, so
that comments, decorators and layout survive:

    extract   the function's own text, from its first decorator to its last line
    blank     the same module with the function's body gone: its docstring stays, then it raises NotImplementedError
    splice    the same module with another text in the function's place

Blanking holes and splicing in what was extracted gives the module back, byte for byte.
"""

from __future__ import annotations

import ast
import functools
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hwfsdp.course.refusals import unusable

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Span:
    """The place of a function in its module, as indices of lines.

    Attributes:
        start: its first decorator, or its `def`.
        body: the first line after its signature and docstring.
        stop: the line after its last one; comments that are indented like its body belong to it.
        indent: of its `def`.
    """

    start: int
    body: int
    stop: int
    indent: str


def functions(source: str) -> dict[str, Span]:
    """All functions of a module and methods of its classes, by name, in order.

    Left out is what cannot be a hole: a function on one line, and a name that is defined twice, such as a property and its
    setter, since it does not say which.

    Raises:
        SyntaxError: the source is not Python.
    """
    lines = source.splitlines(keepends=True)
    found: dict[str, Span] = {}
    twice: set[str] = set()
    for name, node in definitions(source):
        if name in found:
            twice.add(name)
        first = node.body[0]
        if not lines[first.lineno - 1].encode()[: first.col_offset].strip():
            found[name] = _span(node, lines)
    return {name: span for name, span in found.items() if name not in twice}


@functools.lru_cache(maxsize=128)
def parsed(source: str) -> ast.Module:
    """Parse a text. Callers must not change the tree: modules of the package are read again and again.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it is no Python.
    """
    return ast.parse(source)


def definitions(source: str) -> Iterator[tuple[str, Function]]:
    """Every function and method of a module by name, in order; a name that is defined twice comes twice.

    Raises:
        SyntaxError: the source is not Python.
    """
    yield from _definitions(parsed(source).body, "")


def _definitions(body: Sequence[ast.AST], prefix: str) -> Iterator[tuple[str, Function]]:
    for node in body:
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            for field in ("body", "orelse", "handlers", "finalbody"):
                yield from _definitions(getattr(node, field, []), prefix)


def _span(node: Function, lines: Sequence[str]) -> Span:
    start = _first_line(node)
    first = node.body[0]
    docstring = ast.get_docstring(node, clean=False) is not None
    assert node.end_lineno is not None and first.end_lineno is not None, "ast.parse gives all positions"
    indent = lines[node.lineno - 1][: node.col_offset]
    stop = node.end_lineno
    for index in range(stop, len(lines)):  # comments at the end
        stripped = lines[index].strip()
        deeper = lines[index].startswith((indent + " ", indent + "\t"))
        if stripped and not (stripped.startswith("#") and deeper):
            break
        stop = index + 1 if stripped else stop
    body = first.end_lineno if docstring else _after_signature(node, lines)
    return Span(start, body, stop, indent)


def _first_line(node: ast.stmt) -> int:
    """Index of the line where a statement begins, decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1


def _after_signature(node: Function, lines: Sequence[str]) -> int:
    """The line where the body begins; comments above its first statement are part of it."""
    index = _first_line(node.body[0])
    header = node.lineno - 1
    while index - 1 > header and lines[index - 1].strip().startswith("#"):
        index -= 1
    return index


def find(source: str, name: str) -> Span:
    """Find the function of this name.

    Raises:
        UsageError: there is none, or several.
    """
    known = functions(source)
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        remedy = f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(known)}."
        raise unusable("manifest.hole", name=name, remedy=remedy)
    return known[name]


def extract(source: str, name: str) -> str:
    """The function's own text, as it stands there, indentation included."""
    lines, span = source.splitlines(keepends=True), find(source, name)
    return "".join(lines[span.start : span.stop])


def splice(source: str, name: str, text: str) -> str:
    """The module with `text` in place of the function.

    Args:
        text: what `extract` gave of a function that is indented in the same way.
    """
    lines, span = source.splitlines(keepends=True), find(source, name)
    return "".join([*lines[: span.start], text, *lines[span.stop :]])


def blank(source: str, name: str, label: str) -> str:
    """The module with a hole: of the function, decorators, signature and docstring stay.

    Args:
        label: of the exercise, for the comment that says what is to be done, for example "04".
    """
    lines, span = source.splitlines(keepends=True), find(source, name)
    ending = "\r\n" if lines[span.start].endswith("\r\n") else "\n"
    inner = span.indent + "    "
    hole = f"{inner}# TODO({label}){ending}{inner}raise NotImplementedError{ending}"
    head = "".join(lines[span.start : span.body])
    if head and not head.endswith(("\n", "\r")):  # the docstring was the module's last line
        head += ending
    return "".join([*lines[: span.start], head, hole, *lines[span.stop :]])
