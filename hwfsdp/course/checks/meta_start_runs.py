"""13, on the ranks: a model from the meta device to weights, with every new storage watched; generators; exchanged shards.

The same probe runs on one rank and on four. Four ranks start the model on meshes of two, three and four of them. The expected rows
are drawn once more, row by row for whole parameters, from `row_generator` itself, which has its own check.
"""

from __future__ import annotations

import builtins
import gc
import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from hwfsdp import fully_shard
from hwfsdp.core.param import FSDPParam
from hwfsdp.core.state import state_of
from hwfsdp.course.checks import raised_by, with_nan
from hwfsdp.course.checks.lifetimes import Allocations, bytes_alive, copied, ready
from hwfsdp.course.checks.meta_start_held import HELD, Data, exchanged, placed
from hwfsdp.course.findings import is_same
from hwfsdp.course.run import Report, attempt
from hwfsdp.features.hybrid_sharding import hybrid_mesh
from hwfsdp.layout import init_shards
from hwfsdp.observe.events import COLLECTIVES
from hwfsdp.observe.recording import record

RUNS = {1: (1,), 4: (2, 3, 4)}  # sizes of meshes, by the number of ranks of a run
WIDTH = 12  # every number of ranks divides it


class Model(nn.Module):
    """Parameters of all kinds: uneven, of one row, cut along dim 1, bf16, tied, not sharded, without dims; and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.wide = nn.Linear(WIDTH, 48)
        self.uneven = nn.Linear(WIDTH, draw.choice([5, 7, 9, 11]))
        self.short = nn.Conv1d(WIDTH, 2, draw.choice([2, 3]))
        self.columns = nn.Linear(WIDTH, draw.choice([3, 5]), bias=False)
        self.coarse = nn.Linear(WIDTH, draw.choice([5, 7]), dtype=torch.bfloat16)
        self.embed, self.head = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale, self.shift = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(3, 2))
        self.register_buffer("counts", torch.zeros(4))


def sharded(seed: int, mesh: DeviceMesh) -> Model:
    """Shard a model on the meta device: some layers are groups, the rest is the root's. The last two parameters are left out."""
    with torch.device("meta"):
        model = Model(seed)
    for layer in (model.wide, model.uneven, model.coarse):
        fully_shard(layer, mesh=mesh)
    fully_shard(model.columns, mesh=mesh, shard_placement_fn=lambda param: Shard(1))
    fully_shard(model, mesh=mesh, ignored_params={model.scale, model.shift})
    return model


def started(seed: int, mesh: DeviceMesh) -> Model:
    return sharded(seed, mesh).to_empty(device="cpu")


def shapes(seed: int) -> dict[str, tuple[list[int], torch.dtype]]:
    """Return shape and dtype of the whole parameters, by name."""
    with torch.device("meta"):
        return {name: (list(param.shape), param.dtype) for name, param in Model(seed).named_parameters()}


ALIASES = {"head.weight": "embed.weight"}  # second names of parameters → their first names
SHARDED_DIM = {"columns.weight": 1, "scale": None, "shift": None}  # 0 for all others


def noise(fqn: str, row: Tensor, generator: torch.Generator) -> None:
    """Fill a row with normal noise, as models of this kind are initialized."""
    row.normal_(generator=generator)


class Noted:
    """Fills rows with noise, and notes each call by the name of the parameter: shape, dtype, class, seed, and the row."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Any]] = {}

    def __call__(self, fqn: str, row: Tensor, generator: torch.Generator) -> None:
        facts = [list(row.shape), row.dtype, type(row).__name__, generator.initial_seed()]
        noise(fqn, row, generator)
        self.calls.setdefault(fqn, []).append([*facts, row.detach().clone()])


def probe_start(report: Report, seed: int) -> None:
    """Run all parts, even if some fail. Ranks outside a mesh report None for it."""
    ready()
    for part in (_generators, _kinds, _cuts, _expected):
        attempt(report, part.__name__[1:], partial(part, seed))
    for size in RUNS[dist.get_world_size()]:
        _probe_mesh(report, seed, _mesh(size))
    _probe_again(report, seed, _mesh(dist.get_world_size()))


def _mesh(size: int) -> DeviceMesh:
    """Return the mesh of the first ranks."""
    return DeviceMesh("cpu", list(range(size)), mesh_dim_names=("shard",))


def _probe_mesh(report: Report, seed: int, mesh: DeviceMesh) -> None:
    parts: dict[str, Callable[[], Any]] = {
        "emptied": lambda: with_nan(lambda: _paddings(started(seed, mesh))),
        "start": lambda: with_nan(lambda: _start(seed, mesh)),
        "memory": lambda: _memory(seed, mesh),
        "held": lambda: with_nan(lambda: [exchanged(case, hybrid_mesh(mesh), seed) for case in HELD]),
    }
    for name, part in parts.items():
        attempt(report, f"{name} {mesh.size()}", part if mesh.get_coordinate() is not None else lambda: None)


# --- Generators --------------------------------------------------------------------------------------------

Key = tuple[int, str, int]  # seed, name, row


def keys(seed: int) -> list[Key]:
    """Return seeds, names and rows that are easy to confuse; seeds may be negative or large."""
    seeds = [seed, seed + 1, seed + 10, -1 - seed, 2**63 + seed, 2**64 + seed]
    names = "layers.1.weight layers.2.weight layers.1.thgiew layers.11.weight layers.1.bias w w1".split()
    found = list(product(seeds, names, (0, 1, 2, 11, 12, 110, 10**9)))
    # of 16 bits, so many seeds would collide
    return found + [(seed, "w", row) for row in range(200, 800)]


def _generators(seed: int) -> Tensor:
    """Return the first numbers of each generator."""
    return torch.stack([_first(init_shards.row_generator(*key)) for key in keys(seed)])


def _first(generator: torch.Generator) -> Tensor:
    return torch.randint(-(2**62), 2**62, (2,), generator=generator)


def _kinds(seed: int) -> Data:
    """Report the type of a generator, whether a second call gives the same, and what a call changes."""
    some = keys(seed)[:40]
    state = torch.get_rng_state()
    one, other = init_shards.row_generator(*some[0]), init_shards.row_generator(*some[1])
    facts: Data = {"kind": f"{type(one).__name__} on {one.device}", "same object": one is other}
    first = [_first(init_shards.row_generator(*key)) for key in some]
    facts["global"] = not torch.equal(state, torch.get_rng_state())
    torch.manual_seed(seed + 17)
    random.seed(seed + 17)
    again = [_first(init_shards.row_generator(*key)) for key in reversed(some)][::-1]
    facts["changed"] = [i for i, (a, b) in enumerate(zip(first, again, strict=True)) if not torch.equal(a, b)]
    salted = []
    for salt in (1, 2):
        with mock.patch.object(builtins, "hash", partial(_salted, builtins.hash, salt)):
            salted.append([_first(init_shards.row_generator(*key)) for key in some])
    facts["hashed"] = [i for i, (a, b) in enumerate(zip(*salted, strict=True)) if not torch.equal(a, b)]
    return facts


def _salted(usual: Callable[[Any], int], salt: int, value: Any) -> int:
    """Return the `hash` that a text has in another process."""
    return usual((salt, value)) if _has_text(value) else usual(value)


def _has_text(value: Any) -> bool:
    return isinstance(value, str | bytes) or (isinstance(value, tuple) and any(map(_has_text, value)))


def _expected(seed: int) -> dict[str, Tensor]:
    """Return the expected whole parameters, drawn row by row."""
    return {name: _rows(name, shape, dtype, seed) for name, (shape, dtype) in shapes(seed).items()}


def _rows(name: str, shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    rows = []
    for number in range(shape[0] if shape else 1):
        rows.append(torch.empty(shape[1:], dtype=dtype))
        noise(name, rows[-1], init_shards.row_generator(seed, name, number))
    return torch.stack(rows) if shape else rows[0]


class Cut(NamedTuple):
    """A part as tensor parallelism leaves it: cut along several dims, or without elements."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]


CUTS = (
    Cut((9, 8), (4, 5), (2, 3)),
    Cut((6, 4, 5), (1, 0, 2), (3, 4, 2)),
    Cut((3, 12), (0, 12), (3, 0)),
    Cut((3, 12), (3, 0), (0, 12)),
    Cut((4,), (1,), (2,)),
    Cut((), (), ()),
)


def _cuts(seed: int) -> list[Data]:
    """Run `fill_part` by itself: report what it fills, what is right, and how often it calls init."""
    found = []
    for number, (shape, offset, size) in enumerate(CUTS):
        local, name, init = torch.zeros(size), f"cut {number}", Noted()
        init_shards.fill_part(name, init_shards.Part(local, offset), shape, init, seed)
        whole = _rows(name, list(shape), torch.float32, seed)
        right = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        found.append({"local": local, "right": right, "calls": sum(map(len, init.calls.values()))})
    return found


# --- A start -----------------------------------------------------------------------------------------------


def _locals(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: copied(param) for name, param in model.named_parameters()}


def _start(seed: int, mesh: DeviceMesh) -> Data:
    """Report what init is called with, and what the shards hold afterwards."""
    model, init = started(seed, mesh), Noted()
    model.get_buffer("counts").fill_(4)
    torch.manual_seed(seed + 4711)
    state = torch.get_rng_state()
    objects = [id(param) for param in model.parameters()]
    init_shards.init_shards(model, init, seed)
    return {
        "local": _locals(model),
        "calls": init.calls,
        "global": not torch.equal(state, torch.get_rng_state()),
        "buffer": model.get_buffer("counts").tolist(),
        "objects": objects == [id(param) for param in model.parameters()],
        "refused": _refused(seed, mesh),
    }


def _params(model: nn.Module) -> list[FSDPParam]:
    states = dict.fromkeys(state for m in model.modules() if (state := state_of(m)) is not None)
    return [param for state in states for group in state.groups for param in group.params]


def _paddings(model: nn.Module) -> Data:
    """Report, by name, where each shard is in its padded memory."""
    names = {id(param): name for name, param in model.named_parameters()}
    return {names[id(p.sharded_param)]: placed(p, p.local) for p in _params(model)}


def _refused(seed: int, mesh: DeviceMesh) -> str:
    """Return the error for a model that has no memory yet."""
    raised = raised_by(lambda: init_shards.init_shards(sharded(seed, mesh), noise, seed))
    return "nothing" if raised is None else raised.partition(":")[0]


def _probe_again(report: Report, seed: int, mesh: DeviceMesh) -> None:
    """Restart with another seed a model that has run and still has unsharded parameters.

    Its forward and backward gather, so it comes last. A rank that raises leaves, and says so.

    It reports what is held after the second start, for which parameters init was called, and which still have the old values.
    """
    model, init = started(seed, mesh), Noted()
    init_shards.init_shards(model, noise, seed + 1)
    before = _locals(model)
    model.wide.unshard()  # type: ignore[operator]
    model.uneven(torch.ones(2, WIDTH)).sum().backward()
    init_shards.init_shards(model, init, seed)
    local = _locals(model)
    same = [name for name, rows in local.items() if is_same(rows, before[name])]
    report["again"] = {"local": local, "drawn": list(init.calls), "as before": same}


# --- Memory ------------------------------------------------------------------------------------------------


def _memory(seed: int, mesh: DeviceMesh) -> Data:
    """Report the bytes during `to_empty`, during `init_shards` and afterwards, and the collectives."""
    model = sharded(seed, mesh)
    with record() as log, Allocations(ignored=torch.uint8) as seen:  # states of generators
        model.to_empty(device="cpu")
        facts = {"to_empty": [seen.largest, seen.peak], "before": bytes_alive(seen.made)}
        seen.restart()
        init_shards.init_shards(model, noise, seed)
        facts["init_shards"] = [seen.largest, seen.peak]
    gc.collect()
    facts["after"] = bytes_alive(seen.made)
    facts["collectives"] = [event.op for event in log.events if event.op in COLLECTIVES]
    return facts
