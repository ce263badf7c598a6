"""The parts of 15 that each rank does alone: it stages all kinds of tensors, again and again."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hwfsdp import compat
from hwfsdp.checkpoint.staging import StateDictStager
from hwfsdp.course.checks import piece
from hwfsdp.course.checks.lifetimes import Allocations, bytes_alive, ready, watch
from hwfsdp.course.run import Report, attempt

TURNS = 5
Data = dict[str, Any]
# how something of a copy is held, and how its values are read later
Hold = tuple[Callable[[Data], Any], Callable[[Any], Tensor]]
HOLDS: dict[str, Hold] = {
    "nothing": (lambda staged: None, lambda held: torch.empty(0)),
    "the dict": (lambda staged: staged, lambda held: torch.cat([*held.values()])),
    "a view of one tensor": (lambda staged: staged["tensor 1"][3:], lambda held: held),
    "an array of one tensor": (lambda staged: staged["tensor 1"].numpy(), torch.from_numpy),
    "the storage of one tensor": (
        lambda staged: staged["tensor 1"].untyped_storage(),
        lambda held: torch.empty(0).set_(held),
    ),
}


def probe_staging(report: Report, seed: int) -> None:
    """Run each staging part by itself; nothing is communicated."""
    ready()
    for part in (_snapshot, _turns, _twins, _blocks, _bound, _released, _untold):
        attempt(report, part.__name__[1:], partial(part, seed))


# --- A snapshot --------------------------------------------------------------------------------------------


class Thing:
    """A leaf of a state dict that is not a tensor and can change."""

    def __init__(self, value: int, friend: Thing | None = None) -> None:
        self.value, self.friend = value, friend


def tensors(seed: int) -> dict[str, Tensor]:
    """Return tensors by name; some share memory. The seed draws sizes and values. No two elements of a tensor are equal."""
    draw = random.Random(seed)
    rows, columns = draw.randint(3, 9), draw.randint(2, 6)
    flat = _numbers(4 * rows * columns, 1)
    matrix = nn.Parameter(_numbers(rows * columns, 2).view(rows, columns))
    wide = _numbers(rows * 40, 3).view(rows, 40)
    return {
        "matrix": matrix,
        "tied": matrix,
        "transposed": matrix.detach().t(),
        "flat": flat,
        "first slice": flat[: rows * columns],
        "second slice": flat[rows * columns : 3 * rows * columns].view(2 * rows, columns),
        "column": wide[:, 3],
        "other column": wide[:, 20],
        "expanded": _numbers(columns, 4).expand(rows, columns),
        "ints": torch.arange(rows) - 2,
        "half": _numbers(rows, 5).bfloat16(),
        "one number": torch.tensor(float(seed)),
        "nothing": torch.zeros(0, columns),
        "conjugated": torch.complex(_numbers(rows, 6), _numbers(rows, 7)).conj(),
    }


def _numbers(count: int, kind: int) -> Tensor:
    return torch.arange(count).float() + 1000 * kind


def values_before(seed: int) -> list[Tensor]:
    """Return the values of all tensors of the snapshot when it is taken, in order, with conjugation resolved."""
    return [tensor.detach().resolve_conj().clone() for tensor in tensors(seed).values()]


def shared_memory(found: dict[str, Tensor]) -> dict[str, int]:
    """Return, for every two tensors that share memory, the bytes from the first one's begin to the second one's, by "first, second"."""
    entries = [(name, tensor) for name, tensor in found.items() if tensor.numel()]
    return {
        f"{name}, {other_name}": other.data_ptr() - one.data_ptr()
        for name, one in entries
        for other_name, other in entries
        if compat.storage_key(one) == compat.storage_key(other)
    }


def _snapshot(seed: int) -> Data:
    """Stage once, change everything in the source, and report the copy."""
    found = tensors(seed)
    dtensor = make_dtensor(seed)
    friend = Thing(5)
    settings: Data = {"lr": 0.5, "betas": [0.9, 0.99], "thing": Thing(3, friend), "friend": (friend, "text")}
    state: Data = {"model": found, "sharded": dtensor, "settings": settings, "list": [1, found["flat"]]}
    staged = StateDictStager().stage(state)
    _spoil(found, dtensor, settings)
    copies = {name: staged["model"][name] for name in found}
    sharded, local, kind = staged["sharded"], None, type(staged["sharded"]).__name__
    if isinstance(sharded, DTensor):
        local = compat.local_of(sharded)
        if [str(sharded.placements), sharded.shape] != [str(dtensor.placements), dtensor.shape]:
            kind = "DTensor of another shape or placement"
    return {
        "tensors": {name: _facts_of(copy, found[name]) for name, copy in copies.items()},
        "storage": [copies["nothing"].untyped_storage().nbytes(), int(copies["nothing"].storage_offset())],
        "tied": copies["matrix"] is copies["tied"] and staged["list"][1] is copies["flat"],
        "shared": shared_memory(copies),
        "sharded": None if local is None else local.clone(),
        "is_dtensor": kind,
        "sharded_aliased": local is not None and _share(local, compat.local_of(dtensor)),
        "settings": _plain(staged["settings"]),
        "one_thing": getattr(staged["settings"]["thing"], "friend", None) is staged["settings"]["friend"][0],
        "kinds": [type(staged[key]).__name__ for key in ("model", "settings", "list")],
    }


def _facts_of(copy: Tensor, source: Tensor) -> Data:
    values, is_plain = copy.detach().resolve_conj().clone(), type(copy) is Tensor and not copy.requires_grad
    return {"values": values, "plain": is_plain, "aliased": _share(copy, source)}


def _share(one: Tensor, other: Tensor) -> bool:
    return bool(one.numel()) and compat.storage_key(one) == compat.storage_key(other)


def _plain(settings: Data) -> list[Any]:
    value = getattr(settings["thing"], "value", None)
    return [settings["lr"], list(settings["betas"]), value, settings["friend"][1]]


@torch.no_grad()
def _spoil(found: dict[str, Tensor], dtensor: DTensor, settings: Data) -> None:
    """Change everything in place, as an optimizer and a scheduler do in the next step."""
    for name, tensor in found.items():
        if name != "expanded":
            tensor.mul_(0).add_(77)
    found["expanded"][0].fill_(77)
    compat.local_of(dtensor).fill_(77)
    settings["lr"], settings["thing"].value = 0.1, 4
    settings["betas"].append(0.1)


def make_dtensor(seed: int) -> DTensor:
    """Return a DTensor with uneven rows over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = sharded_whole(seed)
    local = piece(whole, mesh.size(), mesh.get_local_rank())
    return compat.dtensor(local.clone(), mesh, (Shard(0),), whole.shape, whole.stride())


def sharded_whole(seed: int) -> Tensor:
    return _numbers(3 * (3 + seed % 4), 9).view(-1, 3)


# --- Buffers -----------------------------------------------------------------------------------------------


def sizes(seed: int) -> list[int]:
    """Return the numbers of elements of three tensors; no two are equal."""
    draw = random.Random(seed + 1)
    return draw.sample(range(50, 400), 3)


def _turns(seed: int) -> Data:
    return {hold: _turns_with(seed, hold) for hold in HOLDS}


def _turns_with(seed: int, hold: str) -> Data:
    """Stage again and again, each time after an update. Release what is held two turns later, as a background save would.

    Report by turn: the bytes allocated, whether the values are right, and whether what is held kept its values.
    """
    state = {f"tensor {i}": torch.zeros(n) for i, n in enumerate(sizes(seed))}
    stager = StateDictStager()
    take, read = HOLDS[hold]
    held, before = None, None
    found: Data = {"allocated": [], "right": [], "kept": []}
    for turn in range(TURNS):
        for index, tensor in enumerate(state.values()):
            tensor.copy_(_numbers(tensor.numel(), turn + 10 * index))
        with Allocations() as counted:
            staged = stager.stage(state)
        expected = [_numbers(t.numel(), turn + 10 * i) for i, t in enumerate(state.values())]
        found["allocated"].append(counted.nbytes)
        found["right"].append(all(map(torch.equal, staged.values(), expected)))
        found["kept"].append(before is None or torch.equal(read(held), before))
        held = take(staged)
        before = read(held).clone()
        del staged
    return found


def _twins(seed: int) -> Data:
    """Stage two parts of one large tensor, far apart and of equal size; then a part of another size. Compare all values."""
    n = sizes(seed)[0]
    large = _numbers(n * 20, 0)
    stager = StateDictStager()
    parts = {"first": large[:n], "last": large[-n:]}
    with Allocations() as first:
        staged = stager.stage(parts)
    right = _are_equal(staged, parts)
    del staged
    with Allocations() as second:
        staged = stager.stage(parts)
    right += _are_equal(staged, parts)
    longer = {"first": large[: n + 5], "last": large[-n:]}
    right += _are_equal(stager.stage(longer), longer)
    right += _are_equal(staged, parts)
    return {"right": right, "allocated": [first.nbytes, second.nbytes], "elements": n}


def _blocks(seed: int) -> list[list[int]]:
    """Stage two parts of one large tensor, far apart and of different sizes, three times. Return sizes, and allocated bytes."""
    n = sizes(seed)[0]
    large, stager, allocated = _numbers(n * 20, 0), StateDictStager(), list[int]()
    for _ in range(3):
        with Allocations() as seen:
            stager.stage({"first": large[:n], "last": large[-2 * n :]})
        allocated.append(seen.nbytes)
    return [[n, 2 * n], allocated]


def _are_equal(staged: dict[str, Tensor], parts: dict[str, Tensor]) -> list[bool]:
    return [torch.equal(staged[name], part) for name, part in parts.items()]


def _bound(seed: int) -> Data:
    """Make many copies at a time, then one; report how many bytes the stager keeps."""
    source = {"only": torch.zeros(sizes(seed)[0])}
    stager = StateDictStager()
    copies = [stager.stage(source) for _ in range(6)]
    kept = [stager.nbytes]
    copies.clear()
    last = stager.stage(source)
    kept.append(stager.nbytes)
    with Allocations() as counted:
        second = stager.stage(source)
    del last, second
    return {"kept": kept, "one": source["only"].untyped_storage().nbytes(), "allocated": counted.nbytes}


def _released(seed: int) -> list[int]:
    """Return the bytes of copies still alive once nothing refers to copy and source: [in all, as the stager counts them]."""
    source = {"only": torch.ones(sizes(seed)[0]), "parts": torch.ones(100)[:30]}
    stager = StateDictStager()
    staged = stager.stage(source)
    watched = [watch(tensor) for tensor in staged.values()]
    del staged, source
    gc.collect()
    return [bytes_alive(watched), stager.nbytes]


def _untold(seed: int) -> list[bool]:
    """Make two copies, the second where torch does not count references. Report whether the first keeps its values and its memory."""
    source = {"only": _numbers(sizes(seed)[0], 1)}
    before, stager = source["only"].clone(), StateDictStager()
    first = stager.stage(source)  # its buffer is in the pool
    source["only"].fill_(77)
    with mock.patch.object(compat, "USE_COUNT", "of no torch"):
        second = stager.stage(source)
    return [torch.equal(first["only"], before), not _share(first["only"], second["only"])]
