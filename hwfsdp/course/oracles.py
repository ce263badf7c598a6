"""The part of the checks that a rank sees: the probe, and the functions that the probe calls.

Checks and probes of an exercise are in the same modules. So a module that defines a probe may also define or import the functions that
the judges compare with. A rank first loads the probe's modules. Before it loads the learner's file, `keep_only` deletes everything else
in these modules. Then the rank cannot read their files any more (`Confinement.close_files`).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hwfsdp.course.trust import codes_in

# the packages with checks; learners' code cannot read their files (`confinement`)
ROOMS = ("hwfsdp.course.checks", "hwfsdp.course.stations", "hwfsdp.course.capstone", "hwfsdp.course.lab")
_DEEPEST = 5  # levels of nested tables that are searched for functions


def keep_only(probe: Callable[..., Any]) -> None:
    """Delete the functions, classes and tables of the checks' modules that the probe cannot reach."""
    rooms = {name: module for name, module in sys.modules.items() if name.startswith(ROOMS)}
    kept = _reached(probe, rooms)
    for module_name, module in rooms.items():
        for name, value in list(vars(module).items()):
            own = getattr(value, "__module__", module_name).startswith(ROOMS)
            known = name.startswith("__") or isinstance(value, types.ModuleType)
            if own and not known and (module_name, name) not in kept:
                delattr(module, name)


def _reached(probe: Callable[..., Any], rooms: dict[str, types.ModuleType]) -> set[tuple[str, str]]:
    """Return (module, name) of everything that the probe's code may look up, directly or in the functions that it calls."""
    kept: set[tuple[str, str]] = set()
    seen: set[int] = set()
    todo: list[Any] = [probe]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for function in _functions_in(value):
            scope = function.__globals__
            names = {name for code in codes_in(function.__code__) for name in code.co_names}
            for module in (scope.get("__name__"), *_modules_named(names, scope, rooms)):
                if module not in rooms:
                    continue
                for name in names & vars(rooms[module]).keys():
                    kept.add((module, name))
                    todo.append(vars(rooms[module])[name])
    return kept


def _modules_named(
    names: Iterable[str], scope: dict[str, Any], rooms: dict[str, types.ModuleType]
) -> Iterator[str]:
    """Yield the names of the checks' modules that code reaches by a name: `runs.probe_gather`."""
    for name in names:
        found = scope.get(name)
        if isinstance(found, types.ModuleType) and found.__name__ in rooms:
            yield found.__name__


def _functions_in(value: Any, depth: int = _DEEPEST) -> Iterator[types.FunctionType]:
    """Yield the functions that a value is or holds: methods, functions inside decorators, entries of tables, fields."""
    if isinstance(value, types.FunctionType):
        yield value
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        inner: list[Any] = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        inner += [vars(value)["__wrapped__"]] if "__wrapped__" in vars(value) else []
    elif type(value).__module__.startswith(ROOMS):  # named tuples, too
        items = value if isinstance(value, tuple) else ()
        inner = [type(value), *getattr(value, "__dict__", {}).values(), *items]
    elif hasattr(value, "__wrapped__"):  # a cache around a function
        inner = [value.__wrapped__]
    elif isinstance(value, type):
        inner = [*vars(value).values(), *value.__bases__] if value.__module__.startswith(ROOMS) else []
    elif isinstance(value, property):
        inner = [value.fget, value.fset]
    elif isinstance(value, staticmethod | classmethod | types.MethodType):
        inner = [value.__func__]
    elif isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, tuple | list | set | frozenset):
        inner = list(value)
    elif type(value).__name__ == "partial":
        inner = [value.func, *value.args, *value.keywords.values()]
    else:
        return
    for each in inner if depth else ():
        yield from _functions_in(each, depth - 1)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
