"""One GPU: time of a step, time until the host has issued it, and peak memory.

NCCL refuses two ranks on one device. So each library gets a fake process group of 8 or 64 ranks, with collectives that move the
bytes that rank 0 would receive: they copy on the stream on which the library calls them. Streams, events, buffers and copies
are then the same as on that many devices; only the wire is faster. A world of one rank is real, over NCCL. The gradients are
not meaningful, so the model learns nothing useful.

    step     until the device has finished, from an idle device
    issue    until backward has returned to the host: the device waits for this when layers are small
    peak     the most bytes that tensors held on the device, with one library per process, beside a closed form of
             all that sharding needs: shards, their gradients, whole parameters, flat buffers. Activations are extra

Stacks of MLPs use fp32. Llamas compute in bf16, reduce in fp32, and have the given number of layers; the unsharded Llama
uses bf16 throughout.

On a CPU, small models run through the same code as a test; their numbers are not meaningful.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contenders import FSDP2, HWFSDP, UNSHARDED, Shape, build, world_mesh
from benchmarks.fake import Buffers, in_fake_world
from benchmarks.peak import MIB, StorageCounter
from benchmarks.records import Check, Record, Spread, ratio
from benchmarks.timing import Action, Laps, Samples, steady, stopwatch, take_turns
from hwfsdp import launch
from hwfsdp.compat import local_of
from hwfsdp.core.sharding import padded_local_numel
from hwfsdp.observe.accounting import GroupSizes, peak_unsharded_bytes, unsharded_bytes
from hwfsdp.train.models.llama import Llama, LlamaConfig
from hwfsdp.train.models.zoo import CONFIGS

ROUNDS = 20
WORLD_SIZE = 8
STEP, ISSUE = "fwd+bwd", "issue"
TARGETS = {STEP: 1.0, ISSUE: 0.6}
PEAK_TARGET = 1.0
NAMES = (HWFSDP, FSDP2, UNSHARDED)
NO_GPU = "gpu: skipped, because torch.cuda is not available here; `--device cpu` tries it out on the CPU."


class Case(NamedTuple):
    """A model on rank 0 of a world, and the number of tokens in its batch."""

    params: str
    shape: Shape | LlamaConfig
    ranks: int
    tokens: int


def cut(name: str, layers: int) -> LlamaConfig:
    """Return a Llama config with only its first layers."""
    config = CONFIGS[name]
    assert isinstance(config, LlamaConfig)
    return replace(config, layers=layers)


def cases(device: str, ranks: int = WORLD_SIZE) -> list[Case]:
    """Return every case for this device; on the CPU the same with small models."""
    if device == "cpu":
        tiny = LlamaConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden=48, seq_len=16, vocab=64)
        return [
            Case("0.1 M", Shape(3, 64, 256), ranks, 16),
            *(Case("llama", tiny, n, 16) for n in (1, ranks)),
        ]
    large = torch.cuda.get_device_properties(0).total_memory > 60 * 2**30
    tokens = 8192 if large else 2048
    stacks = {"6 M": Shape(12, 256, 1024), "100 M": Shape(12, 1024, 4096), "400 M": Shape(12, 2048, 8192)}
    found = [Case(name, shape, ranks, 4096) for name, shape in stacks.items()]
    found += [Case("llama3-1b", cut("llama3-1b", 16), n, tokens) for n in (1, ranks, 8 * ranks)]
    layers = 8 if large else 1
    name = f"llama3-8b, {layers} of 32 layers"
    return found + [Case(name, cut("llama3-8b", layers), n, tokens) for n in (ranks, 8 * ranks)]


# --- Models --------------------------------------------------------------------------------------------------


class CopyGather(Buffers):
    """A gather: copy this rank's part into the place of every other rank's part."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        rank, world_size = group.rank(), group.size()
        rows = output_tensor.view(world_size, -1)
        for others in (rows[:rank], rows[rank + 1 :]):
            if len(others):
                others.copy_(input_tensor.view(1, -1).expand_as(others))


class SumReduce(Buffers):
    """A reduction: read every rank's part of the input, as if each had come from another rank."""

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


def made(name: str, case: Case, device: str) -> nn.Module:
    """Build the model of a contender on the device. A Llama is sharded on the meta device, so that it is never whole."""
    if isinstance(case.shape, Shape):
        return sharded(name, build(case.shape).to(device), device)
    with torch.device("meta"):
        model: nn.Module = Llama(case.shape)
    if name == UNSHARDED:
        model = model.to(torch.bfloat16)
    model = sharded(name, model, device).to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            local_of(param).normal_(std=0.02)
    return model


def sharded(name: str, model: nn.Module, device: str) -> nn.Module:
    """Shard one group for each block, and one for the rest. In a fake world, their collectives copy."""
    if name == UNSHARDED:
        return model
    package: Any = importlib.import_module("torch.distributed.fsdp" if name == FSDP2 else "hwfsdp")
    options = {"mesh": world_mesh(device)}
    if isinstance(model, Llama):
        options["mp_policy"] = package.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*blocks_of(model), model):
        package.fully_shard(module, **options)
        if dist.get_backend() == "fake":
            any_module: Any = module
            any_module.set_custom_all_gather(CopyGather())
            any_module.set_custom_reduce_scatter(SumReduce())
    return model


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    return (model.blocks if isinstance(model, Llama) else model).children()


def batch(case: Case, device: str) -> Tensor:
    """Return one row of tokens, or rows of features."""
    if isinstance(case.shape, Shape):
        return torch.randn(case.tokens, case.shape.width, device=device)
    return torch.randint(case.shape.vocab, (1, case.tokens), device=device)


# --- Measurements --------------------------------------------------------------------------------------------


def stepping(model: nn.Module, x: Tensor) -> Action:
    """Return an action of forward and backward, with a lap when the host has issued all of it."""

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


def times(case: Case, device: str, rounds: int) -> Samples:
    """Measure all contenders in turns; runs on a rank."""
    steady()
    x = batch(case, device)
    return take_turns({name: stepping(made(name, case, device), x) for name in NAMES}, rounds, warm_up=5)


def peak(name: str, case: Case, device: str) -> int:
    """Return the bytes at the peak of a step, after a few others; runs on a rank."""
    steady()
    if device == "cuda":
        action = stepping(made(name, case, device), batch(case, device))
        for _ in range(3):
            action()
        torch.cuda.reset_peak_memory_stats()
        action()
        return int(torch.cuda.max_memory_allocated())
    with StorageCounter() as counter:
        action = stepping(made(name, case, device), batch(case, device))
        for _ in range(3):
            action()
            counter.reset()
        action()
        return counter.peak


def closed_form(case: Case) -> int:
    """Return the bytes that rank 0 needs for a step, without activations. This is a bound, as not all of them peak at once.

    They are shards and their gradients, whole parameters, the buffers of two neighboring gathers and of one reduction, and the whole
    gradients of one group.
    """
    with torch.device("meta"):
        llama = not isinstance(case.shape, Shape)
        model: nn.Module = Llama(case.shape) if isinstance(case.shape, LlamaConfig) else build(case.shape)
    below = {block: list(block.parameters()) for block in blocks_of(model)}
    claimed = {param for params in below.values() for param in params}
    root = [param for param in model.parameters() if param not in claimed]
    itemsize = 2 if llama else 4
    groups = [
        GroupSizes([p.shape for p in params], itemsize)
        for params in ([root] if root else []) + [*below.values()]
    ]
    kept, passing = groups[: bool(root)], groups[bool(root) :]
    shards = 4 * sum(padded_local_numel(p.shape, case.ranks) for p in model.parameters())
    wholes = sorted(unsharded_bytes(group, case.ranks) for group in groups)
    reduction = 4 * max(group.padded_numel(case.ranks) for group in groups)
    grads = itemsize * max(sum(map(torch.Size.numel, map(torch.Size, group.shapes))) for group in groups)
    return 2 * shards + peak_unsharded_bytes(kept, passing, case.ranks) + sum(wholes[-2:]) + reduction + grads


def on_rank(ranks: int, device: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn(*args)` on rank 0 of a fake world, or in a real world of one rank."""
    return launch(fn, 1, *args, device=device)[0] if ranks == 1 else in_fake_world(fn, ranks, *args)


def measure(case: Case, device: str, rounds: int) -> list[Record]:
    """Return two records of times and one of memory."""
    records = []
    labels: dict[str, str | int] = {"params": case.params, "pretended ranks": case.ranks, "device": device}
    samples = on_rank(case.ranks, device, times, case, device, rounds)
    for kind, target in TARGETS.items():
        found = samples[kind]
        values = {name: Spread.of(ms) for name, ms in found.items()}
        checks = {"hwfsdp / FSDP2": ratio(found[HWFSDP], found[FSDP2], target)}
        records.append(Record("gpu", {**labels, "kind": kind}, "ms", values, checks))
    peaks = {name: on_rank(case.ranks, device, peak, name, case, device) for name in NAMES}
    values = {name: Spread.of([nbytes / MIB]) for name, nbytes in peaks.items()}
    values["closed form"] = Spread.of([closed_form(case) / MIB])
    checks = {"hwfsdp / FSDP2": Check(Spread.of([peaks[HWFSDP] / peaks[FSDP2]]), PEAK_TARGET)}
    return [*records, Record("gpu", {**labels, "kind": "peak"}, "MiB", values, checks)]


def run(device: str, rounds: int | None, world_size: int = WORLD_SIZE) -> list[Record]:
    """Return the records of every case. If there is no such device, print a message and return none."""
    if device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU)
        return []
    return [
        record for case in cases(device, world_size) for record in measure(case, device, rounds or ROUNDS)
    ]
