"""This machine as a device: its ranks are processes, and its links are memory.

A GPU has a data sheet; this machine is measured instead. All ranks measure at the same time, because they share the machine.
Each rank times the matrix products of a model, forward and backward, and its other operators. It also times an operator on a
tiny tensor, the same operator on a DTensor, and gathers of two sizes. This takes a few seconds. A busy machine gives worse
figures.

Note [Rates]
    A rate is the count of `costs`, divided by the measured time. The count leaves out some effects of a CPU: the arithmetic of
    GELU takes time, small tensors stay in caches, and a transposed product is slower. The rate includes these effects.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hwfsdp.collectives import DefaultAllGather
from hwfsdp.compat import DispatchMode
from hwfsdp.launcher.ranks import launch
from hwfsdp.train.loop import TrainConfig, train
from hwfsdp.virtual.costs import Cost, cost_of
from hwfsdp.virtual.devices import THIS_MACHINE, Device
from hwfsdp.virtual.run import simulate

_ROUNDS = 9
_SMALL, _LARGE = 1 << 12, 1 << 22  # elements of the two gathers
_BATCH, _LENGTH, _HEADS, _WIDTH = 8, 128, 4, 128  # sizes of the model that the workbench trains


class Rate(NamedTuple):
    """A measured run: FLOPs, bytes and operators by the counts of `costs`, and seconds."""

    flops: float
    nbytes: float
    operators: int
    seconds: float


class Measured(NamedTuple):
    """The measurements of one rank: matrix products, other operators, and times in seconds.

    Attributes:
        operator, dtensor: seconds of an operator on a tiny tensor, and of the same operator on a DTensor.
        small_gather, large_gather: seconds of gathers of two sizes.
    """

    products: Rate
    elementwise: Rate
    operator: float
    dtensor: float
    small_gather: float
    large_gather: float


class _Counter(DispatchMode):
    """Collects the costs of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs: list[Cost] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        self.costs.append(cost_of(op, args, kwargs or {}, out))
        return out


def _products() -> None:
    """Run the matrix products of a block, forward and backward."""
    x = torch.ones(_BATCH, _LENGTH, _WIDTH, requires_grad=True)
    w = [torch.ones(n * _WIDTH, _WIDTH, requires_grad=True) for n in (3, 1, 4, 4)]
    q, k, v = (t.unflatten(-1, (_HEADS, -1)).transpose(1, 2) for t in F.linear(x, w[0]).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    y = F.linear(F.linear(F.linear(y, w[1]), w[2]), w[3].t())
    y.backward(torch.ones_like(y))


def _elementwise() -> None:
    """Run the operators between the matrix products, forward and backward, at their widths."""
    x = torch.ones(_BATCH, _LENGTH, _WIDTH, requires_grad=True)
    scale = torch.ones(_WIDTH, requires_grad=True)
    wide = torch.ones(_BATCH, _LENGTH, 4 * _WIDTH, requires_grad=True)
    y = F.layer_norm(x + F.layer_norm(x, (_WIDTH,), scale), (_WIDTH,), scale)
    z = torch.log_softmax(F.gelu(wide), -1)
    torch.autograd.backward([y, z], [torch.ones_like(y), torch.ones_like(z)])


def measure_rank() -> Measured:
    """Measure this rank. All ranks of the process group must call this at the same time."""
    tiny = torch.ones(8)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = DTensor.from_local(tiny.clone(), mesh, [Shard(0)], run_check=False)
    return Measured(
        _rate(_products),
        _rate(_elementwise),
        _seconds(lambda: tiny.add_(1.0), repeat=500),
        _seconds(lambda: sharded.add_(1.0), repeat=100),
        *(_gather_seconds(numel) for numel in (_SMALL, _LARGE)),
    )


def _rate(run: Callable[[], None]) -> Rate:
    with _Counter() as counter:
        run()
    costs = [cost for cost in counter.costs if cost.is_kernel]
    flops, nbytes = sum(c.flops for c in costs), sum(c.nbytes for c in costs)
    return Rate(flops, nbytes, len(costs), _seconds(run, repeat=5))


def _seconds(run: Callable[[], object], repeat: int = 1) -> float:
    """Return the median time of `_ROUNDS` rounds, in seconds per call. All ranks begin each round together."""
    times = []
    for _ in range(_ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeat):
            run()
        times.append((time.perf_counter() - start) / repeat)
    return sorted(times)[_ROUNDS // 2]


def _gather_seconds(numel: int) -> float:
    gather, group, ranks = DefaultAllGather(), dist.group.WORLD, dist.get_world_size()
    whole = gather.allocate((numel,), dtype=torch.float32, device=torch.device("cpu"))
    part = whole.view(ranks, -1)[dist.get_rank()]
    return _seconds(lambda: gather(whole, part, group))


def calibrate(ranks: int = 2) -> Device:
    """Measure this machine while `ranks` ranks run on it. This takes some seconds."""
    found = launch(measure_rank, ranks)
    slowest = Measured(*(max(of_ranks, key=_time) for of_ranks in zip(*found, strict=True)))
    host = slowest.operator
    share = (ranks - 1) / ranks if ranks > 1 else 1.0
    moved = share * 4 * (_LARGE - _SMALL)
    link = moved / max(slowest.large_gather - slowest.small_gather, 1e-9)
    rate = slowest.products.flops / _beyond(slowest.products, host)
    return Device(
        name=THIS_MACHINE,
        flops={"float32": rate, "bfloat16": rate, "float16": rate, "float64": rate / 2},
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / ranks,
        memory_bandwidth=slowest.elementwise.nbytes / _beyond(slowest.elementwise, host),
        link=link,
        network=link,
        per_node=ranks,
        efficiency=1.0,
        attention_efficiency=1.0,
        fitted_on=f"measured with {ranks} ranks",
        source="a short benchmark on this machine",
        memory_efficiency=1.0,
        link_efficiency=1.0,
        launch_us=0.5e6 * host,
        kernel_us=0.5e6 * host,
        dtensor_us=max(0.0, 1e6 * (slowest.dtensor - host)) or 1e-3,
        collective_us=1e6 * slowest.small_gather,
        hop_us=1e-3,
        node_hop_us=1e-3,
        host=True,
    )


def _time(measured: Rate | float) -> float:
    return measured.seconds if isinstance(measured, Rate) else measured


def _beyond(rate: Rate, host: float) -> float:
    """Return the seconds without the host's launches, but at least a tenth of all seconds."""
    return max(rate.seconds - rate.operators * host, 0.1 * rate.seconds)


class Prediction(NamedTuple):
    """The predicted time and the measured time of the demo's training step, in milliseconds."""

    predicted: float
    measured: float


def held_against_a_run(device: Device, ranks: int) -> Prediction:
    """Predict the demo's step for this machine, and measure the median step of a run on it."""
    config = TrainConfig(steps=30)
    model = config.model
    found = simulate(model, ranks, device, batch=config.batch, seq=model.seq_len)
    times = sorted(launch(train, ranks, config)[0].step_ms)
    return Prediction(found.step_seconds * 1e3, times[len(times) // 2])
