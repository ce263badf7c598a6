"""Training steps to measure: ZeRO-3 and hybrid sharding by hwfsdp, DDP and the first two stages of ZeRO by hand.

All of them train the same small model, no dimension of which four ranks divide.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hwfsdp.accounting import MeshShape, Strategy
from hwfsdp.compat import all_gather_single, reduce_scatter_single
from hwfsdp.learn.run import Report
from hwfsdp.memory import Ledger
from hwfsdp.precision import MixedPrecisionPolicy
from hwfsdp.recording import record
from hwfsdp.ring import ring_all_gather, ring_reduce_scatter
from hwfsdp.sharding import chunk_extent, padded_length
from hwfsdp.wrap import fully_shard

WORLD_SIZE = 4
AXIS = 2  # ranks of each axis of the mesh for hybrid sharding
ROWS = 24  # elements that a ring is measured with
GROUPS = ([(7, 6), (7,)], [(5, 7), (5,)], [(2, 5), (2,)])  # two blocks, and the root around them


def build() -> nn.Sequential:
    """The model whose parameters have the shapes of `GROUPS`."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(weight[1], weight[0]) for weight, _ in GROUPS))


class Training:
    """One step of a model; its states are still there afterwards."""

    def __init__(self) -> None:
        self.model = build()
        self.optimizer: torch.optim.Optimizer

    def step(self) -> None:
        inputs = torch.arange(12.0).view(2, 6) + dist.get_rank()
        self.model(inputs).square().mean().backward()
        self.reduce()
        self.optimizer.step()
        self.gather()

    def reduce(self) -> None:
        """What is left to do for gradients."""

    def gather(self) -> None:
        """What is left to do for parameters."""

    def watch(self, ledger: Ledger) -> None:
        """Shows the ledger parameters and gradients."""
        ledger.visit(self.model)


class Sharded(Training):
    """hwfsdp over a mesh."""

    def __init__(self, mesh: DeviceMesh, **options: Any) -> None:
        super().__init__()
        for module in (self.model[0], self.model[1], self.model):
            fully_shard(module, mesh=mesh, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters())


class ByHand(Training):
    """DDP, ZERO1 or ZERO2: parameters lie in memory with a full chunk for each shard, of which DDP has one.

    The optimizer has this rank's rows, `own`, as views. ZERO2 reduces a gradient, and gives up its memory, as soon as
    backward has made it; the others keep all in `grads`.
    """

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self.strategy = strategy
        alone = strategy is Strategy.DDP
        self.shards, self.rank = (1, 0) if alone else (dist.get_world_size(), dist.get_rank())
        self.params = list(self.model.parameters())
        self.wholes = [self.padded(p.detach()) for p in self.params]
        for param, whole in zip(self.params, self.wholes, strict=True):
            param.data = whole[: len(param)]
        self.own = [nn.Parameter(self.own_rows(p.detach())) for p in self.params]
        self.grads: list[Tensor] = []
        for param, own in zip(self.params, self.own, strict=True):
            if strategy is Strategy.ZERO2:
                param.register_post_accumulate_grad_hook(functools.partial(self.reduce_one, own))
            else:
                self.grads.append(torch.zeros_like(self.padded(param.detach())))
                param.grad = self.grads[-1][: len(param)]
        self.optimizer = torch.optim.AdamW(self.own)

    def padded(self, rows: Tensor) -> Tensor:
        memory = rows.new_zeros(padded_length(len(rows), self.shards), *rows.shape[1:])
        memory[: len(rows)] = rows
        return memory

    def own_rows(self, whole: Tensor) -> Tensor:
        return whole.narrow(0, *chunk_extent(len(whole), self.shards, self.rank))

    def own_chunk(self, whole: Tensor) -> Tensor:
        return whole.view(self.shards, -1)[self.rank]

    def scatter(self, grad: Tensor) -> Tensor:
        mine = torch.empty_like(self.own_chunk(grad))
        reduce_scatter_single(mine, grad.view(-1), dist.ReduceOp.SUM, None, False)
        return mine / dist.get_world_size()

    def reduce_one(self, own: nn.Parameter, param: Tensor) -> None:
        assert param.grad is not None
        mine = self.scatter(self.padded(param.grad))
        own.grad, param.grad = mine[: own.numel()].view(own.shape), None

    def reduce(self) -> None:
        for param, own, grad in zip(self.params, self.own, self.grads, strict=False):
            if self.strategy is Strategy.DDP:
                dist.all_reduce(grad)
                grad /= dist.get_world_size()
            else:
                self.own_chunk(grad).copy_(self.scatter(grad))
            own.grad = self.own_rows(grad[: len(param)])

    def gather(self) -> None:
        for whole in self.wholes if self.shards > 1 else ():
            all_gather_single(whole.view(-1), self.own_chunk(whole).clone(), None, False)

    def watch(self, ledger: Ledger) -> None:
        super().watch(ledger)
        for own in self.own:
            assert own.grad is not None
            ledger.watch(own.grad, "sharded_grad")


def measure(training: Training) -> dict[str, Any]:
    """A step of it: bytes by state afterwards, and bytes by collective."""
    with record() as log:
        training.step()
    ledger = Ledger()
    training.watch(ledger)
    moments = [
        {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
        for state in training.optimizer.state.values()
    ]
    ledger.visit_state(moments)
    alive = ledger.bytes_by_kind()
    left = log.samples[dist.get_rank()][-1].bytes_by_kind["unsharded_param"]
    unsharded = alive["unsharded_param"] if isinstance(training, ByHand) else left
    params, grads = alive["sharded_param"] + unsharded, alive["sharded_grad"] + alive["unsharded_grad"]
    return {"states": [params, grads, alive["optimizer_state"]], "traffic": log.summary()["bytes_by_op"]}


def probe_measure(report: Report) -> None:
    """Every strategy on four ranks; and what rings send along each axis."""
    names = ("replicate", "shard")
    line = init_device_mesh("cpu", (1, WORLD_SIZE), mesh_dim_names=names)
    square = init_device_mesh("cpu", (AXIS, AXIS), mesh_dim_names=names)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    report["DDP"] = measure(ByHand(Strategy.DDP))
    report["ZERO1"] = measure(ByHand(Strategy.ZERO1))
    report["ZERO2"] = measure(ByHand(Strategy.ZERO2))
    report["ZERO3"] = measure(Sharded(line["shard"]))
    report["ZERO3 in bf16"] = measure(Sharded(line["shard"], mp_policy=bf16))
    report["ZERO3, whole until backward"] = measure(Sharded(line["shard"], reshard_after_forward=False))
    report["HSDP"] = measure(Sharded(square))
    report["sent"] = {
        str(tuple(shape)): sent_by_rings(mesh)
        for shape, mesh in ((MeshShape(1, WORLD_SIZE), line), (MeshShape(AXIS, AXIS), square))
    }


def sent_by_rings(mesh: DeviceMesh) -> dict[str, int]:
    """Bytes that this rank sends for each collective over `ROWS` floats, along its axis of the mesh."""
    shard, replicate = mesh.get_group("shard"), mesh.get_group("replicate")

    def gather(group: dist.ProcessGroup) -> None:
        ring_all_gather(torch.zeros(ROWS), torch.ones(ROWS // dist.get_world_size(group)), group)

    def scatter(group: dist.ProcessGroup) -> None:
        ring_reduce_scatter(torch.zeros(ROWS // dist.get_world_size(group)), torch.ones(ROWS), group, False)

    walks = {"all_gather": [(gather, shard)], "reduce_scatter": [(scatter, shard)]}
    walks["all_reduce"] = [(scatter, replicate), (gather, replicate)]
    sent = {}
    for collective, parts in walks.items():
        with record() as log:
            for walk, group in parts:
                walk(group)
        sent[collective] = sum(event.bytes for event in log.select("send"))
    return sent
