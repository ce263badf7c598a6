"""12, on the ranks: cuts on meshes of all kinds, and a tensor-parallel model under FSDP.

`Cuts` says which mesh dims cut what, and in which order. A closed form derives the matching placements from it. So the right
answer to every question for the learner's functions is known.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import permutations, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hwfsdp import compat, fully_shard
from hwfsdp.course.checks import piece, plain, two_layers, with_nan
from hwfsdp.course.checks.lifetimes import copied
from hwfsdp.course.run import Report, attempt
from hwfsdp.errors import UsageError
from hwfsdp.features import layouts
from hwfsdp.layout import extents

Sizes = tuple[int, ...]
GRID = (2, 2)  # data-parallel, tensor-parallel
STEPS, LR = 2, 0.25
PADDING, REPLICA = 777.0, 888.0  # values that must not come back


class Cuts(NamedTuple):
    """Which mesh dims cut which tensor dim: `orders` has, for each tensor dim, the mesh dims that cut it, in order."""

    mesh: Sizes
    orders: tuple[Sizes, ...]

    def placements(self) -> list[Placement]:
        """Return the placements that say the same, with split factors from a closed form."""
        found: list[Placement] = [Replicate()] * len(self.mesh)
        for dim, order in enumerate(self.orders):
            for place, mesh_dim in enumerate(order):
                before = [self.mesh[j] for j in order[:place] if j > mesh_dim]
                found[mesh_dim] = compat.strided_shard(dim, prod(before)) if before else Shard(dim)
        return found

    def by_dim(self) -> dict[int, list[int]]:
        """Return the orders of the tensor dims that are cut."""
        return {dim: list(order) for dim, order in enumerate(self.orders) if order}

    def coordinates(self) -> Iterator[Sizes]:
        """Yield the coordinates of all ranks, in row-major order."""
        return product(*map(range, self.mesh))

    def __str__(self) -> str:
        return f"mesh {self.mesh}, {listed(self.placements())}"


def listed(placements: Iterable[Any]) -> str:
    return f"[{', '.join(map(shown, placements))}]"


def shown(placement: Any) -> str:
    """Return a placement as text, the same with every version of torch. Learners may also return something else."""
    if isinstance(placement, compat.StridedShard):
        return f"StridedShard({placement.dim}, split_factor={placement.split_factor})"
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return f"{type(placement).__name__.capitalize()}()"


# --- Cases -------------------------------------------------------------------------------------------------


def small_cuts() -> list[Cuts]:
    """Return every order of cuts of one tensor dim on every mesh up to 4 x 4 and 3 x 3 x 3."""
    meshes = [*product(range(1, 5), repeat=2), *product(range(1, 4), repeat=3)]
    return [Cuts(mesh, (order,)) for mesh in meshes for order in permutations(range(len(mesh)))]


def mixed_cuts(seed: int, count: int = 60) -> list[Cuts]:
    """Return meshes whose dims cut different tensor dims, or replicate. The first ones are always the same."""
    draw = random.Random(seed)
    found = [
        Cuts((2, 3), ((1,),)),
        Cuts((3, 2), ((0,),)),
        Cuts((2, 3, 2), ((2, 0),)),
        Cuts((2, 2, 2), ((2, 0), (1,))),
        Cuts((3, 2, 2, 2), ((3, 1), (2, 0))),
    ]
    while len(found) < count:
        mesh = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 4)))
        ndim = draw.randint(1, 3)
        owner = [draw.choice([None, *range(ndim)]) for _ in mesh]
        orders = [[m for m, of in enumerate(owner) if of == dim] for dim in range(ndim)]
        for order in orders:
            draw.shuffle(order)
        if prod(mesh) <= 64:
            found.append(Cuts(mesh, tuple(map(tuple, orders))))
    return found


def all_cuts(seed: int) -> list[Cuts]:
    return small_cuts() + mixed_cuts(seed)


def boxes(seed: int) -> list[tuple[Cuts, Sizes]]:
    """Return cuts and shapes to cut: every length up to 16 on meshes of two dims, and some lengths on other meshes."""
    draw = random.Random(seed)
    found: list[tuple[Cuts, Sizes]] = []
    for cuts in small_cuts():
        lengths = range(17) if len(cuts.mesh) == 2 else draw.sample(range(28), 3)
        found += [(cuts, (n,)) for n in lengths]
    found += [(cuts, tuple(draw.randint(0, 9) for _ in cuts.orders)) for cuts in mixed_cuts(seed)]
    return [*found, (Cuts((3, 2), ((1, 0),)), (7, 3)), (Cuts((2, 2), ((1, 0),)), (10**16 + 1,))]


REFUSED: list[tuple[Sizes, list[Any]]] = [
    ((3, 2), [compat.strided_shard(0, 3), Shard(0)]),
    ((2, 2), [Shard(0), compat.strided_shard(0, 2)]),
    ((2, 2, 3), [compat.strided_shard(0, 3), Shard(0), Shard(0)]),
    ((2, 2), [compat.strided_shard(0, 2), Shard(1)]),
    ((2, 2), [compat.strided_shard(0, 2), Replicate()]),
]


class Tensors(NamedTuple):
    """A tensor to cut. pad: its shards are padded."""

    cuts: Cuts
    shape: Sizes
    dtype: torch.dtype
    pad: bool = False

    def whole(self) -> Tensor:
        """Return the tensor. All elements are different, none is zero, and all are exact in the dtypes used."""
        return torch.arange(1, prod(self.shape) + 1).to(self.dtype).view(self.shape)

    def pieces(self) -> list[Tensor]:
        """The oracle: return the chunks of chunks of all ranks."""
        return [box_of(self.whole(), self.cuts, coordinate) for coordinate in self.cuts.coordinates()]

    def shards(self, padding: float = 0.0) -> list[Tensor]:
        """Return the right shards in memory of their own. All are as large as the largest one if they are padded."""
        pieces, found = self.pieces(), list[Tensor]()
        largest = [max(sizes) for sizes in zip(*(part.shape for part in pieces), strict=True)]
        for part in pieces:
            found.append(part.new_full(largest if self.pad else part.shape, padding))
            found[-1][tuple(map(slice, part.shape))] = part
        return found

    def __str__(self) -> str:
        return f"shape {self.shape}, {self.cuts}"


def tensors(seed: int) -> list[Tensors]:
    """Return uneven tensors, one that leaves most ranks without rows, one without dims, and tensors that the seed draws.

    Each is there twice: without padding, and with it.
    """
    draw = random.Random(seed)
    shapes = (5,), (6, 4), (3, 7, 2), (9, 5), (4, 3, 5)
    found = [
        Tensors(Cuts((3, 2), ((1, 0),)), (7,), torch.float32),
        Tensors(Cuts((2, 2), ((1, 0), ())), (7, 3), torch.float64),
        Tensors(Cuts((2, 2), ((1,), (0,))), (3, 5), torch.float32),
        Tensors(Cuts((4, 2), ((1, 0),)), (2,), torch.int64),
        Tensors(Cuts((2, 2), ((1,),)), (5,), torch.float32),
        Tensors(Cuts((2,), ()), (), torch.float32),
    ]
    for cuts in mixed_cuts(seed, 30)[5:]:
        shape = draw.choice([s for s in shapes if len(s) >= len(cuts.orders)])
        if prod(cuts.mesh) <= 16:
            found.append(Tensors(cuts, shape, draw.choice([torch.float32, torch.float64])))
    return [case._replace(pad=pad) for case in found for pad in (False, True)]


def box_of(whole: Tensor, cuts: Cuts, coordinate: Sizes) -> Tensor:
    """The oracle: return chunks of chunks."""
    for dim, order in enumerate(cuts.orders):
        for mesh_dim in order:
            whole = piece(whole, cuts.mesh[mesh_dim], coordinate[mesh_dim], dim)
    return whole


Axes = list[tuple[Any, int]]  # placement and size


def axes(seed: int) -> list[tuple[Axes, int]]:
    """Return the placements and sizes of the axes on the right of FSDP's axis, and the dim that FSDP cuts."""
    draw = random.Random(seed)
    found: list[tuple[Axes, int]] = [
        ([(Shard(0), 2)], 0),
        ([(Shard(0), 3)], 0),
        ([(Replicate(), 2)], 0),
        ([(Shard(1), 2)], 0),
        ([], 0),
        ([(Shard(0), 1)], 0),
        ([(Shard(1), 4), (Shard(0), 3)], 1),
        ([(compat.strided_shard(0, 2), 3), (Shard(0), 2)], 0),
        ([(Partial(), 2), (Shard(0), 2)], 0),
    ]
    kinds = [Shard(0), Shard(1), Replicate(), Shard(0), compat.strided_shard(0, 2)]
    for _ in range(30):
        before = [(draw.choice(kinds), draw.randint(1, 4)) for _ in range(draw.randint(1, 3))]
        found.append((before, draw.randint(0, 1)))
    return found


# --- Integers and tensors, on one rank ---------------------------------------------------------------------


def probe_cuts(report: Report, seed: int) -> None:
    """Run every function by itself, so that one that raises does not hide the others."""
    parts: dict[str, Callable[[], Any]] = {
        "cut after": lambda: [shown(layouts.cut_after(*case)) for case in axes(seed)],
        "joined": lambda: [_joined(*case) for case in axes(seed)],
        "orders": lambda: [_order(c.mesh, c.placements()) for c in all_cuts(seed)],
        "refused": lambda: [_refusal(partial(extents.orders_of_cuts, *case)) for case in REFUSED],
        "boxes": lambda: _boxes(seed),
        "shards": lambda: with_nan(lambda: [_sharded(case) for case in tensors(seed)]),
        "whole": lambda: with_nan(lambda: [_unsharded(case) for case in tensors(seed)]),
        "misfits": lambda: [_refusal(misfit) for misfit in _misfits()],
    }
    for key, part in parts.items():
        attempt(report, key, part)


def _joined(before: Axes, dim: int) -> list[Any]:
    placements, sizes = [p for p, _ in before], [size for _, size in before]
    made = [
        layouts.joined_placements(own, placements, sizes, dim)
        for own in ((Shard(dim),), (Replicate(), Shard(dim)))
    ]
    return [[*map(shown, found)] for found in made]


def _order(mesh: Sizes, placements: list[Placement]) -> Any:
    """Return [dim, mesh dims] for each tensor dim; the error text if the placements were refused."""
    try:
        found = extents.orders_of_cuts(mesh, placements)
    except UsageError as error:
        return str(error)
    return plain([[dim, list(order)] for dim, order in sorted(found.items())])


def _refusal(call: Callable[[], object]) -> str:
    """Return "refused", or what the call returned or raised."""
    try:
        return " ".join(f"returned {call()!r}".split())[:120]
    except UsageError:
        return "refused"
    except (TypeError, AttributeError, NameError):  # a wrong call, not a different answer
        raise
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"[:120]


def _boxes(seed: int) -> Tensor | dict[str, Any]:
    """Return shape and offset of every rank, end to end. If a result is not a pair of tuples of integers, return the first such case."""
    numbers: list[int] = []
    for cuts, shape in boxes(seed):
        for coordinate in cuts.coordinates():
            found = extents.nested_extent(shape, cuts.mesh, cuts.by_dim(), coordinate)
            parts = [getattr(found, name, None) for name in ("shape", "offset")]
            if any(type(part) is not tuple or [*map(type, part)] != [int] * len(shape) for part in parts):
                case = f"shape {shape}, {cuts}, coordinate {coordinate}"
                return {"case": case, "shown": repr(found)[:120]}
            numbers += [*found.shape, *found.offset]
    return torch.tensor(numbers)


def _sharded(case: Tensors) -> dict[str, Any]:
    whole = case.whole().requires_grad_(case.dtype.is_floating_point)
    kept = whole.detach().clone()
    shards = extents.shard_strided(whole, case.cuts.mesh, case.cuts.placements(), pad=case.pad)
    grad = None
    if whole.requires_grad and any(s.requires_grad for s in shards):
        sum((number + 1) * shard.sum() for number, shard in enumerate(shards)).backward()  # type: ignore[union-attr]
        grad = whole.grad
    keys = {compat.storage_key(shard) for shard in shards}
    return {
        "shards": [shard.detach() for shard in shards],
        "contiguous": all(shard.is_contiguous() for shard in shards),
        "own": len(keys) == len(shards) and compat.storage_key(whole) not in keys,
        "views": [compat.storage_key(shard) == compat.storage_key(whole) for shard in shards],
        "bytes": [shard.untyped_storage().nbytes() for shard in shards],
        "written": not torch.equal(whole.detach(), kept),
        "grad": grad,
    }


def _unsharded(case: Tensors) -> dict[str, Any]:
    """Unshard shards that the oracle cut. Their padding and replicas must not come back."""
    cuts, seen, shards = case.cuts, set[Sizes](), case.shards(PADDING)
    for coordinate, shard in zip(cuts.coordinates(), shards, strict=True):
        where = tuple(coordinate[m] for order in cuts.orders for m in order)
        if where in seen:
            shard[shard != PADDING] = REPLICA
        seen.add(where)
        shard.requires_grad_(shard.is_floating_point())
    before = [shard.detach().clone() for shard in shards]
    found = extents.unshard_strided(shards, case.shape, cuts.mesh, cuts.placements())
    keys = {compat.storage_key(shard) for shard in shards}
    return {
        "whole": found.detach(),
        "whole_grad": found.requires_grad == shards[0].requires_grad,
        "own": not found.numel() or compat.storage_key(found) not in keys,
        "same": all(torch.equal(a, b) for a, b in zip(before, shards, strict=True)),
        "laid out": torch.cat([s.flatten() for s in before]),
    }


def _misfits() -> list[Callable[[], object]]:
    """Return calls with too few shards, with one too small, and with one too large."""
    mesh, placements, whole = (3, 2), [compat.strided_shard(0, 2), Shard(0)], torch.arange(7)
    shards = [box_of(whole, Cuts(mesh, ((1, 0),)), c) for c in product(range(3), range(2))]
    wrong = [shards[:-1], [shards[0][:1], *shards[1:]], [torch.arange(3), *shards[1:]]]
    return [partial(extents.unshard_strided, each, (7,), mesh, placements) for each in wrong]


# --- FSDP over tensor parallelism, on four ranks -----------------------------------------------------------


def build(seed: int) -> nn.Sequential:
    """Return two linear layers. Tensor parallelism cuts the first along its outputs, the second along its inputs."""
    draw = torch.Generator().manual_seed(seed)
    hidden = (7, 3, 9, 5)[int(torch.randint(0, 4, (1,), generator=draw))]  # 2 and 4 divide none of them
    model = two_layers(4, hidden, 3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-2, 3, param.shape, generator=draw))
    return model


def batch(seed: int, step: int, index: int) -> Tensor:
    """Return integers, different for every step and data-parallel index."""
    draw = torch.Generator().manual_seed(seed * 100 + step * 10 + index)
    return torch.randint(-2, 3, (4, 4), generator=draw).float()


def loss_of(out: Tensor) -> Tensor:
    return (out * torch.arange(1.0, out.shape[1] + 1)).sum() / 4


def probe_training(report: Report, seed: int) -> None:
    """Train two steps; report every parameter's rows before and after."""
    mesh = init_device_mesh("cpu", GRID, mesh_dim_names=("dp", "tp"))
    model = build(seed)
    parallelize_module(
        model, mesh["tp"], {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    )
    fully_shard(model, mesh=mesh["dp"])
    params: dict[str, Any] = dict(model.named_parameters())
    report["placements"] = {name: listed(param.placements) for name, param in params.items()}
    report["before"] = {name: copied(param) for name, param in params.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    report["losses"] = losses = []
    for step in range(STEPS):
        loss = loss_of(model(batch(seed, step, mesh.get_local_rank("dp"))))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report["after"] = {name: copied(param) for name, param in params.items()}
