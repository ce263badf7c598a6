"""Races: every loss and every gradient keeps its bits, no matter which stream of a device is late.

One rank communicates nothing, and NCCL refuses two ranks on one GPU. So each training here is rank 0 of a fake world. Its collectives
make up the data of the other ranks, on the stream that calls them. Late means: on a GPU, a stream sleeps at a `Place`; on the CPU, a
collective moves its bytes only at the wait for it. All buffers begin as NaNs, so that data read too early never look right.

Oracles: torch's FSDP2 with the same collectives, and the same training with no stream asleep.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import pretended
import torch
from torch import Tensor, nn

from benchmarks.contenders import world_mesh
from benchmarks.fake import in_fake_world
from hwfsdp.features.schedule import checked_state
from hwfsdp.collectives import AllGather, ReduceScatter
from hwfsdp.core.device_streams import Stream
from oracles import BITS, Trace, differences
from together import run_all

WORLD_SIZE, ROWS = 8, 16
STEPS = {"cpu": 3, "cuda": 8}
LONGEST = 20_000_000  # cycles that a stream sleeps: about 10 ms
FSDP2, DELAYS, LITTER = "as in FSDP2", "with streams late", "with freed memory written to"

# Where a stream may sleep: before a buffer is filled, around a collective, at both ends of a block, before the optimizer.
Place = Enum("Place", "ALLOCATE GATHER GATHERED REDUCTION REDUCED FORWARD BACKWARD UPDATE")
COMPUTE = (Place.FORWARD, Place.BACKWARD, Place.UPDATE)


class Delays:
    """Put the current stream to sleep at some places, each time for another period. The host goes on."""

    def __init__(self, device: str, places: Collection[Place] = ()) -> None:
        self.device, self.places, self.random = device, places, random.Random(0)
        self.visited: set[Place] = set()  # asleep or not

    def __call__(self, place: Place) -> None:
        self.visited.add(place)
        if place in self.places and self.device == "cuda":
            torch.cuda._sleep(self.random.randrange(LONGEST // 4, LONGEST))


class Collective:
    """A collective for both libraries. The caller makes its stream current."""

    move: Callable[..., None]

    def __init__(self, delays: Delays, sizes: set[tuple[int, torch.dtype]]) -> None:
        self.delays, self.sizes = delays, sizes

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.sizes.add((size[0], dtype))
        # the copy stream, for a gather; compute and reduce-scatter, for a reduction
        self.delays(Place.ALLOCATE)
        return torch.full(tuple(size), torch.nan, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op=False):
        if async_op:  # on the CPU only
            return SimpleNamespace(wait=lambda: self.move(output_tensor, input_tensor, group, op))
        self.move(output_tensor, input_tensor, group, op)


class Gather(Collective, AllGather):
    def move(self, output: Tensor, given: Tensor, group: Any, op: Any) -> None:
        self.delays(Place.GATHER)
        pretended.gather(output, given, group, op)
        self.delays(Place.GATHERED)


class Reduction(Collective, ReduceScatter):
    def move(self, output: Tensor, given: Tensor, group: Any, op: Any) -> None:
        self.delays(Place.REDUCTION)
        pretended.scatter(output, given, group, op)
        self.delays(Place.REDUCED)


class Sleep(torch.autograd.Function):
    """The identity. Compute may sleep in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delays: Delays) -> Tensor:
        ctx.delays = delays
        delays(Place.FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.delays(Place.BACKWARD)
        return grad, None


class Block(nn.Sequential):
    """Linear, ReLU, linear, and a sleep at both ends."""

    def __init__(self, width: int, hidden: int, delays: Delays) -> None:
        super().__init__(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.delays = delays

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(super().forward(Sleep.apply(x, self.delays)), self.delays)


@dataclass(frozen=True)
class Case:
    """Blocks with these hidden sizes between two linear layers of the root, and the way to shard them."""

    width: int = 16
    hidden: tuple[int, ...] = (32, 64, 32, 16)
    frozen: bool = False
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)  # of parameters, of reductions
    reshard: bool = True
    offload: bool = False

    def build(self, library: str, delays: Delays, gather: Gather, reduction: Reduction) -> nn.Module:
        """Build the model on the device with the same weights each time. Shard each block and the root."""
        torch.manual_seed(0)
        blocks = [Block(self.width, hidden, delays) for hidden in self.hidden]
        model = nn.Sequential(nn.Linear(self.width, self.width), *blocks, nn.Linear(self.width, 3))
        blocks[1][0].weight.requires_grad_(not self.frozen)
        model.to(delays.device)
        fsdp: Any = importlib.import_module(library)
        offload = fsdp.CPUOffloadPolicy(delays.device == "cuda") if self.offload else fsdp.OffloadPolicy()
        options = {"mp_policy": fsdp.MixedPrecisionPolicy(*self.dtypes), "offload_policy": offload}
        mesh = world_mesh(delays.device)
        for module in (*blocks, model):
            fsdp.fully_shard(module, mesh=mesh, reshard_after_forward=self.reshard, **options)
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduction)
        return model


CASES = {
    "even": Case(),
    "uneven": Case(width=13, hidden=(7, 29, 3, 11)),
    "large": Case(width=256, hidden=(512, 1024)),  # the allocator has a pool for more than 1 MiB
    "frozen": Case(frozen=True),
    "bf16": Case(dtypes=(torch.bfloat16, None)),
    "bf16 reduced in fp32": Case(width=13, dtypes=(torch.bfloat16, torch.float32)),
    "whole after forward": Case(reshard=False),
    "offloaded": Case(offload=True),
}


def train(case: Case, delays: Delays, library: str = "hwfsdp", litters: bool = False) -> Trace:
    """Return every loss and this rank's part of every gradient. The host waits for the device only to offload.

    If it `litters`, each stream takes memory that the library has freed, and writes to it. This happens before the update: after
    `zero_grad`, the gradients' memory belongs to a stream that has not waited for the update yet.
    """
    torch.set_num_threads(1)
    sizes: set[tuple[int, torch.dtype]] = set()
    model, trace = case.build(library, delays, Gather(delays, sizes), Reduction(delays, sizes)), Trace()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = torch.randn(STEPS[delays.device], ROWS, case.width, generator=torch.Generator().manual_seed(1))
    for x in batches.to(delays.device):
        loss = model(x).float().square().mean()
        loss.backward()
        trace.keep("loss", loss)
        for name, param in model.named_parameters():
            trace.keep(f"grad {name}", None if param.grad is None else param.grad.to_local())
        found = vars(checked_state(model, "train").comm_ctx.streams).values() if litters else ()
        streams = [stream for stream in found if isinstance(stream, Stream)]
        for stream in streams:
            with stream.run():
                for n, dtype in sizes:  # several at a time
                    _ = [torch.full((n,), torch.nan, dtype=dtype, device=delays.device) for _ in range(4)]
        delays(Place.UPDATE)
        optimizer.step()
        optimizer.zero_grad()
    return trace


def check(case: Case, device: str) -> dict[str, list[str]]:
    expected, everywhere = train(case, Delays(device)), Delays(device, tuple(Place))
    found = {FSDP2: differences(expected, train(case, Delays(device), "torch.distributed.fsdp"), *BITS)}
    found[LITTER] = differences(train(case, everywhere, litters=True), expected, *BITS)
    found[DELAYS] = [f"never at {place}" for place in set(Place) - everywhere.visited]
    for places in [tuple(Place), COMPUTE, *((p,) for p in Place)] if device == "cuda" else [tuple(Place)]:
        lines = differences(train(case, Delays(device, places)), expected, *BITS)
        found[DELAYS] += [f"{line}, late: {[place.name for place in places]}" for line in lines]
    return found


@functools.cache
def found_on(device: str) -> dict[str, Any]:
    checks = {name: functools.partial(check, case, device) for name, case in CASES.items()}
    return in_fake_world(run_all, WORLD_SIZE, checks)


gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off torch's checks of collectives, which need a real store."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("case", CASES)
def test_every_loss_and_gradient_has_the_same_bits(case: str, device: str) -> None:
    assert found_on(device)[case] == {FSDP2: [], DELAYS: [], LITTER: []}
