"""State dicts gathered from ranks, broadcast to them and distributed among them.

The oracle is the whole tensor from which the shards were cut. torch's private helpers must agree where they are right.
"""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from faults import bits
from rank_checks import is_first, is_last, raised
from together import Together
from samples import Pair, assert_same, cut, line, mesh, numbered, sharded, wholes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as torchs_extent

from hwfsdp import layout
from hwfsdp.checkpoint import dcp, load, save
from hwfsdp.checkpoint.distribute import broadcast_state_dict, distribute_state_dict
from hwfsdp.checkpoint.meta import init_state_dict
from hwfsdp.checkpoint.staging import StateDictStager
from hwfsdp.checkpoint.state_dict import copy_state_dict, create_cpu_state_dict, gather_state_dict
from hwfsdp.checkpoint.state_dict import check_state_dict_similarity, offload_state_dict_to_cpu
from hwfsdp.checkpoint.traverse import map_leaves
from hwfsdp.compat import dtensor, local_of
from hwfsdp.errors import StateError, UnsupportedError, UsageError
from hwfsdp.layout import shard_of

CPU = torch.device("cpu")
WORLD_SIZE = 4  # uneven parts, ranks without a part, and a mesh of 2 x 2
on_ranks = Together(WORLD_SIZE)


# --- State dicts -------------------------------------------------------------------------------------------


def model_like() -> dict[str, Any]:
    """Return a full state dict with a bit of everything."""
    return {
        "weight": numbered(7, 3),
        "transposed": numbered(3, 7).t(),
        "view": numbered(12)[1::2],
        "zero dim": torch.tensor(5.0),
        "flags": torch.tensor([True, False, True]),
        "half": numbered(5, dtype=torch.bfloat16),
        "complex": numbered(3).to(torch.complex64).conj() * 1j,
        "text": "new",
        "none": None,
        "number": 3,
        "optimizer": {
            "state": {0: {"step": torch.tensor(2.0), "exp_avg": numbered(7, 3)}, 1: {"exp_avg": numbered(2)}},
            "param_groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": [0, 1]}],
        },
        "pair": Pair(numbered(4), OrderedDict(a=numbered(1))),
    }


def local_like() -> dict[str, Any]:
    """Return the state dict of `model_like` before it is filled: zeros, other scalars, sharded where possible."""
    plain = {"view": torch.zeros(12)[::2], "step": torch.tensor(0.0), "a": torch.zeros(1)}

    def emptied(path: tuple[Any, ...], value: Any, _: Any) -> Any:
        if not isinstance(value, Tensor):
            return None if value is None else type(value)()
        zeros = torch.zeros(value.shape, dtype=value.dtype)
        return plain.get(path[-1], cut(zeros, line(), Shard(0) if value.ndim else Replicate()))

    return map_leaves(emptied, model_like(), by_path=True)


def assert_holds(local: Any, whole: Any) -> None:
    """Check types of containers, and scalars. Each tensor must be this rank's part of the whole one."""

    def part_as(_: Any, value: Any, place: Any) -> Any:
        return shard_of(value, place.device_mesh, place.placements) if isinstance(place, DTensor) else value

    parts = map_leaves(lambda _, leaf, __: local_of(leaf), local)
    assert_same(parts, map_leaves(part_as, whole, local), exact=True)


@contextlib.contextmanager
def data_sent() -> Iterator[list[Tensor]]:
    """Collect the tensors that the `with` block broadcasts. Tensors that carry objects are left out."""
    sent: list[Tensor] = []
    broadcast = dist.broadcast

    def watching(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor)
        return broadcast(tensor, *args, **kwargs)

    with mock.patch.object(dist, "broadcast", watching):
        yield sent


# --- Gather ------------------------------------------------------------------------------------------------


@on_ranks
def gathering_gives_the_whole_whatever_the_layout_and_dtype() -> None:
    whole = wholes() | {"scalar": torch.tensor(1.0)}
    parts = sharded() | {"scalar": cut(torch.tensor(1.0), line(), Replicate())}
    for dtype in (torch.bool, torch.uint16, torch.bfloat16, torch.complex64, torch.float8_e5m2):
        whole[str(dtype)] = numbered(7, 3, dtype=dtype)
        parts[str(dtype)] = cut(whole[str(dtype)], line(), Shard(0))
    reversed_mesh = DeviceMesh("cpu", list(reversed(range(dist.get_world_size()))))
    whole["reversed"], parts["reversed"] = numbered(7), cut(numbered(7), reversed_mesh, Shard(0))
    for name, gathered in gather_state_dict(parts).items():
        assert type(gathered) is Tensor and gathered.dtype == whole[name].dtype, name
        assert bits(gathered) == bits(whole[name]), name


@on_ranks
def gathering_leaves_history_behind_and_other_values_as_they_are() -> None:
    whole = {"a": numbered(7, 3), "b": numbered(8)}
    parameter = nn.Parameter(distribute_tensor(whole["a"], line(), [Shard(0)]))
    partial = DTensor.from_local(numbered(3), line(), [Partial()])
    mine = gather_state_dict({"x": [parameter], "y": whole["b"], "z": "s", "p": partial})
    assert torch.equal(mine["x"][0], whole["a"]) and not mine["x"][0].requires_grad
    assert mine["y"] is whole["b"] and mine["z"] == "s"
    assert torch.equal(mine["p"], numbered(3) * dist.get_world_size())


@on_ranks
def only_the_ranks_asked_for_get_the_gathered_dict() -> None:
    last = dist.get_world_size() - 1
    gathered = gather_state_dict({"a": cut(numbered(7), line(), Shard(0)), "b": {"c": 1}}, ranks_only=(last,))
    assert_holds(gathered, {"a": numbered(7), "b": {"c": 1}} if is_last() else {})
    message = raised(lambda: gather_state_dict({}, ranks_only=(last + 1,)))
    assert message.startswith("ranks_only: expected ranks of the group")


@on_ranks
def gathering_over_a_part_of_a_mesh_asks_only_the_ranks_in_it() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        mine = numbered(7, 2) * (1 + mesh.get_local_rank("b" if name == "a" else "a"))
        assert torch.equal(gather_state_dict({"w": cut(mine, mesh[name], Shard(0))})["w"], mine)


@on_ranks
def gathering_refuses_a_local_part_that_placements_do_not_give() -> None:
    wrong = dtensor(torch.zeros(9), line(), [Shard(0)], (7,), (1,))
    with pytest.raises(UsageError, match=r"^state_dict\['w'\]\[0\]: expected the local shape .*got \(9,\)\."):
        gather_state_dict({"w": [wrong]})


# --- Copies of DTensors ------------------------------------------------------------------------------------


@on_ranks
def dtensors_are_copied_into_room_made_for_them() -> None:
    state_dict = sharded()
    room = create_cpu_state_dict(state_dict)
    assert check_state_dict_similarity(state_dict, room)
    copied = copy_state_dict(state_dict, room)
    for name, whole in wholes().items():
        assert_holds(copied[name], whole)
        memory, original = local_of(copied[name]), local_of(state_dict[name])
        assert not memory.numel() or memory.data_ptr() != original.data_ptr()
    assert all(mine is state_dict[name] for name, mine in offload_state_dict_to_cpu(state_dict).items())


def assert_not_similar(name: str, value: Any, others: list[Any]) -> None:
    for other in others:
        assert not check_state_dict_similarity({name: value}, {name: other})
        with pytest.raises(UsageError, match=rf"^state_dict\['{name}'\]: expected "):
            copy_state_dict({name: value}, {name: other})


@on_ranks
def dtensors_of_other_shape_placement_or_mesh_are_not_similar() -> None:
    others = [
        numbered(8, 8),
        cut(numbered(8, 9), line(), Shard(0)),
        cut(numbered(8, 8).double(), line(), Shard(0)),
        cut(numbered(8, 8), line(), Shard(1)),
        cut(numbered(8, 8), mesh(1, 4), Shard(0), Replicate()),
    ]
    assert_not_similar("a", cut(numbered(8, 8), line(), Shard(0)), others)


# --- ShardedTensors ----------------------------------------------------------------------------------------


def old_sharded(whole: Tensor, boxes: list[tuple[list[int], list[int]]], group: Any = None) -> Any:
    """Make a ShardedTensor of (offsets, sizes). The boxes go to the ranks of the group in turn, the last rank first."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)[::-1]
    places = [
        ShardMetadata(shard_offsets=offsets, shard_sizes=sizes, placement=f"rank:{ranks[i % len(ranks)]}/cpu")
        for i, (offsets, sizes) in enumerate(boxes)
    ]
    spec = EnumerableShardingSpec(places)
    made = sharded_tensor.empty(spec, *whole.shape, dtype=whole.dtype, process_group=group)
    for shard in made.local_shards():
        (box,) = [m for m in places if m.shard_offsets == shard.metadata.shard_offsets]
        shard.tensor.copy_(whole[tuple(slice(o, o + n) for o, n in zip(box.shard_offsets, box.shard_sizes))])
    return made


def values(sharded_tensor: Any) -> list[Any]:
    return [shard.tensor.tolist() for shard in sharded_tensor.local_shards()]


BOXES = [([3, 0], [4, 2]), ([0, 0], [3, 5]), ([3, 2], [4, 3])]  # 7 x 5, in no order, and fewer than 4 ranks


@on_ranks
def sharded_tensors_of_several_boxes_or_none_are_gathered() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        whole = numbered(7, 5, dtype=dtype)
        assert torch.equal(gather_state_dict({"s": old_sharded(whole, BOXES)})["s"], whole)
    only = gather_state_dict({"s": old_sharded(numbered(7, 5), BOXES)}, ranks_only=(0,), cpu_offload=True)
    assert torch.equal(only["s"], numbered(7, 5)) if is_first() else only == {}


@on_ranks
def a_sharded_tensor_of_some_ranks_is_gathered_by_them() -> None:
    groups = [dist.new_group(ranks) for ranks in ([0], [*range(1, dist.get_world_size())])]
    group = groups[not is_first()]
    whole = numbered(7, 5) * (1 + is_first())
    state_dict = {"s": old_sharded(whole, BOXES, group)}
    assert torch.equal(gather_state_dict(state_dict)["s"], whole)
    room = create_cpu_state_dict(state_dict)  # where torch loses the group
    assert torch.equal(gather_state_dict(copy_state_dict(state_dict, room))["s"], whole)
    with pytest.raises(UsageError, match=r"^state_dict\['s'\]: expected a ShardedTensor on ranks of"):
        gather_state_dict({"s": old_sharded(numbered(4), [([i], [1]) for i in range(4)])}, pg=group)


@on_ranks
def sharded_tensors_are_copied_into_room_made_for_them() -> None:
    old = old_sharded(numbered(7, 5), BOXES)
    room = create_cpu_state_dict({"s": old})
    assert check_state_dict_similarity({"s": old}, room)
    new = copy_state_dict({"s": old}, room)["s"]
    assert new is room["s"] and type(new) is type(old) and values(new) == values(old)
    for shard in new.local_shards():
        shard.tensor.fill_(-1)
    assert values(new) != values(old) or not new.local_shards()
    assert offload_state_dict_to_cpu({"s": old})["s"] is old
    others = [old_sharded(numbered(7, 5), [([0, 0], [7, 5])]), old_sharded(numbered(7, 5).double(), BOXES)]
    assert_not_similar("s", old, [numbered(7, 5), *others])


@on_ranks
def a_sharded_tensor_is_neither_filled_from_a_whole_one_nor_staged() -> None:
    old, whole = {"s": old_sharded(numbered(7, 5), BOXES)}, {"s": numbered(7, 5)}
    for go in (
        lambda: broadcast(whole, old),
        lambda: distribute(whole, old),
        lambda: StateDictStager().stage(old),
    ):
        with pytest.raises(UnsupportedError, match=r"^state_dict\['s'\].*: .*; got a ShardedTensor\."):
            go()


# --- Broadcast and distribute, where all goes well ---------------------------------------------------------


def broadcast(full: dict[Any, Any], local: dict[Any, Any], **options: Any) -> None:
    broadcast_state_dict(full if is_first() else {"junk": object()}, local, CPU, **options)


def distribute(full: dict[Any, Any], local: dict[Any, Any], **options: Any) -> None:
    distribute_state_dict(full, local, CPU, **options)


def every_rank_gets_its_part(fill: Callable[..., None]) -> None:
    local = sharded(fill=-1.0)
    before = dict(local)
    fill(wholes(), local)
    for name, whole in wholes().items():
        assert_holds(local[name], whole)
        assert local[name] is before[name]  # where it was


def a_bit_of_everything_arrives(fill: Callable[..., None]) -> None:
    local = local_like()
    weight = local["optimizer"]["state"][0]["exp_avg"]
    fill(model_like(), local)
    assert_holds(local, model_like())
    assert local["optimizer"]["state"][0]["exp_avg"] is weight


def tensors_on_the_meta_device_get_memory(fill: Callable[..., None]) -> None:
    full = {"w": numbered(7, 3), "plain": numbered(2), "step": torch.tensor(1.0), "tied": numbered(7, 3)}
    meta = dtensor(torch.empty(2, 3, device="meta"), line(), [Shard(0)], (7, 3), (3, 1))
    plain, scalar = torch.empty(2, device="meta"), torch.empty((), device="meta")
    local = {"w": meta, "plain": plain, "step": scalar, "tied": meta}
    fill(full, local)
    assert_holds(local, full)
    assert local["tied"] is local["w"]
    full["plain"].zero_(), full["w"].zero_()
    assert_holds({"w": local["w"], "plain": local["plain"]}, {"w": numbered(7, 3), "plain": numbered(2)})
    part = local_of(local["w"])
    assert part.untyped_storage().nbytes() == part.numel() * 4  # not a view of the whole


def keys_of_one_side_alone_are_left_unchanged(fill: Callable[..., None]) -> None:
    local = {"a": torch.zeros(1).expand(2), "mine": {"b": [torch.zeros(1), "x"]}, "empty": {}}
    fill({"a": numbered(2), "theirs": numbered(3), "empty": {0: numbered(1)}}, local)
    assert_holds(local, {"a": numbered(2), "mine": {"b": [torch.zeros(1), "x"]}, "empty": {}})


def dtypes_are_cast_if_asked_for(fill: Callable[..., None]) -> None:
    whole = numbered(7, 3) + 0.7
    meta = dtensor(torch.empty(2, 3, device="meta", dtype=torch.float16), line(), [Shard(0)], (7, 3), (3, 1))
    places = {
        "sharded": cut(torch.zeros(7, 3, dtype=torch.int64), line(), Shard(0)),
        "plain": torch.zeros(7, 3, dtype=torch.bfloat16),
        "meta": meta,
    }
    dtypes = {name: place.dtype for name, place in places.items()}
    for name, place in places.items():
        with pytest.raises(UsageError, match=r"; got shape \(7, 3\) and torch.float32. Pass allow_cast=True"):
            fill({name: whole}, {name: place})
    fill({name: whole for name in places}, places, allow_cast=True)
    assert_holds(places, {name: whole.to(dtype) for name, dtype in dtypes.items()})
    misfit = {"first": torch.zeros(2), "k": [torch.zeros(3, 7)]}
    with pytest.raises(
        UsageError, match=r"\['k'\]\[0\].*got shape \(7, 3\) and torch.float32. Compare the model"
    ):
        fill({"first": numbered(2), "k": [whole]}, misfit, allow_cast=True)
    assert not misfit["first"].any()


def one_tensor_gets_two_entries_only_if_they_are_the_same(fill: Callable[..., None]) -> None:
    for make in (lambda: torch.zeros(8), lambda: cut(torch.zeros(8), line(), Shard(0))):
        weight = make()
        with pytest.raises(UsageError, match="'b'.*same values as for .*'a'.*Untie"):
            fill({"a": torch.ones(8), "b": numbered(8)}, {"a": weight, "b": weight.detach()})
        assert_holds({"a": weight}, {"a": torch.zeros(8)})
        fill({"a": numbered(8), "b": numbered(8)}, {"a": weight, "b": weight.detach()})
        assert_holds({"a": weight}, {"a": numbered(8)})


for promise in (
    one_tensor_gets_two_entries_only_if_they_are_the_same,
    every_rank_gets_its_part,
    a_bit_of_everything_arrives,
    tensors_on_the_meta_device_get_memory,
    keys_of_one_side_alone_are_left_unchanged,
    dtypes_are_cast_if_asked_for,
):
    for fill in (broadcast, distribute):
        on_ranks.add(f"{promise.__name__} ({fill.__name__})", functools.partial(promise, fill), None)


@on_ranks
def distributing_adds_values_that_need_no_cutting() -> None:
    full = {
        "a": numbered(2),
        "step": torch.tensor(3.0),
        "theirs": numbered(3),
        "others": {"epoch": 1, "seen": torch.tensor(2)},
        "state": {number: {"m": numbered(2), "step": torch.tensor(1.0)} for number in (0, 5)},
        "groups": [{"lr": 1.0, "betas": (0.5, 0.25)}, {"lr": 2.0}],
        "empty": {"x": 1},
        "none": None,
    }
    nothing: dict[str, Any] = {}
    local = {
        "a": cut(torch.zeros(2), line(), Shard(0)),
        "state": {0: {"m": torch.zeros(2)}},
        "groups": [{"lr": 0.0}],
        "empty": nothing,
    }
    distribute(full, local)
    expected = full | {"state": {0: full["state"][0]}}  # type: ignore[index]
    del expected["theirs"]
    assert_holds({key: local[key] for key in expected}, expected)
    assert local.keys() == expected.keys()
    assert local["step"] is not full["step"] and local["others"] is not full["others"] and nothing == {}
    only_filled = {"a": torch.zeros(2)}
    broadcast(full, only_filled)  # torch's function adds nothing here, either
    assert list(only_filled) == ["a"]


@on_ranks
def distributing_needs_no_communication() -> None:
    if is_last():  # no one else takes part
        mine = {"k": torch.zeros(3), "cut": cut(torch.zeros(7), line(), Shard(0))}
        distribute({"k": numbered(3), "cut": numbered(7)}, mine)
        assert_holds(mine, {"k": numbered(3), "cut": numbered(7)})


@on_ranks
def strict_removes_keys_that_the_source_does_not_have_and_offloading_does_not_mind_others() -> None:
    full = {"a": numbered(2), "state": {0: {"m": numbered(1)}}, "gone": {}}
    one = torch.zeros(1)
    state = {0: {"m": torch.zeros(1), "v": one}, 1: {"m": one}}
    local = {"a": torch.zeros(2), "b": one, "state": state, "gone": {0: one}}
    broadcast(full | {"theirs": numbered(2)}, local, strict=True, cpu_offload=True)
    assert_holds(local, full)


@on_ranks
def the_source_is_the_first_rank_of_the_group() -> None:
    group = dist.new_group([2, 3])
    if dist.get_rank() < 2:
        return
    local = {"a": torch.zeros(3)}
    full = {"a": numbered(3)} if dist.get_rank(group) == 0 else {}
    broadcast_state_dict(full, local, CPU, pg=group)
    assert_holds(local, {"a": numbered(3)})


@on_ranks
def whole_tensors_are_in_memory_one_at_a_time() -> None:
    full = {str(i): numbered(100 + i) for i in range(6)} | {"turned": numbered(9, 11).t()}
    local = {name: cut(torch.zeros(whole.shape), line(), Shard(0)) for name, whole in full.items()}
    with data_sent() as sent:
        broadcast(full, local)
    assert_holds(local, full)
    assert len(sent) == len(full)
    if is_first():  # contiguous tensors are sent without a copy
        assert [s.data_ptr() for s in sent[:-1]] == [w.data_ptr() for w in list(full.values())[:-1]]
    else:
        assert len({tensor.untyped_storage().data_ptr() for tensor in sent}) == 1
        assert sent[0].untyped_storage().nbytes() == 4 * 105


# --- Broadcast, where something does not fit ---------------------------------------------------------------


def refusals() -> dict[str, tuple[Any, Any, str]]:
    """Return name → (value of the source, the last rank's place for it, beginning of the error message)."""
    looped: dict[str, Any] = {}
    looped["again"] = looped
    odd = dtensor(torch.zeros(9), line(), [Shard(0)], (7,), (1,))
    rows, partial = cut(numbered(4), line(), Shard(0)), DTensor.from_local(numbered(3), line(), [Partial()])
    misfit = f", rank {dist.get_world_size() - 1}: expected "
    return {
        "(1,) for (4,)": (numbered(1), torch.zeros(4), misfit + "shape (4,) and torch.float32; got shape (1"),
        "tensor for a scalar": (numbered(3), 5, misfit + "int"),
        "scalar for a tensor": (5, torch.zeros(3), misfit + "a tensor of shape (3,)"),
        "leaf for a container": (5, {"a": 1}, misfit + "a container"),
        "container for a leaf": ({"a": 1}, 5, misfit + "what can hold the entries of a container"),
        "partial": (numbered(3), partial, ""),
        "cut in another way": (numbered(7), odd, ": expected the local shape"),
        "cycle at the source": (looped, torch.zeros(3), "['again']: expected containers"),
        "dtensor": (rows, torch.zeros(4), ": expected a whole"),
        "meta": (torch.empty(3, device="meta"), torch.zeros(3), ": expected a tensor with"),
        "lambda": (lambda: 1, 5, ": expected what can be sent to other ranks"),
    }


@on_ranks
def a_misfit_on_one_rank_is_an_error_on_all_before_any_data_moves() -> None:
    for name, (value, place, begin) in refusals().items():
        fits = is_last() or name == "cycle at the source"
        local = {"first": torch.zeros(2), "k": place} if fits else {"first": torch.zeros(2)}
        kind = UnsupportedError if name == "partial" else UsageError
        with data_sent() as sent:
            message = raised(lambda: broadcast({"first": numbered(2), "k": value}, local), kind)
        if ", rank" not in begin:
            message = re.sub(r", rank \d+:", ":", message)
        assert message.startswith(f"state_dict['k']{begin}"), (name, message)
        assert torch.equal(local["first"], torch.zeros(2)) and local.get("k", place) is place, name
        assert sent == [], name


# --- DTensors that were flattened ----


FLATTENED: list[tuple[tuple[int, ...], tuple[int, ...], list[Placement]]] = [
    ((4,), (3, 5, 2), [Shard(1)]),  # uneven: the last rank has nothing
    ((2, 2), (2, 8), [Shard(1), Shard(1)]),
    ((2, 2), (2, 8), [Replicate(), Shard(1)]),
    ((2, 2), (2, 3, 8), [Shard(2), Shard(1)]),
]


@functools.cache
def stripes() -> list[tuple[DTensor, Tensor]]:
    """Return DTensors whose first two dims were flattened, so that a rank holds stripes of them, and the whole tensors."""
    found = []
    for sizes, shape, placements in FLATTENED:
        whole = numbered(*shape)
        striped = distribute_tensor(whole, mesh(*sizes), placements, src_data_rank=None)
        found.append((striped.flatten(0, 1), whole.flatten(0, 1)))
    return found


def like(striped: DTensor, device: str = "cpu") -> DTensor:
    local = torch.zeros_like(striped.to_local(), device=device)
    shape, stride = striped.shape, striped.stride()
    return DTensor.from_local(local, striped.device_mesh, striped.placements, shape=shape, stride=stride)


@on_ranks
def stripes_are_gathered_cut_and_staged_as_torch_does() -> None:
    for striped, whole in stripes():
        assert torch.equal(gather_state_dict({"w": striped})["w"], whole)
        args = striped.shape, striped.device_mesh, striped.placements
        assert layout.compute_local_shape_and_global_offset(*args) == torchs_extent(*args)
        for fill, device in product((distribute_state_dict, broadcast_state_dict), ("cpu", "meta")):
            target = {"w": like(striped, device)}
            fill({"w": whole}, target, CPU)
            assert torch.equal(target["w"].to_local(), striped.to_local())
        assert torch.equal(StateDictStager().stage({"w": striped})["w"].to_local(), striped.to_local())
        made = init_state_dict({"w": like(striped, "meta")})["w"]
        assert made.to_local().shape == striped.to_local().shape and not made.is_meta


@on_ranks
def stripes_are_saved_and_loaded_from_and_into_any_sharding() -> None:
    paths = [Path(tempfile.mkdtemp()) if is_first() else None]
    dist.broadcast_object_list(paths)
    for striped, whole in stripes():
        rows = distribute_tensor(whole, striped.device_mesh, [Shard(0)] * striped.device_mesh.ndim)
        for write, read, name in ((save, load, "store"), (dcp.save, dcp.load, "dcp")):
            for saved, targets in ((rows, [like(striped, "meta")]), (striped, [like(striped), like(rows)])):
                write({"w": saved, "plain": whole}, paths[0] / name, overwrite=True)
                for target in targets:
                    state = {"w": target, "plain": torch.zeros_like(whole)}
                    read(state, paths[0] / name)
                    assert torch.equal(gather_state_dict(state)["w"], whole)
        plain = {"w": torch.zeros_like(whole)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch_dcp.load(plain, checkpoint_id=paths[0] / "dcp")
        assert torch.equal(plain["w"], whole)


@on_ranks
def replicas_of_stripes_that_differ_are_not_saved() -> None:
    striped = stripes()[2][0].clone()
    if is_first():
        striped.to_local().detach()[0] += 1
    said = r"expected the same values \[.*\] on ranks 0 and 2, as both have them"
    with pytest.raises(UsageError, match=said):
        save({"w": striped}, "differ")
    assert not Path("differ").exists()


# --- The tests ---------------------------------------------------------------------------------------------


test_on_ranks = on_ranks.test()


def test_broadcasting_without_a_process_group_is_refused() -> None:
    with pytest.raises(StateError, match="broadcast_state_dict: expected a process group; got none"):
        broadcast_state_dict({}, {}, CPU)
