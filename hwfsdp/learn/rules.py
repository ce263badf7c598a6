"""What no answer needs, found in its text before anything of it runs: doors to the frames, the memory and the code of others.

The guard sees these doors used (`trust`), but not all of them: a signal's handler is handed a frame, and nobody is told. A submission that
names one in plain words is not run. One that hides the words still meets the guard.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

from hwfsdp.learn.verdict import Finding

MODULES = {
    *(
        "ctypes",
        "_ctypes",
        "gc",
        "inspect",
        "marshal",
        "signal",
        "_signal",
        "subprocess",
        "_posixsubprocess",
        "opcode",
    ),
    *(
        "faulthandler",
        "tracemalloc",
        "mmap",
        "pickletools",
        "_testcapi",
        "_testinternalcapi",
        "_thread",
        "code",
        "codeop",
    ),
}
ATTRIBUTES = {
    *("_getframe", "_current_frames", "_current_exceptions", "settrace", "setprofile", "addaudithook"),
    *("f_back", "f_globals", "f_locals", "f_builtins", "tb_frame", "gi_frame", "cr_frame", "ag_frame"),
    *("__globals__", "__builtins__", "__closure__", "cell_contents", "__code__", "co_code", "co_consts"),
    *("__subclasses__", "CodeType", "FunctionType", "get_objects", "get_referrers", "get_referents"),
}
CHECKS = "hwfsdp.learn"


class Use(NamedTuple):
    """Something that an answer does without: what, and in which line."""

    what: str
    line: int


def check_rules(path: str | Path, text: str) -> None:
    """Reads a file that is Python.

    Raises:
        Finding: it uses what no answer needs; nothing of it counts.
    """
    if use := find_digging(text):
        raise Finding("blocked", f"{Path(path).name}, line {use.line}, {use.what}.")


def find_digging(text: str) -> Use | None:
    """The first use of something that no answer needs, if there is one; the text is Python."""
    found = [use for node in ast.walk(ast.parse(text)) if (use := _use_of(node)) is not None]
    return min(found, key=lambda use: use.line, default=None)


def _use_of(node: ast.AST) -> Use | None:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
        bad = [name for name in names if name.partition(".")[0] in MODULES or name.startswith(CHECKS)]
        return Use(f"imports {bad[0]}", node.lineno) if bad else None
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        whole = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        bad = [name for name in whole if name.startswith(CHECKS)]
        if module.partition(".")[0] in MODULES or bad:
            return Use(f"imports {bad[0] if bad else module}", node.lineno)
        bad = [alias.name for alias in node.names if alias.name in ATTRIBUTES]
        return Use(f"imports {bad[0]}", node.lineno) if bad else None
    if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
        return Use(f"uses {node.attr}", node.lineno)
    return None
