"""This machine as a device: its ranks are processes, its links are memory.

What a data sheet says of a GPU is measured here, on as many ranks as will be simulated, at once, because they share the
machine: matrix products and element-wise operators of the sizes that models for a CPU have, what the host takes for an
operator on next to nothing and for DTensor's dispatch, and how long gathers of two sizes take. A few seconds, and as good
as the machine is quiet.

Note [One bandwidth]
    On a CPU an element-wise operator is seldom limited by memory: GELU and softmax compute, and small tensors stay in
    caches. The bandwidth that is kept is what a mixture of such operators reaches, bytes as `costs` counts them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hwfsdp.collectives import DefaultAllGather
from hwfsdp.ranks import launch
from hwfsdp.train import TrainConfig, train
from hwfsdp.virtual.devices import THIS_MACHINE, Device
from hwfsdp.virtual.run import simulate

_ROUNDS = 9
_SMALL, _LARGE = 1 << 12, 1 << 22  # elements of a gather
_ROWS, _WIDTH = 1024, 256  # of activations


class Measured(NamedTuple):
    """Of one rank, in seconds: matrix products, element-wise operators, a small operator, the same on a DTensor, and gathers."""

    products: float
    elementwise: float
    operator: float
    dtensor: float
    small_gather: float
    large_gather: float


_PRODUCT_FLOPS = (
    2 * 3 * 2 * _ROWS * _WIDTH * 4 * _WIDTH
)  # of a layer to four times the width and back: both, thrice
_ELEMENTWISE_BYTES = 4 * _ROWS * 4 * _WIDTH * (3 + 2 + 3 + 2 + 3)


def measure_rank() -> Measured:
    """On every rank of a process group at once."""
    x, up, down = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, 4 * _WIDTH), torch.randn(4 * _WIDTH, _WIDTH)
    wide, tiny = torch.randn(_ROWS, 4 * _WIDTH), torch.ones(8)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = DTensor.from_local(tiny.clone(), mesh, [Shard(0)], run_check=False)

    def products() -> None:
        for _ in range(3):
            wide @ down, x @ up

    def elementwise() -> None:
        y = wide + wide
        y = F.gelu(y)
        y = y * wide
        y = torch.softmax(y, -1)
        y + wide

    return Measured(
        _seconds(products),
        _seconds(elementwise),
        _seconds(lambda: tiny.add_(1.0), repeat=500),
        _seconds(lambda: sharded.add_(1.0), repeat=100),
        *(_gather_seconds(numel) for numel in (_SMALL, _LARGE)),
    )


def _seconds(run: Callable[[], object], repeat: int = 1) -> float:
    """The median of some rounds, all ranks beginning together."""
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
    """Measures this machine with so many ranks on it; takes some seconds."""
    found = launch(measure_rank, ranks)
    slowest = Measured(*(max(times) for times in zip(*found, strict=True)))
    share = (ranks - 1) / ranks if ranks > 1 else 1.0
    moved = share * 4 * (_LARGE - _SMALL)
    link = moved / max(slowest.large_gather - slowest.small_gather, 1e-9)
    rate = _PRODUCT_FLOPS / slowest.products
    return Device(
        name=THIS_MACHINE,
        flops={"float32": rate, "bfloat16": rate, "float16": rate, "float64": rate / 2},
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / ranks,
        memory_bandwidth=_ELEMENTWISE_BYTES / slowest.elementwise,
        link=link,
        network=link,
        per_node=ranks,
        efficiency=1.0,
        fitted_on=f"measured with {ranks} ranks",
        source="a short benchmark on this machine",
        memory_efficiency=1.0,
        link_efficiency=1.0,
        launch_us=0.5e6 * slowest.operator,
        kernel_us=0.5e6 * slowest.operator,
        dtensor_us=max(0.0, 1e6 * (slowest.dtensor - slowest.operator)) or 1e-3,
        collective_us=1e6 * slowest.small_gather,
        hop_us=1e-3,
        node_hop_us=1e-3,
        host=True,
    )


class Prediction(NamedTuple):
    """Of the demo's training step, in milliseconds."""

    predicted: float
    measured: float


def held_against_a_run(device: Device, ranks: int = 2, steps: int = 30) -> Prediction:
    """The demo's step, predicted for this machine, and the median of a run on it."""
    config = TrainConfig(steps=steps)
    model = config.model
    found = simulate(model, ranks, device, batch=config.batch, seq=model.seq_len)
    times = sorted(launch(train, ranks, config)[0].step_ms)
    return Prediction(found.step_seconds * 1e3, times[len(times) // 2])
