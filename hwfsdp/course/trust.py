"""Find out who wrote the code of a frame: Python, a library or the package, or the learner.

The name of its file decides whether code is trusted. So a learner's code must not choose that name, and must not use trusted code as its
own. Each function that makes this possible raises an audit event (https://docs.python.org/3/library/audit_events.html). So does each
function that gives access to frames, functions and variables of others. `digging` describes the attempt in words.

Note [Through whom]
    An audit event does not say who caused it, but the calling frame does. For most events, only the direct caller counts, because
    libraries also cause them while a learner's code runs. Some functions of libraries return a forbidden object to their caller
    (`inspect.currentframe`, `cloudpickle.loads`). For these, the caller of the function counts.
"""

from __future__ import annotations

import dis
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hwfsdp.course.manifest import PACKAGE
from hwfsdp.course.rules import ATTRIBUTES, CLOSED, FRAMES, NAMES, is_below

# libraries may be outside of Python's own folders
_TORCH = os.path.dirname(torch.__file__) + os.sep
_BESIDE_TORCH = os.path.dirname(os.path.dirname(torch.__file__))
FOLDERS = (sys.prefix, sys.base_prefix, sys.exec_prefix, _BESIDE_TORCH, str(PACKAGE))
ROOTS = (*FOLDERS, "<hwfsdp.", "<frozen ")
FILLER = str(PACKAGE / "bodies.py")  # fills the holes of a student's edition
_FRAMES = {f"sys.{name}" for name in FRAMES}
_MEMORY = {"gc.get_objects", "gc.get_referrers", "gc.get_referents"}
_FRAME_OF = {"tb_frame", "gi_frame", "cr_frame", "ag_frame"}
_HAND_ON = {"currentframe", "stack", "trace", "walk_stack", "walk_tb", "getouterframes", "getinnerframes"}
_IMPORTLIB = "<frozen importlib"
# they stand between a learner's code and the libraries that it calls
_GATES = [str(PACKAGE / "course" / name) for name in ("doors.py", "lookups.py", "guard.py")]
_DECORATES = os.path.join(os.path.dirname(torch.__file__), "utils", "_contextlib.py")
_EVALUATES = ("/typing.py", "/timeit.py", "/runpy.py", "/inspect.py")
_OF_FROZEN = {"__setattr__", "__delattr__"}  # in text that `dataclasses` writes and runs


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code, and the codes of all functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def is_trusted(code: types.CodeType) -> bool:
    """True if the code is from a file of Python, of a library or of the package."""
    return code.co_filename.startswith(ROOTS)


def is_package(code: types.CodeType) -> bool:
    """True if the code is from a file of the package."""
    return code.co_filename.startswith((str(PACKAGE), "<hwfsdp."))


def digging(
    event: str,
    args: tuple[Any, ...],
    caller: types.FrameType,
    came_in: Callable[[types.CodeType], bool] = lambda code: False,
) -> str | None:
    """Describe an audit event that a learner's code may not cause; None for all other events.

    Args:
        caller: the frame that raised the event. came_in: see `doors`.
    """
    direct = not is_trusted(caller.f_code)
    if event == "compile":
        named = args[1] if isinstance(args[1], str) else ""
        disguised = direct and named.startswith(ROOTS)
        return "compiles code under a name that is not its own" if disguised else None
    if event == "exec":
        return None if came_in(args[0]) else _running(args[0], caller)
    if event == "function.__new__":
        return "makes a function of code of others" if direct and is_trusted(args[0]) else None
    if event == "code.__new__":
        return "makes code out of bytes" if _is_behind(caller) and not names_wrapper(caller) else None
    if event == "marshal.loads":
        brought = not _is_known_import(caller) and _is_behind(caller, imports=True)
        return "runs code that was compiled elsewhere" if brought else None
    if event == "pickle.find_class":
        closed = is_below(args[0], CLOSED) or args[1] in NAMES.get(args[0], ())
        return f"unpickles {args[0]}.{args[1]}" if closed and _is_behind(caller, imports=True) else None
    if event in _FRAMES:
        return f"looks into the frames of others ({event})" if direct or _handed_on(caller) else None
    if event in _MEMORY:
        return f"looks for objects of others ({event})" if direct else None
    if event == "object.__getattr__" and args[1] in _FRAME_OF:
        return f"looks into the frames of others ({args[1]})" if direct or _handed_on(caller) else None
    return _native(event, args, caller)


def _native(event: str, args: tuple[Any, ...], caller: types.FrameType) -> str | None:
    """Describe an event through which a learner's code gets native code."""
    loads = event in ("ctypes.dlopen", "ctypes.dlsym") and asked_by_learner(caller)
    if loads or (event.startswith("ctypes.") and _is_behind(caller, "/ctypes/")):
        return "calls native code by itself (ctypes)"
    if event == "import" and isinstance(args[1], str) and not _is_of_library(args[1]):
        return "loads native code"
    return None


def _running(code: types.CodeType, caller: types.FrameType) -> str | None:
    """Describe the run of code that did not come in by the door, if a learner's code may not run it.

    A library may write the words of a learner into text that it runs, as `dataclasses` does with the names of fields.
    """
    file, direct = caller.f_code.co_filename, not is_trusted(caller.f_code)
    if is_trusted(code):
        return "runs code of others by hand" if direct else None
    is_text = code.co_filename.startswith("<") and not direct and not file.endswith(_EVALUATES)
    of_library = file.startswith(_BESIDE_TORCH) and not file.startswith(_TORCH)
    if not is_text or (of_library and asked_by_learner(caller)):
        return "runs code that nobody has seen"
    for each in codes_in(code) if asked_by_learner(caller) else ():
        called = {i.argval for i in dis.get_instructions(each) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        found = (FRAMES | ATTRIBUTES - _OF_FROZEN) & {*each.co_names} | called & {*NAMES["builtins"]}
        if found:
            return f"lets a library look up {min(found)}"
    return None


def asked_by_learner(frame: types.FrameType | None) -> bool:
    """True if a learner's code called libraries, and they came to this frame. Imports and the package in between ask for themselves."""
    while frame is not None and is_trusted(frame.f_code):
        file, asks = frame.f_code.co_filename, is_package(frame.f_code)
        if (asks and file not in _GATES) or file.startswith(_IMPORTLIB):
            return False
        frame = frame.f_back
    return frame is not None


def names_wrapper(frame: types.FrameType) -> bool:
    """True if torch names the code of a wrapper that it has just made, as `@torch.no_grad()` does since 2.15."""
    outer = frame.f_back
    return outer is not None and frame.f_code.co_filename == outer.f_code.co_filename == _DECORATES


def _is_behind(frame: types.FrameType | None, through: str = "", imports: bool = False) -> bool:
    """True if a learner's code made the call, directly or through the frames in between.

    Args:
        through: the frames in between must be of files with this text in their name. imports: these frames may be imports.
    """
    while frame is not None:
        code = frame.f_code
        if not is_trusted(code):
            return True
        if through not in code.co_filename or (not imports and code.co_filename.startswith(_IMPORTLIB)):
            return False
        frame = frame.f_back
    return False


def _handed_on(caller: types.FrameType) -> bool:
    """True if a function returned the forbidden object to a learner's code. See Note [Through whom]."""
    frame: types.FrameType | None = caller
    while frame is not None and frame.f_code.co_name in _HAND_ON:
        frame = frame.f_back
    return frame is not None and frame is not caller and not is_trusted(frame.f_code)


def _is_known_import(caller: types.FrameType) -> bool:
    """True if Python, or a student's edition (`bodies`), reads a compiled file of Python, of a library or of the package."""
    code = caller.f_code
    path: Any = None
    if code.co_filename.startswith(_IMPORTLIB) and code.co_name == "_compile_bytecode":
        path = caller.f_locals.get("bytecode_path")
    elif code.co_filename == FILLER and code.co_name == "_unpack":
        path = caller.f_locals.get("path")
    return type(path) in (str, type(PACKAGE)) and _is_of_library(path)


def _is_of_library(path: Any) -> bool:
    return str(os.path.realpath(path)).startswith(tuple(map(os.path.realpath, FOLDERS)))
