"""State dicts as leaves at paths.

Containers are mappings, lists, tuples (also named tuples) and dataclasses. Everything else is a leaf, for example a tensor. A
path is the tuple of keys that lead to a leaf: keys of mappings (an int stays an int), positions, names of fields. This package
goes through state dicts with two functions: `map_leaves` builds the same containers again around new leaves, and `nodes_of`
lists leaves and containers. A container that contains itself has no end, so it is refused.

`flatten_state_dict` names leaves by their paths, joined by dots. Such a name alone does not give the path back: "a.0" may belong
to a list or to a dict, with an int key or a str key. So the function also returns the structure of the containers. If
`unflatten_state_dict` gets only paths, it guesses the containers, as torch does. Empty containers are leaves of the flat dict.
Otherwise they would be lost, because they have no leaves.

`torch.Size` is a leaf, although it is a tuple: it holds only ints.

Left out: sets, because their members have no keys, and containers of unknown types. Both are leaves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hwfsdp.checkpoint.messages import KeyPath, refuse
from hwfsdp.checkpoint.messages import show as show
from hwfsdp.errors import UsageError


class CompanionMismatch(UsageError):
    """Two state dicts that should be alike differ in keys, kinds, shapes or dtypes. The message says where."""


class _Absent:
    """Stands for a companion that was not given. None cannot stand for it, because None is a value like any other."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


def brief(value: Any) -> str:
    """Describe a leaf or container in a few words: its type, and for a tensor its shape and dtype."""
    if isinstance(value, Tensor):
        return f"{type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    items = items_of(value)
    return type(value).__name__ if items is None else f"{type(value).__name__} with keys {list(items)}"


def items_of(tree: Any) -> dict[Any, Any] | None:
    """Return the children by key, in order; None if `tree` is a leaf."""
    if isinstance(tree, Mapping):
        return dict(tree.items())
    if isinstance(tree, list | tuple):
        return None if isinstance(tree, torch.Size) else dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if hasattr(tree, f.name)}
    return None


def state_dict_of(given: Any) -> Any:
    """Return the state dict of a module, which stands for it; anything else is returned as it is."""
    return given.state_dict() if isinstance(given, nn.Module) else given


def child_of(tree: Any, key: Any) -> Any:
    """Return the child of a container under one of the keys that `items_of` returns."""
    return tree[key] if isinstance(tree, Mapping | list | tuple) else getattr(tree, key)


def container_kind(container: Any) -> str:
    """Return "list", "tuple" or "dict". A mapping or dataclass of any type is a dict."""
    return "list" if isinstance(container, list) else "tuple" if isinstance(container, tuple) else "dict"


def rebuild(tree: Any, items: dict[Any, Any]) -> Any:
    """Return a new container of the same type as `tree` with these children. Their keys are all or some of its keys, in its order."""
    if isinstance(tree, tuple):
        return type(tree)(*items.values()) if hasattr(tree, "_fields") else type(tree)(items.values())
    if isinstance(tree, Mapping) and not isinstance(tree, MutableMapping):
        expected, got = "a mapping that items can be assigned to", "one that is read-only"
        refuse(f"a {type(tree).__name__} in a state dict", expected, got, "Make it a dict.")
    # A copy keeps its default factory, its attributes, and fields that __init__ does not take.
    result = copy.copy(tree)
    if isinstance(tree, list):
        result[:] = items.values()
        return result
    if isinstance(tree, MutableMapping):
        if len(items) < len(tree):
            for key in tree.keys() - items.keys():
                del result[key]
        attributes = getattr(tree, "__dict__", {})
        for key, value in items.items():
            result[key] = value
            if key in attributes and attributes[key] is tree[key]:  # items of this type are attributes, too
                setattr(result, key, value)
        return result
    for name, value in items.items():
        object.__setattr__(result, name, value)  # frozen or not
    return result


# --- Going through -----------------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """A leaf or a container, and the keys that lead to it."""

    path: KeyPath
    value: Any


def map_leaves(
    fn: Callable[[KeyPath, Any, Any], Any], tree: Any, companion: Any = ABSENT, *, by_path: bool = False
) -> Any:
    """Build the containers of `tree` again, with `fn(path, leaf, companion's leaf)` in place of every leaf.

    An object that is found again (with the same companion) is not mapped again. So the result is one object again, too.

    Args:
        companion: has the same keys. A mapping may have them in another order and be of another type, and a list may stand for a
            tuple. For each leaf of `tree`, `fn` gets the companion's value at the same place; `ABSENT` below a None.
        by_path: the result of `fn` depends on the path. Then `fn` is called for every path, also for paths of empty containers, and
            one object at two paths becomes two results.

    Raises:
        UsageError: a container contains itself. CompanionMismatch: the companion has no such container at this place, or other keys.
    """
    for _ in nodes_of(tree):  # refuses cycles
        pass
    return _Descent(fn, by_path).map((), tree, companion)


class _Descent:
    """One pass down through the containers and up again; see `map_leaves`. A function that calls itself would keep all leaves alive."""

    def __init__(self, fn: Callable[[KeyPath, Any, Any], Any], by_path: bool) -> None:
        self.fn, self.by_path = fn, by_path
        # The values keep tree and companion alive, so that the ids in the keys stay valid.
        self.done: dict[tuple[int, int], tuple[Any, Any, Any]] = {}

    def map(self, path: KeyPath, tree: Any, companion: Any) -> Any:
        known = (id(tree), id(companion))
        if known in self.done:
            return self.done[known][0]
        items = items_of(tree)
        if items is None or (self.by_path and path and not items):
            result = self.fn(path, tree, companion)
        else:
            others = _companions(path, tree, items, companion)
            new = {key: self.map((*path, key), child, others[key]) for key, child in items.items()}
            result = rebuild(tree, new)
        if not self.by_path:
            self.done[known] = (result, tree, companion)
        return result


def nodes_of(tree: Any) -> Iterator[Leaf]:
    """Yield the leaves and all containers from left to right, a container before its children. A shared object comes once for each path.

    Raises:
        UsageError: a container contains itself.
    """
    return _nodes((), tree, {})


def _nodes(path: KeyPath, tree: Any, above: dict[int, KeyPath]) -> Iterator[Leaf]:
    """`above`: the containers that we are inside of, by id."""
    if id(tree) in above:
        got = f"the {type(tree).__name__} that is {show(above[id(tree)])}, too"
        remedy = "Remove the reference back; state dicts are trees."
        refuse(path, "containers that do not contain themselves", got, remedy)
    yield Leaf(path, tree)
    above[id(tree)] = path
    for key, child in (items_of(tree) or {}).items():
        yield from _nodes((*path, key), child, above)
    del above[id(tree)]


def leaves_of(tree: Any) -> list[Leaf]:
    """Return the leaves from left to right, including empty containers. A shared object comes once for each path.

    Raises:
        UsageError: a container contains itself.
    """
    items = ((node, items_of(node.value)) for node in nodes_of(tree))
    return [node for node, inner in items if inner is None or (node.path and not inner)]


def containers_in(tree: Any) -> dict[KeyPath, Any]:
    """Return all containers by path, the outermost one first."""
    return {path: value for path, value in nodes_of(tree) if items_of(value) is not None}


def traverse_state_dict(
    state_dict: Mapping[Any, Any],
    visitor: Callable[[KeyPath, Any], None],
    keep_traversing: Callable[[Any], bool] | None = None,
) -> None:
    """Call `visitor(path, leaf)` for every leaf, from left to right. An empty container is visited as a leaf.

    Args:
        keep_traversing: returns True for an entry of a list if the list must be taken apart because of it. If this function is
            given, a list is a leaf if it has no such entry, and no mapping at any depth. Tuples and dataclasses are always leaves
            then. None: lists, tuples and dataclasses are all taken apart.

    Raises:
        UsageError: a container contains itself.
    """
    leaves = leaves_of(state_dict)  # called in both cases, because it refuses cycles
    if keep_traversing is not None:
        leaves = _leaves_at((), state_dict, keep_traversing)
    for path, value in leaves:
        visitor(path, value)


def _leaves_at(path: KeyPath, tree: Any, keep_traversing: Callable[[Any], bool]) -> list[Leaf]:
    items = None if _is_one(tree, keep_traversing) else items_of(tree)
    if not items:
        return [Leaf(path, tree)] if path else []
    return [leaf for key, child in items.items() for leaf in _leaves_at((*path, key), child, keep_traversing)]


def _is_one(tree: Any, keep_traversing: Callable[[Any], bool]) -> bool:
    """True if the tree is visited as one leaf."""
    if isinstance(tree, Mapping) or not isinstance(tree, list):
        return not isinstance(tree, Mapping)
    inner = (isinstance(entry, Mapping | list) and not _is_one(entry, keep_traversing) for entry in tree)
    return not any(inner) and not any(map(keep_traversing, tree))


_LIKE_THE_FIRST = "Make the second state dict from the first one's structure."


def _companions(path: KeyPath, tree: Any, items: dict[Any, Any], companion: Any) -> dict[Any, Any]:
    """Return the companion of each child."""
    if companion is ABSENT or companion is None:
        return dict.fromkeys(items, ABSENT)
    others = items_of(companion)
    if others is None or _kind(companion) != _kind(tree):
        got = f"{type(tree).__name__} and {brief(companion)}"
        refuse(path, f"two of a kind, here {_kind(tree)}", got, _LIKE_THE_FIRST, CompanionMismatch)
    if others.keys() != items.keys():
        missing, unknown = ([k for k in a if k not in b] for a, b in ((items, others), (others, items)))
        got = f"{missing} only in the first, {unknown} only in the second"
        refuse(path, "the same keys in both state dicts", got, _LIKE_THE_FIRST, CompanionMismatch)
    return others


def _kind(container: Any) -> str:
    if isinstance(container, Mapping):
        return "mappings"
    return "sequences" if isinstance(container, list | tuple) else "dataclasses"


# --- Flat and back -----------------------------------------------------------------------------------------


class FlatMapping(dict[str, KeyPath]):
    """The path of each flat key, in order, and the structure of the containers.

    Attributes:
        structure: the containers of the state dict, with None in place of each leaf. It holds no tensor.
    """

    structure: Any = None


def flatten_state_dict(state_dict: Mapping[Any, Any]) -> tuple[dict[str, Any], FlatMapping]:
    """Return the leaves by name, and a mapping for `unflatten_state_dict`. A name is the keys of the path, joined by dots.

    Leaves are the same objects. Empty containers are leaves here, as copies.

    Raises:
        UsageError: two leaves would have the same name, or a container contains itself.
    """
    flat: dict[str, Any] = {}
    mapping = FlatMapping()

    def move_out(path: KeyPath, value: Any, _: Any) -> None:
        key = flat_key(path, mapping)
        flat[key] = value if items_of(value) is None else rebuild(value, {})
        mapping[key] = path

    mapping.structure = map_leaves(move_out, state_dict, by_path=True)
    return flat, mapping


def flat_key(path: KeyPath, known: Mapping[str, KeyPath]) -> str:
    """Return the keys of the path, joined by dots. Raise an error if this is a known key, of another path."""
    key = ".".join(map(str, path))
    if key in known:
        got = f"{key!r}; {show(known[key])} has the same name"
        refuse(path, "a flat key of its own", got, "Rename one of the two.")
    return key


def unflatten_state_dict(state_dict: Mapping[str, Any], mapping: Mapping[str, KeyPath]) -> Any:
    """Build the nested state dict again that `flatten_state_dict` took apart, with the present leaves of the flat dict.

    Container types, int keys, tuples and empty containers are the same as before. A container that was at two paths becomes two
    containers, because its leaves have two names and may now differ. Leaves that are one object stay one object.

    Args:
        state_dict: the flat dict, with any of the mapping's keys. A container without any leaf in it is left out. In lists and
            tuples, None takes the place of a missing entry if other entries follow it; in a named tuple or dataclass, of any
            missing entry.
        mapping: the second result of `flatten_state_dict`. Or a plain dict of paths, for example torch's. It does not have the types
            of the containers, so a container whose keys are all ints becomes a list, and any other container becomes a dict.

    Raises:
        UsageError: a key is not in the mapping, or one path leads through the leaf of another.
    """
    unknown = sorted(key for key in state_dict if key not in mapping)
    if unknown:
        remedy = "Add entries to the nested state dict, then flatten it again."
        refuse("unflatten_state_dict", "flat keys that the mapping has", f"{unknown}, unknown to it", remedy)
    root = _Branch()
    for key, value in state_dict.items():
        _hang(root, tuple(mapping[key]), value)
    structure = getattr(mapping, "structure", None)
    return root.grown({} if structure is None else structure)


class _Branch(dict[Any, Any]):
    """A container of the new state dict: its children by key, which are leaves or branches."""

    def grown(self, like: Any) -> Any:
        """Return a container with these children, of the type of `like`. If `like` is None, the keys decide between list and dict."""
        shape = items_of(like) or {}
        keys = [key for key in shape if key in self] + [key for key in self if key not in shape]
        items = {}
        for key in keys:
            child = self[key]
            items[key] = child.grown(shape.get(key)) if isinstance(child, _Branch) else child
        if like is None:
            like = [] if all(type(key) is int and key >= 0 for key in items) else {}
        if isinstance(like, list | tuple) and not hasattr(like, "_fields"):
            items = {n: items.get(n) for n in range(1 + max(items, default=-1))}
        elif not isinstance(like, Mapping):
            items = dict.fromkeys(shape) | items
        return rebuild(like, items)


def _hang(root: _Branch, path: KeyPath, value: Any) -> None:
    """Put a leaf at its path."""
    branch: Any = root
    for key in path[:-1]:
        branch = branch.setdefault(key, _Branch()) if isinstance(branch, _Branch) else branch
    if not path or not isinstance(branch, _Branch) or branch.setdefault(path[-1], value) is not value:
        got = "one that is empty, or meets the path of another leaf"
        remedy = "Use the mapping that flatten_state_dict returned."
        refuse(f"the path {path!r} in the mapping", "a path of its own, of one key or more", got, remedy)
