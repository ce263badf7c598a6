"""State dicts as leaves at paths: flattening and back, and containers that keep their types.

The oracles are equality with the input, and torch's private helpers where they lose nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import FORMATS, Pair, Record
from torch import nn
from torch.distributed import _state_dict_utils as torchs
from torch.distributed.checkpoint import _traverse as torchs_checkpoint

from hwfsdp.checkpoint import async_save, parts
from hwfsdp.checkpoint.staging import StateDictStager
from hwfsdp.checkpoint.state_dict import gather_state_dict
from hwfsdp.checkpoint.traverse import (
    ABSENT,
    CompanionMismatch,
    flatten_state_dict,
    leaves_of,
    map_leaves,
    traverse_state_dict,
    unflatten_state_dict,
)
from hwfsdp.errors import UsageError

# If Hypothesis retries a draw, it describes the strategy. The description of nested containers is long.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    computed: Any = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "computed", self.a)


class ListOfOurs(list):
    pass


KEYS = st.one_of(st.text("abc", min_size=1, max_size=3), st.integers(0, 3))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3))


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    # Keys "1" and 1 in one dict have the same flat key, which is an error of its own.
    items = st.lists(st.tuples(KEYS, children), max_size=3, unique_by=lambda item: str(item[0]))
    values = st.lists(children, max_size=3)
    return st.one_of(
        items.map(dict),
        items.map(OrderedDict),
        items.map(lambda pairs: defaultdict(list, pairs)),
        values,
        values.map(tuple),
        values.map(ListOfOurs),
        st.tuples(children, children).map(lambda pair: Pair(*pair)),
        st.tuples(children, children).map(lambda pair: Record(*pair)),
        children.map(Frozen),
    )


TREES = st.recursive(LEAVES, containers, max_leaves=12)
STATE_DICTS = st.lists(st.tuples(KEYS, TREES), max_size=4, unique_by=lambda item: str(item[0])).map(dict)


def types(tree: Any) -> Any:
    """Return the tree with types in place of leaves, and with the types of containers, which == does not compare."""
    if isinstance(tree, dict):
        return type(tree), [(key, types(value)) for key, value in tree.items()]
    if isinstance(tree, list | tuple):
        return type(tree), [types(value) for value in tree]
    if dataclasses.is_dataclass(tree):
        return type(tree), [types(getattr(tree, f.name)) for f in dataclasses.fields(tree)]
    return type(tree)


# --- Flat and back -----------------------------------------------------------------------------------------


@given(STATE_DICTS)
def test_unflatten_undoes_flatten_and_map_leaves_copies_every_container(state_dict: dict[Any, Any]) -> None:
    flat, mapping = flatten_state_dict(state_dict)
    copied = map_leaves(lambda path, leaf, _: leaf, state_dict)
    assert copied is not state_dict
    for back in (
        copied,
        *(unflatten_state_dict(flat, m) for m in (mapping, pickle.loads(pickle.dumps(mapping)))),
    ):
        assert back == state_dict and types(back) == types(state_dict)


STR_KEYS = st.text("abc", min_size=1, max_size=2)
PLAIN = st.dictionaries(
    STR_KEYS,
    st.recursive(
        LEAVES,
        lambda children: st.one_of(
            st.dictionaries(STR_KEYS, children, min_size=1, max_size=3),
            st.lists(children, min_size=1, max_size=3),
        ),
        max_leaves=10,
    ),
    max_size=4,
)


@given(PLAIN, st.data())
def test_flat_keys_paths_and_visits_are_torchs_where_torch_loses_nothing(
    state_dict: dict[str, Any], data: Any
) -> None:
    flat, mapping = flatten_state_dict(state_dict)
    assert (flat, mapping) == torchs._flatten_state_dict(state_dict)
    some = {key: value for key, value in flat.items() if data.draw(st.booleans())}
    expected = torchs._unflatten_state_dict(some, mapping)
    for known in (mapping, dict(mapping)):
        assert unflatten_state_dict(state_dict=some, mapping=known) == expected
    visits: list[Any] = []
    theirs: list[Any] = []
    traverse_state_dict(state_dict, lambda *visit: visits.append(visit))
    torchs._traverse_state_dict(state_dict, lambda *visit: theirs.append(visit))
    assert visits == theirs


def test_two_leaves_with_the_same_flat_key_are_refused_by_both_paths() -> None:
    said = r"^state_dict\['a.b'\]: expected a flat key of its own; got 'a.b'; state_dict\['a'\]\['b'\] has the same"
    with pytest.raises(UsageError, match=said):
        flatten_state_dict({"a": {"b": 1}, "a.b": 2})


@given(PLAIN)
def test_lists_without_a_value_to_visit_are_visited_as_a_whole(state_dict: dict[str, Any]) -> None:
    """The oracle is torch's other traversal, which its checkpoints use."""
    for wanted in (str, ()):
        found: list[list[Any]] = []
        for traverse in (traverse_state_dict, torchs_checkpoint.traverse_state_dict):
            found.append([])
            traverse(state_dict, lambda *visit: found[-1].append(visit), lambda v: isinstance(v, wanted))
        assert found[0] == found[1]


def test_missing_items_leave_containers_of_their_types() -> None:
    state_dict = OrderedDict(
        state={0: {"m": 1, "v": 2}, 10: {"m": 3}},
        pair=Pair(1, [2, 3]),
        record=Record(1, (4, 5, 6)),
        list=ListOfOurs([1, {"x": 2}, 3]),
        default=defaultdict(list, a=1, b=2),
    )
    flat, mapping = flatten_state_dict(state_dict)
    gone = "state.0.m state.10.m pair.0 record.first record.second.2 list.0 list.2 default.a".split()
    some = unflatten_state_dict({key: flat[key] for key in reversed(flat) if key not in gone}, mapping)
    expected = OrderedDict(
        state={0: {"v": 2}},
        pair=Pair(None, [2, 3]),
        record=Record(None, (4, 5)),
        list=ListOfOurs([None, {"x": 2}]),
        default=defaultdict(list, b=2),
    )
    assert some == expected and types(some) == types(expected) and list(some) == list(expected)
    assert some["default"]["new"] == []


def test_flat_keys_that_the_mapping_does_not_know_are_refused() -> None:
    flat, mapping = flatten_state_dict({"a": [1, 2]})
    for known in (mapping, dict(mapping)):
        with pytest.raises(UsageError, match=r"expected flat keys that the mapping has; got \['b'\], unk"):
            unflatten_state_dict({"a.0": 1, "b": 2}, known)


def test_paths_that_meet_are_refused() -> None:
    for paths in ([("x",), ("x", "y")], [("x", "y"), ("x",)], [("x",), ("x",)], [()]):
        flat = {str(n): object() for n in range(len(paths))}
        with pytest.raises(UsageError, match="in the mapping: expected a path of its own"):
            unflatten_state_dict(flat, dict(zip(flat, paths)))


# --- Sharing and cycles ------------------------------------------------------------------------------------


def test_a_cycle_is_an_error_with_both_paths() -> None:
    in_tuple: dict[str, Any] = {"a": ([],)}
    in_tuple["a"][0].append(in_tuple["a"])
    record = Record(1)
    record.second = {7: record}
    for state_dict, again, first in (
        (in_tuple, "state_dict['a'][0][0]", "state_dict['a']"),
        ({"r": record}, "state_dict['r']['second'][7]", "state_dict['r']"),
    ):
        for go in (leaves_of, flatten_state_dict):
            with pytest.raises(UsageError) as info:
                go(state_dict)
            assert str(info.value).startswith(f"{again}: ")
            assert f"that is {first}, too." in str(info.value) and "\n" not in str(info.value)


def nested(depth: int) -> Any:
    return functools.reduce(lambda inner, _: {"a": inner}, range(depth), torch.ones(1))


def test_nesting_that_goes_too_deep_is_refused_in_words_and_other_nesting_works(tmp_path: Path) -> None:
    calls: dict[str, Callable[[Any], Any]] = {
        "flatten": lambda tree: unflatten_state_dict(*flatten_state_dict(tree)),
        "visit": lambda tree: traverse_state_dict(tree, lambda *_: None, lambda _: True),
        "unflatten": lambda tree: unflatten_state_dict(
            {"a": 1}, {"a": ("a",) * (150 if tree is deep else 501)}
        ),
        "gather": gather_state_dict,
        "stage": StateDictStager().stage,
        "async_save": lambda tree: async_save(tree, tmp_path / "async_save").wait(),
        "others": lambda tree: parts.save(tmp_path / "others", {}, others=tree),
    }
    for name, format in FORMATS.items():
        calls[name] = lambda tree, name=name, format=format: format.save(tree, tmp_path / name)
    deep, deeper = nested(150), nested(500)
    for name, call in calls.items():
        call(deep)
        with pytest.raises(
            UsageError, match="expected at most 200 containers, one inside the other; got more"
        ):
            call(deeper)


def test_an_object_that_is_shared_without_a_cycle_stays_shared_and_is_visited_at_each_path() -> None:
    tensor, inner = torch.ones(2), {"x": 1}
    state_dict = {"a": inner, "b": [inner, inner], "t": tensor, "u": (tensor,)}
    copied = map_leaves(lambda _, leaf, __: leaf + 0, state_dict)
    assert copied["a"] is copied["b"][0] is copied["b"][1] is not inner
    assert copied["t"] is copied["u"][0] is not tensor
    assert leaves_of({"a": inner, "b": inner}) == [(("a", "x"), 1), (("b", "x"), 1)]


# --- Containers --------------------------------------------------------------------------------------------


def test_attributes_of_a_container_are_kept() -> None:
    state_dict = nn.Sequential(nn.Linear(1, 1)).state_dict()
    factory = defaultdict(dict, a=1)
    copied = map_leaves(lambda path, leaf, _: 0, {"model": state_dict, "d": factory})
    assert copied["model"]._metadata == state_dict._metadata  # type: ignore[attr-defined]
    assert copied["d"]["new"] == {}
    assert "new" not in factory


def test_a_read_only_mapping_can_be_visited_but_not_rebuilt() -> None:
    state_dict = {"a": MappingProxyType({"b": 1})}
    assert leaves_of(state_dict) == [(("a", "b"), 1)]
    with pytest.raises(UsageError, match="mappingproxy in a state dict: expected a mapping that items can"):
        map_leaves(lambda path, leaf, _: leaf, state_dict)


# --- Companions --------------------------------------------------------------------------------------------


def test_leaves_meet_the_companions_leaves_in_any_order_of_keys() -> None:
    pairs = map_leaves(lambda path, a, b: (a, b), {"x": 1, "y": [2, 3]}, OrderedDict(y=(5, 6), x=4))
    assert pairs == {"x": (1, 4), "y": [(2, 5), (3, 6)]}
    assert map_leaves(lambda path, a, b: b, {"x": 1}) == {"x": ABSENT}


def test_a_companion_of_another_structure_is_refused_at_its_path() -> None:
    for tree, companion, said in (
        (
            {"a": {"b": 1}},
            {"a": {"c": 1}},
            "['a']: expected the same keys in both state dicts; got ['b'] only",
        ),
        ({"a": [{"b": 1}]}, {"a": [1]}, "['a'][0]: expected a container like the dict"),
        ({"a": {0: 1}}, {"a": [1]}, "['a']: expected a container like the dict"),
    ):
        with pytest.raises(CompanionMismatch) as info:
            map_leaves(lambda path, a, b: a, tree, companion)
        assert str(info.value).startswith(f"state_dict{said}")
