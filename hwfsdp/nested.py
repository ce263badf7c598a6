"""Tensors inside whatever a forward takes or returns.

Modules take and return tensors wrapped in tuples, lists, dicts, named tuples and dataclasses. `map_tensors`
rebuilds such a structure with every tensor replaced; a part in which nothing changed is handed back as the same
object, so structures that FSDP has no business with pass through untouched.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """`tree` with `fn(t)` in place of every tensor t, visited from left to right.

    Dict keys, sets, strings and objects of unknown types are leaves and stay as they are.
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    if type(tree) in (tuple, list):  # what the rest would find out, too, later
        return _map_sequence(fn, tree) if tree else tree
    if not tree and type(tree) is dict:
        return tree
    if isinstance(tree, PackedSequence):
        data = fn(tree.data)
        return tree if data is tree.data else tree._replace(data=data)
    if isinstance(tree, dict):  # before dataclasses: the output classes of model libraries are both
        return _map_dict(fn, tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(fn, tree)
    if isinstance(tree, list | tuple):
        return _map_sequence(fn, tree)
    return tree


def _map_dict(fn: Callable[[Tensor], Tensor], tree: dict[Any, Any]) -> Any:
    new = {key: map_tensors(fn, value) for key, value in tree.items()}
    if all(new[key] is tree[key] for key in tree):
        return tree
    result = copy.copy(tree)  # of the same class, with its default factory, its order and its attributes
    attributes = getattr(tree, "__dict__", {})
    for key, value in new.items():
        result[key] = value
        if key in attributes and attributes[key] is tree[key]:  # where items are attributes, too
            setattr(result, key, value)
    return result


def _map_dataclass(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    old = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if hasattr(tree, f.name)}
    new = {name: map_tensors(fn, value) for name, value in old.items()}
    if all(new[name] is old[name] for name in old):
        return tree
    result = copy.copy(tree)  # not `replace`: fields may be init=False, and __post_init__ ran already
    for name, value in new.items():
        object.__setattr__(result, name, value)
    return result


def _map_sequence(fn: Callable[[Tensor], Tensor], tree: list[Any] | tuple[Any, ...]) -> Any:
    new = [map_tensors(fn, value) for value in tree]
    if all(map(operator.is_, new, tree)):
        return tree
    if hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*new)
    return type(tree)(new)


def tensors_with_grad(tree: Any) -> list[Tensor]:
    """The tensors in `tree` that require grad, from left to right."""
    if isinstance(tree, Tensor):
        return [tree] if tree.requires_grad else []
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(collect, tree)
    return found


def replace_tensors_with_grad(tree: Any, replacements: list[Tensor]) -> Any:
    """`tree` with its tensors that require grad exchanged, in the order of `tensors_with_grad`."""
    queue = iter(replacements)
    return map_tensors(lambda tensor: next(queue) if tensor.requires_grad else tensor, tree)
