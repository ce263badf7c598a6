"""The objects that `copy.deepcopy` would copy from a state dict, of any class, and the path to each."""

from __future__ import annotations

import copy
import copyreg
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint.messages import Attribute, KeyPath, refusal
from hwfsdp.compat import IS_PARAMETER
from hwfsdp.errors import FSDPError

# A deep copy returns objects of these types without a copy.
ATOMIC: tuple[type, ...] = (int, float, bool, complex, bytes, str, range, property, type(None), type(...))
ATOMIC += (type(NotImplemented), types.FunctionType, types.BuiltinFunctionType, types.CodeType, ref)


class Found(NamedTuple):
    """An object in a state dict, and one path to it. `certain` is False if a `__deepcopy__` decides whether the object is copied."""

    path: KeyPath
    value: Any
    certain: bool = True


def objects_in(tree: Any) -> Iterator[Found]:
    """Yield all objects that a deep copy of `tree` would copy. Each object comes once, before its parts."""
    seen: dict[int, Any] = {}  # by id; it keeps the objects alive, so that ids stay valid
    todo = [Found((), tree)]
    while todo:
        path, value, certain = found = todo.pop()
        if type(value) in ATOMIC or id(value) in seen:
            continue
        seen[id(value)] = value
        yield found
        try:
            parts = _parts_of(value)
        except Exception as error:
            if certain:
                raise not_copied(path, value, error) from error
            continue
        certain = certain and (isinstance(value, Tensor) or getattr(value, "__deepcopy__", None) is None)
        inner = [Found((*path, *steps), part, certain) for steps, part in parts if type(part) not in ATOMIC]
        todo += reversed(inner)


Parts = list[tuple[KeyPath, Any]]


def _parts_of(value: Any) -> Parts:
    """Return the parts of a value that `copy.deepcopy` copies with it, and the steps of the path to each part."""
    if isinstance(value, type):
        return []
    if isinstance(value, Tensor):
        return attributes_of(value)
    plain = isinstance(value, tuple) or type(value) in (dict, list, set, frozenset)
    # A __deepcopy__ may do anything; probably it copies these parts.
    if plain or getattr(value, "__deepcopy__", None) is not None:
        return _items_of(value) + attributes_of(value)
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = reduce(value) if reduce is not None else value.__reduce_ex__(4)
    if isinstance(reduced, str):  # a global object
        return []
    _, args, state, items, pairs = (*reduced, None, None, None)[:5]
    states = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    parts: Parts = [((), arg) for arg in args]
    for each in states:
        named = isinstance(each, dict)
        parts += [((Attribute(key),), part) for key, part in each.items()] if named else [((), each)]
    return parts + _items_of(list(items or ())) + _items_of(dict(pairs or ()))


def _items_of(value: Any) -> Parts:
    if isinstance(value, Mapping):
        return [((key,), part) for item in value.items() for key, part in zip(item[:1] * 2, item)]
    if isinstance(value, np.ndarray):
        return _items_of(value.ravel().tolist()) if value.dtype.hasobject else []
    if isinstance(value, list | tuple | set | frozenset):
        return [((index,), item) for index, item in enumerate(value)]
    return []


def attributes_of(value: Any) -> Parts:
    """Return the entries of the object's `__dict__`, and the values of its slots, except torch's own."""
    attributes = getattr(value, "__dict__", None)
    slots = _slots_of(type(value))  # type: ignore[arg-type]  # a class can be hashed
    if not (slots or attributes):  # most tensors have neither
        return []
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    found |= {name: part for name, part in (attributes or {}).items() if name != IS_PARAMETER}
    return [((Attribute(name),), part) for name, part in found.items()]


@functools.lru_cache(maxsize=256)
def _slots_of(kind: type) -> list[str]:
    members = [item for base in kind.__mro__ if base is not DTensor for item in vars(base).items()]
    return [name for name, member in members if isinstance(member, types.MemberDescriptorType)]


def culprit(tree: Any, memo: dict[int, Any], error: Exception) -> FSDPError:
    """Make the error that names the innermost object in `tree` that cannot be copied."""
    path: KeyPath = ()
    found, tensors = tree, {key: value for key, value in memo.items() if isinstance(value, Tensor)}
    for steps, value, _ in objects_in(tree):
        try:
            copy.deepcopy(value, dict(tensors))
        except Exception as inner:
            path, found, error = steps, value, inner
    return not_copied(path, found, error)


def not_copied(path: KeyPath, value: Any, error: Exception) -> FSDPError:
    got = f"{type(value).__name__} ({' '.join(str(error).split())})"
    return refusal(path, "what can be copied", got, "Take it out, or store what it is made of instead.")
