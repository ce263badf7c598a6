"""11, on ranks: a model on a mesh, its gradients after each micro-batch, and every collective with the ranks that take part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hwfsdp.comm.users_collectives import tensors_in
from hwfsdp.comm import shared_memory
from hwfsdp.course.probing import Report, submitted
from hwfsdp.course.watching import Watched, bytes_alive, collectives_of, copied, ready, watch

WIDTH, ROWS = 6, 4
BLOCKS = ("0", "1", "2", "3")
PATIENCE = timedelta(seconds=10)  # for other ranks, whose tensors may have another size
OPS = ("all_gather", "reduce_scatter", "all_reduce")


class Micro(NamedTuple):
    """A micro-batch: whether its gradients go to other nodes, the blocks that run, and whether a step of the optimizer was before it."""

    all_reduces: bool = True
    blocks: tuple[str, ...] = BLOCKS
    begins: bool = False
    shifted: bool = False


RUNS = {
    "one micro-batch": [Micro()],
    "two steps": [Micro(shifted=True), Micro(), Micro(shifted=True, begins=True)],
    "partial gradients": [
        Micro(False),
        Micro(False, BLOCKS[:3]),
        Micro(True, BLOCKS[:1]),
        Micro(True, begins=True),
        Micro(False, begins=True),
        Micro(True, BLOCKS[:2], begins=True),
    ],
}


class Log:
    """What happens in a run, in its order.

    Attributes:
        calls: see `probe_run`. of_autograd: memory of gradients that autograd may read again. sent: inputs of reduce-scatters.
        right: by op, the ranks over which it runs. is_over: one has run over others.
    """

    is_over = False

    def __init__(self, right: dict[str, list[int]] | None = None) -> None:
        self.calls, self.right = list[Any](), right or {}
        self.of_autograd, self.sent = list[Watched](), list[Watched]()


class Begins(torch.autograd.Function):
    """Nothing; it notes when the backward gets here, and the memory of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, log: Log) -> Tensor:
        ctx.name, ctx.log = name, log
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.calls.append(["backward", ctx.name])
        ctx.log.of_autograd.append(watch(grad))
        return grad, None, None


class Block(nn.Module):
    """Five rows, six rows and one row: no mesh divides them all. In block 1, one parameter is frozen."""

    def __init__(self, name: str, log: Log) -> None:
        super().__init__()
        self.name, self.log = name, log
        self.down = nn.Linear(WIDTH, 5, bias=False)
        self.up = nn.Linear(5, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(1, WIDTH))
        self.up.weight.requires_grad_(name != "1")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(self.down(x)) * self.scale
        return Begins.apply(x, self.name, self.log)  # type: ignore[no-any-return,no-untyped-call]


class Shift(nn.Module):
    """Two parameters that get one gradient: the same tensor for both."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.left, self.right = nn.Parameter(torch.ones(ROWS, WIDTH)), nn.Parameter(torch.ones(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Begins.apply(x + self.left + self.right, "shift", self.log)  # type: ignore[no-any-return,no-untyped-call]


class Model(nn.Module):
    """Blocks, some of which a micro-batch skips, and a head that the root owns."""

    def __init__(self, seed: int, log: Log) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: Block(name, log) for name in BLOCKS})
        self.shift, self.head = Shift(log), nn.Linear(WIDTH, 3, bias=False)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=draw) / 2)

    def forward(self, x: Tensor, micro: Micro) -> Tensor:
        for name in micro.blocks:
            x = self.blocks[name](x)
        x = self.shift(x) if micro.shifted else x
        return self.head(x)  # type: ignore[no-any-return]

    @property
    def units(self) -> list[nn.Module]:
        return [*self.blocks.values(), self.shift, self]


def loss_of(model: nn.Module, seed: int, rank: int, number: int, micro: Micro) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * seed + 100 * number + rank)
    x = torch.randn(ROWS, WIDTH, generator=draw, requires_grad=True)
    output: Tensor = model(x, micro)
    return (output * torch.randn(ROWS, 3, generator=draw)).sum()


def parts_of(name: str, seed: int, world_size: int) -> list[list[dict[str, Tensor | None]]]:
    """Return the whole gradients of the unsharded model: [rank][micro-batch], by name."""
    found = list[list[dict[str, Tensor | None]]]()
    for rank in range(world_size):
        model = Model(seed, Log())
        found.append([])
        for number, micro in enumerate(RUNS[name]):
            model.zero_grad()
            loss_of(model, seed, rank, number, micro).backward()
            found[rank].append({each: copied(param.grad) for each, param in model.named_parameters()})
    return found


# --- Collectives -------------------------------------------------------------------------------------------


class Stopped(Exception):
    """A collective runs over the wrong ranks. They may not even have tensors of the same size."""


class Late(dist.Work):
    """A collective that takes its inputs when it begins, and gives its results when the program waits for it, not before.

    If the program changes a tensor in between, the results are NaN.
    """

    def __init__(self, run: Any, written: list[Tensor], read: list[Tensor], calls: list[Any]) -> None:
        super().__init__()
        self.run, self.calls, self.number, self.written = run, calls, len(calls), written
        self.given = [(tensor.detach(), tensor.detach().clone()) for tensor in read]
        self.spoil()
        self.versions = [tensor._version for tensor in (*written, *read)]

    def spoil(self) -> None:
        for tensor in self.written:
            tensor.detach().fill_(torch.nan)

    def wait(self, *_: Any) -> bool:
        if self.run is not None:
            self.calls.append(["wait", self.number])
            is_changed = self.versions != [t._version for t in (*self.written, *(t for t, _ in self.given))]
            for tensor, value in self.given:
                tensor.copy_(value)
            if work := self.run():
                work.wait(PATIENCE)
            if is_changed:
                self.spoil()
            self.run, self.given, self.written = None, [], []
        return True

    def is_completed(self) -> bool:
        return self.run is None


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@contextmanager
def late(log: Log) -> Iterator[None]:
    """Note each collective: [op, its ranks, bytes of the whole, bytes of earlier gradients that are there, whether it writes to autograd's]."""

    def wrapped(name: str, original: Any) -> Any:
        plain = name.replace("_", "")
        op = next((op for op in OPS if plain.startswith(op.replace("_", ""))), name)

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            written, given = map(tensors_in, args[:2])
            read = written if op == "all_reduce" else given
            ranks, whole = dist.get_process_group_ranks(group), max(written, read, key=bytes_of)
            kept = bytes_alive(log.sent) if op == "reduce_scatter" else 0
            taken = any(ref() is t.untyped_storage() for ref in log.of_autograd for t in written)
            log.sent += [watch(tensor) for tensor in read if op == "reduce_scatter"]
            work = Late(lambda: original(group, *args, **kwargs), written, read, log.calls)
            log.calls.append([op, ranks, bytes_of(whole), kept, taken])
            if log.right.get(op) != ranks:
                log.is_over = True
                raise Stopped
            return work

        return call

    kind, through = dist.ProcessGroup, mock.patch.object(shared_memory, "over", lambda group, device: group)
    calls = {name: vars(kind)[name] for name in collectives_of(kind) if name in vars(kind)}
    with through, mock.patch.multiple(kind, **{name: wrapped(name, call) for name, call in calls.items()}):
        yield


# --- Probes ------------------------------------------------------------------------------------------------


def mesh_of(replicas: int) -> DeviceMesh:
    shape = replicas, dist.get_world_size() // replicas
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def probe_axes(report: Report, replicas: int) -> None:
    """Report, by axis: its ranks, the ranks of its group, this rank's place."""
    axes = submitted().axes_of(mesh_of(replicas))
    report["axes"] = {
        name: [list(axis.ranks), dist.get_process_group_ranks(axis.group), axis.number]
        for name, axis in (("shard", axes.shard), ("replicate", axes.replicate))
    }


def lines_of(rank: int, replicas: int, shards: int) -> dict[str, list[int]]:
    """Return the ranks of this rank's node, and the ranks that hold the same rows."""
    node = rank // shards * shards
    across = range(rank % shards, replicas * shards, shards)
    return {"shard": [*range(node, node + shards)], "replicate": [*across]}


def probe_run(report: Report, seed: int, replicas: int, name: str) -> None:
    """Run micro-batches. Report this rank's rows with the bytes of their memory, and, for each micro-batch: the gradients after it, its
    calls, and the number of its first call.

    A call is ["backward", block], ["wait", the number of a collective], or a collective (`late`). The run ends at a collective over
    the wrong ranks.
    """
    ready()
    mesh = mesh_of(replicas)
    node, column = lines_of(dist.get_rank(), *mesh.shape).values()
    log = Log(dict(zip(OPS, (node, node, column), strict=True)))
    model, moments = Model(seed, log), list[Any]()
    returned = [submitted().hybrid_shard(unit, mesh) is unit for unit in model.units]
    params = dict(model.named_parameters())
    rows = {each: [copied(param), param.untyped_storage().nbytes()] for each, param in params.items()}
    report["sharded"] = {"returned": all(returned), "rows": rows}
    for number, micro in enumerate(RUNS[name]):
        if micro.begins:
            model.zero_grad()
        if micro.all_reduces is not (RUNS[name][number - 1].all_reduces if number else True):
            submitted().set_requires_all_reduce(model, micro.all_reduces)
        first = len(log.calls)
        with late(log), suppress(Stopped):
            loss_of(model, seed, dist.get_rank(), number, micro).backward()
        grads = {each: copied(param.grad) for each, param in params.items()}
        moments.append({"grads": grads, "calls": log.calls[first:], "first": first})
        if log.is_over:
            break
    report[name] = moments
