"""The functions that issued a log's events, with their text on this machine.

A log has the file, line and function of each place (`observe.call_sites`), and a checksum of each file. If a file is missing here or has
changed, the page does not show it, because the line number would point at the wrong line. The page then names the place and says why
there is no text.
"""

from __future__ import annotations

import ast
import re
import zlib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from hwfsdp.observe.call_sites import INSIDE, path_of

_PLACE = re.compile(r"(.+):(\d+) (\S+)")


class _File(NamedTuple):
    """The text of a file, and its functions by qualified name. `missing`: why there is no text; "" if there is one."""

    lines: list[str]
    functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]
    missing: str = ""


class Sources:
    """Collects places and functions of a page.

    Attributes:
        places: chains of places, each from the inside out: [key of the function in `functions`, line].
        functions: by key: file, function, first line, text, the first sentence of its docstring; or why there is no text.
    """

    def __init__(self) -> None:
        self.places: list[list[tuple[str, int]]] = [[]]
        self.functions: dict[str, dict[str, Any]] = {}
        self._numbers: dict[str, int] = {"": 0}
        self._names: dict[tuple[str, int, str, Any], str] = {}
        self._checksums: Mapping[str, Any] = {}
        self._files: dict[tuple[str, Any], _File] = {}

    def expect(self, checksums: Any) -> None:
        """Begin a log. `checksums`: the checksum of each file, from the log (`EventLog.code`)."""
        self._checksums = checksums if isinstance(checksums, dict) else {}
        self._numbers = {"": 0}

    def chain(self, code: str) -> int:
        """Return the index in `places` of an event's places (`Event.code`); 0 for none."""
        number = self._numbers.get(code)
        if number is None:
            number = self._numbers[code] = len(self.places)
            found = [_PLACE.fullmatch(place) for place in code.split(INSIDE)]
            self.places.append([self._place(m[1], int(m[2][:9]), m[3]) for m in found if m])
        return number

    def _place(self, file: str, line: int, function: str) -> tuple[str, int]:
        checksum = self._checksums.get(file)
        read = self._files.get((file, checksum))
        if read is None:
            read = self._files[file, checksum] = _read(file, checksum)
        nodes = read.functions.get(function, [])
        node = next((n for n in nodes if _first(n) <= line <= (n.end_lineno or 0)), None)
        first = _first(node) if node else line
        # The key is a number: the page must not show the whole path of a user's file.
        name = self._names.setdefault((file, first, function, checksum), str(len(self._names)))
        if name not in self.functions:
            said: dict[str, Any] = {"file": _short(file), "function": function, "first": first}
            if node is None:
                said["missing"] = read.missing or "this function is not in the file"
            else:
                said["lines"] = read.lines[first - 1 : node.end_lineno]
                said["promise"] = _first_sentence(ast.get_docstring(node) or "")
                said["docstring"] = _extent_of_docstring(node)
            self.functions[name] = said
        return name, line


def _read(file: str, checksum: Any) -> _File:
    if checksum is None:
        return _File([], {}, "the log does not say what was in this file")
    try:
        data = path_of(file).read_bytes()
        if zlib.crc32(data) != checksum:
            return _File([], {}, "the file has changed since the recording")
        text = data.decode()
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return _File([], {}, "the file is not on the machine that wrote this page")
    functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
    _collect(tree, "", functions)
    return _File(text.splitlines(), functions)


def _collect(node: ast.AST, prefix: str, found: dict[str, list[Any]]) -> None:
    """Add all functions below a node to `found`, by their qualified names (`__qualname__`)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found.setdefault(f"{prefix}{child.name}", []).append(child)
            _collect(child, f"{prefix}{child.name}.<locals>.", found)
        elif isinstance(child, ast.ClassDef):
            _collect(child, f"{prefix}{child.name}.", found)
        else:
            _collect(child, prefix, found)


def _first(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _extent_of_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[int]:
    """Return the first and the last line of the docstring; [] without a docstring."""
    if ast.get_docstring(node) is None:
        return []
    return [node.body[0].lineno, node.body[0].end_lineno or 0]


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    match = re.match(r".*?[.!?](?= |$)", paragraph)
    return match[0] if match else paragraph


def _short(file: str) -> str:
    """Shorten the path of a user's file to its last two parts: the page must not show where the user keeps it."""
    return file if file.startswith("hwfsdp/") else "/".join(PurePath(file).parts[-2:])
