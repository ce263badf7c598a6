"""One GPU: time of a step, time until the host has issued it, and peak memory.

With one rank nothing would be communicated, and NCCL refuses two ranks on one device. So each library is given a
fake process group of eight ranks and collectives that move the bytes that rank 0 would receive, as copies on the stream
that the library calls them on. Streams, events, buffers and copies are then what they are on eight devices; only the
wire is faster. What a model learns from such gradients means nothing.

    step     until the device has finished, from an idle device
    issue    until backward has returned to the host: what keeps the device waiting when layers are small
    peak     the most bytes that tensors held on the device, of a library alone in its process

On a CPU a small model goes through the same, which tries the code out; the numbers mean nothing there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contenders import FSDP2, HWFSDP, UNSHARDED, Shape, build, sharding, world_mesh
from benchmarks.fake import Buffers, in_fake_world
from benchmarks.peak import MIB, StorageCounter
from benchmarks.records import Check, Record, Spread, ratio
from benchmarks.timing import Action, Laps, Samples, steady, stopwatch, take_turns

ROUNDS = 30
WORLD_SIZE = 8
SIZES = {"6 M": Shape(12, 256, 1024), "100 M": Shape(12, 1024, 4096), "400 M": Shape(12, 2048, 8192)}
TOKENS = 4096
TRIAL_SIZES, TRIAL_TOKENS = {"0.1 M": Shape(3, 64, 256)}, 16  # on the CPU
STEP, ISSUE = "fwd+bwd", "issue"
TARGETS = {STEP: 1.0, ISSUE: 0.6}
PEAK_TARGET = 1.0
NO_GPU = "gpu: skipped, because torch.cuda is not available here; `--device cpu` tries it out on the CPU."


class CopyGather(Buffers):
    """Every other rank's part is a copy of this one's."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        rank, world_size = group.rank(), group.size()
        rows = output_tensor.view(world_size, -1)
        for others in (rows[:rank], rows[rank + 1 :]):
            if len(others):
                others.copy_(input_tensor.view(1, -1).expand_as(others))


class SumReduce(Buffers):
    """Reads every rank's part of the input, as if each had come from another rank."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        rows = input_tensor.view(group.size(), -1)
        if op == dist.ReduceOp.AVG:
            torch.mean(rows, 0, out=output_tensor)
        else:
            torch.sum(rows, 0, out=output_tensor)


def sharded(name: str, shape: Shape, device: str) -> nn.Module:
    """A model on the device over the fake group, with collectives that copy."""
    model = build(shape).to(device)
    if name == UNSHARDED:
        return model
    mesh, shard = world_mesh(device), sharding(name)
    for block in model:
        group: Any = shard(block, mesh=mesh)
        group.set_custom_all_gather(CopyGather())
        group.set_custom_reduce_scatter(SumReduce())
    return shard(model, mesh=mesh)


def stepping(model: nn.Module, x: Tensor) -> Action:
    """An action of forward and backward, with a lap when the host has issued all of it."""

    def action() -> Laps:
        synchronize(x.device)
        start = stopwatch()
        model(x).square().mean().backward()
        issued = stopwatch()
        synchronize(x.device)
        laps = {ISSUE: issued - start, STEP: stopwatch() - start}
        model.zero_grad()
        return laps

    return action


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def times(shape: Shape, tokens: int, device: str, rounds: int) -> Samples:
    """In a fake world: all libraries in turns."""
    steady()
    x = torch.randn(tokens, shape.width, device=device)
    names = (HWFSDP, FSDP2, UNSHARDED)
    return take_turns({name: stepping(sharded(name, shape, device), x) for name in names}, rounds, warm_up=5)


def peak(name: str, shape: Shape, tokens: int, device: str) -> int:
    """In a fake world: bytes at the peak of a step after the first ones."""
    steady()
    if device == "cuda":
        action = stepping(sharded(name, shape, device), torch.randn(tokens, shape.width, device=device))
        for _ in range(3):
            action()
        torch.cuda.reset_peak_memory_stats()
        action()
        return int(torch.cuda.max_memory_allocated())
    with StorageCounter() as counter:
        action = stepping(sharded(name, shape, device), torch.randn(tokens, shape.width))
        for _ in range(3):
            action()
            counter.reset()
        action()
        return counter.peak


def run(device: str, rounds: int | None, world_size: int = WORLD_SIZE) -> list[Record]:
    """Per size two records of times and one of memory; none, and a message, where there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU)
        return []
    sizes, tokens = (SIZES, TOKENS) if device == "cuda" else (TRIAL_SIZES, TRIAL_TOKENS)
    records = []
    for size, shape in sizes.items():
        case: dict[str, str | int] = {"params": size, "pretended ranks": world_size, "device": device}
        samples = in_fake_world(times, world_size, shape, tokens, device, rounds or ROUNDS)
        for kind, target in TARGETS.items():
            found = samples[kind]
            values = {name: Spread.of(ms) for name, ms in found.items()}
            checks = {"hwfsdp / FSDP2": ratio(found[HWFSDP], found[FSDP2], target)}
            records.append(Record("gpu", {**case, "kind": kind}, "ms", values, checks))
        names = (HWFSDP, FSDP2, UNSHARDED)
        peaks = {n: in_fake_world(peak, world_size, n, shape, tokens, device) for n in names}
        values = {name: Spread.of([nbytes / MIB]) for name, nbytes in peaks.items()}
        checks = {"hwfsdp / FSDP2": Check(Spread.of([peaks[HWFSDP] / peaks[FSDP2]]), PEAK_TARGET)}
        records.append(Record("gpu", {**case, "kind": "peak"}, "MiB", values, checks))
    return records
