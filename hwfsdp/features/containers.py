"""Containers that a module gets as arguments and may write into, such as a list of losses.

A forward computes with other tensors than the caller passed: on the device, cast, or aliases that autograd watches. The core
rebuilds the containers of these tensors, so the module would write into copies. This feature lets the module have the caller's own
lists, dicts and dataclasses. For the time of the forward, these tensors are in them. After the forward, also after an exception,
the caller's tensors are in their place again, and all that the module wrote stays. Tuples and frozen dataclasses are still rebuilt, with
the caller's lists in them.

The module's writes are outputs of the module, too: a backward that reaches them calls pre-backward.

After a KeyboardInterrupt, torch calls no hook. Then the next forward puts the caller's tensors back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hwfsdp.core.precision import fields_of, map_tensors, set_item
from hwfsdp.core.state import Args, Kwargs


class RunningForward:
    """A forward of a module that has not ended, and the containers of its arguments.

    Attributes:
        containers: the containers, by id. visited: the ids of the containers that the newest call of `map_inputs` has visited; None
            before the first call.
        is_inner: True if the module has called itself. is_entered: True once the forward was prepared without an error.
        before: for tensors, and for tuples in which one was replaced: (what the module got, what the caller passed), by the id of
            what the module got.
    """

    def __init__(self) -> None:
        self.containers: dict[int, Any] = {}
        self.is_inner = self.is_entered = False
        self.visited: set[int] | None = None
        self.before: dict[int, tuple[Any, Any]] = {}

    def map_inputs(self, fn: Callable[[Tensor], Tensor], inputs: tuple[Args, Kwargs]) -> tuple[Args, Kwargs]:
        """Return the arguments with fn(t) in place of every tensor t. A container stays the same object, and is visited once."""
        self.visited = set()
        args, kwargs = inputs  # `kwargs` is a dict of this call, which no caller has
        return (
            tuple([self._map(fn, value) for value in args]),
            {name: self._map(fn, value) for name, value in kwargs.items()},
        )

    def _map(self, fn: Callable[[Tensor], Tensor], value: Any) -> Any:
        if value is None:  # most arguments by name are; this saves time
            return None
        new = map_tensors(fn, value, self._map_in_place)
        if new is not value:
            self.before[id(new)] = new, self.callers(value)
        return new

    def _map_in_place(self, fn: Callable[[Tensor], Tensor], container: Any) -> Any:
        assert self.visited is not None
        if id(container) not in self.visited:
            self.visited.add(id(container))
            self.containers[id(container)] = container
            for key, value in items_of(container):
                if isinstance(value, Tensor):
                    self.before.setdefault(id(value), (value, value))
                put(container, key, value, self._map(fn, value))
        return container

    def callers(self, value: Any) -> Any:
        """Return the caller's value in place of `value`, which the module may have got instead."""
        return self.before.get(id(value), (value, value))[1]

    def items(self) -> list[tuple[Any, Any, Any]]:
        """List (container, key, value) for every value in the containers, as they are now."""
        return [(c, key, value) for c in self.containers.values() for key, value in items_of(c)]

    def written(self) -> list[tuple[Any, Any, Any]]:
        """List the items that the module wrote."""
        known = {*self.before, *self.containers}
        return [item for item in self.items() if id(item[-1]) not in known]

    def give_back(self) -> None:
        """Put the caller's tensors back. A second call does nothing."""
        for container, key, value in self.items():
            put(container, key, value, self.callers(value))
        self.containers, self.before = {}, {}


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """Return the items of a list or a dict, or the fields of a dataclass, with their keys."""
    if isinstance(container, list):
        return [*enumerate(container)]
    return [*(container if isinstance(container, dict) else fields_of(container)).items()]


def put(container: Any, key: Any, old: Any, new: Any) -> None:
    """Replace an item, which is `old`, by `new`."""
    if new is old:
        return
    if isinstance(container, list):
        list.__setitem__(container, key, new)  # a class may forbid its own method
    elif isinstance(container, dict):
        set_item(container, key, new)
    else:
        object.__setattr__(container, key, new)
