"""State dicts copied, offloaded and compared in one process, and the refusals.

Where torch's private helpers are right, they are the oracle. Where they are wrong, the tensors themselves are: each trap of the
helpers that has to do with copying has its own test here.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import Pair, Record, assert_same
from torch import Tensor
from torch.distributed import _state_dict_utils as torchs

from hwfsdp.checkpoint.distribute import distribute_state_dict
from hwfsdp.checkpoint.state_dict import (
    check_state_dict_similarity,
    copy_state_dict,
    create_cpu_state_dict,
    iterate_state_dict,
    offload_state_dict_to_cpu,
)
from hwfsdp.checkpoint.traverse import CompanionMismatch, map_leaves
from hwfsdp.errors import StateError, UsageError


def plain() -> dict[str, Any]:
    """Return a state dict that torch's helpers handle well: dicts, lists and tuples of dense tensors and scalars."""
    return {
        "w": torch.arange(6.0).view(2, 3),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "nested": {"list": [torch.ones(2, dtype=torch.bfloat16), 1, "s"], "tuple": (None, 2.5, b"x")},
        "strided": torch.arange(6).view(2, 3).t(),
        0: {1: torch.tensor([1 + 2j])},
    }


def rich() -> dict[str, Any]:
    """Return a state dict that torch's helpers refuse, or turn into plain dicts and tuples."""
    return {
        "pair": Pair(torch.ones(2), [torch.zeros(1)]),
        "ordered": OrderedDict(b=torch.ones(1), a=2),
        "default": defaultdict(list, {3: torch.ones(1)}),
        "record": Record(torch.ones(3), "n"),
        "none": None,
        "size": torch.Size([1, 2]),
        "empties": [{}, (), []],
    }


def same(tensor: Tensor, *_: Any) -> Tensor:
    return tensor


def zeroed(state_dict: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = iterate_state_dict(state_dict, same, same, lambda t, *_: torch.zeros_like(t))
    return result


# --- Iterate -----------------------------------------------------------------------------------------------


def test_iterating_gives_the_same_as_torch() -> None:
    def double(tensor: Tensor, *_: Any) -> Tensor:
        return tensor + tensor

    mine = iterate_state_dict(plain(), same, same, double)
    assert_same(mine, torchs._iterate_state_dict(plain(), same, same, double))


def test_functions_are_handed_group_device_and_companion() -> None:
    seen: list[Any] = []
    target, cpu = torch.zeros(2), torch.device("cpu")

    def look(tensor: Tensor, *rest: Any) -> Tensor:
        seen.append(rest)
        return tensor

    iterate_state_dict({"a": torch.ones(2)}, same, same, look, device=cpu, companion_obj={"a": target})
    assert seen == [(None, cpu, target)] and target.tolist() == [1, 1]


def test_the_type_check_refuses_a_leaf_by_its_path_before_anything_is_called() -> None:
    calls: list[Tensor] = []
    state_dict = {"t": torch.ones(1), "a": [0, {1}]}
    with pytest.raises(UsageError, match=r"^state_dict\['a'\]\[1\]: .*got set\."):
        iterate_state_dict(state_dict, same, same, lambda t, *_: calls.append(t))
    assert calls == []
    result = iterate_state_dict(state_dict, same, same, same, type_check=False)
    assert result["a"][1] == {1} and result["a"][1] is not state_dict["a"][1]


# --- Copy --------------------------------------------------------------------------------------------------


def test_copying_gives_the_same_as_torch() -> None:
    mine, theirs = zeroed(plain()), zeroed(plain())
    result = copy_state_dict(plain(), mine)
    assert_same(result, torchs._copy_state_dict(plain(), theirs))
    assert_same(mine, theirs)
    assert result["w"] is mine["w"]


def test_copying_into_room_made_for_it_keeps_values_and_types_without_history() -> None:
    base = torch.arange(8.0, requires_grad=True) * 1
    state_dict = {**rich(), "view": base[::2], "overlapping": base[1:5], "expanded": base[:1].expand(3)}
    room = create_cpu_state_dict(state_dict)
    assert check_state_dict_similarity(state_dict, room)
    copied = copy_state_dict(state_dict, room)
    assert_same(copied, state_dict)
    assert copied["expanded"].stride() == (1,) and not copied["view"].requires_grad
    meta = {"m": torch.empty(2, 3, device="meta")}
    room = create_cpu_state_dict(meta)
    assert room["m"].is_cpu and check_state_dict_similarity(meta, room)


CASTS = {
    "1.7 that would become 1": (torch.tensor([1.7]), torch.zeros(1, dtype=torch.int64)),
    "complex that would lose its imaginary part": (torch.tensor([1j]), torch.zeros(1)),
}
MISFITS = {
    "a (1,) that would be broadcast to (4,)": (torch.ones(1), torch.zeros(4)),
    "the same number of elements in another shape": (torch.ones(2, 3), torch.zeros(3, 2)),
    "a tensor and no tensor": (torch.ones(1), 1.0),
    "no tensor and a tensor": (1.0, torch.ones(1)),
    "a scalar and a container": (1, {}),
    "sparse and dense": (torch.eye(2).to_sparse(), torch.zeros(2, 2)),
}


def test_copy_refuses_by_path_and_before_anything_is_copied() -> None:
    for name, (source, target) in (CASTS | MISFITS).items():
        for allow_cast in (False,) if name in CASTS else (False, True):
            into = {"first": torch.zeros(1), "k": [target]}
            with pytest.raises(CompanionMismatch) as info:
                copy_state_dict({"first": torch.ones(1), "k": [source]}, into, allow_cast=allow_cast)
            assert str(info.value).startswith("state_dict['k'][0]: expected "), name
            assert ("allow_cast=True" in str(info.value)) == (name in CASTS), name
            assert torch.equal(into["first"], torch.zeros(1)), name


def test_copy_refuses_a_target_that_cannot_be_written_to_before_anything_is_copied() -> None:
    with torch.inference_mode():
        read_only = torch.zeros(2)
    for target, expected in (
        (torch.zeros(1).expand(2), "memory"),
        (read_only, "a tensor that can be changed"),
    ):
        into = {"first": torch.zeros(1), "k": [target]}
        with pytest.raises(UsageError, match=rf"state_dict\['k'\]\[0\]: expected {expected}"):
            copy_state_dict({"first": torch.ones(1), "k": [torch.ones(2)]}, into)
        assert not into["first"].any()
    sparse = {"k": torch.zeros(2, 2).to_sparse()}
    copy_state_dict({"k": torch.eye(2).to_sparse()}, sparse)
    assert torch.equal(sparse["k"].to_dense(), torch.eye(2))


def test_copy_casts_dtypes_as_torch_if_asked_for() -> None:
    source, into = {"k": torch.tensor([1.7])}, {"k": torch.zeros(1, dtype=torch.int64)}
    expected = torchs._copy_state_dict(source, {"k": into["k"].clone()})
    assert copy_state_dict(source, into, allow_cast=True)["k"] is into["k"]
    assert_same(into, expected)


# --- Similarity --------------------------------------------------------------------------------------------


def test_every_difference_of_structure_shape_or_dtype_is_seen() -> None:
    changes: list[Callable[[Any], Any]] = [
        lambda sd: sd.pop("w"),
        lambda sd: sd.update(w=torch.ones(3, 2)),
        lambda sd: sd.update(w=sd["w"].double()),
        lambda sd: sd[0].update({1: 5}),
        lambda sd: sd[0].update({"1": sd[0].pop(1)}),
    ]
    for change in changes:
        other = plain()
        change(other)
        assert not check_state_dict_similarity(plain(), other)
        assert not check_state_dict_similarity(other, plain())


def test_values_and_container_classes_may_differ_and_nothing_is_overwritten() -> None:
    first, other = plain(), OrderedDict(reversed(zeroed(plain()).items()))
    other["nested"]["list"][2] = "other"
    assert check_state_dict_similarity(first, other)
    assert_same(first, plain())
    assert not other["w"].any()


# --- Room on the CPU, offloading ---------------------------------------------------------------------------


def test_room_has_torchs_shapes_and_dtypes_and_memory_of_its_own() -> None:
    state_dict = plain()
    for share in (False, True):
        room = create_cpu_state_dict(state_dict, share_memory=share)
        theirs = torchs._create_cpu_state_dict(plain(), share_memory=share)
        assert check_state_dict_similarity(room, theirs) and check_state_dict_similarity(room, state_dict)
        for name in ("w", "scalar"):
            assert room[name].data_ptr() != state_dict[name].data_ptr()
            assert room[name].is_shared() == share


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to pin memory for")
def test_pinning_without_a_device_is_refused() -> None:
    with pytest.raises(StateError, match="expected a CUDA device; got none"):
        create_cpu_state_dict(plain(), pin_memory=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("share", [False, True])
def test_pinned_room_is_pinned_and_takes_copies_from_the_device(share: bool) -> None:
    on_device = {"w": torch.arange(1000.0, device="cuda"), "empty": torch.empty(0, device="cuda")}
    for _ in range(3):  # each round must give back its registered memory for the next
        room = create_cpu_state_dict(on_device, pin_memory=True, share_memory=share)
        assert room["w"].is_pinned() and room["w"].is_shared() == share
        copy_state_dict(on_device, room, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(room["w"], torch.arange(1000.0))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloading_from_a_device_gives_the_same_as_torch() -> None:
    on_device = {"w": torch.arange(4.0, device="cuda"), "n": [1, torch.ones(2)]}
    assert_same(offload_state_dict_to_cpu(on_device), torchs._offload_state_dict_to_cpu(on_device))


def test_offloading_does_not_move_tensors_on_the_cpu() -> None:
    state_dict = rich()
    offloaded = offload_state_dict_to_cpu(state_dict)
    assert_same(offloaded, state_dict)
    assert offloaded["pair"].first is state_dict["pair"].first


def test_none_stands_for_no_companion_as_with_torch() -> None:
    def tensors(tree: Any, value: float) -> Any:
        return map_leaves(lambda _, leaf, __: torch.full((2,), value) if leaf == 1 else leaf, tree)

    for state, companion in (
        ({"w": 1}, {"w": None}),
        ({"w": None, "v": [1, {"x": 1}]}, {"w": 3, "v": None}),
        ({"a": {}, "v": 1}, {"a": None, "v": 1}),
    ):
        expected = torchs._copy_state_dict(tensors(state, 1), first := tensors(companion, 0))
        assert_same(copy_state_dict(tensors(state, 1), second := tensors(companion, 0)), expected)
        assert_same(second, first)


def test_none_in_place_of_a_tensor_is_left_out_as_with_torch() -> None:
    for value, place in (
        (torch.ones(3), None),
        (torch.tensor(2.0), None),
        (None, torch.zeros(3)),
    ):
        results = []
        for distribute in (torchs._distribute_state_dict, distribute_state_dict):
            local = {"w": None if place is None else place.clone(), "v": torch.zeros(2)}
            distribute({"w": value, "v": torch.ones(2)}, local, torch.device("cpu"))
            results.append(local)
        assert_same(*results)
