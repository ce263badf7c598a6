"""Removed function bodies as bytecode in a student's edition (there `hwfsdp.bodies`): they run, but do not show their text.

holes     every module with holes ends in `bodies.fill(__name__)`, so that all of it works before the holes are written;
          the holes of the exercise that is being checked stay blank (`left_blank`)
checks    a module of `course.checks` keeps the first paragraph of its docstring and `bodies.load(__name__)`, as an oracle may
          be an answer in other words
"""

from __future__ import annotations

import importlib.util
import marshal
import sys
import types
from pathlib import Path
from typing import Any

SUFFIX = ".body"
FOLDER = Path(__file__).parent / "compiled"
left_blank: set[tuple[str, str]] = set()  # (module, function): functions that `fill` leaves blank


def pack(code: types.CodeType) -> bytes:
    """Return the code of a function or a module as the bytes of a file."""
    return importlib.util.MAGIC_NUMBER + marshal.dumps(code)


def fill(module: str) -> None:
    """Give the blank functions of a new module their bodies, except the functions in `left_blank`.

    Raises:
        ImportError: they were compiled for another version of Python.
    """
    for path in sorted(FOLDER.glob(f"{module}-*{SUFFIX}")):
        name = path.name.removeprefix(f"{module}-").removesuffix(SUFFIX)
        if (module, name) not in left_blank:
            find_function(vars(sys.modules[module]), name).__code__ = _unpack(path)


def load(module: str) -> None:
    """Run the compiled text of a module that is being imported. The compiled file is beside the module.

    Raises:
        ImportError: it was compiled for another version of Python.
    """
    names = vars(sys.modules[module])
    exec(_unpack(Path(names["__file__"]).with_suffix(SUFFIX)), names)


def _unpack(path: Path) -> types.CodeType:
    data, size = path.read_bytes(), len(importlib.util.MAGIC_NUMBER)
    if data[:size] != importlib.util.MAGIC_NUMBER:
        raise ImportError(
            f"this edition of hwfsdp was made for another version of Python than {sys.version.split()[0]}: see its README"
        )
    code: types.CodeType = marshal.loads(data[size:])
    return code


def find_function(names: Any, name: str) -> types.FunctionType:
    """Return the function with this dotted name that the module itself defines, below its decorators.

    Raises:
        LookupError: there is none.
    """
    *classes, attribute = name.split(".")
    for inner in classes:
        names = vars(names[inner])
    found = names[attribute]
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    while getattr(getattr(found, "__code__", None), "co_qualname", None) != name:
        found = getattr(found, "__wrapped__", None)
        if found is None:
            raise LookupError(f"no function {name} below its decorators")
    function: types.FunctionType = found
    return function
