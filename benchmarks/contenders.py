"""The same model, wrapped by each library.

A model is a sequence of blocks. The sharding libraries get one group per block, and a root without its own parameters. Every
contender starts from the same weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hwfsdp
from benchmarks.timing import Action, Laps, stopwatch

BATCH = 64
HWFSDP, FSDP2, DDP, UNSHARDED = "hwfsdp", "FSDP2", "DDP", "unsharded"
# hwfsdp with `hwfsdp.optim.AdamW`; all others use `torch.optim.AdamW`.
OWN_ADAMW = "hwfsdp, its AdamW"
FORWARD_BACKWARD, STEP = "fwd+bwd", "full step"


class Shape(NamedTuple):
    """The shape of a stack of MLPs: blocks of two linear layers, width → inner → width."""

    blocks: int
    width: int
    inner: int


SIZES = {"0.2 M": Shape(6, 64, 256), "3 M": Shape(6, 256, 1024), "13 M": Shape(6, 512, 2048)}  # by parameters
TINY = Shape(6, 8, 8)  # hardly any compute, so that the framework remains


def mlp(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))


def build(shape: Shape) -> nn.Sequential:
    """Build the model, with the same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(*[mlp(shape.width, shape.inner) for _ in range(shape.blocks)])


def wrapped(name: str, model: nn.Sequential, mesh: DeviceMesh | None = None) -> nn.Module:
    """Wrap the model as one of the libraries trains it; the children of `model` are the groups.

    Args:
        mesh: for the sharding libraries; the whole world on CPUs by default.
    """
    if name == UNSHARDED:
        return model
    if name == DDP:
        return nn.parallel.DistributedDataParallel(model)
    shard = sharding(name)
    mesh = mesh or world_mesh("cpu")
    for block in model:
        shard(block, mesh=mesh)
    return shard(model, mesh=mesh)


def sharding(name: str) -> Callable[..., nn.Module]:
    """Return `fully_shard` of a library."""
    if name == FSDP2:
        from torch.distributed import fsdp

        return cast(Callable[..., nn.Module], fsdp.fully_shard)
    return hwfsdp.fully_shard


def world_mesh(device_type: str) -> DeviceMesh:
    """Return a mesh of all ranks in one dimension."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells a fake group on a machine with GPUs to set its device
        return init_device_mesh(device_type, (dist.get_world_size(),))


def own_adamw() -> Callable[..., torch.optim.Optimizer] | None:
    """Return `hwfsdp.optim.AdamW`, or None in a version without it."""
    try:
        from hwfsdp import optim  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        return None
    found: Any = getattr(optim, "AdamW", None)
    return found  # type: ignore[no-any-return]


class Contender(NamedTuple):
    """A wrapped model and its optimizer. Without an optimizer, only forward and backward can be measured."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None


def contender(name: str, shape: Shape) -> Contender:
    """Make a contender. `OWN_ADAMW` needs `own_adamw()`."""
    make = own_adamw() if name == OWN_ADAMW else torch.optim.AdamW
    assert make is not None, f"{name}: hwfsdp.optim.AdamW is missing"
    model = wrapped(name, build(shape))
    return Contender(model, make(model.parameters()))


def training(contender: Contender, x: Tensor) -> Action:
    """Return an action of one training step, with a lap after the backward."""
    model, optimizer = contender

    def action() -> Laps:
        start = stopwatch()
        model(x).square().mean().backward()
        laps = {FORWARD_BACKWARD: stopwatch() - start}
        if optimizer is None:
            model.zero_grad()
            return laps
        optimizer.step()
        optimizer.zero_grad()
        return {**laps, STEP: stopwatch() - start}

    return action
