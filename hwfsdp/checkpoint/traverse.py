"""State dicts as leaves at paths.

Containers are mappings, lists, tuples (also named tuples) and dataclasses. Everything else is a leaf, for example a tensor. A
path is the tuple of keys that lead to a leaf: keys of mappings (an int stays an int), positions, names of fields. This package
goes through state dicts with two functions: `map_leaves` builds the same containers again around new leaves, and `nodes_of`
lists leaves and containers. A container that contains itself has no end, so it is refused. So are more than `DEEPEST` containers,
one inside the other: functions that call themselves could not follow them.

`flatten_state_dict` names leaves by their paths, joined by dots. Such a name alone does not give the path back: "a.0" may belong
to a list or to a dict, with an int key or a str key. So the function also returns the structure of the containers. If
`unflatten_state_dict` gets only paths, it guesses the containers, as torch does. Empty containers are leaves of the flat dict.
Otherwise they would be lost, because they have no leaves.

`torch.Size` is a leaf, although it is a tuple: it holds only ints.

Left out: sets, because their members have no keys, and containers of unknown types. Both are leaves.

Values that each rank has for itself, such as the state of a random number generator, are wrapped in a `PerRank`:

    state = {"model": model.state_dict(), "rng": PerRank(torch.get_rng_state())}
    save(state, path)
    load(state, path)                           # as many ranks as saved
    torch.set_rng_state(state["rng"].value)

In the checkpoint it is a dict with one entry for each rank: state["rng"][0], state["rng"][1], and so on. A load by another number of
ranks has no right value for every rank, so it refuses a `PerRank`. With strict=False it leaves the value out, with a warning. Such a
load can also take a plain dict {rank: value} as target, and then decide for itself.

`objects_in` goes further than containers: to all objects that `copy.deepcopy` would copy, of any class.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Set
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint.error_messages import Attribute, KeyPath, refusal, refuse, show as show
from hwfsdp.compat import IS_PARAMETER
from hwfsdp.errors import FSDPError, UsageError


class CompanionMismatch(UsageError):
    """Two state dicts that should be alike differ in keys, kinds, shapes or dtypes. The message says where."""


class _Absent:
    """Stands for a companion that was not given. None cannot stand for it, because None is a value like any other."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()
DEEPEST = 200


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


def nodes_of(tree: Any, path: KeyPath = (), above: dict[int, KeyPath] | None = None) -> Iterator[Leaf]:
    """Yield the leaves and all containers from left to right, a container before its children. A shared object comes once for each path.

    Args:
        path, above: of a part of the tree: its path, and the containers around it, by id.

    Raises:
        UsageError: a container contains itself, or containers are nested too deep.
    """
    check_depth(path)
    above = {} if above is None else above
    if id(tree) in above:
        got = f"the {type(tree).__name__} that is {show(above[id(tree)])}, too"
        remedy = "Remove the reference back; state dicts are trees."
        refuse(path, "containers that do not contain themselves", got, remedy)
    yield Leaf(path, tree)
    above[id(tree)] = path
    for key, child in (items_of(tree) or {}).items():
        yield from nodes_of(child, (*path, key), above)
    del above[id(tree)]


def check_depth(path: KeyPath) -> None:
    if len(path) > DEEPEST:
        remedy = "Name entries by longer keys instead, or put them into a list."
        refuse(path[:3], f"at most {DEEPEST} containers, one inside the other", "more", remedy)


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


def put(tree: Any, path: KeyPath, value: Any) -> Any:
    """Put a value at a path of keys, and return the container: the same one, or a new one if it is a tuple."""
    old = child_of(tree, path[0])
    new = put(old, path[1:], value) if path[1:] else value
    if new is old:
        return tree
    if isinstance(tree, tuple):
        return rebuild(tree, {**dict(enumerate(tree)), path[0]: new})
    if hasattr(tree, "__setitem__"):
        tree[path[0]] = new
    else:
        object.__setattr__(tree, path[0], new)
    return tree


def place_of(path: KeyPath, tree: Any) -> tuple[int, KeyPath]:
    """Return the id of the container that takes a new value for `path`, and the keys inside it. Two paths may lead to one place.

    A tuple is made again, so the container above it takes the new tuple.

    Raises:
        UsageError: the container is read-only.
    """
    above, holder, n_above = tree, tree, 0
    for n, key in enumerate(path):
        if not isinstance(above, tuple):
            holder, n_above = above, n
        above = child_of(above, key)
    if isinstance(holder, Mapping) and not hasattr(holder, "__setitem__"):
        got = f"the read-only {type(holder).__name__}"
        refuse(path[:n_above], "a mapping that items can be assigned to", got, "Make it a dict.")
    return id(holder), path[n_above:]


def are_alike(one: Any, other: Any) -> bool:
    """True if two values are the same object, or have the same text. Two objects with tensors are not alike."""
    if one is other:
        return True
    has_tensors = any(isinstance(leaf.value, Tensor) for leaf in leaves_of([one, other]))
    return type(one) is type(other) and repr(one) == repr(other) and not has_tensors


_LIKE_THE_FIRST = "Make the second state dict from the first one's structure."


def _companions(path: KeyPath, tree: Any, items: dict[Any, Any], companion: Any) -> dict[Any, Any]:
    """Return the companion of each child."""
    if companion is ABSENT or companion is None:
        return dict.fromkeys(items, ABSENT)
    others = items_of(companion)
    if others is None or isinstance(companion, list | tuple) != isinstance(tree, list | tuple):
        expected = f"a container like the {type(tree).__name__} of the first state dict"
        refuse(path, expected, brief(companion), _LIKE_THE_FIRST, CompanionMismatch)
    if others.keys() != items.keys():
        missing, unknown = ([k for k in a if k not in b] for a, b in ((items, others), (others, items)))
        got = f"{missing} only in the first, {unknown} only in the second"
        refuse(path, "the same keys in both state dicts", got, _LIKE_THE_FIRST, CompanionMismatch)
    return others


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
    leaves: dict[KeyPath, Any] = {}
    for key, value in state_dict.items():
        path = tuple(mapping[key])
        if not path or path in leaves:
            _refuse_path(path)
        leaves[path] = value
    structure = getattr(mapping, "structure", None)
    like = {path: value for path, value in nodes_of({} if structure is None else structure)}
    return nest(leaves, lambda path, items: container_like(like.get(path), items))


def nest(leaves: Mapping[KeyPath, Any], make: Callable[[KeyPath, dict[Any, Any]], Any]) -> Any:
    """Build containers around leaves at their paths, from the inside out.

    Args:
        make: returns the container at a path, from its children by key. The keys are in the order of the leaves.

    Raises:
        UsageError: one path leads through the leaf of another.
    """
    children: dict[KeyPath, dict[Any, None]] = {(): {}}
    for path in leaves:
        check_depth(path)
        for n in range(len(path)):
            children.setdefault(path[:n], {})[path[n]] = None

    def build(path: KeyPath) -> Any:
        if path not in children:
            return leaves[path]
        if path in leaves:
            _refuse_path(path)
        return make(path, {key: build((*path, key)) for key in children[path]})

    return build(())


def _refuse_path(path: KeyPath) -> NoReturn:
    got = "one that is empty, or meets the path of another leaf"
    remedy = "Use the mapping that flatten_state_dict returned."
    refuse(f"the path {path!r} in the mapping", "a path of its own, of one key or more", got, remedy)


def container_like(like: Any, items: dict[Any, Any]) -> Any:
    """Return a container with these children, of the type of `like`. If `like` is None, the keys decide between list and dict."""
    shape = items_of(like) or {}
    items = {
        key: items[key] for key in (*(k for k in shape if k in items), *(k for k in items if k not in shape))
    }
    if like is None:
        like = [] if all(type(key) is int and key >= 0 for key in items) else {}
    if isinstance(like, list | tuple) and not hasattr(like, "_fields"):
        items = {n: items.get(n) for n in range(1 + max(items, default=-1))}
    elif not isinstance(like, Mapping):
        items = dict.fromkeys(shape) | items
    return rebuild(like, items)


# --- Values of ranks ---------------------------------------------------------------------------------------


class PerRank(dict[int, Any]):
    """A value in a state dict that belongs to this rank alone. It is a dict with one entry: {rank: value}.

    Args:
        value: anything that a checkpoint can hold, except DTensors. Each rank may have another type or shape.
        group: the process group that saves or loads; None: all ranks. Make a PerRank after `init_process_group`.
    """

    def __init__(self, value: Any, group: dist.ProcessGroup | None = None) -> None:
        super().__init__({dist.get_rank(group) if dist.is_initialized() else 0: value})

    @property
    def value(self) -> Any:
        """This rank's value. A load replaces it, or fills it if it is a tensor."""
        return next(iter(self.values()))


def find_per_rank(state_dict: Any, rank: int) -> list[KeyPath]:
    """Return the paths of every `PerRank`. Raise UsageError if one is not this rank's."""
    found = [(path, tree) for path, tree in containers_in(state_dict).items() if isinstance(tree, PerRank)]
    for path, tree in found:
        if set(tree) != {rank}:
            expected, got = f"the value of rank {rank}, which this process is in the group", f"{list(tree)}"
            remedy = "Make it after init_process_group, as PerRank(value, group)."
            refuse(path, expected, f"the value of rank {got}", remedy)
    return [path for path, _ in found]


def is_within(path: KeyPath, outer: Set[KeyPath]) -> bool:
    """True if the path leads into one of the containers at the paths `outer`."""
    return any(path[:n] in outer for n in range(len(path)))


# --- Objects of any class ----------------------------------------------------------------------------------

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
        check_depth(path)
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
        return _entries_of(value) + attributes_of(value)
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
    return parts + _entries_of(list(items or ())) + _entries_of(dict(pairs or ()))


def _entries_of(value: Any) -> Parts:
    if isinstance(value, Mapping):
        return [((key,), part) for item in value.items() for key, part in zip(item[:1] * 2, item)]
    if isinstance(value, np.ndarray):
        return _entries_of(value.ravel().tolist()) if value.dtype.hasobject else []
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
