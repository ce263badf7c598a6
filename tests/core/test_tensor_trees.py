"""Tensors inside structures: found in order, replaced in place, and nothing else changed."""

from __future__ import annotations

import dataclasses
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from hwfsdp.core.precision import map_tensors, replace_tensors_with_grad, tensors_with_grad


def one(value: float = 1.0) -> Tensor:
    return torch.tensor([value])


def add_ten(tensor: Tensor) -> Tensor:
    return tensor + 10


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


def visited(tree: Any) -> list[Tensor]:
    """Return the tensors of the tree in the order in which `map_tensors` visits them."""
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, tree)
    return found


# --- Structures that a forward may take or return ----------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any = None


class ListOfOurs(list):
    pass


@dataclass
class Plain:
    hidden: Any
    label: str = "kept"
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Frozen:
    hidden: Any
    label: str = "kept"


@dataclass(slots=True)
class Slotted:
    hidden: Any
    label: str = "kept"


@dataclass
class Computed:
    """A dataclass that a second call of `__init__` or `__post_init__` would change, with a field that is not in the constructor."""

    hidden: Any
    scale: InitVar[int] = 1
    cache: Any = field(init=False)

    def __post_init__(self, scale: int) -> None:
        self.hidden = self.hidden * scale
        self.cache = None


class ModelOutput(OrderedDict):
    """A dict whose items are attributes as well, as in Hugging Face's transformers. None is not an item."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if getattr(self, f.name) is not None:
                self[f.name] = getattr(self, f.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


@dataclass
class Logits(ModelOutput):
    logits: Any = None
    loss: Any = None
    hidden: Any = None


class AttributeDict(dict):
    """A dict with another constructor, whose items are attributes as well."""

    def __init__(self, names: str, value: Any) -> None:
        super().__init__()
        self.note = "kept"
        for name in names:
            self[name] = value
            self.__dict__[name] = value


# --- One at a time -----------------------------------------------------------------------------------------

HOLDERS: dict[str, Callable[[Tensor], Any]] = {  # others are in `trees`
    "subclass of list": lambda t: ListOfOurs([t]),
    "dict with a constructor of its own": lambda t: AttributeDict("ab", t),
    "result of an operator": lambda t: torch.max(t[None], 0),
    "dataclass with slots": lambda t: Slotted(t),
    "dataclass with a computed field": Computed,
    "model output": lambda t: Logits(logits=t, hidden=(t, t)),
    "packed sequence": lambda t: pack_sequence([t]),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_every_tensor_is_replaced_in_a_structure_of_the_same_type_and_the_argument_keeps_its_own(hold):
    tree = hold(one())
    before = visited(tree)
    mapped = map_tensors(lambda t: t + 10 if t.is_floating_point() else t, tree)
    floats = [t for t in visited(mapped) if t.is_floating_point()]
    assert floats and all(t.tolist() in (11.0, [11.0]) for t in floats)
    assert type(mapped) is type(tree)
    assert len(visited(mapped)) == len(before)
    assert all(a is b for a, b in zip(before, visited(tree), strict=True))
    assert map_tensors(unchanged, tree) is tree


# --- Special cases of one kind -----------------------------------------------------------------------------


def test_model_outputs_agree_as_dict_and_as_attributes_and_are_visited_once() -> None:
    tree = Logits(logits=one(1), hidden=(one(2), one(3)))
    assert [t.item() for t in visited(tree)] == [1, 2, 3]
    mapped = map_tensors(add_ten, tree)
    assert list(mapped) == ["logits", "hidden"]
    assert mapped.loss is None
    assert mapped["logits"] is mapped.logits
    assert mapped["hidden"] is mapped.hidden
    assert [t.item() for t in (mapped.logits, *mapped.hidden)] == [11, 12, 13]


def test_packed_sequences_keep_lengths_and_order_and_move_without_their_batch_sizes() -> None:
    packed = pack_sequence([one(1), torch.tensor([2.0, 3.0])], enforce_sorted=False)
    mapped = map_tensors(lambda tensor: tensor + 10 if len(tensor) == 3 else tensor, packed)
    assert isinstance(mapped, PackedSequence)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(mapped, batch_first=True)
    assert padded.tolist() == [[11, 0], [12, 13]]
    assert lengths.tolist() == [1, 2]

    moved = map_tensors(lambda tensor: tensor.to("meta"), packed)
    assert moved.data.is_meta and moved.sorted_indices.is_meta and moved.unsorted_indices.is_meta
    assert moved.batch_sizes is packed.batch_sizes


# --- Any structure -----------------------------------------------------------------------------------------

leaves = st.one_of(
    st.integers(0, 9).map(lambda i: torch.tensor([float(i)], requires_grad=i % 2 == 1)),
    st.integers(0, 9).map(lambda i: torch.tensor([i])),
    st.none(),
    st.text(max_size=2),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(lambda d: defaultdict(int, d)),
        st.builds(Pair, inner, inner),
        st.builds(Plain, inner, more=st.dictionaries(st.text(max_size=2), inner, max_size=2)),
        st.builds(Frozen, inner),
    ),
    max_leaves=12,
)


def flattened(tree: Any) -> list[Any]:
    """Return the tree as a complete flat list of types, keys and leaves, tensors included."""
    if dataclasses.is_dataclass(tree):
        return [type(tree), *flattened(vars(tree))]
    if isinstance(tree, dict):
        return [type(tree), *(part for item in tree.items() for part in (item[0], *flattened(item[1])))]
    if isinstance(tree, list | tuple):
        return [type(tree), len(tree), *(part for item in tree for part in flattened(item))]
    return [tree]


@given(trees)
def test_mapping_any_tree_changes_its_tensors_from_left_to_right_and_nothing_else(tree: Any) -> None:
    before, after = flattened(tree), flattened(map_tensors(add_ten, tree))
    assert all(map(operator.is_, before, flattened(tree))), "the argument has changed"
    for old, new in zip(before, after, strict=True):
        assert new.item() == old.item() + 10 if isinstance(old, Tensor) else new == old
    tensors = [part for part in before if isinstance(part, Tensor)]
    assert all(a is b for a, b in zip(visited(tree), tensors, strict=True))
    assert map_tensors(unchanged, tree) is tree


@given(trees)
def test_tensors_with_grad_require_grad_and_can_be_exchanged_in_their_order(tree: Any) -> None:
    tensors = [part for part in flattened(tree) if isinstance(part, Tensor)]
    found = tensors_with_grad(tree)
    assert all(a is b for a, b in zip(found, [t for t in tensors if t.requires_grad], strict=True))
    numbered = [torch.tensor(float(i)) for i in range(len(found))]
    exchanged = visited(replace_tensors_with_grad(tree, numbered))
    queue = iter(numbered)
    assert all(
        new is (next(queue) if old.requires_grad else old)
        for old, new in zip(tensors, exchanged, strict=True)
    )
