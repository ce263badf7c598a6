"""11, on the ranks: parts of a group by themselves, and a small model with a tied, a frozen and a bf16 parameter.

Weights and inputs are small integers, and each loss is multiplied by the number of ranks, so that no sum and no mean has to
round, in whatever order it is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hwfsdp
from hwfsdp import MixedPrecisionPolicy, collectives, events, record
from hwfsdp.group import FSDPCommContext, ParamGroup
from hwfsdp.learn.checks.grouped_buffers_trees import found_modules, found_parameters
from hwfsdp.learn.checks.lifetimes import ready
from hwfsdp.learn.run import Report, attempt, log_data
from hwfsdp.mesh import ShardMesh, shard_mesh, smaller_mesh
from hwfsdp.param import FSDPParam, Slot
from hwfsdp.placement import spread

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
Shape = tuple[int, ...]


def drawing(*numbers: int) -> torch.Generator:
    seed = 0
    for number in numbers:
        seed = (seed * 1009 + number) % (1 << 40)
    return torch.Generator().manual_seed(seed)


def whole_numbers(shape: Shape, draw: torch.Generator, dtype: torch.dtype = FP32) -> Tensor:
    """Small ones, none of them zero."""
    return (torch.randint(1, 50, shape, generator=draw) * 2 - 51).to(dtype)


# --- Columns: a gather's buffer and what is copied out of it -----------------------------------------------


class Column(NamedTuple):
    """A tensor that was gathered: its dtype, the shape of a row of it, and whether its memory is laid out so."""

    dtype: torch.dtype
    shape: Shape
    is_contiguous: bool = True


COLUMNS: list[tuple[int, list[Column]]] = [  # by number of ranks
    *((w, [Column(FP32, (6,)), Column(FP32, (2, 3)), Column(FP32, (1,))]) for w in (1, 2, 3, 4)),
    *((w, [Column(BF16, (4,)), Column(FP32, (3, 2), False), Column(FP32, (5,))]) for w in (2, 3)),
    (2, [Column(FP32, (3, 4), False), Column(FP32, (0,)), Column(FP32, (2, 2), False), Column(FP32, (7,))]),
    (4, [Column(BF16, (5,)), Column(FP32, (2,)), Column(FP16, (3,)), Column(BF16, (0, 2))]),
    (3, [Column(BF16, (8,))]),
]


class Gather(NamedTuple):
    """What `copy_columns` is given."""

    flat: Tensor
    sizes: list[int]
    wholes: list[Tensor]


def gather_of(seed: int, number: int) -> tuple[Gather, list[Tensor]]:
    """A buffer, and beside it what each tensor has to be, row by row."""
    ranks, columns = COLUMNS[number]
    draw = drawing(seed, 11, number)
    mixed = len({column.dtype for column in columns}) > 1
    expected = [whole_numbers((ranks, *c.shape), draw, c.dtype) for c in columns]
    rows = []
    for rank in range(ranks):
        parts = [whole[rank].reshape(-1) for whole in expected]
        rows.append(torch.cat([part.view(torch.uint8) if mixed else part for part in parts]))
    sizes = [e[0].numel() * (e.element_size() if mixed else 1) for e in expected]
    wholes = [_unwritten(e, column.is_contiguous) for e, column in zip(expected, columns, strict=True)]
    return Gather(torch.stack(rows), sizes, wholes), expected


def _unwritten(like: Tensor, is_contiguous: bool) -> Tensor:
    """Memory of this shape, all zeros; if not contiguous, as of a parameter that is cut along its dim 1."""
    if is_contiguous:
        return torch.zeros_like(like)
    return torch.zeros(like.shape[1], like.shape[0], *like.shape[2:], dtype=like.dtype).transpose(0, 1)


def _columns(seed: int) -> list[Any]:
    found = []
    for number in range(len(COLUMNS)):
        gather, _ = gather_of(seed, number)
        before = gather.flat.clone()
        collectives.copy_columns(gather.flat, list(gather.sizes), list(gather.wholes))
        wholes = [whole.contiguous() for whole in gather.wholes]
        found.append({"wholes": wholes, "read only": torch.equal(before, gather.flat)})
    return found


# --- Groups without a model --------------------------------------------------------------------------------


def shapes_of(seed: int, world_size: int) -> list[Shape]:
    """Rows that do not divide, in the first and in a later place; rows that do; fewer rows than ranks."""
    pick = iter(torch.randint(0, 1000, (8,), generator=drawing(seed, 12)).tolist())
    uneven = [world_size * (1 + next(pick) % 2) + 1 + next(pick) % (world_size - 1) for _ in range(2)]
    return [(uneven[0], 1 + next(pick) % 3), (2 * world_size, 2), (1, 3), (uneven[1],), (world_size, 1)]


def _param(mesh: ShardMesh, name: str, shape: Shape, policy: MixedPrecisionPolicy) -> FSDPParam:
    module = nn.Module()
    param = nn.Parameter(torch.ones(shape))
    module.register_parameter("weight", param)
    return FSDPParam(param, [Slot(module, "weight")], name, mesh, policy, spread(param, 0, mesh, name))


def _group(mesh: ShardMesh, params: list[Any]) -> ParamGroup:
    group = ParamGroup(params, mesh, FSDPCommContext("cpu"), mesh)
    group.rename("group")
    return group


def _pieces(seed: int, mesh: ShardMesh) -> list[Any]:
    """Of all parameters, and of some of them: names, pieces, and whether these are views."""
    shapes = shapes_of(seed, mesh.size)
    params = [_param(mesh, f"p{i}", shape, MixedPrecisionPolicy()) for i, shape in enumerate(shapes)]
    group, found = _group(mesh, params), []
    for chosen in (params, [params[3], params[0], params[2]]):
        result = torch.arange(1.0, 1 + sum(p.padded_numel for p in chosen))
        pieces = [(p.fqn, piece) for p, piece in group.pieces(chosen, result)]
        memory = result.untyped_storage().data_ptr()
        views = [not piece.numel() or piece.untyped_storage().data_ptr() == memory for _, piece in pieces]
        found.append({"pieces": [[name, piece.clone()] for name, piece in pieces], "views": views})
    return found


class Case(NamedTuple):
    """A parameter at the end of a backward; of a group with `reduce_unused` and `all_reduce_grads` as they are."""

    gathered: bool
    trained: bool
    grad: bool
    partial: bool
    accumulated: bool

    @property
    def name(self) -> str:
        words = (
            "gathered" if self.gathered else "never gathered",
            "trained" if self.trained else "frozen",
            "with a gradient" if self.grad else "without a gradient",
            "with an accumulated one" if self.accumulated else "",
            "with a partial one" if self.partial else "",
        )
        return ", ".join(filter(None, words))


CASES = [Case(*c) for c in itertools.product((False, True), repeat=5) if c[0] or not (c[2] or c[4])]
FLAGS = list(itertools.product((False, True), repeat=2))  # reduce_unused, all_reduce_grads
TAKEN_SHAPE = (3, 2)


def _taken(mesh: ShardMesh) -> list[Any]:
    """For all flags: names and gradients that were taken, and names of parameters that still have one."""
    found = []
    for reduce_unused, all_reduce_grads in FLAGS:
        params = [_param(mesh, c.name, TAKEN_SHAPE, MixedPrecisionPolicy(BF16, FP32)) for c in CASES]
        for number, (param, case) in enumerate(zip(params, CASES, strict=True)):
            _prepare(param, case, float(number + 1))
        group = _group(mesh, params)
        group.reduce_unused, group.all_reduce_grads = reduce_unused, all_reduce_grads
        taken, grads = group.take_grads()
        left = [p.fqn for p in params if p.has_unreduced_grad]
        found.append(
            {"names": [p.fqn for p in taken], "grads": [grad.clone() for grad in grads], "left": left}
        )
    return found


def _prepare(param: FSDPParam, case: Case, value: float) -> None:
    if case.gathered:
        param.allocate()
        assert param.unsharded_param is not None
        if case.grad:
            param.unsharded_param.grad = torch.full(TAKEN_SHAPE, value, dtype=BF16)
    if case.accumulated:
        param.accumulated_grad = torch.full(TAKEN_SHAPE, 100 * value)
    if case.partial:
        param.partial_grad = torch.zeros(param.local_shape)
    param.sharded_param.requires_grad_(case.trained)


# --- A gather of tensors that no parameter has -------------------------------------------------------------


class Travels(FSDPParam):
    """A parameter in all but what it contributes to a gather: that, and where it was asked for."""

    def __init__(
        self, tensors: list[Tensor], dtypes: list[torch.dtype], mesh: ShardMesh, over: ShardMesh
    ) -> None:
        module, param = nn.Module(), nn.Parameter(torch.ones(mesh.size, 2))
        module.register_parameter("weight", param)
        placed, policy = spread(param, 0, mesh, "weight"), MixedPrecisionPolicy()
        super().__init__(param, [Slot(module, "weight")], "weight", mesh, policy, placed)
        self.tensors, self.in_dtypes, self.gather_mesh = tensors, dtypes, over
        self.asked_on: list[str] = []

    def gather_inputs(self) -> list[Tensor]:
        recorder = events.active()
        self.asked_on.append(str(recorder.stream) if recorder else "")
        return list(self.tensors)

    @property
    def gather_dtypes(self) -> list[torch.dtype]:
        return list(self.in_dtypes)


def travelling(seed: int, kind: str, rank: int) -> list[tuple[list[Tensor], list[torch.dtype]]]:
    """Per parameter, what a rank contributes, and in which dtypes it is gathered."""
    draw = drawing(seed, 13, rank, len(kind))
    sizes = torch.randint(1, 6, (5,), generator=drawing(seed, 14, len(kind))).tolist()
    wide = BF16 if kind == "in bf16" else FP32
    dtypes = [
        [wide],
        [FP32 if kind == "of several dtypes" else wide, BF16 if wide is BF16 or "sev" in kind else FP32],
    ]
    tensors = [whole_numbers((size,), draw) for size in sizes]
    parts = [tensors[:1], tensors[1:3], tensors[3:4], tensors[4:]]
    parts = parts[1:2] if kind == "of one parameter" else parts
    return [(part, (dtypes[1] if len(part) == 2 else dtypes[0])) for part in parts]


GATHERS = ("in fp32", "in bf16", "of several dtypes", "of one parameter", "from fewer ranks")


def _gathers(seed: int, mesh: ShardMesh) -> dict[str, Any]:
    fewer, found = smaller_mesh(mesh, 1), {}
    for kind in GATHERS:
        over = fewer if kind == "from fewer ranks" else mesh
        params = [Travels(*each, mesh, over) for each in travelling(seed, kind, mesh.rank)]
        group, released = _group(mesh, list(params)), []
        with record() as log:
            recorder = events.active()
            group.comm_ctx.release_gather_buffer = lambda: released.append(  # type: ignore[method-assign]
                sum(draft.event.op in events.COLLECTIVES for draft in recorder.drafts) if recorder else 0
            )
            gathered = group._gather()
            group.comm_ctx.streams.compute.wait(gathered.done)
        found[kind] = {
            "flat": gathered.flat.clone(),
            "sizes": list(gathered.sizes),
            "released": released,
            "asked": [p.asked_on for p in params],
            "log": log_data(log),
        }
    return found


# --- A model -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two linear layers; a bias is frozen, and so is a bf16 scale: a group of two dtypes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 5), nn.Linear(5, width)
        self.scale = nn.Parameter(torch.ones(width, dtype=BF16), requires_grad=False)
        self.down.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.scale.float()  # type: ignore[no-any-return]


class Model(nn.Module):
    """Tokens to tokens: the head's weight is that of the embedding, whose rows divide by no number of ranks."""

    def __init__(self, seed: int, world_size: int) -> None:
        super().__init__()
        draw, self.width = drawing(seed, 15), 3
        self.tokens = world_size * 3 + 1
        self.embed = nn.Embedding(self.tokens, self.width)
        self.blocks = nn.ModuleList(Block(self.width) for _ in range(2))
        self.norm = nn.Linear(self.width, self.width)
        self.head = nn.Linear(self.width, self.tokens, bias=False)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-1, 2, param.shape, generator=draw))
        self.head.weight = self.embed.weight
        self.looks: list[list[bool]] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        self.looks.append(self.tied())
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def tied(self) -> list[bool]:
        """Whether both places have one object, and whether it is whole."""
        weight: Any = self.head.weight
        return [weight is self.embed.weight, not isinstance(weight, DTensor)]


RATE = 0.25


def batch(model: Model, seed: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens, and by how much each output counts."""
    draw = drawing(seed, 16, rank)
    ids = torch.randint(0, model.tokens, (4,), generator=draw)
    return ids, torch.randint(-1, 2, (4, model.tokens), generator=draw).float()


def loss_of(model: Any, seed: int, rank: int, world_size: int) -> Tensor:
    ids, counts = batch(model, seed, rank)
    loss: Tensor = (model(ids) * counts).sum() * world_size
    return loss


def groups_of(model: Model) -> dict[str, list[nn.Parameter]]:
    """By group, its parameters: a block's, and what is left to the root."""
    groups: dict[str, list[nn.Parameter]] = {"blocks.0": [], "blocks.1": [], "Model": []}
    for name, param in model.named_parameters():
        groups[name[:8] if name.startswith("blocks") else "Model"].append(param)
    return groups


def train(report: Report, seed: int, package: Any) -> None:
    """One step, and what there is afterwards."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model: Any = Model(seed, world_size)
    for module in (*model.blocks, model):
        package.fully_shard(module, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loss_of(model, seed, rank, world_size).backward()
    report["grads"] = dict(_local(model, lambda p: p.grad))
    optimizer.step()
    report["params"] = dict(_local(model, lambda p: p))
    report["tied"] = [*model.looks.pop(), *model.tied()]


def _local(model: nn.Module, look: Any) -> Iterator[tuple[str, Any]]:
    """All names, tied ones too."""
    for name, param in model.named_parameters(remove_duplicate=False):
        found = look(param)
        yield name, found.to_local().detach().clone() if isinstance(found, DTensor) else _plain(found)


def _plain(found: Tensor | None) -> Tensor | None:
    return None if found is None else found.detach().clone()


def probe_groups(report: Report, seed: int) -> None:
    """Parts, each by itself; then gathers."""
    ready()
    mesh = shard_mesh(None)
    attempt(report, "modules", lambda: found_modules(seed))
    attempt(report, "parameters", lambda: found_parameters(seed))
    attempt(report, "columns", lambda: _columns(seed))
    attempt(report, "pieces", lambda: _pieces(seed, mesh))
    attempt(report, "taken", lambda: _taken(mesh))
    report["gathers"] = _gathers(seed, mesh)


def probe_step(report: Report, seed: int) -> None:
    """The model."""
    with record() as log:
        train(report, seed, hwfsdp)
    report["log"] = log_data(log)


def probe_fsdp2(report: Report, seed: int) -> None:
    """The same model with torch's `fully_shard`: the oracle's oracle."""
    train(report, seed, torch.distributed.fsdp)
