"""Check the attributes that a library looks up or sets for a learner's code.

`doors` checks each attribute that a learner's code itself reads or sets. But a function of a library may take the name of an attribute:
`torch.fx.Interpreter.fetch_attr("__globals__")`, `GetAttrKey("__globals__").get(function)`. Such functions call the built-in `getattr`
or `setattr`. So this module replaces both. If the code that calls them does not contain the name, somebody else has chosen it. Then
these accesses are refused:

    getattr    code and variables of functions, generators and frames. If a learner's code asks, also all names of a module, and
               everything in an instrument
    setattr    if a learner's code asks: attributes of modules, classes and functions of the package and of torch, and of instruments
"""

from __future__ import annotations

import builtins
import sys
import types
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hwfsdp.course.rules import ATTRIBUTES, BUSY, FRAMES, INSTRUMENTS, is_below, is_stream
from hwfsdp.course.trust import asked_by_learner, is_package, is_trusted

_WORDS = FRAMES | ATTRIBUTES
# metaclasses; their classes are safe in a set
_KINDS = frozenset({type, ABCMeta, type(Tensor), type(nn.Parameter)})
_ALL_NAMES = ("__dict__", "__builtins__", "__subclasses__")
_CODE = (  # kinds of objects that lead to code and variables
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType),
    *(types.FrameType, types.TracebackType, types.CellType),
    *(types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
)


def watch(refuse: Callable[[str], Any]) -> None:
    """Replace the built-in `getattr` and `setattr` of this process.

    Args:
        refuse: called with a text that says what was tried; it does not return.
    """
    look_up, set_to, frame_of = getattr, setattr, sys._getframe
    checked = _WORDS | {*_ALL_NAMES}
    plain: set[type] = set()  # classes whose objects are not instruments

    def checked_getattr(value: Any, name: str, /, *default: Any) -> Any:
        kind = type(value)
        if type(name) is str and name not in checked and type(kind) in _KINDS and kind in plain:
            return look_up(value, name, *default)  # almost always, as this is called very often
        word = _plain(name)
        if not _is_instrument(value) and type(kind) in _KINDS:
            plain.add(kind)
        if word in checked or _is_instrument(value):
            caller = frame_of(1)
            if not _means(caller.f_code, word) and (
                _leads_to_code(value, word)
                or ((_is_instrument(value) or _holds_names(value, word)) and asked_by_learner(caller))
            ):
                refuse(f"lets a library look up {word}")
        return look_up(value, word, *default)

    def checked_setattr(value: Any, name: str, new: Any, /) -> None:
        word = _plain(name)
        if _is_instrument(value) or _is_fixed(value):
            caller = frame_of(1)
            if not _means(caller.f_code, word) and asked_by_learner(caller):
                refuse(f"lets a library exchange {word}")
        set_to(value, word, new)

    vars(builtins).update(getattr=checked_getattr, setattr=checked_setattr)
    for name in BUSY & sys.modules.keys():
        vars(sys.modules[name]).update(getattr=look_up, setattr=set_to)


def _is_instrument(value: Any) -> bool:
    kind = type(value)
    home = str(kind.__module__)
    return home.startswith("hwfsdp") and (is_stream(kind) or is_below(home, INSTRUMENTS))


def _plain(name: Any) -> Any:
    """Return a name as a plain `str`, which cannot change between the check and the use."""
    return str.__str__(name) if isinstance(name, str) else name


def _means(code: types.CodeType, word: str) -> bool:
    """True if this code is of a library and contains the word, or is of the package, where `doors` has checked it."""
    texts = code.co_consts
    found = word in texts or any(type(each) is tuple and word in each for each in texts)
    return is_package(code) or (found and is_trusted(code))


def _leads_to_code(value: Any, word: str) -> bool:
    if type(value) is type:
        return value in _CODE and word in _ALL_NAMES
    return isinstance(value, _CODE) and word in _WORDS


def _holds_names(value: Any, word: str) -> bool:
    return word in _ALL_NAMES and (isinstance(value, types.ModuleType) or value is type or value is object)


def _is_fixed(value: Any) -> bool:
    """True if this is a module, or a class or function that a module defines, of the package or of torch."""
    if type(value) is types.ModuleType:
        return is_below(value.__name__, ("hwfsdp", "torch"))
    if not isinstance(value, type | types.FunctionType):
        return False
    home = sys.modules.get(str(value.__module__))
    is_theirs = home is not None and is_below(home.__name__, ("hwfsdp", "torch"))
    return is_theirs and vars(home).get(value.__name__) is value
