"""The parts of 14 that ranks do together: parts on every mesh, and saves that are loaded on other meshes.

Four ranks save and load every state on meshes of the first 1, 2, 3 and 4 ranks, so that one run has all sixteen pairs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hwfsdp import compat
from hwfsdp.checkpoint import matching, plan, store
from hwfsdp.checkpoint.boxes import Box
from hwfsdp.checkpoint.manifest import Chunk, Manifest, TensorEntry
from hwfsdp.checkpoint.traverse import leaves_of, show
from hwfsdp.course.checks import piece, shared_folder
from hwfsdp.course.checks.checkpoints_runs import ROWS, WORLDS, Numbers, Part, plain_box
from hwfsdp.course.run import FAILED, Report, attempt
from hwfsdp.errors import FSDPError
from hwfsdp.features.api import fully_shard


def sizes(seed: int) -> tuple[int, int]:
    """Return the number of rows in the state, and the number of columns of its matrices."""
    draw = random.Random(seed + 5)
    return draw.choice((5, 7, 9, 10, 11)), draw.randint(2, 4)


class Net(nn.Module):
    """A model with uneven rows, fewer rows than ranks, a tied pair, and a buffer that is whole on every rank."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.first = nn.Linear(columns, rows)
        self.tied = nn.Linear(columns, rows, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.Linear(rows, 2)
        self.register_buffer("scale", torch.zeros(columns))


class Spread(NamedTuple):
    """A tensor of the state that is not a parameter: its shape, its mesh, and its placements there."""

    shape: Numbers
    mesh: Numbers
    placements: tuple[Placement, ...]


def spreads(seed: int, ranks: int) -> dict[str, Spread]:
    """Return tensors cut by columns, copies, and, on four ranks, a tensor with two dims cut and sharded replicas."""
    rows, columns = sizes(seed)
    line, shape = (ranks,), (rows, columns)
    found = {
        "columns": Spread(shape, line, (Shard(1),)),
        "copies": Spread(shape, line, (Replicate(),)),
        "grid": Spread(shape, line, (Shard(0),)),
        "replicas": Spread(shape, line, (Shard(1),)),
    }
    if ranks == 4:
        found["grid"] = Spread(shape, (2, 2), (Shard(0), Shard(1)))
        found["replicas"] = Spread(shape, (2, 2), (Replicate(), Shard(0)))
    return found


def values_of(name: str, shape: Sequence[int], seed: int, ranks: int) -> Tensor:
    """Return the whole tensor of this name as `ranks` ranks save it. All elements of a state are different, and none is negative."""
    start = random.Random(f"{name} {seed} {ranks}").randrange(1 << 12)
    return torch.arange(prod(shape)).view(tuple(shape)).float() + start * 1024


def cut(whole: Tensor, spread: Spread, coordinate: Sequence[int]) -> Tensor:
    """Return the part of the rank at this coordinate: nested chunks, without the package's code. Mesh dims go from left to right."""
    for placement, size, index in zip(spread.placements, spread.mesh, coordinate, strict=True):
        if isinstance(placement, Shard):
            whole = piece(whole, size, index, placement.dim)
    return whole


def coordinate(rank: int, mesh: Numbers) -> Numbers:
    return (rank,) if len(mesh) == 1 else divmod(rank, mesh[1])


def spread_of(path: str, shape: Numbers, seed: int, ranks: int) -> Spread:
    """Return how a tensor of the state is cut; `path` is its path as text."""
    extra = path.partition("extra.")[2]
    if extra:
        return spreads(seed, ranks)[extra]
    if path.endswith(("scale", "step")):
        return Spread(shape, (ranks,), (Replicate(),))
    return Spread(shape, (ranks,), (Shard(0),))


def probe_parts(report: Report, seed: int) -> None:
    """Report the parts of every rank on every mesh. Only making the meshes communicates, so no rank waits for another."""
    meshes = {w: _meshes(w) for w in WORLDS}
    report["parts"] = {str(w): _parts(seed, w, meshes[w]) for w in WORLDS}
    for w in WORLDS:
        attempt(report, f"needs {w}", partial(_needs, seed, w, meshes[w]))


def probe_pairs(report: Report, seed: int) -> None:
    """Save every state on the ranks of its mesh, then load it on every mesh into other values."""
    meshes = {w: _meshes(w) for w in WORLDS}
    report["raised"], report["loaded"] = {}, {}
    states = {w: _state(seed, w, meshes[w]) for w in WORLDS if dist.get_rank() < w}
    with shared_folder() as folder:
        for w, state in states.items():
            _fill(state, seed, w, is_target=False)
            save = partial(store.save, state, folder / str(w), process_group=meshes[w][w,].get_group())
            _try(report, f"save {w}", save)
        dist.barrier()
        for v, state in states.items():
            target = _reordered(state)
            for w in WORLDS:
                _fill(target, seed, v, is_target=True)
                load = partial(store.load, target, folder / str(w), process_group=meshes[v][v,].get_group())
                _try(report, f"{w} to {v}", partial(_load, report, target, f"{w} to {v}", load))
        if "causes" not in report.get(FAILED, {}):
            report["causes"] = None


Meshes = Mapping[Numbers, DeviceMesh]


def _meshes(ranks: int) -> Meshes:
    """Return meshes by shape. Every rank makes all meshes, also the meshes that it is not in."""
    found: dict[Numbers, DeviceMesh] = {
        (ranks,): DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=("shard",))
    }
    if ranks == 4:
        found[2, 2] = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("outer", "inner"))
    return found


def _try(report: Report, key: str, part: Callable[[], object]) -> None:
    try:
        part()
    except Exception as error:
        report["raised"][key] = [type(error).__name__, " ".join(str(error).split())[:400]]
        cause = error.__cause__ or error
        if not isinstance(cause, FSDPError):
            attempt(report, "causes", lambda: _raise(cause))


def _raise(error: BaseException) -> None:
    raise error


def _spread_out(path: str, spread: Spread, meshes: Meshes, seed: int, ranks: int) -> DTensor:
    whole, mesh = values_of(path, spread.shape, seed, ranks), meshes[spread.mesh]
    at = mesh.get_coordinate()
    local = torch.empty(0) if at is None else cut(whole, spread, at).clone()
    return compat.dtensor(local, mesh, spread.placements, whole.shape, whole.stride())


def _parts(seed: int, ranks: int, meshes: Meshes) -> dict[str, Any]:
    """Return the answers of `box_of` for tensors on a mesh, by name, also on ranks outside the mesh."""
    found: dict[str, Any] = {}
    for name, spread in {**spreads(seed, ranks), **more_spreads(ranks)}.items():
        attempt(found, name, partial(_part, _spread_out("", spread, meshes, seed, ranks)))
    for name, spread in PLAIN.items():
        attempt(found, name, partial(_part, torch.zeros(spread.shape)))
    return found


def _part(tensor: Tensor) -> Any:
    return plain_box(plan.box_of(tensor))


# tensors that are not sharded
PLAIN = {
    name: Spread(shape, (1,), (Replicate(),))
    for name, shape in {"plain": (3, 2), "one number": (), "nothing": (0, 2)}.items()
}


def more_spreads(ranks: int) -> dict[str, Spread]:
    """Return shapes whose parts need only integers: uneven rows, fewer rows than ranks, no rows."""
    found = {f"{n} rows": Spread((n, 2), (ranks,), (Shard(0),)) for n in range(ROWS + 1)}
    for n in range(1, ROWS + 1) if ranks == 4 else ():
        found[f"{n} rows cut twice"] = Spread((n, 2), (2, 2), (Shard(0), Shard(0)))
    return found


SAVED = ("grid", "columns", "copies")  # names in `spreads`
TIED = "tied"  # in the save, the same object as the first of these


def part_at(spread: Spread, rank: int) -> list[list[int]] | None:
    """Return offset and shape of the rank's part, as `torch.chunk` cuts; None if it has none."""
    numbers = torch.arange(prod(spread.shape)).view(spread.shape)
    mine = cut(numbers, spread, coordinate(rank, spread.mesh))
    if not mine.numel():
        return None
    first = torch.unravel_index(mine.flatten()[0], spread.shape)
    return [[int(index) for index in first], list(mine.shape)]


def saved_parts(name: str, seed: int, ranks: int) -> list[Part]:
    """Return offset and shape of each part that this many ranks saved of a tensor, once each."""
    spread = spreads(seed, ranks)[SAVED[0] if name == TIED else name]
    parts = [part_at(spread, rank) for rank in range(ranks)]
    return list(dict.fromkeys((tuple(part[0]), tuple(part[1])) for part in parts if part))


def _needs(seed: int, ranks: int, meshes: Meshes) -> dict[str, Any]:
    """Return, by the number of ranks that saved, the answers of `needs_of` on a mesh of `ranks`: path, chunk, box and shared of each."""
    if dist.get_rank() >= ranks:
        return {}
    of = spreads(seed, ranks)
    targets = {name: _spread_out(name, of[name], meshes, seed, ranks) for name in SAVED}
    targets[TIED] = _spread_out(TIED, of[SAVED[0]], meshes, seed, ranks)
    found = {}
    for saved in WORLDS:
        manifest = _manifest(seed, saved)
        matched = matching.Match(manifest)
        for name, target in targets.items():
            if compat.local_of(target).numel():
                matched.tensors["model", name] = target
        needs: Any = matching.needs_of(matched)
        if not isinstance(needs, Iterable):
            return {"instead": type(needs).__name__}
        found[str(saved)] = [_plain_need(need) for need in needs]
    return found


def _manifest(seed: int, ranks: int) -> Manifest:
    """Return the manifest of a save by this many ranks, with the fields that `needs_of` reads."""
    entries = dict[tuple[str | int, ...], Any]()
    for name in SAVED:
        chunks = [Chunk(i, 0, Box(*part)) for i, part in enumerate(saved_parts(name, seed, ranks))]
        shape = spreads(seed, ranks)[name].shape
        entries["model", name] = TensorEntry(("model", name), torch.float32, shape, tuple(chunks))
    first = entries["model", SAVED[0]]
    entries["model", TIED] = replace(first, path=("model", TIED), chunks=(), same_as=first.path)
    return Manifest("000001-0a1b2c3d", (), {(): "dict", ("model",): "dict"}, entries)


def _plain_need(need: Any) -> Any:
    """Return the fields of a `Need` as data; a text if it is not a `Need`, or its fields have other types."""
    if type(need) is not matching.Need:
        return f"a {type(need).__name__} in place of a Need"
    for name, value, kind in (("entry", need.entry, TensorEntry), ("chunk", need.chunk, Chunk)):
        if not isinstance(value, kind):
            return f"a Need whose {name} is a {type(value).__name__}, expected a {kind.__name__}"
    boxes = [plain_box(box) for box in (need.chunk.box, need.box, need.shared)]
    return [str(need.entry.path[-1]), *boxes]


def _state(seed: int, ranks: int, meshes: Meshes) -> dict[str, Any]:
    """Return model, optimizer and other values on a mesh. AdamW's state after a step is put there directly, which is faster than a step."""
    net = Net(*sizes(seed))
    fully_shard(net, mesh=meshes[(ranks,)])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    for param in net.parameters():
        assert isinstance(param, DTensor)
        like = [compat.wrap_like(torch.zeros_like(compat.local_of(param)), param) for _ in range(2)]
        optimizer.state[param] = {"step": torch.zeros(()), "exp_avg": like[0], "exp_avg_sq": like[1]}
    extra = {name: _spread_out(name, s, meshes, seed, ranks) for name, s in spreads(seed, ranks).items()}
    states = {"model": net.state_dict(), "optim": optimizer.state_dict()}
    return {"extra": extra, **states, "step": 100 + ranks}


def _reordered(state: dict[str, Any]) -> dict[str, Any]:
    """Return the same tensors with the keys in another order: two state dicts need not have the same order."""
    of_params = {index: _reversed(of) for index, of in state["optim"]["state"].items()}
    optim = {**state["optim"], "state": of_params}
    return _reversed({**state, "extra": _reversed(state["extra"]), "optim": optim})


def _reversed(of: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(of.items()))


@torch.no_grad()
def _fill(state: dict[str, Any], seed: int, ranks: int, is_target: bool) -> None:
    """Fill the state with known numbers; a target with -1 everywhere."""
    for path, leaf in leaves_of(state):
        if not isinstance(leaf, Tensor):
            continue
        name, shape = named(path), tuple(leaf.shape)
        spread = spread_of(name, shape, seed, ranks)
        values = values_of(name, shape, seed, ranks)
        mine = cut(values, spread, coordinate(dist.get_rank(), spread.mesh))
        compat.local_of(leaf).fill_(-1) if is_target else compat.local_of(leaf).copy_(mine)
    if is_target:
        state["step"], state["optim"]["param_groups"][0]["lr"] = -1, 0.25


def named(path: tuple[Any, ...]) -> str:
    """Return the path as text; a tied pair has one name."""
    text = show(path).replace("tied.weight", "first.weight").replace("[", ".")
    return text.replace("]", "").replace("'", "")


def _load(report: Report, state: dict[str, Any], pair: str, load: Callable[[], object]) -> None:
    """Load, and report the local parts and how much was read for each."""
    read: dict[str, int] = {}
    needs_of = matching.needs_of

    def counted(match: Any) -> Iterator[Any]:
        for need in needs_of(match):
            name = show(need.entry.path)
            read[name] = read.get(name, 0) + need.shared.numel
            yield need

    with mock.patch.object(matching, "needs_of", counted):
        load()
    tensors = [
        {
            "name": named(path),
            "path": show(path),
            "shape": list(leaf.shape),
            "values": compat.local_of(leaf).detach().reshape(-1).float().clone(),
            "read": read.get(show(path), 0),
        }
        for path, leaf in leaves_of(state)
        if isinstance(leaf, Tensor)
    ]
    others = [state["step"], state["optim"]["param_groups"][0]["lr"]]
    report["loaded"][pair] = {"tensors": tensors, "others": others}
