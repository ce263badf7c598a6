"""Holes: whole functions and methods, cut out of a module's source and put back.

A hole has the qualified name of its function: `chunk_extent` or `FSDPParam.to_sharded`. There are three operations. All of them work
on text, so comments, decorators and layout survive:

    extract   return the function's own text, from its first decorator to its last line
    blank     remove the function's body: its docstring stays, then it raises NotImplementedError
    splice    put another text in the function's place

If you blank the holes and splice the extracted texts back in, you get the same module, byte for byte.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hwfsdp.course.refusals import suggestion, unusable

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Span:
    """The place of a function in its module, as indices of lines.

    Attributes:
        start: its first decorator, or its `def`.
        body: the first line after its signature and docstring.
        stop: the line after its last one. Comments at the end that are indented like its body belong to it.
        indent: the indentation of its `def`, as text.
    """

    start: int
    body: int
    stop: int
    indent: str


def functions(source: str) -> dict[str, Span]:
    """Return all functions of a module and all methods of its classes, by name, in order.

    Functions that cannot be a hole are left out: a function on one line, and a name with two definitions (such as a property and
    its setter), because the name is ambiguous.

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
    """Parse a text. Callers must not change the tree, because it is cached and used again.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: the text is not Python.
    """
    return ast.parse(source)


def definitions(source: str) -> Iterator[tuple[str, Function]]:
    """Yield every function and method of a module with its name, in order. A name with two definitions comes twice.

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


class Parameter(NamedTuple):
    """A parameter of a function: "", "*" or "**", its name and type, and its default; None if there is none."""

    stars: str
    node: ast.arg
    default: ast.expr | None


def parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    """Yield the parameters in order."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = [None] * (len(positional) - len(arguments.defaults))
    for node, default in zip(positional, [*required, *arguments.defaults], strict=True):
        yield Parameter("", node, default)
    if arguments.vararg:
        yield Parameter("*", arguments.vararg, None)
    for node, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield Parameter("", node, default)
    if arguments.kwarg:
        yield Parameter("**", arguments.kwarg, None)


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
    """Return the index of the line where a statement begins, decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1


def _after_signature(node: Function, lines: Sequence[str]) -> int:
    """Return the index of the line where the body begins. Comments above its first statement belong to the body."""
    index = _first_line(node.body[0])
    header = node.lineno - 1
    while index - 1 > header and lines[index - 1].strip().startswith("#"):
        index -= 1
    return index


def find(source: str, name: str) -> Span:
    """Find the function of this name.

    Raises:
        UsageError: there is no such function, or there are several.
    """
    known = functions(source)
    if name not in known:
        raise unusable("manifest.hole", name=name, remedy=suggestion(name, known))
    return known[name]


def extract(source: str, name: str) -> str:
    """Return the function's own text unchanged, indentation included."""
    lines, span = source.splitlines(keepends=True), find(source, name)
    return "".join(lines[span.start : span.stop])


def splice(source: str, name: str, text: str) -> str:
    """Return the module with `text` in place of the function.

    Args:
        text: the result of `extract` for a function with the same indentation.
    """
    lines, span = source.splitlines(keepends=True), find(source, name)
    return "".join([*lines[: span.start], text, *lines[span.stop :]])


def blank(source: str, name: str, label: str) -> str:
    """Return the module with a hole: the function keeps its decorators, signature and docstring.

    Args:
        label: the label of the exercise for the TODO comment, for example "04".
    """
    lines, span = source.splitlines(keepends=True), find(source, name)
    ending = "\r\n" if lines[span.start].endswith("\r\n") else "\n"
    inner = span.indent + "    "
    hole = f"{inner}# TODO({label}){ending}{inner}raise NotImplementedError{ending}"
    head = "".join(lines[span.start : span.body])
    if head and not head.endswith(("\n", "\r")):  # the docstring was the module's last line
        head += ending
    return "".join([*lines[: span.start], head, hole, *lines[span.stop :]])
